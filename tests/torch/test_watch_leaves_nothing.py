"""What watching leaves and costs: nothing behind, no model alive, no weights; threads, compilers and transforms."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import needs
from mha_c import torch as mt
from small_gpt import formula, gpt
from watching import CLOSE, has_function, is_young, step


def places():
    """All that a watch could put something in the place of: names of torch's modules and ours, and of our classes."""
    kinds = {
        kind for layer in (mt.MultiHeadAttention, mt.GQAAttention, mt.nn.MultiheadAttention) for kind in layer.mro()
    }
    owners = torch, torch.Tensor, torch.overrides, F, mt, mt.functional, *sorted(kinds, key=repr)
    return [{name: id(x) for name, x in vars(owner).items()} for owner in owners], torch._C._len_torch_function_stack()


@has_function
def test_errors_inside_leave_nothing_behind():
    before, q = places(), torch.randn(1, 1, 3, 4)
    with pytest.raises(ZeroDivisionError), mt.watch() as seen:
        F.scaled_dot_product_attention(q, q, q)
        raise ZeroDivisionError
    assert places() == before and len(seen.calls) == 1
    layer = mt.MultiHeadAttention(16, 2, 0.0)
    with mt.watch() as seen, pytest.raises(TypeError):
        layer(q, q)
    F.scaled_dot_product_attention(q, q, q)
    assert places() == before and not seen.calls


@has_function
def test_modules_made_inside_have_their_names():
    model, other, x = gpt(), gpt(), torch.randint(11, (1, 4))
    with mt.watch(model) as seen:
        for block in other[1]:
            model[1].append(block)
            model(x)
        model[1][3](torch.randn(1, 4, 32))
        other(x)
    assert [call.name for call in seen.calls] == [f"1.{i}" for i in (0, 1, 2, 0, 1, 2, 3, 3, 2, 3)]


@has_function
def test_nested_watches_see_what_is_theirs():
    model, x = gpt(), torch.randint(11, (1, 4))
    with mt.watch() as outer:
        model(x)
        with mt.watch(model[1][1]) as inner:
            model(x)
        model(x)
    assert [len(seen.calls) for seen in (outer, inner)] == [6, 1]
    assert inner.calls[0].name == "" and outer.calls[3].name == "1.1"
    again = mt.watch()
    with again as first:
        model(x)
        with pytest.raises(RuntimeError, match="active already"), again:
            pass
    with again as second:
        model(x)
    assert len(first.calls) == len(second.calls) == 2 and first is not second


@has_function
def test_other_threads_are_not_seen():
    needs.of_torch("torch.nn.functional.scaled_dot_product_attention")
    q, found = torch.randn(1, 1, 3, 4), []
    layer = mt.DotProductAttention(0.0)

    def other():
        found.append(F.scaled_dot_product_attention(q, q, q))
        found.append(layer(q[0], q[0], q[0]))

    with mt.watch() as seen:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 2 and not seen.calls


@has_function
def test_what_is_changed_afterwards_does_not_change_what_was_seen():
    q, k, mask = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.rand(3, 3)
    with mt.watch() as seen:
        F.scaled_dot_product_attention(q, k, k)
        F.scaled_dot_product_attention(q, k, k, mask)
        with torch.inference_mode():
            own = mask + 0
            F.scaled_dot_product_attention(q, k, k, own)
            own.zero_()
    weights = seen.calls[2].weights
    q.zero_()
    k.zero_()
    torch.testing.assert_close(seen.calls[1].weights, weights, **CLOSE)
    assert not torch.allclose(seen.calls[0].weights, torch.full((), 1 / 3))
    mask.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        seen.calls[1].received()


