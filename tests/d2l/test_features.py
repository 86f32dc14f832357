"""The table of torch's features in docs/compatibility.md is what its command prints, and says nothing silent."""

from pathlib import Path

import pytest

import needs
import torch_features

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


# Of these an exporter or a compiler of torch's takes seconds for each layer: by day of one, the others' are tried by
# test_onnx.py and test_compile.py.
LONG = "`torch.onnx.export`, both exporters, in onnxruntime", "`torch.compile`, forward and backward"


@pytest.fixture(scope="module")
def shown():
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(torch_features.BEGIN) : text.index(torch_features.END)].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    return dict(cells[2:] if cells[1][0].startswith("-") else cells[1:])


@pytest.mark.filterwarnings("ignore")  # of torch's, about what it will drop one day
@pytest.mark.parametrize("name", torch_features.OF_TORCH)
def test_a_feature(name, shown):
    found = torch_features.outcome(name, 1 if name in LONG and not needs.NIGHTLY else None)
    if found == "neither works" != shown[name]:  # not even on d2l's
        needs.skip_without(name)
    if found == "works; d2l's does not" and shown[name] == "equal" and not needs.usual_torch():
        return  # more than d2l's can there
    assert found == shown[name]


def test_the_table_has_these_lines(shown):
    assert list(shown) == list(torch_features.OF_TORCH) and {*LONG} <= {*shown}
    allowed = ("equal", "works; d2l's does not", "neither works", "refused: ", "differs: ")
    assert all(value.startswith(allowed) for value in shown.values())
