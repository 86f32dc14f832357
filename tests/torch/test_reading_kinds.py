"""A reading is left, or does not hold any more, where a comparison of numbers would not look: settings, effects,
sizes."""

import collections
import functools
import math
import random
import types

import pytest

import needs

torch = needs.module("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

from mha_c.torch._reading.attention import attentions  # noqa: E402
from mha_c.torch._reading.reading import read, why_not  # noqa: E402
from mha_c.torch._reading.sizes import Axis  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

X = torch.randn(2, 9, 32)
STORE, MAPS, ROWS = {}, [], [1.0] * 9 + [2.0] * 1000
SPACE = types.SimpleNamespace(t=1.0)


class Base(nn.Module):
    """`put` are attributes, `scale` and `see` what a test does with scores and weights."""

    def __init__(self, put=(), scale=None, see=None):
        super().__init__()
        self.h = 4
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.scale, self.see = scale, see
        for name, value in dict(put).items():
            setattr(self, name, value)

    def heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = q @ k.transpose(-2, -1) / math.sqrt(8)
        if self.scale is not None:
            s = s * self.scale(self, s)
        w = s.softmax(-1)
        if self.see is not None:
            self.see(self, w)
        return self.o((w @ v).transpose(1, 2).flatten(2))


def factor(self, s):
    return 1 / getattr(self, "tau", 1.0)


SETTINGS = {  # {what: (attributes, what is read, what changes)}
    "number": ({"t": 1.0}, lambda m, s: m.t, lambda m: setattr(m, "t", 2.0)),
    "of NumPy": ({"t": np.float64(1)}, lambda m, s: float(m.t), lambda m: setattr(m, "t", np.float64(2))),
    "array": ({"t": np.ones(1)}, lambda m, s: float(m.t[0]), lambda m: m.t.fill(2)),
    "dict": ({"t": {"a": 1.0}}, lambda m, s: m.t["a"], lambda m: m.t.update(a=2.0)),
    "missing key": ({"t": {}}, lambda m, s: m.t.get("a", 1.0), lambda m: m.t.update(a=2.0)),
    "list": ({"t": [1.0]}, lambda m, s: m.t[0], lambda m: m.t.insert(0, 2.0)),
    "set": ({"t": set()}, lambda m, s: 2.0 if m.t else 1.0, lambda m: m.t.add(1)),
    "deque": ({"t": collections.deque([1.0])}, lambda m, s: m.t[0], lambda m: m.t.appendleft(2.0)),
    "config": (
        {"c": types.SimpleNamespace(a=types.SimpleNamespace(t=1.0))},
        lambda m, s: m.c.a.t,
        lambda m: setattr(m.c.a, "t", 2.0),
    ),
    "config in a list": (
        {"c": [types.SimpleNamespace(t=1.0)]},
        lambda m, s: m.c[0].t,
        lambda m: setattr(m.c[0], "t", 2.0),
    ),
    "global": ({}, lambda m, s: SPACE.t, lambda m: setattr(SPACE, "t", SPACE.t + 1)),
    "default of getattr": ({}, factor, lambda m: setattr(m, "tau", 2.0)),
    "hasattr": ({}, lambda m, s: 2.0 if hasattr(m, "sharp") else 1.0, lambda m: setattr(m, "sharp", 1)),
    "made name": ({"t_1": 1.0}, lambda m, s: getattr(m, f"t_{1}"), lambda m: setattr(m, "t_1", 2.0)),
    "function": ({"f": lambda: 1.0}, lambda m, s: m.f(), lambda m: setattr(m, "f", lambda: 2.0)),
    "in a lambda": ({"t": 1.0}, lambda m, s: (lambda o: o.t)(m), lambda m: setattr(m, "t", 2.0)),
    "in a loop": ({"t": 1.0}, lambda m, s: sum([o.t for o in [m]]), lambda m: setattr(m, "t", 2.0)),
    "its __dict__": ({"t": 1.0}, lambda m, s: m.__dict__["t"], lambda m: setattr(m, "t", 2.0)),
    "hook": ({}, factor, lambda m: m.register_forward_hook(print)),
    "hook of a child": ({}, factor, lambda m: m.q.register_forward_hook(print)),
    "child": ({}, factor, lambda m: setattr(m, "q", nn.Linear(32, 32))),
    "weight": ({}, factor, lambda m: setattr(m.q, "weight", nn.Parameter(torch.ones(32, 32)))),
    "forward of the instance": ({}, factor, lambda m: setattr(m, "forward", print)),
    "forward of a child": ({}, factor, lambda m: setattr(m.q, "forward", print)),
    "mode": ({"d": nn.Dropout(0.5)}, lambda m, s: m.d(s), lambda m: m.d.eval()),
    "rate": ({"d": nn.Dropout(0.5)}, lambda m, s: m.d(s), lambda m: setattr(m.d, "p", 0.1)),
    "empty list of modules": (
        {"edits": nn.ModuleList()},
        lambda m, s: functools.reduce(lambda a, f: f(a), m.edits, s),
        lambda m: m.edits.append(nn.Tanh()),
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_setting_that_changes_is_seen(what):
    put, reads, change = SETTINGS[what]
    module = Base(put, scale=reads)
    _, reading = read(module, (X,))
    assert reading.refused is None and reading.settings.still_holds()
    change(module)
    assert not reading.settings.still_holds()


def test_code_that_changes_is_seen():
    class Own(Base):
        def heads(self, x):
            return Base.heads(self, x)

    for change in (
        lambda: setattr(Own, "heads", lambda self, x: x),
        lambda: setattr(Own.heads, "__code__", (lambda self, x: x).__code__),
        lambda: setattr(Own, "h", 2),
    ):
        before = Own.heads
        code = before.__code__
        _, reading = read(Own(), (X,))
        assert reading.settings.still_holds()
        change()
        assert not reading.settings.still_holds()
        before.__code__ = code
        Own.heads = before
        if "h" in vars(Own):
            del Own.h


def test_a_function_of_torch_that_is_replaced_is_seen(monkeypatch):
    _, reading = read(Base(), (X,))
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", print)
        assert not reading.settings.still_holds()
    assert reading.settings.still_holds()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", print, raising=False)
        assert not reading.settings.still_holds()


def counts(m, w):
    m.n = m.n + 1


def global_item(m, w):
    STORE["maps"] = w


def own_item(m, w):
    m.store["maps"] = w


def grows(m, w):
    m.maps += [w]


def of_another(m, w):
    m.layers[0].store["maps"] = w


def without_gradients(m, w):
    with torch.no_grad():
        w * 1.0


EFFECTS = {
    "list": ({}, lambda m, w: MAPS.append(w)), "global dict": ({}, global_item), "counter": ({"n": 0}, counts),
    "own dict": ({"store": {}}, own_item), "+=": ({"maps": []}, grows),
    "of another": ({"layers": [types.SimpleNamespace(store={})]}, of_another),
    "its __dict__": ({}, lambda m, w: m.__dict__.update(maps=w)), "setattr": ({}, lambda m, w: setattr(m, "n", 3)),
    "callback": ({"seen": MAPS.append}, lambda m, w: m.seen(w)), "print": ({}, lambda m, w: print(end="")),
    "hook": ({}, lambda m, w: w.register_hook(print)), "retain_grad": ({}, lambda m, w: w.retain_grad()),
    "random": ({}, lambda m, w: random.random()), "of NumPy": ({}, lambda m, w: np.random.default_rng().random()),
    "of torch": ({}, lambda m, w: torch.rand(())), "seed": ({}, lambda m, w: torch.manual_seed(0)),
    "item": ({}, lambda m, w: w.sum().item()), "truth": ({}, lambda m, w: bool(w.isnan().any())),
    "numpy": ({}, lambda m, w: w.detach().numpy()), "data": ({}, lambda m, w: m.q.weight.data.clamp_(-9, 9)),
    "buffer": ({}, lambda m, w: m.register_buffer("last", w)), "train": ({}, lambda m, w: m.o.train()),
    "iterator": ({"rest": iter([1, 2, 3])}, lambda m, w: next(m.rest)), "gradients": ({}, without_gradients),
}  # fmt: skip


@pytest.mark.parametrize("what", EFFECTS)
def test_an_effect_is_left(what):
    put, does = EFFECTS[what]
    _, reading = read(Base(put, see=does), (X,))
    assert reading.refused is not None
    assert reading.refused.line is not None


def test_attributes_that_keep_results_are_effects():
    class Keeps(Base):
        loss = 0.0

        def forward(self, x):
            self.kept = super().forward(x)
            if self.training:
                self.loss = self.kept.mean()
            return self.kept

    module = Keeps()
    _, reading = read(module, (X,))
    assert reading.refused is None and reading.settings.still_holds()
    assert {x.name: x.path for x in reading.effects} == {"kept": "", "loss": ""}
    _, reading = read(module.eval(), (X,))
    assert [x.name for x in reading.effects] == ["kept"]


SIZES = {  # what hangs on a size in a way that nobody sees, or decides
    "compared": lambda n: 2.0 if n > 256 else 1.0, "range": lambda n: float(len(range(0, n, 256))),
    "log": lambda n: max(1.0, math.log(n, 512)), "table": lambda n: ROWS[n - 1], "key": lambda n: {9: 1.0}.get(n, 2.0),
    "text": lambda n: float(len(str(n))), "repeated": lambda n: float(len([0] * n)), "root": lambda n: math.sqrt(n / 2),
    "of NumPy": lambda n: float(np.sqrt(n)), "int": lambda n: int(n * 0.5), "sum": lambda n: sum(1.0 for _ in range(n)),
    "cut": lambda n: float(len(ROWS[:n])), "in": lambda n: 2.0 if n in (300,) else 1.0, "bits": lambda n: float(n & 1),
    "taken": lambda n: list(range(1000))[n], "even": lambda n: 2.0 if n % 2 == 0 else 1.0,
}  # fmt: skip


@pytest.mark.parametrize("what", SIZES)
def test_sizes_that_decide_are_conditions(what):
    of = SIZES[what]
    _, reading = read(Base(scale=lambda m, s: of(s.shape[-2])), (X,))
    sizes = reading.sizes()
    assert reading.refused is not None or reading.holds_for(sizes)
    assert reading.refused is not None or not reading.holds_for({**sizes, Axis("x", 1): 300})


def test_a_plain_call_holds_for_all_sizes():
    _, reading = read(Base(), (X,))
    assert reading.refused is None
    assert reading.holds_for({**reading.sizes(), Axis("x", 0): 7, Axis("x", 1): 300})


def test_a_table_counts_with_its_numbers():
    module = Base()
    module.register_buffer("table", torch.ones(64, 64, dtype=torch.bool).tril())
    module.scale = None

    class Causal(Base):
        def forward(self, x):
            q = self.heads(self.q(x))
            s = (q @ q.transpose(-2, -1)).masked_fill(~self.table[: x.shape[1], : x.shape[1]], -1e9)
            return s.softmax(-1) @ q

    module.__class__ = Causal
    _, reading = read(module, (X,))
    (found,) = attentions(reading)
    assert [(mask.sense, mask.offset) for mask in found.masks] == [("causal", 0)]
    assert reading.settings.still_holds()
    module.table.fill_(True)
    assert not reading.settings.still_holds()


def tri(s):
    return torch.ones(s.shape[-2:], dtype=torch.bool).tril()


def set_at(index):
    """Scores are set in place at an index."""

    def changed(s):
        s[index(s)] = -math.inf
        return s

    return changed


FUTURES = {  # tables of ones that have their shape, or type, alone from what the data make; indices of the last axes
    "ones_like": lambda s: s.masked_fill(torch.ones_like(s).tril() == 0, -1e9),
    "new_ones": lambda s: s.masked_fill(s.new_ones(s.shape[-2:]).tril() == 0, -1e9),
    "new_full": lambda s: s + s.new_full(s.shape[-2:], -math.inf).triu(1),
    "zeros_like": lambda s: s + torch.zeros_like(s).masked_fill(~tri(s), -math.inf),
    "full_like": lambda s: torch.where(tri(s), s, torch.full_like(s, -1e9)),
    "times ones": lambda s: torch.where(tri(s) == 0, torch.ones_like(s) * (1 - 2**32), s),
    "index behind ...": set_at(lambda s: (..., ~tri(s))), "index behind :": set_at(lambda s: (slice(None), ~tri(s))),
}  # fmt: skip


@pytest.mark.parametrize("hide", FUTURES.values(), ids=FUTURES)
def test_the_future_is_hidden_by_any_table(hide):
    _, reading = read(lambda x: hide(x @ x.transpose(-2, -1)).softmax(-1) @ x, (X,))
    (found,) = attentions(reading)
    assert [(mask.sense, mask.offset) for mask in found.masks] == [("causal", 0)]
    assert reading.holds_for({**reading.sizes(), Axis("x", 1): 300})


NO_MASKS = {  # indices of other axes than the last
    "of queries": set_at(lambda s: torch.ones(2, 9, dtype=torch.bool).tril()),
    "of one item": set_at(lambda s: (0, ~tri(s))),
    "of one query": set_at(lambda s: (..., 0, ~tri(s)[0])),
}


@pytest.mark.parametrize("hide", NO_MASKS.values(), ids=NO_MASKS)
def test_an_index_of_other_axes_is_no_mask(hide):
    _, reading = read(lambda x: hide(x @ x.transpose(-2, -1)).softmax(-1) @ x, (X,))
    (found,) = attentions(reading)
    assert "places that are no mask" in str(found)
