"""Where the pages are shown: notebooks, frames, old browsers, no JavaScript, light and dark surroundings."""

import html
import re

import pytest

from chromium import MATRIX, SENTENCE, Shown, weights_of
from mha_c.viz import view

pytest_plugins = ["browser_fixtures"]


# --- Where pages are shown -----------------------------------------------------------------------

DOCUMENT = (
    "<!DOCTYPE html><html><head><meta charset='utf-8'><meta http-equiv='Content-Security-Policy' "
    "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'{more}\"></head>"
    "<body {attributes}>{body}</body></html>"
)


def document(body, attributes="", more=""):
    return DOCUMENT.format(body=body, attributes=attributes, more=more)


def test_several_views_in_one_page(show, weights):
    first, second = view(weights, SENTENCE), view(weights[::-1], SENTENCE)
    page = document("".join(each._repr_html_() for each in (first, first, second)))
    show(page)
    browser = show(page).browser
    views = [Shown(browser, number) for number in range(3)]
    views[1].click(".mhac-card", at=1)
    views[2].click("header .mhac-choice", at=1)
    assert [each.chosen(".mhac-card") for each in views] == [0, 1, 0]
    assert [each.chosen("header .mhac-choice") for each in views] == [0, 0, 1]
    browser.run("scrollTo(0, 0)")
    views[0].focus(".mhac-matrix")
    views[0].press("2")
    assert [each.chosen(".mhac-card") for each in views] == [2, 1, 0]


def test_the_same_output_twice(show, weights):
    """A notebook may show one output in two places, under the same id."""
    blob = view(weights, SENTENCE)._repr_html_()
    element = blob[: blob.index("<script>")]
    shown = show(document(element + blob))
    shown.click(".mhac-card", at=1)
    assert [Shown(shown.browser, number).chosen(".mhac-card") for number in range(2)] == [1, 0]


def test_a_script_that_runs_before_its_element_is_there(show, weights):
    blob = view(weights)._repr_html_()
    cut = blob.index("<script>")
    shown = show(document(f"{blob[cut:]}<p id='end'></p><template id='late'>{blob[:cut]}</template>"))
    shown.browser.run("document.body.append(document.getElementById('late').content.cloneNode(true))")
    shown.browser.wait("return document.querySelector('[data-mhac-ready]')")


def test_inside_a_sandboxed_frame(show, weights):
    source = html.escape(view(weights, SENTENCE).html(), quote=True)
    frame = f"<iframe sandbox='allow-scripts' srcdoc=\"{source}\" width='1200' height='800'></iframe>"
    browser = show(document(frame, more="; frame-src 'self'")).browser
    browser.enter_frame("iframe")
    try:
        browser.wait("return document.querySelector('[data-mhac-ready]')")
        inside = Shown(browser)
        inside.focus(".mhac-matrix")
        inside.press("1")
        assert inside.chosen(".mhac-card") == 1
        left, top, width, height = inside.box(MATRIX)
        browser.move(left + 0.5 * width, top + 0.6 * height)  # relative to the frame, which WebDriver knows
        inside.settle()
        query, key, weight = inside.pair()
        assert weight == pytest.approx(weights[1, query, key], abs=6e-4)
    finally:
        browser.leave_frames()


def test_without_javascript_the_text_is_shown(browser, weights, tmp_path):
    page = view(weights, SENTENCE)
    browser.javascript(False)
    try:
        browser.open(page.save(tmp_path / "page.html").as_uri())
        browser.javascript(True)  # for the question only: the page has been read without it
        assert browser.run("return document.querySelector('pre').innerText").strip() == page.text.strip()
        assert browser.run("return document.querySelector('pre').offsetHeight") > 100
        assert browser.run("return document.querySelector('[data-mhac]').shadowRoot") is None
    finally:
        browser.javascript(True)


def test_with_javascript_the_text_makes_room(show, weights):
    shown = show(view(weights, SENTENCE))
    assert shown.browser.run("return document.querySelector('pre').offsetHeight") == 0


def test_where_the_data_cannot_be_read_the_text_stays(browser, weights, tmp_path):
    """A browser from before 2023 cannot inflate what is compressed."""
    page = view(weights_of(8, 80)).html().replace('mount("', 'window.DecompressionStream = undefined; mount("')
    page = re.sub(r"'sha256-[^']*'", "'unsafe-inline'", page)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    browser.open((tmp_path / "page.html").as_uri())
    browser.wait("return document.body.innerText.includes('The interactive view could not start')")
    assert browser.run("return document.querySelector('pre').offsetHeight") > 50


