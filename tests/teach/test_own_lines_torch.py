"""Lines of torch files as students write them, each with what it should be: masks, slices, groups, views, pairs."""

import pytest

import needs

START = """
import torch
import torch.nn.functional as F
from torch import nn

"""
LAYER = """
def one_head(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores[~mask] = float("-inf")
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, queries, keys, values, mask=None):
        q, k, v = self.q_proj(queries), self.k_proj(keys), self.v_proj(values)
        width = q.shape[2] // self.num_heads
        result = []
        for h in range(self.num_heads):
            part = slice(h * width, (h + 1) * width)
            result.append(one_head(q[..., part], k[..., part], v[..., part], mask))
        return self.out_proj(torch.cat(result, dim=-1))
"""
FUSED = """
class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2)
        return self.out(y.flatten(2))
"""
PADDED = """
class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x):
        return x.view(len(x), -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, value, key_padding_mask=None):
        q, k, v = self.split(self.q_proj(query)), self.split(self.k_proj(key)), self.split(self.v_proj(value))
        attn_mask = None
        if key_padding_mask is not None:
            attn_mask = ~key_padding_mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))
"""
WINDOW = """
def attention(q, k, v, window):
    n = q.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril()
    allowed &= torch.ones(n, n, dtype=torch.bool).triu(-window + 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ v
"""
CACHED = """
def future(n):
    steps = torch.arange(n)
    return steps[None, :] > steps[:, None]


def causal_attention(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores[:, future(q.shape[1])] = -torch.inf
    return scores.softmax(-1) @ v
"""
GROUPS = """
def grouped_attention(q, k, v):
    share = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        j = h // share
        scores = q[:, h] @ k[:, j].mT / q.shape[-1] ** 0.5
        heads.append(scores.softmax(-1) @ v[:, j])
    return torch.stack(heads, dim=1)
"""
ROWS = """
def masked_softmax(x, valid_lens):
    if valid_lens is None:
        return torch.exp(x - torch.logsumexp(x, dim=-1, keepdim=True))
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for i in range(x.shape[1]):
            n = int(valid_lens[b]) if valid_lens.ndim == 1 else int(valid_lens[b, i])
            out[b, i, :n] = x[b, i, :n].softmax(-1)
    return out
"""
PAIRS = """
def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(q, k):
    n, d = q.shape[-2:]
    freqs = torch.arange(n)[:, None] * 1.0 / 10000 ** (torch.arange(0, d, 2) / d)
    angle = torch.cat((freqs, freqs), dim=-1)
    q_turned = q * angle.cos() + rotate_half(q) * angle.sin()
    k_turned = k * angle.cos() + rotate_half(k) * angle.sin()
    return q_turned, k_turned
"""


@pytest.fixture
def answer_to(judged):
    """What check says of the one attention of a file with one change."""
    needs.module("torch")

    def answer(text, kind, old="", new="", **options):
        assert not old or text.count(old) == 1
        (found,) = judged(START + text.replace(old, new), kind=kind, **options).judged
        return found.answer

    return answer


RIGHT = {
    "multi_head": (LAYER, PADDED), "causal_multi_head": (FUSED,), "window": (WINDOW,), "causal": (CACHED,),
    "grouped": (GROUPS,), "masked_softmax": (ROWS,), "rope": (PAIRS,),
}  # fmt: skip


@pytest.mark.parametrize("kind, text", [(kind, text) for kind, texts in RIGHT.items() for text in texts])
def test_they_are_right(answer_to, kind, text):
    answer = answer_to(text, kind)
    assert answer.ok, answer


