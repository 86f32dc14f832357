"""The layers in use: dropout, attention weights on demand, copies, projected keys, threads.

That their numbers are d2l's is proved in test_d2l_parity.py.
"""

import copy
import pickle
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

import mha_c
from checks import TOLERANCE, close
from constructor_forms import SIZED, fitting_inputs
from mha_c import teach
from mha_c.layers import AdditiveAttention, DotProductAttention, MultiHeadAttention

inputs = pytest.fixture(fitting_inputs)


# --- Training and dropout ------------------------------------------------------------------------


def test_layers_start_in_eval_mode(inputs):
    mha = MultiHeadAttention(12, 3, 0.5, rng=0)
    assert not mha.training and not mha.attention.training
    quiet = mha(*inputs)
    np.testing.assert_array_equal(mha(*inputs), quiet)
    assert mha.train() is mha and mha.training and mha.attention.training
    assert (mha(*inputs) != quiet).any()
    np.testing.assert_array_equal(mha(*inputs, training=False), quiet)
    assert mha.eval() is mha and not mha.training
    np.testing.assert_array_equal(mha(*inputs), quiet)
    assert (mha(*inputs, training=True) != quiet).any()
    for wrong in (1, "yes", 0.0):
        with pytest.raises(TypeError, match="training must be True or False"):
            mha(*inputs, training=wrong)
    with pytest.raises(TypeError, match="mode must be True or False"):
        mha.train(1)


def is_trained_by(layer, inputs):
    """Whether the next call is one of training: with dropout 1 it gives 0 where there is no W_o."""
    return not layer(*inputs).any()


@pytest.mark.parametrize("make", [lambda: AdditiveAttention(8, 1.0, rng=0), lambda: DotProductAttention(1.0, rng=0)])
def test_each_way_to_switch_the_mode_counts_for_the_next_call(make, rng):
    x = rng.standard_normal((2, 4, 6)), rng.standard_normal((2, 9, 6)), rng.standard_normal((2, 9, 7))
    layer = make()

    def assign(mode):
        layer.training = mode

    assert not is_trained_by(layer, x)
    for switch in layer.train, assign:
        for mode in True, True, False, False, True, False:
            switch(mode)
            assert layer.training is mode
            assert [is_trained_by(layer, x) for _ in range(3)] == [mode] * 3
    for twin_of in copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)):
        assign(True)
        is_trained_by(layer, x)
        twin = twin_of(layer)
        assert is_trained_by(twin, x)
        assert not is_trained_by(twin.eval(), x) and layer.training and is_trained_by(layer, x)
    assert is_trained_by(layer.train(), x) and not layer(*x, training=True).any() and layer(*x, training=False).any()
    assert is_trained_by(layer, x)


def test_a_mode_that_another_thread_switches_during_a_call_counts_for_the_next(rng):
    x = rng.standard_normal((2, 4, 6)), rng.standard_normal((2, 9, 6)), rng.standard_normal((2, 9, 7))

    class Switched(AdditiveAttention):
        def _make_plan(self, queries, states):
            plan = super()._make_plan(queries, states)
            self.training = not self.training  # as if another thread did it just now
            return plan

    layer = Switched(8, 1.0, rng=0)
    layer(*x)  # sets the sizes
    for _ in range(3):
        layer.load_state_dict(layer.state_dict())  # the next call asks for a plan
        mode = layer.training
        out = layer(*x)
        assert layer.training != mode and (not out.any()) == mode, "a call goes by the mode that it found"


def test_dropout_follows_the_layers_stream(inputs, dtype):
    first, second = (MultiHeadAttention(12, 3, 0.5, rng=6).train() for _ in range(2))
    outs = [(first(*inputs), second(*inputs)) for _ in range(4)]
    for a, b in outs:
        np.testing.assert_array_equal(a, b)
    assert all((outs[0][0] != a).any() for a, _ in outs[1:])  # another choice at each call
    with pytest.raises(mha_c.ShapeError):
        first(inputs[0][:1], *inputs[1:])
    np.testing.assert_array_equal(first(*inputs), second(*inputs))  # a refused call used nothing up


