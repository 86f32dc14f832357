"""Layers called with keep_mask and bias, and the plain formulas in float64 that say what comes of it, gradients too."""

from typing import Any, NamedTuple

import numpy as np

import needs
import stepwise
from mha_c import _reference

B, H, HKV, Q, K, FEATURES, HIDDENS = 2, 4, 2, 5, 7, 16, 6
LIMITS = {"float32": 1e-5, "float64": 1e-12}  # of numbers around 1 that are sums of some tens of terms


class Kind(NamedTuple):
    """A layer: the class and the arguments of its constructor, the same for NumPy and torch, and what it is."""

    name: str
    arguments: tuple[Any, ...]
    widths: dict[str, tuple[int, int]]  # (out_features, in_features) of its projections
    heads: int = 1
    kv_heads: int = 1
    biases: bool = False
    rope: bool = False
    own: Any = False  # the corner of a call that says none
    empty: str = "uniform"

    @property
    def is_self(self):
        return self.name == "CausalAttention"


FOUR = dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), (FEATURES, FEATURES))
SHARED = {**FOUR, **dict.fromkeys(("W_k", "W_v"), (HKV * FEATURES // H, FEATURES))}
JOINT = {"W_qkv": (3 * FEATURES, FEATURES), "W_o": (FEATURES, FEATURES)}
ADDED = {"W_k": (HIDDENS, FEATURES), "W_q": (HIDDENS, FEATURES), "w_v": (1, HIDDENS)}


def _multi_head(bias):
    return Kind("MultiHeadAttention", (FEATURES,) * 4 + (H, 0.0, bias), FOUR, H, H, bias)


def _grouped(bias, rope, causal):
    corner = "top_left" if causal else False
    return Kind("GQAAttention", (FEATURES, H, HKV, bias, rope, causal), SHARED, H, HKV, bias, rope, corner, "zero")


def _causal(bias, rope):
    return Kind("CausalAttention", (FEATURES, H, bias, rope), JOINT, H, H, bias, rope, "top_left", "zero")


KINDS = {
    "multi-head": _multi_head(False),
    "multi-head with biases": _multi_head(True),
    "dot": Kind("DotProductAttention", (0.0,), {}),
    "additive": Kind("AdditiveAttention", (FEATURES, FEATURES, HIDDENS, 0.0), ADDED),
    "grouped": _grouped(False, False, False),
    "grouped with biases and rope": _grouped(True, True, False),
    "grouped, causal": _grouped(False, False, True),
    "causal": _causal(False, False),
    "causal with biases and rope": _causal(True, True),
}


def sizes_of(kind):
    """(Q, K) of a call."""
    return (Q, Q) if kind.is_self else (Q, K)


def state_of(kind, seed=7):
    """Weights {name: array} in float64."""
    rng, state = np.random.default_rng(seed), {}
    for name, (n_out, n_in) in kind.widths.items():
        state[f"{name}.weight"] = rng.standard_normal((n_out, n_in)) * (0.7 if name == "w_v" else n_in**-0.5)
        if kind.biases:
            state[f"{name}.bias"] = rng.standard_normal(n_out) / 3
    return state


def inputs_of(kind, seed=3):
    """Queries, keys, values; X alone for a self-attention."""
    rng, (n_queries, n_keys) = np.random.default_rng(seed), sizes_of(kind)
    return [rng.standard_normal((B, n, FEATURES)) for n in (n_queries, n_keys, n_keys)[: 1 if kind.is_self else 3]]


# --- Masks of every shape -----------------------------------------------------------------------------------


def shapes_of(kind):
    """Of masks that broadcast to the weights: rank 2, and their rank."""
    n_queries, n_keys = sizes_of(kind)
    flat = [(n_queries, n_keys), (1, n_keys), (n_queries, 1), (1, 1)]
    leading = [(B, kind.heads), (B, 1), (1, kind.heads), (1, 1)] if kind.heads > 1 else [(B,), (1,)]
    return flat + [(*first, *last) for first in leading for last in flat]


def keep_of(shape, seed=5, empty=True):
    """A mask of this shape, True where a query may see; with a row that sees nothing, if `empty`."""
    keep = np.random.default_rng(seed).random(shape) < 0.7
    keep[..., 0] = True
    if empty and shape[-2] > 1:
        keep[..., 2, :] = False
    return keep


def bias_of(shape, seed=6, empty=False):
    bias = np.random.default_rng(seed).standard_normal(shape)
    if empty and shape[-1] > 1:
        bias[..., -2] = -np.inf
    return bias


BESIDE = {
    "alone": {},
    "lengths": {"valid_lens": [3, 6]},
    "lengths of queries": {"valid_lens": [[1, 2, 3, 4, 7], [7, 0, 5, 2, 1]]},
    "causal": {"causal": "bottom_right"},
    "lengths, causal": {"valid_lens": [2, 7], "causal": "top_left"},
}
MASKS = "keep_mask", "bias", "both"


def masks_of(which, shape, other=None):
    """{"keep_mask": , "bias": } of the shape; other: that of the bias where both are there."""
    given = {}
    if which != "bias":
        given["keep_mask"] = keep_of(shape)
    if which != "keep_mask":
        given["bias"] = bias_of(other or shape, empty=which == "bias")
    return given


def beside(kind):
    """The other arguments of its calls, by name."""
    return ["alone"] if kind.is_self else [*BESIDE]


def calls():
    """(kind, masks, shape, beside) of every call; by day each kind with each mask, and shapes and arguments in turn."""
    found, turn = [], 0
    for name, kind in KINDS.items():
        shapes, others = shapes_of(kind), beside(kind)
        for which in MASKS:
            every = [(name, which, shape, other) for shape in shapes for other in others]
            if not needs.NIGHTLY:
                n = max(len(shapes), len(others)) // 2
                every = [
                    (name, which, shapes[(turn + i) % len(shapes)], others[(turn + i) % len(others)]) for i in range(n)
                ]
                turn += n
            found += every
    return found


def options_of(name, which, shape, other):
    """The keywords of a call."""
    shapes = shapes_of(KINDS[name])
    return {**BESIDE[other], **masks_of(which, shape, shapes[-1 - shapes.index(shape)])}


# --- What comes of it -----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    out: Any
    weights: Any  # in the shape that the layer shows
    grads: list[Any]  # of the inputs
    of_parameters: dict[str, Any]
    of_bias: Any  # None without a bias


def gradient_of(kind):
    """That of the output of a call."""
    features = FEATURES
    return np.linspace(-1, 1, B * Q * features).reshape(B, Q, features)


def expected(kind, state, inputs, **options):
    """Of a call of the layer with these weights, by the formulas in float64."""
    inputs, grad = list(inputs) * (3 if kind.is_self else 1), gradient_of(kind)
    parts = _split_weights(state)
    q, k, v = (_projected(x, parts, role) for x, role in zip(inputs, "qkv"))
    q, k, v = (_heads(x, n) for x, n in ((q, kind.heads), (k, kind.kv_heads), (v, kind.kv_heads)))
    if kind.rope:
        q, k = stepwise.rotated(q), stepwise.rotated(k)
    k, v = (x.repeat(kind.heads // kind.kv_heads, 1) for x in (k, v))
    call = _call_of(kind, options)
    w_v = state.get("w_v.weight", [None])[0]
    scored = (q, k, v) if w_v is None else (q, k, v, w_v)
    attention = _reference.dot_product_attention if w_v is None else _reference.additive_attention
    out, weights = attention(*scored, **call, empty_rows=kind.empty, return_weights=True)
    joined = out.swapaxes(1, 2).reshape(*inputs[0].shape[:2], -1)
    grads, grad_joined = {}, grad
    if "o" in parts:
        grad_joined = _back(grad, joined, parts["o"], grads, "W_o")
    of_heads = _heads(grad_joined, kind.heads)
    of_q, of_k, of_v, of_w_v, of_scores = _attention_back(of_heads, (q, k, v, w_v), weights, call)
    of_k, of_v = (x.reshape(B, kind.kv_heads, -1, *x.shape[2:]).sum(2) for x in (of_k, of_v))
    if kind.rope:
        of_q, of_k = _turned_back(of_q), _turned_back(of_k)
    found = []
    for x, of_x, role in zip(inputs, (of_q, of_k, of_v), "qkv"):
        of_x = of_x.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        found.append(_back(of_x, x, parts[role], grads, f"W_{role}") if role in parts else of_x)
    if of_w_v is not None:
        grads["w_v.weight"] = of_w_v[None]
    if "W_qkv.weight" in state:
        for one in ("weight", "bias") if kind.biases else ("weight",):
            grads[f"W_qkv.{one}"] = np.concatenate([grads.pop(f"W_{role}.{one}") for role in "qkv"])
    bias = options.get("bias")
    of_bias = None if bias is None else _summed(of_scores, np.shape(bias))
    out = joined if "o" not in parts else _projected(joined, parts, "o")
    shown = weights if kind.heads > 1 else weights[:, 0]
    return Outcome(out, shown, [sum(found)] if kind.is_self else found, {n: grads[n] for n in state}, of_bias)


def _split_weights(state):
    """{role: (weight, bias)} of the projections, W_qkv as its three."""
    parts = {}
    for name, weight in state.items():
        role, _, what = name.partition(".")
        if what == "weight" and role != "w_v":
            bias = state.get(f"{role}.bias")
            roles = role[2:]
            weights = np.split(weight, len(roles))
            biases = [None] * len(roles) if bias is None else np.split(bias, len(roles))
            parts.update(zip(roles, zip(weights, biases)))
    return parts


def _projected(x, parts, role):
    if role not in parts:
        return x
    weight, bias = parts[role]
    return x @ weight.T + (0 if bias is None else bias)


def _back(grad, x, part, grads, name):
    weight, bias = part
    grads[f"{name}.weight"] = np.einsum("btn,btm->nm", grad, x)
    if bias is not None:
        grads[f"{name}.bias"] = grad.sum((0, 1))
    return grad @ weight


def _heads(x, n):
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)


def _turned_back(x):
    """The gradient of rotated features: turned by the same angles the other way."""
    other = np.stack((x[..., 1::2], x[..., 0::2]), -1).reshape(x.shape)
    back = stepwise.rotated(other)
    return np.stack((back[..., 1::2], back[..., 0::2]), -1).reshape(x.shape)


def _call_of(kind, options):
    """The arguments of the reference."""
    corner = options.get("causal", kind.own)
    if kind.name == "GQAAttention" and "causal" not in options and kind.own and options.get("valid_lens") is not None:
        corner = "bottom_right"  # as in the book
    call = {"valid_lens": options.get("valid_lens"), "causal": corner or None}
    for name in ("keep_mask", "bias"):
        mask = options.get(name)
        call[name] = mask if mask is None or np.ndim(mask) != 3 else mask[:, None]
    return call


def _attention_back(grad, operands, weights, call):
    """Gradients of q, k, v, w_v or None, and of the scores."""
    q, k, v, w_v = operands
    of_weights = grad @ v.swapaxes(2, 3)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    visible = _reference.visible_keys(weights.shape, call["valid_lens"], call["keep_mask"], call["causal"])
    if call["bias"] is not None:
        visible = visible & ~np.isneginf(call["bias"])
    of_scores = np.where(visible.any(-1, keepdims=True), of_scores, 0)  # a row without keys is constant
    of_v = weights.swapaxes(2, 3) @ grad
    if w_v is None:
        scaled = of_scores * q.shape[3] ** -0.5
        return scaled @ k, scaled.swapaxes(2, 3) @ q, of_v, None, of_scores
    features = np.tanh(q[..., :, None, :] + k[..., None, :, :])
    inner = of_scores[..., None] * (1 - features**2) * w_v
    return inner.sum(3), inner.sum(2), of_v, np.einsum("bhqk,bhqkf->f", of_scores, features), of_scores


def _summed(grad, shape):
    """A gradient in the shape of what was broadcast."""
    if len(shape) == 3:  # of a layer without heads
        grad = grad[:, 0]
    over = (*range(grad.ndim - len(shape)), *(grad.ndim - len(shape) + i for i, n in enumerate(shape) if n == 1))
    return grad.sum(tuple(over)).reshape(shape)
