"""What the pages once got wrong: words and numbers that did not fit, races, states that no edit left."""

import re

import numpy as np
import pytest

from chromium import weights_of
from mha_c.viz import view
from playground_page import results, type_into

pytest_plugins = ["browser_fixtures", "playground_fixtures"]


# --- Words and numbers -----------------------------------------------------------------------------------------------


def test_nearly_one_is_not_one_and_nearly_nothing_is_not_nothing(show):
    shown = show(view([[0.9996, 0.0004], [0.5, 0.5]]))
    shown.point(".mhac-matrix .mhac-stage", 0.4, 0.4)
    assert shown.text(".mhac-value") == "0.99960"
    assert shown.texts(".mhac-bar-w") == ["> 99.9 %", "< 0.1 %"]


@pytest.mark.parametrize("width", [0.01, 0.2])
def test_where_no_key_is_within_the_width_that_is_said(turn, width):
    shown = turn(f"from=nadaraya&kind=distance&kernel=boxcar&width={width}&row=3&column=2")
    text = " ".join(shown.texts(".mhac-arith"))
    assert "Infinity" not in text and "exp(∞)" not in text
    assert ("no key is within the width: all weights are 1 / 50" in text) == (width == 0.01)


def test_the_mean_of_the_heads_is_explained_as_the_mean(turn):
    shown = turn("heads=2&head=2&row=3&column=1")
    title, said = shown.text(".mhac-explained h2"), shown.texts(".mhac-arith")
    assert "Mean" in title and len(said) == 1
    first, second, mean = map(float, re.match(r"\(([\d.]+) \+ ([\d.]+)\) / 2 = ([\d.]+)$", said[0]).groups())
    assert mean == pytest.approx((first + second) / 2, abs=1e-4)
    assert shown.texts(".mhac-boards figure") == [], "and no head's matrices stand beside it"


def test_numbers_whose_sums_are_infinite_are_refused_in_words(turn):
    shown = turn("text=a+b&d=2&v=1e38,1e38;3e38,3e38&q=1e30,1;1,1&k=1e30,1;1,1")
    assert "too large" in shown.texts(".mhac-trouble")[0]


def test_a_wrong_field_says_what_is_wrong(turn):
    shown = turn("from=drawn")
    type_into(shown, "features", "99")
    assert shown.texts(".mhac-wrong") == ["a whole number from 1 to 16"]
    assert (
        shown.run(
            "const box = R.querySelector('[aria-invalid=true]');"
            "return R.getElementById(box.getAttribute('aria-describedby')).textContent"
        )
        == "a whole number from 1 to 16"
    )
    type_into(shown, "features", "3")
    assert shown.texts(".mhac-wrong") == []


def test_hidden_keys_have_no_rank(turn):
    shown = turn("causal=top_left&row=2&column=1")
    assert re.match(r"rank \d of 3 keys", shown.texts(".mhac-readout .mhac-note")[0])


# --- States and races ------------------------------------------------------------------------------------------------


def test_every_state_can_be_left_by_an_edit(turn):
    """Two heads and five features once had no tables to edit, nor fields that helped."""
    shown = turn("from=drawn&heads=2&d=5")
    assert shown.texts(".mhac-trouble") == ["5 features cannot be split into 2 heads"]
    type_into(shown, "features", "4")
    assert shown.texts(".mhac-trouble") == [] and len(shown.texts(".mhac-arith")) == 3
    shown.run("R.querySelectorAll('details').forEach((each) => each.open = true)")
    assert shown.run("return R.querySelectorAll('[data-matrix]').length") == 3


# The first layer that is decoded from now on takes as long as the test likes.
HOLD = """
const read = Response.prototype.arrayBuffer;
Response.prototype.arrayBuffer = function () {
    Response.prototype.arrayBuffer = read;
    const given = new Promise((give) => (window.give = give));
    return (window.held = Promise.all([read.call(this), given]).then(([bytes]) => bytes));
};
"""


