"""What explains a student's outcomes: the book's functions with one known mistake or two, on all probes or on some."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from .answers import NEAR
from .mistakes import Mistake, function, known, small_fills
from .probes import Inputs
from .rounds import Run, output
from .student import Outcome

HUGE = 1e4  # what a mask writes, where no softmax follows: -1e6, -1e9 and minus infinity are alike
_PAIRED = 36  # of the likeliest mistakes each two are tried together


class Explained(NamedTuple):
    """The mistakes that explain a run; `left` are probes that they do not: a form that is not taken."""

    run: Run
    form: str
    mistakes: Sequence[Mistake]
    left: Sequence[int] = ()
    within: str = ""  # the probes that have these mistakes, if they are only those of one form of lengths or masks


def equal(outcome: Outcome, expected: Any) -> bool:
    """Whether a result is the expected one, both None included."""
    got = outcome.output
    if got is None or expected is None:
        return got is None and expected is None
    return got.shape == expected.shape and near(got, expected)


def near(got: Any, expected: Any) -> bool:
    """Whether two arrays of one shape hold the same numbers."""
    got, expected = np.clip(got, -HUGE, HUGE), np.clip(expected, -HUGE, HUGE)
    with np.errstate(invalid="ignore"):
        same = np.abs(got - expected) <= NEAR + NEAR * np.abs(expected)
    return bool((same | (np.isnan(got) & np.isnan(expected))).all())


def is_right(run: Run, form: str) -> bool:
    """Whether all outcomes are those of a function of the book."""
    if not run.outcomes or (run.asked.role and not _hides(run)):
        return False
    right = run.right if form == run.form else [output(function(form), inputs) for inputs in run.probes]
    return all(map(equal, run.outcomes, right))


def _hides(run: Run) -> bool:
    """Whether its probes hide a key at all: a shape of masks may be able to say none of them."""
    if run.asked.role == "lens" or run.asked.role == "mask":
        return any(isinstance(x.get("mask", x.get("valid_lens")), np.ndarray) for x in run.probes)
    return True


def explanation(runs: Sequence[Run]) -> Optional[Explained]:
    """The likeliest mistake, or two, that explain all outcomes of a run; else all but errors, else all of one form."""
    runs = [run for run in runs if not run.asked.role or _hides(run)]
    lesser: dict[str, Explained] = {}
    for form, mistakes, fill in _candidates(runs):
        made = function(form, mistakes, fill)
        if made is None:
            continue
        outputs: dict[int, Any] = {}
        for run in runs:
            if fill != "-1e6" and not _has_nan(run):
                continue
            tier, left = _explains(made, outputs, run)
            if tier == "all":
                return Explained(run, form, mistakes)
            if tier and tier not in lesser:
                lesser[tier] = Explained(run, form, mistakes, left)
    found = lesser.get("numbers") or lesser.get("shapes")
    return found or next(filter(None, map(_within_a_form, runs)), None)


def _candidates(runs: Sequence[Run]) -> Iterator[tuple[str, Sequence[Mistake], str]]:
    forms = runs[0].asked.forms if runs else ()
    fills = ["-1e6", "-np.inf"] if any(map(_has_nan, runs)) else ["-1e6"]
    for form, fill in itertools.product(forms, fills):
        yield from ((form, (), fill) for _ in range(fill != "-1e6"))
        yield from ((form, (each,), fill) for each in known(form))
    for form in forms[1:]:
        yield form, (), "-1e6"
    for form in forms:
        yield from ((form, (each,), "-1e6") for each in small_fills(form))
    for form, fill in itertools.product(forms, fills):
        single = known(form)[: _PAIRED if len(forms) > 1 else None]
        two = itertools.combinations(range(len(single)), 2)
        yield from ((form, (single[i], single[j]), fill) for i, j in sorted(two, key=sum))


def _has_nan(run: Run) -> bool:
    return any(outcome.output is not None and np.isnan(outcome.output).any() for outcome in run.outcomes)


def _explains(made: Any, outputs: dict[int, Any], run: Run) -> tuple[str, list[int]]:
    """("all" | "numbers" | "shapes" | "", the probes that are left).

    "all": it has the same outcomes, errors too; "numbers": the same where neither raises an error; "shapes": the same
    where neither does, and the shape is right.
    """
    left: list[int] = []
    met, differs, tier = 0, False, "all"
    for i, (inputs, outcome, right) in enumerate(zip(run.probes, run.outcomes, run.right)):
        if id(inputs) not in outputs:
            outputs[id(inputs)] = output(made, inputs)
        got = outputs[id(inputs)]
        if got is None or outcome.error is not None:
            if not (got is None and outcome.error is not None):
                tier = "numbers" if tier == "all" else tier
        elif equal(outcome, got):
            met, differs = met + 1, differs or not equal(outcome, right)
        elif right is not None and outcome.output.shape not in (right.shape, got.shape):
            left, tier = [*left, i], "shapes"
        else:
            return "", []
    return (tier if met > 1 and differs else ""), left


# ---- forms of lengths and masks --------------------------------------------------------------------------------------


def form_of(inputs: Inputs) -> str:
    """In which form a probe hides keys, as a sentence says it; "" where it hides none."""
    lens, mask = inputs.get("valid_lens"), inputs.get("mask")
    if isinstance(lens, np.ndarray):
        return (
            "valid_lens has a length for each item, as (batch,)"
            if lens.ndim == 1
            else "valid_lens has a length for each query, as (batch, queries)"
        )
    if isinstance(mask, np.ndarray):
        mask = mask.reshape(-1, *mask.shape[-2:])
        return "the mask is the same for all queries" if (mask == mask[:, :1]).all() else "the mask differs by query"
    return "valid_lens is None" if "valid_lens" in inputs else "the mask is None"


def where(run: Run, chosen: Sequence[int]) -> str:
    """The form that these probes, and no others, have in common; "" if they do not."""
    forms = [form_of(each) for each in run.probes]
    for form in dict.fromkeys(forms):
        if [i for i, each in enumerate(forms) if each == form] == list(chosen) and len(chosen) < len(forms):
            return form
    hidden = [i for i, form in enumerate(forms) if not form.endswith("is None")]
    if hidden == list(chosen) and len(hidden) < len(forms):
        return "there is a mask" if "mask" in run.probes[0] else "there are valid_lens"
    return ""


def _within_a_form(run: Run) -> Optional[Explained]:
    """A mistake that is made only where lengths or masks have one form."""
    others = [i for i, pair in enumerate(zip(run.outcomes, run.right)) if not equal(*pair)]
    form = where(run, others)
    if not form or any(run.outcomes[i].error is not None for i in others):
        return None
    for mistake in known(run.form):
        made = function(run.form, [mistake])
        if made is not None and all(equal(run.outcomes[i], output(made, run.probes[i])) for i in others):
            return Explained(run, run.form, [mistake], within=form)
    return None
