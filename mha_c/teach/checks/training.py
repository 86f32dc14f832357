"""What a layer of torch does in training, where all else is right: whether dropout acts, and on what."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..asking.making import DROPOUT, asks_for, plain
from ..asking.probes import Inputs
from ..asking.rounds import Run
from ..why.noting import Trace
from ..why.own_lines import line_of, line_that_multiplies
from ..why.traces import noted
from ..words.sentences import say
from .beyond import lengthened

_CALLS = 4  # in training: of some 400 numbers and more each
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
    numbers = _wrong_numbers(run, inputs, layer)
    with _dropped(layer) as dropped:
        calm = student(inputs, run.way, run.asked)
    with _in_training(layer):
        wild = student(inputs, run.way, run.asked)
    if calm.output is None or wild.output is None:
        return []
    of_keys = [x for x in dropped if x.shape[-2:] == (_STEPS, _STEPS)]
    if of_keys and not all(map(_are_weights, of_keys)):
        return [("dropout_on_scores", say("dropout_on_scores"))]
    if np.array_equal(calm.output, wild.output):
        return [("no_dropout", say("no_dropout"))]
    # Of what projects nothing the weights alone are dropped; behind W_o many drop once more.
    if dropped and len(of_keys) < len(dropped) and student.kind in ("dot_product", "additive"):
        return [("dropout_elsewhere", say("dropout_elsewhere"))]
    return numbers


def with_lines(run: Run, found: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    """What is wrong with dropout, each with the line where it acts, or where weights that lose nothing are used."""
    made: list[tuple[str, Any]] = []
    for id, words in found:
        if id == "no_dropout":
            lines = line_that_multiplies(run, _are_weights) or line_of(run, "softmax")
        else:
            lines = line_of(run, "drop", 0 if id == "dropout_on_scores" else -1)
        made += [(id, words), *((id, line) for line in lines)]
    return made


# ---- its numbers -----------------------------------------------------------------------------------------------------


def _wrong_numbers(run: Run, inputs: Inputs, layer: Any) -> list[tuple[str, str]]:
    """Id and words of weights that are dropped in other numbers than the book's: kept ones are divided by 1 - p."""
    p = _share(run, layer)
    if not 0 < p < 1:
        return []
    if run.student.kind == "positional_encoding":
        return _of_the_sum(run, inputs, layer, p)
    calm = _weights_in(run, inputs)
    if calm is None:
        return []
    with _in_training(layer):
        drawn = [_dropped_weights(run, inputs, calm) for _ in range(_CALLS)]
    wild = [x for x in drawn if x is not None]
    if len(wild) < len(drawn):
        return [("dropout_elsewhere", say("dropout_elsewhere"))] if run.student.kind != "causal_multi_head" else []
    counted = np.broadcast_to(calm > 1e-5, calm.shape)
    factors = np.concatenate([(x[counted] / calm[counted]) for x in wild])
    kept = factors[np.abs(factors) > 1e-6]
    if len(kept) == len(factors):
        return []
    if not len(kept) or np.ptp(kept) > 1e-2 * np.abs(kept).max():
        return [("dropout_numbers", say("dropout_uneven"))]
    if abs(kept.mean() - 1 / (1 - p)) > 1e-2:
        words = say("dropout_factor", p=f"{p:g}", factor=f"{kept.mean():.3g}", right=f"{1 / (1 - p):.3g}")
        return [("dropout_numbers", words)]
    share, spread = 1 - len(kept) / len(factors), (p * (1 - p) / len(factors)) ** 0.5
    zeros = [x[counted] == 0 for x in wild]
    if all((zeros[0] == each).all() for each in zeros):
        return [("dropout_numbers", say("dropout_kept"))]
    if abs(share - p) > 6 * spread:
        return [("dropout_numbers", say("dropout_share", p=f"{p:g}", share=f"{share:.2g}"))]
    if len(wild[0]) > 1 and all((x[0][calm[0] > 1e-5] == 0).any() for x in wild) and all(map(_is_shared, wild)):
        return [("dropout_numbers", say("dropout_shared"))]
    return []


def _is_shared(x: Any) -> bool:
    """Whether all items have their zeros in the same places."""
    return bool(((x == 0) == (x[:1] == 0)).all())


def _share(run: Run, layer: Any) -> float:
    """The p that dropout should have: the one that the class is made with, or the layer's own."""
    if run.student.is_class and asks_for(run.student.mine, "dropout"):
        return DROPOUT
    return max((float(getattr(each, "p", 0)) for each in _parts(layer)), default=0.0)


def _weights_in(run: Run, inputs: Inputs) -> Any:
    """The attention weights of a call, with the axes that they have in it; None where none are seen."""
    steps = _steps_of(run, inputs)
    found = [x for x in steps if x.ndim > 2 and x.shape[-2:] == (_STEPS, _STEPS) and _are_weights(x)]
    largest = max((x.size for x in found), default=0)  # not their mean over heads
    return next((x for x in reversed(found) if x.size == largest), None)


def _dropped_weights(run: Run, inputs: Inputs, calm: Any) -> Any:
    """The last array of a call in training that holds some of the weights, others than all of them."""
    found = [x for x in _steps_of(run, inputs) if x.shape == calm.shape and not (np.isclose(x, calm).all())]
    found = [x for x in found if (x >= 0).all() and (x[calm < 1e-6] < 1e-5).all() and (x == 0).any()]
    return found[-1] if found else None


def _steps_of(run: Run, inputs: Inputs) -> list[Any]:
    trace = Trace(lambda file: True)
    try:
        noted(run, inputs, trace, remade=False)
    except Exception:
        return []
    return [x.value for x in trace.steps if x.value.dtype != bool]


def _of_the_sum(run: Run, inputs: Inputs, layer: Any, p: float) -> list[tuple[str, str]]:
    """The same of positional encoding, where the sum is dropped."""
    calm = run.student(inputs, run.way, run.asked).output
    with _in_training(layer):
        wild = run.student(inputs, run.way, run.asked).output
    if calm is None or wild is None or np.allclose(calm, wild):
        return []
    kept = wild[np.abs(wild) > 1e-6]
    if np.allclose(kept, calm[np.abs(wild) > 1e-6] / (1 - p), rtol=1e-2, atol=1e-3) and len(kept) < wild.size:
        return []
    return [("dropout_elsewhere", say("dropout_of_sum"))]


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
