"""check beside the numbers: types, shapes, errors, changed inputs, what nobody knows, and what it takes."""

import numpy as np
import pytest

from mha_c import teach
from mha_c.teach import book

# ---- what is not a matter of numbers ---------------------------------------------------------------------------------


def test_another_type():
    answer = teach.check(lambda q, k, v, lens=None: book.dot_product(q, k, v, lens).astype(np.float32), "dot_product")
    assert answer.mistakes == ["dtype"]
    answer = teach.check(lambda X, lens: book.masked_softmax(X, lens).astype(np.longdouble), "masked_softmax")
    assert answer.mistakes == ["dtype"] and "Inputs of float64 give a result of" in str(answer)


def test_another_shape():
    def flat(q, k, v, lens=None):
        return book.dot_product(q, k, v, lens).squeeze(1) if q.shape[1] == 1 else book.dot_product(q, k, v, lens)

    def turned(queries, keys, values):
        return book.causal(queries, keys, values).swapaxes(1, 2)

    def four_axes(X, num_heads):
        batch, steps, hiddens = X.shape
        return X.reshape(batch, steps, num_heads, hiddens // num_heads).transpose(0, 2, 1, 3)

    answer = teach.check(flat, "dot_product")
    assert answer.mistakes == ["shape"]
    assert "gives shape (1, 2) where the book's dot_product gives (1, 1, 2)" in str(answer)
    assert "transposed by (0, 2, 1), the numbers are right" in str(teach.check(turned, "causal"))
    answer = teach.check(four_axes, "transpose_qkv")
    assert answer.mistakes == ["shape"] and "the numbers are right, in another shape" in str(answer)


def test_an_error_with_its_line():
    def no_transpose(queries, keys, values, valid_lens=None):
        scores = queries @ keys / np.sqrt(queries.shape[-1])
        return book.masked_softmax(scores, valid_lens) @ values

    def no_second_axis(X, valid_lens):
        if valid_lens is not None and valid_lens.ndim == 2:
            raise NotImplementedError("one length for each query")
        return book.masked_softmax(X, valid_lens)

    answer = teach.check(no_transpose, "dot_product")
    assert answer.mistakes == ["no_transpose"] and "It raises ValueError" in str(answer)
    assert "scores = queries @ keys / np.sqrt(queries.shape[-1])" in str(answer)
    answer = teach.check(no_second_axis, "masked_softmax")
    assert answer.mistakes == ["raises"]
    assert "raises an error for 1 of 6 probes; the others are right" in str(answer)
    assert "NotImplementedError: one length" in str(answer) and 'raise NotImplementedError("one length' in str(answer)
    assert "with X (2, 3, 3), valid_lens (2, 3)" in str(answer)
    answer = teach.check(lambda queries, keys, values, valid_lens: 1 / 0, "dot_product")
    assert answer.mistakes == ["raises"] and "ZeroDivisionError: division by zero" in str(answer)
    assert teach.laws(lambda queries, keys, values, valid_lens: 1 / 0, "dot_product").broken
    assert "it gives None: is a return missing?" in str(teach.check(lambda queries, keys, values: None, "causal"))


def test_a_known_mistake_and_an_error():
    def mine(queries, keys, values, valid_lens=None):
        if valid_lens is not None and valid_lens.ndim == 2:
            raise IndexError("too many axes")
        return book.masked_softmax(queries @ keys.swapaxes(1, 2), valid_lens) @ values

    answer = teach.check(mine, "dot_product")
    assert answer.mistakes == ["no_scale", "raises"] and "IndexError: too many axes" in str(answer)


def test_inputs_that_change():
    def scales_queries(queries, keys, values, valid_lens=None):
        queries /= np.sqrt(queries.shape[-1])
        return book.masked_softmax(queries @ keys.swapaxes(1, 2), valid_lens) @ values

    def shifts_scores(X, valid_lens):
        X -= X.max(axis=-1, keepdims=True)
        return book.masked_softmax(X, valid_lens)

    def adds(X):
        X += book.positional_encoding(X * 0)
        return X

    answer = teach.check(scales_queries, "dot_product")
    assert answer.mistakes == ["changes_inputs"] and "It writes into queries" in str(answer)
    assert teach.check(shifts_scores, "masked_softmax").mistakes == ["changes_inputs"]
    assert teach.check(adds, "positional_encoding").mistakes == ["changes_inputs"]


def test_the_books_own_change_is_a_note():
    def in_place(X, valid_lens):
        if valid_lens is not None:
            lens = valid_lens[:, None] if valid_lens.ndim == 1 else valid_lens
            X[np.broadcast_to(np.arange(X.shape[-1]) >= lens[..., None], X.shape)] = -1e6
        return book.softmax(X, axis=-1)

    answer = teach.check(in_place, "masked_softmax")
    assert answer.ok and "writes the mask into X, as the book's own does" in answer.notes[0]


def test_a_function_that_cannot_hide_a_key():
    without = teach.check(lambda q, k, v: book.dot_product(q, k, v), "dot_product")
    assert without.ok and without.mask is None and "no mask was tried" in str(without)
    answer = teach.check(lambda q, k, v: book.dot_product(q, k, v), "dot_product", mask="none")
    assert answer.ok and answer.mask == "none" and "the task has no masks" in str(answer)
    assert teach.check(book.dot_product, "dot_product", mask="none").mask == "none"
    answer = teach.check(lambda q, k, v: book.dot_product(q, k, v), "dot_product", mask="attend")
    assert answer.mistakes == ["no_mask"] and not answer.ok
    assert "It takes no valid_lens and no mask, so it hides no key; the book's is dot_product(queries, keys" in str(
        answer
    )
    answer = teach.check(lambda q, k, v: book.softmax(q @ k.swapaxes(1, 2), -1) @ v, "dot_product")
    assert answer.mistakes == ["no_scale"]


def test_dropout_that_always_acts():
    rng = np.random.default_rng(0)

    def dropped(queries, keys, values, valid_lens=None):
        weights = book.masked_softmax(queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1]), valid_lens)
        return weights * (rng.random(weights.shape) > 0.5) * 2 @ values

    assert teach.check(dropped, "dot_product").mistakes == ["dropout_in_eval"]


