"""How a student is asked: in rounds, one for each parameter that hides keys, with probes that fit, in likely ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Optional

import numpy as np

from ..._recognize.roles import says
from .answers import is_own_raise
from .comparing import equal, is_misshapen, output
from .fitting import probes_for, types_of
from .forms import (
    LAYOUTS,
    NARROWER,
    RANKS,
    STEPS_FIRST,
    Way,
    keys_of_weights,
    makes_batch_first,
    multiplies_masks,
    says_steps_first,
)
from .masks import AXES, CannotSay, MaskWay
from .masks import ways as mask_ways
from .mistakes import (
    ADDITIVE_WEIGHTS,
    CHUNKED,
    CHUNKED_ALL,
    KINDS,
    ROPE_HALVES,
    ROTARY,
    BookForm,
    function,
    of_mask,
)
from .probes import Inputs, has_other_lengths, has_other_widths, lens_of, probes
from .student import CAUSAL, WEIGHTS, Outcome, Round, Student

_KEPT = 4  # layouts and shapes of masks that are tried in full


class Run(NamedTuple):
    """A student, one way to ask it, the probes, what came of them, and what should have."""

    student: Student
    asked: Round
    form: BookForm
    way: Way
    probes: list[Inputs]
    outcomes: list[Outcome]
    right: list[Any]


def rounds(student: Student) -> list[Round]:
    """The comparisons that exercise all that may hide a key; without any, the one of the kind."""
    kind, own = student.kind, _forms(student)
    made = []
    for name, role in student.takes.items():
        if role in ("valid_lens", "mask") and not (takes_masks(student) and student.mask != "none"):
            continue
        if role == "valid_lens":
            made.append(Round(own, "lens", name))
        elif role == "mask":
            made.append(Round(forms_of_mask(student), "mask", name))
        elif role == "causal" and kind not in CAUSAL:
            past = (CHUNKED if student.is_chunked else KINDS["causal"],)
            made.append(Round(past if kind == "dot_product" else forms_of_mask(student), "flag", name))
        elif role == "second":
            made.append(Round(own, "second", name))
        elif role == "window" and kind in ("dot_product", "causal"):
            made.append(Round((KINDS["window"],), "window", name))
    if not any(each.role in ("lens", "mask") for each in made):
        made.insert(0, Round(own))
    return made


def forms_of_mask(student: Student) -> tuple[BookForm, ...]:
    """What a student is that is given a mask: kinds of lengths read otherwise then."""
    return tuple(map(of_mask, _forms(student)))


def takes_masks(student: Student) -> bool:
    """Whether the book's function can be given a mask at all."""
    return bool(KINDS[student.kind].hides)


def may_be_a_mask(asked: Round) -> bool:
    """Whether lengths were told by place alone: a fourth argument by a name that says nothing may be a mask."""
    return asked.role == "lens" and not says("valid_lens", asked.parameter)


def as_mask(asked: Round) -> Round:
    """The same round, with a mask in the place of lengths."""
    return Round(tuple(map(of_mask, asked.forms)), "mask", asked.parameter)


def untried(student: Student) -> list[str]:
    """The parameters that no round exercises, and whose name does not say that they hide nothing."""
    asked = {each.parameter for each in rounds(student)}
    asked |= {x for x, role in student.takes.items() if student.mask == "none" and role in ("valid_lens", "mask")}
    known = {*student.arguments, *student.sizes_of_table.values(), "base", "positions", "offset", "cos", "sin", "cis"}
    known |= {"size", "axis", "bias", "weights", "-"}
    known |= {"causal"} if student.kind in CAUSAL else set()
    return [name for name, role in student.takes.items() if name not in asked and role not in known]


def _forms(student: Student) -> tuple[BookForm, ...]:
    if student.is_chunked:
        return (CHUNKED,) if student.kind == "causal" else (CHUNKED_ALL,)
    others = {"causal_multi_head": ROTARY, "rope": (ROPE_HALVES,)}
    if student.kind == "additive" and student.values_are_keys:
        return (KINDS["additive"], ADDITIVE_WEIGHTS)
    return (KINDS[student.kind], *others.get(student.kind, ()))


# ---- ways ----------------------------------------------------------------------------------------------------------


