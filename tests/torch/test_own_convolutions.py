"""Classes that project by convolutions of one step: the core's where nothing else is in them, else their own lines; and
what is said of queries that are made in another way."""

import copy

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs
from converted import TOLERANCE

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
FEATURES, HEADS = 8, 2
OTHER_CONVOLUTIONS = (
    {"groups": 2}, {"kernel_size": 3, "padding": 1}, {"padding": 1}, {"padding": 1, "padding_mode": "circular"},
    {"stride": 2}, {"kernel_size": 3, "padding": "same", "dilation": 2},
)  # fmt: skip


class Convolved(nn.Module):
    """Inputs (B, C, T), heads cut from channels."""

    def __init__(self, **options):
        super().__init__()
        options = {"kernel_size": 1, **options}
        self.q, self.k, self.v = (nn.Conv1d(FEATURES, FEATURES, **options) for _ in range(3))
        self.o = nn.Conv1d(FEATURES, FEATURES, 1)

    def forward(self, x):
        channels = x.shape[1]
        q, k, v = (y.view(len(y), HEADS, channels // HEADS, -1) for y in (self.q(x), self.k(x), self.v(x)))
        weights = (torch.einsum("bhdq,bhdk->bhqk", q, k) / (channels // HEADS) ** 0.5).softmax(-1)
        mixed = torch.einsum("bhqk,bhdk->bhdq", weights, v)
        return self.o(mixed.reshape(len(x), channels, -1))


class OfImages(nn.Module):
    """Positions of two axes, as some generators of pictures have them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(FEATURES, FEATURES, 1) for _ in range(3))

    def forward(self, x):
        queries, keys, values = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
        return (values @ (queries.transpose(1, 2) @ keys).softmax(-1).transpose(1, 2)).view(x.shape)


def way_of(module):
    return mt.report(module).as_dict()[""]["way"]


def numbers(module, x):
    """The result, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in module.parameters())]


def equal_thrice(module, twin, n_steps=5):
    """Three calls with a graph, and three without, have the numbers of the reader's lines."""
    x = torch.randn(2, FEATURES, n_steps)
    expected = numbers(twin, x)
    for _ in range(3):
        for one, other in zip(numbers(module, x), expected):
            torch.testing.assert_close(one, other, **TOLERANCE)
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected[0].detach(), **TOLERANCE)


def converted(**options):
    """(module, the same as it was): with three calls that were compared."""
    torch.manual_seed(0)
    module = Convolved(**options)
    twin = copy.deepcopy(module)
    mt.convert(module)
    equal_thrice(module, twin)
    return module, twin


def test_convolutions_of_one_step_are_the_cores():
    module, twin = converted()
    assert way_of(module) == "core"
    equal_thrice(module, twin, n_steps=7)
    for each in (module, twin):  # other weights, and another child
        each.q.weight.data = each.q.weight.data * 2
        each.v.bias.data.add_(1)
    equal_thrice(module, twin)
    torch.manual_seed(1)
    module.k = nn.Conv1d(FEATURES, FEATURES, 1, groups=2)
    twin.k = copy.deepcopy(module.k)
    equal_thrice(module, twin)


@pytest.mark.filterwarnings("ignore:convert left")
@pytest.mark.parametrize("options", OTHER_CONVOLUTIONS, ids=str)
def test_other_convolutions_keep_their_lines(options):
    """More than one step, groups, borders, strides: no projection of a row each."""
    module, _ = converted(**options)
    assert way_of(module) == "left"
    assert "please report" not in mt.report(module).as_dict()[""]["reason"]


@pytest.mark.filterwarnings("ignore:convert left")
def test_an_attribute_of_a_convolution_that_is_set_later_is_seen():
    module, twin = converted()
    for each in (module, twin):
        each.k.stride = each.v.stride = (2,)
    equal_thrice(module, twin, n_steps=6)


@pytest.mark.filterwarnings("ignore:convert left")
def test_positions_of_two_axes_are_named():
    module = mt.convert(OfImages())
    twin = copy.deepcopy(module)
    x = torch.randn(2, FEATURES, 3, 4)
    for _ in range(2):
        torch.testing.assert_close(module(x), twin(x), **TOLERANCE)
    assert "positions have several axes" in mt.report(module).as_dict()[""]["reason"]


class Turned(nn.Module):
    """Queries whose neighbouring features are turned behind their projection."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        q, angles = self.q(x), torch.arange(x.shape[1])[:, None] * torch.ones(FEATURES // 2)
        one, two = q[..., 0::2], q[..., 1::2]
        turned = torch.stack((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), -1)
        return (turned.flatten(-2) @ self.k(x).mT).softmax(-1) @ x


@pytest.mark.filterwarnings("ignore:convert left")
def test_what_is_done_behind_a_projection_is_not_said_to_come_before_it():
    module = mt.convert(Turned())
    module(torch.randn(2, 5, FEATURES))
    assert "queries or keys alone are rotated" in mt.report(module).as_dict()[""]["reason"]
