"""`convert` where a call is like the one before: it is told in few steps, and whatever differs is seen; a module that
is left costs nothing more."""

import copy

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs
from mha_c.torch._readers import call_masks, modules
from mha_c.torch._readers.arranging import arrangement
from seen_by_torch import events_of_python

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.turns_over = 2, False

    def forward(self, queries, keys, values, mask=None):
        if keys is values and keys is not queries:
            values = values.flip(1) if self.turns_over else values
        q, k, v = (
            W(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for W, x in ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, float("-inf"))
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def drawn(n_times=1, dtype=torch.float32):
    found = [torch.randn(2, 5, 8, dtype=dtype) for _ in range(n_times)]
    return found[0] if n_times == 1 else found


MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])[:, None].expand(2, 5, 5)


@pytest.fixture
def modules_of_a_class():
    torch.manual_seed(0)
    module = Attention().eval()
    return mt.convert(copy.deepcopy(module)), module


def same(modules_of_a_class, *args, **kwargs):
    converted, own = modules_of_a_class
    # float32 sums of 8 products in another order
    torch.testing.assert_close(converted(*args, **kwargs), own(*args, **kwargs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("mask", ((), (MASK,), (MASK.bool(),)), ids=("no mask", "numbers", "bools"))
def test_a_call_like_the_last_makes_no_key_and_no_mask_again(modules_of_a_class, monkeypatch, mask):
    x = drawn()
    for _ in range(2):
        same(modules_of_a_class, x, x, x, *mask)
    used = []
    monkeypatch.setattr(modules, "key_of", lambda *given: used.append("key"))
    monkeypatch.setattr(call_masks, "Replay", lambda *given: used.append("graph"))
    y = drawn()
    same(modules_of_a_class, y, y, y, *mask)
    assert used == []
    with pytest.raises(AssertionError):  # other sizes are another call
        same(modules_of_a_class, y[:1], y[:1], y[:1], *(each[:1] for each in mask))
        assert used == []


def ways_to_differ():
    """{what differs from a call of (x, x, x, MASK): (arguments, what is done before)}."""
    a, b, c = drawn(3)
    return {
        "three tensors": (a, b, c, MASK), "two": (a, b, b, MASK), "the first two": (a, a, b, MASK),
        "the outer two": (a, b, a, MASK), "another mask": (a, a, a, MASK.flip(0)), "no mask": (a, a, a),
        "None": (a, a, a, None), "longer": tuple(torch.cat((x, x)) for x in (a, a, a, MASK)),
        "a mask of bools": (a, a, a, MASK.bool()), "a mask of floats": (a, a, a, MASK.float()),
        "a mask for all items": (a, a, a, MASK[:1]), "a gradient": (a.clone().requires_grad_(), b, b, MASK),
    }  # fmt: skip


@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("how", ways_to_differ())
def test_whatever_differs_from_the_last_call_is_seen(modules_of_a_class, how, grad):
    other = ways_to_differ()[how]
    x = drawn()
    for turns_over in (False, True):  # a setting that changes the calls with two tensors alone
        for each in modules_of_a_class:
            each.turns_over = turns_over
        with torch.set_grad_enabled(grad):
            for given in ((x, x, x, MASK),) * 3 + (other,) * 3 + ((x, x, x, MASK), other):
                same(modules_of_a_class, *given)


@torch.no_grad()
def test_settings_modes_and_hooks_between_two_calls_alike(modules_of_a_class):
    converted, own = modules_of_a_class
    x = drawn()
    for _ in range(3):
        same(modules_of_a_class, x, x, x)
    for each in (converted, own):
        each.heads = 4
    same(modules_of_a_class, x, x, x)
    for each in (converted, own):
        each.W_q.weight.mul_(2.0)
    same(modules_of_a_class, x, x, x)
    for each in (converted, own):
        each.W_v.weight = nn.Parameter(each.W_v.weight.flip(0))
    same(modules_of_a_class, x, x, x)
    seen = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        converted(x, x, x)
    finally:
        hook.remove()
    assert seen.count(nn.Linear) == 4
    with torch.enable_grad():
        assert converted(x, x, x).grad_fn is not None
    assert converted(x, x, x).grad_fn is None


class Squared(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(1, 2)).square().softmax(-1) @ v


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Squared()
        self.norm = nn.LayerNorm(8)

    def forward(self, q, k, v):
        return self.norm(self.inner(q, k, v)) * torch.sigmoid(q)


class OfTheNumbers(nn.Module):
    def forward(self, q, k, v):
        scale = float(q.abs().max())
        return (q @ k.transpose(1, 2) / scale).softmax(-1) @ v


class Plain(nn.Module):
    def forward(self, q, k, v):
        return q + k + v


@pytest.mark.filterwarnings("ignore:convert left")
@pytest.mark.parametrize("kind", (Squared, Gated, OfTheNumbers, Plain))
def test_a_module_that_is_left_costs_nothing(kind):
    own, converted = kind(), mt.convert(kind())
    x = drawn(3)
    converted(*x)
    assert all(type(a) is type(b) for a, b in zip(own.modules(), converted.modules()))
    assert events_of_python(lambda: converted(*x)) == events_of_python(lambda: own(*x))


@pytest.mark.parametrize("have", ("b1k", "bk", "b11k", "bhqk", "1k", "b1qk", "11k1"))
@pytest.mark.parametrize("want", ("b11k", "b1k", "bhqk", "1b1k"))
def test_axes_of_one_are_put_in_and_taken_out(have, want):
    """Against NumPy's rule: the letters stay in their order."""
    letters = [x for x in want if x != "1"]
    if [x for x in have if x != "1"] != [x for x in letters if x in have]:
        with pytest.raises(ValueError):
            arrange = arrangement(have, want)
            x = torch.zeros([dict(b=2, h=3, q=4, k=5).get(x, 1) for x in have])
            assert arrange is not None and arrange(x).shape is None
        return
    sizes = dict(b=2, h=3, q=4, k=5)
    x = torch.arange(float(torch.tensor([sizes.get(each, 1) for each in have]).prod())).reshape(
        [sizes.get(each, 1) for each in have]
    )
    arrange = arrangement(have, want)
    found = x if arrange is None else arrange(x)
    expected = [sizes[each] if each in have and each != "1" else 1 for each in want]
    assert torch.equal(found, x.reshape(expected))
    if arrange is not None and "1" in have:
        axis = have.index("1")
        with pytest.raises(ValueError, match="longer"):
            arrange(torch.cat((x, x), axis))
