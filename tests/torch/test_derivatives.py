"""Derivatives beyond the plain backward call: of derivatives, forwards, in batches, by torch.func."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.autograd import functional as AF

import needs
from mha_c import torch as mt
from mha_c.torch import functional
from torch_derivatives import check, with_parameters
from torch_features import pairs
from torch_modules import leaf

# By torch, for jvp.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

F64 = torch.float64


LENS = {"none": None, "1-D": [3, 1], "2-D": [[1, 2], [4, 9]], "empty rows": [[1, 0], [4, -1]], "all empty": [0, 0]}


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("dropout, empty_rows", [(0.0, "uniform"), (0.4, "zero")])
def test_layers(lens, dropout, empty_rows):
    q, k, v = leaf(2, 2, 3), leaf(2, 4, 2), leaf(2, 4, 2)
    multi_head = mt.MultiHeadAttention(2, 3, 2, 4, 2, dropout, bias=lens == "1-D", empty_rows=empty_rows)
    additive = mt.AdditiveAttention(2, 3, 3, dropout, empty_rows=empty_rows)
    for layer in (multi_head, additive):
        check(with_parameters(layer.double(), LENS[lens]), q, k, v, *layer.parameters())
    dot = mt.DotProductAttention(dropout, empty_rows=empty_rows)
    check(lambda q, k, v: dot(q, k, v, LENS[lens]), q, leaf(2, 4, 3), v)


OPTIONS = [
    {},
    {"causal": "top_left"},
    {"causal": "bottom_right", "window": (2, 1), "scale": -0.7},
    {"window": (1, None)},
    {"valid_lens": [2, 4], "dropout": 0.4, "rng": 7},
    {"valid_lens": [0, 4], "empty_rows": "uniform"},
    {"keep_mask": torch.arange(12).reshape(3, 4) % 5 > 1},
    {"keep_mask": torch.zeros(3, 4, dtype=torch.bool)},
]


@pytest.mark.parametrize("kind", ["dot", "additive"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
def test_functional(kind, options):
    """The output, the weights and the logarithm of their divisor."""
    extras = {"return_weights": True, "return_lse": "valid_lens" not in options and "keep_mask" not in options}
    if kind == "dot":  # two query heads for each key head
        check(
            lambda *x: functional.dot_product_attention(*x, **options, **extras),
            leaf(2, 2, 3, 2), leaf(2, 1, 4, 2), leaf(2, 1, 4, 2),
        )  # fmt: skip
    else:
        tensors = leaf(2, 3, 3), leaf(2, 4, 2), leaf(2, 4, 2), leaf(3), leaf(3, 3), leaf(3, 2)
        check(lambda *x: functional.additive_attention(*x, **options, **extras), *tensors)


@pytest.mark.parametrize("shape", [(3, 4), (2, 1, 1, 4), (1, 2, 3, 1)])
def test_bias(shape):

    def call(q, k, v, bias):
        return functional.dot_product_attention(q, k, v, [4, 2], bias=bias, causal="bottom_right", dropout=0.2, rng=1)

    check(call, leaf(2, 2, 3, 2), leaf(2, 2, 4, 2), leaf(2, 2, 4, 2), leaf(*shape))
    q, k, v, bias = leaf(1, 2, 2), leaf(1, 3, 2), leaf(1, 3, 2), torch.tensor([[0, -torch.inf, 1], [-torch.inf] * 3])
    check(lambda q, k, v: functional.dot_product_attention(q, k, v, bias=bias.double()), q, k, v)


def test_one_tensor_computed_from_another():
    """Each input is a variable of its own: what leads from one to the other is counted once."""
    layer, x = mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.3).double(), leaf(2, 3, 4)
    call = with_parameters(layer, [3, 2])
    check(lambda x, *parameters: call(x, 2 * x, torch.sin(x), *parameters), x, *layer.parameters())
    check(lambda x, *parameters: call(x, x, x, *parameters), x, *layer.parameters())
    y = leaf(2, 3, 4)
    check(lambda x, y: functional.dot_product_attention(x, y, y), x, y)


def tanh_of(layer, lens):
    return lambda x: torch.tanh(layer(x, x, x, lens)).sum()


@pytest.mark.parametrize("lens", [None, torch.tensor([3, 1])])
def test_what_torch_asks_with_second_derivatives(lens):
    x, direction = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    for ours, theirs in pairs(bias=True):
        found, expected = (
            [
                AF.hessian(tanh_of(layer, lens), x),
                AF.hessian(tanh_of(layer, lens), x, vectorize=True),
                AF.hvp(tanh_of(layer, lens), x, direction)[1],
                AF.vhp(tanh_of(layer, lens), x, direction)[1],
                AF.jvp(lambda x, layer=layer: layer(x, x, x, lens), x, direction)[1],
                AF.jacobian(lambda x, layer=layer: layer(x, x, x, lens), x, vectorize=True),
                AF.jacobian(lambda x, layer=layer: layer(x, x, x, lens), x, vectorize=True, strategy="forward-mode"),
            ]
            for layer in (ours, theirs)
        )
        torch.testing.assert_close(found, expected)


def test_a_penalty_on_the_gradient():
    """As d2l's own modules, whichever way the second backward call is made."""
    lens = torch.tensor([3, 1])

    def by_backward(penalty, leaves):
        penalty.backward()

    def by_backward_of_inputs(penalty, leaves):
        penalty.backward(inputs=leaves)

    def by_grad(penalty, leaves):
        for x, grad in zip(leaves, torch.autograd.grad(penalty, leaves, allow_unused=True)):
            x.grad = grad

    for way in (by_backward, by_backward_of_inputs, by_grad):
        for ours, theirs in pairs(bias=True):
            results = []
            for layer in (ours, theirs):
                x = torch.linspace(-1, 1, 24, dtype=F64).reshape(2, 3, 4).requires_grad_()
                layer.zero_grad()
                leaves = [x, *layer.parameters()]
                (grad,) = torch.autograd.grad(layer(x, x, x, lens).square().sum(), x, create_graph=True)
                way(grad.square().sum(), leaves)
                results.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("size", [3, 200])  # the tape kept as arrays; as saved tensors
