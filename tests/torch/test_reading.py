"""What a call of somebody's lines computed, read while they ran."""

import gc
import time

import pytest

import needs

torch = needs.module("torch")

import converted  # noqa: E402
from mha_c.torch._reading.attention import Attention, attentions  # noqa: E402
from mha_c.torch._reading.graph import Value, walked  # noqa: E402
from mha_c.torch._reading.reading import read, why_not  # noqa: E402
from mha_c.torch._reading.sizes import Axis  # noqa: E402
from zoo import ZOO  # noqa: E402

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(params=ZOO)
def one_of_the_zoo(request):
    torch.manual_seed(0)
    return ZOO[request.param].called(), ZOO[request.param].calls


def leave_what_torch_hides(reading):
    """torch 2.0.0 shows a mode no index of one number or slice: a class with such a line stays the reader's."""
    hidden = reading.refused is not None and reading.refused.words == "a tensor comes from where nobody saw it"
    if hidden and not needs.index_is_seen():
        pytest.skip(f"an index that this torch shows to nobody: {reading.refused}")


def test_right_classes_are_read_whole(one_of_the_zoo):
    module, calls = one_of_the_zoo
    for args, named in calls:
        wanted = module(*args, **named)
        found, reading = read(module, tuple(args), named)
        leave_what_torch_hides(reading)
        assert reading.refused is None
        for a, b in zip(converted.tensors(found), converted.tensors(wanted)):
            assert torch.equal(a, b)
        assert reading.settings.still_holds() and reading.holds_for(reading.sizes())
        given = [x for x in walked(reading.output) if isinstance(x, Value)]
        assert [tuple(map(int, x.shape)) for x in given] == [tuple(x.shape) for x in converted.tensors(found)]


def test_what_the_garbage_collector_runs_is_no_line_of_the_call():
    """Callbacks, and `__del__` of what others left in circles: hypothesis measures collections so."""
    calls = []

    class Left:
        def __del__(self):
            calls.append(time.perf_counter())

    def callback(phase, info):
        calls.append(time.perf_counter())

    def many(x):
        kept = list(zip(range(10_000), range(10_000)))  # of one function of C
        return x * len(kept)

    gc.callbacks.append(callback)
    left = Left()
    left.itself = left
    del left
    try:
        many(1)
        assert calls, "the plain call makes Python collect"
        _, reading = read(many, (torch.randn(3),))
    finally:
        gc.callbacks.remove(callback)
    assert reading.refused is None and gc.isenabled()
    gc.disable()
    try:
        read(many, (torch.randn(3),))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_module_that_a_call_makes_is_read_after_something_was_compiled(monkeypatch):
    """From its first use on, torch's compiler has a function of its own in the place of `Module.__init__`."""
    guard = needs.module("torch._dynamo.mutation_guard")
    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(guard.GenerationTracker, "generation", guard.GenerationTracker.generation)
    guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__.__module__ == guard.__name__
    _, reading = read(ZOO["HiddenPadding"].make(), *ZOO["HiddenPadding"].calls[0])
    assert reading.refused is None


def test_attention_is_found_in_right_classes(one_of_the_zoo):
    module, calls = one_of_the_zoo
    for args, named in calls:
        _, reading = read(module, tuple(args), named)
        leave_what_torch_hides(reading)
        found = attentions(reading)
        assert found and all(isinstance(x, Attention) for x in found)
        assert reading.holds_for(reading.sizes())
        for x in found:
            assert x.kind == "fused" or x.weights_axes[-1:] == ("k",) or "k" in x.weights_axes


def test_sizes_are_formulas_of_the_inputs():
    def heads(x, n):
        return x.reshape(x.shape[0], x.shape[1], n, -1).transpose(1, 2)

    def scores(x):
        assert x.shape[1] <= 256
        return heads(x, 2) @ heads(x, 2).mT

    _, reading = read(scores, (torch.randn(3, 5, 8),))
    shape = reading.graph.nodes[-1].results[0].shape
    assert [getattr(n, "formula", n) for n in shape] == [Axis("x", 0), 2, Axis("x", 1), Axis("x", 1)]
    assert [bool(c.holds({Axis("x", 1): n})) for c in reading.conditions for n in (256, 257)] == [True, False]
    assert reading.holds_for({Axis("x", 0): 7, Axis("x", 1): 100, Axis("x", 2): 8})
