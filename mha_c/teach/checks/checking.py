"""`check`: runs an implementation on the probes, and says which known mistakes explain all its answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Optional

import numpy as np

from ..._arguments.calls import is_refusal, refuses_at_the_call
from ..asking import masks
from ..asking.answers import UNNAMED, Answer, failed
from ..asking.comparing import equal, is_misshapen
from ..asking.forms import LAYOUTS, NARROWER, STEPS_FIRST, has_bool_masks_apart, says_steps_first
from ..asking.kinds import reason
from ..asking.making import CannotAsk, Unmade
from ..asking.mistakes import BookForm
from ..asking.rounds import (
    Run,
    as_mask,
    forms_of_mask,
    may_be_a_mask,
    rounds,
    run_of,
    runs,
    takes_masks,
    untried,
)
from ..asking.student import Round, Student, gradients_recorded
from ..asking.written import as_written
from ..why.noting import without_text_of_others
from ..why.own_lines import likeliest, reads_beyond
from ..words.sentences import said, say
from .besides import besides
from .besides import notes as notes_on
from .beyond import beyond, extra, of_large_scores
from .biases import biases, made_with
from .choices import by_positions, choices
from .choices import left as left_of_constructor
from .explaining import despite_nan, explanation, fixed_scale, is_right
from .fixed import others
from .students import may_hide_the_future, student_of
from .together import together
from .training import training, with_lines
from .verdicts import (
    InOneLine,
    exits,
    in_one_line,
    is_nan,
    known,
    mended_line,
    nan,
    over_the_batch,
    random,
    right,
    unknown,
    unmade,
)

_Found = tuple[Run, BookForm]  # a run that is right, and the book's function that it equals


@refuses_at_the_call
def check(
    mine: Any,
    kind: Optional[str] = None,
    *,
    mask: Optional[str] = None,
    weights: Optional[Mapping[str, str]] = None,
) -> Answer:
    """Compare an implementation with the book's, and say which line is wrong.

    `check` runs the implementation on small inputs, beside the book's function, the book's function with each known
    mistake, and with each two of them.  The mistakes that explain all its results are the answer.

    Parameters
    ----------
    mine : callable
        A function of arrays or tensors, a layer, or its class.  Its arguments may have the book's names or others;
        weights are attributes of a layer, or arguments, named W_q, W_k, W_v, W_o, w_v, or like Wq or q_proj.  It may
        return (output, weights), take one input, for self-attention, one item without a batch axis, and a mask in the
        place of lengths.
    kind : str, optional
        "masked_softmax" (X, valid_lens), "dot_product" (queries, keys, values, valid_lens), "additive", "multi_head",
        "transpose_qkv" and "transpose_output" (X, num_heads), "positional_encoding" (X), "causal" (queries, keys,
        values; a chunk size), "window" (queries, keys, values, window), "rope" (X, offset), "grouped" (queries (B, H,
        Q, D), keys and values (B, G, K, D)) or "causal_multi_head" (X; or X as queries, keys and values).  Default:
        told from its weights, its name and its signature.
    mask : {"attend", "hide", "add", "none"}, optional
        What True means in a mask: the key may be seen, or is hidden; or the mask is added to the scores; or the task
        has no masks, and none is tried.  Default: whichever explains all results, and `.mask` says which; what takes
        no mask, and is right otherwise, is right with a note.
    weights : dict, optional
        {"W_q": "my_query", ...}: attributes of a layer, where their names do not tell.

    Returns
    -------
    Answer
        `.ok`, `.mistakes`, `.mask`, a text, and a page in notebooks.  An error of the student's own is one, too: a loop
        of grades goes on.  `.ok` is None where it could not be judged, as where weights have names that are not known.

    Raises
    ------
    TypeError
        If `mine` cannot be called.
    ValueError
        If there is no such kind, or if name and signature do not tell the kind.

    Examples
    --------
    >>> from mha_c import teach
    >>> def attention(q, k, v, valid_lens=None):
    ...     scores = q @ k.swapaxes(1, 2) / q.shape[-1]
    ...     return teach.book.masked_softmax(scores, valid_lens) @ v
    >>> result = teach.check(attention, "dot_product")
    >>> result.ok, result.mistakes
    (False, ['scale_d'])
    >>> print(str(result).splitlines()[0])
    Yours differs from the book's in one thing: it divides scores by d, not by sqrt(d).
    """
    if mask is not None and mask not in (*masks.MEANS, "none"):
        raise ValueError(said('mask must be "attend", "hide", "add" or "none", got {mask!r}', mask=mask))
    notes, mine = [], as_written(mine)
    try:
        student = student_of(mine, kind, weights)
        student.mask = mask
        if kind is None and reason(mine):
            notes = [say("note_taken_for", kind=student.kind, why=said(reason(mine)))]
        with gradients_recorded(), without_text_of_others(mine):
            answer = _with_other_sizes(student, _compared(student, mask, notes), mask, notes)
            # A line that makes all right by hiding nothing is no mending of what must hide the future.
            may_be_causal = answer.mistakes[:1] in (["unknown"], ["hides_future"], ["one_line"])
            if kind is None and may_be_causal and student.kind == "multi_head":
                # It may hide the future without being told to: its numbers do not tell, where a mistake changed them.
                hiding = Student(mine, "causal_multi_head", weights, mask=mask)
                hiding.patience = 1 / 3 if may_hide_the_future(student) else 0  # one answer waits for both
                causal = _compared(hiding, mask, notes)
                # Right with one input in three places says nothing about three: then what differs is among them.
                tells = causal.mistakes or student.attends_to_itself or "hides_future" in answer.mistakes
                answer = causal if tells and not UNNAMED & {*causal.mistakes} else answer
            if kind is None and student.kind == "dot_product" and answer.ok is False:
                answer = _as_another(mine, weights, mask, answer)
            word = by_positions(student) if answer.mistakes[:1] in (["unknown"], ["one_line"]) else ""
            if word:
                words = say("by_positions", name=student.name, kind=student.kind, word=word)
                return Answer(["not_judged"], [words], notes)
            return answer
    except Unmade as error:
        return unmade(mine, error, notes)
    except CannotAsk as error:
        return Answer(["not_judged"], [str(error)], notes, error=error)
    except SystemExit as error:
        return exits(mine, error, notes)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, (TypeError, ValueError)) and is_refusal(error)):
            raise
        return Answer(["internal"], [failed(error)], notes, error=error)


def _as_another(mine: Any, weights: Optional[Mapping[str, str]], means: Optional[str], answer: Answer) -> Answer:
    """The answer; of a function whose name says attention alone, and which hides the future, or shares keys among
    heads, that of its numbers."""
    vague = UNNAMED | {"hides_future", "sees_future"}  # what sees the future is not causal for that
    for kind in ("causal", "grouped") if vague & {*answer.mistakes} else ():
        other = Student(mine, kind, weights, mask=means)
        other.patience = 0
        with suppress(CannotAsk, Unmade):
            found = _compared(other, means, [say("note_taken_for", kind=kind, why=said("of its numbers"))])
            if found.ok is not None and not vague & {*found.mistakes}:
                return found
    return answer


def _with_other_sizes(student: Student, answer: Answer, means: Optional[str], notes: list[str]) -> Answer:
    """The answer; of a layer whose heads, or scale, only its code fixes, the one with these, if they explain it."""
    if not _OF_SIZES & {*answer.mistakes}:
        return answer
    for other in others(student, answer.mistakes):
        found = _compared(other, means, notes)
        # Of another width two mistakes may explain what this width alone does.
        if not _OF_SIZES & {*found.mistakes} and not (other.width and len(found.mistakes) > 1):
            return found
    return answer


# What may follow from sizes that it is not made for.
_OF_SIZES = UNNAMED | {"scale_fixed"}


class _Wrong(Exception):
    """The first comparison that is wrong ends all: its answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def _compared(student: Student, means: Optional[str], notes: list[str]) -> Answer:
    """The student's answers beside the book's: of its rounds, of what its constructor can choose, of unknown names."""
    found: list[_Found] = []
    try:
        for asked in rounds(student):
            found.append(_in_round(student, asked, means, notes, found))
        for chosen, made, asked in choices(student):
            found.append(_right_one(runs(made, asked, means, _equals), [*notes, say("note_chosen", choice=chosen)]))
    except _Wrong as wrong:
        return wrong.answer
    masks_by_other_names = _by_other_names(student, means)
    notes = [*notes, *(say("note_unknown_used", argument=name) for name in masks_by_other_names)]
    first = next((pair for pair in found if pair[0].asked.role != "flag"), found[0])
    found += masks_by_other_names.values()
    untried_names = [name for name in untried(student) if name not in masks_by_other_names]
    apart, more = together(found)
    left = [*apart, *_left(student, untried_names), *_beside_numbers(student, first)]
    more += [each for pair in found for each in notes_on(*pair)]
    return right(found, left, [*notes, *dict.fromkeys(more), *of_large_scores(*first)])


