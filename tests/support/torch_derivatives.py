"""Derivatives of a function of tensors, or of a layer's inputs and parameters, against finite differences."""

import torch

from torch_modules import seeded


def check(function, *tensors):
    """First derivatives backwards and forwards, second derivatives: against finite differences."""
    call = seeded(function)
    # Along random directions: every entry of every matrix takes part.
    assert torch.autograd.gradcheck(call, tensors, atol=1e-5, rtol=1e-4, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, tensors, atol=1e-5, rtol=1e-4, fast_mode=True)


def with_parameters(layer, *lens):
    """The layer as a function of its inputs and its parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def call(*tensors):
        inputs, parameters = tensors[: -len(names)], tensors[-len(names) :]
        return torch.func.functional_call(layer, dict(zip(names, parameters)), (*inputs, *lens))

    return call
