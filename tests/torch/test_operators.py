"""The operators that compilers see: the same function as the eager calls, in gradients of gradients, weights, seeds."""

import numpy as np
import pytest
import torch
from torch import nn

import masked_layers
import needs
from masked_layers import KINDS
from mha_c import torch as mt
from mha_c.torch import functional
from mha_c.torch._call.formulas import split_heads
from torch_modules import entropy, layers, leaf, seeded

gradcheck, gradgradcheck = torch.autograd.gradcheck, torch.autograd.gradgradcheck

F64 = torch.float64


class Loss(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.mha, self.additive = mt.MultiHeadAttention(8, 8, 8, 8, 2, p, True), mt.AdditiveAttention(8, 8, 6, 0.0)

    def forward(self, x, lens):
        y = self.mha(x, x, x, lens)
        z = self.additive(y, x, x)
        out, weights, lse = functional.dot_product_attention(z, x, x, lens, return_weights=True, return_lse=True)
        extra = entropy(self.mha.attention_weights) + self.additive.attention_weights.square().sum()
        return out.sum() + extra + weights.square().sum() + lse.sum()


@pytest.mark.filterwarnings("ignore")
def test_weights_in_a_compiled_loss():
    needs.compilers()
    needs.fresh_compiler()
    model, x, lens = Loss(0.3).double(), leaf(2, 5, 8), torch.tensor([3, 5])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = [torch.autograd.grad(seeded(call)(x, lens), [x, *model.parameters()]) for call in (model, compiled)]
    torch.testing.assert_close(*found)
    layer = model.mha
    outcomes = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):  # read outside the compiled part
        loss = seeded(call)(x, x, x, lens).sum() + layer.attention_weights.square().sum()
        outcomes.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    torch.testing.assert_close(*outcomes)
    call(x, x, x, lens)
    weights = layer.attention_weights
    with torch.no_grad():
        layer.W_q.weight.mul_(-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weights.sum().backward()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_second_derivatives_of_the_operators(dropout):
    needs.operators()
    q, k, v, lens, seed = leaf(2, 2, 4), leaf(2, 3, 4), leaf(2, 3, 4), torch.tensor([2, 3]), torch.tensor(-5)
    W, b, bias = [leaf(4, 4) for _ in range(4)], leaf(4), leaf(1, 2, 2, 3)
    seed, keep = seed if dropout else None, torch.tensor([[True, True, False], [True, False, True]])

    def layer(q, k, v, bias, *parameters):
        *W, b = parameters
        words = 2, 2, "uniform", dropout, "bottom_right", 2, []
        given = q, k, v, lens, *W, b, None, None, b, None, keep, bias, *words, seed
        out, q, k, _, _, row_max, row_sum, met = torch.ops.mha_c.layer(*given)
        q, k = (split_heads(x, 2) for x in (q, k))
        kept = None, bias, met, row_max, row_sum, keep, "uniform", "bottom_right"
        return out, torch.ops.mha_c.weights(q, k, *kept)

    tensors = q, k, v, bias, *W, b
    assert gradcheck(layer, tensors, atol=1e-5, rtol=1e-4, fast_mode=True)
    assert gradgradcheck(layer, tensors, atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("name", ["grouped with biases and rope", "causal with biases and rope"])
def test_second_derivatives_of_layers(name, float64):
    """Of shared heads, rows of one weight, turned queries, masks: eager, where torch's operations go back again."""
    kind = KINDS[name]
    layer, shape = getattr(mt, kind.name)(*kind.arguments), masked_layers.shapes_of(kind)[0]
    inputs = [torch.from_numpy(x).requires_grad_() for x in masked_layers.inputs_of(kind)]
    keep, bias = torch.from_numpy(masked_layers.keep_of(shape)), leaf(*shape)

    def call(*tensors):
        return layer(*tensors[:-1], keep_mask=keep, bias=tensors[-1])

    assert gradcheck(call, (*inputs, bias), atol=1e-5, rtol=1e-4, fast_mode=True)
    assert gradgradcheck(call, (*inputs, bias), atol=1e-5, rtol=1e-4, fast_mode=True)


# --- Gradients of weights ----------------------------------------------------------------------------------------

READ = [("multi-head with biases", True), ("additive", True), ("grouped with biases and rope", True),
        ("causal with biases and rope", False), ("dot", False)]  # fmt: skip


class Reads(nn.Module):
    """As the book's encoders: its call reads the weights, whether somebody uses them or not."""

    def __init__(self, layer, reads):
        super().__init__()
        self.layer, self.reads, self.weights = layer, reads, None

    def forward(self, inputs, **given):
        out = self.layer(*inputs, **given)
        self.weights = self.layer.attention_weights if self.reads else None
        return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, reads", READ)
def test_gradients_of_weights_in_a_compiled_model(name, reads, float64):
    """Read in the model's call, or behind it; with an empty row, and a key that nobody sees, which is NaN."""
    needs.compilers()
    needs.fresh_compiler()
    kind = KINDS[name]
    n, shape = masked_layers.sizes_of(kind), masked_layers.shapes_of(kind)[0]
    model = Reads(getattr(mt, kind.name)(*kind.arguments), reads)
    inputs, lens = [torch.from_numpy(x) for x in masked_layers.inputs_of(kind)], None
    if not kind.is_self:
        lens = torch.tensor([n[1] - 1, n[1] - 2])
        inputs[1][:, -1] = torch.nan
    inputs = [x.requires_grad_() for x in inputs]
    bias, keep = leaf(*shape), torch.from_numpy(masked_layers.keep_of(shape))
    leaves = [*inputs, bias, *model.parameters()]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for used in ("output", "weights", "both"):
        outcomes = []
        for call in (model, compiled):
            out = call(inputs, keep_mask=keep, bias=bias, **({} if lens is None else {"valid_lens": lens}))
            weights = model.weights if reads else model.layer.attention_weights
            loss = out.square().sum() * (used != "weights") + entropy(weights) * (used != "output")
            grads = torch.autograd.grad(loss, leaves, allow_unused=True)
            grads = [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads)]
            outcomes.append([out, weights + 0, *grads])
        torch.testing.assert_close(*outcomes, msg=lambda text, used=used: f"{used}: {text}")


# --- Seeds -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rng", [3, np.int64(3), 2**63 + 5, 2**64 - 1, True, 2**64, -1, 3.0])
def test_seeds_compiled_and_not(rng):
    x, outcomes = torch.randn(1, 3, 4), []

    def call():
        return functional.dot_product_attention(x, x, x, dropout=0.5, rng=rng)

    needs.fresh_compiler()
    for run in (call, torch.compile(call, backend="eager")):
        try:
            outcomes.append(run())
        except (TypeError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    if isinstance(rng, (int, np.integer)) and rng is not True and 0 <= rng < 2**64:
        torch.testing.assert_close(*outcomes)  # the same weights are dropped
    else:
        assert outcomes[0] == outcomes[1] and "rng must" in outcomes[0][1]


class Marked(torch.Tensor):
    """As fastai's and torchvision's tensors: torch's operations on it give its class again."""


def plain(x):
    return x.as_subclass(torch.Tensor)


@pytest.mark.parametrize("layer", layers(8, 2).values(), ids=lambda layer: type(layer).__name__)
def test_tensors_of_a_subclass(layer):
    x, lens = torch.randn(2, 5, 8), torch.tensor([2, 5])
    ours, theirs = x.as_subclass(Marked).requires_grad_(), x.clone().requires_grad_()
    out, wanted = layer(ours, ours, ours, lens.as_subclass(Marked)), layer(theirs, theirs, theirs, lens)
    assert type(out) is Marked
    torch.testing.assert_close(out.as_subclass(torch.Tensor), wanted)
    pairs = (out, ours), (wanted, theirs)
    found, expected = [torch.autograd.grad(y.sum(), [z, *layer.parameters()]) for y, z in pairs]
    for grad, its in zip(found, expected):
        torch.testing.assert_close(grad.as_subclass(torch.Tensor), its)
    layer(theirs, theirs, theirs, lens)
    weights = layer.attention_weights + 0
    with torch.no_grad():
        torch.testing.assert_close(plain(layer(ours, x, x, lens)), wanted)
        torch.testing.assert_close(plain(layer.attention_weights + 0), weights)
        layer.eval()
        cache, others = layer.new_cache(2, 5), layer.new_cache(2, 5)
        torch.testing.assert_close(plain(layer(ours, ours, ours, cache=cache)), layer(x, x, x, cache=others))
        torch.testing.assert_close(plain(layer(ours, layer.project(ours, ours))), layer(x, layer.project(x, x)))


@pytest.mark.parametrize("layer", layers(8, 2).values(), ids=lambda layer: type(layer).__name__)
def test_words_about_a_wrong_call(layer):
    x, name = torch.randn(2, 5, 8), type(layer).__name__
    with pytest.raises(TypeError, match=rf"{name}\.forward\(\) got an unexpected keyword argument 'mask'"):
        layer(x, x, x, mask=None)
    for training in (1, "no", torch.tensor(True)):
        with pytest.raises(TypeError, match="training must be True or False"):
            layer(x, x, x, training=training)
    assert layer(x, x, x, training=np.bool_(False)).shape == (2, 5, 8)


def test_a_bias_of_bools_is_a_mask():
    x = torch.randn(2, 5, 8)
    with pytest.raises(TypeError, match="as keep_mask"):
        functional.dot_product_attention(x, x, x, bias=torch.ones(5, 5, dtype=torch.bool))


HALF_PARTS = {
    "16 bit": lambda layer, x: (layer.bfloat16(), x.bfloat16()),
    "16 bit under float32": lambda layer, x: (layer.bfloat16(), x),
    "a negated view": lambda layer, x: (layer, torch.complex(x, x).conj().imag),
    "float32": lambda layer, x: (layer, x),
}


@pytest.mark.by_day("name", "kind", together=1)
@pytest.mark.parametrize("name", HALF_PARTS)
@pytest.mark.parametrize("kind", ["multi-head", "dot product"])
def test_a_call_draws_one_seed(name, kind):
    """Whatever way it ends up on: what is drawn next does not depend on it, and compiled calls drop the same."""
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5) if kind == "multi-head" else mt.DotProductAttention(0.5)
    layer, x = HALF_PARTS[name](layer, torch.randn(2, 5, 8))
    torch.manual_seed(3)
    mt.DotProductAttention(0.5)(*[torch.ones(1, 2, 2)] * 3)
    expected = torch.rand(1)
    for call in (layer, torch.compile(layer, backend="eager")):
        needs.fresh_compiler()
        torch.manual_seed(3)
        call(x, x, x)
        assert torch.equal(torch.rand(1), expected)


def test_eager_and_compiled_halves_drop_the_same_weights():
    needs.compilers()
    layer, x, outcomes = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5).bfloat16(), torch.randn(2, 5, 8).bfloat16(), []
    needs.fresh_compiler()
    for call in (layer, torch.compile(layer, backend="eager")):
        torch.manual_seed(3)
        outcomes.append(call(x, x, x))
    torch.testing.assert_close(*outcomes)


