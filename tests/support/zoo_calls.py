"""More of the zoo: what calls take and give beside the inputs: several masks, tables, inputs left out, dicts."""

import math
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo import case
from zoo_modules import PAIRS, SEEN, cross, rows

HIDDEN, ONE = SEEN == 0, [rows(2, 5, 8)]
_ANGLES = torch.arange(8.0)[:, None] * 10000.0 ** -(torch.arange(0, 4, 2) / 4)


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def mixed(q, k, v, bias=0.0):
    return ((q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Projected(nn.Module):
    def __init__(self, d=8, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def project(self, q, k, v):
        return [heads_of(W(x), self.heads) for W, x in ((self.q, q), (self.k, k), (self.v, v))]


# ---- several masks, inputs left out ------------------------------------------------------------------------------


ADDED = (SEEN[:, None, None] - 1) * 1e4


@case("multi_head", [rows(2, 5, 8)], [rows(2, 5, 8), ADDED],
      [rows(2, 3, 8), {"encoder_hidden_states": rows(2, 5, 8, 1), "encoder_attention_mask": ADDED}],
      [rows(2, 5, 8), {"output_attentions": True}], says="mask_ignored")  # fmt: skip
class SelfOrCross(Projected):
    """A mask of its own for the encoder's states, one for heads, and results in a tuple of one or two."""

    def forward(self, hidden_states, attention_mask=None, head_mask=None, encoder_hidden_states=None,
                encoder_attention_mask=None, past_key_value=None, output_attentions=False):  # fmt: skip
        others = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        attention_mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
        q, k, v = self.project(hidden_states, others, others)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if attention_mask is None else scores + attention_mask
        probabilities = scores.softmax(-1)
        probabilities = probabilities if head_mask is None else probabilities * head_mask
        context = self.o((probabilities @ v).transpose(1, 2).flatten(2))
        return (context, probabilities) if output_attentions else (context,)


@case(
    "multi_head", cross(), [*cross(), rows(1, 3, 5)[0]], [*cross(), None, HIDDEN], [*cross(), rows(1, 3, 5)[0], HIDDEN]
)
class TwoMasks(Projected):
    """One is added to the scores, the other says which keys are padding; both may come."""

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None):
        q, k, v = self.project(query, key, value)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores if attn_mask is None else scores + attn_mask
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("multi_head", ONE, [*ONE, SEEN], says="mask_ignored")
class MaskForLater(Projected):
    """No line reads the mask."""

    def forward(self, x, mask=None):
        return self.o(mixed(*self.project(x, x, x)))


@case(
    "multi_head",
    cross()[:2],
    [*cross()[:2], {"attention_mask": PAIRS.expand(2, 3, 5)}],
    [*cross(), PAIRS.bool().expand(2, 3, 5), True],
)
class ValuesBeforeKeys(nn.Module):
    """Values are the keys where there are none; 1 - mask times a large number is added."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self._num_heads = heads
        self._query_dense, self._key_dense = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self._value_dense, self._output_dense = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, query, value, key=None, attention_mask=None, return_attention_scores=False):
        key = value if key is None else key
        pairs = (self._query_dense, query), (self._key_dense, key), (self._value_dense, value)
        q, k, v = (heads_of(W(x), self._num_heads) for W, x in pairs)
        scores = torch.einsum("bhqd,bhkd->bhqk", q * q.shape[-1] ** -0.5, k)
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None].to(scores.dtype)) * -1e9
        weights = scores.softmax(-1)
        out = self._output_dense((weights @ v).transpose(1, 2).flatten(2))
        return (out, weights) if return_attention_scores else out


# ---- results -----------------------------------------------------------------------------------------------------

Attended = namedtuple("Attended", "output weights")


@case("multi_head", cross())
class InANamedTuple(Projected):
    def forward(self, query, key, value):
        q, k, v = self.project(query, key, value)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return Attended(self.o((weights @ v).transpose(1, 2).flatten(2)), weights)


@case("multi_head", cross())
class InADict(InANamedTuple):
    def forward(self, query, key, value):
        return super().forward(query, key, value)._asdict()


# ---- weights -----------------------------------------------------------------------------------------------------


@case("multi_head", ONE)
class BiasesBeside(nn.Module):
    """Biases of the queries and values alone, beside one projection."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads, self.proj, self.qkv = heads, nn.Linear(dim, dim), nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))

    def forward(self, x):
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        q, k, v = (heads_of(y, self.heads) for y in F.linear(x, self.qkv.weight, bias).chunk(3, -1))
        return self.proj(mixed(q, k, v))


@case("multi_head", ONE, [*ONE, {"lengths": torch.tensor([2, 5])}])
class KeysFirst(nn.Module):
    """One projection, in the order that its name says."""

    def __init__(self, dim=8, heads=2):
        super().__init__()
        self.heads, self.kqv, self.unify = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        k, q, v = (heads_of(y, self.heads) for y in self.kqv(x).chunk(3, -1))
        bias = torch.zeros(len(x), 1, 1, x.shape[1])
        if lengths is not None:
            bias = bias.masked_fill(torch.arange(x.shape[1]) >= lengths[:, None, None, None], float("-inf"))
        return self.unify(mixed(q, k, v, bias))


@case(
    "multi_head",
    [rows(2, 5, 8), torch.stack((_ANGLES.cos(), _ANGLES.sin()), -1)[:5], torch.ones(5, 5).tril().bool()],
    says="untried",
)
class OneProjectionOfGroups(nn.Module):
    """Queries of two heads beside one key and value; angles (T, D/2, 2) and a mask must be given."""

    def __init__(self, dim=8, n_head=2, n_local_heads=1):
        super().__init__()
        self.n_head, self.n_local_heads, self.size = n_head, n_local_heads, dim // n_head
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * self.size, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, freqs_cis, mask, input_pos=None):
        shared = self.n_local_heads * self.size
        q, k, v = self.wqkv(x).split([self.n_head * self.size, shared, shared], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in (q, k, v))
        q, k = (self.turned(y, *freqs_cis.unbind(-1)) for y in (q, k))
        k, v = (y.expand(-1, self.n_head, -1, -1) for y in (k, v))
        return self.wo(mixed(q, k, v, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))))

    def turned(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


@case("causal_multi_head", [rows(2, 5, 8), _ANGLES.cos()[:5], _ANGLES.sin()[:5]])
class TablesByLongNames(OneProjectionOfGroups):
    def forward(self, x, freqs_cos, freqs_sin):
        future = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        return super().forward(x, torch.stack((freqs_cos, freqs_sin), -1), future)


@case("additive", [rows(1, 2, 4)[0], rows(2, 5, 6), SEEN], core=False)
class ThreeLetters(nn.Module):
    """W, U, v; weights alone, and a mask that must be given."""

    def __init__(self, query=4, key=6, hiddens=5):
        super().__init__()
        self.W, self.U = nn.Linear(query, hiddens, bias=False), nn.Linear(key, hiddens, bias=False)
        self.v = nn.Linear(hiddens, 1, bias=False)

    def energy(self, s, H):
        return self.v(torch.tanh(self.W(s).unsqueeze(1) + self.U(H)))

    def forward(self, s, H, mask):
        return self.energy(s, H).squeeze(-1).masked_fill(mask == 0, float("-inf")).softmax(-1)


@case("additive", [rows(1, 2, 4)[0], rows(2, 5, 6)], [rows(1, 2, 4)[0], rows(2, 5, 6), SEEN], core=False)
class QueryAndValues(ThreeLetters):
    """The values are the keys, and the weights a column."""

    def forward(self, query, values, mask=None):
        score = self.energy(query, values)
        score = score if mask is None else score.masked_fill(mask.unsqueeze(-1) == 0, -1e9)
        weights = score.softmax(1)
        return (weights * values).sum(1), weights


# ---- dropout and scale -------------------------------------------------------------------------------------------


@case("multi_head", ONE, of_class="dropout_elsewhere")
class DropoutOfTheOutput(Projected):
    """Beside the projection, in one Sequential; the weights are not dropped."""

    def __init__(self, d=8, heads=2, dropout=0.0):
        super().__init__(d, heads)
        self.o = nn.Sequential(nn.Linear(d, d), nn.Dropout(dropout))

    def forward(self, x):
        return self.o(mixed(*self.project(x, x, x)))


@case("causal_multi_head", ONE)
class RateOfANumber(Projected):
    """The rate of a number; one Dropout is left over from other lines."""

    def __init__(self, d=8, heads=2, dropout=0.0):
        super().__init__(d, heads)
        self.dropout, self.attn_dropout, self.resid_dropout = dropout, nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        rate = self.dropout if self.training else 0.0
        q, k, v = self.project(x, x, x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + torch.full((x.shape[1],) * 2, -math.inf).triu(1)
        y = F.dropout(scores.softmax(-1), rate) @ v
        return self.resid_dropout(self.o(y.transpose(1, 2).flatten(2)))


@case(
    "dot_product",
    [heads_of(x, 4) for x in cross()],
    [*(heads_of(x, 4) for x in cross()), {"mask": SEEN[:, None, None]}],
    core=False,
)
class Temperature(nn.Module):
    """The root of a number of features, 2, that a call must have."""

    def __init__(self, temperature=2**0.5):
        super().__init__()
        self.temperature = temperature

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        attn = attn if mask is None else attn.masked_fill(mask == 0, -1e9)
        attn = F.softmax(attn, dim=-1)
        return torch.matmul(attn, v), attn
