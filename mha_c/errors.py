"""The exceptions of mha_c that are not Python's own.

Shapes that do not fit together raise `ShapeError` (a `ValueError`), unsuitable types `TypeError`, unsuitable
values `ValueError`, calls at a wrong time `RuntimeError` or `AttributeError`.  Each message names the argument, what
it was and what was expected; those of the compiled core are in _arguments/core_refusals.py.
"""

__all__ = ["ShapeError"]
__dir__ = __all__.copy  # what dir() and completion show


class ShapeError(ValueError):
    """Shapes that do not fit together; the message names the argument, what it got,
    what was expected and the sizes that clash."""


ShapeError.__module__ = "mha_c"
