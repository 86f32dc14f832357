"""Changes of one place in a line of a student's: other axes, numbers, names, functions, orders.

`mending` tries them.  Which are tried for a known mistake, the table at the end says.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .arranging import (
    halves,
    interleaved,
    letters,
    neighbours,
    of_groups,
    ranges,
    sides,
    signs,
    signs_of_both,
    whole_pairs,
    with_input,
)  # fmt: skip
from .places import (
    SYMBOLS,
    WIDTH_OF_HEAD,
    Edit,
    Scope,
    bracketed,
    called,
    end_of,
    instead,
    is_number,
    is_product,
    number_in,
)
from .statements import (
    around_all,
    bounded,
    complement,
    exchanged,
    exponentials,
    given_more,
    inverted,
    joined_masks,
    mirrored,
    of_all,
    of_numbers,
    of_other_axes,
    other_corner,
    other_texts,
    over_rows,
    per_head,
    thrown_away,
    unread,
)  # fmt: skip

_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OTHER_WAY = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="}
_PRODUCTS = ("matmul", "bmm", "einsum")
_NAMES = {"tril": "triu", "triu": "tril", "sin": "cos", "cos": "sin", "log_softmax": "softmax", "relu": "tanh",
          "sigmoid": "tanh", "softmin": "softmax", "mean": "sum", "argmax": "max", "tile": "repeat",
          "repeat": "repeat_interleave", "exp2": "exp", "expm1": "exp", "min": "max", "amin": "amax",
          "prod": "sum"}  # fmt: skip


def edits(nodes: Sequence[Any], names: Scope, of: str = "") -> Iterator[Edit]:
    """Changes of one place; `of`: those alone that mend a mistake of this id."""
    for change in _of_mistake(of) if of else _ALL:
        for node in nodes:
            yield from change(node, names)


def is_of_number(edit: Edit, line: bytes) -> bool:
    """Whether it changes a number, or a text, that is written there: a name has its value from elsewhere."""
    return bool(re.fullmatch(rb"[-+(]*[\d.]+(?:e[-+]?\d+)?\)?|[\"'].*[\"']", line[edit.start : edit.end]))


def _axes(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        named = [x.value for x in node.keywords if x.arg in ("axis", "dim")]
        told = [*named, *(x for x in node.args if number_in(x) is not None)]
        yield from (instead(x, "-1") for x in told if number_in(x) != -1)
    elif isinstance(node, ast.Subscript) and number_in(node.slice) not in (None, -1):
        yield instead(node.slice, "-1")
    elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call) and "None" in ast.unparse(node.slice):
        of = node.value  # .sum(1)[:, None]: the axis, and where it is put back
        told = [x for x in (*of.args, *(each.value for each in of.keywords)) if number_in(x) is not None]
        arrays = [f"{ast.unparse(x)}, " for x in of.args if x not in told]
        if told:
            yield instead(node, f"{ast.unparse(of.func)}({''.join(arrays)}-1, keepdims=True)")
    elif isinstance(node, ast.Assign) and re.search("axis|dim", ast.unparse(node.targets[0])):
        yield from [instead(node.value, "-1")] if number_in(node.value) not in (None, -1) else ()


def _roots(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, ast.Div):
            yield instead(node.right, f"({right}) ** 0.5" if " " in right else f"{right} ** 0.5")
        elif isinstance(node.op, ast.Mult):
            yield instead(node, f"{left} / ({right})" if " " in right else f"{left} / {right}")
        elif isinstance(node.op, ast.Pow):
            yield from (instead(node.right, text) for text in ("0.5", "-0.5"))
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.BinOp, ast.Constant)):
        yield instead(node.value, f"1 / ({ast.unparse(node.value)})" if isinstance(node.value, ast.BinOp) else
                    f"1 / {ast.unparse(node.value)}")  # fmt: skip
    if is_product(node) or (isinstance(node, ast.Call) and called(node) in ("matmul", "bmm", "einsum")):
        arrays = [node.left] if is_product(node) else [x for x in node.args if not isinstance(x, ast.Constant)]
        if arrays:
            yield instead(node, f"{ast.unparse(node)} / {ast.unparse(arrays[0])}.shape[-1] ** 0.5")


def _features(node: Any, _: Scope) -> Iterator[Edit]:
    """Of a product of queries and keys that is scaled in its line: their features, under a root of something else."""
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
        inner = [*ast.walk(node.value)]
        products: list[Any] = [x for x in inner if is_product(x)]
        roots = [x.left for x in inner if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Pow)]
        roots += [x.args[0] for x in inner if isinstance(x, ast.Call) and called(x) == "sqrt" and x.args]
        first = [x.left for x in products] + [
            x.args[at] for x in inner if isinstance(x, ast.Call) and called(x) in _PRODUCTS
            for at in [called(x) == "einsum"] if len(x.args) > at
        ]  # fmt: skip
        for one in first[:1]:
            yield from (instead(x, f"{ast.unparse(one)}.shape[-1]") for x in roots)


def _comparisons(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        for table in (_COMPARED, _OTHER_WAY):
            if type(node.ops[0]) in table:
                yield instead(node, f"{left} {table[type(node.ops[0])]} {right}")
    if isinstance(node, ast.Call) and called(node) == "max" and len(node.args) == 2:  # where a window begins
        yield instead(node.args[1], f"{ast.unparse(node.args[1])} + 1")


def _inversions(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.USub)):
        yield instead(node, ast.unparse(node.operand))
    if isinstance(node, ast.Call) and called(node) in ("tri", "tril", "triu"):
        yield instead(node, f"1 - {ast.unparse(node)}")
    if isinstance(node, ast.Call) and called(node) in ("masked_fill", "masked_fill_", "where") and node.args:
        if len(node.args) == 3:
            one, two = node.args[1:]
            yield Edit(one.col_offset, end_of(two), f"{ast.unparse(two)}, {ast.unparse(one)}")


def _fills(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        if called(node) in ("masked_fill", "masked_fill_", "where", "full", "full_like"):
            yield from (instead(x, "-1e9") for x in node.args[1:] if not isinstance(x, ast.Name))
        yield from (instead(x.value, "-1e9") for x in node.keywords if re.search("val|fill", x.arg or ""))
        if called(node) == "ones" and len(node.args) == 1 and isinstance(node.func, ast.Attribute):
            start = f"{ast.unparse(node.func.value)}.full"
            yield Edit(node.col_offset, end_of(node.args[0]), f"{start}({ast.unparse(node.args[0])}, -1e9")
    if isinstance(node, ast.Assign) and (isinstance(node.targets[0], ast.Subscript) or is_number(node.value)):
        yield instead(node.value, "-1e9")
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
        yield instead(node, f"{ast.unparse(node.target)} = -1e9")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield instead(node.right, "-1e9")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and called(node.value) == "finfo":
        yield instead(node, f"{ast.unparse(node.value)}.min")


def _calls(node: Any, _: Scope) -> Iterator[Edit]:
    """Another function; and a call with one argument without the function."""
    if isinstance(node, ast.Call):
        other = _NAMES.get(called(node))
        if other and isinstance(node.func, ast.Attribute):
            yield Edit(end_of(node.func) - len(node.func.attr), end_of(node.func), other)
        if len(node.args) == 1 and isinstance(node.func, ast.Name):
            yield instead(node, ast.unparse(node.args[0]))
            if node.func.id == "max":
                yield instead(node.func, "sum")
        if called(node) in ("view", "reshape") and len(node.args) > 3:
            order = [node.args[0], node.args[2], node.args[1], *node.args[3:]]
            yield instead(node, f"{ast.unparse(node.func)}({', '.join(map(ast.unparse, order))}).swapaxes(1, 2)")
        if called(node) in ("view", "reshape", "flatten") and isinstance(node.func, ast.Attribute):
            inner = ", ".join(map(ast.unparse, node.args))
            yield instead(node, f"{ast.unparse(node.func.value)}.swapaxes(1, 2).reshape({inner})")
        if called(node) in ("sigmoid", "tanh", "relu", "exp", "softplus"):
            of = node.args[0] if node.args else getattr(node.func, "value", node.func)
            yield instead(node, f"{bracketed(of)}.softmax(-1)")
        if called(node) in ("maximum", "clip", "clamp"):
            yield instead(node, f"{ast.unparse(node.func).rpartition('.')[0]}.tanh({ast.unparse(node.args[0])})")


def _in_functions(node: Any, names: Scope) -> Iterator[Edit]:
    """What is given a name, or returned, in exp or tanh; that, or a variable, in softmax or in a layer."""
    whole = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    library = "np" if "np" in names.of_file else "torch"
    if whole is not None:
        yield from (instead(whole, f"{library}.{name}({ast.unparse(whole)})") for name in ("exp", "tanh"))
    for part in (whole, node if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None):
        if part is not None and not (isinstance(part, ast.Name) and part.id not in names.variables):
            yield from _in_softmax(part, names)


def _in_softmax(part: Any, names: Scope) -> Iterator[Edit]:
    text = ast.unparse(part)
    own = [x for x in names.of_file if "softmax" in x.lower() and "masked" not in x.lower()]
    own += [f"self.{x}" for x in names.attributes if "softmax" in x.lower()]
    yield from (instead(part, f"{name}({text})") for name in own)
    if "torch" in names.of_file:
        yield instead(part, f"{bracketed(part)}.softmax(-1)")


def _in_layers(node: Any, names: Scope) -> Iterator[Edit]:
    """A variable in one of the layers that self has, or times one of its matrices."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names.variables:
        for each in names.attributes:
            if re.search("drop|softmax", each.lower()) is None:
                yield instead(node, f"{node.id} @ self.{each}" if "np" in names.of_file else f"self.{each}({node.id})")


