"""One answer on every path: what a user may switch without meaning another result, crossed and compared to the bit.

Weights read or not, training without dropout or not, NumPy or torch with or without gradient, one thread or several,
lengths in each of their forms, operands dense or strided.  Instruction sets are compared with each other within
rounding; what one of them gives by itself, whatever the batch and the threads, is test_determinism.py's matter.
"""

import itertools

import numpy as np
import pytest

import mha_c
import needs
from mha_c import _core
from mha_c import functional as F

B, Q, K, FEATURES, HIDDENS = 3, 70, 133, 24, 48


def numbers(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


LAYERS = {
    "multi-head": lambda module: module.MultiHeadAttention(FEATURES, FEATURES, FEATURES, HIDDENS, 4, 0.0, bias=True),
    "dot-product": lambda module: module.DotProductAttention(0.0),
    "additive": lambda module: module.AdditiveAttention(FEATURES, FEATURES, 20, 0.0),
}
LENGTHS = {
    "none": None,
    "per item": np.array([K, 5, 64]),
    "per query": np.arange(B * Q).reshape(B, Q) % (K + 1),
}


def strided(x):
    """The same numbers in another layout: every row of a wider array, the batch reversed."""
    wide = np.zeros((x.shape[0], x.shape[1], x.shape[2] + 5), x.dtype)
    view = wide[::-1, :, 2:-3]
    view[...] = x
    return view


def bits(array):
    return np.asarray(array).tobytes()


@pytest.fixture
def threads():
    return mha_c.set_num_threads


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(isa, threads, kind, lens, rng):
    layer = LAYERS[kind](mha_c)
    inputs = [numbers(rng, B, rows, FEATURES) for rows in (Q, K, K)]
    valid_lens = LENGTHS[lens]
    threads(1)
    expected = bits(layer(*inputs, valid_lens))
    weights = bits(layer.attention_weights)
    for n, training, layout, read in itertools.product((1, 3, 8), (False, True), (None, strided), (False, True)):
        threads(n)
        arrays = inputs if layout is None else [layout(x) for x in inputs]
        out = layer(*arrays, valid_lens, training=training)
        if read:
            assert bits(layer.attention_weights) == weights, (n, training, layout)
        assert bits(out) == expected, (n, training, layout, read)


@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("kind", LAYERS)
def test_torch_gives_the_same_bits(threads, kind, lens, rng):
    torch = needs.module("torch")
    module = LAYERS[kind](mha_c.torch)
    layer = LAYERS[kind](mha_c)
    inputs = [numbers(rng, B, rows, FEATURES) for rows in (Q, K, K)]
    valid_lens = LENGTHS[lens]
    layer(*inputs)
    module(*map(torch.from_numpy, inputs))  # fixes open sizes
    if layer.state_dict():
        layer.load_state_dict(module.state_dict())
    expected, weights = bits(layer(*inputs, valid_lens)), bits(layer.attention_weights)
    tensor_lens = None if valid_lens is None else torch.from_numpy(valid_lens)
    for n, training, with_grad, layout in itertools.product((1, 3), (False, True), (False, True), (None, strided)):
        threads(n)
        module.train(training)
        tensors = [torch.from_numpy(x.copy() if layout is None else layout(x)[::-1].copy()) for x in inputs]
        if layout is not None:
            tensors = [tensor.flip(0) for tensor in tensors]  # torch has no negative strides; flip copies
        for tensor in tensors:
            tensor.requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            out = module(*tensors, tensor_lens)
        assert bits(out.detach()) == expected, (n, training, with_grad, layout)
        assert bits(torch.as_tensor(module.attention_weights).detach()) == weights, (n, training, with_grad, layout)


def given_as(lens, causal, dtype=np.float32):
    """The same visibility in the words of each argument that can say it."""
    visible = np.arange(K) < lens[:, :, None]
    if causal:
        visible &= np.tril(np.ones((Q, K), bool), K - Q)
    forms = {
        "lengths": {"valid_lens": visible.sum(-1)},
        "keep_mask": {"keep_mask": visible},
        "bias": {"bias": np.where(visible, 0, -np.inf).astype(dtype)},
    }
    if causal:
        forms["corner"] = {"valid_lens": lens, "causal": "bottom_right"}
        forms["window"] = {"valid_lens": lens, "causal": "bottom_right", "window": (None, 0)}
    return forms


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", ["dot", "additive"])
def test_forms_of_a_mask(isa, scores, causal, dtype, rng):
    """Lengths, keep_mask, bias of -inf, causal corner, window: the same output, weights and lse, to the bit."""
    q, k, v = (numbers(rng, B, rows, FEATURES, dtype=dtype) for rows in (Q, K, K))
    w_v = numbers(rng, FEATURES, dtype=dtype)
    lens = rng.integers(0, K + 2, (B, Q))

    def run(**mask):
        if scores == "dot":
            return F.dot_product_attention(q, k, v, **mask, return_weights=True, return_lse=True)
        return F.additive_attention(q, k, v, w_v, **mask, return_weights=True, return_lse=True)

    results = {name: [bits(x) for x in run(**mask)] for name, mask in given_as(lens, causal, dtype).items()}
    for name, result in results.items():
        assert result == results["lengths"], name


def by_columns(queries, keys):
    x = np.zeros((1, queries, 4), np.float32), np.zeros((1, keys, 4), np.float32)
    return mha_c.explain(F.dot_product_attention, x[0], x[1], x[1]).as_dict()["attention"]["by_columns"]


@pytest.mark.parametrize("keys", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 37, 48, 64, 65])
def test_short_rows_by_columns_or_by_rows(isa, keys, dtype, rng):
    """Few keys are scored by columns, but with a mask of single keys by rows: the same bits, NaN and infinity too."""
    chosen = set()
    for queries, dim in [(1, 5), (3, 8), (17, 3), (50, 33)]:
        chosen.add(by_columns(queries, keys))
        q, k, v = (numbers(rng, B, 2, rows, dim, dtype=dtype) for rows in (queries, keys, keys))
        q[0, 0, 0, 0], k[1, 1, keys // 2, 1], v[2, 0, keys - 1, 2] = np.nan, np.inf, -np.inf
        lens = np.array([keys, 0, (keys + 1) // 2])
        ragged = {"valid_lens": rng.integers(0, keys + 2, (B, queries)), "empty_rows": "uniform"}
        corner = {"valid_lens": lens, "causal": "bottom_right", "window": (None, 2)}
        uniform = {"valid_lens": lens, "empty_rows": "uniform", "scale": 30.0}
        for options in ({}, {"valid_lens": lens}, uniform, ragged, {"causal": "top_left"}, corner):
            extras = {"return_weights": True, "return_lse": True}
            plain = F.dot_product_attention(q, k, v, **options)
            found = F.dot_product_attention(q, k, v, **options, **extras)
            keep = np.ones((queries, keys), bool)
            expected = F.dot_product_attention(q, k, v, keep_mask=keep, **options, **extras)
            np.testing.assert_array_equal(plain, found[0])
            for a, b in zip(found, expected):
                np.testing.assert_array_equal(a, b, err_msg=f"{queries} {dim} {options}")
    assert (True in chosen) == (keys <= 64)  # 50 queries fill the lanes of any vector


@pytest.mark.parametrize("keys", [1, 3, 17, 64, 65])
@pytest.mark.parametrize("batch, dim", [(1, 3), (2, 20), (37, 8), (131, 33)])
def test_single_queries_by_items_or_by_rows(isa, threads, batch, dim, keys, dtype, rng):
    """One query an item: items side by side, but with a mask of single keys one by one; on threads, too."""
    q, k, v = (numbers(rng, batch, rows, size, dtype=dtype) for rows, size in ((1, 7), (keys, 7), (keys, dim)))
    w_v = numbers(rng, 7, dtype=dtype)
    v[batch // 2, keys // 2, dim - 1], k[0, keys - 1, 0], q[batch - 1, 0, 0] = np.inf, np.nan, np.nan
    lens = rng.integers(0, keys + 1, batch)
    extras = {"return_weights": True, "return_lse": True}
    for options in (
        {},
        {"valid_lens": lens},
        {"valid_lens": lens, "empty_rows": "uniform"},
        {"causal": "top_left"},
        {"window": (None, keys // 2), "valid_lens": lens},
    ):
        expected = F.additive_attention(q, k, v, w_v, **options, keep_mask=np.ones((1, keys), bool), **extras)
        for n in (1, 3):
            threads(n)
            plain = F.additive_attention(q, k, v, w_v, **options)
            found = F.additive_attention(q, k, v, w_v, **options, **extras)
            np.testing.assert_array_equal(plain, found[0])
            for a, b in zip(found, expected):
                np.testing.assert_array_equal(a, b, err_msg=f"{options}")


@pytest.mark.parametrize("asked", [(False, True), (True, False), (True, True)])
def test_extras_change_nothing(isa, asked, dtype, rng):
    q, k, v = (numbers(rng, B, rows, FEATURES, dtype=dtype) for rows in (Q, 3 * K, 3 * K))
    options = {"valid_lens": [3 * K, 20, 200], "dropout": 0.25, "rng": 7}
    plain = F.dot_product_attention(q, k, v, **options)
    with_extras = F.dot_product_attention(q, k, v, **options, return_weights=asked[0], return_lse=asked[1])
    assert bits(with_extras[0]) == bits(plain)


def test_instruction_sets_agree(rng, dtype):
    """Within rounding: the same scores, sums of the same numbers in another order."""
    results = {}
    q, k, v = (numbers(rng, B, rows, FEATURES, dtype=dtype) for rows in (Q, K, K))
    w_v = numbers(rng, FEATURES, dtype=dtype)
    for name in (name for name, offered in _core.isas() if offered):
        _core.set_isa(name)
        results[name] = (
            *F.dot_product_attention(q, k, v, LENGTHS["per query"], return_weights=True),
            F.additive_attention(q, k, v, w_v, valid_lens=LENGTHS["per item"]),
            *F.dot_product_attention_backward(v[:, :Q], q, k, v, LENGTHS["per item"]),
        )
    # Outputs are around 1, gradients a few; sums of some hundred terms, scores of FEATURES products.
    tolerance = 200 * np.finfo(dtype).eps
    for name, found in results.items():
        for a, b in zip(found, results["scalar"]):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=name)
