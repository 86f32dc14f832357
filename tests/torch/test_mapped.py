"""torch.vmap: a mapped call gives what a loop over the calls gives, alone and among other transforms."""

import copy

import pytest
import torch

import needs
from mha_c import torch as mt
from mha_c.torch import functional

needs.of_torch("torch.func")
vmap = torch.func.vmap
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def looped(call, dims, tensors):
    n = next(x.shape[dim] for x, dim in zip(tensors, dims) if dim is not None)
    found = [call(*[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims)]) for i in range(n)]
    return [torch.stack(parts) for parts in zip(*found)]


def check(call, dims, *tensors):
    """vmap against a loop, but for rounding; call gives a tuple."""
    expected = looped(call, dims, tensors)
    found = vmap(call, dims)(*tensors)
    assert len(found) == len(expected)
    torch.testing.assert_close(found, expected)


LAYERS = {
    "multi-head": lambda: mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.5, True).eval(),
    "no bias": lambda: mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.0),
    "additive": lambda: mt.AdditiveAttention(6, 6, 5, 0.0),
    "dot product": lambda: mt.DotProductAttention(0.0),
}
LENGTHS = {
    "all": (None, None), "shared": (None, torch.tensor([2, 0])), "of each": (0, torch.tensor([[1, 2], [3, 4], [0, 9]])),
    "of each query": (2, torch.arange(2 * 3 * 3).reshape(2, 3, 3) % 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("lens", LENGTHS)
@pytest.mark.parametrize("grad", [False, True])
def test_layers(kind, lens, grad):
    layer, (lens_dim, lens) = LAYERS[kind](), LENGTHS[lens]
    queries, keys = torch.randn(3, 2, 3, 6), torch.randn(2, 4, 6, 3)

    def call(queries, keys, lens):
        out = layer(queries, keys, keys, lens)
        return out, layer.attention_weights.clone()

    def one(x, lens):
        return (layer(x, x, x, lens),)

    with torch.set_grad_enabled(grad):
        check(call, (0, 3, lens_dim), queries, keys, lens)
        check(call, (0, None, lens_dim), queries, keys[..., 0], lens)
        check(call, (None, 3, lens_dim), queries[0], keys, lens)
        check(one, (1, lens_dim), queries.transpose(0, 1), lens)
        check(lambda q, k: call(q, k, None), (0, 3), queries.double().float(), keys)


def test_gradients_of_a_mapped_layer():
    layer, x = mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.0, True).double(), torch.randn(3, 2, 4, 6, dtype=torch.float64)
    x.requires_grad_()

    def call(x):
        return layer(x, x, x, torch.tensor([3, 2]))

    t = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    grads = [torch.autograd.grad((out * t).sum(), [x, *layer.parameters()]) for out in (
        vmap(call)(x), torch.stack([call(y) for y in x]))]  # fmt: skip
    torch.testing.assert_close(*grads)


def test_weights_of_a_mapped_layer():
    layer, x = mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.0), torch.randn(3, 2, 4, 6)
    lens, params = torch.tensor([3, 2]), [layer.W_q.weight, layer.W_k.weight]

    def call(x):
        return layer(x, x, x, lens), layer.attention_weights.square()

    found = []
    for out, weights in (vmap(call)(x), looped(call, (0,), (x,))):
        loss = out.sum() + weights.sum()
        found.append([out, weights, *torch.autograd.grad(loss, params)])
    torch.testing.assert_close(*found)
    vmap(lambda x: layer(x, x, x, lens))(x)  # read afterwards, they are those of all, as of d2l's
    rows = torch.stack([layer(y, y, y, lens) for y in x]), layer.attention_weights
    vmap(lambda x: layer(x, x, x, lens))(x)
    weights = layer.attention_weights
    assert weights.shape == (3, 2, 2, 4, 4)
    torch.testing.assert_close(weights[-1], rows[1])
    assert torch.equal(copy.deepcopy(layer).attention_weights, weights)


