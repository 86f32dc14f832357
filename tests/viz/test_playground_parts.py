"""The playground's Why and How fast, what is shared from it, and its languages, in a real Chromium."""

import base64
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs
from mha_c.teach.players.stepping import STEPS
from playground_page import STATES, python_of, results, run_python, type_into

pytest_plugins = ["browser_fixtures", "playground_fixtures"]
ROOT = Path(__file__).resolve().parents[2]


# --- Why ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", ["", "causal=top_left", "left=1&right=1", "kind=additive&len=7", "kind=distance&width=2"]
)
def test_blocks_joined_are_the_one_call(turn, state):
    shown = turn(f"part=tiles&block=3&{state}")
    blocks, apart = re.match(r"Joined from (\d+) blocks, .* by at most (.*)\.$", shown.text(".mhac-fact")).groups()
    assert blocks == "4" and float(apart) < 1e-6
    assert shown.text(".mhac-step").startswith("1 / 13   Scores of this tile, keys 0 to 2")
    shown.focus(".mhac-player")
    shown.press("ArrowRight")
    assert shown.text(".mhac-step").startswith("2 / 13   New maximum")


def test_the_sum_and_the_maximum_of_each_step_are_those_of_the_formula(play):
    shown = play("part=tiles&block=1&text=a+b&d=2&q=1,0;2,1&k=1,1;3,-1&v=1,2;3,4")
    shown.browser.until(
        lambda: shown.run("return R.activeElement && R.activeElement.classList.contains('mhac-player')")
    )
    first, second = np.array([1, 3]) / np.sqrt(2)
    alpha = f"{np.exp(first - second):.2f}"
    for _ in range(4):
        shown.press("ArrowRight")
    assert shown.text(".mhac-sum") == (
        f"a:  m = max({first:.2f}, {second:.2f}) = {second:.2f}     α = exp({first:.2f} − {second:.2f}) = {alpha}"
        f"     ℓ = {alpha} · 1.00 = {alpha}"
    )


def test_gradients_are_the_packages_and_hidden_keys_have_none(turn):
    shown = turn("part=gradients&causal=top_left&row=3&feature=1&heads=2&head=1")
    found = results(shown, "How much each key moves it (length of its gradient)")
    names = run_python(python_of(shown))
    q, k, v = names["q"], names["k"], names["v"]
    grad = np.zeros_like(v[:, :, : q.shape[2]])
    grad[0, 1, 3, 1] = 1
    _, grad_k, grad_v = mha_c.functional.dot_product_attention_backward(grad, q, k, v, causal="top_left")
    expected = np.stack([np.linalg.norm(g[0, 1], axis=1) for g in (grad_k, grad_v)], axis=1)
    np.testing.assert_allclose(found, expected, atol=6e-4)
    assert (found[4:] == 0).all() and (found[:4, 1] > 0).all()
    assert "4 of 10 keys can move it" in shown.run("return R.textContent")


# --- Sharing and languages ---------------------------------------------------------------------------------------


def test_a_link_opens_what_is_shown(play):
    shown = play("text=good+day&kind=additive&causal=top_left")
    shown.run("[...R.querySelectorAll('button')].find((b) => b.textContent === 'Copy link').click()")
    link = shown.run("return R.querySelector('textarea').value")
    expected = results(shown, "output")
    again = play(link.split("#")[1])
    assert results(again, "output").tolist() == expected.tolist()


