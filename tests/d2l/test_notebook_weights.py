"""attention_weights as notebooks use them, assigned, read, changed: under patch() as without."""

import copy
import pickle

import pytest
import torch

import book_models
import mha_c.d2l
import mha_c.torch
import needs
from notebook import LENS, additive, multi_head, same_under_patch, wave


def book_forward(d2l):
    """The book's own forward of DotProductAttention, with another scale: an exercise."""

    def forward(self, queries, keys, values, valid_lens=None):
        scores = torch.bmm(queries, keys.transpose(1, 2)) / queries.shape[-1]
        self.attention_weights = d2l.masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)

    return forward


@pytest.mark.parametrize("where", ["subclass", "class", "object"])
@same_under_patch
def test_a_forward_that_assigns_attention_weights(d2l, where, monkeypatch):
    kind, forward = d2l.DotProductAttention, book_forward(d2l)
    with monkeypatch.context() as patch:
        if where == "subclass":
            kind = type("Mine", (kind,), {"forward": forward})
        elif where == "class":  # add_to_class
            patch.setattr(kind, "forward", forward)
        single, mha, x = kind(0.0), multi_head(d2l), wave(2, 4, 8)
        mha.attention = kind(0.0)
        if where == "object":
            single.forward, mha.attention.forward = (forward.__get__(m) for m in (single, mha.attention))
        outs = [module(x, x, x, torch.tensor(LENS)) for module in (single, mha)]
        return *outs, single.attention_weights, mha.attention.attention_weights


@same_under_patch
def test_additive_attention_with_a_forward_of_its_own(d2l):
    class Mine(d2l.AdditiveAttention):
        def forward(self, queries, keys, values, valid_lens):
            queries, keys = self.W_q(queries), self.W_k(keys)
            scores = self.w_v(torch.relu(queries.unsqueeze(2) + keys.unsqueeze(1))).squeeze(-1)
            self.attention_weights = d2l.masked_softmax(scores, valid_lens)
            return torch.bmm(self.dropout(self.attention_weights), values)

    module, x = Mine(*((8, 8) if book_models.is_eager(d2l) else ()), 6, 0.0), wave(2, 4, 8)
    return module(x, x, x, torch.tensor(LENS)), module.attention_weights


@same_under_patch
def test_a_scorer_with_a_bias(d2l):
    """Which moves all scores alike: its gradient is 0, and there, as d2l.grad_clipping wants it."""
    module, x, found = additive(d2l), wave(2, 4, 8), []
    module.w_v = torch.nn.Linear(8, 1)
    module(x, x, x, None)  # lazy sizes
    for call in (module, torch.compile(module, backend="eager")):
        module.zero_grad()
        out = call(x, x, x, torch.tensor(LENS))
        out.square().sum().backward()
        found += [out, module.attention_weights, *[p.grad for p in module.parameters()]]
    return found


def test_what_was_assigned_is_read_until_the_next_call(d2l):
    for make in (multi_head, additive, lambda d2l: d2l.DotProductAttention(0.0)):
        with mha_c.d2l.patch(d2l):
            module, x = make(d2l), wave(2, 4, 8)
        inner = getattr(module, "attention", module)
        module(x, x, x, torch.tensor(LENS))
        called = inner.attention_weights + 0
        for value in (None, torch.ones(3), "heads"):
            inner.attention_weights = value
            assert inner.attention_weights is value
        with torch.no_grad():
            module(x, x, x, torch.tensor(LENS))
        torch.testing.assert_close(inner.attention_weights + 0, called)


@same_under_patch
def test_weights_taken_away_before_a_copy(d2l):
    m, x = multi_head(d2l), wave(2, 4, 8)
    m(x, x, x, torch.tensor(LENS)).sum().backward()
    m.attention.attention_weights = None
    twins = copy.deepcopy(m), pickle.loads(pickle.dumps(m))
    assert all(twin.attention.attention_weights is None for twin in twins)
    m(x, x, x, torch.tensor(LENS))
    del m.attention.attention_weights
    assert not hasattr(m.attention, "attention_weights")
    with pytest.raises(AttributeError):
        del m.attention.attention_weights
    return [twin(x, x, x, torch.tensor(LENS)) for twin in (*twins, m, copy.deepcopy(m))]


