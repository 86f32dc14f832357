"""The page of `mha_c playground`: the core as WebAssembly, the scripts of playground_page/, and those of `view`.

`playground_page/core.wasm` is compiled by `make playground` from tools/playground.c and the core's own sources.  This
module uses nothing but page.py, so that tools/playground.py can load both without the extension and NumPy.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import Optional

from .page import FOLDER, as_javascript, asset, document, joined

SOURCES = FOLDER / "playground_page"
CORE = SOURCES / "core.wasm"
SHARED = [
    "base.js", "store.js", "matrix.js", "lines.js", "sentence.js", "frame.js", "view.js", "grids.js", "scenes.js",
    "lines_of_code.js", "teach.js",
]  # fmt: skip
STYLES = [*(FOLDER / name for name in ("base.css", "view.css", "teach.css")), SOURCES / "playground.css"]
WORKER = ["core.js", "worker.js"]
TITLE = "Attention playground"
REPOSITORY = "ADDRESS-OF-THE-REPOSITORY"  # until `make address` has filled it in
TEXT = "This page computes attention in your browser. It needs JavaScript and WebAssembly."


def whole_page(core: Optional[bytes] = None, repository: Optional[str] = None) -> str:
    """The HTML of the page with this module of WebAssembly, or the package's; the same bytes each time.

    With a repository's address the page says where the reader finds the rest.
    """
    address = repository or (REPOSITORY if REPOSITORY.startswith("https://") else None)
    own = sorted(path for path in SOURCES.glob("*.js") if path.name != "worker.js")
    own += sorted((SOURCES / "chapters").glob("*.js"))
    parts = [asset(path) for path in [*(FOLDER / name for name in SHARED), *own]]
    packed = base64.b64encode(zlib.compress(CORE.read_bytes() if core is None else core, 9)).decode()
    players = json.loads((FOLDER.parent / "teach" / "players" / "players.json").read_text(encoding="utf-8"))
    data = {
        "title": TITLE,
        "core": packed,
        "worker": joined([asset(SOURCES / name) for name in WORKER]),
        "tileSteps": players["tiles"],  # what the player of the online softmax says
        "models": json.loads((SOURCES / "lecture_models.json").read_text(encoding="utf-8")),
        **({"repository": address} if address else {}),
    }
    style = json.dumps("".join(map(asset, STYLES)))
    script = joined([*parts, f"openPlayground({style}, {as_javascript(data)});"])
    blob = f'<div class="mhac" data-mhac="playground"><p>{TEXT}</p></div>\n<script>{script}</script>'
    return document(TITLE, blob, script, allowed=" 'wasm-unsafe-eval'; worker-src blob:")
