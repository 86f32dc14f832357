"""What explains a student's outcomes: the book's functions with one known mistake or two, on all probes or on some."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from ..asking.answers import NEAR
from ..asking.comparing import begins_otherwise, equal, is_misshapen, output
from ..asking.mistakes import SOURCES, BookForm, Change, Mistake, function, hiding_with, known, subtracting
from ..asking.probes import Inputs, steps_of
from ..asking.rounds import Run
from ..asking.student import Outcome
from ..words.sentences import say

_HIDE_ROWS = ("softmax_axis", "mask_off_by_one", "mask_inverted")  # mistakes that may hide a whole row
_ANY = "(-np.inf)"  # what masks write, where a row without keys may give what it likes
_PAIRED, _PAIRED_ALONE = 36, 72  # of the likeliest mistakes each two are tried together: of several forms, or of one


class Explained(NamedTuple):
    """The mistakes that explain a run; `left` are probes that they do not: a form that is not taken."""

    run: Run
    form: BookForm
    mistakes: Sequence[Mistake]
    left: Sequence[int] = ()
    within: str = ""  # the probes that have these mistakes, if they are only those of one form of lengths or masks


def is_right(run: Run, form: BookForm) -> bool:
    """Whether all outcomes are those of a function of the book."""
    if not run.outcomes or (run.asked.role and not _hides(run)):
        return False
    right = run.right if form == run.form else [output(function(form), inputs) for inputs in run.probes]
    if all(x is None for x in right):  # sizes that the book refuses, too: that both do says nothing
        return False
    return all(map(equal, run.outcomes, right)) and _adds(run, form)


def _adds(run: Run, form: BookForm) -> bool:
    """Whether a mask that is said to be added is: a small number must hide a little."""
    return _loses(run, form, 1.5)


def _loses(run: Run, form: BookForm, number: float) -> bool:
    """Whether hidden scores lose this number, or gain it, where the mask that is added holds -1.5.

    That they gain it tells a mask that is subtracted from one of 0 and 1 that is taken times -1e-9.
    """
    mask = run.way.mask
    if mask is None or mask.means != "add":
        return True
    made, way = function(form, subtracting(form, number, mask.past)), run.way._replace(mask=mask._replace(size=1.5))
    return all(equal(run.student(inputs, way, run.asked), output(made, inputs)) for inputs in run.probes)


def _hides(run: Run) -> bool:
    """Whether its probes hide a key at all: a shape of masks may be able to say none of them."""
    if run.asked.role == "lens" or run.asked.role == "mask":
        return any(isinstance(x.get("mask", x.get("valid_lens")), np.ndarray) for x in run.probes)
    return True


def explanation(runs: Sequence[Run], *others: Callable[[], Any]) -> Any:
    """The likeliest mistake that explains all outcomes of a run; else all of one form; else what one of the others
    finds; else two mistakes, or all but errors.

    Of a student without patience, one mistake or none.
    """
    # Of what raises an error everywhere, but for one probe, no mistake explains two numbers.
    runs = [run for run in runs if (not run.asked.role or _hides(run)) and _number_of_results(run) > 1]
    lesser: dict[str, Explained] = {}
    found = _first(_one(runs), runs, lesser) or lesser.pop("nan", None)
    if not all(run.student.patience for run in runs):
        return found or lesser.get("numbers") or lesser.get("shapes")
    if found is None and not lesser:
        found = next(filter(None, map(_within_a_form, runs)), None)
        found = found or next(filter(None, (each() for each in others)), None)
    found = found or _first(_two(runs), runs, lesser) or lesser.get("nan")
    return found or lesser.get("numbers") or lesser.get("shapes")


def _number_of_results(run: Run) -> int:
    return sum(each.error is None for each in run.outcomes)


def despite_nan(runs: Sequence[Run]) -> Optional[Explained]:
    """One mistake that explains all numbers where some results are NaN: what is NaN beside them follows from it, as
    where softmax runs over a row that hides a key of all queries."""
    runs = [run for run in runs if not run.asked.role or _hides(run)]
    runs.sort(key=lambda run: sum(map(_is_all_nan, run.outcomes)))
    found = _first((each for each in _one(runs) if each[2] == "-np.inf"), runs, {})
    if found is None:
        return None
    made = function(found.form, found.mistakes, "-np.inf")
    pairs = [(x, inputs) for x, inputs in zip(found.run.outcomes, found.run.probes) if _is_all_nan(x)]
    results = [output(made, _as_given(found.run, inputs)) for _, inputs in pairs]
    return found if all(x is not None and np.isnan(x).all() for x in results) else None


def _is_all_nan(outcome: Outcome) -> bool:
    """Whether it says nothing: NaN equals NaN."""
    return outcome.output is not None and bool(outcome.output.size) and bool(np.isnan(outcome.output).all())


def _first(
    candidates: Iterator[tuple[BookForm, Sequence[Mistake], str]], runs: Sequence[Run], lesser: dict[str, Explained]
) -> Optional[Explained]:
    """The first candidate that explains all; `lesser` gets those that explain less."""
    with_nan = {id(run): _has_nan(run) for run in runs}
    first = {id(run): _first_number(run) for run in runs}
    for form, mistakes, fill in candidates:
        asked = [run for run in runs if fill != "-np.inf" or with_nan[id(run)]]
        made = function(form, mistakes, fill) if asked else None
        if made is None:
            continue
        outputs: dict[int, Any] = {}
        for run in asked:
            if any(_says_nothing(run, each) for each in mistakes):
                continue
            if fill != _ANY and _begins_otherwise(made, outputs, run, first[id(run)]):
                continue
            tier, left = _explains(made, outputs, run, fill == _ANY, len(mistakes) > 1)
            if tier and any(each.id == "mask_inverted" for each in mistakes) and not _loses(run, form, -1.5):
                continue
            if tier == "all":
                return Explained(run, form, mistakes)
            if tier and tier not in lesser:
                lesser[tier] = Explained(run, form, mistakes, left)
    return None


def _says_nothing(run: Run, mistake: Mistake) -> bool:
    """Whether it would undo the way in which weights are given, or is one of a mask where none is."""
    if mistake.id == "weights_transposed":
        return run.way.outputs_first
    return mistake.id.startswith("mask_") and not run.asked.role and run.form.hides == "lens"


def _first_number(run: Run) -> Optional[int]:
    """The first probe with a result that says something, if there is one."""
    return next((i for i, x in enumerate(run.outcomes) if x.error is None and not _is_all_nan(x)), None)


def _begins_otherwise(made: Any, outputs: dict[int, Any], run: Run, at: Optional[int]) -> bool:
    """Whether the result of this probe has the right shape, and another first number: then nothing else is asked."""
    if at is None:
        return False
    inputs, outcome = run.probes[at], run.outcomes[at].output
    if id(inputs) not in outputs:
        outputs[id(inputs)] = output(made, _as_given(run, inputs))
    got = outputs[id(inputs)]
    return got is not None and got.shape == outcome.shape and begins_otherwise(outcome, got)


def _known_to(runs: Sequence[Run]) -> tuple[dict[BookForm, list[Mistake]], list[str]]:
    """The mistakes of each form, and what masks may write."""
    having = set().union(*map(_having, runs))
    fills = ["-1e6", "-np.inf"] if any(map(_has_nan, runs)) else ["-1e6"]
    return {form: _singles(form, having) for form in (runs[0].asked.forms if runs else ())}, fills


def _having(run: Run) -> set[str]:
    """What it has that only some implementations have, as mistakes.txt calls it."""
    student, found = run.student, set[str]()
    if "heads" in run.way.layout:
        found.add("heads")
    if run.way.layout == "time first":
        found.add("first")
    if any("num_kv_heads" in inputs for inputs in run.probes):
        found.add("groups")
    if any("W_q" in x and len(x["W_q"]) > x["W_q"].shape[1] for x in run.probes):
        found.add("narrow")
    if "W_qkv" in student.takes.values() or (student.layers and student.layers.has_joint_weights):
        found.add("joint")
    return found


def _one(runs: Sequence[Run]) -> Iterator[tuple[BookForm, Sequence[Mistake], str]]:
    singles, fills = _known_to(runs)
    forms = [*singles]
    for form, fill in itertools.product(forms, fills):
        yield from ((form, (), fill) for _ in range(fill != "-1e6"))
        yield from ((form, (each,), fill) for each in singles[form] if each.id != "mask_ignored")
    for form in forms:
        # Where a row hides all its keys, what is added to the scores leaves their differences.
        added = "X - 1e9" if forms[0].hides == "lens" else "scores - 1e9"
        yield from ((form, (each,), fill) for each in singles[form] if each.id in _HIDE_ROWS for fill in (added, _ANY))
        yield from ((form, (each,), "-1e6") for each in _small_fills(runs, form))
        yield from ((form, (each,), "-1e6") for each in singles[form] if each.id == "mask_ignored")


def _two(runs: Sequence[Run]) -> Iterator[tuple[BookForm, Sequence[Mistake], str]]:
    singles, fills = _known_to(runs)
    for form, fill in itertools.product(singles, fills):
        single = [each for each in singles[form] if each.id != "mask_transposed"]  # it says nothing of most probes
        single.sort(key=lambda each: not each.only)  # what only some have is likelier there
        single = single[: _PAIRED if len(singles) > 1 else _PAIRED_ALONE]
        two = itertools.combinations(range(len(single)), 2)
        yield from ((form, (single[i], single[j]), fill) for i, j in sorted(two, key=sum))


def _small_fills(runs: Sequence[Run], form: BookForm) -> Iterator[Mistake]:
    """The numbers that masks may hide with, fitted to the probe that differs most."""
    made = [function(form, mistakes) for mistakes in ([each] for each in hiding_with(form, "FILL"))]
    for run in runs if made else ():
        numbers = zip(run.probes, run.outcomes, run.right)
        hidden = [
            (x, out.output, right)
            for x, out, right in numbers
            if _hides_a_key(x) and right is not None and not is_misshapen(out, right)
        ]
        if not hidden:
            continue
        inputs, got, _ = max(hidden, key=lambda each: float(np.nan_to_num(np.abs(each[1] - each[2])).max()))
        for number, each in enumerate(made):
            fill = _least(each, inputs, got)
            if fill is not None:
                yield list(hiding_with(form, fill))[number]


def _least(made: Any, inputs: Inputs, got: Any) -> Optional[float]:
    """The number between -30 and 0 with which masks give a result: the best of a grid, then halves; None if none."""
    distance = _distance(made, "FILL", inputs, got)
    best = min((-0.0, -0.5, *map(float, range(-1, -16, -1)), -20.0, -30.0), key=distance)
    step = 0.5 if best > -16 else 5.0
    while step > 1e-4 and distance(best) > NEAR / 10:
        best = min((best - step, best, best + step), key=distance)
        step /= 2
        if distance(best) > 40 * step:  # too far for what is left of the way
            return None
    return best if best < -0.01 and distance(best) < NEAR else None


def _distance(made: Any, name: str, inputs: Inputs, got: Any) -> Callable[[float], float]:
    """How far a function's result is from what a student got, by the number that this name has in it."""

    def distance(number: float) -> float:
        made.__globals__[name] = number
        expected = output(made, inputs)
        if expected is None or expected.shape != got.shape:
            return np.inf
        return float(np.nan_to_num(np.abs(expected - got), nan=np.inf).max())

    return distance


