"""The page docs/what-each-layer-can-do.md: every cell is tried, and the page says what was found."""

from pathlib import Path

import pytest

import abilities
import needs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what-each-layer-can-do.md"
CELLS = list(abilities.cells())


def rows_of_the_page():
    """{(kind, word): its cell, with the reason if there is one}."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    kinds = [cell.strip("`") for cell in table[0][-len(abilities.KINDS) :]]
    found = {}
    for name, *row in table[2:]:
        word = name.partition("`: ")[0].strip("`")
        found.update({(kind, word): cell for kind, cell in zip(kinds, row)})
    for line in text[text.index("## Why not") :].splitlines():
        if line.startswith("- `"):
            about, _, reason = line[3:].partition("`: ")
            kind, _, word = about.partition("`, `")
            found[kind, word] += f" {reason[:-1]}"
    return found


@pytest.mark.filterwarnings("ignore")  # torch's, about what it will drop one day
@pytest.mark.parametrize(("side", "kind", "name"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_a_cell(side, kind, name):
    if side == "mha_c.torch" or name == "state_dict":
        needs.module("torch")
    if name in ("convert", "d2l.compare") and kind == "AdditiveAttention":
        needs.d2l("0.17.6")
    if name in ("convert", "d2l.compare") and kind in ("GQAAttention", "CausalAttention"):  # the book's own call it
        needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
    assert abilities.outcome(side, kind, name) == rows_of_the_page()[kind, name]


def test_the_page_has_every_layer_and_every_word():
    assert set(rows_of_the_page()) == {(kind, name) for kind in abilities.KINDS for name in abilities.WORDS}
    assert abilities.HEAD in PAGE.read_text(encoding="utf-8")
    assert all(cell == "yes" or cell.startswith("- ") for cell in rows_of_the_page().values())


def test_a_broken_cell_is_noticed(monkeypatch):
    """What a word promises is compared, not only called."""
    monkeypatch.setattr(abilities.heads, "prune", lambda layer, gone: layer)
    assert abilities.outcome("mha_c", "GQAAttention", "heads.prune").startswith("BROKEN: ")
    monkeypatch.setattr(abilities.mha_c.KernelAttention, "new_cache", lambda self, batch, most: None, False)
    assert abilities.outcome("mha_c", "KernelAttention", "new_cache()").startswith("BROKEN: ")