def test_maps_of_maps():
    layer, x = mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.0), torch.randn(2, 3, 2, 4, 6)
    found = vmap(vmap(lambda x: layer(x, x, x)))(x)
    torch.testing.assert_close(found, torch.stack([torch.stack([layer(z, z, z) for z in y]) for y in x]))
    k = torch.randn(3, 2, 5, 6)  # mapped by the outer one alone
    found = vmap(lambda k: vmap(lambda x: layer(x, k, k))(x[0]))(k)
    torch.testing.assert_close(found, torch.stack([torch.stack([layer(z, y, y) for z in x[0]]) for y in k]))


def masks():
    torch.manual_seed(1)
    whole, per_head = torch.rand(2, 1, 3, 4) > 0.3, torch.randn(2, 4, 3, 4)
    yield "none", (None, None), (None, None)
    yield "for all", (None, None), (whole[0, 0], torch.randn(3, 4))
    yield "of the batch", (None, None), (whole, per_head)
    yield "one item's", (None, None), (whole[:1], per_head[:1])
    yield "each its own, rank 2", (0, 2), (torch.rand(5, 3, 4) > 0.3, torch.randn(3, 4, 5))
    yield "each its own", (0, 1), (torch.rand(5, 2, 4, 3, 4) > 0.3, torch.randn(1, 5, 4, 3, 4))


@pytest.mark.parametrize("kind", [name for name, *_ in masks()])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "window": (2, 1), "scale": 0.3}, {"softcap": 2.0}])
def test_functions(kind, options):
    dims, (keep_mask, bias) = next((dims, found) for name, dims, found in masks() if name == kind)
    q, k, v = torch.randn(5, 2, 4, 3, 6), torch.randn(2, 5, 2, 4, 6), torch.randn(5, 2, 2, 4, 3)
    lens = torch.tensor([3, 4])

    def call(q, k, v, keep_mask, bias):
        given = {"return_weights": True, "return_lse": True, **options}
        return functional.dot_product_attention(q, k, v, lens, keep_mask=keep_mask, bias=bias, **given)

    check(call, (0, 1, 0, *dims), q, k, v, keep_mask, bias)
    check(lambda *x: (call(*x)[0],), (0, None, 0, *dims), q, k[:, 0], v, keep_mask, bias)


def test_functions_of_rank_3():
    q, k, w_v, mask = torch.randn(5, 2, 3, 6), torch.randn(5, 2, 4, 6), torch.randn(6), torch.rand(5, 3, 4) > 0.3
    check(lambda q, k, m: (functional.additive_attention(q, k, k, w_v, keep_mask=m),), (0, 0, 0), q, k, mask)
    terms = {"relative_bias": torch.randn(1, 5), "sinks": torch.randn(1), "bias": torch.randn(2, 3, 4)}
    check(lambda q, k: (functional.dot_product_attention(q, k, k, [2, 4], **terms),), (0, 0), q, k)


def test_maps_among_other_transforms():
    torch.manual_seed(0)
    F, t = torch.func, torch.randn(3, 2, 4, 6)
    layer, x = mt.MultiHeadAttention(6, 6, 6, 6, 2, 0.0), torch.randn(3, 2, 4, 6)
    names = {name: p.detach() for name, p in layer.named_parameters()}

    def call(x, p=names):
        return F.functional_call(layer, p, (x, x, x, [2, 3]))

    def each(x):
        return torch.stack([call(y) for y in x])

    torch.testing.assert_close(F.grad(lambda x: (vmap(call)(x) * t).sum())(x), F.grad(lambda x: (each(x) * t).sum())(x))
    found = F.grad(lambda p: (vmap(lambda x: call(x, p))(x) * t).sum())(names)
    expected = F.grad(lambda p: (torch.stack([call(y, p) for y in x]) * t).sum())(names)
    for name in names:
        torch.testing.assert_close(found[name], expected[name])
    found, expected = (F.jvp(run, (x,), (t,)) for run in (vmap(call), each))
    torch.testing.assert_close(found, expected)

    def of_closed_over(way):  # mapped by the outer transform alone, wrapped by none of the inner ones
        q = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
        return lambda k: way(lambda q: layer(q, k, k))(q)

    for way in (
        lambda f: F.grad(lambda q: f(q).sum()), lambda f: lambda q: F.jvp(f, (q,), (q,))[1],
        lambda f: F.grad(lambda q: vmap(lambda s: f(q * 1) * s)(torch.ones(2)).sum()),
    ):  # fmt: skip
        torch.testing.assert_close(vmap(of_closed_over(way))(x), torch.stack([of_closed_over(way)(k) for k in x]))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        found, expected = (forward_ad.unpack_dual(run(dual)).tangent for run in (vmap(call), each))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["dropout", "parameters", "sinks", "inner gradient", "tangents"])
