"""What a reader changes behind `convert`: hooks, tables, functions, odd calls; the module's own lines run again."""

import copy

import pytest
import torch
from torch import nn

import mha_c
import mha_c.torch as mt
import needs
import zoo_calls
import zoo_lookalikes_more
import zoo_modules
from converted import TOLERANCE, drawn, of_the_zoo, tensors
from mha_c.torch._call import core
from mha_c.torch._readers.replaying import near
from zoo import ZOO

pair = pytest.fixture(of_the_zoo, params=ZOO)
where_read = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.filterwarnings("ignore:convert left")
def test_parts_that_are_replaced_run(pair):
    """A hook, another child or class of one, another method, function or number: the module's own lines run again."""
    module, twin, calls = pair
    args, named = calls[0]
    linears = [(path, part) for path, part in module.named_modules() if type(part) is nn.Linear]
    module(*args, **named)
    seen, kind = [], type(module)
    if linears:
        handle = linears[0][1].register_forward_hook(lambda *_: seen.append(1))
        for n in (1, 2, 3):
            module(*args, **named)
            assert len(seen) >= n
        handle.remove()
        module(*args, **named)
        assert type(module) is kind

    for path, _ in linears[:1]:
        module.eval()(*args, **named)
        for one in (module, twin):
            one.get_submodule(path).__class__ = Doubled
        results = [tensors(one.eval()(*args, **named)) for one in (module, twin)]
        torch.testing.assert_close(*results, **TOLERANCE)
        for one in (module, twin):
            one.get_submodule(path).__class__ = nn.Linear

    for path, part in linears[:1]:
        for one in (module, twin):
            owner, _, name = path.rpartition(".")
            new = Doubled(part.in_features, part.out_features, part.bias is not None)
            new.load_state_dict(part.state_dict())
            one.get_submodule(owner)._modules[name] = new
        results = [tensors(one.eval()(*args, **named)) for one in (module, twin)]
        torch.testing.assert_close(*results, **TOLERANCE)


@where_read
@pytest.mark.parametrize("other_form", (False, True))
def test_a_bug_of_ours_is_told_and_its_plan_dropped(monkeypatch, other_form):
    """The reader's lines give the result; they alone are asked from then on, and `report` says why."""
    module, twin = drawn("MultiHeadAttention")
    q, k, v, lens = ZOO["MultiHeadAttention"].calls[0][0]
    if other_form:  # of which a plan stays
        module.double()(q.double(), k.double(), v.double(), lens)
        module.float()
    module(q, k, v, lens)
    asked = []

    def broken(*given, **named):
        asked.append(1)
        raise KeyError(f"planted {other_form}")  # another one: a reason is told once

    monkeypatch.setattr(core, "call", broken)
    with pytest.warns(UserWarning, match="MultiHeadAttention as it is: the core failed.*planted.*please report it"):
        torch.testing.assert_close(module(q, k, v, lens), twin(q, k, v, lens), rtol=0, atol=0)
    torch.testing.assert_close(module(q, k, v, lens), twin(q, k, v, lens), rtol=0, atol=0)
    assert len(asked) == 1
    assert "planted" in mt.report(module).as_dict()[""]["reason"] and "planted" in str(mt.report(module))
    if other_form:
        monkeypatch.undo()
        args = q.double(), k.double(), v.double(), lens
        assert mha_c.explain(module.double(), *args).as_dict()["way"] == "core"


@where_read
def test_what_both_refuse_is_no_bug_of_ours(monkeypatch):
    module, _ = drawn("MultiHeadAttention")
    q, k, v, lens = ZOO["MultiHeadAttention"].calls[0][0]
    module(q, k, v, lens)
    kind = type(module)

    def refuses(*_):
        raise OSError("no room on the disk")

    with pytest.raises(OSError, match="no room"), torch.autograd.graph.saved_tensors_hooks(refuses, lambda x: x):
        module(q.clone().requires_grad_(), k, v, lens)  # the zoo keeps its own
    assert type(module) is kind
    monkeypatch.setattr(core, "call", lambda *_, **__: refuse_types())
    module(q, k, v, lens)
    assert type(module) is kind


def refuse_types():
    raise BufferError("no plain memory")


