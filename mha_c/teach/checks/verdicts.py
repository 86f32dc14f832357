"""What `check` answers, put together: right, a known mistake, or none that is known."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from ..._recognize import parameters
from .. import lawful
from ..asking.answers import NEAR, Answer, Example, Lines, OwnLine, own_line, readable, written
from ..asking.comparing import equal, is_misshapen, output
from ..asking.configuration import class_of_file
from ..asking.forms import LAYOUTS_SAY
from ..asking.making import Unmade
from ..asking.masks import MEANS
from ..asking.mistakes import KINDS, BookForm, function, signature, sources
from ..asking.probes import Inputs, probes
from ..asking.results import NoOutput
from ..asking.rounds import Run
from ..asking.student import Student
from ..why.noting import error_place
from ..why.own_lines import constructor_line, line_of_second, nan_line, one_line, own_lines, random_lines, up_to
from ..words.sentences import said, say
from .biases import bias_arguments
from .explaining import Explained, where

_SCORING = "11.3 Attention Scoring Functions"
_SEVERAL = "11.5 Multi-Head Attention, Implementation (10.5.2 in the first edition)"
_DECODER = "11.7 The Transformer Architecture, Decoder (10.7.5 in the first edition)"
_POSITIONS = "11.6 Self-Attention and Positional Encoding (10.6.3 in the first edition)"
SECTIONS = {  # of the book's second edition (of its first)
    "softmax": f"{_SCORING}, Masked Softmax Operation (10.3.1 in the first edition)",
    "masked_softmax": f"{_SCORING}, Masked Softmax Operation (10.3.1 in the first edition)",
    "dot_product": f"{_SCORING}, Scaled Dot Product Attention (10.3.3 in the first edition)",
    "additive": f"{_SCORING}, Additive Attention (10.3.2 in the first edition)",
    "additive_weights": f"{_SCORING}, Additive Attention (10.3.2 in the first edition)",
    "transpose_qkv": _SEVERAL, "transpose_output": _SEVERAL, "multi_head": _SEVERAL,
    "positional_encoding": _POSITIONS,
    "causal": _DECODER, "causal_multi_head": _DECODER, "causal_multi_head_rope": _DECODER,
    "window": "Longformer, section 3.1 (arXiv 2004.05150); Mistral 7B, section 2 (arXiv 2310.06825)",
    "chunked": "Online softmax (arXiv 1805.02867), section 3; FlashAttention (arXiv 2205.14135), section 3.1",
    "grouped": "GQA (arXiv 2305.13245), section 2.2",
    "rope": "RoFormer (arXiv 2104.09864), section 3.2",
}  # fmt: skip


def right(found: Sequence[tuple[Run, BookForm]], left: Sequence[tuple[str, str]], notes: Sequence[str]) -> Answer:
    """All numbers are right; `left` are ids and words of what else is wrong, or was not tried."""
    mistakes, parts, more = [], [], []
    for run, form in found:
        ids, words = _beside(run)
        mistakes += ids
        parts += [each for each in words if each not in parts]
        more += [each for each in _notes(run, form) if each not in more]
    mistakes += [id for id, _ in left]
    parts += [words for _, words in left]
    run, form = found[0]
    if mistakes:
        start = say("right_but", name=run.student.name, kind=run.student.kind)
    else:
        sentence = "right_with_mask" if form.by_mask else "right"
        start = say(sentence, name=run.student.name, kind=run.student.kind, count=len(run.probes), given=_given(run))
    return Answer(mistakes, [start, *parts], [*notes, *more], _mask([run for run, _ in found]))


def _given(run: Run) -> str:
    return say("tensors" if run.way.tensors else "arrays")


def _mask(runs: Sequence[Run]) -> Optional[str]:
    """What True means in the first mask that was tried; "none" where the task has no masks."""
    if any(run.student.mask == "none" for run in runs):
        return "none"
    means = (run.way.mask.means for run in runs if run.way.mask is not None and run.asked.role == "mask")
    return next(means, None)


def random(run: Run, notes: Sequence[str]) -> Answer:
    """Dropout acts, or something else is drawn in each call."""
    found = random_lines(run)
    others = say("random_other"), say("random_lengths")
    id = "random" if found and str(found[0]) in others else "dropout_in_eval"
    words = [say("random", name=run.student.name), *(found or [say("random_drops")])]
    return Answer([id], words, notes)


def over_the_batch(run: Run, notes: Sequence[str]) -> Answer:
    """Right with batch and steps exchanged."""
    line = constructor_line(run) or up_to(run)[-1:]
    start = say("in_one", says=said("it attends over the batch (axis 0), not over the steps (axis 1)"))
    section = say("read", sections=said(SECTIONS[run.form.called]))
    parts = [start, *line, say("steps_first"), *_example(run), section]
    return Answer(["batch_for_steps"], parts, notes)


def unmade(mine: Any, error: Unmade, notes: Sequence[str]) -> Answer:
    """The constructor raises an error."""
    cause = readable(error.__cause__ or error)
    words = say("unmade", name=mine.__name__, error=f"{type(cause).__name__}: {cause}", line=own_line(cause))
    return Answer(["raises"], [words], notes, error=error)


def exits(mine: Any, error: BaseException, notes: Sequence[str]) -> Answer:
    """It calls exit()."""
    name = str(getattr(mine, "__name__", type(mine).__name__))
    words = say("exits", name=name, type=type(error).__name__, line=own_line(error))
    return Answer(["exits"], [words], notes, error=error)


def _beside(run: Run, writes: bool = True) -> tuple[list[str], list[Any]]:
    """Ids and words of what is not a matter of numbers: types, and inputs that are written into; `writes`: also of a
    masked softmax that writes into X, as the book's own does."""
    wanted, student = run.way.dtype, run.student
    types = [] if student.sizes_of_table else [each.dtype for each in run.outcomes if each.dtype not in ("", wanted)]
    mistakes = ["dtype"] if types else []
    parts: list[Any] = [say("dtype", wanted=wanted, got=types[0])] if types else []
    if _hides_nothing(student) and student.mask in MEANS:
        mistakes += ["no_mask"]
        parts += [say("no_mask", kind=student.kind, signature=", ".join(signature(student.kind)))]
    for outcome in run.outcomes:
        for name, before, now in outcome.changed:
            may = student.kind == "masked_softmax" and student.takes[name] == "X" and not writes
            if not (may or _masks_in_place(student, name, before, now)):
                example = Example({}, before, now, ("before", "after"))
                return [*mistakes, "changes_inputs"], [*parts, say("changes_inputs", name=name), example]
    return mistakes, parts


