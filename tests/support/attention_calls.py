"""One attention call of the core on arrays of its own, of every kind: what tests of bits change and run again."""

import numpy as np

from core_calls import core as _core


class Call:
    """One attention call on arrays of its own: its output, statistics and gradients."""

    def __init__(self, q, k, v, grad_out, w_v=None, **options):
        self.q, self.k, self.v, self.grad_out, self.w_v, self.options = q, k, v, grad_out, w_v, options

    def change(self, **changes):
        fields = {"q": self.q, "k": self.k, "v": self.v, "grad_out": self.grad_out, "w_v": self.w_v, **self.options}
        return Call(**{**fields, **changes})

    def forward(self, **wishes):
        return _core.attention_forward(self.q, self.k, self.v, self.w_v, return_stats=True, **self.options, **wishes)

    def run(self):
        """(out, row_max, row_sum, grad_q, grad_k, grad_v and, if there are any, grad_w_v, grad_bias)"""
        out, _, _, stats = self.forward()
        grads = _core.attention_backward(
            self.grad_out, out, stats, self.q, self.k, self.v, self.w_v,
            bias_grad="bias" in self.options, **self.options,
        )  # fmt: skip
        return (out, *stats, *(grad for grad in grads if grad is not None))


def draw(rng, dtype, sizes, additive=False, **options):
    """sizes: B, H, Hkv, Q, K, D, Dv"""
    batch, heads, kv_heads, n_queries, n_keys, dim, value_dim = sizes
    shapes = [(heads, n_queries, dim), (kv_heads, n_keys, dim), (kv_heads, n_keys, value_dim)]
    q, k, v = (rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes)
    grad_out = rng.standard_normal((batch, heads, n_queries, value_dim)).astype(dtype)
    return Call(q, k, v, grad_out, rng.standard_normal(dim).astype(dtype) if additive else None, **options)


def masks(rng, dtype, sizes):
    """Every kind of mask at once, with a query that sees nothing."""
    batch, n_queries, n_keys = sizes[0], sizes[3], sizes[4]
    lens = rng.integers(0, n_keys + 1, (batch, n_queries))
    lens[0, 0] = 0
    return {
        "valid_lens": lens,
        "keep_mask": rng.random((n_queries, n_keys)) < 0.8,
        "bias": rng.standard_normal((n_queries, n_keys)).astype(dtype),
        "causal": "bottom_right",
        "window_left": n_keys // 2,
        "empty_rows": "uniform",
    }


SHORT, LONG = (2, 4, 2, 37, 130, 24, 18), (2, 2, 1, 33, 1100, 16, 8)  # one key block; several, and parts of gradients
KINDS = {
    "short": lambda rng, dtype: draw(rng, dtype, SHORT),
    "long": lambda rng, dtype: draw(rng, dtype, LONG),
    "decode": lambda rng, dtype: draw(rng, dtype, (1, 2, 1, 3, 1500, 64, 64)),
    "masks": lambda rng, dtype: draw(rng, dtype, LONG, **masks(rng, dtype, LONG)),
    "dropout": lambda rng, dtype: draw(rng, dtype, LONG, valid_lens=np.array([700, 0]), dropout=0.4, seed=7),
    "additive": lambda rng, dtype: draw(rng, dtype, (2, 1, 1, 21, 530, 20, 8), additive=True),
}


def of_a_kind(request, isa, dtype, rng):
    """For a fixture whose params are KINDS."""
    return KINDS[request.param](rng, dtype)
