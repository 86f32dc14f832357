"""The calls of a student and of the book, noted operation by operation, and which lines a mistake changes."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from difflib import SequenceMatcher
from typing import Any, NamedTuple, Optional

import numpy as np

from ..asking.comparing import HUGE, equal, output
from ..asking.forms import parts
from ..asking.mistakes import BookForm, Mistake, function, sources
from ..asking.probes import Inputs
from ..asking.rounds import Run
from .noting import Operation, Place, Trace, forget_results, lines_noted, tensors_noted, written_by_them


def student_trace(run: Run, inputs: Inputs) -> Optional[Trace]:
    """The student's call with these inputs; None where it cannot be noted."""
    trace = Trace(written_by_them)
    try:
        trace.end = next(iter(trace.source(noted(run, inputs, trace))), None)
    except Exception:
        return None
    return trace if trace.steps else None


def noted(run: Run, inputs: Inputs, trace: Trace, remade: bool = True) -> Any:
    """The output of one call, whose operations a trace notes, and those of the constructor, where a class makes the
    layer again."""
    student, way, asked = run.student, run.way, run.asked
    (part,) = parts(inputs, way.layout)
    keys, given = part["shape"][-1], student.given(part, way, asked)
    given = {name: _noted_input(trace, x) for name, x in given.items()}
    # What torch.empty gives a constructor may hold any number: what is noted of it warns nobody.
    noting = tensors_noted(trace) if way.tensors else nullcontext()
    forget_results(student.mine)
    with np.errstate(all="ignore"), noting, lines_noted(trace) if remade else nullcontext():
        if student.layers is not None and remade:
            student.layers.remake(inputs)
            trace.paused = True  # weights are put into it, which a call may have to make first
            student.output(inputs, student.given(part, way, asked), way, asked, keys)
            trace.paused = False
            layer = student.layers.at(inputs)
            trace.forget(layer.parameters() if callable(getattr(layer, "parameters", None)) else ())
        return student.output(inputs, given, way, asked, keys)


def _noted_input(trace: Trace, x: Any) -> Any:
    if isinstance(x, dict):
        return type(x)((key, _noted_input(trace, each)) for key, each in x.items())
    if isinstance(x, tuple):
        return tuple(_noted_input(trace, each) for each in x)
    return trace.input(x) if hasattr(x, "shape") and hasattr(x, "dtype") else x


def book_trace(form: BookForm, mistakes: Sequence[Mistake], inputs: Inputs) -> Trace:
    """The book's call, with mistakes."""
    texts = sources(form, mistakes) or {}
    trace = Trace(lambda file: file.startswith("book:"))
    room: dict[str, Any] = {"np": np}
    for name, text in texts.items():
        linecache.cache[f"book:{name}"] = len(text), None, text.splitlines(True), f"book:{name}"
        exec(compile(text, f"book:{name}", "exec"), room)
    made = room[form.called]
    names = made.__code__.co_varnames[: made.__code__.co_argcount]
    given = {
        x: trace.input(inputs[x]) if isinstance(inputs[x], np.ndarray) else inputs[x] for x in names if x in inputs
    }
    with np.errstate(all="ignore"), suppress(Exception), lines_noted(trace):
        made(**given)
    return trace


class ChangedLine(NamedTuple):
    """A line of the book, as a mistake has it: where it stands there, and how the book itself reads."""

    where: str
    line: int
    book: str
    is_lost: bool  # no line has taken its place: `line` is the next one

    def is_at(self, place: Place) -> bool:
        return place.file == f"book:{self.where}" and place.number == self.line


def last_of(trace: Trace, change: ChangedLine) -> list[Any]:
    """What a line of the book gives, each time that it runs."""
    own = [i for i, x in enumerate(trace.steps) if change.is_at(x.place)]
    return [trace.steps[i].value for i in own if i + 1 not in own]


def first_read(right: Trace, change: ChangedLine) -> list[Any]:
    """What a line of the book that is lost would read."""
    for step in right.steps:
        if step.place.file == f"book:{change.where}" and step.place.text == change.book and step.sources:
            return [right.value(step.sources[0])]
    return []


def changed(form: BookForm, mistakes: Sequence[Mistake], number: int) -> list[ChangedLine]:
    """The lines that one of these mistakes changes."""
    others = [x for i, x in enumerate(mistakes) if i != number]
    before, after = sources(form, others) or {}, sources(form, mistakes) or {}
    found = []
    for name in after:
        one, two = before.get(name, "").splitlines(), after[name].splitlines()
        for tag, i, j, k, m in SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
            if tag != "equal":
                theirs = next((x for x in one[i:j] if not x.startswith("def ")), "")
                theirs = theirs or _reads(one[i:], two[k:m])
                found += [ChangedLine(name, n + 1, theirs.strip(), m == k) for n in range(k, max(m, k + 1))]
    return [each for each in found if not each.book.startswith("def ")]