def _hides_nothing(student: Student) -> bool:
    return KINDS[student.kind].hides == "lens" and not {"valid_lens", "mask"} & {*student.takes.values()}


def _masks_in_place(student: Student, name: str, before: Any, now: Any) -> bool:
    """The book's own masked_softmax writes -1e6 into X."""
    return (
        student.kind == "masked_softmax"
        and student.takes[name] == "X"
        and bool((now[~np.isclose(now, before)] < -1000).all())
    )


def _notes(run: Run, form: BookForm, tells_pairs: bool = True) -> list[str]:
    """Of a call in one way; `tells_pairs`: its numbers say which numbers rope turns as pairs."""
    notes = []
    student, layout = run.student, run.way.layout
    changed = [each for outcome in run.outcomes for each in outcome.changed if student.kind == "masked_softmax"]
    right = all(map(equal, run.outcomes, run.right))
    if changed and (not right or any(_masks_in_place(student, *each) for each in changed)):
        notes += [say("note_writes")]
    ran = [x for x, outcome in zip(run.probes, run.outcomes) if outcome.error is None]
    told = any(isinstance(x.get("mask"), np.ndarray) for x in ran)  # what raises with any mask says nothing of it
    if run.way.mask is not None and run.asked.role == "mask" and told:
        notes += [say("note_mask", argument=run.asked.parameter, says=run.way.mask.says)]
    if student.mask == "none":
        notes += [say("note_mask_none")]
    elif _hides_nothing(student):
        notes += [say("note_no_mask")]
    if student.attends_to_itself:
        notes += [say("note_itself")]
    elif [*student.takes.values()].count("X") > 1:
        notes += [say("note_one_input")]
    elif student.values_are_keys:
        values = "note_values" if "keys" in student.takes.values() else "note_keys"
        notes += [say("note_weights_alone" if form.called == "additive_weights" else values)]
    if layout in LAYOUTS_SAY:
        notes += [say("note_layout", layout=said(LAYOUTS_SAY[layout]))]
    if run.way.lens_of_items:
        notes += [say("note_lens_of_items", argument=run.asked.parameter)]
    if run.way.outputs_first:
        notes += [say("note_outputs_first")]
    if run.way.one_width:
        notes += [say("note_one_width")]
    if run.way.one_length:
        notes += [say("note_one_length")]
    if student.entry:
        notes += [say("note_entry", entry=student.entry)]
    if student.kind == "rope" and tells_pairs:
        notes += [say("note_halves" if form.halves else "note_pairs")]
    if "rope" in form.functions[:-1]:
        notes += [say("note_rotary", pairs=said("halves" if form.halves else "neighbours"))]
    if student.sizes_of_table:
        notes += [say("note_table")]
    if student.only_heads:
        notes += [say("note_only_heads")]
    elsewhere = student.projected_by if student.has_weights and student.joins_heads_alone else ""
    if elsewhere:
        notes += [say("note_projected_by", name=elsewhere)]
    biases = [name for name, role in student.takes.items() if role == "bias" and name not in student.optional]
    biases = [name for name in biases if name not in bias_arguments(student)]
    if biases:
        notes += [say("note_biases", names=", ".join(biases))]
    if student.has_one_head:
        notes += [say("note_one_head") if student.heads == 1 else say("note_heads", heads=student.heads)]
    if student.width:
        notes += [say("note_width", width=student.width)]
    at_places = form.called == "causal" and student.kind in ("causal", "dot_product")
    if at_places and "offset" not in student.takes.values():
        inputs = dict(probes("causal")[3], mask=True)
        inputs["queries"] = inputs["queries"][:, -2:]
        if not student.attends_to_itself and layout == "batch" and run.way.mask is None:
            if equal(student(inputs, run.way, run.asked), output(function(KINDS["causal"]), inputs)):
                notes += [say("note_top_left")]
    return notes