# --- Themes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "attributes", "theme"),
    [
        ("light", "data-vscode-theme-kind=vscode-dark", "dark"),
        ("dark", "data-vscode-theme-kind=vscode-light", "light"),
        ("light", "data-vscode-theme-kind=vscode-high-contrast", "dark"),
        ("dark", "data-vscode-theme-kind=vscode-high-contrast-light", "light"),
        ("light", "data-jp-theme-light=false", "dark"),
        ("dark", "data-jp-theme-light=true style='color: white'", "light"),
        ("light", "style='color: #eee; background: #111'", "dark"),
        ("dark", "style='color: #222; background: #fff'", "light"),
        ("light", "style='color: color(srgb 0.92 0.93 0.92)'", "dark"),
        ("dark", "style='color: color(display-p3 0.1 0.1 0.1)'", "light"),
        ("light", "style='color: oklch(0.92 0.01 100)'", "dark"),
        ("dark", "style='color: lab(12 5 100)'", "light"),
        ("dark", "style='color: #888'", "dark"),
        ("light", "style='color: #888'", "light"),
    ],
)
def test_the_theme_of_the_surroundings(show, weights, system, attributes, theme):
    show(document("", "")).browser.scheme(system)
    shown = show(document(view(weights, SENTENCE)._repr_html_(), attributes))
    shown.browser.scheme(system)
    shown.settle()
    assert theme_of(shown) == theme


def theme_of(shown):
    """What the elements and the canvas are painted with."""
    shown.settle()
    paper = shown.run("return getComputedStyle(R.querySelector('.mhac-root')).backgroundColor")
    (corner,) = shown.colours(".mhac-scale-bar canvas", 2, 4, 1, 1)
    dark = [int(re.findall(r"\d+", paper)[0]) < 100, corner & 255 < 100]
    return "dark" if all(dark) else "between" if any(dark) else "light"


def test_a_saved_page_follows_the_system(show, weights):
    shown = show(view(weights, SENTENCE))
    for scheme in ("dark", "light"):
        shown.browser.scheme(scheme)
        shown.browser.until(lambda scheme=scheme: theme_of(shown) == scheme)


def test_a_notebook_changes_its_theme(show, weights):
    shown = show(document(view(weights, SENTENCE)._repr_html_(), "data-jp-theme-light=true"))
    assert theme_of(shown) == "light"
    shown.browser.run("document.body.setAttribute('data-jp-theme-light', 'false')")
    assert theme_of(shown) == "dark"


FRAME = """
const frame = document.querySelector("iframe"), body = frame.contentDocument.body;
return body.querySelector("[data-mhac-ready]") && {
  theme: body.querySelector("[data-mhac]").dataset.theme, height: frame.getBoundingClientRect().height,
  empty: frame.getBoundingClientRect().height - body.getBoundingClientRect().height,
};
"""


def test_in_marimo_a_frame_is_as_high_as_its_page_and_takes_the_theme_of_what_is_around(show, weights):
    """What `_mime_` gives; test_marimo.py has marimo itself.  Line ends may get lost on the way."""
    kind, blob = view(weights, SENTENCE)._mime_()
    assert kind == "text/html" and "<script" not in blob  # or marimo would put it into a frame of 400 pixels
    browser = show(document(blob.replace("\n", " "), "style='color: #eee'")).browser
    first = browser.wait(FRAME)
    browser.until(lambda: 0 <= browser.run(FRAME)["empty"] < 1)
    assert first["theme"] == "dark"
    browser.run("document.body.style.color = '#111'")
    browser.until(lambda: browser.run(FRAME)["theme"] == "light")
    browser.run("document.querySelector('iframe').style.width = '380px'")
    browser.until(lambda: browser.run(FRAME)["height"] > first["height"] and browser.run(FRAME)["empty"] < 1)
    sandboxed = show(document(blob.replace("<iframe ", "<iframe sandbox='allow-scripts' "))).browser
    sandboxed.enter_frame("iframe")
    sandboxed.wait("return document.querySelector('[data-mhac-ready]') && window.frameElement === null")
    sandboxed.leave_frames()


def test_in_a_page_of_somebody_else_keys_are_not_taken(show, weights):
    """A notebook has keys of its own; a view that appears in it must not answer to them."""
    shown = show(document("<input autofocus>" + view(weights, SENTENCE)._repr_html_()))
    assert shown.run("return R.activeElement") is None
    assert "Keys work after a click here" in shown.run("return R.querySelector('footer').textContent")
