"""`convert` on d2l's own classes, and on classes with their names that an exercise has changed."""

import copy
import warnings

import pytest
import torch

import book_models
import mha_c.d2l
import needs
from mha_c import torch as mt


def test_convert(d2l):
    with torch.no_grad():
        encoder, decoder = book_models.build(d2l, "transformer", 20, 20)
        ids, lens = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
        expected, weights = encoder(ids, lens), encoder.attention_weights
        before = list(encoder.parameters())
        assert mt.convert(encoder) is encoder
        assert type(encoder.blks[0].attention) is mt.MultiHeadAttention
        assert [id(p) for p in encoder.parameters()] == [id(p) for p in before]
        torch.testing.assert_close(encoder(ids, lens), expected)
        for found, old in zip(encoder.attention_weights, weights):
            torch.testing.assert_close(found + 0, old)
        encoder, decoder = book_models.build(d2l, "bahdanau", 20, 20)
        state = decoder.init_state(encoder(ids), lens)
        expected = decoder(ids, state)[0]
        torch.testing.assert_close(mt.convert(decoder)(ids, state)[0], expected)
        assert type(decoder.attention) is mt.AdditiveAttention
    single = d2l.DotProductAttention(0.3)
    single.layer, single.attention_weights = 7, torch.ones(1, 2, 3)
    assert type(mt.convert(single)) is mt.DotProductAttention and single.dropout.p == 0.3
    assert single.layer == 7 and not hasattr(single, "attention_weights") and not hasattr(single, "board")
    lazy = mt.convert(d2l.MultiHeadAttention(*((8, 8, 8) if book_models.is_eager(d2l) else ()), 8, 2, 0.0))
    X = torch.ones(2, 3, 8)
    lazy(X, X, X).sum().backward()
    assert type(lazy.W_q) is torch.nn.Linear and repr(lazy).startswith("MultiHeadAttention(\n  (attention)")


def notebook_class():
    """A class as a notebook defines it: the book's text over two lines that exercises change."""

    class DotProductAttention(torch.nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = torch.nn.Dropout(dropout)

        def forward(self, queries, keys, values, valid_lens=None):
            scores = torch.bmm(queries, keys.transpose(1, 2)) / queries.shape[-1] ** 0.5
            self.attention_weights = masked(self.changed(scores), valid_lens)
            return self.mixed(self.attention_weights, values)

        changed = staticmethod(lambda scores: scores)

        def mixed(self, weights, values):
            return torch.bmm(self.dropout(weights), values)

    def masked(scores, lens):
        if lens is None:
            return torch.softmax(scores, -1)
        lens = lens[:, None] if lens.dim() == 1 else lens
        hidden = torch.arange(scores.shape[-1]) >= lens[..., None]
        return torch.softmax(scores.masked_fill(hidden, -1e6), -1)

    own = {"forward": DotProductAttention.forward}
    return type("DotProductAttention", (DotProductAttention,), own)


CHANGES = {  # a line of the class, as an exercise changes it
    "a window": ("changed", staticmethod(lambda scores: scores + torch.full(scores.shape[-2:], -1e6).triu(9))),
    "no scale": ("changed", staticmethod(lambda scores: scores * 2)),
    "dropout of the result": ("mixed", lambda self, weights, values: self.dropout(weights @ values)),
    "no dropout": ("mixed", lambda self, weights, values: weights @ values),
    "more in training": ("mixed", lambda self, weights, values: self.dropout(weights) @ values * (1 + self.training)),
    "no gradient": ("mixed", lambda self, weights, values: self.dropout(weights.detach()) @ values),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:convert left")
def test_what_an_exercise_changed_is_computed(change):
    """A class that has a name of d2l's and computes something else."""
    kind = notebook_class()
    setattr(kind.__base__, *CHANGES[change])
    model, twin, state = torch.nn.Sequential(kind(0.0)), kind(0.0), torch.get_rng_state()
    mt.convert(model)
    assert torch.equal(state, torch.get_rng_state()) and not hasattr(model[0], "attention_weights")
    for training in (False, True, False):
        for n in (4, 4, 4, 40, 40, 40):
            results = []
            x = torch.randn(2, n, 8)
            for one in (model[0], twin):
                given = x.clone().requires_grad_(True)
                out = one.train(training)(given, given, given)
                results.append([out.detach(), torch.autograd.grad(out.square().sum(), given)[0]])
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)  # float32, sums of 40 numbers around 1


def test_a_class_with_the_books_name_is_read(d2l):
    def forward(self, queries, keys, values, valid_lens):
        return 2 * d2l.MultiHeadAttention.forward(self, queries, keys, values, valid_lens)

    sizes = (8, 8, 8) if book_models.is_eager(d2l) else ()
    other, x = type("MultiHeadAttention", (d2l.MultiHeadAttention,), {"forward": forward}), torch.randn(2, 4, 8)
    module = other(*sizes, 8, 2, 0.0)
    with torch.no_grad():
        module(x, x, x, None)
    twin = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mt.convert(module)
        for _ in range(3):
            torch.testing.assert_close(module(x, x, x, None), twin(x, x, x, None))
    assert type(mt.convert(d2l.MultiHeadAttention(*sizes, 8, 2, 0.0))) is mt.MultiHeadAttention


def test_a_function_of_the_book_that_was_replaced_is_read(d2l, monkeypatch):
    """Its classes look it up: they are the original's no longer."""
    own = d2l.masked_softmax
    monkeypatch.setattr(d2l, "masked_softmax", lambda X, lens: own(X.clamp(-0.1, 0.1), lens))
    module, x = d2l.DotProductAttention(0.0).eval(), torch.randn(2, 4, 8)
    expected = module(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mt.convert(module)
        for _ in range(3):
            torch.testing.assert_close(module(x, x, x), expected)


@pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
def test_convert_knows_the_books_text():
    kind = notebook_class()
    module, x = kind(0.1), torch.randn(2, 4, 8)
    with torch.no_grad():
        module(x, x, x)
        weights = module.attention_weights
        assert mt.convert(module) is module and module.attention_weights is weights
        module(x, x, x)
        assert isinstance(module, kind) and mha_c.explain(module, x, x, x).as_dict()["way"] == "core"
    assert module.training and module.dropout.p == 0.1
    kind.__base__.changed = staticmethod(lambda scores: scores + torch.full(scores.shape[-2:], -1e6).triu(1))
    causal = mt.convert(kind(0.1), x, x, x)
    assert mha_c.explain(causal, x, x, x).as_dict()["way"] == "core"


def test_convert_in_other_types_and_after_training(d2l):
    sizes = (8, 8, 8) if book_models.is_eager(d2l) else ()
    for dtype in (torch.float64, torch.bfloat16):
        module, x = d2l.MultiHeadAttention(*sizes, 8, 2, 0.1), torch.randn(2, 4, 8, dtype=dtype)
        module.to(dtype)
        module(x, x, x, None).sum().backward()
        before = [(x, x.clone(), x.grad.clone()) for x in module.parameters()]
        assert type(mt.convert(module)) is type(mt.convert(module.eval())) is mt.MultiHeadAttention
        assert type(module.attention) is mt.DotProductAttention
        for own, (x, numbers, grad) in zip(module.parameters(), before):
            assert own is x and torch.equal(x, numbers) and torch.equal(x.grad, grad)
