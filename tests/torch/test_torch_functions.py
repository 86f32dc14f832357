"""Functions of mha_c.torch, the attention of other courses, and the book's decoder."""

import pytest
import torch

from mha_c import torch as mt
from mha_c.torch import functional, variants


def test_variants_are_those_of_the_numpy_side():
    import numpy as np

    import mha_c.variants

    x, drop = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool).triu(1)
    several = "MultiHeadSelfAttentionAISummer"
    cases = (
        ("MultiHeadedSelfAttention", (8, 2)),
        ("SelfAttentionAISummer", (8,)),
        (several, (8, 2)),
        (several, (8, 2, 3)),
    )
    for name, arguments in cases:
        layer, twin = getattr(variants, name)(*arguments), getattr(mha_c.variants, name)(*arguments)
        twin.load_state_dict(layer.state_dict())
        assert repr(layer.eval()) == repr(twin)
        masks = [()] if name == "MultiHeadedSelfAttention" else [(), (drop,)]
        for mask in masks:
            expected = torch.from_numpy(twin(x.numpy(), *[m.numpy() for m in mask]))
            torch.testing.assert_close(layer(x, *mask), expected)
    q, k, v = torch.randn(3, 1, 4, 2), torch.randn(2, 5, 2), torch.randn(3, 2, 5, 3)
    expected_pair = mha_c.variants.scaled_dot_product_attention(q.numpy(), k.numpy(), v.numpy())
    for found, expected in zip(variants.scaled_dot_product_attention(q, k, v), expected_pair):
        torch.testing.assert_close(found, torch.from_numpy(np.array(expected)))
    with pytest.raises(AttributeError, match="call the layer first"):
        variants.MultiHeadedSelfAttention(8, 2).attention_weights  # noqa: B018
    with pytest.raises(TypeError, match="True = drop"):
        variants.SelfAttentionAISummer(8)(x, torch.ones(5, 5))


def test_masking_functions_with_gradients():
    import numpy as np

    import mha_c

    X = torch.randn(2, 3, 4)
    X[0, :2, :2] = X[1, 2] = -torch.inf  # rows in which nothing counts, of some lengths or of all
    X.requires_grad_()
    for lens in (None, [2, 4], [[1, 2, 3], [0, -1, 9]], torch.tensor([2.5, 1.0])):
        for empty_rows in ("uniform", "zero"):
            found = mt.masked_softmax(X, lens, empty_rows=empty_rows)
            expected = mha_c.masked_softmax(X.detach().numpy(), lens, empty_rows=empty_rows)
            torch.testing.assert_close(found.detach(), torch.from_numpy(expected))
            assert torch.isfinite(torch.autograd.grad(found.square().sum(), X)[0]).all()
    assert mt.sequence_mask(torch.ones(2, 3, 4), [1, 2], value=-1).equal(
        torch.from_numpy(np.asarray(mha_c.sequence_mask(np.ones((2, 3, 4), np.float32), [1, 2], value=-1)))
    )
    spoilt = torch.tensor([[[torch.nan, 0.0, 1.0, 2.0], [1.0, 1.0, torch.nan, torch.nan]]])
    found = mt.masked_softmax(spoilt, [2])
    assert found[0, 0].isnan().all() and found[0, 1].tolist() == [0.5, 0.5, 0, 0]  # as in d2l: where it is seen, NaN
    Y = torch.randn(2, 4, 10)
    assert torch.equal(mt.transpose_output(mt.transpose_qkv(Y, 5), 5), Y)
    misfits = (
        lambda: mt.masked_softmax(X, [1]),
        lambda: mt.masked_softmax(X[0], [1]),
        lambda: mt.sequence_mask(X[0, 0], [1]),
        lambda: mt.transpose_qkv(Y, 3),
        lambda: mt.transpose_qkv(Y[0], 2),
        lambda: mt.transpose_output(Y, 3),
    )
    for call in misfits:
        with pytest.raises(mha_c.ShapeError):
            call()
    with pytest.raises(TypeError):
        mt.masked_softmax(X, torch.tensor([True, False]))
    for split in (mt.transpose_qkv, mt.transpose_output):
        with pytest.raises(ValueError, match="num_heads must be at least 1, got 0"):
            split(Y, 0)


def test_functional_errors_and_types():
    q = torch.randn(2, 3, 4)
    for bad, error in (
        (lambda: functional.dot_product_attention(q, q.double(), q), TypeError),
        (lambda: functional.dot_product_attention(q.numpy(), q, q), TypeError),
        (lambda: functional.dot_product_attention(q, q, q, rng="a"), TypeError),
        (lambda: functional.dot_product_attention(q, q[:, :2], q[:, :2], causal=True), ValueError),
        (lambda: functional.dot_product_attention(q, q, q, keep_mask=torch.ones(3, 3)), TypeError),
        (lambda: functional.dot_product_attention(q, q, q, keep_mask=-torch.eye(3, dtype=torch.int64)), ValueError),
        (lambda: functional.additive_attention(q, q, q, torch.ones(2, 2)), ValueError),
        (lambda: functional.additive_attention(q, q, q, torch.ones(3), torch.ones(3, 5)), ValueError),
        (lambda: functional.additive_attention(q, q, q, torch.ones(3), torch.ones(3, 4).double()), TypeError),
        (lambda: functional.merge(q, q[..., 0], q, q[..., :2]), ValueError),
    ):
        with pytest.raises(error):
            bad()
    half = q.bfloat16()
    assert torch.equal(
        functional.dot_product_attention(half, half, half),
        functional.dot_product_attention(*[half.float()] * 3).bfloat16(),
    )
    generator = torch.Generator().manual_seed(3)
    first = functional.dot_product_attention(q, q, q, dropout=0.5, rng=generator)
    again = functional.dot_product_attention(q, q, q, dropout=0.5, rng=torch.Generator().manual_seed(3))
    assert torch.equal(first, again)
    assert torch.equal(*[functional.dot_product_attention(q, q, q, dropout=0.5, rng=5) for _ in range(2)])


def test_decoder_of_the_book():
    decoder = mt.Seq2SeqAttentionDecoder(10, 8, 16, 2).eval()
    assert [name for name, _ in decoder.named_children()] == ["attention", "embedding", "rnn", "dense"]
    assert isinstance(decoder, mt.AttentionDecoder)
    state = decoder.init_state((torch.randn(7, 4, 16), torch.randn(2, 4, 16)), torch.tensor([3, 7, 1, 2]))
    ids = torch.arange(20).reshape(4, 5) % 10
    whole, end = decoder(ids, state)
    assert whole.shape == (4, 5, 10) and end[0].shape == (4, 7, 16) and len(end) == 3 and end[1].shape == (2, 4, 16)
    weights = decoder.attention_weights
    assert len(weights) == 5 and all(w.shape == (4, 1, 7) for w in weights)
    for step in range(5):  # one token at a time gives the same
        scores, state = decoder(ids[:, step : step + 1], state)
        torch.testing.assert_close(scores, whole[:, step : step + 1])
        torch.testing.assert_close(decoder.attention_weights[0], weights[step] + 0)
    for method in (lambda d: d.init_state(None), lambda d: d(ids, None), lambda d: d.attention_weights):
        with pytest.raises(NotImplementedError):
            method(mt.AttentionDecoder())
