"""The biases of a layer whose numbers are right without them: whether each is there, and added where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..asking.comparing import equal
from ..asking.configuration import constructor_parameters, takes_config
from ..asking.forms import bias_of
from ..asking.making import asks_for
from ..asking.mistakes import BookForm
from ..asking.rounds import Run, run_of
from ..asking.student import Student
from ..words.sentences import say
from .beyond import with_biases

_OF_ALL = re.compile("(use_)?bias", re.IGNORECASE)  # flags that speak of the output, too


def biases(run: Run, form: BookForm) -> list[tuple[str, str]]:
    """Ids and words of biases that are lost, or added in another way than in a projection."""
    if run.student.kind == "additive":
        return []
    if not run.student.has_weights:
        return _named(run, form, bias_arguments(run.student))
    return _numbers(run, form) or list(_missing(run, form))


def bias_arguments(student: Student) -> dict[str, str]:
    """{argument, or a key of one: the weight whose bias it is}, where it is no layer."""
    needed = (name for name, role in student.takes.items() if role == "bias" and name not in student.optional)
    named = {name: bias_of(name) for name in needed}
    named.update((str(key), ours) for each in student.held.values() for key, ours in each.items() if ours[0] == "b")
    return {name: f"W_{ours[2:]}" for name, ours in named.items() if ours}


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
    return _named(run, form, {name: name for name in ("W_q", "W_k", "W_v", "W_o") if _has(run, name)})


def _named(run: Run, form: BookForm, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """The same of these: {an argument, or a weight that a layer holds: the weight}."""
    if not names or _is_right(run, form, names):
        return []
    wrong = [name for name in names if not _is_right(run, form, {name: names[name]})]
    lost = [name for name in wrong if _is_right(run, form, {name: names[name]}, added=False)]
    if lost:
        return [("bias_lost", say("bias_unused", names=_shown(names, lost)))]
    return [("bias_wrong", say("bias_wrong", names=_shown(names, wrong or names)))]


def _shown(names: Mapping[str, str], chosen: Iterable[str]) -> str:
    return ", ".join(names[name] for name in chosen)


def _is_right(run: Run, form: BookForm, names: Mapping[str, str], added: bool = True) -> bool:
    """Whether the last probe gives the book's result with numbers in these biases; `added`: these have effect."""
    rng, inputs = np.random.default_rng(23), run.probes[-1]
    if not run.student.has_weights:
        given = {name: rng.uniform(-1, 1, inputs[ours].shape[1]).round(1) for name, ours in names.items()}
        outcome = run.student({**inputs, **given}, run.way, run.asked)
        return equal(outcome, with_biases(inputs, form, {names[name]: x for name, x in given.items() if added}))
    layers, layer = _held(run)
    run.student(inputs, run.way, run.asked)  # puts the weights, and no biases
    read = layers.weights(layer)[run.way.weights]
    given = {name: rng.uniform(-1, 1, read.bias(layer, name).shape).round(1) for name in names}
    try:
        for name, x in given.items():
            read.set_bias(layer, name, x)
        outcome = run.student(inputs, run.way, run.asked)
    finally:
        read.clear_biases(layer)
    return equal(outcome, with_biases(inputs, form, given if added else {}))
