"""What mha_c.torch has of NumPy functions and classes says in its docstring what theirs say, of tensors."""

import inspect

import pytest

import mha_c
import mha_c.torch
from mha_c.torch import functional

TWINS = [
    "masked_softmax",
    "sequence_mask",
    "transpose_qkv",
    "transpose_output",
    "PositionalEncoding",
    "KernelAttention",
]


@pytest.mark.parametrize("name", TWINS)
def test_says_the_same_errors_as_the_numpy_one(name):
    ours, theirs = inspect.getdoc(getattr(mha_c.torch, name)), inspect.getdoc(getattr(mha_c, name))
    assert ours.partition("Raises\n")[2].partition("\n\n")[0] == theirs.partition("Raises\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize("name", TWINS)
def test_explains_each_parameter_once_and_no_other(name):
    ours = getattr(mha_c.torch, name)
    lines = ours.__doc__.partition("Parameters\n----------\n")[2].partition("\n\n")[0].splitlines()
    explained = [one for line in lines if not line.startswith(" ") for one in line.partition(" : ")[0].split(", ")]
    assert explained == list(inspect.signature(ours).parameters)


def test_speaks_of_tensors():
    assert "array" not in functional.rotary.__doc__
    assert "x : Tensor (B, [H,] T, D)\n" in functional.rotary.__doc__


def test_keeps_what_it_says_itself():
    assert "device, dtype : optional\n    Device and type of the result" in functional.alibi_slopes.__doc__
    assert "tensor([0.2500, 0.0625" in functional.alibi_slopes.__doc__
