"""Weights for a page of `mha_c.viz.view`, and what stands in it, read as its own scripts read it."""

import base64
import zlib

import numpy as np

from checks import softmax


def drawn_weights(rng):
    """A function of their shape."""
    return lambda *shape: softmax(2 * rng.standard_normal(shape))


def unpacked(panel):
    """What the page's own code makes of a panel; base.js does the same."""
    raw = base64.b64decode(panel["w"])
    levels = np.frombuffer(zlib.decompress(raw) if panel["z"] else raw, "<u2" if panel["bits"] == 16 else "u1")
    top = np.frombuffer(base64.b64decode(panel["m"]), "<f4").reshape(panel["h"], panel["q"], 1)
    share = np.maximum(levels - 1.0, 0) / (65534 if panel["bits"] == 16 else 254)
    share = np.where(levels == 1, 1e-9, share if panel["bits"] == 16 else share**2)
    return share.reshape(panel["h"], panel["q"], panel["k"]) * top


def layers_of(page):
    """{layer's name: its weights (examples, heads, queries, keys)}, small ones to 1e-5 (tests/viz/test_viz.py)."""
    found = {name: [] for name in page.data["layers"]}
    for panel in page.data["panels"]:
        found[page.data["layers"][panel["layer"]]].append(unpacked(panel))
    return {name: np.stack(examples) for name, examples in found.items()}
