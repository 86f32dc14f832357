"""Fixtures of the browser tests; their files name this module in pytest_plugins.  One Chromium serves them all."""

import pytest

import needs
from chromium import HIGH, SENTENCE, WIDE, Browser, Clock, Shown, weights_of


@pytest.fixture(scope="session")
def browser():
    opened = Browser(*needs.browser())
    yield opened
    opened.close()


@pytest.fixture
def clock(browser):
    """The clock of the page that a test opens, to be stopped there and played; the next test may use the same page."""
    played = Clock(browser)
    yield played
    played.end()


@pytest.fixture(scope="module")
def weights():
    return weights_of(4, len(SENTENCE))


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page from the disk and waits until it is drawn; at the end the console must be empty."""
    browser.size(WIDE, HIGH)
    browser.scheme("light")
    browser.javascript(True)
    browser.open("about:blank")
    browser.move(1, 1)  # where a test before has left the pointer, it would point at something
    browser.console()

    def open_page(page, name="page.html"):
        path = tmp_path / name
        if isinstance(page, str):
            path.write_text(page, encoding="utf-8")
        else:
            page.save(path)
        browser.open(path.as_uri())
        browser.wait("return document.querySelectorAll('[data-mhac]:not([data-mhac-ready])').length === 0")
        shown = Shown(browser)
        shown.settle()  # a view takes its size from the first layout, and draws in the frame after
        return shown

    yield open_page
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