def is_nan(run: Run) -> bool:
    """Whether results are NaN where the book's are numbers, as far as keys are hidden, or all of them."""
    pairs = [(x.output, y) for x, y in zip(run.outcomes, run.right) if x.output is not None and y is not None]
    with_nan = [np.isnan(x).all() for x, y in pairs if x.shape == y.shape and not np.isnan(y).any() and x.size]
    return bool(with_nan) and (all(with_nan) or _is_nan_where_hidden(run))


def _is_nan_where_hidden(run: Run) -> bool:
    """Whether all results of the probes that hide keys are NaN."""
    hiding = [
        np.isnan(x.output).all()
        for x, inputs in zip(run.outcomes, run.probes)
        if x.output is not None and isinstance(inputs.get("mask", inputs.get("valid_lens")), np.ndarray)
    ]
    return bool(hiding) and all(hiding)


def nan(run: Run, notes: Sequence[str]) -> Answer:
    """Not a number, before anything else is said."""
    parts = [say("nan"), *nan_line(run), *_example(run), say("read", sections=said(SECTIONS[run.form.called]))]
    return Answer(["nan"], parts, [*notes, *_notes(run, run.form)], _mask([run]))


def known(found: Explained, notes: Sequence[str]) -> Answer:
    """The mistakes that explain it, and beside them what is not taken."""
    form = found.form
    if found.run.asked.role == "second" and [each.id for each in found.mistakes] == ["no_rotation"]:
        keys = found.mistakes[0]._replace(id="keys_not_rotated", says=say("keys_not_turned"))
        found = found._replace(mistakes=[keys])
    run = found.run._replace(right=[output(function(form), inputs) for inputs in found.run.probes])
    # Without what only carries an argument to the line that is wrong.
    texts = sources(form, [each._replace(changes=each.changes[:1]) for each in found.mistakes]) or {}
    plain = sources(form) or {}
    names = {where: name for name, where in form.texts.items()}
    places = list(dict.fromkeys(names[each.changes[0].where] for each in found.mistakes))
    here = [place for place in texts if texts[place] != plain[place]]
    errors, (more, beside) = _error(run, function(form, found.mistakes)), _beside(run, writes=False)
    clauses = list(dict.fromkeys(said(each.says) for each in found.mistakes))
    if found.within:
        start = say("within", form=said(found.within), says=_both("and", clauses))
    else:
        start = say("in_one" if len(clauses) == 1 else "in_two", says=_both("and", clauses))
    keys_alone = found.mistakes[0].id == "keys_not_rotated" and run.asked.role == "second"
    own = line_of_second(run) if keys_alone else own_lines(run, form, found.mistakes)
    lines = [*own, *([] if own else [Lines(plain[place], texts[place]) for place in here])]
    read = say("read", sections=_both("also", [said(SECTIONS[place]) for place in places]))
    shapes = [i for i in found.left if run.outcomes[i].error is None]
    left = [_not_taken(run, shapes)] if shapes else []
    ids = [
        *(each.id for each in found.mistakes),
        *(["raises"] if errors else []),
        *(["shape"] if shapes else []),
        *more,
    ]
    told = errors or _error(run, function(form))  # those that the mistakes explain, too: a student has met them
    theirs = _as_they_mean(run, [each.id for each in found.mistakes])
    parts = [start, *lines, *_example(run), *told, *left, *beside, read]
    turned = not {"no_rotation", "keys_not_rotated"} & {*ids}
    return Answer(ids, parts, [*notes, *_notes(theirs, form, turned)], _mask([theirs]))