def _reads(lines: Sequence[str], added: Sequence[str]) -> str:
    """The first of the book's lines that reads what added lines give another meaning; else the first."""
    names = {name for text in added for name in re.findall(r"\w+", text.partition("=")[0])}
    reading = (x for x in lines if names & {*re.findall(r"\w+", x.partition(" = ")[2] or x)})
    return next(reading, lines[0] if lines else "")


# ---- probes ----------------------------------------------------------------------------------------------------------


def telling(run: Run, form: BookForm) -> Optional[Inputs]:
    """The largest probe that differs and raises no error, in one call; one without NaN, if there is any."""
    made = function(form)
    order = sorted(range(len(run.probes)), key=lambda i: (_is_nan(run.outcomes[i]), _unclear(run.probes[i]), -i))
    for number in order:
        outcome = run.outcomes[number]
        if outcome.error is None and not equal(outcome, output(made, run.probes[number])):
            for inputs in in_one_call(run.probes[number], run.way.layout):
                if not equal(run.student(inputs, run.way, run.asked), output(made, inputs)):
                    return inputs
    return None


def _is_nan(outcome: Any) -> bool:
    """Whether its result has NaN, which tells neither what a mask means nor where it came from."""
    return outcome.output is not None and bool(np.isnan(outcome.output).any())


def _unclear(inputs: Inputs) -> int:
    """How often an axis of heads, or of their features, can be taken for one of steps."""
    steps = [inputs[name].shape[-2] for name in ("X", "queries", "keys") if name in inputs]
    if "num_heads" not in inputs:
        return 0
    heads = inputs["num_heads"]
    features = inputs["W_q"].shape[1] // heads if "W_q" in inputs else 0
    return sum(map(steps.count, {heads, features, 1}))


def in_one_call(inputs: Inputs, layout: str) -> Iterator[Inputs]:
    """The probe, or its items, or its queries, as each call takes them."""
    first: Any = inputs.get("queries", inputs.get("X"))
    if layout in ("item", "one group"):
        names = ("X", "queries", "keys", "values", "valid_lens", "mask")
        for i in range(len(first)):
            cut = {x: inputs[x][i : i + 1] for x in names if isinstance(inputs.get(x), np.ndarray)}
            yield {**inputs, **cut}
    elif "query" in layout:
        for i in range(first.shape[1]):
            cut = {"queries": inputs["queries"][:, i : i + 1]}
            lens, mask = inputs.get("valid_lens"), inputs.get("mask")
            if isinstance(lens, np.ndarray) and lens.ndim == 2:
                cut["valid_lens"] = lens[:, i : i + 1]
            if isinstance(mask, np.ndarray):
                cut["mask"] = mask[:, i : i + 1]
            yield {**inputs, **cut}
    else:
        yield inputs


# ---- the book's numbers ----------------------------------------------------------------------------------------------


def stages(right: Trace) -> list[tuple[str, Any]]:
    """The stages of the book's call, with the numbers that the line of each ends with: a product is no score yet."""
    found: list[tuple[str, Any]] = []
    last: Optional[Place] = None
    for step in right.steps:
        text = step.place.text
        name = ""
        if text.startswith("scores = queries") or text.startswith("scores = features"):
            name = "scores"
        elif "-1e6" in text:
            name = "mask"
        elif step.place.file == "book:softmax" and text.startswith("return"):
            name = "softmax"
        elif text.startswith(("return attention_weights @", "return softmax(scores, axis=-1) @", "return output /")):
            name = "values"
        elif text.startswith("return X.reshape(X.shape[0], X.shape[1], -1)"):
            name = "heads"
        elif "= transpose_qkv(" in text:
            name = "projections"
        if name and step.place == last:
            found.pop()
        if name:
            found.append((name, step.value))
        last = step.place
    return found


