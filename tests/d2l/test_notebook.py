"""What a notebook does around d2l's classes works under patch() as it does without: both generations of d2l.

Each test is a few lines that a reader of the book would write, run on d2l's own classes and on ours in their place.
"""

import contextlib
import copy
import math
import pickle

import pytest

import needs

torch = needs.module("torch")
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")

import book_models  # noqa: E402  torch must be there
import mha_c.d2l  # noqa: E402

LENS = [3, 2]


@pytest.fixture(params=needs.real_d2l.VERSIONS)
def d2l(request):
    yield needs.d2l(request.param)
    mha_c.d2l.unpatch()


def multi_head(d2l, hiddens=8, heads=2, dropout=0.0, kind="MultiHeadAttention", **options):
    sizes = (hiddens,) * 3 if book_models.is_eager(d2l) else ()
    return getattr(d2l, kind)(*sizes, hiddens, heads, dropout, **options)


def additive(d2l, hiddens=8, dropout=0.0):
    return d2l.AdditiveAttention(*((8, 8) if book_models.is_eager(d2l) else ()), hiddens, dropout)


def numbers(*shape):
    return torch.linspace(-1, 1, math.prod(shape)).sin().reshape(shape)


def equal_under_patch(d2l, notebook):
    """`notebook(d2l)` gives the same tensors with d2l's classes and with ours."""
    outcomes = []
    for patched in (contextlib.nullcontext(), mha_c.d2l.patch(d2l)):
        with patched:
            torch.manual_seed(0)
            outcomes.append(notebook(d2l))
    theirs, ours = outcomes
    assert len(theirs) == len(ours)
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found + 0, expected)


# --- attention_weights, assigned -------------------------------------------------------------------------


def book_forward(d2l):
    """The book's own forward of DotProductAttention, with another scale: an exercise."""

    def forward(self, queries, keys, values, valid_lens=None):
        scores = torch.bmm(queries, keys.transpose(1, 2)) / queries.shape[-1]
        self.attention_weights = d2l.masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)

    return forward


@pytest.mark.parametrize("where", ["subclass", "class", "object"])
def test_a_forward_that_assigns_attention_weights(d2l, where, monkeypatch):
    def notebook(d2l):
        kind, forward = d2l.DotProductAttention, book_forward(d2l)
        with monkeypatch.context() as patch:
            if where == "subclass":
                kind = type("Mine", (kind,), {"forward": forward})
            elif where == "class":  # add_to_class
                patch.setattr(kind, "forward", forward)
            single, mha, x = kind(0.0), multi_head(d2l), numbers(2, 4, 8)
            mha.attention = kind(0.0)
            if where == "object":
                single.forward, mha.attention.forward = (forward.__get__(m) for m in (single, mha.attention))
            outs = [module(x, x, x, torch.tensor(LENS)) for module in (single, mha)]
            return *outs, single.attention_weights, mha.attention.attention_weights

    equal_under_patch(d2l, notebook)


def test_additive_attention_with_a_forward_of_its_own(d2l):
    def notebook(d2l):
        class Mine(d2l.AdditiveAttention):
            def forward(self, queries, keys, values, valid_lens):
                queries, keys = self.W_q(queries), self.W_k(keys)
                scores = self.w_v(torch.relu(queries.unsqueeze(2) + keys.unsqueeze(1))).squeeze(-1)
                self.attention_weights = d2l.masked_softmax(scores, valid_lens)
                return torch.bmm(self.dropout(self.attention_weights), values)

        module, x = Mine(*((8, 8) if book_models.is_eager(d2l) else ()), 6, 0.0), numbers(2, 4, 8)
        return module(x, x, x, torch.tensor(LENS)), module.attention_weights

    equal_under_patch(d2l, notebook)


def test_what_was_assigned_is_read_until_the_next_call(d2l):
    for make in (multi_head, additive, lambda d2l: d2l.DotProductAttention(0.0)):
        with mha_c.d2l.patch(d2l):
            module, x = make(d2l), numbers(2, 4, 8)
        inner = getattr(module, "attention", module)
        module(x, x, x, torch.tensor(LENS))
        called = inner.attention_weights + 0
        for value in (None, torch.ones(3), "heads"):
            inner.attention_weights = value
            assert inner.attention_weights is value
        with torch.no_grad():
            module(x, x, x, torch.tensor(LENS))
        torch.testing.assert_close(inner.attention_weights + 0, called)