def test_an_odd_call_takes_its_own_lines():
    module, twin = drawn("MultiHeadAttention")
    q, k, v, lens = ZOO["MultiHeadAttention"].calls[0][0]
    for args, named in (([q, k], {"values": v, "valid_lens": lens}), ([q.double(), k.double(), v.double(), lens], {})):
        if args[0].dtype is torch.float64:
            module, twin = module.double(), twin.double()
        torch.testing.assert_close(module(*args, **named), twin(*args, **named), **TOLERANCE)
    with pytest.raises(TypeError, match="forward"):  # its own words
        module(q)
    with pytest.raises(RuntimeError):
        module(q[..., :3].double(), k.double(), v.double(), lens)


class TwoLengths(zoo_modules.MHA):
    """Those of the source hide keys, those of the keys hide more."""

    def forward(self, queries, keys, values, src_lens=None, key_lens=None):
        lens = [x for x in (src_lens, key_lens) if x is not None]
        return super().forward(queries, keys, values, torch.stack(lens).amin(0) if lens else None)


def test_one_of_two_lengths_is_told_and_with_the_other_its_own_lines_run():
    module = TwoLengths()
    x, some, more = torch.randn(2, 5, 8), torch.tensor([2, 5]), torch.tensor([4, 1])
    calls = [(x, x, x, *lens) for lens in ((None, None), (some, None), (None, more), (some, more), (more, some))]
    expected = [module(*call) for call in calls]
    mt.convert(module)
    for call, out in zip(calls, expected):
        torch.testing.assert_close(module(*call), out, **TOLERANCE)


def test_tables_of_positions_that_end_or_change():
    """More rows than its own table has: its own lines refuse them.  Another table: its own lines use it."""
    module, twin = drawn("RotatedAsComplexNumbers")
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 13, 8))
    x = torch.randn(2, 12, 8)
    torch.testing.assert_close(module(x), twin(x), **TOLERANCE)
    module.freqs_cis = twin.freqs_cis = twin.freqs_cis.flip(0)
    torch.testing.assert_close(module(x), twin(x))


def test_tables_that_are_given():
    """Numbers of their own, too few rows, another type, halves that differ: the core or its own lines, and the same."""
    module, twin = drawn("CosinesAreGiven")
    x, mask = torch.randn(2, 5, 8), torch.ones(5, 5).triu(1).bool()
    any_numbers = [torch.randn(7, 2).repeat(1, 2) for _ in "cs"]
    of_doubles = [table.double() for table in any_numbers]
    with_gradients = [table.clone().requires_grad_(True) for table in any_numbers]
    for tables in (any_numbers, [torch.randn(7, 4) for _ in "cs"], of_doubles, with_gradients):
        try:
            expected = twin(x, mask, *tables)
        except RuntimeError:  # doubles beside floats
            with pytest.raises(RuntimeError):
                module(x, mask, *tables)
            continue
        torch.testing.assert_close(module(x, mask, *tables), expected, **TOLERANCE)
    assert all(grad is not None for grad in torch.autograd.grad(module(x, mask, *with_gradients).sum(), with_gradients))
    with pytest.raises(RuntimeError):
        module(x, mask, *[table[:3] for table in any_numbers])


def test_a_subclass_runs_its_own_lines():
    module, twin = drawn("NoLengths")
    kind = type(module)

    class Louder(kind):
        def forward(self, query, key, value):
            return 2 * super().forward(query, key, value)

    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(Louder()(x, x, x), 2 * twin(x, x, x))


def test_functions_that_are_redefined(monkeypatch):
    """A cell of the notebook that is run again with another function."""
    module, twin = drawn("MultiHeadAttention")
    q, k, v, lens = ZOO["MultiHeadAttention"].calls[0][0]
    before = module(q, k, v, lens)
    monkeypatch.setattr(zoo_modules, "masked_softmax", lambda X, lens: torch.ones_like(X))
    torch.testing.assert_close(module(q, k, v, lens), twin(q, k, v, lens))
    assert not torch.allclose(module(q, k, v, lens), before)


def test_a_number_or_a_table_that_changes():
    module, twin = drawn("VisionAttention")
    x = torch.randn(2, 5, 8)
    module.scale = twin.scale = 3.0
    torch.testing.assert_close(module(x), twin(x))
    module, twin = drawn("CausalHeads")
    x = torch.randn(2, 5, 4)
    for one in (module, twin):
        one.mask.logical_not_().fill_diagonal_(False)
    torch.testing.assert_close(module(x), twin(x))


