"""mha_c.d2l.compare: times and differences of a model with its own attention and with ours, and nothing changed."""

import copy

import pytest
import torch

import book_models
import mha_c.d2l
from mha_c import torch as mt


def test_compare_leaves_a_model_as_it_is():
    """Gradients, modes of each part, running statistics."""
    attention, norm = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.BatchNorm1d(5)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm, self.dropout = attention, norm, torch.nn.Dropout(0.5).eval()

        def forward(self, x):
            return self.dropout(self.norm(self.attention(x, x, x)[0]))

    net, x = Net(), torch.randn(4, 5, 8)
    net(x).square().sum().backward()
    before, grads = copy.deepcopy(net.state_dict()), [p.grad.clone() for p in net.parameters()]
    mha_c.d2l.compare(net, x, seconds=0.01, show=False)
    assert type(attention) is torch.nn.MultiheadAttention
    assert net.training and norm.training and not net.dropout.training
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads))


def test_compare(d2l, capsys):
    sizes = (24, 24, 24) if book_models.is_eager(d2l) else ()
    module, X = d2l.MultiHeadAttention(*sizes, 24, 8, 0.5), torch.randn(2, 10, 24)
    state = torch.get_rng_state()
    result = mha_c.d2l.compare(module, X, X, X, torch.tensor([3, 2]), seconds=0.05)
    shown = capsys.readouterr().out
    assert f"MultiHeadAttention on {result['processor']}, " in shown and "largest difference" in shown
    low, high = result["forward_range"]
    assert f"{result['forward_ratio']:.2f} times as fast ({low:.2f} to {high:.2f})" in shown and 0 < low <= high
    assert result["largest_difference"] < 1e-6
    assert result["forward_ratio"] == result["forward_us"] / result["forward_ours_us"] > 0
    assert result["training_ratio"] == result["training_us"] / result["training_ours_us"] > 0
    assert module.training and type(module).__module__ == d2l.__name__
    assert all(p.grad is None for p in module.parameters())
    torch.set_rng_state(state)
    encoder, _ = book_models.build(d2l, "transformer", 20, 20)
    ids, lens = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
    assert mha_c.d2l.compare(encoder, ids, lens, seconds=0.05, show=False)["largest_difference"] < 1e-5
    with pytest.raises(ValueError, match="no attention module"):
        mha_c.d2l.compare(torch.nn.Linear(3, 3), torch.ones(3), show=False)
    with_gradients = []
    module.register_forward_pre_hook(lambda *given: with_gradients.append(torch.is_grad_enabled()))
    with torch.no_grad():  # backward passes are timed even so
        mha_c.d2l.compare(module, X, X, X, torch.tensor([3, 2]), seconds=0.05, show=False)
    assert {*with_gradients} == {False, True}


@pytest.mark.filterwarnings("error:convert")
def test_compare_takes_no_model_that_has_ours(d2l):
    with mha_c.d2l.patch(d2l):
        patched, _ = book_models.build(d2l, "transformer", 20, 20)
    inputs = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
    for model in (patched, mt.convert(patched), torch.nn.Sequential(mt.MultiHeadAttention(8, 2, 0.0))):
        with pytest.raises(ValueError, match=r"attention is mha_c's|0 is mha_c's"):
            mha_c.d2l.compare(model, *inputs)
