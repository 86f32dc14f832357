"""Teaching attention: one step at a time, and checks of students' own code.

    import mha_c.teach as teach
    teach.check(my_attention)             # which line is wrong?
    teach.laws(my_attention).assert_all()  # for graders: no reference, laws alone
    teach.puzzle(level=2)                 # the book's function with a line changed, to be mended
    teach.set_language("zh")              # what these three say, in Chinese
    layer, X, tokens = teach.trained()    # a layer whose pictures mean something
    steps = teach.steps(q, k, v, valid_lens=3, tokens="the cat sat down")
    steps.weights                         # every intermediate matrix, as NumPy
    steps                                 # last line of a notebook cell: a player with Back, Next, Play
    teach.tiles(q, k, v, block_size=2)    # the same output without storing the whole matrix of scores

This folder is plain NumPy, because its functions are meant to be read.  The layers compute the same in C.
"""

from . import book
from .asking.answers import Answer
from .asking.mistakes import add_mistake
from .checks.checking import check
from .lawful import Law, Laws, laws
from .players.playing import LayerSteps, additive, multi_head
from .players.stepping import Steps, Tile, Tiles, steps, tiles
from .players.trained_layer import trained
from .puzzles import Puzzle, puzzle
from .words.sentences import set_language

__all__ = [
    "Answer", "Law", "Laws", "LayerSteps", "Puzzle", "Steps", "Tile", "Tiles", "add_mistake", "additive", "check",
    "laws", "multi_head", "puzzle", "set_language", "steps", "tiles", "trained",
]  # fmt: skip
__dir__ = [*__all__, "book"].copy  # what dir() and completion show
