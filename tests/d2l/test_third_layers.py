"""GQAAttention and the causal attention of the third generation's GPT: ours beside the stand-in's, and the real one's.

MHA_D2L_NEU names a checkout of smolix/d2l-neu: then its own d2l/torch.py is put in the place of the stand-in, too.
"""

import contextlib
import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import mha_c
import mha_c.d2l
import needs
import stepwise
import third_generation as stand_in
from features import saved
from mha_c import torch as mt

needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of the real package
# The limits, for numbers around 1; gradients are sums of a few hundred of such terms.
LIMITS = {"float32": {"atol": 1e-5, "rtol": 1e-5}, "float64": {"atol": 1e-11, "rtol": 1e-11}}
LENGTHS = {
    "none": None,
    "items": torch.tensor([3, 0]),
    "rows": torch.tensor([[1, 2, 0, 5, 7], [7, 3, 0, 1, 0]]),
}


def real():
    """The d2l.torch of the checkout."""
    place = os.environ.get("MHA_D2L_NEU")
    if not place:
        pytest.skip("MHA_D2L_NEU names no checkout of the third generation")
    return needs.real_d2l.load_file("real_third", Path(place) / "d2l" / "torch.py")


@pytest.fixture(params=["stand-in", "real"])
def d2l(request):
    module = stand_in if request.param == "stand-in" else real()
    yield module
    mha_c.d2l.unpatch(module)


def results(layer, inputs, lens=None):
    layer.zero_grad()
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = layer(*inputs, *([] if lens is None else [lens]))
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_grouped_heads(d2l, dtype, key_heads, rope, causal, lens):
    dtype = str(np.dtype(dtype))
    kind = getattr(torch, dtype)
    theirs = d2l.GQAAttention(16, 4, key_heads, True, rope, causal).to(kind)
    with mha_c.d2l.patch(d2l):
        ours = d2l.GQAAttention(16, 4, key_heads, True, rope, causal).to(kind)
    assert isinstance(ours, mt.GQAAttention) and type(ours) is not type(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    inputs = [torch.randn(2, n, 16, dtype=kind) for n in (5, 7, 7)]
    found = results(ours, inputs, lens)
    torch.testing.assert_close(found, results(theirs, inputs, lens), **LIMITS[dtype])
    of_numpy = mha_c.GQAAttention(16, 4, key_heads, True, rope, causal, dtype=dtype)
    of_numpy.load_state_dict(theirs.state_dict())
    arrays = [x.numpy() for x in inputs]
    out = of_numpy(*arrays, None if lens is None else lens.numpy(), training=True)
    grads = of_numpy.backward(2 * out)
    of_parameters = {name: np.asarray(p.grad) for name, p in of_numpy.named_parameters()}
    named = [of_parameters[name] for name, _ in ours.named_parameters()]
    # The book's angles are float32, which differ from ours by one rounding of numbers up to 7, in float64 too.
    limits = {"atol": 2e-5, "rtol": 2e-5} if rope else LIMITS[dtype]
    for a, b in zip(found, [out, *grads, *named]):
        np.testing.assert_allclose(b, a.numpy(), **limits)
    np.testing.assert_allclose(of_numpy.attention_weights, ours.attention_weights.numpy(), **limits)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_attention_of_gpt(d2l, dtype, rope, bias):
    dtype = str(np.dtype(dtype))
    theirs = d2l.GPT.CausalAttention(16, 4, bias, rope).to(getattr(torch, dtype))
    with mha_c.d2l.patch(d2l):
        ours = d2l.GPT.CausalAttention(16, 4, bias, rope).to(getattr(torch, dtype))
    assert isinstance(ours, mt.CausalAttention)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 16, dtype=getattr(torch, dtype))
    torch.testing.assert_close(results(ours, [x]), results(theirs, [x]), **LIMITS[dtype])
    with mt.watch(theirs) as seen:
        theirs(x)
    torch.testing.assert_close(seen.calls[0].weights, ours.attention_weights, **LIMITS[dtype])
    assert torch.equal(ours(x, x, x, None), ours(x))
    of_numpy = mha_c.CausalAttention(16, 4, bias, rope, dtype=dtype)
    of_numpy.load_state_dict(theirs.state_dict())
    out = of_numpy(x.numpy(), training=True)
    arrays = [out, of_numpy.backward(2 * out), *(p.grad for p in of_numpy.parameters()), of_numpy.attention_weights]
    limits = {"atol": 2e-5, "rtol": 2e-5} if rope else LIMITS[dtype]  # as above
    for a, b in zip([*results(ours, [x]), ours.attention_weights], arrays):
        np.testing.assert_allclose(b, a.numpy(), **limits)
    np.testing.assert_array_equal(of_numpy(*[x.numpy()] * 3, None), out)


