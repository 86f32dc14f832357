"""What a class does in its first call alone: a table that it makes and keeps, an error, an odd input.  The next call of
the form is read, too; what goes on stays with the lines."""

import copy
import warnings

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs
from mha_c.torch._readers.modules import MOST_IN_A_ROW

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.prepare()

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, 4, C // 4).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(~self.kept(T), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))


class Grown(Causal):
    def prepare(self):
        self.table = None

    def kept(self, T):
        if self.table is None or self.table.shape[0] < T:
            self.table = torch.ones(T, T).tril().bool()
        return self.table[:T, :T]


class BySize(Causal):
    def prepare(self):
        self.tables = {}

    def kept(self, T):
        if T not in self.tables:
            self.tables[T] = torch.ones(T, T).tril().bool()
        return self.tables[T]


class Buffered(Causal):
    def prepare(self):
        self.register_buffer("table", torch.ones(0, 0).bool(), persistent=False)

    def kept(self, T):
        if len(self.table) < T:
            self.register_buffer("table", torch.ones(T, T).tril().bool(), persistent=False)
        return self.table[:T, :T]


class Once(Causal):
    def prepare(self):
        self.is_ready = False

    def kept(self, T):
        if not self.is_ready:
            self.table, self.is_ready = torch.ones(20, 20).tril().bool(), True
        return self.table[:T, :T]


class Counting(Causal):
    def prepare(self):
        self.calls = 0

    def kept(self, T):
        self.calls += 1
        return torch.ones(T, T).tril().bool()


class Alternating(Causal):
    """Each second call hides more, by what the one before has left."""

    def prepare(self):
        self.strict = False

    def kept(self, T):
        self.strict = not self.strict
        return torch.ones(T, T).tril(-1 if self.strict else 0).bool() | torch.eye(T).bool()


class Picky(Causal):
    def prepare(self):
        pass

    def kept(self, T):
        if T > 9:
            raise ValueError("too many")
        return torch.ones(T, T).tril().bool()


def both(kind):
    module = kind().eval()
    return mt.convert(copy.deepcopy(module)), module


def way(module):
    return mt.report(module).as_dict()[""]["way"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Grown, BySize, Buffered, Once])
def test_a_table_of_the_first_call_is_the_cores_from_the_second_on(kind, grad):
    module, own = both(kind)
    ways = []
    with torch.set_grad_enabled(grad):
        for T in (6, 6, 6, 4, 9, 9, 9, 5, 6, 12, 12, 12):
            x = torch.randn(2, T, 32)
            # float32 in another order.
            torch.testing.assert_close(module(x), own(x), rtol=1e-5, atol=1e-5)
            ways.append(way(module))
            if len(ways) == 1:
                assert "waits for another call; so far its own lines: " in str(mt.report(module))
    assert ways == ["waits"] + ["core"] * 11
    assert [*vars(module)] == [*vars(own)] and [*module._buffers] == [*own._buffers]
    for one in (module, own):  # what was kept is another's
        for table in [one.table] if kind is not BySize else one.tables.values():
            table.fill_(True)
    x = torch.randn(2, 12, 32)
    torch.testing.assert_close(module(x), own(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(own(x)[:, 0], kind.forward(both(kind)[1], x)[:, 0])


@pytest.mark.parametrize("kind", [Counting, Alternating])
def test_what_each_call_changes_is_left_behind_the_second(kind):
    module, own = both(kind)
    for n in range(6):
        x = torch.randn(2, 6, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(module(x), own(x)), n
        assert way(module) == ("waits" if n == 0 else "left")
    assert "is read and set" in mt.report(module).as_dict()[""]["reason"]
    assert type(module) is kind and vars(module)["_parameters"].keys() == vars(own)["_parameters"].keys()
    assert {x: y for x, y in vars(module).items() if type(y) in (int, bool)} == {
        x: y for x, y in vars(own).items() if type(y) in (int, bool)
    }


def test_calls_that_the_lines_refuse_are_no_forms():
    module, own = both(Picky)
    for _ in range(MOST_IN_A_ROW + 2):
        with pytest.raises(ValueError, match="too many"):
            module(torch.randn(2, 10, 32))
    for _ in range(2):
        x = torch.randn(2, 6, 32)
        torch.testing.assert_close(module(x), own(x), rtol=1e-5, atol=1e-5)
    assert way(module) == "core"


def test_one_odd_call_decides_for_no_others():
    """Of lines whose hidden scores are all equal a query without keys gives the mean; of others that call is the
    lines' own."""

    class Padded(Picky):
        def forward(self, x, keep):
            B, T, C = x.shape
            q, k, v = (y.view(B, T, 4, C // 4).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
            scores = q @ k.transpose(-2, -1) / 8**0.5 + (~keep[:, None, None]).float() * -1e9
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))

    module, own = both(Padded)
    full, none = torch.ones(2, 6).bool(), torch.ones(2, 6).bool()
    none[0] = False
    with torch.no_grad():
        for keep in (none, full, full, none, full):
            x = torch.randn(2, 6, 32)
            torch.testing.assert_close(module(x, keep), own(x, keep), rtol=1e-5, atol=1e-5)
    assert way(module) == "core"
