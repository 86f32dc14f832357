"""Head parallel: every rank of a group keeps some of the heads of a MultiHeadAttention.

The rows of W_q, W_k, W_v and the columns of W_o that belong to a head stay together, so that a rank computes its heads
by itself; the sum over the ranks is one all-reduce forward, and the gradient of the inputs one all-reduce backward.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._layers_with_heads import TorchLayer
from ...errors import ShapeError
from .._call.children import has_own_attention, is_changed
from .._tensors import FLOATS, array, draw_seed
from ..functional import dot_product_attention
from ..layers import MultiHeadAttention
from . import _ring
from ._group import Field, Ranks, agree, ranks_of, talking
from ._sequence import Mask, Plan
from .attention import _attend, _whole_lengths

_CALLER = "shard_heads"
_ROLES = "W_q", "W_k", "W_v", "W_o"


def shard_heads(module: nn.Module, group: Optional[dist.ProcessGroup] = None) -> nn.Module:
    """Spread the heads of a module over a group of n ranks: each rank keeps 1/n of the heads, in the order of ranks.

    Every rank calls it with the same parameters, and calls the result with the same inputs.  On every rank the outputs,
    the gradients of inputs and the gradients of the rank's own parameters are those of the whole module.

    Parameters
    ----------
    module : nn.Module
        A mha_c.torch.MultiHeadAttention without open sizes, or a model that contains some, which are replaced.
    group : ProcessGroup, optional
        A group of torch.distributed (gloo).  Default: all processes.  Its size must divide num_heads.

    Returns
    -------
    ShardedMultiHeadAttention or nn.Module
        The new layer, or the model.  The parameters are new objects: create the optimizer afterwards.

    Raises
    ------
    ValueError
        If the size of the group does not divide num_heads, or if the model contains no such layer.  If parameters or
        inputs differ between ranks: this or a ShapeError, with the ranks in the message.
    TypeError
        If the layer or its W_o has hooks; in a call with dropout also if the attention in it is replaced or has hooks.
    RuntimeError
        If a rank does not answer.

    Notes
    -----
    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.

    Examples
    --------
    >>> import torch, torch.distributed as dist, mha_c.torch
    >>> from mha_c.torch.distributed import gather_heads, shard_heads
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # torchrun starts more
    >>> whole = mha_c.torch.MultiHeadAttention(8, 8, 8, num_hiddens=8, num_heads=2, dropout=0.0)
    >>> part, x = shard_heads(whole), torch.randn(1, 4, 8)
    >>> torch.allclose(part(x, x, x), whole(x, x, x), atol=1e-6), gather_heads(part).num_heads
    (True, 2)
    >>> dist.destroy_process_group()
    """
    ranks = ranks_of(group, _CALLER)
    return _replaced(module, lambda layer: ShardedMultiHeadAttention(layer, ranks), MultiHeadAttention, "shard_heads")


def gather_heads(module: nn.Module) -> nn.Module:
    """Undo `shard_heads`: every rank gets the whole layer, or the model with whole layers.

    Parameters
    ----------
    module : nn.Module
        The result of `shard_heads`; all ranks make this call.

    Returns
    -------
    MultiHeadAttention or nn.Module
        The whole layer, or the model.

    Examples
    --------
    >>> import torch.distributed as dist, mha_c.torch
    >>> from mha_c.torch.distributed import gather_heads, shard_heads
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> gather_heads(shard_heads(mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0))).num_heads
    2
    >>> dist.destroy_process_group()
    """
    return _replaced(module, ShardedMultiHeadAttention.gathered, ShardedMultiHeadAttention, "gather_heads")


def _replaced(module: nn.Module, replace: Any, kind: type[nn.Module], caller: str) -> nn.Module:
    if isinstance(module, kind):
        return replace(module)
    done: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, kind):
                done[child] = done[child] if child in done else replace(child)
                setattr(parent, name, done[child])
    if not done:
        raise ValueError(f"{caller}: {type(module).__name__} has no {kind.__name__} in it")
    return module


class ShardedMultiHeadAttention(nn.Module):
    """This rank's heads of a MultiHeadAttention; made by `shard_heads`.

    Call: like the layer itself.  All ranks call it together, with the same inputs, and get the same result.
    `num_heads` counts all heads.
    `state_dict()` is that of the whole layer, and all ranks call it together; `load_state_dict` takes such a dict.
    `attention_weights` are gathered: they are the weights of all heads.  Rank 0 holds the bias of W_o.

    Not made by hand.
    """

    def __init__(self, layer: MultiHeadAttention, ranks: Ranks) -> None:
        super().__init__()
        self._ranks, self.num_heads = ranks, layer.num_heads
        refusal: Optional[Exception] = None
        state = b""
        if layer.num_heads % ranks.size:
            counted = f"num_heads ({layer.num_heads}) must be divisible by the number of ranks ({ranks.size})"
            refusal = ValueError(counted)
        elif any(isinstance(child, nn.LazyLinear) for child in layer.children()):
            refusal = ValueError("the layer's sizes are still open: call it once before shard_heads")
        elif is_changed(layer) or is_changed(layer.W_o):
            refusal = TypeError("the layer or its W_o has hooks or a forward of its own, which would see part of a sum")
        else:
            state = b"".join(array(x).tobytes() for x in layer.state_dict().values())
        agree(ranks, _CALLER, [Field("the layer's parameters (shown: a checksum)", zlib.crc32(state))], (), refusal)
        part = copy.deepcopy(layer)
        share = layer.num_heads // ranks.size
        TorchLayer(part, _ROLES, "").keep_heads(range(ranks.rank * share, (ranks.rank + 1) * share), {})
        if ranks.rank:
            part.W_o.bias = None
        self.has_bias = layer.W_o.bias is not None
        self.part = part
        self._agreed: Any = None
        self._dropped: Any = None  # q, k, v and lengths of the last call, if it had dropout
        self.register_state_dict_post_hook(_gather_state)
        self.register_load_state_dict_pre_hook(_cut_state)

    # The children, under the names that the whole layer has.
    W_q = property(lambda self: self.part.W_q)
    W_k = property(lambda self: self.part.W_k)
    W_v = property(lambda self: self.part.W_v)
    W_o = property(lambda self: self.part.W_o)
    attention = property(lambda self: self.part.attention)

    @property
    def attention_weights(self) -> Tensor:
        """Weights of all heads in the last call, (B, H, Q, K), on every rank.  All ranks must read them together."""
        empty_rows: Any = self.part.empty_rows
        if self._dropped is None:
            own = self.part.attention_weights
        else:
            _, own = dot_product_attention(*self._dropped, empty_rows=empty_rows, return_weights=True)
        return _gathered(self._ranks, own, 1)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Any = None, *, training: Optional[bool] = None
    ) -> Tensor:
        """The call of the layer, by all ranks together: see the class."""
        p = self.part._dropout_now(training)
        seed = draw_seed() if p else 0
        self._agree(queries, keys, values, seed if p else 0)
        distinct = list({id(x): x for x in (queries, keys, values)}.values())
        spread = dict(zip(map(id, distinct), _Spread.apply(self._ranks, *distinct)))
        q, k, v = (spread[id(x)] for x in (queries, keys, values))
        self._dropped = None
        if p:
            out = self._dropping(q, k, v, valid_lens, p, seed)
        else:
            out = self.part(q, k, v, valid_lens, training=training)
        return _Sum.apply(self._ranks, out)

    def _agree(self, queries: Tensor, keys: Tensor, values: Tensor, seed: int) -> None:
        """Check, whenever shapes change, that all ranks have the same inputs."""
        shapes = tuple(tuple(x.shape) for x in (queries, keys, values)), queries.dtype
        if shapes == self._agreed:
            return
        numbers = b"".join(array(x).tobytes() for x in (queries, keys, values) if x.dtype in FLOATS)
        fields = [
            *(Field(f"the shape of {name}", shape, ShapeError)
              for name, shape in zip(("queries", "keys", "values"), shapes[0])),
            Field("dtype", queries.dtype, TypeError),
            Field("the inputs, which are the same on all ranks (shown: a checksum)", zlib.crc32(numbers)),
            Field("the seed of dropout (seed torch alike on all ranks)", seed),
        ]  # fmt: skip
        agree(self._ranks, _CALLER, fields)
        self._agreed = shapes

    def _dropping(self, queries: Tensor, keys: Tensor, values: Tensor, lens: Any, p: float, seed: int) -> Tensor:
        """A call with dropout, which depends on the number of each head in the whole layer."""
        part = self.part
        if not has_own_attention(part) or is_changed(part.attention.dropout):
            raise TypeError(
                f"attention is a {type(part.attention).__name__} that is replaced or hooked, or its dropout is: where "
                f"heads are shared out neither is called in training with dropout"
            )
        q, k, v = (
            linear(x).unflatten(2, (part.num_heads, -1)).transpose(1, 2)
            for linear, x in ((part.W_q, queries), (part.W_k, keys), (part.W_v, values))
        )
        lens = _whole_lengths(lens, q.shape[0])
        part.attention._last, self._dropped = None, (q.detach(), k.detach(), v.detach(), lens)
        plan = Plan(1, q.shape[2], k.shape[2], "contiguous", Mask(lens=lens))
        one, first_head = Ranks(self._ranks.group, 0, 1), self._ranks.rank * part.num_heads
        context = _attend(_ring.Call(plan, one, None, p, seed, _CALLER, first_head, part.empty_rows), q, k, v)
        return part.W_o(context.transpose(1, 2).flatten(2))

    def gathered(self) -> MultiHeadAttention:
        """The whole layer, on every rank.

        Returns
        -------
        MultiHeadAttention
            A new layer with its own parameters.
        """
        layer = copy.deepcopy(self.part)
        trained = {name: x.requires_grad for name, x in layer.named_parameters()}
        for name, value in self.state_dict().items():
            role, kind = name.split(".")
            kept = nn.Parameter(value, requires_grad=trained.get(name, True))
            getattr(layer, role).register_parameter(kind, kept)
        for role in _ROLES:
            linear = getattr(layer, role)
            linear.out_features, linear.in_features = linear.weight.shape
        layer.num_heads = self.num_heads
        return layer

    def extra_repr(self) -> str:
        """The text between the brackets of `repr`.

        Returns
        -------
        str
            How many heads this rank has, and its rank.
        """
        return f"heads {self.part.num_heads} of {self.num_heads}, rank {self._ranks.rank} of {self._ranks.size}"

    def _as_layer_with_heads(self, name: str) -> ShardedHeads:
        return ShardedHeads(self, name)


# --- Communication --------------------------------------------------------------------------------------


class _Spread(Function):
    """Inputs that all ranks have: each rank computes a part of their gradient; the backward pass sums the parts."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *tensors: Tensor) -> Any:
        ctx.ranks = ranks
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *(_summed(ctx.ranks, grad) if need else None for grad, need in zip(grads, needed))


