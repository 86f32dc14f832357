"""Modules of the zoo that are converted and were read, beside the same ones as they were."""

import copy
import functools
import warnings
from collections.abc import Iterable

import torch

import mha_c.torch as mt
import zoo
from zoo import ZOO

zoo.whole()
COPIES = {}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # float32 in another order of operations


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    value = value.values() if isinstance(value, dict) else value
    return [x for item in value for x in tensors(item)] if isinstance(value, Iterable) else []


def drawn(name):
    """(a converted module, the same as it was), with sizes set; and copies of them for `again`."""
    torch.manual_seed(0)
    module = ZOO[name].called()
    twin = copy.deepcopy(module)
    assert mt.convert(module) is module
    for args, named in ZOO[name].calls:
        again_in_both_modes(module, args, named)
    COPIES[name] = copy.deepcopy((module, twin))
    return module, twin


@functools.cache
def drawn_once(name):
    """The same in each process once, for tests that call and look, and change nothing."""
    return drawn(name)


def again_in_both_modes(module, args, named):
    """Calls with and without gradients, so that the forms that the tests use have been read."""
    training = module.training
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for grad in (True, False, True, False):  # the last leaves no graph behind
            with torch.set_grad_enabled(grad):
                module.train(training)(*args, **named)
    for part in module.parameters():
        part.grad = None


def again(name):
    """Copies of what `drawn` has given: a tenth of a second less than to convert once more."""
    if name not in COPIES:
        drawn(name)
    return copy.deepcopy(COPIES[name])


def of_the_zoo(request):
    """For a fixture whose params are ZOO: (a converted module, the same as it was, its calls)."""
    return (*again(request.param), ZOO[request.param].calls)
