"""`puzzle`: the book's function with a line changed, as source to read, run and mend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Optional

import numpy as np

from .._arguments import scalars
from .._arguments.calls import refuses_at_the_call
from .asking.answers import NEAR, Answer
from .asking.kinds import unknown_kind
from .asking.mistakes import KINDS, BookForm, Mistake, function, known, sources
from .asking.probes import Sizes, probes
from .checks.checking import check
from .words.sentences import said


class Puzzle:
    """The result of `puzzle`: a text to mend.

    Not meant to be constructed directly.

    Attributes
    ----------
    source : str
        Python that runs: the book's function, and one line, or two, that are not the book's.
    seed, kind, level : int, str, int
        What gives the same puzzle again.
    mistakes : list of str
        The solution.

    Examples
    --------
    >>> from mha_c import teach
    >>> puzzle = teach.puzzle(seed=4)
    >>> puzzle.kind, puzzle.level, len(puzzle.mistakes)
    ('dot_product', 1, 1)
    """

    def __init__(self, seed: int, kind: str, level: int, mistakes: Sequence[Mistake]) -> None:
        self.seed, self.kind, self.level = seed, kind, level
        self.mistakes = [each.id for each in mistakes]
        texts = sources(KINDS[kind], mistakes) or {}
        self.source = "\n\n".join(["import numpy as np\n", *texts.values()])

    def __repr__(self) -> str:
        start = said(
            "Puzzle {seed}, {kind}, level {level}.  Two lines are not as the book has them: which?"
            if len(self.mistakes) == 2
            else "Puzzle {seed}, {kind}, level {level}.  One line is not as the book has it: which?",
            seed=self.seed, kind=self.kind, level=self.level,
        )  # fmt: skip
        call = f"teach.puzzle({self.seed}, {self.kind!r}, {self.level}).check({self.kind})"
        return f"{start}\n\n{self.source}\n{said('Correct it, then call {call}.', call=call)}"

    def check(self, mended: Any) -> Answer:
        """Grade an attempt.

        Parameters
        ----------
        mended : callable or str
            The function, or the whole source.

        Returns
        -------
        Answer
            As `mha_c.teach.check` gives it.
        """
        if isinstance(mended, str):
            room: dict[str, Any] = {}
            exec(compile(mended, "your text", "exec"), room)
            if self.kind not in room:
                raise ValueError(said("mended must define a function {kind}", kind=self.kind))
            mended = room[self.kind]
        return check(mended, self.kind, mask="attend")


@refuses_at_the_call
def puzzle(seed: Optional[int] = None, kind: str = "dot_product", level: int = 1) -> Puzzle:
    """Make a puzzle: the book's function with a mistake in it, to be found.

    Parameters
    ----------
    seed : int, optional
        The same seed gives the same puzzle; None draws a seed, which the puzzle shows.
    kind : str
        As in `check`.
    level : int
        1: a mistake that any input shows.  2: one that stays hidden if all sizes are equal, in a batch of one, with one
        head.  3: two mistakes.

    Returns
    -------
    Puzzle
        `.source` and `.check(mended)`.

    Raises
    ------
    ValueError
        If there is no such kind or level.

    Examples
    --------
    >>> from mha_c import teach
    >>> puzzle = teach.puzzle(seed=4)
    >>> puzzle.check(puzzle.source).mistakes == puzzle.mistakes
    True
    >>> puzzle.check(teach.book.dot_product).ok
    True
    """
    if kind not in KINDS:
        raise unknown_kind(kind)
    if scalars.whole(level, "level") not in (1, 2, 3):
        raise ValueError(said("level must be 1, 2 or 3, got {level}", level=level))
    seed = int(np.random.default_rng().integers(10000)) if seed is None else scalars.whole(seed, "seed", least=0)
    form = KINDS[kind]
    hiding = {each for each in known(form) if _hides(form, each)}
    choices: list[tuple[Mistake, ...]] = [(each,) for each in known(form) if (each in hiding) == (level == 2)]
    if level == 3:
        pairs = itertools.combinations(known(form), 2)
        choices = [pair for pair in pairs if pair[0].id != pair[1].id and sources(form, pair)]
    choices = choices or [(each,) for each in known(form)]  # heads: a single one hides all mistakes
    # By hash, so that a mistake more in the table leaves most puzzles as they are.
    choices.sort(key=lambda mistakes: sha256(f"{seed} {mistakes}".encode()).digest())
    made = (Puzzle(seed, kind, level, mistakes) for mistakes in choices)
    # Two mistakes may undo each other, or look like one.
    return next(each for each in made if level < 3 or each.check(each.source).mistakes == each.mistakes)


def _hides(form: BookForm, mistake: Mistake) -> bool:
    """Whether it changes nothing where all sizes are alike, in a batch of one, with a single head."""
    chosen = probes(form.kind, Sizes(2, 2, 2, 2, 1))[1]
    inputs = {name: x[:1, :2] if np.ndim(x) == 3 else x for name, x in chosen.items()}
    tried = [inputs, {**inputs, "valid_lens": np.array([1])}] if "valid_lens" in inputs else [inputs]
    made = [function(form, mistakes) for mistakes in ((), [mistake])]
    with np.errstate(all="ignore"):
        pairs = [[each(**given) for each in made if each is not None] for given in tried]
    return all(right.shape == wrong.shape and np.allclose(right, wrong, NEAR, NEAR) for right, wrong in pairs)
