"""A result is computed from what the parameters hold at the call, whoever changed them and however; and `frozen`."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from torch import nn

import needs
from mha_c import _core, heads
from mha_c import torch as mt
from mha_c.torch import variants

# --- Every way to change one number -------------------------------------------------------------------------


def _by_data(p, i):
    p.data[i] = 9


def _by_numpy(p, i):
    p.detach().numpy()[i] += 9


def _by_an_old_view(p, i):
    p.kept[i] -= 9


def _by_mask(p, i):
    mask = torch.zeros_like(p, dtype=torch.bool)
    mask[i] = True
    p.data[mask] = 9


def _by_storage(p, i):
    where = sum(n * stride for n, stride in zip(i, p.stride()))
    torch.tensor([], dtype=p.dtype).set_(p.untyped_storage())[where] = 9


def _without_grad(p, i):
    with torch.no_grad():
        p[i] += 9


def _by_dlpack(p, i):
    torch.from_dlpack(p.detach())[i] = 9


def _by_new_data(p, i):
    new = p.detach().clone()
    new[i] = 9
    p.data = new


WAYS = (_by_data, _by_numpy, _by_an_old_view, _by_mask, _by_storage, _without_grad, _by_dlpack, _by_new_data)
# (num_hiddens, rows of queries, keys): products of few rows and of many, that are read and packed in their ways.
SIZES = [(2, 1, 2), (30, 7, 3), (30, 300, 12), (256, 1, 9), (256, 64, 64)]
SIZES += [(2, 4096, 3), (1024, 1, 2), (1024, 4096, 2)] if needs.NIGHTLY else []


def kinds(hiddens):
    yield mt.MultiHeadAttention(hiddens, hiddens, hiddens, hiddens, 2, 0.0, True)
    yield mt.AdditiveAttention(hiddens, hiddens, hiddens, 0.0)
    yield variants.MultiHeadedSelfAttention(hiddens, 2)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_one_number(size):
    """Each way, in each parameter: the result is that of a copy that has never been called."""
    hiddens, rows, keys = size
    ways = itertools.cycle(WAYS)
    for layer in kinds(hiddens):
        layer.eval()
        few = isinstance(layer, variants.MultiHeadedSelfAttention) or (isinstance(layer, mt.AdditiveAttention))
        x, y = torch.randn(1, min(rows, 64) if few else rows, hiddens), torch.randn(1, keys, hiddens)
        arguments = (x,) if isinstance(layer, variants.MultiHeadedSelfAttention) else (x, y, y)
        names = [name for name, _ in layer.named_parameters()]
        for p in layer.parameters():
            p.kept = p.detach().numpy()
        for name in names * (len(WAYS) if hiddens <= 256 and rows < 1000 else 1):
            way = next(ways)
            p = layer.get_parameter(name)
            place = tuple(int(torch.randint(0, n, ())) for n in p.shape)
            with torch.set_grad_enabled(way is not _by_numpy):
                layer(*arguments)
                way(p, place)
                found = layer(*arguments)
                fresh = copy.deepcopy(layer)(*arguments)
            assert torch.equal(found, fresh), (name, way.__name__)
            p.kept = p.detach().numpy()


@pytest.mark.parametrize("change", [_by_data, _by_numpy, _by_mask, _by_storage])
def test_a_change_is_worth_noticing(change):
    """The edits above do change the result: without this, the test could not fail."""
    for layer in kinds(30):
        x = torch.randn(2, 5, 30)
        arguments = (x,) if isinstance(layer, variants.MultiHeadedSelfAttention) else (x, x, x)
        for name in [name for name, _ in layer.named_parameters() if name != "W_k.bias"]:
            before = layer(*arguments)
            change(layer.get_parameter(name), (0,) * layer.get_parameter(name).dim())
            assert not torch.allclose(layer(*arguments), before), name


def test_every_numbers_turn_comes():
    """No sample: each of the numbers of a weight is looked at."""
    layer = mt.MultiHeadAttention(24, 24, 24, 24, 2, 0.0).eval()
    x = torch.randn(1, 3, 24)
    with torch.no_grad():
        for i, j in itertools.product(range(0, 24, 5), range(24)):
            before = layer(x, x, x)
            layer.W_v.weight.data[i, j] += 1
            assert not torch.equal(layer(x, x, x), before)


def _linears(layer):
    return [child for child in layer.children() if isinstance(child, nn.Linear)]


def _averaged(layer):  # an exponential moving average as many write it: torch does not count these
    for parameter in layer.parameters():
        parameter.data.mul_(0.9).add_(0.1)


@torch.no_grad()
def _doubled(layer):
    for parameter in layer.parameters():
        parameter *= 2


def _fewer_outputs(layer):
    layer.W_o.weight.data, layer.W_o.bias.data = layer.W_o.weight.data[:4], layer.W_o.bias.data[:4]


def _another_state(layer, **how):
    layer.load_state_dict({name: torch.randn_like(x) for name, x in layer.state_dict().items()}, **how)


CHANGES = {
    "a step of an optimizer": lambda layer: torch.optim.Adam(layer.parameters(), lr=0.1).step(),
    "an average": _averaged,
    "all doubled": _doubled,
    "drawn anew": lambda layer: [nn.init.xavier_uniform_(linear.weight) for linear in _linears(layer)],
    "one number": lambda layer: layer.W_k.weight.data[0, 0].fill_(42),
    "written through a view": lambda layer: layer.W_v.weight.detach().copy_(torch.randn(8, 8)),
    "other data": lambda layer: setattr(layer.W_q.weight, "data", layer.W_q.weight.data * 2),
    "transposed data": lambda layer: setattr(layer.W_o.weight, "data", layer.W_o.weight.data.t()),
    "strided data": lambda layer: setattr(layer.W_o.weight, "data", torch.randn(8, 16)[:, ::2]),
    "fewer outputs": _fewer_outputs,
    "another parameter": lambda layer: setattr(layer.W_v, "weight", nn.Parameter(torch.randn(8, 8))),
    "another module": lambda layer: setattr(layer, "W_v", nn.Linear(8, 8, bias=False)),
    "another state": _another_state,
    "another state in its place": lambda layer: _another_state(layer, assign=True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_parameters_is_seen(change, grad):
    if change == "another state in its place":
        needs.of_torch("torch.nn.Module.load_state_dict(assign)")
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, True).train(grad), torch.randn(2, 3, 8)
    layer(x, x, x).sum().backward()
    with torch.set_grad_enabled(grad):
        before = layer(x, x, x)
        CHANGES[change](layer)
        after = layer(x, x, x)
        expected = copy.deepcopy(layer)(x, x, x)
    assert torch.equal(after, expected) and not torch.equal(after, before)


# --- Threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eval", "training"])
def test_whatever_starts_after_an_update_sees_it(mode):
    """Four threads call while one updates: a call that starts after update n has returned computes with n or later."""
    layer = mt.MultiHeadAttention(64, 64, 64, 64, 2, 0.0).train(mode == "training")
    x, done, failures, counts = torch.ones(1, 3, 64), [0], [], [0] * 4
    with torch.no_grad():  # the result of update n is n, everywhere
        for linear in (layer.W_q, layer.W_k, layer.W_v):
            linear.weight.copy_(torch.eye(64))
        layer.W_o.weight.zero_()
    stop = threading.Event()

    def call(i):
        with torch.set_grad_enabled(mode == "training"):
            while not stop.is_set():
                known = done[0]
                least = float(layer(x, x, x).detach().min())
                counts[i] += 1
                if least < known:
                    failures.append((known, least))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        flat = layer.W_o.weight.detach().numpy()
        n = 0
        while n < 400 or (min(counts) < 20 and not failures):  # until every thread has called between updates
            n += 1
            np.fill_diagonal(flat, n)  # behind torch's back
            done[0] = n
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert float(layer(x, x, x).detach().min()) == n


# --- frozen -------------------------------------------------------------------------------------------------------


def models():
    torch.manual_seed(0)
    multi_head, additive = mt.MultiHeadAttention(24, 24, 24, 24, 2, 0.0, True), mt.AdditiveAttention(24, 24, 16, 0.0)
    others = {"dot": mt.DotProductAttention(0.0), "linear": nn.Linear(24, 24)}
    return nn.ModuleDict({"multi-head": multi_head, "additive": additive, **others}).eval()


def results(model, x):
    with torch.no_grad():
        return [model[name](x, x, x) for name in ("multi-head", "additive", "dot")]


@torch.no_grad()
def uses_packed(layer, x):
    """Whether a call uses a weight that was packed before: it does not see that a number changes."""
    weight, before = layer.W_v.weight.detach().numpy(), layer(x, x, x)
    kept = float(weight[3, 5])
    weight[3, 5] += 9
    after = layer(x, x, x)
    weight[3, 5] = kept
    return torch.equal(before, after)


@pytest.mark.parametrize("rows", [1, 5, 500])
def test_frozen_gives_the_same_bits(rows, isa):
    """From weights that are packed, once, for this instruction set and these parameters; of no copy."""
    model, x = models(), torch.randn(2, rows, 24)
    expected, layer = results(model, x), model["multi-head"]
    with mt.frozen(model) as inside:
        assert inside is model
        assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected))
        assert uses_packed(layer, x) and not uses_packed(copy.deepcopy(model)["multi-head"], x)
        for name in (name for name, offered in _core.isas() if offered):
            _core.set_isa(name)
            assert uses_packed(layer, x) == (name == isa)
        _core.set_isa(isa)
        for parent in (layer.W_o, layer.W_q):
            weight, parent.weight = parent.weight, nn.Parameter(parent.weight.detach().clone())
            assert not uses_packed(layer, x)
            parent.weight = weight
        assert uses_packed(layer, x)
    assert not uses_packed(layer, x)


def test_frozen_notices_each_change():
    for change, name in ((_by_data, "W_q"), (_by_numpy, "W_k"), (_by_storage, "W_v"), (_by_mask, "W_o")):
        model, x = models(), torch.randn(2, 5, 24)
        with pytest.raises(RuntimeError, match=rf"frozen\(\): multi-head\.{name}\.weight;"):
            with mt.frozen(model):
                change(model["multi-head"].get_parameter(f"{name}.weight"), (23, 23))
        expected = results(copy.deepcopy(model), x)
        assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected))  # outside, fresh again
    with pytest.raises(RuntimeError, match=r"frozen\(\): W_k\.weight;"), mt.frozen(model["additive"]):
        _by_data(model["additive"].W_k.weight, (0, 0))
    with mt.frozen(model):  # what is not packed is read at each call
        before = results(model, x)
        _by_data(model["multi-head"].W_o.bias, (3,))
        _by_data(model["additive"].w_v.weight, (0, 3))
        after = results(model, x)
        assert not torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
        model["multi-head"].W_q.weight = nn.Parameter(torch.zeros(24, 24))  # another parameter: seen as well
        assert not torch.equal(results(model, x)[0], after[0])
    with pytest.warns(RuntimeWarning, match=r"multi-head\.W_q\.weight;"), pytest.raises(ZeroDivisionError):
        with mt.frozen(model):  # an error inside comes first
            _by_data(model["multi-head"].W_q.weight, (0, 0))
            raise ZeroDivisionError


def test_frozen_records_gradients_as_ever():
    model, x = models().train(), torch.randn(2, 5, 24)
    with mt.frozen(model):
        found = torch.autograd.grad(model["multi-head"](x, x, x).sum(), model["multi-head"].W_q.weight)[0]
    expected = torch.autograd.grad(model["multi-head"](x, x, x).sum(), model["multi-head"].W_q.weight)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("names", [("W_o",), ("W_q", "W_k", "W_v", "W_o")])
def test_heads_are_measured_without_those_of_others(names):
    """Inside frozen(), which has packed the weights, and of layers that share a parameter."""
    one, other = models()["multi-head"], models()["multi-head"]
    x = torch.randn(2, 5, 24)
    alone = heads.importance(one, (x, x, x), "ablation")
    with torch.no_grad(), mt.frozen(one):
        np.testing.assert_array_equal(heads.importance(one, (x, x, x), "ablation"), alone)
    expected = {method: heads.importance(one, x, method, loss=loss) for method in ("ablation", "gradient")}
    for name in names:
        getattr(other, name).weight = getattr(one, name).weight
    pair, before = nn.ModuleList([one, other]), one.W_o.weight
    for method, found in expected.items():  # the second layer has no part in the loss
        both = heads.importance(pair, x, method, loss=lambda pair, x: loss(pair[0], x))
        np.testing.assert_allclose(both, [*found.scores[method], *[0] * other.num_heads], rtol=1e-5)
    assert one.W_o.weight is other.W_o.weight is before and before.requires_grad


def loss(layer, x):
    return layer(x, x, x).square().sum()


def test_pruned_modules_have_no_weights_of_the_heads_they_had():
    x, mha, of_another = torch.randn(2, 5, 24), models()["multi-head"], variants.MultiHeadedSelfAttention(24, 4)
    for layer, inputs in ((mha, (x, x, x)), (of_another, (x,))):
        layer(*inputs)
        heads.prune(layer, [0])
        with pytest.raises(AttributeError, match="call the layer first"):
            layer.attention_weights  # noqa: B018
        layer(*inputs)
        assert layer.attention_weights.shape == (2, layer.num_heads, 5, 5)


def test_frozen_by_several():
    """Contexts that overlap, in any order of leaving; another instruction set meanwhile."""
    model, x = models(), torch.randn(2, 5, 24)
    expected = results(model, x)
    first, second = mt.frozen(model), mt.frozen(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert uses_packed(model["multi-head"], x)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected))
    second.__exit__(None, None, None)
    assert not uses_packed(model["multi-head"], x)
    active = _core.isa()
    with mt.frozen(model):
        _core.set_isa("scalar")
        torch.testing.assert_close(results(model, x)[0], expected[0])
        _core.set_isa(active)
    model.half()
    with mt.frozen(model):
        pass
