"""The lecture on a projector of 1024 x 768: larger letters, and each text of a picture whole in a place of its own."""

import numpy as np
import pytest

import needs

pytest_plugins = ["browser_fixtures", "playground_fixtures"]
CHAPTERS = ["pooling", "dot", "additive", "heads", "masks", "root", "cost"]
WATCH = """
const P = CanvasRenderingContext2D.prototype, write = P.fillText, there = window.written;
window.written = [];
if (!there) P.fillText = function (text, x, y) {
    const {a, b, c, d, e, f} = this.getTransform(), m = this.measureText(text), canvas = this.canvas;
    const [left, top] = [x - m.actualBoundingBoxLeft, y - m.actualBoundingBoxAscent];
    const [right, low] = [x + m.actualBoundingBoxRight, y + m.actualBoundingBoxDescent];
    const corners = [[left, top], [right, top], [right, low], [left, low]]
        .map(([x, y]) => [a * x + c * y + e, b * x + d * y + f]);
    window.written.push({text, canvas, corners, size: parseFloat(this.font.match(/[\\d.]+px/)[0])});
    return write.call(this, text, x, y);
};
"""

# All texts of the picture: what is written on its canvases, and what stands beside them.
TEXTS = """
const stage = R.querySelector('.mhac-picture'), place = stage.getBoundingClientRect();
const framed = (b) => [[b.left, b.top], [b.right, b.top], [b.right, b.bottom], [b.left, b.bottom]];
const found = window.written.filter((each) => stage.contains(each.canvas)).map(({text, canvas, corners, size}) => {
    const box = canvas.getBoundingClientRect();
    const scale = box.width / canvas.width;
    return {text, size, corners: corners.map(([x, y]) => [box.left + x * scale, box.top + y * scale]), frame: box};
});
const walk = document.createTreeWalker(stage, NodeFilter.SHOW_TEXT);
for (let node; (node = walk.nextNode());) {
    const range = document.createRange(), owner = node.parentElement;
    if (!node.data.trim() || !owner.offsetParent) continue;
    range.selectNodeContents(node);
    for (const b of range.getClientRects()) {
        found.push({text: node.data, size: parseFloat(getComputedStyle(owner).fontSize), corners: framed(b),
            frame: place, line: owner.closest('figcaption, p, .mhac-through, .mhac-thumbs span')});
    }
}
// Two convex shapes are apart if a side of one of them has the other behind it.
const behind = (a, b) => a.some(([x, y], i) => {
    const [u, v] = a[(i + 1) % a.length];
    return b.every(([p, q]) => ((p - x) * (v - y) - (q - y) * (u - x)) / Math.hypot(u - x, v - y) > -0.5);
});
const wrong = [];
found.forEach((a, i) => {
    const {left, right, top, bottom} = a.frame;
    if (a.text.endsWith('…')) wrong.push(['short', a.text]);
    const inside = ([x, y]) => x > left - 0.5 && x < right + 0.5 && y > top - 0.5 && y < bottom + 0.5;
    if (!a.corners.every(inside)) wrong.push(['cut', a.text]);
    for (const b of found.slice(i + 1)) {
        if (a.line && a.line === b.line) continue;
        if (!behind(a.corners, b.corners) && !behind(b.corners, a.corners)) wrong.push(['over', a.text, b.text]);
    }
});
const lines = R.querySelector('.mhac-explained').getBoundingClientRect().bottom;
return {wrong, lines, texts: found.map((each) => each.text), sizes: found.map((each) => each.size), high: place.height,
    letters: parseFloat(getComputedStyle(R.querySelector('.mhac-arith')).fontSize),
    over: Math.max(stage.scrollWidth - stage.clientWidth, stage.scrollHeight - stage.clientHeight)};
"""
WHOLE = {
    "ch=dot&lang=en": ["s = q · k / √d", "exp(s − m)", "o = Σ α v"], "ch=additive&lang=en": ["−1.58", "−2.25"],
    "ch=heads&lang=en": ["<bos> → la", "voiture → est", "0.94", "0.88"],
    "ch=masks&lang=en": ["the", "cat", "did", "not", "−∞"],
}  # fmt: skip


LANGUAGES = ("en", "de", "zh", "tr") if needs.NIGHTLY else ("en", "de")  # German words are the longest
ADDRESSES = [
    *(f"ch={chapter}&lang={language}" for chapter in CHAPTERS for language in LANGUAGES),
    "ch=dot&root=no&query=10", "ch=additive&gain=16", "ch=heads&heads=8", "ch=heads&heads=32",
    "ch=masks&causal=yes&len=11",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_the_projector_has_larger_letters_and_whole_texts(turn, address):
    """On 1024 x 768 no two texts of a picture overlap, and none is cut or made short, with the key p and without."""
    shown = turn(address, 1024, height=768)
    shown.browser.run(WATCH)
    shown.press("p")
    shown.settle()
    large = shown.run(TEXTS)
    assert large["wrong"] == [] and set(WHOLE.get(address, [])) <= set(large["texts"])
    assert large["lines"] <= 768 and large["over"] <= 0 and large["high"] > 300 and large["letters"] >= 18
    assert shown.browser.run("return document.documentElement.scrollHeight") <= 768, "nothing to scroll"
    shown.press("p")
    shown.browser.until(lambda: "p=1" not in shown.browser.run("return location.hash"))  # after a rest of 160 ms
    shown.settle()
    usual = shown.run(TEXTS)
    assert usual["wrong"] == [] and usual["lines"] <= 768
    assert np.median(large["sizes"]) > np.median(usual["sizes"]) and min(large["sizes"]) > 0.9 * min(usual["sizes"])


MEASURED = """
const times = arguments[0];
window.Worker = class {
    terminate() {}
    postMessage({sizes, depth}) {
        const send = (data) => setTimeout(() => this.onmessage({data}));
        sizes.forEach((n, i) => send({n, depth, apart: 0, tiled: {milliseconds: times[i][1], mebibytes: n / 1000},
            naive: {milliseconds: times[i][0], mebibytes: n * n / 2 ** 17}}));
        send({done: true});
    }
};
"""


@pytest.mark.by_day(("naive", "tiled"), "language", together=1)
@pytest.mark.parametrize("language", ["en", "de", "zh", "tr"])
@pytest.mark.parametrize(
    ("naive", "tiled"), [(3, 2), (2, 5), (2, 2.001), (2, 2), (1, 9), (1e5, 1e6), (0.1, 0.2), (1500, 2000)]
)
def test_the_names_of_both_ways_meet_at_no_measurement(play, naive, tiled, language):
    """A busy machine may measure anything, even the tiled way slower than the naive one."""
    shown = play(f"ch=masks&lang={language}", 1024, height=768)
    shown.browser.run(WATCH)
    shown.browser.run(MEASURED, [[0.1, 0.2], [0.3, 0.2], [1, 0.7], [4, 3], [naive, tiled]])
    shown.press("7")
    shown.browser.until(lambda: "n = 1024" in " ".join(shown.texts(".mhac-arith")))
    shown.settle()
    assert shown.run(TEXTS)["wrong"] == []
