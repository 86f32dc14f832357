"""mha_c: the attention layers of "Dive into Deep Learning" as NumPy layers on a C core.

>>> import numpy as np, mha_c
>>> X = np.random.default_rng(0).standard_normal((2, 4, 100), dtype=np.float32)
>>> mha = mha_c.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5, rng=0)
>>> mha(X, X, X, valid_lens=[3, 2]).shape
(2, 4, 100)
>>> mha.attention_weights.shape
(2, 5, 4, 4)

Layers: MultiHeadAttention, DotProductAttention, AdditiveAttention, GQAAttention, CausalAttention, KernelAttention,
PositionalEncoding.
Functions: mha_c.functional.  Other systems' layers: mha_c.variants.  For torch: mha_c.torch.  The book's own package:
mha_c.d2l.  Pictures: show_heatmaps, mha_c.viz.  `import mha_c` imports only NumPy; modules that need more are imported
at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from . import _core
except ImportError as error:
    from ._no_core import explained

    raise explained(error) from None

from . import config, functional
from ._arguments import core_refusals as _refusals  # for the core, which asks for it by name
from ._arguments.names import meant
from ._decoder.caches import KeyValueCache, ProjectedKeyValues
from .config import get_num_threads, set_num_threads, show_config
from .errors import ShapeError
from .grouped import CausalAttention, GQAAttention
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .masking import masked_softmax, sequence_mask, transpose_output, transpose_qkv
from .positions import PositionalEncoding
from .similarity import KernelAttention

if TYPE_CHECKING:
    from ._cost import cost
    from ._explain import explain
    from .viz import show_heatmaps

    __version__: str

__all__ = [
    "AdditiveAttention",
    "CausalAttention",
    "DotProductAttention",
    "GQAAttention",
    "KernelAttention",
    "KeyValueCache",
    "MultiHeadAttention",
    "PositionalEncoding",
    "ProjectedKeyValues",
    "ShapeError",
    "cost",
    "explain",
    "functional",
    "get_num_threads",
    "masked_softmax",
    "sequence_mask",
    "set_num_threads",
    "show_config",
    "show_heatmaps",
    "transpose_output",
    "transpose_qkv",
]

# What dir() and completion show: layers, functions, and where the rest starts.  Other names are found by who asks.
_SHOWN = (
    "MultiHeadAttention DotProductAttention AdditiveAttention GQAAttention CausalAttention KernelAttention "
    "PositionalEncoding functional masked_softmax sequence_mask transpose_qkv transpose_output show_heatmaps "
    "torch d2l viz heads teach explain show_config get_num_threads set_num_threads __version__"
).split()

# Modules that import torch or matplotlib, or take time to import: imported at their first use.
_LATER = ("d2l", "heads", "selftest", "teach", "torch", "variants", "viz")
_FROM = {"cost": "._cost", "explain": "._explain", "show_heatmaps": ".viz"}

# Names that are looked for here and stand in a module.
_IN_MODULES = {
    **{name: f"d2l.{name}" for name in ("patch", "unpatch", "compare")},
    **{name: f"torch.{name}" for name in ("convert", "frozen", "watch", "to_torch_state", "from_torch_state")},
    **{name: f"functional.{name}" for name in ("dot_product_attention", "additive_attention", "merge", "rotary")},
    **{name: f"functional.{name}" for name in ("alibi_slopes", "t5_buckets")},
    **{name: f"viz.{name}" for name in ("view", "show_bars")},
    **{name: f"heads.{name}" for name in ("importance", "prune")},
    **{name: f"teach.{name}" for name in ("check", "laws", "puzzle", "trained")},
}

config.apply_environment()


def __getattr__(name: str) -> Any:
    if name in _LATER:
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as missing:  # hasattr, help and inspect expect this type
            error = AttributeError(str(missing))
            error.name = name  # else Python suggests another name
            raise error from missing
    if name not in (*_FROM, "__version__"):
        found = _IN_MODULES.get(name, "") or meant(name, [*__all__, *_LATER])
        guess = f": did you mean mha_c.{found}?" if found else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{guess}")
    value = config.version() if name == "__version__" else getattr(import_module(_FROM[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_SHOWN)
