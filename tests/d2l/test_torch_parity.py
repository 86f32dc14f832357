"""Our torch modules against d2l's own, weights copied: outputs, attention weights and every gradient, in float64.

Drawn: sizes, lengths in all forms, which inputs are one tensor, memory layouts, biases, scale of the data.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import needs
from book_models import is_eager
from mha_c import torch as mt


@st.composite
def calls(draw, single_head=False, same_sizes=False):
    """(queries, keys, values, lengths or None, num_hiddens, num_heads, bias)"""
    batch, n_queries, n_keys = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 30))
    heads = 1 if single_head else draw(st.sampled_from([1, 2, 3, 5, 8]))
    hiddens = heads * draw(st.sampled_from([1, 3, 4, 8, 17, 20]))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1.0, 1.0, 0.05, 5.0]))
    size, layout = st.integers(1, 24), st.sampled_from(["dense", "permuted", "rows apart", "expanded"])

    def tensor(rows, features):
        made = {
            "dense": lambda: torch.randn(batch, rows, features),
            "permuted": lambda: torch.randn(rows, batch, features).permute(1, 0, 2),
            "rows apart": lambda: torch.randn(batch, 2 * rows, features + 2)[:, ::2, :-2],
            "expanded": lambda: torch.randn(1, rows, features).expand(batch, -1, -1),
        }[draw(layout)]()
        return (scale * made.double()).requires_grad_()

    q = tensor(n_queries, draw(size))
    sharing = draw(st.sampled_from(["self", "keys are values", "separate"]))
    if sharing == "self":
        n_keys, k, v = n_queries, q, q
    else:
        k = tensor(n_keys, q.shape[2] if same_sizes else draw(size))
        v = k if sharing == "keys are values" else tensor(n_keys, draw(size))
    low = draw(st.sampled_from([1, 1, -1]))
    lens = {
        "none": None,
        "1-D": torch.randint(low, n_keys + 3, (batch,)),
        "2-D": torch.randint(low, n_keys + 3, (batch, n_queries)),
        "ramp": torch.arange(1, n_queries + 1).repeat(batch, 1),
    }[draw(st.sampled_from(["none", "1-D", "2-D", "ramp"]))]
    if lens is not None and draw(st.booleans()):
        lens = lens.float() - draw(st.sampled_from([0.0, 0.5]))
    return q, k, v, lens, hiddens, heads, draw(st.booleans())


GENERATIONS = st.sampled_from(needs.real_d2l.VERSIONS).map(needs.d2l)


def distinct(tensors):
    return [x for i, x in enumerate(tensors) if all(x is not y for y in tensors[:i])]


def outcome(layer, weights_of, tensors, lens, grad):
    """Output, weights and gradients of all inputs and parameters."""
    out = layer(*tensors, lens)
    names = [f"input {i}" for i in range(len(distinct(tensors)))] + [name for name, _ in layer.named_parameters()]
    grads = torch.autograd.grad(out, [*distinct(tensors), *layer.parameters()], grad(out))
    return {"output": out.detach(), "weights": weights_of(layer).detach(), **dict(zip(names, grads))}


def compare(ours, theirs, weights_of, tensors, lens):
    theirs(*tensors, lens)  # fixes the sizes of the lazy generation
    ours.double().load_state_dict(theirs.double().state_dict())
    seed = torch.randint(2**31, ()).item()

    def grad(out):
        torch.manual_seed(seed)
        return torch.randn_like(out)

    found = outcome(ours, weights_of, tensors, lens, grad)
    expected = outcome(theirs, weights_of, tensors, lens, grad)
    assert list(found) == list(expected)
    # Sums of up to 1000 terms of either sign in different order: 1000 eps = 2e-13 of the largest, with room for
    # logits of up to 1000 (scale 5), whose rounding the exponential passes on.
    # Gradients that are exactly 0 by cancellation are judged beside the others: hence the common scale.
    scale = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        note = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-11 * max(scale, 1), msg=note)


@settings(max_examples=needs.draws(60))
@given(call=calls(), d2l=GENERATIONS)
def test_multi_head_attention(call, d2l, float64):
    q, k, v, lens, hiddens, heads, bias = call
    sizes = (k.shape[2], q.shape[2], v.shape[2]) if is_eager(d2l) else ()
    theirs = d2l.MultiHeadAttention(*sizes, hiddens, heads, 0.0, bias)
    ours = mt.MultiHeadAttention(*sizes, hiddens, heads, 0.0, bias)
    compare(ours, theirs, lambda layer: layer.attention.attention_weights, (q, k, v), lens)


@settings(max_examples=needs.draws(60))
@given(call=calls(single_head=True), d2l=GENERATIONS)
def test_additive_attention(call, d2l, float64):
    q, k, v, lens, hiddens, _, _ = call
    sizes = (k.shape[2], q.shape[2]) if is_eager(d2l) else ()
    theirs, ours = d2l.AdditiveAttention(*sizes, hiddens, 0.0), mt.AdditiveAttention(*sizes, hiddens, 0.0)
    compare(ours, theirs, lambda layer: layer.attention_weights, (q, k, v), lens)


@settings(max_examples=needs.draws(60))
@given(call=calls(single_head=True, same_sizes=True), d2l=GENERATIONS)
def test_dot_product_attention(call, d2l):
    q, k, v, lens, _, _, _ = call
    compare(mt.DotProductAttention(0.0), d2l.DotProductAttention(0.0), lambda x: x.attention_weights, (q, k, v), lens)


@settings(max_examples=needs.draws(30))
@given(call=calls())
def test_dropout_is_that_of_the_numpy_side(call):
    """The same seed drops the same weights, in every form of the layer; in the mean nothing changes."""
    import numpy as np

    import mha_c

    q, k, v, lens, hiddens, heads, _ = call
    layer = mt.MultiHeadAttention(k.shape[2], q.shape[2], v.shape[2], hiddens, heads, 0.4).double()
    torch.manual_seed(1)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(1)
    found = layer(q, k, v, lens)
    projected = (W(x) for W, x in zip((layer.W_q, layer.W_k, layer.W_v), (q, k, v)))
    heads_of = [layer.transpose_qkv(x).unflatten(0, (-1, heads)) for x in projected]
    context = mha_c.functional.dot_product_attention(
        *[x.detach().numpy() for x in heads_of],
        None if lens is None else lens.numpy(),
        dropout=0.4,
        rng=seed,
        empty_rows="uniform",
    )
    expected = layer.W_o(torch.from_numpy(np.ascontiguousarray(context)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
