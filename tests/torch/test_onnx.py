"""Programs that run without us: torch.export, torch.jit.trace, and ONNX by both exporters, in onnxruntime.

What they compute is compared with the module's own call, which the other files compare with d2l's.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import children
import needs
from mha_c import torch as ours
from mha_c.torch import functional, variants

onnx, onnxruntime = needs.module("onnx"), needs.module("onnxruntime")
needs.module("onnxscript")

pytestmark = pytest.mark.filterwarnings(  # of torch's and onnxscript's own
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)
# float32 sums of some 50 terms around 1 in another order, thrice behind one another.
TOLERANCE = 5e-6


def modules():
    torch.manual_seed(0)
    return {
        "multi-head": ours.MultiHeadAttention(12, 12, 12, 12, 3, 0.5, bias=True),
        "multi-head, zero": ours.MultiHeadAttention(12, 12, 12, 12, 3, 0.5, empty_rows="zero"),
        "additive": ours.AdditiveAttention(12, 12, 6, 0.5),
        "dot": ours.DotProductAttention(0.5),
    }


def inputs(batch=2, n_queries=4, n_keys=7):
    rng = torch.Generator().manual_seed(batch + 10 * n_queries + 100 * n_keys)
    return [torch.randn(batch, n, 12, generator=rng) for n in (n_queries, n_keys, n_keys)]


def lengths(kind, batch, n_queries, n_keys):
    """None, (B,) or (B, Q): rows without keys, beyond all keys, and floats, which are rounded up."""
    if kind == "none":
        return None
    if kind == "item":
        return torch.tensor([n_keys + 3, 0, 2.5, 1])[:batch]
    return (torch.arange(batch * n_queries).reshape(batch, n_queries) * 3) % (n_keys + 2)


CASES = [("multi-head", "none"), ("multi-head", "query"), ("multi-head, zero", "query"), ("additive", "query"),
         ("dot", "item")]  # fmt: skip


def run(model, *tensors):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    given = [x.numpy() for x in tensors if x is not None]
    assert len(names) == len(given), (names, len(given))
    return [torch.from_numpy(x) for x in session.run(None, dict(zip(names, given)))]


def operators(model):
    """Types of a graph's nodes; all of them, and those of functions in it, are of standard ONNX."""
    graph = onnx.load_from_string(model)
    onnx.checker.check_model(graph)
    nodes = [*graph.graph.node, *(node for function in graph.functions for node in function.node)]
    local = {(function.domain, function.name) for function in graph.functions}
    foreign = [node.op_type for node in nodes if node.domain and (node.domain, node.op_type) not in local]
    assert not foreign, foreign
    return {node.op_type for node in nodes}


def exported(module, args, dynamo=True, **options):
    if dynamo:
        program = torch.onnx.export(module, tuple(args), dynamo=True, verbose=False, **options)
        return program.model_proto.SerializeToString()
    file = io.BytesIO()
    torch.onnx.export(module, tuple(args), file, dynamo=False, **options)
    return file.getvalue()


class Together(nn.Module):
    """Several modules in one program, each with arguments of its own: exporting takes its time."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *args):
        found = [layer(*some) for layer, some in zip(self.layers, args)]
        return tuple(x for out in found for x in (out if isinstance(out, tuple) else (out,)))

    def compare(self, args, dynamo=True, **options):
        """The program's results with ours; its operators."""
        self.eval()
        model = exported(self, args, dynamo, **options)
        given = [x for some in args for x in some]
        results, wanted = run(model, *given), self(*args)
        assert len(results) == len(wanted)
        for found, expected in zip(results, wanted):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=TOLERANCE)
        return operators(model)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "TorchScript"])
def test_modules_in_onnx(dynamo):
    """Dynamic batch and lengths; equal results at the sizes of the export and at others."""
    named = modules()
    together = Together(*(named[name] for name, _ in CASES)).eval()
    each = {"queries": {0: "batch", 1: "n_queries"}, "keys": {0: "batch", 1: "n_keys"},
            "values": {0: "batch", 1: "n_keys"}}  # fmt: skip
    axes = [(*each.values(), {"none": None, "item": {0: "batch"}, "query": each["queries"]}[kind]) for _, kind in CASES]
    if dynamo:
        options = {"dynamic_shapes": (tuple(axes),)}
    else:
        flat = {f"{i}.{j}": axis for i, some in enumerate(axes) for j, axis in enumerate(some) if axis is not None}
        options = {"input_names": [*flat], "dynamic_axes": flat}

    def arguments(*sizes):
        return tuple((*inputs(*sizes), lengths(kind, *sizes)) for _, kind in CASES)

    model = exported(together, arguments(2, 4, 7), dynamo, **options)
    used = operators(model)
    assert "Softmax" in used and "Attention" not in used  # below opset 23
    for sizes in ((2, 4, 7), (4, 5, 3), (1, 1, 9)):
        args = arguments(*sizes)
        found = run(model, *[x for some in args for x in some])
        for (name, kind), one, expected in zip(CASES, found, together(*args)):
            torch.testing.assert_close(
                one, expected, rtol=0, atol=TOLERANCE, msg=lambda said, case=(name, kind): f"{case}: {said}"
            )


