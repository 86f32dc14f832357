"""Masks of readers' classes whose first call shows nothing of them, and numbers that are rounded on the way: what a
call hides is read from the lines, for a call in which nothing is hidden, of items that are all alike, tells nothing."""

import copy

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
LOWEST = torch.finfo(torch.float64).min


class Own(nn.Module):
    """hide: what becomes of the scores (B, H, T, T), told a mask; after: of the weights."""

    def __init__(self, hide, after=None):
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)
        self.hide, self.after = hide, after

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, 4, C // 4).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        w = self.hide(q @ k.transpose(-2, -1) / 8**0.5, mask).softmax(-1)
        if self.after is not None:
            w = self.after(w, mask)
        return self.o((w @ v).transpose(1, 2).reshape(B, T, C))


def places(s):
    return torch.arange(s.shape[-1])


def causal(s):
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


def lengths(n_keys, lens, first=0):
    return torch.tensor(lens) + first


def kept(n_keys, lens, first=0):
    return (torch.arange(n_keys) < torch.tensor(lens)[:, None]).double()


def of_parts(n_keys, lens, first=0):
    """Masks of fractions, which hide in part where they are numbers."""
    return kept(n_keys, lens) * 0.5 + 0.5


def given(n_keys, lens, first=0):
    return torch.where(kept(n_keys, lens) > 0, 0.0, -torch.inf)[:, None, None]


# What hides, what the mask is made by, with which first place.
HIDE = {
    "from_the_length": (lambda s, m: s.masked_fill(places(s) >= m[:, None, None, None], -1e9), lengths, 0),
    "behind_the_last": (lambda s, m: s.masked_fill(places(s) > m[:, None, None, None], -torch.inf), lengths, -1),
    "up_to_the_last": (lambda s, m: torch.where(places(s) <= m.view(-1, 1, 1, 1), s, -torch.inf), lengths, -1),
    "counted_from_one": (lambda s, m: s.masked_fill(places(s) + 1 > m[:, None, None, None], -1e9), lengths, 0),
    "fractions": (lambda s, m: s.masked_fill(places(s) >= m[:, None, None, None] - 0.5, -torch.inf), lengths, 0),
    "lowest": (lambda s, m: s.masked_fill(causal(s) | (m[:, None, None] == 0), LOWEST), kept, 0),
    "numbers": (lambda s, m: s + (1.0 - m[:, None, None]) * -1e9, kept, 0),
    "numbers_in_part": (lambda s, m: s + (1.0 - m[:, None, None]) * -2e3, of_parts, 0),
    "float32": (lambda s, m: s + (1.0 - m[:, None, None]) * -1e9, lambda *of: kept(*of).float(), 0),
    "whole_numbers": (lambda s, m: s + (1 - m.long()[:, None, None]) * -(10**9), kept, 0),
    "condition": (lambda s, m: s + (causal(s) | (m[:, None, None] == 0)).double() * -1e9, kept, 0),
    "no_zero": (lambda s, m: s + (causal(s) | (m != 0)).double() * -1e9, given, 0),
    "of_no_zero": (lambda s, m: s + torch.zeros_like(s).masked_fill(causal(s) | (m != 0), -1e9), given, 0),
    "truncated": (lambda s, m: s.masked_fill(m.long()[:, None, None] == 0, -torch.inf), of_parts, 0),
    "truncated_bool": (lambda s, m: s.masked_fill(~m.long().bool()[:, None, None], -torch.inf), of_parts, 0),
    "named": (lambda s, m: s.masked_fill(value=-1e9, mask=m[:, None, None] == 0), kept, 0),
    "byte": (lambda s, m: s.masked_fill(m[:, None, None].to(torch.uint8) == 0, -1e9), of_parts, 0),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", HIDE)
def test_what_is_hidden_is_read_of_calls_that_show_nothing(name, grad):
    hide, made, first = HIDE[name]
    own = Own(hide).double()
    module = mt.convert(copy.deepcopy(own))
    calls = [(torch.ones(2, n, 32, dtype=torch.float64), made(n, [n, n], first)) for n in (7, 9)]
    shapes = (7, [7, 3]), (9, [1, 9]), (11, [5, 0]), (7, [2, 7])
    calls += [(torch.randn(2, n, 32, dtype=torch.float64), made(n, lens, first)) for n, lens in shapes]
    with torch.set_grad_enabled(grad):
        for x, mask in calls:
            expected, found = own(x, mask), module(x, mask)
            known = ~expected.isnan()  # of queries without keys
            # Sums of 32 products in another order.
            torch.testing.assert_close(found[known], expected[known], rtol=1e-11, atol=1e-11)
    assert mt.report(module).as_dict()[""]["way"] == "core"


def rounded(s, mask):
    return s.half().float()


LEFT = {
    "half": (rounded, None, "half rounds to float16", "s.half()"),
    "bfloat16": (lambda s, m: s.to(torch.bfloat16).to(s.dtype), None, "to rounds to bfloat16", "bfloat16"),
    "long": (lambda s, m: s.long().float(), None, "scores go through long", "s.long()"),
    "bool": (lambda s, m: s.bool().float(), None, "scores go through bool", "s.bool()"),
    "weights": (lambda s, m: s, lambda w, m: w.half().float(), "half rounds to float16", "w.half()"),
    "after": (lambda s, m: s, lambda w, m: w * m[:, None, None], "attention weights go through mul", "w * m"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_rounds_or_follows_is_left_with_its_line(name):
    hide, after, words, line = LEFT[name]
    own = Own(hide, after)
    module = mt.convert(copy.deepcopy(own))
    mask = kept(7, [7, 7]).float()
    with pytest.warns(UserWarning, match=words):
        module(torch.zeros(2, 7, 32), mask)
    row = mt.report(module).as_dict()[""]
    assert words in row["reason"] and line in row["line"], row
    x = torch.randn(2, 7, 32)
    assert torch.equal(module(x, mask), own(x, mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_type_is_the_reason_and_other_calls_are_the_cores(dtype):
    own, args = Own(lambda s, m: s + m).to(dtype).eval(), (torch.randn(2, 7, 32).to(dtype), torch.zeros(7, 7).to(dtype))
    with torch.no_grad():
        try:
            own(*args)
        except RuntimeError as error:  # older torch on a CPU
            pytest.skip(str(error))
        module = mt.convert(own)
        module(*args)
        row = mt.report(module).as_dict()[""]
        assert row["way"] == "waits" and str(dtype)[6:] in row["reason"] and "float32" in row["reason"]
        module.float()
        module(torch.randn(2, 7, 32), torch.zeros(7, 7))
    assert mt.report(module).as_dict()[""]["way"] == "core"


def test_a_call_that_gives_no_numbers_says_so():
    module = mt.convert(Own(lambda s, m: s + (1 - m[:, None, None]) * -torch.inf))  # 0 * inf
    module(torch.randn(2, 7, 32), kept(7, [7, 3]).float())
    assert "NaN" in mt.report(module).as_dict()[""]["reason"]


def test_lengths_of_queries_are_no_lengths_of_items():
    own = Own(lambda s, m: s.masked_fill(places(s) >= m[:, None], -torch.inf))
    module = mt.convert(copy.deepcopy(own))
    for lens in ([7] * 7, [1, 2, 3, 4, 5, 6, 7]):
        x = torch.randn(7, 7, 32)
        # float32 in another order.
        torch.testing.assert_close(module(x, torch.tensor(lens)), own(x, torch.tensor(lens)), rtol=1e-5, atol=1e-5)
