"""What torch.compile makes of a layer: one operator that reads the weights where they lie, and eager's bits."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import needs

needs.compilers()

from mha_c import torch as mt  # noqa: E402  torch must be there
from mha_c.torch._call import ops  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = "multi-head", "multi-head with biases", "dot product", "additive"


def make(name):
    torch.manual_seed(0)
    return {
        "multi-head": lambda: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0),
        "multi-head with biases": lambda: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, bias=True, empty_rows="zero"),
        "dot product": lambda: mt.DotProductAttention(0.0),
        "additive": lambda: mt.AdditiveAttention(8, 8, 6, 0.0),
    }[name]().eval()


def compiled(call, **options):
    needs.fresh_compiler()
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **options})


class Graphs:
    """A backend that runs what it is given as it is, and remembers which of our operators are in it."""

    def __init__(self):
        self.names = []

    def __call__(self, graph, _):
        ours = [node for node in graph.graph.nodes if "mha_c" in str(node.target)]
        self.names += [str(node.target).split(".")[1] for node in ours]
        return graph


@pytest.mark.by_day("name", "length", together=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length, operator", [(3, "layer_with_weights"), (20, "layer")])  # which are more than q and k
def test_bits_of_eager_calls(name, length, operator):
    layer, x, y = make(name), torch.randn(2, length, 8), torch.randn(2, length + 2, 8)
    graphs = Graphs()
    call = compiled(layer, backend=graphs)
    with torch.no_grad():
        for lens in (None, torch.tensor([2, length]), torch.tensor([0, length + 9])):
            found = call(x, y, y, lens), layer.attention_weights + 0
            shown = copy.deepcopy(layer).attention_weights
            expected = layer(x, y, y, lens), layer.attention_weights + 0
            assert all(map(torch.equal, found, expected))
            assert torch.equal(shown + 0, found[1])
    assert set(graphs.names) == {operator} and len(graphs.names) >= 2


@pytest.mark.by_day("name", "n", together=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n, operators", [(4, ["layer_with_weights"]), (17, ["layer", "weights"])])
def test_weights_that_a_model_reads_in_its_call(name, n, operators):
    """As the book's encoders read those of each block: the core computes them, to eager's bits, not the compiler.

    Those that are no more numbers than queries and keys come with the call.
    """
    layer, x, y, graphs = make(name), torch.randn(2, n, 8), torch.randn(2, n, 8), Graphs()

    def call(**masks):
        return layer(x, y, y, **masks), layer.attention_weights

    seen = compiled(call, backend=graphs)
    for masks in (
        {}, {"valid_lens": torch.tensor([0, 3])}, {"causal": True}, {"bias": torch.randn(n, n)},
        {"keep_mask": torch.ones(n, n).tril().bool()},
    ):  # fmt: skip
        graphs.names.clear()
        with torch.no_grad():
            found, expected = seen(**masks), call(**masks)
        assert graphs.names == operators
        assert all(map(torch.equal, found, expected)), masks


def test_dropout_and_training_in_a_call():
    layer, x = make("multi-head"), torch.randn(2, 5, 8)
    layer.attention.dropout.p = 0.5
    outcomes = []
    with torch.no_grad():
        for call in (layer, compiled(layer)):
            torch.manual_seed(3)
            outcomes.append(call(x, x, x, training=True))
    assert torch.equal(*outcomes) and not torch.equal(outcomes[0], layer(x, x, x))


def test_weights_are_read_where_they_lie(monkeypatch):
    """No copy, no packing."""
    layer, x, met = make("multi-head with biases"), torch.randn(1, 2, 8), []

    def forward(*call, original=ops.layer_forward):
        met.append([tensor.data_ptr() for tensor in (*call[:3], *call[4][:8])])
        return original(*call)

    monkeypatch.setattr(ops, "layer_forward", forward)
    call = compiled(layer)
    linears = layer.W_q, layer.W_k, layer.W_v, layer.W_o
    expected = [*[x] * 3, *[linear.weight for linear in linears], *[linear.bias for linear in linears]]
    with torch.no_grad():
        call(x, x, x)
    call = compiled(layer.requires_grad_(False))  # gradients are recorded, but there are none
    call(x, x, x)
    assert met == [[tensor.data_ptr() for tensor in expected]] * 2


def test_what_needs_gradients_gets_them():
    layer, x = make("multi-head"), torch.randn(2, 3, 8)
    graphs = Graphs()
    call = compiled(layer, backend=graphs)
    for needs_grad in (False, True):
        layer.requires_grad_(not needs_grad)
        given = x.clone().requires_grad_(needs_grad)
        leaf = given if needs_grad else layer.W_v.weight
        (found,) = torch.autograd.grad(call(given, given, given).square().sum(), leaf)
        (expected,) = torch.autograd.grad(layer(given, given, given).square().sum(), leaf)
        torch.testing.assert_close(found, expected)
    assert set(graphs.names) == {"layer"}

    def part(x):  # a part of the graph without gradients
        with torch.no_grad():
            y = layer(x, x, x)
        return layer(x, x, x) * y

    given = x.clone().requires_grad_()
    found, expected = (torch.autograd.grad(f(given).sum(), given)[0] for f in (compiled(part), part))
    torch.testing.assert_close(found, expected)


# --- What has changed since is seen ------------------------------------------------------------------------------


def doubled(function):
    return lambda *arguments: function(*arguments) * 2


CHANGES = {
    "a child's forward": lambda layer, patch: patch.setattr(layer.W_k, "forward", lambda rows: rows * 2),
    "the forward of attention": lambda layer, patch: patch.setattr(layer.attention, "forward", lambda q, *_: q * 2),
    "the forward of dropout": lambda layer, patch: patch.setattr(layer.attention.dropout, "forward", lambda w: w * 2),
    "another child": lambda layer, patch: patch.setitem(layer._modules, "W_q", nn.Sequential(nn.Linear(8, 8))),
    "a bias": lambda layer, patch: patch.setattr(layer.W_q, "bias", nn.Parameter(torch.ones(8))),
    "another dropout": lambda layer, patch: patch.setitem(layer.attention._modules, "dropout", nn.Threshold(0.3, 9)),
    "number of heads": lambda layer, patch: patch.setattr(layer, "num_heads", 4),
    "empty rows": lambda layer, patch: patch.setattr(layer, "empty_rows", "zero"),
    "numbers": lambda layer, patch: layer.W_o.weight.data.mul_(3),
    "torch's linear": lambda layer, patch: patch.setattr(nn.functional, "linear", doubled(nn.functional.linear)),
    "forward of Linear": lambda layer, patch: patch.setattr(nn.Linear, "forward", doubled(nn.Linear.forward)),
    "forward of a class": lambda layer, patch: patch.setattr(
        mt.DotProductAttention, "forward", doubled(mt.DotProductAttention.forward)
    ),
    "transpose_qkv": lambda layer, patch: patch.setattr(
        mt.MultiHeadAttention, "transpose_qkv", doubled(mt.MultiHeadAttention.transpose_qkv)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_changes_behind_the_first_call(what, monkeypatch):
    layer, x, lens = make("multi-head"), torch.randn(2, 4, 8), torch.tensor([0, 3])
    call = compiled(layer, backend="eager")
    with torch.no_grad():
        before = call(x, x, x, lens)
        CHANGES[what](layer, monkeypatch)
        found, expected = call(x, x, x, lens), layer(x, x, x, lens)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(found, expected)


# --- Graphs that fit many calls ----------------------------------------------------------------------------------


def test_layers_of_one_kind_share_a_graph():
    layers, x = [make("multi-head") for _ in range(4)], torch.randn(2, 4, 8)
    for layer in layers:
        nn.init.normal_(layer.W_o.weight)
    call = compiled(lambda layer, x: layer(x, x, x), backend="eager")
    with torch.no_grad():
        call(layers[0], x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert all(torch.equal(call(layer, x), layer(x, x, x)) for layer in layers)


@pytest.mark.parametrize("grad", [False, True])
def test_sizes_that_are_not_known(grad):
    """Sizes as symbols, on both sides of where weights become more numbers than q and k; and sizes out of data."""
    layer, x = make("multi-head"), torch.randn(1, 60, 8, requires_grad=grad)
    call = compiled(layer, dynamic=True)
    with torch.set_grad_enabled(grad):
        for n_queries, n_keys in itertools.product((3, 50), (4, 60)):
            q, k = x[:, :n_queries], x[:, :n_keys]
            found, weights = call(q, k, k), layer.attention_weights + 0
            assert torch.equal(found, layer(q, k, k))
            torch.testing.assert_close(weights, layer.attention_weights + 0, rtol=1e-5, atol=1e-6)

    def chosen(x, which):
        some = x[0, which].unsqueeze(0)
        return layer(some, some, some)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.set_grad_enabled(grad):
        call = compiled(chosen)
        for which in (torch.arange(60) % 3 > 0, torch.arange(60) % 20 == 3):
            assert torch.equal(call(x, which), chosen(x, which))


@pytest.mark.parametrize("compiles", [False, True])
def test_what_weights_were_read_from_is_freed(compiles):
    """Weights that were looked at with gradients, and then forgotten: nothing of them stays."""
    layer, x, left = make("multi-head"), torch.randn(2, 9, 8), []
    call = compiled(layer, backend="eager") if compiles else layer
    for backward in (False, False, True):
        call(x, x, x)
        weights = layer.attention_weights
        loss = weights.square().sum()
        if backward:
            loss.backward()
        left += [weakref.ref(weights), weakref.ref(weights + 0), weakref.ref(loss)]
        del weights, loss
    call(x, x, x)
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def test_changed_weights_of_a_compiled_call_are_noticed():
    layer, x = make("multi-head"), torch.randn(2, 9, 8)
    compiled(layer, backend="eager")(x, x, x)
    weights = layer.attention_weights
    with torch.no_grad():
        layer.W_q.weight.mul_(-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights.square().sum().backward()