# --- Options -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "empty_rows": (
        {"empty_rows": "foo"},
        ValueError,
        r"empty_rows must be .(uniform. or .zero|zero. or .uniform)., got .foo",
    ),
    "dropout": ({"dropout": 1.5}, ValueError, "dropout must be between 0 and 1, got 1.5"),
    "dropout of text": ({"dropout": "a"}, TypeError, "dropout must be a real number"),
    "a float mask": ({"keep_mask": torch.ones(3, 3)}, TypeError, r"keep_mask has dtype .*float32, expected bool"),
    "a mask of numbers": ({"keep_mask": [[2, 0, 1]] * 3}, ValueError, "keep_mask has .*numbers other than 0 and 1"),
}
WAYS = {
    "torch.func": lambda call, q, options: torch.func.grad(lambda q: call(q, q, q, **options).sum())(q),
    "forward mode": lambda call, q, options: torch.func.jvp(lambda q: call(q, q, q, **options), (q,), (q,)),
    "meta": lambda call, q, options: call(*[q.to("meta")] * 3, **options),
    "compiled": lambda call, q, options: torch.compile(lambda q: call(q, q, q, **options), backend="eager")(q),
    "exported": lambda call, q, options: torch.jit.trace(lambda q: call(q, q, q, **options), q),
}


@pytest.mark.by_day("way", "option", together=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_checked_on_every_way(way, option):
    options, kind, words = OPTIONS[option]
    q = torch.randn(1, 3, 4)
    if way == "meta" and isinstance(options.get("keep_mask"), torch.Tensor):
        options = {"keep_mask": options["keep_mask"].to("meta")}
    elif way == "meta" and "keep_mask" in options:
        pytest.skip("a list has no device")
    if way == "compiled":
        needs.compilers()
        needs.fresh_compiler()
    with pytest.raises(kind, match=words):
        WAYS[way](functional.dot_product_attention, q, options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_what_a_layer_was_set_to_is_checked_on_every_way(way):
    for name, value, words in (
        ("empty_rows", "foo", "empty_rows must be"),
        ("p", 1.5, "dropout must be between 0 and 1"),
    ):
        layer = mt.DotProductAttention(0.5)
        setattr(layer.dropout if name == "p" else layer, name, value)
        if way == "compiled":
            needs.of_torch("torch.compile")
            needs.fresh_compiler()
        with pytest.raises(ValueError, match=words):
            WAYS[way](layer, torch.randn(1, 3, 4), {})
