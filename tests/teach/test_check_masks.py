"""check: masks and lengths: their forms, the numbers that they hide with, flags, and two of them in one call."""

import numpy as np
import pytest

import needs
from checks import attended, softmax
from mha_c import teach
from mha_c.teach import book

# ---- lengths ---------------------------------------------------------------------------------------------------------


def lengths_of_items(divisor):
    def mine(q, k, v, valid_lens=None):
        seen = True if valid_lens is None else np.arange(k.shape[1]) < valid_lens[:, None, None]
        return attended(q, k, v, seen, divisor=q.shape[-1] if divisor == "d" else None)

    return mine


def lengths_in_a_loop(divisor, raises_for_one=False):
    def mine(q, k, v, valid_lens=None):
        made = []
        for i in range(len(q)):
            n = k.shape[1] if valid_lens is None else int(valid_lens[i])
            if raises_for_one and valid_lens is not None:
                raise ValueError("no lengths")
            made.append(softmax(q[i] @ k[i, :n].T / q.shape[-1] ** divisor) @ v[i, :n])
        return np.stack(made)

    return mine


def test_lengths_of_items_count_where_those_of_queries_raise():
    answer = teach.check(lengths_in_a_loop(0.5), "dot_product")
    assert answer.ok and "its valid_lens is one length for each item, (batch,)" in answer.notes[0], answer
    assert teach.laws(lengths_in_a_loop(0.5), "dot_product").ok
    wrong = teach.check(lengths_in_a_loop(1), "dot_product")
    assert wrong.mistakes == ["scale_d"] and wrong.notes == answer.notes, wrong
    assert teach.check(lengths_in_a_loop(0.5, raises_for_one=True), "dot_product").mistakes == ["raises"]


def test_the_mistake_behind_a_form_that_is_not_taken_comes_first():
    def of_first_query(divisor):
        def mine(q, k, v, valid_lens=None):
            rows = 1 if np.ndim(valid_lens) == 2 else None
            return lengths_of_items(divisor)(q[:, :rows], k, v, valid_lens[:, 0] if rows else valid_lens)

        return mine

    answer = teach.check(of_first_query("d"), "dot_product")
    assert answer.mistakes == ["scale_d", "shape"]
    assert "Its form where valid_lens has a length for each query, as (batch, queries) is not taken" in str(answer)
    answer = teach.check(of_first_query("root"), "dot_product")
    assert answer.mistakes == ["shape"] and "and nowhere else" in str(answer)


def test_lengths_of_items_that_give_those_of_queries_one_more_axis():
    answer = teach.check(lengths_of_items("root"), "dot_product")
    assert answer.ok and "its valid_lens is one length for each item, (batch,)" in answer.notes[0], answer
    wrong = teach.check(lengths_of_items("d"), "dot_product")
    assert wrong.mistakes == ["scale_d"] and wrong.notes == answer.notes, wrong


def test_a_mistake_only_where_lengths_are_those_of_items():
    def mine(q, k, v, valid_lens=None):
        if valid_lens is None:
            return attended(q, k, v)
        lens = np.tile(valid_lens, q.shape[1]).reshape(len(q), -1) if valid_lens.ndim == 1 else valid_lens
        return attended(q, k, v, np.arange(k.shape[1]) < lens[..., None])

    assert teach.check(mine, "dot_product").mistakes == ["lens_tiled"]


# ---- the number that hides -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [-0.5, -1, -2.5, -5, -7.5, -10])
def test_masks_may_hide_with_any_small_number(fill):
    def mine(q, k, v, mask=None):
        return attended(q, k, v, True if mask is None else mask, fill)

    answer = teach.check(mine, "dot_product")
    assert answer.mistakes == ["mask_small"] and f"masked scores become {fill:g}, not -1e6" in str(answer)


def masked_with(factor, times=1.0):
    def scaled_dot_product(q, k, v, mask=None):
        logits = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) * times
        return softmax(logits if mask is None else logits + mask * factor) @ v

    return scaled_dot_product


@pytest.mark.parametrize(("factor", "id"), [(-2.0, "mask_small"), (-1e-9, "mask_ignored"), (-1.0, "mask_inverted")])
def test_a_factor_tells_a_mask_of_ones_from_one_that_is_added(factor, id):
    """-1 times a mask may be either: an added one that is subtracted is likelier."""
    assert teach.check(masked_with(factor), "dot_product").mistakes == [id]
    assert teach.check(masked_with(-1e9), "dot_product").mask == "hide"


