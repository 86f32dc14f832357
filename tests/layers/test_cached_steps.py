"""Caches of every layer that decodes: any schedule of steps gives the rows of the uncached call over all steps.

The reference are the book's formulas in float64.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import mha_c
import needs
import stepwise

# The limits, for outputs around 1 and weights up to 1.
LIMITS = {"float32": 1e-5, "float64": 1e-12}
FEATURES = 16
WINDOWS, SINKS = [0, 1, 2, 3, 5, 8, 64, 70, 2000], [0, 1, 2, 4, 9, 2000]


def layer_of(kind, heads, kv_heads, rope, bias, dtype, torch):
    module = mha_c
    if torch:
        from mha_c import torch as module
    options = {"grouped": (FEATURES, heads, kv_heads, bias, rope), "causal": (FEATURES, heads, bias, rope)}
    if kind in options:
        of_numpy = {"grouped": mha_c.GQAAttention, "causal": mha_c.CausalAttention}[kind](
            *options[kind], dtype=dtype, rng=1
        )
        layer = {"grouped": module.GQAAttention, "causal": module.CausalAttention}[kind](*options[kind])
    else:
        sizes = (FEATURES,) * 4
        of_numpy = mha_c.MultiHeadAttention(*sizes, heads, 0.3, bias, dtype=dtype, rng=1)
        layer = module.MultiHeadAttention(*sizes, heads, 0.3, bias)
    rng = np.random.default_rng(5)
    for name, p in of_numpy.named_parameters():
        if name.endswith("bias"):
            p += rng.standard_normal(p.shape) / 4
    if not torch:
        return of_numpy, of_numpy.state_dict()
    layer = layer.eval().to(getattr(needs.module("torch"), dtype))
    layer.load_state_dict(of_numpy.state_dict())
    return layer, of_numpy.state_dict()


class Steps(RuleBasedStateMachine):
    """One cache; what went in and came out of it, of each item, and the whole call at the end of each rule."""

    dtype, torch = "float64", False
    most = 3  # items

    @initialize(
        kind=st.sampled_from(["grouped", "causal", "multi-head"]),
        heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (8, 2), (8, 1), (8, 8), (4, 1), (2, 2)]),
        rope=st.booleans(),
        bias=st.booleans(),
        hooked=st.booleans(),
        span=st.none() | st.tuples(st.sampled_from(WINDOWS), st.sampled_from(SINKS)),
        bounded=st.booleans(),
        batch=st.integers(1, most),
        seed=st.integers(0, 1000),
    )  # fmt: skip
    def begin(self, kind, heads, rope, bias, hooked, span, bounded, batch, seed):
        self.rng = np.random.default_rng(seed)
        heads, kv_heads = heads
        kv_heads = kv_heads if kind == "grouped" else heads
        rope = rope and kind != "multi-head"
        self.layer, state = layer_of(kind, heads, kv_heads, rope, bias, self.dtype, self.torch)
        if self.torch and hooked:  # by torch's operations, child by child
            self.layer.W_o.register_forward_hook(lambda *_: None)
        # The book's own lines assign the weights that they have computed, one for each row of the cache.
        self.as_it_lies = self.torch and hooked and kind == "multi-head" and span is not None
        window, sinks = span or (None, 0)
        self.options = {"window": window, "sinks": sinks}
        self.formula = {
            "state": state,
            "heads": heads,
            "kv_heads": kv_heads,
            "rope": self.turning() if rope else None,
            **self.options,
        }
        room = 3000 if window is None or bounded else None
        self.cache = self.layer.new_cache(batch, room, **self.options)
        self.inputs = [np.zeros((0, FEATURES))] * batch
        self.rows = kv_heads * (FEATURES // heads)

    def turning(self):
        """The book's angles: float64 in NumPy, torch's float32 in its modules."""
        if not self.torch:
            return stepwise.rotated
        import third_generation

        torch = needs.module("torch")
        return lambda x: third_generation.turned(torch.from_numpy(x)).numpy()

    def step(self, counts, n):
        """n new steps, of which counts[i] count for item i."""
        x = self.rng.standard_normal((len(self.inputs), n, FEATURES)).astype(self.dtype)
        lens = None if min(counts) == n else np.array(counts)
        if self.torch:
            torch = needs.module("torch")
            given, lens = torch.from_numpy(x), None if lens is None else torch.from_numpy(lens)
            with torch.no_grad():
                out = self.layer(given, given, given, lens, cache=self.cache)
        else:
            out = self.layer(x, x, x, lens, cache=self.cache)
        weights = np.asarray(self.layer.attention_weights)
        out = np.asarray(out)
        assert out.dtype == x.dtype and out.shape == x.shape
        limit, longest = LIMITS[self.dtype], 0
        for i, count in enumerate(counts):
            had = len(self.inputs[i])
            self.inputs[i] = np.concatenate([self.inputs[i], x[i, :count]])
            expected, expected_weights = stepwise.attended(self.inputs[i][None], **self.formula)
            np.testing.assert_allclose(out[i, :count], expected[0, had:], atol=limit, rtol=limit)
            longest = max(longest, had + count)
            if self.as_it_lies:
                continue
            now = weights[i, :, :count]
            np.testing.assert_allclose(now[..., : had + count], expected_weights[0, :, had:], atol=limit, rtol=limit)
            assert not now[..., had + count :].any()
        assert self.as_it_lies or weights.shape[3] == longest

    @rule(n=st.integers(1, 9))
    def steps(self, n):
        self.step([n] * len(self.inputs), n)

    @rule(n=st.integers(1, 9), data=st.data())
    def some_count(self, n, data):
        if type(self.layer).__name__ == "CausalAttention":
            return  # takes no lengths
        counts = data.draw(st.lists(st.integers(0, n), min_size=len(self.inputs), max_size=len(self.inputs)))
        self.step(counts, n)

    @precondition(lambda self: max(map(len, self.inputs)) < 400)
    @rule(n=st.integers(0, 300))
    def prefill(self, n):
        self.step([n] * len(self.inputs), n)

    @rule(data=st.data())
    def reorder(self, data):
        order = data.draw(st.lists(st.integers(0, len(self.inputs) - 1), min_size=1, max_size=self.most))
        self.cache.reorder(order)
        self.inputs = [self.inputs[i] for i in order]

    @rule()
    def copy(self):
        import copy
        import pickle

        self.cache = pickle.loads(pickle.dumps(copy.copy(self.cache)))

    @rule()
    def clear(self):
        self.cache.clear()
        self.inputs = [x[:0] for x in self.inputs]

    @invariant()
    def lengths(self):
        if hasattr(self, "cache"):
            assert np.asarray(self.cache.lengths).tolist() == list(map(len, self.inputs))
            window = self.options["window"]
            rows = 3000 if window is None else window + self.options["sinks"]
            rows = min(rows, self.cache.max_len or rows)
            wanted = 2 * len(self.inputs) * rows * self.rows * np.dtype(self.dtype).itemsize
            assert self.cache.nbytes in (0, wanted)


def machine(dtype, torch):
    kind = type(f"Steps_{dtype}_{torch}", (Steps,), {"dtype": dtype, "torch": torch})
    test = kind.TestCase
    test.settings = settings(
        max_examples=needs.draws(30),
        stateful_step_count=8,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    return test


class TestFloat32(machine("float32", False)):
    pass


class TestFloat64(machine("float64", False)):
    pass


class NeedsTorch:
    @classmethod
    def setUpClass(cls):
        needs.module("torch")


class TestTorchFloat32(NeedsTorch, machine("float32", True)):
    pass


class TestTorchFloat64(NeedsTorch, machine("float64", True)):
    pass
