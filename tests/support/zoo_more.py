"""More of the zoo: other masks, other axes, heads that share keys, additive attention of translators."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import case
from zoo_modules import EACH, LENS, PAIRS, SEEN, cross, masked_softmax, rows, self_of


def heads_of(x, n):
    return x.view(x.size(0), x.size(1), n, -1).transpose(1, 2)


class Projected(nn.Module):
    """Four projections by names that a subclass gives."""

    names = "q_proj", "k_proj", "v_proj", "out_proj"

    def __init__(self, dim=8, num_heads=2, dropout=0.0, bias=True):
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(dim, dim, bias=bias))
        self.num_heads = num_heads
        self.dropout = nn.Dropout(dropout)

    def project(self, q, k, v):
        inputs = zip(self.names, (q, k, v))
        return [heads_of(getattr(self, name)(x), self.num_heads) for name, x in inputs]

    def output(self, x):
        return getattr(self, self.names[3])(x.transpose(1, 2).flatten(2))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))


@case("multi_head", [*cross()], [*cross(), ~SEEN[:, None, None].bool()])
class TrueIsHidden(Projected):
    def forward(self, q, k, v, attn_mask=None):
        q, k, v = self.project(q, k, v)
        scores = self.scores(q, k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        return self.output(self.dropout(scores.softmax(-1)) @ v)


@case("multi_head", [*cross()], [*cross(), (1 - PAIRS) * -1e9])
class AddedMask(Projected):
    names = "linear_q", "linear_k", "linear_v", "linear_out"

    def forward(self, query, key, value, attention_mask=None):
        q, k, v = self.project(query, key, value)
        scores = self.scores(q, k)
        scores = scores if attention_mask is None else scores + attention_mask
        self.attn_weights = F.softmax(scores, dim=-1)
        return self.output(self.dropout(self.attn_weights) @ v)


@case("multi_head", [*cross()], [*cross(), SEEN.bool()])
class KeyMask(Projected):
    names = "q_lin", "k_lin", "v_lin", "out_lin"

    def forward(self, query, key, value, mask=None):
        q, k, v = self.project(query, key, value)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores.masked_fill((mask == 0).view(len(mask), 1, 1, -1), -1e9)
        context = self.dropout(torch.softmax(scores, dim=-1)) @ v
        return self.output(context)


@case("multi_head", [*cross()], [*cross(), SEEN[:, None, :].bool().expand(2, 3, 5)])
class MaskOfPairs(Projected):
    names = "query", "key", "value", "out"

    def forward(self, query, key, value, mask=None):
        q, k, v = self.project(query, key, value)
        scores = self.scores(q, k)
        if mask is not None:
            scores = torch.where(mask.unsqueeze(1), scores, torch.tensor(-1e9))
        weights = scores.softmax(-1)
        return self.output(self.dropout(weights) @ v), weights.mean(dim=1)


@case(
    "multi_head",
    [rows(2, 5, 8)],
    [rows(2, 5, 8), {"attention_mask": (1.0 - SEEN[:, None, None].float()) * -10000.0}],
    says="no_output_projection",
)
class BertSelfAttention(nn.Module):
    """query, key, value without an output; an added mask of -10000."""

    def __init__(self, hidden_size=8, num_attention_heads=2, dropout=0.0):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query, self.key = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (self.transpose_for_scores(W(hidden_states)) for W in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = self.dropout(nn.Softmax(dim=-1)(scores))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.size()[:-2], -1)


@case("multi_head", [rows(2, 3, 8)], [rows(2, 3, 8), rows(2, 5, 8, 1)])
class CrossAttention(nn.Module):
    """x and a context; to_q, to_kv, to_out."""

    def __init__(self, dim=8, context_dim=None, heads=2, dim_head=4, dropout=0.0):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(context_dim or dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(context_dim or dim, heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = (heads_of(y, self.heads) for y in (self.to_q(x), self.to_k(context), self.to_v(context)))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * self.scale).softmax(dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", self.drop(attn), v).transpose(1, 2).flatten(2))


@case("multi_head", [rows(2, 3, 8), rows(2, 5, 8, 1)])
class KeysAndValuesInOne(nn.Module):
    def __init__(self, dim=8, num_heads=2, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(dropout)

    def forward(self, x, memory):
        k, v = self.kv(memory).chunk(2, dim=-1)
        q, k, v = (heads_of(y, self.num_heads) for y in (self.q(x), k, v))
        attn = self.attn_drop(torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1))
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


@case("causal_multi_head", [rows(2, 5, 8)], [rows(1, 7, 8)])
class GroupedQueryAttention(nn.Module):
    """num_kv_heads heads of keys, repeated for the queries; causal."""

    def __init__(self, dim=8, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        T = x.shape[1]
        q, k, v = heads_of(self.q_proj(x), self.num_heads), self.k_proj(x), self.v_proj(x)
        group = self.num_heads // self.num_kv_heads
        k, v = (heads_of(y, self.num_kv_heads).repeat_interleave(group, dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


@case("multi_head", [*cross(), LENS], [*cross(), None])
class MultiQueryAttention(nn.Module):
    """One head of keys and values for all queries."""

    def __init__(self, d_model=8, n_heads=2, dropout=0.0):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_q, self.W_k = nn.Linear(d_model, d_model), nn.Linear(d_model, self.d_k)
        self.W_v, self.W_o = nn.Linear(d_model, self.d_k), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = heads_of(self.W_q(queries), self.n_heads), self.W_k(keys)[:, None], self.W_v(values)[:, None]
        scores = q @ k.transpose(2, 3) / self.d_k**0.5
        if valid_lens is not None:
            scores = scores.masked_fill(torch.arange(k.size(2)) >= valid_lens.view(-1, 1, 1, 1), -1e6)
        self.attention_weights = scores.softmax(-1)
        return self.W_o((self.dropout(self.attention_weights) @ v).transpose(1, 2).flatten(2))


@case("multi_head", [*(x.transpose(0, 1) for x in cross())])
class TimeFirst(nn.Module):
    """(T, B, features), as old translators have it."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads = heads
        self.Wq, self.Wk, self.Wv = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.Wo = nn.Linear(dim, dim)

    def forward(self, q, k, v):
        q, k, v = (W(x).unflatten(2, (self.heads, -1)).permute(1, 2, 0, 3) for W, x in
                   ((self.Wq, q), (self.Wk, k), (self.Wv, v)))  # fmt: skip
        out = (q @ k.transpose(2, 3) / math.sqrt(q.size(3))).softmax(-1) @ v
        return self.Wo(out.permute(2, 0, 1, 3).flatten(2))


