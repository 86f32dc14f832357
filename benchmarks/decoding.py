"""Decoding: tokens/s of the book's Transformer, 100 steps of 256 hidden behind 100 source tokens, beside d2l's own.

    python benchmarks/decoding.py [--batches 1 4 32] [--steps 100] [--turns 5] [--version 1.0.3] [--gradients]

d2l      the book's decoder on d2l's classes
patched  the same code under mha_c.d2l.patch(): a module sees that its keys go on from the call before
+frozen  that inside mha_c.torch.frozen(model)
cached   the same modules, called with cache= and with keys and values that are projected once
frozen   the same inside mha_c.torch.frozen(model)
none     the book's decoder with attention that gives back its queries: what is left where attention costs nothing

Two blocks, 4 heads, under no_grad; with --gradients as the book's predict_step runs, which records them: there a cache
is refused.  All but `none` translate the same sentence to the same tokens, which is checked.  Time is that of the
thread, from the encoder's outputs on, step by step in turns; the fastest turn of each step counts, so that other
programs do not.  Entering frozen() is not counted: a loop over sentences is inside it.  The book's code looks at
attention_weights after every step, `cached` and `frozen` do not.
"""

import argparse
import contextlib
import copy
import io
import math
import time
import types

import numpy as np
import torch

import bench  # noqa: F401  so that the tests' modules are found
import mha_c.d2l
import mha_c.torch
from machine import describe

HIDDENS, VOCABULARY = 256, 200


def models(d2l):
    """Two decoders and their encoder with the same weights: d2l's, ours."""
    import book_models

    def build():
        torch.manual_seed(0)
        parts = book_models.build(d2l, "transformer", VOCABULARY, VOCABULARY, num_hiddens=HIDDENS)
        return [part.eval() for part in parts]

    theirs = build()
    with contextlib.redirect_stdout(io.StringIO()), mha_c.d2l.patch(d2l):
        ours = build()
    tokens, lens = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([2])
    for encoder, decoder in (theirs, ours):  # fixes lazy sizes
        decoder(tokens, decoder.init_state(encoder(tokens, lens), lens))
    for part, own in zip(theirs, ours):
        own.load_state_dict(part.state_dict())
    return theirs, ours


class Whole:
    """The book's own decoding: the state holds the inputs of all earlier steps."""

    def __init__(self, decoder, encoded, lens, n_steps):
        self.decoder, self.state = decoder, decoder.init_state(encoded, lens)

    def __call__(self, tokens):
        scores, self.state = self.decoder(tokens, self.state)
        return scores


class Cached:
    """The same modules, each attention with a cache or on projected keys and values."""

    def __init__(self, decoder, encoded, lens, n_steps):
        self.decoder = decoder
        self.blocks = [
            (block, block.attention1.new_cache(len(lens), n_steps), block.attention2.project(encoded, encoded, lens))
            for block in decoder.blks
        ]

    def __call__(self, tokens):
        X = self.decoder.pos_encoding(self.decoder.embedding(tokens) * math.sqrt(HIDDENS))
        for block, cache, kv in self.blocks:
            Y = block.addnorm1(X, block.attention1(X, X, X, cache=cache))
            Z = block.addnorm2(Y, block.attention2(Y, kv))
            X = block.addnorm3(Z, block.ffn(Z))
        return self.decoder.dense(X)


class NoAttention(torch.nn.Module):
    """In the place of a layer: its queries, at no cost."""

    attention = types.SimpleNamespace(attention_weights=None)

    def forward(self, queries, *_):
        return queries


def without_attention(model):
    encoder, decoder = copy.deepcopy(model)
    for block in decoder.blks:
        block.attention1 = block.attention2 = NoAttention()
    return encoder, decoder


def translate(way, model, batch, n_steps, gradients=False):
    """(tokens, seconds of making the state and of each step)."""
    encoder, decoder = model
    source, lens = torch.arange(batch * n_steps).reshape(batch, n_steps) % VOCABULARY, torch.full((batch,), n_steps)
    with torch.set_grad_enabled(gradients):
        encoded, tokens, found = encoder(source, lens), torch.ones(batch, 1, dtype=torch.int64), []
        start = time.thread_time()
        step = way(decoder, encoded, lens, n_steps)
        seconds = [time.thread_time() - start]
        for _ in range(n_steps):
            start = time.thread_time()
            tokens = step(tokens).argmax(dim=2)
            seconds.append(time.thread_time() - start)
            found.append(tokens)
    return torch.cat(found, 1), seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--version", default="1.0.3")
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args()
    import real_d2l

    torch.set_num_threads(1)
    theirs, ours = models(real_d2l.load(options.version))
    frozen = mha_c.torch.frozen
    ways = [("d2l", Whole, theirs, None), ("patched", Whole, ours, None), ("+frozen", Whole, ours, frozen),
            ("cached", Cached, ours, None), ("frozen", Cached, ours, frozen),
            ("none", Whole, without_attention(ours), None)]  # fmt: skip
    ways = [way for way in ways if not (options.gradients and way[1] is Cached)]
    mha_c.set_num_threads(1)
    print(describe(torch, mha_c, 1))
    print(f"{'batch':>6}" + "".join(f"{name:>10}" for name, *_ in ways) + "   tokens/s; how many times d2l's")
    for batch in options.batches:
        seconds, tokens = {name: [] for name, *_ in ways}, {}
        for _ in range(options.turns):
            for name, way, model, context in ways:
                with contextlib.nullcontext() if context is None else context(model[1]):
                    tokens[name], taken = translate(way, model, batch, options.steps, options.gradients)
                seconds[name].append(taken)
        del tokens["none"]
        assert all(torch.equal(tokens["d2l"], found) for found in tokens.values()), "other tokens than d2l's"
        rates = {name: batch * options.steps / np.min(taken, axis=0).sum() for name, taken in seconds.items()}
        ratios = ", ".join(f"{rates[name] / rates['d2l']:.1f}" for name, *_ in ways[1:])
        print(f"{batch:>6}" + "".join(f"{rate:>10.0f}" for rate in rates.values()) + f"   {ratios}")


if __name__ == "__main__":
    main()
