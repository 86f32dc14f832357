"""The workflows hold nothing that cannot be run here: each line they run is a goal or a script of the repository.

Then what they get from elsewhere is pinned, each job ends, may do no more than it needs, and finds what it downloads.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import needs
import tools

yaml = needs.module("yaml")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = {path.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yml"))}
JOBS = {f"{file}: {name}": job for file, flow in FILES.items() for name, job in flow["jobs"].items()}
each_job = pytest.mark.parametrize("name", JOBS)


def steps(name, key):
    return [step for step in JOBS[name].get("steps", ()) if key in step]


def goals():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w-]+):(?!=)", text, re.MULTILINE))


def unknown(line):
    """What of a line is no goal of the Makefile and no script of the repository, or None."""
    words = shlex.split(line)
    if words[0] == "make":
        named = [word for word in words[1:] if "=" not in word]
        return sorted(set(named) - goals()) or (None if named else line)
    script = ROOT / (words[1] if words[0] in ("python", "python3") else words[0])
    if not script.is_file() or not script.is_relative_to(ROOT):
        return line
    return None if words[0].startswith("python") or os.access(script, os.X_OK) else f"{line}: not executable"


@each_job
def test_a_job_runs_goals_and_scripts_alone(name):
    lines = [line for step in steps(name, "run") for line in step["run"].strip().splitlines()]
    assert [found for found in map(unknown, lines) if found is not None] == []
    assert not [line for line in lines if "${{" in line]  # what GitHub puts into a line is run, whatever it is


@pytest.mark.parametrize(
    "line", ["make nonsense", "make", "pip install x", "make test && rm x", "python tools/none.py"]
)
def test_anything_else_would_be_seen(line):
    assert unknown(line) is not None


@pytest.mark.parametrize("script", ["tools/wheels/suite.py", "tools/nightly.py"])
def test_scripts_take_the_options_that_workflows_give(script):
    help_text = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True).stdout
    lines = [step["run"] for job in JOBS.values() for step in job.get("steps", ()) if script in step.get("run", "")]
    assert lines and all(word in help_text for line in lines for word in line.split() if word.startswith("--"))


@each_job
def test_what_comes_from_elsewhere_is_pinned(name):
    used = [step["uses"] for step in steps(name, "uses")] + [JOBS[name].get("uses", "./")]
    ours = [action for action in used if action.startswith("./")]
    assert all(action == "./" or (ROOT / action).is_file() for action in ours)
    assert [action for action in used if action not in ours and not re.search(r"@[0-9a-f]{40}$", action)] == []


def test_each_action_has_one_version():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yml"))
    found = re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40}) # (v\S+)", text)
    assert len(found) == text.count("uses: ") - text.count("uses: ./")
    assert len({action for action, _, _ in found}) == len(set(found))


@each_job
def test_a_job_ends_and_may_do_what_it_needs(name):
    job, flow = JOBS[name], FILES[name.partition(":")[0]]
    assert flow["permissions"] == {}  # what a job does not ask for it has not
    assert "uses" in job or 0 < job["timeout-minutes"] <= 350  # six hours are GitHub's end, without a word
    allowed = {"contents": {"read"}, "pages": {"write"}, "id-token": {"write"}}
    assert all(value in allowed[what] for what, value in job.get("permissions", {}).items())
    writes = [what for what, value in job.get("permissions", {}).items() if value == "write"]
    assert not writes or name in ("release.yml: publish", "site.yml: deploy")
    assert not writes or not steps(name, "run")  # nothing of ours runs beside such a right
    for step in steps(name, "uses"):
        assert "checkout" not in step["uses"] or step["with"]["persist-credentials"] is False


@each_job
def test_a_job_finds_what_it_downloads(name):
    """Each artifact comes from a job that this one waits for, or, in a called workflow, that its callers wait for."""
    file, _, own = name.partition(": ")
    for step in steps(name, "uses"):
        if "download-artifact" not in step["uses"]:
            continue
        wanted = step["with"].get("name") or step["with"]["pattern"]
        callers = [(f, j) for f, flow in FILES.items() for j, job in flow["jobs"].items()
                   if job.get("uses") == f"./.github/workflows/{file}"]  # fmt: skip
        for where, job in callers or [(file, own)]:
            assert matching(wanted, uploads_before(where, job)), f"{where}: {job} has no {wanted}"


def uploads_before(file, job):
    """Names of the artifacts of all jobs that come before it."""
    jobs, found, ahead = FILES[file]["jobs"], [], [job]
    while ahead:
        before = jobs[ahead.pop()].get("needs", [])
        for needed in [before] if isinstance(before, str) else before:
            ahead.append(needed)
            used = [step for step in jobs[needed].get("steps", ()) if "upload-artifact" in step.get("uses", "")]
            found += [step["with"]["name"] for step in used]
    return found


def matching(wanted, names):
    pattern = re.escape(wanted).replace(r"\*", ".*")
    return [name for name in names if re.fullmatch(pattern, name)]


def test_what_is_published_was_uploaded_before_anything_without_a_hash_was_installed():
    hashed = ("wheels", "wheels-twice", "browser-wheel")
    for name, job in FILES["release.yml"]["jobs"].items():
        if any("upload-artifact" in step.get("uses", "") for step in job.get("steps", ())):
            lines = [step["run"] for step in job["steps"] if "run" in step]
            assert all(line.split() == ["make", line.split()[1]] and line.split()[1] in hashed for line in lines), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for folder in ("wheel-tools", "browser-tools"):
        rule = makefile[makefile.index(f"\nbuild/{folder}/installed:") :].partition("\n\n")[0]
        assert all("--require-hashes" in line for line in rule.splitlines() if "pip install" in line)


def test_nightly_runs_every_part():
    parts = tools.load("tools/nightly.py").PARTS
    listed = FILES["nightly.yml"]["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert listed == list(parts)
    assert {words[0] for words in parts.values()} <= goals()


def test_the_oldest_numpy_is_the_one_that_is_promised():
    (oldest,) = FILES["everywhere.yml"]["jobs"]["numpy"]["strategy"]["matrix"]["include"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={oldest["python"]}"' in project
    assert f'dependencies = ["numpy>={oldest["numpy"].rpartition(".")[0]}"]' in project
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"pythons.py {oldest['python']}" in run and f"NUMPY={oldest['numpy']}" in run


def test_dependabot_moves_all_pins():
    moved = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert {(update["package-ecosystem"], update["directory"]) for update in moved} == {
        ("github-actions", "/"), ("pip", "/tools/wheels"),
    }  # fmt: skip
