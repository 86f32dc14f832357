"""Calls that are drawn, and d2l in float64 as the judge of what ours give: see `Judge` for what is allowed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from layouts import LAYOUTS


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
