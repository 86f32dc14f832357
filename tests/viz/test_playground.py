"""The page of `make playground` in a real Chromium: what is chosen is computed, shown and explained."""

import re
import sys
import types

import numpy as np
import pytest

import mha_c
import needs
from playground_page import STATES, inputs, python_of, results, run_python, type_into

pytest_plugins = ["browser_fixtures", "playground_fixtures"]


# --- The page ----------------------------------------------------------------------------------------------------


def test_one_file_that_asks_for_nothing(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) <= 1_500_000
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src" not in policy
    assert not re.search(r"@import|<link|<img|fetch\(", text)
    book = [
        "https://d2l.ai/chapter_attention-mechanisms-and-transformers/",
        "https://zh.d2l.ai/chapter_attention-mechanisms/",
    ]
    assert re.findall(r"https?://[^\"]*", text) == book  # where the last page's link leads who follows it


@pytest.mark.by_day("state", "width", together=1)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize(("width", "schemes"), [(390, ["light", "dark"]), (1280, ["dark", "light"])])
def test_every_part_fits_phone_and_desk_in_light_and_dark(turn, state, width, schemes):
    shown = turn(state, width, schemes[0])
    for scheme in schemes:
        shown.browser.scheme(scheme)
        shown.settle()
        assert shown.run("return R.querySelector('.mhac-root').dataset.theme") == scheme
        assert shown.overflow() == 0
        assert shown.run("return [...R.querySelectorAll('.mhac-trouble')].every((each) => each.hidden)")


def test_the_first_picture_is_there_within_a_second(play, browser):
    """Of opening, in time of the page's main thread: the machine has other work."""
    shown = play("ch=all")
    assert len(shown.colours(".mhac-base")) > 20
    assert 0 < shown.browser.thread_seconds() < 1


def test_keys_work_as_soon_as_the_page_is_open(play):
    shown = play("ch=all")
    shown.browser.until(lambda: shown.run("return R.activeElement && R.activeElement.className") == "mhac-matrix")
    shown.press("ArrowDown", "ArrowRight", "ArrowRight")
    assert shown.pair()[:2] == (1, 2)
    shown.browser.until(lambda: "row=1&column=2" in shown.browser.run("return location.hash"))
    assert shown.text(".mhac-explained h2") == "Score, cat → sat"


def test_the_keyboard_alone_reaches_and_changes_everything(play):
    shown = play("ch=all")
    shown.run("R.querySelectorAll('details').forEach((each) => each.open = true)")
    seen = []
    for _ in range(400):
        shown.browser.press("Tab")
        where = shown.run(
            "const e = R.activeElement; return e &&"
            " (e.dataset.cell ? e.closest('table').dataset.matrix + e.dataset.cell :"
            " e.tagName === 'BUTTON' || e.tagName === 'SUMMARY' ? e.textContent : e.closest('.mhac-field') ?"
            " e.closest('.mhac-field').firstChild.textContent : e.className)"
        )
        if where in seen and where == seen[0]:
            break
        seen.append(where)
    wanted = {"Attend", "Language", "Start from", "Sentence", "scores", "heads", "causal", "dropout", "Q0,0", "V9,3",
              "mhac-matrix", "feature of the output", "Copy link", "Copy as Python",
              "Save picture", "Projector"}  # fmt: skip
    assert wanted <= set(seen), wanted - set(seen)
    before = shown.texts(".mhac-arith")
    shown.focus("[data-matrix=Q] [data-cell='0,0']")
    shown.press("ArrowDown", "ArrowUp")
    shown.run("R.activeElement.select()")
    shown.press("5")
    assert shown.texts(".mhac-arith") != before and "5.00 · " in shown.texts(".mhac-arith")[0]


# --- Attend ------------------------------------------------------------------------------------------------------


