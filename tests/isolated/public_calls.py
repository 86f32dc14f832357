"""A good call and some bad ones of every public callable of the NumPy side, for the scripts beside this file.

GOOD is {name: call}; BAD is {name: (call, exception)}.  `names()` is what there is to call, read from the modules, so
that a new callable without an entry here is noticed.
"""

import contextlib
import copy
import inspect
import io
import pickle

import numpy as np

import mha_c
from mha_c import functional as F
from mha_c import variants

rng = np.random.default_rng(0)


def numbers(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


Q, K, V = numbers(2, 24, 8), numbers(2, 40, 8), numbers(2, 40, 8)
Q4, K4, V4 = numbers(2, 4, 24, 8), numbers(2, 2, 40, 8), numbers(2, 2, 40, 6)
G = numbers(2, 24, 8)
LENS, LENS2 = [3, 40], np.arange(48).reshape(2, 24)
KEEP, BIAS = np.tri(24, 40) > 0, numbers(24, 40)
W_V, W_Q, W_K = numbers(6), numbers(6, 8), numbers(6, 8)
mha = mha_c.MultiHeadAttention(8, 8, 8, 16, 4, 0.1, bias=True, rng=0)
dot = mha_c.DotProductAttention(0.1, rng=0)
additive = mha_c.AdditiveAttention(8, 8, 6, 0.1, rng=0)
PROJECTED = additive.project_keys(K, LENS)
STATE = mha.state_dict()
self_attention = variants.MultiHeadedSelfAttention(8, 2, rng=0)
gqa = mha_c.GQAAttention(8, 4, 2, rng=0)
causal = mha_c.CausalAttention(8, 2, rope=True, rng=0)
summer = variants.SelfAttentionAISummer(8, rng=0)
multi_summer = variants.MultiHeadSelfAttentionAISummer(8, 2, rng=0)
out_a, lse_a = F.dot_product_attention(Q, K, V, return_lse=True)


def quietly(call):
    with contextlib.redirect_stdout(io.StringIO()):
        return call()


def train(layer, *inputs):
    out = layer(*inputs, training=True)
    layer.backward(np.ones_like(out))
    for p in layer.parameters():
        p -= 0.01 * p.grad
    layer.zero_grad()
    layer(*inputs)  # no record for a backward is left


def read_weights(layer, *inputs):
    layer(*inputs)
    return layer.attention_weights, layer.attention_weights


def decode():
    layer = mha_c.MultiHeadAttention(8, 8, 8, 16, 4, 0.1, rng=0)
    cache = layer.new_cache(2, 5)
    for _ in range(2):
        layer(Q[:, :2], Q[:, :2], Q[:, :2], [1, 2], cache=cache)
        cache.reorder([1, 0])
    return copy.deepcopy(cache), layer.attention_weights


def decode_too_much():
    cache = mha.new_cache(2, 3)
    mha(Q, Q, Q, cache=cache)


def assign():
    mha.W_q.weight = mha.W_q.weight * 1
    mha.W_q.bias = mha.W_q.bias + 0


GOOD = {
    "MultiHeadAttention": lambda: mha_c.MultiHeadAttention(16, 4, 0.1, rng=0)(Q, K, V, LENS),
    "MultiHeadAttention, called": lambda: mha(Q, K, V, LENS2),
    "MultiHeadAttention, weights": lambda: read_weights(mha, Q, K, V, LENS),
    "MultiHeadAttention, d2l's weights": lambda: mha(Q, K, V) is mha.attention.attention_weights,
    "MultiHeadAttention, float64": lambda: mha(Q.astype("f8"), K.astype("f8"), V.astype("f8")),
    "MultiHeadAttention, trained": lambda: train(mha, Q, K, V, LENS),
    "MultiHeadAttention, copied": lambda: (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))),
    "MultiHeadAttention, state": lambda: mha.load_state_dict(mha.state_dict()),
    "MultiHeadAttention, parameters": lambda: [(p.name, p.shape, repr(p), p.data) for p in mha.parameters()],
    "MultiHeadAttention, assigned": assign,
    "MultiHeadAttention, printed": lambda: repr(mha.eval()),
    "MultiHeadAttention, drawn": lambda: mha.initialize(rng=0, method="torch"),
    "MultiHeadAttention, one projection": lambda: mha.W_q(Q),
    "DotProductAttention": lambda: (mha_c.DotProductAttention(0.1)(Q, K, V, LENS), read_weights(dot, Q, K, V, LENS2)),
    "DotProductAttention, trained": lambda: train(dot, Q, K, V, LENS),
    "AdditiveAttention": lambda: mha_c.AdditiveAttention(6, 0.1)(Q, K, V, LENS),
    "AdditiveAttention, weights": lambda: read_weights(additive, Q, K, V, LENS2),
    "AdditiveAttention, trained": lambda: train(additive, Q, K, V, LENS),
    "ProjectedKeyValues, keys only": lambda: mha_c.AdditiveAttention(8, 8, 6, 0.1, rng=0).project_keys(K, LENS),
    "ProjectedKeyValues, keys only, used": lambda: additive(Q, additive.project_keys(K), V),
    "get_num_threads": mha_c.get_num_threads,
    "set_num_threads": lambda: mha_c.set_num_threads(mha_c.get_num_threads()),
    "show_config": lambda: quietly(mha_c.show_config),
    "explain": lambda: (
        str(mha_c.explain(mha, Q, K, V, LENS)),
        mha_c.explain(F.dot_product_attention, Q, K, V).as_dict(),
    ),
    "masked_softmax": lambda: mha_c.masked_softmax(BIAS[None].repeat(2, 0), LENS),
    "sequence_mask": lambda: mha_c.sequence_mask(Q, LENS, value=-1),
    "transpose_qkv": lambda: mha_c.transpose_qkv(Q, 4),
    "transpose_output": lambda: mha_c.transpose_output(Q, 2),
    "dot_product_attention": lambda: F.dot_product_attention(Q4, K4, V4, LENS, return_weights=True, return_lse=True),
    "dot_product_attention, masks": lambda: F.dot_product_attention(
        Q,
        K[..., ::-1],
        V,
        LENS2,
        keep_mask=KEEP,
        bias=BIAS,
        causal="bottom_right",
        window=(9, None),
        dropout=0.5,
        rng=3,
    ),
    "dot_product_attention, lists": lambda: F.dot_product_attention(Q.tolist(), K.tolist(), V.tolist()),
    "dot_product_attention_backward": lambda: F.dot_product_attention_backward(G, Q, K, V, LENS, bias=BIAS),
    "additive_attention": lambda: F.additive_attention(Q, K, V, W_V, W_Q, W_K, LENS, empty_rows="uniform"),
    "additive_attention_backward": lambda: F.additive_attention_backward(G, Q, K, V, W_V, W_Q, W_K, LENS2),
    "merge": lambda: F.merge(out_a, lse_a, out_a, lse_a),
    "KernelAttention": lambda: read_weights(mha_c.KernelAttention("boxcar", 2.0), Q, K, V, LENS),
    "KernelAttention, a function": lambda: mha_c.KernelAttention(lambda distance: 1 / (1 + distance))(Q, K, V),
    "PositionalEncoding": lambda: mha_c.PositionalEncoding(8, 0.5, rng=0)(Q, start=[3, 4], training=True),
    "KeyValueCache": decode,
    "ProjectedKeyValues": lambda: mha(Q, mha.project(K, V, LENS)),
    "rotary": lambda: F.rotary(Q4, np.arange(24), interleaved=True),
    "rotary_backward": lambda: F.rotary_backward(Q, np.arange(48).reshape(2, 24)),
    "alibi_slopes": lambda: F.alibi_slopes(6),
    "t5_buckets": lambda: F.t5_buckets(np.arange(-40, 40)),
    "dot_product_attention, terms": lambda: F.dot_product_attention(
        Q4, K4, V4, softcap=3.0, relative_bias=BIAS[:4, :7], sinks=BIAS[0, :4], causal="bottom_right"
    ),
    "dot_product_attention_backward, terms": lambda: F.dot_product_attention_backward(
        Q4[..., :6], Q4, K4, V4, softcap=3.0, relative_bias=BIAS[:4, :7], sinks=BIAS[0, :4]
    ),
    "weights_summary": lambda: F.weights_summary(Q, K, LENS, top=2),
    "GQAAttention": lambda: (mha_c.GQAAttention(8, 4, 2), read_weights(gqa, Q, Q, Q)),
    "CausalAttention": lambda: (mha_c.CausalAttention(8, 2), read_weights(causal, Q), train(causal, Q)),
    "scaled_dot_product_attention": lambda: variants.scaled_dot_product_attention(Q, K, V),
    "MultiHeadedSelfAttention": lambda: (variants.MultiHeadedSelfAttention(8, 2), read_weights(self_attention, Q)),
    "SelfAttentionAISummer": lambda: (variants.SelfAttentionAISummer(8), summer(Q, np.tri(24) == 0)),
    "MultiHeadSelfAttentionAISummer": lambda: (variants.MultiHeadSelfAttentionAISummer(8), multi_summer(Q)),
}
BAD = {
    "MultiHeadAttention": (lambda: mha_c.MultiHeadAttention(16, 5, 0.1), ValueError),
    "MultiHeadAttention, sizes": (lambda: mha(Q[..., :3], K, V), ValueError),
    "MultiHeadAttention, lengths": (lambda: mha(Q, K, V, [1.0, np.nan]), ValueError),
    "MultiHeadAttention, types": (lambda: mha(Q, K.astype("f8"), V), TypeError),
    "MultiHeadAttention, state": (lambda: mha.load_state_dict({**STATE, "W_q.weight": W_V}), ValueError),
    "MultiHeadAttention, assigned": (lambda: setattr(mha.W_q, "weight", W_V), ValueError),
    "MultiHeadAttention, backward": (lambda: (mha(Q, K, V), mha.backward(G)), RuntimeError),
    "DotProductAttention": (lambda: dot(Q, K, V[:, :3], LENS), ValueError),
    "DotProductAttention, weights": (lambda: mha_c.DotProductAttention(0).attention_weights, AttributeError),
    "AdditiveAttention": (lambda: additive(Q, K, V, LENS2.T), ValueError),
    "ProjectedKeyValues, keys only": (lambda: additive.project_keys(K[0]), ValueError),
    "set_num_threads": (lambda: mha_c.set_num_threads(0), ValueError),
    "explain": (lambda: mha_c.explain(mha, Q[..., :3], K, V), ValueError),
    "masked_softmax": (lambda: mha_c.masked_softmax(Q, [True, False]), TypeError),
    "sequence_mask": (lambda: mha_c.sequence_mask(Q, [1, 2, 3]), ValueError),
    "transpose_qkv": (lambda: mha_c.transpose_qkv(Q, 3), ValueError),
    "transpose_output": (lambda: mha_c.transpose_output(Q, 3), ValueError),
    "dot_product_attention": (lambda: F.dot_product_attention(Q, K, V[:1]), ValueError),
    "dot_product_attention, mask": (lambda: F.dot_product_attention(Q, K, V, keep_mask=KEEP[:3]), ValueError),
    "dot_product_attention, objects": (lambda: F.dot_product_attention(Q.astype(object), K, V), TypeError),
    "dot_product_attention_backward": (lambda: F.dot_product_attention_backward(G[:, :1], Q, K, V), ValueError),
    "additive_attention": (lambda: F.additive_attention(Q, K, V, W_V[:2], W_Q, W_K), ValueError),
    "additive_attention_backward": (lambda: F.additive_attention_backward(G, Q, K, V, W_Q), ValueError),
    "merge": (lambda: F.merge(out_a, lse_a, out_a, lse_a[:1]), ValueError),
    "KernelAttention": (lambda: mha_c.KernelAttention("boxcar")(Q, K[..., :3], V), ValueError),
    "PositionalEncoding": (lambda: mha_c.PositionalEncoding(8, 0.5, 20)(Q), ValueError),
    "KeyValueCache": (decode_too_much, ValueError),
    "ProjectedKeyValues": (lambda: mha.project(K, V[:1]), ValueError),
    "rotary": (lambda: F.rotary(Q[..., :7], np.arange(24)), ValueError),
    "rotary_backward": (lambda: F.rotary_backward(Q, np.arange(23)), ValueError),
    "alibi_slopes": (lambda: F.alibi_slopes(0), ValueError),
    "t5_buckets": (lambda: F.t5_buckets(0.5), TypeError),
    "dot_product_attention, terms": (lambda: F.dot_product_attention(Q4, K4, V4, relative_bias=BIAS), ValueError),
    "weights_summary": (lambda: F.weights_summary(Q, K[:1], top=2), ValueError),
    "GQAAttention": (lambda: mha_c.GQAAttention(8, 4, 3), ValueError),
    "CausalAttention": (lambda: causal(Q[0]), ValueError),
    "scaled_dot_product_attention": (lambda: variants.scaled_dot_product_attention(Q, K[..., :1], V), ValueError),
    "MultiHeadedSelfAttention": (lambda: variants.MultiHeadedSelfAttention(8, 3), ValueError),
    "SelfAttentionAISummer": (lambda: summer(Q, KEEP), ValueError),
    "MultiHeadSelfAttentionAISummer": (lambda: multi_summer(Q[0, 0]), ValueError),
}


def names():
    """The public callables of mha_c, mha_c.functional and mha_c.variants that compute."""
    others = {"show_heatmaps", "ShapeError", "cost", "WeightsSummary"}  # no arrays of their own
    found = set()
    for module in (mha_c, F, variants):
        listed = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for name in set(listed) - others:
            value = getattr(module, name)
            mine = getattr(value, "__module__", "").startswith("mha_c")
            if callable(value) and not inspect.ismodule(value) and mine:
                found.add(name)
    return found


def refused(name):
    """Makes the bad call; it must raise what it is said to raise."""
    call, kind = BAD[name]
    try:
        call()
    except kind:
        return
    raise AssertionError(f"{name} was not refused")
