"""patch, convert and compare with the book's third generation: the stand-in of tests/support/third_generation.py."""

import contextlib
import copy
import inspect
import operator

import pytest
import torch

import mha_c.d2l
import needs
import third_generation as book
from features import saved
from mha_c import torch as mt

LENS = torch.tensor([[2, 0, 3], [0, 0, 0]])  # rows without keys, of which this generation alone gets 0
PATCHED = ["MultiHeadAttention", "DotProductAttention", "GQAAttention", "GPT.CausalAttention"]


def named(module, name):
    return operator.attrgetter(name)(module)


@pytest.fixture
def d2l():
    yield book
    mha_c.d2l.unpatch()
    assert all(named(book, name).__module__ == book.__name__ for name in PATCHED)


def test_what_is_replaced_and_what_is_not(d2l, capsys):
    originals = [named(d2l, name) for name in PATCHED]
    with mha_c.d2l.patch(d2l):
        said = capsys.readouterr().out
        assert said.startswith(f"mha_c replaces {', '.join(PATCHED)} in third_generation\n")
        assert "third_generation has no AdditiveAttention" in said
        assert not hasattr(d2l, "AdditiveAttention")
        assert all(issubclass(named(d2l, name), named(mt, name.rpartition(".")[2])) for name in PATCHED)
        assert issubclass(d2l.MultiHeadAttention, d2l.Module)
    assert [named(d2l, name) for name in PATCHED] == originals


@pytest.mark.parametrize("lens", [LENS, torch.tensor([3, 0]), None], ids=["rows", "items", "none"])
@pytest.mark.parametrize("training", [False, True])
def test_a_row_without_keys_gets_0(d2l, lens, training):
    theirs = d2l.MultiHeadAttention(12, 3, 0.0, bias=True).train(training)
    with mha_c.d2l.patch(d2l):
        ours = d2l.MultiHeadAttention(12, 3, 0.0, bias=True).train(training)
    queries, keys = torch.randn(2, 3, 12, requires_grad=True), torch.randn(2, 3, 12, requires_grad=True)
    theirs(queries, keys, keys, lens)
    ours(queries, keys, keys, lens)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for layer in (theirs, ours):
        out = layer(queries, keys, keys, lens)
        grads = torch.autograd.grad(out.square().sum(), [queries, keys, *layer.parameters()])
        found.append([out, layer.attention.attention_weights, *grads])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    if lens is not None:
        assert not found[1][1].reshape(2, 3, 3, 3)[1, :, 1].any()


def test_the_default_can_be_overridden_and_replaced(d2l):
    x = torch.ones(2, 3, 12)
    with mha_c.d2l.patch(d2l):
        assert d2l.DotProductAttention(0.0).empty_rows == "zero"
        layer = d2l.MultiHeadAttention(12, 3, 0.0, empty_rows="uniform")
        layer(x, x, x, LENS)
        assert layer.attention.empty_rows == "uniform" and layer.attention_weights[1].eq(1 / 3).all()
        assert inspect.signature(d2l.MultiHeadAttention).parameters["empty_rows"].default == "zero"
        with pytest.raises(TypeError, match="MultiHeadAttention"):
            d2l.MultiHeadAttention(12)
        before, d2l.masked_softmax = d2l.masked_softmax, lambda X, lens: torch.ones_like(X)
        try:
            layer = d2l.MultiHeadAttention(12, 3, 0.0)
            layer(x, x, x, LENS)
            assert layer.attention.attention_weights.eq(1).all()
        finally:
            d2l.masked_softmax = before


def test_convert(d2l):
    model = d2l.TransformerBlock(12, 3)
    x = torch.randn(2, 3, 12)
    with torch.no_grad():
        expected = model(x, LENS)
    converted = mt.convert(copy.deepcopy(model))
    assert type(converted.attention) is mt.MultiHeadAttention and converted.attention.empty_rows == "zero"
    assert type(converted.attention.attention) is mt.DotProductAttention
    assert converted.attention.attention.empty_rows == "zero"
    torch.testing.assert_close(converted(x, LENS), expected, rtol=1e-5, atol=1e-5)
    loaded = saved(converted, **needs.whole_modules())
    torch.testing.assert_close(loaded(x, LENS), expected, rtol=1e-5, atol=1e-5)


def test_convert_lets_errors_of_its_own_through(d2l, monkeypatch):
    """A broad `except` said "computes something else" where our own side had failed."""

    def fails(self, queries, keys, values, valid_lens=None):
        return 1 / 0

    monkeypatch.setattr(mt.DotProductAttention, "forward", fails)
    x = torch.randn(1, 2, 4)
    with pytest.raises(ZeroDivisionError):
        mt.convert(d2l.DotProductAttention(0.0))(x, x, x)


def test_compare(d2l):
    layer, x = d2l.MultiHeadAttention(12, 3, 0.0), torch.randn(2, 3, 12)
    found = mha_c.d2l.compare(layer, x, x, x, LENS, seconds=0.01, show=False)
    assert found["largest_difference"] < 1e-5


def trained(d2l, replaced):
    """Losses of ten steps of a small model of blocks, with padded sentences, one of which is empty."""
    torch.manual_seed(0)
    with mha_c.d2l.patch(d2l) if replaced else contextlib.nullcontext():
        blocks = torch.nn.ModuleList([d2l.TransformerBlock(16, 4), d2l.TransformerBlock(16, 4)])
    embedding, head = torch.nn.Embedding(9, 16), torch.nn.Linear(16, 9)
    tokens, lens = torch.randint(0, 9, (4, 6)), torch.tensor([6, 3, 0, 1])
    for block in blocks:
        block(embedding(tokens), lens)  # sets sizes
    model = torch.nn.ModuleList([embedding, *blocks, head])
    kind = type(blocks[0].attention)
    assert issubclass(kind, mt.MultiHeadAttention) is replaced
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for _ in range(10):
        x = embedding(tokens)
        for block in blocks:
            x = block(x, lens)
        loss = torch.nn.functional.cross_entropy(head(x).flatten(0, 1), tokens.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ten_steps_of_a_training(d2l):
    theirs, ours = trained(d2l, False), trained(d2l, True)
    assert theirs[-1] < 0.9 * theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_models_whose_attention_is_torchs_own_go_on(d2l):
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
    tokens = torch.randint(0, 7, (2, 5))
    model = d2l.GPT(7, 16, 4, 2)
    expected = model(tokens)
    with mha_c.d2l.patch(d2l):
        torch.testing.assert_close(model(tokens), expected)
        assert d2l.GQAAttention(16, 4, 2)(*[torch.ones(2, 5, 16)] * 3).shape == (2, 5, 16)
