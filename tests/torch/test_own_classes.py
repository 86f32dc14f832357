"""`convert` on attention that readers have typed: the core computes it, and it stays the reader's."""

import copy
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
import own_attention
import own_lookalikes_more  # noqa: F401
import own_self_attention
from converted import TOLERANCE, ZOO, drawn, of_the_zoo, split, tensors
from mha_c.torch._own.telling import what_differs
from own_lookalikes import LOOKALIKES


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


def test_the_zoo_is_large():
    assert len(ZOO) >= 40


@pytest.mark.parametrize("name", ZOO)
def test_same_outputs_gradients_and_weights(name):
    module, twin = drawn(name)
    for call in ZOO[name][1]:
        args, named = split(call)
        assert mha_c.explain(module, *args, **named).as_dict()["way"] == "core", named
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


def test_ten_steps_of_training(pair):
    module, twin, calls = pair
    args, named = split(calls[0])
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


def test_it_stays_the_readers(pair):
    module, twin, calls = pair
    args, named = split(calls[0])
    kind = type(twin)
    assert isinstance(module, kind) and type(module).__name__ == kind.__name__ and repr(module) == repr(twin)
    assert (type(module).__module__, type(module).__qualname__) == (kind.__module__, kind.__qualname__)
    assert [*module.state_dict()] == [*twin.state_dict()]
    with torch.no_grad():
        expected = tensors(twin.eval()(*args, **named))
    module.eval()(*args, **named)
    for twice in (copy.deepcopy(module), copy.copy(module)):
        assert mha_c.explain(twice, *args, **named).as_dict()["way"] == "core"
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


def test_probing_has_no_side_effect():
    for name in ("MultiHeadAttention", "CausalSelfAttention", "MultiHeadedAttention"):
        make, _ = ZOO[name]
        module = make(dropout=0.3)
        module.train()
        module.attention = module.attention.eval() if hasattr(module, "attention") else None
        if module.attention is None:
            del module.attention
        calls = []
        module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        state, numbers = torch.get_rng_state(), copy.deepcopy(module.state_dict())
        modes, threads = [x.training for x in module.modules()], torch.get_num_threads()
        parameters = [id(x) for x in module.parameters()]
        mt.convert(module)
        assert torch.equal(state, torch.get_rng_state()) and not calls and torch.get_num_threads() == threads
        assert modes == [x.training for x in module.modules()] and parameters == [id(x) for x in module.parameters()]
        assert all(torch.equal(x, numbers[key]) for key, x in module.state_dict().items())
        assert all(x.grad is None for x in module.parameters())


def test_dropout_acts_by_its_law():
    """In training it drops, with the probability that the module's own Dropout has at the call."""
    for name in ("MultiHeadedAttention", "DotProductAttention", "CausalSelfAttention", "HeadsInAList", "MHA"):
        make, calls = ZOO[name]
        module, (args, named) = mt.convert(make(dropout=0.5)), split(calls[0])
        assert not torch.equal(tensors(module(*args, **named))[0], tensors(module(*args, **named))[0]), name
        module.eval()
        torch.testing.assert_close(module(*args, **named), module(*args, **named))
        module.train()
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        torch.testing.assert_close(module(*args, **named), module(*args, **named))


def test_weights_after_dropout_are_those_that_were_used():
    """The annotated Transformer keeps its weights after dropout."""
    module = mt.convert(own_attention.MultiHeadedAttention(1, 8, dropout=0.5))
    x = torch.randn(2, 5, 8)
    out = module(x, x, x)
    values = module.linears[2](x)
    torch.testing.assert_close(module.linears[3]((module.attn @ values[:, None])[:, 0]), out, **TOLERANCE)
    assert (module.attn == 0).any()


@pytest.mark.parametrize("name", ["MultiHeadAttention", "DotProductAttention", "AdditiveAttention", "RotatedAndShared"])
def test_cost_says_which_layer_has_the_same_sizes(name):
    module, _ = drawn(name)
    with pytest.raises(TypeError, match="its own class: write") as told:
        mha_c.cost(module, 8)
    written = re.search(r"mha_c\.cost\((mha_c\.torch\..*), \.\.\.\)", str(told.value))[1]
    assert mha_c.cost(eval(written), 8, measure=False).flops > 0


