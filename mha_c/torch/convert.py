"""`convert`: attention modules of d2l and torch inside a model become ours and keep their weights.

d2l is never imported: `convert` recognizes a class by its name, its children and what it computes.  So it also finds
copies of the book's classes in a notebook, and does not change classes that only have the name.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .._arguments.calls import refuses_at_the_call
from ..errors import ShapeError
from ._call.children import is_changed
from ._call.inputs import copied
from ._module import AttentionModule
from ._twins import twin
from .grouped import CausalAttention, GQAAttention
from .layers import AdditiveAttention, DotProductAttention, MultiHeadAttention
from .nn import MultiheadAttention


class _Kind(NamedTuple):
    """A class of the book, as all generations have it that have it at all."""

    ours: Any
    children: set[str]
    call: tuple[str, ...] = ("queries", "keys", "values", "valid_lens")
    methods: tuple[str, ...] = ()  # that ours has not


_KINDS = {
    "MultiHeadAttention": _Kind(MultiHeadAttention, {"attention", "W_q", "W_k", "W_v", "W_o"}),
    "AdditiveAttention": _Kind(AdditiveAttention, {"W_k", "W_q", "w_v", "dropout"}),
    "DotProductAttention": _Kind(DotProductAttention, {"dropout"}),
    "GQAAttention": _Kind(GQAAttention, {"W_q", "W_k", "W_v", "W_o"}, methods=("_rope",)),
    "CausalAttention": _Kind(CausalAttention, {"W_qkv", "W_o"}, ("X",), ("_rope",)),
}
_STATE = frozenset((*nn.Module().__dict__, "num_heads"))  # attributes of our modules before the first call
_ROUNDING = 1e-4  # far above rounding in float32, far below the difference of another formula with numbers around 1


@refuses_at_the_call
def convert(module: nn.Module) -> nn.Module:
    """Convert the attention modules inside `module` to ours, in place, and return `module`.

    d2l's MultiHeadAttention, AdditiveAttention, DotProductAttention, GQAAttention and CausalAttention of any generation
    become our classes of the same names, nn.MultiheadAttention becomes `mha_c.torch.nn.MultiheadAttention`.  The
    modules and parameters stay the same objects, so optimizers keep working; modes, your own attributes, hooks of the
    model around them and state_dict keys stay too.  Before a class with one of d2l's names is converted, its results on
    a few small inputs are compared with ours, including gradients and the place of its dropout.

    Parameters
    ----------
    module : nn.Module
        A model, or an attention module itself.

    Returns
    -------
    nn.Module
        The same object.

    Raises
    ------
    TypeError
        If `module` is not a torch module.

    Warns
    -----
    UserWarning
        Names the attention modules that are not converted and says why (hooks of their own, a subclass, another
        formula), or says that `module` contains none.

    Notes
    -----
    nn.TransformerEncoderLayer has a fast path of its own in eval mode under no_grad.  It reads the weights and calls no
    attention module, neither ours nor torch's; torch.backends.mha.set_fastpath_enabled(False) switches it off.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> type(mha_c.torch.convert(model).self_attn)
    <class 'mha_c.torch.nn.MultiheadAttention'>
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"convert takes a torch module, got {type(module).__name__}")
    left, found, before = [], False, {}
    for name, part in reversed(list(module.named_modules())):  # a MultiHeadAttention after the attention inside
        if is_ours(part):
            found = True
        elif isinstance(part, nn.MultiheadAttention) or type(part).__name__ in _KINDS:
            before[part], found = (type(part), dict(part.__dict__)), True
            try:
                reason = _convert(part)
            except RuntimeError as error:  # weights that take no other numbers, as quantized ones: torch's words
                reason = f"has weights that convert cannot replace to compare it: convert before you quantize ({error})"
                for inside in before.keys() & set(part.modules()):
                    inside.__class__, attributes = before[inside]
                    inside.__dict__.clear()
                    inside.__dict__.update(attributes)
            if reason is not None:
                kind = f"{type(part).__module__}.{type(part).__qualname__}"
                left.append(f"{name or 'the module itself'} ({kind}) {reason}")
    if left:
        warnings.warn(f"convert left as they were: {'; '.join(reversed(left))}", stacklevel=3)
    elif not found:
        warnings.warn(
            f"convert found nothing to replace in {type(module).__name__}: it knows nn.MultiheadAttention, and "
            f"{', '.join(_KINDS)} as the book has them",
            stacklevel=3,
        )
    return module


def is_ours(module: nn.Module) -> bool:
    """Whether a class of mha_c computes it; those that patch() has put into d2l have d2l's name."""
    return type(module).__module__.startswith("mha_c.") or hasattr(type(module), "_explained")


def _convert(module: nn.Module) -> Optional[str]:
    """Convert one attention module; returns None, or the reason why it is not converted."""
    if is_changed(module):
        return "has hooks or a forward of its own"
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is not nn.MultiheadAttention:
            return "is a subclass"
        module.__class__ = MultiheadAttention
        return None
    if not _looks_like_d2l(module):
        return "has other parts or other arguments than d2l's class of that name"
    empty_rows = _equal_with(module)
    if empty_rows is None:
        return "computes something other than d2l's class of that name"
    _become_ours(module, empty_rows)
    return None


