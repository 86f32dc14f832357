"""Sizes of files and functions, and what no file may hold.  Prints each breach; exit status 1 if there is one.

    python tools/check_style.py

Limits (CONTRIBUTING.md says why): 450 lines a file, 500 of a test, 150 for setup.py, 100 for README.md; 60 lines a
function, 120 for one of C whose comment or first line says `long: <reason>`.  A line of csrc has at most 120
characters; those of Python are ruff's matter.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = {"tools/wheels/requirements.txt": 1000, "setup.py": 150, "README.md": 100}
C_HEAD = re.compile(r"^(\w+)\(", re.MULTILINE)
# Words of our own for which the field, or plain English, has better ones: in messages, docstrings and pages.
PHRASES = {
    r"lead(s|ing)? (no )?gradients? back": "is not differentiable",
    r"not made by hand": "not meant to be constructed directly",
    r"written down by an exporter": "traced for export",
    r"(has|have) no numbers yet|no numbers yet in": "is not initialised yet",
    r"taken before; to reach": "was imported before patch()",
    r"put these layers under": "replace",
    r"changes? no bit of": "results are bit-identical",
    r"looks anywhere": "its weights are random",
    r"behind the import": "after the import",
    r"Two lines after its import": "two lines after the one that imports d2l",
    r"gone about": "computed",
    r"of one's own": "your own",
    r"puts words to it": "says it in words",
    r"needs a call in training mode before it": "call backward once after each call in training mode",
    r"(Error|Warning) (?-i:Where) ": "If ...",
    r"as far as (it is|they are) given": "if given",
    r"open sizes|sizes? (that )?(is|are|was|were) (still )?open|still open": "not known yet, not initialised yet",
    r" : (None, or )?numbers \(": "array_like (...)",
    r"Call: [^.]* gives \(": "returns",
    r"(has|have) (another|other) (types?|shape|rank)\b": "the wrong type, shape or rank",
    r"[\"`]\w*:? [^\"]*\bexpected[,;] got": "must be ..., got",
    r"speaks DLPack": "is a DLPack object",
    r"For the first weights": "random numbers for the initial weights",
    r"misses (dropout|a size|num_)": "is missing",
    r"\banew\b": "again",
    r"in earnest": "in practice",
    r"kept back\b": "held out",
    r"to the bit the same": "the same to the last bit",
    r"shar(e|es|ed|ing) (them |it )?out\b": "distribute, divide",
    r"(win|wins|won) .{0,20}\bback\b": "regain",
    r"asks? the network": "needs no network",
    r"takes? it back": "undo",
    r"says? what computes": "says how ... is computed",
    r"of which other programs": "shared with other programs",
    r"\bthe mend\b": "the fix",
}
BANNED = [
    (re.compile(r"/(home|root|Users)/\w"), "a path of one machine"),
    (re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))"), "a TODO without an issue number"),
]


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def c_functions(text):
    """(name, first line, last line, long reason given) of each definition: a head in column 0, braces in column 0."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line != "{":
            continue
        head = number - 1
        while head > 0 and not C_HEAD.match(lines[head]):
            head -= 1
        end = next((i for i in range(number, len(lines)) if lines[i].startswith("}")), number)
        around = "\n".join(lines[max(0, head - 12) : number + 2])
        name = C_HEAD.match(lines[head])
        yield (name.group(1) if name else lines[head]), head + 1, end + 1, "long:" in around


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            start = body[1].lineno if doc and len(body) > 1 else node.lineno
            yield node.name, start, node.end_lineno, False


def breaches(path):
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    lines = text.splitlines()
    limit = FILE_LINES.get(name, 500 if name.startswith("tests/") else 450)
    if len(lines) > limit and path.suffix not in (".svg", ".json", ".ipynb"):
        yield f"{name}: {len(lines)} lines, at most {limit}"
    if path != Path(__file__).resolve():
        for number, line in enumerate(lines, 1):
            yield from (f"{name}:{number}: {why}" for pattern, why in BANNED if pattern.search(line))
    if name.startswith(("mha_c/", "docs/", "examples/", "README", "benchmarks/README")):
        flowing = " ".join(re.sub(r'"\s*\n\s*f?"|\n\s*', " ", text).split())  # sentences go on in the next line
        yield from (f"{name}: {found[0]!r}: write {better!r}" for phrase, better in PHRASES.items()
                    for found in re.finditer(phrase, flowing, re.IGNORECASE))  # fmt: skip
    is_c, is_python = path.suffix in (".c", ".h", ".inc"), path.suffix == ".py"
    if is_c or is_python:
        for function, start, end, long in (c_functions if is_c else python_functions)(text):
            most = 120 if long else 60
            if end - start + 1 > most:
                yield f"{name}:{start}: {function} has {end - start + 1} lines, at most {most}"
    if name.startswith("csrc/") and path.suffix != ".md":
        yield from (f"{name}:{i}: {len(line)} characters, at most 120" for i, line in enumerate(lines, 1)
                    if len(line) > 120)  # fmt: skip


def main():
    paths = tracked("*.c", "*.h", "*.inc", "*.py", "*.js", "*.css", "*.md", "*.toml", "Makefile", ".ci/run")
    found = [breach for path in paths for breach in breaches(path)]
    print("\n".join(found) or f"{len(paths)} files are in style")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