@is_young
def test_checkpointed_parts_go_back_outside():
    needs.of_torch("torch._C._autograd._top_saved_tensors_default_hooks")
    from torch.utils.checkpoint import checkpoint

    model, x = gpt(), torch.randn(2, 5, 32)
    expected = step(model[1], x)
    for reentrant in (False, True):
        model.zero_grad()
        x.requires_grad_()
        with mt.watch() as seen:
            out = checkpoint(model[1], x, use_reentrant=reentrant)
        out.square().sum().backward()
        for a, p in zip(expected[1:], model[1].parameters()):
            torch.testing.assert_close(a, p.grad, atol=1e-4, rtol=1e-4)
        assert len(seen.calls) == 2


@has_function
def test_transforms_and_compilers_are_left_alone():
    q = torch.randn(3, 1, 2, 5, 4)
    with mt.watch() as seen:
        found = torch.func.vmap(mt.DotProductAttention(0.0))(q[:, 0], q[:, 0], q[:, 0])
        gradient = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(q[0])
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q)[:, 0], **CLOSE)
    assert gradient.shape == q[0].shape and not seen.calls


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by torch's compiler
@is_young
def test_a_compiled_model_computes_what_it_computed():
    """torch.compile cannot follow a mode of ours: it leaves these frames to Python."""
    model, x = gpt(), torch.randint(11, (1, 4))
    compiled = torch.compile(model, backend="eager")
    with mt.watch():
        found = compiled(x)
    torch.testing.assert_close(found, model(x), **CLOSE)
    needs.fresh_compiler()


@has_function
def test_no_model_is_kept_alive():
    model = gpt()
    gone = weakref.ref(model)
    with mt.watch(model) as seen:
        model(torch.randint(11, (1, 4)))
    del model
    gc.collect()
    assert gone() is None and seen.calls[0].name == "1.0"


@is_young
def test_seen_reads_aloud(tmp_path):
    model, x = gpt(key_heads=1), torch.randint(11, (1, 4))
    with mt.watch(model) as seen:
        model(x)
    assert repr(seen).splitlines() == [
        "2 calls of attention",
        "   0 <1.0: scaled_dot_product_attention, batch 1, 4 heads (1 key heads), 4 queries x 4 keys, causal>",
        "   1 <1.1: scaled_dot_product_attention, batch 1, 4 heads (1 key heads), 4 queries x 4 keys, causal>",
    ]
    assert list(seen) == seen.calls and seen[1] is seen.calls[1] and len(seen) == 2
    for page in (seen.view(tokens="a b c d"), seen.view(1), seen.view(seen[0], tokens="a b c d"), seen[0].view()):
        assert "4 heads" in page.text
    with pytest.raises(ValueError, match="below 2"):
        seen.view(2)
    with pytest.raises(ValueError, match="no call of attention was seen"), mt.watch() as nothing:
        nothing.view()
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        mt.watch("model")
    with pytest.raises(ValueError, match="compute must be 'core' or 'torch', got 'gpu'"):
        mt.watch(compute="gpu")


@has_function
def test_half_precision_and_other_devices_are_noted():
    q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    with mt.watch() as seen:
        out = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q))
    torch.testing.assert_close(seen.calls[0].weights, formula(q, q), **CLOSE)
    with mt.watch() as seen:
        F.scaled_dot_product_attention(*torch.empty(3, 1, 2, 5, 8, device="meta"))
    assert not seen.calls


def numbers_alive():
    """How many numbers the tensors have that Python knows."""
    gc.collect()  # of other tests
    return sum(x.numel() for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter))


@has_function
def test_nothing_of_q_times_k():
    """3,000 tokens of 2 heads: their weights would be 72 MB; what is noted is 2 x 3000 x 2 x 8 numbers of 4 bytes."""
    q = torch.randn(1, 2, 3000, 8)
    before = numbers_alive()
    with mt.watch() as seen:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert numbers_alive() - before == 2 * q.numel()
    (call,) = seen.calls
    np.testing.assert_allclose(call.received().sum().item(), 6000, rtol=1e-5)  # each row of 6000 sums to 1
