"""Which of a student's lines a mistake is in: the first that makes numbers which the book's call never has.

A student's steps stand beside those of the book, and of the book with the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Optional

import numpy as np

from ..asking.answers import NEAR
from ..asking.comparing import HUGE
from ..asking.probes import Inputs
from .alike import Known, KnownNumbers, counts, cut, equal_masks, is_arranged, is_mask, is_numbers, same_mask
from .named_before import TYPED, where_a_number, where_named, where_partial
from .noting import Operation, Place, Trace
from .traces import ChangedLine, first_read, heads, in_loops, last_of, otherwise, stages

_OF_LAYOUT = (
    "reshape", "view", "transpose", "swapaxes", "permute", "T", "mT", "flatten",
    "unflatten", "rearrange", "moveaxis", "split", "chunk", "unbind", "contiguous",
)  # fmt: skip


_MOVES = ("named", "getitem", "setitem", "stack", *_OF_LAYOUT)  # they compute no number
_PARTS = ("getitem", "unbind", "chunk", "split")
_COPIES = ("named", "getitem", "expand", "repeat", "tile", "repeat_interleave", "broadcast_to", "stack", *_OF_LAYOUT)
_EMPTY = re.compile(r"= *(np|torch)\.(empty|zeros)(_like)?\(")  # numbers that something is written over
_MAKE_EMPTY = ("named", "setitem", "empty", "zeros", "empty_like", "zeros_like")
_OF_SOFTMAX = ("max", "amax", "subtract", "sub", "exp", "sum", "divide", "div", "softmax")
_OF_MASKS = ("no_mask", "mask_", "sees_", "window_", "hides_", "lens_", "causal_")
_OF_SIZES = ("scale_keys", "scale_queries", "scale_values", "scale_num_hiddens", "scale_fixed", "scaled")
_MAKES_A_MASK = re.compile(r"[<>]|\btri[lu]?\(")
_GIVES_NONE = re.compile(r"\w\(([^\[]*,)? *(\w+ *= *)?None *[,)]")
_LAID = ("heads_", "wrong_axes", "qkv_order", "groups_", "wrong_group")


def _says_hidden(name: str) -> Optional[bool]:
    """Whether the name of a mask says that it is true of hidden keys, or of those that are seen; None: neither."""
    if re.search("hid|pad|futur|block|invalid|beyond|out", name.lower()):
        return True
    return False if len(name) > 2 else None


def _computes(trace: Trace) -> bool:
    return any(x.sources and x.name not in _MOVES for x in trace.steps)


class Search:
    """The student's steps beside the book's."""

    def __init__(self, trace: Trace, right: Sequence[Trace], inputs: Inputs) -> None:
        first: Any = inputs.get("X", inputs.get("keys"))
        # Python's own numbers are not noted: of what lists compute, the first array says no line.
        self.is_noted = _computes(trace) or not _computes(right[0])
        self.inputs, self.end = inputs, trace.end
        self.steps = [
            x._replace(value=cut(x.value, first.shape[-2])) if x.place.function == "__init__" else x
            for x in trace.steps
        ]
        books = [x.value for each in right for x in each.steps]
        books += [x for each in right for x in each.inputs]
        books += [x for x in inputs.values() if isinstance(x, np.ndarray)]
        count = inputs.get("num_heads", 1)
        masks = [x for x in books if x.dtype == bool and x.ndim > 1]
        self.masks = [*masks, *(x[::count] for x in masks if len(x) % count == 0)]
        self.masks += [x.reshape(-1, x.shape[-1]) for x in masks]
        self.books, self.heads = books, [*heads(right, inputs)]
        sizes = {x.value.size for x in self.steps}
        books += [item for x in books for item in in_loops(x, inputs.get("valid_lens")) if item.size in sizes]
        others = [*otherwise(books, right, inputs)]
        alone = [each for x in self.heads for each in x.swapaxes(0, 1) if each.size in sizes]  # heads in a list
        alone += [each for x in others for each in self._of_each_head(x) if each.size in sizes]
        self.right = Known([*(x for x in books if x.dtype != bool), *others, *alone])
        self.is_right: list[bool] = []
        for x in self.steps:
            given = (
                self.steps[x.sources[0]].value
                if x.name == "named" and len(x.sources) == 1 <= x.sources[0] + 1
                else None
            )
            gives_a_name = given is not None and np.array_equal(given, x.value, equal_nan=True)
            self.is_right.append(self.is_right[x.sources[0]] if gives_a_name else self._is_right(x))
        if "window" in inputs:
            self._allow_ends(first.shape[-2], inputs["window"])
        numbers = {i for i, x in enumerate(self.is_right) if x and is_numbers(self.steps[i].value)}
        self.good = numbers | self._leading_to(numbers)

    def _allow_ends(self, steps: int, window: int) -> None:
        """Each of a window's two ends is right where a mask is made of it and of another."""
        ends = [np.tri(steps, dtype=bool), ~np.tri(steps, k=-window, dtype=bool)]
        for x in self.steps:
            for i in x.sources if is_mask(x.value) and len({*x.sources}) > 1 else ():
                if i >= 0 and is_mask(self.steps[i].value):
                    self.is_right[i] |= any(same_mask(self.steps[i].value, end) for end in ends)

    def _is_right(self, step: Operation) -> bool:
        if (
            step.value.size == 0
            or counts(step.value)
            or (not step.sources and (step.value == step.value.flat[0]).all())
            or (_EMPTY.search(step.place.text) and (step.name in _MAKE_EMPTY or not step.sources))
        ):
            return True
        if is_mask(step.value):
            return any(same_mask(step.value, x) for x in self.masks)
        if step.value.ndim < 3 and step.value.size > 1 and (step.value == np.round(step.value)).all():
            return any(x.size == step.value.size and (x.ravel() == step.value.ravel()).all() for x in self.books)
        if step.value not in self.right:
            return False
        if step.name in _OF_LAYOUT and step.value.ndim > 2:
            alike = [x for x in self.heads if x.size == step.value.size and step.value in Known([x])]
            return not alike or any(is_arranged(step.value, x) for x in alike)
        return True

    def of_mistake(self, id: str, wrong: Trace, right: Trace, changed: Sequence[ChangedLine]) -> Optional[Place]:
        """The line of a mistake: where the numbers of the book's changed line appear, or what leads to them began."""
        if id == "no_input" and self.steps:
            return self.steps[-1].outer
        if not self.is_noted:
            return None
        if id == "no_rescale" and "chunk_size" not in self.inputs:  # of one key after the other the book has no line
            tops = [x.place for x in self.steps if x.name.startswith("max") and x.place.function != "__init__"]
            return tops[-1] if tops else self.first()
        if id == "groups_tiled":
            laid = [x for each in changed for x in last_of(wrong, each)]
            moved = (x for x in self.steps if x.name != "named" and any(np.array_equal(x.value, y) for y in laid))
            place = next((x.place for x in moved), None)
            if place is not None:
                return place
        if id.startswith(_LAID):
            place = self._laid_wrong() or self._last_transposed(right)
            if place is not None:
                return place
        if id.startswith(_OF_MASKS):
            unused = self._mask_without_use() or self._mask_of_nothing()
            if unused is not None:
                return unused
        elif all(each.is_lost for each in changed):
            lost = [x for each in changed for x in first_read(right, each)]
            at = next((at for x in lost for at in [self._last_with(x)] if at is not None), None)
            if at is not None:
                return self.steps[at].place
        if id.startswith("swapped"):
            return self._swapped(wrong, right, changed)
        values = [x for each in changed for x in last_of(wrong, each) if is_numbers(x)]
        if id == "lost_key":  # which keys a chunk has says no line
            values = [x for x in values if x.ndim > 2]
        every = [*values, *(each for x in values for each in self._of_each_head(x))]
        if id == "mask_after_softmax":  # the weights as the mask leaves them
            every.reverse()
        if id == "scale_after_softmax":  # the weights as the scale leaves them
            last = [each for x in values[-2:-1] for each in (x, *self._of_each_head(x))]
            scaled = next((at for x in last for at in [self._first_with(x)] if at is not None), None)
            if scaled is not None:
                return self.steps[scaled].place
        new = next((at for x in every if x not in self.right for at in [self._first_with(x)] if at is not None), None)
        if new is not None and id == "mask_after_softmax":
            return self._called_with(new)
        if new is not None:
            return self._begins(id, new)
        if id.startswith("no_projection") and values:
            at = self._last_with(values[-1])
            return self.steps[at].outer if at is not None else self.first()
        for x in every if id == "no_scale" else values if not id.startswith(_OF_MASKS) else ():
            at = (self._made_last(x) if id == "no_scale" else self._last_with(x)) if x in self.right else None
            if at is not None:  # heads are laid in the helper, not where its result gets a name
                return self.steps[self._before(at, ("named",)) if id.startswith(_LAID) else at].place
        starts = [i for i, x in enumerate(wrong.steps) if any(each.is_at(x.place) for each in changed)]
        for step in wrong.steps[min(starts, default=0) :]:
            for x in (step.value, *self._of_each_head(step.value)):
                is_new = is_numbers(x) and x not in self.right and (id != "lost_key" or x.ndim > 2)
                at = self._first_with(x) if is_new else None
                if at is not None:
                    return self._begins(id, at)
        place = (self._wrong_mask() if id.startswith(_OF_MASKS) else None) or self.first()
        return self._named_otherwise(id, place) if place is not None and id == "mask_inverted" else place

    def _wrong_mask(self) -> Optional[Place]:
        """The first line that makes a wrong mask, which leads to the output."""
        of_output = self._leading_to_the_end()
        made = (x for i, x in enumerate(self.steps) if i in of_output and x.sources and not self.is_right[i])
        masks = (x for x in made if is_mask(x.value) and x.value.ndim > 1)  # weights of one key are 1, too
        return next((x.place for x in masks if (x.value != x.value.flat[0]).any()), None)

    def _scaled(self, place: Place) -> Place:
        """Of a line that only picks numbers, the line behind it that divides."""
        divides = r"sqrt|\*\*|/|scal"
        lines = [x.place for x in self.steps if x.place.function == place.function and x.place.number > place.number]
        behind = (x for x in lines if re.search(divides, x.text))
        return place if re.search(divides + "|[(]", place.text) else next(behind, place)

    def _called_with(self, at: int) -> Place:
        """The line that writes into what is right but for it; of one in a helper, that which calls it and another."""
        step = self.steps[at]
        began = self._began(at)
        return step.outer if began.function != step.place.function else began

    def _begins(self, id: str, at: int) -> Place:
        """The line of a mistake whose numbers are those of this step."""
        return self._named_otherwise(id, self._calls(at) if id.startswith(_OF_MASKS) else self._began(at))

    def _calls(self, at: int) -> Place:
        """The line where it began; of a softmax that gets what nobody masked, that which calls it behind the scores."""
        began, outer = self._began(at), self.steps[at].outer
        if self.steps[at].name not in _OF_SOFTMAX:
            return began
        before = next((x.place for x in reversed(self.steps[:at]) if x.place.function != began.function), None)
        called = before is not None and outer.function == before.function and outer.number > before.number
        return outer if called else began

    def _of_each_head(self, x: Any) -> list[Any]:
        """Of an array of all heads, one below the other, that of each: who has heads in a list has no other."""
        count = self.inputs.get("num_heads", 1)
        if count == 1 or x.ndim != 3 or len(x) % count:
            return []
        return [x[head::count] for head in range(count)]

    def _laid_wrong(self) -> Optional[Place]:
        """The first line that gives right numbers in an order of axes that the book's heads never have."""
        wrong = [i for i, right in enumerate(self.is_right) if not right and self.steps[i].place.function != "__init__"]
        if wrong and self.steps[wrong[0]].name in _PARTS:
            whole = self._before(wrong[0], _PARTS)
            if whole != wrong[0] and self.steps[whole].name in _OF_LAYOUT:
                return self.steps[whole].place
        if wrong and self.steps[wrong[0]].name == "getitem" and self._takes_features(wrong[0]):
            return self.steps[wrong[0]].place
        bad = [i for i in wrong if self.steps[i].name in _OF_LAYOUT and self.steps[i].value in self.right]
        if not bad:
            return None
        if self.steps[wrong[0]].name in _PARTS and wrong[0] in self._leading_to({bad[0]}):
            return self.steps[wrong[0]].place
        step = self.steps[bad[0]]
        before = self.steps[step.sources[0]] if step.sources and step.sources[0] >= 0 else step
        joins = before.value.ndim > step.value.ndim and before.name in ("transpose", "permute", "swapaxes")
        return before.place if joins else step.place

    def _takes_features(self, at: int) -> bool:
        """Whether it is some of the features of what is right as a whole: x[..., h::heads]."""
        source = self.steps[at].sources[0] if self.steps[at].sources else -1
        if source < 0 or not self.is_right[source]:
            return False
        whole, shape = self.steps[source].value.shape, self.steps[at].value.shape
        return whole[:-1] == shape[:-1] and shape[-1] < whole[-1]

    def _before(self, at: int, names: Sequence[str]) -> int:
        """The step that this one's numbers come of, where steps of these names only choose or repeat them."""
        while self.steps[at].name in names and self.steps[at].sources and self.steps[at].sources[0] >= 0:
            at = self.steps[at].sources[0]
        return at

    def _last_transposed(self, right: Trace) -> Optional[Place]:
        """Of a function that transposes, and does nothing else: where it does."""
        if any(not x.place.file.startswith("book:transpose") for x in right.steps):
            return None
        turns = [x.place for x in self.steps if x.name in ("transpose", "permute", "swapaxes", "einsum")]
        return turns[-1] if turns else self.steps[0].place

    def _mask_without_use(self) -> Optional[Place]:
        """The line that masks the scores rightly, where nothing uses what it makes."""
        used = self._leading_to_the_end()
        for i, step in enumerate(self.steps):
            hides = step.value.size > 1 and (step.value <= -1e4).any()
            fills = self.is_right[i] or step.name in ("masked_fill", "where")  # of scores that are scaled later
            if hides and fills and i not in used and step.name != "named":
                bad = self._first_bad() if self._is_alone(step) else None
                return step.place if bad is None else self.steps[bad].place
        return self._call_without_mask(used)

    def _mask_of_nothing(self) -> Optional[Place]:
        """The line that makes a mask which is the same for all keys, where the book's is not."""
        if not any(x.ndim > 1 and (x != x.flat[0]).any() for x in self.masks):
            return None
        for step in self.steps:
            for at in step.sources if step.name in ("where", "masked_fill", "setitem") else ():
                mask = self.steps[at].value if at >= 0 else step.value
                if mask.dtype == bool and mask.ndim > 1 and mask.size > 1 and (mask == mask.flat[0]).all():
                    return self.steps[at].place
        return None

    def _is_alone(self, step: Operation) -> bool:
        """Whether it is a mask that a call adds, made of no scores."""
        return bool(((step.value == 0) | (step.value <= -1e4)).all())

    def _call_without_mask(self, used: set[int]) -> Optional[Place]:
        """The call that does not get a mask: right, and used by nothing, it stands in the function that calls; or the
        call gets None."""
        bad = self._first_bad()
        if bad is None:
            return None
        outer = self.steps[bad].outer
        if outer.function != self.steps[bad].place.function and _GIVES_NONE.search(outer.text):
            return outer
        for i, step in enumerate(self.steps):
            makes = is_mask(step.value) and step.value.ndim > 1 and self.is_right[i] and i not in used
            if makes and outer.function == step.place.function and outer.number > step.place.number:
                return outer if outer != self.steps[bad].place else None
        return None

    def _swapped(self, wrong: Trace, right: Trace, changed: Sequence[ChangedLine]) -> Optional[Place]:
        """Of inputs or weights in each other's place: where they are exchanged, or the first product that is not right;
        of products that the book has in another place, the one that takes the place of what is missing."""
        for step in self.steps:
            if re.match(r"(\w+), (\w+) = \2, \1\b", step.place.text):
                return step.place
        if "X" not in self.inputs:
            return self.first()
        theirs = [x for each in changed for x in last_of(right, each) if is_numbers(x)]
        have, wrongs = Known(x.value for x in self.steps), Known(x.value for x in wrong.steps)
        missing = [x for x in theirs if x not in wrongs]
        if missing and all(x in have for x in missing):
            return self.first()
        made = [self.inputs["X"] @ self.inputs[name] for name in ("W_q", "W_k", "W_v") if name in self.inputs]
        each_head = [x for each in made for x in _in_heads(each, self.inputs.get("num_heads", 1))]
        twice = [[i for i in self._with(x) if not {*self._with(x)} & {*self.steps[i].sources}] for x in each_head]
        again = next((each[1] for each in twice if len(each) > 1), None)
        if again is not None and not any(x in have for x in made):
            return self.steps[again].place
        values = [x for each in changed for x in last_of(wrong, each) if x in Known(made)] or made
        at = next((at for x in values for at in [self._made_last(x)] if at is not None), None)
        return self.steps[self._before(at, _COPIES)].place if at is not None else self.first()

    def _named_otherwise(self, id: str, place: Place) -> Place:
        """Of a mask that is read the other way round: the line that made it, if its name says the opposite; of a scale
        by a wrong number: the line that made this number."""
        if id in _OF_SIZES:
            return where_named(place) or self._scaled(place)
        if id == "no_rescale":
            return where_a_number(place) or place
        if id == "softmax_axis":
            return where_partial(place) or place
        if id != "mask_inverted":
            return place
        for step in self.steps:
            name = re.match(rf"(\w+){TYPED}=[^=]", step.place.text)
            makes = is_mask(step.value) and name and step.place != place and _MAKES_A_MASK.search(step.place.text)
            if makes and name and self._is_used_by(step, place):
                hides = _says_hidden(name[1])
                seen = any(equal_masks(step.value, x) for x in self.masks)
                if hides is None or hides == seen:
                    return step.place
        return place

    def _is_used_by(self, step: Operation, place: Place) -> bool:
        name = step.place.text.partition("=")[0].strip()
        return bool(re.search(rf"\b{re.escape(name)}\b", place.text))

    def _with(self, value: Any) -> list[int]:
        known = Known([value])
        return [i for i, x in enumerate(self.steps) if x.value.dtype != bool and x.value in known]

    def _first_with(self, value: Any) -> Optional[int]:
        return next(iter(self._with(value)), None)

    def _last_with(self, value: Any) -> Optional[int]:
        return next(reversed(self._with(value)), None)

    def _made_last(self, value: Any) -> Optional[int]:
        """The last step with these numbers that does not have them from another."""
        having = {*self._with(value)}
        made = [i for i in having if not having & {*self.steps[i].sources} and self.steps[i].name != "named"]
        return max(made, default=None)

    def _began(self, at: int) -> Place:
        """The first of the steps that led to this one whose numbers are not right, either."""
        found, waiting = at, [at]
        seen = set()
        while waiting:
            for source in self.steps[waiting.pop()].sources:
                if source >= 0 and source not in seen and not self.is_right[source] and source not in self.good:
                    seen.add(source)
                    waiting.append(source)
                    found = min(found, source)
        return self.steps[found].place

    def first(self, inner: bool = False, new: bool = False) -> Optional[Place]:
        """The first step that is not right, and leads to nothing right; `inner`: in the helper with it; `new`: which
        makes a number that the book does not have, if one does: an order of rows, or a table laid twice, makes none."""
        bad = self._first_bad() if self.is_noted else None
        if bad is None:
            return None
        if new:
            numbers = KnownNumbers([np.zeros(1), *(x for x in self.books if x.dtype != bool)])
            of_output = (i for i in sorted(self._leading_to_the_end()) if i not in self.good)
            made = (i for i in of_output if is_numbers(self.steps[i].value) and self.steps[i].value not in numbers)
            bad = next(made, bad)
        return (self.steps[bad].inner if inner else None) or self.steps[bad].place

    def _first_bad(self) -> Optional[int]:
        of_output = sorted(self._leading_to_the_end())
        return next((i for i in of_output if i not in self.good and is_numbers(self.steps[i].value)), None)

    def _leading_to_the_end(self) -> set[int]:
        last = len(self.steps) - 1 if self.end is None or self.end < 0 else self.end
        return {last} | self._leading_to({last})

    def _leading_to(self, ends: Iterable[int]) -> set[int]:
        """The steps that these were made of."""
        found: set[int] = set()
        waiting = [*ends]
        while waiting:
            for source in self.steps[waiting.pop()].sources:
                if source >= 0 and source not in found:
                    found.add(source)
                    waiting.append(source)
        return found

    def stage(self, right: Trace) -> str:
        """The last stage of the book's that the student has whole, before the first step that is not right; "" where
        there is none."""
        first = self._first_bad()
        theirs = [x.value for x in self.steps[:first] if x.value.dtype != bool]
        reached = ""
        for stage, value in stages(right):
            known = Known([value])
            if any(x in known and _is_laid_alike(x, value) for x in theirs):
                reached = stage
        return reached


def _in_heads(x: Any, count: int) -> list[Any]:
    return np.split(x, count, axis=-1) if count > 1 and x.shape[-1] % count == 0 else []


def _is_laid_alike(x: Any, value: Any) -> bool:
    """Whether it has the same rows, in any order: the transposed scores have the same numbers."""
    if x.shape[-1:] != value.shape[-1:]:
        return False
    one, two = (np.clip(each, -HUGE, HUGE).reshape(-1, each.shape[-1]) for each in (x, value))
    one, two = (each[np.lexsort(each.round(3).T)] for each in (one, two))
    return np.allclose(one, two, NEAR, NEAR)
