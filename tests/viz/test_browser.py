"""The attention view in a real Chromium, without network: what is pointed at, clicked and pressed is shown."""

import re

import numpy as np
import pytest

from chromium import HIGH, MATRIX, SENTENCE, at, weights_of
from mha_c.viz import view

pytest_plugins = ["browser_fixtures"]


# --- Matrix --------------------------------------------------------------------------------------


def test_hovering_shows_both_tokens_and_the_weight(show, weights):
    shown = show(view(weights, SENTENCE))
    seen = set()
    for across, down in ((0.3, 0.4), (0.55, 0.6), (0.8, 0.9)):
        shown.point(MATRIX, across, down)
        query, key, weight = shown.pair()
        assert weight == pytest.approx(weights[0, query, key], abs=6e-4)
        assert shown.texts(".mhac-pair bdi") == [SENTENCE[query], SENTENCE[key]]
        assert shown.text(".mhac-tip").startswith(f"{SENTENCE[query]} → {SENTENCE[key]}")
        # the small heads say their weight at the same place
        values = [float(text) for text in shown.texts(".mhac-card-value")]
        np.testing.assert_allclose(values, [*weights[:, query, key], weights[:, query, key].mean()], atol=6e-4)
        seen.add((query, key))
    assert len(seen) == 3
    shown.browser.move(5, HIGH - 5)
    shown.settle()
    assert shown.texts(".mhac-tip") == []
    assert "bit" in shown.texts(".mhac-card-value")[0]


