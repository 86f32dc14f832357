"""How exact attention is: families of inputs, a reference with more digits, and two numbers for an error.

    E      largest |found - exact|
    R      E over the E of torch's plain attention (no fused kernel) in the same type on the same inputs
    kappa  largest |found - exact| over what rounding alone may do:
           u (sum_j p_j |v_j| + sum_j p_j |v_j - o| scale sum_d |q_d k_jd|), u = 2^-24 or 2^-53
           The first term is the rounding of a weighted mean, the second that of scores, seen through the softmax.

R says whether we are worse than what a user has now, kappa whether we are bad in absolute terms; one limit each
serves tame, huge and cancelling inputs alike.  Used by test_accuracy.py and tools/accuracy.py.
"""

from dataclasses import dataclass

import numpy as np

UNIT = {"float32": 2.0**-24, "float64": 2.0**-53}
# 64 bits of mantissa on x86; where long double is double, float64 results are judged by a float64 reference.
LONG = np.longdouble


@dataclass
class Problem:
    """q (draws, Q, D), k (draws, K, D), v (draws, K, Dv): each draw a problem of its own."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    valid_lens: object = None

    @property
    def scale(self):
        return 1 / np.sqrt(self.q.shape[-1])


@dataclass
class Sizes:
    draws: int
    queries: int
    keys: int
    dim: int
    value_dim: int


def _normal(rng, s):
    q, k = rng.standard_normal((s.draws, s.queries, s.dim)), rng.standard_normal((s.draws, s.keys, s.dim))
    return q, k, rng.standard_normal((s.draws, s.keys, s.value_dim))


def _spread(std):
    def family(rng, s, dtype):
        q, k, v = _normal(rng, s)
        return std * q, k, v

    return family


def _along(scores):
    """Queries and keys that lie along one direction, so that key j has about the score scores[j]."""

    def family(rng, s, dtype):
        q, k, v = _normal(rng, s)
        direction = np.full(s.dim, s.dim**-0.5)
        wanted = scores(s.keys, dtype)[:, None] * np.sqrt(s.dim) * direction
        return np.broadcast_to(direction, q.shape) + 0.01 * q / np.sqrt(s.dim), 0.1 * k + wanted, v

    return family


def _equal_keys(rng, s, dtype):
    q, k, v = _normal(rng, s)
    return q, np.broadcast_to(k[:, :1], k.shape), v


def _tiny(rng, s, dtype):
    q, k, v = _normal(rng, s)
    small = 1e-20 if dtype == np.float32 else 1e-157  # their products are subnormal
    return small * q, small * k, v


def _alternating(rng, s, dtype):
    q, k, _ = _normal(rng, s)
    signs = np.where(np.arange(s.keys) % 2, -1e4, 1e4)[:, None]
    return q, k, np.broadcast_to(signs, (s.draws, s.keys, s.value_dim))


def _offset_values(rng, s, dtype):
    q, k, v = _normal(rng, s)
    return q, k, 1e6 + v


def _subnormal_values(rng, s, dtype):
    q, k, v = _normal(rng, s)
    return q, k, v * (1e-39 if dtype == np.float32 else 1e-309)


def _cancelling(rng, s, dtype):
    """Large parts of q and k that are orthogonal: each product is 1e4, their sum is not."""
    q, k, v = _normal(rng, s)
    signs = np.where(np.arange(s.dim) % 2, -1.0, 1.0)
    return q + 100, k + 100 * signs, v


def _cauchy(rng, s, dtype):
    q, k, v = _normal(rng, s)
    return rng.standard_cauchy(q.shape), rng.standard_cauchy(k.shape), rng.standard_cauchy(v.shape)


def _tile_edges(rng, s, dtype):
    q, k, v = _normal(rng, s)
    edges = np.array([n + d for n in (128, 256, 512, 1024, 4096) for d in (-1, 0, 1)])
    edges = edges[edges <= s.keys]
    return q, k, v, edges[np.arange(s.draws) % len(edges)] if len(edges) else None


def _huge(position):
    def scores(n, dtype):
        x = np.zeros(n)
        x[min(position, n - 1) if position >= 0 else n - 1] = 40.0
        return x

    return scores


def _low_half(n, dtype):
    """Every second key at the lowest score whose weight is still a normal number."""
    return np.where(np.arange(n) % 2, -80.0 if dtype == np.float32 else -690.0, 0.0)


FAMILIES = {
    "normal": _spread(1),
    "scores of std 4": _spread(4),
    "scores of std 1e3": _spread(1e3),
    "scores of std 1e4": _spread(1e4),
    "equal keys": _equal_keys,
    "one key alone": _along(lambda n, dtype: np.where(np.arange(n) == n // 2, 1200.0, 0.0)),
    "subnormal products": _tiny,
    "values +-1e4": _alternating,
    "values 1e6 + N(0,1)": _offset_values,
    "subnormal values": _subnormal_values,
    "rising scores": _along(lambda n, dtype: np.linspace(0, 60, n)),
    "falling scores": _along(lambda n, dtype: np.linspace(60, 0, n)),
    "large key first": _along(_huge(0)),
    "large key last": _along(_huge(-1)),
    "large key at an edge": _along(_huge(512)),
    "half of the keys low": _along(_low_half),
    "cancelling products": _cancelling,
    "Cauchy tails": _cauchy,
    "lengths at tile edges": _tile_edges,
}


def problem(family, sizes, dtype, seed):
    made = FAMILIES[family](np.random.default_rng(seed), sizes, np.dtype(dtype))
    arrays = [np.ascontiguousarray(x, dtype=dtype) for x in made[:3]]
    return Problem(*arrays, made[3] if len(made) > 3 else None)


# --- Exact ------------------------------------------------------------------------------------------


@dataclass
class Exact:
    out: np.ndarray
    weights: np.ndarray
    rounding: np.ndarray  # kappa's denominator without u


def _softmax(scores, lens):
    if lens is not None:
        hidden = np.arange(scores.shape[-1]) >= np.asarray(lens)[:, None, None]
        scores = np.where(hidden, -np.inf, scores)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def exact(p):
    """The output in float64 for float32 inputs, in long double for float64 ones."""
    wide = np.float64 if p.q.dtype == np.float32 else LONG
    q, k, v = (x.astype(wide) for x in (p.q, p.k, p.v))
    scale = wide(1) / np.sqrt(wide(q.shape[-1]))
    weights = _softmax(_times(q, k) * scale, p.valid_lens)
    out = _times(weights, v.swapaxes(1, 2))
    magnitude = _times(np.abs(p.q), np.abs(p.k)) * p.scale
    return Exact(out, weights.astype(np.float64), _rounding(p.v, weights, out, magnitude))


def _times(a, b):
    """a b^T for each draw, in at least double precision; not by a BLAS, whose threads spin when others are busy."""
    a, b = (x if x.dtype == LONG else x.astype(np.float64) for x in (a, b))
    return np.einsum("brd,bcd->brc", a, b)


def _rounding(v, weights, out, magnitude):
    """kappa's denominator: magnitude is what the rounding of a score is relative to."""
    v, weights, out = (np.asarray(x, np.float64) for x in (v, weights, out))
    magnitude = weights * magnitude
    total = _times(weights, np.abs(v).swapaxes(1, 2))
    for d in range(v.shape[-1]):  # one column at a time: (Q, K, Dv) numbers would not fit the cache
        total[..., d] += (magnitude * np.abs(v[:, None, :, d] - out[:, :, None, d])).sum(axis=-1)
    return total


