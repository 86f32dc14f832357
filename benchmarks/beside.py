"""What may not take longer than something else: hidden keys than seen ones, projections' gradients than torch.mm's.

    python benchmarks/beside.py [--seconds 1.5]

Each pair takes turns; the ratio of our time to the other's is that of minima, beside it that of medians.  One thread.
"""

import argparse
import statistics

import numpy as np
import torch

import mha_c
from bench import measure
from cases import draw
from mha_c.functional import dot_product_attention


def attention(shape, causal):
    q, k, v = (array.copy() for array in draw(3, *shape))
    return lambda: dot_product_attention(q, k, v, causal=causal)


def gradients(rows, in_features, out_features):
    """Gradients of x and W of y = x W^T, ours and torch's."""
    x, grad_y = draw(rows, in_features), draw(rows, out_features)
    weight = draw(out_features, in_features)
    tx, tg, tw = map(torch.from_numpy, (x, grad_y, weight))

    def theirs():
        return torch.mm(tg, tw), torch.mm(tg.T, tx)

    def ours():
        return mha_c._core.linear_backward(grad_y, x, weight, False)[:2]

    for mine, other in zip(ours(), theirs()):
        np.testing.assert_allclose(mine, other, atol=1e-3, rtol=1e-3)
    return {"mha_c": ours, "beside": theirs}


def causal_beside_full(*shape):
    contenders = {"mha_c": attention(shape, True), "beside": attention(shape, False)}
    return f"{'x'.join(map(str, shape))}, causal / full", contenders


def show(what, contenders, seconds, most):
    """One line; our share of the other's time is to be `most` or less."""
    times = measure(contenders, seconds)[0]
    ratio, median = (f(times["mha_c"]) / f(times["beside"]) for f in (min, statistics.median))
    miss = "" if ratio <= most else " MISS"
    print(
        f"{what:<44}{min(times['mha_c']) / 1e3:>10.1f} us{ratio:>8.2f}{median:>8.2f}   <= {most:.2f}{miss}", flush=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each pair")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    mha_c.set_num_threads(1)
    print(f"{'':<44}{'ours':>13}{'ratio':>8}{'median':>8}   aimed at")
    for shape in ((64, 4, 10, 8), (64, 8, 37, 64), (1, 12, 128, 64)):
        show(*causal_beside_full(*shape), seconds, 1.2)
    lengths = {"mha_c": attention((1, 12, 127, 64), False), "beside": attention((1, 12, 128, 64), False)}
    show("1x12x127x64 / 1x12x128x64", lengths, seconds, 1.05)
    for shape in ((592, 512, 512), (512, 768, 768), (1152, 256, 256), (4096, 128, 128)):
        show(f"gradients of {'x'.join(map(str, shape))} / torch.mm", gradients(*shape), seconds, 1 / 0.95)


if __name__ == "__main__":
    main()
