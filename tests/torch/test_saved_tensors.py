"""What nodes of autograd's graph have saved: programs that draw graphs (torchviz) ask each tensor for its size."""

import pytest
import torch

import needs
from mha_c import torch as mt
from torch_modules import layers

FUNCTIONS = {
    "dot_product_attention": lambda x: mt.functional.dot_product_attention(x, x, x),
    "its extras": lambda x: sum(
        y.sum() for y in mt.functional.dot_product_attention(x, x, x, [2, 3], return_weights=True, return_lse=True)
    ),
    "bias": lambda x: mt.functional.dot_product_attention(x, x, x, bias=(x @ x.transpose(1, 2))),
    "additive_attention": lambda x: mt.functional.additive_attention(x, x, x, x[0, 0]),
    "KernelAttention": lambda x: mt.KernelAttention("gaussian")(x[0, :, 0], x[0, :, 0], x[0, :, 1]),
    "MultiheadAttention": lambda x: mt.MultiheadAttention(12, 3, batch_first=True)(x, x, x)[0],
    "GQAAttention": lambda x: mt.GQAAttention(12, 4, 2)(x, x, x),
    "CausalAttention": lambda x: mt.CausalAttention(12, 3)(x),
    "masked_softmax": lambda x: mt.masked_softmax(x @ x.transpose(1, 2), torch.tensor([1, 2])),
}


def check_saved(out):
    """Each node's saved tensors are tensors; there is a node of ours, or of torch's operations."""
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        assert all(isinstance(x, torch.Tensor) for x in getattr(node, "saved_tensors", ())), node
        nodes += [each for each, _ in node.next_functions]
    assert seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["multi-head", "additive", "dot"])
@pytest.mark.parametrize("rows", [4, 300])  # of 300 the larger results are saved, too
@pytest.mark.parametrize("how", ["core", "hook", "compiled"])
def test_layers(name, bias, rows, how):
    if how == "compiled":
        needs.compilers()
    layer, x = layers(bias=bias)[name], torch.randn(2, rows, 12, requires_grad=True)
    if how == "hook":
        next(layer.children()).register_forward_hook(lambda *_: None)
    call = torch.compile(layer, backend="eager") if how == "compiled" else layer
    out = call(x, x, x, torch.tensor([3, rows]))
    check_saved(out)
    check_saved(layer.attention_weights)
    check_saved(layer.attention_weights.sum())
    out.sum().backward()  # and the nodes find them again


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    x = torch.randn(2, 4, 12, requires_grad=True)
    out = FUNCTIONS[name](x)
    check_saved(out)
    out.sum().backward()


def test_weights_without_the_output():
    layer, x = layers()["multi-head"], torch.randn(2, 4, 12, requires_grad=True)
    layer(x * 1, x, x)
    check_saved(layer.attention_weights)
