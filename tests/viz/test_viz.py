"""viz without a browser: what is gathered, packed, said and written; and show_heatmaps."""

import base64
import hashlib
import json
import re
import sys
import zlib
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

import children
import mha_c
import needs
from checks import softmax
from mha_c.viz import labels, pack, show_heatmaps, view
from mha_c.viz.sources import collect

SENTENCE = "the cat sat on the mat".split()


@pytest.fixture
def weights(rng):
    return lambda *shape: softmax(2 * rng.standard_normal(shape))


def unpacked(panel):
    """What the page's own code makes of a panel; base.js does the same."""
    raw = base64.b64decode(panel["w"])
    levels = np.frombuffer(zlib.decompress(raw) if panel["z"] else raw, "<u2" if panel["bits"] == 16 else "u1")
    top = np.frombuffer(base64.b64decode(panel["m"]), "<f4").reshape(panel["h"], panel["q"], 1)
    share = np.maximum(levels - 1.0, 0) / (65534 if panel["bits"] == 16 else 254)
    share = np.where(levels == 1, 1e-9, share if panel["bits"] == 16 else share**2)
    return share.reshape(panel["h"], panel["q"], panel["k"]) * top


# --- Where weights come from ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 4), (1, 1, 3, 4)), ((2, 3, 4), (1, 2, 3, 4)), ((5, 2, 3, 4), (5, 2, 3, 4))],
)
def test_arrays_of_any_sensible_rank(weights, shape, expected):
    array = weights(*shape)
    for source in (array, array.tolist(), array.astype(np.float32), list(array) if len(shape) == 2 else array):
        (layer,) = collect(source)
        assert layer.weights.shape == expected
        np.testing.assert_allclose(layer.weights.ravel(), array.ravel(), rtol=1e-6)


def test_a_stack_of_layers_and_a_list_of_layers(weights):
    array = weights(3, 2, 4, 5, 6)
    for source in (array, list(array), tuple(array)):
        layers = collect(source)
        assert [layer.name for layer in layers] == ["layer 1", "layer 2", "layer 3"]
        np.testing.assert_array_equal(layers[2].weights, array[2])
    assert [layer.name for layer in collect(array, layer_names="abc")] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="2 names for 3 layers"):
        collect(array, layer_names="ab")


def test_layers_know_their_heads(weights):
    joined = weights(6, 4, 4)  # d2l: batch * heads first
    ours = SimpleNamespace(attention_weights=joined.reshape(2, 3, 4, 4), num_heads=3)
    theirs = SimpleNamespace(attention=SimpleNamespace(attention_weights=joined), num_heads=3)
    encoder = SimpleNamespace(attention_weights=[joined, joined], modules=lambda: [object(), theirs])
    for source in (ours, theirs, encoder):
        np.testing.assert_array_equal(collect(source)[0].weights, joined.reshape(2, 3, 4, 4))
    assert collect(joined, num_heads=2)[0].weights.shape == (3, 2, 4, 4)
    assert collect(ours, num_heads=3)[0].weights.shape == (2, 3, 4, 4)
    for source, says in ((joined, "not a multiple of num"), (ours, "3 head.s., but "), (joined[0], "1 head.s., but ")):
        with pytest.raises(ValueError, match=says):
            collect(source, num_heads=4)
    pruned = SimpleNamespace(num_heads=2)
    encoder = SimpleNamespace(attention_weights=[joined, joined[:4]], modules=lambda: [theirs, pruned])
    with pytest.raises(ValueError, match="different numbers of heads, 2, 3: give one layer"):
        collect(encoder)
    one_head = SimpleNamespace(attention_weights=joined)  # DotProductAttention: (batch, queries, keys)
    assert collect(one_head)[0].weights.shape == (6, 1, 4, 4)