@pytest.mark.parametrize("state", ["text=good+day", "part=tiles", "part=gradients", "ch=pooling", "ch=dot"])
def test_the_picture_is_what_is_drawn(play, state):
    shown = play(state)
    shown.run(
        "HTMLAnchorElement.prototype.click = function () { window.saved = this.download; };"
        "const make = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { window.blob = blob; return make.call(URL, blob); };"
    )
    shown.run("[...R.querySelectorAll('button')].find((b) => b.textContent === 'Save picture').click()")
    assert shown.browser.wait("return window.saved") == "attention.png"
    assert shown.texts(".mhac-share .mhac-note") == ["Saved as attention.png."]
    address = shown.browser.run(
        "return new Promise((done) => { const reader = new FileReader();"
        " reader.onload = () => done(reader.result); reader.readAsDataURL(window.blob); })"
    )
    picture = needs.module("matplotlib.image").imread(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert min(picture.shape[:2]) > 200
    colours = np.rint(255 * picture).astype(np.int64) @ 256 ** np.arange(picture.shape[2])
    assert len(np.unique(colours)) > 100


WATCH = """
const write = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.written.push(text);
    return write.call(this, text, ...place);
};
"""


@pytest.mark.parametrize(("state", "key", "texts"), [
    ("ch=masks", "ArrowDown", {"−∞": 55, "cat": 5}),  # five hidden keys of eleven queries; a bar says its word, too
    ("ch=additive&p=1", "ArrowDown", {"−1.58": 1, "39.0": 1}),  # on the projector, too
    ("ch=additive", "ArrowDown", {"39.0": 1, "0.0": 1, "19.6": 1}),  # values, and what they are mixed to
])  # fmt: skip
def test_a_picture_writes_its_numbers(play, state, key, texts):
    shown = play(state, 1024)
    shown.browser.run(WATCH)
    shown.press(key)
    shown.settle()
    written = shown.browser.run("return window.written")
    assert {text: written.count(text) for text in texts} == texts


def test_a_phone_names_the_words_that_a_row_asks_for(play):
    """The text speaks of a word and the next one; a row that has no room for both has the next one behind an arrow."""
    shown = play("ch=heads", 390)
    shown.browser.run(WATCH)
    shown.press("ArrowDown")
    shown.settle()
    assert {"→ la", "→ voiture"} <= {*shown.browser.run("return window.written")}


@pytest.mark.parametrize(
    ("language", "first"), [("en", "Pooling by distance"), ("de", "Mitteln nach Abstand"), ("zh", "按距离汇聚")]
)
def test_the_lecture_ends_with_what_was_seen(turn, language, first):
    shown = turn(f"ch=cost&lang={language}", 1024)
    assert not re.search("[。！？] .", shown.text(".mhac-says")), "no space behind a full stop in Chinese"
    assert not re.search(r"[。！？] .|[\u4e00-\u9fff]\.", " ".join(shown.texts(".mhac-folds .mhac-note")))
    shown.browser.size(1024, 768)
    shown.press("8")
    shown.browser.until(lambda: shown.run("return R.activeElement && R.activeElement.className") == "mhac-summary")
    titles = shown.texts(".mhac-summary li b")
    assert len(titles) == 7 and titles[0] == first and "layer.playground(inputs=x)" in shown.texts(".mhac-summary dt")
    assert shown.overflow() == 0 and shown.browser.run("return document.documentElement.scrollHeight") <= 768
    shown.browser.size(390, 844)
    shown.settle()
    assert shown.overflow() == 0, "an address is as long as it is"
    shown.browser.size(1024, 768)
    shown.press("PageDown")  # the last page
    shown.press("PageUp")
    shown.browser.until(lambda: "ch=cost" in shown.browser.run("return location.hash"))


def texts_of_the_sources():
    """Every English text that goes through the table of words."""
    viz = ROOT / "mha_c" / "viz"
    sources = [*(ROOT / "mha_c" / "viz" / "playground_page").rglob("*.js"), *viz.glob("*.js")]
    found = set()
    for path in sources:
        if path.name != "words.js":
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r'\bT\(\s*"((?:[^"\\]|\\.)*)"', text))
            found |= set(re.findall(r'^  .*\b(?:title|nav|label|seen): "([^"_]{2,})"', text, re.MULTILINE))
            for says in re.findall(r"^  says: (\[.*?\]),$", text, re.MULTILINE | re.DOTALL):
                found |= set(json.loads(says))
    found |= set(
        re.findall(
            r'name: "([^"]+)"', (ROOT / "mha_c" / "viz" / "playground_page" / "sources.js").read_text(encoding="utf-8")
        )
    )
    keys = (viz / "frame.js").read_text(encoding="utf-8").partition("const KEYS")[2].partition("];")[0]
    found |= set(re.findall(r'\["[^"]+", "([^"]+)"\]', keys))
    for title, caption in ((step["title"], step["caption"]) for step in STEPS["tiles"]):
        found |= {title, caption}
    return found


def test_every_text_has_its_words_in_every_language():
    table = (
        (ROOT / "mha_c" / "viz" / "playground_page" / "words.js")
        .read_text(encoding="utf-8")
        .partition("const TABLE = ")[2]
    )
    rows = json.loads(re.sub(r",\s*\]", "]", table.partition(";\n")[0]))
    assert all(len(row) == 4 and all(row) for row in rows)
    assert texts_of_the_sources() - {row[0] for row in rows} == set()
    for row in rows:
        places = [sorted(re.findall(r"\{\w+\}", text)) for text in row]
        assert places == [places[0]] * 4, row


@pytest.mark.parametrize(("language", "attend", "why"), [
    ("de", "Gewicht", "Softmax in Blöcken"), ("zh", "权重", "分块的 softmax"), ("tr", "Ağırlık", "Bloklarla softmax"),
])  # fmt: skip
def test_the_page_speaks(turn, language, attend, why):
    shown = turn("text=good+day")
    type_into(shown, "Language", language)
    assert attend in shown.texts(".mhac-explained h2")
    assert shown.run("return R.querySelector('.mhac-root').lang") == language
    assert "“good” looks at" not in shown.run("return R.textContent")
    assert why in turn(f"lang={language}&part=tiles").texts(".mhac-choice")


@pytest.mark.by_day("state", "language", together=1)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("language", ["de", "zh", "tr"])
def test_every_part_fits_phone_and_desk_in_every_language(turn, state, language):
    shown = turn(f"lang={language}&{state}", 390)
    assert shown.overflow() == 0
    shown.browser.size(1280, 900)
    shown.settle()
    assert shown.overflow() == 0


def test_an_own_layer_is_computed_by_the_page(page, show):
    """layer.playground() with inputs: the page's numbers are the layer's; without: its weights are shown."""
    mha = mha_c.MultiHeadAttention(num_hiddens=16, num_heads=4, dropout=0, bias=True, rng=0)
    x = np.random.default_rng(1).standard_normal((1, 5, 16)).astype(np.float32)
    out = mha(x, x, x, [3])
    for more in ({"inputs": x, "valid_lens": [3]}, {}):
        shown = show(mha.playground("a b c d e", page=page, **more))
        found = shown.browser.run("return mha_c.numbers('ch=heads')")
        np.testing.assert_allclose(found["weights"], mha.attention_weights[0], atol=2e-5)
        assert shown.texts("h1") == ["Many heads"] and "Your own layer." in " ".join(shown.texts(".mhac-says p"))
        if more:
            np.testing.assert_allclose(found["output"], out[0], atol=1e-4)
