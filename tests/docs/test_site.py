"""The site, built once and read as HTML; its notebooks are run by `make docs`, and by test_notebooks.py."""

import ast
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest

import children
import needs
from constructor_forms import FORMS
from mha_c._layer.lacks import Lacking
from mha_c._layer.module import OfTorchModule

pytest_plugins = ["browser_fixtures"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages; tools/site.py checks their links, and that every public name has its place."""
    if not needs.NIGHTLY:
        pytest.skip("the site is built by night, and at each push by `make docs`")
    for name in ("sphinx", "furo", "myst_nb", "torch", "matplotlib", "dask.array"):
        needs.module(name)
    folder = tmp_path_factory.mktemp("site")
    children.python(ROOT / "tools" / "site.py", "-D", "nb_execution_mode=off", cwd=folder, MHA_C_SITE=str(folder))
    return folder / "html"


class Texts(HTMLParser):
    """The texts of headings and of the names in lists of names, which stand in elements of these kinds."""

    def __init__(self, path):
        super().__init__()
        self.headings, self.names, self._open = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        if re.fullmatch("h[1-6]", tag):
            self.headings.append("")
            self._open.append((tag, self.headings))
        elif tag == "dt" and "sig" not in (dict(attributes).get("class") or ""):
            self.names.append("")
            self._open.append((tag, self.names))

    def handle_endtag(self, tag):
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data):
        if self._open:
            self._open[-1][1][-1] += data


SECTION = re.compile("(Parameters|Attributes|Returns|Yields|Raises|Warns|See Also):")  # numpydoc's own


def test_no_heading_of_the_reference_is_a_piece_of_a_sentence(site):
    pages = {path: Texts(path) for path in sorted((site / "api").glob("*.html"))}
    assert len(pages) >= 7
    torn = []
    for path, page in pages.items():
        for text in [*page.headings, *page.names]:
            words = text.strip().rstrip("¶#")
            long = len(re.sub(r"\S+, ", "", words).split()) > 12  # a list of names may be
            if not SECTION.fullmatch(words) and (re.search(r"[.;:] |[.;:]$", words) or long):
                torn.append((path.name, words))
    assert torn == []
    names = {name.strip() for page in pages.values() for name in page.names}
    assert any(name.startswith("valid_lens") for name in names)  # what a section lists has names of its own


def test_all_pages_for_users_are_on_the_site_and_its_index_leads_to_them(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    body = index[index.index("<article") : index.index("</article>")]
    folders = {"docs": "docs", "examples/notebooks": "examples/notebooks"}
    for folder, there in folders.items():
        for path in (ROOT / folder).glob("*.md"):
            if path.stem not in ("index", "promises", "webassembly"):
                assert (site / there / f"{path.stem}.html").is_file(), path
                assert f"{there}/{path.stem}.html" in body, path
    assert body.count("<img") >= 2 and body.count("<table") >= 1
    titles = re.findall(r'class="toctree-l1[^>]*><a[^>]*>([^<]+)<', index)
    assert len(titles) == len(set(titles)) > 20
    assert titles[0] == "Start"
    first = index[index.index('<p class="caption') :].split('<p class="caption')[1]
    assert first.count('class="toctree-l1') == 9 + (site / "playground.html").is_file()  # for users, and the playground


def test_what_only_builders_read_is_not_on_the_site(site):
    """It is in the repository; a link to it is a word here."""
    for name in ("docs/promises", "docs/webassembly", "csrc/kernels/README", "CONTRIBUTING", "RELEASING", "api/c"):
        assert not (site / f"{name}.html").exists()
    page = (site / "docs" / "how-it-works.html").read_text(encoding="utf-8")
    assert "promises.md" not in page and "kernels/README" not in page


def test_small_classes_stand_on_the_page_of_their_module(site):
    own = {path.stem for path in (site / "api").glob("mha_c.*.html")}
    assert {"mha_c.MultiHeadAttention", "mha_c.torch.GQAAttention"} <= own and len(own) < 30
    assert not [
        name for name in own if re.match(r"mha_c\.(teach|heads|viz|variants|functional|torch\.variants)\.", name)
    ]
    assert 'id="mha_c.teach.Law"' in (site / "api" / "teaching.html").read_text(encoding="utf-8")


def test_names_and_code_of_the_reference_are_whole(site):
    """Marks of code that span two lines are marks, too, and names keep their underscores where they are quoted."""
    texts = {}
    for path in (site / "api").glob("*.html"):
        page = re.sub(r"<(script|style|pre)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        texts[path.stem] = re.sub(r"<[^>]*>", "", page)
    assert [name for name, text in texts.items() if "`" in text] == []
    assert "W_o joins" in texts["layers"] and "num_kv_heads heads" in texts["layers"]


def test_functions_stand_before_the_small_classes_that_they_return(site):
    page = (site / "api" / "teaching.html").read_text(encoding="utf-8")
    assert page.index('id="mha_c.teach.check"') < page.index('id="mha_c.teach.Answer"')
    assert "Answer(" not in re.sub(r"<[^>]*>", "", page)  # nobody makes one by hand


def test_pages_in_chinese_say_so_and_stand_in_the_menu(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "zh").glob("*.md"):
        page = (site / "docs" / "zh" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert re.search('<html[^>]* lang="zh-CN"', page)
        assert index.count(f'class="reference internal" href="docs/zh/{path.stem}.html"') >= 2
    assert 'lang="en"' in index


def test_the_playground_is_in_every_menu(site):
    if not (site / "playground.html").is_file():
        needs.skip_or_fail("needs build/playground.html (make playground)")
    for path in [site / "index.html", site / "docs" / "lecture.html", site / "examples" / "notebooks" / "scoring.html"]:
        page = path.read_text(encoding="utf-8")
        (link,) = re.findall(r'class="toctree-l1"><a[^>]*href="([^"]*)">The playground<', page)
        assert (path.parent / link).resolve() == site / "playground.html"


def test_each_notebook_can_be_taken_along(site):
    for path in (ROOT / "examples" / "notebooks").glob("*.md"):
        page = site / "examples" / "notebooks" / f"{path.stem}.html"
        (link,) = re.findall(rf'href="([^"]*/{path.stem}\.ipynb)"', page.read_text(encoding="utf-8"))
        assert (page.parent / link).resolve().is_file()


def site_tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
        tool = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tool)
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return tool


def test_a_cell_that_draws_and_has_no_picture_is_found():
    """As under MPLBACKEND=Agg, which draws to nowhere; `make docs` takes it from the notebooks' environment."""
    for name in ("jupytext", "nbformat", "numpydoc"):
        needs.module(name)
    tool = site_tool()
    begins = '<div class="cell docutils container"><div class="cell_input"><pre>{}</pre></div>{}</div>'
    drawn = begins.format("plt.<span>plot</span>(x)", '<div class="cell_output"><img src="a.png"/></div>')
    bare = begins.format(
        "figure, ax = plt.subplots(1, 2)\nax.plot(x &lt; 3)", '<div class="cell_output"><pre>[]</pre></div>'
    )
    none = begins.format("def later():\n    plt.plot(x)", "")
    assert list(tool.without_pictures(drawn + bare + none)) == ["figure, ax = plt.subplots(1, 2)"]
    notebooks = [path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "notebooks").glob("*.md")]
    cells = [
        cell for text in notebooks for cell in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]
    assert sum(map(tool.draws, cells)) >= 24


