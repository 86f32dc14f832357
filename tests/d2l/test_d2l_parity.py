"""Our layers against the real classes of both d2l generations: same weights in, same numbers out.

Drawn configurations: sizes, every form of valid_lens, memory layouts, which inputs are one object, scale of the
data, both dtypes, every instruction set.  The judge is d2l itself in float64; see `Judge` for what is allowed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mha_c
import needs
from book_models import is_eager
from layouts import LAYOUTS

# --- What is drawn ---------------------------------------------------------------------------------


@dataclass
class Call:
    """One call: the arrays for us, and how to build the layers."""

    queries: Any
    keys: Any
    values: Any
    lens: Any  # what we are given: None, list, array or tensor
    lens_numbers: Any  # the same for d2l: None or array
    num_hiddens: int
    num_heads: int
    bias: bool
    weight_seed: int
    training: bool

    def __repr__(self):
        shapes = [f"{a.shape}/{tuple(s // a.itemsize for s in a.strides)}" for a in self.arrays]
        return (
            f"Call({', '.join(shapes)}, lens={self.lens!r}, h={self.num_hiddens}, H={self.num_heads}, "
            f"bias={self.bias}, seed={self.weight_seed}, training={self.training})"
        )

    def _repr_pretty_(self, printer, cycle):  # what hypothesis prints
        printer.text(repr(self))

    @property
    def arrays(self):
        return self.queries, self.keys, self.values


ARRANGED = st.sampled_from([name for name in LAYOUTS if name != "other byte order"])  # which torch, the judge, refuses


@st.composite
def valid_lens(draw, batch, queries, keys):
    """(what we are given, the numbers): all forms, with lengths below 1, broken ones and ones beyond K."""
    kind = draw(st.sampled_from(["none", "1-D", "1-D", "2-D", "2-D", "ramp"]))
    if kind == "none":
        return None, None
    if kind == "ramp":
        numbers = np.tile(np.arange(1, queries + 1), (batch, 1))
    else:
        shape = (batch,) if kind == "1-D" else (batch, queries)
        seed = draw(st.integers(0, 2**32 - 1))
        low, high = draw(st.sampled_from([(1, keys + 1), (-2, keys + 4)]))
        numbers = np.random.default_rng(seed).integers(low, high, shape)
    number_type = draw(st.sampled_from(["int64", "int32", "float32", "float64"]))
    numbers = numbers.astype(number_type)
    if numbers.dtype.kind == "f" and draw(st.booleans()):
        numbers = numbers - numbers.dtype.type(0.5)  # 2.5 leaves 3 keys
    given_as = draw(st.sampled_from([np.ndarray.tolist, np.asarray, torch.from_numpy]))
    return given_as(numbers), numbers


@st.composite
def calls(draw, dtype, single_head=False, same_sizes=False):
    """A call; `same_sizes`: queries and keys have equally many features (dot products without projections)."""
    batch, queries, keys = draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 40))
    heads = 1 if single_head else draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    hiddens = heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 17, 20, 32]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([1.0, 1.0, 0.05, 6.0]))  # typical; nearly uniform weights; nearly one-hot
    size = st.integers(1, 40)

    def array(rows, features, layout):
        return LAYOUTS[layout]((scale * rng.standard_normal((batch, rows, features))).astype(dtype))

    sharing = draw(st.sampled_from(["self", "keys are values", "separate"]))
    q = array(queries, draw(size), draw(ARRANGED))
    if sharing == "self":
        keys = queries
        k = v = q
    else:
        k = array(keys, q.shape[2] if same_sizes else draw(size), draw(ARRANGED))
        v = k if sharing == "keys are values" else array(keys, draw(size), draw(ARRANGED))
    lens, numbers = draw(valid_lens(batch, queries, keys))
    bias, weight_seed, training = draw(st.booleans()), draw(st.integers(0, 2**31)), draw(st.booleans())
    return Call(q, k, v, lens, numbers, hiddens, heads, bias, weight_seed, training)


# --- d2l's side ------------------------------------------------------------------------------------


def tensor(array):
    """A torch copy of an array of any layout."""
    return None if array is None else torch.from_numpy(np.array(array, order="C"))


def run_theirs(module, call, dtype):
    """(output, attention_weights) of d2l in that dtype, as arrays."""
    module = module.to(getattr(torch, dtype))
    with torch.no_grad():
        out = module(*(tensor(a).to(getattr(torch, dtype)) for a in call.arrays), tensor(call.lens_numbers))
    weights = getattr(module, "attention", module).attention_weights
    return out.numpy(), weights.numpy()


ALLOWED = {"float32": 1.0, "float64": 4.0}


class Judge:
    """Compares results with d2l's in float64.

    float32: our largest error may be twice that of d2l in float32 on the same numbers.  Both errors are the
    largest of few values, so d2l's can be small by luck; hence an allowance of ALLOWED units in the last place
    of the largest intermediate, `magnitude`: an upper bound, from absolute values, on the sums that lead to an
    output, times 1 + the largest sum of products behind a score, because a rounded score moves its weight by
    that factor.  float64: nothing more exact is at hand, so both sides together get that allowance.
    """

    def __init__(self, dtype, magnitude):
        self.unit = np.finfo(dtype).eps / 2
        self.floor = ALLOWED[dtype.name] * self.unit * magnitude

    def check(self, ours, theirs, exact, what):
        error = np.abs(ours - exact).max(initial=0)
        allowed = 2 * np.abs(theirs - exact).max(initial=0) + self.floor
        assert ours.dtype == theirs.dtype and ours.shape == exact.shape, what
        assert not np.isnan(ours).any(), what
        assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e} of which floor {self.floor:.2e}"


def magnitude_of(call, state, heads):
    """(for weights, for outputs): see Judge.  `state` holds the float64 parameters as arrays, by name."""
    q, k, v = (np.abs(a.astype(np.float64)) for a in call.arrays)

    def through(x, name):
        if name + ".weight" not in state:
            return x
        return x @ np.abs(state[name + ".weight"]).T + np.abs(state.get(name + ".bias", 0.0))

    q, k, v = through(q, "W_q"), through(k, "W_k"), through(v, "W_v")
    if "w_v.weight" in state:  # |tanh| <= 1, but its argument carries rounding errors of the size of q + k
        score = np.abs(state["w_v.weight"]).sum() * (1 + q.max() + k.max())
    else:
        q, k = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k))
        score = np.einsum("bqhd,bkhd->bhqk", q, k).max() / np.sqrt(q.shape[-1])
    return 1 + score, through(v.max(axis=(0, 1)), "W_o").max() * (1 + score)


def check_call(ours, theirs, call, dtype, heads=1):
    """Runs one call on both sides and judges outputs and weights."""
    exact, exact_weights = run_theirs(theirs, call, "float64")
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    same, same_weights = run_theirs(theirs, call, dtype.name)
    before = [np.array(a) for a in call.arrays]
    out = ours(*call.arrays, call.lens)
    weights = ours.attention_weights
    np.testing.assert_equal(list(call.arrays), before)
    for_weights, for_output = magnitude_of(call, state, heads)
    Judge(dtype, for_output).check(out, same, exact, "output")
    if heads > 1 or hasattr(ours, "attention"):
        np.testing.assert_array_equal(ours.attention.attention_weights, weights.reshape(exact_weights.shape))
    Judge(dtype, for_weights).check(weights.reshape(exact_weights.shape), same_weights, exact_weights, "weights")
    # Zero where masked and nowhere else that matters: d2l's float64 weights are exactly 0 behind the length.
    assert (weights.reshape(exact_weights.shape)[exact_weights == 0] == 0).all()
    # A row of K <= 40 weights, each rounded once and divided by their rounded sum: within (K + 2) units of 1.
    np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), 1, atol=42 * np.finfo(dtype).eps / 2)


# --- Layers ----------------------------------------------------------------------------------------

examples = settings(max_examples=60)


def drawn(data, **kwargs):
    return data.draw(calls(**kwargs))


@examples
@given(data=st.data())
def test_multi_head_attention(d2l, isa, dtype, data):
    call = drawn(data, dtype=dtype)
    torch.manual_seed(call.weight_seed)
    sizes = (call.keys.shape[2], call.queries.shape[2], call.values.shape[2]) if is_eager(d2l) else ()
    arguments = (*sizes, call.num_hiddens, call.num_heads, 0.0)
    theirs = d2l.MultiHeadAttention(*arguments, bias=call.bias)
    theirs(*map(tensor, call.arrays), None) if dtype == np.float32 else theirs.double()(*map(tensor, call.arrays), None)
    theirs = theirs.to(torch.float32)  # so that the weights are exact in both types
    ours = mha_c.MultiHeadAttention(*arguments, bias=call.bias, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    ours.train(call.training)
    theirs.train(call.training)
    check_call(ours, theirs, call, dtype, call.num_heads)
    batch, heads, queries, keys = ours.attention_weights.shape
    assert (batch, heads, queries) == (call.queries.shape[0], call.num_heads, call.queries.shape[1])
    assert keys == call.keys.shape[1]


@examples
@given(data=st.data())
def test_dot_product_attention(d2l, isa, dtype, data):
    call = drawn(data, dtype=dtype, single_head=True, same_sizes=True)
    theirs = d2l.DotProductAttention(0.0)
    ours = mha_c.DotProductAttention(0.0)
    ours.train(call.training)
    check_call(ours, theirs.train(call.training), call, dtype)


@examples
@given(data=st.data())
def test_additive_attention(d2l, isa, dtype, data):
    call = drawn(data, dtype=dtype, single_head=True)
    torch.manual_seed(call.weight_seed)
    sizes = (call.keys.shape[2], call.queries.shape[2]) if is_eager(d2l) else ()
    theirs = d2l.AdditiveAttention(*sizes, call.num_hiddens, 0.0)
    theirs.to(getattr(torch, dtype.name))(*map(tensor, call.arrays), None)
    theirs = theirs.to(torch.float32)
    ours = mha_c.AdditiveAttention(*sizes, call.num_hiddens, 0.0, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    ours.train(call.training)
    check_call(ours, theirs.train(call.training), call, dtype)


# --- Functions -------------------------------------------------------------------------------------


@examples
@given(data=st.data())
def test_masked_softmax(d2l, isa, dtype, data):
    batch, queries, keys = (data.draw(st.integers(1, n)) for n in (4, 20, 40))
    lens, numbers = data.draw(valid_lens(batch, queries, keys))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = LAYOUTS[data.draw(ARRANGED)](rng.normal(0, 3, (batch, queries, keys)).astype(dtype))
    before = np.array(x)
    theirs = d2l.masked_softmax
    exact = theirs(tensor(x).double(), tensor(numbers)).numpy()
    ours = mha_c.masked_softmax(x, lens)
    # A weight is exp(x - max) / sum.  x - max is rounded by half a unit of at most 2 max|x| < 32, which moves the
    # weight by 16 units; exp, the sum of up to 40 terms and the quotient add fewer than 8.
    np.testing.assert_allclose(ours, exact, rtol=24 * np.finfo(dtype).eps / 2, atol=np.finfo(dtype).tiny)
    Judge(dtype, 1 + np.abs(x).max()).check(ours, theirs(tensor(x), tensor(numbers)).numpy(), exact, "weights")
    np.testing.assert_array_equal(x, before)  # d2l's own writes its mask into its argument


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4)])
@pytest.mark.parametrize("value", [0, -1, -1e6])
def test_sequence_mask(d2l, dtype, shape, value, rng):
    theirs = d2l.sequence_mask
    for lens in ([1, 2], [0, 3], [4, -1]):
        x = rng.standard_normal(shape).astype(dtype)
        before = x.copy()
        ours = mha_c.sequence_mask(x, lens, value=value)
        np.testing.assert_array_equal(ours, theirs(tensor(x), torch.tensor(lens), value=value).numpy())
        assert ours.dtype == dtype
        np.testing.assert_array_equal(x, before)


def test_transposes(d2l, dtype, rng):
    heads = 3
    x = rng.standard_normal((2, 4, 12)).astype(dtype)
    ours = mha_c.MultiHeadAttention(12, heads, 0.0)
    if is_eager(d2l):
        split, join = (lambda t: d2l.transpose_qkv(t, heads)), (lambda t: d2l.transpose_output(t, heads))
    else:
        theirs = d2l.MultiHeadAttention(12, heads, 0.0)
        split, join = theirs.transpose_qkv, theirs.transpose_output
    halves = split(tensor(x)).numpy()
    np.testing.assert_array_equal(mha_c.transpose_qkv(x, heads), halves)
    np.testing.assert_array_equal(ours.transpose_qkv(x), halves)
    np.testing.assert_array_equal(join(tensor(halves)).numpy(), x)
    np.testing.assert_array_equal(mha_c.transpose_output(halves, heads), x)
    np.testing.assert_array_equal(ours.transpose_output(halves), x)


# --- What the book prints --------------------------------------------------------------------------


def book_layers(d2l, h=8):
    """The layers of the book's scoring-function example: (ours, theirs, queries) twice."""
    sizes = (2, 20) if is_eager(d2l) else ()
    additive = d2l.AdditiveAttention(*sizes, h, 0.1).eval()
    return [
        (mha_c.AdditiveAttention(*sizes, h, 0.1), additive, np.ones((2, 1, 20), np.float32)),
        (mha_c.DotProductAttention(0.5), d2l.DotProductAttention(0.5).eval(), np.ones((2, 1, 2), np.float32)),
    ]


