"""The torch modules inside the rest of torch: compilers, exporters, checkpointing."""

import copy
import itertools
import shutil
import warnings

import pytest
import torch
from torch import nn

import needs
import torch_modules
from mha_c import torch as mt
from mha_c.torch import functional


def layers():
    return {"multi-head with bias": torch_modules.layers(8, 2)["multi-head"], **torch_modules.layers(8, 2, bias=False)}


def results(layer, x, y, lens):
    """Output, weights, gradients."""
    out = layer(x, y, y, lens)
    weights = layer.attention_weights + 0
    return [out.detach(), weights, *torch.autograd.grad(out.square().sum(), [x, y, *layer.parameters()])]


def test_what_a_test_draws_is_the_same_in_every_run(seed):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))


# --- Compilers -------------------------------------------------------------------------------------------

# inductor builds a program for each instruction set to see that it runs, and its headers ahead of their first use.
QUICK = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name, backend",
    [*itertools.product(layers(), ["aot_eager"]), ("multi-head with bias", "inductor")],
)
def test_compile(name, backend):
    needs.compilers()
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    layer = layers()[name]
    x, y = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 7, 8, requires_grad=True)
    needs.fresh_compiler()
    from torch._inductor import config as inductor

    with inductor.patch(QUICK):
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
        for lens in (None, torch.tensor([3, 7]), torch.tensor([9, 8])):
            torch.testing.assert_close(results(compiled, x, y, lens), results(layer, x, y, lens))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_model_reads_weights_and_drops():
    needs.compilers()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha, self.additive = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5), mt.AdditiveAttention(8, 8, 6, 0.5)
            self.weights = None

        def forward(self, x, lens):
            y = self.mha(x, x, x, lens)
            self.weights = self.mha.attention.attention_weights
            z = functional.dot_product_attention(y, x, x, lens, causal=True, bias=x.new_zeros(5, 5))
            return self.additive(y, x, z, [5, 3]) + self.mha.attention_weights.sum()

    needs.fresh_compiler()
    # float64: the sum of all weights is constant, and the two ways round its gradient of zero differently.
    model, lens = Model().double(), torch.tensor([3, 5])
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outcomes = []
    for call in (model, compiled, compiled):
        torch.manual_seed(4)
        out = call(x, lens)
        outcomes.append([out, model.weights + 0, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])])
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0])
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(x, lens), model.eval()(x, lens))


def test_operators_are_well_formed():
    x, y = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 5, 4, requires_grad=True)
    W = [torch.randn(4, 4, requires_grad=True) for _ in range(4)]
    b, lens = torch.randn(4, requires_grad=True), torch.tensor([2, 5])
    v, masks = y.detach().clone(), (torch.ones(3, 5, dtype=torch.bool), torch.randn(2, 1, 3, 5, requires_grad=True))
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for arguments in (
        (x, y, v, lens, *W, b, None, None, b, None, *masks, 2, 2, "uniform", 0.0, "", 2, [], None),
        (x, y, v, *[None] * 12, 1, 1, "zero", 0.0, "top_left", 0, [], None),
        (x, y, v, lens + 5, *W[:2], *[None] * 6, b[None], None, None, 1, 1, "uniform", 0.0, "", 0, [], None),
    ):
        torch.library.opcheck(torch.ops.mha_c.layer, arguments, test_utils=tests)
        torch.library.opcheck(torch.ops.mha_c.layer_forward, arguments, test_utils=tests[:2])  # has no gradients
        torch.library.opcheck(torch.ops.mha_c.layer_with_weights, arguments, test_utils=tests[:2])  # has no gradients


def test_the_operators_of_weights_are_well_formed():
    q, k, w_v = (torch.randn(*shape, requires_grad=True) for shape in ((2, 4, 3, 6), (2, 2, 5, 6), (1, 6)))
    lens, keep, bias = torch.tensor([2, 5]), torch.ones(3, 5, dtype=torch.bool), torch.randn(3, 5, requires_grad=True)
    statistics, grad = (torch.zeros(2, 4, 3), torch.ones(2, 4, 3)), torch.randn(2, 4, 3, 5)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for given in (
        (q, k, w_v, bias, lens, *statistics, keep, "uniform", ""),
        (q, k, None, None, None, *statistics, None, "zero", "top_left"),
    ):
        torch.library.opcheck(torch.ops.mha_c.weights, given, test_utils=tests)
        torch.library.opcheck(torch.ops.mha_c.weights_forward, given, test_utils=tests[:2])  # has no gradients
        for some in (grad, grad * 0):
            needs_grad = [True, True, given[2] is not None, given[3] is not None]
            torch.library.opcheck(torch.ops.mha_c.weights_backward, (some, *given, needs_grad), test_utils=tests[:2])


def test_export_and_trace():
    needs.export()
    layer = layers()["multi-head with bias"].eval()
    x, lens = torch.randn(2, 5, 8), torch.tensor([3, 5])
    exported = torch.export.export(layer, (x, x + 1, x + 2, lens)).module()
    torch.testing.assert_close(exported(2 * x, x, x, lens), layer(2 * x, x, x, lens))
    with pytest.warns():
        traced = torch.jit.trace(layer, (x, x + 1, x + 2, lens), check_trace=False)
    other = torch.randn(2, 5, 8)
    torch.testing.assert_close(traced(other, x, x, lens), layer(other, x, x, lens))


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("way", ["export", "trace"])
def test_gradients_of_programs_with_an_empty_row_among_others(way, empty_rows):
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, empty_rows=empty_rows).eval()
    inputs = [torch.randn(2, n, 8) for n in (3, 5, 5)]
    lens = torch.tensor([[1, 2, 3], [5, 0, 4]])
    if way == "export":
        needs.export()
        program = torch.export.export(layer, (*inputs, lens)).module()
    else:
        with warnings.catch_warnings():  # a newer torch warns of torch.jit itself
            warnings.simplefilter("ignore")
            program = torch.jit.trace(layer, (*inputs, lens), check_trace=False)
    outcomes = []
    for call in (layer, program):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = call(*leaves, lens)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert float(outcomes[0][1][1, 1].abs().max()) == 0  # the query that sees no key
    torch.testing.assert_close(*outcomes, rtol=0, atol=2e-6)  # float32 sums in another order


# --- Memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("size", [5, 300])
def test_checkpointing(size, use_reentrant):
    from torch.utils.checkpoint import checkpoint

    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5), torch.randn(10, size, 8, requires_grad=True)
    lens, outcomes = torch.tensor([3, 5] * 5), []
    for call in (layer, lambda *tensors: checkpoint(layer, *tensors, use_reentrant=use_reentrant)):
        torch.manual_seed(2)
        out = call(x, x, x, lens)
        out.sum().backward()
        leaves = [x, *layer.parameters()]
        outcomes.append([out, *[leaf.grad for leaf in leaves]])
        for leaf in leaves:
            leaf.grad = None
    torch.testing.assert_close(*outcomes)  # sums over the three uses of x may come in another order


def test_saved_tensors_can_be_moved_away():
    """torch.autograd.graph.save_on_cpu and its like see the tape of a large call."""
    sizes = []
    layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(30, 300, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x, x, x).sum(), x)[0]

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x, x, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert sum(sizes) >= 5 * x.numel()  # inputs, projected q, k, v, context
