"""check: dropout's numbers in training, and a task without masks."""

import numpy as np
import pytest

import needs
from mha_c import teach
from mha_c.teach import book
from mha_c.teach.words import sentences as words


def attention(drop, p=None):
    """A class of torch whose weights are dropped by drop(layer, weights)."""
    torch = needs.module("torch")

    class DotProductAttention(torch.nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.p = dropout
            self.dropout = torch.nn.Dropout(dropout if p is None else p)
            self.kept = {}

        def forward(self, queries, keys, values, valid_lens=None):
            scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
            if valid_lens is not None:
                lens = valid_lens.reshape(len(queries), -1, 1)
                scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, -1e6)
            return drop(self, scores.softmax(-1)) @ values

    return DotProductAttention


def zeros(layer, x):
    """True where a weight is lost."""
    torch = needs.module("torch")
    return torch.rand(x.shape) < layer.p


def not_scaled(layer, x):
    return x.masked_fill(zeros(layer, x), 0) if layer.training else x


def scaled_by_what_is_lost(layer, x):
    return x.masked_fill(zeros(layer, x), 0) / layer.p if layer.training else x


def normalized_again(layer, x):
    x = layer.dropout(x)
    return x / x.sum(-1, keepdim=True) if layer.training else x


def twice(layer, x):
    return layer.dropout(layer.dropout(x))


def drawn_once(layer, x):
    if not layer.training:
        return x
    if x.shape not in layer.kept:
        layer.kept[x.shape] = zeros(layer, x)
    return x.masked_fill(layer.kept[x.shape], 0) / (1 - layer.p)


def drawn_for_one_item(layer, x):
    return x.masked_fill(zeros(layer, x[:1]), 0) / (1 - layer.p) if layer.training else x


def by_hand(layer, x):
    return x.masked_fill(zeros(layer, x), 0) / (1 - layer.p) if layer.training else x


def never(layer, x):
    return x


@pytest.mark.parametrize("drop", [lambda layer, x: layer.dropout(x), by_hand], ids=["nn.Dropout", "by_hand"])
def test_dropout_that_is_right(drop):
    answer = teach.check(attention(drop))
    assert answer.ok, answer


@pytest.mark.parametrize(
    ("drop", "id", "says"),
    [
        (not_scaled, "dropout_numbers", "multiplied by 1, not by 1 / (1 - p) = "),
        (scaled_by_what_is_lost, "dropout_numbers", "not by 1 / (1 - p) = "),
        (normalized_again, "dropout_numbers", words.say("dropout_uneven")),
        (drawn_once, "dropout_numbers", words.say("dropout_kept")),
        (drawn_for_one_item, "dropout_numbers", words.say("dropout_shared")),
        (never, "no_dropout", words.say("no_dropout")),
    ],
)
def test_what_dropout_does_in_training(drop, id, says):
    answer = teach.check(attention(drop))
    assert answer.mistakes == [id] and says in str(answer), answer


def test_dropout_twice():
    """Its factor, or its share of zeros, is not that of p."""
    answer = teach.check(attention(twice))
    assert answer.mistakes == ["dropout_numbers"], answer


def test_a_p_of_its_own():
    """The constructor's p is not the one that drops."""
    answer = teach.check(attention(lambda layer, x: layer.dropout(x), p=0.75))
    assert answer.mistakes == ["dropout_numbers"] and "multiplied by 4" in str(answer), answer


# ---- a task without masks --------------------------------------------------------------------------------------------


def without_masks(queries, keys, values):
    return book.dot_product(queries, keys, values, None)


def two_axes(Q, K, V):
    """Q (n, d), K (m, d), V (m, d_v)"""
    return book.softmax(Q @ K.T / np.sqrt(K.shape[1]), -1) @ V


def mistaken_mask(queries, keys, values, valid_lens=None):
    """Its mask is wrong, and the task has none."""
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    if valid_lens is not None:
        scores = scores + 1
    return book.softmax(scores, -1) @ values


@pytest.mark.parametrize("mine", [without_masks, two_axes, mistaken_mask, book.dot_product])
def test_no_mask_is_tried_where_the_task_has_none(mine):
    answer = teach.check(mine, "dot_product", mask="none")
    assert answer.ok and answer.mask == "none" and "the task has no masks, so none was tried" in str(answer)


def test_what_else_is_wrong_is_named_without_masks():
    answer = teach.check(
        lambda q, k, v: book.softmax(q @ k.swapaxes(1, 2) / q.shape[-1], -1) @ v, "dot_product", mask="none"
    )
    assert answer.mistakes == ["scale_d"] and not answer.ok


def test_without_the_word_the_mask_counts():
    assert not teach.check(mistaken_mask, "dot_product").ok
    for means in ("attend", "hide", "add"):
        assert teach.check(without_masks, "dot_product", mask=means).mistakes == ["no_mask"]
    with pytest.raises(ValueError, match='mask must be "attend", "hide", "add" or "none"'):
        teach.check(without_masks, "dot_product", mask="nothing")
