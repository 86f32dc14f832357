"""`mine` as a function of a probe: a function, class or layer, of arrays or of tensors, by whatever names it has.

torch is never imported: where a student has tensors, it is loaded already.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import linecache
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np

from .._arguments.arrays import is_tensor
from .._recognize import HEADS, attribute, books_name, parameters, taken
from . import book
from .probes import Inputs, Sizes, probes

if TYPE_CHECKING:
    from .._types import Array

WEIGHTS = {"additive": ("W_q", "W_k", "w_v"), "multi_head": ("W_q", "W_k", "W_v", "W_o")}


@contextmanager
def gradients_recorded() -> Iterator[None]:
    """As torch is by default, so that a cell without gradients is graded as any other."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Way(NamedTuple):
    """One way to give a student the same numbers."""

    tensors: bool  # torch's tensors of float32; else NumPy's arrays of float64
    turned: bool = False  # weights are (outputs, inputs)
    column: bool = False  # w_v is a matrix

    @property
    def dtype(self) -> str:
        """The type of its numbers."""
        return "float32" if self.tensors else "float64"


class NoOutput(TypeError):
    """What a student gives is no output."""


class Outcome(NamedTuple):
    """What came of one probe: an output, or an error."""

    output: Any  # an array, or None
    error: Optional[Exception] = None
    dtype: str = ""
    changed: Sequence[tuple[str, Array]] = ()  # inputs that hold other numbers afterwards, as they are then