def test_numbers_drawn_with_a_seed_are_numpys(turn):
    q, k, v = inputs(turn("from=drawn&n=5&m=7&d=3&draw=12"))
    draw = np.random.RandomState(12)
    for found, rows in ((q, 5), (k, 7), (v, 7)):
        np.testing.assert_array_equal(found[0], draw.standard_normal((rows, 3)).round(1).astype(np.float32))


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_python_computes_what_is_shown(turn, state):
    if "part=" in state:
        state += "&part=attend"
    shown = turn(state)
    names = run_python(python_of(shown))
    head = names["weights"] if names["weights"].ndim == 2 else names["weights"][0]
    if head.shape[0] > 16:  # too large for a table: the chosen query has one
        np.testing.assert_allclose(results(shown, "0")[:, 1], head[0], atol=6e-5)
        return
    np.testing.assert_allclose(results(shown, "weights"), head, atol=6e-5)
    np.testing.assert_allclose(results(shown, "output"), names["output"], atol=6e-5)


BOOK = [
    "ch=all", "len=3", "len=1,2,3,4,5,6,7,8,9,10", "causal=top_left&len=7", "left=2&right=1", "scale=0.7",
    "softcap=2&scale=2", "heads=2&len=4", "kind=additive&heads=2&causal=bottom_right", "kind=additive&len=0",
    "from=drawn&n=3&m=6&causal=bottom_right",
    "kind=distance&width=2", "kind=distance&kernel=boxcar&width=3&causal=top_left", "from=toy-dot&len=6",
    "from=toy-additive&kind=additive&len=2", "from=multihead&heads=5&len=3", "from=nadaraya&kind=distance",
]  # fmt: skip


@pytest.mark.parametrize("state", BOOK)
def test_the_lines_for_d2l_compute_the_same(turn, state, monkeypatch):
    d2l = needs.d2l("1.0.3")
    package = types.ModuleType("d2l")
    package.torch = d2l
    monkeypatch.setitem(sys.modules, "d2l", package)
    monkeypatch.setitem(sys.modules, "d2l.torch", d2l)
    names = run_python(python_of(turn(state)), book=True)
    book = names["book"].numpy()
    ours = names["output"] if names["output"].ndim == 3 else names["output"][None]
    np.testing.assert_allclose(ours, book.reshape(ours.shape), atol=1e-5)


@pytest.mark.parametrize(("state", "printed"), [
    ("from=toy-dot&len=2", [2, 3, 4, 5]), ("from=toy-dot&len=6&item=1", [10, 11, 12, 13]),
    ("from=toy-additive&kind=additive&len=2", [2, 3, 4, 5]),
    ("from=toy-additive&kind=additive&len=6&item=1", [10, 11, 12, 13]),
])  # fmt: skip
def test_the_books_examples_show_what_the_book_prints(turn, state, printed):
    assert results(turn(state), "output").tolist() == [printed]


def test_a_sentence_can_be_read_whenever_there_is_one(turn):
    shown = turn("from=drawn")
    assert "Sentence" not in shown.texts(".mhac-root .mhac-root .mhac-choice")
    type_into(shown, "Start from", "sentence")
    shown.settle()
    assert "Sentence" in shown.texts(".mhac-root .mhac-root .mhac-choice")
    shown.click(".mhac-root .mhac-root .mhac-choice", at=2)
    assert shown.texts(".mhac-word")[:3] == ["the", "cat", "sat"]


def test_choosing_an_example_shows_it(turn):
    shown = turn("ch=all")
    type_into(shown, "Start from", "toy-additive")
    assert results(shown, "output").tolist() == [[2, 3, 4, 5]]
    type_into(shown, "item of the batch", 1)
    assert results(shown, "output").tolist() == [[10, 11, 12, 13]]
    type_into(shown, "Start from", "multihead")
    assert shown.texts(".mhac-card-name") == ["0", "1", "2", "3", "4", "Mean"]
    np.testing.assert_allclose(results(shown, "weights"), [[1 / 3] * 3 + [0] * 3] * 4, atol=6e-5)
    type_into(shown, "item of the batch", 1)
    np.testing.assert_allclose(results(shown, "weights"), [[0.5] * 2 + [0] * 4] * 4, atol=6e-5)


