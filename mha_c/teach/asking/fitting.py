"""The probes that a student can be asked in a round: without what it does not take, and with what it needs."""

from __future__ import annotations

import sys
from typing import Any, Optional

import numpy as np

from ..words.sentences import said
from .configuration import constructor_parameters
from .forms import Way, doubled
from .making import CannotAsk, asks_for, widths
from .mistakes import BookForm, signature
from .probes import Inputs, Sizes, probes, steps_of
from .student import Round, Student


def probes_for(student: Student, asked: Round, layout: str = "batch") -> list[Inputs]:
    """The probes that it can be asked in a round: the same objects each time."""
    key = asked, "heads" in layout
    if key not in student.memory.probes:
        student.memory.probes[key] = _made_for(student, asked, layout)
    return student.memory.probes[key]


def _probes(form: BookForm, sizes: Optional[Sizes]) -> list[Inputs]:
    return probes(form.kind, sizes, form.by_mask)


def _made_for(student: Student, asked: Round, layout: str, again: bool = False) -> list[Inputs]:
    if student.kind == "rope" and student.layers is not None and not student.is_class:
        student.sizes = _size_that_fits(student, asked)
    made = [_fitting(student, each, asked) for each in _probes(asked.forms[0], student.sizes)]
    made = [each for each in made if _is_answerable(student, each, asked)]
    if not made:
        words = said("{name}: check has no inputs that it takes; the book's is {kind}({signature})",
                     name=student.name, kind=student.kind, signature=", ".join(signature(student.kind)))  # fmt: skip
        raise CannotAsk(words)
    if not student.has_weights:
        made += _of_narrow_head(student, asked, made[-1])
    if student.layers is not None and student.is_class and made:
        fitting = [each for each in made if student.layers.at(each) is not None]
        if not fitting:  # it makes a layer of its own size
            layer = student.layers.any(made[-1])
            if again:  # a layer of these sizes has others yet: it would grow for ever
                words = "{name}: check does not know how its sizes follow from {arguments}: give it a layer"
                arguments = ", ".join(each.name for each in constructor_parameters(student.mine))
                raise CannotAsk(said(words, name=student.name, arguments=arguments))
            student.sizes = student.layers.sizes_that_fit(layer)
            return _made_for(student, asked, layout, again=True)
        if student.kind == "additive" and student.sizes is None and len(fitting) < len(made):
            student.sizes = student.layers.sizes(student.layers.at(fitting[-1]))  # queries as wide as keys: all fit
            return _made_for(student, asked, layout)
        made = [*fitting, *_of_narrow_head(student, asked, fitting[-1])]
    return [doubled(each) for each in made] if "heads" in layout else made