class _Sum(Function):
    """The sum over the ranks; the gradient of each rank's part is the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor) -> Tensor:
        return _summed(ranks, x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad


def _summed(ranks: Ranks, x: Tensor) -> Tensor:
    """The sum of the ranks' x."""
    total = x.clone(memory_format=torch.contiguous_format)
    with talking(ranks, _CALLER):
        dist.all_reduce(total, group=ranks.group)
    return total


def _gathered(ranks: Ranks, x: Tensor, dim: int) -> Tensor:
    """The parts of all ranks, which have one size, side by side along `dim`."""
    own = x.detach().transpose(0, dim).contiguous()
    found = [torch.empty_like(own) for _ in range(ranks.size)]
    with talking(ranks, _CALLER):
        dist.all_gather(found, own, group=ranks.group)
    return torch.cat(found).transpose(0, dim).contiguous()


def _gather_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace this rank's entries of a state_dict by those of the whole layer, under the names of the whole layer."""
    ranks = module._ranks
    for role in _ROLES:
        name = f"{prefix}part.{role}."
        weight = _gathered(ranks, state.pop(name + "weight"), int(role == "W_o"))
        bias = state.pop(name + "bias", None)
        if role == "W_o" and module.has_bias:  # rank 0's comes first
            bias = _gathered(ranks, weight.new_zeros(len(weight)) if bias is None else bias, 0)[: len(weight)].clone()
        elif bias is not None:
            bias = _gathered(ranks, bias, 0)
        found = {"weight": weight, "bias": bias}
        state.update({f"{prefix}{role}.{kind}": x for kind, x in found.items() if x is not None})


