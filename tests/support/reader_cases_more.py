"""More of CASES: effects of a call (H), settings that change (I), what is added afterwards (J)."""

import copy
import enum
import functools
import os
import random
import tempfile
import types
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from reader_cases import CASES, Base, case, hide_future, of_sizes

FILE = os.path.join(tempfile.gettempdir(), f"mha_c_reader_{os.getpid()}.txt")
MAPS, SWITCH, LAYERS = {}, {"causal": False}, []


def reset():
    MAPS.clear()
    LAYERS.clear()
    SWITCH.update(causal=False)


# --- H: what a call does beside its result ------------------------------------------------------------------------


class Effect(Base):
    """What `effect(self, x, weights)` does is the effect; it may give something else than weights."""

    effect = None
    aux_loss = 0.0

    def __init__(self):
        super().__init__()
        reset()
        self.store, self.kept, self.count, self.last = {}, [], [0], deque(maxlen=3)
        self.meter = types.SimpleNamespace(n=0, total=0.0)
        self.max_len = 64
        if os.path.exists(FILE):
            os.unlink(FILE)

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        w = self.scores(q, k).softmax(-1)
        changed = self.effect(x, w)
        out = self.o(((w if changed is None else changed) @ v).transpose(1, 2).flatten(2))
        return (out, w.detach()) if getattr(self, "gives", False) else out


def _meter(self, x, w):
    self.meter.n += 1
    self.meter.total += float(w.detach().mean())


def _loss(self, x, w):
    if self.training:
        self.aux_loss = -(w * w.log()).sum(-1).mean()


def _hook(self, x, w):
    if w.requires_grad:
        w.register_hook(lambda grad: self.kept.append(grad))


def _retain(self, x, w):
    if w.requires_grad:
        w.retain_grad()
    self.weights = w


def _sometimes(self, x, w):
    return torch.zeros_like(w) if self.training and torch.rand(()) < 0.5 else None


def _sometimes_of_python(self, x, w):
    return torch.zeros_like(w) if random.random() < 0.5 else None


def _of_numpy(self, x, w):
    return w * float(np.random.rand())  # noqa: NPY002  the state that all share


def _asserts(self, x, w):
    assert x.shape[1] <= self.max_len, f"sequence of {x.shape[1]} tokens"


def _raises_on_nan(self, x, w):
    if w.isnan().any():
        raise ValueError("weights are NaN")


def _counts_long(self, x, w):
    if x.shape[1] > 16:
        self.seen_long = True


def _under_no_grad(self, x, w):
    if not torch.is_grad_enabled():
        self.attn = w


def _file(self, x, w):
    with open(FILE, "a") as file:
        file.write("x")
    self.kept.append(os.path.getsize(FILE))


def _shared(self, x, w):
    if "keys" in MAPS:
        return MAPS["keys"]
    MAPS["keys"] = w


EFFECTS = {
    "auxiliary_loss": _loss, "hook_on_weights": _hook, "retain_grad": _retain, "meter": _meter,
    "global_dict": lambda self, x, w: MAPS.__setitem__("layer", w.detach()),
    "global_list": lambda self, x, w: LAYERS.append(w.detach()),
    "own_dict": lambda self, x, w: self.store.__setitem__("attn", w),
    "own_list": lambda self, x, w: self.kept.append(w),
    "counter_in_a_list": lambda self, x, w: self.count.__setitem__(0, self.count[0] + 1),
    "deque": lambda self, x, w: self.last.append(w.detach().mean()),
    "attribute": lambda self, x, w: setattr(self, "attn", w),
    "attribute_detached": lambda self, x, w: setattr(self, "attn", w.detach()),
    "attribute_mean": lambda self, x, w: setattr(self, "attn", w.mean(1)),
    "attribute_of_the_input": lambda self, x, w: setattr(self, "seen_x", x),
    "attribute_number": lambda self, x, w: setattr(self, "n", getattr(self, "n", 0) + 1),
    "attribute_shape": lambda self, x, w: setattr(self, "n_seen", x.shape[1]),
    "sometimes": _sometimes, "sometimes_of_python": _sometimes_of_python, "of_numpy": _of_numpy, "asserts": _asserts,
    "raises_on_nan": _raises_on_nan, "long_only": _counts_long, "under_no_grad": _under_no_grad, "file": _file,
    "changes_its_input": lambda self, x, w: x.mul_(1.0) and None, "shared_weights": _shared,
    "nothing": lambda self, x, w: None, "prints": lambda self, x, w: print(end=""),
    "weights_in_place": lambda self, x, w: w.mul_(2.0),
}  # fmt: skip