def test_gradients_with_and_without_a_graph_agree(size):
    layer, x = mt.MultiHeadAttention(4, 4, 4, 8, 2, 0.5), torch.randn(20, size, 4, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = []
    for create_graph in (False, True):
        torch.manual_seed(1)
        out = layer(x, x, x, torch.full((20,), size - 1))
        found.append(torch.autograd.grad(out.square().sum(), leaves, create_graph=create_graph))
    for a, b in zip(*found):
        largest = float(a.abs().max())  # both are single precision: sums of size terms, a few roundings
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * largest)
    assert all(grad.requires_grad for grad in found[1])


def test_padding_may_hold_nan_in_second_derivatives_too():
    for layer in (mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.0).double(), mt.AdditiveAttention(4, 4, 3, 0.0).double(),
                  mt.DotProductAttention(0.0)):  # fmt: skip
        q, y, results = leaf(2, 3, 4), torch.randn(2, 5, 4, dtype=F64), []
        for filler in (0.0, float("nan")):
            y[0, 2:], y[1, 4:] = filler, filler
            k = y.clone().requires_grad_()
            leaves = [q, k, *layer.parameters()]
            (grad,) = torch.autograd.grad(layer(q, k, k, [2, 4]).square().sum(), q, create_graph=True)
            results.append(torch.autograd.grad(grad.square().sum(), leaves, allow_unused=True))
        for a, b in zip(*results):
            assert a is b is None or torch.equal(a, b)


# --- Forward mode ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_dual_numbers(grad):
    """A tangent in the inputs, or in a parameter alone, and whether or not gradients are recorded."""
    direction = torch.randn(2, 3, 4, dtype=F64)
    for ours, theirs in pairs(bias=True):
        tangents = []
        for layer in (ours, theirs):
            x = torch.linspace(-1, 1, 24, dtype=F64).reshape(2, 3, 4)
            with torch.set_grad_enabled(grad), fwAD.dual_level():
                dual = fwAD.make_dual(x, direction)
                tangents.append(fwAD.unpack_dual(layer(dual, x, x, torch.tensor([3, 1]))).tangent)
                if hasattr(layer, "W_q"):
                    weight = layer.W_q._parameters.pop("weight")
                    layer.W_q.weight = fwAD.make_dual(weight.detach(), torch.ones_like(weight))
                    tangents.append(fwAD.unpack_dual(layer(x, x, x, torch.tensor([3, 1]))).tangent)
                    del layer.W_q.weight
                    layer.W_q.weight = weight
        half = len(tangents) // 2
        torch.testing.assert_close(tangents[:half], tangents[half:])
    q, t = torch.randn(2, 2, 3, 4)
    with fwAD.dual_level():
        dual = fwAD.make_dual(q[None], t[None])
        found = fwAD.unpack_dual(functional.dot_product_attention(dual, dual, dual)).tangent
        expected = fwAD.unpack_dual(torch.softmax(dual @ dual.mT / 2, -1) @ dual).tangent
    torch.testing.assert_close(found, expected)