def sharper(queries, keys, values, valid_lens=None):
    return book.dot_product(3 * queries, keys, values, valid_lens)


def mixed(queries, keys, values, valid_lens=None):
    return book.dot_product(queries, keys, values, valid_lens) + queries.mean() * 0.1


def leaking(queries, keys, values, valid_lens=None):
    weights = book.masked_softmax(queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1]), valid_lens)
    return 0.9 * weights @ values + 0.1 * values.mean(axis=1, keepdims=True)


def test_nobody_knows_it():
    answer = teach.check(sharper, "dot_product")
    assert answer.mistakes == ["one_line"] and "(3 * queries" in answer.lines[0].text
    assert answer.lines[0].should_be == "return book.dot_product(1 * queries, keys, values, valid_lens)"
    answer = teach.check(mixed, "dot_product")
    assert answer.mistakes == ["one_line"] and "+" not in answer.lines[0].should_be
    answer = teach.check(leaking, "dot_product")
    assert answer.mistakes == ["unknown"] and "lengths_hide: what lengths hide changes nothing" in str(answer)


def test_each_law_can_be_broken():
    broken = {
        "masked_softmax": [lambda X, lens: X * 0.1, lambda X, lens: book.softmax(X + np.arange(X.shape[2]), -1),
                           lambda X, lens: book.softmax(X, 1), lambda X, lens: book.softmax(X, 0)],
        "dot_product": [mixed, leaking],
        "multi_head": [lambda queries, keys, values, valid_lens, W_q, W_k, W_v, W_o, num_heads: values[:, :1] @ W_v + 0
                       * queries + keys.sum()],
        "causal": [book.dot_product],
        "positional_encoding": [lambda X: X + X, lambda X: X + np.arange(X.shape[1])[:, None] / X.shape[1]],
        "transpose_qkv": [lambda X, num_heads: np.zeros((len(X) * num_heads, X.shape[1], X.shape[2] // num_heads)),
                          lambda X, num_heads: book.transpose_qkv(X[::-1], num_heads)],
        "transpose_output": [lambda X, num_heads: 0 * book.transpose_output(X, num_heads)],
    }  # fmt: skip
    met = set()
    for kind, all_of in broken.items():
        for mine in all_of:
            laws = teach.laws(mine, kind)
            with pytest.raises(AssertionError, match="BROKEN"):
                laws.assert_all()
            met |= set(laws.broken)
    assert met == {"rows_sum_to_1", "values_alike", "lengths_hide", "no_future", "items_apart", "keys_permuted",
                   "query_alone", "prefix", "same_addend", "circle", "each_once"}  # fmt: skip


# ---- what it takes ---------------------------------------------------------------------------------------------------


class NumPyAdditive:
    """Weights by name, arrays in either order."""

    def __init__(self, num_hiddens, turned=False):
        rng = np.random.default_rng(0)
        self.W_q, self.W_k = rng.random((3, num_hiddens)), rng.random((2, num_hiddens))
        self.w_v = rng.random(num_hiddens)
        self.turned = turned
        if turned:
            self.W_q, self.W_k, self.w_v = self.W_q.T, self.W_k.T, self.w_v[None]

    def __call__(self, queries, keys, values, valid_lens=None):
        weights = (self.W_q.T, self.W_k.T, self.w_v[0]) if self.turned else (self.W_q, self.W_k, self.w_v)
        return book.additive(queries, keys, values, valid_lens, *weights)


@pytest.mark.parametrize("turned", [False, True])
def test_a_layer_of_arrays(turned):
    assert teach.check(NumPyAdditive(5, turned), "additive").ok
    assert teach.laws(NumPyAdditive(5, turned), "additive").ok


def test_the_page_marks_what_differs():
    answer = teach.check(lambda X: X + 0.9 * book.positional_encoding(0 * X), "positional_encoding")
    page = answer._repr_html_()
    assert page.count("<table") == 3 and page.count("font-weight: 600") > 2 and "<script" not in page
    known = teach.check(eval("lambda X, valid_lens: book.softmax(X, -1)", globals()), "masked_softmax")  # no text
    assert "pre-wrap" in known._repr_html_()  # a phone shows the ends of the lines, too
    assert "<span" in known._repr_html_() and "# nothing" in known._repr_html_()
    assert teach.check(book.dot_product)._repr_html_().count("<p") == 1  # its name tells the kind: nothing to note


def test_as_many_queries_as_keys_may_be_asked_for():
    """An assert says so: this is self-attention with three arguments.  An error of the numbers alone is a mistake."""

    def mine(queries, keys, values):
        assert queries.shape == keys.shape == values.shape
        return book.dot_product(queries, keys, values)

    def another(queries, keys, values):
        assert queries.shape == keys.shape
        return book.dot_product(queries, keys, values) * np.sqrt(queries.shape[-1])

    def fails(queries, keys, values):
        scores = (queries + 0 * keys) @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
        return book.softmax(scores, -1) @ values

    answer = teach.check(mine, "dot_product")
    assert answer.ok and "its own check refuses" in str(answer)
    assert teach.check(another, "dot_product").ok is False
    assert "raises" in teach.check(fails, "dot_product").mistakes
