"""Under patch(), who wants to see torch's operations sees them: modes, classes of tensors, functions put into torch."""

import pytest
import torch
from torch.nn import functional as F

import mha_c.d2l
import needs
from notebook import LENS, additive, multi_head, same_under_patch, wave
from seen_by_torch import Names, Operations, Tripled


@pytest.mark.parametrize("kind, wanted", [
    (Names, {"linear", "bmm", "softmax", "dropout"}),
    (Operations, {"aten.mm.default", "aten.bmm.default", "aten._softmax.default"}),
])  # fmt: skip
@same_under_patch
def test_modes_see_the_operations(d2l, kind, wanted):
    needs.of_torch("torch._C._len_torch_dispatch_stack")
    found, x = [], wave(2, 4, 8).requires_grad_()
    for module in (multi_head(d2l), additive(d2l), d2l.DotProductAttention(0.0)):
        found.append(module(x, x, x, torch.tensor(LENS)))  # the usual way first
        with kind() as mode:
            found.append(module(x, x, x, torch.tensor(LENS)))
        seen = wanted if hasattr(module, "W_q") else wanted - {"linear", "aten.mm.default"}
        assert seen <= set(mode.names)
        with Operations() as mode:
            found += torch.autograd.grad(found[-2].sum(), x)
        assert any("bmm" in name for name in mode.names)
    return found


def test_a_default_device_is_no_reason(d2l):
    needs.of_torch("torch.set_default_device")
    with mha_c.d2l.patch(d2l), torch.device("cpu"):
        module, x = multi_head(d2l), wave(2, 4, 8)
        out = module(x, x, x, None)
    assert type(out.grad_fn).__name__ == "LayerFunctionBackward"


@same_under_patch
def test_weights_and_inputs_with_operations_of_their_own(d2l):
    found, x = [], wave(2, 4, 8)
    for module in (multi_head(d2l), additive(d2l)):
        module(x, x, x, torch.tensor(LENS))
        module.requires_grad_(False)
        found.append(module(x, x, x, torch.tensor(LENS)))
        module.W_q.weight = torch.nn.Parameter(module.W_q.weight.as_subclass(Tripled), requires_grad=False)
        found += [module(x, x, x, torch.tensor(LENS)), getattr(module, "attention", module).attention_weights]
        assert (found[-2] - found[-3]).abs().max() > 1e-4
        found.append(module(x.as_subclass(Tripled), x, x, torch.tensor(LENS)))
    return found


@same_under_patch
def test_gradients_of_each_sample(d2l):
    needs.of_torch("torch.func")
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    module, x = multi_head(d2l), wave(3, 4, 8)
    module(x, x, x, None)
    call_for_per_sample_grads(module)(x, x, x, None).square().sum().backward()
    return [p.grad_sample for p in module.parameters()]


@pytest.mark.parametrize(
    "owner, name", [(F, "softmax"), (F, "dropout"), (F, "linear"), (torch, "bmm"), (torch, "tanh")]
)
@same_under_patch
def test_functions_of_torch_that_are_replaced(d2l, owner, name, monkeypatch):
    found, x, original = [], wave(2, 4, 8), getattr(owner, name)
    modules = multi_head(d2l), additive(d2l), d2l.DotProductAttention(0.0)
    for replaced in (False, True, False):
        with monkeypatch.context() as patch:
            if replaced:
                patch.setattr(owner, name, lambda *args, **named: 0.7 * original(*args, **named))
            found += [module(x, x, x, torch.tensor(LENS)) for module in modules]
    return found


@same_under_patch
def test_dropout_in_place_shows_what_is_left(d2l):
    found, x = [], wave(2, 4, 8)
    for module in (multi_head(d2l, dropout=0.5), additive(d2l, dropout=0.5), d2l.DotProductAttention(0.5)):
        inner = getattr(module, "attention", module)
        with torch.no_grad():
            module.eval()(x, x, x, None)
            inner.dropout.inplace = True
            torch.manual_seed(3)
            found += [module.train()(x, x, x, torch.tensor(LENS)), inner.attention_weights]
            assert (found[-1] == 0).sum() > (found[-1].numel() * 3 // 8)
            found += [module.eval()(x, x, x, torch.tensor(LENS)), inner.attention_weights]
    return found