def runs(
    student: Student, asked: Round, means: Optional[str] = None, accepts: Callable[[Run], Any] = lambda run: False
) -> list[Run]:
    """What comes of the probes, for each way that leads somewhere: the fewest errors and other types first.

    A run without errors that `accepts` takes is the only one.
    """
    found: list[tuple[tuple[float, int], int, Run]] = []
    takes: dict[Way, bool] = {}  # whether gradients are recorded, for any weights and masks
    for way in _ways(student, asked, means):
        run = run_of(student, asked, way)
        if _takes_one_width_alone(run):
            way = way._replace(one_width=True)
            run = run_of(student, asked, way)
        if _refuses_other_lengths_alone(run):
            way = way._replace(one_length=True)
            run = run_of(student, asked, way)
        if _takes_lens_of_items_alone(run):
            way = way._replace(lens_of_items=True)
            run = run_of(student, asked, way)
        failed = sum(outcome.error is not None for outcome in run.outcomes)
        failed += sum(is_misshapen(*pair) for pair in zip(run.outcomes, run.right)) if way.layout != "batch" else 0
        if way.tensors and failed < len(run.outcomes):
            alike = way._replace(weights=0, mask=None)
            takes[alike] = takes[alike] if alike in takes else takes_graphs(run)
            failed += not takes[alike]
        types = sum(outcome.dtype not in ("", way.dtype) for outcome in run.outcomes)
        if not failed and not types and accepts(run):
            return [run]
        share = failed / len(run.outcomes) if run.outcomes else 2  # a way that no probe can be given says nothing
        found.append(((share, types), len(found), run))
    ordered = [run for _, _, run in sorted(found, key=lambda each: each[:2])]
    useful = [run for run in ordered if any(outcome.error is None for outcome in run.outcomes)]
    if useful and not useful[0].way.tensors and not _raises(useful[0]):  # written for arrays: tensors tell of torch
        useful = [run for run in useful if not (run.way.tensors and _raises(run))]
    useful = [run for run in useful if not _refuses_its_masks(run, useful)]
    return _distinct(useful) or ordered[:1]


def _refuses_its_masks(run: Run, others: list[Run]) -> bool:
    """Whether masks of its type raise errors, and those of another, with the same axes, do not: the type is check's
    own choice, and such errors are none of the student's."""
    like = run.way._replace(mask=None), run.way.mask.axes if run.way.mask else ""
    taken = ((x.way._replace(mask=None), x.way.mask.axes) for x in others if x.way.mask and not _raises(x))
    return run.way.mask is not None and _raises(run) and like in taken


def _raises(run: Run) -> bool:
    return any(outcome.error is not None for outcome in run.outcomes)


def _takes_lens_of_items_alone(run: Run) -> bool:
    """Whether lengths of each query, and nothing else, raise errors, which no line of the student's own does, or give
    more axes than there are: those of items are spread over them."""
    if run.asked.role != "lens":
        return False
    refused = [
        x.error is not None if x.output is None or right is None else x.output.ndim > right.ndim
        for x, right in zip(run.outcomes, run.right)
    ]
    errors = [x.error for x in run.outcomes if x.error is not None]
    return any(refused) and _lens_of_queries(run) == refused and not any(map(is_own_raise, errors))


def _lens_of_queries(run: Run) -> list[bool]:
    """Which probes have a length for each query."""
    return [run.asked.role == "lens" and np.ndim(lens_of(x)) > 1 for x in run.probes]


def _refuses_other_lengths_alone(run: Run) -> bool:
    """Whether an assert or a raise of the student's own wants as many queries as keys, and nothing else fails."""
    others = [*map(has_other_lengths, run.probes)]
    errors = [outcome.error for outcome in run.outcomes]
    if not any(others) or all(others) or others != [x is not None for x in errors]:
        return False
    return all(is_own_raise(x) for x in errors if x is not None)


def _takes_one_width_alone(run: Run) -> bool:
    """Whether what a function gives has no right shape where inputs are not as wide as the result, and there alone;
    nor where all of them are narrower, so that each weight fits each of them: an exchange of two is no reason."""
    if run.student.has_weights:
        return False
    others = [*map(has_other_widths, run.probes)]
    wrong = map(is_misshapen, run.outcomes, run.right)
    apart = [pair for pair, lens in zip(zip(others, wrong), _lens_of_queries(run)) if not lens]  # another narrow form
    if not any(others) or all(others) or any(wide != fails for wide, fails in apart):
        return False
    inputs = dict(run.probes[others.index(True)])
    width = inputs["queries" if "queries" in inputs else "X"].shape[-1]
    for name in ("keys", "values", "W_k", "W_v"):
        if name in inputs:
            same = inputs["W_q"].shape if name[0] == "W" else (*inputs[name].shape[:-1], width)
            inputs[name] = np.resize(inputs[name], same)
    return is_misshapen(run.student(inputs, run.way, run.asked), output(function(run.form), inputs))


def run_of(student: Student, asked: Round, way: Way, most: Optional[int] = None) -> Run:
    """What comes of the probes; of those that it was asked this way before, what came then."""
    kept, outcomes, right = [], [], []
    form = asked.forms[0]
    for inputs in probes_for(student, asked, way.layout)[:most]:
        key = asked, way, id(inputs)
        try:
            if key not in student.memory.outcomes:
                student.memory.outcomes[key] = student(inputs, way, asked)
        except CannotSay:
            continue
        if (form, id(inputs)) not in student.memory.right:
            student.memory.right[form, id(inputs)] = output(function(form), inputs)
        kept.append(inputs)
        outcomes.append(student.memory.outcomes[key])
        right.append(student.memory.right[form, id(inputs)])
    return Run(student, asked, form, way, kept, outcomes, right)


