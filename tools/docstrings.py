"""Every public name's docstring, held to numpydoc's rules: parameters, results, errors, an example.

    python tools/docstrings.py        prints what is missing; exit status 1 if anything is

Called by `make docs` and by tests/docs/test_docs.py.  What our style leaves out: verbs in the imperative, a blank line
after the quotes, "See Also", an extended summary, the example as a section: a class begins with it.  A method, which
help() shows with twenty others, may say in a few sentences what it takes: each parameter by its name.  What a class
says behind "Call:" is said once: its `forward` may refer to it.
"""

import importlib
import inspect
import re
import sys

from numpydoc.validate import ERROR_MSGS, validate

MODULES = [
    "mha_c.viz", "mha_c", "mha_c.dask", "mha_c.functional", "mha_c.heads", "mha_c.teach", "mha_c.config",
    "mha_c.variants", "mha_c.d2l", "mha_c.torch", "mha_c.torch.distributed", "mha_c.torch.functional",
    "mha_c.torch.variants",
]  # fmt: skip
LEFT_OUT = {"GL01", "GL02", "SS05", "SS06", "ES01", "SA01", "SA04"}
CHECKS = set(ERROR_MSGS) - LEFT_OUT
OF_METHODS = CHECKS - {"EX01"}
SECTIONS = {"PR01", "RT01", "SS03"}
LONGEST = 50  # lines of a class's docstring
# A class with this line shows no constructor.
NOT_MADE_BY_HAND = "Not meant to be constructed directly."


def public():
    """{name: object} of what the modules say is theirs, modules and data left out; each object once."""
    found, seen = {}, set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in seen:
                seen.add(value)
                found[f"{module.__name__}.{name}"] = value
    return found


def members(name, value):
    """{name: function or property} of a class that this package defines, its bases included."""
    found = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("mha_c"):
            found.update({key: member for key, member in vars(base).items() if not key.startswith("_")})
    functions = {key: getattr(member, "fget", getattr(member, "__func__", member)) for key, member in found.items()}
    shown = [key for key, given in functions.items() if inspect.isfunction(given) and given.__name__ != "<lambda>"]
    return {f"{name}.{key}": found[key] for key in shown}


def complaints(name, value, checks):
    text = inspect.getdoc(value) or ""
    if ">>> " in text:
        checks = checks - {"EX01"}
    if NOT_MADE_BY_HAND in text:
        checks = checks - {"PR01"}
    elif inspect.isclass(value) and issubclass(value, Exception):
        checks = checks - {"PR01", "EX01"}
    yield from (f"{name}: {code} {what}" for code, what in validate(name)["errors"] if code in checks)


def in_sentences(function):
    """Whether a method's few sentences, without sections, name each parameter."""
    text = inspect.getdoc(function) or ""
    if "Parameters\n---" in text or isinstance(function, property):
        return False
    names = [name.strip("*") for name in inspect.signature(getattr(function, "__func__", function)).parameters]
    return all(f"`{name}`" in text or re.search(rf"\b{name}\b", text) for name in names if name not in ("self", "cls"))


def all_complaints():
    for name, value in public().items():
        yield from complaints(name, value, CHECKS)
        if inspect.isclass(value):
            said = {"PR01", "RT01"} if "Call: " in (inspect.getdoc(value) or "") else set()
            if len((inspect.getdoc(value) or "").splitlines()) > LONGEST:
                yield f"{name}: more than {LONGEST} lines"
            for member, function in members(name, value).items():
                refers = member.endswith(".forward") and "see the class" in (function.__doc__ or "")
                checks = OF_METHODS - said if refers else OF_METHODS
                yield from complaints(member, function, checks - SECTIONS if in_sentences(function) else checks)


if __name__ == "__main__":
    found = list(all_complaints())
    print("\n".join(found) or f"{len(public())} public names are documented as numpydoc asks")
    sys.exit(bool(found))
