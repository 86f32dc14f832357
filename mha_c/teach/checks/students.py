"""Whom to ask: the student of an implementation, and of which kind it is where its numbers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from ..._recognize.roles import causal_flag
from ..asking.comparing import equal
from ..asking.kinds import told
from ..asking.making import Unmade, copied
from ..asking.probes import Inputs, steps_of
from ..asking.rounds import Run, rounds, runs
from ..asking.student import Round, Student, gradients_recorded


def student_of(mine: Any, kind: Optional[str], weights: Optional[Mapping[str, str]] = None) -> Student:
    """The student; whether one whose kind is not told is causal, its numbers tell, where its name does not."""
    chosen = told(mine, kind)
    student = Student(mine, chosen, weights)
    flag = causal_flag(mine) if chosen in _FREE else ""
    if flag:
        return _without_flag(student, flag)
    other = {"multi_head": "causal_multi_head", "causal": "dot_product"}.get(chosen)
    one_input = chosen == "multi_head" and student.attends_to_itself
    if kind is None and other and (one_input or (student.is_chunked and "caus" not in student.name.lower())):
        try:
            second = Student(mine, other, weights)
            with gradients_recorded():
                return second if _hides_the_future(second) == (chosen == "multi_head") else student
        except (Unmade, TypeError):
            return student
    return student


_FREE = {"dot_product": "causal", "multi_head": "causal_multi_head"}  # kinds that hide no future, and such that do


def _without_flag(student: Student, flag: str) -> Student:
    """A layer that says that it is causal: as it is without this flag, to be asked with it, too.

    Where the flag changes nothing, the layer may have been made causal: its numbers tell.
    """
    layer = copied(student.mine)
    setattr(layer, flag, False)
    free = Student(layer, student.kind, student.weights)
    free.name, free.flagged = student.name, (flag, student)
    with gradients_recorded():
        run = runs(free, Round(rounds(free)[0].forms))[0]
        with_flag = [student(inputs, run.way, run.asked) for inputs in run.probes]
        if not any(each.error is not None for each in run.outcomes):
            if not all(equal(one, two.output) for one, two in zip(run.outcomes, with_flag)):
                return free
        one_input = student.kind == "dot_product" or student.attends_to_itself
        if one_input and _hides_the_future(student):
            return Student(student.mine, _FREE[student.kind], student.weights)
    student.flagged = flag, student
    return student


def _hides_the_future(student: Student) -> bool:
    """Whether a change of the last step leaves the others as they are, and one of the first changes the last."""
    run = runs(student, Round(rounds(student)[0].forms))[0]
    names: list[Any] = [name for name in ("X", "keys", "values") if name in run.probes[0]]
    inputs, outcome = max(zip(run.probes, run.outcomes), key=lambda pair: pair[0][names[0]].shape[1])
    last, first = (_with_a_step_changed(student, run, inputs, names, at) for at in (-1, 0))
    if last is None or first is None or outcome.output is None or last.ndim < 2:
        return False
    return _are_near(last[:, :-1], outcome.output[:, :-1]) and not _are_near(first[:, -1], outcome.output[:, -1])


def _with_a_step_changed(student: Student, run: Run, inputs: Inputs, names: Sequence[str], at: int) -> Any:
    changed = {name: inputs[name].copy() for name in names}
    for x in changed.values():
        x[:, at] += 3
    return student({**inputs, **changed}, run.way, run.asked).output


def _are_near(one: Any, two: Any) -> bool:
    return bool(np.allclose(one, two, 1e-4, 1e-4))


def may_hide_the_future(student: Student) -> bool:
    """Whether some row but the last stays as it is where the last step changes, or an error leaves that open."""
    run = runs(student, Round(rounds(student)[0].forms))[0]
    inputs, outcome = max(zip(run.probes, run.outcomes), key=lambda pair: min(steps_of(pair[0])[1:]))
    names = ("queries", "keys", "values") if student.attends_to_itself else ("keys", "values")
    changed = _with_a_step_changed(student, run, inputs, names, -1)
    if changed is None or outcome.output is None or changed.ndim < 3 or changed.shape[1] < 2:
        return True
    return bool(np.isclose(changed, outcome.output, 1e-4, 1e-4, equal_nan=True)[:, :-1].all(axis=(0, 2)).any())
