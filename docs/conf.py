"""The site, built by `make docs` with Sphinx: pages, notebooks, and the API from docstrings.

tools/site.py lays out what is built; this file says how it looks.  Nothing of the site comes from the network.
"""

import inspect
import itertools
import re
import sys
from functools import partial
from pathlib import Path

import latex2mathml.converter
from docutils import nodes

import mha_c
from mha_c._layer.lacks import Lacking

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from docstrings import NOT_MADE_BY_HAND

project, author, copyright = "mha_c", "mha_c developers", "mha_c developers"
release = version = mha_c.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc"]
numpydoc_show_class_members = False
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_ipywidgets_js = {}
nb_merge_streams = True  # what a cell prints is one box
exclude_patterns = ["_build", "files"]
highlight_language = "none"  # a box without a language is what another one printed, or for a shell
html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_favicon = "favicon.svg"
html_title = f"mha_c {release}"
html_show_sourcelink = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
nitpicky = True
suppress_warnings = ["myst.xref_missing_text"]


PLAYGROUND = Path(__file__).resolve().parents[1] / "build" / "playground.html"
PLAIN = re.compile(r"[*_|\\`]")


SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-+$\n", re.MULTILINE)
LISTS = {"Parameters", "Attributes", "Returns", "Yields", "Raises", "Warns", "See Also"}  # of names with texts


def as_text(app, what, name, obj, options, lines):
    """Sections are numpydoc's; the words in them plain text, in which no character is markup but `code`."""
    opening, *sections = SECTION.split("\n".join(lines))
    lines[:] = paragraphs(opening)
    if what == "class" and "Examples" in sections:  # a class begins with what one writes
        at = sections.index("Examples")
        first, blank = next(iter(opening.strip("\n").split("\n\n"))), ["", ""]
        rest = opening.strip("\n")[len(first) :]
        lines[:] = [*paragraphs(first), *blank[:1], *paragraphs(sections[at + 1]), *paragraphs(rest)]
        del sections[at : at + 2]
    for title, text in zip(sections[::2], sections[1::2]):
        if what == "class" and title == "Attributes":  # they become entries below
            continue
        body = text.splitlines()
        if title in LISTS:  # an indented line is text; one that is not names something
            body = listed(body)
        elif title != "Examples":
            body = paragraphs(text)
        lines += ["", title, "-" * len(title), *body, ""]


def attribute_entries(app, what, name, obj, options, lines):
    """What a class and its bases list as "Attributes" are entries, which index and search know, like properties."""
    if what != "class":
        return
    known = {key for base in obj.__mro__ for key, value in vars(base).items() if isinstance(value, property)}
    for base in (base for base in obj.__mro__ if base.__module__.startswith("mha_c")):
        _, *sections = SECTION.split(inspect.cleandoc(base.__doc__ or ""))
        listed = dict(zip(sections[::2], sections[1::2])).get("Attributes", "").strip("\n")
        for block in re.split(r"\n(?=\S)", listed) if listed else []:
            head, *text = block.splitlines()
            names, _, kind = head.partition(" : ")
            new = [each for each in names.split(", ") if each not in known]
            known.update(new)
            if new:
                lines += ["", f".. attribute:: {new[0]}", *(f"               {each}" for each in new[1:]), ""]
                said = marked("\n".join(line.strip() for line in text)).splitlines()
                lines += [f"   *{marked(kind)}*", "", *(f"   {line}" for line in said), ""]


def without_fields(app, what, name, obj, skip, options):
    """The fields of a named tuple are listed as its attributes, where Python's own texts only count them; what a layer
    lacks is on a page of its own."""
    said = getattr(obj, "__doc__", None) or ""
    return True if said.startswith("Alias for field number") or isinstance(obj, Lacking) else None


def paragraphs(text):
    """Paragraphs stay paragraphs, tables of names become lists, and what is aligned otherwise stays as it is."""
    lines = []
    for block in text.strip("\n").split("\n\n"):
        named = entries(block)
        aligned = any(line.startswith("  ") or "   " in line for line in block.splitlines())
        if block.lstrip().startswith(">>>"):
            lines += [".. code-block:: pycon", "", *(f"   {line}" for line in block.splitlines()), ""]
        elif named:
            for name, text in named:
                lines += [f"``{name}``", f"   {marked(text)}", ""]
        elif aligned:
            lines += [".. code-block:: text", "", *(f"   {line}" for line in block.splitlines()), ""]
        else:
            lines += [*marked(block).splitlines(), ""]
    return lines


def listed(body):
    """The lines of a list: texts, which are indented, marked as a whole, because `code` may go on in the next line."""
    lines = []
    for is_text, group in itertools.groupby(body, lambda line: line.startswith(" ")):
        text = "\n".join(group)
        lines += (marked(text) if is_text else text.replace("`", "``")).split("\n")
    return lines


def entries(block):
    """[(name, text)] of a table: lines of a name, spaces, and a text that goes on in indented lines; else None."""
    found = []
    for line in block.splitlines():
        entry = re.match(r"(\S+(?: \S+)*)(?<![.:!?]) {2,}(\S.*)", line)  # two spaces behind a full stop are prose
        if entry:
            found.append(list(entry.groups()))
        elif found and line.startswith("  "):
            found[-1][1] += f" {line.strip()}"
        else:
            return None
    return found


def marked(text):
    """`word` in reStructuredText's own marks for code, other marks of it as plain characters."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one without its pair
        return PLAIN.sub(r"\\\g<0>", text)
    return "".join(f"``{part}``" if i % 2 else PLAIN.sub(r"\\\g<0>", part) for i, part in enumerate(parts))


def both_forms(app, what, name, obj, options, signature, returned):
    """Constructors of layers in both of their forms, none of a class that nobody makes by hand; types as one
    writes them."""
    if what == "class" and NOT_MADE_BY_HAND in (obj.__doc__ or ""):
        return "", None
    if not signature:
        return None
    if what == "class" and hasattr(obj, "_forms"):
        keywords = signature[signature.index("*, ") :]
        forms = [f"({form}, {keywords}" for form in obj._forms]
        signature = f"\n{obj.__name__}".join(forms)  # autodoc writes the name of the first
    return re.sub(r"<class '(?:numpy\.)?([\w.]+)'>", r"\1", signature), returned


def formula(self, node, display):
    """Formulas as MathML, which browsers draw themselves, without a script."""
    self.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def with_playground(app, page, template, context, doctree):
    """The playground, which is no document, stands in the menu too, after its first page."""
    if PLAYGROUND.exists():
        here = context["pathto"](PLAYGROUND.name, 1)
        item = f'<li class="toctree-l1"><a class="reference internal" href="{here}">The playground</a></li>'
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace("</li>", f"</li>\n{item}", 1)


def in_chinese(app, page, template, context, doctree):
    """Browsers choose the shapes of Chinese characters by the language that a page says it has."""
    if page.startswith("docs/zh/"):
        context["language"] = "zh-CN"


def setup(app):
    inline, block = ((partial(formula, display=display), None) for display in ("inline", "block"))
    app.add_html_math_renderer("mathml", inline, block)
    app.connect("autodoc-process-signature", both_forms)
    app.connect("autodoc-process-docstring", as_text, priority=400)  # before numpydoc looks at them
    app.connect("autodoc-process-docstring", attribute_entries, priority=600)  # after numpydoc
    app.connect("autodoc-skip-member", without_fields)
    app.connect("html-page-context", in_chinese)
    app.connect("html-page-context", with_playground, priority=900)  # after furo has made its menu
