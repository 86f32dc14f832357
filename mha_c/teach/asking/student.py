"""`mine` as a function of a probe: a function, class or layer, of arrays or of tensors, by whatever names it has.

torch is never imported: where a student has tensors, it is loaded already.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from ..._arguments.arrays import is_tensor
from ..._recognize import books_name, parameters, root_of
from ..._recognize.roles import is_flag, trains
from ..words.sentences import said
from .answers import readable
from .configuration import constructor_parameters, size_of, sizes_of_table
from .forms import HeldByKey, Way, additive_weights, held_weights, joined, parts, take_pairs, told_roles
from .kinds import projected_by
from .making import (
    OF_FORM,
    CannotAsk,
    Layers,
    asks_for,
    heads_by_place,
    number_of_heads,
    of_groups,
    own_size,
    plain,
)
from .masks import CannotSay
from .mistakes import KINDS, BookForm, signature
from .probes import Inputs, Sizes, has_other_lengths, has_other_widths, lens_of, probes
from .results import Memory, output_of
from .written import nothing_compiled

if TYPE_CHECKING:
    from ..._types import Array

WEIGHTS = {
    "additive": ("W_q", "W_k", "w_v"),
    "multi_head": ("W_q", "W_k", "W_v", "W_o"),
    "causal_multi_head": ("W_q", "W_k", "W_v", "W_o"),
}
_TABLES = ("cos", "sin", "cis")
_BY_NAME_ALONE = {
    "causal": ("mask", "offset"), "chunked": ("mask",), "window": ("mask",), "grouped": ("mask",),
    "causal_multi_head": ("mask",),
}  # fmt: skip


@contextmanager
def gradients_recorded() -> Iterator[None]:
    """As torch is by default, so that a cell without gradients is graded as any other; on one thread.

    A probe has a few numbers: threads that wait for each other took 14 s for an answer of 0.7 s on a busy machine.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), nothing_compiled(), warnings.catch_warnings():
            # Of layers of no features, which a class is tried with: no student asked for them.
            warnings.filterwarnings("ignore", ".*zero-element")
            yield
    finally:
        torch.set_num_threads(threads)


class _NoDropout(float):
    """A rate of 0, or a layer that drops nothing: a function may take either."""

    def __call__(self, x: Any) -> Any:
        return x


class Outcome(NamedTuple):
    """What came of one probe: an output, or an error."""

    output: Any  # an array, or None
    error: Optional[BaseException] = None
    dtype: str = ""
    changed: Sequence[tuple[str, Array, Array]] = ()  # inputs that hold other numbers afterwards: before, after


class Round(NamedTuple):
    """One comparison: the book's functions that a student may be, and the parameter that hides keys in it."""

    forms: tuple[BookForm, ...]
    # "lens", "mask", "flag", "window", "made" (by a constructor); "second": the keys of a pair; "": nothing is hidden
    role: str = ""
    parameter: str = ""
    beside: str = ""  # a parameter with the same mask, without which a flag is refused


