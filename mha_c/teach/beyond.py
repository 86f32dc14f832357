"""What small probes do not show of an implementation whose numbers are right: parameters that change nothing at their
first values, and what depends on many keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._arguments.arrays import is_tensor
from .comparing import equal, is_misshapen, output
from .making import is_open, plain
from .mistakes import function
from .probes import Inputs
from .rounds import Run
from .words import say

_MANY = (64, 32, 16)  # keys; a layer may have room for fewer
_TABLES = ("positional_encoding", "rope")  # kinds that keep tables of numbers that are the book's own
_WITHOUT_KEYS = (*_TABLES, "transpose_qkv", "transpose_output")


def beyond(run: Run, form: str) -> list[tuple[str, str]]:
    """Ids and words of what a right run has beside the book's function."""
    found = extra(run, form)
    if run.student.kind not in _WITHOUT_KEYS:
        found += _of_many_keys(run, form)
    return found


def extra(run: Run, form: str) -> list[tuple[str, str]]:
    """Id and words of parameters that are no weight of the book, and matter."""
    if run.student.layers is None or run.student.kind in _TABLES:
        return []
    names = _extra(run, form)
    words = say("extra_parameter", names=", ".join(names[:3]), kind=run.student.kind)
    return [("extra_parameter", words)] if names else []


# ---- parameters ------------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """A parameter that is no weight of the book."""

    path: str
    owner: Any
    name: str
    value: Any

    def write(self, new: Any) -> None:
        if is_tensor(self.value):
            self.value.data.copy_(self.value.data.new_tensor(new))
        else:
            setattr(self.owner, self.name, np.array(new, self.value.dtype))


def _extra(run: Run, form: str) -> list[str]:
    """The parameters that belong to no weight of the book, and change the result once they have other numbers."""
    student, inputs = run.student, run.probes[-1]
    assert student.layers is not None
    layer = student.layers.at(inputs)
    parts = student.layers.weights(layer)[0].parts if student.has_weights else {}
    used = {path for part in parts.values() for each in part for path in (each.weight, each.bias)}
    held = [each for each in _parameters(layer) if each.path not in used]
    if not held or _same(run, form, held):
        return []
    matter = [each for each in held if not _same(run, form, [each])]
    return [each.path for each in matter or held if not _is_a_bias(run, form, each)]


def _parameters(layer: Any, before: str = "", depth: int = 3) -> Iterator[_Held]:
    """Those of torch that learn; else arrays of ones or zeros: others, as a table, are right only as they are."""
    if hasattr(layer, "named_parameters"):
        for path, x in layer.named_parameters():
            if is_tensor(x) and x.requires_grad and not is_open(x):
                yield _Held(before + path, None, "", x)
        return
    for name, x in getattr(layer, "__dict__", {}).items():
        if isinstance(x, np.ndarray) or is_tensor(x):
            if _is_neutral(x):
                yield _Held(before + name, layer, name, x)
        elif depth and not isinstance(x, type):
            yield from _parameters(x, f"{before}{name}.", depth - 1)


def _is_neutral(x: Any) -> bool:
    numbers = np.asarray(plain(x))
    return numbers.dtype.kind == "f" and numbers.ndim > 0 and bool((numbers == 0).all() or (numbers == 1).all())


def _numbers(held: _Held) -> Any:
    return np.random.default_rng(7).uniform(0.5, 2, tuple(held.value.shape)).round(1)


def _same(run: Run, form: str, held: Sequence[_Held], expected: Any = None) -> bool:
    """Whether the result is the expected one, by default the book's, with other numbers in these."""
    inputs = run.probes[-1]
    firsts = [np.array(plain(each.value)) for each in held]
    try:
        for each in held:
            each.write(_numbers(each))
        outcome = run.student(inputs, run.way, run.asked)
    finally:
        for each, first in zip(held, firsts):
            each.write(first)
    return equal(outcome, output(function(form), inputs) if expected is None else expected)


