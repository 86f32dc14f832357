"""Who sees torch's operations, or changes them: a profiler, modes, and a class of tensors."""

import gc
import sys
import tracemalloc

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mha_c.torch import functional


def profiled(call):
    """The names of what torch's profiler finds in a call: torch's operations, and those of ours that it is told of."""
    with torch.autograd.profiler.profile() as found:
        call()
    return [event.name for event in found.function_events]


def keep_nothing():
    """No memory waits for the next large result but one block, too large for any: it took all the room there is, but
    half a KiB, so what others have left is gone."""
    functional.dot_product_attention(torch.zeros(1, 2, 128 * 1024 - 1, 64), *torch.zeros(2, 1, 2, 4, 64))


def bytes_taken(call):
    """What a call takes of memory for tensors and for Python's and NumPy's objects, at most; of none that was kept."""
    keep_nothing()
    tracemalloc.start()
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as found:
            call()
            of_python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return of_python + sum(max(0, event.self_cpu_memory_usage) for event in found.function_events)


def events_of_python(call):
    """What Python tells a profiler of a call, event by event."""
    found = []
    gc.collect()  # others' modules that are gone, and who is told of collections, are no part of the call
    gc.disable()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: found.append(event))
    try:
        call()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def way_taken(call):
    """Who computes the attention of a call: "general", torch's operations, or "core", of which torch sees nothing."""
    names = {"aten::softmax", "aten::_softmax", "aten::scaled_dot_product_attention"}
    return "general" if names.intersection(profiled(call)) else "core"


class Names(TorchFunctionMode):
    """The functions of torch that are called, but for looks at attributes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """The names of the operations that are computed."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Tripled(torch.Tensor):
    """A weight as torchao's are: products with it are its own, here three times as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return 3 * out if func is nn.functional.linear else out.as_subclass(cls) if func is torch.Tensor.detach else out