if hasattr(F, "scaled_dot_product_attention"):

    @case("causal_multi_head", [rows(2, 5, 8)], [rows(3, 7, 8)])
    class FusedCausal(nn.Module):
        """torch's own function, dropout as a number."""

        def __init__(self, n_embd=8, n_head=2, dropout=0.0):
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
            self.resid_dropout = nn.Dropout(dropout)
            self.n_head, self.dropout = n_head, dropout

        def forward(self, x):
            B, T, C = x.size()
            q, k, v = (heads_of(y, self.n_head) for y in self.c_attn(x).chunk(3, dim=-1))
            p = self.dropout if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
            return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


@case("dot_product", [*cross(), LENS], [*cross(), None], of_class="dropout_elsewhere")
class DropoutOfANumber(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.p = dropout

    def forward(self, queries, keys, values, valid_lens=None):
        weights = masked_softmax(queries @ keys.transpose(1, 2) / queries.shape[2] ** 0.5, valid_lens)
        return F.dropout(weights, p=self.p, training=self.training) @ values


@case("multi_head", [*cross(), LENS], [*cross(), EACH], says="raises")
class Undecorated(Projected):
    """A method for each step; a length for each query; weights under another name."""

    names = "W_Q", "W_K", "W_V", "W_O"

    def forward(self, Q, K, V, lengths):
        Q, K, V = self.project(Q, K, V)
        scores = self.scores(Q, K)
        lengths = lengths[:, None].expand(-1, Q.size(2)) if lengths.dim() == 1 else lengths
        seen = torch.arange(K.size(2))[None, None, None] < lengths[:, None, :, None]
        self.A = torch.softmax(scores.masked_fill(~seen, -1e6), -1)
        return self.output(self.dropout(self.A) @ V)


# ---- additive ---------------------------------------------------------------------------------------------------


@case("additive", [rows(1, 2, 4)[0], rows(5, 2, 6)], [rows(1, 3, 4)[0], rows(7, 3, 6)], core=False)
class AttentionOfATranslator(nn.Module):
    """One projection of [hidden; encoder_outputs]; (T, B, E); weights alone."""

    def __init__(self, enc_hid_dim=6, dec_hid_dim=4):
        super().__init__()
        self.attn = nn.Linear(enc_hid_dim + dec_hid_dim, dec_hid_dim)
        self.v = nn.Linear(dec_hid_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs):
        src_len = encoder_outputs.shape[0]
        hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
        encoder_outputs = encoder_outputs.permute(1, 0, 2)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        return F.softmax(self.v(energy).squeeze(2), dim=1)


@case("additive", [rows(1, 2, 4)[0], rows(2, 5, 6)], core=False)
class ContextAndWeights(nn.Module):
    """(hidden (B, H), encoder_outputs (B, T, E)): gives (context, weights)."""

    def __init__(self, hidden=4, enc=6, units=5):
        super().__init__()
        self.W, self.U, self.V = nn.Linear(hidden, units), nn.Linear(enc, units), nn.Linear(units, 1, bias=False)

    def forward(self, hidden, encoder_outputs):
        energy = torch.tanh(self.W(hidden).unsqueeze(1) + self.U(encoder_outputs))
        weights = torch.softmax(self.V(energy).squeeze(-1), dim=-1)
        context = torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1)
        return context, weights