def _numbers_beside(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value >= 50:
        yield instead(node, "10000.0")
    n = number_in(node)
    if n is not None and not isinstance(n, bool):
        yield from (instead(node, str(n + step)) for step in (-1, 1))
        # 10000 is a base of angles: as the end of a slice it would be right, too, and say nothing.
        others = (10000,) if abs(n) >= 100 else (2, 0, 1)
        yield from (instead(node, str(x)) for x in others if x not in (n, n - 1, n + 1))


def _symbols(node: Any, _: Scope, others: str = "+-*/") -> Iterator[Edit]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield Edit(end_of(node.targets[0]), node.value.col_offset, " += ")
    if isinstance(node, ast.BinOp) and type(node.op) in SYMBOLS:
        own, left, right = SYMBOLS[type(node.op)], ast.unparse(node.left), ast.unparse(node.right)
        bracketed = f"({right})" if isinstance(node.right, ast.BinOp) else right
        opposite = own == "-" and number_in(node.left) == 1  # of a mask, or of a rate
        others = "*" if own == "/" else others  # the same number added to a row makes the same softmax
        is_sum = isinstance(node.right, ast.BinOp) and isinstance(node.right.op, (ast.Add, ast.Sub))
        for each in others if not opposite else "":
            if each != own:
                yield instead(node, f"{left} {each} {right if each in '+-' and not is_sum else bracketed}")


def _without(node: Any, _: Scope) -> Iterator[Edit]:
    """One side of an operation alone; a method's object alone; a slice without its end; no scale that is given."""
    if isinstance(node, ast.Slice) and node.upper is not None and node.step is None:
        yield instead(node, f"{ast.unparse(node.lower) if node.lower is not None else ''}:")
    if isinstance(node, ast.BinOp):
        yield from (instead(node, ast.unparse(x)) for x in (node.left, node.right))
    if isinstance(node, ast.Call):
        of_name = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        moves = ("transpose", "swapaxes", "flip", "roll")
        if isinstance(node.func, ast.Attribute) and (not of_name or called(node) in moves):
            yield instead(node, ast.unparse(node.func.value))
        if node.args and number_in(node.args[0]) is None:
            yield instead(node, ast.unparse(node.args[0]))
        if node.args and node.keywords and node.keywords[-1].arg == "scale":
            before = [*node.args, *(x.value for x in node.keywords[:-1])][-1]
            yield Edit(end_of(before), end_of(node.keywords[-1].value), "")


def _orders(node: Any, _: Scope) -> Iterator[Edit]:
    """Two values, or two targets, in the other order; axes in another one."""
    if isinstance(node, (ast.Tuple, ast.Call)):
        items = node.elts if isinstance(node, ast.Tuple) else node.args
        for i, j in itertools.combinations(range(len(items)), 2) if len(items) < 5 else ():
            new = [*items]
            new[i], new[j] = new[j], new[i]
            yield Edit(items[0].col_offset, end_of(items[-1]), ", ".join(map(ast.unparse, new)))
            for order in ((1, 2, 0), (2, 0, 1)) if len(items) == 3 else ():
                text = ", ".join(ast.unparse(items[k]) for k in order)
                yield Edit(items[0].col_offset, end_of(items[-1]), text)


def _products(node: Any, _: Scope) -> Iterator[Edit]:
    """A product with the second array transposed: the two arrays in the other order."""
    is_call = isinstance(node, ast.Call) and called(node) in ("matmul", "bmm") and len(node.args) == 2
    if not is_call and not is_product(node):
        return
    between, left, right = (", ", *node.args) if is_call else (" @ ", node.left, node.right)
    turned = getattr(right.func if isinstance(right, ast.Call) else right, "value", None)
    if isinstance(left, ast.Name) and isinstance(turned, ast.Name):
        yield Edit(
            left.col_offset, end_of(right), f"{turned.id}{between}{left.id}{ast.unparse(right)[len(turned.id) :]}"
        )


def _other_names(node: Any, names: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and node.id in names.variables and isinstance(node.ctx, ast.Load):
        yield from (instead(node, name, True) for name in names.variables if name != node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        if isinstance(node.ctx, ast.Load) and node.attr in names.attributes:
            yield from (instead(node, f"self.{name}", True) for name in names.attributes if name != node.attr)


def _indices(node: Any, names: Scope) -> Iterator[Edit]:
    """A variable in the place of a number between brackets; the other side of a slice; a slice with a sign."""
    if isinstance(node, ast.Subscript):
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for at in places:
            if number_in(at) is not None:
                yield from (instead(at, name) for name in names.variables if len(name) < 3)
    if isinstance(node, ast.Slice) and node.step is None:
        if node.lower is None and node.upper is not None:
            yield instead(node, f"{ast.unparse(node.upper)}:")
        elif node.lower is not None and node.upper is None:
            yield instead(node, f":{ast.unparse(node.lower)}")


def _up_to_now(node: Any, names: Scope) -> Iterator[Edit]:
    """A slice that ends with the step that a loop is at."""
    if isinstance(node, ast.Slice) and node.step is None:
        lower = "" if node.lower is None else ast.unparse(node.lower)
        yield from (instead(node, f"{x}:{name} + 1") for name in names.counters for x in {lower, ""} - {name})
    if isinstance(node, ast.Call) and called(node) == "slice" and node.args:
        lower = ast.unparse(node.args[0]) if len(node.args) > 1 else "0"
        for name in names.counters:
            texts = (f"{x}, {name} + 1" for x in sorted({lower, "0"} - {name, "None"}))
            yield from (Edit(node.args[0].col_offset, end_of(node.args[-1]), text) for text in texts)


def _flags(node: Any, _: Scope) -> Iterator[Edit]:
    """A flag of a call, the other way."""
    for each in node.keywords if isinstance(node, ast.Call) else ():
        if isinstance(each.value, ast.Constant) and type(each.value.value) is bool:
            yield instead(each.value, str(not each.value.value))


def _normalised(node: Any, _: Scope) -> Iterator[Edit]:
    """What is given a name, divided by its sum; or softmax of it."""
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
        value, whole = ast.unparse(node.value), bracketed(node.value)
        yield instead(node.value, f"{value} / {whole}.sum(-1, keepdims=True)")
        yield instead(node.value, f"{whole}.softmax(-1)")
        yield instead(node.value, f"softmax({value})")


def _turned(node: Any, _: Scope) -> Iterator[Edit]:
    """A matrix transposed, or not."""
    if isinstance(node, ast.Attribute) and node.attr == "T":
        yield instead(node, ast.unparse(node.value))
    if is_product(node) and isinstance(node.right, (ast.Name, ast.Attribute)):
        yield instead(node.right, f"{ast.unparse(node.right)}.T")


def _with_scale(node: Any, names: Scope) -> Iterator[Edit]:
    """What is given a name, divided by the root of the features."""
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.BinOp, ast.Call, ast.Subscript)):
        value = ast.unparse(node.value)
        for name in names.variables:
            if WIDTH_OF_HEAD.fullmatch(name):
                yield instead(node.value, f"{value} / {name} ** 0.5")


def _wrapped(node: Any, _: Scope) -> Iterator[Edit]:
    """What is returned, projected."""
    if isinstance(node, ast.Return) and node.value is not None:
        inner = ast.unparse(node.value)
        names = ("W_o", "c_proj", "proj", "out_proj", "w_o", "Wo", "fc_out", "to_out", "out", "o_proj")
        yield from (instead(node.value, f"self.{name}({inner})") for name in names)
        yield instead(node.value, f"{inner} @ W_o")


_ALL = (
    _axes, _roots, _comparisons, _inversions, _fills, _calls, _without, _numbers_beside, _symbols, _orders,
    _other_names, _wrapped, _indices, signs, halves, letters, _normalised, _turned, _in_functions, _in_layers,
    sides, ranges, interleaved, _with_scale, _products, thrown_away, mirrored, over_rows, of_other_axes, bounded,
    of_numbers, exponentials, unread, other_texts, exchanged, inverted, other_corner, joined_masks, given_more, of_all,
    around_all, of_groups, neighbours,
)  # fmt: skip
# What mends the mistakes whose ids start so.
_MENDS = {
    ("scale_", "scaled", "no_scale"): (
        _axes, _roots, partial(_symbols, others="*/"), _other_names, _without, _numbers_beside, _with_scale, _features,
        per_head,
    ),
    ("softmax_axis", "max_axis"): (_axes, letters, _orders, over_rows),
    ("no_softmax",): (_normalised, _calls, _in_functions, _without, _symbols, of_numbers, exponentials),
    ("mask_after",): (_orders,),
    ("mask_of_first",): (_without, of_all, of_other_axes),
    ("softmax_", "mean_", "argmax", "log_", "uniform", "relu", "softmin", "chunk_", "no_rescale"): (
        _calls, _without, _normalised, _numbers_beside, _symbols, _axes, _in_functions, _flags,
    ),
    ("mask_", "lens_", "sees_", "hides_", "causal_", "window_", "together", "no_mask"): (
        _comparisons, _inversions, _fills, _numbers_beside, _indices, _without, _calls, partial(_symbols, others="+-*"),
        _other_names, ranges, thrown_away, mirrored, bounded, of_other_axes, complement, unread, _up_to_now, inverted,
        other_corner, joined_masks, given_more, of_all, _flags,
    ),
    ("swapped", "no_projection", "no_output", "weights_", "no_values", "no_w_v", "no_tanh", "no_transpose"): (
        _other_names, _orders, _numbers_beside, letters, _turned, _wrapped, _in_layers, _in_functions, _products,
        other_texts, exchanged,
    ),
    ("heads_", "no_heads", "wrong_axes", "wrong_group", "group", "first_group", "qkv_order", "keys_reshaped"): (
        _calls, _orders, halves, letters, _numbers_beside, _symbols, _without, interleaved, neighbours, of_groups,
    ),
    ("sin_", "wrong_exponent", "position", "rope_", "offset_", "keys_not", "no_rotation", "batch_", "no_input"): (
        _numbers_beside, _calls, signs, halves, _symbols, _without, _orders, _other_names, _axes, sides, ranges,
        signs_of_both, whole_pairs, with_input, _inversions, unread,
    ),
}  # fmt: skip


def _of_mistake(id: str) -> Sequence[Callable[[Any, Scope], Iterator[Edit]]]:
    return next((changes for starts, changes in _MENDS.items() if id.startswith(starts)), _ALL)