def test_attention_is_onnxs_operator():
    """From opset 23 on scaled dot products are one operator; w_v . tanh is none."""
    named, lens = modules(), lengths("query", 2, 4, 7)
    products = Together(named["dot"], named["multi-head"])
    used = products.compare(((*inputs(),), (*inputs(), lens)), opset_version=23)
    assert "Attention" in used and "Softmax" not in used and used & {"MatMul", "Gemm"}
    assert "Attention" not in Together(named["additive"]).compare(((*inputs(), lens),), opset_version=23)


class Weighing(nn.Module):
    """A model that reads the weights, as the book's encoders do, and gives them out."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, q, k, v, lens):
        out = self.layer(q, k, v, lens)
        return out, self.layer.attention_weights


@pytest.mark.by_day("dynamo", "name", together=1)  # an export takes seconds
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "TorchScript"])
@pytest.mark.parametrize("name", ["multi-head", "additive"])
def test_weights_in_the_program(name, dynamo):
    model, args = Weighing(modules()[name]).eval(), [*inputs(), torch.tensor([[3, 0, 9, 1], [7, 2, 1, 4]])]
    wanted = [x.detach() for x in model(*args)]
    torch.testing.assert_close(run(exported(model, args, dynamo), *args), wanted, rtol=0, atol=TOLERANCE)
    again = copy.deepcopy(model)  # nothing of the exporter is left in the module
    torch.testing.assert_close(again(*args), wanted, rtol=0, atol=0)


class Function(nn.Module):
    """One call of a function with options, on q, k, v (B, 2, rows, 6) split from the inputs."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in (q, k, v))
        return functional.dot_product_attention(q, k, v, **self.options)


OPTIONS = [
    {"causal": "bottom_right"},
    {"causal": "top_left", "window": (2, 0)},
    {"keep_mask": (torch.arange(28) % 5 != 0).reshape(4, 7)},
    {"keep_mask": torch.tensor([True, False, True, True])[:, None].expand(4, 7)},
    {"bias": torch.linspace(-2, 2, 28).reshape(4, 7), "valid_lens": torch.tensor([7, 3]), "scale": 0.3},
    {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0])},
    {"relative_bias": torch.linspace(-1, 1, 10).reshape(2, 5), "return_lse": True},
    {"valid_lens": torch.tensor([0, 5]), "empty_rows": "uniform", "return_weights": True},
]


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "TorchScript"])
def test_functions_in_onnx(dynamo):
    Together(*(Function(**options) for options in OPTIONS)).compare(((*inputs(),),) * len(OPTIONS), dynamo)


@pytest.mark.parametrize("d2l", needs.real_d2l.VERSIONS[0 if needs.NIGHTLY else -1 :], indirect=True)
def test_the_books_encoder(d2l, capsys):
    """d2l's TransformerEncoder on our classes, and nn.TransformerEncoderLayer with ours in it."""
    import book_models
    import mha_c.d2l

    torch.manual_seed(0)
    with mha_c.d2l.patch(d2l):
        encoder, _ = (part.eval() for part in book_models.build(d2l, "transformer", 30, 30, 16, num_layers=1))
    tokens, lens = torch.arange(12).reshape(2, 6), torch.tensor([6, 3])
    wanted = encoder(tokens, lens).detach()
    axes = {0: "batch", 1: "steps"}
    model = exported(encoder, (tokens, lens), dynamic_shapes=(axes, {0: "batch"}), opset_version=23)
    assert "Attention" in operators(model)
    torch.testing.assert_close(run(model, tokens, lens)[0], wanted, rtol=0, atol=TOLERANCE)
    other, short = torch.arange(24).reshape(3, 8), torch.tensor([1, 8, 5])
    torch.testing.assert_close(run(model, other, short)[0], encoder(other, short).detach(), rtol=0, atol=TOLERANCE)
    model = exported(encoder, (tokens, lens), dynamo=False)
    torch.testing.assert_close(run(model, tokens, lens)[0], wanted, rtol=0, atol=TOLERANCE)


def test_other_modules():
    """nn.MultiheadAttention's twin, those of other courses, KernelAttention, PositionalEncoding."""
    x = inputs()[1]
    cases = {
        ours.nn.MultiheadAttention(12, 3, batch_first=True): (x, x, x, torch.arange(7) > torch.tensor([[6], [3]])),
        variants.MultiHeadedSelfAttention(12, 3): (x,),
        variants.MultiHeadSelfAttentionAISummer(12, 3): (x, torch.ones(7, 7, dtype=torch.bool).triu(1)),
        ours.KernelAttention("epanechnikov", 6.0): (x, x, x, torch.tensor([7, 2])),
        ours.PositionalEncoding(12, 0.1): (x,),
    }
    Together(*cases).compare(tuple(cases.values()))


# --- Programs of torch, without us ---------------------------------------------------------------------------