def _ways(student: Student, asked: Round, means: Optional[str]) -> list[Way]:
    """The ways worth trying, the likeliest first."""
    bases = [Way(*each) for each in itertools.product(types_of(student), *_turns(student))]
    weights = [name for name, role in student.takes.items() if role in ("W_q", "W_k", "W_v", "W_o", "W_qkv")]
    keys = keys_of_weights(student.mine, weights) if weights and not student.is_layer else ()
    bases = [way._replace(keys=keys) for way in bases]
    read = range(_readings(student))
    if student.precision != "float32":
        bases = [way._replace(precision=student.precision) for way in bases]
    bases = [way._replace(weights=number) for way in bases for number in read]
    taken = {*student.takes.values()}
    batched = [False, True] if taken & {"positions", "cos", "cis"} else [False]
    tables = ["", "halves", "pairs"] if "cos" in taken else [""]
    more = [*itertools.product(batched, tables)]
    bases = [way._replace(batched=each, tables=laid) for way in bases for each, laid in more]
    laid = _laid(bases, student, asked)
    if asked.role != "mask":
        return laid
    past = student.kind in CAUSAL and asked.parameter not in student.optional
    masked = [[way._replace(mask=mask) for mask in mask_ways(way.layout, means, past)] for way in laid]
    if not says_steps_first(student.mine):  # the batch last would make right what nobody says of the steps
        masked = [[way for way in ways if way.mask is None or way.mask.axes != "qkb"] for ways in masked]
    if means is None and multiplies_masks(student.mine):
        masked = [[way for way in ways if way.mask is None or way.mask.means != "add"] for ways in masked]
    usable: dict[Any, set[str]] = {}  # axes that are taken, where all else but weights is alike
    for ways in masked:
        key = ways[0].tensors, ways[0].layout
        if key not in usable:
            usable[key] = _usable(ways, student, asked)
    return [way for ways in masked for way in ways if way.mask and way.mask.axes in usable[way.tensors, way.layout]]


def _laid(bases: list[Way], student: Student, asked: Round) -> list[Way]:
    """The ways, each with the axes that it takes."""
    best = (_best([way._replace(layout=layout) for layout in LAYOUTS[student.kind]], student, asked) for way in bases)
    return [run.way._replace(mask=None) for run in best]


def _best(ways: list[Way], student: Student, asked: Round) -> Run:
    """The way whose first probes, where nothing is hidden, have outputs of the right shape."""
    free = asked if asked.role in ("", "lens") else asked._replace(role="")
    if asked.role == "mask" and asked.parameter not in student.optional:  # it is refused without any
        free = asked
        ways = [
            way._replace(mask=MaskWay("attend", "bool", axes))
            for way in ways
            for axes in AXES.get(way.layout, AXES["batch"])[:3]
        ]
    ways = _without_narrower(ways, student, free)
    if says_steps_first(student.mine):
        ways.sort(key=lambda way: way.layout not in STEPS_FIRST)
    tried = [run_of(student, free, way, 2) for way in ways]
    bad = [sum(is_misshapen(*pair) for pair in zip(run.outcomes, run.right)) for run in tried]
    first = tried[bad.index(min(bad))]
    if first.way.layout == "batch" and not _takes_several(first):
        # Its batch of one item was taken for a sentence: with several it fails.
        alone = [run for run in tried if run.way.layout == "item" and _is_near(run) and _takes_several(run)]
        first = alone[0] if alone else first
    # Of layouts with as many axes numbers tell; one with fewer may be right only because the batch is missing.
    ranks = [RANKS.get(run.way.layout) for run in tried]
    alike = [
        run for run, count, rank in zip(tried, bad, ranks) if (count, rank) == (min(bad), RANKS.get(first.way.layout))
    ]
    if len(alike) > 1:  # one item, of which first probes are, may stand for a batch that is missing
        several = [_takes_several(run) for run in alike]
        alike = [run for run, takes in zip(alike, several) if takes == max(several)]
    if min(bad) == 0 and any(run.way.layout == "batch" for run in alike):  # a single query shows less than several
        alike = [run for run in alike if run.way.layout != "single_query"]
    return next(filter(_is_near, alike), alike[0])


