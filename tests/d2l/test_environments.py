"""The table of torches in docs/compatibility.md says of this torch what runs with it."""

from pathlib import Path

import pytest

import torch_environments

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


@pytest.mark.filterwarnings("ignore")  # of torch's, about what it will drop one day
def test_the_column_of_this_torch():
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(torch_environments.BEGIN) : text.index(torch_environments.END)]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head[1:] == list(torches())  # the page and tools/torches.txt name the same versions
    version = torch_environments.version()
    if version not in head:
        pytest.skip(f"torch {version} is not in the table")
    assert {row[0]: row[head.index(version)] for row in rows} == torch_environments.column()


def torches():
    lines = (PAGE.parents[1] / "tools" / "torches.txt").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]