ALONE = """
import importlib.abc, sys

class Nobody(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "mha_c":
            raise ImportError("not here")

sys.meta_path.insert(0, Nobody())
import torch
for name in sys.argv[1:]:
    args, expected = torch.load(name + ".pt")
    call = torch.export.load(name + ".pt2").module() if name.endswith("export") else torch.jit.load(name + ".ts")
    torch.testing.assert_close(call(*args), expected, rtol=0, atol=5e-6)
    print("equal")
assert "mha_c" not in sys.modules
"""


def test_programs_run_without_us(tmp_path):
    """torch.export (both ways), jit.trace: saved, loaded and run where mha_c cannot be imported, at other sizes.

    By day one of products and one of sums: test_modules_in_onnx begins with both programs of all four."""
    batch, rows = torch.export.Dim("batch"), torch.export.Dim("rows")
    names, named = [], modules()
    for name in named if needs.NIGHTLY else ("multi-head", "additive"):
        module = named[name].eval()
        args = (*inputs(), torch.tensor([7, 3]))
        shapes = ({0: batch}, {0: batch, 1: rows}, {0: batch, 1: rows}, {0: batch})
        module(*args)  # what a call leaves is in nobody's way
        for strict in (False, True) if name == "multi-head" else (False,):
            program = torch.export.export(module, args, dynamic_shapes=shapes, strict=strict)
            targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
            assert all(target.startswith(("aten.", "<built-in function", "_assert", "torch.sym")) for target in targets)
        with pytest.warns():
            traced = torch.jit.trace(module, args, check_trace=False)
        assert "mha_c::" not in str(traced.inlined_graph)
        other = (*inputs(4, 4, 9), torch.tensor([9, 0, 1, 4]))
        for kind in ("export", "trace"):
            names.append(str(tmp_path / f"{name}-{kind}"))
            torch.save((other, module(*other).detach()), names[-1] + ".pt")
        torch.export.save(program, names[-2] + ".pt2")
        torch.jit.save(traced, names[-1] + ".ts")
    assert children.python("-c", ALONE, *names).stdout.split() == ["equal"] * len(names)


def test_training_programs_drop():
    """In training mode dropout is torch's own, drawn at each run."""
    module = ours.MultiHeadAttention(12, 12, 12, 12, 3, 0.5).train()
    program = torch.export.export(module, (*inputs(), None)).module()
    torch.manual_seed(3)
    first, second = program(*inputs(), None), program(*inputs(), None)
    torch.manual_seed(3)
    assert not torch.equal(first, second) and torch.equal(program(*inputs(), None), first)
    runs, expected = torch.stack([program(*inputs(), None) for _ in range(400)]), module.eval()(*inputs()).detach()
    # A mean of 400 lies beyond 5 of its own deviations once in two million times; half of each number would be seen.
    room = 5 * runs.std(0) / 20
    assert ((runs.mean(0) - expected).abs() <= room).all() and ((runs.mean(0) / 2 - expected).abs() > room).any()
    with pytest.raises(RuntimeError, match="leave rng out"):
        torch.export.export(Function(dropout=0.5, rng=3), tuple(inputs()))


@pytest.mark.parametrize("kind", ["multi-head", "additive", "dot", "with a hook"])
def test_what_an_exporter_leaves(kind):
    """No weights without numbers; the module is copied, saved and called as before."""
    module = modules()["multi-head" if kind == "with a hook" else kind].eval()
    if kind == "with a hook":
        module.attention.dropout.register_forward_hook(print)
    args = (*inputs(), None)
    torch.export.export(module, args)
    with pytest.raises(AttributeError, match="traced for export"):
        _ = module.attention_weights
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(AttributeError, match="call the layer first"):
            _ = twin.attention_weights
        assert torch.equal(twin(*args), module(*args)) and twin.attention_weights.shape[-2:] == (4, 7)


def test_an_exported_module_goes_on():
    module, args = modules()["multi-head"].eval(), (*inputs(), None)
    torch.export.export(module, args)
    with pytest.raises(TypeError, match="training, cache and masks by name"):
        module(*args, True)
    torch.compile(module, backend="eager")(*args)  # compilers go on by our operators
    explained = torch._dynamo.explain(module)(*args)
    assert "mha_c.layer" in str([graph.code for graph in explained.graphs])


def test_decoding_is_not_exported():
    module = modules()["multi-head"].eval()

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cache = module, module.new_cache(1, 4)

        def forward(self, x):
            return self.layer(x, x, x, cache=self.cache)

    with torch.no_grad(), pytest.raises(Exception, match="decoding with a cache cannot be exported"):
        torch.export.export(Step(), (torch.ones(1, 1, 12),))


def test_positions_are_not_traced_from_a_start_that_is_an_input():
    encoding, X = ours.PositionalEncoding(12, 0.0), torch.randn(2, 4, 12)
    with pytest.raises(RuntimeError, match="a traced program would keep the value"):
        torch.jit.trace(lambda X, at: encoding(X, start=at), (X, torch.tensor([5, 7])), check_trace=False)
    traced, longer = torch.jit.trace(lambda X: encoding(X, start=3), X, check_trace=False), torch.randn(1, 9, 12)
    assert torch.equal(traced(longer), encoding(longer, start=3))