def _cut_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace the whole layer's entries of a state_dict by this rank's part, under the names of the part."""
    ranks = module._ranks
    for role in _ROLES:
        for kind in ("weight", "bias"):
            whole = state.pop(f"{prefix}{role}.{kind}", None)
            if whole is None:
                continue
            for_all = role == "W_o" and kind == "bias"
            dim = int(role == "W_o" and kind == "weight")
            if not for_all and whole.shape[dim] % ranks.size == 0:
                whole = whole.chunk(ranks.size, dim)[ranks.rank]
            if not (for_all and ranks.rank):  # only rank 0 has W_o's bias
                state[f"{prefix}part.{role}.{kind}"] = whole


class ShardedHeads(TorchLayer):
    """A sharded layer for `heads.importance`, which all ranks call together with the same data."""

    def __init__(self, module: ShardedMultiHeadAttention, name: str) -> None:
        super().__init__(module.part, _ROLES, name)
        self._sharded, self.num_heads = module, module.num_heads

    @contextmanager
    def with_head_silenced(self, head: int) -> Iterator[None]:
        owner, number = divmod(head, self._heads_here)
        with super().with_head_silenced(number) if owner == self._sharded._ranks.rank else nullcontext():
            yield

    def attention_weights(self) -> Any:
        return self._sharded.attention_weights.numpy()

    def gates(self, gradient: Any) -> Any:
        own = super().gates(gradient)
        return _gathered(self._sharded._ranks, torch.from_numpy(own), 0).numpy()

    def check_prunable(self) -> None:
        raise TypeError("a sharded layer cannot lose heads: prune the result of gather_heads and shard that again")

    def keep_heads(self, heads: Sequence[int]) -> None:
        self.check_prunable()
