"""The chapters of the page in hands and on screens: keys, pointer, sizes, contrast, and nothing that grows."""

import re

import pytest

import needs
from playground_page import CLOSE, press, results

pytest_plugins = ["browser_fixtures", "playground_fixtures"]
IDS = ["pooling", "dot", "additive", "heads", "masks", "root", "cost"]
SAME, REST = 1000, 160  # milliseconds, of playground/address.js


# --- Measurements ----------------------------------------------------------------------------------------------------


def test_cost_measures_both_ways_when_it_opens(play):
    shown = play("ch=cost&largest=256&depth=32")
    shown.browser.until(lambda: "n = 256" in " ".join(shown.texts(".mhac-arith")))
    shown.browser.until(lambda: "Measure" in shown.texts(".mhac-button"))
    shown.press("6")
    shown.browser.until(lambda: "Draw again" in shown.texts(".mhac-button"))
    shown.press("7")  # a question from the hall takes no measurement away
    shown.browser.until(lambda: "Measure" in shown.texts(".mhac-button"))
    rows = results(shown, "measured")
    assert len(rows) == 3 and (rows[:, :2] > 0).all()
    naive, tiled = rows[-1][2:]
    assert naive > tiled and naive >= 0.5  # two arrays of 256 x 256 float32
    assert float(re.search(r"differ by at most (\S+)", " ".join(shown.texts(".mhac-arith"))).group(1)) < CLOSE


# Workers that never answer by themselves: a measurement lasts until it is given up, on every machine.
SILENT = """
window.silent = [];
window.Worker = class {
    constructor() { silent.push(this); }
    postMessage() {}
    terminate() { this.ended = true; }
};
"""
SEND = """
const way = {milliseconds: 1, mebibytes: 1};
const data = {n: 64, depth: 128, apart: 0, tiled: way, naive: way};
silent.filter((each) => each.ended).forEach((each) => each.onmessage({data}));
"""


def test_a_measurement_can_be_given_up_and_begun_again(play):
    shown = play("ch=masks")
    shown.browser.run(SILENT)
    shown.press("7")
    for word in ("Give up", "Measure", "Give up", "Measure", "Give up"):
        shown.browser.until(lambda word=word: word in shown.texts(".mhac-button"))
        press(shown, word)
        shown.browser.run(SEND)  # what one that was given up had on its way is not heard
        shown.settle()
        assert "n = 64" not in " ".join(shown.texts(".mhac-arith"))
    assert "Measure" in shown.texts(".mhac-button") and "Nothing is measured yet." in shown.texts(".mhac-arith")
    assert shown.browser.run("return silent.map((each) => each.ended)") == [True] * 3


# --- Screens ---------------------------------------------------------------------------------------------------------

WHERE = """
const box = (selector) => R.querySelector(selector).getBoundingClientRect();
const stage = R.querySelector('.mhac-picture');
const picture = box('.mhac-picture');
return [picture.top, picture.bottom, box('.mhac-explained').bottom, stage.scrollWidth - stage.clientWidth,
    stage.scrollHeight - stage.clientHeight, stage.querySelectorAll('canvas').length];
"""


@pytest.mark.by_day("chapter", "language", together=1)
@pytest.mark.parametrize("chapter", IDS)
@pytest.mark.parametrize("language", ["en", "de", "zh", "tr"])
def test_picture_and_formula_stand_on_the_first_screen(turn, chapter, language):
    for width, height in ((1024, 768), (1280, 720), (390, 844)):
        if language != "en" and width == 1280:
            continue
        for scheme in ("light", "dark") if language == "en" else ("light",):
            shown = turn(f"ch={chapter}&lang={language}", width, scheme, height)
            top, picture, formula, wide, high, drawn = shown.run(WHERE)
            assert drawn and wide <= 1 and high <= 0 and shown.overflow() == 0
            if width > 390:
                least = 430 if language == "en" else 320
                assert formula <= height and picture - top >= least, (chapter, language, width)
            else:  # after one scroll
                assert picture - top <= 640 and formula - top <= height + 100, (chapter, language)