def _in_round(student: Student, asked: Round, means: Optional[str], notes: list[str], found: list[_Found]) -> _Found:
    """The right run of a round; _Wrong if there is none.  `found`: those of the rounds before."""
    if means in masks.MEANS and may_be_a_mask(asked):
        asked = as_mask(asked)
    tried = runs(student, asked, means, _equals)
    one = _right_run(tried)
    if one is None and may_be_a_mask(asked):
        masked = runs(student, as_mask(asked), means, _equals)
        one = _right_run(masked)
        tried = masked if _errors(masked) < _errors(tried) else tried
    after_others = asked.role == "flag" and bool(found)
    if one is None and after_others and _errors(tried) == 1:
        # torch's own layer takes is_causal beside a mask alone.
        masked = [run for run, _ in found if run.way.mask is not None]
        one = _right_run([run_of(student, asked._replace(beside=x.asked.parameter), x.way) for x in masked])
    if one is not None:
        if one[0].way.layout == "item" and student.has_weights and _steps_first(one[0]):
            raise _Wrong(over_the_batch(_of_a_batch(one[0]), notes))
        apart = _of_bool_masks(one[0]) if means is None else []
        if apart and _right_run(apart) is None:
            raise _Wrong(_wrong(apart, notes))
        return one
    more = [say("note_chosen", choice=f"{asked.parameter}=True")] if after_others else []
    more += [say("note_second")] if asked.role == "second" else []
    try:
        return _right_one(tried, [*notes, *more])
    except _Wrong as wrong:
        others = _in_other_layouts(tried[0]) if wrong.answer.mistakes == ["unknown"] else []
        one = _right_run(others)
        if one is None and _steps_first(tried[0]):
            raise _Wrong(over_the_batch(_of_a_batch(tried[0]), notes)) from None
        if one is None:
            raise
        return one


