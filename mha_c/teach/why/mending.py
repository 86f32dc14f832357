"""A line of the student's own, changed in one place until all numbers are right: then it is known what it should be.

Each change is tried: the function runs with the changed line, and is compared with the book's on all probes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import SequenceMatcher
from time import process_time
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from ..asking.comparing import equal, output
from ..asking.mistakes import BookForm, function
from ..asking.rounds import Run
from .edits import is_of_number
from .noting import Place, forget_results, traced, written_by_them
from .places import Edit
from .statements import everywhere
from .texts import Constants, FunctionText, functions_of, lines_that_ran

_MOST = 700  # changes that are tried for one answer: most that were found are among the first 350
_MORE = 150  # and after the first that makes all right, for one that costs less
_PATIENCE = 1.0  # seconds of the processor that they may take, where a call is slow
_LINES = 20_000  # that run before a changed loop counts as endless: calls with probes run some hundred
_DEEP = 20  # calls of one function within each other: those of a text that ends are few
_FAR, _LARGE = 5, 6  # lines and characters; what is farther, or larger, is tried as this is


_AS_IT_IS = ("mask_after_softmax", "no_rescale")  # another change of one line would only hide it
# Of lines that mend equally well, the one where numbers differ first; but a number that is written out is as likely.
_WHERE_FOUND = ("no_scale", "mask_inverted")
_IN_ORDER = re.compile(rb"^\s*\w*k\w*\s*,\s*\w*v\w*\s*=[^=]|\b\w*q\w*\s*,\s*\w*k\w*\s*,\s*\w*v\w*", re.IGNORECASE)
_EACH_ITS_OWN = re.compile(
    rb"\s*(\w*cos\w*, \w*sin\w* = [^,]*cos[^,]*, [^,]*sin|\w*sin\w*, \w*cos\w* = [^,]*sin[^,]*, [^,]*cos)"
)
_SAYS_NOTHING = re.compile(r"(?:transpose|swapaxes)\((-?\d), ?\1\)")  # a change that only hides the call
# What undoes itself, or adds nothing.
_UNDONE = re.compile(
    r"\.T\.T\b|\.(?:transpose|swapaxes)(\(-?\d, ?-?\d\))\.(?:transpose|swapaxes)\1| [-+] 0(?= *(?:[\])},:;]|$))"
)
_WITH_E = re.compile(r"\b\d[\d.]*e[-+]?\d+")  # numbers that Python writes otherwise
_MAXIMUM = re.compile(rb"(?<!soft)max(imum)?\(")
_LESS_MAXIMUM = re.compile(r"exp\([^()]* - ")
_PRODUCT = re.compile(rb"@|matmul|bmm|einsum|dot\(")
_OF_ROWS = re.compile(rb"\b\w*q\w*\s*[@,]\s*\w*k\w*\.", re.IGNORECASE)  # a row of scores is of a query


_Text = Union[FunctionText, Constants]


class Mended(NamedTuple):
    """A line, and the same as it should be."""

    place: Place
    text: str


class _Candidate(NamedTuple):
    """A change of a line; of those that make all right, the one with the least cost is told."""

    cost: tuple[int, ...]
    of: _Text
    number: int
    text: str  # the line as it has it


def mended(run: Run, form: BookForm, places: Sequence[Place], id: str = "", share: float = 1.0) -> Optional[Mended]:
    """The smallest change of one line that makes all numbers right: as a mistake of this id is mended, or any.

    The lines of `places` are tried first; then all others of the functions that ran.  Numbers and texts that are
    written out are changed before names, whose values come from elsewhere.  `share`: of what may be tried.
    """
    end = process_time() + share * _PATIENCE
    differs = (x for x, got, right in zip(run.probes, run.outcomes, run.right) if not equal(got, right))
    lines = lines_that_ran(run, next(differs))
    ending = _loops_end if any(each.may_loop for each in functions_of(run)) else nullcontext
    forms = (form,) if id else run.asked.forms  # of what nothing explains it may be any
    rights = [[output(function(each), inputs) for inputs in run.probes] for each in forms]
    tried: set[Any] = set()
    for of in dict.fromkeys((id, id if id in _AS_IT_IS else "")):
        found: Optional[_Candidate] = None
        most = share * _MOST
        for change in _ordered(lines, places, of):
            if len(tried) >= most or process_time() > end:
                break
            if change[1:] in tried or (found is not None and change.cost >= found.cost):
                continue
            tried.add(change[1:])
            with ending():
                is_right = _is_right_with(run, rights, change)
            if is_right:
                found, most = change, min(most, len(tried) + _MORE)
        if found is not None:
            line = found.of.line(found.number).strip()
            place = Place(found.of.file, found.number, line, found.of.name)
            return Mended(place, found.text.strip())
    return None


def _ordered(lines: Sequence[tuple[_Text, int]], places: Sequence[Place], id: str) -> list[_Candidate]:
    """All changes, the smallest and nearest first."""
    made: list[tuple[int, _Candidate]] = []
    for theirs, number in lines:
        near = (
            abs(number - each.number) for each in places if each.file == theirs.file and each.number in theirs.lines
        )
        distance = min(_FAR, *near, _FAR)
        other = id in _WHERE_FOUND and not any((x.file, x.number) == (theirs.file, number) for x in places[:1])
        made += [
            (distance + late, change._replace(cost=(other and change.cost[2] > 0, *change.cost)))
            for late, change in _changes_of(theirs, number, id)
        ]
    return [change for _, change in sorted(made, key=lambda each: (each[0], each[1].cost))]


def _changes_of(theirs: _Text, number: int, id: str) -> list[tuple[int, _Candidate]]:
    """The changes of a line, each with how late it is tried."""
    if (number, id) not in theirs.memory:
        theirs.memory[number, id] = list(_changes(theirs, number, id))
    return theirs.memory[number, id]


def _changes(theirs: _Text, number: int, id: str) -> Iterator[tuple[int, _Candidate]]:
    """The changes of a line, each with how late it is tried."""
    raw = theirs.line(number).encode()
    if id.startswith("no_rescale") and re.search(rb"max|exp\(", raw):  # with no maximum at all none is to be rescaled
        return
    for edit in [each for one in theirs.edits(number, id) for each in dict.fromkeys((one, everywhere(one, raw)))]:
        # Of two as small: what is done to a name, not to a call, whose own line would do it.
        size, is_of_call = _size(edit, raw) + _is_new_sign(edit, raw), b"(" in raw[edit.start : edit.end]
        # A division that is missing behind a name; a transpose that is too much.
        meant = id.startswith("no_softmax") and re.search(rb"(=|return) [A-Za-z_]\w*\s*$", raw) is not None
        meant |= (
            id.startswith(("heads_joined", "groups_"))
            and b"transpose(" in raw[edit.start : edit.end]
            and "transpose" not in edit.text
        )
        # What is missing at the end is missing in the call itself, not in a helper.
        helps = id.startswith("no_output") and theirs.name not in ("forward", "__call__", "call")
        elsewhere = id.startswith("no_scale") and _PRODUCT.search(raw) is None
        elsewhere |= id == "rope_direction" and "-" in edit.text and b"-" not in raw and b"*" not in raw
        # A mask is read the other way round where it is made, not where its sign stands.
        elsewhere |= (
            id == "mask_inverted"
            and edit.text.count("-") != raw[edit.start : edit.end].count(b"-")
            and ("(1 - " not in edit.text)
        )
        misnamed, turns = _misnames(edit, raw), ".swapaxes(" in edit.text and b".swapaxes(" not in raw
        cost = (elsewhere - meant, misnamed + turns, not is_of_number(edit, raw), size, is_of_call, helps, number)
        is_late = edit.is_of_name and (not id or id.startswith("no_scale"))
        last = 2 * (_FAR + _LARGE) * (is_late + (misnamed > 0))
        text = _UNDONE.sub("", (raw[: edit.start] + edit.text.encode() + raw[edit.end :]).decode())
        for written in _WITH_E.findall(raw.decode()):
            text = text.replace(repr(float(written)), written)
        if _SAYS_NOTHING.search(text) or text == raw.decode() or _is_of_maximum(edit, raw, text, id):
            continue
        if _APPENDED.search(text) and _holds_itself(theirs, number, text):
            continue
        likely = 2 * is_of_number(edit, raw) + 2 * ("->" in edit.text)  # an axis, a sign; more so, letters of einsum
        likely += _LARGE * (id.startswith("no_softmax") and ".sum(-1" in edit.text)
        likely += _LARGE * (id.startswith("no_scale") and not elsewhere and "** 0.5" in edit.text)
        yield min(size, _LARGE) + last - likely, _Candidate(cost, theirs, number, text)


_APPENDED = re.compile(r"\b(\w+)\.(?:append|extend|insert)\((?:\d+, *)?(\w+)\)|\b(\w+) \+= \[?(\w+)\]?$")


def _holds_itself(theirs: _Text, number: int, text: str) -> bool:
    """Whether lists, with this line, hold each other: of such NumPy makes an array until memory ends."""
    lines = (text if each == number else theirs.line(each) for each in theirs.lines)
    held = [tuple(filter(None, pair)) for line in lines for pair in _APPENDED.findall(line)]
    inside = {pair[-1] for pair in held}
    while inside:  # of those that hold others, the outermost is in none
        fewer = {inner for outer, inner in held if outer in inside}
        if fewer == inside:
            return True
        inside = fewer
    return False


def _is_of_maximum(edit: Edit, line: bytes, text: str, id: str) -> bool:
    """Whether it changes the maximum that is subtracted before exp: any makes the same softmax, and none as well."""
    if not id and _LESS_MAXIMUM.search(line.decode()) and not _LESS_MAXIMUM.search(text):
        return True
    return _MAXIMUM.search(line) is not None and (edit.is_of_name or (not id and b"exp(" not in line))


def _size(edit: Edit, line: bytes) -> int:
    """How many characters it changes."""
    old, new = line[edit.start : edit.end].decode(), edit.text
    start = _begin_alike(old, new)
    old, new = old[start:], new[start:]
    end = _begin_alike(old[::-1], new[::-1])
    old, new = old[: len(old) - end], new[: len(new) - end]
    if not (old and new):  # SequenceMatcher takes as long as a call of the function does
        return len(old) + len(new)
    same = SequenceMatcher(None, old, new, autojunk=False)
    return len(old) + len(new) - 2 * sum(each.size for each in same.get_matching_blocks())


def _begin_alike(one: str, two: str) -> int:
    """The number of characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


