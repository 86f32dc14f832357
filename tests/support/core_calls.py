"""The functions of `mha_c._core` by keyword, for tests: it takes positions only, and lengths as int64.

from core_calls import core as _core
"""

import ast
import functools
from pathlib import Path

from mha_c import _core
from mha_c._arguments.arrays import to_lengths
from mha_c._layer.kept_weights import saved_weights
from mha_c.errors import ShapeError


def stub():
    """Function -> [(parameter, its default or ...)], as _core.pyi promises them."""
    found = {}
    for node in ast.parse(Path(_core.__file__).with_name("_core.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name not in found:  # of overloads, the first
            names = [argument.arg for argument in node.args.posonlyargs]
            defaults = [ast.literal_eval(default) for default in node.args.defaults]
            found[node.name] = list(zip(names, [...] * (len(names) - len(defaults)) + defaults))
    return found


STUB = stub()


def positions(name, *args, **named):
    """What the compiled function of this name gets."""
    given, parameters = list(args), STUB[name]
    for parameter, default in parameters[len(args) :]:
        if parameter not in named and default is ...:
            break
        given.append(named.pop(parameter, default))
    assert not named, f"{name} has no {', '.join(named)}"
    for i, (parameter, _) in enumerate(parameters[: len(given)]):
        if parameter == "valid_lens":
            given[i] = to_lengths(given[i])
    return given


def by_keyword(name):
    function = getattr(_core, name)

    @functools.wraps(function)
    def call(*args, **named):
        return function(*positions(name, *args, **named))

    return call


class Core:
    def __init__(self):
        for name in STUB:
            setattr(self, name, by_keyword(name))
        self.saved_weights = saved_weights
        self.ShapeError, self.__file__ = ShapeError, _core.__file__


core = Core()
