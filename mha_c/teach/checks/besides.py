"""What outputs do not show of a run that is right: the weights that it returns or keeps, gradients, masks that hide
with a number which is not small enough, heads that are one, calls that depend on calls before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..._arguments.arrays import is_tensor
from ..._recognize import parameters
from .. import lawful
from ..asking.comparing import equal, near, output
from ..asking.making import plain
from ..asking.masks import CannotSay
from ..asking.mistakes import BookForm, function, hiding_with
from ..asking.probes import Inputs
from ..asking.rounds import Run
from ..why.alike import Known
from ..why.own_lines import line_of, line_of_class
from ..why.traces import book_trace, stages
from ..words.sentences import say

_FILLS = (-10.0, -20.0, -30.0, -50.0, -100.0)  # that are written where the book writes -1e6
_BELOW, _APART = -105.0, 50.0  # scores that are seen are below all of these, and hidden ones so far above them
_KEPT = ("attention_weights", "attn_weights", "weights", "attn", "attention", "p_attn", "scores")
_OF_CACHES = re.compile("past|cache|memory|state", re.IGNORECASE)
_WITH_WEIGHTS = ("dot_product", "additive", "multi_head", "causal", "window", "causal_multi_head")

Finding = tuple[str, Any]


def besides(run: Run, form: BookForm) -> Iterator[Finding]:
    """Ids and words, or lines, of what is wrong beside the output."""
    yield from (each for each in _of_weights(run, form) if each[0] == "kept_weights")
    yield from _of_small_fills(run, form)
    yield from _of_gradients(run)
    yield from _of_one_head(run)
    yield from _of_calls_before(run)


# ---- weights that are returned, or kept ------------------------------------------------------------------------------


def _of_weights(run: Run, form: BookForm) -> Iterator[Finding]:
    if run.student.kind not in _WITH_WEIGHTS or run.way.layout not in ("batch", "heads"):
        return
    inputs = run.probes[-1]
    every = stages(book_trace(form, [], inputs))
    right = [x for name, x in every if name == "softmax"]
    scores = [x for name, x in every if name in ("scores", "mask")]
    first: Any = inputs.get("W_q", inputs.get("queries", inputs.get("X")))
    root = (first.shape[-1] // inputs.get("num_heads", 1)) ** 0.5
    others = Known([*scores, *(x * root for x in scores)])  # and products that nothing divides
    result = _result(run, inputs)
    if not right or result is None:
        return
    heads = inputs.get("num_heads", 1)
    expected = right[-1].reshape(-1, heads, *right[-1].shape[1:])
    second = result[1] if isinstance(result, tuple) and len(result) == 2 else None
    held = [("returned_weights", "returned_weights", second)] if _looks_like(second, expected) else []
    layer = run.student.layers.at(inputs) if run.student.layers is not None else None
    held += [("kept_weights", name, x) for name, x in _kept_by(layer) if _looks_like(x, expected)]
    for id, name, x in held:
        numbers = np.asarray(plain(x), dtype=np.float64)
        if numbers in others and not _is_weights(numbers, expected):
            yield id, say(id, name=name)


def _result(run: Run, inputs: Inputs) -> Any:
    """All that a call gives; None where it raises."""
    run.student(inputs, run.way, run.asked)
    return run.student.last_result


def _kept_by(layer: Any) -> Iterator[tuple[str, Any]]:
    """Arrays that a layer, or a part of it, keeps by a name that says weights."""
    for part in layer.modules() if callable(getattr(layer, "modules", None)) else [layer]:
        held = getattr(part, "__dict__", {})
        yield from ((name, held[name]) for name in _KEPT[:2] if name in held)


def _looks_like(x: Any, expected: Any) -> bool:
    """Whether something is an array with as many numbers as the weights, or as the weights of one head."""
    is_array = isinstance(x, np.ndarray) or (is_tensor(x) and not x.is_complex())
    return is_array and x.ndim > 1 and int(np.prod(x.shape)) in (expected.size, expected[:, 0].size)


def _is_weights(x: Any, expected: Any) -> bool:
    """Whether these are the weights of all heads, in any order of items and heads, or their mean."""
    queries, keys = expected.shape[-2:]
    if x.shape[-2:] != (queries, keys):
        return False
    if x.size == expected.size:
        return near(x.reshape(expected.shape), expected) or near(
            x.reshape(-1, queries, keys), expected.swapaxes(0, 1).reshape(-1, queries, keys)
        )
    return near(x.reshape(-1, queries, keys), expected.mean(axis=1)) or near(
        x.reshape(-1, queries, keys), expected.sum(axis=1)
    )


# ---- masks that hide with a number that is not small enough ----------------------------------------------------------


def _of_small_fills(run: Run, form: BookForm) -> Iterator[Finding]:
    """Whether hidden keys stay hidden where what is seen has scores below -100."""
    made = function(form)
    changed = [(f, each) for f in _FILLS for each in hiding_with(form, f)]
    if form.hides == "past" and run.asked.role:
        return
    if not changed or run.way.layout not in ("batch", "heads", "grouped", "item"):
        return
    for inputs in _low(run, form):
        try:
            outcome = run.student(inputs, run.way, run.asked)
        except CannotSay:
            continue
        expected = output(made, inputs)
        if outcome.output is None or not np.isfinite(outcome.output).all() or equal(outcome, expected):
            continue
        for _, mistake in changed:
            if equal(outcome, output(function(form, [mistake]), inputs)):
                yield "mask_small", say("besides", says=mistake.says)
                yield from (("mask_small", line) for line in _line_of_fill(run))
                return


def _line_of_fill(run: Run) -> list[Any]:
    return line_of(run, "masked_fill") or line_of(run, "where") or line_of(run, "setitem")


def _low(run: Run, form: BookForm) -> Iterator[Inputs]:
    """Probes in which some query sees scores below -105 alone, and hidden ones are far above."""
    rng = np.random.default_rng(29)
    for chosen in [x for x in reversed(run.probes) if _hides(x, form)][:2]:
        for _ in range(12):
            inputs = dict(chosen)
            made: dict[int, Any] = {}
            for name in ("queries", "keys", "X"):
                if name in inputs:
                    x = inputs[name]
                    size = 150.0 if name == "X" and "W_q" not in inputs else 14.0
                    made.setdefault(id(x), (rng.standard_normal(x.shape) * size).round(1))
                    inputs[name] = made[id(x)]
            if inputs.get("values") is chosen.get("keys") and "values" in inputs:
                inputs["values"] = inputs["keys"]
            if _is_low(inputs, form):
                yield inputs
                break


def _hides(inputs: Inputs, form: BookForm) -> bool:
    hiding = inputs.get("mask", inputs.get("valid_lens"))
    return isinstance(hiding, np.ndarray) or form.hides == "past"


def _is_low(inputs: Inputs, form: BookForm) -> bool:
    steps = book_trace(form, [], inputs).steps
    for step in steps:
        if step.name == "where" and "-1e6" in step.place.text and step.value.ndim > 1:
            hidden = step.value <= -1e6
            before = next((steps[s].value for s in step.sources if s >= 0 and steps[s].value.shape == hidden.shape and
                           steps[s].value.dtype != bool), inputs.get("X"))  # fmt: skip
            if before is None or before.shape != hidden.shape:
                return False
            seen = np.where(hidden, -np.inf, before).max(axis=-1)
            above = np.where(hidden, before, -np.inf).max(axis=-1)
            return bool(((seen < _BELOW) & np.isfinite(seen) & (above > seen + _APART)).any())
    return False


# ---- the rest --------------------------------------------------------------------------------------------------------


def _of_gradients(run: Run) -> Iterator[Finding]:
    way, student = run.way, run.student
    if way.tensors and way.layout in ("batch", "grouped") and not student.sizes_of_table:
        one_input = {"X", "second"} & {*student.takes.values()} and len(student.takes) > 1
        if student.kind != "transpose_output" and not one_input and lawful.gradients(student, way, run.asked):
            yield "gradients", say("gradients")
            lines = [line for name in ("detach", "numpy", ".data", "no_grad", "tolist") for line in line_of(run, name)]
            yield from (("gradients", line) for line in lines[:1])


def _of_one_head(run: Run) -> Iterator[Finding]:
    every = run.student.layers.every if run.student.layers is not None else []  # with several heads it may fit no probe
    for part in (part for layer in every if callable(getattr(layer, "modules", None)) for part in layer.modules()):
        if type(part).__name__ == "ModuleList" and len(part) > 1 and len({id(x) for x in part}) < len(part):
            yield "shared_heads", say("shared_heads")
            yield from (("shared_heads", line) for line in line_of_class(run, r"\] *\*"))
            return


def _of_calls_before(run: Run) -> Iterator[Finding]:
    """Whether a call gives other numbers after other calls."""
    if depends_on_calls(run):
        yield "state", say("state")


def depends_on_calls(run: Run) -> bool:
    """Whether what a call gives depends on calls before it."""
    inputs = run.probes[-1]
    one, two = (run.student(inputs, run.way, run.asked).output for _ in range(2))
    return not (one is None or two is None or (one.shape == two.shape and near(one, two)))


def notes(run: Run, form: BookForm) -> list[str]:
    """Remarks on what was not looked at, and on rows without keys."""
    names = [
        each.name
        for each in parameters(run.student.mine)
        if run.student.takes.get(each.name) == "-" and _OF_CACHES.search(each.name) and each.default is not each.empty
    ]
    found: list[str] = [say("note_untried", names=", ".join(names))] if names else []
    found += [words for id, words in _of_weights(run, form) if id == "returned_weights"]
    return [*found, *_of_empty_rows(run, form)]


def _of_empty_rows(run: Run, form: BookForm) -> list[str]:
    inputs = dict(run.probes[-1])
    if run.asked.role == "lens" and isinstance(inputs.get("valid_lens"), np.ndarray):
        inputs["valid_lens"] = inputs["valid_lens"] * (np.arange(len(inputs["valid_lens"])) > 0).reshape(
            -1, *[1] * (inputs["valid_lens"].ndim - 1)
        )
    elif run.asked.role == "mask" and isinstance(inputs.get("mask"), np.ndarray):
        inputs["mask"] = inputs["mask"] & (np.arange(inputs["mask"].shape[-2]) > 0)[:, None]
    else:
        return []
    try:
        outcome = run.student(inputs, run.way, run.asked)
    except CannotSay:
        return []
    expected = output(function(form), inputs)
    if outcome.output is None or expected is None or not np.isfinite(expected).all():
        return []
    return [say("note_empty")] if np.isnan(outcome.output).any() else []