def test_decoding_step_by_step(weights):
    steps = [weights(2, 1, 5) for _ in range(4)]  # d2l's Seq2SeqAttentionDecoder
    for source in (steps, SimpleNamespace(attention_weights=steps), [[step] for step in steps]):
        (layer,) = collect(source)
        np.testing.assert_array_equal(layer.weights[:, 0], np.concatenate(steps, axis=1))


def test_decoding_with_a_growing_row_of_keys(weights):
    """d2l's Transformer, predicting: [step][self, cross][block], the self-attention one key longer each step."""
    steps = [[[weights(4, 1, t + 1)] * 2, [weights(4, 1, 5)] * 2] for t in range(3)]
    layers = collect(steps, num_heads=4)
    assert [layer.name for layer in layers] == [
        "self-attention, block 1", "self-attention, block 2", "cross-attention, block 1", "cross-attention, block 2",
    ]  # fmt: skip
    assert [layer.weights.shape for layer in layers] == [(1, 4, 3, 3)] * 2 + [(1, 4, 3, 5)] * 2
    np.testing.assert_array_equal(layers[0].weights[0, :, 1, :2], steps[1][0][0][:, 0])
    assert not layers[0].weights[0, :, 1, 2:].any()


def test_one_call_of_a_transformer_decoder(weights):
    given = [[weights(2, 3, 3), weights(2, 3, 3)], [weights(2, 3, 5), weights(2, 3, 5)]]
    layers = collect(given)
    assert [layer.name.split(",")[0] for layer in layers] == ["self-attention"] * 2 + ["cross-attention"] * 2
    one_query = [[w[:, :1] for w in group] for group in given]  # not a list of steps, though each has one query
    assert [layer.weights.shape for layer in collect(one_query)] == [(1, 2, 1, 3)] * 2 + [(1, 2, 1, 5)] * 2


def test_torch_tensors(weights):
    torch = needs.module("torch")
    array = weights(2, 3, 4).astype(np.float32)
    tensor = torch.tensor(array, requires_grad=True)
    np.testing.assert_array_equal(collect(tensor)[0].weights[0], array)
    np.testing.assert_array_equal(collect([tensor[:, :1]] * 2)[0].weights[:, 0, 1], array[:, 0])
    np.testing.assert_allclose(collect(tensor.bfloat16())[0].weights[0], array, atol=5e-3)


def test_the_package_s_own_layers(rng):
    x = rng.standard_normal((2, 4, 12)).astype(np.float32)
    mha = mha_c.MultiHeadAttention(12, 3, 0.0, rng=0)
    with pytest.raises(AttributeError, match="call"):
        view(mha)
    mha(x, x, x, valid_lens=[4, 2])
    page = view(mha, tokens="the cat sat down")
    assert page.title == "MultiHeadAttention"
    np.testing.assert_allclose(unpacked(page.data["panels"][1]), mha.attention_weights[1], atol=1e-5)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        (object(), TypeError, "object has no attention_weights"),
        (np.ones(3), ValueError, "rank 2"),
        (np.ones((2, 0, 3)), ValueError, "nothing to show"),
        (np.full((2, 2), "a"), TypeError, "weights must be numbers"),
        (np.array([[0.5, np.nan]]), ValueError, r"must be finite, but are not at \(head, query, key\) \(0, 0, 1\)"),
        (np.array([[1.0, -0.5]]), ValueError, "negative"),
        ({"weights": np.ones((2, 3, 3)), "head_names": ["one"]}, ValueError, "1 names for 2 heads"),
        ({"weights": [np.ones((n, 3, 3)) for n in (2, 4)], "head_names": "ab"}, ValueError, "2 names for 4 heads"),
        ({"weights": np.ones((2, 3, 3)), "num_heads": 2.0}, TypeError, "num_heads must be a whole number"),
        ({"weights": np.ones((2, 3, 3)), "tokens": " "}, ValueError, "0 tokens for 3 queries"),
        ({"weights": np.ones((2, 3, 3)), "tokens": 3}, TypeError, "tokens must be sentences"),
        ({"weights": np.ones((2, 1, 3, 3)), "tokens": [["a"]] * 3}, ValueError, r"3 sentences.*2 example"),
        ({"weights": np.ones((2, 3, 2, 5)), "valid_lens": [1, 2, 3]}, ValueError, "3 lengths for 2 example"),
        ({"weights": np.ones((2, 3, 2, 5)), "valid_lens": [True, False]}, TypeError, "bool, like a mask"),
    ],
)
def test_what_cannot_be_shown(source, error, says):
    with pytest.raises(error, match=says):
        view(**(source if isinstance(source, dict) else {"weights": source}))


