"""check on a zoo: right implementations are right, each mistake is named first, and no argument is left untried.

The zoo is written in forms that students use now: tests/support/zoo_*.py.
"""

import functools
import inspect
import time

import pytest

import needs
import zoo_functions
import zoo_right
import zoo_slips
import zoo_trial
from mha_c import teach
from students import SECONDS

SAME = {"mask_small_10": "mask_small", "bias_unused": "bias_lost"}
SAME |= {f"softmax_axis_{axis}": "softmax_axis" for axis in ("heads", "all", "queries", "batch")}
SAME |= {f"heads_without_transpose_{x}": "heads_without_transpose" for x in "qkv"}
SAME |= {"heads_interleaved_k": "heads_interleaved"}
try:
    import zoo_layers
    import zoo_right_torch
except ImportError:  # without torch: the forms in NumPy alone
    MAKERS, RIGHT = zoo_functions.FUNCTIONS + zoo_trial.FUNCTIONS + zoo_slips.FUNCTIONS, zoo_right.RIGHT
else:
    MAKERS = zoo_functions.FUNCTIONS + zoo_layers.FUNCTIONS + zoo_trial.FUNCTIONS + zoo_slips.FUNCTIONS
    RIGHT = zoo_right.RIGHT + zoo_right_torch.RIGHT
WRONG = [(kind, make, id, options) for kind, make, options in MAKERS for id in make.mistakes]


def label(value):
    return getattr(value, "__name__", type(value).__name__)


def answered(mine, kind, **options):
    started = time.process_time()
    answer = teach.check(mine, kind, **options)
    assert time.process_time() - started < SECONDS, answer
    return answer


@pytest.mark.parametrize(("kind", "mine"), RIGHT, ids=label)
def test_a_right_one_is_right(kind, mine):
    answer = answered(mine, kind)
    assert answer.ok and answer.mistakes == [], answer


@pytest.mark.parametrize(("kind", "make"), [each[:2] for each in MAKERS], ids=label)
def test_a_style_without_its_mistakes_is_right(kind, make):
    answer = answered(make(), kind)
    assert answer.ok and answer.mistakes == [], answer
    assert teach.laws(make(), kind).ok, teach.laws(make(), kind)


@pytest.mark.by_day("make", "id", together=1)
@pytest.mark.parametrize(("kind", "make", "id", "options"), WRONG, ids=label)
def test_a_mistake_is_named_first(kind, make, id, options):
    answer = answered(make(id), kind, **options)
    assert not answer.ok and answer.mistakes[0] == SAME.get(id, id), answer


def test_it_is_a_zoo():
    needs.module("torch")
    assert len(RIGHT) + len(MAKERS) >= 120 and len(WRONG) >= 200


# ---- what True means -------------------------------------------------------------------------------------------------

TAKES_MASKS = [(kind, make) for kind, make, _ in MAKERS if "mask_ignored" in make.mistakes]


@pytest.mark.parametrize(("kind", "make"), TAKES_MASKS if needs.NIGHTLY else TAKES_MASKS[::2], ids=label)
def test_the_other_meaning_is_a_mistake(kind, make):
    means = teach.check(make(), kind).mask
    assert teach.check(make(), kind, mask=means).ok
    for other in {"attend", "hide", "add"} - {means}:
        answer = teach.check(make(), kind, mask=other)
        assert not answer.ok, answer
        if "add" not in (means, other):
            assert answer.mistakes == ["mask_inverted"], answer


# ---- ok only if all that may hide keys was tried -------------------------------------------------------------------


def with_one_more(mine, name, default):
    """The same, with one more argument that does nothing."""

    @functools.wraps(mine)
    def more(*arguments, **named):
        named.pop(name, None)
        return mine(*arguments, **named)

    given = list(inspect.signature(mine).parameters.values())
    more.__signature__ = inspect.Signature(
        [*given, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)]
    )
    return more


FUNCTIONS = [(kind, mine) for kind, mine in RIGHT if inspect.isfunction(mine)]
FUNCTIONS += [(kind, make()) for kind, make, _ in MAKERS if inspect.isfunction(make())]
NOTHING_TO_HIDE = ("rope", "positional_encoding")
HIDDEN_ALREADY = ("causal", "window", "causal_multi_head")
HIDING = {"attention_mask": None, "valid_lens": None, "is_causal": False, "something": None, "key_padding_mask": None}


@pytest.mark.parametrize(("at", "kind", "mine"), [(i, *each) for i, each in enumerate(FUNCTIONS)], ids=label)
def test_an_argument_that_does_nothing_is_not_passed_over(at, kind, mine):
    """Two of the names for each function, by day one, in turn."""
    for name, default in [[*HIDING.items()][(at + i) % len(HIDING)] for i in ((0, 2) if needs.NIGHTLY else (0,))]:
        if name in inspect.signature(mine).parameters:
            continue
        if kind in NOTHING_TO_HIDE or (name == "is_causal" and kind in HIDDEN_ALREADY):
            continue
        answer = teach.check(with_one_more(mine, name, default), kind)
        assert not answer.ok, (name, answer)


def test_what_hides_nothing_is_no_matter():
    for name, default in {"dropout": 0.0, "training": False, "need_weights": True, "scale": None}.items():
        assert teach.check(with_one_more(zoo_right.sdpa, name, default), "dot_product").ok
