"""The biases of a layer whose numbers are right without them: whether each is there, and added where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..asking.comparing import equal
from ..asking.configuration import constructor_parameters, takes_config
from ..asking.making import asks_for
from ..asking.mistakes import BookForm
from ..asking.rounds import Run, run_of
from ..asking.student import Student
from ..words.sentences import say
from .beyond import with_biases

_OF_ALL = re.compile("(use_)?bias", re.IGNORECASE)  # flags that speak of the output, too


def biases(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Ids and words of biases that are lost, or added in another way than in a projection."""
    if not run.student.has_weights or run.student.kind == "additive":
        return []
    return _numbers(run, form) or list(_missing(run, form))


def made_with(student: Student, value: bool) -> Iterator[tuple[str, Student]]:
    """Each flag of the constructor, or of its configuration, that chooses biases; and a student made with it."""
    if not student.is_class:
        return
    names = [each.name for each in constructor_parameters(student.mine) if isinstance(each.default, bool)]
    names = [name for name in names if re.search("(?<!attention_)(?<!position_)bias$", name, re.IGNORECASE)]
    if not names and takes_config(student.mine) and asks_for(student.mine, "bias"):
        names = ["bias"]
    for name in names:
        yield name, Student(student.mine, student.kind, student.weights, {**student.chosen, name: value}, student.mask)


def _missing(run: Run, form: BookForm) -> Iterator[tuple[str, str]]:
    """What a flag does not choose: a projection without a bias where it is True, with one where it is False."""
    for value in (True, False):
        for name, student in made_with(run.student, value):
            other = run_of(student, run.asked, run.way)
            wrong = [each for each in ("W_q", "W_k", "W_v", "W_o") if _has(other, each) is (not value)]
            if not _OF_ALL.fullmatch(name) or not value:
                wrong = [each for each in wrong if each != "W_o"]
            if wrong:
                sentence = "bias_lost" if value else "bias_always"
                yield sentence, say(sentence, flag=f"{name}={value}", names=", ".join(wrong))
            elif value and _held(other)[1] is not None:
                yield from _numbers(other, form)


def _has(run: Run, name: str) -> Any:
    """Whether the weight of this name has a bias; None where there is no such weight."""
    layers, layer = _held(run)
    if layer is None:
        return None
    read = layers.weights(layer)[run.way.weights]
    return None if name not in read.parts else read.bias(layer, name) is not None


def _held(run: Run) -> tuple[Any, Any]:
    layers = run.student.layers
    assert layers is not None
    return layers, layers.at(run.probes[-1])


def _numbers(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Whether biases that have numbers are added to what their weights make."""
    names = [name for name in ("W_q", "W_k", "W_v", "W_o") if _has(run, name)]
    if not names or _is_right(run, form, names):
        return []
    wrong = [name for name in names if not _is_right(run, form, [name])]
    lost = [name for name in wrong if _is_right(run, form, [name], [])]
    if lost:
        return [("bias_lost", say("bias_unused", names=", ".join(lost)))]
    return [("bias_wrong", say("bias_wrong", names=", ".join(wrong or names)))]


def _is_right(run: Run, form: BookForm, names: Sequence[str], added: Any = None) -> bool:
    """Whether the last probe gives the book's result, with numbers in these biases; `added`: those that have effect."""
    layers, layer = _held(run)
    inputs = run.probes[-1]
    run.student(inputs, run.way, run.asked)  # puts the weights, and no biases
    read = layers.weights(layer)[run.way.weights]
    given = {}
    rng = np.random.default_rng(23)
    for name in names:
        given[name] = rng.uniform(-1, 1, read.bias(layer, name).shape).round(1)
        read.set_bias(layer, name, given[name])
    try:
        outcome = run.student(inputs, run.way, run.asked)
    finally:
        read.clear_biases(layer)
    used = {name: given[name] for name in (names if added is None else added)}
    return equal(outcome, with_biases(inputs, form, used))
