"""What `layer.W_q.weight` gives: an array that cannot be written to, yet may stand on the left of `-=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from .._types import Array
    from ..linear import Parameter


def _in_place(operation: np.ufunc) -> Callable[[Any, Any], Any]:
    """The operator that gives a parameter what `operation` makes of its numbers and an operand."""

    def change(self: Any, operand: Any) -> Any:
        parameter = self._parameter
        if parameter is None:
            operation(self, operand, out=self)
            return self
        if parameter.data.base is not self.base:
            raise ValueError(f"{parameter.name} has been replaced since it was read: read it again, then change it")
        changed = np.array(self)
        parameter.data = operation(changed, operand, out=changed)
        return parameter.data

    return change


class Reading(np.ndarray):
    """A weight or bias as it is read: a read-only array of what the parameter held then.

    `reading -= step`, `+=`, `*=` and `/=` assign the result to the layer.  What is computed from it is a plain array.
    """

    _parameter: Optional[Parameter]  # None: a part or a copy

    __iadd__, __isub__ = _in_place(np.add), _in_place(np.subtract)
    __imul__, __itruediv__ = _in_place(np.multiply), _in_place(np.true_divide)

    def __array_finalize__(self, source: Any) -> None:
        self._parameter = None

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        for x in out:
            if isinstance(x, Reading):
                x._need_writeable()
        if out:
            options["out"] = _plain(out)
        return getattr(ufunc, method)(*_plain(inputs), **options)

    def __array_wrap__(self, array: Array, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._need_writeable()
        super().__setitem__(key, value)

    def _need_writeable(self) -> None:
        if not self.flags.writeable:
            name = self._parameter.name if self._parameter is not None else "W_q.weight"
            raise ValueError(
                f"parameters are read-only, as the layer keeps them packed: change a copy and assign the whole, as in "
                f"`new = layer.{name}.copy(); new[0] = 0; layer.{name} = new`"
            )

    def __repr__(self) -> str:
        return repr(np.asarray(self))


def _plain(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(np.asarray(x) if isinstance(x, Reading) else x for x in arrays)