@pytest.mark.parametrize(("label", "value", "options"), [
    ("lengths", "3", {"valid_lens": [3]}), ("causal", "top_left", {"causal": "top_left"}),
    ("window left", "1", {"window": (1, None)}), ("right", "2", {"window": (None, 2)}), ("scale", "2", {"scale": 2.0}),
    ("softcap", "0.5", {"softcap": 0.5}), ("dropout", "0.5", {"dropout": 0.5, "rng": 0}),
])  # fmt: skip
def test_every_change_shows_at_once(turn, label, value, options):
    shown = turn("text=the+cat+sat+down")
    q, k, v = inputs(shown)
    before = results(shown, "output")
    type_into(shown, label, value)
    output, weights = mha_c.functional.dot_product_attention(
        q, k, v, empty_rows="uniform", return_weights=True, **options
    )
    np.testing.assert_allclose(results(shown, "weights"), weights[0], atol=6e-5)
    np.testing.assert_allclose(results(shown, "output"), output[0], atol=6e-5)
    assert not np.array_equal(results(shown, "output"), before)


def test_a_cell_explains_itself_with_its_numbers(turn):
    shown = turn("text=a+b+c&d=2&row=1&column=2&q=1,0;2,1;0,0&k=1,1;0,1;3,-1&v=1,2;3,4;5,6")
    score, weight, output = shown.texts(".mhac-arith")
    assert score == "(2.00 · 3.00 + 1.00 · (−1.00)) / √2 = 3.5355"
    scores = np.array([3, 1, 5]) / np.sqrt(2)
    e = np.exp(scores) / np.exp(scores).sum()
    assert weight == f"exp(0) / [exp(−1.41) + exp(−2.83) + exp(0)] = {e[2]:.4f}"
    assert output.endswith(f" = {e @ [1, 3, 5]:.4f}") and output.count("·") == 3
    type_into(shown, "causal", "top_left")
    assert shown.texts(".mhac-arith")[1] == "this key may not be seen: 0"


@pytest.mark.parametrize(
    "state", [*BOOK[:-2], "kind=additive&softcap=0.5&scale=2", "kind=distance&kernel=epanechnikov"]
)
def test_the_scores_that_are_explained_are_those_of_the_weights(turn, state):
    """Both are the core's.  Four digits of either are shown."""
    shown = turn(state)
    scores, weights = results(shown, "scores"), results(shown, "weights")
    seen = np.isfinite(scores).any(axis=1)
    e = np.exp(scores[seen] - scores[seen].max(axis=1, keepdims=True))
    np.testing.assert_allclose(weights[seen], e / e.sum(axis=1, keepdims=True), atol=2e-4)
    np.testing.assert_allclose(weights[~seen], 1 / weights.shape[1], atol=6e-5)
    score, weight = shown.texts(".mhac-arith")[:2]
    number = float(re.sub("−", "-", re.split(" = |: |; +", score)[-1]).replace("-∞", "-inf"))
    assert number == scores[0, 0] or scores[0, 0] == -np.inf
    assert float(re.split(" = |: ", weight)[-1]) == weights[0, 0]


def test_a_number_that_is_changed_is_computed_with(play):
    shown = play("text=a+b&d=2")
    shown.run("const box = R.querySelector(\"[data-matrix=V] [data-cell='0,1']\"); box.value = 77;"
              "box.dispatchEvent(new Event('input'))")  # fmt: skip
    shown.settle()
    _, _, v = inputs(shown)
    assert v[0, 0, 1] == 77
    assert results(shown, "output")[0, 1] > 5
    assert (
        play(shown.browser.run("return location.hash")[1:]).run(
            "return R.querySelector(\"[data-matrix=V] [data-cell='0,1']\").value"
        )
        == "77"
    )