def _as_they_mean(run: Run, mistakes: Sequence[str]) -> Run:
    """The run with the meaning that True has in the student's code, if it has any."""
    mask = run.way.mask
    if mask is None or "mask_ignored" in mistakes or _is_nan_where_hidden(run):
        return run._replace(way=run.way._replace(mask=None))
    if "mask_inverted" in mistakes and mask.means != "add":
        mask = mask._replace(means="hide" if mask.means == "attend" else "attend")
    return run._replace(way=run.way._replace(mask=mask))


def _both(sentence: str, clauses: Sequence[str]) -> str:
    """One clause, or two that differ, put together."""
    one, *two = dict.fromkeys(clauses)
    return say(sentence, one=one, two=two[0]) if two else one


def _not_taken(run: Run, left: Sequence[int]) -> str:
    outcome, right = run.outcomes[left[0]], run.right[left[0]]
    what = say("gives_shape", got=outcome.output.shape, expected=right.shape)
    return say("not_taken", form=said(where(run, left)) or written_shapes(run.probes[left[0]]), what=what)


def written_shapes(inputs: Inputs) -> str:
    """The shapes of a probe."""
    return ", ".join(f"{name} {x.shape}" for name, x in inputs.items() if isinstance(x, np.ndarray))


def _example(run: Run) -> list[Any]:
    """The smallest probe with other numbers."""
    different = [i for i, outcome in enumerate(run.outcomes) if not equal(outcome, run.right[i])]
    for i in different:
        if run.outcomes[i].error is None:
            start = say("smallest", count=len(different), all=len(run.probes))
            return [start, Example(_shown(run.probes[i]), run.right[i], run.outcomes[i].output)]
    return []


def _shown(inputs: Inputs) -> Inputs:
    """Without what says nothing: no mask, no offset."""
    return {
        name: x
        for name, x in inputs.items()
        if not (name == "mask" and x is True) and not (name == "offset" and x == 0)
    }


def _error(run: Run, made: Any) -> list[str]:
    """The smallest probe with an error where `made` has none."""
    for inputs, outcome in zip(run.probes, run.outcomes):
        error = outcome.error
        if isinstance(error, NoOutput):
            return [say("here", error=error)]
        if error is not None and output(made, inputs) is not None:
            name = type(error).__name__
            return [say("raises_in", type=name, error=error, line=own_line(error), shapes=written_shapes(inputs))]
    return []


class InOneLine(NamedTuple):
    """A run, and the line that makes it right once it is changed."""

    run: Run
    line: OwnLine


def mended_line(tried: Sequence[Run]) -> Optional[InOneLine]:
    """The one line of the student's that makes all right once it is changed, for the first way to read its weights with
    which there is one; None where there is none such."""
    ways = {run.way.weights: run for run in reversed(tried)}
    runs = [run for run in ways.values() if any(each.error for each in run.outcomes) or not _is_rounded(run)][:3]
    pairs = [pair for run in runs for pair in zip(run.outcomes, run.right)]
    if any(isinstance(x.error, NoOutput) or (x.error is None and is_misshapen(x, y)) for x, y in pairs):
        return None  # what it gives is said then
    for run in reversed(runs):
        errors = [each.error for each in run.outcomes if each.error is not None]
        share = 1 / len(runs) if len(errors) < len(run.outcomes) else 0.5  # the way itself may be wrong where all raise
        line = one_line(run, error_place(errors[0]) if errors else None, share * run.student.patience)
        if line is not None:
            return InOneLine(run, line)
    return None


def in_one_line(found: InOneLine, notes: Sequence[str]) -> Answer:
    """No known mistake, but one line that is known to be wrong."""
    run, line = found
    section = say("read", sections=said(SECTIONS[run.form.called]))
    return Answer(["one_line"], [say("one_line"), line, *_example(run), section], [*notes, *_notes(run, run.form)])


def _given_nothing(run: Run) -> list[str]:
    """The parameters that were taken for lengths by their place alone, where what fails is that they are None."""
    if not any("NoneType" in str(each.error) for each in run.outcomes):
        return []
    told = [x for x, role in run.student.takes.items() if role == "valid_lens" and x not in run.student.optional]
    return [x for x in told if not any(word in x.lower() for word in ("len", "valid", "mask", "num", "pad"))]


