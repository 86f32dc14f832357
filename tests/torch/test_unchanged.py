"""What a call of the core stands on is looked at in C before each: every kind of change is seen, equal numbers are
none, and no reference is lost or kept."""

import collections
import sys
import sysconfig
import types

import pytest

import needs

torch = needs.module("torch")

from mha_c._core import first_changed, what_is_asked  # noqa: E402
from mha_c.torch._reading import settings as all_settings  # noqa: E402
from mha_c.torch._reading.holding import MISSING, Fact  # noqa: E402
from mha_c.torch._reading.settings import Settings  # noqa: E402

GLOBAL = 1.0


def made_function(cell):
    def function(a=1.5, b=(2, [3])):
        return a, b, cell

    return function


class Above:
    above = 1.0


def things():
    class Kind(Above):
        number = 1.0

        def method(self):
            return self

    Kind.other = Kind.method
    return types.SimpleNamespace(
        dict={"a": 1.0, "b": 2.0}, names=collections.OrderedDict(a=1.0), list=[1.0, "x"], set={1.0},
        deque=collections.deque([1.0]), hooks=collections.OrderedDict(), empty=[], nothing={}, none=set(),
        function=made_function(1.0), kind=Kind, tensor=torch.ones(2),
    )  # fmt: skip


def kept(t):
    """All of it, as a reading keeps it."""
    found = Settings()
    for name in ("dict", "list", "set", "deque", "hooks", "empty", "nothing", "none", "function"):
        found.attribute(t, name)
    found.name(t.names, "a")
    found.name(t.nothing, "comes")
    found.name(t.__dict__, "comes")
    found.name(globals(), "GLOBAL")
    found.attribute(t.kind(), "number")
    found.facts.append(Fact(t.tensor, "requires_grad", False))
    return found


def renamed(kind):
    value = kind.other
    del kind.other
    kind.renamed = value


CHANGES = {
    "attribute": lambda t: setattr(t, "list", [1.0, "x"]),
    "attribute that goes": lambda t: delattr(t, "dict"),
    "attribute that comes": lambda t: setattr(t, "comes", None),
    "value of a dict": lambda t: t.dict.update(a=3.0),
    "key of a dict": lambda t: t.dict.update(c=3.0),
    "key that goes": lambda t: t.dict.pop("b"),
    "key that comes": lambda t: t.nothing.update(comes=None),
    "order of a dict": lambda t: t.dict.update(a=t.dict.pop("a")),
    "name of an OrderedDict": lambda t: t.names.update(a=2.0),
    "hook": lambda t: t.hooks.update(a=print),
    "item of a list": lambda t: t.list.__setitem__(0, 2.0),
    "longer list": lambda t: t.list.append(2.0),
    "shorter list": lambda t: t.list.pop(),
    "empty list": lambda t: t.empty.append(1),
    "set": lambda t: t.set.add(2.0),
    "empty set": lambda t: t.none.add(2.0),
    "deque": lambda t: t.deque.append(2.0),
    "global": lambda t: globals().update(GLOBAL=2.0),
    "global that goes": lambda t: globals().pop("GLOBAL"),
    "class attribute": lambda t: setattr(t.kind, "number", 2.0),
    "class attribute that comes": lambda t: setattr(t.kind, "comes", 2.0),
    "class attribute that goes": lambda t: delattr(t.kind, "other"),
    "class attribute under another name": lambda t: renamed(t.kind),
    "method": lambda t: setattr(t.kind, "method", lambda self: None),
    "class above": lambda t: setattr(Above, "above", 2.0),
    "code": lambda t: setattr(t.function, "__code__", made_function(1.0).__code__.replace(co_name="another")),
    "defaults": lambda t: setattr(t.function, "__defaults__", (1.5, (3, [3]))),
    "keyword defaults": lambda t: setattr(t.function, "__kwdefaults__", {"a": 1}),
    "cell": lambda t: setattr(t.function.__closure__[0], "cell_contents", 2.0),
    "empty cell": lambda t: delattr(t.function.__closure__[0], "cell_contents"),
    "requires_grad": lambda t: t.tensor.requires_grad_(),
}


@pytest.fixture
def as_before():
    """Puts back what the changes change of this file."""
    yield
    Above.above = 1.0
    globals()["GLOBAL"] = 1.0


@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_change_is_seen(change, as_before):
    t = things()
    found = kept(t)
    assert found.still_holds() and found.still_holds()
    CHANGES[change](t)
    assert not found.still_holds()
    assert not found.still_holds()


def test_all_but_two_kinds_are_seen_in_c(monkeypatch):
    """No other is asked in Python, as long as all things are the same."""
    t, asked = things(), []
    found = kept(t)
    still_holds = all_settings.Setting.still_holds
    monkeypatch.setattr(
        all_settings.Setting, "still_holds", lambda self: bool(asked.append(type(self.owner))) or still_holds(self)
    )
    assert found.still_holds()
    assert sorted(asked, key=str) == [collections.deque, set]


def test_equal_numbers_and_texts_are_no_change(as_before):
    t = things()
    found = kept(t)
    t.dict["a"], t.names["a"], t.list[0], globals()["GLOBAL"] = (float("1") for _ in range(4))
    t.function.__defaults__ = (float("1.5"), t.function.__defaults__[1])
    t.function.__closure__[0].cell_contents = float("1")
    assert t.dict["a"] is not things().dict["a"] and found.still_holds()
    t.list[1] = "y"  # behind all these
    assert not found.still_holds()


