"""Compares an attention module, or a model that contains some, with a converted copy; `mha_c.d2l.compare` calls it."""

from __future__ import annotations

import contextlib
import copy
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._layer.description import LOOKED
from .._layers_with_heads import in_eval_mode
from .._recognize import THREE_LINES
from ..config import processor, set_num_threads, threads_of
from ._readers.converting import is_cores, is_ours
from .convert import convert, of_arrays

WIDE = 2  # times the lowest ratio, or the time of one thread: more is the machine's other work, not the module's
UNCERTAIN = 10  # times the lowest ratio: then no ratio is said


def compare(module: nn.Module, *inputs: Any, seconds: float = 1.0, show: bool = True) -> dict[str, Any]:
    """Runs `module` and a converted copy on the same inputs; see mha_c.d2l.compare."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"compare takes a torch module, then its arguments; got {type(module).__name__}{of_arrays(module)}"
        )
    already = [name or type(module).__name__ for name, part in module.named_modules() if is_ours(part)]
    if already:
        raise ValueError(
            f"compare takes a model that is not changed yet, and {already[0]} is mha_c's: build it before patch() or "
            "after unpatch(), and compare before convert()"
        )
    with in_eval_mode(module), torch.no_grad():
        try:
            module(*inputs)  # sets lazy sizes, and leaves weights that can be copied
        except TypeError as error:
            if inputs:
                raise
            raise TypeError(f"compare calls the module with what follows it, compare(model, X): {error}") from None
    theirs = copy.deepcopy(module).eval()  # training changes gradients, statistics and modes, of copies only
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert (found nothing|left)")  # here it raises an error below
        ours = convert(copy.deepcopy(theirs))
        _read(ours, inputs)
    if not any(map(is_cores, ours.modules())):
        raise ValueError(
            f"{type(module).__name__} holds no attention module that mha_c could replace{_why(ours)}.  {THREE_LINES}"
        )
    result: dict[str, Any] = {"largest_difference": _difference(theirs, ours, inputs), "processor": processor()}
    threads = torch.get_num_threads()
    found = _measured(theirs, ours, inputs, seconds)
    waiting = threads > 1 and _waiting(found, theirs, ours, inputs, seconds)
    if waiting:
        slow, threads = found["forward"]["us"], 1
        with _one_thread():
            found = _measured(theirs, ours, inputs, seconds)
    result.update(threads=threads, threads_of=threads_of()[0])
    for name, times in found.items():
        result.update({f"{name}_{key}": value for key, value in times.items()})
    if show:
        if waiting:
            says = "This machine is busy, and {} threads wait for each other: forward took {}.  With one thread:"
            print(says.format(torch.get_num_threads(), _us(slow).strip()))
        used = "1 thread" if threads == 1 else f"{threads} threads{' of torch' * (result['threads_of'] == 'torch')}"
        print(f"{type(module).__name__} on {result['processor']}, {used}:")
        for name, words in (("forward", "forward"), ("training", "forward + backward")):
            low, high = result[f"{name}_range"]
            print(f"  {words:<20}{_us(result[f'{name}_us'])}, with mha_c {_us(result[f'{name}_ours_us'])}: ", end="")
            ratio = "uncertain" if high > UNCERTAIN * low else f"{_digits(result[f'{name}_ratio'])} times as fast"
            print(f"{ratio} ({_digits(low)} to {_digits(high)})")
        print(f"  largest difference  {result['largest_difference']:9.1e}")
        if any(map(_wide, found.values())):
            print("  The machine has other work, so a range is wide: measure again when it is quiet.")
    return result


def _read(module: nn.Module, inputs: Any) -> None:
    """Call a converted module in the forms that are measured, so that its own classes are read."""
    for _ in range(2):  # what is inside a module that is left is read at the next call
        _forward(module.eval(), inputs)
        _training(module.train(), inputs)
    module.eval()


def _why(left: nn.Module) -> str:
    """What reading has said of the modules that were left."""
    looked = [(part, LOOKED[part]) for part in left.modules() if part in LOOKED]
    found = [f"{type(part).__name__}: {each.reason}" for part, each in looked if each.attends and each.reason]
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


def _measured(theirs: nn.Module, ours: nn.Module, inputs: Any, seconds: float) -> dict[str, dict[str, Any]]:
    pair = (theirs, ours)
    forward = _timed(_forward, [module.eval() for module in pair], inputs, seconds / 2)
    return {
        "forward": forward,
        "training": _timed(_training, [module.train() for module in pair], inputs, seconds / 2),
    }


def _wide(times: dict[str, Any]) -> bool:
    """Whether the turns tell too little: eight in ten of an idle machine's ratios lie within a tenth of the median."""
    low, high = times["range"]
    return bool(high > WIDE * low)


def _waiting(found: Any, theirs: nn.Module, ours: nn.Module, inputs: Any, seconds: float) -> bool:
    """Whether threads wait for each other, as on a machine with other work: then a call of 0.1 ms may take 70 ms."""
    if any(map(_wide, found.values())):
        return True
    with _one_thread():
        alone = _timed(_forward, [theirs.eval(), ours.eval()], inputs, seconds / 20)
    return any(found["forward"][name] > WIDE * alone[name] for name in ("us", "ours_us"))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """torch's calls and ours use the calling thread alone; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with set_num_threads(1):
            yield
    finally:
        torch.set_num_threads(before)


def _digits(ratio: float) -> str:
    """A ratio in two digits, which is what a shared machine lets one know."""
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 0.995 else f"{ratio:.2f}"


def _us(time: float) -> str:
    return f"{time:9.1f} us" if time < 100 else f"{time:9.0f} us"


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