@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("window", [None, 4])
def test_generation_with_our_caches(d2l, pos, window):
    """The GPT's own logits, of all steps at once, from a prefill, single steps and a chunk."""
    with mha_c.d2l.patch(d2l):
        model = d2l.GPT(30, 16, 4, 2, 20, pos=pos).eval()
    tokens = torch.randint(0, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    caches = [block.attention.new_cache(1, 12, window=window, sinks=0 if window is None else 1) for block in model.blks]

    def cached(tokens, first):
        h = model.token_emb(tokens)
        if pos == "learned":
            h = h + model.pos_emb(torch.arange(first, first + tokens.shape[1]))
        for block, cache in zip(model.blks, caches):
            h = h + block.attention(block.norm1(h), cache=cache)
            h = h + block.ffn(block.norm2(h))
        return torch.nn.functional.linear(model.norm(h), model.token_emb.weight)

    with torch.no_grad():
        parts = tokens.split([5, 1, 1, 4, 1], dim=1)
        firsts = [0, 5, 6, 7, 11]
        found = torch.cat([cached(part, first) for part, first in zip(parts, firsts)], dim=1)
        if window is None:
            torch.testing.assert_close(found, model(tokens), atol=1e-5, rtol=1e-5)
        else:  # a window of one layer is seen by the formulas of its own input
            x = torch.randn(1, 12, 16)
            attention, cache = model.blks[0].attention, model.blks[0].attention.new_cache(1, 12, window=window, sinks=1)
            out = torch.cat([attention(part, cache=cache) for part in x.split([5, 1, 1, 4, 1], dim=1)], dim=1)
            state = {name: value.numpy() for name, value in attention.state_dict().items()}
            turn = (lambda y: stand_in.turned(torch.from_numpy(y)).numpy()) if pos == "rope" else None
            expected, _ = stepwise.attended(x.numpy(), state, 4, 4, turn, window, 1)
            np.testing.assert_allclose(out.numpy(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["GPT", "MultiHeadAttention", "GQAAttention"])
def test_ten_steps_of_a_training(d2l, kind):
    """Losses of a small model, patched and not."""
    tokens, lens = torch.randint(0, 9, (4, 6), generator=torch.Generator().manual_seed(0)), torch.tensor([6, 3, 0, 1])

    def trained(replaced):
        torch.manual_seed(0)
        with mha_c.d2l.patch(d2l) if replaced else contextlib.nullcontext():
            if kind == "GPT":
                model = d2l.GPT(9, 16, 4, 2)
            else:
                own = {"attn_factory": lambda: d2l.GQAAttention(16, 4, 2, rope=True)} if kind[0] == "G" else {}
                embedding, head = torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)
                blocks = [d2l.TransformerBlock(16, 4, **own) for _ in range(2)]
                model = torch.nn.ModuleList([embedding, *blocks, head])
                for block in blocks:
                    block(embedding(tokens), lens)  # sets sizes
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.3)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(10):
            if kind == "GPT":
                out = model(tokens)
            else:
                out = model[0](tokens)
                for block in model[1:-1]:
                    out = block(out, lens)
                out = model[-1](out)
            loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.roll(1, 1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    (theirs, plain), (ours, patched) = trained(False), trained(True)
    assert theirs[-1] < theirs[0] and ours == pytest.approx(theirs, rel=1e-5)
    for model in (plain, patched):
        assert {type(x).__module__ for x in model.modules() if "Attention" in type(x).__name__} == {d2l.__name__}
    assert any(isinstance(x, (mt.GQAAttention, mt.CausalAttention, mt.MultiHeadAttention)) for x in patched.modules())


def test_a_look_into_its_models(d2l):
    """TinyLM, GPT and the blocks as they are: nobody edits them."""
    model, tokens = d2l.GPT(9, 16, 4, 2), torch.randint(0, 9, (2, 6))
    expected = model(tokens)
    with mt.watch(model) as seen:
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=1e-5)
    assert [call.name for call in seen.calls] == ["blks.0.attention", "blks.1.attention"]
    with mha_c.d2l.patch(d2l):
        patched = d2l.GPT(9, 16, 4, 2)
    patched.load_state_dict(model.state_dict())
    with mt.watch() as other:
        torch.testing.assert_close(patched(tokens), expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(seen.calls, other.calls):
        torch.testing.assert_close(a.weights, b.weights, atol=1e-5, rtol=0)
        assert (b.name, b.kind, b.causal) == (a.name, "CausalAttention", "top_left")


def test_saved_copied_and_loaded(d2l):
    with mha_c.d2l.patch(d2l):
        models = [d2l.GQAAttention(16, 4, 2), d2l.GPT.CausalAttention(16, 4)]
        x = torch.randn(2, 6, 16)
        for model in models:
            inputs = [x, x, x][: 3 if hasattr(model, "W_k") else 1]
            expected = model(*inputs)
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                torch.testing.assert_close(twin.attention_weights, model.attention_weights, atol=0, rtol=0)
                torch.testing.assert_close(twin(*inputs), expected)  # torch's products depend on where memory begins
            model.load_state_dict(saved(model.state_dict()))


# --- convert --------------------------------------------------------------------------------------------


def models_of(d2l, bias):
    """A GPT; a block with shared key heads."""
    torch.manual_seed(3)
    gpt = d2l.GPT(20, num_hiddens=16, num_heads=4, num_blks=2, max_len=8, bias=bias)
    block = d2l.TransformerBlock(16, 4, attn_factory=lambda: d2l.GQAAttention(16, 4, 2, bias=bias, rope=True))
    return (gpt, torch.randint(20, (2, 6)), mt.CausalAttention), (block, torch.randn(2, 6, 16), mt.GQAAttention)


@pytest.mark.parametrize("bias", [False, True])
def test_convert_changes_models_that_exist(d2l, bias):
    for model, X, kind in models_of(d2l, bias):
        names, twin = [*model.state_dict()], copy.deepcopy(model)
        with torch.no_grad():
            expected = model(X)
        assert mt.convert(twin) is twin
        changed = [part for part in twin.modules() if isinstance(part, kind)]
        assert changed and all(type(part) is kind for part in changed) and [*twin.state_dict()] == names
        torch.testing.assert_close(twin(X), expected, atol=1e-5, rtol=1e-5)
        for one in (model, twin):
            one(X).square().mean().backward()
        for a, b in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(b.grad, a.grad, atol=1e-5, rtol=1e-5)
        assert changed[0].attention_weights.shape == (2, 4, 6, 6)
        assert "empty_rows" not in vars(changed[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_convert_leaves_what_computes_something_else(grouped):
    base = stand_in.GQAAttention if grouped else stand_in.GPT.CausalAttention

    class Turned(base):
        def _rope(self, x):
            return -super()._rope(x).flip(-1) * torch.arange(x.shape[-1])

    Turned.__name__ = base.__name__
    layer = Turned(16, 4, 2, rope=True) if grouped else Turned(16, 4, rope=True)
    inputs = [torch.randn(2, 6, 16)] * (3 if grouped else 1)
    expected, turned = layer(*inputs), mt.convert(copy.deepcopy(layer))
    with pytest.warns(UserWarning, match="as it is: mul makes the queries, which no call of the core does"):
        assert torch.equal(turned(*inputs), expected)  # read at its first call
    assert type(turned) is Turned and torch.equal(turned(*inputs), expected)
    hooked, fired = base(16, 4, 2) if grouped else base(16, 4), []
    hooked.register_forward_hook(lambda *_: fired.append(1))
    expected, converted = hooked(*inputs), mt.convert(hooked)
    for calls in (2, 3, 4):
        torch.testing.assert_close(converted(*inputs), expected)
        assert len(fired) == calls
