"""What tests of a notebook's lines have in common: the same lines on d2l's own classes and under patch()."""

import contextlib
import functools
import math

import torch

import book_models
import mha_c.d2l
import needs
import third_generation

LENS = [3, 2]
GENERATIONS = [*needs.real_d2l.VERSIONS, "third"]


def of_a_generation(request):
    """For a fixture whose params are GENERATIONS: the real packages of two, and the stand-in of the third."""
    module = third_generation if request.param == "third" else needs.d2l(request.param)
    yield module
    mha_c.d2l.unpatch()


def multi_head(d2l, hiddens=8, heads=2, dropout=0.0, kind="MultiHeadAttention", **options):
    sizes = (hiddens,) * 3 if book_models.is_eager(d2l) else ()
    return getattr(d2l, kind)(*sizes, hiddens, heads, dropout, **options)


def additive(d2l, hiddens=8, dropout=0.0):
    return d2l.AdditiveAttention(*((8, 8) if book_models.is_eager(d2l) else ()), hiddens, dropout)


def wave(*shape):
    return torch.linspace(-1, 1, math.prod(shape)).sin().reshape(shape)


def same_under_patch(notebook):
    """A test whose lines, a notebook's, give the same tensors with d2l's classes and with ours."""

    @functools.wraps(notebook)
    def test(d2l, **others):
        equal_under_patch(d2l, lambda d2l: notebook(d2l, **others))

    return test


def equal_under_patch(d2l, notebook):
    """`notebook(d2l)` gives the same tensors with d2l's classes and with ours."""
    outcomes = []
    for patched in (lambda _: contextlib.nullcontext(), mha_c.d2l.patch):  # which begins where it is called
        with patched(d2l):
            assert d2l.DotProductAttention.__mro__[1].__module__.startswith("mha_c") == (patched is mha_c.d2l.patch)
            torch.manual_seed(0)
            outcomes.append(notebook(d2l))
    theirs, ours = outcomes
    assert len(theirs) == len(ours)
    for found, expected in zip(ours, theirs):
        torch.testing.assert_close(found + 0, expected)
