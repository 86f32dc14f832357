"""Makes the pictures of docs/*.md and README.md from runs: notebooks are executed, pages shown in Chromium.

    python tools/pictures.py             # writes docs/img/*.png; needs what notebooks need, torch and chromium
    python tools/pictures.py playground  # those of build/playground.html alone; needs chromium
    python tools/pictures.py pages       # those of the boxes of docs/heat-maps.md and docs/seeing.md alone

The pages are those that the notebooks show, and the figures those that they draw; those of docs/heat-maps.md and
docs/seeing.md are made by the box above them.
"""

import base64
import io
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chromium import Browser, Shown  # noqa: E402

FOLDER = ROOT / "docs" / "img"
DRAWN = "return document.querySelectorAll('[data-mhac]:not([data-mhac-ready])').length === 0"
FRAME = '<!DOCTYPE html><meta charset="utf-8"><body style="margin:8px;background:#fff">'


def outputs(name):
    """What the notebook shows, in order: [("text/html", page), ("image/png", bytes), ...]."""
    import jupytext
    import nbclient

    notebook = jupytext.read(ROOT / "examples" / "notebooks" / f"{name}.md")
    notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith("%pip")]
    folder = {"metadata": {"path": str(ROOT / "examples" / "notebooks")}}
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:
                yield "text/html", data["text/html"]
            elif "image/png" in data:
                yield "image/png", base64.b64decode(data["image/png"])


CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def written_by_the_page(page, folder, file):
    """What the box of the page that names the file writes into the folder."""
    os.chdir(folder)
    (box,) = [code for code in CODE.findall((ROOT / "docs" / page).read_text(encoding="utf-8")) if file in code]
    exec(box, {})
    return folder / file


def shown(browser, blob, width, hands, scheme="light"):
    """A screenshot of a page at double density, after `hands` have done something in it."""
    with tempfile.TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        page.write_text(blob if blob.startswith("<!") else FRAME + blob, encoding="utf-8")
        browser.size(width, 800, 1.5)
        browser.scheme(scheme)
        browser.open(page.as_uri())
        browser.wait(DRAWN)
        view = Shown(browser)
        hands(view)
        bottom = browser.run("return document.querySelector('[data-mhac]').getBoundingClientRect().bottom")
        browser.size(width, round(bottom) + 8, 1.5)
        view.settle()
        browser.screenshot(picture)
        return picture.read_bytes()


PLAYGROUND = {  # picture: width, height or None for all of the page, density, colours, what the address says
    "playground": (1024, 900, 1, "light", "ch=all"),
    "playground-why": (1024, 900, 1, "light", "part=gradients&causal=top_left&row=4"),
    "playground-phone": (390, 844, 1, "light", "ch=dot"),
    "lecture-1-pooling": (1024, 768, 1, "light", "ch=pooling"),
    "lecture-2-dot": (1024, 768, 1, "light", "ch=dot&last=cold"),
    "lecture-3-additive": (1024, 768, 1, "light", "ch=additive"),
    "lecture-4-heads": (1024, 768, 1, "light", "ch=heads"),
    "lecture-5-masks": (1024, 768, 1, "light", "ch=masks"),
    "lecture-6-root": (1024, 768, 1, "light", "ch=root"),
    "lecture-7-cost": (1024, 768, 1, "light", "ch=cost&largest=2048"),
}
MEASURE = "const b = [...R.querySelectorAll('button')].find((each) => each.textContent === 'Measure'); if (b) b.click()"


def playground(browser):
    address = (ROOT / "build" / "playground.html").as_uri()
    for name, (width, height, density, scheme, state) in PLAYGROUND.items():
        browser.size(width, height or 900, density)
        browser.scheme(scheme)
        browser.open("about:blank")
        browser.open(f"{address}#{state}")
        browser.wait(DRAWN)
        view = Shown(browser)
        view.run(MEASURE)  # the last chapter shows what was measured
        browser.until(lambda view=view: "Give up" not in view.texts(".mhac-button"))
        browser.run("return new Promise((done) => setTimeout(done, 500))")
        view.run("R.activeElement && R.activeElement.blur()")  # without the frame of what has the focus
        whole = browser.run("return document.documentElement.scrollHeight")
        browser.size(width, height or whole, density)
        view.settle()
        with tempfile.TemporaryDirectory() as folder:
            browser.screenshot(Path(folder) / "page.png")
            write(name, (Path(folder) / "page.png").read_bytes())


def press_next(view, times):
    for _ in range(times):
        view.run("[...R.querySelectorAll('button')].find(b => b.textContent === 'Next').click()")
    view.browser.run("return new Promise(done => setTimeout(done, 1500))")  # numbers move to their places


def without_focus(view):
    view.run("if (R.activeElement) R.activeElement.blur()")


def heads_and_matrix(data):
    """The heads and the matrix of a page that is 760 wide, at 1.5 pixels a point: as wide as a page of the site."""
    part, file = Image.open(io.BytesIO(data)).convert("RGB").crop((36, 36, 1104, 870)), io.BytesIO()
    part.save(file, "PNG")
    return file.getvalue()


def write(name, data):
    """As a PNG with a palette, which these pictures of few colours do not notice."""
    path = FOLDER / f"{name}.png"
    path.write_bytes(data)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(colors=256, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}  {small.width} x {small.height}  {path.stat().st_size / 1024:.0f} KiB")


def pages(browser):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        view = written_by_the_page("heat-maps.md", folder, "attention.html").read_text(encoding="utf-8")
        for name, scheme in ("first", "light"), ("first-dark", "dark"):
            write(name, heads_and_matrix(shown(browser, view, 760, without_focus, scheme)))
        write("heads", written_by_the_page("heat-maps.md", folder, "heads.png").read_bytes())
        for file in "steps.html", "tiles.html":
            text = written_by_the_page("seeing.md", folder, file).read_text(encoding="utf-8")
            write(Path(file).stem, shown(browser, text, 860, lambda view: press_next(view, 4)))
        os.chdir(ROOT)


def main():
    FOLDER.mkdir(exist_ok=True)
    browser = Browser(shutil.which("chromium"), shutil.which("chromedriver"))
    try:
        if "pages" not in sys.argv[1:]:
            playground(browser)
        if "playground" in sys.argv[1:]:
            return
        pages(browser)
        if "pages" in sys.argv[1:]:
            return
        figures = [data for kind, data in outputs("multihead") if kind == "image/png"]
        write("pruning", figures[3])
        (figure,) = (data for kind, data in outputs("bahdanau") if kind == "image/png")
        write("bahdanau", figure)
        _, heads, _ = (data for kind, data in outputs("inside_any_model") if kind == "image/png")
        write("induction", heads)
    finally:
        browser.close()


if __name__ == "__main__":
    main()
