"""What looks like attention, has its names, and computes something else: one line of each class differs."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zoo import differs


class Dot(nn.Module):
    """One head without weights; its steps are methods, of which a subclass changes one."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])

    def masked(self, scores, lens):
        if lens is None:
            return scores
        lens = lens[:, None] if lens.dim() == 1 else lens
        return scores.masked_fill(torch.arange(scores.shape[-1]) >= lens[..., None], -1e6)

    def softmax(self, scores):
        return F.softmax(scores, dim=-1)

    def mixed(self, weights, values):
        return torch.bmm(self.dropout(weights), values)

    def forward(self, queries, keys, values, valid_lens=None):
        self.attention_weights = self.softmax(self.masked(self.scores(queries, keys), valid_lens))
        return self.mixed(self.attention_weights, values)


@differs("dot_product", "scale_d")
class DividedByD(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / q.shape[-1]


@differs("dot_product", "no_scale")
class NotScaled(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2))


@differs("dot_product", "scale_inverted")
class Multiplied(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) * math.sqrt(q.shape[-1])


@differs("dot_product", "one_line")
class DividedByTheWidthOfAll(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / math.sqrt(2 * q.shape[-1])


@differs("dot_product", "softmax_axis")
class SoftmaxOverQueries(Dot):
    def softmax(self, scores):
        return F.softmax(scores, dim=1)


@differs("dot_product", "no_softmax")
class NoSoftmax(Dot):
    def softmax(self, scores):
        return scores


@differs("dot_product", "no_softmax")
class Sigmoid(Dot):
    def softmax(self, scores):
        return torch.sigmoid(scores)


@differs("dot_product", "mask_zero")
class MaskedWithZero(Dot):
    def masked(self, scores, lens):
        return scores if lens is None else torch.where(super().masked(scores, lens) < -1e5, torch.tensor(0.0), scores)


@differs("dot_product", "mask_inverted")
class MaskInverted(Dot):
    def masked(self, scores, lens):
        if lens is None:
            return scores
        lens = lens[:, None] if lens.dim() == 1 else lens
        return scores.masked_fill(torch.arange(scores.shape[-1]) < lens[..., None], -1e6)


@differs("dot_product", "mask_off_by_one")
class OneTooMany(Dot):
    def masked(self, scores, lens):
        return super().masked(scores, None if lens is None else lens + 1)


@differs("dot_product", "mask_after_softmax")
class MaskedAfterSoftmax(Dot):
    def forward(self, queries, keys, values, valid_lens=None):
        weights = self.softmax(self.scores(queries, keys))
        if valid_lens is not None:
            lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            weights = weights * (torch.arange(weights.shape[-1]) < lens[..., None])
        return self.mixed(weights, values)


@differs("dot_product", "dropout_elsewhere")
class OutputDropped(Dot):
    def mixed(self, weights, values):
        return self.dropout(torch.bmm(weights, values))


@differs("dot_product", "dropout_on_scores")
class DropoutOfTheScores(Dot):
    def softmax(self, scores):
        return F.softmax(self.dropout(scores), dim=-1)

    def mixed(self, weights, values):
        return torch.bmm(weights, values)


@differs("dot_product", "dropout_elsewhere")
class DropoutOfTheValues(Dot):
    def mixed(self, weights, values):
        return torch.bmm(weights, self.dropout(values))


@differs("dot_product", "no_dropout")
class DropoutForgotten(Dot):
    def mixed(self, weights, values):
        return torch.bmm(weights, values)


@differs("dot_product", "dropout_in_eval")
class DropoutInEvaluation(Dot):
    def __init__(self, dropout=0.4):
        super().__init__()
        del self.dropout
        self.p = dropout

    def mixed(self, weights, values):
        return torch.bmm(F.dropout(weights, self.p), values)


@differs("dot_product", "")
class LouderInTraining(Dot):
    def mixed(self, weights, values):
        return super().mixed(weights, values) * (1 + self.training)


@differs("dot_product", "gradients")
class GradientLost(Dot):
    def mixed(self, weights, values):
        return torch.bmm(self.dropout(weights.detach()), values)


@differs("dot_product", "many_keys")
class Windowed(Dot):
    def scores(self, q, k):
        away = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        return super().scores(q, k).masked_fill(away.abs() > 9, -1e6)


@differs("dot_product", "one_line")
class BiasOfDistance(Dot):
    def scores(self, q, k):
        away = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        return super().scores(q, k) - 0.1 * away.abs()


@differs("dot_product", "one_line")
class Residual(Dot):
    def forward(self, queries, keys, values, valid_lens=None):
        return queries + super().forward(queries, keys, values, valid_lens)


@differs("dot_product", "")
class Counting(Dot):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, queries, keys, values, valid_lens=None):
        self.calls += 1
        return super().forward(queries, keys, values, valid_lens)


