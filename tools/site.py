"""make docs: lays out build/docs/source, builds the site into build/docs/html with warnings as errors, and checks it.

The repository's own layout is kept, so that relative links between its pages hold on the site as well.  Notebooks are
made from their text and executed.  Checks: docstrings are as numpydoc asks, every public name has its place, every
link inside leads somewhere, and nothing comes from the network.
"""

import ast
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import docstrings
import jupytext
import nbformat
import notebooks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from chromium import Browser  # noqa: E402

PLAYGROUND = ROOT / "build" / "playground.html"  # `make playground`; on the site beside index.html
BUILT = Path(os.environ.get("MHA_C_SITE") or ROOT / "build" / "docs")
SOURCE, SITE, DOCTREES = BUILT / "source", BUILT / "html", BUILT / "doctrees"
GROUPS = {  # of the sidebar; what is in docs/ and nowhere here stands last in "More"
    "For users": "start colab from-d2l from-torch masks heat-maps check your-own-attention generate",
    "For teachers": "lecture grading browser",
    "More": "seeing heads from-bertviz command notebooks what-each-layer-can-do",
}
INSIDE = """docs/how-it-works docs/compatibility docs/accuracy benchmarks/README docs/attention-in-c docs/scale-out
CHANGELOG""".split()
FOR_BUILDERS = {"docs/promises", "docs/webassembly"}  # in the repository alone, as CONTRIBUTING, RELEASING and SECURITY


def grouped_pages():
    """{title in the sidebar: pages}."""
    there = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")} - {"docs/index", *INSIDE, *FOR_BUILDERS}
    groups = {title: [f"docs/{name}" for name in names.split()] for title, names in GROUPS.items()}
    groups["More"] += sorted(there.difference(*groups.values()))
    return groups


CALLS = "masked_softmax sequence_mask transpose_qkv transpose_output"
LAYERS = "MultiHeadAttention DotProductAttention AdditiveAttention GQAAttention CausalAttention KernelAttention"
STEPS = "LayerSteps Steps Tile Tiles additive multi_head steps tiles"
CHECKS = "Answer Law Laws Puzzle add_mistake check laws puzzle set_language trained"
REFERENCE = {  # page: title, and for each module its names; None: its __all__
    "layers": ("Layers", {
        "mha_c": f"{LAYERS} PositionalEncoding ProjectedKeyValues KeyValueCache {CALLS}",
    }),
    "functional": ("Functions of arrays", {"mha_c.functional": None}),
    "torch": ("Inside torch", {"mha_c.torch": None, "mha_c.torch.nn": None}),
    "torch-functional": ("Functions of tensors", {"mha_c.torch.functional": None}),
    "d2l": ("Inside d2l", {"mha_c.d2l": None}),
    "variants": ("Classes of other courses", {"mha_c.variants": None, "mha_c.torch.variants": None}),
    "seeing": ("Pages and plots", {"mha_c.viz": None}),
    "heads": ("Heads", {"mha_c.heads": None}),
    "teaching": ("Checks, laws, puzzles", {"mha_c.teach": CHECKS}),
    "steps": ("One step at a time", {"mha_c.teach": STEPS}),
    "processes": ("Several processes", {"mha_c.torch.distributed": None, "mha_c.dask": None}),
    "system": ("Threads, costs, errors", {
        "mha_c": "show_config get_num_threads set_num_threads cost explain ShapeError",
        "mha_c.config": "register_with_threadpoolctl",
    }),
}  # fmt: skip
WITH_PAGES = "mha_c", "mha_c.torch", "mha_c.torch.nn"  # modules whose classes have pages; others stand on theirs
OF_THE_REPOSITORY = os.environ.get("MHA_C_REPOSITORY", "").rstrip("/")
GROUPED = grouped_pages()
PAGES = {
    "For users": GROUPED["For users"],
    "Reference": [f"api/{page}" for page in REFERENCE],
    "For teachers": GROUPED["For teachers"],
    "中文": [f"docs/zh/{path.stem}" for path in sorted((ROOT / "docs" / "zh").glob("*.md"), reverse=True)],
    "More": GROUPED["More"],
    "Notebooks": [f"examples/notebooks/{name}" for name in notebooks.names()],
    "Inside": INSIDE,
}
EVERY_PAGE = {page for pages in PAGES.values() for page in pages}
# The page that answers, and what readers search for: it is the first hit.
SEARCHED = {
    "docs/start": "install, windows, wheel",
    "docs/colab": "colab, google colab, gpu, cuda",
    "docs/from-d2l": "replace d2l, speed up, d2l slow, slow d2l",
    "docs/from-torch": "batch_first, MultiheadAttention, need_weights, scaled_dot_product_attention",
    "docs/from-bertviz": "bertviz, transformerlens, circuitsvis",
    "docs/masks": "valid_lens, mask, causal mask, padding mask, look-ahead mask, upper triangular mask, tril, "
    "attention_mask, attn_mask, src_mask, key_padding_mask",
    "docs/heat-maps": "see weights, attention weights, heat map, heatmap, heatmaps, visualize attention, visualise, "
    "visualization, attention map, plot attention weights",
    "docs/heads": "prune, head_mask, which heads matter, interpretability",
    "docs/check": "which line is wrong, debug, exercise",
    "docs/your-own-attention": "slow, my own attention, my model is slow, custom attention, my own class, convert",
    "docs/seeing": "step by step",
    "docs/lecture": "lecture, slides, QR code",
    "docs/grading": "homework, grade, autograder, exam, quiz",
    "docs/browser": "playground",
    "docs/generate": "generate text, kv cache, decoding with a cache",
    "docs/zh/start": "chinese, 慢, 热图, 掩码, 因果掩码, 哪一行错了, 快, 作业, 教学",
    "benchmarks/README": "how fast",
    "docs/accuracy": "exact, how exact",
}  # fmt: skip
TAKE_ALONG = """{{download}}`This notebook as a file </files/{name}.ipynb>`, without results and with all data that it
reads: for Jupyter, Colab or JupyterLite."""
NOTEBOOK = re.compile(r"((?:^|notebooks/)(?:" + "|".join(notebooks.names()) + r"))\.md$")
MODULES = {"functional", "nn", "variants", "METHODS"}  # names in an __all__ that are no functions and no classes