def effects_seen(m, see):
    for train in (False, True, False):
        m.train(train)
        for n in (9, 20, 9):
            see.thrice(m, torch.randn(2, n, 32))
            look(m, see)
        with torch.no_grad():
            see.thrice(m, torch.randn(2, 5, 32))
        look(m, see)
    x = torch.randn(2, 7, 32, requires_grad=True)
    for _ in range(3):
        out = see.call(m.train(), x)
        out = out[0] if isinstance(out, tuple) else out
        loss = out.square().mean() + (m.aux_loss if isinstance(m.aux_loss, torch.Tensor) else 0)
        see(torch.autograd.grad(loss, [x, *m.parameters()], allow_unused=True))
        look(m, see)
    see.call(m, torch.full((2, 7, 32), torch.nan))
    see.call(m, torch.randn(2, 70, 32))
    see(torch.rand(3))  # as many random numbers were drawn
    look(m, see)


def look(m, see):
    see({"maps": MAPS, "layers": LAYERS, "store": m.store, "kept": m.kept, "count": m.count, "last": m.last})
    see({"n": m.meter.n, "total": round(m.meter.total, 3), "aux": m.aux_loss})
    shown = ("attn", "weights", "seen_x", "n", "seen_long", "n_seen")
    see({name: getattr(m, name) for name in shown if hasattr(m, name)})


for name, effect in EFFECTS.items():
    for gives in (False, True):
        kind = type(f"Effect_{name}", (Effect,), {"effect": effect, "gives": gives})
        case("H", effects_seen, name=f"{name}{'_and_gives' * gives}")(kind)


@case("H", of_sizes())
class Aliased(Base):
    """Gives weights that are attached, and those after dropout."""

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        w = self.scores(q, k).softmax(-1)
        return {"out": self.o((w @ v).transpose(1, 2).flatten(2)), "weights": w, "mean": w.mean(1)}


# --- I: settings ---------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    PLAIN = 0
    CAUSAL = 1


@dataclass
class Settings:
    causal: bool = False
    scale: float = 1.0


class Globals:
    causal = False


def _true():
    return True


def _false():
    return False


class Setting(Base):
    """`causal(self)` reads a setting; `turn(self)` changes it."""

    def scores(self, q, k):
        s = super().scores(q, k)
        return hide_future(s) if self.causal() else s


def by_closure():
    held = [False]

    def causal(self):
        return held[0]

    return causal, lambda self: held.__setitem__(0, self is not None)


def by_cell():
    held = False

    def causal(self):
        return held

    def turn(self):
        nonlocal held
        held = self is not None

    return causal, turn


def _of_default(self, options={"causal": False}):  # noqa: B006
    return options["causal"]


def _restored(change, undo):
    return change, undo


FLAG = False


def _global(self):
    return FLAG


def _turn_global(self):
    global FLAG
    FLAG = True


def reset_all():
    global FLAG
    FLAG = False
    reset()
    Globals.causal = False
    _of_default.__defaults__[0]["causal"] = False
    os.environ.pop("MHA_C_READER", None)
    for name in ("closure", "cell"):
        SETTINGS[name][2](None)


