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


def form_of(make):
    """Whether a style is a function, a layer or a class, and of which file."""
    mine = make()
    return make.made.__module__, type(mine).__name__ if inspect.isroutine(mine) or inspect.isclass(mine) else "layer"


@pytest.fixture(scope="session")
def answer_to():
    """The answer to a style without mistakes, asked once for several tests."""
    return functools.lru_cache(maxsize=None)(lambda kind, make: answered(make(), kind))


@pytest.mark.parametrize(("kind", "mine"), RIGHT, ids=label)
def test_a_right_one_is_right(kind, mine):
    answer = answered(mine, kind)
    assert answer.ok and answer.mistakes == [], answer


@pytest.mark.by_day(("kind", "form"), together=1)
@pytest.mark.parametrize(("kind", "make", "form"), [(*each[:2], form_of(each[1])) for each in MAKERS], ids=label)
def test_a_style_without_its_mistakes_is_right(kind, make, form, answer_to):
    answer = answer_to(kind, make)
    assert answer.ok and answer.mistakes == [], answer


@pytest.mark.by_day("kind", together=1)
@pytest.mark.parametrize(("kind", "make"), [each[:2] for each in MAKERS], ids=label)
def test_a_style_without_its_mistakes_breaks_no_law(kind, make):
    laws = teach.laws(make(), kind)
    assert laws.ok, laws


@pytest.mark.by_day("kind", "id", together=1)
@pytest.mark.parametrize(("kind", "make", "id", "options"), WRONG, ids=label)
def test_a_mistake_is_named_first(kind, make, id, options):
    answer = answered(make(id), kind, **options)
    assert not answer.ok and answer.mistakes[0] == SAME.get(id, id), answer


def test_it_is_a_zoo():
    needs.module("torch")
    assert len(RIGHT) + len(MAKERS) >= 120 and len(WRONG) >= 200


# ---- what True means -------------------------------------------------------------------------------------------------

TAKES_MASKS = [(kind, make) for kind, make, _ in MAKERS if "mask_ignored" in make.mistakes]


@pytest.mark.by_day("kind", "other", together=1)
@pytest.mark.parametrize("other", ["attend", "hide", "add"])
@pytest.mark.parametrize(("kind", "make"), TAKES_MASKS, ids=label)
def test_the_other_meaning_is_a_mistake(kind, make, other, answer_to):
    means = answer_to(kind, make).mask
    answer = teach.check(make(), kind, mask=other)
    if other == means:
        assert answer.ok, answer
    else:
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


def may_be_added(name, kind, mine):
    """Whether an argument of this name could hide keys of what does not have it."""
    if name in inspect.signature(mine).parameters or kind in NOTHING_TO_HIDE:
        return False
    return not (name == "is_causal" and kind in HIDDEN_ALREADY)


ADDED = [(kind, mine, name) for kind, mine in FUNCTIONS for name in HIDING if may_be_added(name, kind, mine)]


@pytest.mark.by_day("kind", "name", together=1)
@pytest.mark.parametrize(("kind", "mine", "name"), ADDED, ids=label)
def test_an_argument_that_does_nothing_is_not_passed_over(kind, mine, name):
    answer = teach.check(with_one_more(mine, name, HIDING[name]), kind)
    assert not answer.ok, answer


def test_what_hides_nothing_is_no_matter():
    for name, default in {"dropout": 0.0, "training": False, "need_weights": True, "scale": None}.items():
        assert teach.check(with_one_more(zoo_right.sdpa, name, default), "dot_product").ok
