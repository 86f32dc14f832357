"""The layers as objects: random numbers, sizes, parameters, state_dict.

That their numbers are d2l's is proved in test_d2l_parity.py; constructors: test_layer_constructors.py.
"""

import functools

import numpy as np
import pytest

import mha_c
from checks import TOLERANCE, close
from constructor_forms import SIZED, fitting_inputs
from mha_c import _core, _reference
from mha_c.layers import DotProductAttention, MultiHeadAttention

inputs = pytest.fixture(fitting_inputs)


# --- Random numbers and initial weights ----------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_weights_whatever_the_form_and_the_type(inputs, bias):
    layers = [
        MultiHeadAttention(*SIZED, bias, rng=5),
        MultiHeadAttention(12, 3, 0.1, bias, rng=5),
        MultiHeadAttention(*SIZED, bias, rng=np.random.default_rng(5), dtype=np.float64),
    ]
    layers[1](*inputs)
    expected = layers[0].state_dict()
    for layer in layers[1:]:
        for name, value in layer.state_dict().items():
            np.testing.assert_array_equal(value.astype(np.float32), expected[name])
    assert any((MultiHeadAttention(*SIZED).W_q.weight != MultiHeadAttention(*SIZED).W_q.weight).ravel())


def test_initial_weights_are_xavier_uniform_or_torchs():
    mha = MultiHeadAttention(64, 32, 16, 96, 4, 0.0, bias=True, rng=0)
    xavier = np.sqrt(6 / (32 + 96))
    assert 0.9 * xavier < np.abs(mha.W_q.weight).max() <= xavier
    assert not mha.W_q.bias.any()
    before = mha.W_q.weight
    mha.initialize(rng=1, method="torch")
    bound = 1 / np.sqrt(32)
    assert 0.9 * bound < np.abs(mha.W_q.weight).max() <= bound and (mha.W_q.weight != before).any()
    assert 0.5 * bound < np.abs(mha.W_q.bias).max() <= bound
    with pytest.raises(ValueError, match="method must be 'xavier_uniform' or 'torch', got 'he'"):
        mha.initialize(method="he")


def test_initialize_before_the_sizes_are_known(inputs):
    """The mxnet edition's form: net.initialize(), then the first call."""
    mha = MultiHeadAttention(12, 3, 0.1, use_bias=True)
    mha.initialize(rng=8, method="torch")
    mha(*inputs)
    again = MultiHeadAttention(*SIZED, bias=True)
    again.initialize(rng=8, method="torch")
    for name, value in mha.state_dict().items():
        np.testing.assert_array_equal(value, again.state_dict()[name])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_refused_first_call_leaves_sizes_open_and_random_numbers_unused(inputs, dropout):
    q, k, v = inputs
    mha, untouched = (MultiHeadAttention(12, 3, dropout, rng=2).train() for _ in range(2))
    for bad in ((q, k[:, :3], v), (q[0], k, v), (q, k, v.astype(np.int64)), (np.array(1.0), k, v)):
        with pytest.raises((ValueError, TypeError)):
            mha(*bad)
        assert repr(mha.W_q).startswith("Lazy") and not hasattr(mha, "attention_weights")
    for _ in range(3):
        np.testing.assert_array_equal(mha(q, k, v), untouched(q, k, v))


@pytest.mark.parametrize("layer", ["sizes open", "sizes known", "function"])
def test_a_refused_call_gives_no_number_back_that_others_may_have_drawn(inputs, layer):
    """A Generator may have several users: nothing of it is drawn before all checks, so nothing is taken back."""
    q, k, v = inputs

    class Watched(np.random.Generator):
        draws = 0

        def uniform(self, *args):
            self.draws += 1
            return super().uniform(*args)

        def integers(self, *args, **options):
            self.draws += 1
            return super().integers(*args, **options)

    rng = Watched(np.random.PCG64(3))
    if layer == "function":
        call = functools.partial(mha_c.functional.dot_product_attention, dropout=0.5, rng=rng)
        q = k
    else:
        call = MultiHeadAttention(*(SIZED if layer == "sizes known" else (12, 3, 0.5)), rng=rng).train()
        if layer == "sizes known":
            call.attention.dropout.p = 0.5
    before, draws = rng.bit_generator.state, rng.draws
    for bad in ((q, k[:, :3], v), (q[0], k, v), (q, k, v.astype(np.int64)), (q, k, v, [1, 2, 3, 4])):
        with pytest.raises((ValueError, TypeError)):
            call(*bad)
    assert rng.draws == draws and rng.bit_generator.state == before
    call(q, k, v)
    assert rng.draws > draws