def test_the_layer_that_is_asked_for_last_is_shown(show):
    shown = show(view([weights_of(1, 5), weights_of(8, 300), weights_of(1, 7)], max_bytes=4_000_000))
    shown.browser.run(HOLD)
    shown.run(
        "const box = R.querySelector('select'); for (const value of [1, 2]) {"
        " box.value = value; box.dispatchEvent(new Event('change')); }"
    )
    shown.browser.until(lambda: "7 queries × 7 keys" in shown.text("header"))
    assert shown.browser.run("give(); return held.then((bytes) => bytes.byteLength)") == 8 * 300 * 300
    shown.settle()
    assert "7 queries × 7 keys" in shown.text("header") and shown.run("return R.querySelector('select').value") == "2"


def test_a_player_keeps_its_step_when_a_slider_moves(play):
    shown = play("part=tiles&block=2")
    shown.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert shown.text(".mhac-step").startswith("4 / 16")
    shown.run("const box = R.querySelector('input[type=range]'); box.value = 2; box.dispatchEvent(new Event('input'))")
    shown.settle()
    assert shown.text(".mhac-step").startswith("4 / 13")


def test_lengths_that_are_wrong_take_nothing_else_with_them(turn):
    shown = turn("part=gradients&len=99")
    assert "“lengths” must be a whole number from 0 to 10" in shown.run("return R.textContent")
    shown.browser.size(900, 700)  # nothing is drawn that is not there
    shown.settle()
    type_into(shown, "lengths", "4")
    assert "4 of 10 keys can move it" in shown.run("return R.textContent")
    type_into(shown, "output of", "3")
    assert shown.text("[role=status]") == "on, feature 0: 4 of 10 keys can move it."


def test_an_edit_that_a_new_source_removed_comes_back(play):
    shown = play("from=drawn&n=2&m=2&d=2&q=9,8;7,6")
    before = results(shown, "scores")
    type_into(shown, "numbers drawn with seed", "5")
    assert not np.array_equal(results(shown, "scores"), before)
    shown.browser.run("history.back()")
    shown.browser.until(lambda: np.array_equal(results(shown, "scores"), before))


# --- Chapters --------------------------------------------------------------------------------------------------------


def test_the_space_bar_moves_the_third_control_and_a_clicker_turns_the_page(play):
    shown = play("ch=pooling")
    for kernel in ("boxcar", "epanechnikov", "constant", "gaussian"):
        shown.press(" ")
        assert shown.run("return R.querySelector('[aria-checked=true]').textContent") == kernel
    shown.browser._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": [
        {"type": "keyDown", "value": "\ue00f"}, {"type": "keyUp", "value": "\ue00f"}]}]})  # fmt: skip
    shown.browser.until(lambda: shown.texts("h1") == ["The dot product"])
    shown.press("p")
    shown.press("3")
    shown.browser.until(lambda: shown.texts("h1") == ["Additive attention"])
    assert shown.run("return R.querySelector('.mhac-root').hasAttribute('data-projector')")


def test_a_link_for_the_projector_shows_what_the_key_shows(play):
    """Its labels had the size of the desk's: the page asked how wide it was before it was in the document."""
    drawn = "return [...R.querySelectorAll('.mhac-picture canvas')].map((e) => e.toDataURL())"
    shown = play("ch=pooling&p=1", 1024)
    opened = shown.run(drawn)
    shown.press("p")
    shown.settle()
    assert shown.run(drawn) != opened
    shown.press("p")
    shown.settle()
    assert shown.run(drawn) == opened


@pytest.mark.parametrize("chapter", ["pooling", "dot", "additive", "heads", "masks", "root", "cost"])
def test_the_projector_has_no_small_words(turn, chapter):
    """Controls, and what a picture says beside its drawings, are read in the last row; 12 pixels were not."""
    shown = turn(f"ch={chapter}&p=1", 1024)
    small = shown.run(
        "return [...R.querySelectorAll('.mhac-fields *, .mhac-lanes-of > p')].filter((e) => e.offsetParent"
        " && e.childNodes.length && e.firstChild.nodeType === 3 && parseFloat(getComputedStyle(e).fontSize) < 16)"
        ".map((e) => e.textContent)"
    )
    assert small == []
