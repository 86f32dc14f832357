"""check: two hundred right ones of each kind are right, whatever their types, shapes and orders of operations."""

import functools
import inspect
import itertools
import math

import numpy as np
import pytest

import needs
from mha_c import teach
from mha_c.teach import book


def product(q, k, way):
    if way == "einsum":
        return np.einsum("bqd,bkd->bqk", q, k)
    if way == "sum":
        return (q[:, :, None, :] * k[:, None, :, :]).sum(axis=-1)
    if way == "dot":
        return np.stack([np.dot(a, b.T) for a, b in zip(q, k)])
    return np.matmul(q, np.moveaxis(k, 1, 2))


def scaled_product(q, k, order, way):
    root = q.shape[-1] ** 0.5
    if order == "before":
        return product(q / root, k, way)
    if order == "both":
        return product(q / root**0.5, k / root**0.5, way)
    return product(q, k, way) * root**-1 if order == "times" else product(q, k, way) / np.sqrt(q.shape[-1])


def softmax(s, way):
    if way == "plain":
        return np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    if way == "logs":
        top = s.max(-1, keepdims=True)
        return np.exp(s - top - np.log(np.exp(s - top).sum(-1, keepdims=True)))
    if way == "shift":
        e = np.exp(s - s.max(-1)[..., None])
        return e / np.einsum("bqk->bq", e)[..., None]
    e = np.exp2((s - s.max(-1, keepdims=True)) * np.log2(np.e))
    return np.divide(e, e.sum(axis=2, keepdims=True))


def masked(s, lens, way):
    if lens is None:
        return s
    rows = np.repeat(lens, s.shape[1]).reshape(s.shape[:2]) if lens.ndim == 1 else lens
    hidden = np.arange(s.shape[2])[None, None] >= rows[:, :, None]
    if way == "add":
        return s + hidden * -1e9
    if way == "infinite":
        return np.where(hidden, -np.inf, s)
    s = s.copy()
    if way == "loop":
        for b, i in np.ndindex(*s.shape[:2]):
            s[b, i, rows[b, i] :] = -1e6
        return s
    np.putmask(s, hidden, -1e6)
    return s


# ---- each kind, from its parts ---------------------------------------------------------------------------------------

PRODUCTS, ORDERS = ["einsum", "sum", "dot", "matmul"], ["before", "both", "times", "after"]
SOFTMAXES, MASKS = ["plain", "logs", "shift", "base2"], ["add", "infinite", "loop", "putmask"]
SPLITS = ["reshape", "slices", "split", "loop", "einsum", "moveaxis"]


def attend(way, q, k, v, lens):
    weights = softmax(masked(scaled_product(q, k, way["order"], way["product"]), lens, way["mask"]), way["softmax"])
    return (weights @ v if way["product"] != "einsum" else np.einsum("bqk,bkv->bqv", weights, v)), weights


def causal(way, q, k, v):
    lens = np.broadcast_to(np.arange(1, q.shape[1] + 1), q.shape[:2])
    return attend(way, q, k, v, lens)


def additive(way, q, k, v, lens, W_q, W_k, w_v):
    w_v = np.ravel(w_v)
    q, k = np.einsum("bqi,ih->bqh", q, W_q), np.stack([item @ W_k for item in k])
    if way["features"] == "loop":
        scores = np.empty((len(q), q.shape[1], k.shape[1]))
        for b, i, j in np.ndindex(*scores.shape):
            scores[b, i, j] = np.dot(np.tanh(q[b, i] + k[b, j]), w_v)
    elif way["features"] == "repeat":
        pairs = np.repeat(q, k.shape[1], axis=1) + np.tile(k, (1, q.shape[1], 1))
        scores = (np.tanh(pairs) * w_v).sum(-1).reshape(len(q), q.shape[1], k.shape[1])
    else:
        features = np.tanh(np.expand_dims(q, 2) + np.expand_dims(k, 1))
        scores = np.tensordot(features, w_v, 1) if way["features"] == "tensordot" else features @ w_v
    weights = softmax(masked(scores, lens, way["mask"]), way["softmax"])
    return weights @ v, weights


def split_heads(way, X, heads):
    batch, steps, hiddens = X.shape
    d = hiddens // heads
    if way["split"] == "slices":
        return np.stack([X[:, :, h * d : (h + 1) * d] for h in range(heads)], axis=1).reshape(-1, steps, d)
    if way["split"] == "split":
        return np.concatenate([np.stack(np.split(item, heads, axis=-1)) for item in X])
    if way["split"] == "loop":
        out = np.zeros((batch * heads, steps, d))
        for b, h in np.ndindex(batch, heads):
            out[b * heads + h] = X[b][:, np.arange(d) + h * d]
        return out
    four = X.reshape(batch, steps, heads, d)
    if way["split"] == "einsum":
        return np.einsum("bthd->bhtd", four).reshape(batch * heads, steps, d)
    return (np.moveaxis(four, 2, 1) if way["split"] == "moveaxis" else four.swapaxes(1, 2)).reshape(-1, steps, d)


