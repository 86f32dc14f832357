"""The real d2l package with our attention classes in it: patch, unpatch, compare.

>>> from d2l import torch as d2l                                          # doctest: +SKIP
>>> import mha_c.d2l
>>> mha_c.d2l.patch()                                                     # doctest: +SKIP
mha_c replaces MultiHeadAttention, DotProductAttention, AdditiveAttention in d2l.torch

d2l is never imported here: it is found where the user has imported it.  Either generation will do.
"""

from __future__ import annotations

import builtins
import copyreg
import importlib
import sys
from types import FunctionType, ModuleType, TracebackType
from typing import Any, Optional

NAMES = ("MultiHeadAttention", "DotProductAttention", "AdditiveAttention")
__all__ = ["compare", "patch", "unpatch"]
__dir__ = __all__.copy  # what dir() and completion show

_originals: dict[ModuleType, dict[str, Any]] = {}


class Patched:
    """What `patch` returns: leaving `with patch():` undoes it."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self._modules = modules

    def __enter__(self) -> Patched:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        _restore(self._modules)

    def __repr__(self) -> str:
        return f"<mha_c in {', '.join(module.__name__ for module in self._modules) or 'nothing new'}>"


def patch(module: Optional[ModuleType] = None) -> Patched:
    """Put our attention classes in the place of d2l's, and print their names; `unpatch` undoes it.

    Every model that is built afterwards by d2l's own code, and by code that says `d2l.MultiHeadAttention`, uses
    ours, and goes on working after `unpatch`.  Names that a program has taken out of d2l before (`from d2l.torch
    import MultiHeadAttention`), subclasses of d2l's classes and models that exist already stay d2l's and go on working;
    for models: mha_c.torch.convert.  A model saved whole is, when loaded, of the classes that d2l has then.

    Parameters
    ----------
    module : module, optional
        The imported d2l.torch; None: the one in sys.modules.

    Returns
    -------
    Patched
        For `with mha_c.d2l.patch(): ...`, which undoes it at the end.

    Raises
    ------
    RuntimeError
        If there is no such module.

    Notes
    -----
    Patching twice does nothing.

    Examples
    --------
    >>> import mha_c.d2l
    >>> from d2l import torch as d2l  # doctest: +SKIP
    >>> with mha_c.d2l.patch():  # doctest: +SKIP
    ...     attention = d2l.MultiHeadAttention(100, 5, 0.5)
    """
    from . import torch as ours

    found = _found() if module is None else [module]
    fresh = [each for each in found if each not in _originals]
    for each in fresh:
        missing = [name for name in NAMES if not hasattr(each, name)]
        if missing:
            raise RuntimeError(f"{each.__name__} has no {', '.join(missing)}: is it d2l.torch?")
    for each in fresh:
        _originals[each] = {name: getattr(each, name) for name in NAMES}
        for original in _originals[each].values():
            _keep_working(original)
        for name in NAMES:
            setattr(each, name, getattr(ours, name))
        print(f"mha_c replaces {', '.join(NAMES)} in {each.__name__}")
    return Patched(fresh)


def unpatch(module: Optional[ModuleType] = None) -> None:
    """Put d2l's own classes back, in `module` or wherever `patch` replaced them; no error where it has not.

    Parameters
    ----------
    module : module, optional
        The imported d2l.torch; None: all.

    Examples
    --------
    >>> import mha_c.d2l
    >>> mha_c.d2l.unpatch()
    """
    _restore(list(_originals) if module is None else [module])


def compare(module: Any, *inputs: Any, seconds: float = 1.0, show: bool = True) -> dict[str, float]:
    """Run `module` and a copy of it with our attention side by side; print speed ratio and largest difference.

    Parameters
    ----------
    module : torch module
        A d2l attention module, or any model with such (or nn.MultiheadAttention) inside; left as it is.
    *inputs : Any
        What it is called with.
    seconds : float
        How long to measure.
    show : bool
        False: nothing is printed.

    Returns
    -------
    dict
        Keys: largest_difference (of the results, without dropout) and, in microseconds of the fastest call,
        forward_us, forward_ours_us, training_us (forward and backward, with dropout), training_ours_us, and the
        ratios theirs / ours forward_ratio and training_ratio.

    Raises
    ------
    ValueError
        Where there is no attention module in it; what the module itself raises passes through.

    Examples
    --------
    >>> mha_c.d2l.compare(d2l.MultiHeadAttention(100, 5, 0.5), X, Y, Y, valid_lens)       # doctest: +SKIP
    """
    from .torch.compare import compare as run

    return run(module, *inputs, seconds=seconds, show=show)


def _found() -> list[ModuleType]:
    module = sys.modules.get("d2l.torch")
    if module is None:
        raise RuntimeError("d2l.torch is not imported: say `from d2l import torch as d2l` before mha_c.d2l.patch()")
    return [module]


def _restore(modules: list[ModuleType]) -> None:
    for module in modules:
        for name, original in _originals.pop(module, {}).items():
            setattr(module, name, original)
            copyreg.dispatch_table.pop(original, None)


# --- d2l's own classes while ours stand in their place ------------------------------------------------------


class _Namespace(dict[str, Any]):
    """The globals of a module, with one name that means what it meant when the module was imported."""

    def __init__(self, module: dict[str, Any], name: str, value: Any) -> None:
        super().__init__({name: value})
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name in self._module:
            return self._module[name]
        return vars(builtins)[name]


class _Reference:
    """A class as a pickle shall name it: by its module and name, whatever stands there now."""

    def __init__(self, kind: type, attribute: bool = True) -> None:
        self._kind, self._attribute = kind, attribute

    def __reduce__(self) -> Any:
        if not self._attribute:
            return importlib.import_module, (self._kind.__module__,)
        return getattr, (_Reference(self._kind, attribute=False), self._kind.__name__)

    def __deepcopy__(self, memo: Any) -> type:
        return self._kind


class _Blank:
    """object.__new__, as which it is pickled, that takes a _Reference too: copy.copy hands it over as it is."""

    def __call__(self, kind: Any) -> Any:
        return object.__new__(kind._kind if type(kind) is _Reference else kind)

    def __reduce__(self) -> Any:
        return getattr, (object, "__new__")


def _keep_working(kind: type) -> None:
    """Constructing, copying and pickling a class of d2l that a program has from before, or has built upon.

    Its __init__ looks its own name up in the module, for super(), and would find ours; pickle too.
    """
    init = kind.__dict__["__init__"]
    if not isinstance(init.__globals__, _Namespace):
        names = _Namespace(init.__globals__, kind.__name__, kind)
        own = FunctionType(init.__code__, names, init.__name__, init.__defaults__, init.__closure__)
        own.__kwdefaults__ = init.__kwdefaults__
        own.__doc__, own.__qualname__, own.__module__ = init.__doc__, init.__qualname__, init.__module__
        kind.__init__ = own  # type: ignore[misc]
    copyreg.pickle(kind, _reduced)


def _reduced(module: Any) -> Any:
    state = module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__
    return _Blank(), (_Reference(type(module)),), state
