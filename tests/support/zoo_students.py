"""Students' attention: each kind in several styles, none of them of the book's text, with its mistakes by name."""

import numpy as np

from zoo import style


def but(ask, own):
    """`ask` for pieces that must not make one of the mistakes, which their caller makes in its own way."""
    return lambda name: name != own and ask(name)


MASKS = "lens_tiled mask_off_by_one mask_inverted mask_after_softmax no_mask mask_zero softmax_axis no_softmax "
SCALES = "no_scale scale_d scale_inverted swapped_keys_values scale_keys "

# ---- NumPy, with axes written out ----------------------------------------------------------------------------------


def numpy_mask(ask, scores, valid_len, tiled=np.tile):
    if valid_len is None:
        return None
    batch, queries, keys = scores.shape
    if valid_len.ndim == 1:
        lens = tiled(valid_len, queries) if ask("lens_tiled") else np.repeat(valid_len, queries)
    else:
        lens = valid_len.flatten()
    lens = lens.reshape(batch, queries)[..., np.newaxis]
    positions = np.arange(keys)[np.newaxis, np.newaxis]
    hidden = positions > lens if ask("mask_off_by_one") else positions >= lens
    return ~hidden if ask("mask_inverted") else hidden


def numpy_weights(ask, scores, hidden):
    late, off, zero = ask("mask_after_softmax"), ask("no_mask"), ask("mask_zero")
    axis = 1 if ask("softmax_axis") else -1
    if hidden is not None and not late and not off:
        scores = np.where(hidden, 0.0 if zero else -1e9, scores)
    if ask("no_softmax"):
        return scores
    exps = np.exp(scores - np.max(scores, axis=axis, keepdims=True))
    weights = exps / np.sum(exps, axis=axis, keepdims=True)
    return weights * ~hidden if late and hidden is not None else weights


@style("masked_softmax", MASKS)
def numpy_masked_softmax(ask):
    def softmax_with_lengths(scores, lens=None):
        return numpy_weights(ask, scores, numpy_mask(ask, scores, lens))

    return softmax_with_lengths


def scaled(ask, product, size, keys, root):
    if ask("no_scale"):
        return product
    if ask("scale_d"):
        return product / size
    if ask("scale_keys"):
        return product / root(keys)
    return product * root(size) if ask("scale_inverted") else product / root(size)


@style("dot_product", MASKS + SCALES)
def numpy_dot_product(ask):
    def attention(q, k, v, valid_len=None):
        if ask("swapped_keys_values"):
            k, v = v, k
        scores = scaled(ask, np.einsum("bqd,bkd->bqk", q, k), q.shape[2], k.shape[1], np.sqrt)
        weights = numpy_weights(ask, scores, numpy_mask(ask, scores, valid_len))
        return np.einsum("bqk,bkv->bqv", weights, v), weights

    return attention


# ---- one number after another --------------------------------------------------------------------------------------


LOOP_MASKS = "mask_off_by_one mask_inverted mask_after_softmax no_mask mask_zero no_softmax "


def loop_row(ask, row, length):
    """The weights of one query, from the list of its scores."""
    seen = [j < length for j in range(len(row))]
    if ask("mask_off_by_one"):
        seen = [j < length - 1 for j in range(len(row))] if length < len(row) + 1 and length != INFINITE else seen
    if ask("mask_inverted") and length != INFINITE:
        seen = [not s for s in seen]
    if ask("no_mask"):
        seen = [True] * len(row)
    if not ask("mask_after_softmax"):
        row = [x if s else (0.0 if ask("mask_zero") else -1e6) for x, s in zip(row, seen)]
    if ask("no_softmax"):
        return row
    exps = [np.exp(x - max(row)) for x in row]
    weights = [e / sum(exps) for e in exps]
    return [w if s else 0.0 for w, s in zip(weights, seen)] if ask("mask_after_softmax") else weights


INFINITE = float("inf")


def loop_length(valid_lens, b, i):
    if valid_lens is None:
        return INFINITE
    return valid_lens[b] if valid_lens.ndim == 1 else valid_lens[b, i]