@case("additive", [rows(2, 1, 4), rows(2, 5, 6)], core=False)
class BahdanauAttention(nn.Module):
    """Wa, Ua, Va, one query (B, 1, H): gives (context, weights)."""

    def __init__(self, query=4, keys=6, units=5):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(query, units), nn.Linear(keys, units), nn.Linear(units, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
        return torch.bmm(weights, keys), weights


@case("additive", [*cross(6, 4, 7), SEEN.bool()], [*cross(6, 4, 7), None])
class VectorOfScores(nn.Module):
    """A vector for v, one projection of both, a mask of keys."""

    def __init__(self, query_size=6, key_size=4, hiddens=5, dropout=0.0):
        super().__init__()
        self.W = nn.Linear(query_size + key_size, hiddens, bias=False)
        self.v = nn.Parameter(torch.rand(hiddens))
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        n_q, n_k = query.size(1), key.size(1)
        both = torch.cat([query[:, :, None].expand(-1, -1, n_k, -1), key[:, None].expand(-1, n_q, -1, -1)], dim=-1)
        scores = torch.tanh(self.W(both)) @ self.v
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        self.weights = F.softmax(scores, dim=-1)
        return self.dropout(self.weights) @ value


@case("multi_head", [*self_of()], [*cross()])
class NotKept(Projected):
    """No dropout, no mask, nothing kept; an attribute more."""

    def __init__(self):
        super().__init__()
        del self.dropout
        self.description = "a course's first version"

    def forward(self, x, y, z):
        q, k, v = self.project(x, y, z)
        return self.output(self.scores(q, k).softmax(-1) @ v)


@case("additive", [rows(1, 2, 4), rows(2, 5, 6)], says="dropout_in_eval", of_class="one_line", core=False)
class HiddenOfAnRnn(nn.Module):
    """hidden (1, B, H) as an RNN gives it; context (B, E), weights (B, T, 1)."""

    def __init__(self, hidden=4, enc=6, units=5):
        super().__init__()
        self.W1, self.W2, self.V = nn.Linear(hidden, units), nn.Linear(enc, units), nn.Linear(units, 1)

    def forward(self, hidden, enc_output):
        scores = self.V(torch.tanh(self.W1(hidden.permute(1, 0, 2)) + self.W2(enc_output)))
        weights = F.softmax(scores, dim=1)
        return (weights * enc_output).sum(1), weights


@case("dot_product", [rows(2, 3, 4), rows(2, 5, 4)], core=False)
class KeysAreValues(nn.Module):
    def forward(self, query, keys):
        weights = F.softmax(torch.bmm(query, keys.transpose(1, 2)) / math.sqrt(query.size(-1)), dim=-1)
        return torch.bmm(weights, keys), weights


@case("multi_head", [*cross()], [*cross(), ~SEEN.bool()], [*cross(), {"need_weights": False}])
class AsTorchHasIt(Projected):
    """key_padding_mask, need_weights: (output, mean of the weights)."""

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, need_weights=True):
        q, k, v = self.project(query, key, value)
        scores = self.scores(q, k)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        weights = scores.softmax(-1)
        out = self.output(self.dropout(weights) @ v)
        return (out, weights.mean(1)) if need_weights else (out, None)