def test_dropout_can_be_changed(inputs):
    mha = MultiHeadAttention(12, 3, 0.5, rng=0).train()
    mha.attention.dropout.p = 0
    assert "Dropout(p=0, inplace=False)" in repr(mha)
    np.testing.assert_array_equal(mha(*inputs), mha(*inputs, training=False))
    with pytest.raises(ValueError, match=r"dropout must be between 0 and 1"):
        mha.attention.dropout.p = 2


# --- attention_weights ---------------------------------------------------------------------------


def layers_and_calls(rng, dtype, batch, queries, keys, **options):
    q, k, v = (rng.standard_normal((batch, rows, 6)).astype(dtype) for rows in (queries, keys, keys))
    yield MultiHeadAttention(12, 3, 0.2, rng=1, dtype=dtype, **options), (q, k, v)
    yield AdditiveAttention(8, 0.2, rng=1, dtype=dtype, **options), (q, k, v)
    yield DotProductAttention(0.2, **options), (q, k, v)


def test_weights_before_the_first_call():
    for layer in (MultiHeadAttention(12, 3, 0.1), DotProductAttention(0), AdditiveAttention(8, 0)):
        with pytest.raises(AttributeError, match=f"{type(layer).__name__} has no attention_weights yet: call"):
            layer.attention_weights  # noqa: B018
        assert not hasattr(layer, "attention_weights")


# Few keys: the core keeps the weights themselves.  Many: what they are computed from.
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (70, 90)])
def test_weights_are_those_of_the_call_whatever_changes_after_it(rng, dtype, queries, keys):
    for layer, (q, k, v) in layers_and_calls(rng, dtype, 2, queries, keys):
        lens = np.array([keys - 2, 1])
        out = layer(q, k, v, lens)
        weights = layer.attention_weights
        assert weights.flags.writeable and weights.dtype == dtype
        q[:], k[:], lens[:] = 9, 9, 9
        for p in layer.parameters():
            p.data = np.zeros(p.shape)
        again = copy.deepcopy(layer).attention_weights  # computed from what the call has kept
        np.testing.assert_array_equal(again, weights)
        assert layer.attention_weights is weights  # one array, as torch's modules give one tensor
        weights[:] = -1
        assert (layer.attention_weights == -1).all()
        layer(q, k, v, [1, 1])
        assert layer.attention_weights is not weights and (layer.attention_weights >= 0).all()
        q[:], k[:] = 9, 9
        assert not again[..., -2:][0].any() and not again[1, ..., 1:].any()
        np.testing.assert_allclose(again.sum(-1, dtype=np.float64), 1, atol=TOLERANCE[dtype.name])
        if isinstance(layer, DotProductAttention):
            close(again @ v, out, dtype)


def test_both_views_of_the_weights(inputs):
    mha = MultiHeadAttention(12, 3, 0.5).train()
    mha(*inputs, [2, 9])
    weights = mha.attention_weights
    assert weights.shape == (2, 3, 4, 9) and mha.attention.attention_weights.shape == (6, 4, 9)
    np.testing.assert_array_equal(mha.attention.attention_weights, weights.reshape(6, 4, 9))
    weights[0, 1] = 5  # both are one memory
    assert (mha.attention.attention_weights[1] == 5).all()
    mha.attention(*(np.ones((5, 2, 2)),) * 3)  # d2l's inner attention can be called alone
    assert mha.attention.attention_weights.shape == (5, 2, 2) and mha.attention_weights.shape == (2, 3, 4, 9)


def test_a_refused_call_keeps_the_weights(inputs):
    mha = MultiHeadAttention(12, 3, 0.1)
    mha(*inputs)
    before = mha.attention_weights
    with pytest.raises(ValueError):
        mha(*inputs, [[1], [2], [3]])
    np.testing.assert_array_equal(mha.attention_weights, before)


@pytest.mark.parametrize("empty_rows", ["uniform", "zero"])
@pytest.mark.parametrize("queries", [3, 60])
def test_empty_rows(rng, dtype, empty_rows, queries):
    for layer, (q, k, v) in layers_and_calls(rng, dtype, 2, queries, 50, empty_rows=empty_rows):
        values = layer.W_v(v) if isinstance(layer, MultiHeadAttention) and layer(q, k, v) is not None else v
        out, weights = layer(q, k, v, [0, -3]), layer.attention_weights
        expected = 1 / 50 if empty_rows == "uniform" else 0
        np.testing.assert_allclose(weights, np.full_like(weights, expected), rtol=1e-6)
        mean = values.mean(axis=1, keepdims=True) * (empty_rows == "uniform")
        if isinstance(layer, MultiHeadAttention):
            mean = mean @ layer.W_o.weight.T
        close(out, np.broadcast_to(mean, out.shape), dtype)


