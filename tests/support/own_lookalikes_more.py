"""More of what looks like attention: what small numbers, few calls or one kind of call do not show."""

import math

import torch
from torch import nn

from own_lookalikes import Additive, Dot, Heads, OneInput, differs


@differs("large scores are cut off")
class Clipped(Dot):
    def scores(self, q, k):
        return super().scores(q, k).clamp(-50, 50)


@differs()
class FixedTemperature(Dot):
    """Right for four features alone."""

    def __init__(self, dropout=0.1):
        super().__init__(dropout)
        self.scale = 2.0

    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / self.scale


@differs("mask has no effect")
class MaskOfShortRowsAlone(OneInput):
    """A parameter that lines do read, though not in the calls that compare."""

    def forward(self, x, mask=None):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        if mask is not None and x.shape[1] == 37:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return self.output(self.dropout(scores.softmax(-1)) @ v)


@differs("q_scale")
class ScaleBesideProjections(Heads):
    """A vector that a name could take for a bias."""

    def more(self, dim):
        self.q_scale = nn.Parameter(torch.ones(dim))

    def project(self, q, k, v):
        return self.split(self.W_q(q) * self.q_scale), self.split(self.W_k(k)), self.split(self.W_v(v))


@differs()
class LinesOfAnotherAdditive(Additive):
    """W, U, v with gelu, by names that say nothing."""

    def forward(self, queries, keys, values):
        energy = self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None]
        return self.dropout(self.w_v(nn.functional.gelu(energy)).squeeze(-1).softmax(-1)) @ values


@differs("drops something other")
class DropoutBeforeTheOutput(Heads):
    """In a Sequential, but before the projection."""

    def more(self, dim):
        self.W_o, self.dropout = nn.Sequential(nn.Dropout(0.1), nn.Linear(dim, dim)), nn.Identity()


@differs("result 2 of its call is neither its output nor its weights")
class ScoresBesideTheOutput(OneInput):
    def forward(self, x):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        return self.output(self.dropout(scores.softmax(-1)) @ v), scores.detach()


def interacting(mask, padding, scores):
    """Two masks that are right one by one."""
    both = mask is not None and padding is not None
    for each in (mask, padding):
        scores = scores if each is None else scores.masked_fill(~each, -math.inf)
    return scores / 2 if both else scores
