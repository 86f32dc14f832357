"""Readers' classes of what stays unseen: state that no name shows, attributes of tensors, identity, types that torch
takes where none is named, memory, checkpoints, queries that see no key, axes of size 0."""

import collections
import ctypes
import functools
import operator
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reader_cases import CASES, INF, Base, hide_future
from reader_cases_more import replaced

TAU, TAKE_TAU, NUMBERS = [1.0], operator.attrgetter("tau"), np.ones(1, dtype="float32")


class Meta(type):
    tau = 1.0


class Settings(metaclass=Meta):
    pass


class Plain:
    tau = 1.0


class Holds(Base):
    """Its scores are divided by what `reads` finds in what `holds` has made."""

    def __init__(self, holds, reads):
        super().__init__()
        self.held, self.reads, self.tau = holds(), reads, 1.0

    def scores(self, q, k):
        return super().scores(q, k) / self.reads(self)


def of_thread():
    found = threading.local()
    found.tau = 1.0
    return found


def put(name):
    def change(m, value):
        setattr(m.held, name, value)

    return change


def item(m, value):
    m.held[0] = value


def of_shared(m, value):
    SHARED["tau"] = value


SHARED = {"tau": 1.0}
ALIVE = Plain()
HELD = {  # {what: (what is made, what is read, how it changes)}
    "ctypes": (lambda: ctypes.c_double(1.0), lambda m: m.held.value, put("value")),
    "ctypes_array": (lambda: (ctypes.c_double * 1)(1.0), lambda m: m.held[0], item),
    "view_of_dict": (lambda: SHARED.values(), lambda m: max(m.held), of_shared),
    "proxy_of_dict": (lambda: types.MappingProxyType(SHARED), lambda m: m.held["tau"], of_shared),
    "memory": (lambda: memoryview(NUMBERS), lambda m: m.held[0], lambda m, v: NUMBERS.fill(v)),
    "of_thread": (of_thread, lambda m: m.held.tau, put("tau")),
    "weak": (lambda: weakref.ref(ALIVE), lambda m: m.held().tau, lambda m, v: setattr(ALIVE, "tau", v)),
    "weak_proxy": (lambda: weakref.proxy(ALIVE), lambda m: m.held.tau, lambda m, v: setattr(ALIVE, "tau", v)),
    "attrgetter": (lambda: None, lambda m: TAKE_TAU(m), lambda m, v: setattr(m, "tau", v)),
    "metaclass": (lambda: None, lambda m: Settings.tau, lambda m, v: setattr(Meta, "tau", v)),
    "table_data": (lambda: torch.ones(1), lambda m: m.held, lambda m, v: m.held.data.fill_(v)),
    "table_of_numpy": (lambda: torch.from_numpy(NUMBERS), lambda m: m.held, lambda m, v: NUMBERS.fill(v)),
}  # fmt: skip


def back_to_one(change):
    return replaced(lambda m: change(m, 3.0), lambda m: change(m, 1.0))


for name, (holds, reads, change) in HELD.items():
    CASES[f"held_{name}"] = "I", functools.partial(Holds, holds, reads), back_to_one(change)


class Imports(Base):
    def scores(self, q, k):
        from reader_cases_hidden import TAU as tau

        return super().scores(q, k) / tau[0]


class ImportsName(Base):
    def scores(self, q, k):
        from operator import tau_of_a_test as tau

        return super().scores(q, k) / tau


operator.tau_of_a_test = 1.0
CASES["imports_list"] = "I", Imports, replaced(lambda m: TAU.insert(0, 3.0), lambda m: TAU.pop(0))
CASES["imports_name"] = (
    "I", ImportsName, replaced(lambda m: setattr(operator, "tau_of_a_test", 3.0),
                               lambda m: setattr(operator, "tau_of_a_test", 1.0)))  # fmt: skip


def other_modules(m, see):
    x = torch.randn(2, 9, 32)
    see.thrice(m, x)
    before = m._modules
    m._modules = {k: nn.Sequential(v, nn.Tanh()) for k, v in before.items()}
    see.thrice(m, x)
    m._modules = before
    see.thrice(m, x)


CASES["dict_of_modules"] = "I", Base, other_modules


# --- Tensors ----------------------------------------------------------------------------------------------------------


class MarkedScores(Base):
    """Something about the tensor that it is given."""

    def __init__(self, looks):
        super().__init__()
        self.looks, self.last = looks, None

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k)
        s = hide_future(s) if self.looks(self, x) else s
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def tried(m, x):
    try:
        return x.sharp
    except AttributeError:
        return False