def join_heads(way, X, heads):
    rows, steps, d = X.shape
    if way["split"] in ("slices", "split"):
        return np.stack([np.hstack(list(X[b : b + heads])) for b in range(0, rows, heads)])
    if way["split"] == "loop":
        out = np.zeros((rows // heads, steps, heads * d))
        for row in range(rows):
            b, h = divmod(row, heads)
            out[b, :, h * d : (h + 1) * d] = X[row]
        return out
    four = X.reshape(rows // heads, heads, steps, d)
    if way["split"] == "einsum":
        return np.einsum("bhtd->bthd", four).reshape(rows // heads, steps, -1)
    return (np.moveaxis(four, 1, 2) if way["split"] == "moveaxis" else four.swapaxes(1, 2)).reshape(
        -1, steps, heads * d
    )


def multi_head(way, q, k, v, lens, W_q, W_k, W_v, W_o, heads):
    q, k, v = (np.matmul(x, W) for x, W in ((q, W_q), (k, W_k), (v, W_v)))
    if way["heads"] == "one by one":
        d = q.shape[2] // heads
        parts = [[x[:, :, h * d : (h + 1) * d] for x in (q, k, v)] for h in range(heads)]
        return np.concatenate([attend(way, *part, lens)[0] for part in parts], axis=2) @ W_o
    lens = None if lens is None else np.repeat(lens, heads, axis=0)
    out, _ = attend(way, *(split_heads(way, x, heads) for x in (q, k, v)), lens)
    joined = join_heads(way, out, heads)
    return np.einsum("bth,ho->bto", joined, W_o) if way["product"] == "einsum" else joined @ W_o


def positions(way, X):
    steps, hiddens = X.shape[1:]
    j = np.arange(0, hiddens, 2)
    rate = {
        "power": lambda: 10000 ** (-j / hiddens),
        "exp": lambda: np.exp(j * -(np.log(10000.0) / hiddens)),
        "divided": lambda: 1 / np.power(10000, j / hiddens),
        "list": lambda: np.array([100.0 ** (-4 * n / hiddens) for n in range(len(j))]),
    }[way["rate"]]()
    angle = {
        "outer": lambda: np.outer(np.arange(steps), rate),
        "columns": lambda: np.arange(steps)[:, None] * rate,
        "sum": lambda: np.cumsum(np.tile(rate, (steps, 1)), axis=0) - rate,
    }[way["angle"]]()
    P = np.empty((steps, hiddens))
    if way["fill"] == "stack":
        P = np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(steps, hiddens)
    elif way["fill"] == "shifted":  # cos is sin, a quarter later
        P = np.sin(np.repeat(angle, 2, axis=1) + np.tile([0, np.pi / 2], hiddens // 2))
    elif way["fill"] == "complex":
        P[:, ::2], P[:, 1::2] = np.exp(1j * angle).imag, np.exp(1j * angle).real
    else:
        P[:, ::2], P[:, 1::2] = np.sin(angle), np.cos(angle)
    return np.array([item + P for item in X]) if way["add"] == "loop" else X + P[None]


# kind: (implementation, the names its arguments may have, its choices beside those of every kind)
_CALLS = ["queries keys values valid_lens", "q k v lens", "query key value lengths", "Q K V valid_len"]
_HEADS = ["X num_heads", "x heads", "input n_heads", "x h", "inputs nhead"]
KINDS = {
    "masked_softmax": (
        lambda way, X, lens: softmax(masked(X, lens, way["mask"]), way["softmax"]),
        ["X valid_lens", "scores lens", "x lengths", "s valid_len", "logits valid_lengths"],
        {"softmax": SOFTMAXES, "mask": MASKS},
    ),
    "dot_product": (attend, _CALLS, {"product": PRODUCTS, "order": ORDERS, "softmax": SOFTMAXES, "mask": MASKS}),
    "causal": (
        causal,
        [names.rpartition(" ")[0] for names in _CALLS],
        {"product": PRODUCTS, "order": ORDERS, "softmax": SOFTMAXES, "mask": MASKS},
    ),
    "additive": (
        additive,
        [f"{names} W_q W_k w_v" for names in _CALLS],
        {"features": ["loop", "repeat", "tensordot", "matmul"], "softmax": SOFTMAXES, "mask": MASKS},
    ),
    "multi_head": (
        multi_head,
        [f"{names} W_q W_k W_v W_o {heads}" for names in _CALLS for heads in ("num_heads", "n_heads", "heads")],
        {"product": PRODUCTS, "order": ORDERS, "softmax": SOFTMAXES, "mask": MASKS, "split": SPLITS,
         "heads": ["together", "one by one"]},
    ),
    "transpose_qkv": (split_heads, _HEADS, {"split": SPLITS}),
    "transpose_output": (join_heads, _HEADS, {"split": SPLITS}),
    "positional_encoding": (
        positions,
        ["X", "x", "inputs", "embeddings"],
        {"rate": ["power", "exp", "divided", "list"], "angle": ["outer", "columns", "sum"],
         "fill": ["plain", "stack", "shifted", "complex"], "add": ["whole", "loop"]},
    ),
}  # fmt: skip
RESULTS = ["numbers", "pair", "float32 inside", "list", "columns first"]
CALLS = ["function", "partial", "object", "method", "keywords alone"]


def result_as(how, out):
    out, *weights = out if isinstance(out, tuple) else (out,)
    if how == "pair" and weights:
        return out, *weights
    return out.tolist() if how == "list" else np.asfortranarray(out) if how == "columns first" else out


def rounded(x):
    """What float32 holds of it."""
    return x.astype(np.float32).astype(float) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x


def variant(kind, way):
    """An implementation whose parameters have other names, called in another way."""
    compute, _, _ = KINDS[kind]
    in_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    by_name = inspect.Parameter.KEYWORD_ONLY if way["call"] == "keywords alone" else in_place
    names = way["names"].split()
    parameters = [inspect.Parameter(name, by_name if i else in_place) for i, name in enumerate(names)]
    signature = inspect.Signature(parameters)

    def mine(*given, **named):
        arguments = signature.bind(*given, **named).arguments.values()
        return result_as(way["result"], compute(way, *map(rounded, arguments) if "32" in way["result"] else arguments))

    mine.__signature__ = signature
    if way["call"] == "partial":
        return functools.partial(mine)
    if way["call"] in ("object", "method"):
        itself = inspect.Parameter("self", in_place)
        call = functools.wraps(mine)(lambda self, *given, **named: mine(*given, **named))
        call.__signature__ = signature.replace(parameters=[itself, *parameters])
        made = type("Mine", (), {"__call__": call, "attend": call})()
        return made if way["call"] == "object" else made.attend
    return mine


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_right_ones(kind, rng):
    """Each is another choice of all that may differ: operations and their order, types, names, ways to be called."""
    _, names, own = KINDS[kind]
    own = {**own, "names": names, "result": RESULTS, "call": CALLS}
    if kind in ("additive", "multi_head"):  # objects of these kinds are layers, which own their weights
        own["call"] = [call for call in CALLS if call != "object"]
    every = math.prod(map(len, own.values()))
    for number in rng.choice(every, 200 if needs.NIGHTLY else 20, replace=False):
        places = np.unravel_index(number, [len(each) for each in own.values()])
        way = {name: each[place] for (name, each), place in zip(own.items(), places)}
        answer = teach.check(variant(kind, way), kind)
        assert answer.ok and answer.mistakes == [], (way, answer)
        assert ("overflows" in str(answer)) == (way.get("softmax") == "plain"), (way, answer)


# ---- in torch --------------------------------------------------------------------------------------------------------

IN_TORCH = list(
    itertools.product(["before", "after"], ["plain", "log"], ["least", "infinite"], ["numbers", "pair", "float32"])
)


def right_in_torch(torch, order, softmaxes, masks, result):
    def attention(query, key, value, valid_len=None):
        if result == "float32":
            query, key, value = query.float(), key.float(), value.float()
        d = query.size(-1)
        scores = torch.einsum("bqd,bkd->bqk", query / d**0.5, key) if order == "before" else (
            torch.baddbmm(torch.zeros(1), query, key.permute(0, 2, 1), alpha=d**-0.5))  # fmt: skip
        if valid_len is not None:
            lens = valid_len.view(-1, 1, 1) if valid_len.dim() == 1 else valid_len.unsqueeze(-1)
            hidden = torch.arange(key.size(1)) >= lens
            fill = torch.finfo(scores.dtype).min if masks == "least" else float("-inf")
            scores = scores.masked_fill(hidden.expand_as(scores), fill)
        weights = scores.softmax(-1) if softmaxes == "plain" else torch.exp(scores.log_softmax(-1))
        return (weights @ value, weights) if result == "pair" else torch.bmm(weights, value)

    return attention


def test_right_ones_in_torch():
    torch = needs.module("torch")
    for choices in IN_TORCH:
        answer = teach.check(right_in_torch(torch, *choices), "dot_product")
        assert answer.ok, (choices, answer)
    wrapped = functools.wraps(book.masked_softmax)(lambda *arguments: book.masked_softmax(*arguments))
    assert teach.check(wrapped, "masked_softmax").ok