# --- Tokens --------------------------------------------------------------------------------------


def test_tokens_for_one_example_or_several():
    pair = labels.Pair
    assert labels.pair_of("a b", 0, 1) == pair(["a", "b"], ["a", "b"])
    assert labels.pair_of(("a b", "c d e"), 0, 1) == pair(["a", "b"], ["c", "d", "e"])
    assert labels.pair_of(("a", "b"), 0, 1) == pair(["a", "b"], ["a", "b"])
    assert labels.pair_of((["a"], ["b", "c"]), 0, 1) == pair(["a"], ["b", "c"])
    assert labels.pair_of([["a"], (["b"], ["c"])], 1, 2) == pair(["b"], ["c"])
    assert labels.pair_of(np.array([7, 8]), 0, 1) == pair(["7", "8"], ["7", "8"])
    assert labels.pair_of(None, 0, 1) == pair(None, None)


def test_what_follows_the_tokens_is_padding(weights):
    padded = np.zeros((2, 8, 8))
    padded[:, :, :6] = weights(2, 8, 6)
    panel = view(padded, SENTENCE).data["panels"][0]
    assert (panel["q"], panel["k"], panel["qt"], panel["kt"]) == (6, 6, SENTENCE, SENTENCE)
    with pytest.raises(ValueError, match="6 tokens for 8 keys, and the keys after them"):  # then it is no padding
        view(weights(2, 8, 8), SENTENCE)
    assert view(weights(2, 8, 8), SENTENCE, valid_lens=[6]).data["panels"][0]["k"] == 6
    with pytest.raises(ValueError, match="6 tokens for 4 queries"):
        view(weights(4, 4), SENTENCE)
    with pytest.raises(ValueError, match="6 tokens for 5 keys"):
        view(weights(6, 5), SENTENCE)


def test_decoders_have_their_own_tokens_on_both_sides_of_self_attention(weights):
    target, source = "il a perdu".split(), "he lost his dog .".split()
    page = view([[weights(2, 3, 3)], [weights(2, 3, 5)]], (target, source))
    assert [panel["kt"] for panel in page.data["panels"]] == [target, source]


def test_valid_lens_cut_the_keys(weights):
    for lens in ([3, 4], np.array([[2, 3], [4, 1]])):
        page = view(weights(2, 3, 2, 5), valid_lens=lens)
        assert [panel["k"] for panel in page.data["panels"]] == [3, 4]


# --- Packing -------------------------------------------------------------------------------------


def test_small_weights_are_exact_to_the_digits_shown(weights):
    array = weights(4, 12, 12)
    panel = view(array).data["panels"][0]
    assert panel["bits"] == 16 and np.abs(unpacked(panel) - array).max() < 1e-5


def test_large_weights_keep_their_shape(weights):
    array = weights(2, 300, 300)
    array[0] = 1 / 300  # one scale for all rows would make this zero
    array[1, :, :3] = 0, 1e-30, 1e-9
    panel = view(array).data["panels"][0]
    np.testing.assert_allclose(unpacked(panel)[0], array[0], rtol=1e-6)
    np.testing.assert_array_equal(unpacked(panel) > 0, array > 0)  # nothing else is said to be no weight at all
    assert panel["bits"] == 8 and np.abs(unpacked(panel) - array).max() <= 0.004 * array.max()
    np.testing.assert_allclose(unpacked(panel).sum(axis=-1), array.sum(axis=-1), atol=0.01)  # small ones are not lost


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_eight_heads_of_512_tokens_stay_under_four_megabytes(rng, spread):
    page = view(softmax(spread * rng.standard_normal((8, 512, 512))), [f"token{i}" for i in range(512)])
    assert len(page.html().encode()) < 4_000_000
    assert page.data["panels"][0]["q"] == 512  # in full


