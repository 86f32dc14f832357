"""A self-contained page: text, style, script and data in one blob that needs no network.

`view` and `teach` return a `Page`.  A notebook shows it through `_repr_mimebundle_`, marimo through `_mime_`; `save`
writes a file whose Content-Security-Policy allows its own style and script and nothing else.  Readers see the text of
the page where scripts do not run (an untrusted notebook, a code host, a browser without JavaScript).  Where the script
runs, it puts the view into a shadow root of the same element, which replaces the text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Optional, Union

# How often each content was shown in this process.  An id is this count and a hash of the content: it is unique in a
# page, and the same in each run of a notebook, so that notebooks in git do not change without reason.
_shown: Counter[str] = Counter()

FOLDER = Path(__file__).parent  # of the scripts and styles
PICTURES = ".png .svg .pdf .jpg .jpeg .gif".split()

# The scripts of a kind of page, and which of their functions builds it.
SCRIPTS = {
    "view": (["base.js", "store.js", "matrix.js", "lines.js", "sentence.js", "frame.js", "view.js"], "buildView"),
    "teach": (["base.js", "store.js", "grids.js", "scenes.js", "lines_of_code.js", "teach.js"], "buildPlayer"),
}


class Page:
    """A self-contained page: the last expression of a notebook cell shows it, `save` writes it, `print` its text.

    Not meant to be constructed directly.

    Attributes
    ----------
    kind : str
        Which scripts and which style the page has: "view" or "teach".
    data : dict
        What the scripts draw.
    text : str
        The content in words, shown where no script runs.
    title : str
        The title of the document.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_c.viz import view
    >>> print(view(np.eye(2), tokens="good morning").text.splitlines()[0])
    Attention weights: 1 head, 2 queries x 2 keys
    """

    def __init__(
        self, kind: str, data: dict[str, Any], text: str, title: str, picture: Optional[Callable[[], bytes]] = None
    ) -> None:
        self.kind = kind  # selects scripts and style
        self.data = data  # what the scripts draw, as JSON
        self.text = text  # the content in words, shown where no script runs
        self.title = title
        self._picture = picture  # draws a PNG for readers that show no HTML, such as LaTeX export

    def __repr__(self) -> str:
        return self.text

    def blob(self, number: int) -> str:
        """The element, its text and its script.

        Parameters
        ----------
        number : int
            Makes ids unique if one page shows the same content several times.

        Returns
        -------
        str
            HTML for the inside of a page.
        """
        return (
            f'<div class="mhac" data-mhac="{self._id(number)}" data-lm-suppress-shortcuts="true">'
            f'<pre class="mhac-text">{html.escape(self.text)}</pre></div>\n'
            f"<script>{self._script(number)}</script>"
        )

    def html(self) -> str:
        """The whole document that `save` writes.

        Returns
        -------
        str
            HTML.
        """
        return document(self.title, self.blob(number=0), self._script(0), language=self.data.get("lang", "en"))

    def save(self, path: Union[str, Path]) -> Path:
        """Write one HTML file that opens from the disk, without network.  Equal pages give equal bytes.

        Parameters
        ----------
        path : str or Path
            The file to write.

        Returns
        -------
        Path
            `path` as a Path.

        Raises
        ------
        ValueError
            If the name is that of a picture: page.png.
        """
        path = Path(path)
        if path.suffix.lower() in PICTURES:
            raise ValueError(
                f"save writes a web page, not a picture: name it {path.stem}.html; a picture is "
                f"mha_c.show_heatmaps(...).savefig({path.name!r})"
            )
        path.write_bytes(self.html().encode("utf-8", "replace"))  # a lone surrogate from a tokenizer becomes ?
        return path

    def _repr_html_(self) -> str:
        _shown[self._id(0)] += 1
        return self.blob(_shown[self._id(0)])

    def _mime_(self) -> tuple[str, str]:
        """What marimo asks for first.  Of HTML with a script it would make a frame of 400 pixels with a bar."""
        script = joined([asset(FOLDER / "framed.js")])
        inside = f'<!DOCTYPE html><body style="margin: 0">{self._repr_html_()}<script>{script}</script></body>'
        return "text/html", frame(inside, self.title)

    def _repr_mimebundle_(
        self, include: Optional[Container[str]] = None, exclude: Optional[Container[str]] = None
    ) -> dict[str, Any]:
        makers: dict[str, Callable[[], Any]] = {"text/plain": lambda: self.text, "text/html": self._repr_html_}
        if self._picture is not None and "matplotlib" in sys.modules:  # not worth importing it for
            picture = self._picture
            makers["image/png"] = lambda: base64.b64encode(picture()).decode()
        return {
            kind: make()
            for kind, make in makers.items()
            if (not include or kind in include) and not (exclude and kind in exclude)
        }

    def _id(self, number: int) -> str:
        return f"mhac-{number}-{hashlib.sha256(as_javascript(self.data).encode()).hexdigest()[:10]}"

    def _script(self, number: int) -> str:
        files, builder = SCRIPTS[self.kind]
        style = asset(FOLDER / "base.css") + asset(FOLDER / f"{self.kind}.css")
        start = f'mount("{self._id(number)}", {json.dumps(style)}, {as_javascript(self.data)}, {builder});'
        return joined([*(asset(FOLDER / name) for name in files), start])


def joined(parts: Sequence[str]) -> str:
    """JavaScript texts as the body of one function, so that a surrounding page sees none of their names."""
    return "\n".join(["(function () {", '"use strict";', *parts, "})();"])


def frame(inside: str, title: str) -> str:
    """A document inside another page: without a border, as wide as there is room.

    Line ends are written as &#10;, because some readers of notebooks make spaces of those in an attribute.
    """
    source, title = html.escape(inside).replace("\n", "&#10;"), html.escape(title)
    return f'<iframe srcdoc="{source}" width="100%" height="780" style="border: 0" title="{title}"></iframe>'


def document(title: str, blob: str, script: str, allowed: str = "", language: str = "en") -> str:
    """A whole HTML file.  Its policy allows the script in `blob`, the sources in `allowed`, and no other script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'{allowed}; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    template, style = asset(FOLDER / "document.html"), asset(FOLDER / "document.css")
    return template.format(policy=policy, title=html.escape(title), style=style, blob=blob, language=language)


def as_javascript(data: Any) -> str:
    """JSON that is safe inside a script element: tokens are data, and a token may be `</script>`."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def asset(path: Path) -> str:
    """A script, style or document without indentation and comment lines: they are for readers of the sources."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))
