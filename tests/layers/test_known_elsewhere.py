"""Mistakes that caches elsewhere have had, each by its name, in every layer that decodes: which steps a step sees.

Read off attention_weights, which are above 0 where a key is seen; NumPy's layers and torch's.
"""

import numpy as np
import pytest

import needs
import stepwise
from decoding_layers import KINDS, layer_of, sizes_of

N = 12


def made(side, kind):
    layer = layer_of(kind, np.dtype("float64"))
    if side == "numpy":
        return layer, np.asarray
    torch = needs.module("torch")
    from mha_c import torch as mt

    name, sizes = sizes_of(kind)
    module = getattr(mt, name)(*sizes).double().eval().requires_grad_(False)
    module.load_state_dict(layer.state_dict())
    return module, torch.from_numpy


@pytest.fixture(params=["numpy", "torch"])
def side(request):
    return request.param


@pytest.fixture(params=KINDS)
def decoder(side, request):
    """decoder(cuts, **window): the steps (N,) that each of N steps of 2 items sees, (N, N), and their outputs."""
    layer, given = made(side, request.param)
    x = np.random.default_rng(0).standard_normal((2, N, 24))

    def decode(cuts, **window):
        cache, found, outs, done = layer.new_cache(2, None if window else N, **window), [], [], 0
        for n in cuts:
            part = given(np.ascontiguousarray(x[:, done : done + n]))
            outs.append(np.asarray(layer(part, part, part, cache=cache)))
            weights = np.asarray(layer.attention_weights)
            weights = weights.reshape(2, -1, *weights.shape[-2:])
            assert ((weights > 0) == (weights > 0)[:1, :1]).all()  # of all items and heads
            found.append(np.pad(weights[0, 0] > 0, ((0, 0), (0, N - weights.shape[3]))))
            done += n
        return np.concatenate(found), np.concatenate(outs, 1)

    decode.x, decode.layer, decode.given = x, layer, given
    return decode


@pytest.mark.parametrize("window", [1, 3])
def test_a_window_is_not_one_key_too_long_at_a_step(decoder, window):
    seen, _ = decoder([4, *[1] * 8], window=window)
    assert seen.sum(1).tolist() == [min(i + 1, window) for i in range(N)]


def test_a_chunk_behind_a_prefix_is_not_masked_as_if_it_began_at_0(decoder):
    seen, out = decoder([5, 4, 3])
    np.testing.assert_array_equal(seen, stepwise.seen(N))
    np.testing.assert_allclose(out, decoder([N])[1], atol=1e-12)


def test_a_cache_that_is_not_full_is_not_read_to_its_end(decoder):
    """What lies behind the steps has never been written, or is left of steps before `clear`: NaN here."""
    layer, given, x = decoder.layer, decoder.given, decoder.x
    for window in ({}, {"window": 9, "sinks": 1}):
        cache = layer.new_cache(2, N + 8, **window)
        part = given(x[:, :3])
        expected = np.asarray(layer(part, part, part, cache=cache))
        nothing = given(np.full((2, N + 8, x.shape[2]), np.nan))
        cache.clear()
        layer(nothing, nothing, nothing, cache=cache)
        cache.clear()
        np.testing.assert_array_equal(np.asarray(layer(part, part, part, cache=cache)), expected)
        np.testing.assert_allclose(np.asarray(layer.attention_weights).sum(-1), 1, atol=1e-12)


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("first", [4, 5, 6, 7, 8])
def test_a_buffer_rolls_once_when_it_fills(decoder, sinks, first):
    """The prefill ends just before, with, or behind the last free row; one step more, then several."""
    window = 6 - sinks
    seen, out = decoder([first, 1, 1, N - first - 2], window=window, sinks=sinks)
    np.testing.assert_array_equal(seen, stepwise.seen(N, window, sinks))
    np.testing.assert_allclose(out, decoder([1] * N, window=window, sinks=sinks)[1], atol=1e-12)


def test_a_window_holds_in_the_prefill_and_behind_it(decoder):
    wanted = stepwise.seen(N, 3, 1)
    for cuts in ([N], [7, *[1] * 5], [1] * N):
        np.testing.assert_array_equal(decoder(cuts, window=3, sinks=1)[0], wanted)


def test_padding_at_the_left(decoder):
    """Prompts that end together begin at different places: moved to the front, they are steps 0, 1, ... of their own
    items, and what they leave behind them does not count."""
    layer, given, x = decoder.layer, decoder.given, decoder.x
    pads, alone = np.array([0, 4]), []
    for item, n_pads in enumerate(pads):
        cache = layer.new_cache(1, N)
        parts = [given(np.ascontiguousarray(part[None])) for part in (x[item, n_pads:8], x[item, 8:9])]
        alone.append([np.asarray(layer(part, part, part, cache=cache)) for part in parts][-1])
    front = np.stack([np.roll(x[item, :8], -n_pads, axis=0) for item, n_pads in enumerate(pads)])
    front[1, 4:] = np.nan
    cache, counts = layer.new_cache(2, N), given(8 - pads)
    front, last = given(front), given(np.ascontiguousarray(x[:, 8:9]))
    layer(front, front, front, counts, cache=cache)
    np.testing.assert_allclose(np.asarray(layer(last, last, last, cache=cache)), np.concatenate(alone), atol=1e-12)