def test_what_is_read_later_is_looked_at_too():
    t = things()
    found = kept(t)
    assert found.still_holds()
    found.name(vars(t), "later")
    assert found.still_holds()
    t.later = 1
    assert not found.still_holds()


class Raises:
    def __getattr__(self, name):
        raise KeyError(name)


def changed(*checks, start=0):
    return first_changed(checks, what_is_asked(checks, MISSING), start)


def test_a_check_that_raises_does_not_hold():
    assert changed(Raises(), "a", 1) == 0
    assert changed(Raises(), "a", MISSING) == -1
    assert changed({}, [], 1) == changed({}, [], MISSING) == 0  # no key
    assert changed(3, None, (1,)) == changed(3, None, ()) == 0  # no container
    assert changed([], None, 3) == 0
    assert changed() == changed({}, "a", 1, start=1) == changed({}, "a", 1, start=1 << 70) == -1
    assert changed({}, "a", MISSING) == -1
    assert changed({}, "a") == -1  # no whole check


def test_what_is_no_check_is_refused():
    checks = {}, "a", 1
    for wrong in (([], b"", 0), ((), b"", 0.5), (checks, b"", 0), (checks, bytes(2), 0), (checks, "a", 0)):
        with pytest.raises(TypeError, match="checks"):
            first_changed(*wrong)
    with pytest.raises(TypeError, match="checks"):
        what_is_asked([], MISSING)
    for asked in range(256):  # of other checks
        for checks in (({}, "a", 1), (3, None, None), ([], 1, ()), (torch.ones(2), 1, b""), (torch.ones(2), "T", 3)):
            assert first_changed(checks, bytes([asked]), 0) in (0, -1)


def test_sizes_and_numbers_of_a_tensor():
    table = torch.arange(6.0).reshape(2, 3)
    numbers = table.numpy().tobytes()
    assert changed(table, "shape", (2, 3)) == -1
    assert [changed(table, "shape", x) for x in ((2,), (3, 2), (2, 3, 1), ("2", 3), 6)] == [0] * 5
    if changed(table, 1, numbers) == 0:  # torch before 2.10 shows no numbers quickly
        return
    assert changed(table, 1, numbers[:8]) == -1
    assert changed(table, 5, numbers[:4] + numbers[-4:]) == -1
    wrong = [(table, 1, numbers + b"0000"), (table, 5, numbers[:8]), (table, 6, numbers[:8]), (table, 0, numbers)]
    wrong += [
        (table, -1, numbers),
        (table, 1 << 70, numbers),
        (table, 1, b""),
        (table.t(), 1, numbers),
        (table, 1, numbers[:3]),
    ]
    assert [changed(*each) for each in wrong] == [0] * len(wrong)
    table[1, 2] = 7
    assert changed(table, 1, numbers) == changed(table, 5, numbers[:4] + numbers[-4:]) == 0
    assert changed(table, 1, numbers[:-4]) == changed(table, "shape", (2, 3)) == -1


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (10, 10), (2, 3, 4, 5, 6), (70, 70), (1, 3000)])
@pytest.mark.parametrize("turned", [False, True])
def test_numbers_of_a_table_are_kept(dtype, shape, turned):
    """Of each type and size, however it lies: with the first number, by `.data`, and by other sizes."""

    def made():
        table = torch.zeros(shape).to(dtype)
        return table.transpose(0, -1) if turned and shape else table

    for change in ("number", "data", "sizes"):
        table, found = made(), Settings()
        found.numbers(table)
        assert found.still_holds() and found.still_holds()
        if change == "number" and table.numel():
            table[(0,) * table.dim()] = 1
        elif change == "data" and table.numel():
            table.data = made() + made().new_ones(())
        elif change == "sizes" and len(shape) > 1:
            table.data = torch.ones(3).to(dtype)
        else:
            continue
        assert not found.still_holds(), change


@pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="counts are kept in parts")
def test_references_are_kept_right():
    t = things()
    number, text = object(), "".join(("some", "text"))
    t.own, t.dict["own"], t.kind.own = number, number, number
    t.list.append(number)
    found = kept(t)
    found.attribute(t, "own")
    found.name({text: number}, text)
    checks = (Above, "above", Above.above, t, "own", number, t, "gone", MISSING, t.list, None, tuple(t.list))
    parts = [number, text, MISSING, t.dict, t.list, t.kind, t.function, t.tensor, t.hooks, Above, None]
    assert found.still_holds() and changed(*checks) == -1

    def many():
        for _ in range(1000):
            found.still_holds()
            changed(*checks)
            changed(t, "own", None)
            changed(t, "gone", None)
            changed(t.dict, None, b"")
            changed(t.tensor, "shape", (2,), t.tensor, 1, bytes(8))

    many()
    before = [sys.getrefcount(x) for x in parts]
    many()
    after = [sys.getrefcount(x) for x in parts]
    assert all(abs(a - b) < 50 for a, b in zip(after, before)), (before, after)  # of 1000; None has other users
