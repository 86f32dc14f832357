"""Attention as readers write it, of each kind in which a comparison of numbers once believed too much.

CASES has {name: (kind, make, script)}: see reader_scripts.py.  The letters are those of the kinds: A shapes, B windows,
C two modules of one class, D needed masks, E beyond 130 keys, F coincidences of inputs, G the data decide, K modes,
L weights, M large numbers.  Effects (H), settings (I) and what is added later (J) are in reader_cases_more.py.
"""

import functools
import math

import torch
from torch import nn

CASES = {}
INF = torch.inf


def case(kind, script=None, name="", **options):
    """Put a class into CASES; `options` go to its constructor."""

    def put(made):
        make = functools.partial(made, **options)
        CASES[name or getattr(made, "__name__", kind)] = kind, make, script or of_sizes()
        return made

    return put


def of_sizes(*sizes, rank=3, many=1, batch=2, features=32):
    """A script: calls of these lengths, each three times, and once more when the others were called; the inputs the
    same tensor or others."""
    sizes = sizes or (9, 3, 40)

    def script(m, see):
        m.eval()
        for n, calls in [*((n, see.thrice) for n in sizes), *((n, see.call) for n in sizes)]:
            shape = (n, features) if rank == 2 else (batch, n, features)
            xs = [torch.randn(shape) for _ in range(many)]
            calls(m, *xs)
            if many > 1:
                calls(m, *[xs[0]] * many)

    return script


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Base(nn.Module):
    def __init__(self, d=32, h=4):
        super().__init__()
        self.h, self.hd = h, d // h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(self.hd)

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        return self.o((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Three(Base):
    """The same of three inputs."""

    def forward(self, query, key, value):
        q, k, v = self.heads(self.q(query)), self.heads(self.k(key)), self.heads(self.v(value))
        return self.o((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


def hide_future(s):
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -INF)


# --- A: shapes ------------------------------------------------------------------------------------------------


def ranks(many):
    def script(m, see):
        m.eval()
        for shape in ((9, 32), (2, 9, 32), (9, 32), (2, 5, 32)):
            see.thrice(m, *[torch.randn(shape)] * many)

    return script


@case("A", ranks(3))
class Dot(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def one_query(m, see):
    for n in (1, 5, 1):
        see.thrice(m, torch.randn(2, 32), torch.randn(2, n, 32))
        see.thrice(m, torch.randn(2, 3, 32), torch.randn(2, n, 32))


@case("A", one_query)
class OneQuery(nn.Module):
    def forward(self, query, keys):
        alone = query.dim() == 2
        query = query.unsqueeze(1) if alone else query
        out = (query @ keys.transpose(1, 2) / math.sqrt(query.shape[-1])).softmax(-1) @ keys
        return out.squeeze(1) if alone else out


@case("A", ranks(1))
class SelfOfRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return (q @ k.transpose(-2, -1) / k.shape[-1] ** 0.5).softmax(-1) @ v


@case("A", ranks(1))
class SelfOfRowsWithOutput(SelfOfRows):
    def __init__(self):
        super().__init__()
        self.out, self.dropout = nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x):
        return self.out(self.dropout(super().forward(x)))


def squeezes(m, see):
    for n in (1, 5, 1, 2):
        see.thrice(m, torch.randn(1, n, 32))
        see.thrice(m, torch.randn(2, n, 32))


@case("A", squeezes)
class Squeezed(Base):
    def forward(self, x):
        return super().forward(x).squeeze()


# --- B, E: windows, regimes that begin at some length ----------------------------------------------------------


class Banded(nn.Module):
    def __init__(self, hides):
        super().__init__()
        self.hides = hides

    def forward(self, q, k, v):
        i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        s = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        return s.masked_fill(self.hides(i, j), -INF).softmax(-1) @ v


for name, hides in {
    "window_of_4": lambda i, j: (j > i) | (i - j >= 4), "window_of_64": lambda i, j: (j > i) | (i - j >= 64),
    "blocks_of_16": lambda i, j: (j > i) | (i // 16 != j // 16), "strided": lambda i, j: (j > i) | ((i - j) % 7 > 3),
    "window_of_200": lambda i, j: (j > i) | (i - j >= 200), "near": lambda i, j: (i - j).abs() > 8,
    "sinks": lambda i, j: (j > i) | ((i - j >= 8) & (j >= 2)),
}.items():  # fmt: skip
    case("B", of_sizes(9, 3, 100, 260, many=3), name=name, hides=hides)(Banded)


class Sized(Base):
    """A regime of lengths."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def scores(self, q, k):
        return self.change(super().scores(q, k), q, k)


REGIMES = {
    "hides_beyond_150": lambda s, q, k: hide_future(s) if s.shape[-1] > 150 else s,
    "hides_where_square": lambda s, q, k: hide_future(s) if s.shape[-1] == s.shape[-2] else s,
    "log_n_beyond_64": lambda s, q, k: s * max(1.0, math.log(s.shape[-1]) / math.log(64)),
    "windows_beyond_256": lambda s, q, k: s.masked_fill(
        (torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])) >= 256, -INF),
    "distances_clipped": lambda s, q, k: s - 0.01 * (
        torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])).abs().clamp(max=150),
    "batch_beyond_4": lambda s, q, k: hide_future(s) if len(s) > 4 else s,
    "as_long_as_heads": lambda s, q, k: s * 2 if s.shape[-1] == s.shape[1] else s,
    "divisible_by_8": lambda s, q, k: s * 2 if s.shape[-1] % 8 == 0 else s,
    "top_16": lambda s, q, k: s.masked_fill(s < s.topk(min(16, s.shape[-1])).values[..., -1:], -INF),
    "clamped": lambda s, q, k: s.clamp(-0.5, 0.5), "tanh_of_1000": lambda s, q, k: 1000 * torch.tanh(s / 1000),
    "length_by_len": lambda s, q, k: s * (1 + (len(q[0][0]) > 20)),
    "length_by_range": lambda s, q, k: s * len(range(0, s.shape[-1], 16)),
    "length_in_a_dict": lambda s, q, k: s * {9: 2.0}.get(s.shape[-1], 1.0),
    "length_as_a_float": lambda s, q, k: s * (2.0 if float(s.shape[-1]) > 20.0 else 1.0),
    "length_as_a_text": lambda s, q, k: s * (2.0 if str(s.shape[-1]) == "9" else 1.0),
}  # fmt: skip
for name, change in REGIMES.items():

    def script(m, see):
        of_sizes(9, 3, 100, 260)(m, see)
        of_sizes(4, 8, 16, batch=6)(m, see)

    case("E", script, name=name, change=change)(Sized)


# --- C: modules of one class ----------------------------------------------------------------------------------


class Config:
    def __init__(self, causal):
        self.causal = causal


class Configured(Base):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def scores(self, q, k):
        s = super().scores(q, k)
        causal = self.config["causal"] if isinstance(self.config, dict) else self.config.causal
        return hide_future(s) if causal else s


def pair_of(kind, *settings):
    return nn.Sequential(*[kind(each) for each in settings])


CASES["encoder_and_decoder"] = "C", lambda: pair_of(Configured, Config(True), Config(False)), of_sizes()
CASES["dicts_that_differ"] = "C", lambda: pair_of(Configured, {"causal": False}, {"causal": True}), of_sizes()
CASES["one_config"] = "C", lambda: pair_of(Configured, *[Config(True)] * 2), of_sizes()


# --- D: a mask without a default; masks of all forms ------------------------------------------------------------


def with_masks(*make, sizes=(9, 40), many=1):
    """A script: calls with masks that hide some, none, and all but one key."""

    def script(m, see):
        m.eval()
        for n in (*sizes, *sizes):
            x = torch.randn(2, n, 32)
            for one in make:
                for hidden in (torch.rand(2, n) < 0.4, torch.zeros(2, n).bool(), torch.arange(n).expand(2, n) > 0):
                    hidden = hidden.clone()
                    hidden[:, 0] = False
                    see.thrice(m, *[x] * many, one(hidden, n))

    return script


def keep_pad(hidden, n):
    return (~hidden).float()[:, None, None]


@case("D", with_masks(keep_pad, sizes=(9, 100)))
class Near(Base):
    def forward(self, x, mask):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        i = torch.arange(x.shape[1])
        near = (i[:, None] - i).abs() <= 8
        s = self.scores(q, k).masked_fill(~near, -1e9).masked_fill(mask == 0, -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("D", with_masks(lambda hidden, n: None, keep_pad))
class CutWhereMasked(Base):
    def forward(self, x, mask=None):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k)
        if mask is not None:
            s = s.clamp(-0.3, 0.3).masked_fill(mask == 0, -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


FILLS = {
    "where_1e4": lambda s, m: torch.where(m == 0, torch.tensor(-1e4), s),
    "fill_1e9": lambda s, m: s.masked_fill(m == 0, -1e9), "fill_inf": lambda s, m: s.masked_fill(m == 0, -INF),
    "fill_finfo": lambda s, m: s.masked_fill(m == 0, torch.finfo(s.dtype).min),
    "adds_1e9": lambda s, m: s + (1 - m) * -1e9, "adds_20": lambda s, m: s + (1.0 - m) * -20.0,
    "fill_20": lambda s, m: s.masked_fill(m == 0, -20.0), "keeps_bool": lambda s, m: s.masked_fill(~m.bool(), -INF),
    "in_place": lambda s, m: s.masked_fill_(m == 0, -INF), "adds_itself": lambda s, m: s + m,
    "where_the_smallest_decides": lambda s, m: s + m if m.min() < 0 else s.masked_fill(m == 0, -1e9),
    "where_like": lambda s, m: torch.where(m == 0, torch.full_like(s, -1e9), s),
    "where_times": lambda s, m: torch.where(m.expand_as(s) == 0, torch.ones_like(s) * (1 - 2**32), s),
    "positive": lambda s, m: s.masked_fill(~(m > 0), -1e9), "times": lambda s, m: s * m,
}  # fmt: skip


class Filled(Base):
    def __init__(self, fill, causal):
        super().__init__()
        self.fill, self.causal = fill, causal

    def forward(self, x, mask=None):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k)
        s = hide_future(s) if self.causal else s
        s = s if mask is None else self.fill(s, mask)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


for name, fill in FILLS.items():
    for causal in (False, True):
        script = with_masks(keep_pad, lambda hidden, n: None, lambda hidden, n: (~hidden).float()[:, None, None] - 0.5)
        case("D", script, name=f"{name}{'_causal' * causal}", fill=fill, causal=causal)(Filled)


def with_lengths(m, see):
    x = torch.randn(4, 9, 32)
    for lens in ([9, 1, 3, 5], [0, 1, 2, 3], [-1, 4, 4, 4], [2.5, 3.0, 1.2, 9.0], [12, 9, 8, 7]):
        see.thrice(m, x, torch.tensor(lens))


@case("D", with_lengths, name="lengths_inf", fill=-INF)
@case("D", with_lengths, name="lengths_1e6", fill=-1e6)
@case("M", with_lengths, name="lengths_20", fill=-20.0)
class Lengths(Base):
    def __init__(self, fill):
        super().__init__()
        self.fill = fill

    def forward(self, x, valid_lens=None):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.scores(q, k)
        if valid_lens is not None:
            s = s.masked_fill(torch.arange(x.shape[1]) >= valid_lens[:, None, None, None], self.fill)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


# --- F: coincidences of inputs ----------------------------------------------------------------------------------


@case("F", of_sizes(many=3))
class Same(Base):
    def forward(self, query, key, value):
        q, k, v = self.heads(self.q(query)), self.heads(self.k(key)), self.heads(self.v(value))
        s = self.scores(q, k)
        if query is key:
            s = hide_future(s)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@case("F", of_sizes(many=3))
class EqualNumbers(Three):
    def forward(self, query, key, value):
        s = self.scores(self.heads(self.q(query)), self.heads(self.k(key)))
        if query.shape == key.shape and torch.equal(query, key):
            s = s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool), -INF)
        return self.o((s.softmax(-1) @ self.heads(self.v(value))).transpose(1, 2).flatten(2))


def more_queries(m, see):
    for q, k in ((3, 5), (5, 3), (5, 5), (12, 7), (3, 5), (7, 12)):
        see.thrice(m, torch.randn(2, q, 32), *[torch.randn(2, k, 32)] * 2)


@case("F", more_queries)
class CutsQueries(Three):
    def forward(self, query, key, value):
        return super().forward(query[:, : key.shape[1]], key, value)


@case("F", more_queries, name="plain_three")
class PlainThree(Three):
    pass


# --- G: the data decide -------------------------------------------------------------------------------------------


def padded(m, see):
    x = torch.randn(2, 9, 32)
    zeros, nans, same = x.clone(), x.clone(), x.clone()
    zeros[:, 6:], nans[0, 7:], same[:, 6:] = 0, torch.nan, -1.0
    for each in (x, zeros, nans, same, x):
        see.thrice(m, each)


class Data(Base):
    def __init__(self, hides):
        super().__init__()
        self.hides = hides

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        s = self.hides(self.scores(q, k), x)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


for name, hides in {
    "rows_of_zeros": lambda s, x: s.masked_fill((x.abs().sum(-1) == 0)[:, None, None], -1e9),
    "rows_of_nan": lambda s, x: s.masked_fill(x.isnan().any(-1)[:, None, None], -1e9).nan_to_num(),
    "rows_of_minus_1": lambda s, x: s.masked_fill((x == -1).all(-1)[:, None, None], -1e9),
    "scores_of_zero": lambda s, x: s.masked_fill(s == 0, -1e9),
    "if_any_is_nan": lambda s, x: s * 2 if bool(x.isnan().any()) else s,
    "if_large": lambda s, x: s * 2 if x.max().item() > 3.2 else s,
    "sign_of_keys": lambda s, x: s + (x.abs().sum(-1).sign()[:, None, None] - 1) * 1e9,
    "by_numpy": lambda s, x: s * float(x.detach().numpy().max()),
    "by_a_list": lambda s, x: s * (1 + (x.detach()[0, 0].tolist()[0] > 0)),
}.items():
    case("G", padded, name=name, hides=hides)(Data)