_NO_ARRAY = re.compile(r"\bmapping|integers,\s|indices\smust|no\sattribute|not\scallable")  # errors of an array


def _given_as_array(run: Run) -> list[str]:
    """The weights that are arguments, where what fails is that they are arrays: it takes them as dicts or layers."""
    errors = [each.error for each in run.outcomes if each.error is not None]
    if not errors or not all(_NO_ARRAY.search(str(each)) for each in errors):
        return []
    weights = [name for name, role in run.student.takes.items() if role.startswith("W_")]
    return [name for name in weights if re.search(rf"\b{name}\b", own_line(errors[0]))]


def unknown(run: Run, notes: Sequence[str]) -> Answer:
    """Not explained by any known mistake: an error, another shape, or laws that do not hold."""
    student, all_of = run.student, len(run.probes)
    section = say("read", sections=said(SECTIONS[run.form.called]))
    others = [i for i, each in enumerate(run.outcomes) if not equal(each, run.right[i])]
    errors = [i for i in others if run.outcomes[i].error is not None]
    notes = [*notes, *_notes(run, run.form, tells_pairs=False)]
    strange = student.unknown or _given_nothing(run) or _given_as_array(run)
    strange = strange or [x.name for x in parameters(student.mine) if class_of_file(student.mine, x.annotation)]
    if len(errors) == all_of and strange:
        words = say("not_understood", name=student.name, arguments=", ".join(strange))
        return Answer(["untried"], [words, *_error(run, function(run.form)), section])
    if not errors and _is_rounded(run):
        return Answer(["precision"], [say("precision"), *up_to(run), *_example(run), section], notes)
    if errors:
        no_output = isinstance(run.outcomes[errors[0]].error, NoOutput)
        words = say("no_output" if no_output else "raises", name=student.name, count=len(errors), all=all_of)
        rest = say("others_right" if errors == others else "others_differ")
        rest += _where(run, errors) if errors == others else ""
        words += said(".") if len(errors) == all_of else rest
        ids = ["raises"] if errors == others else ["raises", "unknown"]
        more = up_to(run) if errors != others else []
        parts = [words, *_error(run, function(run.form)), *more, *_example(run), section]
        return Answer(ids, parts, notes, error=run.outcomes[errors[0]].error)
    for i in others:
        got, right = run.outcomes[i].output, run.right[i]
        if got is not None and got.shape != right.shape:
            words = say("shape", name=student.name, got=got.shape, kind=student.kind, expected=right.shape)
            words += _reshaped(run) + said(".") + _where(run, others)
            shown = written({**_shown(run.probes[i]), said("expected"): right, said("got"): got})
            return Answer(["shape"], [words, shown, section], notes)
    laws = [
        said("{id}: {says}", id=law.id, says=law.says)
        for law in lawful.found(student, run.way, run.asked)
        if not law.holds
    ]
    says = say("laws_broken", laws="\n  ".join(laws)) if laws else say("no_law_broken")
    start = say("unknown", name=student.name, kind=student.kind) + _where(run, others)
    return Answer(["unknown"], [start, *up_to(run), *_example(run), says, section], notes)


def _where(run: Run, chosen: list[int]) -> str:
    """What these probes, and no others, have in common, if it is their lengths."""
    form = where(run, chosen)
    return say("only_where", form=said(form)) if form else ""


def _reshaped(run: Run) -> str:
    """Whether the numbers of all probes are right in another order of axes."""
    pairs = [(x.output, y) for x, y in zip(run.outcomes, run.right)]
    if any(x is None or y is None or x.size != y.size for x, y in pairs):
        return ""
    if all(np.allclose(x.reshape(y.shape), y, NEAR, NEAR) for x, y in pairs):
        return say("other_shape")
    for axes in itertools.permutations(range(pairs[0][0].ndim)):
        turned = [(x.transpose(axes), y) for x, y in pairs if x.ndim == len(axes)]
        if len(turned) == len(pairs) and all(x.shape == y.shape and np.allclose(x, y, NEAR, NEAR) for x, y in turned):
            return say("transposed", axes=axes)
    return ""


def _is_rounded(run: Run) -> bool:
    """Whether all numbers are right to about three digits, and not to more."""
    pairs = [(x.output, y) for x, y in zip(run.outcomes, run.right)]
    return all(
        x is not None and y is not None and x.shape == y.shape and np.allclose(x, y, 2e-2, 1e-2, equal_nan=True)
        for x, y in pairs
    )
