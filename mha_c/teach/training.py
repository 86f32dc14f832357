"""What a layer of torch does in training, where all else is right: whether dropout acts, and on what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .beyond import lengthened
from .making import asks_for, plain
from .rounds import Run
from .words import say

_STEPS = 13  # queries and keys: no layer has as many features
_WITHOUT_WEIGHTS = ("positional_encoding", "rope")


def training(run: Run) -> list[tuple[str, str]]:
    """Ids and words of dropout that is asked for, and has no effect, or acts on scores."""
    student = run.student
    if student.layers is None:
        return []
    inputs = run.probes[-1] if student.kind in _WITHOUT_WEIGHTS else lengthened(run, _STEPS)
    layer = student.layers.at(inputs)
    if not (callable(getattr(layer, "modules", None)) and callable(getattr(layer, "train", None))):
        return []
    if not (asks_for(student.mine, "dropout") or any(getattr(each, "p", 0) for each in _parts(layer))):
        return []
    with _dropped(layer) as dropped:
        calm = student(inputs, run.way, run.asked)
    with _in_training(layer):
        wild = student(inputs, run.way, run.asked)
    if calm.output is None or wild.output is None:
        return []
    of_keys = [x for x in dropped if x.shape[-2:] == (_STEPS, _STEPS)]
    on_weights = any(map(_are_weights, of_keys))
    if of_keys and not on_weights:
        return [("dropout_on_scores", say("dropout_on_scores"))]
    if np.array_equal(calm.output, wild.output):
        return [("no_dropout", say("no_dropout"))]
    if dropped and not on_weights and student.kind in ("dot_product", "additive"):
        return [("dropout_elsewhere", say("dropout_elsewhere"))]
    return []


def _are_weights(x: Any) -> bool:
    """Whether each row sums to 1."""
    return bool((x >= 0).all() and np.allclose(x.sum(axis=-1), 1, atol=1e-4))


def _parts(layer: Any) -> list[Any]:
    """Those that drop."""
    return [each for each in layer.modules() if "dropout" in type(each).__name__.lower()]


@contextmanager
def _dropped(layer: Any) -> Iterator[list[Any]]:
    """What its parts that drop are given."""
    found: list[Any] = []

    def keep(part: Any, given: Any) -> None:
        found.extend(np.array(plain(x)) for x in given[:1])

    hooks = [each.register_forward_pre_hook(keep) for each in _parts(layer)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _in_training(layer: Any) -> Iterator[None]:
    """In training, and with random numbers that nobody else misses."""
    torch: Any = sys.modules["torch"]
    with torch.random.fork_rng(devices=[]):
        layer.train()
        try:
            yield
        finally:
            layer.eval()
