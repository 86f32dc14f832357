"""Compares an attention module, or a model that contains some, with a converted copy; `mha_c.d2l.compare` calls it."""

from __future__ import annotations

import copy
import time
import timeit
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._layers_with_heads import in_eval_mode
from .._recognize import THREE_LINES
from ..config import processor
from ._own.finding import LEFT
from ._own.made import is_ours
from .convert import convert


def compare(module: nn.Module, *inputs: Any, seconds: float = 1.0, show: bool = True) -> dict[str, Any]:
    """Runs `module` and a converted copy on the same inputs; see mha_c.d2l.compare."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"compare takes a torch module, then its arguments; got {type(module).__name__}")
    already = [name or type(module).__name__ for name, part in module.named_modules() if is_ours(part)]
    if already:
        raise ValueError(
            f"compare takes a model that is not changed yet, and {already[0]} is mha_c's: build it before patch() or "
            "after unpatch(), and compare before convert()"
        )
    with in_eval_mode(module), torch.no_grad():
        module(*inputs)  # sets lazy sizes, and leaves weights that can be copied
    theirs = copy.deepcopy(module).eval()  # training changes gradients, statistics and modes, of copies only
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert (found nothing|left)")  # here it raises an error below
        ours = convert(copy.deepcopy(theirs))
    if not any(map(is_ours, ours.modules())):
        raise ValueError(
            f"{type(module).__name__} holds no attention module that mha_c could replace{_why(ours)}.  {THREE_LINES}"
        )
    difference = _difference(theirs, ours, inputs)
    forward = _timed(_forward, (theirs, ours), inputs, seconds / 2)
    both = _timed(_training, (theirs.train(), ours.train()), inputs, seconds / 2)
    result: dict[str, Any] = {"largest_difference": difference, "processor": processor()}
    for name, times in (("forward", forward), ("training", both)):
        result.update({f"{name}_{key}": value for key, value in times.items()})
    if show:
        threads = torch.get_num_threads()
        print(f"{type(module).__name__} on {result['processor']}, {threads} thread{'s' * (threads > 1)}:")
        for name, times in (("forward", forward), ("forward + backward", both)):
            low, high = times["range"]
            print(f"  {name:<20}{times['us']:9.1f} us, with mha_c {times['ours_us']:9.1f} us: ", end="")
            print(f"{times['ratio']:.2f} times as fast ({low:.2f} to {high:.2f})")
        print(f"  largest difference  {difference:9.1e}")
    return result


def _why(left: nn.Module) -> str:
    """What `convert` has said of the modules that it left."""
    found = [f"{type(part).__name__} {LEFT[part]}" for part in left.modules() if part in LEFT]
    return f": {'; '.join(found)}" if found else ""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _difference(theirs: nn.Module, ours: nn.Module, inputs: Any) -> float:
    with torch.no_grad():
        pairs = zip(_tensors(theirs(*inputs)), _tensors(ours(*inputs)))
        return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def _forward(module: nn.Module, inputs: Any) -> None:
    with torch.no_grad():
        module(*inputs)


def _training(module: nn.Module, inputs: Any) -> None:
    with torch.enable_grad():  # whatever the caller's mode
        loss: Any = sum(x.sum() for x in _tensors(module(*inputs)) if x.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    module.zero_grad(set_to_none=True)


def _timed(call: Callable[..., None], modules: Sequence[nn.Module], inputs: Any, seconds: float) -> dict[str, Any]:
    """Medians of the two modules' times, in microseconds, and their ratio; they are called in turn, and the range is
    that of eight in ten turns."""
    times: list[list[float]] = [[] for _ in modules]
    end = time.perf_counter() + seconds
    while len(times[0]) < 3 or time.perf_counter() < end:
        for module, own in zip(modules, times):
            own.append(timeit.timeit(partial(call, module, inputs), number=1))
    theirs, ours = (1e6 * np.median(own) for own in times)
    low, high = np.percentile(np.divide(times[0], times[1]), [10, 90])
    return {
        "us": float(theirs),
        "ours_us": float(ours),
        "ratio": float(theirs / ours),
        "range": (float(low), float(high)),
    }
