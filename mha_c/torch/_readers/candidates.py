"""Which modules of a model are read at their first calls: a choice of the order alone, by what they are made of.

No name and no number is looked at.  What is read is judged by what its lines do.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# What a layer of ours may be made of; a module with anything else inside is more than one layer.
_OF_A_LAYER = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Dropout, nn.Dropout1d if hasattr(nn, "Dropout1d") else nn.Dropout, nn.Softmax,
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Tanh, nn.Bilinear,
)  # fmt: skip
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def first_to_read(model: nn.Module) -> list[nn.Module]:
    """The modules that are read at their first calls: the outermost that may be one layer, and those that may not and
    hold none that may."""
    return [*_first(model)]


def next_to_read(module: nn.Module) -> list[nn.Module]:
    """The same inside a module that is left."""
    return [each for child in module.children() for each in _first(child)]


def _first(module: nn.Module) -> Iterator[nn.Module]:
    own = is_the_readers(module)
    if own and _may_be_one_layer(module):
        yield module
        return
    inside = [each for child in module.children() for each in _first(child)]
    yield from inside
    if own and not inside:
        yield module


def is_the_readers(module: nn.Module) -> bool:
    """Whether a reader, or a library, has written its class."""
    kind = type(module)
    home = kind.__module__.partition(".")[0]
    return home not in ("torch", "mha_c") and kind.forward is not nn.Module.forward


def _may_be_one_layer(module: nn.Module) -> bool:
    for part in module.modules():
        kind = type(part)
        if is_the_readers(part) or kind in _CONTAINERS:
            continue
        if not isinstance(part, _OF_A_LAYER):
            return False
    return True