def otherwise(books: Sequence[Any], right: Sequence[Trace], inputs: Inputs) -> Iterator[Any]:
    """Right numbers of other ways to compute the same."""
    with np.errstate(all="ignore"):
        for x in books if not {"keys", "W_q", "valid_lens", "mask"} & {*inputs} else ():  # of tables of angles
            if x.dtype != bool and x.size > 1:
                yield -x
                yield 1 / np.where(x == 0, 1, x) if (x != 0).all() else -x
        for trace in right:
            for step in trace.steps:
                if step.place.file.startswith("book:rope") and step.value.ndim == 2:  # both numbers of a pair need one
                    halves = step.place.file != "book:rope"
                    yield np.tile(step.value, 2) if halves else np.repeat(step.value, 2, axis=1)
                if step.name == "where" and "-1e6" in step.place.text:  # a mask may come after exp
                    yield from _before_a_mask(step, trace)
                if step.place.file == "book:softmax" and step.name == "subtract" and step.sources:
                    scores = trace.value(step.sources[0])
                    for each in (scores, scores - scores.max(), np.clip(scores, -HUGE, HUGE)):
                        e = np.exp(each)
                        yield from (e, e.sum(-1), e * 1.0, each, each.max(-1), np.log(e.sum(-1)))
                    yield scores - scores.max(-1, keepdims=True)
        for name in ("queries", "X"):
            if name in inputs:
                d = inputs[name].shape[-1]
                yield from (inputs[name] / np.sqrt(d), inputs[name] / d**0.25)
        if "keys" in inputs:
            d = inputs["keys"].shape[-1]
            yield from (inputs["keys"] / np.sqrt(d), inputs["keys"] / d**0.25)
        if "W_q" in inputs:
            given: list[Any] = [inputs.get(name, inputs.get("X")) for name in ("queries", "keys", "values")]
            weights: list[Any] = [inputs.get(name) for name in ("W_q", "W_k", "W_v")]
            if all(w is not None for w in weights):
                made = [x @ w for x, w in zip(given, weights)]
                size = weights[0].shape[1] / inputs.get("num_heads", 1)
                yield from (made[0] / np.sqrt(size), made[0] / size**0.25, made[1] / size**0.25)
                yield np.concatenate([x.ravel() for x in made])
                yield np.concatenate([x.ravel() for x in made[1:]])
            yield from _head_by_head(right, inputs)


def _before_a_mask(step: Operation, trace: Trace) -> Iterator[Any]:
    """Exp of scores that a mask hides later, and what is left of it."""
    hidden = step.value <= -1e6
    for x in (trace.value(at) for at in step.sources):
        if x.dtype != bool and x.shape == hidden.shape:
            top = x.max(-1, keepdims=True)
            e = np.exp(x - top)
            left = np.where(hidden, 0, e)
            yield from (top, x - top, e, left, left.sum(-1))


def in_loops(x: Any, lens: Any) -> Iterator[Any]:
    """What who loops over the batch, or over the steps, has of an array: items, rows, and what these may see."""
    if x.ndim == 3:
        yield from x
        if np.ndim(lens) == 1 and len(lens) == len(x):
            yield from (each for item, n in zip(x, lens) for each in (item[:n], item[:, :n]))
        rows = x.swapaxes(0, 1)
        yield from rows
        if x.dtype != bool and x.shape[1] <= x.shape[2]:
            yield from (row[:, : i + 1] for i, row in enumerate(rows))
            yield from (row[i, : n + 1] for n, row in enumerate(rows) for i in range(len(x)))


def _head_by_head(right: Sequence[Trace], inputs: Inputs) -> Iterator[Any]:
    """The parts of the weights that belong to one head, and what each head adds to the output."""
    heads = inputs.get("num_heads", 1)
    sizes = [inputs[name].shape[1] for name in ("W_q", "W_k", "W_v") if name in inputs]
    rows = len(inputs["W_o"]) if "W_o" in inputs else 1
    if heads == 1 or any(size % heads for size in (*sizes, rows)):
        return
    for name in ("W_q", "W_k", "W_v"):
        yield from np.split(inputs[name], heads, axis=1)
    parts = np.split(inputs["W_o"], heads)
    yield from parts
    values = [x for trace in right[:1] for name, x in stages(trace) if name == "values" and x.ndim == 3]
    for x in values[-1:]:
        added = [x[head::heads] @ part for head, part in enumerate(parts)]
        yield from (*added, *np.cumsum(added, axis=0))


_OF_HEADS = [f"book:{name}" for name in ("transpose_qkv", "dot_product", "masked_softmax", "softmax", "causal")]


def heads(right: Sequence[Trace], inputs: Inputs) -> Iterator[Any]:
    """Arrays of the book's with an axis of heads, as (batch, heads, steps, features)."""
    heads = inputs.get("num_heads", 1)
    for trace in right:
        for step in trace.steps:
            if step.value.ndim == 3 and step.place.file in _OF_HEADS:
                if len(step.value) % heads == 0 and heads > 1 and step.value.dtype != bool:
                    yield step.value.reshape(-1, heads, *step.value.shape[1:])
            if step.value.ndim == 4 and step.place.file == "book:transpose_qkv" and step.name == "transpose":
                yield step.value
            if step.value.ndim == 4 and step.place.file == "book:transpose_output" and step.name == "reshape":
                yield step.value
