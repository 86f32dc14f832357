"""check: right implementations are right, and each known mistake, and likely pairs of them, are named."""

import time

import pytest

from mha_c import teach
from students import ADDITIVE, FUTURE, HEADS, MASKS, POSITIONS, SCALES, SECONDS, STYLES


def makes(make, *mistakes):
    try:
        return make(*mistakes)
    except KeyError:
        return None


EVERY = [(kind, make) for kind, makers in STYLES.items() for make in makers]
IDS = {
    "masked_softmax": MASKS,
    "dot_product": MASKS + SCALES,
    "additive": [*ADDITIVE, "no_mask"],
    "multi_head": [name for name in HEADS if name != "mask_after_softmax"],
    "transpose_qkv": ["heads_without_transpose", "heads_interleaved", "heads_joined_wrong"],
    "transpose_output": ["heads_joined_wrong", "heads_interleaved"],
    "positional_encoding": POSITIONS,
    "causal": FUTURE,
}
WRONG = [(kind, id, make) for kind, ids in IDS.items() for id in ids for make in STYLES[kind] if makes(make, id)]


def label(value):
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("kind", "make"), EVERY, ids=label)
def test_a_right_one_is_right(kind, make):
    answer = teach.check(make(), kind)
    assert answer.ok and answer.mistakes == [], answer
    assert teach.laws(make(), kind).ok


@pytest.mark.by_day(("kind", "id"), "make", together=1)
@pytest.mark.parametrize(("kind", "id", "make"), WRONG, ids=label)
def test_a_mistake_is_named(kind, id, make):
    started = time.process_time()
    answer = teach.check(make(id), kind)
    assert answer.mistakes == [id], answer
    assert not answer.ok and time.process_time() - started < SECONDS


# The pairs that are met most: the mask and the scale; two slips in one mask; heads and projections.
PAIRS = [
    (kind, *pair.split(" + "))
    for kind, pairs in {
        "dot_product": """no_scale + no_mask, no_scale + softmax_axis, scale_d + no_mask, no_scale + mask_zero,
            no_scale + mask_inverted, no_scale + mask_after_softmax, scale_inverted + mask_off_by_one,
            scale_d + lens_tiled, no_scale + swapped_keys_values, softmax_axis + no_mask""",
        "masked_softmax": """softmax_axis + mask_zero, mask_inverted + lens_tiled, mask_off_by_one + mask_zero,
            softmax_axis + no_mask""",
        "additive": """no_tanh + no_mask, scaled + no_tanh, product_for_sum + no_tanh, no_w_v + swapped_projections""",
        "multi_head": """no_output_projection + no_scale, heads_without_transpose + no_output_projection,
            heads_without_transpose + no_scale, heads_without_transpose + scale_num_hiddens, lens_tiled + no_scale,
            swapped_projections + no_mask""",
        "positional_encoding": "sin_cos_swapped + wrong_exponent, position_off_by_one + wrong_exponent",
        "causal": "no_scale + sees_future, mask_off_by_one + no_scale, mask_zero + scale_d",
    }.items()
    for pair in " ".join(pairs.split()).split(", ")
]


TWICE_WRONG = [
    (kind, one, two, make)
    for kind, one, two in PAIRS
    # the encoding with a loop is two lines of the book
    for make in (STYLES[kind][:1] if kind == "positional_encoding" else STYLES[kind])
    if makes(make, one, two)
]


def test_each_pair_has_a_student():
    assert {each[:3] for each in TWICE_WRONG} == {*PAIRS}
    assert {each[:2] for each in WRONG} == {(kind, id) for kind, ids in IDS.items() for id in ids}


@pytest.mark.by_day(("kind", "one", "two"), "make", together=1)
@pytest.mark.parametrize(("kind", "one", "two", "make"), TWICE_WRONG, ids=label)
def test_two_mistakes_are_named(kind, one, two, make):
    started = time.process_time()
    answer = teach.check(make(one, two), kind)
    assert sorted(answer.mistakes) == sorted([one, two]), answer
    assert time.process_time() - started < SECONDS