CUT = """
const cut = [...document.querySelectorAll("pre")].filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => box.textContent.slice(0, 80));
"""
BEYOND = """
const wide = document.documentElement.scrollWidth > innerWidth ? ["the page itself"] : [];
const contents = document.querySelector(".toc-drawer");
const box = contents && contents.getBoundingClientRect();
if (box && box.left < innerWidth && box.right > innerWidth + 1) wide.push("On this page");
return cut.concat(wide, [...document.querySelectorAll("article table, article img")]
    .filter(box => box.getBoundingClientRect().right > innerWidth + 1).map(box => box.textContent.slice(0, 80)));
"""
FOR_USERS = """start colab from-d2l from-torch masks heat-maps check your-own-attention generate from-bertviz heads
seeing lecture grading browser notebooks command""".split()
LOOKED_AT = """index api/mha_c.MultiHeadAttention api/every-layer api/layers api/torch examples/notebooks/scoring
docs/from-d2l docs/heat-maps docs/lecture docs/masks docs/start docs/what-each-layer-can-do benchmarks/README
examples/notebooks/long_sequences""".split()


def test_formulas_need_no_script_and_no_network(site):
    page = (site / "examples" / "notebooks" / "scoring.html").read_text(encoding="utf-8")
    assert page.count("<math ") >= 3 and "MathJax" not in page
    text = re.sub(r"<(script|style|pre|code).*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r"\$[^$<]{1,80}\$", text) and "\\top" not in text


def test_both_forms_of_a_constructor_and_every_attribute_have_a_place(site):
    page = (site / "api" / "mha_c.MultiHeadAttention.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]*>", "", page)
    for form in FORMS:
        assert f"mha_c.MultiHeadAttention({form}, *, dtype=float32" in " ".join(text.split()), form
    shared = (site / "api" / "every-layer.html").read_text(encoding="utf-8")
    for name, there in (("num_heads", page), ("num_hiddens", page), ("attention_weights", shared), ("view", shared)):
        assert there.count(f'id="mha_c.MultiHeadAttention.{name}"') == 1
        assert f'href="every-layer.html#mha_c.MultiHeadAttention.{name}"' in page or there is page
    begins = page.index('id="mha_c.MultiHeadAttention"')
    assert page.index("&gt;&gt;&gt;", begins) < page.index("Parameters", begins)


def attributes(kind):
    """The public names that a class of this package, or a base of it, annotates, assigns, or gives its `self`; those of
    every nn.Module left out."""
    found = set()
    for base in [base for base in kind.__mro__ if base.__module__.startswith("mha_c")]:
        said = OfTorchModule, Lacking  # names that only say whose they are, or why there is none
        own = {name: value for name, value in vars(base).items() if not isinstance(value, said)}
        found |= {name for name, value in own.items() if not hasattr(value, "__get__") or is_data(value)}
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for node in ast.walk(body):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
        for block in [body, *(each for each in body.body if isinstance(each, ast.If))]:
            found |= {each.target.id for each in block.body if isinstance(each, ast.AnnAssign)}
    if "torch" in kind.__module__:
        found -= set(dir(needs.module("torch").nn.Module()))
    return {name for name in found if not name.startswith("_")}


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def is_data(value):
    return not isinstance(value, (classmethod, staticmethod)) and not inspect.isfunction(value)


def test_every_public_attribute_of_the_reference_is_an_entry(site):
    pages = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    classes = re.findall(r'<dl class="py class">\s*<dt class="[^"]*" id="([\w.]+)"', pages)
    assert len(classes) >= 38 and {"mha_c.GQAAttention", "mha_c.torch.GQAAttention", "mha_c.teach.Law"} <= {*classes}
    wanted = {f"{name}.{each}" for name in classes for each in attributes(pkgutil.resolve_name(name))}
    books = {"W_q", "W_k", "W_v", "W_o", "num_heads", "attention", "attention_weights", "empty_rows"}
    assert {f"{module}.MultiHeadAttention.{each}" for module in ("mha_c", "mha_c.torch") for each in books} <= wanted
    places = set(re.findall(r' id="(mha_c[\w.]+)"', pages))
    assert [name for name in sorted(wanted) if pages.count(f' id="{name}"') > 1] == []
    assert [name for name in sorted(wanted - places) if not told_of_a_base(name, places)] == []
    assert "Alias for field number" not in pages


def told_of_a_base(name, places):
    """Whether an attribute that a class has from a base is told of another class with this base, and linked."""
    kind, _, attribute = name.rpartition(".")
    bases = [base for base in pkgutil.resolve_name(kind).__mro__ if attribute in vars(base)]
    others = [place.rpartition(".")[0] for place in places if place.rpartition(".")[2] == attribute]
    return any(base in pkgutil.resolve_name(other).__mro__ for base in bases[-1:] for other in others)


def test_a_page_for_users_is_short(site, browser):
    """Three screens of 1280 x 900; a page of the reference, on which its small classes stand too, twelve."""
    browser.devtools("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
    pages = [f"docs/{name}" for name in FOR_USERS]
    pages += [f"api/{path.stem}" for path in (site / "api").glob("*.html")]
    assert len(pages) > 40
    long = {}
    for page in pages:
        browser.open((site / f"{page}.html").as_uri())
        screens = browser.run("return document.querySelector('article').scrollHeight") / 900
        if screens > (12 if page.startswith("api") else 3):
            long[page] = screens
    assert long == {}


WIDTHS = 1280, 1366, 1440, 1536, 1600, 1920


def at_each_width(browser, path):
    """Opens a page; gives each width of WIDTHS once the page has it."""
    for width in WIDTHS:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.devtools("Emulation.setDeviceMetricsOverride", **size)
        if width == WIDTHS[0]:
            browser.open(path.as_uri())
        browser.wait("return innerWidth === arguments[0]", width)
        yield width


@pytest.mark.parametrize("page", LOOKED_AT)
def test_nothing_is_cut(site, browser, page):
    path = site / f"{page}.html"
    assert [(width, found) for width in at_each_width(browser, path) if (found := browser.run(CUT + BEYOND))] == []
    browser.devtools("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
    browser.open(path.as_uri())
    assert browser.run(CUT + BEYOND) == []


BROKEN = """
return [...document.querySelectorAll(".highlight-text pre, .highlight-c pre")].filter((box) => {
    box.style.whiteSpace = "pre";
    const broken = box.scrollWidth > box.clientWidth + 1;
    box.style.whiteSpace = "";
    return broken;
}).map(box => box.textContent.slice(0, 80));
"""


@pytest.mark.parametrize("page", ["docs/how-it-works", "docs/attention-in-c"])
def test_lines_of_drawings_and_of_c_are_whole(site, browser, page):
    for width in at_each_width(browser, site / f"{page}.html"):
        assert browser.run("return document.querySelectorAll('.highlight-text pre, .highlight-c pre').length") > 0
        assert browser.run(BROKEN) == [], width
