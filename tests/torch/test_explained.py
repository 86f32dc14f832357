"""mha_c.explain, mha_c.cost and mha_c.show_config of torch's modules and devices: the way said is the way taken."""

import contextlib
import copy

import pytest
import torch

import mha_c
import needs
import own_device
from mha_c import torch as ours
from seen_by_torch import profiled, way_taken
from torch_modules import layers


def twins():
    yield mha_c.MultiHeadAttention(12, 12, 12, 12, 3, 0, bias=True)
    yield mha_c.AdditiveAttention(12, 12, 8, 0)
    yield mha_c.DotProductAttention(0)


def way_of(layer, *args, **options):
    return mha_c.explain(layer, *args, **options).as_dict()["way"]


@pytest.mark.parametrize("name", ["plain", "cache", "device", "hook", "fake", "mode"])
def test_the_way_said_is_the_way_taken(name):
    wanted = "core" if name in ("plain", "cache") else "general"
    for layer in layers().values():
        x, options, around = torch.randn(2, 4, 12), {}, contextlib.nullcontext()
        if name == "device":
            own = own_device.load()
            layer, x = layer.to(own), x.to(own)
        elif name == "hook":
            getattr(layer, "attention", layer).dropout.register_forward_hook(lambda *_: None)
        elif name == "fake":
            from torch._subclasses import FakeTensorMode

            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                x = mode.from_tensor(x)
        elif name == "cache":
            layer.eval()
            options["cache"] = layer.new_cache(2, 8)
        elif name == "mode":
            needs.of_torch("torch.utils.flop_counter")  # which torch does not import by itself
            around = torch.utils.flop_counter.FlopCounterMode(display=False)
        with torch.no_grad(), around:
            assert way_of(layer, x, x, x, **options) == wanted
            assert way_taken(lambda: layer(x, x, x, **options)) == wanted  # noqa: B023  called at once
        assert way_of(layer, x, x, x, **options) == ("core" if name == "mode" else wanted)


def test_cost_says_why_it_has_no_counts():
    layer = ours.MultiHeadAttention(12, 12, 12, 12, 3, 0.0)
    layer.W_q.register_forward_hook(lambda *call: None)
    with pytest.raises(TypeError, match=r"this one is torch.s operations, .*hooks"):
        mha_c.cost(layer, 4, measure=False)


def test_torch_does_the_projections_where_one_has_a_hook():
    """The switch of docs/compatibility.md: our attention stands between them, as in a whole call."""
    layer, x, lens = layers()["multi-head"], torch.randn(2, 4, 12), torch.tensor([3, 2])
    found, projections = [], []
    for hooked in (True, False):
        switch = layer.W_q.register_forward_hook(lambda *_: None) if hooked else None
        names = profiled(lambda: found.append(layer(x, x, x, lens)))
        if switch is not None:
            switch.remove()
        projections.append(names.count("aten::linear"))
        assert not {"aten::softmax", "aten::scaled_dot_product_attention"}.intersection(names)
    assert projections == [4, 0]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_nothing_changes_by_asking():
    for sizes in ((12, 3, 0.5), (12, 12, 12, 12, 3, 0.5)):
        layer, x = ours.MultiHeadAttention(*sizes), torch.randn(2, 4, 12)
        text, state = repr(layer), torch.get_rng_state()
        facts = mha_c.explain(layer, x, x, x, [3, 2]).as_dict()
        assert repr(layer) == text and torch.equal(torch.get_rng_state(), state)
        assert not hasattr(layer, "attention_weights")
        layer(x, x, x)
        weights = layer.attention_weights
        mha_c.explain(layer, 2 * x, x, x)
        assert layer.attention_weights is weights
        assert facts["projections"]["W_k"]["rows_needed"] == 5 and facts["attention"]["keys"] == 4


def test_open_weights_are_drawn_in_vain():
    x = torch.randn(2, 4, 12)
    for layer in (ours.MultiHeadAttention(12, 3, 0.1), ours.AdditiveAttention(8, 0.1)):
        before = torch.get_rng_state()
        mha_c.explain(layer, x, x, x)
        for measure in (True, False):
            mha_c.cost(layer, 4, features=12, measure=measure)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.nn.parameter.is_lazy(p) for p in layer.parameters())


def test_what_the_call_refuses_is_refused():
    x = torch.randn(2, 4, 12)
    for layer in layers().values():
        cache = layer.new_cache(2, 8)
        for options in ({"training": "no"}, {"cache": 3}, {"cache": cache}, {"cache": cache, "training": True}):
            with pytest.raises((TypeError, ValueError)) as of_call:
                layer(x, x, x, **options)
            with pytest.raises(of_call.type) as found:
                mha_c.explain(layer, x, x, x, **options)
            assert str(found.value) == str(of_call.value)