def test_a_refused_first_call_with_a_cache_leaves_sizes_open(inputs):
    _, k, _ = inputs
    rng = np.random.default_rng(3)
    mha, other = MultiHeadAttention(12, 3, 0.0, rng=rng), MultiHeadAttention(12, 3, 0.0, rng=0)
    full, before = mha.new_cache(len(k), k.shape[1] - 1), rng.bit_generator.state
    used = mha.new_cache(len(k), 2 * k.shape[1])
    other(k, k, k, cache=used)
    for cache in (full, used):
        with pytest.raises(ValueError, match="the cache"):
            mha(k, k, k, cache=cache)
    with pytest.raises(ValueError):
        mha(k, k[:, :2], k, cache=mha.new_cache(len(k), 9))
    assert rng.bit_generator.state == before and repr(mha.W_q).startswith("Lazy")


def test_sizes_are_fixed_by_the_first_call(inputs):
    q, k, v = inputs
    mha = MultiHeadAttention(12, 3, 0.1, rng=2)
    mha(q, k, v)
    with pytest.raises(mha_c.ShapeError, match=r"queries has 5 features.*W_q expects 6"):
        mha(k, k, v)


# --- Parameters ----------------------------------------------------------------------------------


def test_parameters_are_read_only_views_and_copied_on_assignment(inputs, dtype):
    mha = MultiHeadAttention(*SIZED, True, dtype=dtype)
    before = mha(*inputs)
    with pytest.raises(ValueError):
        mha.W_q.weight[0, 0] = 1
    with pytest.raises(ValueError):
        mha.W_q.weight.flags.writeable = True
    mine = np.ones((12, 6))
    mha.W_q.weight = mine
    after = mha(*inputs)
    mine[:] = 7  # changes nothing: it was copied
    np.testing.assert_array_equal(mha.W_q.weight, np.ones((12, 6), dtype))
    np.testing.assert_array_equal(mha(*inputs), after)
    assert mha.W_q.weight.dtype == dtype and (before != after).any()
    mha.W_v.bias = [1.0] * 12
    assert (mha(*inputs) != after).any()
    expected, _ = _reference.multi_head_attention(*inputs, mha.state_dict(), 3)
    close(mha(*inputs), expected, dtype)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones((6, 12)), mha_c.ShapeError, r"W_q.weight must have shape \(12, 6\), got \(6, 12\)"),
        (np.ones(12), mha_c.ShapeError, r"W_q.weight must have shape \(12, 6\), got \(12,\)"),
        (np.ones((12, 6), int), TypeError, "W_q.weight must be float32 or float64, got int64"),
        (None, TypeError, "W_q.weight must be an array, got None"),
        (np.ones((12, 6), np.float16), TypeError, "W_q.weight must be float32 or float64, got float16"),
    ],
)
def test_assignments_that_do_not_fit(value, error, message):
    mha = MultiHeadAttention(*SIZED, rng=0)
    before = mha.W_q.weight
    with pytest.raises(error, match=message):
        mha.W_q.weight = value
    np.testing.assert_array_equal(mha.W_q.weight, before)


def test_bias_exists_only_where_asked_for():
    without, lazy = MultiHeadAttention(*SIZED), MultiHeadAttention(12, 3, 0.0, True)
    assert without.W_q.bias is None
    without.W_q.bias = None
    with pytest.raises(ValueError, match="W_q has no bias: build the layer with bias=True"):
        without.W_q.bias = np.zeros(12)
    with pytest.raises(ValueError, match=r"W_q.weight is not initialised yet"):
        lazy.W_q.bias = np.zeros(12)
    with pytest.raises(mha_c.ShapeError, match=r"W_q.weight must have shape \(12, in_features\), got \(11, 6\)"):
        lazy.W_q.weight = np.zeros((11, 6))
    lazy.W_q.weight = np.ones((12, 6))
    np.testing.assert_array_equal(lazy.W_q.bias, np.zeros(12))
    assert repr(lazy.W_q) == "Linear(in_features=6, out_features=12, bias=True)"