@differs("dot_product", "")
class WithHistory(Dot):
    """What it appends to a list would be missing."""

    def __init__(self):
        super().__init__()
        self._history = []

    def forward(self, queries, keys, values, valid_lens=None):
        out = super().forward(queries, keys, values, valid_lens)
        self._history.append(self.attention_weights.mean().item())
        return out


@differs("dot_product", "")
class WithCounter(Dot):
    """A buffer that each call changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, queries, keys, values, valid_lens=None):
        self.seen += 1
        return super().forward(queries, keys, values, valid_lens)


@differs("dot_product", "")
class Printing(Dot):
    def forward(self, queries, keys, values, valid_lens=None):
        print(queries.shape)
        return super().forward(queries, keys, values, valid_lens)


# ---- with projections -----------------------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self, dim=8, num_heads=2, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.W_o = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        self.more(dim)

    def more(self, dim):
        pass

    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def join(self, x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def project(self, q, k, v):
        return self.split(self.W_q(q)), self.split(self.W_k(k)), self.split(self.W_v(v))

    def scores(self, q, k):
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])

    def masked(self, scores, lens):
        hidden = None if lens is None else torch.arange(scores.shape[-1]) >= lens.reshape(len(scores), 1, -1, 1)
        return scores if lens is None else scores.masked_fill(hidden, -1e6)

    def output(self, x):
        return self.W_o(self.join(x))

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = self.project(queries, keys, values)
        weights = self.masked(self.scores(q, k), valid_lens).softmax(-1)
        return self.output(self.dropout(weights) @ v)


@differs("multi_head", "scale_num_hiddens")
class ScaledByAllHeads(Heads):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1] * self.num_heads)


@differs("multi_head", "heads_without_transpose")
class HeadsSplitWithoutTranspose(Heads):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, x.shape[1], -1)


@differs("multi_head", "heads_joined_wrong")
class HeadsJoinedWithoutTranspose(Heads):
    def join(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


@differs("multi_head", "heads_interleaved")
class FeaturesBeforeHeads(Heads):
    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], -1, self.num_heads).permute(0, 3, 1, 2)


@differs("multi_head", "heads_interleaved")
class AnotherOrderOut(Heads):
    def join(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


@differs("multi_head", "swapped_projections")
class KeysByTheWeightOfQueries(Heads):
    def project(self, q, k, v):
        return self.split(self.W_q(q)), self.split(self.W_q(k)), self.split(self.W_v(v))


@differs("multi_head", "swapped_keys_values")
class ValuesAreKeys(Heads):
    def project(self, q, k, v):
        return self.split(self.W_q(q)), self.split(self.W_k(k)), self.split(self.W_v(k))


@differs("multi_head", "residual")
class WithResidual(Heads):
    def forward(self, queries, keys, values, valid_lens=None):
        return queries + super().forward(queries, keys, values, valid_lens)


@differs("multi_head", "one_line")
class WithNormAfter(Heads):
    def more(self, dim):
        self.norm = nn.LayerNorm(dim)

    def output(self, x):
        return self.norm(super().output(x))


@differs("multi_head", "one_line")
class WithNormOfQueries(Heads):
    def more(self, dim):
        self.q_norm = nn.LayerNorm(dim // self.num_heads, elementwise_affine=True)

    def scores(self, q, k):
        return super().scores(self.q_norm(q), k)


@differs("multi_head", "one_line")
class NormWithoutWeights(Heads):
    def more(self, dim):
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)

    def forward(self, queries, keys, values, valid_lens=None):
        return super().forward(self.norm(queries), keys, values, valid_lens)


@differs("multi_head", "one_line")
class DistanceTable(Heads):
    def more(self, dim):
        self.table = nn.Embedding(64, self.num_heads)

    def scores(self, q, k):
        away = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).clamp(-31, 31) + 32
        return super().scores(q, k) + self.table(away).permute(2, 0, 1)


@differs("multi_head", "extra_parameter")
class LearnedScale(Heads):
    def more(self, dim):
        self.tau = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    def scores(self, q, k):
        return super().scores(q, k) * self.tau


@differs("multi_head", "no_scale")
class Cosine(Heads):
    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(2, 3)


@differs("multi_head", "one_line")
class OutputTwice(Heads):
    def output(self, x):
        return self.W_o(super().output(x))


@differs("multi_head", "relu")
class Activated(Heads):
    def project(self, q, k, v):
        return [x.relu() for x in super().project(q, k, v)]


@differs("multi_head", "one_line")
class TalkingHeads(Heads):
    def scores(self, q, k):
        return super().scores(q, k).mean(1, keepdim=True).expand(-1, self.num_heads, -1, -1)


@differs("multi_head", "dropout_elsewhere")
class DropoutOfProjections(Heads):
    def project(self, q, k, v):
        return [self.dropout(x) for x in super().project(q, k, v)]

    def forward(self, queries, keys, values, valid_lens=None):
        q, k, v = self.project(queries, keys, values)
        return self.output(self.masked(self.scores(q, k), valid_lens).softmax(-1) @ v)


class OneInput(Heads):
    def forward(self, x):
        q, k, v = self.project(x, x, x)
        return self.output(self.dropout(self.masked(self.scores(q, k), None).softmax(-1)) @ v)


@differs("causal_multi_head", "mask_off_by_one")
class DiagonalHidden(OneInput):
    """Hides the present, too."""

    def masked(self, scores, lens):
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(0).bool(), -1e9)


@differs("causal_multi_head", "causal_corner")
class FutureSeen(OneInput):
    """Sees the future, not the past."""

    def masked(self, scores, lens):
        return scores.masked_fill(torch.ones(scores.shape[-2:]).tril(-1).bool(), -1e9)


@differs("multi_head", "one_line", of_class="raises")
class Rotated(OneInput):
    def scores(self, q, k):
        angle = torch.arange(q.shape[2])[:, None] / 10 ** torch.arange(q.shape[3] // 2)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * turn).flatten(-2)
                for x in (q, k))  # fmt: skip
        return super().scores(q, k)


@differs("multi_head", "one_line", of_class="raises")
class OnlyKeysRotated(OneInput):
    def scores(self, q, k):
        angle = torch.outer(torch.arange(k.shape[2]).float(), 1e4 ** (-torch.arange(k.shape[3] // 2) * 2 / k.shape[3]))
        first, second = k.chunk(2, dim=-1)
        k = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
        return super().scores(q, k)


# ---- additive ---------------------------------------------------------------------------------------------------


class Additive(nn.Module):
    def __init__(self, size=6, hiddens=5, dropout=0.1):
        super().__init__()
        self.W_k, self.W_q = nn.Linear(size, hiddens, bias=False), nn.Linear(size, hiddens, bias=False)
        self.w_v, self.dropout = nn.Linear(hiddens, 1, bias=False), nn.Dropout(dropout)

    def features(self, q, k):
        return torch.tanh(q + k)

    def forward(self, queries, keys, values, valid_lens=None):
        features = self.features(self.W_q(queries)[:, :, None], self.W_k(keys)[:, None])
        scores = self.w_v(features).squeeze(-1)
        if valid_lens is not None:
            lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens[..., None], -1e6)
        return self.dropout(scores.softmax(-1)) @ values


@differs("additive", "no_tanh")
class NoTanh(Additive):
    def features(self, q, k):
        return q + k


@differs("additive", "no_tanh")
class ReluForTanh(Additive):
    def features(self, q, k):
        return (q + k).relu()


@differs("additive", "product_for_sum")
class ProductForSum(Additive):
    def features(self, q, k):
        return torch.tanh(q * k)


@differs("additive", "unknown")
class TanhOfEach(Additive):
    def features(self, q, k):
        return q.tanh() + k.tanh()


@differs("additive", "scaled")
class ScaledAdditive(Additive):
    def features(self, q, k):
        return torch.tanh(q + k) / math.sqrt(q.shape[-1])
