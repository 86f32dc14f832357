"""Which module of a model is calling: the nearest frame of Python whose `self` is one of its modules.

Nothing is put into the model for this.  A hook on each module would make torch's layers, and ours, take slower ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Optional

from torch import nn


class ModuleNames:
    """The names of the modules of one model, or of whatever models call while somebody watches.

    model   None: the model is the outermost module that is being called
    """

    def __init__(self, model: Optional[nn.Module]) -> None:
        self._model = model
        self._of_model: dict[nn.Module, dict[nn.Module, str]] = {}

    def modules(self) -> Optional[Iterable[nn.Module]]:
        """Those of the model that was given."""
        return None if self._model is None else self._named(self._model, self._model)

    def of_caller(self, frame: FrameType) -> Optional[str]:
        """The name of the module that calls from this frame, as in named_modules; None where none of the model's is."""
        callers: Iterable[nn.Module] = _callers(frame)
        model = self._model
        if model is None:
            callers = list(callers)
            if not callers:
                return ""
            model = callers[-1]
        for module in callers:
            names = self._named(model, module)
            if module in names:
                return names[module]
        return None

    def _named(self, model: nn.Module, wanted: nn.Module) -> dict[nn.Module, str]:
        """The names of a model's modules: listed again for one that is not among them, as the model may have got it."""
        found = self._of_model.get(model)
        if found is None or wanted not in found:
            found = self._of_model[model] = {module: name for name, module in model.named_modules()}
        return found


def _callers(frame: Optional[FrameType]) -> Iterator[nn.Module]:
    """The modules whose methods are running in this frame and those outside it, the innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":  # reading the variables of a frame takes a microsecond
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                yield owner
        frame = frame.f_back
