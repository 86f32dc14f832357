"""`convert` on classes that readers write, of each kind in which a comparison of numbers once believed too much: the
reader's own numbers, shapes, effects and errors, before and after changes of anything.  And classes that are drawn."""

import random

import pytest
import torch

import needs
import reader_cases
import reader_cases_added  # noqa: F401  its cases join the others
import reader_cases_hidden  # noqa: F401
import reader_cases_more
import reader_cases_of_numbers  # noqa: F401
from reader_cases import CASES, REGIMES, Base
from reader_cases_more import EFFECTS, SETTINGS, Effect
from reader_scripts import converted, played, seen_of, way

pytestmark = pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")


@pytest.mark.parametrize("name", CASES)
def test_the_readers_own(name):
    _kind, make, script = CASES[name]
    played(make, script)


def test_what_is_one_layer_is_the_cores():
    """The cases would hold, too, if nothing were ever converted."""
    for make, shapes in (
        (Base, [(2, 9, 32), (2, 40, 32), (3, 7, 32)]), (reader_cases.Dot, [(2, 9, 32)] * 3),
        (lambda: reader_cases.Banded(lambda i, j: (j > i) | (i - j >= 4)), [(2, 9, 32)]),
        (lambda: reader_cases.Filled(reader_cases.FILLS["fill_1e9"], True), [(2, 9, 32)]),
        (lambda: Effect(), []),
    ):  # fmt: skip
        module = converted(make().eval())
        for shape in shapes:
            x = torch.randn(shape)
            needed = 3 if isinstance(module, (reader_cases.Dot, reader_cases.Banded)) else 1
            module(*[x] * needed)
        for shape in shapes:  # also sizes that were called once
            x = torch.randn(shape)
            assert way(module, *[x] * needed) == "core", (type(module), shape)


@pytest.mark.parametrize("seed", range(40 if needs.NIGHTLY else 12))
def test_drawn_classes(seed):
    """A regime of lengths, an effect, a setting that is turned: each with some probability."""
    draw = random.Random(seed)
    regime = REGIMES[draw.choice([*REGIMES])] if draw.random() < 0.5 else None
    effect = EFFECTS[draw.choice([*EFFECTS])] if draw.random() < 0.5 else EFFECTS["nothing"]
    value, reads, turn = SETTINGS[draw.choice([name for name in SETTINGS if name not in ("cell", "iterator")])]
    gives = draw.random() < 0.2

    def scores(self, q, k):
        found = Base.scores(self, q, k)
        found = found if regime is None else regime(found, q, k)
        return reader_cases.hide_future(found) if reads(self) else found

    def make():
        reader_cases_more.reset_all()
        kind = type(f"Drawn{seed}", (Effect,), {"scores": scores, "effect": effect, "gives": gives})
        return reader_cases_more.with_setting(kind(), value)

    def script(m, see):
        sizes = [draw_sizes.choice((3, 9, 20, 160)) for _ in range(4)]
        for train in (False, True):
            m.train(train)
            for n in sizes:
                see.thrice(m, torch.randn(2, n, 32))
            reader_cases_more.look(m, see)
        turn(m)
        for n in sizes[:2]:
            see.thrice(m.eval(), torch.randn(2, n, 32))
        reader_cases_more.look(m, see)
        reader_cases_more.reset_all()

    def draws_anew(m, see):
        global draw_sizes
        draw_sizes = random.Random(seed + 1000)
        script(m, see)

    played(make, draws_anew)


draw_sizes = random.Random(0)
assert seen_of