def test_what_goes_another_way(kind):
    """Right as before: each draws its own dropout, has its own parameters, or wants more than numbers."""
    layer, x = mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.5).eval(), torch.randn(3, 2, 4, 6)
    if kind == "dropout":
        found = vmap(lambda x: layer(x, x, x, training=True), randomness="different")(torch.stack([x[0]] * 3))
        assert not torch.equal(found[0], found[1])
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(lambda x: layer(x, x, x, training=True))(x)
        return
    if kind == "parameters":
        names = dict(layer.named_parameters())

        def call(scale, x):
            scaled = {name: p * scale for name, p in names.items()}
            return (torch.func.functional_call(layer, scaled, (x, x, x)),)

        tensors = torch.tensor([1.0, 2.0, 3.0]), x
    elif kind == "sinks":
        tensors = torch.randn(3, 4), torch.randn(3, 2, 4, 3, 6)

        def call(sinks, x):
            return (functional.dot_product_attention(x, x, x, sinks=sinks),)

    else:
        tensors = x, torch.randn(3, 2, 4, 6)
        kinds = {
            "inner gradient": lambda x, t: (torch.func.grad(lambda x: (layer(x, x, x)[..., :6] * t).sum())(x),),
            "tangents": lambda x, t: torch.func.jvp(lambda x: layer(x, x, x), (x,), (t,)),
        }
        call = kinds[kind]
    found, expected = vmap(call)(*tensors), looped(call, (0, 0), tensors)
    torch.testing.assert_close(found, expected)


def test_beside_d2l():
    d2l = needs.d2l("0.17.6")
    ours, theirs = mt.MultiHeadAttention(6, 6, 6, 8, 2, 0.0), d2l.MultiHeadAttention(6, 6, 6, 8, 2, 0.0)
    theirs.load_state_dict(ours.state_dict())
    x, found = torch.randn(3, 2, 4, 6), []
    for layer in (ours, theirs):
        out = vmap(lambda x, layer=layer: (layer(x, x, x, None), layer.attention.attention_weights * 1))(x)
        grads = torch.autograd.grad((out[0] ** 2).sum(), list(layer.parameters()))
        found.append([*out, *grads])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("where", ["q", "k", "bias", "sinks"])
def test_nan_is_not_hidden(where):
    """A score of NaN is no score of -inf: who sees it gets NaN, as from the core."""
    shapes = {"q": (2, 2, 3, 4), "k": (2, 2, 5, 4), "bias": (3, 5), "sinks": (2,)}
    tensors = {name: torch.randn(*shape) for name, shape in shapes.items()}
    tensors[where].view(-1)[1] = torch.nan

    def call(q, k, bias, sinks):
        return functional.dot_product_attention(q, k, k, [4, 2], bias=bias, sinks=sinks, return_lse=True)

    for found, expected in zip(vmap(call, (0, None, None, None))(tensors["q"][None], *[*tensors.values()][1:]),
                               call(*tensors.values())):  # fmt: skip
        assert expected.isnan().any() and not expected.isnan().all()
        torch.testing.assert_close(found[0], expected, equal_nan=True)
