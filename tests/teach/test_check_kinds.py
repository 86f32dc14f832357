"""check: which kind of attention it is, told by its name, its arguments or its numbers; rotations and chunks."""

import numpy as np
import pytest

import needs
from checks import attended
from mha_c import teach
from mha_c.teach import book


def softmax_cross_entropy(scores, targets):
    return -np.log(book.softmax(scores, -1))[np.arange(len(targets)), targets].mean()


def test_the_kind_is_told_by_name_and_signature():
    def masked_softmax(X, valid_lens):
        return book.masked_softmax(X, valid_lens)

    def scaled_dot_product_attention(query, key, value, valid_len=None):
        return book.dot_product(query, key, value, valid_len)

    def f(q, k, v, lens):
        return book.dot_product(q, k, v, lens)

    def g(queries, keys, values, valid_lens, W_q, W_k, w_v):
        return book.additive(queries, keys, values, valid_lens, W_q, W_k, w_v)

    def merge_heads(x, heads):
        return book.transpose_output(x, heads)

    def softmax_attention(q, k, v, lens):
        return book.dot_product(q, k, v, lens)

    for mine in (masked_softmax, scaled_dot_product_attention, f, g, merge_heads, softmax_attention):
        assert teach.check(mine).ok, teach.check(mine)
    with pytest.raises(ValueError, match="its name does not tell what it is"):
        teach.check(softmax_cross_entropy)
    with pytest.raises(TypeError, match=r"the function comes first, then its kind: write check\(your_function, kind\)"):
        teach.check("dot_product", f)
    with pytest.raises(ValueError, match="did you mean 'dot_product'"):
        teach.check(f, "dot-product")
    with pytest.raises(ValueError, match="did you mean 'multi_head'"):
        teach.puzzle(3, "multihead")
    with pytest.raises(ValueError, match="its name does not tell what it is; give kind, one of masked_softmax"):
        teach.check(lambda a: a)
    with pytest.raises(ValueError, match=r"kind must be one of masked_softmax, dot_product.*got 'softmax'"):
        teach.check(f, "softmax")
    with pytest.raises(TypeError, match="mine must be a function, a class or a layer, got ndarray"):
        teach.check(np.ones(3))
    answer = teach.check(f, "additive")  # a loop of grades goes on
    assert answer.mistakes == ["not_judged"] and "check needs W_q, W_k, w_v with these names" in str(answer)


def test_the_kind_that_it_was_taken_for():
    answer = teach.check(lambda X, W_q, W_k, W_v: book.causal(X @ W_q, X @ W_k, X @ W_v))
    assert answer.ok and "it was taken for causal_multi_head, because it takes weights" in str(answer)


def attention_that_hides_the_future(q, k, v):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    np.where(np.tri(q.shape[1], k.shape[1]) > 0, scores, -1e9)  # and drops the result
    return book.softmax(scores, -1) @ v


def test_a_triangular_mask_that_is_made_tells_the_kind():
    answer = teach.check(attention_that_hides_the_future)
    assert answer.mistakes[0] == "sees_future" and "it makes a triangular mask" in str(answer)


def sliding_window_attention(Q, K, V, w):
    i, j = np.ogrid[: len(Q), : len(K)]
    return attended(Q[None], K[None], V[None], (j <= i) & (j > i - w))[0]


def test_a_window_called_w():
    assert teach.check(sliding_window_attention).ok


class Unnamed:
    def __init__(self, size):
        raise RuntimeError("no such size")

    def __call__(self, x):
        return x


def test_a_constructor_that_fails_where_nothing_tells_the_kind():
    answer = teach.check(Unnamed)
    assert answer.mistakes == ["raises"] and "RuntimeError: no such size" in str(answer)


# ---- rotations from tables -------------------------------------------------------------------------------------------


