"""What the lines of a function read, write and call by name, from its bytecode: once for each code object.

The instructions are walked in their order with a stack of what is known: a name with attributes behind it (a Chain), a
constant, or nothing.  Whatever the walk does not know is UNSEEN, which only makes it say less: an attribute of
something unseen is `loose`.  Python 3.9 and later.
"""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any, NamedTuple, Optional


class Chain(NamedTuple):
    """A name, "fast" (local), "cell" (of a closure) or "global", and the attributes that are read off it."""

    kind: str
    name: str
    attributes: tuple[str, ...] = ()

    def then(self, attribute: str) -> Chain:
        return Chain(self.kind, self.name, (*self.attributes, attribute))


class Constant(NamedTuple):
    value: Any


class Mixed(NamedTuple):
    """An operation on things that are known."""

    parts: tuple[Any, ...]


UNSEEN = None


def _mixed(parts: Any) -> Any:
    """A slice: of constants it is one."""
    known = all(isinstance(part, Constant) for part in parts)
    return Constant(tuple(part.value for part in parts)) if known else Mixed(tuple(parts))


class LineFacts:
    """Of one line.

    reads     {Chain: the Chain that it is an attribute of, or None}
    loose     names of attributes of what was not seen
    stores    [(Chain or None, name of the attribute)]
    items     [Chain or None] containers an item of which is set or deleted
    looked    [(Chain or None, Constant or None)] what getattr and hasattr look for
    calls     [(Chain, its arguments or None)]
    indexed   [(Chain or None, index)]
    same      [(Chain or None, Chain or None)] what `is` compares
    imported  [(module, name or None)]
    outside   words of what changes something outside
    """

    __slots__ = "calls", "imported", "indexed", "items", "looked", "loose", "outside", "reads", "same", "stores"

    def __init__(self) -> None:
        self.reads: dict[Chain, Optional[Chain]] = {}
        self.loose: dict[str, None] = {}
        self.stores: list[tuple[Optional[Chain], str]] = []
        self.items: list[Optional[Chain]] = []
        self.looked: list[tuple[Any, Any]] = []
        self.calls: list[tuple[Chain, Any]] = []
        self.indexed: list[tuple[Optional[Chain], Any]] = []
        self.outside: list[str] = []
        self.same: list[tuple[Optional[Chain], Optional[Chain]]] = []
        self.imported: list[tuple[str, Optional[str]]] = []