def test_the_strongest_keys_of_the_row_are_listed(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.point(MATRIX, 0.5, 0.5)
    query = shown.pair()[0]
    best = np.argsort(-weights[0, query])[:6]
    assert shown.texts(".mhac-bar-name") == [SENTENCE[k] for k in best]
    row = weights[0, query]
    entropy = -(row * np.log2(row)).sum()
    assert f"entropy {entropy:.2f} bits" in shown.texts(".mhac-readout .mhac-note")[1]


def test_a_click_keeps_the_place(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.point(MATRIX, 0.7, 0.5)
    there = shown.pair()
    shown.browser.click(*(round(c) for c in at(shown.box(MATRIX), 0.7, 0.5)))
    shown.browser.move(5, HIGH - 5)
    shown.settle()
    assert shown.pair() == there
    query, key, _ = there
    assert shown.text("[aria-live]").startswith(f"Head 0, {SENTENCE[query]} to {SENTENCE[key]}: ")


def test_keys_move_through_the_matrix(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.focus(".mhac-matrix")
    shown.press("Home", *["ArrowUp"] * 12)
    assert shown.pair()[:2] == (0, 0)
    shown.press("ArrowDown", "ArrowDown", "ArrowRight")
    query, key, weight = shown.pair()
    assert (query, key) == (2, 1) and weight == pytest.approx(weights[0, 2, 1], abs=6e-4)
    shown.press("End")
    assert shown.pair()[:2] == (2, 11)
    assert "did to tired" in shown.text("[aria-live]")


def test_heads_are_chosen_by_click_and_by_key(show, weights):
    shown = show(view(weights, SENTENCE, head_names=["a", "b", "c", "d"]))
    assert shown.texts(".mhac-card-name") == ["a", "b", "c", "d", "Mean"]
    shown.click(".mhac-card", at=2)
    assert shown.chosen(".mhac-card") == 2
    query, key, weight = shown.pair()
    assert weight == pytest.approx(weights[2, query, key], abs=6e-4)
    assert shown.text(".mhac-words b") == "c"
    shown.press("1")
    assert shown.chosen(".mhac-card") == 1
    shown.press("m")
    assert shown.chosen(".mhac-card") == 4
    assert shown.pair()[2] == pytest.approx(weights[:, query, key].mean(), abs=6e-4)
    shown.press("[")
    assert shown.chosen(".mhac-card") == 3
    shown.focus(".mhac-card[aria-checked=true]")
    shown.press("ArrowLeft")
    assert shown.chosen(".mhac-card") == 2


def test_canvases_are_painted(show, weights):
    shown = show(view(weights, SENTENCE))
    for selector in (".mhac-base", ".mhac-card canvas", ".mhac-scale-bar canvas"):
        assert len(shown.colours(selector)) > 20


def test_the_scale_can_be_linear_or_a_root(show, weights):
    shown = show(view(weights, SENTENCE))
    middle = float(shown.text(".mhac-scale-middle"))
    assert middle == pytest.approx(weights.max() / 2, abs=1e-3)
    shown.click(".mhac-scale .mhac-choice", at=1)
    assert float(shown.text(".mhac-scale-middle")) == pytest.approx(weights.max() / 4, abs=1e-3)


def test_zooming_in_and_out(show):
    tokens = [f"t{i}" for i in range(64)]
    array = weights_of(2, 64)
    shown = show(view(array, tokens))
    box = shown.box(MATRIX)
    shown.browser.drag(at(box, 0.4, 0.4), at(box, 0.6, 0.6))
    shown.settle()
    assert "Show the whole matrix" in shown.texts(".mhac-button")
    shown.point(MATRIX, 0.2, 0.3)
    query, key, weight = shown.pair()
    assert 15 < query < 45 and 15 < key < 45
    assert weight == pytest.approx(array[0, query, key], abs=6e-4)
    shown.click(".mhac-button")
    assert shown.texts(".mhac-button") == []
    shown.focus(".mhac-matrix")
    shown.press("+", "+")
    assert shown.texts(".mhac-button") == ["Show the whole matrix"]
    shown.press("Escape")
    assert shown.texts(".mhac-button") == []


# --- Lines and sentence --------------------------------------------------------------------------


def lines(shown):
    return int(shown.run("return R.querySelector('.mhac-middle canvas').getAttribute('data-lines')"))


def test_the_slider_sets_the_number_of_lines(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.click("header .mhac-choice", at=1)
    assert lines(shown) == 4 * len(SENTENCE)
    shown.focus("input[type=range]")
    shown.press("ArrowRight", "ArrowRight")
    assert shown.text(".mhac-topk output") == "6"
    assert lines(shown) == 6 * len(SENTENCE)
    shown.press("Home")
    assert lines(shown) == len(SENTENCE)
    assert len(shown.colours(".mhac-middle canvas")) > 20


def test_pointing_at_a_token_leaves_only_its_lines(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.click("header .mhac-choice", at=1)
    shown.point(".mhac-left .mhac-lane", across=0.9, at=3)
    assert lines(shown) == 4
    query, key, weight = shown.pair()
    assert (query, key) == (3, weights[0, 3].argmax()) and weight == pytest.approx(weights[0, 3].max(), abs=6e-4)
    shown.point(".mhac-column:not(.mhac-left) .mhac-lane", across=0.1, at=5)
    readers = (np.argsort(-weights[0], axis=1)[:, :4] == 5).sum()
    assert lines(shown) == readers
    shown.browser.move(5, HIGH - 5)
    shown.settle()
    assert lines(shown) == 4 * len(SENTENCE)


def test_lines_by_click_and_by_key(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.focus(".mhac-matrix")
    shown.press("v")
    assert shown.chosen("header .mhac-choice") == 1
    shown.click(".mhac-left .mhac-lane", at=2)
    shown.browser.move(5, HIGH - 5)
    shown.settle()
    assert lines(shown) == 4
    shown.focus(".mhac-lines")
    shown.press("ArrowDown")
    assert shown.pair()[0] == 3
    shown.press("Escape")
    assert lines(shown) == 4 * len(SENTENCE)


def test_the_sentence_tints_what_a_word_looks_at(show, weights):
    shown = show(view(weights, SENTENCE))
    shown.click("header .mhac-choice", at=2)
    shown.point(".mhac-word", at=4)
    assert shown.texts(".mhac-word.mhac-focus") == [SENTENCE[4]]
    luma = shown.run(
        "return [...R.querySelectorAll('.mhac-word')].map(w => {"
        "const c = (w.style.background.match(/\\d+/g) || [255, 255, 255]).map(Number);"
        "return 0.3 * c[0] + 0.6 * c[1] + 0.1 * c[2]; })"
    )
    assert np.argmin(luma) == weights[0, 4].argmax()
    shown.focus(".mhac-sentence")
    shown.click(".mhac-word", at=4)
    shown.press("ArrowRight")
    shown.browser.move(5, HIGH - 5)
    shown.settle()
    assert shown.texts(".mhac-word.mhac-focus") == [SENTENCE[5]]


def test_without_tokens_there_is_no_sentence_and_positions_are_shown(show, weights):
    shown = show(view(weights))
    assert shown.texts("header .mhac-choice") == ["Matrix", "Lines"]
    shown.point(MATRIX, 0.5, 0.5)
    query, key = (int(text) for text in shown.texts(".mhac-pair bdi"))
    assert float(shown.text(".mhac-value")) == pytest.approx(weights[0, query, key], abs=6e-4)


def test_no_weight_at_all_is_said_of_zeros_alone(show):
    shown = show(view([[1.0, 1e-7, 0.0]] * 3))
    for key, said in enumerate(["1 rank 1 of 2 keys", "< 0.00001 rank 2 of 2 keys", "0 no weight at all"]):
        shown.point(MATRIX, 0.3 + 0.3 * key, 0.5)
        assert " ".join([shown.text(".mhac-value"), shown.text(".mhac-value + .mhac-note")]) == said


# --- Layers, examples, shapes --------------------------------------------------------------------


def test_layers_and_examples_are_selected(show):
    array = np.stack([np.stack([weights_of(3, 5, seed=10 * i + b) for b in range(2)]) for i in range(2)])
    shown = show(view(array, "a b c d e"))
    for layer, example in ((1, 0), (1, 1), (0, 1)):
        shown.run(
            "R.querySelectorAll('select').forEach((s, i) => { s.value = arguments[0][i];"
            " s.dispatchEvent(new Event('change')); })",
            [layer, example],
        )

        def is_shown(there=array[layer, example, 0]):
            shown.point(MATRIX, 0.6, 0.6)
            query, key, weight = shown.pair()
            return weight == pytest.approx(there[query, key], abs=6e-4)

        shown.browser.until(is_shown)


def test_joined_neighbours_count_as_what_they_are(show):
    array = weights_of(2, 140)
    shown = show(view(array, max_bytes=20_000))
    assert shown.run("return R.querySelector('header').textContent").count("140 queries × 140 keys") == 1
    entropy, most = re.search(r"entropy ([0-9.]+) of ([0-9.]+) bits", shown.run("return R.textContent")).groups()
    assert float(entropy) <= float(most) == pytest.approx(np.log2(140), abs=5e-3)
    shown.point(MATRIX, 0.6, 0.6)
    query, key = (int(text.split(" … ")[0]) for text in shown.texts(".mhac-pair bdi"))
    assert query > 70 < key and [int(text) for text in shown.texts(".mhac-pair sub")] == [query, key]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 9), (2, 9, 1), (3, 2, 40), (20, 6, 6)])
def test_odd_shapes(show, shape):
    array = np.random.default_rng(1).random(shape)
    array /= array.sum(axis=-1, keepdims=True)
    shown = show(view(array))
    for mode in range(2):
        shown.click("header .mhac-choice", at=mode)
        assert shown.overflow() == 0
    assert len(shown.texts(".mhac-card")) == (shape[0] + 1 if shape[0] > 1 else 0)


@pytest.mark.parametrize("width", [320, 420, 700, 1000, 1600])
def test_every_width(show, weights, width):
    shown = show(view(weights, SENTENCE))
    shown.browser.size(width, HIGH)
    for mode in range(3):
        shown.click("header .mhac-choice", at=mode)
        shown.settle()
        assert shown.overflow() == 0
    assert shown.run("return R.querySelector('.mhac-root').dataset.size") == (
        "small" if width < 680 else "medium" if width < 1030 else "large"
    )


def test_tokens_of_every_kind(show):
    tokens = ["</script>", "<b>bold</b>", "שלום", "😀", "", " ", "\n", "&amp;", "a" * 60]
    shown = show(view(weights_of(2, len(tokens)), tokens))
    shown.focus(".mhac-matrix")
    shown.press("Home", *["ArrowUp"] * 9)
    seen = []
    for _ in tokens:
        seen.append(shown.texts(".mhac-pair bdi")[0])
        shown.press("ArrowDown")
    assert seen == [*tokens[:4], "∅", "␣", "⏎", *tokens[7:]]
    assert shown.overflow() == 0


# --- Many tokens ---------------------------------------------------------------------------------


def test_512_tokens_and_8_heads_within_two_seconds(show, tmp_path):
    """From opening the file to the answer of a hover, in time of the page's main thread: the machine has other work."""
    array = weights_of(8, 512)
    page = view(array, [f"token{i}" for i in range(512)])
    path = page.save(tmp_path / "many.html")
    assert path.stat().st_size < 4_000_000
    shown = show(page)
    shown.point(MATRIX, 0.6, 0.6)
    query, key, weight = shown.pair()
    opened = shown.browser.thread_seconds()
    assert weight == pytest.approx(array[0, query, key], abs=0.004 * array[0, query].max() + 5e-4)
    assert 0 < opened < 2
    shown.browser.move(1, 1)
    shown.click("header .mhac-choice", at=1)
    shown.point(".mhac-left .mhac-lane", across=0.9, at=20)
    assert lines(shown) == 4
    shown.press("2")
    assert shown.chosen(".mhac-card") == 2
    assert shown.browser.thread_seconds() - opened < 2
    print(f"\n512 tokens, 8 heads: {path.stat().st_size / 1e6:.2f} MB, interactive after {opened:.2f} s of its thread")


# --- Keys ----------------------------------------------------------------------------------------


def test_a_saved_page_answers_keys_at_once_and_says_so(show, weights):
    """A teacher at the projector presses an arrow before any click."""
    shown = show(view(weights, SENTENCE))
    before = shown.pair()[:2]
    shown.press("ArrowUp" if before[0] else "ArrowDown")
    assert shown.pair()[:2] == (before[0] + (-1 if before[0] else 1), before[1])
    shown.press("2")
    assert shown.chosen(".mhac-card") == 2
    assert "Keys work as soon as the page is open" in shown.run("return R.querySelector('footer').textContent")


def test_a_page_begins_at_the_head_and_the_query_that_were_asked_for(show):
    array = np.full((3, 4, 5), 0.2)
    array[2, 3] = [0, 0, 0.9, 0.1, 0]
    shown = show(view(array, ("a b c d", "v w x y z"), head=2, query="d"))
    assert shown.texts(".mhac-pair bdi") == ["d", "x"] and shown.text(".mhac-value") == "0.900"
    assert shown.run("return R.querySelector('.mhac-card[aria-checked=true] .mhac-card-name').textContent") == "2"
    shown = show(view(array, head=1, query=0))
    assert shown.texts(".mhac-pair bdi") == ["0", "0"]
