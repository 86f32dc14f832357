"""The real d2l package with our attention classes in it: patch, unpatch, compare.

>>> from d2l import torch as d2l                                          # doctest: +SKIP
>>> import mha_c.d2l
>>> mha_c.d2l.patch()                                                     # doctest: +SKIP
mha_c replaces MultiHeadAttention, DotProductAttention, AdditiveAttention in d2l.torch

This module never imports d2l: it uses the d2l that the user has imported, of any generation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Optional

from .._arguments.calls import refuses_at_the_call
from ._originals import construct_by_own_name, pickle_by_name

if TYPE_CHECKING:
    from ._classes import Book

D2L = "d2l.torch"
__all__ = ["compare", "patch", "unpatch"]
__dir__ = __all__.copy  # what dir() and completion show

_known: dict[ModuleType, Book] = {}  # each d2l.torch that ever had our classes
_patched: list[ModuleType] = []  # each d2l.torch that has them now


class Patched(AbstractContextManager["Patched"]):
    """The result of `patch`: the end of a `with patch():` block undoes the patch."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self._modules = modules

    def __exit__(self, *error: object) -> None:
        _wait_no_longer()
        _restore(self._modules)

    def __repr__(self) -> str:
        where = ", ".join(module.__name__ for module in self._modules)
        return f"<mha_c in {where}>" if where else f"<mha_c in {D2L}, {'as before' if D2L in sys.modules else 'later'}>"


@refuses_at_the_call
def patch(module: Optional[ModuleType] = None) -> Patched:
    """Replace d2l's attention classes by ours, and print their names; `unpatch` undoes it.

    >>> import mha_c.d2l
    >>> from d2l import torch as d2l  # doctest: +SKIP
    >>> with mha_c.d2l.patch():  # doctest: +SKIP
    ...     attention = d2l.MultiHeadAttention(100, 5, 0.5)

    Models that are built afterwards by d2l's own code, or by code that writes `d2l.MultiHeadAttention`, use our
    classes, and still work after `unpatch`.  Names that a program has imported from d2l before (`from d2l.torch import
    MultiHeadAttention`) still mean d2l's classes: `patch` prints each of them, with the line that replaces it.
    Subclasses of d2l's classes and models that exist already do not change; mha_c.torch.convert changes models.  A
    model that was saved as a whole gets, when loaded, the classes that d2l has at that moment.

    Our classes have the same bases (d2l.Module in 1.0) and look up the same names in d2l.torch: after
    `d2l.DotProductAttention = Mine` new MultiHeadAttentions contain Mine, and if a program replaces d2l's
    `masked_softmax`, `transpose_qkv` or `transpose_output`, our classes call the new function.

    Parameters
    ----------
    module : module, optional
        The imported d2l.torch.  Default: the one in sys.modules, or the one that is imported later.

    Returns
    -------
    Patched
        For `with mha_c.d2l.patch(): ...`: the end of the block undoes the patch.

    Raises
    ------
    TypeError, RuntimeError
        If it is no module, or a module without these classes.

    Notes
    -----
    Patching twice does nothing.
    """
    modules: list[ModuleType] = []
    if module is None and D2L not in sys.modules:
        _wait_no_longer()
        sys.meta_path.insert(0, _OnImport(modules))
        print(f"mha_c will replace the attention classes of {D2L} once it is imported")
        for name in _others_with_classes():
            print(f"{name} has classes of these names: import {name}; mha_c.d2l.patch({name}) replaces them now")
    else:
        modules += _replace(sys.modules[D2L] if module is None else module)
    return Patched(modules)


@refuses_at_the_call
def unpatch(module: Optional[ModuleType] = None) -> None:
    """Put d2l's own classes back, in `module` or wherever `patch` replaced them; no error if nothing is patched.

    >>> import mha_c.d2l
    >>> mha_c.d2l.unpatch()

    Parameters
    ----------
    module : module, optional
        The imported d2l.torch.  Default: all that are patched.

    Raises
    ------
    TypeError, RuntimeError
        If it is no module, or a module without these classes.
    """
    given = list(_patched) if module is None else [_checked(module, "unpatch")]
    _wait_no_longer()
    _restore(given)


@refuses_at_the_call
def compare(module: Any, *inputs: Any, seconds: float = 1.0, show: bool = True) -> dict[str, Any]:
    """Run `module` and a copy of it with our attention in turns; print how much faster, and the largest difference.

    >>> mha_c.d2l.compare(d2l.MultiHeadAttention(100, 5, 0.5), X, Y, Y, valid_lens)       # doctest: +SKIP

    Parameters
    ----------
    module : torch module
        A d2l attention module, or a model that contains one (or nn.MultiheadAttention).  It is not changed.
    *inputs : Any
        The arguments to call it with.
    seconds : float
        How long to measure.
    show : bool
        False: print nothing.

    Returns
    -------
    dict
        Keys: largest_difference (of the results, without dropout), processor, threads (1 where the machine's other work
        makes threads wait for each other), and, as medians in microseconds, forward_us, forward_ours_us, training_us
        (forward and backward, with dropout), training_ours_us.  The ratios of the medians, theirs / ours, are
        forward_ratio and training_ratio; forward_range and training_range are the ratios between which eight of ten
        turns lie.

    Raises
    ------
    ValueError
        If `module` contains no attention module; errors of the module itself pass through.
    """
    from ..torch.compare import compare as run

    return run(module, *inputs, seconds=seconds, show=show)


