"""A page of `view` without a browser: how weights are packed, what is said of heads, and that tokens stay data."""

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import children
import needs
from checks import softmax
from mha_c import teach
from mha_c.viz import pack, view
from mha_c.viz import page as page_module
from view_pages import drawn_weights, unpacked

SENTENCE = "the cat sat on the mat".split()
weights = pytest.fixture(drawn_weights)


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


@pytest.mark.parametrize("spread", [0.1, 4.0])  # test_browser.py has one between
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


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"head": 2}, r"head must lie in 0\.\.1, got 2"),
        ({"head": -1}, "head"),
        ({"query": 3}, r"query must lie in 0\.\.2, or be a word, got 3"),
        ({"query": "dog"}, "no query is 'dog': the words are the cat sat"),
    ],
)
def test_a_head_or_a_query_that_is_not_there_is_refused(weights, asked, says):
    with pytest.raises(ValueError, match=says):
        view(weights(2, 3, 3), "the cat sat", **asked)
    with pytest.raises(ValueError, match="give its place, or tokens"):
        view(weights(2, 3, 3), query="cat")


@pytest.fixture
def in_chinese():
    teach.set_language("zh")
    yield
    teach.set_language("en")


def test_the_page_speaks_the_readers_language(in_chinese, weights):
    page = view(weights(2, 3, 3), "the cat sat")
    assert page.text.splitlines()[0] == "注意力权重：2 个头，3 个查询 x 3 个键"
    assert not re.search("[a-z]{3}", re.sub("the|cat|sat", "", page.text)), page.text
    sources = "".join(page_module.asset(page_module.FOLDER / name) for name in page_module.SCRIPTS["view"][0])
    said = set(re.findall(r'\bT\(\s*"((?:[^"\\]|\\.)*)"', sources))
    assert len(said) > 20 and said <= {*page.data["words"]} and '<html lang="zh">' in page.html()
    assert '<html lang="en">' in teach.steps(*weights(3, 3, 3)).html()  # players speak English
    teach.set_language("en")
    page = view(weights(2, 3, 3))
    assert "words" not in page.data and '<html lang="en">' in page.html()
