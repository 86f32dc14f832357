"""What looks like attention, has its names, and computes something else: one line of each class differs.

LOOKALIKES has {name: (class, words of what convert says, or "" where it knows no more than that it differs)}.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

LOOKALIKES = {}
OTHER = "computes something other than an attention of the book"


def differs(words=""):
    def put(kind):
        LOOKALIKES[kind.__name__] = kind, words
        return kind

    return put


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


@differs("scores are divided by d, not by sqrt")
class DividedByD(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / q.shape[-1]


@differs("scores are not divided by sqrt")
class NotScaled(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2))


@differs("scores are multiplied by sqrt")
class Multiplied(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) * math.sqrt(q.shape[-1])


@differs()
class DividedByTheWidthOfAll(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / math.sqrt(2 * q.shape[-1])


@differs("softmax")
class SoftmaxOverQueries(Dot):
    def softmax(self, scores):
        return F.softmax(scores, dim=1)


@differs("softmax")
class NoSoftmax(Dot):
    def softmax(self, scores):
        return scores


@differs("sigmoid")
class Sigmoid(Dot):
    def softmax(self, scores):
        return torch.sigmoid(scores)


@differs("masked scores become 0")
class MaskedWithZero(Dot):
    def masked(self, scores, lens):
        return scores if lens is None else torch.where(super().masked(scores, lens) < -1e5, torch.tensor(0.0), scores)


@differs("hidden|keys that count are hidden")
class MaskInverted(Dot):
    def masked(self, scores, lens):
        if lens is None:
            return scores
        lens = lens[:, None] if lens.dim() == 1 else lens
        return scores.masked_fill(torch.arange(scores.shape[-1]) < lens[..., None], -1e6)


@differs("one key too many")
class OneTooMany(Dot):
    def masked(self, scores, lens):
        return super().masked(scores, None if lens is None else lens + 1)


@differs("after the softmax")
class MaskedAfterSoftmax(Dot):
    def forward(self, queries, keys, values, valid_lens=None):
        weights = self.softmax(self.scores(queries, keys))
        if valid_lens is not None:
            lens = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens
            weights = weights * (torch.arange(weights.shape[-1]) < lens[..., None])
        return self.mixed(weights, values)


@differs("drops the output")
class DropoutOfTheOutput(Dot):
    def mixed(self, weights, values):
        return self.dropout(torch.bmm(weights, values))


@differs("drops something other")
class DropoutOfTheScores(Dot):
    def softmax(self, scores):
        return F.softmax(self.dropout(scores), dim=-1)

    def mixed(self, weights, values):
        return torch.bmm(weights, values)


@differs("drops something other")
class DropoutOfTheValues(Dot):
    def mixed(self, weights, values):
        return torch.bmm(weights, self.dropout(values))


@differs("is not used")
class DropoutForgotten(Dot):
    def mixed(self, weights, values):
        return torch.bmm(weights, values)


@differs("in evaluation|other numbers each time|could not|something else|acts")
class DropoutInEvaluation(Dot):
    def __init__(self, dropout=0.4):
        super().__init__()
        del self.dropout
        self.p = dropout

    def mixed(self, weights, values):
        return torch.bmm(F.dropout(weights, self.p), values)


@differs("something else in training")
class LouderInTraining(Dot):
    def mixed(self, weights, values):
        return super().mixed(weights, values) * (1 + self.training)


@differs("gradients are not")
class GradientLost(Dot):
    def mixed(self, weights, values):
        return torch.bmm(self.dropout(weights.detach()), values)


@differs()
class Windowed(Dot):
    def scores(self, q, k):
        away = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        return super().scores(q, k).masked_fill(away.abs() > 9, -1e6)


@differs()
class BiasOfDistance(Dot):
    def scores(self, q, k):
        away = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
        return super().scores(q, k) - 0.1 * away.abs()


@differs()
class Residual(Dot):
    def forward(self, queries, keys, values, valid_lens=None):
        return queries + super().forward(queries, keys, values, valid_lens)


@differs("also sets calls|also sets")
class Counting(Dot):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, queries, keys, values, valid_lens=None):
        self.calls += 1
        return super().forward(queries, keys, values, valid_lens)


@differs("also sets _history")
class WithHistory(Dot):
    """What it appends to a list would be missing."""

    def __init__(self):
        super().__init__()
        self._history = []

    def forward(self, queries, keys, values, valid_lens=None):
        out = super().forward(queries, keys, values, valid_lens)
        self._history.append(self.attention_weights.mean().item())
        return out


@differs("also sets seen")
class WithCounter(Dot):
    """A buffer that each call changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, queries, keys, values, valid_lens=None):
        self.seen += 1
        return super().forward(queries, keys, values, valid_lens)


