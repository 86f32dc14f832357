"""The notebooks of examples/notebooks as files that run in an empty folder: used by tools/site.py and the tests.

Kept as text they read data of the repository; a file that is downloaded, or opened where no clone is, holds it inside.
"""

import base64
import os
import re
import zlib
from pathlib import Path

import jupytext
import nbformat
from address import filled_in

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
DATA = re.compile(r'"(\.\./data/([\w.]+))"')
UNPACKED = """\
# The data of the cells below, packed into this one.
import base64
import zlib
from pathlib import Path

Path("{name}").write_bytes(zlib.decompress(base64.b85decode("{packed}")));"""


def names():
    """Those that are there, in the order in which their questions come up in the book."""
    first = ["scoring", "write_it_yourself", "similarity", "multihead", "self_attention", "bahdanau", "predicting"]
    first += ["decoding", "generation", "long_sequences", "inside_any_model"]
    there = {path.stem for path in FOLDER.glob("*.md")}
    return [name for name in first if name in there] + sorted(there - set(first))


def with_address(text):
    """What a reader copies has the repository's address in it, where that is known."""
    return filled_in(text, os.environ.get("MHA_C_REPOSITORY", "").rstrip("/"))


def portable(name):
    """The notebook with the data that it reads; its first cell of code installs what the others import."""
    notebook = jupytext.read(FOLDER / f"{name}.md")
    cells = []
    for cell in notebook.cells:
        for path, file in DATA.findall(cell.source) if cell.cell_type == "code" else ():
            packed = base64.b85encode(zlib.compress((FOLDER / path).read_bytes(), 9)).decode()
            source = UNPACKED.format(name=file, packed=packed)
            cells.append(nbformat.v4.new_code_cell(source))
            cell.source = cell.source.replace(f'"{path}"', f'"{file}"')
        cells.append(cell)
    notebook.cells = cells
    install_cell(notebook).source = with_address(install_cell(notebook).source)
    return notebook


def install_cell(notebook):
    """The cell with the %pip of a notebook."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code")
