"""A converted module at ever new sizes: after readings at two sizes its calls are the core's at all others, and what
hangs on a size, seen or unseen, is the reader's own at each of them."""

import math
import random

import numpy as np
import pytest
import torch

import needs
from reader_cases import INF, Base, Three, hide_future
from reader_scripts import converted, played, way

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")

ROWS = torch.arange(2000.0) / 1000


def far(s):
    return torch.arange(s.shape[-2])[:, None] - torch.arange(s.shape[-1])


def hidden(s):
    return torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)


def set_from_5(s):
    hide = torch.zeros(s.shape[-2:], dtype=torch.bool)
    hide[:, 5:] = True
    return s.masked_fill(hide, -INF)


HANGS = {  # {what: scores of scores}
    "nothing": lambda s: s,
    "causal": hide_future,
    "root": lambda s: s * 3 / s.shape[-1] ** 0.5,
    "root by math": lambda s: s * 3 / math.sqrt(s.shape[-1]),
    "parts of 9": lambda s: s * (s.shape[-1] // 9),
    "rest": lambda s: s * (1 + s.shape[-1] % 9),
    "beyond 200": lambda s: s * (1 + s.shape[-1] // 200),
    "at most 150": lambda s: s * (min(s.shape[-1], 150) / s.shape[-1]),
    "rounded": lambda s: s * round(s.shape[-1] / 150 + 0.6),
    "NumPy": lambda s: s * float(np.minimum(s.shape[-1], 50) / 50 + 1),
    "a table": lambda s: s * (1 + float(ROWS[s.shape[-1]].item() > 0.05)),
    "a slice's length": lambda s: s * (1 + (ROWS[: s.shape[-1]].numel() > 50)),
    "a fill": lambda s: s.masked_fill(hidden(s), -10000 * s.shape[-1]),
    "a smaller fill": lambda s: s.masked_fill(hidden(s), -2e6 / s.shape[-1]),
    "a window of a third": lambda s: s.masked_fill(far(s) > s.shape[-1] // 3, -INF),
    "a window of 50 at most": lambda s: s.masked_fill(far(s) >= min(50, s.shape[-1]), -INF),
    "a diagonal": lambda s: s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - 8), -INF),
    "a bias from the end": lambda s: s + ROWS[-s.shape[-1] :],
    "distances by size": lambda s: s - far(s).abs() / s.shape[-1],
    "blocks of 16": lambda s: s.masked_fill(far(s) // 16 != 0, -INF) if s.shape[-1] < 16 else s * 2,
    "20 keys": lambda s: s.masked_fill(torch.arange(s.shape[-1]) >= 20, -INF),
    "not the last": lambda s: s.masked_fill(torch.arange(s.shape[-1]) >= max(s.shape[-1] - 1, 1), -INF),
    "the batch": lambda s: s * (1 + s.shape[0] / 10),
    "numel": lambda s: s * (1 + s.numel() / 1e4),
    "a text": lambda s: s * (2 if "9" in f"{s.shape[-1]}" else 1),
    "a set": lambda s: s * (2 if s.shape[-1] in {9, 3} else 1),
    "divmod": lambda s: s * (1 + divmod(s.shape[-1], 100)[0]),
    "bits": lambda s: s * s.shape[-1].bit_length(),
    "len": lambda s: s * (len(s[0, 0]) / 9),
    "the sum": lambda s: s * sum(s.shape) * 0.05,
    "a loop": lambda s: s * sum(1 for _ in s[0, 0]) * 0.1,
    "a tensor": lambda s: s / torch.tensor(s.shape[-1]).float().sqrt(),
    "a cap": lambda s: s.shape[-1] * torch.tanh(s / s.shape[-1]),
    "set from 5": set_from_5,
    "itself": lambda s: s.masked_fill(torch.eye(s.shape[-1], dtype=torch.bool), -1e9) if s.shape[-1] > 1 else s,
}


def made(kind, change):
    return type("Changed", (kind,), {"scores": lambda self, q, k: change(kind.scores(self, q, k))})().eval()


@pytest.mark.parametrize("kind", (Base, Three))
@pytest.mark.parametrize("what", HANGS)
def test_the_readers_own_at_all_sizes(what, kind):
    def script(m, see):
        draw = random.Random(f"{what} {kind.__name__}")
        sizes = [(2, 9), (2, draw.choice((3, 5, 12))), (3, 9)]
        sizes += [(draw.choice((1, 2, 6)), draw.choice((1, 2, 4, 8, 17, 33, 101, 260))) for _ in range(6)]
        for batch, n in sizes:
            keys = draw.choice((n, n, 1, 9, 30))
            lengths = (n,) if kind is Base else (n, keys, keys)
            xs = [torch.randn(batch, length, 32) for length in lengths]
            see.call(m, *xs)
            see.call(m, *xs)

    played(lambda: made(kind, HANGS[what]), script)


@pytest.mark.parametrize("what", ("nothing", "causal", "a window of a third", "20 keys"))
def test_new_sizes_are_the_cores(what):
    """A window of a third is another number of keys at each size."""
    module = converted(made(Base, HANGS[what]))
    for shape in ((2, 40, 32), (2, 9, 32), (3, 40, 32)):
        module(torch.randn(shape))
    for shape in ((1, 25, 32), (5, 70, 32), (2, 31, 32)):
        assert way(module, torch.randn(shape)) == "core", shape
    assert way(module, torch.randn(2, 9, 32, dtype=torch.float64)) == "general"  # of another form


def test_a_size_that_was_not_seen_to_vary_is_read():
    module = converted(made(Base, HANGS["nothing"]))
    module(torch.randn(2, 9, 32))
    assert way(module, torch.randn(2, 8, 32)) == "general"
    module(torch.randn(2, 12, 32))
    assert way(module, torch.randn(2, 8, 32)) == "core"
    assert way(module, torch.randn(3, 8, 32)) == "general"


def test_a_buffer_that_comes_later_counts():
    """A module without a buffer has an empty dict of them, which is looked at, too."""

    class Later(Base):
        def scores(self, q, k):
            return super().scores(q, k) * getattr(self, "sharp", 1.0)

    def script(m, see):
        x = torch.randn(2, 9, 32)
        see.thrice(m.eval(), x)
        m.register_buffer("sharp", torch.tensor(2.0))
        see.thrice(m, x)

    played(Later, script)
