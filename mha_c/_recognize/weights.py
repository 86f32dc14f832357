"""Which attribute of a layer is which weight of the book: `weights_of` finds them, by names and by sizes.

A layer is anything with attributes: a module of torch, or a class that keeps arrays.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from .._arguments.names import OTHERS
from .names import heads_of, root_of
from .stored import PER_HEAD, Leaf, Part, as_it_was, at, bias_of, leaves_of, paths, place, shape_of, stored_in, write

_ANY = "linear proj projection fc dense w".split()
_JOINING = ((2,), (0, 1)), ((0,), (1, 2)), ((1,), (0, 2))  # of W_o: (H, K, D), (D, H, K), (H, D, K)
_SCORERS = "w_v wv v va v_a vt v_t score energy".split()


class Weights(NamedTuple):
    """Where a layer keeps the weights of the book.

    Attributes
    ----------
    parts : dict
        {the book's name: its parts, joined along the outputs; of W_o, where heads have one each, along the inputs}.  A
        layer may have no W_o.
    num_heads, num_kv_heads : int
        Heads of queries; heads of keys and values.  1 where the layer says nothing of heads.
    """

    parts: dict[str, tuple[Part, ...]]
    num_heads: int = 1
    num_kv_heads: int = 1

    def get(self, layer: Any, name: str) -> Any:
        """The weight of this name of the book, (inputs, outputs) as in X @ W, as an array; w_v is (inputs,)."""
        parts = self.parts[name]
        found = np.concatenate([stored_in(layer, part)[place(part)].T for part in parts], axis=int(name != "W_o"))
        return found[:, 0] if name == "w_v" else found

    def set(self, layer: Any, name: str, new: Any) -> None:
        """Write the weight of this name, of the shape that `get` gives, into the layer."""
        new, begin = np.asarray(new), 0
        new = (new[:, None] if new.ndim == 1 else new).T
        for part in self.parts[name]:
            stored = stored_in(layer, part).copy()
            count = stored[place(part)].shape[name == "W_o"]
            cut = slice(begin, begin + count)
            stored[place(part)] = new[:, cut] if name == "W_o" else new[cut]
            write(layer, part.weight, as_it_was(layer, part, stored))
            begin += count

    def bias(self, layer: Any, name: str) -> Any:
        """The bias that is added where this weight multiplies, (outputs,); None where there is none."""
        found = [bias_of(layer, part) for part in self.parts[name]]
        if any(x is None for x in found):
            return None
        if name == "W_o":
            return sum(found)
        return np.concatenate([x[part.rows_of(len(x))] for x, part in zip(found, self.parts[name])])

    def set_bias(self, layer: Any, name: str, new: Any) -> None:
        """Write the bias of this weight, (outputs,), into a layer that has it."""
        begin = 0
        for part in self.parts[name]:
            stored = bias_of(layer, part).copy()
            if name == "W_o":
                write(layer, part.bias, stored * 0 if begin else new)
                begin += 1
                continue
            rows = part.rows_of(len(stored))
            count = len(stored[rows])
            stored[rows] = new[begin : begin + count]
            write(layer, part.bias, stored)
            begin += count

    def clear_biases(self, layer: Any) -> None:
        """Write zeros into all biases, those too that are added to what several weights make."""
        alone = {path for path in self.unused(layer) if path.rpartition(".")[2] in ("bias", "b")}
        for path in {part.bias for parts in self.parts.values() for part in parts} - {""} | alone:
            if at(layer, path) is not None:
                write(layer, path, np.zeros(tuple(at(layer, path).shape)))

    def sizes(self, layer: Any) -> dict[str, tuple[int, int]]:
        """{name: (inputs, outputs)}; 0 for a size that the first call of a layer sets."""
        shapes = {name: [shape_of(layer, part) for part in parts] for name, parts in self.parts.items()}
        return {
            name: (sum(x for _, x in each), each[0][0]) if name == "W_o" else (each[0][1], sum(x for x, _ in each))
            for name, each in shapes.items()
        }

    def beside(self, queries: int) -> Weights:
        """The same, where one weight makes W_q and W_k side by side, of so many features of queries."""
        (q, *_), (k, *_) = self.parts["W_q"], self.parts["W_k"]
        if q.columns is None or k.columns is None:
            return self
        wide = max(q.columns.stop, k.columns.stop)
        first = queries if q.columns.start == 0 else wide - queries
        columns = slice(0, first), slice(first, wide)
        own, other = columns if q.columns.start == 0 else columns[::-1]
        return self._replace(
            parts={**self.parts, "W_q": (q._replace(columns=own),), "W_k": (k._replace(columns=other),)}
        )

    def unused(self, layer: Any) -> list[str]:
        """The names of the layer's parameters that belong to none of these weights."""
        used = {path for parts in self.parts.values() for part in parts for path in (part.weight, part.bias)}
        return [path for path in paths(layer) if path not in used]

    def places(self) -> dict[str, str]:
        """{the book's name: where it is}, for messages: {"W_q": "c_attn[outputs 0..7]"}."""
        return {name: ", ".join(map(str, parts)) for name, parts in self.parts.items()}


def weights_of(layer: Any, kind: str = "", given: Optional[dict[str, str]] = None) -> list[Weights]:
    """The ways in which a layer's weights can be those of the book, the likeliest first; [] where there is none.

    Several ways are left where names and sizes do not tell: a matrix may be meant as X @ W or as a Linear's, thirds of
    a joint projection may be whole or head by head.  Numbers tell.

    Parameters
    ----------
    layer : object
        Its attributes, and those of its parts, hold weights: Linears, matrices, lists of Linears.
    kind : str
        "multi_head" or "additive"; "": whichever it is.
    given : dict, optional
        {"W_q": "my_query", ...}: paths of those that are not to be guessed.
    """
    held = _LayerLeaves(layer)
    found: list[Weights] = []
    if kind in ("", "multi_head"):
        found += held.multi_head(given or {})
    if kind in ("", "additive") and not found:
        found += held.additive(given or {})
    return found


# ---- what a layer holds --------------------------------------------------------------------------------------------


class _LayerLeaves:
    """What a layer holds that can be weights."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.leaves = list(leaves_of(layer))

    def heads(self) -> tuple[Optional[int], Optional[int]]:
        """(heads of queries, heads of keys) as attributes of the layer say; None where they do not."""
        return self._number("num_heads"), self._number("num_kv_heads")

    def _number(self, name: str) -> Optional[int]:
        if name == "num_heads":
            return heads_of(self.layer) or None
        names = (name, *OTHERS[name].anywhere.split())
        found = (getattr(self.layer, each, None) for each in names)
        return next((x for x in found if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)

    # ---- projections of queries, keys and values --------------------------------------------------

    def multi_head(self, given: dict[str, str]) -> list[Weights]:
        """The ways in which these are W_q, W_k, W_v, and perhaps W_o."""
        groups: dict[str, list[Leaf]] = {}
        for leaf in self.leaves:
            groups.setdefault(leaf.name, []).append(leaf)
        by_root: dict[str, list[Leaf]] = {}
        for name, leaves in groups.items():
            asked = next((ours for ours, path in given.items() if path in (name, *(leaf.path for leaf in leaves))), "")
            root = asked[2:] if asked else _root_of_path(name)
            if root and not (given and not asked and f"W_{root}" in given):
                by_root.setdefault(root, []).extend(leaves)
        if not {"q", "qkv"} & {*by_root}:
            by_root.update(_alike(groups))
        if not {"q", "qkv"} & {*by_root} and self.heads()[0]:
            by_root.update(_joint(self.leaves))
        if not {"q", "qkv"} & {*by_root}:
            by_root = next((_counted(leaves) for leaves in groups.values() if len(leaves) in (3, 4)), by_root)
        if all(leaf.shape[0] == 1 for leaf in by_root.get("v", [])) and any(
            x.shape[0] > 1 for x in by_root.get("q", [])
        ):
            by_root.pop("v", None)  # w_v, which makes a score
        joint = next((one for one in by_root if one in ("qkv", "kv")), "")
        if not ({"q", "k", "v"} <= {*by_root} or "qkv" in by_root or {"q", "kv"} <= {*by_root}):
            return []
        used = {id(leaf) for root in ("q", "k", "v", joint) for leaf in by_root.get(root, [])}
        rest = [leaf for leaf in self.leaves if id(leaf) not in used and leaf.shape[0] != 1]  # no W_o is a vector
        named = [leaf for leaf in by_root.get("o", []) if id(leaf) not in used]
        out = named[:1] if named and named[0].place[:1] in ((), (0,), (3,)) else rest[:1] if len(rest) == 1 else []
        if len(named) == len(by_root.get("q", [])) > 1 and all(leaf.place for leaf in named):
            out = named  # each head has one; their sum is the output
        queries = sum(leaf.shape[1] for leaf in out)
        found = [{**parts, **({"W_o": tuple(leaf.part for leaf in out)} if out else {})}
                 for parts in self._projections(by_root, joint, queries)]  # fmt: skip
        found = [self._with_biases(parts) for parts in found]
        return list(itertools.chain.from_iterable(map(self._with_heads, map(self._both_ways, found))))

    def _with_biases(self, parts: dict[str, tuple[Part, ...]]) -> dict[str, tuple[Part, ...]]:
        """The same, with vectors that are biases by their names alone: q_bias, bias_v, b_query."""
        used = {path for own in parts.values() for part in own for path in (part.weight, part.bias)}
        for path in paths(self.layer):
            last = path.rpartition(".")[2]
            name = "W_" + root_of(re.sub("_?bias_?|^b_|_b$", "", last))
            own = parts.get(name, ())
            if path not in used and len(own) == 1 and not own[0].bias and last.lower().startswith(("b", "q", "k", "v")):
                shape, weight = tuple(at(self.layer, path).shape), at(self.layer, own[0].weight).shape
                by_heads = bool(own[0].axes) and {*shape} <= {*weight}  # which axes are outputs, is told later
                if by_heads or shape == (shape_of(self.layer, own[0])[0],):
                    parts = {**parts, name: (own[0]._replace(bias=path),)}
        return parts

    def _projections(
        self, by_root: dict[str, list[Leaf]], joint: str, queries: int
    ) -> Iterator[dict[str, tuple[Part, ...]]]:
        """{W_q, W_k, W_v: parts} of each order of a joint projection.

        queries   how many of its outputs are queries, as W_o says; 0 where there is none
        """
        alone = {f"W_{x}": tuple(leaf.part for leaf in by_root[x]) for x in "qkv" if x in by_root}
        if not joint:
            yield alone
            return
        leaf = _upright(by_root[joint][0], len(joint))
        letters = _letters(leaf.name, joint)
        heads = self._number("num_heads") or 1
        orders = _orders(leaf.shape[0], len(letters), heads if joint == "qkv" else 1)
        if joint == "qkv":
            orders = itertools.chain(_shared(leaf.shape[0], queries or leaf.shape[1], heads), orders)
        for rows in orders:
            cut = {f"W_{x}": (leaf.part._replace(rows=own),) for x, own in zip(letters, rows)}
            yield {**{name: parts for name, parts in alone.items() if name not in cut}, **cut}

    def _with_heads(self, ways: list[dict[str, tuple[Part, ...]]]) -> list[Weights]:
        asked, shared = self.heads()
        found = []
        for parts in ways:
            shapes = {name: sum(shape_of(self.layer, part)[0] for part in own) for name, own in parts.items()}
            first, *others = parts["W_q"]
            heads = asked or (len(parts["W_q"]) if others else None)
            if first.axes and not others:
                heads = at(self.layer, first.weight).shape[first.axes[0][0]]
            size = self._number("head_dim")
            if heads is None and size and shapes["W_q"] % size == 0 and len(parts["W_q"]) == 1:
                heads = shapes["W_q"] // size
            heads = heads or 1
            width = shapes["W_q"] // heads
            kv = shapes["W_k"] // width if width and shapes["W_k"] % width == 0 else shared or heads
            found.append(Weights(parts, heads, kv or heads))
        return found

    def _both_ways(self, parts: dict[str, tuple[Part, ...]]) -> list[dict[str, tuple[Part, ...]]]:
        """As they are; and with matrices that are not in a Linear as (outputs, inputs), where that may be."""
        bare = [name for name, own in parts.items() if any(not part.outputs_first for part in own)]
        if any(hasattr(at(self.layer, p.weight.rpartition(".")[0]), "nf") for n in bare for p in parts[n]):
            bare = []
        deep = [name == "W_o" for name, own in parts.items() if any(part.axes for part in own)]
        into, out = PER_HEAD if False in deep else [()], _JOINING if True in deep else [()]

        def so(part: Part, axes: Any, first: bool) -> Part:
            return part._replace(axes=axes) if part.axes else part._replace(outputs_first=part.outputs_first or first)

        return [
            {name: tuple(so(part, axes[name == "W_o"], first) for part in own) for name, own in parts.items()}
            for *axes, first in itertools.product(into, out, (False, True) if bare else (False,))
        ]

    # ---- additive scores --------------------------------------------------------------------------

    def additive(self, given: dict[str, str]) -> list[Weights]:
        """The ways in which these are W_q, W_k and w_v, or one projection of query and key side by side, and w_v."""
        if not 2 <= len(self.leaves) <= 3:
            return []
        asked = {leaf.path: ours for leaf in self.leaves for ours, path in given.items() if path == leaf.path}
        vectors = [x for x in self.leaves if asked.get(x.path) == "w_v"] or [x for x in self.leaves if 1 in x.shape]
        if len(vectors) != 1:
            vectors = [x for x in self.leaves if x.name.lower() in _SCORERS]
        if len(vectors) != 1:
            return []
        one = vectors[0].part
        w_v = (one._replace(outputs_first=one.outputs_first != (vectors[0].shape[0] > 1 and vectors[0].shape[1] == 1)),)
        others = [leaf for leaf in self.leaves if leaf is not vectors[0]]
        if len(others) == 1:
            return self._side_by_side(others[0], w_v)
        roots = [asked.get(leaf.path, "W_" + _root_of_path(leaf.name)) for leaf in others]
        orders = [others[::-1]] if roots[0] == "W_k" or roots[1] == "W_q" else [others]
        if not {"W_q", "W_k"} & {*roots}:
            orders = [others, others[::-1]]
        ways: list[dict[str, tuple[Part, ...]]] = [{"W_q": (q.part,), "W_k": (k.part,), "w_v": w_v} for q, k in orders]
        return [Weights(each) for way in ways for each in self._both_ways(way)]

    def _side_by_side(self, leaf: Leaf, w_v: tuple[Part, ...]) -> list[Weights]:
        """One projection of [query; key], or [key; query].  Where the one ends and the other begins, the features of a
        call tell; here both have half of them."""
        half = leaf.shape[1] // 2
        first, second = (
            leaf.part._replace(columns=slice(0, half)),
            leaf.part._replace(columns=slice(half, leaf.shape[1])),
        )
        pairs = (first, second._replace(bias="")), (second._replace(bias=""), first)  # the bias is added once
        return [Weights({"W_q": (q,), "W_k": (k,), "w_v": w_v}) for q, k in pairs]


def _root_of_path(name: str) -> str:
    """Of "heads.key" that of "key"; of "to_out" or "to_out.proj" that of "to_out"."""
    *around, last = name.split(".")
    found = [root_of(word) for word in around]
    by_last = root_of(last)
    says_little = last.lower() in _ANY and any(found)  # of "query.linear" the "query" says more
    return next(filter(None, [*found, by_last] if says_little else [by_last, *found]), "")


def _alike(groups: dict[str, list[Leaf]]) -> dict[str, list[Leaf]]:
    """Three names that differ in one word alone, which says q, k, v: my_query_net, my_key_net, my_value_net; or in one
    letter at an end: fq, fk, fv, and fo."""
    found: dict[str, dict[str, list[Leaf]]] = {}
    for name, leaves in groups.items():
        words = re.split("[_.]", name)
        for i, word in enumerate(words):
            if root_of(word) in ("q", "k", "v"):
                found.setdefault("_".join([*words[:i], "", *words[i + 1 :]]), {})[root_of(word)] = leaves
    for name, leaves in groups.items():
        for letter, rest in ((name[-1:].lower(), f"{name[:-1]}*"), (name[:1].lower(), f"*{name[1:]}")):
            if letter and letter in "qkvo":
                found.setdefault(rest, {})[letter] = leaves
    return next((one for one in found.values() if {*"qkv"} <= {*one}), {})


def _upright(leaf: Leaf, count: int) -> Leaf:
    """A matrix of so many projections in no Linear, as (outputs, inputs) where only that has as many outputs."""
    outputs, inputs = leaf.shape
    if leaf.part.outputs_first or leaf.part.axes or outputs * count != inputs:
        return leaf
    return leaf._replace(part=leaf.part._replace(outputs_first=True), shape=(inputs, outputs))


def _joint(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    """One that makes three times as many features as it gets, and perhaps one behind it, by names that say nothing."""
    shapes = {leaf: _upright(leaf, 3).shape for leaf in leaves}
    wide = [leaf for leaf, (outputs, inputs) in shapes.items() if outputs == 3 * inputs > 0]
    others = [leaf for leaf in leaves if leaf not in wide]
    fits = len(wide) == 1 and len(others) < 2 and all(leaf.shape[1] == shapes[wide[0]][1] for leaf in others)
    return {"qkv": wide} if fits else {}


def _counted(leaves: list[Leaf]) -> dict[str, list[Leaf]]:
    """linears[0] ... linears[3] of one list are W_q, W_k, W_v, W_o."""
    return {letter: [leaf] for letter, leaf in zip("qkvo", leaves)} if all(x.name and x.place for x in leaves) else {}


def _letters(name: str, joint: str) -> str:
    """The order of the parts of a joint projection, if its name says one: "qkv", "kqv", ..."""
    found = re.search("[qkv]{2,3}", name.lower().rpartition(".")[2])
    return found[0] if found and {*found[0]} == {*joint} and len(found[0]) == len(joint) else joint


def _orders(outputs: int, parts: int, heads: int) -> Iterator[list[Sequence[int]]]:
    """Which outputs are q, k, v: one after the other; so for each head; or for each feature, beside each other."""
    size = outputs // parts
    if size * parts != outputs:  # one of another size than its name says
        return
    yield [range(i * size, (i + 1) * size) for i in range(parts)]
    if heads > 1 and size % heads == 0:
        each = np.arange(outputs).reshape(heads, parts, -1)
        yield [tuple(each[:, i].ravel().tolist()) for i in range(parts)]
    if heads and size % heads == 0 and size:
        each = np.arange(outputs).reshape(-1, parts, heads)
        yield [tuple(each[:, i].T.ravel().tolist()) for i in range(parts)]


def _shared(outputs: int, queries: int, heads: int) -> Iterator[list[Sequence[int]]]:
    """The same where heads of queries share keys: all q, then k, then v; or so for each group of heads."""
    keys = (outputs - queries) // 2
    if not 0 < keys < queries or queries + 2 * keys != outputs:
        return
    yield [range(queries), range(queries, queries + keys), range(queries + keys, outputs)]
    width = queries // heads
    if keys % width == 0 and queries % keys == 0 and keys > width:
        each = np.arange(outputs).reshape(keys // width, -1, width)
        yield [tuple(x.ravel().tolist()) for x in (each[:, :-2], each[:, -2], each[:, -1])]