def _hides_a_key(inputs: Inputs) -> bool:
    hiding, first = inputs.get("mask", inputs.get("valid_lens")), inputs.get("queries", inputs.get("X"))
    assert first is not None
    return isinstance(hiding, np.ndarray) or (hiding is True and first.shape[-2] > 1)


def _singles(form: BookForm, having: set[str]) -> list[Mistake]:
    """The known mistakes, mask_ignored last: a mask that is given in the wrong way may have no effect, either."""
    found = known(form, having)
    return sorted(found, key=lambda each: each.id == "mask_ignored")


def _has_nan(run: Run) -> bool:
    return any(outcome.output is not None and np.isnan(outcome.output).any() for outcome in run.outcomes)


def _explains(made: Any, outputs: dict[int, Any], run: Run, any_row: bool, is_pair: bool) -> tuple[str, list[int]]:
    """("all" | "nan" | "numbers" | "shapes" | "", the probes that are left).

    "all": it has the same outcomes, errors too; "nan": all, but for what is NaN with the student alone; "numbers": the
    same where neither raises an error; "shapes": the same where neither does, and the shape is right.  A pair of
    mistakes that raises where the student has numbers explains nothing: of the few probes that are left, some pair
    always has the numbers.
    """
    left: list[int] = []
    met, differs, tier = 0, False, "all"
    for i, (inputs, outcome, right) in enumerate(zip(run.probes, run.outcomes, run.right)):
        if id(inputs) not in outputs:
            outputs[id(inputs)] = output(made, _as_given(run, inputs))
        got = outputs[id(inputs)]
        if _is_all_nan(outcome):
            if got is not None and not np.isnan(got).all() and tier == "all":
                tier = "nan"
            continue
        if any_row and got is not None and outcome.output is not None and got.shape == outcome.output.shape:
            if np.isnan(got).all():  # it says nothing
                continue
            got = np.where(np.isnan(got), outcome.output, got)
        if got is None or outcome.error is not None:
            if is_pair and outcome.error is None:
                return "", []
            if not (got is None and outcome.error is not None):
                tier = "numbers" if tier in ("all", "nan") else tier
        elif equal(outcome, got):
            met, differs = met + 1, differs or not equal(outcome, right)
        elif right is not None and outcome.output.shape not in (right.shape, got.shape):
            left, tier = [*left, i], "shapes"
        else:
            return "", []
    return (tier if met > 1 and differs else ""), left