def test_no_queries_in_a_large_batch(dtype):
    for layer, (q, k, v) in layers_and_calls(np.random.default_rng(0), dtype, 400, 0, 60):
        assert layer(q, k, v).shape[:2] == (400, 0)


# --- Copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("keys", [5, 90])
def test_copies(rng, dtype, duplicate, keys):
    for layer, (q, k, v) in layers_and_calls(rng, dtype, 2, keys, keys):
        untouched = duplicate(layer)  # before any call: sizes open
        assert repr(untouched) == repr(layer) and not hasattr(untouched, "attention_weights")
        out, weights = layer(q, k, v, [3, keys]), layer.attention_weights
        twin = duplicate(layer)
        np.testing.assert_array_equal(twin.attention_weights, weights)
        np.testing.assert_array_equal(twin(q, k, v, [3, keys]), out)
        assert repr(twin) == repr(layer) and twin.training == layer.training
        if isinstance(twin, MultiHeadAttention):
            assert twin.attention.attention_weights.shape == (6, keys, keys)
            twin.attention.dropout.p = 1.0  # one part, which the copy uses
            assert not twin(q, k, v, training=True).any()


def test_a_deep_copy_has_parameters_of_its_own(inputs):
    mha = MultiHeadAttention(*SIZED, rng=0)
    out = mha(*inputs)
    twin, shared = copy.deepcopy(mha), copy.copy(mha)
    mha.W_o.weight = np.zeros((12, 12))
    assert not mha(*inputs).any() and not shared(*inputs).any()
    np.testing.assert_array_equal(twin(*inputs), out)
    twin.W_q.weight = np.zeros((12, 6))
    assert mha.W_q.weight.any()


def test_a_pickle_holds_no_packed_weights(inputs):
    mha = MultiHeadAttention(64, 64, 64, 64, 4, 0.0, rng=0)
    before = len(pickle.dumps(mha))
    mha(*(np.ones((1, 1, 64), np.float32),) * 3)
    assert len(pickle.dumps(mha)) < before + 2000


def test_an_object_without_init_raises_and_lives():
    for kind in (MultiHeadAttention, DotProductAttention, AdditiveAttention):
        layer = kind.__new__(kind)
        for use in (repr, lambda x: x.state_dict(), lambda x: x(1, 2, 3), lambda x: x.attention_weights, copy.copy):
            try:
                use(layer)
            except (AttributeError, TypeError, ValueError):
                pass


# --- Projected keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(), (5, 6)])
def test_projected_keys_give_the_same_bits(inputs, sizes):
    q, k, v = inputs
    layer, plain = (AdditiveAttention(*sizes, 8, 0.3, rng=9) for _ in range(2))
    keys = layer.project_keys(k)
    assert keys.shape == (2, 9, 8) and repr(keys) == f"ProjectedKeyValues(shape=(2, 9, 8), dtype={q.dtype}, keys only)"
    for lens in (None, [3, 9], np.array([[1, 2, 3, 4], [9, 0, 7, 5]])):
        for training in (False, True):
            out = layer(q, keys, v, lens, training=training)
            np.testing.assert_array_equal(out, plain(q, k, v, lens, training=training))
            np.testing.assert_array_equal(layer.attention_weights, plain.attention_weights)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer))(q, copy.deepcopy(keys), v), plain(q, k, v))


def test_lengths_of_projected_keys(inputs):
    q, k, v = inputs
    k[:, 6:] = np.nan
    layer = AdditiveAttention(8, 0.0, rng=9)
    keys = layer.project_keys(k, valid_lens=[2, 6])
    out = layer(q, keys, v)  # the lengths given then
    np.testing.assert_array_equal(out, layer(q, k, v, [2, 6]))
    np.testing.assert_array_equal(layer(q, keys, v, [1, 5]), layer(q, k, v, [1, 5]))
    turned = keys.reorder([1, 0])
    np.testing.assert_array_equal(layer(q, turned, v), layer(q, k[::-1], v, [6, 2]))
    assert (
        repr(turned)
        == repr(keys)
        == "ProjectedKeyValues(shape=(2, 9, 8), dtype=float32, keys only)".replace("float32", k.dtype.name)
    )
    with pytest.raises(ValueError, match="valid_lens"):
        layer(q, layer.project_keys(k, valid_lens=[np.nan, 1]), v)