# --- Hands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chapter", "key", "said"), [
    ("pooling", "ArrowRight", "query 2.55"), ("dot", "ArrowDown", "it looks at soup"),
    ("additive", "ArrowDown", "key 4"),
    ("heads", "ArrowRight", "Head 1, la"), ("masks", "ArrowRight", "did: 7 keys"), ("root", "ArrowLeft", "d = 256"),
])  # fmt: skip
def test_a_chapter_by_keyboard_alone(turn, chapter, key, said):
    """Digits open it, arrows change it, what has changed is announced; fewer than 12 stops lie before the picture."""
    shown = turn("ch=summary")
    shown.press(str(1 + IDS.index(chapter)))
    shown.browser.until(lambda: shown.run("return R.activeElement && R.activeElement.className") == "mhac-picture")
    assert shown.browser.run("return location.hash").startswith(f"#ch={chapter}")
    assert shown.texts("h1") and shown.browser.run("return document.title").startswith(shown.texts("h1")[0])
    shown.press(key)
    shown.settle()
    assert shown.run("return R.querySelector('[aria-live]').textContent").startswith(said)
    stops = shown.run(
        "const all = [...R.querySelectorAll('a[href], button, select, input, summary, [tabindex]')]"
        ".filter((e) => e.tabIndex >= 0 && e.offsetParent); return all.findIndex((e) => e.className === 'mhac-picture')"
    )
    assert 0 <= stops < 12


def test_keys_work_wherever_the_focus_is(play):
    """Behind a click on the margin, on a slider and in a list; a clicker turns chapters, and never moves a slider."""
    shown = play("ch=pooling")
    at = lambda: shown.browser.run("return location.hash")  # noqa: E731
    shown.browser.run("document.activeElement && document.activeElement.blur()")
    for key, there in (
        ("p", "p=1"),
        ("ArrowRight", "at=2.55"),
        ("Escape", "at=2.55"),
        ("3", "ch=additive"),
        ("1", "ch=pooling"),
    ):
        shown.press(key)
        shown.browser.until(lambda there=there: there in at())
    assert "p=1" not in at()
    for field, chapters in (
        ("input[type=range]", ["dot", "additive", "dot"]),
        ("header select", ["additive", "heads", "additive"]),
    ):
        shown.run("R.querySelector(arguments[0]).focus()", field)
        for key, chapter in zip(("PageDown", "PageDown", "PageUp"), chapters):
            shown.press(key)
            shown.browser.until(lambda chapter=chapter: at() == f"#ch={chapter}")


def test_the_slider_of_heads_has_as_many_as_there_are(play, clock):
    shown = play("ch=heads")
    clock.stop()
    most = lambda: shown.run("return R.querySelector('input[type=range]').max")  # noqa: E731
    assert most() == "1"
    shown.press("ArrowRight", "ArrowRight")  # there is no third head
    clock.passes(REST)
    assert shown.browser.run("return location.hash") == "#ch=heads&head=1"
    shown.press("Space")
    shown.browser.until(lambda: most() == "3")


def test_back_takes_a_change_back_and_reset_gives_the_preset(play, clock):
    """What changes one field again within SAME belongs to the change before."""
    shown = play("ch=pooling")
    clock.stop()
    seen = [shown.texts(".mhac-arith")]
    for key, rest in (("ArrowDown", 0), ("ArrowRight", SAME - 1), ("ArrowRight", SAME), ("ArrowRight", 0)):
        shown.press(key)
        clock.passes(rest)
        seen.append(shown.texts(".mhac-arith"))
    start, down, _, twice, _ = seen
    assert all(one != other for one, other in zip(seen, seen[1:]))
    for before in (twice, down, start):
        shown.browser.run("history.back()")
        shown.browser.until(lambda before=before: shown.texts(".mhac-arith") == before)
    shown.press("ArrowRight")
    press(shown, "Reset")
    shown.settle()
    assert shown.texts(".mhac-arith") == start