def test_facts_are_those_of_the_layer_for_numpy():
    for layer, plain in zip(layers().values(), twins()):
        x, y = torch.randn(2, 4, 12), torch.randn(2, 600, 12)
        with torch.no_grad():
            facts = mha_c.explain(layer, x, y, y, [3, 500]).as_dict()
        with mha_c.set_num_threads(min(torch.get_num_threads(), mha_c.get_num_threads())):
            wanted = mha_c.explain(plain, x.numpy(), y.numpy(), y.numpy(), [3, 500]).as_dict()
        assert facts["device"] == "cpu" and facts["kept"] == wanted["kept"]
        for one in (facts["attention"], wanted["attention"]):
            del one["scratch_bytes"]  # weights are packed in the call, or were before it
        assert facts["attention"] == wanted["attention"]
        assert mha_c.explain(layer.half(), x.half(), y.half(), y.half()).as_dict()["dtype"] == "float16"


def test_on_a_device():
    own = own_device.load()
    multi, additive, _ = (layer.to(own) for layer in layers().values())
    x = torch.randn(2, 4, 12, device=own)
    text = mha_c.explain(multi, x, x, x, torch.tensor([3, 2])).detail
    assert "on own:0: 2 items, 3 heads" in text and "torch's operations, in the book's order: another device" in text
    assert "scaled_dot_product_attention" in text
    y = torch.empty(2, 2048, 12, device=own)  # 64 MiB of features at a time, of 8 for each pair of float32
    assert "512 of 2048 queries at a time" in mha_c.explain(additive, y, y, y).as_dict()["by"]
    with torch.no_grad():
        assert way_of(multi, x, multi.project(x, x)) == "general"
        multi.eval()
        cache = multi.new_cache(2, 8)
        multi(x, x, x, cache=cache)
        assert mha_c.explain(multi, x, x, x, cache=cache).as_dict()["attention"]["keys"] == 8
        # What is said beside the kernels' own is what a call takes of the device where they take the scores alone.
        y = torch.randn(1, 256, 12, device=own)
        facts = mha_c.explain(additive, y, y, y).as_dict()
        peak = own_device.peak_bytes(lambda: additive(y, y, y))
        assert facts["scratch_bytes"] / 2 < peak < 2 * (facts["scratch_bytes"] + facts["kept_bytes"])
    with pytest.raises(TypeError, match="parameters on own:0"):
        mha_c.explain(multi, x.cpu(), x.cpu(), x.cpu())


def test_projected_keys():
    multi = layers()["multi-head"]
    x, y = torch.randn(2, 1, 12), torch.randn(2, 5, 12)
    facts = mha_c.explain(multi, x, multi.project(y, y, [3, 2])).as_dict()
    assert facts["way"] == "core" and list(facts["projections"]) == ["W_q", "W_o"]
    with torch.no_grad():
        facts = mha_c.explain(multi, x, multi.project(y, y)).as_dict()
    assert facts["way"] == "core" and facts["attention"]["keys"] == 5


def test_cost():
    for layer, plain in zip(layers().values(), twins()):
        wanted = mha_c.cost(plain, 8, 5, batch=2, features=12, measure=False)
        for device in ("cpu", own_device.load()):
            found = mha_c.cost(copy.deepcopy(layer).to(device), 8, 5, batch=2, features=12, measure=device == "cpu")
            assert found[:3] == wanted[:3] and (found.seconds is None) == (device != "cpu")
            where = "cpu" if device == "cpu" or not [*layer.parameters()] else "own:0"
            assert found.way.startswith("the compiled core" if where == "cpu" else "torch's operations")
            assert found.way.endswith(f", on {where}")
            assert repr(found).endswith(found.way) and found.tiled_memory > 0
    lazy = ours.AdditiveAttention(8, 0.0)
    assert mha_c.cost(lazy, 4, features=6).steps[0].flops == 2 * 4 * 6 * 8 and lazy.W_q.in_features == 0
    with pytest.raises(TypeError, match="must be an attention layer"):
        mha_c.cost(torch.nn.Linear(2, 2), 4)


def test_show_config(capsys):
    own_device.load()
    assert mha_c.show_config()["torch_device"] == "own"
    assert "on own: by torch's own kernels" in capsys.readouterr().out