def names_of(module, names):
    """The public names of a module to document: those given, or its __all__."""
    if names is not None:
        return names.split()
    return [name for name in importlib.import_module(module).__all__ if name not in MODULES]


def classes_and_functions():
    """{page: [(module, [names of classes], [names of others])]} of REFERENCE."""
    found = {}
    for page, (_, modules) in REFERENCE.items():
        for module, names in modules.items():
            names = names_of(module, names)
            classes = [name for name in names if name[0].isupper() and name != "ShapeError"]
            found.setdefault(page, []).append((module, classes, [name for name in names if name not in classes]))
    return found


def inherited(kind, documented):
    """{member: the class of this package that has it} of what a class has from bases that have no page."""
    found = {}
    for base in reversed([base for base in kind.__mro__[1:] if base.__module__.startswith("mha_c")]):
        if base not in documented:
            found.update({name: base for name, member in vars(base).items() if shown(name, member, kind)})
    return {name: base for name, base in found.items() if name not in vars(kind)}


def shown(name, member, kind):
    called = inspect.isfunction(getattr(member, "fget", getattr(member, "__func__", member)))
    return called and not name.startswith("_") and getattr(kind, "__dict__", {}).get(name) is not member


def python_reference():
    """A page for each module's functions and then its small classes, and one for each layer.  What classes have
    from a base without a place is told once, of the first of them, on "What every layer has"; the others lead there."""
    told = {}  # (base, member) -> the class on whose behalf it is told
    of_all = []
    pages = classes_and_functions()
    kinds = {f"{module}.{name}": pkgutil.resolve_name(f"{module}.{name}")
             for parts in pages.values() for module, classes, _ in parts for name in classes}  # fmt: skip
    documented = set(kinds.values())
    for page, (title, _) in REFERENCE.items():
        lines, tree = [f"# {title}", ""], []
        for module, classes, others in pages[page]:
            lines += [f"## `{module}`", ""]
            small = []  # classes, behind the functions that return them
            for name in classes:
                path = f"{module}.{name}"
                members = inherited(kinds[path], documented)
                new = {each: base for each, base in members.items() if (base, each) not in told}
                told.update({(base, each): path for each, base in new.items()})
                of_all += [f"{path}.{each}" for each in new]
                entry = class_entry(path, kinds[path], members, told)
                if module not in WITH_PAGES:
                    small += ["", f"### {name}", "", *entry]
                    continue
                tree.append(path)
                first = (inspect.getdoc(kinds[path]) or "").split("\n\n")[0].replace("\n", " ")
                lines += [f"- [{name}]({path}.md): {as_words(first)}"]
                (SOURCE / "api" / f"{path}.md").write_text("\n".join([f"# {name}", "", *entry]), encoding="utf-8")
            lines += [""]
            for name in others:
                kind = "autoexception" if name == "ShapeError" else "autofunction"
                lines += ["```{eval-rst}", f".. {kind}:: {module}.{name}", "```", ""]
            lines += small
        if page == "layers":
            tree.append("every-layer")
        lines += ["```{toctree}", ":hidden:", "", *tree, "```", ""] if tree else []
        (SOURCE / "api" / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
    every_layer(of_all)


def every_layer(paths):
    """The page of what several classes share, a section a module."""
    lines = ["# What every layer has", "", "Methods and attributes that several classes share, each told once.", ""]
    for module, members in itertools.groupby(paths, lambda path: path.rsplit(".", 2)[0]):
        lines += [f"## `{module}`", ""]
        for path in members:
            owner, _, name = path.rpartition(".")
            member = inspect.getattr_static(pkgutil.resolve_name(owner), name)
            kind = "autoattribute" if isinstance(member, property) else "automethod"
            lines += ["```{eval-rst}", f".. {kind}:: {path}", "```", ""]
    (SOURCE / "api" / "every-layer.md").write_text("\n".join(lines), encoding="utf-8")


def as_words(text):
    """Text in Markdown: `code` stays, other marks are plain characters."""
    return "`".join(part if i % 2 else re.sub(r"[*_|\\]", r"\\\g<0>", part) for i, part in enumerate(text.split("`")))


def class_entry(path, kind, members, told):
    """The lines of a class, below its heading."""
    links = [f"{{py:obj}}`{each} <{told[base, each]}.{each}>`" for each, base in sorted(members.items())]
    lines = ["```{eval-rst}", f".. autoclass:: {path}", "   :members:", "```", ""]
    return [*lines, f"It also has {', '.join(links)}: [what every layer has](every-layer.md).", ""] if links else lines


def site_links(text, folder):
    """Links to notebooks lead to the executed ones; links to folders and to pages that are not on the site, are words,
    or lead to the repository where its address is known.

    The playground, a file of `build/` elsewhere, is a page here.
    """
    up = "../" * len(folder.relative_to(SOURCE).parts)
    if PLAYGROUND.exists():  # `make docs` has made it; where it is not there, its name stays a name
        chapter = rf'<a href="{up}playground.html\1">playground.html\1</a>'
        text = re.sub(r"`playground\.html(#[^`]*)`", chapter, text)
        save = "下载" if folder.name == "zh" else "save it"
        page = f'<a href="{up}playground.html">playground.html</a> (<a href="{up}playground.html" download>{save}</a>)'
        text = re.sub(r"`playground\.html`", page, text)

    def on_site(link):
        words, target = link.groups()
        path = os.path.normpath(folder.relative_to(SOURCE) / target)
        page, of_pages = path.removesuffix(".md"), path.endswith(".md")
        if (folder / target).is_dir() or (of_pages and page not in {*EVERY_PAGE, "index", "docs/index"}):
            return f"[{words}]({OF_THE_REPOSITORY}/blob/HEAD/{path})" if OF_THE_REPOSITORY else words
        executed = NOTEBOOK.sub(r"\1.ipynb", target)
        return f"[{words}]({executed})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\(([^):#]+)\)", on_site, text)