def test_a_padding_mask_that_is_added_beside_a_triangle():
    def causal_attention(q, k, v, attention_mask=None, sign=1):
        s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        s = np.where(np.tri(*s.shape[1:], dtype=bool), s, -np.inf)
        return softmax(s if attention_mask is None else s + sign * attention_mask) @ v

    def subtracted(q, k, v, attention_mask=None):
        return causal_attention(q, k, v, attention_mask, -1)

    def right(q, k, v, attention_mask=None):
        return causal_attention(q, k, v, attention_mask)

    answer = teach.check(right, "causal")
    assert answer.ok and answer.mask == "add"
    assert not teach.check(subtracted, "causal").ok


def test_a_mask_of_one_item_that_has_no_default():
    def masked_attention(Q, K, V, mask):
        scores = Q @ K.T / np.sqrt(Q.shape[1]) + mask
        return book.softmax(scores, 1) @ V

    assert teach.check(masked_attention).ok


# ---- two in one call -------------------------------------------------------------------------------------------------


def with_lengths_and_mask(join):
    def mine(queries, keys, values, valid_lens=None, mask=None):
        seen = np.ones((len(queries), queries.shape[1], keys.shape[1]), bool)
        if valid_lens is not None:
            seen = seen & (np.arange(keys.shape[1]) < valid_lens.reshape(len(queries), -1, 1))
        return attended(queries, keys, values, seen if mask is None else join(seen, mask, valid_lens))

    return mine


def test_both_arguments_hide_what_either_hides():
    answer = teach.check(with_lengths_and_mask(lambda seen, mask, lens: seen & mask), "dot_product")
    assert answer.ok and answer.mistakes == []


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (lambda seen, mask, lens: mask, "not in one call: there only mask has an effect."),
        (
            lambda seen, mask, lens: mask if lens is None else seen,
            "not in one call: there only valid_lens has an effect.",
        ),
        (lambda seen, mask, lens: mask if lens is None else seen | mask, "a key is hidden only if both hide it."),
        (lambda seen, mask, lens: mask if lens is None else (seen & mask)[..., ::-1], "not in one call.  A key"),
    ],
    ids=["mask", "lengths", "either", "neither"],
)
def test_a_mistake_of_both_arguments_alone(join, why):
    answer = teach.check(with_lengths_and_mask(join), "dot_product")
    assert answer.mistakes == ["together"] and not answer.ok
    assert why in str(answer) and "expected = " in str(answer)
    assert "seen with valid_lens alone = [[[1 1 " in str(answer) and "seen with mask alone = [[[1 " in str(answer)


def test_a_call_with_both_may_be_refused_but_not_fail():
    def refused(seen, mask, lens):
        if lens is not None:
            raise ValueError("give valid_lens or mask")
        return mask

    answer = teach.check(with_lengths_and_mask(refused), "dot_product")
    assert answer.ok and "it refuses valid_lens and mask in one call" in str(answer)
    failing = with_lengths_and_mask(lambda seen, mask, lens: mask if lens is None else seen @ mask[:, :1])
    answer = teach.check(failing, "dot_product")
    assert answer.mistakes == ["together"] and "in one call it raises ValueError" in str(answer)


FIRST = """
import numpy as np


def mha(queries, keys, values, W_q, W_k, W_v, W_o, num_heads, mask=None):
    Q, K, V = queries @ W_q, keys @ W_k, values @ W_v
    size = Q.shape[2] // num_heads
    out = np.zeros(Q.shape)
    for b, i, h in np.ndindex(*Q.shape[:2], num_heads):
        own = slice(h * size, (h + 1) * size)
        scores = K[b, :, own] @ Q[b, i, own] / np.sqrt(size)
        if mask is not None:
            scores = np.array([s if mask[0, i, j] else -1e9 for j, s in enumerate(scores)])
        e = np.exp(scores - scores.max())
        out[b, i, own] = e / e.sum() @ V[b, :, own]
    return out @ W_o
"""


def of_masked_arrays(X, valid_lens=None):
    if valid_lens is None:
        return softmax(X)
    lens = np.asarray(valid_lens).reshape(len(X), -1, 1)
    A = np.ma.array(X, mask=np.broadcast_to(np.arange(X.shape[2]) >= lens, X.shape))
    A = np.ma.exp(A - A.max(axis=-1, keepdims=True))
    return (A / A.sum(axis=1, keepdims=True)).filled(0.0)