def test_a_hand_drags_the_query(turn):
    shown = turn("ch=pooling")
    left, top, width, height = shown.box(".mhac-picture canvas")
    shown.browser.drag((left + width * 0.3, top + height / 2), (left + width * 0.8, top + height / 2))
    at = lambda: re.search(r"at=([\d.]+)", shown.browser.run("return location.hash"))  # noqa: E731
    shown.browser.until(lambda: at() and 3.5 < float(at().group(1)) < 4.5)


COUNT = "Memory.getDOMCounters"


MOVED = ["ch=pooling", *(["part=tiles", "ch=masks", "ch=root", "ch=all&heads=2"] if needs.NIGHTLY else [])]


@pytest.mark.parametrize("address", MOVED)
def test_a_hundred_moves_leave_nodes_and_listeners_as_they_were(play, address):
    shown = play(address)
    browser = shown.browser

    def moved(times):
        browser.run(
            "const [times] = arguments; const R = document.querySelector('[data-mhac]').shadowRoot;"
            " return (async () => {"
            " const box = R.querySelector('input[type=range]') || R.querySelector('input[type=number]');"
            " for (let i = 0; i < times; i++) { box.value = 1 + (i % 2); box.dispatchEvent(new Event('input'));"
            " await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))); }"
            " await new Promise((done) => setTimeout(done, 200)); })()",
            times,
        )
        browser.devtools("HeapProfiler.collectGarbage")
        found = browser.devtools(COUNT)
        return found["nodes"], found["jsEventListeners"]

    nodes, listeners = moved(4)
    for _ in range(4):
        more_nodes, more_listeners = moved(25)
    assert more_nodes <= nodes * 1.2 + 100 and more_listeners <= listeners + 60  # one a move would be 100


@pytest.mark.parametrize("address", [
    "q=" + ";".join(["1,2,3,4"] * 4000), "text=" + "+".join(["w"] * 200),
    "ch=heads&heads=7", "ch=nothing&width=3",
    "n=64&m=64&d=16&from=drawn&heads=16",
    "%00%ff&&&=", "ch=pooling&at=1e999&width=-3", "len=" + "9," * 190, "from=encoder&heads=8",
])  # fmt: skip
def test_an_address_of_any_content_answers_within_a_second(play, address):
    shown = play(address)
    assert 0 < shown.browser.thread_seconds() < 1
    assert shown.texts("h1")


CONTRAST = """
const level = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((c) => level(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
function paper(e) {
    for (; e; e = e.parentElement) {
        const color = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$/.test(color)) return color;
    }
    return getComputedStyle(R.querySelector('.mhac-root')).backgroundColor;
}
const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
const low = [];
for (const e of R.querySelectorAll('*')) {
    const style = getComputedStyle(e);
    if (!e.offsetParent || e.tagName === 'STYLE') continue;
    const written = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (written && ratio(style.color, paper(e)) < 4.5) low.push(['text', e.className || e.tagName, e.textContent]);
    const bordered = /^(INPUT|SELECT|TEXTAREA)$/.test(e.tagName) ? e.type !== 'range' : e.className === 'mhac-button';
    if (bordered && ratio(style.borderTopColor, paper(e.parentElement)) < 3) low.push(['border', e.className]);
}
return low;
"""


@pytest.mark.by_day("address", "scheme", together=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", ["ch=dot", "ch=heads", "ch=summary", "ch=all", "part=gradients", "part=tiles"])
def test_text_has_a_contrast_of_four_and_a_half_and_borders_of_three(turn, address, scheme):
    shown = turn(address, 1024, scheme)
    shown.run("R.querySelectorAll('details').forEach((each) => each.open = true)")
    shown.settle()
    assert shown.run(CONTRAST) == []
