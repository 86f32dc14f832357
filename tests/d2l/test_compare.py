"""mha_c.d2l.compare: times and differences of a model with its own attention and with ours, and nothing changed."""

import copy
import re
import time

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
    said_of_it = re.search(
        r"forward  .*: (?:uncertain|([\d.]+) times as fast) \(([\d.]+) to ([\d.]+)\)", shown
    ).groups()
    for said, found in zip(said_of_it, (result["forward_ratio"], low, high)):
        if said is None:  # the machine is too busy for a ratio
            continue
        assert 1 <= len(said.replace(".", "").lstrip("0")) <= 2 or found >= 100, said
        assert float(said) == pytest.approx(found, rel=0.051)  # two digits
    assert 0 < low <= high
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


class Waiting(torch.nn.Module):
    """Attention in which torch's threads wait for each other in each call, or in every third, as on a busy machine."""

    def __init__(self, every):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.every, self.calls, self.threads = every, 0, []

    def forward(self, x):
        self.calls += 1
        self.threads.append(torch.get_num_threads())
        if torch.get_num_threads() > 1 and self.calls % self.every == 0:
            time.sleep(0.02)  # a call takes less than a hundredth of this
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("every", [1, 3])
def test_compare_uses_one_thread_where_threads_wait(every, capsys):
    before, ours = torch.get_num_threads(), mha_c.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = mha_c.d2l.compare(Waiting(every), torch.randn(2, 4, 8), seconds=0.3)
        assert torch.get_num_threads() == 2 and mha_c.get_num_threads() == ours
    finally:
        torch.set_num_threads(before)
    shown = capsys.readouterr().out
    first, second, *_ = shown.splitlines()
    assert first.startswith("This machine is busy, and 2 threads wait for each other: forward took ")
    assert second.endswith(", 1 thread:") and result["threads"] == 1
    assert result["forward_us"] < 20_000 / 2  # of one thread, which does not wait; half, for a machine that is busy now


def test_compare_says_where_a_range_is_wide(capsys, monkeypatch):
    from mha_c.torch import compare

    timed = {"us": 90.0, "ours_us": 30.0, "ratio": 3.0, "range": (1.5, 3.1)}
    monkeypatch.setattr(compare, "_timed", lambda *_: timed)
    result = mha_c.d2l.compare(torch.nn.MultiheadAttention(8, 2), *[torch.randn(3, 1, 8)] * 3)
    shown = capsys.readouterr().out
    assert "3.0 times as fast (1.5 to 3.1)" in shown and "a range is wide" in shown and result["threads"] == 1
    timed["range"] = (0.25, 64.0)  # no ratio of these turns means anything
    mha_c.d2l.compare(torch.nn.MultiheadAttention(8, 2), *[torch.randn(3, 1, 8)] * 3)
    shown = capsys.readouterr().out
    assert "uncertain (0.25 to 64)" in shown and "times as fast" not in shown and "a range is wide" in shown
