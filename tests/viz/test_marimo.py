"""Pages in marimo, in a real Chromium: each as high as its content, without a bar, and as dark as the notebook.

marimo lives in an environment of its own: `make test-marimo` makes it, and says where by MHA_C_MARIMO.
"""

import os
import socket
import subprocess
import urllib.request

import pytest

import chromium
import needs

PYTHON = os.environ.get("MHA_C_MARIMO")
if not PYTHON:
    pytest.skip("make test-marimo", allow_module_level=True)

NOTEBOOK = """
# /// script
# [tool.marimo.display]
# theme = "{theme}"
# ///
import marimo
app = marimo.App(width="full")

@app.cell
def _():
    import mha_c, numpy as np
    from mha_c import teach, viz
    rng = np.random.default_rng(0)
    return mha_c, np, rng, teach, viz

@app.cell
def _(mha_c, rng, viz):
    viz.view(mha_c.masked_softmax(rng.standard_normal((3, 6, 6)), [6, 5, 4]), tokens="the cat sat on the mat".split())
    return

@app.cell
def _(rng, teach):
    teach.steps(*rng.standard_normal((3, 5, 4)), valid_lens=3)
    return

@app.cell
def _(rng, teach):
    teach.tiles(*rng.standard_normal((3, 5, 4)), block_size=2)
    return

@app.cell
def _(teach):
    def attention(q, k, v, valid_lens=None):
        return teach.book.masked_softmax(q @ k.swapaxes(1, 2) / q.shape[-1], valid_lens) @ v
    teach.check(attention, "dot_product")
    return

if __name__ == "__main__":
    app.run()
"""
FRAMES = """
return [...document.querySelectorAll('iframe')].map((frame) => {
  const inside = frame.contentDocument, root = inside.querySelector('[data-mhac-ready]');
  return root && { theme: root.dataset.theme, height: frame.getBoundingClientRect().height, title: frame.title,
    opaque: getComputedStyle(inside.documentElement).colorScheme !== getComputedStyle(frame).colorScheme,
    bar: inside.documentElement.scrollHeight > inside.documentElement.clientHeight + 1,
    empty: frame.getBoundingClientRect().height - inside.body.getBoundingClientRect().height };
});
"""


@pytest.fixture(scope="module")
def window():
    """A browser that reaches this machine, and nothing else."""
    opened = chromium.Browser(*needs.browser(), reached="127.0.0.1")
    yield opened
    opened.close()


@pytest.fixture(params=["light", "dark"])
def marimo(request, tmp_path):
    """(the address of a running notebook, its theme)"""
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(theme=request.param))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", "notebook.py", "--headless", "--no-token", "--host", "127.0.0.1", "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen([PYTHON, "-m", "marimo", "-q", *words], cwd=tmp_path, env=environment, stdout=log,
                                  stderr=log)  # fmt: skip
        yield f"http://127.0.0.1:{port}/", request.param
        server.terminate()
        server.wait(needs.HANGS)


def opened(window, address):
    def answers():
        try:
            return urllib.request.urlopen(address, timeout=5)
        except OSError:
            return None

    window.until(answers).close()
    window.open(address)


def pages(window):
    """The three pages, once they are there."""
    frames = window.run(FRAMES)
    return frames if len(frames) == 3 and all(frames) else []


def fits(frame):
    """No bar, and less than a pixel below the content."""
    return not frame["bar"] and 0 <= frame["empty"] < 1


def fitting(window, theme):
    """The three pages as they are to be: they take their theme and their height a moment after they are there."""

    def look():
        frames = pages(window)
        right = lambda x: fits(x) and x["height"] > 500 and x["theme"] == theme and not x["opaque"]  # noqa: E731
        return frames if all(map(right, frames)) else []

    return window.until(look)


@pytest.mark.parametrize("width", [1280, 500])
def test_pages_are_as_high_as_their_content_and_as_dark_as_the_notebook(window, marimo, width, tmp_path):
    address, theme = marimo
    window.size(width, 3000)
    opened(window, address)
    try:
        frames = fitting(window, theme)
    finally:
        window.screenshot(tmp_path / "marimo.png")
    assert [frame["title"] for frame in frames][:2] == ["Attention weights", "Attention, step by step"]
    window.size(1780 - width, 3000)  # and again after the window has changed

    def again():
        others = pages(window)
        return others and all(map(fits, others)) and others != frames

    assert window.until(again)
    assert [each for each in window.console() if each["message"].startswith("about:srcdoc")] == []  # ours
    said = "it divides scores by d, not by sqrt(d)"
    assert window.wait("return document.body.innerText.includes(arguments[0])", said)
