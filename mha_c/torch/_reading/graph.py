"""The records of a reading: what a call asked torch for, and all that it depended on and changed.

Nothing here knows of layers, or of attention.  `reading.read` makes a Reading; `attention.attentions` finds attention
in
its graph.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Optional

from torch import Tensor

from .sizes import UNKNOWN, Axis, evaluated, plain


class Line(NamedTuple):
    """A line of the reader's: its file, number, and the function that it stands in."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """The line as it stands in its file, stripped; "" where there is no source."""
        return linecache.getline(self.file, self.number).strip()


class Reason(NamedTuple):
    """Why something was left: a sentence's words without its line, and the line or None."""

    words: str
    line: Optional[Line] = None

    def __str__(self) -> str:
        return self.words if self.line is None else f"{self.words}, in `{self.line.text}`"


class ReasonAtFirst(Reason):
    """Of a call that changes what it reads: another may find that done."""


class Value:
    """A tensor of the call at one time: written in place, it is another Value afterwards.

    node      the Node that gave it, or None of a leaf
    index     which of the node's results it is
    kind      "result"; of leaves "input" (an argument, or inside one), "parameter", "buffer" or "constant" (any other
              tensor that Python read: an attribute, a global, a number of a closure)
    name      of an input: its name among `Graph.inputs` ("query", "args[1][0]"); of other leaves where it was found,
              the
              path from the module that was read ("attention.W_q.weight"), or "" if it is not in the module
    shape     of Size and int; a Size has a formula of the inputs' axes
    dtype, requires_grad, device    of the tensor
    tensor    the tensor itself while somebody else keeps it, else None: a reading keeps no tensor alive
    users     the nodes that take it, in their order
    """

    __slots__ = (
        "__weakref__", "device", "dtype", "index", "kind", "name", "node", "ref", "requires_grad", "shape", "users"
    )  # fmt: skip

    node: Optional[Node]
    index: int
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    device: Any
    requires_grad: bool
    ref: Any
    users: list[Node]

    @property
    def tensor(self) -> Optional[Tensor]:
        found: Optional[Tensor] = self.ref()
        return found

    def __repr__(self) -> str:
        made = f"{self.kind} {self.name}" if self.node is None else f"{self.node.name}#{self.node.number}"
        return f"<{made} {tuple(int(n) for n in self.shape)}>"


class Node:
    """One function that torch was asked for.

    name      the plain name whatever way it was called by: "matmul" (also of `@`), "add" (of `+`), "linear", "softmax",
              "masked_fill_", "__getitem__", "__setitem__"; an attribute of tensors has its name: "mT", "T"
    function  what was called
    args, kwargs   as they were given; each tensor is a Value, each size a Size (an int), wherever it stands inside
                   tuples,
              lists, dicts and slices
    results   a Value for each tensor that it gave, in their order; of a function that writes in place the new Value
              of what
              was written, which is Python's same tensor
    writes    the Value, before, of what it wrote in place; None of other functions
    memory    of a function that writes: the address of what it wrote; else 0
    line      the reader's line that asked
    number    its place among the nodes

    A tensor that was written through another view of its memory becomes a new Value by a Node of the name
    "__aliased__",
    whose arguments are the Value before and the Value of the view that was written.
    """

    __slots__ = ("args", "function", "given", "kwargs", "line", "memory", "name", "number", "results", "writes")

    name: str
    function: Any
    given: list[Value]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Value, ...]
    writes: Optional[Value]
    line: Line
    memory: int
    number: int

    def values(self) -> list[Value]:
        """The Values among its arguments, in their order."""
        return self.given

    def __repr__(self) -> str:
        return f"<{self.number} {self.name} {', '.join(map(repr, self.values()))}>"


def walked(found: Any) -> Iterator[Any]:
    """All that stands inside tuples, lists, dicts and slices, at any depth."""
    if isinstance(found, (tuple, list)):
        for x in found:
            yield from walked(x)
    elif isinstance(found, dict):
        for x in found.values():
            yield from walked(x)
    elif isinstance(found, slice):
        yield from walked((found.start, found.stop, found.step))
    else:
        yield found


class Graph(NamedTuple):
    """The functions of a call, in their order; and its leaves.

    inputs     {name: Value} of the tensors among the arguments, once where one tensor is given twice: `same` has the
               other names ({"key": "query"})
    """

    nodes: list[Node]
    inputs: dict[str, Value]
    leaves: list[Value]
    same: dict[str, str]


class Condition(NamedTuple):
    """A comparison of sizes that decided something: it holds for sizes for which `formula` is `outcome`."""

    formula: Any
    outcome: bool
    line: Optional[Line]

    def holds(self, sizes: Mapping[Axis, int]) -> bool:
        """Whether a call whose inputs have these sizes would take the same side."""
        return bool(evaluated(self.formula, sizes)) is self.outcome


class Effect(NamedTuple):
    """What the call leaves: an attribute that it set to a result of the graph.

    owner   the object; a module's path from the module that was read is `path` ("" is itself; None: it is not in it)
    value   the structure that was set: a Value, or tuples, lists and dicts of Values and plain constants
    """

    owner: Any
    path: Optional[str]
    name: str
    value: Any
    line: Optional[Line]


class Form(NamedTuple):
    """What a call must be for a reading of another call to hold for it: see `reading.form_of`.  Compared with `==`.

    Structure and constants of the arguments, which tensors are the same, their ranks, dtypes, devices, requires_grad;
    grad mode, autocast, inference mode.  Sizes are no part of it: `Reading.conditions` has what decided.
    """

    key: tuple[Any, ...]


class Reading(NamedTuple):
    """What a call computed, and all that it depended on and changed; or why it could not be read whole.

    name        of what was called
    graph       also of a refused reading: as far as it went, all of the call
    output      what the call gave, with a Value in the place of each tensor
    form        of the call's arguments and modes
    conditions  comparisons of sizes that decided
    pinned      {Axis: Line or None} axes of inputs that must have the size they have here: a number followed from them
                in a way that was not seen
    settings    all that Python read: `settings.still_holds()`
    effects     attributes that were set to results of the graph
    random      nodes that draw random numbers: dropout
    refused     None, or the first reason why the reading is not whole: nothing may be computed in its place
    log         of the call's sizes
    """

    name: str
    graph: Graph
    output: Any
    form: Form
    conditions: list[Condition]
    pinned: dict[Axis, Optional[Line]]
    settings: Any
    effects: list[Effect]
    random: list[Node]
    refused: Optional[Reason]
    log: Any

    @contextmanager
    def walk(self) -> Iterator[None]:
        """While the graph is read.  What sizes decide there is a condition of what is found."""
        decided = len(self.log.decided)
        with self.log.reopened():
            yield
        new = [*self.log.decided][decided:]
        self.conditions.extend(Condition(formula, outcome, None) for formula, outcome in new)
        for axis in self.log.pinned:
            self.pinned.setdefault(axis, None)

    def holds_for(self, sizes: Mapping[Axis, int]) -> bool:
        """Whether calls of its form with inputs of these sizes compute the same graph."""
        own = self.sizes()
        if UNKNOWN in self.pinned and sizes != own:
            return False
        if any(sizes.get(axis) != own.get(axis) for axis in self.pinned):
            return False
        return all(condition.holds(sizes) for condition in self.conditions)

    def sizes(self) -> dict[Axis, int]:
        """The sizes of its own inputs."""
        inputs = self.graph.inputs.items()
        return {Axis(name, i): plain(n) for name, value in inputs for i, n in enumerate(value.shape)}
