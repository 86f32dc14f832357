"""Attention in torch's own operations, for autograd to differentiate: the oracle of gradients."""

import numpy as np
import torch

import philox
from mha_c import _reference


def leaf_of(array, dtype=None):
    """A tensor of its own memory that asks for a gradient; None stays None."""
    return None if array is None else torch.tensor(array, dtype=dtype, requires_grad=True)


def attention(q, k, v, w_v=None, valid_lens=None, bias=None, scale=None, dropout=0.0, seed=0, empty_rows="zero",
              keep_mask=None, causal=None, window=None):  # fmt: skip
    """Tensors q (B,[H,]Q,D), k, v; as mha_c.functional.  An empty row's weights are constants."""
    rank = q.ndim
    q, k, v = (x if rank == 4 else x[:, None] for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    if w_v is None:
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    else:
        features = torch.tanh(q[..., :, None, :] + k[..., None, :, :])
        scores = (features * w_v).sum(-1) * (1.0 if scale is None else scale)
    if bias is not None:
        scores = scores + (bias[:, None] if bias.ndim == 3 else bias)
    mask = _reference.visible_keys(tuple(scores.shape), valid_lens, keep_mask, causal, window)
    visible = torch.from_numpy(mask) & (scores > -torch.inf)
    scores = torch.where(visible, scores, -1e300 if scores.dtype == torch.float64 else -1e38)
    weights = torch.softmax(scores, -1) * visible
    is_empty = ~visible.any(-1, keepdim=True)
    weights = torch.where(is_empty, 1 / k.shape[2] if empty_rows == "uniform" else 0.0, weights)
    if dropout:
        weights = weights * torch.from_numpy(philox.factors(seed, dropout, tuple(scores.shape))).to(weights.dtype)
    out = weights @ v
    return out if rank == 4 else out[:, 0]


def layer(inputs, weights, biases, w_v, num_heads, **options):
    """A whole layer of queries, keys, values; weights and biases of W_q, W_k, W_v, W_o, each or None."""

    def project(x, i):
        if weights[i] is None:
            return x
        y = x @ weights[i].transpose(0, 1)
        return y if biases[i] is None else y + biases[i]

    def split(x):  # (B, T, H*d) -> (B, H, T, d)
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)

    q, k, v = (split(project(x, i)) for i, x in enumerate(inputs))
    return project(attention(q, k, v, w_v, **options).transpose(1, 2).flatten(2), 3)


def gradients(out, grad_out, leaves):
    """NumPy gradients of sum(out * grad_out), zeros where there is no way to a leaf; None for None."""
    found = torch.autograd.grad(
        out, [x for x in leaves if x is not None], torch.from_numpy(np.ascontiguousarray(grad_out)), allow_unused=True
    )
    found = iter(found)
    results = [None if x is None else (next(found), x) for x in leaves]
    return [
        None if pair is None else (torch.zeros_like(pair[1]) if pair[0] is None else pair[0]).numpy()
        for pair in results
    ]
