"""`convert` on attention that readers have typed: the core computes it, and it stays the reader's."""

import copy
import inspect
import io
import pickle
import re
import time
import warnings

import pytest
import torch
from torch import nn

import mha_c
import mha_c.torch as mt
import needs
import zoo_modules
import zoo_self
from converted import TOLERANCE, drawn_once, of_the_zoo, tensors
from zoo import LOOKALIKES, ZOO

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


def weights_kept(module):
    """{path: weights} that the lines of a module have left in it."""
    names = "attention_weights", "weights", "attn", "alpha", "A", "attn_weights", "last_attn"
    found = {}
    for path, part in module.named_modules():
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                found[f"{path}.{name}"] = value
    return found


pair = pytest.fixture(of_the_zoo, params=ZOO)
CORE = [name for name, case in ZOO.items() if case.core]


def test_the_zoo_is_large():
    assert len(ZOO) >= 40


@pytest.mark.parametrize("name", ZOO)
def test_same_outputs_gradients_and_weights(name):
    module, twin = drawn_once(name)
    for args, named in ZOO[name].calls:
        results = []
        for one in (module, twin):
            one.zero_grad(set_to_none=True)
            own = [
                x.clone().requires_grad_(True) if torch.is_tensor(x) and x.dtype == torch.float32 else x for x in args
            ]
            out = one(*own, **named)
            sum(x.square().sum() for x in tensors(out)).backward()
            grads = [x.grad for x in own if torch.is_tensor(x) and x.requires_grad] + [p.grad for p in one.parameters()]
            results.append((tensors(out), weights_kept(one), grads, type(out)))
        (outs, weights, grads, kind), (own_outs, own_weights, own_grads, own_kind) = results
        assert kind is own_kind and weights.keys() == own_weights.keys()
        torch.testing.assert_close(outs, own_outs, **TOLERANCE)
        torch.testing.assert_close([x + 0 for x in weights.values()], [*own_weights.values()], **TOLERANCE)
        for got, expected in zip(grads, own_grads):
            if got is None or expected is None:  # of a bias that does not matter
                assert (expected if got is None else got) is None or (
                    expected if got is None else got
                ).abs().max() < 1e-5
            else:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CORE)
def test_the_core_computes_what_is_one_layer(name):
    module, _ = drawn_once(name)
    for args, named in ZOO[name].calls:
        with torch.no_grad():
            assert mha_c.explain(module, *args, **named).as_dict()["way"] == "core"
    assert mt.report(module).as_dict()[""]["way"] == "core"


@pytest.mark.parametrize("name", [name for name in ZOO if name not in CORE])
def test_what_is_left_has_a_reason(name):
    module, _ = drawn_once(name)
    rows = mt.report(module).as_dict()
    assert rows and all(row["reason"] for row in rows.values() if row["way"] == "left")


