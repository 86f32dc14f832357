"""The torch modules inside the rest of torch: compilers, checkpointing, conversion of models."""

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
from mha_c.torch import functional, variants
from mha_c.torch._call import autograd


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
    [*itertools.product(layers(), ["eager", "aot_eager"]), ("multi-head with bias", "inductor")],
)
def test_compile(name, backend):
    needs.compilers()
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    layer = layers()[name]
    x, y = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 7, 8, requires_grad=True)
    torch._dynamo.reset()
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

    torch._dynamo.reset()
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
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for arguments in (
        (x, y, y.detach().clone(), lens, *W, b, None, None, b, None, 2, "uniform", 0.0, None),
        (x, y, y.detach().clone(), None, None, None, None, None, None, None, None, None, None, 1, "zero", 0.0, None),
        (
            x,
            y,
            y.detach().clone(),
            torch.tensor([7, 9]),
            W[0],
            W[1],
            None,
            None,
            None,
            None,
            None,
            None,
            b[None],
            1,
            "uniform",
            0.0,
            None,
        ),
    ):
        torch.library.opcheck(torch.ops.mha_c.layer, arguments, test_utils=tests)


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
    assert x.numel() * x.element_size() >= autograd.LARGE_BYTES
    expected = torch.autograd.grad(layer(x, x, x).sum(), x)[0]

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x, x, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    assert sum(sizes) >= 5 * x.numel()  # inputs, projected q, k, v, context


# --- Conversion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}])
def test_torchs_multi_head_attention(sizes, batch_first):
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    parameters, ours = list(theirs.parameters()), theirs
    theirs = copy.deepcopy(theirs)
    assert mt.convert(ours) is ours and type(ours) is mt.nn.MultiheadAttention
    assert [id(x) for x in ours.parameters()] == [id(x) for x in parameters]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    q, k, v = (
        torch.randn(3, n, theirs.embed_dim if i == 0 else sizes.get(f"{name}dim", 8))
        for i, (name, n) in enumerate((("q", 4), ("k", 6), ("v", 6)))
    )
    padding = torch.arange(6)[None, :] >= torch.tensor([[6], [2], [3]])
    mask = torch.ones(4, 6, dtype=torch.bool).triu(1)
    calls = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(4, 6)},
        {"attn_mask": torch.randn(6, 4, 6), "key_padding_mask": torch.randn(3, 6)},
        {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": False},
        {"attn_mask": mask, "is_causal": True, "need_weights": False},
        {"need_weights": False},
    ]
    for options in calls:
        if "is_causal" in options and not needs.torch_has("torch.nn.MultiheadAttention.forward(is_causal)"):
            continue
        tensors = [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]
        try:
            wanted = theirs(*tensors, **options)
        except (RuntimeError, AssertionError) as error:  # a torch that takes no float key_padding_mask, or no hint
            assert "Mask tensor can take 0 and 1 values only" in str(error) or "Only allow causal mask" in str(error)
            continue
        torch.testing.assert_close(ours(*tensors, **options), wanted)
    torch.testing.assert_close(ours(q[0], k[0], v[0]), theirs(q[0], k[0], v[0]))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_convert_torchs_transformer():
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
    source, target = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.arange(5)[None, :] >= torch.tensor([[5], [2], [3]])
    options = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    expected = model(source, target, **options)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    before = list(model.parameters())
    assert mt.convert(model) is model
    assert sum(type(part) is mt.nn.MultiheadAttention for part in model.modules()) == 6
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]  # an optimizer goes on
    found = model(source, target, **options)
    torch.testing.assert_close(found, expected)
    largest = max(float(grad.abs().max()) for grad in grads)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), list(model.parameters())), grads, rtol=1e-3, atol=1e-5 * largest
    )
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(source, target, **options), expected)


def test_what_convert_leaves_alone():
    class Own(nn.MultiheadAttention):
        pass

    hooked = nn.MultiheadAttention(8, 2)
    hooked.register_forward_hook(lambda *_: None)
    extra = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    model = nn.ModuleList([Own(8, 2), hooked, nn.Linear(8, 8), mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), extra])
    kinds, theirs = [type(part) for part in model][:4], copy.deepcopy(extra)
    with pytest.warns(UserWarning, match=r"left as they were: 0 \(.*Own\) is a subclass; 1 \(.*\) has hooks"):
        mt.convert(model)
    assert [type(part) for part in model][:4] == kinds and type(extra) is mt.nn.MultiheadAttention
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(extra(x, x, x)[0], theirs(x, x, x)[0])  # left to torch
    shared = nn.MultiheadAttention(8, 2)
    pair = mt.convert(nn.ModuleList([shared, shared]))
    assert pair[0] is pair[1] is shared and type(shared) is mt.nn.MultiheadAttention


def test_convert_says_what_it_cannot_do():
    with pytest.raises(TypeError, match="takes a torch module, got int"):
        mt.convert(5)
    with pytest.warns(UserWarning, match=r"nothing to replace in Linear: no module in it takes queries"):
        assert type(mt.convert(nn.Linear(8, 8))) is nn.Linear
    again = mt.convert(mt.DotProductAttention(0.0))  # ours already: nothing to say
    assert type(again) is mt.DotProductAttention


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_torchs_fast_path_calls_no_module():
    """What the words of `convert` say, and the switch that they name."""
    layer, calls = mt.convert(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval(), []
    layer.self_attn.forward = lambda *args, **options: (
        calls.append(1) or type(layer.self_attn).forward(layer.self_attn, *args, **options)
    )
    x, enabled = torch.randn(2, 3, 16), torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            for on, n_calls in ((True, 0), (False, 1)):
                torch.backends.mha.set_fastpath_enabled(on)
                layer(x)
                assert len(calls) == n_calls
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# --- Other modules ------------------------------------------------------------------------------------------


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