def test_weights_taken_away_before_a_copy(d2l):
    def notebook(d2l):
        m, x = multi_head(d2l), numbers(2, 4, 8)
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

    equal_under_patch(d2l, notebook)


def test_weights_on_the_multi_head_attention_itself(d2l):
    def notebook(d2l):
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

        x, found = numbers(2, 4, 8), []
        for kind in (Shows, Alone):
            m = kind(*((8,) * 3 if book_models.is_eager(d2l) else ()), 8, 2, 0.0)
            with torch.no_grad():
                found += [m(x, x, x, torch.tensor(LENS)), m.attention_weights, m.attention.attention_weights]
            twin = copy.deepcopy(m)
            found += [twin.attention_weights, twin(2 * x, x, x, torch.tensor(LENS)), twin.attention_weights]
        return found

    equal_under_patch(d2l, notebook)


def test_weights_that_are_a_parameter(d2l):
    def notebook(d2l):
        class Fixed(d2l.DotProductAttention):  # a random synthesizer: weights that do not look at the inputs
            def __init__(self):
                super().__init__(0.0)
                self.attention_weights = torch.nn.Parameter(torch.rand(1, 4, 4))

            def forward(self, queries, keys, values, valid_lens=None):
                return self.attention_weights @ values

        m, x = Fixed(), numbers(2, 4, 8)
        m(x, x, x).sum().backward()
        assert [name for name, _ in m.named_parameters()] == ["attention_weights"]
        return m(x, x, x), m.attention_weights, m.attention_weights.grad

    equal_under_patch(d2l, notebook)


# --- attention_weights, read and changed ------------------------------------------------------------------

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
def test_what_is_read_twice_is_one_tensor(d2l, edit, tokens, grad):
    def notebook(d2l):
        m, x = multi_head(d2l), numbers(2, tokens, 8)
        with torch.set_grad_enabled(grad):
            m(x, x, x, None)
        weights = m.attention.attention_weights
        assert weights is m.attention.attention_weights
        with torch.no_grad():
            EDITS[edit](weights)
        found = m.attention.attention_weights
        assert found is weights and found.requires_grad == grad
        return found, copy.deepcopy(found.detach())

    equal_under_patch(d2l, notebook)


@pytest.mark.parametrize("tokens", [4, 100])
def test_edits_reach_every_reading(d2l, tokens):
    with mha_c.d2l.patch(d2l):
        m, x = multi_head(d2l), numbers(2, tokens, 8)
    for first in ("attention", "whole"):
        m(x, x, x, torch.tensor(LENS))
        flat, by_head = m.attention.attention_weights, m.attention_weights
        with torch.no_grad():
            (flat[0] if first == "attention" else by_head[0, 0]).fill_(2)
        for weights in (flat[0], by_head[0, 0], m.attention.attention_weights[0], m.attention_weights[0, 0]):
            assert torch.equal(weights, torch.full((tokens, tokens), 2.0))
        for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
            assert torch.equal(twin.attention.attention_weights, flat) and torch.equal(twin.attention_weights, by_head)
            twin.attention.attention_weights.zero_()
        assert flat.detach().any()
        m(x, x, x, torch.tensor(LENS))
        assert m.attention.attention_weights is not flat and bool((m.attention.attention_weights[0] < 1).all())


def test_weights_read_without_gradients_are_still_of_the_graph(d2l):
    def notebook(d2l):
        m, x = multi_head(d2l), numbers(2, 4, 8).requires_grad_()
        m(x, x, x, torch.tensor(LENS))
        with torch.no_grad():
            largest = m.attention.attention_weights.max()  # a look, for a print
        (m.attention.attention_weights.square().sum()).backward()
        return largest, x.grad, m.W_q.weight.grad

    equal_under_patch(d2l, notebook)