def _of_bool_masks(run: Run) -> list[Run]:
    """Of what is right with a mask that is added, and has lines of its own for True and False: the runs of these."""
    if run.way.mask is None or run.way.mask.means != "add" or not has_bool_masks_apart(run.student.mine):
        return []
    tried = [each for means in ("attend", "hide") for each in runs(run.student, run.asked, means, _equals)]
    return [each for each in tried if each.way.mask is not None and each.way.mask.type == "bool"]


def _right_one(tried: list[Run], notes: list[str]) -> _Found:
    """The first run that is right; _Wrong if none is."""
    one = _right_run(tried)
    if one is None:
        raise _Wrong(_wrong(tried, notes))
    return one


def _by_other_names(student: Student, means: Optional[str]) -> dict[str, _Found]:
    """The arguments by unknown names that are masks, as their numbers tell."""
    names = untried(student) if takes_masks(student) and means != "none" else []
    asked = {name: Round(forms_of_mask(student), "mask", name) for name in names}
    found = {name: _right_run(runs(student, each, means, _equals)) for name, each in asked.items()}
    return {name: one for name, one in found.items() if one is not None}


def _left(student: Student, names: list[str]) -> list[tuple[str, str]]:
    """Ids and words of what was not tried."""
    of_call = [("untried", say("untried", argument=name)) for name in names]
    return of_call + [("untried", say("untried_made", argument=name)) for name in left_of_constructor(student)]


def _beside_numbers(student: Student, first: _Found) -> list[tuple[str, str]]:
    """Ids and words of what a right run does not show: biases, dropout, other parameters, many keys."""
    run, form = first
    found = [*biases(run, form), *with_lines(run, training(run))]
    for _, made in made_with(student, True):
        found += extra(run_of(made, run.asked, run.way), form)
    return [*found, *beyond(run, form), *besides(run, form)]


