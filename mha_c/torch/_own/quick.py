"""The usual call of a module like the book's: plain tensors, lengths, one call of the core, a microsecond around it.

It decides as `made._computed` does, for calls by place alone; whatever it does not know is left to that.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..._core import layer_parts
from .. import functional
from .._call import core
from .._private import autocasting_anywhere, quickly_on_cpu, watched
from .._tensors import FLOATS, PLAIN
from .plan import ATTENTION, LAST, NEEDED, Plan

_MISSING: Any = object()


class Quick:
    """What such a call needs, looked up once."""

    def __init__(self, how: Any) -> None:
        plan: Plan = how.plan
        self.how, self.layout, self.options, self.ranks = how, how.layout, how.options, plan.lens
        places = {role: i for i, (_, role, _) in enumerate(plan.takes)}
        self.q = places["queries"]
        self.k = places.get("keys", self.q)
        self.v = places.get("values", self.k)
        self.lens = places.get("valid_lens", -1)
        self.defaults = tuple(default for *_, default in plan.takes)
        needed = [i for i, default in enumerate(self.defaults) if default is NEEDED]
        self.least, self.most = (needed[-1] + 1 if needed else 0), plan.by_place
        _, self.scalars, children, _ = how.watched.tree
        self.inner = [(name, below[1]) for name, below in children if below[1]]
        self.methods = how.watched.methods
        self.shown = [(path, names) for path, names in how.shown.get("BQC", {}).items()]

    @classmethod
    def of(cls, how: Any) -> Optional[Quick]:
        """None where calls of the module are of other forms."""
        plan: Plan = how.plan
        usual = how.layout is not None and not (plan.needs or plan.square or plan.out_dropout or how.flags)
        usual = usual and not plan.more_than_one
        usual = usual and plan.layouts.get((3, 3)) == ("BQC", "BQC") and plan.flags.get(("BQC", ())) == "out"
        short = all("." not in path for path in how.shown.get("BQC", {}))
        usual = usual and not (how.watched.tree[3] or any(below[3] for _, below in how.watched.tree[2]))
        return cls(how) if usual and short and not how.watched.tables and "mask" not in str(plan.takes) else None

    def call(self, module: Any, args: Any) -> Any:
        """The output; None where another way must compute it."""
        if not self.least <= len(args) <= self.most or functional._attention is not ATTENTION:
            return None
        if len(args) < len(self.defaults):
            args = args + self.defaults[len(args) :]
        q, k, v = inputs = args[self.q], args[self.k], args[self.v]
        if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN and q.dim() == k.dim() == v.dim() == 3):
            return None
        if q.dtype not in FLOATS or not quickly_on_cpu(q) or watched() or autocasting_anywhere():
            return None
        lens = args[self.lens] if self.lens >= 0 else None
        if lens is not None and not (
            type(lens) is Tensor and lens.dim() in self.ranks and lens.dtype is not torch.bool
        ):
            return None
        state = module.__dict__
        modules = state["_modules"]
        for name, value in self.scalars:
            if state.get(name, _MISSING) is not value:
                return None
        for child, scalars in self.inner:
            own = modules[child].__dict__
            for name, value in scalars:
                if own.get(name, _MISSING) is not value:
                    return None
        if not self.methods.isdisjoint(state):
            return None
        parts = layer_parts(module, self.layout)
        if parts is None:
            return None
        box: dict[str, Any] = {}
        out = core.call(self.options, (parts[0], box, parts[2], None), inputs, lens, None)
        for path, names in self.shown:
            owner = modules[path].__dict__ if path else state
            owner[LAST] = box["_last"], None, names, self.options.num_heads
        return out
