"""Puzzles: the same seed is the same, each can be solved, levels are what they say, teachers add their own."""

import numpy as np
import pytest

import needs
from mha_c import teach
from mha_c.teach.asking import mistakes
from mha_c.teach.asking.probes import probes

# Two mistakes in a layer with causal heads are looked for as long as in all others together: by night.
LEVELS = [(level, kind) for level in (1, 2, 3) for kind in mistakes.KINDS
          if needs.NIGHTLY or (level, kind) != (3, "causal_multi_head")]  # fmt: skip


@pytest.mark.parametrize(("level", "kind"), LEVELS)
def test_a_puzzle_is_wrong_until_it_is_mended(kind, level):
    for seed in range(1 if not needs.NIGHTLY else 4 if level < 3 else 2):
        puzzle = teach.puzzle(seed, kind, level)
        assert puzzle.source == teach.puzzle(seed, kind, level).source
        answer = puzzle.check(puzzle.source)
        assert answer.mistakes == puzzle.mistakes, (puzzle, answer)
        assert puzzle.check(getattr(teach.book, kind)).ok


def test_levels():
    one, two, three = ({tuple(teach.puzzle(seed, "multi_head", level).mistakes) for seed in range(count)}
                       for level, count in ((1, 20), (2, 20), (3, 4)))  # fmt: skip
    heads = ("heads_without_transpose", "heads_interleaved", "heads_joined_wrong", "scale_num_hiddens")
    assert not any(name in ids for ids in one for name in heads)
    assert any(name in ids for ids in two for name in heads)
    assert all(len(ids) == 1 for ids in one | two) and all(len(ids) == 2 for ids in three)
    assert len(one) > 5 and len(two) > 3 and len(three) > 2


def test_a_mended_line_solves_it():
    puzzle = next(each for each in map(teach.puzzle, range(100)) if each.mistakes == ["scale_d"])
    assert "scores = queries @ keys.swapaxes(1, 2) / d" in puzzle.source
    assert puzzle.check(puzzle.source.replace("/ d\n", "/ np.sqrt(d)\n")).ok
    assert "Puzzle" in repr(puzzle) and "scale_d" not in repr(puzzle)
    assert 0 <= teach.puzzle().seed < 10000


@pytest.mark.parametrize(
    ("arguments", "says"), [(("1", "dot"), "kind must be one of"), ((1, "additive", 4), "1, 2 or 3")]
)
def test_no_such_puzzle(arguments, says):
    with pytest.raises(ValueError, match=says):
        teach.puzzle(*arguments)
    with pytest.raises(ValueError, match="mended must define a function dot_product"):
        teach.puzzle(1).check("x = 1")


def test_a_teacher_adds_a_mistake():
    def mine(queries, keys, values, valid_lens=None):
        scores = queries @ keys.swapaxes(1, 2) / queries.shape[-1] ** 0.25
        return teach.book.masked_softmax(scores, valid_lens) @ values

    assert teach.check(mine, "dot_product").mistakes == ["one_line"]
    teach.add_mistake("fourth_root", "dot_product", "the fourth root of d divides", "np.sqrt(d)", "d**0.25")
    answer = teach.check(mine, "dot_product")
    assert answer.mistakes == ["fourth_root"] and "in one thing: the fourth root of d divides." in str(answer)
    with pytest.raises(ValueError, match="one of the book's functions"):
        teach.add_mistake("x", "dot", "", "d", "e")
    with pytest.raises(ValueError, match=r"line must occur once in dot_product; .* occurs 2 times"):
        teach.add_mistake("x", "dot_product", "", "valid_lens", "e")


def test_each_mistake_of_the_table_differs_from_the_book_and_from_all_others():
    for kind, form in mistakes.KINDS.items():
        asked, seen = probes(kind), []
        for each in [(), *((one,) for one in mistakes.known(form))]:
            made = mistakes.function(form, each)
            seen.append([_output(made, inputs) for inputs in asked])
        for i, one in enumerate(seen):
            for j in range(i):
                assert not all(map(_same, one, seen[j])), (kind, i, j)


def _output(made, inputs):
    try:
        with np.errstate(all="ignore"):
            return made(**inputs)
    except (ValueError, IndexError):
        return None


def _same(one, two):
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and np.allclose(one, two, 1e-3, 1e-3, equal_nan=True)