@style("masked_softmax", LOOP_MASKS)
def loop_masked_softmax(ask):
    def my_softmax(X, valid_lens):
        return [[loop_row(ask, list(row), loop_length(valid_lens, b, i)) for i, row in enumerate(item)]
                for b, item in enumerate(X)]  # fmt: skip

    return my_softmax


@style("dot_product", LOOP_MASKS + SCALES)
def loop_dot_product(ask):
    def attend(queries, keys, values, valid_lens=None):
        if ask("swapped_keys_values"):
            keys, values = values, keys
        batch, n, d = queries.shape
        out = np.zeros((batch, n, values.shape[-1]))
        for b in range(batch):
            for i in range(n):
                row = [scaled(ask, sum(queries[b, i, c] * key[c] for c in range(d)), d, len(keys[b]), lambda x: x**0.5)
                       for key in keys[b]]  # fmt: skip
                for weight, value in zip(loop_row(ask, row, loop_length(valid_lens, b, i)), values[b]):
                    out[b, i] += weight * value
        return out

    return attend


# ---- additive attention --------------------------------------------------------------------------------------------

ADDITIVE = "no_tanh product_for_sum scaled no_w_v swapped_projections swapped_keys_values "


@style("additive", ADDITIVE + MASKS)
def numpy_additive(ask):
    def bahdanau(query, key, value, w_v, W_k, W_q, lens=None):  # weights (outputs, inputs), w_v (1, hiddens)
        if ask("swapped_keys_values"):
            key, value = value, key
        W_q, W_k = (W_k, W_q) if ask("swapped_projections") else (W_q, W_k)
        q, k = np.einsum("bqi,hi->bqh", query, W_q)[:, :, None], np.einsum("bki,hi->bkh", key, W_k)[:, None]
        joined = q * k if ask("product_for_sum") else q + k
        features = joined if ask("no_tanh") else np.tanh(joined)
        scores = features.sum(-1) if ask("no_w_v") else (features @ w_v.T)[..., 0]
        if ask("scaled"):
            scores = scores / np.sqrt(features.shape[-1])
        weights = numpy_weights(ask, scores, numpy_mask(ask, scores, lens))
        return weights @ value, weights

    return bahdanau


@style("additive", ADDITIVE + "no_mask")
def loop_additive(ask):
    def score(q, k, W_q, W_k, w_v):
        h = len(w_v)
        total = 0.0
        for a in range(h):
            left = sum(x * W_q[c, a] for c, x in enumerate(q))
            right = sum(x * W_k[c, a] for c, x in enumerate(k))
            z = left * right if ask("product_for_sum") else left + right
            total += (z if ask("no_tanh") else np.tanh(z)) * (1 if ask("no_w_v") else w_v[a])
        return total / np.sqrt(h) if ask("scaled") else total

    def additive_attention(queries, keys, values, valid_lens, W_q, W_k, w_v):
        if ask("swapped_keys_values"):
            keys, values = values, keys
        W_q, W_k = (W_k, W_q) if ask("swapped_projections") else (W_q, W_k)
        rows = [[[score(q, k, W_q, W_k, w_v) for k in keys[b]] for q in queries[b]] for b in range(len(queries))]
        weights = [[loop_row(ask, row, loop_length(valid_lens, b, i)) for i, row in enumerate(item)]
                   for b, item in enumerate(rows)]  # fmt: skip
        return np.array(weights) @ values

    return additive_attention


# ---- heads ---------------------------------------------------------------------------------------------------------


SPLITS = "heads_without_transpose heads_interleaved heads_joined_wrong "
JOINS = "heads_joined_wrong heads_interleaved "