def test_printed_result_of_the_scoring_functions(d2l, isa):
    keys = np.ones((2, 10, 2), np.float32)
    values = np.tile(np.arange(40, dtype=np.float32).reshape(1, 10, 4), (2, 1, 1))
    for ours, theirs, queries in book_layers(d2l):
        out = ours(queries, keys, values, [2, 6])
        # Equal weights of 1/2 and of 1/6: halves are exact, and sixths of small whole numbers come out to a few
        # units of 13 * 2**-24, the rounding of the largest term.
        np.testing.assert_array_equal(out[0], [[2, 3, 4, 5]])
        np.testing.assert_allclose(out[1], [[10, 11, 12, 13]], rtol=4 * 2**-24)
        np.testing.assert_array_equal(np.round(out, 4), [[[2, 3, 4, 5]], [[10, 11, 12, 13]]])
        with torch.no_grad():
            printed = theirs(*map(tensor, (queries, keys, values)), torch.tensor([2, 6])).numpy()
        np.testing.assert_array_equal(np.round(out, 4), np.round(printed, 4))
        weights = ours.attention_weights
        np.testing.assert_array_equal(np.round(weights, 4), np.round(theirs.attention_weights.numpy(), 4))
        np.testing.assert_array_equal(weights[0, 0], [0.5] * 2 + [0] * 8)