@pytest.mark.parametrize(("label", "value", "said"), [
    ("lengths", "11", "“lengths” must be a whole number from 0 to 10, the number of keys, got 11"),
    ("lengths", "1,2", "“lengths” are 2, queries are 10"),
    ("heads", "3", "4 features cannot be split into 3 heads"),
    ("scale", "abc", "“scale” must be a finite number, got \"abc\""),
    ("softcap", "-1", "“softcap” must be a number above 0, got -1"),
    ("Sentence", "  ", "Write a sentence: there is no word to look at."),
])  # fmt: skip
def test_what_cannot_be_is_said_and_no_old_picture_stays(turn, label, value, said):
    shown = turn("ch=all")
    type_into(shown, label, value)
    assert shown.texts(".mhac-trouble")[0].startswith(said)
    assert shown.texts(".mhac-arith") == [] and shown.texts(".mhac-value") == []
    assert "Copy as Python" not in shown.texts(".mhac-share .mhac-button")
    type_into(shown, label, {"heads": "2", "Sentence": "good day"}.get(label, ""))
    assert shown.texts(".mhac-trouble") == [] and len(shown.texts(".mhac-arith")) == 3


def test_more_words_than_can_be_shown_are_refused(turn):
    shown = turn("text=" + "+".join(f"w{i}" for i in range(33)))
    assert shown.texts(".mhac-trouble") == ["33 words: at most 32 can be shown here."]
    assert len(turn("text=" + "+".join(f"w{i}" for i in range(32))).texts(".mhac-arith")) == 3


@pytest.mark.parametrize(("label", "value"), [("scores", "additive"), ("Start from", "nadaraya"), ("dropout", "0.5"),
                                              ("feature of the output", "2"), ("Language", "de")])  # fmt: skip
def test_a_field_that_changes_the_form_keeps_the_focus(turn, label, value):
    """Arrow keys in a list choose again and again."""
    shown = turn("ch=all")
    shown.run(
        "[...R.querySelectorAll('.mhac-field')].find((f) => f.firstChild.textContent === arguments[0])"
        ".querySelector('input, select').focus()",
        label,
    )
    type_into(shown, label, value)
    now = shown.run("const e = R.activeElement; return e && e.closest('.mhac-field').firstChild.textContent + e.value")
    assert now == ("Sprache" if label == "Language" else label) + value


def test_the_dark_comes_while_the_page_is_open(turn):
    shown = turn("text=good+day&d=2")
    light = shown.colours(".mhac-boards canvas")
    shown.browser.scheme("dark")
    shown.browser.until(lambda: shown.run("return R.querySelector('.mhac-root').dataset.theme") == "dark")
    shown.settle()
    common = set(shown.colours(".mhac-boards canvas")) & set(light)  # numbers in cells may have one ink
    assert len(common) < len(light) / 4


def test_an_address_that_is_not_understood_says_so(turn):
    shown = turn("kind=cosine&heads=2&window=7")
    assert shown.texts(".mhac-trouble") == ["Not understood in the address: kind=cosine, window=7"]
    assert len(shown.texts(".mhac-card-name")) == 3


def test_words_are_data(play):
    shown = play("text=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E+%3C/script%3E")
    assert shown.run("return R.querySelectorAll('img, script').length") == 0
    assert shown.texts("[data-matrix=Q] tbody th") == ["<img", "src=x", "onerror=alert(1)>", "</script>"]


def test_another_state_in_the_address_is_shown(play):
    shown = play("ch=all")
    shown.browser.run("location.hash = '#text=good+day&kind=additive'")
    shown.browser.until(lambda: shown.texts("[data-matrix=Q] tbody th") == ["good", "day"])
    assert "tanh" in shown.texts(".mhac-arith")[0]