SETTINGS = {  # {name: (attribute at first, reads, turns)}
    "bool": (False, lambda m: m.s, lambda m: setattr(m, "s", True)),
    "none": (None, lambda m: m.s is not None, lambda m: setattr(m, "s", 1)),
    "dict": ({"c": False}, lambda m: m.s["c"], lambda m: m.s.update(c=True)),
    "dict_get": ({}, lambda m: m.s.get("c"), lambda m: m.s.update(c=True)),
    "dict_in": ({}, lambda m: "c" in m.s, lambda m: m.s.update(c=1)),
    "dict_len": ({}, lambda m: len(m.s) > 0, lambda m: m.s.update(c=1)),
    "dict_truth": ({}, lambda m: bool(m.s), lambda m: m.s.update(c=1)),
    "ordered": (OrderedDict(c=False), lambda m: m.s["c"], lambda m: m.s.update(c=True)),
    "defaultdict": (defaultdict(bool), lambda m: m.s["c"], lambda m: m.s.update(c=True)),
    "counter": (Counter(), lambda m: m.s["c"] > 0, lambda m: m.s.update(["c"])),
    "list": ([0], lambda m: m.s[0], lambda m: m.s.__setitem__(0, 1)),
    "list_of_heads": ([], lambda m: any(h == 1 for h in m.s), lambda m: m.s.append(1)),
    "nested": ({"a": [{"c": 0}]}, lambda m: m.s["a"][0]["c"], lambda m: m.s["a"][0].update(c=1)),
    "tuple": ((-1, -1), lambda m: m.s != (-1, -1), lambda m: setattr(m, "s", (2, 2))),
    "set": (set(), lambda m: 1 in m.s, lambda m: m.s.add(1)),
    "set_loop": (set(), lambda m: [h for h in m.s], lambda m: m.s.add(1)),
    "enum": (Kind.PLAIN, lambda m: m.s is Kind.CAUSAL, lambda m: setattr(m, "s", Kind.CAUSAL)),
    "dataclass": (Settings(), lambda m: m.s.causal, lambda m: setattr(m.s, "causal", True)),
    "namespace": (types.SimpleNamespace(c=0), lambda m: m.s.c, lambda m: setattr(m.s, "c", 1)),
    "deep_namespace": (types.SimpleNamespace(a=Settings()), lambda m: m.s.a.causal, lambda m: setattr(m.s.a,
    "causal", 1)),
    "getattr_of_namespace": (
        types.SimpleNamespace(), lambda m: getattr(m.s, "c", 0), lambda m: setattr(m.s, "c", 1)),
    "numpy_number": (np.float64(0), lambda m: m.s > 0, lambda m: setattr(m, "s", np.float64(1))),
    "numpy_array": (np.zeros(2), lambda m: m.s[0] > 0, lambda m: m.s.__setitem__(0, 1.0)),
    "function": (_false, lambda m: m.s(), lambda m: setattr(m, "s", _true)),
    "partial": (functools.partial(max, 0), lambda m: m.s(0), lambda m: setattr(m, "s", functools.partial(max, 1))),
    "text": ("plain", lambda m: m.s == "causal", lambda m: setattr(m, "s", "causal")),
    "tensor": (torch.tensor(0.0), lambda m: m.s > 0, lambda m: m.s.fill_(1.0)),
    "bytearray": (bytearray(1), lambda m: m.s[0], lambda m: m.s.__setitem__(0, 1)),
    "deque": (deque(), lambda m: len(m.s), lambda m: m.s.append(1)),
    "dropout_module": (None, lambda m: m.extra.p > 0, lambda m: setattr(m.extra, "p", 0.5)),
    "softmax_dim": (None, lambda m: m.soft.dim != -1, lambda m: setattr(m.soft, "dim", -2)),
    "global": (None, _global, _turn_global),
    "global_dict": (None, lambda m: SWITCH["causal"], lambda m: SWITCH.update(causal=True)),
    "global_class": (None, lambda m: Globals.causal, lambda m: setattr(Globals, "causal", True)),
    "default_argument": (None, lambda m: _of_default(m), lambda m: _of_default.__defaults__[0].update(causal=True)),
    "environment": (None, lambda m: os.environ.get("MHA_C_READER"), lambda m: os.environ.update(MHA_C_READER="1")),
    "attribute_by_name": (False, lambda m: getattr(m, "".join(["s"])), lambda m: setattr(m, "s", True)),
    "vars": (False, lambda m: vars(m)["s"], lambda m: setattr(m, "s", True)),
    "hooks_list": ([], lambda m: sum(f(1) for f in m.s), lambda m: m.s.append(lambda n: n)),
    "iterator": (iter([0] * 9 + [1] * 99), lambda m: next(m.s), lambda m: None),
    "training_of_a_part": (None, lambda m: m.extra.training, lambda m: m.extra.train()),
    "n_of_parts": (None, lambda m: len(m.parts) > 1, lambda m: m.parts.append(nn.Identity())),
}  # fmt: skip
SETTINGS["closure"] = (None, *by_closure())
SETTINGS["cell"] = (None, *by_cell())