KEPT = {
    "turned": lambda w: w.transpose(-1, -2).detach(), "heads_first": lambda w: w.transpose(0, 1),
    "one_more": lambda w: w[:, None].detach(), "last_first": lambda w: w.permute(3, 0, 1, 2).contiguous(),
    "to_the_cpu": lambda w: w.detach().cpu(), "as_floats": lambda w: w.float(),
    "of_a_type": lambda w: w.to(torch.float32), "doubled": lambda w: w.double(),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_kept_weights_are_those_of_the_last_call(name):
    """In the order of axes in which the lines keep them, also where a call of new sizes is read."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.keep, self.kept = nn.Linear(8, 24), KEPT[name], None

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
            self.kept = self.keep(weights)
            return (weights @ v).transpose(1, 2).flatten(2)

    module = Keeps()
    twin = copy.deepcopy(module)
    mt.convert(module)
    for shape in ((2, 5, 8), (2, 2, 8), (3, 5, 8), (2, 5, 8)):
        for _ in range(3):
            x = torch.randn(shape)
            module(x), twin(x)
            torch.testing.assert_close(module.kept + 0, twin.kept, **TOLERANCE)
            assert module.kept.requires_grad == twin.kept.requires_grad
    assert mt.report(module).as_dict()[""]["way"] == ("left" if name == "doubled" else "core")


class GivesItsWeights(nn.Module):
    """The weights after dropout, kept; and given back, with or without their graph."""

    def __init__(self, detached):
        super().__init__()
        self.qkv, self.drop, self.detached, self.attn = nn.Linear(8, 24), nn.Dropout(0.5), detached, None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        self.attn = weights = self.drop((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1))
        return (weights @ v).transpose(1, 2).flatten(2), weights.detach() if self.detached else weights


@pytest.mark.parametrize("detached", (False, True))
def test_weights_that_are_returned_are_plain_tensors_in_evaluation_and_own_lines_where_a_loss_may_take_them(detached):
    module = GivesItsWeights(detached).eval()
    twin = copy.deepcopy(module)
    mt.convert(module)
    x = torch.randn(2, 5, 8)
    for grad in (True, True, False, False):
        with torch.set_grad_enabled(grad):
            (out, weights), (own, own_weights) = module(x), twin(x)
        torch.testing.assert_close((out, weights), (own, own_weights), **TOLERANCE)
        assert type(weights) is torch.Tensor and weights.requires_grad == own_weights.requires_grad
        with torch.set_grad_enabled(grad):
            way = mha_c.explain(module, x).as_dict()["way"]
        assert way == ("general" if grad and not detached else "core")
    row = mt.report(module).as_dict()[""]
    assert row["way"] == "core" and (row["reason"] is None) == detached
    out, weights = module(x)
    if not detached:
        weights.square().sum().backward()
        twin(x)[1].square().sum().backward()
        torch.testing.assert_close(module.qkv.weight.grad, twin.qkv.weight.grad, **TOLERANCE)


def test_weights_kept_after_dropout_are_those_that_met_the_values():
    module = mt.convert(GivesItsWeights(True))
    x = torch.randn(2, 5, 8)
    for _ in range(4):
        out, weights = module(x)
        _, _, v = module.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        for shown in (module.attn, weights):
            torch.testing.assert_close((shown @ v).transpose(1, 2).flatten(2), out, **TOLERANCE)
            assert (shown == 0).any()
        assert module.attn.requires_grad and not weights.requires_grad
    assert mt.report(module).as_dict()[""]["way"] == "core"


class OneHead(nn.Module):
    """With an axis for heads, of which there is one."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (y.view(len(x), -1, 1, 8).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x)))
        mixed = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(len(x), -1, 8))


def test_an_axis_for_one_head_is_read():
    module = OneHead()
    twin = copy.deepcopy(module)
    mt.convert(module)
    for shape in ((2, 5, 8), (3, 4, 8), (2, 5, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), twin(x), **TOLERANCE)
    row = mt.report(module).as_dict()[""]
    assert row["way"] == "core", row


class Fused(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:convert left")
def test_torchs_function_alone_is_left_with_a_true_reason():
    module, x = mt.convert(Fused()), torch.randn(2, 3, 5, 8)
    module(x, x, x)
    assert "scaled_dot_product_attention" in mt.report(module).as_dict()[""]["reason"]


def test_ten_steps_of_training(pair):
    module, twin, calls = pair
    args, named = calls[0]
    ends = []
    for one in (module, twin):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05) if [*one.parameters()] else None
        for _ in range(10):
            loss = sum(x.square().mean() for x in tensors(one.train()(*args, **named))[:1])
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        ends.append([loss.detach(), *(p.detach() for p in one.parameters())])
    torch.testing.assert_close(*ends, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:convert left")
def test_it_stays_the_readers(pair):
    module, twin, calls = pair
    args, named = calls[0]
    kind = type(twin)
    assert isinstance(module, kind) and type(module).__name__ == kind.__name__ and repr(module) == repr(twin)
    assert (type(module).__module__, type(module).__qualname__) == (kind.__module__, kind.__qualname__)
    assert [*module.state_dict()] == [*twin.state_dict()]
    with torch.no_grad():
        expected = tensors(twin.eval()(*args, **named))
        module.eval()(*args, **named)
    for twice in (copy.deepcopy(module), copy.copy(module)):
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(tensors(twice(*args, **named)), expected, **TOLERANCE)
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded) is kind and vars(loaded).keys() == vars(twin).keys()
    torch.testing.assert_close(tensors(loaded(*args, **named)), expected, **TOLERANCE)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = copy.deepcopy(twin)
    for p in fresh.parameters():
        p.data.zero_()
    fresh.load_state_dict(torch.load(file))
    torch.testing.assert_close(tensors(fresh(*args, **named)), expected, **TOLERANCE)
    module.load_state_dict(twin.state_dict())
    torch.testing.assert_close(tensors(module(*args, **named)), expected, **TOLERANCE)


