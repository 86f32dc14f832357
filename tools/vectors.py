"""Writes tests/data/vectors.json: inputs and float64 outputs of the book's functions, for ports to check themselves.

    python tools/vectors.py

docs/grading.md says how it is read.  The outputs are those of mha_c/teach/book.py on the probes of
mha_c/teach/asking/probes.py; tests compare them with the core, with mha_c/_reference.py and with the book's package.
"""

import json
from pathlib import Path

import numpy as np

from mha_c.teach import book
from mha_c.teach.asking.mistakes import KINDS
from mha_c.teach.asking.probes import probes

PATH = Path(__file__).resolve().parents[1] / "tests" / "data" / "vectors.json"
CHOSEN = (0, 3, 5)  # the smallest; a length for each example; a length for each query


def plain(x):
    return x.tolist() if isinstance(x, np.ndarray) else x


def vectors():
    """{kind: [{"inputs": {name: numbers}, "output": numbers}]}"""
    found = {}
    for kind in KINDS:
        asked = probes(kind)
        asked = [asked[i] for i in CHOSEN] if "valid_lens" in asked[0] else asked[-2:]
        found[kind] = [
            {"inputs": {name: plain(x) for name, x in inputs.items()}, "output": plain(getattr(book, kind)(**inputs))}
            for inputs in asked
        ]
    return found


def written():
    """The file's text: a line for each input and output."""
    lines = []
    for kind, cases in vectors().items():
        items = []
        for case in cases:
            inputs = ",\n   ".join(f"{json.dumps(name)}: {json.dumps(x)}" for name, x in case["inputs"].items())
            items.append(f'{{"inputs": {{\n   {inputs}}},\n   "output": {json.dumps(case["output"])}}}')
        lines.append(f' "{kind}": [\n  ' + ",\n  ".join(items) + "]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(written(), encoding="utf-8")
    print(f"{PATH.name}: {PATH.stat().st_size} bytes")