def marks(m, see):
    x, y = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    see.thrice(m, x)
    y.sharp = True
    see.thrice(m, y)
    m.last = y
    see.thrice(m, y)
    see.thrice(m, x)


for name, looks in {
    "hasattr": lambda m, x: hasattr(x, "sharp"), "getattr": lambda m, x: getattr(x, "sharp", False), "try": tried,
    "dict": lambda m, x: bool(x.__dict__), "is_attribute": lambda m, x: x is m.last,
    "of_a_weight": lambda m, x: getattr(m.q.weight, "sharp", False),
}.items():  # fmt: skip
    CASES[f"tensor_{name}"] = "F", functools.partial(MarkedScores, looks), marks


class Viewed(nn.Module):
    def forward(self, x):
        x = x.view(x.shape[0] * x.shape[1], 32).view(x.shape)
        return (x @ x.transpose(1, 2) / 32**0.5).softmax(-1) @ x


def memories(m, see):
    for n in (9, 5):
        see.thrice(m, torch.randn(2, n, 32))
        see.thrice(m, torch.randn(n, 2, 32).transpose(0, 1))


CASES["view_of_memory"] = "A", Viewed, memories


class TypeOfNumbers(Base):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def scores(self, q, k):
        return super().scores(q, k) + self.reads(k.shape[-2])


def doubles(m, see):
    x = torch.randn(2, 9, 32)
    see.thrice(m, x)
    torch.set_default_dtype(torch.float64)
    try:
        see.thrice(m, x)
    finally:
        torch.set_default_dtype(torch.float32)
    see.thrice(m, x)


CASES["default_type_asked"] = (
    "K", functools.partial(TypeOfNumbers, lambda n: 0.0 if torch.get_default_dtype() is torch.float32
                           else torch.arange(n) * 1.0), doubles)  # fmt: skip
CASES["default_type_made"] = "K", functools.partial(TypeOfNumbers, torch.zeros), doubles


# --- Axes of size 0, queries without keys -----------------------------------------------------------------------------


class Reshapes(Base):
    def heads(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)


def empties(m, see):
    for batch, n in ((2, 9), (2, 5), (0, 5), (2, 0), (2, 7)):
        see.thrice(m, torch.randn(batch, n, 32))


CASES["empty_axes"] = "A", Reshapes, empties


class TwoFills(Base):
    """Two numbers in the place of scores: a query without keys sees those of the higher."""

    def __init__(self, first, second, added=False):
        super().__init__()
        self.first, self.second, self.added = first, second, added

    def forward(self, x, mask):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), self.first)
        if self.added:
            s = s + torch.zeros(mask.shape).masked_fill(~mask, self.second)
        else:
            s = s.masked_fill(~mask, self.second)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def without_keys(m, see):
    x = torch.randn(2, 9, 32)
    all_seen, ahead = torch.ones(2, 1, 1, 9, dtype=torch.bool), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    ahead[..., :4] = False
    for mask in (all_seen, ahead, all_seen.flip(-1) & ~ahead, all_seen & False, all_seen):
        see.thrice(m, x, mask)
        see.thrice(m, x * 9, mask)


for first, second in ((-INF, -1e9), (-1e9, -1e6), (-1e6, -1e9), (-1e9, -1e9), (-1e9, -INF)):
    CASES[f"fills_{first:g}_{second:g}"] = "M", functools.partial(TwoFills, first, second), without_keys
CASES["fills_added"] = "M", functools.partial(TwoFills, -INF, -1e6, True), without_keys


# --- Effects ----------------------------------------------------------------------------------------------------------


class Notes(Base):
    def __init__(self, does):
        super().__init__()
        self.does, self.log, self.shape = does, [], None
        self.last = collections.deque(maxlen=3)

    def forward(self, x):
        self.does(self, x)
        return super().forward(x)


def notes(m, see):
    for n in (9, 9, 5):
        see.thrice(m, torch.randn(2, n, 32))
        see([m.log, [type(x).__name__ for x in m.log], m.shape, list(m.last), [type(x).__name__ for x in m.last]])
        see(np.random.get_state()[2])  # noqa: NPY002


def of_shape(m, x):
    m.shape = x.shape