def test_printed_result_of_sequence_mask():
    x = np.array([[1, 2, 3], [4, 5, 6]])
    assert mha_c.sequence_mask(x, [1, 2]).tolist() == [[1, 0, 0], [4, 5, 0]]
    ones = mha_c.sequence_mask(np.ones((2, 3, 4), np.float32), [1, 2], value=-1)
    assert ones[:, :, 0].tolist() == [[1, -1, -1], [1, 1, -1]]


def test_printed_shape_of_the_multi_head_toy():
    attention = mha_c.MultiHeadAttention(100, 5, 0.5)
    x, y = np.ones((2, 4, 100), np.float32), np.ones((2, 6, 100), np.float32)
    assert attention(x, y, y, [3, 2]).shape == (2, 4, 100)
    assert attention.attention_weights.shape == (2, 5, 4, 6)
    assert attention.attention.attention_weights.shape == (10, 4, 6)


def multi_head(make, d2l, dropout, bias):
    sizes = (7, 6, 5) if is_eager(d2l) else ()
    return make.MultiHeadAttention(*sizes, 12, 3, dropout, bias=bias)


@pytest.mark.parametrize("dropout", [0, 0.0, 0.1, 0.5, 1, 1e-7])
def test_repr(d2l, dropout):
    q, k, v = (np.ones((1, 2, n), np.float32) for n in (6, 7, 5))
    for bias in (False, True):
        ours, theirs = multi_head(mha_c, d2l, dropout, bias), multi_head(d2l, d2l, dropout, bias).eval()
        assert repr(ours) == repr(theirs)
        ours(q, k, v)
        theirs(*map(tensor, (q, k, v)), None)
        assert repr(ours) == repr(theirs)
    assert repr(mha_c.DotProductAttention(dropout)) == repr(d2l.DotProductAttention(dropout))
    sizes = (7, 6) if is_eager(d2l) else ()
    ours, theirs = (make.AdditiveAttention(*sizes, 8, dropout) for make in (mha_c, d2l))
    assert repr(ours) == repr(theirs)
    ours(q, k, v)
    theirs(*map(tensor, (q, k, v)), None)
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("bias", [False, True])
def test_state_dicts_are_interchangeable(d2l, bias):
    q, k, v = (np.ones((1, 2, n), np.float32) for n in (6, 7, 5))
    sizes = (7, 6) if is_eager(d2l) else ()
    pairs = [
        (multi_head(mha_c, d2l, 0.1, bias), multi_head(d2l, d2l, 0.1, bias)),
        (mha_c.AdditiveAttention(*sizes, 8, 0.1), d2l.AdditiveAttention(*sizes, 8, 0.1)),
    ]
    for ours, theirs in pairs:
        theirs.eval()(*map(tensor, (q, k, v)), None)
        ours(q, k, v)
        state = ours.state_dict()
        assert list(state) == list(theirs.state_dict())
        assert {name: value.shape for name, value in state.items()} == {
            name: tuple(value.shape) for name, value in theirs.state_dict().items()
        }
        theirs.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in state.items()})
        ours.load_state_dict(theirs.state_dict())
        for name, value in theirs.state_dict().items():
            np.testing.assert_array_equal(ours.state_dict()[name], value.numpy())


