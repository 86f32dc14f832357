"""`check`: runs an implementation on the probes, and says which known mistakes explain all its answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call
from . import lawful
from .answers import NEAR, Answer, Example, Lines, written
from .kinds import told
from .mistakes import SOURCES, Mistake, function, known, sources
from .probes import Inputs, probes
from .student import NoOutput, Outcome, Student, Way, gradients_recorded, own_line

_SCORING = "11.3 Attention Scoring Functions"
SECTIONS = {  # of the book's second edition (of its first)
    "softmax": f"{_SCORING}, Masked Softmax Operation (10.3.1 in the first edition)",
    "masked_softmax": f"{_SCORING}, Masked Softmax Operation (10.3.1 in the first edition)",
    "dot_product": f"{_SCORING}, Scaled Dot Product Attention (10.3.3 in the first edition)",
    "additive": f"{_SCORING}, Additive Attention (10.3.2 in the first edition)",
    "transpose_qkv": "11.5 Multi-Head Attention, Implementation (10.5.2 in the first edition)",
    "transpose_output": "11.5 Multi-Head Attention, Implementation (10.5.2 in the first edition)",
    "multi_head": "11.5 Multi-Head Attention, Implementation (10.5.2 in the first edition)",
    "positional_encoding": "11.6 Self-Attention and Positional Encoding (10.6.3 in the first edition)",
    "causal": "11.7 The Transformer Architecture, Decoder (10.7.5 in the first edition)",
}
HUGE = 1e4  # what a mask writes, where no softmax follows: -1e6, -1e9 and minus infinity are alike


class _Run(NamedTuple):
    """A student, one way to ask it, the probes, what came of them, and what should have."""

    student: Student
    way: Way
    probes: list[Inputs]
    outcomes: list[Outcome]
    right: list[Any]


@refuses_at_the_call
def check(mine: Any, kind: Optional[str] = None) -> Answer:
    """Compare an implementation with the book's, and say which line is wrong.

    `check` runs the implementation on small inputs, beside the book's function, the book's function with each known
    mistake, and with each two of them.  The mistakes that explain all its results are the answer.

    Parameters
    ----------
    mine : callable
        A function of arrays or tensors, a layer, or its class.  Its arguments may have the book's names or others;
        weights are attributes of a layer, or arguments, named W_q, W_k, W_v, W_o, w_v, or like Wq or q_proj.  It may
        return (output, weights), and it may take one input, for self-attention.
    kind : str, optional
        "masked_softmax" (X, valid_lens), "dot_product" (queries, keys, values, valid_lens), "additive", "multi_head",
        "transpose_qkv" and "transpose_output" (X, num_heads), "positional_encoding" (X) or "causal" (queries, keys,
        values).  Default: told from its name and signature.

    Returns
    -------
    Answer
        `.ok`, `.mistakes`, a text, and a page in notebooks.

    Raises
    ------
    TypeError
        If `mine` cannot be called, or has no weights with the names above.
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
    Your attention equals the book's if scores are divided by d, not by sqrt(d).
    """
    student = Student(mine, told(mine, kind))
    with gradients_recorded():
        return _compared(student)


def _compared(student: Student) -> Answer:
    """The student's answers beside the book's."""
    asked = student.probes()
    right = [_output(function(student.kind), inputs) for inputs in asked]
    runs = [_Run(student, way, asked, outcomes, right) for way, outcomes in student.answers()]
    for run in runs:
        if all(map(_equal, run.outcomes, right)):
            return _right(run)
    for run in runs:
        again = [student(inputs, run.way).output for inputs in asked]
        if not all(_equal(one, two) for one, two in zip(run.outcomes, again)):
            words = f"Your {student.name} gives other numbers each time.  Dropout must not act outside of training."
            return Answer(["dropout_in_eval"], [words])
    for run in runs:
        mistakes = _explanation(run)
        if mistakes:
            return _known(run, mistakes)
    return _unknown(runs[0])


# ---- looking for what explains all outcomes ------------------------------------------------------------------------


def _output(made: Any, inputs: Inputs) -> Any:
    """What a reference gives, None if it raises."""
    try:
        with np.errstate(all="ignore"):
            return made(**inputs)
    except Exception:
        return None


def _equal(outcome: Outcome, expected: Any) -> bool:
    got = outcome.output
    if got is None or expected is None:
        return got is None and expected is None
    if got.shape != expected.shape:
        return False
    got, expected = np.clip(got, -HUGE, HUGE), np.clip(expected, -HUGE, HUGE)
    return np.allclose(got, expected, NEAR, NEAR, equal_nan=True)


def _explanation(run: _Run) -> Sequence[Mistake]:
    """The likeliest mistake, or two, that explain all outcomes; else all that are numbers."""
    has_nan = any(outcome.output is not None and np.isnan(outcome.output).any() for outcome in run.outcomes)
    single = [(each,) for each in known(run.student.kind)]
    two = itertools.combinations(range(len(single)), 2)
    candidates = [*single, *(single[i] + single[j] for i, j in sorted(two, key=sum))]
    fills = ["-1e6", "-np.inf"] if has_nan else ["-1e6"]
    without_errors: Sequence[Mistake] = ()
    for mistakes, fill in itertools.product(candidates, fills):
        made = function(run.student.kind, mistakes, fill)
        explained = "" if made is None else _explains(made, run)
        if explained == "all":
            return mistakes
        if explained:
            without_errors = without_errors or mistakes
    return without_errors


def _explains(made: Any, run: _Run) -> str:
    """ "all": it has the same outcomes, errors too; "numbers": the same where neither raises an error; or ""."""
    same_errors, met, differs = True, 0, False
    for inputs, outcome, right in zip(run.probes, run.outcomes, run.right):
        output = _output(made, inputs)
        if output is None or outcome.error is not None:
            same_errors = same_errors and output is None and outcome.error is not None
        elif not _equal(outcome, output):
            return ""
        else:
            met, differs = met + 1, differs or not _equal(outcome, right)
    return ("all" if same_errors else "numbers") if met > 1 and differs else ""


# ---- what is answered ----------------------------------------------------------------------------------------------


def _right(run: _Run) -> Answer:
    """All numbers are right: what is left are their type, and the inputs."""
    student, count = run.student, len(run.probes)
    given = "torch's tensors of float32" if run.way.tensors else "NumPy's arrays of float64"
    mistakes, parts = _beside(run)
    start = f"Your {student.name} computes what the book's {student.kind} does: {count} of {count} probes, {given}."
    if mistakes:
        start = f"Your {student.name} gives the numbers of the book's {student.kind}, but:"
    return Answer(mistakes, [start, *parts], _notes(run))


def _beside(run: _Run) -> tuple[list[str], list[Any]]:
    """Ids and words of what is not a matter of numbers: types, and inputs that are written into."""
    wanted = run.way.dtype
    types = [each.dtype for each in run.outcomes if each.dtype not in ("", wanted)]
    mistakes = ["dtype"] if types else []
    parts: list[Any] = [f"Inputs of {wanted} give a result of {types[0]}; it should have their type."] if types else []
    no_lens = _takes_no_lens(run.student) and not run.student.attends_to_itself
    if no_lens and not any("mask" in name for name in run.student.takes):
        mistakes += ["no_mask"]
        signature = ", ".join(run.student.arguments)
        parts += [f"It takes no valid_lens, so it hides no key; the book's is {run.student.kind}({signature})."]
    for inputs, outcome in zip(run.probes, run.outcomes):
        for name, now in outcome.changed:
            if not _masks_in_place(run.student.kind, inputs, name, now):
                words = f"It writes into {name}: the caller's array holds other numbers afterwards."
                example = Example({}, np.asarray(inputs[name]), now, ("before", "after"))
                return [*mistakes, "changes_inputs"], [*parts, words, example]
    return mistakes, parts


def _takes_no_lens(student: Student) -> bool:
    return "valid_lens" in student.arguments and "valid_lens" not in student.takes.values()


def _masks_in_place(kind: str, inputs: Inputs, name: str, now: Any) -> bool:
    """The book's own masked_softmax writes -1e6 into X."""
    return kind == "masked_softmax" and name == "X" and bool((now[~np.isclose(now, inputs[name])] < -1000).all())