def _of_narrow_head(student: Student, asked: Round, chosen: Inputs) -> list[Inputs]:
    """Probes of one head with fewer features than its input has, where weights are arguments or a class takes the size
    of a head."""
    if "W_q" not in chosen or student.kind == "additive" or student.only_heads or not student.has_one_head:
        return []
    if student.has_weights and not asks_for(student.mine, "head_dim"):
        return []
    wide = len(chosen["W_q"])
    more = [_fitting(student, each, asked) for each in _probes(asked.forms[0], Sizes(wide, wide, wide, wide // 2))]
    more = [each for each in more if _is_answerable(student, each, asked)]
    layers = student.layers if student.has_weights else None
    return [each for each in more if layers.at(each) is not None] if layers is not None else more[-1:]


def _size_that_fits(student: Student, asked: Round) -> Optional[Sizes]:
    """Of a layer that turns pairs: the first width that its tables allow."""
    assert student.layers is not None
    choices = [None, *(Sizes(0, 0, 0, width) for width in widths(student.layers.at({})))]
    for sizes in choices:
        inputs = probes(student.kind, sizes)[1]
        for tensors in types_of(student):
            if student(inputs, Way(tensors, precision=student.precision), asked).error is None:
                return sizes
    return None


def _fitting(student: Student, inputs: Inputs, asked: Round) -> Inputs:
    """A probe, without what the student does not take in this round."""
    inputs = {**inputs, **{name: x for name, x in student.own.items() if x and name in inputs}}
    if "valid_lens" in inputs and asked.role != "lens":
        inputs["valid_lens"] = None
    if "mask" in inputs and asked.role == "flag" and asked.forms[0].hides != "past":
        batch, queries, keys = steps_of(inputs)
        past = np.broadcast_to(np.tri(queries, keys, dtype=bool), (batch, queries, keys))
        inputs["mask"] = True if queries != keys else past[:, None] if student.kind == "grouped" else past
    elif "mask" in inputs and asked.role not in ("lens", "mask"):
        inputs["mask"] = True
    elif asked.role == "lens" and isinstance(inputs.get("mask"), np.ndarray):  # as many keys, the first ones
        seen = inputs["mask"].sum(axis=-1, keepdims=True)
        if "chunk_size" in inputs:  # every other item has a length that ends in its first chunk
            seen //= 2 - np.arange(len(seen)).reshape(-1, *[1] * (seen.ndim - 1)) % 2
        inputs["mask"] = np.arange(inputs["mask"].shape[-1]) < seen
    if student.has_one_head and "W_o" in inputs:
        inputs["num_heads"] = student.heads
    if student.joins_heads_alone and "W_o" in inputs:
        inputs["W_o"] = np.eye(len(inputs["W_o"]))
    if student.width and "W_q" not in inputs:
        rng = np.random.default_rng(22)  # one for both: equal ones would hide that one takes the other's place
        for name in ("queries", "keys"):
            inputs[name] = rng.standard_normal((*inputs[name].shape[:-1], student.width)).round(1)
    if student.only_heads:
        inputs.update((name, np.eye(len(inputs[name]))) for name in ("W_q", "W_k", "W_v", "W_o"))
    if student.attends_to_itself:
        _attend_to_itself(inputs)
    elif student.values_are_keys:
        inputs["values"] = inputs["keys"]
    return inputs


def _attend_to_itself(inputs: Inputs) -> None:
    """Keys are queries, too; a mask that is the same for all queries goes for as many queries as there are keys."""
    mask, steps = inputs.get("mask"), inputs["keys"].shape[-2]
    if inputs["keys"].shape[-1] == inputs["queries"].shape[-1]:
        inputs["queries"] = inputs["keys"]
        if isinstance(mask, np.ndarray) and mask.shape[-2] != steps and (mask == mask[..., :1, :]).all():
            inputs["mask"] = np.broadcast_to(mask[..., :1, :], (*mask.shape[:-2], steps, steps))
    inputs.update(keys=inputs["queries"], values=inputs["queries"])


def _is_answerable(student: Student, inputs: Inputs, asked: Round) -> bool:
    given, hiding = {*student.takes.values()}, inputs.get("mask", inputs.get("valid_lens"))
    for name, weight in (("keys", "W_k"), ("values", "W_v")):
        if weight in inputs and name in inputs and len(inputs[weight]) != inputs[name].shape[-1]:
            return False
    if any(len(inputs[x]) != inputs["X"].shape[-1] for x in ("W_q", "W_k", "W_v") if {x, "X"} <= {*inputs}):
        return False
    if student.attends_to_itself and not _fits_itself(inputs, hiding):
        return False
    if inputs.get("offset") and not {"offset", "positions", "cos", "cis"} & given:
        return False
    if asked.forms[0].kind == "window":
        takes = "window" in given or "window" in student.own
        return takes and inputs["queries"].shape[1] == inputs["keys"].shape[1]
    return asked.role != "flag" or inputs.get("mask", True) is not True or asked.forms[0].hides == "past"


def _fits_itself(inputs: Inputs, hiding: Any) -> bool:
    """Whether lengths and masks are those of as many keys as there are queries."""
    steps = inputs["queries"].shape[1]
    if not isinstance(hiding, np.ndarray):
        return True
    return (
        hiding.shape[-1] == steps and hiding.shape[-2] == steps if hiding.dtype == bool else int(hiding.max()) <= steps
    )


def types_of(student: Student) -> list[bool]:
    """Whether it is given tensors, the likeliest first."""
    torch: Any = sys.modules.get("torch")
    module = getattr(getattr(torch, "nn", None), "Module", ())
    if issubclass(student.mine, module) if student.is_class else isinstance(student.mine, module):
        return [True]
    types = [False, True] if torch else [False]
    if torch and any(x is torch for x in getattr(student.mine, "__globals__", {}).values()):
        types.reverse()
    return types
