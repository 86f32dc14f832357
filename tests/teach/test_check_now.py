"""check: forms that are half taken, masks of any number, constructors, sizes, and weights by any name."""

import re

import numpy as np
import pytest

import needs
from mha_c import teach
from mha_c.teach import book


def attended(q, k, v, seen, fill=-1e9, divisor=None):
    scores = q @ k.swapaxes(1, 2) / (q.shape[-1] ** 0.5 if divisor is None else divisor)
    return book.softmax(scores if seen is None else np.where(seen, scores, fill), -1) @ v


def lengths_of_items(divisor):
    def mine(q, k, v, valid_lens=None):
        seen = None if valid_lens is None else np.arange(k.shape[1]) < valid_lens[:, None, None]
        return attended(q, k, v, seen, divisor=q.shape[-1] if divisor == "d" else None)

    return mine


def test_the_mistake_behind_a_form_that_is_not_taken_comes_first():
    answer = teach.check(lengths_of_items("d"), "dot_product")
    assert answer.mistakes == ["scale_d", "shape"]
    assert "Its form where valid_lens has a length for each query, as (batch, queries) is not taken" in str(answer)
    answer = teach.check(lengths_of_items("root"), "dot_product")
    assert answer.mistakes == ["shape"] and "and nowhere else" in str(answer)


def test_a_mistake_only_where_lengths_are_those_of_items():
    def mine(q, k, v, valid_lens=None):
        if valid_lens is None:
            return attended(q, k, v, None)
        lens = np.tile(valid_lens, q.shape[1]).reshape(len(q), -1) if valid_lens.ndim == 1 else valid_lens
        return attended(q, k, v, np.arange(k.shape[1]) < lens[..., None])

    assert teach.check(mine, "dot_product").mistakes == ["lens_tiled"]


@pytest.mark.parametrize("fill", [-0.5, -1, -2.5, -5, -7.5, -10])
def test_masks_may_hide_with_any_small_number(fill):
    def mine(q, k, v, mask=None):
        return attended(q, k, v, mask, fill)

    answer = teach.check(mine, "dot_product")
    assert answer.mistakes == ["mask_small"] and f"masked scores become {fill:g}, not -1e6" in str(answer)


def test_heads_laid_end_to_end_are_one_sentence():
    def mine(q, k, v, valid_lens, W_q, W_k, W_v, W_o, num_heads):
        def split(x):
            return np.concatenate(np.split(x, num_heads, axis=-1), axis=0)

        lens = None if valid_lens is None else np.repeat(valid_lens, num_heads, axis=0)
        out = book.dot_product(split(q @ W_q), split(k @ W_k), split(v @ W_v), lens)
        return np.concatenate(np.split(out, num_heads, axis=0), axis=-1) @ W_o

    answer = teach.check(mine, "multi_head")
    assert answer.mistakes == ["heads_joined_wrong"] and str(answer).count("h * batch + b") == 1


def test_an_argument_that_says_nothing():
    def ignored(q, k, v, valid_lens=None, foo=None):
        return book.dot_product(q, k, v, valid_lens)

    answer = teach.check(ignored, "dot_product")
    assert answer.mistakes == ["untried"] and "What its argument foo does was not tried" in str(answer)
    with pytest.raises(ValueError, match='mask must be "attend", "hide" or "add", got \'seen\''):
        teach.check(ignored, "dot_product", mask="seen")


def test_the_kind_that_it_was_taken_for():
    answer = teach.check(lambda X, W_q, W_k, W_v: book.causal(X @ W_q, X @ W_k, X @ W_v))
    assert answer.ok and "it was taken for causal_multi_head, because it takes weights" in str(answer)


# ---- in torch --------------------------------------------------------------------------------------------------------


def layer(**children):
    torch = needs.module("torch")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.names = 2, list(children)
            for name, bias in children.items():
                setattr(self, name, torch.nn.Linear(8, 8, bias=bias))

        def forward(self, x):
            q, k, v, last = (getattr(self, name) for name in self.names)
            q, k, v = (f(x).reshape(*x.shape[:2], 2, 4).transpose(1, 2) for f in (q, k, v))
            out = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
            return last(out.transpose(1, 2).reshape(x.shape))

    return Layer


def test_weights_by_names_that_say_nothing():
    mine = layer(alpha=True, beta=False, gamma=True, delta=False)
    names = {"W_q": "alpha", "W_k": "beta", "W_v": "gamma", "W_o": "delta"}
    assert teach.check(mine, "multi_head", weights=names).ok and teach.check(mine(), "multi_head", weights=names).ok
    says = r"does not find them in alpha, beta, delta, gamma; say which they are: .*weights=\{\"W_q\": \"alpha\""
    answer = teach.check(mine(), "multi_head")
    assert answer.mistakes == ["not_judged"] and re.search(says, str(answer))


def test_weights_tell_more_than_a_name():
    Attention = layer(W_q=True, W_k=True, W_v=True, W_o=True)
    answer = teach.check(Attention())
    assert answer.ok and "it was taken for multi_head, because of its weights" in str(answer)


def test_an_error_in_a_constructor_is_an_answer():
    torch = needs.module("torch")

    class MultiHeadAttention(torch.nn.Module):
        def __init__(self, num_hiddens, num_heads):
            super().__init__()
            self.W_q = torch.nn.Linear(num_hiddens, num_hiddenz)  # noqa: F821

        def forward(self, x):
            return x

    for kind in (None, "multi_head", "causal_multi_head"):
        answer = teach.check(MultiHeadAttention, kind)
        assert answer.mistakes == ["raises"] and "NameError: name 'num_hiddenz'" in str(answer)
        assert "num_hiddenz)" in str(answer) and teach.laws(MultiHeadAttention, kind).broken == ["made"]
