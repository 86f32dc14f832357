"""Fixtures of the playground's tests; their files name this module in pytest_plugins, and browser_fixtures.

The page is what `make playground` has made; one that is older than its sources is not tested but asked for.
"""

import itertools
from pathlib import Path

import pytest

import needs
from chromium import Shown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "build" / "playground.html"
SOURCES = [
    "tools/playground.*",
    "mha_c/viz/playground_page/*.[cj]s*",
    "mha_c/viz/playground_page/*/*",
    "mha_c/viz/*.js",
    "mha_c/viz/*.css",
    "csrc/mha.h",
    "csrc/[aklr]*/*",
]


@pytest.fixture(scope="session")
def page():
    newest = max(path.stat().st_mtime for pattern in SOURCES for path in ROOT.glob(pattern))
    if not PAGE.exists() or PAGE.stat().st_mtime < newest:
        needs.skip_or_fail("needs build/playground.html, no older than its sources (make playground)")
    return PAGE


@pytest.fixture
def play(browser, page):
    """Opens the page at an address behind #, as a reader of a slide does; at the end the console must be empty."""
    browser.javascript(True)
    browser.move(1, 1)
    browser.console()

    def open_page(state="", width=1280, scheme="light", height=900, opened=None):
        browser.size(width, height)
        browser.scheme(scheme)
        # Behind another ? it is another page, which is opened, not turned to.
        browser.open(f"{page.as_uri()}?{opened or next(NUMBERS)}" + ("#" + state if state else ""))
        browser.wait("return document.querySelector('[data-mhac-ready]') !== null")
        shown = Shown(browser)
        shown.settle()
        shown.settle()  # the view draws its first picture a moment after the page is there
        return shown

    yield open_page
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


NUMBERS = itertools.count()
TURN = """
const [address] = arguments, root = document.querySelector('[data-mhac]').shadowRoot, there = location.hash;
const part = () => root.querySelector('.mhac-part').firstChild, before = part();
return new Promise((done) => {
    addEventListener('hashchange', () => done(part() !== before), {once: true});
    location.hash = address;
    if (location.hash === there) location.hash = there + '&'; // the same in other words
});
"""


@pytest.fixture
def turn(play, browser, page):
    """One page turned to an address, as by a link to it: all that it shows is built anew, in a third of the time that
    opening it takes.  A test that changes what scripts find in a page opens one by `play`, which no other test gets."""

    def turn_page(state, width=1280, scheme="light", height=900):
        if not browser.run("return location.href").startswith(f"{page.as_uri()}?turned#"):
            return play(state, width, scheme, height, opened="turned")
        browser.size(width, height)
        browser.scheme(scheme)
        assert browser.run(TURN, "#" + state), f"nothing was built anew for {state}"
        shown = Shown(browser)
        shown.settle()
        shown.settle()
        return shown

    return turn_page


@pytest.fixture
def call(browser, page):
    """mha_c.attention in the page: what it returns, or the text of its error.  It leaves nothing there, so that one
    page, once open, serves test after test: the page itself puts an empty state, #, behind its address."""
    if browser.run("return location.href").rstrip("#") != page.as_uri():
        browser.javascript(True)
        browser.open(page.as_uri())
        browser.wait("return document.querySelector('[data-mhac-ready]') !== null")
        browser.run("return mha_c.ready")
    browser.console()

    def attention(**options):
        return browser.run(
            "try { return mha_c.attention(arguments[0]); } catch (error) { return error.message; }", options
        )

    yield attention
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