def test_convert_calls_nothing():
    for name in ("MultiHeadAttention", "CausalSelfAttention", "MultiHeadedAttention"):
        module, calls = ZOO[name].make(dropout=0.3), []
        module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        for part in module.modules():
            part.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        state, numbers = torch.get_rng_state(), copy.deepcopy(module.state_dict())
        mt.convert(module)
        assert torch.equal(state, torch.get_rng_state()) and not calls
        assert all(torch.equal(x, numbers[key]) for key, x in module.state_dict().items())


def test_dropout_acts_by_its_law():
    """In training it drops, with the probability that the module's own Dropout has at the call."""
    for name in ("MultiHeadedAttention", "DotProductAttention", "CausalSelfAttention", "HeadsInAList", "MHA"):
        module, (args, named) = mt.convert(ZOO[name].make(dropout=0.5)), ZOO[name].calls[0]
        assert not torch.equal(tensors(module(*args, **named))[0], tensors(module(*args, **named))[0]), name
        module.eval()
        torch.testing.assert_close(module(*args, **named), module(*args, **named))
        module.train()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        torch.testing.assert_close(module(*args, **named), module(*args, **named))


@pytest.mark.parametrize(
    "name", ["MultiHeadAttention", "DotProductAttention", "AdditiveAttention", "GroupedQueryAttention"]
)
def test_cost_says_which_layer_has_the_same_sizes(name):
    module, _ = drawn_once(name)
    with pytest.raises(TypeError, match="its own class: write") as told:
        mha_c.cost(module, 8)
    written = re.search(r"mha_c\.cost\((mha_c\.torch\..*), \.\.\.\)", str(told.value))[1]
    assert mha_c.cost(eval(written), 8, measure=False).flops > 0


def test_a_class_and_a_decorator():
    @mt.convert
    class Mine(zoo_modules.MultiHeadAttention):
        pass

    assert isinstance(Mine, type) and Mine.__name__ == "Mine" and mt.convert(Mine) is Mine
    module, (args, _) = Mine(), ZOO["MultiHeadAttention"].calls[0]
    twin = copy.deepcopy(module)
    expected = zoo_modules.MultiHeadAttention.forward(twin, *args)
    for _ in range(3):
        torch.testing.assert_close(module(*args), expected, **TOLERANCE)
    assert isinstance(module, Mine) and mha_c.explain(module, *args).as_dict()["way"] == "core"

    @mt.convert
    class Wrong(zoo_modules.NoLengths):
        def forward(self, q, k, v):
            return super().forward(q, k, v) * 2

    wrong = Wrong()
    with pytest.warns(UserWarning, match=r"left .*Wrong as it is: mul follows what it gives, in .*\* 2`.*report"):
        wrong(*args[:1] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong(*args[:1] * 3)  # it is told once
    assert type(wrong) is Wrong


def test_it_is_quick():
    """Twelve layers of width 768 within 0.1 s, and no table is copied."""
    layers = nn.Sequential(*[zoo_self.CausalSelfAttention(768, 12) for _ in range(12)])
    begin = time.process_time()
    mt.convert(layers)
    assert time.process_time() - begin < 0.1
    with pytest.warns(UserWarning, match="nothing to replace"):
        mt.convert(nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 8).linear1 for _ in range(40)]))


def test_compare_takes_own_classes():
    module, args = zoo_modules.MultiHeadAttention(), ZOO["MultiHeadAttention"].calls[0][0]
    result = mha_c.d2l.compare(module, *args, seconds=0.02, show=False)
    assert result["largest_difference"] < 1e-5 and type(module) is zoo_modules.MultiHeadAttention