class Student:
    """One implementation: what it takes, the probes for it, and its outcome for each."""

    def __init__(self, mine: Any, kind: str) -> None:
        self.mine, self.kind = mine, kind
        name = getattr(mine, "__name__", type(mine).__name__)
        self.name = "function" if name == "<lambda>" else name
        self.is_class = isinstance(mine, type)
        self.is_layer = self.is_class or not (inspect.isroutine(mine) or type(mine).__name__ == "partial")
        self.has_weights = kind in WEIGHTS and self.is_layer
        self.arguments = list(inspect.signature(getattr(book, kind)).parameters)[: 4 if self.has_weights else None]
        self.takes = taken(mine, self.arguments)
        self.by_name = {each.name for each in parameters(mine) if each.kind is each.KEYWORD_ONLY}
        self.attends_to_itself = "queries" in self.arguments and not {"keys", "values"} & {*self.takes.values()}
        self.weights: dict[str, str] = {} if self.is_class else self._weights(mine)  # a class: of its first layer
        self._layers: dict[Any, Any] = {} if self.is_class or not self.is_layer else {None: _copied(mine)}
        self.sizes = None if self.is_class else self._sizes()

    def probes(self) -> list[Inputs]:
        """The probes that it can be asked."""
        asked = probes(self.kind, self.sizes)
        if "valid_lens" not in self.takes.values():
            asked = [{**each, "valid_lens": None} if "valid_lens" in each else each for each in asked]
        if self.attends_to_itself:
            asked = [{**each, "keys": each["queries"], "values": each["queries"]} for each in asked]
            widths = [
                (each["queries"].shape[-1], [len(each[W]) for W in ("W_k", "W_v") if W in each]) for each in asked
            ]
            asked = [each for each, (width, needed) in zip(asked, widths) if all(width == size for size in needed)]
        return [each for each in asked if self._layer(each) is not None] if self.is_class else asked

    def ways(self) -> list[Way]:
        """The ways worth trying, the likeliest first."""
        torch: Any = sys.modules.get("torch")
        module = getattr(getattr(torch, "nn", None), "Module", ())
        types = [False, True] if torch else [False]
        if issubclass(self.mine, module) if self.is_class else isinstance(self.mine, module):
            types = [True]
        elif torch and any(x is torch for x in getattr(self.mine, "__globals__", {}).values()):
            types.reverse()
        W_q = getattr(self.mine, self.weights.get("W_q", ""), None)
        linear = self.is_layer and (self.is_class or not hasattr(W_q, "shape"))
        turns = [False] if linear or self.kind not in WEIGHTS else [False, True]  # the order in a Linear is known
        columns = [False, True] if self.kind == "additive" and not self.is_layer else [False]
        return list(itertools.starmap(Way, itertools.product(types, turns, columns)))

    def answers(self) -> list[tuple[Way, list[Outcome]]]:
        """What comes of the probes, for each way that leads somewhere: the fewest errors and other types first."""
        asked = self.probes()
        tried = [(way, [self(inputs, way) for inputs in asked]) for way in self.ways()]
        errors = [sum(outcome.error is not None for outcome in outcomes) for _, outcomes in tried]
        errors = [count + (way.tensors and not self._takes_graphs(way)) for count, (way, _) in zip(errors, tried)]
        types = [sum(outcome.dtype not in ("", way.dtype) for outcome in outcomes) for way, outcomes in tried]
        tried = [tried[i] for i in sorted(range(len(tried)), key=lambda i: (errors[i], types[i]))]
        return [each for each in tried if any(outcome.error is None for outcome in each[1])] or tried[:1]

    def _takes_graphs(self, way: Way) -> bool:
        """Whether tensors that need gradients are taken, too: NumPy's functions take only those that need none."""
        inputs = self.probes()[-1]
        try:
            self.traced(inputs, way, "X" if "X" in inputs else "queries")
        except Exception:
            return False
        return True

    def __call__(self, inputs: Inputs, way: Way) -> Outcome:
        """What comes of these inputs, given this way."""
        given = {name: _given(x, name, way) for name, x in inputs.items()}
        before = {name: np.array(_plain(x)) for name, x in given.items() if x is not None}
        try:
            output = self._output(inputs, given, way)
            shown = np.asarray(_plain(output), dtype=np.float64)
        except Exception as error:
            return Outcome(None, error)
        after = {name: np.asarray(_plain(given[name])) for name in before}
        changed = [(name, x) for name, x in after.items() if not np.array_equal(before[name], x)]
        return Outcome(shown, None, str(getattr(output, "dtype", "")).replace("torch.", ""), changed)

    def traced(self, inputs: Inputs, way: Way, name: str) -> tuple[Any, Any]:
        """The output as a tensor, and the input of this name that its graph leads to."""
        given = {key: _given(x, key, way) for key, x in inputs.items()}
        given[name] = given[name].requires_grad_(True) * 1  # not a leaf: the book's masked_softmax writes into X
        return self._output(inputs, given, way), given[name]

    def _output(self, inputs: Inputs, given: Inputs, way: Way) -> Any:
        layer = self._layer(inputs) if self.is_layer else self.mine
        if self.has_weights:
            self._put_weights(layer, inputs, given, way.turned)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy's functions that are tried on tensors, and torch's on arrays
            result = self._called(layer, given)
        if result is None:
            raise NoOutput("it gives None: is a return missing?")
        if isinstance(result, dict):
            raise NoOutput("it gives a dict: return the output, or (output, weights)")
        return result[0] if isinstance(result, tuple) and len(result) > 1 else result  # (output, weights)

    def _called(self, layer: Any, given: Inputs) -> Any:
        """By place what stands at the beginning, the others by name."""
        by_place = list(itertools.takewhile(lambda name: self.takes[name] and name not in self.by_name, self.takes))
        named = {theirs: given[ours] for theirs, ours in self.takes.items() if ours and theirs not in by_place}
        call = layer if callable(layer) else layer.forward
        return call(*(given[self.takes[theirs]] for theirs in by_place), **named)

    # ---- layers ---------------------------------------------------------------------------------------------------

    def _weights(self, mine: Any) -> dict[str, str]:
        """{the book's name of a weight: the attribute or argument}.  The last, W_o or w_v, may be forgotten."""
        wanted = WEIGHTS.get(self.kind, ())
        ours = {ours: theirs for theirs, ours in self.takes.items()}
        found = {name: attribute(mine, name) if self.has_weights else ours.get(name, "") for name in wanted}
        missing = [name for name, theirs in found.items() if not theirs]
        others = (
            _weights_held(mine) if self.has_weights else [theirs for theirs, name in self.takes.items() if not name]
        )
        if missing and (missing[0] != wanted[-1] or {*others} - {*found.values()}):
            raise TypeError(
                f"{self.name}: check needs {', '.join(wanted)} with these names, as attributes of a layer or "
                f"arguments of a function; {missing[0]} is missing"
            )
        return {name: theirs for name, theirs in found.items() if theirs}

    def _layer(self, inputs: Inputs) -> Any:
        """The layer for these inputs: a copy of the student's, or one that its class makes; None if it makes none."""
        if not self.is_class:
            return self._layers[None]
        first: Any = inputs.get("queries", inputs.get("X"))
        known: dict[str, Any] = {"dropout": 0.5, "bias": False, "max_len": 64, "num_heads": inputs.get("num_heads", 1)}
        known["num_hiddens"] = inputs["W_q"].shape[1] if "W_q" in inputs else first.shape[-1]
        for name, size in (("queries", "query_size"), ("keys", "key_size"), ("values", "value_size")):
            known[size] = inputs.get(name, first).shape[-1]
        arguments = {}
        for parameter in inspect.signature(self.mine).parameters.values():
            name = books_name(parameter.name, list(known))
            needed = parameter.default is parameter.empty and "*" not in str(parameter)
            if needed and not name:
                raise TypeError(f"{self.name}: check does not know the argument {parameter.name}: give it a layer")
            if needed or name in ("num_heads", "dropout"):
                arguments[parameter.name] = known[name]
        key = tuple(known.values())
        if key not in self._layers:
            self._layers[key] = _evaluating(self.mine(**arguments))
            self.weights = self._weights(self._layers[key])
        layer, held = self._layers[key], self.weights.items()
        return layer if all(_size(layer, theirs) in (0, np.size(inputs[name])) for name, theirs in held) else None

    def _sizes(self) -> Optional[Sizes]:
        """Of a layer, or of a layer's method, that is given; None where any will do."""
        owner = getattr(self.mine, "__self__", self.mine)
        heads = next((x for x in (getattr(owner, name, None) for name in HEADS) if isinstance(x, int)), 0)
        if not self.has_weights:
            table = getattr(self.mine, "P", getattr(self.mine, "pe", None))
            hiddens = 0 if table is None or self.kind != "positional_encoding" else int(table.shape[-1])
            return Sizes(0, 0, 0, hiddens, heads) if heads or hiddens else None
        if self.kind == "multi_head" and not heads:
            raise TypeError(f"{self.name}: check needs the number of heads as an attribute or argument num_heads")
        size = {name: _size(self.mine, theirs) for name, theirs in self.weights.items()}
        wide = size.get("w_v" if self.kind == "additive" else "W_o", 0)
        hiddens = wide if self.kind == "additive" else round(wide**0.5)
        if not hiddens:
            hiddens = getattr(self.mine, "num_hiddens", 0)
            hiddens = hiddens or getattr(getattr(self.mine, self.weights["W_q"]), "out_features", 0)
            hiddens = hiddens or round(size["W_q"] ** 0.5) or 6
        if not size["W_q"]:  # not known yet: they follow from the first call
            return Sizes(hiddens, hiddens, hiddens, hiddens, heads or 1)
        q, k = (size[name] // hiddens for name in ("W_q", "W_k"))
        v = size["W_v"] // hiddens if self.kind == "multi_head" else 3
        return Sizes(q, k, v, hiddens, heads or 1)

    def _put_weights(self, layer: Any, inputs: Inputs, given: Inputs, turned: bool) -> None:
        if not all(_size(layer, theirs) for theirs in self.weights.values()):
            self._called(layer, given)  # sizes not known yet become those of the call
        for name, theirs in self.weights.items():
            holder = getattr(layer, theirs)
            owner, held = (holder, "weight") if hasattr(holder, "weight") else (layer, theirs)
            shape = tuple(getattr(owner, held).shape)
            new = inputs[name].T if owner is holder or turned else inputs[name]
            _fill(owner, held, (new.T if new.T.shape == shape != new.shape else new).reshape(shape))
            if owner is holder and getattr(holder, "bias", None) is not None:
                _fill(holder, "bias", np.zeros(tuple(holder.bias.shape)))


def own_line(error: BaseException) -> str:
    """Where in the student's own text an error arose, as "line 7: x = y"; else "the call"."""
    found, trace = "the call", error.__traceback__
    while trace is not None:
        name, number = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if not name.startswith((str(Path(__file__).parents[1]), "<__")) and "-packages" not in name:
            found = f"line {number}: {linecache.getline(name, number).strip()}".rstrip(": ")
        trace = trace.tb_next
    return found


# ---- arrays and tensors ----------------------------------------------------------------------------------------------


def _given(x: Any, name: str, way: Way) -> Any:
    """A probe's input in the student's type."""
    if not isinstance(x, np.ndarray):
        return x
    if way.turned and name.startswith("W_"):
        x = x.T
    if way.column and name == "w_v":
        x = x[None] if way.turned else x[:, None]
    torch: Any = sys.modules.get("torch")
    if not way.tensors:
        return x.copy()
    return torch.tensor(x, dtype=torch.float32 if x.dtype.kind == "f" else torch.int64)


def _plain(x: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return x.detach().cpu().double().numpy() if is_tensor(x) else x


def _size(layer: Any, name: str) -> int:
    """How many elements a weight has; 0 if that is not known yet."""
    held = getattr(layer, name)
    held = getattr(held, "weight", held)
    return 0 if _is_open(held) or not hasattr(held, "shape") else int(np.prod(tuple(held.shape)))


def _weights_held(layer: Any) -> list[str]:
    """The attributes of a layer that are weights, or have some."""
    if hasattr(layer, "named_parameters"):
        return [name.partition(".")[0] for name, _ in layer.named_parameters()]
    return [name for name, x in vars(layer).items() if hasattr(x, "shape")]


def _fill(owner: Any, attribute: str, new: Array) -> None:
    old = getattr(owner, attribute)
    if is_tensor(old):
        old.data.copy_(_given(new, "", Way(True)))
    else:
        setattr(owner, attribute, np.array(new, old.dtype))


def _evaluating(layer: Any) -> Any:
    if callable(getattr(layer, "eval", None)):
        layer.eval()
    return layer


def _copied(layer: Any) -> Any:
    """A copy to put weights into, in evaluation mode.

    Tensors kept with their graph, which nobody copies, lose it; weights without sizes, which torch 1.12 fails to copy,
    are made again.
    """
    in_torch = callable(getattr(layer, "modules", None))
    held = [x for part in (layer.modules() if in_torch else [layer]) for x in vars(part).values()]
    held += layer.parameters() if in_torch else []
    copies = {id(x): x.detach() for x in held if is_tensor(x) and not _is_open(x) and x.grad_fn is not None}
    copies.update({id(x): type(x)() for x in held if _is_open(x)})
    return _evaluating(copy.deepcopy(layer, copies))


def _is_open(weight: Any) -> bool:
    return type(weight).__name__.startswith("Uninitialized")
