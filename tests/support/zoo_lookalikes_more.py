"""More of what looks like attention: what small numbers, few calls or one kind of call do not show."""

import math

import torch
from torch import nn

from zoo import differs
from zoo_lookalikes import Additive, Dot, Heads, OneInput


@differs("dot_product", "")
class Clipped(Dot):
    def scores(self, q, k):
        return super().scores(q, k).clamp(-50, 50)


@differs("dot_product", "", of_class="scale_fixed")
class FixedTemperature(Dot):
    """Right for four features alone."""

    def __init__(self, dropout=0.1):
        super().__init__(dropout)
        self.scale = 2.0

    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / self.scale


@differs("dot_product", "scale_fixed")
class TemperatureThatIsAWidth(Dot):
    """Three is the width of the inputs that it is tried with, too, and not its reason."""

    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / 3


@differs("dot_product", "one_line")
class TemperatureBesideTheWidth(Dot):
    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1]) / 1.7


@differs("dot_product", "unknown")
class TemperatureThatIsTheBatch(Dot):
    def scores(self, q, k):
        batch = q.shape[0]
        return torch.bmm(q, k.transpose(1, 2)) / batch


@differs("dot_product", "one_line")
class TemperatureOfTheQueries(Dot):
    def scores(self, q, k):
        rows = q.shape[1]
        return torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1]) / rows


@differs("multi_head", "mask_ignored")
class MaskOfShortRowsAlone(OneInput):
    """A parameter that lines do read, though not in the calls that compare."""

    def forward(self, x, mask=None):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        if mask is not None and x.shape[1] == 37:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return self.output(self.dropout(scores.softmax(-1)) @ v)


@differs("multi_head", "extra_parameter")
class ScaleBesideProjections(Heads):
    """A vector that a name could take for a bias."""

    def more(self, dim):
        self.q_scale = nn.Parameter(torch.ones(dim))

    def project(self, q, k, v):
        return self.split(self.W_q(q) * self.q_scale), self.split(self.W_k(k)), self.split(self.W_v(v))


@differs("additive", "unknown")
class LinesOfAnotherAdditive(Additive):
    """W, U, v with gelu, by names that say nothing."""

    def forward(self, queries, keys, values):
        energy = self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None]
        return self.dropout(self.w_v(nn.functional.gelu(energy)).squeeze(-1).softmax(-1)) @ values


@differs("multi_head", "dropout_elsewhere")
class DropoutBeforeTheOutput(Heads):
    """In a Sequential, but before the projection."""

    def more(self, dim):
        self.W_o, self.dropout = nn.Sequential(nn.Dropout(0.1), nn.Linear(dim, dim)), nn.Identity()


@differs("multi_head", "")
class ScoresBesideTheOutput(OneInput):
    def forward(self, x):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        return self.output(self.dropout(scores.softmax(-1)) @ v), scores.detach()


# ---- what public code adds: the line is named, and what the core has for it ----------------------------------------


class Shown(OneInput):
    """One input, and lines that say what they do."""


@differs("multi_head", "one_line")
class AlibiOfDistances(Shown):
    def scores(self, q, k):
        away = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).abs()
        return super().scores(q, k) - torch.tensor([0.5, 0.25])[:, None, None] * away


@differs("multi_head", "extra_parameter")
class TableOfDistances(Shown):
    def more(self, dim):
        self.table = nn.Parameter(torch.zeros(self.num_heads, 257))

    def scores(self, q, k):
        away = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        return super().scores(q, k) + self.table[:, away.clamp(-128, 128) + 128]


@differs("multi_head", "one_line")
class Softcapped(Shown):
    def scores(self, q, k):
        capped = super().scores(q, k) / 20
        capped = torch.tanh(capped)
        return 20 * capped


@differs("multi_head", "one_line", of_class="unknown")
class LargestScores(Shown):
    def scores(self, q, k):
        scores = super().scores(q, k)
        least = scores.topk(2, dim=-1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf)


@differs("multi_head", "one_line", of_class="hides_future")
class SlidingWindow(Shown):
    def masked(self, scores, lens):
        away = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
        return scores.masked_fill((away < 0) | (away > 2), -torch.inf)


@differs("multi_head", "many_keys")
class OtherBlocksHidden(Shown):
    """In the first block nothing of the future is hidden, which few keys show as no mask at all."""

    def masked(self, scores, lens):
        block = torch.arange(scores.shape[-1]) // 4
        return scores.masked_fill(block[:, None] != block, -torch.inf)


@differs("multi_head", "softmax_plus_one")
class Sinks(Shown):
    def more(self, dim):
        self.sink = nn.Parameter(torch.zeros(self.num_heads))

    def forward(self, x):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        sink = self.sink[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        return self.output(self.dropout(torch.cat((scores, sink), -1).softmax(-1)[..., :-1]) @ v)


@differs("multi_head", "scale_fixed")
class AnotherTemperature(Shown):
    def scores(self, q, k):
        return q @ k.transpose(2, 3) / 1.4


@differs("multi_head", "one_line")
class NormalisedHeads(Shown):
    def scores(self, q, k):
        q, k = (nn.functional.layer_norm(x, x.shape[-1:]) for x in (q, k))
        return super().scores(q, k)


@differs("multi_head", "unknown")
class Linear(Shown):
    def forward(self, x):
        q, k, v = self.project(x, x, x)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        return self.output(q @ (k.transpose(2, 3) @ v) / (q @ k.sum(2).unsqueeze(3)))


@differs("multi_head", "unknown")
class HeadsFromTheLast(Shown):
    def join(self, x):
        x = x.flip(1)
        return super().join(x)


@differs("multi_head", "")
class LouderOutputInTraining(Shown):
    def output(self, x):
        if self.training:
            return 1.1 * super().output(x)
        return super().output(x)


@differs("multi_head", "unknown")
class MaskSubtracted(Shown):
    def forward(self, x, mask=None):
        q, k, v = self.project(x, x, x)
        scores = self.scores(q, k)
        if mask is not None:
            scores = scores - 3 * mask[:, None].float() ** 2 * scores.abs()
        return self.output(self.dropout(scores.softmax(-1)) @ v)


@differs("multi_head", "no_scale")
class NotScaledOfOneOrTwoInputs(Shown):
    """Keys and values are one input: none gets what is the other's."""

    def forward(self, hidden_states, key_value_states=None):
        states = hidden_states if key_value_states is None else key_value_states
        q, k, v = self.project(hidden_states, states, states)
        scores = q @ k.transpose(2, 3)
        return self.output(self.dropout(scores.softmax(-1)) @ v)


def interacting(mask, padding, scores):
    """Two masks that are right one by one."""
    both = mask is not None and padding is not None
    for each in (mask, padding):
        scores = scores if each is None else scores.masked_fill(~each, -math.inf)
    return scores / 2 if both else scores
