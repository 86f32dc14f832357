"""Decoding with a cache, on tensors: the rules of test_decoding.py, and what only torch can ask."""

import copy
import pickle

import numpy as np
import pytest
import torch

import mha_c
import mha_c.torch as ours
from decoding_layers import FIRST, KINDS, PROJECTING, THIRD, causal_lens, layer_of, sizes_of


def module_of(kind, dtype=torch.float32):
    layer = layer_of(kind, np.dtype(str(dtype)[6:]) if dtype in (torch.float32, torch.float64) else np.dtype("float32"))
    name, sizes = sizes_of(kind)
    module = getattr(ours, name)(*sizes)
    module.to(dtype).load_state_dict({name: torch.from_numpy(x) for name, x in layer.state_dict().items()})
    return module.eval(), layer


def check_same(found, expected, kind, also=1):
    """To the bit, where a call and its steps are one call of the core; a call of the third generation's layers projects
    by torch.  also: what else differs, as a multiple of rounding, for sums of some tens of numbers around 1."""
    if kind in FIRST:
        assert torch.equal(found, expected)
        return
    limit = also * (1e-12 if found.dtype is torch.float64 else 1e-5)
    torch.testing.assert_close(found, expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_numpy_layer(kind, dtype, rng):
    module, layer = module_of(kind, dtype)
    x = torch.from_numpy(rng.standard_normal((2, 9, 24))).to(dtype)
    caches = module.new_cache(2, 20), layer.new_cache(2, 20)
    whole = module(x, x, x, torch.from_numpy(np.array(causal_lens(2, 0, 9)))).detach()
    # Angles of rope are torch's float32 in the module, float64 in the other: 2^-24 of an angle of up to 20.
    parts, angles = [], 1e7 if "rope" in kind and dtype is torch.float64 else 1
    with torch.no_grad():
        for new in x.split([4, 1, 1, 3], dim=1):
            parts.append(module(new, new, new, cache=caches[0]))
            theirs = layer(new.numpy(), new.numpy(), new.numpy(), cache=caches[1])
            check_same(parts[-1], torch.from_numpy(theirs), kind, angles)
            check_same(module.attention_weights, torch.from_numpy(layer.attention_weights), kind, angles)
        check_same(torch.cat(parts, 1), whole, kind)
        for cache in caches:
            cache.reorder([1, 0, 1])
        new = torch.from_numpy(rng.standard_normal((3, 2, 24))).to(dtype)
        out = module(new, new, new, torch.tensor([2, 1, 0]), cache=caches[0])
        theirs = torch.from_numpy(layer(*[new.numpy()] * 3, [2, 1, 0], cache=caches[1]))
        for i, n in enumerate((2, 1)):  # steps that do not count give anything
            check_same(out[i, :n], theirs[i, :n], kind, angles)
    assert caches[0].lengths.tolist() == [11, 10, 9] and isinstance(caches[0].lengths, torch.Tensor)


@pytest.mark.parametrize("kind", PROJECTING)
@pytest.mark.parametrize("lens", [None, [1, 6], [[1, 6, 2], [0, 3, 6]], [0, 4]])
def test_projected(kind, lens, rng):
    module, _ = module_of(kind)
    if kind in THIRD:
        module.causal = False
    queries, encoded = (torch.from_numpy(rng.standard_normal((2, n, 24))).float() for n in (3, 6))
    with torch.no_grad():
        kv = module.project(encoded, encoded, lens)
        whole = module(queries, encoded, encoded, lens)
        check_same(module(queries, kv), whole, kind)
        check_same(module(queries.flip(0), kv.reorder([1, 0])), whole.flip(0), kind)
        encoded.zero_()  # the projection is its own, also where nothing projects
        check_same(module(queries, kv), whole, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dot"])
def test_one_changed_number_is_noticed(kind, rng):
    """Wherever it stands; a write through .data or the memory of an array is not seen."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    names = [name for name in module.state_dict() if name.startswith(("W_k", "W_v", "W_qkv"))]
    for name in names:
        weight = module.get_parameter(name)
        for change in ("in place", "another tensor"):
            with torch.no_grad():
                cache, kv = module.new_cache(1, 4), module.project(x, x) if kind in PROJECTING else None
                module(x, x, x, cache=cache)
                if change == "in place":
                    weight.view(-1)[int(rng.integers(weight.numel()))] += 1
                else:
                    weight.data = weight.data + 1e-3
                with pytest.raises(ValueError, match="cache was filled by another W_k or W_v"):
                    module(x, x, x, cache=cache)
                if kind in PROJECTING:
                    with pytest.raises(ValueError, match="project again"):
                        module(x, kv)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_fx_keeps_the_cache_of_a_call(kind, rng):
    module, _ = module_of(kind)

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, x, cache):
            return self.attention(x, x, x, cache=cache)

    traced = torch.fx.symbolic_trace(Step())
    x = torch.from_numpy(rng.standard_normal((2, 5, 24), dtype=np.float32))
    caches = module.new_cache(2, 9), module.new_cache(2, 9)
    with torch.no_grad():
        for new in x.split([3, 1, 1], dim=1):
            assert torch.equal(traced(new, caches[0]), Step()(new, caches[1]))
    assert caches[0].lengths.tolist() == [5, 5]


def test_refusals(rng):
    module, _ = module_of("multi-head")
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    cache = module.new_cache(1, 3)
    with pytest.raises(RuntimeError, match="decoding with a cache is not differentiable"):
        module(x, x, x, cache=cache)
    with torch.no_grad():
        kv = module.project(x, x)
        with pytest.raises(ValueError, match="evaluation"):
            module.train()(x, x, x, cache=cache)
        module.eval()
        with pytest.raises(TypeError, match="new_cache"):
            module(x, x, x, cache=layer_of("dot", np.float32).new_cache(1, 2))
        with pytest.raises(TypeError, match="together with the keys"):
            module(x, kv, x)
        module(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="room for 3 steps"):
            module(x, x, x, cache=cache)
        with pytest.raises(mha_c.ShapeError, match="same new steps"):
            module(x, x[:, :1], x[:, :1], cache=cache)
        handle, other = module.W_k.register_forward_hook(lambda *_: None), module.new_cache(1, 3)
        hooked = module(x, x, x, cache=other)  # child by child, with the same rows
        handle.remove()
        other.clear()
        torch.testing.assert_close(module(x, x, x, cache=other), hooked)
        with pytest.raises(TypeError, match="values"):
            module(x, x)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert module(x[:, :1], x[:, :1], x[:, :1], cache=cache).shape == (1, 1, 24)  # nothing records gradients


def test_lazy_halves_and_copies(rng):
    lazy = ours.MultiHeadAttention(8, 2, 0.1).eval()
    x = torch.from_numpy(rng.standard_normal((1, 4, 6))).float()
    with torch.no_grad():
        cache = lazy.new_cache(1, 8)
        steps = [lazy(new, new, new, cache=cache) for new in x.split(1, dim=1)]
        whole = lazy(x, x, x, torch.arange(1, 5)[None])
        assert torch.equal(torch.cat(steps, 1), whole)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert other.lengths.tolist() == [4] and lazy(x, x, x, cache=other).shape == (1, 4, 8)
        half = copy.deepcopy(lazy).bfloat16()
        cache, kv = half.new_cache(1, 8), half.project(x.bfloat16(), x.bfloat16())
        steps = [half(new, new, new, cache=cache) for new in x.bfloat16().split(1, dim=1)]
        assert steps[0].dtype is torch.bfloat16
        # Inputs, weights and results have 8 bits; keys and values keep float32 here.
        assert (torch.cat(steps, 1).float() - whole).abs().max() < 0.05
        assert torch.equal(half(x.bfloat16(), kv), half(x.bfloat16(), x.bfloat16(), x.bfloat16()))


def test_forward_mode_is_refused():
    module, _ = module_of("multi-head with biases")
    x = torch.ones(1, 1, 24)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
        module(x, x, x, cache=module.new_cache(1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen(kind, rng):
    """The same bits; weights that have changed are noticed inside, too."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((2, 6, 24))).float()
    with torch.no_grad():
        caches = module.new_cache(2, 9), module.new_cache(2, 9)
        whole = torch.cat([module(new, new, new, cache=caches[1]) for new in x.split(1, dim=1)], 1)
        with ours.frozen(module):
            for i, new in enumerate(x.split(1, dim=1)):
                assert torch.equal(module(new, new, new, cache=caches[0])[:, 0], whole[:, i])
        module(x[:, :1], x[:, :1], x[:, :1], cache=caches[0])
        if kind != "dot":
            changed = module.W_qkv if kind.startswith("causal") else module.W_k
            changed.weight.view(-1)[-3] += 1
            with ours.frozen(module), pytest.raises(ValueError, match="another W_k or W_v"):
                module(x[:, :1], x[:, :1], x[:, :1], cache=caches[0])
            name = "W_qkv" if kind.startswith("causal") else "W_k"
            with pytest.raises(RuntimeError, match=rf"changed inside frozen\(\): {name}.weight;"), ours.frozen(module):
                changed.weight.view(-1)[-3] += 1


@pytest.mark.parametrize("kind", THIRD)
def test_frozen_weights_are_used(kind, rng):
    """By steps of the core, as the other layers': `frozen` packs them once, so no step sees that a number changes."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((2, 6, 24))).float()[:, :1]

    @torch.no_grad()
    def sees_a_change():
        outs = []
        for change in (0, 9):
            module.W_o.weight.view(-1)[7] += change
            outs.append(module(x, x, x, cache=module.new_cache(2, 9)))
        module.W_o.weight.view(-1)[7] -= 9
        return not torch.equal(*outs)

    module.W_o.weight.data.mul_(64).round_()  # which 9 more and 9 less leave as they are
    assert sees_a_change()
    with ours.frozen(module):
        assert not sees_a_change()
    assert sees_a_change()


@pytest.mark.parametrize("kind", PROJECTING)
def test_frozen_and_projected(kind, rng):
    module, _ = module_of(kind)
    if kind in THIRD:
        module.causal = False
    x = torch.from_numpy(rng.standard_normal((2, 6, 24))).float()
    with torch.no_grad():
        crossed, kv = module(x, x, x), module.project(x, x)
        with ours.frozen(module):
            inside = module.project(x, x)
            for each in (kv, inside):
                check_same(module(x, each), crossed, kind)
        check_same(module(x, pickle.loads(pickle.dumps(inside))), crossed, kind)
        if kind != "dot":
            module.W_k.weight.view(-1)[3] += 1
            with ours.frozen(module), pytest.raises(ValueError, match="another W_k"):
                module(x, kv)


@pytest.mark.parametrize("kind", ["multi-head with biases", "grouped with biases and rope"])
def test_frozen_biases_are_looked_at(kind, rng):
    """They are no part of what is frozen."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    for name in ("W_k", "W_v"):
        with torch.no_grad(), ours.frozen(module):
            cache, kv = module.new_cache(1, 9), module.project(x, x)
            for _ in range(2):  # the second knows that the weights are frozen
                module(x, x, x, cache=cache)
                module(x, kv)
            getattr(module, name).bias[5] += 1
            with pytest.raises(ValueError, match="cache was filled by another W_k or W_v"):
                module(x, x, x, cache=cache)
            with pytest.raises(ValueError, match="project again"):
                module(x, kv)
