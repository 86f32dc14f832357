"""Which weights are dropped, in plain Python: Philox4x32-7 as published, and how the core uses it.

Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".  Counter (key // 8, query, head, item), key the
64-bit seed; each block of 128 bits gives 8 decisions of 16 bits, lowest first.
"""

import numpy as np

ROUNDS = 7
WORD = 0xFFFFFFFF


def block(counter, key, rounds=ROUNDS):
    """One block: four words of 32 bits from four, under a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & WORD, (first >> 32) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def bits(seed, item, head, query, n_keys):
    """The 16 bits of each key of one row."""
    row = []
    for first in range(0, n_keys, 8):
        for word in block((first // 8, query, head, item), (seed & WORD, seed >> 32)):
            row += [word & 0xFFFF, word >> 16]
    return row[:n_keys]


def kept(seed, p, shape):
    """bool (B, H, Q, K): the weights that stay."""
    batch, heads, n_queries, n_keys = shape
    stays = np.empty(shape, bool)
    for place in np.ndindex(batch, heads, n_queries):
        stays[place] = np.array(bits(seed, *place, n_keys), int) >= int(p * 65536 + 0.5)
    return stays


def factors(seed, p, shape):
    """What the weights are multiplied with: 0 or 1 / (1 - p)."""
    return kept(seed, p, shape) * (1 / (1 - p) if p < 1 else 0.0)