for name, does in {
    "sizes_in_a_list": lambda m, x: m.log.append(x.shape[1]), "sizes_in_a_deque": lambda m, x: m.last.append(x.size(1)),
    "shape": of_shape, "numpy_draws": lambda m, x: np.random.rand(),  # noqa: NPY002
}.items():  # fmt: skip
    CASES[f"notes_{name}"] = "H", functools.partial(Notes, does), notes


def checkpoints(first):
    def script(m, see):
        m.train()
        for n in (9, 9, 5, 9):
            x = torch.randn(2, n, 32, requires_grad=True)
            if not first:
                see.thrice(m, x)
            for _ in range(2):
                out = checkpoint(m, x, use_reentrant=False)
                out.sum().backward()
                see([out, x.grad, m.q.weight.grad])

    return script


CASES["checkpoint_first"] = "K", Base, checkpoints(True)
CASES["checkpoint_later"] = "K", Base, checkpoints(False)


class Keeps(Base):
    def __init__(self):
        super().__init__()
        self.attn = None

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        self.attn = self.scores(q, k).softmax(-1)
        return self.o((self.attn @ v).transpose(1, 2).flatten(2))


def made_of_its_class(m, see):
    see.thrice(m, torch.randn(2, 9, 32))
    other = type(m)()
    see(m.attn + 0)
    other.load_state_dict(m.state_dict())
    see.thrice(other, torch.randn(2, 5, 32))
    see([m.attn + 0, other.attn + 0])


CASES["another_of_its_class"] = "H", Keeps, made_of_its_class


# --- What is asked of tensors, and of modules, that the result is not computed from -----------------------------------


class Asks(Base):
    """Its scores are divided by 1, or where what is asked of the module is as it was no longer, by 2."""

    def __init__(self, asks):
        super().__init__()
        self.asks, self.other = asks, nn.Linear(32, 32)

    def scores(self, q, k):
        return super().scores(q, k) / (2.0 if self.asks(self) else 1.0)


def wide(m):
    m.other.weight.data = torch.ones(64, 32)


for name, (asks, change) in {
    "type": (lambda m: m.other.weight.dtype is torch.float64, lambda m: m.other.double()),
    "shape": (lambda m: m.other.weight.shape[0] == 64, wide),
    "gradient": (lambda m: not m.other.weight.requires_grad, lambda m: m.other.requires_grad_(False)),
    "children": (lambda m: len([*m.children()]) > 5, lambda m: m.add_module("more", nn.Tanh())),
    "modules": (lambda m: len([*m.modules()]) > 6, lambda m: m.other.add_module("more", nn.Tanh())),
    "parameters": (lambda m: sum(1 for _ in m.parameters()) > 10, lambda m: m.other.register_parameter(
        "more", nn.Parameter(torch.ones(1)))),
    "a_parameter": (lambda m: next(iter(m.parameters())).dtype is torch.float64, lambda m: m.double()),
    "path": (lambda m: isinstance(m.get_submodule("other"), nn.Tanh), lambda m: setattr(m, "other", nn.Tanh())),
    "buffers": (lambda m: len([*m.named_buffers()]) > 0, lambda m: m.register_buffer("more", torch.ones(1))),
}.items():  # fmt: skip
    CASES[f"asks_{name}"] = "I", functools.partial(Asks, asks), replaced(change)


class ByWidth(Base):
    """As many heads of 8 as the weights have."""

    def heads(self, x):
        return x.unflatten(-1, (-1, 8)).transpose(1, 2)


def cut(m):
    for each in (m.q, m.k, m.v):
        each.weight.data, each.bias.data = each.weight.data[:24], each.bias.data[:24]
    m.o.weight.data = m.o.weight.data[:, :24].contiguous()


CASES["narrower_data"] = "J", ByWidth, replaced(cut)
CASES["narrower_data_of_its_width"] = "J", Base, replaced(cut)  # an error of its own lines


class MaskAndTable(Base):
    """A table that hides nothing yet, and a mask: what both say hangs on equal sizes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(16, 16, dtype=torch.bool))

    def forward(self, x, mask):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k).masked_fill(~self.seen[: x.shape[1], : x.shape[1]], -INF).masked_fill(mask == 0, -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def fills_its_table(m, see):
    x, mask = torch.randn(2, 9, 32), torch.ones(2, 1, 1, 9)
    mask[1, ..., 7:] = 0
    see.thrice(m, x, mask)
    m.seen.tril_()
    see.thrice(m, x, mask)


CASES["table_beside_a_mask"] = "I", MaskAndTable, fills_its_table
