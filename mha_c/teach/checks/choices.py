"""What a class's constructor can choose, such as causal=True: layers that are made in another way are asked, too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..._recognize import parameters
from ..._recognize.roles import is_flag
from ..asking.configuration import constructor_parameters
from ..asking.forms import ADDS_POSITIONS, added_by_position
from ..asking.mistakes import KINDS, ROTARY, BookForm
from ..asking.rounds import forms_of_mask
from ..asking.student import Round, Student

# Names of what hides keys, or changes numbers, in a way that the book does not have.
_CHANGES = re.compile(
    ".*(window|mask|alibi|relative|rope|rotary|qk_?norm|soft_?cap|sink|sparse|dilat).*", re.IGNORECASE
)
_WITH_SCORES = "dot_product", "multi_head", "causal", "causal_multi_head", "window", "grouped"
_ROTATES = re.compile(".*(rope|rotary).*", re.IGNORECASE)


def choices(student: Student) -> Iterator[tuple[str, Student, Round]]:
    """For each flag of a right student's constructor: what it says, a student made with it, and what that should be.

    So for a layer's own flag that hides the future.
    """
    if student.flagged:
        name, made = student.flagged
        one_input = student.kind == "multi_head" and student.attends_to_itself
        made = Student(made.mine, "causal_multi_head", student.weights, mask=student.mask) if one_input else made
        forms = (KINDS["causal_multi_head"],) if one_input else forms_of_mask(student)
        yield f"{name}=True", made, Round(forms, "made" if one_input else "flag", name)
    for each in constructor_parameters(student.mine) if student.is_class else ():
        name, kind, forms = each.name, student.kind, tuple[BookForm, ...]()
        if not isinstance(each.default, bool) or (name in student.chosen and kind != "causal_multi_head"):
            continue
        value = not student.chosen.get(name, each.default)
        if is_flag(each):
            kind = "multi_head" if kind == "causal_multi_head" else kind
            forms = forms_of_mask(student) if value else (KINDS[kind],)
            if value and kind == "multi_head" and student.attends_to_itself:
                kind, forms = "causal_multi_head", (KINDS["causal_multi_head"],)
        elif value and _ROTATES.fullmatch(name) and kind == "causal_multi_head":
            forms = ROTARY
        if forms:
            made = Student(student.mine, kind, student.weights, {**student.chosen, name: value}, student.mask)
            role = "" if not (value and is_flag(each)) else "made" if kind == "causal_multi_head" else "flag"
            yield f"{name}={value}", made, Round(forms, role, name)


def by_positions(student: Student) -> str:
    """The word of its code that says that scores get a number of positions, as in no function of the book; "" where
    there is none, or an argument that is off chooses it."""
    if student.kind not in _WITH_SCORES:
        return ""
    made_by = constructor_parameters(student.mine) if student.is_class else []
    given = (each for each in [*made_by, *parameters(student.mine)] if each.default in (None, False, 0))
    return "" if any(ADDS_POSITIONS.search(each.name) for each in given) else added_by_position(student.mine)


def left(student: Student) -> list[str]:
    """The arguments of the constructor that may hide keys, and of which no comparison is known."""
    taken = {made_with.partition("=")[0] for made_with, _, _ in choices(student)} | {*student.chosen}
    found = constructor_parameters(student.mine) if student.is_class else []
    free = [each.name for each in found if each.default in (None, False, 0) and each.name not in taken]
    return [name for name in free if _CHANGES.fullmatch(name)]
