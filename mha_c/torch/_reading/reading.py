"""One call, read while it runs."""

from __future__ import annotations

from typing import Any

from .graph import Form, Reading


def read(called: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> tuple[Any, Reading]:
    """Call `called(*args, **kwargs)`, a module or a function, once, and read it.

    The result, its errors, its random numbers and its effects are those of the plain call: nothing else is called, no
    input is made, nothing is changed.  An error of the call goes on to the caller.

    Returns
    -------
    (result, Reading)
        `Reading.refused` says why it is not whole, if so.
    """
    raise NotImplementedError


def can_read() -> bool:
    """Whether this torch has the modes, and nothing else reads, traces, compiles or profiles here now."""
    raise NotImplementedError


def form_of(args: tuple[Any, ...], kwargs: Any = None) -> Form:
    """The form of a call with these arguments, here and now."""
    raise NotImplementedError