def test_a_class_and_a_decorator():
    @mt.convert
    class Mine(own_attention.MultiHeadAttention):
        pass

    assert isinstance(Mine, type) and Mine.__name__ == "Mine" and mt.convert(Mine) is Mine
    module, (args, _) = Mine(), split(ZOO["MultiHeadAttention"][1][0])
    twin = copy.deepcopy(module)
    expected = own_attention.MultiHeadAttention.forward(twin, *args)
    torch.testing.assert_close(module(*args), expected, **TOLERANCE)
    assert isinstance(module, Mine) and mha_c.explain(module, *args).as_dict()["way"] == "core"

    @mt.convert
    class Wrong(own_attention.NoLengths):
        def forward(self, q, k, v):
            return super().forward(q, k, v) * 2

    wrong = Wrong()
    with pytest.warns(UserWarning, match=r"Wrong\) (computes something other|differs)"):
        wrong(*args[:1] * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrong(*args[:1] * 3)  # it is told once


def test_it_is_quick():
    """Twelve layers within a second, a model without attention within 50 ms; both with room for a loaded machine."""
    layers = nn.Sequential(*[own_self_attention.CausalSelfAttention(64, 4) for _ in range(12)])
    mt.convert(own_self_attention.CausalSelfAttention(64, 4))  # torch's own first calls
    begin = time.process_time()
    mt.convert(layers)
    assert time.process_time() - begin < 1.0
    plain = nn.Sequential(
        *[nn.TransformerEncoderLayer(8, 2, 8).linear1 for _ in range(40)], *[Block() for _ in range(40)]
    )
    begin = time.process_time()
    with pytest.warns(UserWarning, match="nothing to replace"):
        mt.convert(plain)
    assert time.process_time() - begin < 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv1d(3, 3, 1), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)))


def test_compare_takes_own_classes():
    module, args = own_attention.MultiHeadAttention(), ZOO["MultiHeadAttention"][1][0]
    result = mha_c.d2l.compare(module, *args, seconds=0.02, show=False)
    assert result["largest_difference"] < 1e-5 and type(module) is own_attention.MultiHeadAttention


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalikes_are_left_and_named(name):
    kind, words = LOOKALIKES[name]
    module = kind()
    with pytest.warns(UserWarning) as told:
        mt.convert(module)
    assert type(module) is kind
    message = str(told[0].message)
    said = message.split(kind.__name__ + ") ")[1].split(".  In a forward")[0]
    assert re.search(words or r"^differs: |^computes something other than an attention of the book$", said), said
    assert "dot_product_attention(q, k, v, keep_mask=mask)" in message


def test_no_line_of_a_right_class_is_blamed():
    """But for the lines that hide keys, which are looked at where all others are the core's."""
    for name in [*ZOO][::4]:
        told = what_differs(ZOO[name][0]())
        assert told.hides or not told.words, (name, str(told))


def test_what_is_to_be_written_gives_the_same():
    """The keywords of the sentence, in the place of the lines that differ."""
    for name in ("Softcapped", "SlidingWindow", "AnotherTemperature"):
        module, x = LOOKALIKES[name][0]().eval(), torch.randn(2, 9, 8)
        written = re.search(r"; (dot_product_attention\(.*\)) does that", str(what_differs(module)))[1]
        q, k, v = module.project(x, x, x)
        out = eval(written, {"q": q, "k": k, "v": v, "dot_product_attention": mt.functional.dot_product_attention})
        torch.testing.assert_close(module.output(out), module(x), rtol=1e-3, atol=1e-4)  # 0.7143 has four digits


def test_three_layers_that_end_in_one_number_are_no_attention():
    """Nobody calls them one: nothing is said of them."""

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 1)

        def forward(self, state, action):
            return self.fc3(self.fc2(self.fc1(torch.cat((state, action), -1)).tanh()).tanh())

    with pytest.warns(UserWarning, match="nothing to replace"):
        mt.convert(Critic())


def test_check_and_convert_ask_the_same(monkeypatch):
    """Without the one place that knows which attribute is which weight, neither knows a layer."""
    module = own_attention.MHA()
    assert mha_c.teach.check(module, "multi_head").ok
    monkeypatch.setattr(mha_c._recognize.weights, "leaves_of", lambda layer: iter(()))
    answer = mha_c.teach.check(module, "multi_head")
    assert answer.mistakes == ["not_judged"] and "W_q" in str(answer)
    with pytest.warns(UserWarning, match="nothing to replace"):
        mt.convert(own_attention.MultiHeadedAttention())
