"""A layer, a batch and a loss whose heads tests of mha_c.heads measure."""

import numpy as np

import mha_c

HEADS, HIDDENS = 4, 32
LENS = [3, 5, 2, 5, 1, 4]


def numpy_layer(bias=True, dtype=np.float64, dropout=0.3):
    layer = mha_c.MultiHeadAttention(HIDDENS, HIDDENS, HIDDENS, HIDDENS, HEADS, dropout, bias=bias, rng=0, dtype=dtype)
    state = layer.state_dict()
    drawn = np.random.default_rng(1)
    layer.load_state_dict({name: drawn.standard_normal(x.shape) / 4 for name, x in state.items()})
    return layer


def drawn_batch():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 6, 5, HIDDENS))
    return x, y, LENS


def squared(layer, batch):
    """Mean squared error; goes back, as "gradient" asks."""
    x, y, lens = batch
    error = layer(x, x, x, lens) - y
    if layer.training:
        layer.backward(2 * error / error.size)
    return (error**2).mean()
