"""Layers to be asked, copied or made by a class for given sizes; their weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Optional

import numpy as np

from ..._arguments.arrays import is_tensor
from ..._recognize import Weights, heads_of, weights_of
from ..words.sentences import said
from .configuration import (
    Config,
    Seed,
    constructor_parameters,
    is_config,
    names_of,
    own_defaults,
    size_of,
    takes_config,
    unknown_of,
)
from .probes import Inputs, Sizes, probes
from .written import written_methods

_LEFT_AS_THEY_ARE = "bias", "base", "max_len", "temperature", "device", "dtype", "rng"  # where they have a default
DROPOUT = 0.3  # the share that layers are made with: not a half, so that 1 - p is another number
_OF_PROBES = "W_q", "W_k", "W_v", "W_o", "w_v"
OF_FORM = ("window", "chunk_size")  # numbers that make another function of the same arrays


class Making(NamedTuple):
    """What a class is told: the sizes of its layer."""

    num_hiddens: int
    num_heads: int
    query_size: int
    key_size: int
    value_size: int
    num_kv_heads: int = 0  # 0: as many as there are heads
    window: int = 0  # where a constructor takes one
    chunk_size: int = 0
    max_len: int = 64  # more steps than any probe has

    def known(self, for_positions: bool = False) -> dict[str, Any]:
        """By the book's names."""
        each_head = max(self.num_hiddens // max(self.num_heads, 1), 1)
        return {
            **self._asdict(), "num_kv_heads": self.num_kv_heads or self.num_heads,
            "dropout": DROPOUT, "bias": False,
            "head_dim": self.query_size if for_positions else each_head,
            "base": 10000.0, "num_layers": 1, "vocab_size": 16,
            "window": self.window or 2, "chunk_size": self.chunk_size or 2,
            "temperature": self.query_size**0.5, "device": None, "dtype": None, "name": "", "rate": 0.0, "flag": False,
            "small": 0.02, "scale": self.query_size**-0.5, "rng": Seed(0), **self._weights(),
        }  # fmt: skip

    def _weights(self) -> dict[str, Any]:
        """Weights and biases of these sizes, for a constructor that takes them."""
        wide, numbers = self.num_hiddens, np.random.default_rng(3)
        rows = {"W_q": self.query_size, "W_k": self.key_size, "W_v": self.value_size, "W_o": wide}
        made = {name: numbers.standard_normal((size, wide)) for name, size in rows.items()}
        return {**made, "w_v": numbers.standard_normal(wide), **{f"b_{each}": np.zeros(wide) for each in "qkvo"}}


class CannotAsk(TypeError):
    """What is given wants what is not known: an argument of its constructor, weights by other names."""


class Unmade(Exception):
    """The student's constructor raises an error, which is the cause of this one."""


def asks_for(mine: Any, name: str) -> bool:
    """Whether a class's constructor takes what the book calls so, or finds it in its configuration."""
    if not isinstance(mine, type):
        return False
    wanted = constructor_parameters(mine)
    if any(size_of(each.name) == name for each in wanted):
        return True
    config = Config(Making(8, 2, 8, 8, 8).known())
    if not takes_config(mine):
        return False
    with suppress(Exception):
        layer = mine(**{each.name: config for each in wanted if is_config(mine, each.name)})
        if any(held is config for held in vars(layer).values()):  # a call may ask, too
            return name in config.asked or any(size_of(word) == name for word in _words(mine))
    return name in config.asked


def own_size(layer: Any, name: str) -> int:
    """What an attribute of a layer says of a size; 0 where it says nothing."""
    held = ((each, x) for each, x in vars(layer).items() if type(x) is int)
    return next((x for each, x in held if size_of(each) == name), 0)


def _words(mine: type) -> Iterator[str]:
    """The names and texts in the code of a class."""
    for code in (getattr(each, "__code__", None) for each in vars(mine).values()):
        if code is not None:
            yield from (*code.co_names, *(each for each in code.co_consts if isinstance(each, str)))


def heads_by_place(mine: Any) -> bool:
    """Whether a constructor takes a number of heads, and keeps it, by a name in no table: the one that is left."""
    wanted = constructor_parameters(mine) if isinstance(mine, type) else []
    name = next((name for name, ours in names_of(mine, wanted).items() if ours == "num_heads" != size_of(name)), "")
    with suppress(Unmade, CannotAsk):
        return bool(name) and 2 in [x for x in vars(make(mine, Making(8, 2, 8, 8, 8))).values() if type(x) is int]
    return False


def make(mine: Any, sizes: Making, kind: str = "", chosen: Optional[Mapping[str, Any]] = None) -> Any:
    """A layer of a class, in evaluation mode; `chosen` are arguments of the constructor beside sizes."""
    known = sizes.known(kind in ("positional_encoding", "rope"))
    wanted = constructor_parameters(mine)
    given: dict[str, Any] = {}
    names = names_of(mine, wanted, kind)
    for parameter in wanted:
        name = names[parameter.name]
        needed = parameter.default is parameter.empty
        if is_config(mine, parameter.name) and (needed or parameter.default is None):
            own = own_defaults(mine, parameter.annotation)
            given[parameter.name] = Config({**own, **known, **(chosen or {})})
        elif parameter.annotation in (bool, "bool") and parameter.default is False:
            given[parameter.name] = False
        elif needed and not name:
            words = "check does not know the argument {name}: give it a layer"
            raise CannotAsk(said(words, name=parameter.name))
        elif needed or (name and name not in _LEFT_AS_THEY_ARE and parameter.default is not None
                        and not isinstance(parameter.default, bool)):  # fmt: skip
            given[parameter.name] = known[name]
    try:
        return evaluating(mine(**{**given, **{name: x for name, x in (chosen or {}).items() if name in names}}))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        configs = [name for name in given if isinstance(given[name], Config)]
        if configs and isinstance(error, (AttributeError, KeyError)):  # of the invented object, not of the code
            words = "check does not know what {name} holds ({error}): give it a layer"
            raise CannotAsk(said(words, name=configs[0], error=error)) from error
        unknown = [name for name in unknown_of(wanted) if not is_config(mine, name)]
        unknown += [name for name, x in given.items() if isinstance(x, Seed)]  # torch's generators are others
        if unknown:
            words = "check does not know the argument {name}: give it a layer"
            raise CannotAsk(said(words, name=unknown[0])) from error
        raise Unmade from error


def plain(x: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return x.detach().cpu().double().numpy() if is_tensor(x) else x


def evaluating(layer: Any) -> Any:
    """The layer, in evaluation mode; of weights of half precision, which show few digits, in float32."""
    written_methods(layer)
    if callable(getattr(layer, "eval", None)):
        layer.eval()
    elif getattr(layer, "training", None) is True:
        layer.training = False
    held = [x for x in layer.parameters()] if callable(getattr(layer, "parameters", None)) else []
    if any(is_tensor(x) and not is_open(x) and x.element_size() == 2 for x in held):
        layer.float()
    return layer


def copied(layer: Any) -> Any:
    """A copy to put weights into, in evaluation mode.

    Tensors kept with their graph, which nobody copies, lose it; weights without sizes, which torch 1.12 fails to copy,
    are made again.
    """
    in_torch = callable(getattr(layer, "modules", None))
    held = [x for part in (layer.modules() if in_torch else [layer]) for x in vars(part).values()]
    held += layer.parameters() if in_torch else []
    copies = {id(x): x.detach() for x in held if is_tensor(x) and not is_open(x) and x.grad_fn is not None}
    copies.update({id(x): type(x)() for x in held if is_open(x)})
    try:
        return evaluating(copy.deepcopy(layer, dict(copies)))
    except Exception:  # a lock, a generator, a configuration that answers to any name: nobody writes into these
        shared = {id(x): x for x in held if not is_tensor(x) and not callable(x) and not _is_copied(x)}
        return evaluating(copy.deepcopy(layer, {**copies, **shared}))


def _is_copied(x: Any) -> bool:
    try:
        copy.deepcopy(x)
    except Exception:
        return False
    return True


def is_open(weight: Any) -> bool:
    """Whether a weight has no size yet."""
    return type(weight).__name__.startswith("Uninitialized")


# ---- a layer, its weights and its sizes ----------------------------------------------------------------------------


class Layers:
    """The layers that one student is asked with: copies of a layer, or what a class makes for each size."""

    def __init__(
        self, mine: Any, kind: str, wanted: tuple[str, ...], weights: Mapping[str, str], chosen: Mapping[str, Any]
    ) -> None:
        self.mine, self.kind, self.wanted, self.chosen = mine, kind, wanted, chosen
        self.given, self.is_class = dict(weights), isinstance(mine, type)
        self._made: dict[Any, Any] = {} if self.is_class else {None: copied(mine)}
        self._read: dict[int, list[Weights]] = {}
        self._fitting: dict[int, dict[Any, bool]] = {}  # of a layer whose sizes are known: the shapes that it fits
        self._put: dict[int, Any] = {}  # which weights a layer holds
        self._failed: Optional[Unmade] = None
        self.of_probes_steps = False  # the most steps that the constructor takes are those of each call
        self.per_head = False  # the width that the constructor takes is that of one head

    def at(self, inputs: Inputs) -> Any:
        """The layer for these inputs; None if the class makes none of these sizes."""
        if not self.is_class:
            return self._made[None]
        sizes = self._making(inputs)
        if sizes not in self._made:
            try:
                self._made[sizes] = make(self.mine, sizes, self.kind, self.chosen)
            except Unmade as error:
                self._made[sizes], self._failed = None, error
        layer = self._made[sizes]
        return layer if layer is not None and self._fits(layer, inputs) else None

    @property
    def first(self) -> Any:
        """A layer of those that there are; None before the first is made."""
        return next(iter(self.every), None)

    @property
    def every(self) -> list[Any]:
        """All that there are."""
        return [layer for layer in self._made.values() if layer is not None]

    def remake(self, inputs: Inputs) -> None:
        """Let the class make the layer for these inputs again: its constructor's lines may be looked at."""
        if self.is_class:
            old = self._made.pop(self._making(inputs), None)
            self._put.pop(id(old), None)
            self._read.pop(id(old), None)
            self._fitting.pop(id(old), None)
            self.at(inputs)

    def any(self, inputs: Inputs) -> Any:
        """A layer, whatever its sizes; Unmade if there is none."""
        self.at(inputs)
        if not self.every:
            raise self._failed or Unmade
        return self.every[-1]

    def _making(self, inputs: Inputs) -> Making:
        first: Any = inputs.get("queries", inputs.get("X"))
        widths = [inputs.get(name, first).shape[-1] for name in ("queries", "keys", "values")]
        hiddens = inputs["W_q"].shape[1] if "W_q" in inputs else widths[0]
        hiddens //= inputs["num_heads"] if self.per_head else 1
        q, k, v = widths
        more = {name: inputs[name] for name in ("num_kv_heads", *OF_FORM) if name in inputs}
        more.update({"max_len": first.shape[-2]} if self.of_probes_steps else {})
        return Making(hiddens, inputs.get("num_heads", 1), q, k, v, **more)

    def _fits(self, layer: Any, inputs: Inputs) -> bool:
        if not self.wanted:
            return self.kind != "positional_encoding" or _width_of_table(layer) in (0, inputs["X"].shape[-1])
        known = self._fitting.setdefault(id(layer), {})
        heads = (inputs.get("num_heads"), inputs.get("num_kv_heads"))
        shapes = (*heads, *(_shape(inputs[name]) if name in inputs else None for name in _OF_PROBES))
        if shapes in known:  # each probe is asked many times
            return known[shapes]
        ways = self.weights(layer)
        if self.kind == "additive":
            ways = self._read[id(layer)] = [each.beside(len(inputs["W_q"])) for each in ways]
        sizes = [(each, each.sizes(layer)) for each in ways]
        fitting = [each for each, size in sizes if self._are(size, inputs)]
        if fitting:  # of the ways to read its weights
            self._read[id(layer)] = fitting
        if not any(0 in size for _, every in sizes for size in every.values()):
            known[shapes] = bool(fitting)
        return bool(fitting)

    def _are(self, sizes: dict[str, tuple[int, int]], inputs: Inputs) -> bool:
        """Whether weights of these sizes are those of a probe."""
        groups = inputs.get("num_heads", 1) // inputs.get("num_kv_heads", inputs.get("num_heads", 1))
        shared = {"W_k": groups, "W_v": groups}  # heads of a group share one
        wide = {name: (size[0], size[1] * shared.get(name, 1)) for name, size in sizes.items()}
        return all(0 in size or size == _shape(inputs[name]) for name, size in wide.items() if name in inputs)

    def weights(self, layer: Any) -> list[Weights]:
        """The ways to read its weights; TypeError where there is none."""
        if id(layer) not in self._read:
            of_kind = "additive" if self.kind == "additive" else "multi_head"
            found = weights_of(layer, of_kind, self.given)
            held = sorted({name.rpartition(".")[0] or name for name in _held(layer)})
            if not found or (self.wanted[-1] == "w_v" and "w_v" not in found[0].parts):
                words = said(
                    "{name}: check needs {wanted}, and does not find them in {held}; say which they are: {call}",
                    name=type(layer).__name__, wanted=", ".join(self.wanted),
                    held=", ".join(held) or said("a layer without weights"),
                    call=f'check(mine, kind, weights={{"{self.wanted[0]}": "{held[0] if held else "name"}", ...}})',
                )  # fmt: skip
                raise CannotAsk(words)
            self._read[id(layer)] = [each for each in found if _agrees(each.sizes(layer))] or found
        return self._read[id(layer)]

    @property
    def has_joint_weights(self) -> bool:
        """Whether a layer that it was asked with keeps several weights in one."""
        read = (each for ways in self._read.values() for each in ways)
        return any(
            len({part.weight for part in own}) < len(own) or own[0].rows is not None
            for each in read
            for own in each.parts.values()
        )

    def has_output(self, layer: Any) -> bool:
        """Whether it has W_o."""
        return self.kind == "additive" or "W_o" in self.weights(layer)[0].parts

    def sizes(self, layer: Any) -> Optional[Sizes]:
        """Its own sizes, for probes that fit; None where it takes any."""
        heads = number_of_heads(layer)
        if not self.wanted:
            hiddens = _width_of_table(layer) if self.kind == "positional_encoding" else 0
            return Sizes(0, 0, 0, hiddens, heads) if heads or hiddens else None
        read = self.weights(layer)[0]
        size = read.sizes(layer)
        q, hiddens = size["W_q"]
        hiddens = hiddens or getattr(layer, "num_hiddens", 0) or q or 6
        k = size["W_k"][0]
        if self.kind == "additive":
            return Sizes(q or hiddens, k or hiddens, 3, hiddens)
        v, wide = size["W_v"]
        wide = wide * read.num_heads // max(read.num_kv_heads, 1)
        out = size["W_o"][1] if "W_o" in size else 0
        return Sizes(
            q or hiddens, k or hiddens, v or hiddens, hiddens, heads or read.num_heads,
            wide or hiddens, out or hiddens, read.num_kv_heads if heads or read.num_heads > 1 else 0,
        )  # fmt: skip

    def sizes_that_fit(self, layer: Any) -> Optional[Sizes]:
        """Of a class that makes no layer of any probe's sizes: those of this layer of it, or such as follow from them;
        None: any, but the width that its constructor takes is that of one head."""
        sizes = self.sizes(layer)
        if sizes is None or not self.wanted or self.kind == "additive":
            return sizes
        read = self.weights(layer)[0].sizes(layer)
        wide = read.get("W_o", read["W_v"])[0]  # W_o may have a size of its own
        heads = sizes.num_heads if wide % sizes.num_heads == 0 else 2
        joined = sizes._replace(num_hiddens=wide, value_hiddens=wide, num_heads=heads, num_kv_heads=0)
        sizes = sizes if sizes.num_hiddens % sizes.num_heads == 0 else sizes._replace(num_heads=heads, num_kv_heads=0)
        for each, per_head in ((sizes, False), (joined, False), (None, True)):
            self.per_head = per_head
            if self.at(probes(self.kind, each)[-1]) is not None:
                return each
        self.per_head = False
        return sizes

    def put(self, layer: Any, inputs: Inputs, number: int, call: Callable[[], Any]) -> None:
        """Write a probe's weights into a layer, in the way of this number; `call` lets sizes follow from an input."""
        if self._put.get(id(layer)) == (id(inputs["W_q"]), number):
            return
        self._put[id(layer)] = id(inputs["W_q"]), number
        ways = self.weights(layer)
        if any(0 in size for size in ways[0].sizes(layer).values()):
            call()
            del self._read[id(layer)]
            ways = self.weights(layer)
        read = ways[min(number, len(ways) - 1)]
        sizes = read.sizes(layer)
        shared = read.num_heads // read.num_kv_heads if read.num_kv_heads else 1
        for name in read.parts:
            if name in inputs and 0 not in sizes[name]:  # what no call uses has no size
                new = inputs[name]
                if shared > 1 and name in ("W_k", "W_v"):
                    new = of_groups(new, read.num_heads, shared)
                read.set(layer, name, new)
        read.clear_biases(layer)


def of_groups(weight: Any, heads: int, share: int) -> Any:
    """Of a weight whose heads are alike in each group, the first of each."""
    return weight.reshape(len(weight), heads, -1)[:, ::share].reshape(len(weight), -1)


def holds_triangle(layer: Any) -> bool:
    """Whether a layer, or a part of it, keeps a triangular mask."""
    parts = layer.modules() if callable(getattr(layer, "modules", None)) else [layer]
    held = [x for part in parts for x in {**vars(part), **getattr(part, "_buffers", {})}.values()]
    tables = [np.asarray(plain(x)) for x in held if isinstance(x, np.ndarray) or is_tensor(x)]
    squares = [x.reshape(-1, *x.shape[-2:])[0] for x in tables if x.ndim > 1 and 1 < x.shape[-1] == x.shape[-2]]
    return any(len(np.unique(x)) == 2 and (_is_triangle(x) or _is_triangle(x.T)) for x in squares)


def _is_triangle(x: Any) -> bool:
    """Whether the corner below the diagonal, or nearly it, holds one number and the rest the other."""
    past = x == x[-1, 0]
    return any(np.array_equal(past, np.tri(len(x), k=k, dtype=bool)) for k in (-2, -1, 0, 1))


def widths(layer: Any) -> list[int]:
    """The widths of inputs that what a layer keeps may belong to, the likeliest first."""
    held = {**vars(layer), **getattr(layer, "_buffers", {})}
    numbers = [x for x in held.values() if isinstance(x, int) and not isinstance(x, bool)]
    sizes = [int(x.shape[-1]) for x in held.values() if len(getattr(x, "shape", ())) > 0]
    return [x for x in dict.fromkeys([*(2 * n for n in sizes), *sizes, *numbers]) if x > 0 and x % 2 == 0]


def _width_of_table(layer: Any) -> int:
    """Of the table that a layer adds; 0 where it keeps none."""
    held = {**vars(layer), **getattr(layer, "_buffers", {})}
    tables = [held[name] for name in ("P", "pe") if held.get(name) is not None] or list(held.values())
    widths = [int(x.shape[-1]) for x in tables if len(getattr(x, "shape", ())) >= 2]
    return widths[0] if widths else 0


def _agrees(sizes: dict[str, tuple[int, int]]) -> bool:
    """Whether what one weight makes is what the next one takes."""
    if 0 in itertools.chain.from_iterable(sizes.values()):
        return True
    if "w_v" in sizes:
        return sizes["W_q"][1] == sizes["W_k"][1] == sizes["w_v"][0]
    return sizes["W_q"][1] >= sizes["W_k"][1] and ("W_o" not in sizes or sizes["W_o"][0] % sizes["W_v"][1] == 0)


def number_of_heads(layer: Any) -> int:
    """What a layer, or a layer's method, says of it; 0 where it says nothing."""
    return heads_of(getattr(layer, "__self__", layer))


def _shape(x: Any) -> tuple[int, int]:
    return (len(x), 1) if np.ndim(x) == 1 else x.shape


def _held(layer: Any) -> list[str]:
    """The weights that a layer holds, by their paths."""
    if hasattr(layer, "named_parameters"):
        return [name for name, _ in layer.named_parameters()]
    return [name for name, x in vars(layer).items() if hasattr(x, "shape")]