def lay_out():
    for folder in (SOURCE, SITE, DOCTREES):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in ("api", "files"):
        (SOURCE / folder).mkdir(parents=True)
    pages = [page for group in PAGES.values() for page in group if not page.startswith("api/")]
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "conf.py", "index.md", "*.o")
    for name in ("docs", "examples", "benchmarks", "csrc", "tests", "tools", "mha_c"):
        shutil.copytree(ROOT / name, SOURCE / name, ignore=ignored)
    for path in (p for p in ROOT.iterdir() if p.is_file()):
        shutil.copy(path, SOURCE)
    for path in SOURCE.rglob("*.md"):
        if str(path.relative_to(SOURCE).with_suffix("")) not in pages:
            path.unlink()
        else:
            text = site_links(path.read_text(encoding="utf-8"), path.parent)
            page = str(path.relative_to(SOURCE).with_suffix(""))
            words = SEARCHED[page].split(", ") if page in SEARCHED else []
            index = "".join(f"```{{index}} ! {word}\n```\n\n" for word in words)  # one directive takes one main entry
            path.write_text(index + notebooks.with_address(text), encoding="utf-8")
    for path in (SOURCE / "examples" / "notebooks").glob("*.md"):
        notebook = jupytext.read(path)
        notebook.cells.remove(notebooks.install_cell(notebook))
        notebook.cells.insert(1, nbformat.v4.new_markdown_cell(TAKE_ALONG.format(name=path.stem)))
        jupytext.write(notebook, path.with_suffix(".ipynb"))
        jupytext.write(notebooks.portable(path.stem), SOURCE / "files" / path.with_suffix(".ipynb").name)
        path.unlink()
    opening = re.sub(
        r"(\]\()(?=[\w-]+\.md|img/|zh/)", r"\1docs/", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    )
    sections, tables = ["", "## All pages", ""], []
    for title, listed in PAGES.items():
        sections += [f"- **{title}**: " + ", ".join(f"{{doc}}`{page}`" for page in listed)]
        tables += ["", "```{toctree}", ":hidden:", f":caption: {title}", "", *listed, "```"]
    opening = notebooks.with_address(site_links(opening.replace("](../", "]("), SOURCE))
    (SOURCE / "index.md").write_text(opening + "\n".join([*sections, *tables, ""]), encoding="utf-8")
    python_reference()