def _without_narrower(ways: list[Way], student: Student, asked: Round) -> list[Way]:
    """Without the forms that count only where the general one raises: one query for all, batch and steps exchanged; the
    last also where the code says so."""
    first = says_steps_first(student.mine)
    if student.has_weights and makes_batch_first(student.mine):  # torch's layers take one item, too: steps as the batch
        ways = [way for way in ways if way.layout != "item"]
    if not first:  # one more of four axes, which no other of as many refuses
        ways = [way for way in ways if way.layout != "time first, heads"]
    general = next((way for way in ways if way.layout == "batch"), None)
    if general is None or not any(way.layout in NARROWER for way in ways):
        return ways
    run = run_of(student, asked, general)
    if any(map(is_misshapen, run.outcomes, run.right)):
        return ways
    if student.has_weights:
        ways = [way for way in ways if way.layout != "item"]
    return [way for way in ways if way.layout not in NARROWER or (first and way.layout in STEPS_FIRST)]


def _takes_several(run: Run) -> bool:
    """Whether the last probe, which has several items, gives the right shape, or, of lengths, the one before: lengths
    of each query may not be taken."""
    last = 2 if run.asked.role == "lens" else 1
    for inputs in reversed(probes_for(run.student, run.asked, run.way.layout)[-last:]):
        with suppress(CannotSay):
            if not is_misshapen(run.student(inputs, run.way, run.asked), output(function(run.form), inputs)):
                return True
    return False


def _is_near(run: Run) -> bool:
    """Whether all outcomes are those of one of the book's functions."""
    made = map(function, run.asked.forms)
    return any(all(equal(x, output(one, y)) for x, y in zip(run.outcomes, run.probes)) for one in made)


def _usable(ways: list[Way], student: Student, asked: Round) -> set[str]:
    """The axes of masks that are taken, the likeliest."""
    by_axes: dict[str, list[Way]] = {}
    for way in ways:
        assert way.mask is not None
        by_axes.setdefault(way.mask.axes, []).append(way)
    bad = {}
    for axes, those in by_axes.items():
        run, free = run_of(student, asked, those[0]), asked._replace(role="", parameter="")
        failed = 0
        for inputs, outcome, right in zip(run.probes, run.outcomes, run.right):
            # What fails without any mask says nothing of masks.
            if inputs["mask"] is not True and is_misshapen(outcome, right):
                failed += not is_misshapen(student({**inputs, "mask": True}, those[0], free), right)
        bad[axes] = failed / max(len(run.outcomes), 1)
    if {"qk", "k"} <= {*by_axes} and _takes_squares_alone(run_of(student, asked, by_axes["qk"][0])):
        return {"qk"}
    if bad.get("bqk") == 0:  # a mask for all items is narrower: it would hide that the first's is taken for all
        by_axes.pop("1qk", None)
    chosen = sorted(by_axes, key=lambda axes: bad[axes])[:_KEPT]
    return {axes for axes in chosen if bad[axes] == bad[chosen[0]]}


def _takes_squares_alone(run: Run) -> bool:
    """Whether it takes a mask of queries and keys only where there are as many of both: one that it transposes."""
    taken: dict[bool, list[bool]] = {True: [], False: []}
    for inputs, outcome, right in zip(run.probes, run.outcomes, run.right):
        if isinstance(inputs["mask"], np.ndarray):
            queries, keys = inputs["mask"].shape[-2:]
            taken[queries == keys].append(not is_misshapen(outcome, right))
    return bool(taken[True]) and all(taken[True]) and not any(taken[False])


def _turns(student: Student) -> tuple[list[bool], list[bool]]:
    """Whether weights that are arguments are (outputs, inputs), and whether w_v is a matrix."""
    as_arguments = student.kind in WEIGHTS and not student.has_weights
    both = [False, True]
    return both[: 1 + as_arguments], both[: 1 + (as_arguments and student.kind == "additive")]


def _readings(student: Student) -> int:
    if student.layers is None or not student.has_weights:
        return 1
    layer = student.layers.any(probes(student.kind)[0]) if student.is_class else student.layers.at({})
    return len(student.layers.weights(layer))


def _distinct(found: list[Run]) -> list[Run]:
    """Without those that have the same outcomes as one before."""
    seen, kept = set(), []
    for run in found:
        outcomes = (x.output.tobytes() if x.output is not None else str(x.error) for x in run.outcomes)
        key = (run.way.tensors, run.way.layout, *outcomes)
        if key not in seen:
            kept.append(run)
        seen.add(key)
    return kept


def takes_graphs(run: Run) -> bool:
    """Whether tensors that need gradients are taken, too: NumPy's functions take only those that need none."""
    if run.way.layout not in ("batch", "grouped") or run.student.sizes_of_table:
        return True
    inputs = next(inputs for inputs, outcome in zip(run.probes, run.outcomes) if outcome.error is None)
    try:
        run.student.traced(inputs, run.way, run.asked, "X" if "X" in inputs else "queries")
    except Exception:
        return False
    return True
