"""What of a file is judged: the attentions that it defines, never the model or the block that holds them."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

from ..._recognize import books_name, parameters, root_of
from ..asking.answers import readable
from ..asking.kinds import told
from ..asking.making import Unmade
from ..asking.written import as_written, tree_of
from .notebooks import parts

_DefinitionNode = Union[ast.FunctionDef, ast.ClassDef]
_TOKENS = re.compile("(?!.*(rotary|rope|position|relative|segment)).*embeddings?", re.IGNORECASE)
# Layers that an attention is made of; who makes others beside an attention is a block, or a model.
_OF_AN_ATTENTION = re.compile(".*(Linear|Dropout|Softmax|Parameter|Module|ModuleList|ModuleDict|Sequential|Identity)")
_NAMED = re.compile(
    "(my|scaled|dot|product|masked|causal|self|cross|multi|head|softmax|simple|naive|run|compute|_|[0-9])*"
    "(attention|attend|sdpa|mha|attn)_?(v?[0-9]|layer|function|forward)?",
    re.IGNORECASE,
)
# Names that say nothing else than an attention of the book's, or a part of one: no alibi, no relative positions.
_PLAIN = re.compile(
    "(my|own|the|simple|naive|basic|run|compute|apply|scaled|dot|product|masked|causal|self|cross|multi|head|heads|"
    "single|one|softmax|attention|attend|sdpa|mha|attn|additive|bahdanau|rope|rotary|rotate|positional|position|pos|"
    "embedding|emb|encoding|enc|transpose|split|merge|combine|join|qkv|output|group|grouped|query|gqa|mqa|window|"
    "sliding|bert|gpt|vit|encoder|decoder|transformer|layer|function|forward|module|v?[0-9]|_)*",
    re.IGNORECASE,
)
_SURE = {  # kinds that are no attention: what the name must say
    "rope": "rope|rotary", "positional_encoding": "pos[a-z]*_?(enc|emb)", "masked_softmax": "softmax",
    "transpose_qkv": "transpose_qkv|split_?heads?", "transpose_output": "transpose_output|(merge|combine|join)_?heads?",
}  # fmt: skip


class Definition:
    """A function or a class of a file."""

    def __init__(self, name: str, mine: Any, node: Optional[_DefinitionNode]) -> None:
        self.name, self.mine, self.node = name, mine, node
        self.words = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node else set[str]()
        self.uses: set[str] = set()  # names of the definitions that it uses, and what these use
        self.unmade = ""  # why the constructor fails, where nothing else tells what it is

    @cached_property
    def kind(self) -> Optional[str]:
        """What its weights, name and arguments tell; None where they tell nothing."""
        if isinstance(self.mine, type) and not (hasattr(self.mine, "forward") or "__call__" in dir(self.mine)):
            return None
        try:
            return told(self.mine, None)
        except Unmade as error:
            cause = readable(error.__cause__ or error)
            self.unmade = f"{type(cause).__name__}: {cause}"
        except (TypeError, ValueError):
            pass
        return None

    @cached_property
    def holds_projections(self) -> bool:
        """Whether it has weights of queries, keys and values itself."""
        roots = {root_of(each.attr) for each in self._walk() if isinstance(each, ast.Attribute) and _is_stored(each)}
        return {"q", "k", "v"} <= roots or "qkv" in roots or {"q", "kv"} <= roots

    @cached_property
    def takes_tokens(self) -> bool:
        """Whether it gives an argument of a call to an embedding that it has made."""
        tables = set(_named_after(self._walk(), _TOKENS))
        for method in [each for each in self._walk() if isinstance(each, ast.FunctionDef)] if tables else ():
            given = {each.arg for each in method.args.args}
            for call in [each for each in ast.walk(method) if isinstance(each, ast.Call)]:
                table = call.func.attr if isinstance(call.func, ast.Attribute) else ""
                if table in tables and any(isinstance(x, ast.Name) and x.id in given for x in call.args):
                    return True
        return False

    @cached_property
    def makes(self) -> set[str]:
        """The last words of all that it calls."""
        calls = [each.func for each in self._walk() if isinstance(each, ast.Call)]
        return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}

    def _walk(self) -> Iterator[ast.AST]:
        return ast.walk(self.node) if self.node else iter(())

    def is_sure(self) -> bool:
        """Whether more than a word of its name says that it is an attention, or a part of one."""
        given = parameters(self.mine)
        takes = {books_name(each.name, ["queries", "keys", "values", "W_q", "W_k"]) for each in given}
        if self.kind and self.kind in _SURE:
            splits = self.kind.startswith("transpose") and not isinstance(self.mine, type)
            needed = {"num_heads"} if splits else set[str]()
            named = re.search(_SURE[self.kind], self.name, re.IGNORECASE)
            return bool(named) and needed <= {books_name(each.name, ["num_heads"]) for each in given}
        if self.holds_projections or {"queries", "keys"} <= takes or {"W_q", "W_k"} <= takes:
            return True
        return bool(_NAMED.fullmatch(self.name)) and (isinstance(self.mine, type) or len(given) > 2)

    def may_be_another(self) -> bool:
        """Whether it may be right, but nothing of the book's: its name says more, or it holds what none has; heads are
        split and joined with other axes than the book's, too."""
        beside = self.makes & {"LayerNorm", "RMSNorm", "RNN", "LSTM", "GRU", "Conv1d", "Conv2d"}
        lays_heads = str(self.kind).startswith("transpose") and "transpose" not in self.name.lower()
        return not _PLAIN.fullmatch(self.name) or bool(beside) or lays_heads


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)


