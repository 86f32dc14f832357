"""The exceptions of mha_c that are not Python's own.

Shapes that do not fit together raise `ShapeError` (a `ValueError`), unsuitable types `TypeError`, unsuitable
values `ValueError`; nothing else is raised on purpose.  The compiled core checks arrays and writes most of the
texts: each names the argument, what it got and what was expected.
"""

from ._core import ShapeError

__all__ = ["ShapeError"]
__dir__ = __all__.copy  # what dir() and completion show