@pytest.mark.parametrize("name", LOOKALIKES)
@pytest.mark.filterwarnings("ignore:convert left")
def test_lookalikes_give_what_their_own_lines_give(name):
    """What has the names of an attention and computes something else, in one line."""
    torch.manual_seed(0)
    module = LOOKALIKES[name].make().eval()
    twin = copy.deepcopy(module)
    mt.convert(module)
    needed = [x for x in inspect.signature(module.forward).parameters.values() if x.default is x.empty]
    for n in (5, 12, 150, 5):
        for inputs in ([torch.randn(2, n, 8)] * len(needed), [torch.randn(2, n, 8) for _ in needed]):
            for _ in range(3):
                try:
                    expected = tensors(twin(*inputs))
                except Exception as error:
                    with pytest.raises(type(error)):
                        module(*inputs)
                    continue
                found = [x + 0 for x in tensors(module(*inputs))]
                if all(map(torch.equal, tensors(twin(*inputs)), expected)):  # else its own lines draw
                    torch.testing.assert_close(found, expected, **TOLERANCE)


def hand_made(s, axis=-1):
    above = s.exp()
    return above / above.sum(axis, keepdim=True)


WRITTEN = {  # what makes weights of scores; "core", or what its reason says
    "log_softmax": (lambda s: s.log_softmax(-1).exp(), "core"),
    "logsumexp": (lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(), "core"),
    "by hand": (hand_made, "core"),
    "in another type": (lambda s: s.log_softmax(-1, dtype=torch.float64).exp().float(), "core"),
    "softmin": (lambda s: torch.nn.functional.softmin(-s, -1), "write softmax of -scores"),
    "over queries": (lambda s: s.softmax(-2), "over another axis than the one that its weights are summed over"),
    "over queries, of logarithms": (lambda s: s.log_softmax(-2).exp(), "over another axis"),
    "over both": (lambda s: hand_made(s, (-2, -1)), "over several axes"),
    "kept before exp": (None, "which is not its weights"),
    # No softmax at all, though nearly:
    "twice the sum": (lambda s: torch.sub(s, s.logsumexp(-1, keepdim=True), alpha=2).exp(), ""),
    "the sum of others": (lambda s: (s - (2 * s).logsumexp(-1, keepdim=True)).exp(), ""),
    "without the axis": (lambda s: (s - s.logsumexp(-1)).exp(), ""),
    "by hand without the axis": (lambda s: s.exp() / s.exp().sum(-1), ""),
    "sharpened": (lambda s: (2 * s.log_softmax(-1)).exp(), ""),
    "the other way round": (lambda s: (s.logsumexp(-1, keepdim=True) - s).exp(), ""),
    "changed in place": (lambda s: s.log_softmax(-1).exp_(), ""),  # its gradient is an error
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_softmax_is_read_however_it_is_written_and_nothing_else_is_one(name):
    how, said = WRITTEN[name]

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.how = nn.Linear(8, 24), how

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
            s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            if self.how is None:
                self.kept = s.log_softmax(-1)
            w = self.kept.exp() if self.how is None else self.how(s)
            return (w @ v).transpose(1, 2).flatten(2)

    own = Writes()
    module = mt.convert(copy.deepcopy(own))

    def outcome(one, x):
        out = one(x)
        try:
            return [out, *torch.autograd.grad(out.square().sum(), one.qkv.parameters())]
        except RuntimeError as error:
            return [out, str(error)]

    for shape in ((4, 4, 8), (4, 4, 8), (4, 4, 8), (4, 1, 8), (1, 4, 8), (1, 4, 8)):
        x = torch.randn(shape)
        for a, b in zip(outcome(module, x), outcome(own, x)):
            assert a == b if isinstance(b, str) else torch.allclose(a, b, atol=1e-5, rtol=1e-4)
    rows = mt.report(module).as_dict()
    if said:
        assert rows[""]["way"] == ("core" if said == "core" else "left") and said in (rows[""]["reason"] or "core")
    else:
        assert all(row["way"] == "left" for row in rows.values())
