"""The attention classes of d2l itself, which become ours of the same names: told by their parts and what they compute.

d2l is never imported.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ...errors import ShapeError
from .._call.children import is_changed
from .._call.inputs import copied
from .._module import AttentionModule
from ..grouped import OF_MODELS
from ..layers import OF_BOOK

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*OF_BOOK, *OF_MODELS)}  # ours
_STATE = frozenset((*nn.Module().__dict__, "num_heads"))  # attributes of our modules before the first call
_ROUNDING = 1e-4  # far above rounding in float32, far below the difference of another formula with numbers around 1


def is_of_the_book(module: nn.Module) -> bool:
    """Whether its class stands in d2l's own module of any generation, which calls itself d2l."""
    kind = type(module)
    home = sys.modules.get(kind.__module__)
    return kind.__name__ in _KINDS and home is not None and getattr(home, "d2l", None) is home


def become_ours(module: nn.Module) -> Optional[str]:
    """Convert one module of d2l's; returns None, or the reason why it is not converted."""
    if is_changed(module):
        return "has hooks or a forward of its own"
    if not _looks_like_d2l(module):
        return "has other parts or other arguments than d2l's class of that name"
    empty_rows = _equal_with(module)
    if empty_rows is None:
        return "computes something other than d2l's class of that name"
    _become_ours(module, empty_rows)
    return None


def _looks_like_d2l(module: nn.Module) -> bool:
    kind = type(module)
    ours = _KINDS[kind.__name__]
    if {name for name, _ in module.named_children()} != _children(ours) or any(True for _ in module.buffers()):
        return False
    # Python notes __slotnames__ in a class when it first copies an instance.
    names = vars(kind).keys() - {"__slotnames__"}
    if any(True for _ in module.parameters(recurse=False)) or any(not hasattr(ours, name) for name in names):
        return False
    ours_takes, takes = (inspect.signature(one.forward).parameters.values() for one in (ours, kind))
    by_place = [x.name for x in ours_takes if x.kind is x.POSITIONAL_OR_KEYWORD]
    return [x.name for x in takes if x.kind is not x.VAR_POSITIONAL] == by_place


def _children(ours: Any) -> set[str]:
    """The names of the children of a layer: its projections, and what holds the dropout, if there is one."""
    layout = ours._layout
    holder = layout.inner[:1] if layout.inner else ("dropout",) if layout.dropout else ()
    return {*holder, *(name for _, name in layout.slots)}


def _become_ours(module: Any, empty_rows: str) -> None:
    ours = _KINDS[type(module).__name__]
    for name in module.__dict__.keys() - _STATE:  # a program's own attributes stay
        if name == "board" or hasattr(ours, name):  # d2l.Module's: files without it load where d2l is missing
            del module.__dict__[name]
    module.__class__ = ours
    inner = module._modules.get("attention")  # converted before: what decides in a call of the children
    if ours._layout.dropout is not None:  # those of the third generation have one answer
        module.empty_rows = inner.empty_rows if isinstance(inner, AttentionModule) else empty_rows


# --- What a module computes ---------------------------------------------------------------------------


class _Weighing(nn.Module):
    """Replaces a dropout in the comparison: multiplies each number by a factor of its position, without randomness."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)


def _equal_with(module: nn.Module) -> Optional[str]:
    """What a query without keys gets from our module, "uniform" or "zero", where it gives the same results as this
    module, including attention weights and gradients; None where it does not."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        own = _with_numbers(_copy(module))
        twins = {empty_rows: _copy(own) for empty_rows in ("uniform", "zero")}
        try:
            expected = _results_of_calls(own)
        except Exception:  # another class may raise anything where d2l's computes
            return None
        for empty_rows, ours in twins.items():
            _become_ours(ours, empty_rows)
            with suppress(ShapeError):  # projections that do not fit together in d2l's class
                if _agree(expected, _results_of_calls(ours)):
                    return empty_rows
    return None


def _results_of_calls(module: nn.Module) -> list[Tensor]:
    """The results of several calls: one with many keys, which shows windows, and some with lengths, in both modes."""
    found = _results(module.eval(), None, (3, 64))
    for training in (False, True):
        for lens in (None, [1, 3], [[2, 1, 0], [3, 2, 1]]):
            given = None if lens is None else torch.tensor(lens, device="cpu")
            found += _results(module.train(training), given)
    return found


def _agree(own: list[Tensor], ours: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING) for a, b in zip(own, ours))


def _copy(module: nn.Module) -> Any:
    """A copy of the module that shares its parameters and has a `_Weighing` in the place of each dropout."""
    kind: Any = type(module)
    twin = kind.__new__(kind)
    state = {name: value for name, value in module.__dict__.items() if not isinstance(value, Tensor)}
    children = {
        name: _Weighing() if type(child) is nn.Dropout else _copy(child) for name, child in module.named_children()
    }
    twin.__dict__.update(state, _modules=children, _parameters=dict(module._parameters))
    return twin


def _with_numbers(module: nn.Module) -> Any:
    """A copy on the CPU in float32 with random weights: with a model's own weights, which may be zeros or all equal,
    different formulas could give the same results.  The first call draws the weights of lazy modules."""
    module = copied(module).float()
    module = module.to_empty(device="cpu") if any(x.is_meta for x in module.parameters()) else module.cpu()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in module.parameters():
            if not nn.parameter.is_lazy(x):
                x.normal_(std=x.shape[-1] ** -0.5, generator=generator)
    return module


def _results(module: Any, lens: Any, rows: tuple[int, ...] = (3, 5)) -> list[Tensor]:
    """Output, gradients of the inputs, and attention weights where the book's module has them."""
    generator, sizes = torch.Generator().manual_seed(0), (4, 4, 4)  # type: tuple[Any, tuple[int, ...]]
    if hasattr(module, "W_qkv"):
        rows, sizes, lens = rows[1:], (module.W_qkv.in_features,), None
    elif hasattr(module, "W_q"):
        linears = [getattr(module, name, module.W_q) for name in ("W_q", "W_k", "W_v")]
        sizes = tuple(linear.in_features or linear.out_features for linear in linears)
    shapes = [(2, n, size) for n, size in zip((*rows, rows[-1]), sizes)]
    place: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the program's defaults
    inputs = [torch.randn(shape, generator=generator, requires_grad=True, **place) for shape in shapes]
    out = module(*inputs, *([lens] if len(inputs) == 3 else []))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    # A MultiHeadAttention shows the weights of the attention inside it, which has been compared already.
    return [out, *grads, *([module.attention_weights] if "dropout" in module._modules else [])]