def test_a_mask_of_the_first_item_that_hides_for_all(judged):
    """Given a mask for all items alone it would be right: this counts only where the mask of each item raises."""
    answer = judged(FIRST, "mha", kind="multi_head").judged[0].answer
    assert answer.ok is False and answer.lines[0].should_be.count("mask[b, i, j]") == 1, answer
    assert judged(FIRST.replace("mask[0,", "mask[b,"), "mha", kind="multi_head").judged[0].answer.ok


def test_what_takes_arrays_is_not_told_that_tensors_fail():
    """With torch loaded it is tried on tensors, too, whose methods have other names."""
    needs.module("torch")
    answer = teach.check(of_masked_arrays, "masked_softmax")
    assert answer.ok is False and "Tensor" not in str(answer), answer


# ---- a flag ----------------------------------------------------------------------------------------------------------


def with_a_flag(joined):
    def mine(queries, keys, values, mask=None, is_causal=False):
        past = np.tri(queries.shape[1], keys.shape[1], dtype=bool)
        seen = True if mask is None else mask
        return attended(queries, keys, values, joined(past, seen) if is_causal else seen)

    return mine


def test_a_mask_beside_a_flag():
    assert not teach.check(with_a_flag(lambda past, seen: past & seen), "dot_product").notes[2:]
    answer = teach.check(with_a_flag(lambda past, seen: past), "dot_product")
    assert answer.mistakes == ["together"] and "there only is_causal has an effect" in str(answer)
    answer = teach.check(with_a_flag(lambda past, seen: past if seen is True else past | seen), "dot_product")
    assert answer.mistakes == ["together"]


def test_in_torchs_own_layer_a_flag_is_no_more_than_a_hint():
    torch = needs.module("torch")
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention")
    answer = teach.check(torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True), "multi_head")
    assert answer.ok and "in one call with attn_mask and is_causal, only " in str(answer)


def test_what_a_flag_does_not_do_is_not_said_of_a_mask():
    answer = teach.check(with_a_flag(lambda past, seen: seen), "dot_product")
    assert answer.mistakes == ["sees_future"] and "mask =" not in str(answer)


def test_a_mask_by_a_name_that_says_nothing():
    def mine(q, k, v, erlaubt=None):
        return attended(q, k, v, True if erlaubt is None else erlaubt == 0, divisor=q.shape[-2] ** 0.5)

    answer = teach.check(mine, "dot_product", mask="hide")
    assert answer.mistakes == ["scale_queries"] and "valid_lens" not in str(answer).partition("\n")[0]

    def biased(query, key, value, bias=None):
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        return softmax(scores if bias is None else scores + bias) @ value

    assert teach.check(biased, "dot_product", mask="add").ok
    assert "in bias, the mask is added" in str(teach.check(biased, "dot_product"))


def test_lengths_by_a_name_that_says_nothing_are_no_causal_mask(judged):
    text = (
        "import numpy as np\n"
        "def attention(requetes, cles, valeurs, longueurs=None):\n"
        "    scores = np.einsum('bqd,bkd->bqk', requetes, cles) / np.sqrt(cles.shape[-1])\n"
        "    if longueurs is not None:\n"
        "        scores = np.where((np.arange(cles.shape[1]) < longueurs[:, None])[:, None], scores, -1e6)\n"
        "    poids = np.exp(scores - scores.max(-1, keepdims=True))\n"
        "    return poids / poids.sum(-1, keepdims=True) @ valeurs\n"
    )
    assert judged(text).ok
    answer = judged(text.replace("einsum('bqd,bkd->bqk', requetes, cles)", "tanh(requetes @ cles.swapaxes(1, 2))"))
    assert answer.ok is False and "sees_future" not in answer.judged[0].answer.mistakes


def test_who_writes_more_than_the_mask_is_not_told_that_the_book_does():
    def mine(X, valid_lens=None):
        X -= X.max(axis=-1, keepdims=True)
        return book.masked_softmax(X, valid_lens)

    answer = teach.check(mine, "masked_softmax")
    assert answer.mistakes == ["changes_inputs"] and "as the book's own does" not in str(answer)
