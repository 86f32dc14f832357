"""show_heatmaps: its panels, scales, labels, and what a notebook shows."""

import json
import sys

import numpy as np
import pytest

import children
import needs
from mha_c.viz import show_heatmaps


@pytest.fixture
def pyplot():
    needs.module("matplotlib").use("Agg")
    plt = needs.module("matplotlib.pyplot")
    yield plt
    plt.close("all")


def panels(figure):
    return [ax for ax in figure.axes if ax.images and ax.get_label() != "<colorbar>"]


@pytest.mark.parametrize(
    ("shape", "grid"), [((3, 4), (1, 1)), ((5, 3, 4), (1, 5)), ((2, 3, 3, 4), (2, 3)), ((1, 1, 10, 10), (1, 1))]
)
def test_heatmaps_of_any_sensible_rank(pyplot, rng, shape, grid):
    array = rng.random(shape)
    for matrices in (array, array.tolist(), list(array)):
        figure = show_heatmaps(matrices, xlabel="Keys", ylabel="Queries")
        shown = panels(figure)
        assert len(shown) == grid[0] * grid[1]
        assert shown[0].get_subplotspec().get_gridspec().get_geometry() == grid
        np.testing.assert_array_equal(shown[-1].images[0].get_array(), array.reshape(-1, *shape[-2:])[-1])
        pyplot.close(figure)


def test_heatmaps_take_torch(pyplot, rng):
    torch = needs.module("torch")
    tensor = torch.eye(10, requires_grad=True).reshape(1, 1, 10, 10)
    figure = show_heatmaps(tensor, xlabel="Keys", ylabel="Queries")  # d2l's own first picture of the chapter
    assert panels(figure)[0].get_xlabel() == "Keys" and panels(figure)[0].get_ylabel() == "Queries"
    show_heatmaps([tensor[0, 0], tensor[0, 0]], "Keys", "Queries")


def test_heatmaps_share_one_scale(pyplot):
    figure = show_heatmaps(np.array([[[0.1, 0.2]], [[0.3, 0.8]]]), "k", "q")
    assert {ax.images[0].get_clim() for ax in panels(figure)} == {(0.0, 0.8)}
    scores = show_heatmaps(np.array([[-3.0, np.nan], [1.0, 2.0]]), "k", "q")
    assert panels(scores)[0].images[0].get_clim() == (-3.0, 2.0)
    masked = show_heatmaps(np.ma.masked_equal([[-9, 1], [0, 2]], -9), "k", "q")  # blank, too
    assert panels(masked)[0].images[0].get_clim() == (0.0, 2.0)
    assert panels(show_heatmaps(np.zeros((2, 2)), "k", "q"))[0].images[0].get_clim() == (0, 1)


def test_heatmaps_titles_size_and_colours(pyplot):
    grid = np.ones((2, 3, 2, 2))
    figure = show_heatmaps(grid, "k", "q", titles=["a", "b", "c"], figsize=(7, 3.5), cmap="Blues")
    assert [ax.get_title() for ax in panels(figure)] == ["a", "b", "c"] * 2
    assert tuple(figure.get_size_inches()) == (7, 3.5)
    assert panels(figure)[0].images[0].get_cmap().name == "Blues"
    assert panels(show_heatmaps(grid, "k", "q", titles=list("abcdef")))[5].get_title() == "f"
    assert tuple(show_heatmaps(np.ones((2, 2)), "k", "q").get_size_inches()) == (2.5, 2.5)
    assert show_heatmaps(grid, "k", "q").get_size_inches()[0] > 5  # panels that can be read
    assert tuple(show_heatmaps(grid, "k", "q", None, (2.5, 2.5)).get_size_inches())
    with pytest.raises(ValueError, match="2 titles for 3 columns"):
        show_heatmaps(grid, "k", "q", titles=["a", "b"])


def test_heatmaps_token_labels(pyplot, tmp_path):
    figure = show_heatmaps(np.ones((2, 3)), "k", "q", tokens=(["$x", "b"], ["c", "d", "$e$"]))
    (ax,) = panels(figure)
    assert [label.get_text() for label in ax.get_yticklabels()] == [r"\$x", "b"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["c", "d", r"\$e\$"]
    figure.savefig(tmp_path / "tokens.png")


@pytest.mark.parametrize("matrices", [np.ones(3), np.ones((2, 2, 2, 2, 2)), np.ones((0, 3)), 1.0])
def test_heatmaps_of_what_is_no_matrix(pyplot, matrices):
    with pytest.raises(ValueError, match=r"matrices must have shape \(queries, keys\)"):
        show_heatmaps(matrices, "k", "q")


def test_heatmaps_change_no_settings(pyplot):
    before = dict(pyplot.rcParams)
    show_heatmaps(np.ones((2, 2)), "k", "q")
    assert dict(pyplot.rcParams) == before


def test_without_matplotlib_there_is_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "mha_c.viz._figure", raising=False)
    monkeypatch.delattr("mha_c.viz._figure", raising=False)
    with pytest.raises(ImportError, match=r'^show_heatmaps needs matplotlib: pip install "mha_c\[viz\]"$'):
        show_heatmaps(np.ones((2, 2)), "k", "q")


NOTEBOOK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import nbclient, nbformat
cells = ["import numpy as np\\nfrom mha_c.viz import show_heatmaps, view\\nw = np.eye(3)",
         "fig = show_heatmaps(w, 'k', 'q')\\nx = 1", "show_heatmaps(w, 'k', 'q')", "fig", "view(w)"]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
nbclient.NotebookClient(book, timeout=900, kernel_name="python3").execute()
print(json.dumps([[sorted(out.data) for out in cell.outputs if "data" in out] for cell in book.cells]))
"""


def test_a_notebook_shows_a_figure_once(tmp_path):
    """In the middle of a cell, at its end, and again by name in a later cell."""
    for name in ("nbclient", "ipykernel", "matplotlib"):
        needs.module(name)
    answer = children.python("-c", NOTEBOOK, cwd=tmp_path)
    outputs = json.loads(answer.stdout.splitlines()[-1])
    pictures = [sum("image/png" in out for out in cell) for cell in outputs]
    assert pictures[:4] == [0, 1, 1, 1]
    assert len(outputs[4]) == 1 and {"text/html", "text/plain"} <= set(outputs[4][0])