def _notes(run: _Run) -> list[str]:
    notes = []
    student, changed = run.student, any(outcome.changed for outcome in run.outcomes)
    if changed and student.kind == "masked_softmax":
        notes += ["it writes the mask into X, as the book's own does.  A caller who needs X afterwards passes a copy."]
    if _takes_no_lens(student):
        notes += ["it takes no valid_lens, so no mask was tried."]
    if student.attends_to_itself:
        notes += ["it takes queries alone, so keys and values were the queries, too: self-attention."]
    if student.kind == "causal":
        inputs = probes("causal")[-1]
        inputs["queries"] = inputs["queries"][:, -2:]
        if _equal(student(inputs, run.way), _output(function("causal"), inputs)):
            notes += [
                "with fewer queries than keys it counts from the first key (top left), as torch's is_causal does; the "
                "last queries of a sequence, which a decoder with a cache has, count from its end."
            ]
    return notes


def _known(run: _Run, mistakes: Sequence[Mistake]) -> Answer:
    kind = run.student.kind
    # Without what only carries an argument to the line that is wrong.
    texts = sources(kind, [each._replace(changes=each.changes[:1]) for each in mistakes]) or {}
    places = list(dict.fromkeys(each.changes[0].where for each in mistakes))
    errors, (more, beside) = _error(run, function(kind, mistakes)), _beside(run)
    start = f"Your {run.student.name} equals the book's if {', and '.join(each.says for each in mistakes)}."
    lines = [Lines(SOURCES[place], texts[place]) for place in places]
    read = "Read: " + "; ".join(dict.fromkeys(SECTIONS[place] for place in places))
    ids = [*(each.id for each in mistakes), *(["raises"] if errors else []), *more]
    told = errors or _error(run, function(kind))  # those that the mistakes explain, too: a student has met them
    return Answer(ids, [start, *lines, *_example(run), *told, *beside, read], _notes(run))