# --- torch.func ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [None, torch.tensor([3, 1])])
def test_torch_func(lens):
    F = torch.func
    x, t = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64)
    for ours, theirs in pairs(bias=True):
        results = []
        for layer in (ours, theirs):
            call, loss = (lambda x, layer=layer: layer(x, x, x, lens)), tanh_of(layer, lens)
            parameters = {name: p.detach() for name, p in layer.named_parameters()}

            def of_parameters(parameters, x, layer=layer):
                return F.functional_call(layer, parameters, (x, x, x, lens)).square().sum()

            results.append([
                F.grad(loss)(x), F.vjp(call, x)[1](t)[0], F.jvp(call, (x,), (t,))[1], F.jacrev(call)(x),
                *(F.grad(of_parameters)(parameters, x).values()),
            ])  # fmt: skip
            if lens is None or layer is ours:  # d2l's masks are beyond vmap: hence one call after the other
                each, over = torch.stack([x, 2 * x, t]), F.vmap
            else:
                each, over = [x, 2 * x, t], loop
            forwards = F.jacfwd(call)(x) if over is F.vmap else F.jacrev(call)(x)
            hessian = F.hessian(loss)(x) if over is F.vmap else AF.hessian(loss, x)
            results[-1] += [
                forwards, hessian, over(call)(each), over(F.grad(loss))(each),
                *over(lambda x, p=parameters, f=of_parameters: tuple(F.grad(f)(p, x).values()))(each),
            ]  # fmt: skip
        torch.testing.assert_close(*results)


def loop(function):
    def call(items):
        found = [function(item) for item in items]
        return tuple(map(torch.stack, zip(*found))) if isinstance(found[0], tuple) else torch.stack(found)

    return call


def test_vmap_over_lengths_and_parameters():
    x, lens = torch.randn(3, 2, 3, 4), torch.tensor([[1, 2], [3, 0], [2, 9]])
    layers = [mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.0) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(layers)
    found = torch.func.vmap(lambda p, x, n: torch.func.functional_call(layers[0], p, (x, x, x, n)))(parameters, x, lens)
    torch.testing.assert_close(found, torch.stack([layer(y, y, y, n) for layer, y, n in zip(layers, x, lens)]))
    found = torch.func.vmap(lambda y, n: functional.dot_product_attention(y, y, y, n, causal=True))(x, lens)
    expected = [functional.dot_product_attention(y, y, y, n, causal=True) for y, n in zip(x, lens)]
    torch.testing.assert_close(found, torch.stack(expected))


def test_torch_func_and_dropout():
    needs.operators()
    layer, x = mt.DotProductAttention(0.5), torch.randn(2, 6, 4)
    each = torch.stack([x, x])

    def call(x):
        torch.manual_seed(3)
        return layer(x, x, x)

    (expected,) = torch.autograd.grad(call(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).sum())(x.detach()), expected)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(each)
    same = torch.func.vmap(lambda x: layer(x, x, x), randomness="same")(each)
    different = torch.func.vmap(lambda x: layer(x, x, x), randomness="different")(each)
    assert torch.equal(*same) and not torch.equal(*different)


def test_tensors_left_over_from_a_transform():
    """What escapes from a transform is, once that is over, an ordinary tensor again, as it is to torch."""
    kept, layer = [], mt.MultiHeadAttention(4, 4, 4, 4, 2, 0.0)
    x = torch.randn(2, 3, 4)

    def keep(x):
        kept.append(x)
        return x.sum()

    torch.func.grad(keep)(x)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(layer(*kept * 3), layer(x, x, x))