def test_projected_keys_of_other_weights_are_refused(inputs):
    q, k, v = inputs
    layer = AdditiveAttention(8, 0.0, rng=9)
    keys = layer.project_keys(k)
    layer(q, keys, v)
    layer.W_q.weight = np.zeros((8, 6))
    layer(q, keys, v)  # W_k is what it was
    layer.W_k.weight = np.zeros((8, 5))
    for other in (layer, AdditiveAttention(8, 0.0), AdditiveAttention(5, 6, 8, 0.0)):
        with pytest.raises(ValueError, match="projected by another W_k"):
            other(q, keys, v)


def test_project_keys_checks_its_argument(inputs):
    layer = AdditiveAttention(5, 6, 8, 0.0)
    with pytest.raises(mha_c.ShapeError, match=r"keys must have shape \(B, K, features\), got \(9, 5\)"):
        layer.project_keys(inputs[1][0])
    with pytest.raises(mha_c.ShapeError, match="keys has 6 features, but W_k takes 5"):
        layer.project_keys(inputs[0])
    lazy = AdditiveAttention(8, 0.0)
    with pytest.raises(TypeError):
        lazy.project_keys(inputs[1].astype(int))
    assert repr(lazy.W_k).startswith("LazyLinear")


# --- What a call leaves behind -------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("lens", [None, [7, 300]])  # a list takes the longer way through a call
@pytest.mark.parametrize("n_keys", [7, 700])
def test_a_layer_keeps_small_inputs_for_the_players_and_no_others(lens, n_keys, training):
    layer = MultiHeadAttention(16, 4, 0.0, rng=0).train(training)
    queries, keys, values = (np.ones((2, n, 16), np.float32) for n in (5, n_keys, n_keys))
    given = [weakref.ref(x) for x in (queries, keys, values)]
    out = layer(queries, keys, values, lens)
    if n_keys < 64:
        assert teach.multi_head(layer).matrices["output"].shape == (5, 16)
    else:
        with pytest.raises(ValueError, match="has not kept what it was called with: give multi_head the same arrays"):
            teach.multi_head(layer)
    if training:
        layer.backward(np.ones_like(out))
    del queries, keys, values
    assert [x() is None for x in given] == [n_keys > 64] * 3


# --- Threads -------------------------------------------------------------------------------------


def at_every_line(write, read):
    """What `read()` gave between any two lines of the package that `write()` runs, and afterwards."""
    package, found, before = str(Path(mha_c.__file__).parent), [], sys.gettrace()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            sys.settrace(None)
            found.append(read())
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        write()
    finally:
        sys.settrace(before)
    return [*found, read()]


def replace_weight(layer):
    layer.W_k.weight = layer.W_k.weight - 1


WRITERS = {
    "load_state_dict": lambda layer: layer.load_state_dict(MultiHeadAttention(*SIZED, True, rng=1).state_dict()),
    "weight": replace_weight,
    "bias": lambda layer: setattr(layer.W_o, "bias", np.ones(12)),
    "initialize": lambda layer: layer.initialize(rng=3, method="torch"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_parameters_are_replaced_as_a_whole(writer, rng):
    """A call that comes between any two lines of a change computes with the old parameters or the new ones."""
    inputs = tuple(rng.standard_normal(shape) for shape in ((2, 4, 6), (2, 9, 5), (2, 9, 7)))
    layer, after = (MultiHeadAttention(*SIZED, True, rng=0) for _ in range(2))
    old = layer(*inputs).tobytes()
    WRITERS[writer](after)
    new = after(*inputs).tobytes()
    seen = at_every_line(lambda: WRITERS[writer](layer), lambda: layer(*inputs).tobytes())
    n_old = seen.count(old)
    assert n_old > 3 and seen == [old] * n_old + [new] * (len(seen) - n_old) and old != new
