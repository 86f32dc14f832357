"""check beyond the numbers of small probes: parameters that are neutral at first, many keys, one query with an axis."""

import numpy as np
import pytest

from mha_c import teach
from mha_c.teach import book


class Held:
    """Multi-head attention in NumPy, with what a kind of it adds."""

    def __init__(self, num_hiddens, num_heads):
        rng = np.random.default_rng(0)
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (rng.normal(size=(num_hiddens, num_hiddens)) for _ in range(4))
        self.more(num_hiddens)

    def more(self, num_hiddens):
        pass

    def projected(self, queries, keys, values):
        return queries @ self.W_q, keys @ self.W_k, values @ self.W_v

    def result(self, X):
        return X @ self.W_o

    def forward(self, queries, keys, values, valid_lens=None):
        heads = self.num_heads
        q, k, v = (book.transpose_qkv(X, heads) for X in self.projected(queries, keys, values))
        lens = None if valid_lens is None else np.repeat(valid_lens, heads, axis=0)
        return self.result(book.transpose_output(book.dot_product(q, k, v, lens), heads))


class Gain(Held):
    def more(self, num_hiddens):
        self.gain = np.ones(num_hiddens)

    def result(self, X):
        return X * self.gain @ self.W_o


class Norm:
    def __init__(self, features):
        self.beta = np.zeros(features)


class PartsOfParts(Held):
    def more(self, num_hiddens):
        self.norm = Norm(num_hiddens)

    def result(self, X):
        return np.tanh(self.norm.beta) * X + X @ self.W_o


class Biases(Held):
    def more(self, num_hiddens):
        self.b_q, self.b_k, self.b_v, self.b_o = (np.zeros(num_hiddens) for _ in range(4))

    def projected(self, queries, keys, values):
        return queries @ self.W_q + self.b_q, keys @ self.W_k + self.b_k, values @ self.W_v + self.b_v

    def result(self, X):
        return X @ self.W_o + self.b_o


class Tables(Held):
    """What it keeps beside weights is right as it is: a table, a scale, gradients, the last weights."""

    def more(self, num_hiddens):
        self.may_see, self.scale, self.dW = np.tri(8), np.array(1.0), np.zeros((3, 3))

    def result(self, X):
        self.last = X
        return X * self.scale * self.may_see[0, 0] @ self.W_o


@pytest.mark.parametrize(("mine", "names"), [(Gain, "gain"), (PartsOfParts, "norm.beta")])
def test_parameters_that_are_neutral_at_first(mine, names):
    for layer in (mine, mine(8, 2)):
        answer = teach.check(layer, "multi_head")
        assert answer.mistakes == ["extra_parameter"], answer
        assert f"parameters that the book's multi_head has not: {names}." in str(answer)


@pytest.mark.parametrize("mine", [Held, Biases, Tables])
def test_biases_and_tables_are_no_such_parameters(mine):
    layer = mine(8, 2)
    kept = {name: np.array(x) for name, x in vars(layer).items()}
    for each in (mine, layer):
        answer = teach.check(each, "multi_head")
        assert answer.ok, answer
    assert all(np.array_equal(x, kept[name]) for name, x in vars(layer).items())


def test_a_weight_alone_in_a_layer_without_others():
    class Temperature:
        def __init__(self):
            self.temperature = np.ones(1)

        def forward(self, queries, keys, values, valid_lens=None):
            return book.dot_product(queries * self.temperature, keys, values, valid_lens)

    assert teach.check(Temperature(), "dot_product").mistakes == ["extra_parameter"]


# ---- many keys -------------------------------------------------------------------------------------------------------


def no_farther_than(far, queries, keys):
    return np.abs(np.arange(queries)[:, None] - np.arange(keys)) <= far


def seen(queries, keys, values, mask):
    scores = queries @ keys.swapaxes(-1, -2) / np.sqrt(queries.shape[-1])
    return book.softmax(np.where(mask, scores, -1e9), axis=-1) @ values


