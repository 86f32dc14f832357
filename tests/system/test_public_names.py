"""What dir() and the docstrings of the package show: public names, and when each error is raised."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import types
from pathlib import Path

import pytest

import mha_c
import needs


def test_names_that_come_later():
    assert {"torch", "viz", "show_heatmaps", "__version__"} <= set(dir(mha_c))
    assert callable(mha_c.show_heatmaps) and mha_c.variants.MultiHeadedSelfAttention
    with pytest.raises(AttributeError, match="module 'mha_c' has no attribute 'MultiheadAttention'"):
        mha_c.MultiheadAttention  # noqa: B018
    assert all(hasattr(mha_c, name) for name in mha_c.__all__)
    namespace = {}
    exec("from mha_c import *", namespace)
    assert namespace["MultiHeadAttention"] is mha_c.MultiHeadAttention


def test_dir_shows_layers_functions_and_where_the_rest_starts():
    """Not the names that few look for; these are there all the same."""
    missing = {name for name in dir(mha_c) if not hasattr(mha_c, name)}
    assert missing == (set() if importlib.util.find_spec("torch") else {"torch"})
    few = {"KeyValueCache", "ProjectedKeyValues", "ShapeError", "cost", "selftest", "variants"}
    assert not few & set(dir(mha_c)) and all(hasattr(mha_c, name) for name in few)


def modules_shown(module):
    """The module, and all of ours that are public from there on, shown by dir() or not."""
    yield module
    for name in {*dir(module), *getattr(module, "__all__", ()), *getattr(module, "_LATER", ())}:
        value = getattr(module, name, None)  # mha_c.torch is not there without torch
        if isinstance(value, types.ModuleType) and value.__name__.startswith(f"{module.__name__}."):
            yield from modules_shown(value)


def test_dir_shows_public_names_only():
    """Ours, and none of what a module needs for itself; modules that are not shown themselves keep to it, too."""
    for extra in ("torch", "threadpoolctl"):
        needs.module(extra)
    shown = {module.__name__: module for module in modules_shown(mha_c)}
    assert {"mha_c.torch.functional", "mha_c.viz", "mha_c.heads", "mha_c.d2l"} <= set(shown)
    for path in Path(mha_c.__file__).parent.glob("[a-z]*.py"):
        shown[path.stem] = importlib.import_module(f"mha_c.{path.stem}")
    for where, module in shown.items():
        all_shown = module is mha_c or set(module.__all__) <= set(dir(module))
        assert all_shown, f"{where} needs `__dir__ = __all__.copy` behind its __all__"
        for name in dir(module):
            value = getattr(module, name)
            owner = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "mha_c")
            assert name == "__version__" or not name.startswith("_"), f"{where}.{name}"
            assert owner.split(".")[0] == "mha_c", f"{where}.{name} is {owner}'s"


ERRORS = re.compile(r"\b([A-Z]\w*Error)\b(?:, [A-Z]\w*Error)*(?: \(a ValueError\))?(.{0,30})", re.DOTALL)
# How a sentence goes on that says when: "TypeError where types differ".
WHEN = re.compile(r"(?i)\s+(where|for|if|before|on leaving|while|with|without|once|lists|names|every|also|as in)\b")


def documented():
    """(name, docstring) of every public function and class, and of their public methods and properties."""
    for module in modules_shown(mha_c):
        for name in dir(module):
            value = getattr(module, name, None)
            members = {f".{n}": f for n, f in vars(value).items() if n[0] != "_"} if isinstance(value, type) else {}
            for suffix, thing in {"": value, **members}.items():
                if (callable(thing) or isinstance(thing, property)) and thing.__doc__:
                    yield f"{module.__name__}.{name}{suffix}", thing.__doc__


def test_docstrings_say_when_each_error_is_raised():
    needs.module("torch")
    found = list(documented())
    assert len(found) > 80
    unsaid = {
        f"{name}: {error.group()!r}"
        for name, text in found
        for error in ERRORS.finditer(text.replace("(ValueError)", "").partition(">>>")[0])
        if not WHEN.match(error.group(2)) and not text[: error.start()].rstrip("`").endswith((": ", "a ", "an "))
    }
    assert unsaid == set()


def test_functions_and_layers_name_their_errors():
    """By type, or by saying whose errors they are."""
    asked = {"get_num_threads", "show_config", "main"}  # these have no arguments
    silent = {
        f"{module.__name__}.{name}"
        for module in modules_shown(mha_c)
        for name in {*dir(module)} - asked
        if hasattr(module, name)
        if inspect.isfunction(getattr(module, name)) or "__call__" in getattr(getattr(module, name), "__dict__", ())
        if not module.__name__.startswith(("mha_c.torch", "mha_c.teach.book"))  # the book's own lines have no docstring
        if not re.search(r"[A-Z]\w*Error|[Ee]rrors|no error", getattr(module, name).__doc__)
    }
    assert silent == set()


def test_shape_error():
    assert issubclass(mha_c.ShapeError, ValueError) and mha_c.ShapeError.__name__ == "ShapeError"
    assert mha_c.ShapeError.__module__ == "mha_c"