class Temperature(Base):
    """A number that a property makes of another."""

    temperature = 1.0

    @property
    def factor(self):
        return self.hd**-0.5 / self.temperature

    @classmethod
    def doubled(cls, x):
        return x * cls.temperature

    def scores(self, q, k):
        return self.doubled(q @ k.transpose(-2, -1) * self.factor)


def settings_turned(turn):
    def script(m, see):
        m.eval()
        x = torch.randn(2, 9, 32)
        for one in (x, torch.randn(2, 5, 32)):
            see.thrice(m, one)
        turn(m)
        see.thrice(m, x)
        see.thrice(m, torch.randn(2, 5, 32))
        reset_all()

    return script


def with_setting(m, value):
    m.s = iter([0] * 9 + [1] * 99) if hasattr(value, "__next__") else copy.deepcopy(value)
    m.extra, m.soft, m.parts = nn.Dropout(0.0).eval(), nn.Softmax(-1), nn.ModuleList([nn.Identity()])
    return m


def _made_with(value, reads):
    def make():
        reset_all()
        return with_setting(type("Setting_", (Setting,), {"causal": reads})(), value)

    return make


for name, (value, reads, turn) in SETTINGS.items():
    CASES[f"setting_{name}"] = "I", _made_with(value, reads), settings_turned(turn)

for name, turn in {
    "temperature_of_the_instance": lambda m: setattr(m, "temperature", 3.0),
    "temperature_of_the_class": lambda m: setattr(type(m).__mro__[-4], "temperature", 3.0) or setattr(
        Temperature, "temperature", 3.0),
    "heads": lambda m: setattr(m, "h", 8),
    "head_width": lambda m: setattr(m, "hd", 4),
}.items():  # fmt: skip

    def turned(m, see, turn=turn):
        settings_turned(turn)(m, see)
        Temperature.temperature = 1.0
        if "temperature" in vars(Base):
            del Base.temperature

    CASES[f"changed_{name}"] = "I", Temperature, turned


def _other_forward(self, x):
    return x * 2


def _other_scores(self, q, k):
    return hide_future(q @ k.transpose(-2, -1))


class Replaced(Base):
    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / self.hd**0.5


def replaced(change, undo=lambda m: None):
    def script(m, see):
        x = torch.randn(2, 9, 32)
        m.eval()
        see.thrice(m, x)
        try:
            change(m)
            see.thrice(m, x)
        finally:
            undo(m)
        see.thrice(m, x)

    return script


FORWARD, SCORES, SOFTMAX, LINEAR = Base.forward, Replaced.scores, torch.Tensor.softmax, nn.functional.linear
CODE, LINEAR_FORWARD = SCORES.__code__, nn.Linear.forward