def _example(run: _Run) -> list[Any]:
    """The smallest probe with other numbers."""
    different = [i for i, outcome in enumerate(run.outcomes) if not _equal(outcome, run.right[i])]
    for i in different:
        if run.outcomes[i].error is None:
            start = f"The smallest example ({len(different)} of {len(run.probes)} probes differ):"
            return [start, Example(run.probes[i], run.right[i], run.outcomes[i].output)]
    return []


def _error(run: _Run, made: Any) -> list[str]:
    """The smallest probe with an error where `made` has none."""
    for inputs, outcome in zip(run.probes, run.outcomes):
        error = outcome.error
        if isinstance(error, NoOutput):
            return [f"Here {error}"]
        if error is not None and _output(made, inputs) is not None:
            shapes = ", ".join(f"{name} {x.shape}" for name, x in inputs.items() if isinstance(x, np.ndarray))
            return [f"It raises {type(error).__name__}: {error}\nin {own_line(error)}\nwith {shapes}"]
    return []


def _unknown(run: _Run) -> Answer:
    """Not explained by any known mistake: an error, another shape, or laws that do not hold."""
    student = run.student
    section = f"Read: {SECTIONS[student.kind]}"
    others = [i for i, each in enumerate(run.outcomes) if not _equal(each, run.right[i])]
    errors = [i for i in others if run.outcomes[i].error is not None]
    if errors:
        same = "the others are right" if errors == others else "the others differ from the book's, too"
        words = f"Your {student.name} raises an error for {len(errors)} of {len(run.probes)} probes"
        if isinstance(run.outcomes[errors[0]].error, NoOutput):
            words = f"Your {student.name} gives no output for {len(errors)} of {len(run.probes)} probes"
        words += "." if len(errors) == len(run.probes) else f"; {same}.{_lens_of(run, errors)}"
        return Answer(["raises"] if errors == others else ["raises", "unknown"],
                      [words, *_error(run, function(student.kind)), *_example(run), section])  # fmt: skip
    for i in others:
        got, right = run.outcomes[i].output, run.right[i]
        if got is not None and got.shape != right.shape:
            words = f"Your {student.name} gives shape {got.shape} where the book's {student.kind} gives {right.shape}"
            words += f"{_reshaped(got, right)}.{_lens_of(run, others)}"
            return Answer(["shape"], [words, written({**run.probes[i], "expected": right, "got": got}), section])
    laws = lawful.found(student, run.way)
    broken = [f"{law.id}: {law.says}" for law in laws if not law.holds]
    says = "Laws that it breaks:\n  " + "\n  ".join(broken) if broken else "It breaks none of the laws."
    start = f"Your {student.name} differs from the book's {student.kind}, and no known mistake explains it."
    start += _lens_of(run, others)
    return Answer(["unknown"], [start, *_example(run), says, section])


def _lens_of(run: _Run, chosen: list[int]) -> str:
    """What these probes, and no others, have in common, if it is their lengths."""
    lens: list[Any] = [each.get("valid_lens") for each in run.probes]
    forms = {
        "valid_lens is None": [i for i, each in enumerate(lens) if each is None],
        "there are valid_lens": [i for i, each in enumerate(lens) if each is not None],
        "valid_lens has a length for each query, as (batch, queries)": [
            i for i, x in enumerate(lens) if np.ndim(x) == 2
        ],
        "valid_lens has a length for each item, as (batch,)": [i for i, x in enumerate(lens) if np.ndim(x) == 1],
    }
    says = next((form for form, those in forms.items() if those == chosen), "")
    return f"  This is so wherever {says}, and nowhere else." if says and len(chosen) < len(lens) else ""


def _reshaped(got: Any, right: Any) -> str:
    """Whether the numbers are right in another order of axes."""
    if got.size != right.size:
        return ""
    if np.allclose(got.reshape(right.shape), right, NEAR, NEAR):
        return "; the numbers are right, in another shape"
    for axes in itertools.permutations(range(got.ndim)):
        turned = got.transpose(axes)
        if turned.shape == right.shape and np.allclose(turned, right, NEAR, NEAR):
            return f"; transposed by {axes}, the numbers are right"
    return ""
