"""Libraries that quantize, offload, adapt, draw and explain models, beside d2l's own classes: `make clients`.

The usual tests have a stand-in of each mechanism (tests/d2l/test_weights_in_other_forms.py, test_saved_tensors.py);
these run where the library itself is installed.
"""

import copy
import os
import warnings

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
X, LENS = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3, 4, 5, 5])
CLOSE = {"rtol": 0, "atol": 2e-5}  # float32, sums of 16 numbers around 1: some hundred units of rounding


def client(name):
    """The library; without it the test is skipped, and under `make clients` it fails."""
    try:
        return needs.importlib.import_module(name)
    except ImportError:
        if os.environ.get("MHA_C_CLIENTS") == "1":
            raise
        return pytest.skip(f"needs {name}: make clients")


def pairs():
    """(name, d2l's, ours) with the same weights, sizes known."""
    d2l = needs.d2l("1.0.3")
    torch.manual_seed(1)
    theirs = {"multi-head": d2l.MultiHeadAttention(16, 4, 0.0), "additive": d2l.AdditiveAttention(16, 0.0)}
    ours = {"multi-head": mt.MultiHeadAttention(16, 4, 0.0), "additive": mt.AdditiveAttention(16, 0.0)}
    for name, layer in theirs.items():
        layer(X, X, X, None)
        ours[name](X, X, X)
        ours[name].load_state_dict(layer.state_dict())
        yield name, layer.eval(), ours[name].eval()


def outcome(layer, lens, learns):
    """Output, weights, and gradients of the input and of what learns."""
    x = X.clone().requires_grad_(learns)
    with torch.set_grad_enabled(learns):
        out = layer(x, x, x, lens)
    found = [out, getattr(layer, "attention", layer).attention_weights]
    if learns:
        learned = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found += [g for g in torch.autograd.grad(out.square().sum(), learned, allow_unused=True) if g is not None]
    return found


def check(prepare, learns=True):
    for _, theirs, ours in pairs():
        theirs, ours = (prepare(layer) or layer for layer in (theirs, ours))
        for lens in (LENS, None):
            for a, b in zip(outcome(ours, lens, learns), outcome(theirs, lens, learns)):
                torch.testing.assert_close(a.detach(), b.detach(), **CLOSE)