def _named_after(nodes: Iterator[ast.AST], pattern: re.Pattern[str]) -> Iterator[str]:
    """The attributes, keywords and keys that hold what a call of such a name makes."""

    def makes(value: Optional[ast.AST]) -> bool:
        func = value.func if isinstance(value, ast.Call) else None
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        return bool(pattern.fullmatch(name))

    for node in nodes:
        if isinstance(node, ast.Assign) and any(map(makes, ast.walk(node.value))):
            yield from (
                each.attr for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Attribute)
            )
        elif isinstance(node, ast.keyword) and makes(node.value) and node.arg:
            yield node.arg


class Definitions:
    """All that a file defines, and how it hangs together."""

    def __init__(self, module: ModuleType, path: Path) -> None:
        nodes = {
            node.name: node
            for _, text in parts(path)
            for node in tree_of(text).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        self.all = {name: Definition(name, mine, nodes.get(name)) for name, mine in defined(module).items()}
        for name, definition in self.all.items():
            definition.uses = self._reached(name)

    def _reached(self, name: str) -> set[str]:
        reached: set[str] = set()
        waiting = [name]
        while waiting:
            new = {each for each in self.all[waiting.pop()].words & {*self.all} if each != name} - reached
            reached |= new
            waiting += new
        return reached - {name}

    @cached_property
    def attentions(self) -> list[str]:
        """Those whose kind is told, without models, blocks, and plain helpers."""
        found = [name for name, each in self.all.items() if not each.takes_tokens and not _is_plain_softmax(each.mine)]
        found = [name for name in found if self.all[name].kind]
        return [name for name in found if not self._is_block(self.all[name], found)]

    def _is_block(self, definition: Definition, found: Sequence[str]) -> bool:
        """Whether it holds an attention, and something beside it that no attention is made of."""
        if definition.holds_projections or not isinstance(definition.mine, type):
            return False
        held = {name for name in definition.makes & {*found} if name != definition.name}
        nn: Any = getattr(sys.modules.get("torch"), "nn", None)
        layers = {each for each in definition.makes if isinstance(getattr(nn, each, None), type)}
        own = {each for each in definition.makes & {*self.all} if isinstance(self.all[each].mine, type)} - held
        beside = {each for each in layers | own if not _OF_AN_ATTENTION.fullmatch(each)}
        return bool(beside) and bool(held or any("attention" in each.lower() for each in layers))

    @property
    def left(self) -> dict[str, str]:
        """The classes that nothing can be told of, since their constructor fails, and why it does."""
        found = {name: each for name, each in self.all.items() if each.unmade and not each.uses & {*self.attentions}}
        return {name: each.unmade for name, each in found.items()}

    def outermost(self, names: Sequence[str], among: Sequence[str] = ()) -> list[str]:
        """Those that no other of these uses, but for such as use each other."""
        among = among or names

        def is_used(name: str) -> bool:
            return any(
                name in self.all[other].uses and other not in self.all[name].uses for other in among if other != name
            )

        return [name for name in names if not is_used(name)]

    def parts_of(self, name: str) -> list[str]:
        """The attentions that this one uses, the outermost."""
        return self.outermost([each for each in self.attentions if each in self.all[name].uses])


def layer_of(module: ModuleType, mine: Any) -> Any:
    """A layer of this class that the file itself has made, in a model or alone; None where it has made none."""
    for made in [*vars(module).values()] if isinstance(mine, type) else []:
        if type(made) is mine:
            return made
        modules = getattr(made, "modules", None) if not isinstance(made, (type, ModuleType)) else None
        with suppress(Exception):
            found = [each for each in modules() if type(each) is mine] if callable(modules) else []
            if found:
                return found[0]
    return None


def defined(module: ModuleType) -> dict[str, Any]:
    """Functions and classes that the file itself defines, those with an underscore left out."""
    mine = {x: as_written(f) for x, f in vars(module).items() if x[0] != "_" and callable(f)}
    mine = {x: f for x, f in mine.items() if getattr(f, "__module__", "") == module.__name__}
    return {x: f for x, f in mine.items() if isinstance(f, type) or type(f).__module__ != module.__name__}


def made_by_main(path: Path) -> set[str]:
    """The names that the file gives a value under `if __name__ == "__main__":`, which is not run here."""
    body = [node for _, text in parts(path) for node in tree_of(text).body]
    mains = [
        x for x in body if isinstance(x, ast.If) and any(getattr(y, "id", "") == "__name__" for y in ast.walk(x.test))
    ]
    inner = [each for main in mains for each in ast.walk(main)]
    return {each.id for each in inner if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _is_plain_softmax(mine: Any) -> bool:
    """A helper that takes scores alone, and maybe an axis: it is no exercise of the book, and needs no mask."""
    given = [each for each in parameters(mine) if each.name.lower() not in ("dim", "axis")]
    needed = [each for each in given if each.default is each.empty]
    name = str(getattr(mine, "__name__", ""))
    return "softmax" in name.lower() and "mask" not in name.lower() and len(needed) == 1
