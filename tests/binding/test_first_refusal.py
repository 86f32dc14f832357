"""Calls of `_core` with several bad arguments: the first that is taken is refused, and the others are not looked at."""

import itertools
from functools import partial

import numpy as np
import pytest

from binding_calls import DV, PROJECTIONS, B, D, K, Q, assert_leaks_nothing, numbers
from mha_c import _core

QKV = numbers(B, Q, D), numbers(B, K, D), numbers(B, K, DV)
OPTIONS = None, 1, 2, 0.5, 0.1, 3, "zero"  # causal, windows, scale, dropout, seed, empty_rows
ATTENTION = *QKV, numbers(D), np.array([3, 2]), None, numbers(Q, K), *OPTIONS
TERMS = numbers(1, 3), 4.0, numbers(1)
X = numbers(B, Q, 5), numbers(B, K, 5), numbers(B, K, 3)
LAYER = *X, np.array([3, 2]), PROJECTIONS, None, 2, "zero", 0.1, 3
WEIGHTS = numbers(8, 5), numbers(8, 5), numbers(6, 3), numbers(7, 6)
OUT, _, _, STATS = _core.attention_forward(*ATTENTION, False, False, True, (0, 0, 0, 0), TERMS)
LAYER_OUT, RECORD = _core.layer_forward(*X, np.array([3, 2]), (*WEIGHTS, *[None] * 5), *LAYER[5:], True)


def room():
    return np.zeros((B, 9, 8), "f4"), np.zeros((B, 9, 6), "f4")


GOOD = {
    "attention_forward": (*ATTENTION, True, True, True, (0, 0, 0, 0), TERMS),
    "attention_backward": (OUT, OUT, STATS, *ATTENTION, True, (0, 0, 0, 0), TERMS),
    "attention_weights": (*(x[:, None] for x in QKV[:2]), None, None, *(x[:, None] for x in STATS), "zero"),
    "copy_operands": (numbers(B, 2, Q, D), numbers(B, 1, K, D)),
    "explain_attention": (*ATTENTION, True, True, TERMS),
    "masked_softmax": (numbers(B, Q, K), np.array([3, 2]), "zero"),
    "dropout_factors": (numbers(B, 2, Q, K), 0.5, 3),
    "layer_forward": (*LAYER, True),
    "layer_step": (X[1], *LAYER[1:], *room(), np.array([1, 3]), K, 9, (numbers(K, 2), numbers(K, 2))),
    "layer_backward": (LAYER_OUT, RECORD, *LAYER[:4], (*WEIGHTS, *[None] * 5), *LAYER[5:], (True,) * 12, True),
    "explain_layer": (*LAYER, True),
    "pack_linear": (numbers(8, 5),),
    "linear": (numbers(B, 5), PROJECTIONS[0]),
    "linear_backward": (numbers(B, 8), numbers(B, 5), numbers(8, 5), True),
    "explain_linear": (numbers(B, 5), PROJECTIONS[0]),
}


# The places of arguments in the order in which they are taken: numbers, whose methods may run, before arrays.
NUMBERS, ARRAYS = tuple(range(7, 14)), (0, 1, 2, 3, 5, 6, 4)
LAYER_ORDER = (6, 7, 8, 9, 0, 1, 2, 5, 3, 4)
ORDER = {
    "attention_forward": (14, 15, 16, *NUMBERS[:4], 18, *NUMBERS[4:], 17, *ARRAYS),
    "attention_backward": (
        17,
        *(3 + i for i in NUMBERS[:4]),
        19,
        *(3 + i for i in NUMBERS[4:]),
        18,
        *(3 + i for i in ARRAYS),
        2,
        0,
        1,
    ),
    "attention_weights": (6, 0, 1, 2, 3, 4, 5),
    "explain_attention": (14, 15, *NUMBERS[:4], 16, *NUMBERS[4:], *ARRAYS),
    "layer_forward": (10, *LAYER_ORDER),
    "layer_step": (14, *LAYER_ORDER, 15, 12, 13, 10, 11),
    "layer_backward": (12, 13, *(2 + i for i in LAYER_ORDER), 1, 0),
    "explain_layer": (10, *LAYER_ORDER),
    "linear_backward": (3, 1, 0, 2),
}


class Bad:
    """No argument of any kind; as a flag it is an error of its own."""

    def __bool__(self):
        raise ZeroDivisionError


BAD = Bad(), (1, Bad(), "", Bad()), np.zeros((7, 1, 1, 1, 7)), np.array(2.0), -5, 10**400


def refusal(name, args):
    """What is raised, or None."""
    try:
        getattr(_core, name)(*args)
    except Exception as error:
        return type(error), str(error)
    return None


def changed(good, *places, bad=BAD[0]):
    return tuple(bad if i in places else value for i, value in enumerate(good))


@pytest.mark.parametrize("name", GOOD)
def test_the_first_bad_argument_is_refused(name):
    """However many follow, in the words in which it is refused alone."""
    good = GOOD[name]
    assert refusal(name, good) is None
    order = ORDER.get(name, range(len(good)))
    assert sorted(order) == list(range(len(good)))
    for n, place in enumerate(order):
        alone = refusal(name, changed(good, place))
        assert alone is not None and not issubclass(alone[0], SystemError)
        assert refusal(name, changed(good, *order[n:])) == alone


@pytest.mark.parametrize("name", GOOD)
def test_of_two_bad_arguments_one_is_refused(name):
    """Other values than those of a kind that no argument has: ranks, sizes and numbers, which are looked at later."""
    good, places = GOOD[name], range(len(GOOD[name]))
    for (i, j), (b, c) in itertools.product(itertools.combinations(places, 2), itertools.product(BAD, repeat=2)):
        first, second = changed(good, i, bad=b), changed(good, j, bad=c)
        found, alone = refusal(name, changed(first, j, bad=c)), (refusal(name, first), refusal(name, second))
        assert found is None or not issubclass(found[0], SystemError)
        assert (found is None) <= (alone == (None, None))


def test_no_references_are_lost():
    calls = []
    for name, good in GOOD.items():
        order = ORDER.get(name, range(len(good)))
        calls += [partial(getattr(_core, name), *changed(good, *order[n : n + 3])) for n in range(len(order))]
    assert_leaks_nothing(calls)