def test_calls_that_were_not_compared():
    """Another temperature's features; two masks that mean something else together; causal without keys alone."""
    heads = torch.randn(2, 4, 5, 8)
    module, twin = drawn("Temperature")
    torch.testing.assert_close(module(heads, heads, heads), twin(heads, heads, heads))

    class Both(zoo_calls.Projected):
        def forward(self, x, context=None, mask=None, padding_mask=None):
            q, k, v = self.project(x, *[x if context is None else context] * 2)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            scores = zoo_lookalikes_more.interacting(mask, padding_mask, scores)
            if context is None:
                scores = scores + torch.full((x.shape[1],) * 2, -torch.inf).triu(1)
            return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    twin, x, other, seen = Both(), torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.ones(1, 1, 5, 5).tril().bool()
    module = mt.convert(copy.deepcopy(twin))
    ways = {"core": ([x, other], [x, other, seen]), "general": ([x], [x, None, seen], [x, other, seen, seen])}
    for _way, calls in ways.items():
        for call in calls:
            torch.testing.assert_close(module(*call), twin(*call), **TOLERANCE)


def test_settings_that_change():
    module, twin = drawn("FromSettings")
    x = torch.randn(2, 5, 8)
    for one in (module, twin):
        one.settings = copy.copy(one.settings)
        one.settings.n_head = 4
    torch.testing.assert_close(module(x), twin(x))


def test_numbers_beside_an_infinity_are_compared():
    own = torch.tensor([1.0, torch.inf, torch.nan, -torch.inf])
    assert near(torch.tensor([1.0, torch.inf, 0.0, -torch.inf]), own)
    assert not near(torch.tensor([1.1, torch.inf, 0.0, -torch.inf]), own)
    assert not near(torch.tensor([1.0, 3e38, 0.0, -torch.inf]), own)
    assert not near(torch.tensor([1.0, torch.inf, 0.0, torch.nan]), own)
    assert not near(own[1:3], own[1:3])  # nothing is compared


class Divided:
    def scaled(self, scores, features):
        return scores / features**0.5


class Sharper:
    def scaled(self, scores, features):
        return scores * features**0.5


class OfABase(Divided, nn.Module):
    def forward(self, q, k, v):
        return self.scaled(q @ k.transpose(1, 2), q.shape[-1]).softmax(-1) @ v


@where_read
@pytest.mark.parametrize("above", [False, True])
def test_other_bases_of_a_class_are_other_lines(monkeypatch, above):
    class Mine(OfABase):
        __module__ = "lines"  # of nobody that is known

    module, own, changed = mt.convert(Mine()), Mine(), OfABase if above else Mine
    x = torch.randn(2, 5, 8)
    for _ in range(2):
        torch.testing.assert_close(module(x, x, x), own(x, x, x), **TOLERANCE)
    assert mt.report(module).as_dict()[""]["way"] == "core"
    before = changed.__bases__
    changed.__bases__ = (Sharper, nn.Module) if above else (Sharper, OfABase)
    try:
        torch.testing.assert_close(module(x, x, x), own(x, x, x), **TOLERANCE)
    finally:
        changed.__bases__ = before
    torch.testing.assert_close(module(x, x, x), own(x, x, x), **TOLERANCE)


class OfAFunction(nn.Module):
    def __init__(self, asked):
        super().__init__()
        self.asked = asked

    def scores(self, q, k):
        return q @ k.transpose(1, 2) / q.shape[-1] ** 0.5

    def forward(self, q, k, v):
        s = self.scores(q, k)
        if self.asked(self):
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)
        return s.softmax(-1) @ v


@where_read
@pytest.mark.parametrize("asked", [
    lambda self: self.scores.__func__.hides, lambda self: self.scores.hides, lambda self: type(self).scores.hides,
    lambda self: self.__class__.scores.hides, lambda self: OfAFunction.scores.hides,
    lambda self: getattr(self.scores, "late", False), lambda self: hasattr(OfAFunction.scores, "late"),
], ids=["function", "method", "of type", "of class", "by name", "getattr", "hasattr"])  # fmt: skip
def test_attributes_of_functions_are_settings(monkeypatch, asked):
    monkeypatch.setattr(OfAFunction.scores, "hides", True, raising=False)
    module, own, x = mt.convert(OfAFunction(asked)), OfAFunction(asked), torch.randn(2, 5, 8)
    for _ in range(2):
        torch.testing.assert_close(module(x, x, x), own(x, x, x), **TOLERANCE)
    before = own(x, x, x)
    monkeypatch.setattr(OfAFunction.scores, "hides", False)
    monkeypatch.setattr(OfAFunction.scores, "late", True, raising=False)
    torch.testing.assert_close(module(x, x, x), own(x, x, x), **TOLERANCE)
    assert not torch.equal(own(x, x, x), before)