def test_neighbours_are_joined_where_even_that_is_too_large(weights):
    page = view(weights(4, 700, 900), ([*map(str, range(700))], [*map(str, range(900))]), max_bytes=300_000)
    (panel,) = page.data["panels"]
    assert len(panel["w"]) < 300_000 and (panel["q"], panel["k"]) != (700, 900)
    np.testing.assert_allclose(unpacked(panel).sum(axis=-1), 1, atol=0.02)  # rows still sum to 1
    assert "joined into one cell" in page.text and panel["qt"][0].startswith("0 … ")
    assert (panel["queries"], panel["keys"]) == (700, 900)  # what the page says; and its positions are those of tokens
    assert panel["q"] == -(-700 // panel["qStep"]) and panel["k"] == -(-900 // panel["kStep"])


def test_pool_sums_keys_and_averages_queries(rng):
    heads = rng.random((2, 70, 67))
    pooled, q_step, k_step = pack.pool(heads, 2)
    assert (pooled.shape, q_step, k_step) == ((2, 35, 34), 2, 2)
    np.testing.assert_allclose(pooled[1, 3, 4], heads[1, 6:8, 8:10].sum() / 2)
    np.testing.assert_allclose(pooled[1, 3, 33], heads[1, 6:8, 66:].sum() / 2)


def test_as_many_examples_as_fit(weights):
    page = view(weights(9, 2, 40, 40), max_bytes=30_000)
    shown = 1 + max(panel["example"] for panel in page.data["panels"])
    assert 1 <= shown < 9 and page.data["notes"] == [f"Examples 1 to {shown} of 9."]


# --- In words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "words"), [(0, "mostly the token itself"), (-1, "mostly the previous"), (1, "mostly the next")]
)
def test_a_head_that_looks_to_its_neighbour(offset, words):
    head = 0.9 * np.eye(8, k=offset) + 0.1 / 8
    assert pack.head_stats(head, None, True).words.startswith(words)
    assert "same position" in pack.head_stats(0.9 * np.eye(8) + 0.1 / 8, None, False).words


def test_a_head_that_looks_at_one_token_at_all_or_at_none():
    head = np.full((6, 6), 0.02)
    head[:, 2] = 0.9
    assert pack.head_stats(head, SENTENCE, True).words == "mostly “sat”, 90 %"
    assert pack.head_stats(np.roll(head, -2, axis=1), SENTENCE, True).words == "mostly the first token, 90 %"
    assert pack.head_stats(np.full((6, 6), 1 / 6), SENTENCE, True).words == "spread evenly"
    assert pack.head_stats(np.zeros((6, 6)), SENTENCE, True).words == "no attention at all"
    assert pack.head_stats(np.ones((6, 1)), None, False).words == "only one key to look at"


def test_entropy_and_confidence():
    stats = pack.head_stats(np.array([[0.25] * 4, [1, 0, 0, 0], [0, 0, 0, 0]]), None, False)
    assert (stats.entropy, stats.confidence) == pytest.approx((1.0, 0.625))  # of 2 rows: that of zeros does not count


def test_the_text_says_what_the_page_shows(weights):
    page = view(weights(2, 6, 6), SENTENCE, head_names=["left", "right"], title="Toy")
    lines = str(page).splitlines()
    assert lines[0] == "Toy: 2 heads, 6 queries x 6 keys"
    assert [line.split()[0] for line in lines[1:4]] == ["left", "right", "mean"]
    assert lines[-7].split() == SENTENCE