def test_projections_and_sizes_cannot_be_replaced():
    mha = MultiHeadAttention(*SIZED)
    with pytest.raises(TypeError, match=r"W_q cannot be replaced; assign W_q.weight"):
        mha.W_q = np.ones((12, 6))
    with pytest.raises(TypeError, match="W_q cannot be deleted"):
        del mha.W_q
    for name in ("num_heads", "num_hiddens", "attention", "dtype", "empty_rows", "attention_weights"):
        with pytest.raises(AttributeError):
            setattr(mha, name, 0)


def test_a_projection_can_be_called_alone(rng, dtype):
    mha = MultiHeadAttention(*SIZED, True, dtype=dtype, rng=1)
    mha.W_k.bias = np.arange(12.0)
    x = rng.standard_normal((2, 3, 5)).astype(dtype)
    close(mha.W_k(x), x @ mha.W_k.weight.T + np.arange(12), dtype)


def test_inputs_of_the_other_type_get_the_weights_rounded_or_widened(inputs, dtype):
    wide = MultiHeadAttention(*SIZED, dtype=np.float64, rng=1)
    narrow = MultiHeadAttention(*SIZED, dtype=np.float32, rng=1)
    for mha in (wide, narrow):
        out = mha(*inputs)
        assert out.dtype == dtype
        expected, _ = _reference.multi_head_attention(*inputs, mha.state_dict(), 3)
        close(out, expected, dtype)


def test_a_changed_instruction_set_packs_anew(inputs, dtype):
    mha, results = MultiHeadAttention(*SIZED, dtype=dtype, rng=1), []
    _core.isa()
    for isa in [name for name, offered in _core.isas() if offered] * 2:
        _core.set_isa(isa)
        results.append(mha(*inputs))
        expected, _ = _reference.multi_head_attention(*inputs, mha.state_dict(), 3)
        close(results[-1], expected, dtype)
    np.testing.assert_array_equal(results[: len(results) // 2], results[len(results) // 2 :])


# --- state_dict ----------------------------------------------------------------------------------


def test_state_dict_holds_copies_in_torchs_order():
    state = MultiHeadAttention(*SIZED, True).state_dict()
    names = [f"W_{x}.{suffix}" for x in "qkvo" for suffix in ("weight", "bias")]
    assert list(state) == names and all(array.flags.writeable and array.flags.owndata for array in state.values())
    assert DotProductAttention(0.1).state_dict() == {}


def test_load_state_dict_fixes_open_sizes_and_converts_types(inputs, dtype, tmp_path):
    source = MultiHeadAttention(*SIZED, True, dtype=np.float64, rng=4)
    source.W_o.bias = np.linspace(0, 1, 12)
    np.savez(tmp_path / "weights.npz", **source.state_dict())
    target = MultiHeadAttention(12, 3, 0.1, True, dtype=np.float32)
    with np.load(tmp_path / "weights.npz") as entries:
        target.load_state_dict(entries)
    assert repr(target.W_q) == "Linear(in_features=6, out_features=12, bias=True)"
    np.testing.assert_array_equal(target.W_o.bias, np.linspace(0, 1, 12).astype(np.float32))
    np.testing.assert_allclose(target(*inputs), source(*inputs), atol=TOLERANCE["float32"])


def test_load_state_dict_is_all_or_nothing():
    mha = MultiHeadAttention(*SIZED, True, rng=0)
    before, good = mha.state_dict(), MultiHeadAttention(*SIZED, True, rng=1).state_dict()
    bad = {**good, "W_q.weight": good["W_q.weight"].T, "W_k.bias": np.zeros(3), "W_x.weight": 1, "W_v.weight": [1j]}
    del bad["W_o.bias"]
    with pytest.raises(ValueError) as error:
        mha.load_state_dict(bad)
    for text in (
        "MultiHeadAttention.load_state_dict loaded nothing:",
        "W_o.bias is missing",
        "W_x.weight is unexpected",
        "W_q.weight must have shape (12, 6), got (6, 12)",
        "W_k.bias must have shape (12,), got (3,)",
        "W_v.weight must be float32 or float64, got complex128",
    ):
        assert text in str(error.value)
    with pytest.raises(TypeError, match=r"W_q.bias must be float32 or float64, got int64"):
        mha.load_state_dict({**good, "W_q.bias": np.zeros(12, int)})
    for name, value in mha.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_nan_in_weights_loads_and_shows(inputs):
    mha = MultiHeadAttention(*SIZED, rng=0)
    mha.load_state_dict({**mha.state_dict(), "W_o.weight": np.full((12, 12), np.nan)})
    assert np.isnan(mha(*inputs)).all()