CodeFacts = dict[int, LineFacts]
_facts: dict[int, tuple[CodeType, CodeFacts]] = {}
_KINDS = {"LOAD_FAST": "fast", "LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "cell"}
_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD")
_OUTSIDE = {
    "STORE_GLOBAL": "a global name is set", "DELETE_GLOBAL": "a global name is deleted",
    "DELETE_ATTR": "an attribute is deleted", "IMPORT_STAR": "import *",
    "SETUP_ANNOTATIONS": "annotations", "LOAD_BUILD_CLASS": "a class is made",
}  # fmt: skip


def facts_of(code: CodeType) -> CodeFacts:
    """{number of a line: what it reads, writes and calls}."""
    known = _facts.get(id(code))
    if known is None:
        known = _facts[id(code)] = code, _CodeWalk(code).facts
    return known[1]


class _CodeWalk:
    def __init__(self, code: CodeType) -> None:
        self.facts: CodeFacts = {}
        self.stack: list[Any] = []
        self.module = ""  # that is imported
        self.code, number = code, code.co_firstlineno
        for one in dis.get_instructions(code):
            number = _line_number(one, number)
            self.line = self.facts.get(number) or self.facts.setdefault(number, LineFacts())
            if one.is_jump_target:
                self.stack = [UNSEEN] * len(self.stack)
            self._step(one)

    def _pop(self, n: int = 1) -> Any:
        found = [self.stack.pop() if self.stack else UNSEEN for _ in range(n)][::-1]
        return found[0] if n == 1 else found

    def _top(self, depth: int) -> Any:
        """What stands so many below the top, which is 1."""
        return self.stack[-depth] if len(self.stack) >= depth else UNSEEN

    def _step(self, one: Any) -> None:
        name = one.opname
        base = name.replace("_BORROW", "").replace("_CHECK", "")
        if base in _KINDS:
            self._load(one, _KINDS[base])
        elif base.startswith(("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")):
            names = one.argval if isinstance(one.argval, tuple) else one.argrepr.split(", ")
            if base.startswith("STORE"):
                self._pop()
                names = names[1:]
            self.stack += [self._read(Chain("fast", x)) for x in names]
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL"):
            self.stack.append(Constant(one.argval))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(one)
        elif name == "STORE_ATTR":
            owner = self._pop()
            self._pop()
            self.line.stores.append((owner if isinstance(owner, Chain) else None, one.argval))
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            owner = self._top(3 if name == "STORE_SLICE" else 2)
            self.line.items.append(owner if isinstance(owner, Chain) else None)
            self._otherwise(one)
        elif name.startswith(("CALL", "PRECALL")) and name not in ("CALL_INTRINSIC_1", "CALL_INTRINSIC_2"):
            self._call(one)
        elif name == "BINARY_SLICE":
            parts = self._pop(3)
            self.line.indexed.append((parts[0] if isinstance(parts[0], Chain) else None, _mixed(parts[1:])))
            self.stack.append(UNSEEN)
        elif name == "BUILD_SLICE":
            parts = self._pop(one.arg)
            self.stack.append(_mixed(parts))
        elif name.startswith(("BINARY_", "INPLACE_", "UNARY_")):
            self._operate(one)
        elif name in ("COPY", "DUP_TOP"):
            self.stack.append(self._top(one.arg if name == "COPY" else 1))
        elif name in ("SWAP", "ROT_TWO"):
            self._swap(one.arg if name == "SWAP" else 2)
        else:
            self._other(one)

    def _other(self, one: Any) -> None:
        name = one.opname
        if name in _OUTSIDE:
            self.line.outside.append(_OUTSIDE[name])
        elif name in ("STORE_DEREF", "DELETE_DEREF") and one.argval in self.code.co_freevars:
            self.line.outside.append(f"a name of an outer function is set: {one.argval}")
        elif name == "LOAD_SUPER_ATTR":
            self.line.loose[str(one.argval).split()[-1]] = None
        elif name == "IS_OP":
            pair = self._top(2), self._top(1)
            if not any(isinstance(x, Constant) for x in pair):
                self.line.same.append(
                    (pair[0] if isinstance(pair[0], Chain) else None, pair[1] if isinstance(pair[1], Chain) else None)
                )
        elif name == "IMPORT_NAME":
            self.module = str(one.argval)
            self.line.imported.append((self.module, None))
        elif name == "IMPORT_FROM":
            self.line.imported.append((self.module, str(one.argval)))
        self._otherwise(one)
        if name.startswith(_ENDS):
            self.stack.clear()

    def _swap(self, depth: int) -> None:
        while len(self.stack) < depth:
            self.stack.insert(0, UNSEEN)
        self.stack[-depth], self.stack[-1] = self.stack[-1], self.stack[-depth]

    def _otherwise(self, one: Any) -> None:
        """Any other instruction: what it leaves on top was not seen."""
        effect = dis.stack_effect(one.opcode, one.arg, jump=False)
        if effect < 0:
            self._pop(-effect) if effect < -1 else self._pop()
            if self.stack and not one.opname.startswith(("STORE", "POP", "DELETE", "RETURN")):
                self.stack[-1] = UNSEEN
        else:
            if self.stack and effect == 0 and one.opname not in _NOTHING:
                self.stack[-1] = UNSEEN
            self.stack += [UNSEEN] * effect
        if one.opname.startswith(("UNPACK", "ROT", "FOR_ITER", "SEND", "WITH", "END", "MATCH", "GET")):
            self.stack = [UNSEEN] * len(self.stack)

    def _load(self, one: Any, kind: str) -> None:
        chain = self._read(Chain(kind, one.argval if isinstance(one.argval, str) else str(one.argval)))
        effect = dis.stack_effect(one.opcode, one.arg)
        self.stack += [chain, UNSEEN] if effect == 2 and _NULL_BEHIND else [UNSEEN] * (effect - 1) + [chain]

    def _read(self, chain: Chain, owner: Optional[Chain] = None) -> Chain:
        self.line.reads[chain] = owner
        return chain

    def _attribute(self, one: Any) -> None:
        owner, name = self._pop(), str(one.argval)
        effect = dis.stack_effect(one.opcode, one.arg)
        if isinstance(owner, Chain):
            self.stack.append(self._read(owner.then(name), owner))
        else:
            self.line.loose[name] = None
            self.stack.append(UNSEEN)
        self.stack += [UNSEEN] * effect  # a method and its owner are two

    def _operate(self, one: Any) -> None:
        n = 1 if one.opname.startswith("UNARY") else 2
        parts = [self._top(i) for i in range(n, 0, -1)]
        if one.opname == "BINARY_SUBSCR" or (one.opname == "BINARY_OP" and one.argrepr == "[]"):
            self.line.indexed.append((parts[0] if isinstance(parts[0], Chain) else None, parts[1]))
            parts = [UNSEEN]
        self._pop(n) if n > 1 else self._pop()
        self.stack.append(UNSEEN if UNSEEN in parts else Mixed(tuple(parts)))

    def _call(self, one: Any) -> None:
        name, n = one.opname, one.arg or 0
        if name == "CALL" and _HAS_PRECALL:
            self._otherwise(one)
            return
        more = name in ("CALL_KW", "CALL_FUNCTION_KW")  # names of keywords stand on top
        if name == "CALL_FUNCTION_EX":
            n, arguments = 1 + (n & 1), None
        else:
            arguments = [self._top(i) for i in range(n + more, more, -1)]
        callee = next((x for x in (self._top(n + more + i) for i in (1, 2)) if isinstance(x, Chain)), None)
        self._otherwise(one)
        result: Any = UNSEEN
        if callee is not None:
            self.line.calls.append((callee, arguments))
            result = self._looked_up(callee, arguments)
        if name != "PRECALL" and self.stack:
            self.stack[-1] = result
        elif name == "PRECALL" and self.stack:
            self.stack[-1] = UNSEEN

    def _looked_up(self, callee: Chain, arguments: Any) -> Any:
        """getattr and hasattr with what they look for."""
        if callee.kind != "global" or callee.attributes or callee.name not in ("getattr", "hasattr", "len"):
            return UNSEEN
        if callee.name == "len":
            return Constant(0)  # a plain number, whatever it is
        owner, name = (*(arguments or ()), UNSEEN, UNSEEN)[:2]
        name = name if isinstance(name, Constant) and isinstance(name.value, str) else None
        self.line.looked.append((owner if isinstance(owner, Chain) else None, name))
        if owner is None and name is not None:
            self.line.loose[name.value] = None
        return UNSEEN


_NOTHING = frozenset((
    "NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "MAKE_CELL", "COPY_FREE_VARS", "NOT_TAKEN",
))  # fmt: skip
_HAS_PRECALL = "PRECALL" in dis.opmap
_NULL_BEHIND = "CALL_KW" in dis.opmap  # Python 3.13 and later push it behind the function


def _line_number(one: Any, before: int) -> int:
    number = getattr(one, "line_number", None)
    if number is None and one.starts_line is not None and one.starts_line is not False:
        number = one.starts_line
    return before if number is None or number is True else int(number)
