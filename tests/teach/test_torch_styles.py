"""check: torch layers as courses write them, with sizes, weights and configurations of other kinds: right and wrong."""

import pytest

import needs
from mha_c import teach

START = """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

"""
CROSS = """
class CrossAttention(nn.Module):
    def __init__(self, query_dim, other_dim=None, mid=16, heads=2):
        super().__init__()
        other_dim = query_dim if other_dim is None else other_dim
        self.heads = heads
        self.to_q = nn.Linear(query_dim, mid, bias=False)
        self.to_kv = nn.Linear(other_dim, 2 * mid, bias=False)
        self.to_out = nn.Linear(mid, query_dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(x), k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).flatten(2))
"""
FIXED = """
SIZE = 64


def causal_attention(q, k, v):
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    scores = torch.einsum("bqd,bkd->bqk", q, k) / SIZE**0.5
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v
"""
WRAPPED = """
class SelfAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x):
        n = x.shape[1]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        return self.mha(x, x, x, attn_mask=hidden)[0]
"""
DATACLASS = """
@dataclass
class Settings:
    d_model: int = 768
    n_heads: int = 12
    style: str = "plain"
    spread: float = 0.02


class Attention(nn.Module):
    def __init__(self, cfg: Settings):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.fq, self.fk, self.fv, self.fo = (nn.Linear(cfg.d_model, cfg.d_model) for _ in range(4))
        for each in self.parameters():
            nn.init.normal_(each, std=cfg.spread if cfg.style == "plain" else 1.0)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for each in (self.fq, self.fk, self.fv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.fo(y.transpose(1, 2).flatten(2))
"""
POINTWISE = """
class Attention(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.first = nn.Conv1d(channels, 3 * channels, 1)
        self.last = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.first(x.mT).view(b, 3, self.num_heads, -1, n).unbind(1)
        w = (torch.einsum("bhcq,bhck->bhqk", q, k) / (c // self.num_heads) ** 0.5).softmax(-1)
        return self.last(torch.einsum("bhqk,bhck->bhcq", w, v).reshape(b, c, n)).mT
"""
MATRICES = """
class Attention(nn.Module):
    def __init__(self, d, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_in, self.b_in = nn.Parameter(torch.randn(3 * d, d)), nn.Parameter(torch.zeros(3 * d))
        self.behind = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = F.linear(x, self.W_in, self.b_in).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.behind(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
"""


@pytest.fixture
def answer_to(judged):
    """What check says of the one attention of a file with one change."""
    needs.module("torch")

    def answer(text, kind, old="", new="", **options):
        assert old in text
        (found,) = judged(START + text.replace(old, new, 1), kind=kind, **options).judged
        return found.answer

    return answer


@pytest.mark.parametrize("old, new", [("", ""), ("k, v =", "v, k =")])
def test_sizes_that_the_book_refuses_show_nothing(answer_to, old, new):
    """16 features in three heads: both raise errors, which was taken for right, and the mistake was not seen."""
    answer = answer_to(CROSS, "multi_head", old, new, mask="none")
    assert answer.mistakes == (["swapped_keys_values"] if old else []), answer


@pytest.mark.parametrize("wrong", ["k, k", "k, q", "q, q"])
def test_queries_of_a_fixed_width_are_no_keys(answer_to, wrong):
    """Those that a fixed scale is asked with were the keys: that one takes the other's place was right."""
    assert answer_to(FIXED, "causal").ok
    answer = answer_to(FIXED, "causal", "q, k)", f"{wrong})")
    assert answer.ok is False, answer


def test_a_layer_with_the_batch_first_is_asked_with_a_batch(answer_to):
    """torch's layer takes one item, too, whose first axis is its steps."""
    assert answer_to(WRAPPED, "causal_multi_head").ok
    assert answer_to(WRAPPED, "causal_multi_head", "x.shape[1]", "x.shape[0]").ok is False


@pytest.mark.parametrize("text, kind", [(DATACLASS, "causal_multi_head"), (POINTWISE, "multi_head")])
def test_configurations_of_the_file_and_convolutions_over_one_step(answer_to, text, kind):
    """A dataclass has what no size is; letters at an end tell weights; a joint one is as wide as three."""
    assert answer_to(text, kind, mask="none").ok
    assert answer_to(text, kind, "q, k, v =", "k, q, v =", mask="none").mistakes == ["swapped_projections"]


def test_a_joint_matrix_by_a_name_that_says_nothing(answer_to):
    assert answer_to(MATRICES, "multi_head", mask="none").ok
    answer = answer_to(MATRICES, "multi_head", "q, k, v =", "q, v, k =", mask="none")
    assert answer.mistakes == ["swapped_keys_values"], answer


def test_three_times_as_wide_is_no_attention_where_nothing_follows():
    nn = needs.module("torch").nn

    class Block(nn.Module):
        def __init__(self, d, num_heads):
            super().__init__()
            self.num_heads, self.up, self.down = num_heads, nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

        def forward(self, x):
            return self.down(self.up(x).relu())

    assert teach.check(Block, "multi_head", mask="none").mistakes == ["not_judged"]