def turned_halves(x, cos, sin, sign=1):
    half = x.shape[-1] // 2
    return x * cos + sign * np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def turned_pairs(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    return np.stack([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(x.shape)


def test_tables_of_rotations_are_made():
    assert teach.check(turned_pairs, "rope").ok
    assert teach.check(lambda x, cos, sin: turned_halves(x, cos, sin), "rope").ok


def test_mistakes_with_tables_of_rotations():
    assert teach.check(lambda x, cos, sin: turned_halves(x, cos, sin, -1), "rope").mistakes == ["rope_direction"]
    assert teach.check(lambda x, cos, sin: turned_pairs(x, sin, cos), "rope").mistakes == ["sin_cos_swapped"]


def test_queries_and_keys_are_turned_in_one_call():
    def both(sign):
        return lambda q, k, cos, sin: (turned_halves(q, cos, sin), turned_halves(k, cos, sin, sign))

    assert teach.check(both(1), "rope").ok
    assert teach.check(both(-1), "rope").mistakes == ["rope_direction"]


# ---- chunks ----------------------------------------------------------------------------------------------------------


def in_chunks(past=False, rescales=True, masks=True):
    def flash(queries, keys, values, block_size=2, mask=None):
        top, total, output = -np.inf, 0, 0
        for start in range(0, keys.shape[1], block_size):
            chunk = slice(start, start + block_size)
            scores = queries @ keys[:, chunk].swapaxes(1, 2) / np.sqrt(queries.shape[-1])
            if past:
                scores = np.where(np.tri(queries.shape[1], keys.shape[1])[:, chunk] > 0, scores, -1e9)
            if masks and mask is not None:
                scores = np.where(mask[..., chunk], scores, -1e9)
            new_top = np.maximum(top, scores.max(-1, keepdims=True))
            rescale = np.exp(top - new_top) if rescales else 1
            weights = np.exp(scores - new_top)
            total = total * rescale + weights.sum(-1, keepdims=True)
            output = output * rescale + weights @ values[:, chunk]
            top = new_top
        return output / total

    return flash


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("kind", [None, "named"])
def test_chunks_with_masks(past, kind):
    kind = kind and ("causal" if past else "dot_product")
    assert teach.check(in_chunks(past), kind).ok
    assert teach.check(in_chunks(past, rescales=False), kind).mistakes == ["no_rescale"]
    assert teach.check(in_chunks(past, masks=False), kind).mistakes == ["mask_ignored"]


def test_chunks_that_must_not_see_the_future():
    assert teach.check(in_chunks(), "causal").mistakes == ["sees_future"]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_comparing(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    last = np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
    return softmax(np.where(np.arange(k.shape[-2]) <= last, scores, -1e9)) @ v


def by_slices(q, k, v):
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for t in range(q.shape[1]):
        scores = q[:, t : t + 1] @ k[:, : t + 1].swapaxes(1, 2) / np.sqrt(q.shape[-1])
        out[:, t : t + 1] = softmax(scores) @ v[:, : t + 1]
    return out


def of_groups(q, k, v):
    b, h, t, d = q.shape
    q = q.reshape(b, k.shape[1], -1, t, d)
    scores = np.einsum("bgrtd,bgsd->bgrts", q, k) / np.sqrt(d)
    return np.einsum("bgrts,bgsd->bgrtd", softmax(scores), v).reshape(b, h, t, d)


@pytest.mark.parametrize(("made", "kind"), [(by_comparing, "causal"), (by_slices, "causal"), (of_groups, "grouped")])
def test_a_function_whose_name_says_attention_alone_is_what_its_numbers_say(made, kind):
    """It hides the future, or shares keys among heads, and no triangle and no name says so."""

    def attention(q, k, v):
        return made(q, k, v)

    answer = teach.check(attention)
    assert answer.ok and f"taken for {kind}, because of its numbers" in str(answer), answer
    assert teach.check(attention, "dot_product").ok is False  # asked for, it is compared with that alone

    def attention_of_larger_queries(q, k, v):
        return made(q * np.sqrt(q.shape[-1]), k, v)

    assert teach.check(attention_of_larger_queries).mistakes == ["no_scale"]


def test_a_line_that_hides_nothing_is_no_mending_of_a_causal_layer():
    """Its fill is wrong; without any mask it would be the book's multi_head."""
    torch = needs.module("torch")
    nn = torch.nn

    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model, num_heads):
            super().__init__()
            self.h = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v))
            scores = q @ k.transpose(2, 3)
            steps = torch.arange(x.shape[1])
            hidden = steps.unsqueeze(-1) < steps.unsqueeze(0)
            scores.masked_fill_(hidden, 0.0)
            weights = (scores / k.shape[-1] ** 0.5).softmax(-1)
            return self.W_o((weights @ v).transpose(1, 2).flatten(2))

    answer = teach.check(MultiHeadAttention)
    assert answer.mistakes == ["mask_zero"] and "0.0" in answer.lines[0].text, answer