# --- The page ------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.open = [], [], [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.open = tag

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open == "script":
            self.scripts.append(data)


NASTY = ["</script>", "<!--", "<b>&amp;", "'\"\\", "\u2028", "\u05e9\u05dc\u05d5\u05dd", "\U0001f600", ""]


def test_tokens_are_data(weights):
    elements = Elements(view(weights(8, 8), NASTY).html())
    assert elements.tags == ["html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "div", "pre",
                             "script"]  # fmt: skip
    (script,) = elements.scripts
    assert not re.search(r"</script|<!--", script)
    data = json.loads(re.search(r"mount\(\"[^\"]+\", .*?, (\{.*\}), buildView\);\n", script, re.DOTALL).group(1))
    assert data["panels"][0]["qt"] == NASTY


def test_a_title_is_data_too(weights, tmp_path):
    for title in ("</title><script>alert(1)</script>", 7, "half a character: \ud83d"):
        text = view(weights(2, 2), title=title).save(tmp_path / "page.html").read_text(encoding="utf-8")
        assert Elements(text).tags.count("script") == 1


def test_nothing_is_fetched(weights):
    page = view(weights(8, 8), NASTY).html()
    assert not re.search(r"https?:|url\(|@import|src=|href=|fetch\(|XMLHttp|import\(", page)
    policy = next(v for t, n, v in Elements(page).attributes if n == "content" and "default-src" in v)
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'")


def test_ids_are_unique_yet_the_same_in_every_run(weights):
    def ids(page, times):
        return [re.search('data-mhac="([^"]+)"', page._repr_html_()).group(1) for _ in range(times)]

    array = weights(3, 3)
    one, other = view(array), view(1 - array)
    assert len({*ids(one, 2), *ids(other, 2), *ids(view(array), 2)}) == 6
    code = (
        "import numpy as np; from mha_c.viz import view; v = view(np.eye(3)); "
        "v._repr_html_(); import re; print(re.search('data-mhac=.([^\"]+)', v._repr_html_()).group(1))"
    )
    runs = {children.python("-c", code).stdout for _ in range(2)}
    assert len(runs) == 1


def test_saving_twice_gives_the_same_bytes(weights, tmp_path):
    page = view(weights(3, 3))
    first = page.save(tmp_path / "one.html")
    page._repr_html_()
    second = page.save(str(tmp_path / "two.html"))
    assert first.read_bytes() == second.read_bytes()


def test_a_notebook_gets_text_and_html(weights):
    page = view(weights(3, 3))
    assert set(page._repr_mimebundle_()) - {"image/png"} == {"text/plain", "text/html"}
    assert set(page._repr_mimebundle_(include={"text/plain"})) == {"text/plain"}
    assert "text/html" not in page._repr_mimebundle_(exclude={"text/html"})
    assert page._repr_mimebundle_()["text/plain"] == repr(page) == page.text


def test_a_picture_only_where_matplotlib_is_loaded_already(weights, monkeypatch):
    needs.module("matplotlib")
    png = view(weights(5, 300, 300))._repr_mimebundle_()["image/png"]
    assert base64.b64decode(png).startswith(b"\x89PNG")
    monkeypatch.delitem(sys.modules, "matplotlib")
    assert "image/png" not in view(weights(3, 3))._repr_mimebundle_()


def test_viz_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys, numpy as np, mha_c.viz as viz, mha_c.teach as teach\n"
        "viz.view(np.eye(3))._repr_mimebundle_(); teach.steps(np.eye(3), np.eye(3), np.eye(3))._repr_html_()\n"
        "print([name for name in ('torch', 'matplotlib', 'IPython') if name in sys.modules])"
    )
    assert children.python("-c", code).stdout.strip() == "[]"


# --- show_heatmaps -------------------------------------------------------------------------------


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