DIVIDED = """
class Attention(nn.Module):
    def __init__(self, root, attn_dropout=0.1):
        super().__init__()
        self.root = root
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        scores = q @ k.mT / self.root
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = self.dropout(scores.softmax(-1))
        return weights @ v
"""


@pytest.mark.parametrize("name", ["root", "norm", "scale", "temp"])
def test_what_scores_are_divided_by_when_a_class_takes_it(answer_to, name):
    """An argument that the scores are divided by, or multiplied with, is no number of heads."""
    assert answer_to(DIVIDED.replace("root", name), "dot_product").ok
    if name in ("norm", "scale"):
        assert answer_to(DIVIDED.replace("root", name), "dot_product", "/ self", "* self").ok
    else:
        answer = answer_to(DIVIDED.replace("root", name), "dot_product", "/ self", "* self")
        assert answer.mistakes == ["scale_inverted"], answer


def test_dropout_on_the_weights_and_once_more(answer_to):
    answer = answer_to(DIVIDED, "dot_product", "return weights @ v", "return self.dropout(weights @ v)")
    assert answer.mistakes == ["dropout_elsewhere"], answer


BIASED = """
def attention(q, k, v, bias=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    return scores.softmax(-1) @ v
"""


def test_a_bias_of_scores_is_a_mask_that_is_added(answer_to):
    answer = answer_to(BIASED, "dot_product", mask="add")
    assert answer.ok and answer.mask == "add", answer
    assert answer_to(BIASED, "dot_product", "scores + bias", "scores + 0 * bias.clamp(-1)").mistakes == ["mask_ignored"]


def test_names_tell_sinusoids_and_self_attention_without_weights(answer_to):
    text = """
class Sinusoids(nn.Module):
    def __init__(self, d, longest=64):
        super().__init__()
        angle = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def forward(self, x):
        return x + self.table[: x.shape[1]]
"""
    assert answer_to(text, None).ok
    scaled = FIXED.replace("SIZE**0.5", "q.shape[-1] ** 0.5")
    assert answer_to(scaled, None, "causal_attention", "causal_self_attention").ok


BY_HEADS = """
class Attention(nn.Module):
    def __init__(self, num_heads, d_model, d_head):
        super().__init__()
        self.num_heads, self.d_head = num_heads, d_head
        self.WQ, self.WK, self.WV = (nn.Parameter(torch.randn(num_heads, d_model, d_head)) for _ in range(3))
        self.WO = nn.Parameter(torch.randn(num_heads, d_head, d_model))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(num_heads, d_head)) for _ in range(3))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, x):
        q, k, v = (torch.einsum("bsd,ndh->bnsh", x, w) + b[:, None] for w, b in
                   ((self.WQ, self.b_Q), (self.WK, self.b_K), (self.WV, self.b_V)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bnsh,nhd->bsd", y, self.WO) + self.b_O
"""


@pytest.mark.parametrize("lost", ["", " + self.b_O", " + b[:, None]"])
def test_biases_of_heads_beside_weights_of_other_names(answer_to, lost):
    answer = answer_to(BY_HEADS, "causal_multi_head", lost)
    assert answer.mistakes == (["bias_lost"] if lost else []), answer


COUNTED = """
class Attention(nn.Module):
    def __init__(self, d_model, count):
        super().__init__()
        self.count = count
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        width = x.shape[-1] // self.count
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = [slice(i * width, (i + 1) * width) for i in range(self.count)]
        heads = [F.scaled_dot_product_attention(q[..., i], k[..., i], v[..., i], is_causal=True) for i in heads]
        return self.out_proj(torch.cat(heads, -1))
"""


@pytest.mark.parametrize("divided", ["x.shape[-1] // self.count", "int(x.shape[-1] / self.count)"])
def test_a_number_of_heads_that_something_is_divided_by_is_no_scale(answer_to, divided):
    assert answer_to(COUNTED, "causal_multi_head", "x.shape[-1] // self.count", divided).ok


@pytest.mark.parametrize("second", ["scores", "q @ k.mT", "weights"])
def test_a_second_result_that_is_no_weights_gets_a_note(answer_to, second):
    answer = answer_to(DIVIDED, "dot_product", "return weights @ v", f"return weights @ v, {second}")
    assert answer.ok and ("second result is not the book" in str(answer)) == (second != "weights"), answer


def test_w_v_may_be_called_v_beside_vals(answer_to):
    text = """
def additive_attention(queries, keys, vals, valid_lens, W1, W2, v):
    scores = ((queries @ W1)[:, :, None] + (keys @ W2)[:, None]).tanh() @ v
    if valid_lens is not None:
        lens = valid_lens[:, None, None] if valid_lens.ndim == 1 else valid_lens[:, :, None]
        scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, -1e6)
    return scores.softmax(-1) @ vals
"""
    assert answer_to(text, "additive").ok