CHANGED = [  # kind, text, right, wrong, the mistake; where another line is as good: that, and the same mended
    ("multi_head", LAYER, "scores[~mask]", "scores[mask]", "mask_inverted"),
    ("multi_head", LAYER, "scores[~mask] = float(\"-inf\")", "scores[~mask] *= 0.5", "one_line"),
    ("multi_head", LAYER, "v[..., part], mask)", "v[..., part])", "mask_ignored"),
    ("multi_head", LAYER, "slice(h * width, (h + 1) * width)", "slice(h, None, self.num_heads)", "heads_interleaved"),
    ("multi_head", LAYER, "slice(h * width, (h + 1) * width)", "slice(0, width)", "first_head"),
    ("causal_multi_head", FUSED, "3, self.num_heads, -1).permute(2, 0, 3, 1, 4)",
     "3, -1, self.num_heads).permute(2, 0, 4, 1, 3)", "heads_interleaved"),
    ("causal_multi_head", FUSED, ", is_causal=True", "", "sees_future"),
    ("multi_head", PADDED, "= ~key_padding", "= key_padding", "mask_inverted"),
    ("multi_head", PADDED, "_mask[:, None, None, :]", "_mask[:1, None, None, :]", "mask_of_first"),
    ("window", WINDOW, "bool).tril()", "bool)", "sees_future"),
    ("window", WINDOW, "&=", "|=", "sees_future"),
    ("causal", CACHED, "> steps[:, None]", "> n", "one_line"),
    ("causal", CACHED, "scores[:, future", "scores[0, future", "one_line"),
    ("grouped", GROUPS, "h // share", "h % k.shape[1]", "groups_tiled"),
    ("masked_softmax", ROWS, "int(valid_lens[b]) if valid_lens.ndim == 1 else int(valid_lens[b, i])",
     "int(valid_lens[0]) if valid_lens.ndim == 1 else int(valid_lens[0, i])", "lens_of_first"),
    ("masked_softmax", ROWS, "exp(x - torch.logsumexp(x, dim=-1, keepdim=True))",
     "exp(x) - torch.logsumexp(x, dim=-1, keepdim=True)", "one_line"),
    ("rope", PAIRS, "cat((-x2, x1)", "cat((x1, -x2)", "one_line"),
    ("rope", PAIRS, "k * angle.cos() +", "k * angle.cos() -", "rope_direction"),
]  # fmt: skip


@pytest.mark.parametrize("kind, text, right, wrong, id", CHANGED)
def test_the_line_and_what_it_should_be(answer_to, kind, text, right, wrong, id):
    """The line that was changed, and one that makes all right again, as the text had it or otherwise."""
    options = {"mask": "hide"} if text == PADDED else {"mask": "attend"} if text == LAYER else {}
    answer = answer_to(text, kind, right, wrong, **options)
    assert answer.mistakes[:1] == [id], answer
    (line,) = answer.lines
    number = 1 + (START + text)[: (START + text).index(right)].count("\n")
    assert line.number == number and line.should_be, answer
    mended = answer_to(text.replace(right, wrong).replace(line.text, line.should_be), kind, **options)
    assert mended.ok, (line.should_be, mended)


def test_a_pair_that_returns_one_of_both_twice(answer_to):
    """Queries and keys were the same numbers, so that nothing told it."""
    answer = answer_to(PAIRS, "rope", "return q_turned, k_turned", "return q_turned, q_turned")
    assert answer.ok is False, answer
    assert "the queries are right: this is said of the keys" in str(answer)


def test_the_first_new_numbers_are_no_order_of_others(answer_to):
    """A table of angles that is laid twice has no number that the book does not have."""
    answer = answer_to(PAIRS, "rope", "x1, x2 = x.chunk(2, dim=-1)", "x1, x2 = x[..., 0::2], x[..., 1::2]")
    assert answer.mistakes == ["unknown"] and all("angle = " not in x.text for x in answer.lines), answer


def test_numbers_from_behind_the_keys_are_no_dropout(answer_to):
    answer = answer_to(PADDED, "multi_head", "self.k_proj(key)", "self.k_proj(query)", mask="hide")
    assert answer.mistakes == ["random"] and "different lengths" in str(answer), answer
    assert "scaled_dot_product_attention" in answer.lines[0].text