def test_type_in_is_type_out(d2l):
    """CPU tensors in, a tensor out; the same numbers as for arrays."""
    x = np.random.default_rng(0).standard_normal((2, 4, 12), dtype=np.float32)
    ours = mha_c.MultiHeadAttention(12, 3, 0.0)
    from_arrays = ours(x, x, x, [3, 2])
    t = torch.from_numpy(x)
    from_tensors = ours(t, t, t, torch.tensor([3, 2]))
    assert isinstance(from_arrays, np.ndarray) and isinstance(from_tensors, torch.Tensor)
    np.testing.assert_array_equal(from_arrays, from_tensors.numpy())


# --- Over all draws --------------------------------------------------------------------------------


def test_error_is_typically_no_larger_than_torchs(isa):
    """Root mean square over 120 layers; a single draw is luck, this is not.

    1.25: both sides round each product once, but torch's sums are blocked and ours run over the key index in a
    fixed order, so neither is the more exact by design; over 120 draws the ratio itself wavers by about 0.1.
    """
    d2l, rng, squares = needs.d2l("0.17.6"), np.random.default_rng(5), []
    for seed in range(120):
        batch, heads, d = rng.integers(1, 4), rng.integers(1, 6), rng.choice([3, 8, 20, 32, 64])
        queries, keys, h = rng.integers(4, 30), rng.integers(4, 60), int(heads * d)
        torch.manual_seed(seed)
        theirs = d2l.MultiHeadAttention(h, h, h, h, int(heads), 0.0).eval()
        ours = mha_c.MultiHeadAttention(h, int(heads), 0.0)
        ours.load_state_dict(theirs.state_dict())
        x, y = (rng.standard_normal((batch, rows, h), dtype=np.float32) for rows in (queries, keys))
        lens = rng.integers(1, keys + 1, batch)
        call = Call(x, y, y, lens, lens, h, int(heads), False, seed, False)
        exact, _ = run_theirs(theirs, call, "float64")
        same, _ = run_theirs(theirs, call, "float32")
        size = np.abs(exact).max()
        errors = (np.abs(ours(x, y, y, lens) - exact) / size, np.abs(same - exact) / size)
        squares.append([(error**2).mean() for error in errors])
    ours_rms, theirs_rms = np.sqrt(np.mean(squares, axis=0))
    assert ours_rms <= 1.25 * theirs_rms
