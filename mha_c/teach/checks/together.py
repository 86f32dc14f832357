"""Two arguments that hide keys, given in one call: alone each may be right, and together one may undo the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from ..asking.answers import Example, own_line
from ..asking.comparing import equal, output
from ..asking.forms import HEADS
from ..asking.masks import CannotSay
from ..asking.mistakes import KINDS, BookForm, function, of_mask
from ..asking.probes import Inputs, steps_of
from ..asking.rounds import Run
from ..asking.student import Outcome
from ..words.sentences import said, say

_HIDES = ("lens", "mask", "flag", "window", "made")  # roles; from the third on they hide the same keys in each call


class _JointCall(NamedTuple):
    """One call with both arguments, and what comes of it."""

    inputs: Inputs
    seen: Any  # the keys that the first argument lets be seen
    outcome: Outcome
    expected: Any


def together(found: Sequence[tuple[Run, BookForm]]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Ids and words of what is wrong only where two arguments that hide keys are given in one call; notes."""
    hiding = [each for each in found if each[0].asked.role in _HIDES]
    hiding.sort(key=lambda each: _HIDES.index(each[0].asked.role) > 1)
    notes = []
    for (one, form), (two, own_form) in itertools.combinations(hiding, 2):
        if (one.way.layout, one.way.tensors) != (two.way.layout, two.way.tensors) or one.asked.role in _HIDES[2:]:
            continue
        joint = own_form if two.asked.role in _HIDES[2:] else of_mask(form)
        call = _called(one, two, joint)
        if call is None or equal(call.outcome, call.expected):
            continue
        names = {"one": one.asked.parameter, "two": two.asked.parameter}
        if call.outcome.error is not None and _refuses(call.outcome.error):
            notes.append(say("note_together", **names))
            continue
        only, why = _why(call, joint, names)
        if only and str(getattr(one.student.mine, "__module__", "")).startswith("torch."):
            notes.append(say("note_only", name=only, **names))
        else:
            return _words(call, why, one, two), notes
    return ([], notes) if notes else (_at_once(hiding), [])


def _at_once(hiding: Sequence[tuple[Run, BookForm]]) -> list[tuple[str, Any]]:
    """What is wrong only where three arguments or more are given in one call."""
    if len(hiding) < 3:
        return []
    *runs, last = [run for run, _ in hiding]
    runs = [one for one in runs if one.asked.role in _HIDES[:2] and one.way.layout == last.way.layout]
    joint = hiding[-1][1] if last.asked.role in _HIDES[2:] else of_mask(hiding[0][1])
    for inputs in reversed(last.probes):
        for choices in itertools.product(*(_others(one, inputs) for one in runs)):
            if any((one == two).all() for one, two in itertools.combinations(choices, 2)):
                continue
            free = {name: x for name, x in inputs.items() if name != "valid_lens"}
            beside = [({**free, "mask": seen}, one.way, one.asked) for seen, one in zip(choices, runs)]
            try:
                outcome = last.student(inputs, last.way, last.asked, beside)
            except CannotSay:
                continue
            seen = np.logical_and.reduce([*choices, np.broadcast_to(_seen(inputs), choices[0].shape)])
            if equal(outcome, output(function(joint), {**inputs, "mask": seen})):
                return []
            if outcome.error is None or not _refuses(outcome.error):
                names = ", ".join(one.asked.parameter for one in (*runs, last))
                return [("together", say("at_once", names=names))]
    return []


def _called(one: Run, two: Run, joint: BookForm) -> Optional[_JointCall]:
    """The call of the last probe where both arguments hide keys that the other does not; None where there is none."""
    made = function(joint)
    for inputs in reversed(two.probes):
        own = _seen(inputs)
        for seen in _others(one, inputs) if own is not True or two.asked.role in _HIDES[2:] else ():
            if own is not True and not ((own & ~seen).any() and (seen & ~own).any()):
                continue
            first = {**{name: x for name, x in inputs.items() if name != "valid_lens"}, "mask": seen}
            try:
                outcome = two.student(inputs, two.way, two.asked, [(first, one.way, one.asked)])
            except CannotSay:
                continue
            return _JointCall(inputs, seen, outcome, output(made, {**inputs, "mask": own & seen}))
    return None


def _seen(inputs: Inputs) -> Any:
    """The keys that a probe lets be seen, as a mask; True: all."""
    lens = inputs.get("valid_lens")
    if lens is None:
        return inputs.get("mask", True)
    batch, queries, keys = steps_of(inputs)
    return np.broadcast_to(np.arange(keys) < lens.reshape(batch, -1, 1), (batch, queries, keys))


def _others(one: Run, inputs: Inputs) -> Iterator[Any]:
    """Masks for the first argument: one for each item, one for all; the first key is always seen."""
    batch, queries, keys = steps_of(inputs)
    heads = HEADS if "heads" in one.way.layout else 1
    item = np.arange(batch)[:, None, None] // heads
    key = np.arange(keys)
    if one.asked.role == "lens":
        choices = [key < 1 + (item + 1) % keys, key < np.full_like(item, keys - 1)]
    else:
        choices = [(key == 0) | ((item + key) % 2 == 0), (key % 2 == 0) & (item >= 0)]
    for seen in choices:
        mask = np.broadcast_to(seen, (batch, queries, keys))
        yield mask[:, None] if one.student.kind == "grouped" else mask


def _refuses(error: BaseException) -> bool:
    """Whether it says itself that it does not take both, or torch does."""
    line = own_line(error)
    return line == said("the call") or any(f": {word}" in line for word in ("raise", "assert"))


def _why(call: _JointCall, joint: BookForm, names: dict[str, str]) -> tuple[str, str]:
    """The argument that alone has an effect, or ""; and what happens, as the end of a sentence, or ""."""
    own, made = _seen(call.inputs), function(joint)
    of_form = own is True  # the second argument's keys are hidden by the form itself
    plain = function(of_mask(KINDS["dot_product"])) if joint.kind in ("causal", "window") else None
    queries, keys = call.seen.shape[-2:]
    past = np.tri(queries, keys, dtype=bool) if of_form else own
    tries = [
        (names["one"], plain if of_form else made, call.seen),
        (names["two"], made, own),
        ("", plain if of_form else made, call.seen | past),
    ]
    for only, reference, mask in tries:
        if reference is not None and equal(call.outcome, output(reference, {**call.inputs, "mask": mask})):
            return only, say("together_only", name=only) if only else say("together_either")
    return "", ""


def _words(call: _JointCall, why: str, one: Run, two: Run) -> list[tuple[str, Any]]:
    error, names = call.outcome.error, {"one": one.asked.parameter, "two": two.asked.parameter}
    if error is not None:
        words = say("together_raises", type=type(error).__name__, error=error, line=own_line(error), **names)
        return [("together", words)]
    shown = {name: x for name, x in call.inputs.items() if name not in ("mask", "valid_lens", "offset")}
    for name, mask in ((names["one"], call.seen), (names["two"], _seen(call.inputs))):
        if mask is not True:
            shown[said("seen with {name} alone", name=name)] = mask.astype(int)
    example = Example(shown, call.expected, call.outcome.output)
    return [("together", say("together", why=why, **names)), ("together", example)]
