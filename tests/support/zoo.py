"""One zoo of attentions, for `check` and for `convert`: each is written once, with what the two make of it.

ZOO         {name: Case}: modules of torch as readers type them, each right
LOOKALIKES  {name: Case}: modules that have the names of attention and compute something else
RIGHT       [(kind, implementation)]: for check alone, functions and what is no attention
STYLES      [(kind, maker, options of check)]: for check alone; maker(*mistakes) gives an implementation, or raises
            KeyError where the style does not make this mistake; maker.mistakes lists them

The files zoo_*.py put their own into these; `whole` reads them all.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import NamedTuple

ZOO, LOOKALIKES, RIGHT, STYLES = {}, {}, [], []
# CPU time of an answer of check.  The slowest of 566 takes 2.4 s on an AMD EPYC family 25 model 1 (Zen 3), 2 cores,
# while twenty other programs share its caches, and less alone.
SECONDS = 4
OF_TORCH = "layers right_torch students_torch modules self calls more public lookalikes lookalikes_more".split()


class Case(NamedTuple):
    own: type  # the reader's class
    sizes: dict  # with which it is made
    calls: list  # of (inputs, keywords); none: as its signature says
    kind: str  # as what check is asked
    says: str  # the first mistake that check names of such a module, or "": it is right
    of_class: str  # the same of the class, which check makes with sizes of its own
    core: bool  # whether convert has the core compute all the calls

    def make(self, **more):
        return self.own(**{**self.sizes, **more})

    def called(self):
        """One whose open sizes its first call has set."""
        import torch

        module = self.make()
        with torch.no_grad():
            for inputs, keywords in self.calls[:1]:
                module(*inputs, **keywords)
        return module


def _split(call):
    """(inputs, keywords) of a list of inputs with perhaps a dict at its end."""
    return (call[:-1], call[-1]) if isinstance(call[-1], dict) else (call, {})


def case(kind, *calls, says="", of_class=None, core=True, into=ZOO, where=True, **sizes):
    """Puts a class into the zoo; `calls` are lists of inputs, with a dict of keywords at their end."""

    def put(own):
        assert own.__name__ not in {*ZOO, *LOOKALIKES}, own
        if where:
            found = says, says if of_class is None else of_class
            into[own.__name__] = Case(own, sizes, [*map(_split, calls)], kind, *found, core)
        return own

    return put


def differs(kind, says, **more):
    """Puts a class among the lookalikes."""
    return case(kind, says=says, core=False, into=LOOKALIKES, **more)


def right(kind, where=True):
    def register(mine):
        if where:
            RIGHT.append((kind, mine))
        return mine

    return register


def style(kind, mistakes, **options):
    """Over made(ask) -> implementation, which can make these mistakes; ask("id"): whether it makes this one."""

    def register(made):
        def make(*chosen):
            if not set(chosen) <= set(make.mistakes):
                raise KeyError(f"{made.__name__} cannot make {chosen}")
            return made(lambda name: name in chosen)

        make.__name__, make.mistakes, make.made = made.__name__, mistakes.split(), made
        STYLES.append((kind, make, options))
        return make

    return register


def whole():
    """Reads all files of the zoo, without torch those that need none."""
    for path in sorted(Path(__file__).parent.glob("zoo_*.py")):
        if path.stem[4:] not in OF_TORCH or importlib.util.find_spec("torch"):
            importlib.import_module(path.stem)