@same_under_patch
def test_weights_on_the_multi_head_attention_itself(d2l):
    lazy = torch.nn.LazyLinear(2)
    needs.torch_does("a deep copy of a lazy module", lambda: copy.deepcopy(lazy))

    class Shows(d2l.MultiHeadAttention):
        def forward(self, *inputs):
            self.attention_weights = None
            out = super().forward(*inputs)
            self.attention_weights = self.attention.attention_weights[:2]
            return out

    class Alone(d2l.MultiHeadAttention):
        def forward(self, queries, keys, values, valid_lens):
            self.attention_weights = torch.ones(2)
            return self.attention(queries, keys, values, valid_lens)

    x, found = wave(2, 4, 8), []
    for kind in (Shows, Alone):
        m = kind(*((8,) * 3 if book_models.is_eager(d2l) else ()), 8, 2, 0.0)
        with torch.no_grad():
            found += [m(x, x, x, torch.tensor(LENS)), m.attention_weights, m.attention.attention_weights]
        twin = copy.deepcopy(m)
        found += [twin.attention_weights, twin(2 * x, x, x, torch.tensor(LENS)), twin.attention_weights]
    return found


@same_under_patch
def test_weights_that_are_a_parameter(d2l):
    class Fixed(d2l.DotProductAttention):  # a random synthesizer: weights that do not look at the inputs
        def __init__(self):
            super().__init__(0.0)
            self.attention_weights = torch.nn.Parameter(torch.rand(1, 4, 4))

        def forward(self, queries, keys, values, valid_lens=None):
            return self.attention_weights @ values

    m, x = Fixed(), wave(2, 4, 8)
    m(x, x, x).sum().backward()
    assert [name for name, _ in m.named_parameters()] == ["attention_weights"]
    return m(x, x, x), m.attention_weights, m.attention_weights.grad


EDITS = {
    "in place": lambda w: w.mul_(2),
    "an element": lambda w: w[0, 0].fill_(7),
    "an assignment": lambda w: w.__setitem__((0, 1), 5.0),
    "data": lambda w: w.data.add_(1),
    "detached": lambda w: w.detach().zero_(),
    "numpy": lambda w: w.detach().numpy().fill(3),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("tokens", [4, 100])  # kept as they are; computed when first used
@pytest.mark.parametrize("grad", [False, True])
@same_under_patch
def test_what_is_read_twice_is_one_tensor(d2l, edit, tokens, grad):
    m, x = multi_head(d2l), wave(2, tokens, 8)
    with torch.set_grad_enabled(grad):
        m(x, x, x, None)
    weights = m.attention.attention_weights
    assert weights is m.attention.attention_weights
    with torch.no_grad():
        EDITS[edit](weights)
    found = m.attention.attention_weights
    assert found is weights and found.requires_grad == grad
    return found, copy.deepcopy(found.detach())


@pytest.mark.parametrize("tokens", [4, 100])
def test_edits_reach_every_reading(d2l, tokens):
    with mha_c.d2l.patch(d2l):
        m, x = multi_head(d2l), wave(2, tokens, 8)
    for first in ("attention", "whole"):
        m(x, x, x, torch.tensor(LENS))
        flat, by_head = m.attention.attention_weights, m.attention_weights
        with torch.no_grad():
            (flat[0] if first == "attention" else by_head[0, 0]).fill_(2)
        for weights in (flat[0], by_head[0, 0], m.attention.attention_weights[0], m.attention_weights[0, 0]):
            assert torch.equal(weights, torch.full((tokens, tokens), 2.0))
        with mha_c.d2l.patch(d2l):
            twins = copy.deepcopy(m), pickle.loads(pickle.dumps(m))
        for twin in twins:
            assert torch.equal(twin.attention.attention_weights, flat) and torch.equal(twin.attention_weights, by_head)
            twin.attention.attention_weights.zero_()
        assert flat.detach().any()
        m(x, x, x, torch.tensor(LENS))
        assert m.attention.attention_weights is not flat and bool((m.attention.attention_weights[0] < 1).all())


@same_under_patch
def test_weights_read_without_gradients_are_still_of_the_graph(d2l):
    m, x = multi_head(d2l), wave(2, 4, 8).requires_grad_()
    m(x, x, x, torch.tensor(LENS))
    with torch.no_grad():
        largest = m.attention.attention_weights.max()  # a look, for a print
    (m.attention.attention_weights.square().sum()).backward()
    return largest, x.grad, m.W_q.weight.grad