def exact_additive(q, k, v, w_v):
    """The same for additive scores w_v . tanh(q + k): their rounding is relative to sum_d |w_v|, tanh being below 1."""
    wide = np.float64 if q.dtype == np.float32 else LONG
    features = np.tanh(q.astype(wide)[:, :, None] + k.astype(wide)[:, None])
    weights = _softmax((features * w_v.astype(wide)).sum(axis=-1), None)
    out = _times(weights, v.astype(wide).swapaxes(1, 2))
    magnitude = np.full(weights.shape, np.abs(w_v.astype(np.float64)).sum())
    return Exact(out, weights.astype(np.float64), _rounding(v, weights, out, magnitude))


# --- Two numbers ------------------------------------------------------------------------------------


@dataclass
class Error:
    """Of each draw: E, the largest kappa of an element, and the mean square of all kappas."""

    largest: np.ndarray
    kappa: np.ndarray
    kappa_square: np.ndarray


def error(found, known):
    unit = UNIT[found.dtype.name]
    distance = np.abs(found.astype(known.out.dtype) - known.out).astype(np.float64)
    # The smallest number of the type is the best that any rounding can do.
    kappa = distance / (unit * known.rounding + np.nextafter(0, 1, dtype=found.dtype))  # the smallest of all numbers
    return Error(distance.max(axis=(1, 2)), kappa.max(axis=(1, 2)), (kappa**2).mean(axis=(1, 2)))


def torch_math(p):
    """torch's plain attention: matmul, softmax, matmul, each in the inputs' type."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = map(torch.from_numpy, (p.q, p.k, p.v))
    mask = None
    if p.valid_lens is not None:
        mask = torch.arange(k.shape[1]) < torch.as_tensor(p.valid_lens)[:, None, None]
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).numpy()


@dataclass
class Ratios:
    """Of a cell: R over all draws, the worst draw's R, the ratio of root mean square kappas, and the worst kappas."""

    rms: float
    worst: float
    typical: float
    kappa: float
    torch_kappa: float
    largest: float


def _ratio(ours, theirs):
    """0/0 counts as 1: neither has an error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ours == theirs, 1.0, np.divide(ours, theirs))


def _rms(x):
    most = x.max()
    return most * np.sqrt(((x / most) ** 2).mean()) if most > 0 else 0.0  # squares of subnormal errors are 0


def ratios(ours, theirs):
    return Ratios(
        rms=float(_ratio(_rms(ours.largest), _rms(theirs.largest))),
        worst=float(_ratio(ours.largest, theirs.largest).max()),
        typical=float(np.sqrt(_ratio(ours.kappa_square.mean(), theirs.kappa_square.mean()))),
        kappa=float(ours.kappa.max()),
        torch_kappa=float(theirs.kappa.max()),
        largest=float(ours.largest.max()),
    )
