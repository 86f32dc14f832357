"""Calls with causal=, and how many keys each query of them sees."""

import numpy as np

SIZES = {True: [(5, 5), (70, 70)], "top_left": [(5, 5), (3, 7), (7, 3)], "bottom_right": [(5, 5), (3, 7), (7, 3)]}
CASES = [(causal, *size) for causal, sizes in SIZES.items() for size in sizes]
LENS = {"none": None, "of items": [2, 4], "floats": [1.5, 30.0], "0": [0, 3]}


def seen(causal, n_queries, n_keys, lens=None):
    """How many keys each query sees, (2, Q), said in another way: counted in a table of all pairs."""
    after = n_keys - n_queries if causal == "bottom_right" else 0
    table = np.tri(n_queries, n_keys, after, dtype=bool) & np.ones((2, 1, 1), bool)
    if lens is not None:
        table = table & (np.arange(n_keys) < np.reshape(lens, (2, -1, 1)))
    return table.sum(-1)
