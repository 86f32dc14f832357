"""What a reader's program does with a module of his own, played on the module as it is and on a converted copy.

A script is a function of (module, see): it calls, changes and reads as a program does, and gives `see` all that the
program would see.  `played` plays it on both and compares; the states of random generators, hooks and files that
`convert` itself would touch are compared, too.
"""

import copy
import random
import warnings
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

import mha_c
import mha_c.torch as mt

# float32 in another order of operations, of the size of the largest number in a tensor
TOLERANCE = 3e-5


class See(list):
    """What a script has shown, in order."""

    def __call__(self, value):
        self.append(_kept(value))
        return value

    def call(self, module, *args, **named):
        """The result of a call, or its error, is seen."""
        try:
            return self(module(*args, **named))
        except Exception as error:  # the reader's own error is a result as well
            self.append((type(error).__name__, str(error).split("\n")[0]))
            return None

    def thrice(self, module, *args, **named):
        """The first call is the reader's own, the second and third may be another's."""
        return [self.call(module, *args, **named) for _ in range(3)][-1]


class _Tensor:
    def __init__(self, x):
        self.numbers, self.facts = (x.detach() + 0 if x.dtype is not torch.bool else x.detach().clone()), (
            tuple(x.shape), x.dtype, x.requires_grad, type(x))  # fmt: skip


def _kept(value):
    if isinstance(value, torch.Tensor):
        return _Tensor(value)
    if isinstance(value, Mapping):
        return {key: _kept(x) for key, x in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [_kept(x) for x in value]
    return value.copy() if isinstance(value, np.ndarray) else copy.copy(value)


def agree(ours, own, where="", tolerance=None):
    """AssertionError where the two differ."""
    assert type(ours) is type(own), f"{where}: {type(ours).__name__}, not {type(own).__name__}: {ours!r}, {own!r}"
    if isinstance(own, _Tensor):
        assert ours.facts == own.facts, f"{where}: {ours.facts}, not {own.facts}"
        if own.numbers.numel() and not torch.equal(ours.numbers, own.numbers):
            known = ~own.numbers.isnan()  # a query without keys is NaN, where ours has 0: the docs say so
            one, other = ours.numbers[known].double(), own.numbers[known].double()
            far = (one - other)[one != other].abs()
            finite = other[other.isfinite()].abs()
            allowed = (tolerance or TOLERANCE) * max(1.0, float(finite.max()) if finite.numel() else 0.0)
            assert bool((far <= allowed).all()), f"{where}: largest difference {float(far.max()):.3g}"
    elif isinstance(own, dict):
        assert ours.keys() == own.keys(), f"{where}: {[*ours]}, not {[*own]}"
        for key in own:
            agree(ours[key], own[key], f"{where}[{key!r}]", tolerance)
    elif isinstance(own, (list, tuple)):
        assert len(ours) == len(own), f"{where}: {len(ours)} of {len(own)}"
        for i, (one, other) in enumerate(zip(ours, own)):
            agree(one, other, f"{where}[{i}]", tolerance)
    elif isinstance(own, np.ndarray):
        np.testing.assert_allclose(ours, own, rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert ours == own or ours is own or own != own, f"{where}: {ours!r}, not {own!r}"


def outside():
    """What a program has beside its model: states of random numbers, global hooks, modes, threads."""
    hooks = {
        name: len(x) for name, x in vars(nn.modules.module).items() if name.startswith("_global") and "hooks" in name
    }
    return (
        random.getstate(), tuple(map(str, np.random.get_state())), torch.get_rng_state().tolist(),  # noqa: NPY002
        {name: n for name, n in hooks.items()}, torch.is_grad_enabled(), torch.get_num_threads(),
    )  # fmt: skip


def converted(module):
    """`convert` without a warning's noise; nothing outside of the module may have changed."""
    before = outside()
    modes, state = [x.training for x in module.modules()], [(k, id(x)) for k, x in module.named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert mt.convert(module) is module
    assert outside() == before, "convert has changed something outside of the module"
    assert modes == [x.training for x in module.modules()]
    assert state == [(k, id(x)) for k, x in module.named_parameters()]
    return module


def seen_of(script, module):
    """What the script sees with this module; random numbers start anew."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    see = See()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            script(module, see)
        except Exception as error:  # as of the reader's own lines, or a fault of ours
            see.append(("script", type(error).__name__, str(error).split("\n")[0]))
    return see


def played(make, script, tolerance=None):
    """Play the script on the reader's module and on a converted one made the same way; the converted module."""
    torch.manual_seed(0)
    own = make()
    expected = seen_of(script, own)
    torch.manual_seed(0)
    module = converted(make())
    agree(seen_of(script, module), expected, "seen", tolerance)
    return module


def way(module, *args, **named):
    """Who computes a call of the form: "core" or "general"."""
    return mha_c.explain(module, *args, **named).as_dict()["way"]
