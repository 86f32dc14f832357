"""What nodes of autograd's graph have saved: programs that draw graphs (torchviz) ask each tensor for its size."""

import pickle

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
    "MultiheadAttention": lambda x: mt.nn.MultiheadAttention(12, 3, batch_first=True)(x, x, x)[0],
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


@pytest.mark.parametrize("name", ["multi-head", "additive", "dot"])
def test_what_weights_say_whose_graph_is_gone(name):
    """Both ways to ask, in our words; what does not need that graph still works, and nothing of it shows."""
    layer, x = layers()[name], torch.randn(2, 4, 12, requires_grad=True)
    own = torch.ones(4, requires_grad=True)

    def weights():
        behind = x * 1
        layer(behind, behind, behind)
        del behind
        return layer.attention_weights

    for ask in (
        lambda: weights().square().sum().backward(),
        lambda: torch.autograd.grad(weights().square().sum(), x),
        lambda: torch.autograd.grad((2 * weights() + own).mean(), [own, x], allow_unused=True),
        lambda: torch.autograd.grad(torch.unbind(weights().flatten(1).sum(1)), [x]),
        lambda: torch.autograd.grad(weights(), x, torch.ones_like(layer.attention_weights)),
    ):
        with pytest.raises(RuntimeError, match=r"the graph of the call is gone.*keep the call's output \(out = model"):
            ask()
    torch.testing.assert_close(torch.autograd.grad((weights() * own).sum(), own)[0], weights().flatten(0, -2).sum(0))
    mean = weights().mean(-1)
    assert type(mean.detach()) is torch.Tensor and repr(mean).startswith("tensor(")
    assert type(pickle.loads(pickle.dumps(mean.detach()))) is torch.Tensor