def _is_a_bias(run: Run, form: str, held: _Held) -> bool:
    """Whether it is added to a projection, as the book's layers do with bias=True."""
    inputs, new = run.probes[-1], _numbers(held).ravel()
    for weight, name in (("W_q", "queries"), ("W_k", "keys"), ("W_v", "values"), ("W_o", "")):
        if weight not in inputs or inputs[weight].shape[1] != new.size:
            continue
        if not name:
            with_bias = output(function(form), inputs) + new
        elif name in inputs:
            more = {name: with_ones(inputs[name]), weight: np.concatenate([inputs[weight], new[None]])}
            with_bias = output(function(form), {**inputs, **more})
        else:
            zeros = {each: 0 * new if each != weight else new for each in ("W_q", "W_k", "W_v")}
            more = {each: np.concatenate([inputs[each], row[None]]) for each, row in zeros.items()}
            with_bias = output(function(form), {**inputs, **more, "X": with_ones(inputs["X"])})
        if with_bias is not None and _same(run, form, [held], with_bias):
            return True
    return False


def with_ones(x: Any) -> Any:
    """The rows with one more feature, which is 1: a bias is one more row of a weight."""
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)


# ---- many keys -------------------------------------------------------------------------------------------------------


def _of_many_keys(run: Run, form: str) -> list[tuple[str, str]]:
    """Whether numbers stay right with more keys than any probe has; a layer may refuse so many."""
    for steps in _MANY:
        inputs = lengthened(run, steps)
        outcome, right = run.student(inputs, run.way, run.asked), output(function(form), inputs)
        if right is None or is_misshapen(outcome, right):
            continue
        return [] if equal(outcome, right) else [("many_keys", say("many_keys", count=steps))]
    return []


def of_large_scores(run: Run, form: str) -> list[str]:
    """A note where scores that are too large for exp give no numbers: right in the book's sense, and worth a word."""
    if run.student.kind in _WITHOUT_KEYS:
        return []
    for inputs in map(_with_large_scores, reversed(run.probes)):
        outcome, right = run.student(inputs, run.way, run.asked), output(function(form), inputs)
        if right is not None and np.isfinite(right).all():
            overflows = isinstance(outcome.error, OverflowError)
            overflows |= outcome.output is not None and not np.isfinite(outcome.output).all()
            return [say("note_overflow", type=run.way.dtype)] if overflows else []
    return []


def _with_large_scores(chosen: Inputs) -> Inputs:
    """A probe whose scores are some thousands, and alike for all keys of a query: none of them underflows."""
    inputs, large = dict(chosen), 1e4
    if "queries" not in inputs and "W_q" not in inputs:
        return {**inputs, "X": np.broadcast_to(inputs["X"][..., :1] * large, inputs["X"].shape).copy()}
    if "w_v" in inputs:  # tanh keeps sums small; and a layer takes new weights with a new W_q
        inputs.update(w_v=inputs["w_v"] * large, W_q=inputs["W_q"].copy())
        large = 1.0
    first, keys = ("queries", inputs["keys"]) if "queries" in inputs else ("X", inputs["X"])
    itself = keys is inputs[first]
    alike = np.broadcast_to(keys[..., :1, :] * (large**0.5 if itself else 1), keys.shape).copy()
    inputs = {name: alike if x is keys else x for name, x in inputs.items()}
    return inputs if itself else {**inputs, first: inputs[first] * large}


def lengthened(run: Run, steps: int) -> Inputs:
    """The last probe, with so many keys, and queries; nothing is hidden, or the last three keys of each item."""
    rng, made = np.random.default_rng(21), dict(run.probes[-1])
    new: dict[Any, Any] = {}  # inputs that are alike stay alike
    for name in [each for each in ("queries", "keys", "values", "X") if each in made]:
        old = made[name]
        if name == "queries" and "query" in run.way.layout:  # a call for each
            continue
        is_scores = run.student.kind == "masked_softmax"
        shape = (*old.shape[:-1], steps) if is_scores else (*old.shape[:-2], steps, old.shape[-1])
        made[name] = new.setdefault((old.shape, old.tobytes()), rng.standard_normal(shape).round(1))
    if "valid_lens" in made:
        first: Any = made.get("queries", made.get("X"))
        made["valid_lens"] = np.full(len(first), steps - 3) if run.asked.role == "lens" else None
    if "mask" in made:
        made["mask"] = True
    if "offset" in made:
        made["offset"] = 0
    return made
