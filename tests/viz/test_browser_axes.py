"""What stands at the axes of the matrix, read from what the canvas is told to write: tokens or positions."""

import pytest

from chromium import HIGH, MATRIX, weights_of
from mha_c.viz import view

pytest_plugins = ["browser_fixtures"]


LONG = "internationalization antidisestablishmentarianism did not incomprehensibility because".split()
RECORD = """
const base = R.querySelector('.mhac-base'), fill = CanvasRenderingContext2D.prototype.fillText;
window.written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
  if (this.canvas === base && !/^([.][0-9][0-9]|1)$/.test(text)) window.written.push(text);
  return fill.call(this, text, ...at);
};
"""


def written_again(shown):
    """What stands at the axes, after everything was drawn once more."""
    shown.run(RECORD)
    shown.click(".mhac-scale .mhac-choice", at=1)
    return shown.browser.run("return window.written")


@pytest.mark.by_day("width", ("heads", "repeats"), together=1)
@pytest.mark.parametrize("width", [1280, 700, 420])
@pytest.mark.parametrize(("heads", "repeats"), [(1, 1), (4, 1), (4, 2), (1, 8)])
def test_labels_are_all_tokens_or_all_positions(show, width, heads, repeats):
    """Long ones are slanted and cut at the same length on both axes; on each axis positions stand for all or none."""
    tokens = LONG * repeats
    shown = show(view(weights_of(heads, len(tokens)), tokens))
    shown.browser.size(width, HIGH)
    shown.settle()
    written = written_again(shown)
    if repeats == 8:
        assert set(written) <= {str(i) for i in range(len(tokens))}
        return
    rows, columns = written[: len(tokens)], written[len(tokens) : 2 * len(tokens)]
    assert rows == columns and len(rows) == len(tokens)
    for label, token in zip(rows, tokens):
        assert label == token or (label.endswith("…") and token.startswith(label[:-1]) and len(label) > 8)


@pytest.mark.parametrize("tokens", [None, list("abcdefgh" * 8)])
@pytest.mark.parametrize("width", [1280, 420])
def test_numbers_of_places_are_whole(show, width, tokens):
    """Also where the tokens, which have no room, are narrower than the numbers that stand for them."""
    shown = show(view(weights_of(2, 64), tokens))
    shown.browser.size(width, HIGH)
    shown.settle()
    written = written_again(shown)
    assert "10" in written and set(written) <= {*map(str, range(64)), *"abcdefgh"}


PLACED = """
const base = R.querySelector('.mhac-base'), over = R.querySelector('.mhac-over'), ratio = devicePixelRatio;
const P = CanvasRenderingContext2D.prototype, text = P.fillText, rect = P.fillRect;
window.labels = []; window.covers = [];
const at = (context, x, y) => {
  const m = context.getTransform();
  return [(m.a * x + m.e) / ratio, (m.d * y + m.f) / ratio];
};
P.fillText = function (said, x, y) {
  const wide = this.measureText(said).width, [left, middle] = at(this, x, y);
  const start = {right: left - wide, center: left - wide / 2}[this.textAlign];
  const high = this.textBaseline === "middle" ? middle : middle - 4.5;
  if (this.canvas === base && /^[0-9]+$/.test(said)) window.labels.push([start, high - 4.5, start + wide, high + 4.5]);
  return text.call(this, said, x, y);
};
P.fillRect = function (x, y, w, h) {
  const [left, top] = at(this, x, y);
  const cover = [left, top, left + w, top + h, this.fillStyle];
  if (this.canvas === over && h > 8 && w > 8 && w < 200) window.covers.push(cover);
  return rect.call(this, x, y, w, h);
};
"""


@pytest.mark.parametrize("tokens", [33, 150])
def test_a_marked_place_hides_its_neighbours_numbers_as_a_whole(show, tokens):
    shown = show(view(weights_of(2, tokens)))
    shown.run(PLACED)
    for choice in (0, 1):  # one of them draws everything again
        shown.click(".mhac-scale .mhac-choice", at=choice)
    labels = shown.browser.run("return window.labels")
    assert len(labels) > 20
    hidden = 0
    for across, down in [(0.3, 0.4), (0.52, 0.61), (0.72, 0.33)]:
        shown.browser.run("window.covers = []")
        shown.point(MATRIX, across, down)
        covers = shown.browser.run("return window.covers")
        assert {cover[4] for cover in covers} == {"#ffffff"}  # the paper's
        for left, top, right, bottom in labels:
            met = [c for c in covers if c[0] < right - 1 and c[2] > left + 1]
            over = [c for c in met if c[1] < bottom - 1 and c[3] > top + 1]
            whole = [c for c in over if c[0] <= left + 1 and c[2] >= right - 1 and c[1] <= top + 1 < bottom - 1 <= c[3]]
            assert not over or whole
            hidden += bool(over)
    assert hidden >= 6
