"""check: two arguments that hide keys in one call, heads that share keys, tables of rotations, kinds without names."""

import numpy as np
import pytest

import needs
from mha_c import teach
from mha_c.teach import book


def attended(queries, keys, values, seen):
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    return book.softmax(np.where(seen, scores, -1e9), -1) @ values


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


# ---- kinds -----------------------------------------------------------------------------------------------------------


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


def test_a_mask_of_one_item_that_has_no_default():
    def masked_attention(Q, K, V, mask):
        scores = Q @ K.T / np.sqrt(Q.shape[1]) + mask
        return book.softmax(scores, 1) @ V

    assert teach.check(masked_attention).ok


class Unnamed:
    def __init__(self, size):
        raise RuntimeError("no such size")

    def __call__(self, x):
        return x


def test_a_constructor_that_fails_where_nothing_tells_the_kind():
    answer = teach.check(Unnamed)
    assert answer.mistakes == ["raises"] and "RuntimeError: no such size" in str(answer)


def test_heads_in_lists_of_arrays():
    class Heads:
        def __init__(self, d_model, h):
            rng, self.d_k = np.random.default_rng(0), d_model // h
            self.W_Q, self.W_K, self.W_V = (
                [rng.standard_normal((d_model, self.d_k)) for _ in range(h)] for _ in range(3)
            )
            self.W_O = rng.standard_normal((d_model, d_model))

        def __call__(self, q, k, v):
            heads = zip(self.W_Q, self.W_K, self.W_V)
            return np.concatenate([attended(q @ a, k @ b, v @ c, True) for a, b, c in heads], axis=-1) @ self.W_O

    assert teach.check(Heads, "multi_head").mistakes == ["no_mask"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiled", [(), ("k", "v"), ("v",)], ids=["right", "both", "values"])
def test_heads_that_share_keys_in_a_layer(tiled, causal):
    torch = needs.module("torch")

    class Attention(torch.nn.Module):
        def __init__(self, d_model, n_heads, n_kv_heads):
            super().__init__()
            self.n_heads, self.n_kv_heads, self.d = n_heads, n_kv_heads, d_model // n_heads
            self.wq, self.wo = (torch.nn.Linear(d_model, d_model, bias=False) for _ in range(2))
            self.wk, self.wv = (torch.nn.Linear(d_model, n_kv_heads * self.d, bias=False) for _ in range(2))

        def forward(self, x):
            q, k, v = (f(x).view(*x.shape[:2], -1, self.d).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
            share = self.n_heads // self.n_kv_heads
            k, v = (
                x.repeat(1, share, 1, 1) if name in tiled else x.repeat_interleave(share, 1)
                for name, x in (("k", k), ("v", v))
            )
            scores = q @ k.transpose(2, 3) / self.d**0.5
            if causal:
                scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1) > 0, -1e9)
            return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    for mine in (Attention, Attention(8, 4, 2)):
        answer = teach.check(mine, "causal_multi_head" if causal else "multi_head")
        assert [each for each in answer.mistakes if each != "no_mask"] == (["groups_tiled"] if tiled else []), answer


# ---- what a constructor can choose -----------------------------------------------------------------------------------


def may_be_causal(torch, wrong=""):
    class Attention(torch.nn.Module):
        def __init__(self, d_model, num_heads, causal=False, bias=False):
            super().__init__()
            self.num_heads, self.causal = num_heads, causal
            self.wq, self.wk, self.wv, self.wo = (torch.nn.Linear(d_model, d_model, bias=bias) for _ in range(4))
            self.gain = torch.nn.Parameter(torch.ones(d_model)) if wrong == "gain" and bias else 1

        def forward(self, q, k, v, mask=None):
            heads = (f(x).view(*x.shape[:2], self.num_heads, -1) for f, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
            q, k, v = (x.transpose(1, 2) for x in heads)
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
            if mask is not None and not (wrong == "mask" and self.causal):
                scores = scores.masked_fill(~mask[:, None], -1e9)
            if self.causal and wrong != "ignored":
                past = torch.ones(scores.shape[2:]).tril(int(wrong == "next")) > 0
                scores = scores.masked_fill(~past, -1e9)
            return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2) * self.gain)

    return Attention


@pytest.mark.parametrize(
    ("wrong", "id"),
    [("next", "mask_off_by_one"), ("ignored", "mask_ignored"), ("mask", "together"), ("gain", "extra_parameter")],
)
def test_flags_of_a_constructor_are_tried(wrong, id):
    torch = needs.module("torch")
    assert teach.check(may_be_causal(torch), "multi_head").ok
    answer = teach.check(may_be_causal(torch, wrong), "multi_head")
    assert answer.mistakes[0] == id and not answer.ok
    assert ("this is so with causal=True" in str(answer)) == (wrong in ("next", "ignored"))


def test_a_causal_layer_that_need_not_be():
    class OfOneInput(may_be_causal(needs.module("torch"))):
        def forward(self, x):
            return super().forward(x, x, x)

    assert teach.check(OfOneInput, "causal_multi_head").ok and teach.check(OfOneInput, "multi_head").ok


def test_what_attends_to_itself_may_take_its_input_three_times():
    torch = needs.module("torch")

    def always(wrong=""):
        class Always(may_be_causal(torch, wrong)):
            def __init__(self, d_model, num_heads):
                super().__init__(d_model, num_heads, causal=True)

        return Always

    class Mixed(always()):
        def forward(self, q, k, v):
            return super().forward(q, (k + v) / 2, v)

    right = teach.check(may_be_causal(torch), "causal_multi_head")
    assert right.ok and "which of them a line reads was not tried" in str(right)
    assert teach.check(may_be_causal(torch, "next"), "causal_multi_head").mistakes == ["mask_off_by_one"]
    assert teach.check(always("next")).mistakes == ["mask_off_by_one"]  # whose kind nothing tells but its numbers
    assert teach.check(Mixed).mistakes == ["unknown"]  # with one input its numbers would be right


def test_what_a_constructor_hides_in_an_unknown_way_is_not_tried():
    class Window(may_be_causal(needs.module("torch"))):
        def __init__(self, d_model, num_heads, window_size=None):
            super().__init__(d_model, num_heads)

    answer = teach.check(Window, "multi_head")
    assert answer.mistakes == ["untried"] and "constructor's argument window_size does was not tried." in str(answer)
    assert teach.check(Window(8, 2), "multi_head").ok


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