@differs("it prints")
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


@differs("divided by")
class ScaledByAllHeads(Heads):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1] * self.num_heads)


@differs("a plain reshape .*makes the heads")
class HeadsSplitWithoutTranspose(Heads):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, x.shape[1], -1)


@differs("a plain reshape .*joins the heads")
class HeadsJoinedWithoutTranspose(Heads):
    def join(self, x):
        return x.reshape(x.shape[0], x.shape[2], -1)


@differs("head h takes features")
class FeaturesBeforeHeads(Heads):
    def split(self, x):
        return x.reshape(x.shape[0], x.shape[1], -1, self.num_heads).permute(0, 3, 1, 2)


@differs("joined in turns")
class AnotherOrderOut(Heads):
    def join(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


@differs("W_q projects the keys, too")
class KeysByTheWeightOfQueries(Heads):
    def project(self, q, k, v):
        return self.split(self.W_q(q)), self.split(self.W_q(k)), self.split(self.W_v(v))


@differs()
class ValuesAreKeys(Heads):
    def project(self, q, k, v):
        return self.split(self.W_q(q)), self.split(self.W_k(k)), self.split(self.W_v(k))


@differs("queries are added to the output")
class WithResidual(Heads):
    def forward(self, queries, keys, values, valid_lens=None):
        return queries + super().forward(queries, keys, values, valid_lens)


@differs("holds norm")
class WithNormAfter(Heads):
    def more(self, dim):
        self.norm = nn.LayerNorm(dim)

    def output(self, x):
        return self.norm(super().output(x))


@differs("holds q_norm")
class WithNormOfQueries(Heads):
    def more(self, dim):
        self.q_norm = nn.LayerNorm(dim // self.num_heads, elementwise_affine=True)

    def scores(self, q, k):
        return super().scores(self.q_norm(q), k)


@differs()
class NormWithoutWeights(Heads):
    def more(self, dim):
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)

    def forward(self, queries, keys, values, valid_lens=None):
        return super().forward(self.norm(queries), keys, values, valid_lens)


@differs("holds table")
class DistanceTable(Heads):
    def more(self, dim):
        self.table = nn.Embedding(64, self.num_heads)

    def scores(self, q, k):
        away = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).clamp(-31, 31) + 32
        return super().scores(q, k) + self.table(away).permute(2, 0, 1)


@differs("holds tau")
class LearnedScale(Heads):
    def more(self, dim):
        self.tau = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    def scores(self, q, k):
        return super().scores(q, k) * self.tau


@differs("cosines")
class Cosine(Heads):
    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(2, 3)


@differs()
class OutputTwice(Heads):
    def output(self, x):
        return self.W_o(super().output(x))


@differs()
class Activated(Heads):
    def project(self, q, k, v):
        return [x.relu() for x in super().project(q, k, v)]


@differs()
class TalkingHeads(Heads):
    def scores(self, q, k):
        return super().scores(q, k).mean(1, keepdim=True).expand(-1, self.num_heads, -1, -1)


@differs("drops")
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


@differs("does not see its own position")
class DiagonalHidden(OneInput):
    """Hides the present, too."""

    def masked(self, scores, lens):
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(0).bool(), -1e9)


@differs("the wrong corner is hidden")
class FutureSeen(OneInput):
    """Sees the future, not the past."""

    def masked(self, scores, lens):
        return scores.masked_fill(torch.ones(scores.shape[-2:]).tril(-1).bool(), -1e9)


@differs()
class Rotated(OneInput):
    def scores(self, q, k):
        angle = torch.arange(q.shape[2])[:, None] / 10 ** torch.arange(q.shape[3] // 2)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * turn).flatten(-2)
                for x in (q, k))  # fmt: skip
        return super().scores(q, k)


@differs()
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


@differs("tanh")
class NoTanh(Additive):
    def features(self, q, k):
        return q + k


@differs("relu takes the place of tanh")
class ReluForTanh(Additive):
    def features(self, q, k):
        return (q + k).relu()


@differs("multiplied, not added")
class ProductForSum(Additive):
    def features(self, q, k):
        return torch.tanh(q * k)


@differs()
class TanhOfEach(Additive):
    def features(self, q, k):
        return q.tanh() + k.tanh()


@differs("not scaled")
class ScaledAdditive(Additive):
    def features(self, q, k):
        return torch.tanh(q + k) / math.sqrt(q.shape[-1])