@style("transpose_qkv", SPLITS)
def numpy_transpose_qkv(ask):
    def split_heads(x, heads):
        batch, steps, hiddens = x.shape
        if ask("heads_without_transpose"):
            return x.reshape(batch * heads, steps, hiddens // heads)
        size = hiddens // heads
        parts = [x[:, :, h::heads] if ask("heads_interleaved") else x[:, :, h * size : (h + 1) * size]
                 for h in range(heads)]  # fmt: skip
        if ask("heads_joined_wrong"):
            return np.concatenate(parts)
        return np.stack(parts, axis=1).reshape(-1, steps, hiddens // heads)

    return split_heads


@style("transpose_qkv", SPLITS)
def einsum_transpose_qkv(ask):
    def transpose_qkv(X, num_heads):
        b, t, h = X.shape
        if ask("heads_without_transpose"):
            return X.reshape(b, num_heads, t, -1).reshape(-1, t, h // num_heads)
        if ask("heads_interleaved"):
            return np.einsum("btdh->bhtd", X.reshape(b, t, h // num_heads, num_heads)).reshape(b * num_heads, t, -1)
        order = "bthd->hbtd" if ask("heads_joined_wrong") else "bthd->bhtd"
        four = np.einsum(order, X.reshape(b, t, num_heads, h // num_heads))
        return four.reshape(b * num_heads, t, -1)

    return transpose_qkv


@style("transpose_output", JOINS)
def numpy_transpose_output(ask):
    def merge_heads(x, n_heads):
        rows, steps, d = x.shape
        batch = rows // n_heads
        if ask("heads_joined_wrong"):
            return x.reshape(batch, steps, n_heads * d)
        parts = [x[h::n_heads] for h in range(n_heads)]
        if ask("heads_interleaved"):
            return np.stack(parts, axis=-1).reshape(batch, steps, -1)
        return np.concatenate(parts, axis=-1)

    return merge_heads


@style("transpose_output", JOINS)
def einsum_transpose_output(ask):
    def transpose_output(X, num_heads):
        four = X.reshape(-1, num_heads, *X.shape[1:])
        b, h, t, d = four.shape
        if ask("heads_joined_wrong"):
            return four.reshape(b, t, h * d)
        return np.einsum("bhtd->btdh" if ask("heads_interleaved") else "bhtd->bthd", four).reshape(b, t, h * d)

    return transpose_output


HEADS = """heads_without_transpose heads_interleaved no_output_projection scale_num_hiddens no_scale
swapped_projections lens_tiled no_mask mask_inverted softmax_axis swapped_keys_values mask_after_softmax"""


def head_parts(ask, x, heads):
    """A list of (batch, steps, head size), one for each head."""
    if ask("heads_without_transpose"):
        batch, steps, hiddens = x.shape
        return list(x.reshape(batch, heads, steps, hiddens // heads).swapaxes(0, 1))
    size = x.shape[-1] // heads
    return [x[..., h::heads] if ask("heads_interleaved") else x[..., h * size : (h + 1) * size] for h in range(heads)]


def multi_head_attention(ask, queries, keys, values, lens, weights, heads):
    """One head after the other; weights are (inputs, outputs)."""
    W_q, W_k, W_v, W_o = weights
    if ask("swapped_keys_values"):
        keys, values = values, keys
    if ask("swapped_projections"):
        W_q, W_k = W_k, W_q
    parts = [head_parts(ask, x @ W, heads) for x, W in ((queries, W_q), (keys, W_k), (values, W_v))]
    scores = []
    for q, k, _ in zip(*parts):
        size = queries @ W_q if ask("scale_num_hiddens") else q
        scale = 1 if ask("no_scale") else np.sqrt(size.shape[-1])
        scores.append(q @ k.swapaxes(-1, -2) / scale)
    out, quiet = [], but(ask, "lens_tiled")
    for h, (score, v) in enumerate(zip(scores, parts[2])):
        used = lens
        if ask("lens_tiled") and lens is not None:  # row b * heads + h of d2l's folded batch gets a length of the tiled
            used = np.concatenate([lens] * heads)[np.arange(len(queries)) * heads + h]
        out.append(numpy_weights(quiet, score, numpy_mask(quiet, score, used)) @ v)
    if ask("heads_without_transpose"):
        joined = np.stack(out, axis=1).reshape(*queries.shape[:2], -1)
    else:
        joined = (
            np.stack(out, axis=-1).reshape(*out[0].shape[:2], -1)
            if ask("heads_interleaved")
            else np.concatenate(out, -1)
        )
    return joined if ask("no_output_projection") else joined @ W_o


@style("multi_head", HEADS)
def numpy_multi_head(ask):
    def mha(q, k, v, lens, n_heads, W_q, W_k, W_v, W_o):
        return multi_head_attention(ask, q, k, v, lens, (W_q, W_k, W_v, W_o), n_heads)

    return mha


@style("multi_head", HEADS)
def class_multi_head(ask):
    class MultiHead:
        """Plain arrays as weights, in the order of torch's Linear."""

        def __init__(self, num_hiddens, num_heads, dropout=0.0):
            self.num_heads = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = np.random.default_rng(0).standard_normal(
                (4, num_hiddens, num_hiddens)
            )

        def __call__(self, queries, keys, values, valid_lens=None):
            weights = [W.T for W in (self.W_q, self.W_k, self.W_v, self.W_o)]
            return multi_head_attention(ask, queries, keys, values, valid_lens, weights, self.num_heads)

    return MultiHead(6, 3)


# ---- positions, and the future -------------------------------------------------------------------------------------

POSITIONS = "sin_cos_swapped wrong_exponent position_off_by_one "


@style("positional_encoding", POSITIONS)
def numpy_positional_encoding(ask):
    def add_positions(x):
        first = 1 if ask("position_off_by_one") else 0
        steps = np.arange(first, first + x.shape[1], dtype=np.float64)
        pairs = np.arange(x.shape[2] // 2)
        exponent = pairs / x.shape[2] if ask("wrong_exponent") else 2 * pairs / x.shape[2]
        angles = np.outer(steps, np.exp(-np.log(10000.0) * exponent))
        pair = (np.cos(angles), np.sin(angles)) if ask("sin_cos_swapped") else (np.sin(angles), np.cos(angles))
        return x + np.stack(pair, axis=-1).reshape(x.shape[1:])

    return add_positions


@style("positional_encoding", POSITIONS)
def loop_positional_encoding(ask):
    def position_encoding(X):
        Y = np.array(X)
        for i in range(X.shape[1]):
            for j in range(X.shape[2]):
                even = j % 2 == 0
                power = j if ask("wrong_exponent") else j - j % 2  # 2j for the pair that column 2j + 1 belongs to
                angle = (i + ask("position_off_by_one")) / 10000 ** (power / X.shape[2])
                Y[:, i, j] += np.sin(angle) if even != ask("sin_cos_swapped") else np.cos(angle)
        return Y

    return position_encoding


LOOP_FUTURE = """sees_future causal_corner mask_off_by_one mask_after_softmax mask_zero no_scale scale_d scale_inverted
swapped_keys_values no_softmax scale_keys """
FUTURE = LOOP_FUTURE + "softmax_axis"


@style("causal", FUTURE)
def numpy_causal(ask):
    def causal_attention(q, k, v):
        if ask("swapped_keys_values"):
            k, v = v, k
        scores = scaled(ask, q @ np.transpose(k, (0, 2, 1)), q.shape[-1], k.shape[1], np.sqrt)
        ones = np.ones(scores.shape[1:])
        future = np.triu(ones, k=0 if ask("mask_off_by_one") else 1) > 0
        if ask("causal_corner"):
            future = np.tril(ones, k=-1) > 0
        other = {"no_mask": "sees_future"}
        return numpy_weights(lambda name: ask(other.get(name, name)), scores, np.broadcast_to(future, scores.shape)) @ v

    return causal_attention


@style("causal", LOOP_FUTURE)
def loop_causal(ask):
    def masked_self_attention(queries, keys, values):
        if ask("swapped_keys_values"):
            keys, values = values, keys
        out = np.zeros((*queries.shape[:2], values.shape[-1]))
        quiet = but(ask, "mask_off_by_one")
        for b, i in np.ndindex(*queries.shape[:2]):
            d, n = queries.shape[-1], keys.shape[1]
            row = [scaled(ask, queries[b, i] @ key, d, n, lambda x: x**0.5) for key in keys[b]]
            length = n if ask("sees_future") else i + 2 if ask("mask_off_by_one") else i + 1
            if ask("causal_corner"):  # from the end
                weights = loop_row(quiet, row[::-1], n - i)[::-1]
            else:
                weights = loop_row(quiet, row, length)
            out[b, i] = np.array(weights) @ values[b]
        return out

    return masked_self_attention
