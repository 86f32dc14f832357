"""The players of teach in a real Chromium: stepping, playing, pointing, at every size."""

import re

import numpy as np
import pytest

import mha_c
from chromium import HIGH
from mha_c import teach

pytest_plugins = ["browser_fixtures"]
STEP = 3200  # milliseconds, of mha_c/viz/teach.js


@pytest.fixture(scope="module")
def steps():
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((n, 4)).round(2) for n in (3, 5, 5))
    return teach.steps(q, k, v, valid_lens=4, tokens=("il a perdu".split(), "he lost his dog <pad>".split()))


def still(shown):
    """Pictures that appear row by row are complete: they have been the same for ten frames."""
    pictures = []

    def settled():
        shown.settle()
        pictures.append(shown.run("return [...R.querySelectorAll('canvas')].map(canvas => canvas.toDataURL()).join()"))
        return len(pictures) > 5 and len({*pictures[-6:]}) == 1

    shown.browser.until(settled)


def step_of(shown):
    return shown.text(".mhac-step").split("   ")[-1]


def test_stepping_by_button_and_by_key(show, steps):
    shown = show(steps)
    titles = ["Queries, keys, values", "Scores", "Scaled", "Masked", "Weights", "Output"]
    assert step_of(shown) == titles[0]
    for title in titles[1:]:
        shown.click(".mhac-primary")
        assert step_of(shown) == title
    assert shown.run("return R.querySelector('.mhac-primary').disabled")
    shown.focus(".mhac-root")
    shown.press("ArrowLeft", "ArrowLeft")
    assert step_of(shown) == "Masked"
    shown.click(".mhac-dot", at=1)
    assert step_of(shown) == "Scores"
    assert len(shown.texts(".mhac-grid")) == 3
    still(shown)
    assert len(shown.colours(".mhac-grid:last-child canvas")) > 20


def test_pointing_at_a_cell_explains_it(show, steps):
    shown = show(steps)
    shown.click(".mhac-dot", at=1)
    still(shown)
    shown.point(".mhac-grid:last-child canvas", across=0.5, down=0.5)
    query, key = re.match(r"(\w+) → (\S+):", shown.text(".mhac-sum")).groups()
    i, j = steps.inputs.query_tokens.index(query), steps.inputs.key_tokens.index(key)
    assert i == 1 and shown.text(".mhac-sum").replace("−", "-").endswith(f"= {steps.scores[i, j]:.2f}")
    shown.focus(".mhac-root")
    shown.press("ArrowDown")
    assert shown.text(".mhac-sum").startswith("perdu → ")
    shown.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert shown.text(".mhac-sum").replace("−", "-").endswith(f"= {steps.weights[2, j]:.2f}")


def test_playing_and_pausing(show, clock, steps):
    shown = show(steps)
    clock.stop()
    shown.focus(".mhac-root")
    shown.press(" ")
    assert shown.texts(".mhac-controls .mhac-button")[1] == "Pause" and step_of(shown) == "Scores"
    clock.passes(STEP - 1)
    assert step_of(shown) == "Scores"
    clock.passes(1)
    assert step_of(shown) == "Scaled"
    shown.press(" ")
    assert shown.texts(".mhac-controls .mhac-button")[1] == "Play"
    clock.passes(2 * STEP)
    assert step_of(shown) == "Scaled"


def test_the_tiles(show, steps):
    tiles = steps.tiles(2)
    shown = show(tiles)
    assert len(shown.texts(".mhac-dot")) == 3 * 3 + 1
    assert shown.texts(".mhac-memory .mhac-note")[1] == "6 of 15"
    shown.focus(".mhac-root")
    shown.press(*["ArrowRight"] * 5)
    assert step_of(shown) == "Add the tile, keys 2 to 3"
    assert shown.text(".mhac-sum").endswith(f"= {tiles.tiles[1].new_sum[0]:.2f}")
    shown.press(*["ArrowRight"] * 9)
    assert step_of(shown) == "Divide once"
    assert shown.texts(".mhac-memory .mhac-note")[1] == "0 of 15"
    assert shown.text(".mhac-sum").replace("−", "-").endswith(f"= {tiles.output[0, 0]:.2f}")


@pytest.mark.by_day("width", "size", together=1)
@pytest.mark.parametrize("width", [340, 700, 1280])
@pytest.mark.parametrize("size", [(1, 1, 1), (8, 8, 8), (20, 30, 16), (64, 64, 64)])
def test_players_of_every_size(show, width, size):
    rng = np.random.default_rng(5)
    queries, keys, features = size
    q, k, v = (rng.standard_normal((n, features)) for n in (queries, keys, keys))
    shown = show(teach.steps(q, k, v))
    shown.browser.size(width, HIGH)
    shown.focus(".mhac-root")
    for _ in range(5):
        shown.press("ArrowRight")
        assert shown.overflow() == 0
    assert step_of(shown) == "Output"


def test_a_saved_player_answers_keys_at_once_and_says_so(show, steps):
    shown = show(steps)
    shown.press("ArrowRight")
    assert step_of(shown) == "Scores"
    assert "Keys work as soon as the page is open" in shown.run("return R.querySelector('footer').textContent")


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (1024, 768)])
def test_a_page_of_its_own_stands_on_a_projectors_screen(show, browser, steps, width, height):
    layer = mha_c.MultiHeadAttention(num_hiddens=4, num_heads=2, dropout=0.0, rng=0)
    X = np.random.default_rng(4).standard_normal((1, 3, 4)).round(1)
    layer(X, X, X)
    for player in (steps, steps.tiles(2), teach.multi_head(layer, tokens="the cat sat")):
        browser.size(width, height)
        shown = show(player)
        for _ in range(len(player.data["steps"])):
            assert shown.browser.run("return document.documentElement.scrollHeight") <= height
            if not shown.run("return R.querySelector('.mhac-primary').disabled"):
                shown.click(".mhac-primary")