def _looks_like_d2l(module: nn.Module) -> bool:
    kind = type(module)
    ours, children, call, methods = _KINDS[kind.__name__]
    if {name for name, _ in module.named_children()} != children or any(True for _ in module.buffers()):
        return False
    # Python notes __slotnames__ in a class when it first copies an instance.
    names = vars(kind).keys() - {"__slotnames__", *methods}
    if any(True for _ in module.parameters(recurse=False)) or any(not hasattr(ours, name) for name in names):
        return False
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]
    return tuple(x.name for x in parameters if x.kind is not x.VAR_POSITIONAL) == call


def _become_ours(module: Any, empty_rows: str) -> None:
    ours = _KINDS[type(module).__name__].ours
    for name in module.__dict__.keys() - _STATE:  # a program's own attributes stay
        if name == "board" or hasattr(ours, name):  # d2l.Module's: files without it load where d2l is missing
            del module.__dict__[name]
    module.__class__ = ours
    inner = module._modules.get("attention")  # converted before: what decides in a call of the children
    if issubclass(ours, AttentionModule):
        module.empty_rows = inner.empty_rows if isinstance(inner, DotProductAttention) else empty_rows


# --- What a module computes ---------------------------------------------------------------------------


class _Weighing(nn.Module):
    """Replaces a dropout in the comparison: multiplies each number by a factor of its position, without randomness."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).reshape(x.shape)


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
        for lens in (None, torch.tensor([1, 3]), torch.tensor([[2, 1, 0], [3, 2, 1]])):
            found += _results(module.train(training), lens)
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
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    out = module(*inputs, *([lens] if len(inputs) == 3 else []))
    grads = torch.autograd.grad(out.square().sum(), inputs)
    # A MultiHeadAttention shows the weights of the attention inside it, which has been compared already.
    return [out, *grads, *([module.attention_weights] if "dropout" in module._modules else [])]


# --- Names of parameters ------------------------------------------------------------------------------


@refuses_at_the_call
def to_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The state_dict of a d2l or mha_c MultiHeadAttention, renamed for nn.MultiheadAttention.

    Parameters
    ----------
    state : dict
        {name: Tensor}.
    prefix : str
        The prefix of the names, including its dot.

    Returns
    -------
    dict
        With `in_proj_weight` if all input sizes are num_hiddens, else with q_proj_weight and so on (kdim, vdim).

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> ours = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, bias=True)
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> theirs.load_state_dict(mha_c.torch.to_torch_state(ours.state_dict()))
    <All keys matched successfully>
    """
    _check_names(state, *(f"{prefix}W_{name}.weight" for name in "qkvo"))
    weights = [state[f"{prefix}W_{name}.weight"] for name in "qkv"]
    renamed = {}
    if len({tuple(weight.shape) for weight in weights}) == 1 and weights[0].shape[0] == weights[0].shape[1]:
        renamed["in_proj_weight"] = torch.cat(weights)
    else:
        renamed.update({f"{name}_proj_weight": weight for name, weight in zip("qkv", weights)})
    if f"{prefix}W_q.bias" in state:
        renamed["in_proj_bias"] = torch.cat([state[f"{prefix}W_{name}.bias"] for name in "qkv"])
    renamed["out_proj.weight"] = state[f"{prefix}W_o.weight"]
    if f"{prefix}W_o.bias" in state:
        renamed["out_proj.bias"] = state[f"{prefix}W_o.bias"]
    return renamed


@twin(to_torch_state)
@refuses_at_the_call
def from_torch_state(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The reverse of `to_torch_state`: nn.MultiheadAttention's entries under d2l's names.

    Returns
    -------
    dict
        {name: Tensor}, as a MultiHeadAttention loads them.

    Examples
    --------
    >>> import torch, mha_c.torch
    >>> theirs = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    >>> ours = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    >>> ours.load_state_dict(mha_c.torch.from_torch_state(theirs.state_dict()))
    <All keys matched successfully>
    """
    _check_names(state, f"{prefix}out_proj.weight")
    unknown = [name for name in ("bias_k", "bias_v") if f"{prefix}{name}" in state]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: d2l's MultiHeadAttention has no such parameters")
    if f"{prefix}in_proj_weight" in state:
        weights = list(state[f"{prefix}in_proj_weight"].chunk(3))
    else:
        weights = [state[f"{prefix}{name}_proj_weight"] for name in "qkv"]
    biases = state[f"{prefix}in_proj_bias"].chunk(3) if f"{prefix}in_proj_bias" in state else (None,) * 3
    renamed = {}
    out = state[f"{prefix}out_proj.weight"], state.get(f"{prefix}out_proj.bias")
    for name, weight, bias in zip("qkvo", [*weights, out[0]], [*biases, out[1]]):
        renamed[f"W_{name}.weight"] = weight
        if bias is not None:
            renamed[f"W_{name}.bias"] = bias
    return renamed


def _check_names(state: Any, *names: str) -> None:
    """Errors unless `state` is a state_dict that has these entries."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a state_dict, {{name: Tensor}}, got {type(state).__name__}: write m.state_dict()"
        )
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"state has no {', '.join(missing)}: give the prefix of its names, with the dot")