def _misnames(edit: Edit, line: bytes) -> int:
    """Above 0: it gives queries, keys and values, or cos and sin, each other's names: what exchanges them stands
    elsewhere; or einsum's result another order of letters than they come in.  Below 0: it gives them their own."""
    new = line[: edit.start] + edit.text.encode() + line[edit.end :]
    in_order = len(_IN_ORDER.findall(line)) - len(_IN_ORDER.findall(new))
    for names in (_OF_ROWS.search, _EACH_ITS_OWN.match) if not in_order else ():
        if bool(names(line)) != bool(names(new)):
            return bool(names(line)) - bool(names(new))
    return in_order or _disorder(new) - _disorder(line)


def _disorder(line: bytes) -> bool:
    """Whether letters of einsum's result stand in another order than in what it is given."""
    found = re.search(rb"[\"']([\w, ]+)-> ?(\w+)[\"']", line)
    places = [found[1].find(bytes([x])) for x in found[2]] if found else []
    return places != sorted(places)


def _is_new_sign(edit: Edit, line: bytes) -> int:
    """What a minus, or a not, costs more in a line that has none: a wrong sign is likelier in one that has."""
    return 2 * any(sign in edit.text and sign.encode() not in line for sign in "-~")


def _is_right_with(run: Run, rights: Sequence[Sequence[Any]], change: _Candidate) -> bool:
    """Whether all outcomes are those of one of the book's functions with it."""
    changed = change.of.changed(change.number, change.text)
    if changed is None:
        return False
    layers, entry = run.student.layers if change.of.name == "__init__" else None, run.student.entry
    order = sorted(_that_count(run), key=lambda i: equal(run.outcomes[i], run.right[i]))
    met = []
    try:
        with change.of.instead(changed):  # type: ignore[arg-type]
            for i in order:
                forget_results(run.student.mine)
                met.append(run.probes[i])
                if layers is not None:
                    layers.remake(run.probes[i])
                outcome = run.student(run.probes[i], run.way, run.asked)
                rights = [right for right in rights if equal(outcome, right[i])]
                if run.asked.role == "second":  # the first of the pair was right
                    first = run.student(run.probes[i], run.way, run.asked._replace(role="", parameter=""))
                    rights = [right for right in rights if equal(first, right[i])]
                if not rights:
                    return False
    except Exception:  # what its class makes then may be no layer
        return False
    finally:
        forget_results(run.student.mine)
        run.student.entry = entry
        for inputs in met:
            if layers is not None:
                layers.remake(inputs)
    return True


def _that_count(run: Run) -> list[int]:
    """The probes that a changed line must make right: lengths for each query that it never takes say nothing of it."""
    lens: list[Any] = [each.get("valid_lens") for each in run.probes]
    takes = [i for i, x in enumerate(lens) if run.outcomes[i].error is None or np.ndim(x) < 2]
    return takes if any(not equal(run.outcomes[i], run.right[i]) for i in takes) else [*range(len(run.probes))]


def _loops_end() -> AbstractContextManager[None]:
    """While it is entered, what a changed line makes endless ends with an error: loops, and functions that call
    themselves.  Python's own limit comes late: at it others' code fails, too."""
    left = _LINES

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TimeoutError
        return count

    def enter(frame: Any, event: str, _: Any) -> Any:
        if not written_by_them(frame.f_code.co_filename):
            return None
        above, depth = frame.f_back, 0
        while above is not None and depth < _DEEP:
            depth += above.f_code is frame.f_code
            above = above.f_back
        if depth == _DEEP:
            raise RecursionError
        return count

    return traced(enter)
