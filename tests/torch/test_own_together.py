"""`convert` on calls with two arguments that hide keys, with a switch beside one, or with one item, query or key: lines
may mean anything then.  What was read may go to the core, all else to the reader's own lines."""

import copy

import pytest
import torch
from torch import nn

import mha_c.torch as mt
import needs

LENS = torch.tensor([2, 4])
MASK, OTHER = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 1]])


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(8, 8) for _ in range(4))

    def attended(self, x, *hidden):
        """hidden   True where a key is hidden, (B, K)"""
        q, k, v = (W(x).unflatten(-1, (2, 4)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.transpose(-1, -2) / 2
        for each in hidden:
            scores = scores.masked_fill(each[:, None, None], -1e6)
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def beyond(x, lens):
    return torch.arange(x.shape[1]) >= lens[:, None]


class LengthsAndMask(Base):
    def forward(self, x, valid_lens=None, mask=None):
        hidden = [] if valid_lens is None else [beyond(x, valid_lens)]
        return self.attended(x, *hidden, *([] if mask is None else [mask == 0]))


class LengthsElseMask(Base):
    def forward(self, x, valid_lens=None, mask=None):
        return LengthsAndMask.forward(self, x, valid_lens, mask if valid_lens is None else None)


class OneMaskElseTheOther(Base):
    def forward(self, x, attention_mask=None, padding_mask=None):
        mask = padding_mask if attention_mask is None else attention_mask
        return self.attended(x, *([] if mask is None else [mask == 0]))


class InvertedMask(Base):
    def forward(self, x, mask=None, inverted=False):
        return self.attended(x, *([] if mask is None else [(mask == 0) ^ inverted]))


class OneMore(Base):
    def forward(self, x, valid_lens=None, one_more=False):
        return self.attended(x, *([] if valid_lens is None else [beyond(x, valid_lens + int(one_more))]))


CALLS = {  # arguments behind x
    LengthsAndMask: [(LENS,), (None, MASK), (LENS, OTHER)],
    LengthsElseMask: [(LENS,), (None, MASK), (LENS, MASK)],
    OneMaskElseTheOther: [(MASK,), (None, MASK), (MASK, OTHER)],
    InvertedMask: [(MASK,), (None, True), (MASK, True)],
    OneMore: [(LENS,), (LENS, True)],
}


@pytest.mark.parametrize("kind", CALLS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_together_they_mean_what_the_lines_say(kind, dtype):
    torch.manual_seed(0)
    module, x = kind(), torch.randn(2, 5, 8)
    twin = copy.deepcopy(module)
    mt.convert(module)
    for given in CALLS[kind] * 3:
        given = [each.to(dtype) if each is MASK or each is OTHER else each for each in given]
        torch.testing.assert_close(module(x, *given), twin(x, *given), rtol=1e-5, atol=1e-5)


class Squeezed(Base):
    def forward(self, x):
        return self.attended(x).squeeze()


class SqueezedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.w_v = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 1, bias=False)

    def forward(self, query, keys):
        weights = self.w_v(torch.tanh(self.W_q(query[:, None]) + self.W_k(keys))).squeeze().softmax(-1)
        return (weights[..., None] * keys).sum(-2), weights


@pytest.mark.parametrize("kind", [Squeezed, SqueezedWeights, LengthsAndMask])
def test_one_item_or_key_is_what_the_lines_make_of_it(kind):
    torch.manual_seed(0)
    module = kind()
    twin = copy.deepcopy(module)
    mt.convert(module)
    for n_items, n_keys in ((2, 5), (2, 5), (1, 5), (2, 1), (1, 1), (2, 4), (1, 4), (2, 5)):
        inputs = [torch.randn(n_items, n_keys, 8)]
        inputs = [torch.randn(n_items, 8), *inputs] if kind is SqueezedWeights else inputs
        found, expected = module(*inputs), twin(*inputs)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Plain(nn.Module):
    def forward(self, queries, keys):
        return (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(-1) @ keys


@pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
@pytest.mark.filterwarnings("ignore:convert left")
def test_plain_products_of_wide_rows_keep_their_lines_where_gradients_are_taken():
    """The core is no faster there; it computes their evaluation, and training with narrow rows."""
    for features, way in ((256, "waits"), (32, "core")):
        module = mt.convert(Plain())
        queries, keys = (torch.randn(1, n, features, requires_grad=True) for n in (64, 80))
        for _ in range(2):
            torch.testing.assert_close(module(queries, keys), Plain()(queries, keys), rtol=1e-5, atol=1e-5)
        told = mt.report(module).as_dict()[""]
        assert told["way"] == way
        assert (way == "core") or "rows are wide" in told["reason"]
        with torch.no_grad():
            module(queries, keys)
            module(queries, keys)
        assert mt.report(module).as_dict()[""]["way"] == "core"
