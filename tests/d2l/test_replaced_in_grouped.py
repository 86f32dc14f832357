"""A part of GQAAttention or CausalAttention that is replaced or hooked: called as the third generation calls it."""

import pytest
import torch
from torch import nn

import needs
import third_generation
from mha_c import torch as mt
from notebook import equal_under_patch, wave
from quantized import Int8Linear, Packed4bit

pytestmark = pytest.mark.usefixtures("float64")
LENS = {"items": torch.tensor([3, 2]), "queries": torch.tensor([[1, 2, 3, 5, 5], [2, 4, 1, 1, 2]]), "none": None}


def grouped(ours):
    """(theirs, ours, number of inputs) of both layers, with the same weights."""
    torch.manual_seed(3)
    theirs = third_generation.GQAAttention(8, 4, 2), third_generation.GPT.CausalAttention(8, 2)
    found = mt.GQAAttention(8, 4, 2), mt.CausalAttention(8, 2)
    for a, b in zip(found, theirs):
        a.load_state_dict(b.state_dict())
    return found if ours else theirs


def of_grouped(layer, lens):
    x = wave(2, 5, 8).requires_grad_()
    out = layer(x, x, x, lens)
    learned = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [out, *torch.autograd.grad(out.square().sum(), learned)]


@pytest.mark.parametrize("how", ["hooks", "Int8Linear", "Packed4bit", "brought", "embedding", "pre-hook"])
def test_grouped_layers(how):
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
    outcomes, events = [], []
    for ours in (False, True):
        found, seen = [], []
        for layer in grouped(ours):
            for name, child in list(layer.named_children()):
                if how == "hooks":
                    child.register_forward_hook(lambda module, args, out, seen=seen: seen.extend((*args, out)))
                elif how == "brought":
                    whole = nn.Parameter(child.weight.detach(), requires_grad=False)
                    child.weight = nn.Parameter(whole.to("meta"), requires_grad=False)
                    child.register_forward_pre_hook(lambda m, args, whole=whole: setattr(m, "weight", whole))
                elif how == "pre-hook" and name in ("W_q", "W_qkv"):
                    child.register_forward_pre_hook(lambda m, args: (torch.cat((args[0], args[0]), -1),))
                elif how in ("Int8Linear", "Packed4bit"):
                    setattr(layer, name, {"Int8Linear": Int8Linear, "Packed4bit": Packed4bit}[how](child))
            lens = torch.tensor([3, 5])
            x = wave(2, 5, 8)
            if how in ("embedding", "pre-hook") and not hasattr(layer, "W_q"):
                continue  # the original reads the features of X itself
            if how == "embedding":  # of weights as long as sentences: the original reads a third axis of queries
                layer.W_q = nn.Sequential(
                    nn.Flatten(0), nn.Embedding.from_pretrained(wave(4, 8)), nn.Unflatten(0, (2, 5))
                )
                found += [layer(torch.tensor([[0, 3, 1, 2, 2], [1, 1, 0, 3, 0]])[..., None], x, x, lens)]
            elif how == "pre-hook":
                found += [layer(x[..., :4], x, x, lens)]
            else:
                found += of_grouped(layer, lens)
        outcomes.append(found)
        events.append(seen)
    for a, b in zip(outcomes[1] + events[1], outcomes[0] + events[0]):
        torch.testing.assert_close(a + 0, b)
    assert len(events[0]) == len(events[1]) and (events[0] or how != "hooks")


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "_rope"])
def test_functions_that_grouped_layers_look_up(name, lens, monkeypatch):
    """torch's attention, as programs with a faster kernel replace it, and the method that rotates."""
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
    attention, lens = nn.functional.scaled_dot_product_attention, LENS[lens]

    def notebook(d2l):
        seen, found = [], []

        def own(q, k, v, **options):
            seen.append({name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in options.items()})
            return attention(q.square(), k, v, **options)

        torch.manual_seed(3)
        for layer in (d2l.GQAAttention(8, 4, 2, rope=True), d2l.GPT.CausalAttention(8, 2, rope=True)):
            if name != "_rope":
                monkeypatch.setattr(nn.functional, name, own)
            else:
                layer._rope = lambda x: x.flip(2)
            found += of_grouped(layer, lens)
            monkeypatch.undo()
        outcomes.append(seen)
        return found

    outcomes = []
    equal_under_patch(third_generation, notebook)
    assert outcomes[0] == outcomes[1] and bool(outcomes[0]) == (name != "_rope")


def test_a_cache_refuses_a_rotation_of_ones_own():
    layer, x = mt.CausalAttention(8, 2, rope=True).eval(), torch.ones(1, 1, 8)
    layer._rope = lambda x: x
    with torch.no_grad(), pytest.raises(ValueError, match="own _rope"):
        layer(x, cache=layer.new_cache(1, 4))


def outputs_in_steps(layer, x, steps, counts):
    """Of the steps that count, of a call with a cache after another."""
    cache, parts = layer.eval().new_cache(len(x), x.shape[1]), x.split(steps, 1)
    with torch.no_grad():
        for part in parts:
            lens = None if counts is None else torch.tensor(counts).clamp(max=part.shape[1])
            out = layer(*(part,) * (1 if hasattr(layer, "W_qkv") else 3), cache=cache, valid_lens=lens)
            yield from out if lens is None else (one[:n] for one, n in zip(out, lens))


@pytest.mark.parametrize("steps", [[5], [1, 3, 1], [2, 1, 1, 1]])
@pytest.mark.parametrize("counts", [None, [2, 1]])
def test_a_function_of_ones_own_is_called_with_a_cache_too(steps, counts, monkeypatch):
    """It is told what each step sees: torch's own function then gives what the core gives without it."""
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention(enable_gqa)")
    attention, called = nn.functional.scaled_dot_product_attention, []
    for layer in (*grouped(True), mt.GQAAttention(8, 4, 2, rope=True)):
        expected = torch.cat([*outputs_in_steps(layer, wave(2, 5, 8), steps, counts)])
        with monkeypatch.context() as patched:
            patched.setattr(
                nn.functional, attention.__name__, lambda *a, **named: called.append(a) or attention(*a, **named)
            )
            found = torch.cat([*outputs_in_steps(layer, wave(2, 5, 8), steps, counts)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # float64
    assert len(called) == 3 * len(steps)