class Student:
    """One implementation: what it takes, the layers that it is, and its outcome for a probe."""

    # The share of what may be tried on its lines; 0: nothing but the known mistakes, one at a time, is tried either.
    patience = 1.0

    def __init__(
        self,
        mine: Any,
        kind: str,
        weights: Optional[Mapping[str, str]] = None,
        chosen: Optional[Inputs] = None,
        mask: Optional[str] = None,
    ) -> None:
        self.mine, self.kind, self.weights, self.mask = mine, kind, weights, mask  # `mask`: what the task says of it
        self.name = getattr(mine, "__name__", type(mine).__name__).replace("<lambda>", "function")
        self.is_class = isinstance(mine, type)
        self.is_layer = self.is_class or not (inspect.isroutine(mine) or type(mine).__name__ == "partial")
        self.has_weights = kind in WEIGHTS and self.is_layer
        self.arguments = self._books(kind)
        if kind in WEIGHTS and any(root_of(each.name) == "qkv" for each in parameters(mine)):
            self.arguments.append("W_qkv")
        if kind in WEIGHTS and not self.has_weights:
            names = [books_name(each.name, ["num_kv_heads"]) for each in parameters(mine)]
            self.arguments += list(filter(None, names))
        self.takes = told_roles(mine, self.arguments, kind)
        self.takes.update(additive_weights(mine, self.takes) if kind == "additive" and not self.has_weights else {})
        if kind == "causal_multi_head":
            self._take_one_input_three_times()
        self.is_chunked = kind in ("causal", "dot_product") and "chunk_size" in self.takes.values()
        if self.is_chunked:
            self.arguments = self._books("chunked")
            self.takes = told_roles(mine, self.arguments, kind)
        self.own = self._own_numbers()
        self.is_chunked |= kind in ("causal", "dot_product") and "chunk_size" in self.own
        self.sizes_of_table = sizes_of_table(mine) if kind == "positional_encoding" and not self.is_layer else {}
        self.takes.update(self.sizes_of_table)
        if kind == "rope":
            take_pairs(self.takes)
        elif kind != "causal_multi_head":
            self.takes = {name: "-" if role in _TABLES else role for name, role in self.takes.items()}
        taken = {*self.takes.values()}
        self.optional = {each.name for each in parameters(mine) if each.default is not each.empty}
        self.trains = trains(mine)  # arguments of a call: it is asked as in evaluation
        self.unknown = [
            name
            for name, role in self.takes.items()
            if role in ("", "-") and name not in self.optional and "drop" not in name.lower()
        ]
        self.by_name = {each.name for each in parameters(mine) if each.kind is each.KEYWORD_ONLY}
        self.attends_to_itself = "queries" in self.arguments and not {"keys", "values"} & taken
        self.values_are_keys = {"keys", "values"} <= {*self.arguments} and len({"keys", "values"} & taken) == 1
        wanted = WEIGHTS.get(kind, ())
        flags = constructor_parameters(mine) if self.is_class and kind in CAUSAL else []
        self.chosen = {**{each.name: True for each in flags if is_flag(each)}, **(chosen or {})}  # of a constructor
        held = wanted if self.has_weights else ()
        self.layers = Layers(mine, kind, held, weights or {}, self.chosen) if self.is_layer else None
        has_none = wanted and not self.has_weights and not {*wanted, "W_qkv", "weights"} & taken
        self.only_heads = bool(has_none and "num_heads" in taken)  # heads, and no weights
        if not self.has_weights and wanted and not self.only_heads:
            self._check_weights_as_arguments(wanted)
        self.sizes = self._sizes()
        self.heads, self.width = 1, 0  # where nothing says how many; of queries and keys, of a scale that is fixed
        self.entry, self.memory = "", Memory({}, {}, {})  # entry: that of the output, if it is not alone or first
        self.last_result: Any = None  # all that the last call gave
        self.flagged: Optional[tuple[str, Student]] = None  # a flag that hides the future, and the layer with it

    def _books(self, kind: str) -> list[str]:
        """The arguments of the book's function that are told by name or place."""
        every = signature(kind)
        held = (*WEIGHTS[kind], "num_heads") if self.has_weights else ()
        return [each for each in every if each not in (*held, *_BY_NAME_ALONE.get(kind, ()))]

    def _own_numbers(self) -> dict[str, int]:
        """{window, chunk_size: the layer's own; 0: the one that the class is made with}, where no call takes it."""
        names = [name for name in OF_FORM if name not in self.takes.values()]
        if not self.is_layer or self.kind not in ("dot_product", "causal", "window"):
            return {}
        if self.is_class:
            return {name: 0 for name in names if asks_for(self.mine, name)}
        return {name: x for name in names for x in [own_size(self.mine, name)] if x}

    def _take_one_input_three_times(self) -> None:
        """Queries, keys and values by name: what attends to itself is called as layer(X, X, X)."""
        named = {each.name: books_name(each.name, ["queries", "keys", "values"]) for each in parameters(self.mine)}
        if {"queries", "keys", "values"} <= {*named.values()}:
            self.takes.update({name: "X" for name, role in named.items() if role})

    def _check_weights_as_arguments(self, wanted: tuple[str, ...]) -> None:
        """The last, W_o or w_v, may be forgotten."""
        joint = {"W_qkv": ("W_q", "W_k", "W_v"), "weights": wanted}  # these may hold what the code does not read
        found = [name for role in self.takes.values() for name in joint.get(role, (role,))]
        missing = [name for name in wanted if name not in found]
        others = [theirs for theirs, role in self.takes.items() if not role and theirs not in self.optional]
        if missing and (missing[0] != wanted[-1] or others):
            words = said(
                "{name}: check needs {wanted} with these names, as attributes of a layer or arguments of a function; "
                "{missing} is missing among {taken}",
                name=self.name, wanted=", ".join(wanted), missing=missing[0], taken=", ".join(self.takes),
            )  # fmt: skip
            raise CannotAsk(words)

    def _sizes(self) -> Optional[Sizes]:
        """Of a layer, or of a layer's method, that is given; None where any will do."""
        if self.only_heads:
            return Sizes(6, 6, 6, 6, 2)
        if self.layers is None:
            if "num_kv_heads" in self.takes.values():
                return Sizes(8, 8, 8, 8, 4, num_kv_heads=2)
            heads = number_of_heads(self.mine)
            return Sizes(0, 0, 0, 0, heads) if heads else None
        if self.is_class:  # four heads in two groups, where groups can be told
            return Sizes(8, 8, 8, 8, 4, num_kv_heads=2) if asks_for(self.mine, "num_kv_heads") else None
        return self.layers.sizes(self.layers.at({}))

    @cached_property
    def precision(self) -> str:
        """Of the tensors that it takes: that of its weights, else torch's default."""
        torch: Any = sys.modules.get("torch")
        layer: Any = self.layers.first if self.layers is not None else None
        held: Any = next(iter(layer.parameters()), None) if callable(getattr(layer, "parameters", None)) else None
        types = [held.dtype] if is_tensor(held) else [torch.get_default_dtype()] if torch else []
        return next((str(each).replace("torch.", "") for each in types if each.is_floating_point), "float32")

    @cached_property
    def held(self) -> dict[str, dict[Any, str]]:
        """{argument: {key: the weight, or bias}} of arguments that hold weights by name."""
        return held_weights(self.mine) if "weights" in self.takes.values() else {}

    @cached_property
    def has_one_head(self) -> bool:
        """Whether nothing says a number of heads."""
        if self.kind not in ("multi_head", "causal_multi_head") or "num_heads" in self.takes.values():
            return False
        if self.layers is None or not self.has_weights:
            return True
        if asks_for(self.mine, "num_heads") or heads_by_place(self.mine):
            return False
        layer = self.layers.any(probes(self.kind)[0])
        return not number_of_heads(layer) and self.layers.weights(layer)[0].num_heads == 1

    @cached_property
    def has_output(self) -> bool:
        """Whether it has W_o."""
        if self.layers is None or not self.has_weights:
            return "W_o" in self.takes.values() or any("W_o" in each.values() for each in self.held.values())
        return self.layers.has_output(self.layers.any(probes(self.kind)[0]))

    @property
    def joins_heads_alone(self) -> bool:
        """Whether it is right without W_o: a single head, heads of the whole width, or another class projects them."""
        of_heads = self.layers is not None and self.layers.per_head
        return not self.has_output and bool(self.has_one_head or of_heads or self.projected_by)

    @cached_property
    def projected_by(self) -> str:
        """The class that projects its output, where another does, or ""."""
        return projected_by(self.mine)

    # ---- one call ------------------------------------------------------------------------------------------------

    def __call__(
        self, inputs: Inputs, way: Way, asked: Round, beside: Sequence[tuple[Inputs, Way, Round]] = ()
    ) -> Outcome:
        """What comes of these inputs, given this way; `beside` are other rounds whose parameters are given, too."""
        for probe, its_way, its_round in ((inputs, way, asked), *beside):
            if its_way.lens_of_items and its_round.role == "lens" and np.ndim(lens_of(probe)) > 1:
                raise CannotSay
        if (way.one_width and has_other_widths(inputs)) or (way.one_length and has_other_lengths(inputs)):
            raise CannotSay
        outputs, changed = [], []
        others = [parts(each, way.layout) for each, _, _ in beside]
        try:
            for number, part in enumerate(parts(inputs, way.layout)):
                given = self.given(part, way, asked)
                for cut, (_, their_way, other) in zip(others, beside):
                    given[other.parameter] = self.given(cut[number], their_way, other).get(other.parameter)
                before = {name: np.array(plain(x)) for name, x in given.items() if _is_array(x)}
                output = self.output(inputs, given, way, asked, part["shape"][3])
                if self.sizes_of_table:
                    output = _typed(part["X"], "X", way) + output
                outputs.append(np.asarray(plain(output), dtype=np.float64))
                after = {name: np.asarray(plain(given[name])) for name in before}
                changed += [(name, before[name], x) for name, x in after.items() if not np.array_equal(before[name], x)]
            shown = joined(outputs, way.layout)
        except (CannotSay, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            return Outcome(None, readable(error))
        return Outcome(shown, None, str(getattr(output, "dtype", "")).replace("torch.", ""), changed)

    def traced(self, inputs: Inputs, way: Way, asked: Round, name: str) -> tuple[Any, Any]:
        """The output as a tensor, and the input of this name that its graph leads to."""
        (part,) = parts(inputs, way.layout)
        given = self.given(part, way, asked)
        theirs = next(theirs for theirs, ours in self.takes.items() if ours == name)
        given[theirs] = given[theirs].requires_grad_(True) * 1  # not a leaf: the book's masked_softmax writes into X
        return joined([self.output(inputs, given, way, asked, part["shape"][3])], way.layout), given[theirs]

    def given(self, part: Inputs, way: Way, asked: Round) -> Inputs:
        """{parameter: what it is given}, without those that keep their default."""
        given: Inputs = {}
        if "num_kv_heads" in self.takes.values() and "num_kv_heads" in part:
            heads = part["num_heads"], part["num_heads"] // part["num_kv_heads"]
            part = {**part, **{name: of_groups(part[name], *heads) for name in ("W_k", "W_v")}}
        for theirs, role in self.takes.items():
            if theirs == asked.parameter and asked.role in ("lens", "mask"):
                hiding = _hiding(part, way, asked.role, theirs not in self.optional)
                if hiding is not None or theirs not in self.optional:
                    given[theirs] = hiding
            elif role == "causal":
                given[theirs] = (asked.role == "flag" and theirs == asked.parameter) or self.kind in CAUSAL
            elif theirs == asked.beside:
                given[theirs] = _hiding(part, way, "mask", False)
            elif role in ("mask", "valid_lens"):
                if theirs not in self.optional:
                    given[theirs] = None
            elif theirs in self.trains:
                given[theirs] = False
            elif theirs in self.sizes_of_table:
                given[theirs] = part["X"].shape[-1 if role == "num_hiddens" else -2]
            elif role == "second" or (role, asked.role) == ("X", "second"):  # none is to be taken for the other
                given[theirs] = _typed(part["X"] if asked.role == role else 0.7 - part["X"], role, way)
            elif role in part and (role != "window" or asked.forms[0].kind == "window"):
                given[theirs] = _typed(part[role], role, way)
            elif role == "W_qkv":
                joint = np.concatenate([part[name] for name in ("W_q", "W_k", "W_v")], axis=1)
                given[theirs] = _typed(joint, role, way)
            elif role == "weights":
                held = {
                    key: _typed(part[ours] if ours in part else self._bias(str(key), part), ours, way)
                    for key, ours in self.held[theirs].items()
                }
                given[theirs] = tuple(held.values()) if 0 in held else HeldByKey(held)
            elif role in _TABLES:
                given[theirs] = _typed(self._table(role, part, way), role, way)
            elif role == "positions":
                given[theirs] = _typed(_positions(part, way.batched), role, way)
            elif theirs not in self.optional:
                given[theirs] = _typed(self._needed(theirs, role, part), role, way)
        return given

    def _needed(self, theirs: str, role: str, part: Inputs) -> Any:
        """What an argument without a default gets that is no input of the book's function."""
        if role == "size":
            wide = part["W_q"].shape[1] if "W_q" in part else part["queries" if "queries" in part else "X"].shape[-1]
            name = size_of(theirs)
            whole = name in ("num_hiddens", "query_size") or "model" in theirs
            return 64 if name == "max_len" else wide if whole else wide // part.get("num_heads", 1)
        if "W_q" in part and role == "bias":
            return self._bias(theirs, part)
        known = {"base": 10000.0, "offset": 0, "axis": -1}
        return known.get(role, _NoDropout() if "drop" in theirs.lower() else None)

    def _bias(self, theirs: str, part: Inputs) -> Any:
        """Of a projection, beside its weight."""
        joint = re.search("qkv|attn", theirs.lower())
        return part.get(theirs, np.zeros(part["W_q"].shape[1] * (3 if joint else 1)))

    def _table(self, role: str, part: Inputs, way: Way) -> Any:
        """The numbers by which pairs are turned, for the positions of a call, or for many."""
        d = part["X"].shape[-1] if "W_q" not in part else part["W_q"].shape[1] // part["num_heads"]
        positions = _positions(part, False) if not {"offset", "positions"} & {*self.takes.values()} else np.arange(64)
        angle = positions[:, None] / 10000 ** (np.arange(0, d, 2) / d)
        angle = {"halves": np.tile(angle, 2), "pairs": np.repeat(angle, 2, axis=1)}.get(way.tables, angle)
        made = np.exp(1j * angle)
        made = {"cos": made.real, "sin": made.imag}.get(role, made)
        return np.repeat(made[None], part["shape"][0], axis=0) if way.batched else made

    def output(self, inputs: Inputs, given: Inputs, way: Way, asked: Round, keys: int) -> Any:
        call = self.mine
        if self.layers is not None:
            call = layer = self.layers.at(inputs)
            if self.has_weights:
                self.layers.put(layer, inputs, way.weights, lambda: self._called(layer, given))
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy's functions that are tried on tensors, and torch's on arrays
            result = self.last_result = self._called(call, given)
        output, entry = output_of(result, keys, asked.role == "second", self.has_weights)
        self.entry = entry or self.entry
        return output

    def _called(self, layer: Any, given: Inputs) -> Any:
        """By place what stands at the beginning, the others by name."""
        by_place = list(itertools.takewhile(lambda name: name in given and name not in self.by_name, self.takes))
        call = layer if callable(layer) else layer.forward
        by_name = {name: x for name, x in given.items() if name not in by_place}
        return call(*(given[name] for name in by_place), **by_name)


CAUSAL = tuple(kind for kind, form in KINDS.items() if form.hides == "past")  # without being told to


def _hiding(part: Inputs, way: Way, role: str, needed: bool) -> Any:
    """Lengths or a mask, as this way has them; a mask without a default is never None."""
    if role == "lens":
        return _typed(lens_of(part), "valid_lens", way)
    assert way.mask is not None
    batch, _, queries, keys = part["shape"]
    mask = np.ones((batch, queries, keys), dtype=bool) if needed and part["mask"] is True else part["mask"]
    return _typed(way.mask.given(mask, part["shape"]), "mask", way)


def _positions(part: Inputs, batched: bool) -> Any:
    first: Any = part.get("X", part.get("queries"))
    batch, _, steps, _ = part["shape"]
    positions = np.arange(steps) + part.get("offset", 0)
    return np.broadcast_to(positions, (batch, steps)).copy() if batched and first.ndim > 2 else positions


# ---- arrays and tensors ----------------------------------------------------------------------------------------------


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray) or is_tensor(x)


def _typed(x: Any, role: str, way: Way) -> Any:
    """A probe's input in the student's type."""
    if not isinstance(x, np.ndarray):
        return x
    if way.outputs_first and role.startswith("W_"):
        x = x.T
    if way.column and role == "w_v":
        x = x[None] if way.outputs_first else x[:, None]
    if way.keys and role.startswith("W_"):
        bias, alone = np.zeros(x.shape[0 if way.outputs_first else 1]), way._replace(keys=(), outputs_first=False)
        return {key: _typed(bias if key[0] == "b" else x, role, alone) for key in way.keys}
    if not way.tensors:
        return x.copy()
    torch: Any = sys.modules.get("torch")
    wide = way.dtype == "float64"
    types = {"f": getattr(torch, way.dtype), "b": torch.bool, "c": torch.complex128 if wide else torch.complex64}
    return torch.tensor(np.ascontiguousarray(x), dtype=types.get(x.dtype.kind, torch.int64))