def test_keys_that_are_far_are_hidden():
    def softmax(X, valid_lens=None):
        return book.masked_softmax(np.where(no_farther_than(20, *X.shape[1:]), X, -1e9), valid_lens)

    def attention(queries, keys, values, valid_lens=None):
        far = no_farther_than(20, queries.shape[1], keys.shape[1])
        mask = np.broadcast_to(far, (len(queries), *far.shape))
        if valid_lens is not None:
            lens = np.asarray(valid_lens).reshape(len(queries), -1, 1)
            mask = mask & (np.arange(keys.shape[1]) < lens)
        return seen(queries, keys, values, mask)

    def causal(queries, keys, values):
        q, k = queries.shape[1], keys.shape[1]
        return seen(queries, keys, values, np.tri(q, k, k - q, dtype=bool) & no_farther_than(12, q, k))

    def heads(q, k, v, mask=None):
        far = no_farther_than(20, q.shape[2], k.shape[2])
        return seen(q, k, v, far if mask is None else far & mask)

    class OfOneInput(Held):
        def forward(self, X):
            q, k, v = (book.transpose_qkv(each, self.num_heads) for each in self.projected(X, X, X))
            mask = np.tri(X.shape[1], dtype=bool) & no_farther_than(20, X.shape[1], X.shape[1])
            return self.result(book.transpose_output(seen(q, k, v, mask), self.num_heads))

    tried = [(softmax, "masked_softmax"), (attention, "dot_product"), (causal, "causal"), (heads, "dot_product")]
    for mine, kind in [*tried, (OfOneInput, "causal_multi_head"), (OfOneInput(8, 2), "causal_multi_head")]:
        answer = teach.check(mine, kind)
        assert answer.mistakes == ["many_keys"] and "With 64 keys the numbers are others." in str(answer), answer


def test_a_layer_may_have_room_for_fewer():
    class Short(Held):
        def forward(self, X):
            assert X.shape[1] <= 16
            q, k, v = (book.transpose_qkv(each, self.num_heads) for each in self.projected(X, X, X))
            mask = np.tri(16, dtype=bool)[: X.shape[1], : X.shape[1]]
            return self.result(book.transpose_output(seen(q, k, v, mask), self.num_heads))

    class Near(Short):
        def forward(self, X):
            assert X.shape[1] <= 16
            q, k, v = (book.transpose_qkv(each, self.num_heads) for each in self.projected(X, X, X))
            mask = np.tri(X.shape[1], dtype=bool) & no_farther_than(9, X.shape[1], X.shape[1])
            return self.result(book.transpose_output(seen(q, k, v, mask), self.num_heads))

    assert teach.check(Short(8, 2), "causal_multi_head").ok
    answer = teach.check(Near(8, 2), "causal_multi_head")
    assert answer.mistakes == ["many_keys"] and "With 16 keys" in str(answer)


# ---- one query, with an axis -----------------------------------------------------------------------------------------


def test_one_query_with_its_axis():
    class Scorer:
        def __init__(self, hidden):
            rng = np.random.default_rng(0)
            self.Wa, self.Ua, self.Va = (rng.normal(size=(hidden, n)) for n in (hidden, hidden, 1))

        def forward(self, query, keys):
            scores = (np.tanh(query @ self.Wa + keys @ self.Ua) @ self.Va)[..., 0][:, None]
            weights = book.softmax(scores, axis=-1)
            return weights @ keys, weights

    answer = teach.check(Scorer(8))
    assert answer.ok and "(batch, 1, features)" in str(answer), answer

    class WithoutTanh(Scorer):
        def forward(self, query, keys):
            return book.softmax(((query @ self.Wa + keys @ self.Ua) @ self.Va)[..., 0][:, None], axis=-1) @ keys

    assert teach.check(WithoutTanh(8)).mistakes == ["no_tanh"]


# ---- what check does not know ----------------------------------------------------------------------------------------


def test_an_argument_that_says_nothing():
    def ignored(q, k, v, valid_lens=None, foo=None):
        return book.dot_product(q, k, v, valid_lens)

    answer = teach.check(ignored, "dot_product")
    assert answer.mistakes == ["untried"] and "What its argument foo does was not tried" in str(answer)
    with pytest.raises(ValueError, match='mask must be "attend", "hide", "add" or "none", got \'seen\''):
        teach.check(ignored, "dot_product", mask="seen")


def test_an_argument_that_check_cannot_make():
    def rope(x, offset, matrices):
        return np.einsum("tij,btj->bti", matrices, x)

    answer = teach.check(rope)
    assert answer.mistakes == ["untried"], answer
    assert "check does not know what to give rope for matrices." in str(answer) and not answer.notes


@pytest.mark.parametrize("sees_the_past", [True, False])
def test_a_block_of_128_has_a_second_block(sees_the_past):
    def causal_attention(q, k, v):
        out = []
        for at in range(0, q.shape[1], 128):
            rows = np.arange(at, min(at + 128, q.shape[1]))[:, None]
            cols = np.arange(0 if sees_the_past else at, rows[-1, 0] + 1)
            out.append(seen(q[:, rows[:, 0]], k[:, cols], v[:, cols], cols <= rows))
        return np.concatenate(out, axis=1)

    assert teach.check(causal_attention).mistakes == ([] if sees_the_past else ["many_keys"])