def _errors(tried: list[Run]) -> float:
    """The least share of probes that raise an error."""
    shares = [sum(each.error is not None for each in run.outcomes) / max(len(run.outcomes), 1) for run in tried]
    return min(shares, default=1.0)


def _equals(run: Run) -> Optional[BookForm]:
    """The function of the book that a run equals, or None."""
    return next((form for form in run.asked.forms if is_right(run, form)), None)


def _right_run(tried: list[Run]) -> Optional[_Found]:
    """The first run that is right, and the book's function that it equals."""
    return next(((run, form) for run in tried for form in [_equals(run)] if form), None)


def _wrong(tried: list[Run], notes: list[str]) -> Answer:
    for run in tried[:2]:
        again = [run.student(inputs, run.way, run.asked).output for inputs in run.probes]
        if not all(equal(one, two) for one, two in zip(run.outcomes, again)):
            return random(run, notes)
    if all(map(is_nan, tried[:1])):
        cause = despite_nan(tried)
        return nan(tried[0], notes) if cause is None else known(cause, notes)
    runs_right = next(filter(_is_right_where_it_runs, tried), None) or _right_but_for_masks(tried)
    if runs_right is not None:
        return unknown(runs_right, notes)
    found = explanation(tried, lambda: fixed_scale(tried), lambda: mended_line(tried))
    if isinstance(found, InOneLine):
        return in_one_line(found, notes)
    if found is not None and found.mistakes:
        return known(found, notes)
    likely = likeliest(tried)[0]
    return random(likely, notes) if reads_beyond(likely) else unknown(likely, notes)


def _is_right_where_it_runs(run: Run) -> bool:
    """Whether it raises for some probes, and is right for all others, which hide keys as well."""
    errors = [each for each in run.outcomes if each.error is not None]
    ran = [(x, y, z) for x, y, z in zip(run.outcomes, run.right, run.probes) if x.error is None]
    hides = any(isinstance(z.get("mask", z.get("valid_lens")), np.ndarray) for _, _, z in ran)
    return bool(errors) and len(ran) > 1 and hides and all(equal(x, y) for x, y, _ in ran)


def _right_but_for_masks(tried: list[Run]) -> Optional[Run]:
    """The run that is right where no mask is given, if in no way a mask can be: each with one raises."""
    for run in tried:
        masked = [isinstance(x.get("mask"), np.ndarray) for x in run.probes]
        if run.asked.role != "mask" or masked != [x.error is not None for x in run.outcomes] or not any(masked):
            return None
    free = (run for run in tried if sum(map(equal, run.outcomes, run.right)) > 1)
    return next((run for run in free if all(map(equal, *_that_ran(run)))), None)


def _that_ran(run: Run) -> tuple[list[Any], list[Any]]:
    pairs = [(x, y) for x, y in zip(run.outcomes, run.right) if x.error is None]
    return [x for x, _ in pairs], [y for _, y in pairs]


# ---- other axes ------------------------------------------------------------------------------------------------------


def _in_other_layouts(run: Run) -> list[Run]:
    """The same way with other axes: those that are accepted."""
    others = [layout for layout in LAYOUTS[run.student.kind] if layout != run.way.layout and run.way.mask is None]
    if not any(map(is_misshapen, run.outcomes, run.right)):
        first = says_steps_first(run.student.mine)
        others = [each for each in others if each not in NARROWER or (first and each in STEPS_FIRST)]
        if run.student.has_weights:
            others = [each for each in others if each != "item"]
    made = (run_of(run.student, run.asked, run.way._replace(layout=layout)) for layout in others)
    return [each for each in made if _equals(each)]


def _steps_first(run: Run) -> bool:
    """Whether it is right with batch and steps exchanged, where nothing is hidden, and its code does not say so."""
    layouts = [each for each in STEPS_FIRST if each in LAYOUTS[run.student.kind]]
    if says_steps_first(run.student.mine):
        return False
    free = _of_a_batch(run)
    return any(_equals(run_of(run.student, free.asked, free.way._replace(layout=each))) for each in layouts)


def _of_a_batch(run: Run) -> Run:
    """The same with a batch, and nothing hidden."""
    asked = run.asked._replace(role="", parameter="") if run.asked.role == "mask" else run.asked
    layout = run.way.layout if "heads" in run.way.layout else "batch"
    return run_of(run.student, asked, run.way._replace(layout=layout, mask=None))