class Links(HTMLParser):
    """What a page leads to and what it loads, and the places in it."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.places = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.places.update(value for key, value in attributes if key in ("id", "name") and value)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("href") and given.get("rel") != "canonical":
            self.loaded.append(given["href"])


def problems():
    """Links inside that lead nowhere, and what a page would load from elsewhere."""
    pages = {path: Links(path) for path in SITE.rglob("*.html")}
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "data", "mailto", "javascript") or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{path.relative_to(SITE)} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(SITE)}: {link} is not there"
            elif target.name == PLAYGROUND.name:
                continue  # what stands behind its # is a state
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].places:
                yield f"{path.relative_to(SITE)}: {link} has no such place"


# Calls that leave a picture behind a cell.
DRAWING = set("show_heatmaps show_bars chart subplots figure plot semilogx imshow show".split())
CELL = re.compile(r'<div class="cell docutils container')


def draws(source):
    """Whether a cell's own lines, not those of a function that it defines, call what draws."""
    lines = "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    todo = list(ast.parse(lines).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", "")) in DRAWING:
            return True
        todo += ast.iter_child_nodes(node)
    return False


def without_pictures(page):
    """The cells of an executed notebook's page that draw and have no image behind them."""
    for cell in CELL.split(page)[1:]:
        typed, _, output = cell.partition("cell_output")
        source = unescape(re.sub(r"<[^>]*>", "", typed.partition("<pre>")[2].partition("</pre>")[0]))
        if draws(source) and "<img" not in output:
            yield source.splitlines()[0]


def undrawn():
    for path in (SITE / "examples" / "notebooks").glob("*.html"):
        for line in without_pictures(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(SITE)}: no picture behind the cell that begins with: {line}"


def undocumented():
    """Public names without a place in the reference, and docstrings that lack something."""
    places = set().union(*(Links(path).places for path in (SITE / "api").glob("*.html")))
    yield from (f"{name} has no place in the reference" for name in docstrings.public() if name not in places)
    yield from docstrings.all_complaints()


# The hits of a search when all are listed, one after the other; when the first is, if `arguments[0]`.
LISTED = """const said = document.querySelector("#search-results .search-summary");
const hits = [...document.querySelectorAll("#search-results ul.search > li > a")];
return said && (/found|did not match/.test(said.textContent) || arguments[0] && hits.length)
    && hits.map(link => link.getAttribute("href"));"""


def unfound():
    """Words for which the site's own search, in a browser without network, lists another page first."""
    programs = [shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")]
    if None in programs:
        print("no browser: the search was not tried (apt-get install -y chromium chromium-driver)")
        return
    browser = Browser(*programs)
    try:
        for word, page in [(word, page) for page, words in SEARCHED.items() for word in words.split(", ")]:
            browser.open(f"{(SITE / 'search.html').as_uri()}?q={quote(word)}")
            hits = [re.split("[?#]", link)[0] for link in browser.wait(LISTED, word != "valid_lens")]
            if hits[:1] != [f"{page}.html"]:
                yield f"the search for {word} does not find {page} first, but {hits[:3]}"
            if word == "valid_lens" and "api/mha_c.MultiHeadAttention.html" not in hits:
                yield f"the search for {word} does not find the layers"
    finally:
        browser.close()


def build(options):
    lay_out()
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-c", str(ROOT / "docs")]
    # The notebooks' own way to draw, whatever the caller's programs draw with.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    command += ["-d", str(DOCTREES), *options, str(SOURCE), str(SITE)]
    subprocess.run(command, check=True, env=environment)
    if PLAYGROUND.exists():
        shutil.copy(PLAYGROUND, SITE)


def main(options):
    build(options)
    executed = "nb_execution_mode=off" not in options
    found = sorted({*problems(), *undocumented(), *(undrawn() if executed else ())})
    found += unfound()
    print("\n".join(found) or f"{SITE}/index.html: {len(list(SITE.rglob('*.html')))} pages")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