def linears(layer):
    return [(name, child) for name, child in layer.named_children() if type(child) is nn.Linear]


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
@pytest.mark.parametrize("learns", [False, True])
def test_bitsandbytes(kind, learns):
    bnb = client("bitsandbytes")
    options = {"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float32}

    def quantized(layer):
        for name, old in linears(layer):
            new = getattr(bnb.nn, kind)(old.in_features, old.out_features, bias=False, **options)
            new.load_state_dict(old.state_dict())
            setattr(layer, name, new.to("cpu"))

    check(quantized, learns)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
def test_accelerate_brings_weights_for_the_call(how, tmp_path):
    accelerate = client("accelerate")

    def offloaded(layer):
        given = {"execution_device": "cpu"}
        if how == "disk_offload":
            given["offload_dir"] = str(tmp_path / str(id(layer)))
        getattr(accelerate, how)(layer, **given)

    check(offloaded, learns=False)


def test_torchao():
    quantization = client("torchao.quantization")
    check(lambda layer: quantization.quantize_(layer, quantization.Int8WeightOnlyConfig()), learns=False)


@pytest.mark.filterwarnings("ignore:convert left")
def test_convert_of_what_torchao_has_quantized():
    """The book's classes become ours, which call the quantized children."""
    quantization = client("torchao.quantization")
    for name, theirs, _ in pairs():
        quantization.quantize_(theirs, quantization.Int8WeightOnlyConfig())
        wanted, weights = theirs(X, X, X, LENS), theirs.state_dict()
        model = mt.convert(nn.Sequential(theirs))
        for _ in range(3):
            torch.testing.assert_close(model[0](X, X, X, LENS), wanted, **CLOSE, msg=name)
        assert [*model[0].state_dict()] == [*weights]


def test_peft_adapts_and_merges():
    peft = client("peft")

    def adapted(layer):
        torch.manual_seed(2)
        names = [name for name, _ in linears(layer)][:2]
        return peft.get_peft_model(
            layer, peft.LoraConfig(target_modules=names, r=2, init_lora_weights=False)
        ).base_model

    def merged(layer):
        return adapted(layer).merge_and_unload()

    for prepare in (lambda layer: adapted(layer).model, merged):
        check(prepare)


def test_torchviz_draws_outputs_and_weights():
    torchviz = client("torchviz")
    for _, theirs, ours in pairs():
        for layer in (theirs, ours):
            x = X.clone().requires_grad_()
            out = layer(x, x, x, LENS)
            weights = getattr(layer, "attention", layer).attention_weights
            for drawn in (out, weights):
                graph = torchviz.make_dot(drawn, dict(layer.named_parameters()), show_attrs=True, show_saved=True)
                assert "W_q.weight" in graph.source
    x = X.clone().requires_grad_()
    for out in (
        mt.functional.dot_product_attention(x, x, x), mt.functional.additive_attention(x, x, x, x[0, 0]),
        mt.GQAAttention(16, 4, 2)(x, x, x), mt.CausalAttention(16, 4)(x), mt.DotProductAttention(0.0)(x, x, x),
        mt.nn.MultiheadAttention(16, 4, batch_first=True)(x, x, x)[0],
    ):  # fmt: skip
        assert torchviz.make_dot(out, show_attrs=True, show_saved=True).source.startswith("digraph")


def test_torchinfo_of_a_layer_that_was_never_called():
    torchinfo, d2l = client("torchinfo"), needs.d2l("1.0.3")
    for theirs, ours in (
        (d2l.MultiHeadAttention(16, 4, 0.0), mt.MultiHeadAttention(16, 4, 0.0)),
        (d2l.AdditiveAttention(16, 0.0), mt.AdditiveAttention(16, 0.0)),
    ):
        tables = [str(torchinfo.summary(x, input_data=(X, X, X, LENS), verbose=0)) for x in (theirs, ours)]
        assert tables[0] == tables[1]


def test_captum_explains_outputs_inner_modules_and_weights():
    attr = client("captum.attr")
    for _, theirs, ours in pairs():
        found = []
        for layer in (theirs, ours):

            def of_output(x, lens, layer=layer):
                return layer(x, x, x, lens).square().sum((1, 2))

            def of_weights(x, lens, layer=layer):
                out = layer(x, x, x, lens)  # kept until the end, as docs/porting-from-d2l.md says
                weights = getattr(layer, "attention", layer).attention_weights
                return weights.square().reshape(len(out), -1).sum(1), out

            x, rest = X.clone(), {"additional_forward_args": (LENS,)}
            methods = attr.IntegratedGradients, attr.Saliency, attr.InputXGradient
            found.append([method(of_output).attribute(x, **rest) for method in methods])
            inner = [child for _, child in linears(layer) if child is not getattr(layer, "w_v", None)]
            found[-1] += [attr.LayerActivation(layer, child).attribute((x, x, x), **rest) for child in inner]
            x.requires_grad_()
            of, kept = of_weights(x, LENS)
            found[-1] += torch.autograd.grad(of.sum(), x)
            del kept
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, **CLOSE)


def test_copies_of_quantized_layers_work():
    bnb = client("bitsandbytes")
    layer = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0)
    layer.W_k = bnb.nn.Linear8bitLt(16, 16, bias=False, has_fp16_weights=False).to("cpu")
    with torch.no_grad(), warnings.catch_warnings():
        wanted = layer(X, X, X, LENS)
        assert torch.equal(copy.deepcopy(layer)(X, X, X, LENS), wanted)