def _delete(owner, name):
    if name in vars(owner):
        delattr(owner, name)


def _sharper(x, *args, **named):
    return SOFTMAX(x * 3, *args, **named)


for name, change, undo in (
    ("forward_of_the_class", lambda m: setattr(Replaced, "forward", _other_forward), lambda m: _delete(Replaced,
     "forward")),
    ("method_of_the_class", lambda m: setattr(Replaced, "scores", _other_scores), lambda m: setattr(Replaced,
     "scores", SCORES)),
    ("code_of_a_method", lambda m: setattr(SCORES, "__code__", _other_scores.__code__), lambda m: setattr(SCORES,
     "__code__", CODE)),
    ("forward_of_the_instance", lambda m: setattr(m, "forward", lambda x: x), lambda m: delattr(m, "forward")),
    ("method_of_the_instance", lambda m: setattr(m, "scores", lambda q, k: hide_future(q @ k.transpose(2, 3))),
     lambda m: delattr(m, "scores")),
    ("forward_of_linear", lambda m: setattr(nn.Linear, "forward", lambda self, x: LINEAR_FORWARD(self, x) * 2),
     lambda m: setattr(nn.Linear, "forward", LINEAR_FORWARD)),
    ("functional_linear", lambda m: setattr(nn.functional, "linear", lambda *a: LINEAR(*a) * 2),
     lambda m: setattr(nn.functional, "linear", LINEAR)),
    ("softmax_of_tensors", lambda m: setattr(torch.Tensor, "softmax", _sharper), lambda m: _delete(torch.Tensor,
     "softmax")),
    ("global_function", lambda m: Base.scores.__globals__["math"].__dict__.__setitem__("sqrt", lambda x: 1.0),
     lambda m: Base.scores.__globals__["math"].__dict__.__setitem__("sqrt", ROOT)),
    ("hook", lambda m: setattr(m, "handle", m.q.register_forward_hook(lambda _, i, out: out * 2)),
     lambda m: m.handle.remove()),
    ("pre_hook", lambda m: setattr(m, "handle", m.v.register_forward_pre_hook(lambda _, i: (i[0] * 2,))),
     lambda m: m.handle.remove()),
    ("hook_around", lambda m: setattr(m, "handle", m.register_forward_hook(lambda _, i, out: out * 2)),
     lambda m: m.handle.remove()),
    ("child", lambda m: setattr(m, "q", nn.Sequential(nn.Linear(32, 32), nn.Tanh())), lambda m: None),
    ("child_of_another_size", lambda m: setattr(m, "o", nn.Linear(32, 16)), lambda m: None),
    ("bias_removed", lambda m: setattr(m.k, "bias", None), lambda m: None),
    ("bias_added", lambda m: setattr(m.k, "bias", nn.Parameter(torch.ones(32))), lambda m: None),
    ("weight_tied", lambda m: setattr(m.k, "weight", m.q.weight), lambda m: None),
    ("weight_norm", lambda m: nn.utils.parametrizations.weight_norm(m.v), lambda m: None),
    ("class_of_the_child", lambda m: setattr(m.q, "__class__", type("Twice", (nn.Linear,), {
        "forward": lambda self, x: LINEAR_FORWARD(self, x) * 2})), lambda m: setattr(m.q, "__class__", nn.Linear)),
    ("load_state_dict", lambda m: m.load_state_dict({k: x * 0.5 for k, x in m.state_dict().items()}), lambda m: None),
    ("global_hook", lambda m: setattr(m, "handle", nn.modules.module.register_module_forward_hook(
        lambda each, i, out: out * 2 if type(each) is nn.Linear else None)), lambda m: m.handle.remove()),
):  # fmt: skip
    CASES[f"replaced_{name}"] = "I", Replaced, replaced(change, undo)
ROOT = __import__("math").sqrt