def _as_given(run: Run, inputs: Inputs) -> Inputs:
    """A probe with the mask that hides nothing, where one is needed."""
    if inputs.get("mask") is not True or run.asked.role != "mask" or run.asked.parameter in run.student.optional:
        return inputs
    mask = np.ones(steps_of(inputs), dtype=bool)
    return {**inputs, "mask": mask[:, None] if run.student.kind == "grouped" else mask}


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


# ---- a scale that does not follow d ----------------------------------------------------------------------------------


def fixed_scale(runs: Sequence[Run]) -> Optional[Explained]:
    """Scores that are multiplied by one number in all probes: the number, fitted to the probe that says most."""
    for run in runs[:2]:
        pairs = [i for i, x in enumerate(run.outcomes) if x.output is not None and not is_misshapen(x, run.right[i])]
        line = next((x for x in _scaled_lines(run.form)), None)
        if line is None or len(pairs) < 2:
            continue
        where, text, product = line
        made = function(
            run.form, [Mistake("", "", (Change(where, text, text.replace(product[1], f"{product[0]} * FACTOR")),))]
        )
        if made is None:
            continue
        factor = _fitted(made, run.probes[pairs[-1]], run.outcomes[pairs[-1]].output)
        if factor is None:
            continue
        shown = f"{factor:.4g}"
        change = Change(where, text, text.replace(product[1], f"{product[0]} * {factor:.6g}"))
        mistake = Mistake("scale_fixed", say("scale_fixed", factor=shown), (change,))
        wrong = function(run.form, [mistake])
        if all(equal(run.outcomes[i], output(wrong, run.probes[i])) for i in pairs):
            return Explained(run, run.form, [mistake])
    return None


def _scaled_lines(form: BookForm) -> Iterator[tuple[str, str, tuple[str, str]]]:
    """(function, the line with the scale, (the product, the product with its scale))."""
    for where in form.texts.values():
        for text, product in re.findall(r"((?:scores = )(queries @ .*) / np\.sqrt\(d\))", SOURCES[where]):
            yield where, text, (product, f"{product} / np.sqrt(d)")


def _fitted(made: Any, inputs: Inputs, got: Any) -> Optional[float]:
    """The factor with which a function gives a result: the best of a grid, then halves."""
    distance = _distance(made, "FACTOR", inputs, got)
    grid = [sign * 2.0**i for i in np.arange(-7, 4.5, 0.5) for sign in (1, -1)]
    best = min(grid, key=distance)
    step = abs(best) / 3
    while step > 1e-5 * abs(best) and distance(best) > NEAR / 10:
        best = min((best - step, best, best + step), key=distance)
        step /= 1.6
    return best if distance(best) < NEAR else None