# --- Where d2l is, or will be ---------------------------------------------------------------------------


def _checked(module: Any, caller: str) -> ModuleType:
    """The module, if it can be d2l.torch; else an error that says what to write."""
    if not isinstance(module, ModuleType):
        got = f"got {module!r:.100}: write mha_c.d2l.{caller}()"
        raise TypeError(f"{caller} takes the imported module d2l.torch, or nothing; {got}")
    if module.__name__.partition(".")[0] == "mha_c":
        raise RuntimeError(f"{module.__name__} is ours: {caller} takes the imported module d2l.torch, or nothing")
    from ._classes import CLASSES  # which imports torch

    if not any(hasattr(module, name) for name in CLASSES):
        raise RuntimeError(f"{module.__name__} has no {', '.join(CLASSES)}: is it d2l.torch?")
    return module


def _replace(module: ModuleType) -> list[ModuleType]:
    """Replace d2l's own classes in `module` by ours; returns [module], or [] where that is done already."""
    from ._classes import CLASSES, Book, is_own, place_of, written_in

    book = _known.get(_checked(module, "patch"))
    if book is not None and module in _patched:
        if not book.was_loaded_again():
            return []
        _patched.remove(module)
    missing = [name for name in CLASSES if not hasattr(module, name)]
    if book is None or (book.originals, book.functions) != written_in(module):
        book = _known[module] = Book(module)
        for kind in book.originals.values():
            construct_by_own_name(kind)
        for kind in book.classes.values():
            pickle_by_name(kind)
    _patched.append(module)
    for name, original in book.originals.items():
        pickle_by_name(original)
        setattr(*place_of(module, name), book.classes[name])
    print(f"mha_c replaces {', '.join(book.originals)} in {module.__name__}")
    for name in CLASSES:
        if name not in missing and not is_own(getattr(module, name), module):
            print(f"it leaves {name}, which is not d2l's own")
    if missing:
        print(f"{module.__name__} has no {', '.join(missing)}")
    for line in (*_not_reached(book), *_of_the_notebook()):
        print(line)
    return [module]


def _of_the_notebook() -> Iterator[str]:
    """A line for the classes of d2l's names that a notebook has typed itself, which no patch reaches."""
    from ._classes import CLASSES, is_own

    main = sys.modules["__main__"]
    own = [name for name in CLASSES if is_own(vars(main).get(name), main)]
    if own:
        them = "it" if len(own) == 1 else "them"
        yield f"{', '.join(own)} of this notebook: mha_c.torch.convert(model) makes {them} fast, too"


def _others_with_classes() -> list[str]:
    """The modules that define classes of d2l's names, as a copy of d2l's file in a program's own folder does."""
    if "torch" not in sys.modules:  # needed for such classes, and imported here by no patch of nothing
        return []
    from ._classes import CLASSES, is_own

    modules = {id(module): module for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    others = [x for x in modules.values() if x.__name__ != "__main__" and x.__name__.partition(".")[0] != "mha_c"]
    return [x.__name__ for x in others if sum(is_own(vars(x).get(name), x) for name in CLASSES) > 1]


def _not_reached(book: Book) -> Iterator[str]:
    """A line for each name that was imported from d2l before the patch, and so still means d2l's own class."""
    names = {id(kind): name for name, kind in book.originals.items() if "." not in name}
    d2l = book.module.__name__
    for module in {id(module): module for module in list(sys.modules.values())}.values():
        if module is book.module or not isinstance(module, ModuleType):
            continue
        for here, value in list(vars(module).items()):
            if id(value) in names:
                name = names[id(value)]
                line = f"from {d2l} import {name}" + ("" if here == name else f" as {here}")
                if module.__name__ != "__main__":
                    line = f"import {d2l}, {module.__name__}; {module.__name__}.{here} = {d2l}.{name}"
                yield f"not patched: {here} in {module.__name__} was imported before patch(); import it again: {line}"


def _restore(modules: list[ModuleType]) -> None:
    from ._classes import found_in, place_of

    for module in modules:
        if module not in _patched:
            continue
        _patched.remove(module)
        book = _known[module]
        for name, original in book.originals.items():
            if found_in(module, name) is book.classes[name]:  # not if replaced since
                setattr(*place_of(module, name), original)


class _OnImport(MetaPathFinder):
    """Lets the other finders find d2l.torch, and replaces its classes by ours after the import."""

    def __init__(self, modules: list[ModuleType]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: Any, target: Optional[ModuleType] = None) -> Optional[ModuleSpec]:
        if name != D2L:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _wait_no_longer()
                self._modules += _replace(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wait_no_longer() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)]
