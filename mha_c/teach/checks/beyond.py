"""What small probes do not show of an implementation whose numbers are right: parameters that change nothing at their
first values, and what depends on many keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..._arguments.arrays import is_tensor
from ..._recognize.stored import at, write
from ..asking.comparing import equal, is_misshapen, output
from ..asking.making import is_open, plain
from ..asking.mistakes import BookForm, function
from ..asking.probes import Inputs
from ..asking.rounds import Run
from ..asking.student import WEIGHTS, Outcome
from ..words.sentences import say

_MANY = (64, 130), (32,), (16,)  # keys, 130 for blocks of 128; a layer may have room for fewer
_TABLES = ("positional_encoding", "rope")  # kinds that keep tables of numbers that are the book's own
_INPUT = {"W_q": "queries", "W_k": "keys", "W_v": "values"}  # what each weight multiplies, where there are three inputs
_WITHOUT_KEYS = (*_TABLES, "transpose_qkv", "transpose_output")


def beyond(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Ids and words of what a right run has beside the book's function."""
    found = extra(run, form)
    if run.student.kind not in _WITHOUT_KEYS:
        found += _of_many_keys(run, form)
    return found


def extra(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Id and words of parameters that are no weight of the book, and matter."""
    if run.student.layers is None or run.student.kind in _TABLES:
        return []
    names = _extra(run, form)
    words = say("extra_parameter", names=", ".join(names[:3]), kind=run.student.kind)
    return [("extra_parameter", words)] if names else []


# ---- parameters ------------------------------------------------------------------------------------------------------


def _extra(run: Run, form: BookForm) -> list[str]:
    """The parameters that belong to no weight of the book, and change the result once they have other numbers."""
    student, inputs = run.student, run.probes[-1]
    assert student.layers is not None
    layer = student.layers.at(inputs)
    parts = student.layers.weights(layer)[0].parts if student.has_weights else {}
    used = {path for part in parts.values() for each in part for path in (each.weight, each.bias)}
    held = [path for path in _parameters(layer) if path not in used]
    if not held or _same(run, form, layer, held):
        return []
    matter = [path for path in held if not _same(run, form, layer, [path])]
    return [path for path in matter or held if not _is_a_bias(run, form, layer, path)]


def _parameters(layer: Any, before: str = "", depth: int = 3) -> Iterator[str]:
    """The paths of those of torch that learn; else of arrays of ones or zeros: others, as a table, are right only as
    they are."""
    if hasattr(layer, "named_parameters"):
        for path, x in layer.named_parameters():
            if is_tensor(x) and x.requires_grad and not is_open(x):
                yield before + path
        return
    for name, x in getattr(layer, "__dict__", {}).items():
        if isinstance(x, np.ndarray) or is_tensor(x):
            if _is_neutral(x):
                yield before + name
        elif depth and not isinstance(x, type):
            yield from _parameters(x, f"{before}{name}.", depth - 1)


def _is_neutral(x: Any) -> bool:
    numbers = np.asarray(plain(x))
    return numbers.dtype.kind == "f" and numbers.ndim > 0 and bool((numbers == 0).all() or (numbers == 1).all())


def _numbers(layer: Any, path: str) -> Any:
    return np.random.default_rng(7).uniform(0.5, 2, tuple(at(layer, path).shape)).round(1)


def _same(run: Run, form: BookForm, layer: Any, paths: Sequence[str], expected: Any = None) -> bool:
    """Whether the result is the expected one, by default the book's, with other numbers in these parameters."""
    inputs = run.probes[-1]
    firsts = [np.array(plain(at(layer, path))) for path in paths]
    try:
        for path in paths:
            write(layer, path, _numbers(layer, path))
        outcome = run.student(inputs, run.way, run.asked)
    finally:
        for path, first in zip(paths, firsts):
            write(layer, path, first)
    return equal(outcome, output(function(form), inputs) if expected is None else expected)


def _is_a_bias(run: Run, form: BookForm, layer: Any, path: str) -> bool:
    """Whether it is added to a projection, as the book's layers do with bias=True."""
    inputs, new = run.probes[-1], _numbers(layer, path).ravel()
    names = [name for name in WEIGHTS["multi_head"] if name in inputs and inputs[name].shape[1] == new.size]
    expected = (with_biases(inputs, form, {name: new}) for name in names)
    return any(each is not None and _same(run, form, layer, [path], each) for each in expected)


def with_biases(inputs: Inputs, form: BookForm, given: dict[str, Any]) -> Any:
    """What the book gives: a bias is one more row of its weight, for one more feature, which is 1."""
    weights = {name: first for name, first in _INPUT.items() if name in inputs}
    more: Inputs = {name: _with_ones(inputs[name]) for name in (*weights.values(), "X") if name in inputs}
    for name in weights:
        wide = inputs[name].shape[1]
        bias = given.get(name, np.zeros(wide))
        if len(bias) < wide:  # heads that share keys share the bias
            share, size = wide // len(bias), wide // inputs["num_heads"]
            bias = np.repeat(bias.reshape(-1, size), share, axis=0).ravel()
        more[name] = np.concatenate([inputs[name], bias[None]])
    made = output(function(form), {**inputs, **more})
    return None if made is None else made + given.get("W_o", 0)


def _with_ones(x: Any) -> Any:
    """The rows with one more feature, which is 1."""
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)


# ---- many keys -------------------------------------------------------------------------------------------------------


def _of_many_keys(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Whether numbers stay right with more keys than any probe has; a layer may refuse so many."""
    for sizes in _MANY:
        asked = [(steps, *_with_many(run, form, steps)) for steps in sizes]
        fitting = list(itertools.takewhile(lambda each: each[2] is not None and not is_misshapen(*each[1:]), asked))
        if fitting:
            wrong = [steps for steps, outcome, right in fitting if not equal(outcome, right)]
            return [("many_keys", say("many_keys", count=steps)) for steps in wrong[:1]]
    return []


def _with_many(run: Run, form: BookForm, steps: int) -> tuple[Outcome, Any]:
    """What comes of so many keys, and what should."""
    inputs = lengthened(run, steps)
    return run.student(inputs, run.way, run.asked), output(function(form), inputs)


def of_large_scores(run: Run, form: BookForm) -> list[str]:
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
