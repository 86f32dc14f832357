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

from .places import Edit, Scope
from .places import called as _called
from .places import edit as _edit
from .places import end as _end
from .places import inner as _inner
from .places import is_number as _is_number
from .places import is_product as _is_product
from .places import number as _number

_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OTHER_WAY = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="}
_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.FloorDiv: "//",
            ast.Mod: "%"}  # fmt: skip
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
    return bool(re.fullmatch(rb"[-+(]*[\d.]+\)?|[\"'].*[\"']", line[edit.start : edit.end]))


def _axes(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        named = [x.value for x in node.keywords if x.arg in ("axis", "dim")]
        told = [*named, *(x for x in node.args if _number(x) is not None)]
        yield from (_edit(x, "-1") for x in told if _number(x) != -1)
    elif isinstance(node, ast.Subscript) and _number(node.slice) not in (None, -1):
        yield _edit(node.slice, "-1")
    elif isinstance(node, ast.Assign) and re.search("axis|dim", ast.unparse(node.targets[0])):
        yield from [_edit(node.value, "-1")] if _number(node.value) not in (None, -1) else ()


def _roots(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, ast.Div):
            yield _edit(node.right, f"({right}) ** 0.5" if " " in right else f"{right} ** 0.5")
        elif isinstance(node.op, ast.Mult):
            yield _edit(node, f"{left} / ({right})" if " " in right else f"{left} / {right}")
        elif isinstance(node.op, ast.Pow):
            yield from (_edit(node.right, text) for text in ("0.5", "-0.5"))
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.BinOp, ast.Constant)):
        yield _edit(node.value, f"1 / ({ast.unparse(node.value)})" if isinstance(node.value, ast.BinOp) else
                    f"1 / {ast.unparse(node.value)}")  # fmt: skip
    if _is_product(node) or (isinstance(node, ast.Call) and _called(node) in ("matmul", "bmm", "einsum")):
        arrays = [node.left] if _is_product(node) else [x for x in node.args if not isinstance(x, ast.Constant)]
        if arrays:
            yield _edit(node, f"{ast.unparse(node)} / {ast.unparse(arrays[0])}.shape[-1] ** 0.5")


def _features(node: Any, _: Scope) -> Iterator[Edit]:
    """Of a product of queries and keys that is scaled in its line: their features, under a root of something else."""
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
        inner = [*ast.walk(node.value)]
        products: list[Any] = [x for x in inner if _is_product(x)]
        roots = [x.left for x in inner if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Pow)]
        roots += [x.args[0] for x in inner if isinstance(x, ast.Call) and _called(x) == "sqrt" and x.args]
        for product in products[:1]:
            yield from (_edit(x, f"{ast.unparse(product.left)}.shape[-1]") for x in roots)


def _comparisons(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        for table in (_COMPARED, _OTHER_WAY):
            if type(node.ops[0]) in table:
                yield _edit(node, f"{left} {table[type(node.ops[0])]} {right}")
    if isinstance(node, ast.Call) and _called(node) == "max" and len(node.args) == 2:  # where a window begins
        yield _edit(node.args[1], f"{ast.unparse(node.args[1])} + 1")


def _inversions(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.USub)):
        yield _edit(node, ast.unparse(node.operand))
    if isinstance(node, ast.Call) and _called(node) in ("masked_fill", "masked_fill_", "where") and node.args:
        if len(node.args) == 3:
            one, two = node.args[1:]
            yield Edit(one.col_offset, _end(two), f"{ast.unparse(two)}, {ast.unparse(one)}")
        if isinstance(node.args[0], ast.Name):
            yield _edit(node.args[0], f"~{node.args[0].id}")


def _fills(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Call):
        if _called(node) in ("masked_fill", "masked_fill_", "where", "full", "full_like"):
            yield from (_edit(x, "-1e9") for x in node.args[1:] if not isinstance(x, ast.Name))
        yield from (_edit(x.value, "-1e9") for x in node.keywords if re.search("val|fill", x.arg or ""))
    if isinstance(node, ast.Assign) and (isinstance(node.targets[0], ast.Subscript) or _is_number(node.value)):
        yield _edit(node.value, "-1e9")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield _edit(node.right, "-1e9")


def _calls(node: Any, _: Scope) -> Iterator[Edit]:
    """Another function; and a call with one argument without the function."""
    if isinstance(node, ast.Call):
        other = _NAMES.get(_called(node))
        if other and isinstance(node.func, ast.Attribute):
            yield Edit(_end(node.func) - len(node.func.attr), _end(node.func), other)
        if len(node.args) == 1 and isinstance(node.func, ast.Name):
            yield _edit(node, ast.unparse(node.args[0]))
            if node.func.id == "max":
                yield _edit(node.func, "sum")
        if _called(node) in ("view", "reshape") and len(node.args) > 3:
            order = [node.args[0], node.args[2], node.args[1], *node.args[3:]]
            yield _edit(node, f"{ast.unparse(node.func)}({', '.join(map(ast.unparse, order))}).swapaxes(1, 2)")
        if _called(node) in ("view", "reshape", "flatten") and isinstance(node.func, ast.Attribute):
            inner = ", ".join(map(ast.unparse, node.args))
            yield _edit(node, f"{ast.unparse(node.func.value)}.swapaxes(1, 2).reshape({inner})")
        if _called(node) in ("sigmoid", "tanh", "relu", "exp", "softplus"):
            of = node.args[0] if node.args else getattr(node.func, "value", node.func)
            yield _edit(node, f"{_inner(of)}.softmax(-1)")
        if _called(node) in ("maximum", "clip", "clamp"):
            yield _edit(node, f"{ast.unparse(node.func).rpartition('.')[0]}.tanh({ast.unparse(node.args[0])})")


def _in_functions(node: Any, names: Scope) -> Iterator[Edit]:
    """What is given a name, or returned, in exp or tanh; that, or a variable, in softmax or in a layer."""
    whole = node.value if isinstance(node, (ast.Assign, ast.Return)) else None
    library = "np" if "np" in names.of_file else "torch"
    if whole is not None:
        yield from (_edit(whole, f"{library}.{name}({ast.unparse(whole)})") for name in ("exp", "tanh"))
    for part in (whole, node if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None):
        if part is not None and not (isinstance(part, ast.Name) and part.id not in names.variables):
            yield from _in_softmax(part, names)


def _in_softmax(part: Any, names: Scope) -> Iterator[Edit]:
    text = ast.unparse(part)
    own = [x for x in names.of_file if "softmax" in x.lower() and "masked" not in x.lower()]
    own += [f"self.{x}" for x in names.attributes if "softmax" in x.lower()]
    yield from (_edit(part, f"{name}({text})") for name in own)
    if "torch" in names.of_file:
        yield _edit(part, f"{_inner(part)}.softmax(-1)")


def _in_layers(node: Any, names: Scope) -> Iterator[Edit]:
    """A variable in one of the layers that self has, or times one of its matrices."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names.variables:
        for each in names.attributes:
            if re.search("drop|softmax", each.lower()) is None:
                yield _edit(node, f"{node.id} @ self.{each}" if "np" in names.of_file else f"self.{each}({node.id})")


def _sides(node: Any, _: Scope) -> Iterator[Edit]:
    """Of a sum of two products, a factor of each in the other's place."""
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.BinOp) and isinstance(node.right, ast.BinOp):
        one, two, symbol = node.left, node.right, _SYMBOLS.get(type(node.op))
        if symbol in ("+", "-") and isinstance(one.op, ast.Mult) and isinstance(two.op, ast.Mult):
            a, b, c, d = map(_inner, (one.left, one.right, two.left, two.right))
            other = "-" if symbol == "+" else "+"
            for pair in ((c, b, a, d), (a, d, c, b), (c, d, a, b)):
                yield from (
                    _edit(node, "{} * {} {} {} * {}".format(*pair[:2], each, *pair[2:])) for each in (symbol, other)
                )


def _ranges(node: Any, names: Scope) -> Iterator[Edit]:
    """arange(1, n + 1), arange(n // 2) as arange(n), arange(0, n, 2); with an offset."""
    if not (isinstance(node, ast.Call) and _called(node) in ("arange", "range") and node.args):
        return
    called, first, last = ast.unparse(node.func), node.args[0], node.args[-1]
    if len(node.args) > 1 and isinstance(node.args[1], ast.BinOp) and _number(first) is not None:
        yield Edit(first.col_offset, _end(node.args[1]), ast.unparse(node.args[1].left))
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.FloorDiv):
        yield Edit(first.col_offset, _end(last), f"0, {ast.unparse(last.left)}, 2")
    if len(node.args) == 1:
        yield _edit(first, f"0, {ast.unparse(first)}, 2")
        for name in names.variables:
            if re.search("off|start|pos", name) and called != "range":
                yield _edit(node, f"({ast.unparse(node)} + {name})")


def _interleaved(node: Any, _: Scope) -> Iterator[Edit]:
    """(head_dim, heads), transposed, as (heads, head_dim)."""
    if not (isinstance(node, ast.Call) and _called(node) in ("transpose", "permute")):
        return
    made: Any = getattr(node.func, "value", None)
    if not isinstance(made, ast.Call):
        return
    if _called(made) in ("view", "reshape") and len(made.args) == 4:
        one, two, three, four = map(ast.unparse, made.args)
        start = f"{ast.unparse(made.func)}({one}, {two}, {four}, {three})"
    elif _called(made) == "unflatten" and isinstance(made.args[-1], ast.Tuple) and len(made.args[-1].elts) == 2:
        three, four = map(ast.unparse, made.args[-1].elts)
        start = f"{ast.unparse(made.func)}({ast.unparse(made.args[0])}, ({four}, {three}))"
    else:
        return
    yield _edit(node, f"{start}.swapaxes(1, 2)")


def _numbers_beside(node: Any, _: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value >= 50:
        yield _edit(node, "10000.0")
    n = _number(node)
    if n is not None and not isinstance(n, bool):
        yield from (_edit(node, str(n + step)) for step in (-1, 1))
        # 10000 is a base of angles: as the end of a slice it would be right, too, and say nothing.
        others = (10000,) if abs(n) >= 100 else (2, 0, 1)
        yield from (_edit(node, str(x)) for x in others if x not in (n, n - 1, n + 1))


def _symbols(node: Any, _: Scope, others: str = "+-*/") -> Iterator[Edit]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield Edit(_end(node.targets[0]), node.value.col_offset, " += ")
    if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
        own, left, right = _SYMBOLS[type(node.op)], ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.right, ast.BinOp):
            right = f"({right})"
        opposite = own == "-" and _number(node.left) == 1  # of a mask, or of a rate
        others = "*" if own == "/" else others  # the same number added to a row makes the same softmax
        yield from (_edit(node, f"{left} {each} {right}") for each in others if each != own and not opposite)


def _without(node: Any, _: Scope) -> Iterator[Edit]:
    """One side of an operation alone; a method's object alone; a slice without its end; no scale that is given."""
    if isinstance(node, ast.Slice) and node.upper is not None and node.step is None:
        yield _edit(node, f"{ast.unparse(node.lower) if node.lower is not None else ''}:")
    if isinstance(node, ast.BinOp):
        yield from (_edit(node, ast.unparse(x)) for x in (node.left, node.right))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name):
            yield _edit(node, ast.unparse(node.func.value))
        if node.args and _number(node.args[0]) is None:
            yield _edit(node, ast.unparse(node.args[0]))
        if node.args and node.keywords and node.keywords[-1].arg == "scale":
            before = [*node.args, *(x.value for x in node.keywords[:-1])][-1]
            yield Edit(_end(before), _end(node.keywords[-1].value), "")


def _orders(node: Any, _: Scope) -> Iterator[Edit]:
    """Two values, or two targets, in the other order; axes in another one."""
    if isinstance(node, (ast.Tuple, ast.Call)):
        items = node.elts if isinstance(node, ast.Tuple) else node.args
        for i, j in itertools.combinations(range(len(items)), 2) if len(items) < 5 else ():
            new = [*items]
            new[i], new[j] = new[j], new[i]
            yield Edit(items[0].col_offset, _end(items[-1]), ", ".join(map(ast.unparse, new)))
            for order in ((1, 2, 0), (2, 0, 1)) if len(items) == 3 else ():
                text = ", ".join(ast.unparse(items[k]) for k in order)
                yield Edit(items[0].col_offset, _end(items[-1]), text)


def _products(node: Any, _: Scope) -> Iterator[Edit]:
    """A product with the second array transposed: the two arrays in the other order."""
    is_call = isinstance(node, ast.Call) and _called(node) in ("matmul", "bmm") and len(node.args) == 2
    if not is_call and not _is_product(node):
        return
    between, left, right = (", ", *node.args) if is_call else (" @ ", node.left, node.right)
    turned = getattr(right.func if isinstance(right, ast.Call) else right, "value", None)
    if isinstance(left, ast.Name) and isinstance(turned, ast.Name):
        yield Edit(left.col_offset, _end(right), f"{turned.id}{between}{left.id}{ast.unparse(right)[len(turned.id) :]}")


def _other_names(node: Any, names: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Name) and node.id in names.variables and isinstance(node.ctx, ast.Load):
        yield from (_edit(node, name, True) for name in names.variables if name != node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        if isinstance(node.ctx, ast.Load) and node.attr in names.attributes:
            yield from (_edit(node, f"self.{name}", True) for name in names.attributes if name != node.attr)


def _indices(node: Any, names: Scope) -> Iterator[Edit]:
    """A variable in the place of a number between brackets; the other side of a slice; a slice with a sign."""
    if isinstance(node, ast.Subscript):
        places = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for at in places:
            if _number(at) is not None:
                yield from (_edit(at, name) for name in names.variables if len(name) < 3)
    if isinstance(node, ast.Slice) and node.step is None:
        if node.lower is None and node.upper is not None:
            yield _edit(node, f"{ast.unparse(node.upper)}:")
        elif node.lower is not None and node.upper is None:
            yield _edit(node, f":{ast.unparse(node.lower)}")


def _signs(node: Any, _: Scope) -> Iterator[Edit]:
    """Two halves with other signs, or in another order."""
    if isinstance(node, (ast.List, ast.Tuple)) and len(node.elts) == 2:
        one, two = (ast.unparse(x.operand if isinstance(x, ast.UnaryOp) else x) for x in node.elts)
        for pair in ((f"-{two}", one), (f"-{one}", two), (one, f"-{two}"), (two, one), (one, two)):
            yield Edit(node.elts[0].col_offset, _end(node.elts[1]), ", ".join(pair))


def _halves(node: Any, _: Scope) -> Iterator[Edit]:
    """Each number twice, or all of them once more."""
    if isinstance(node, ast.Call) and _called(node) in ("repeat", "repeat_interleave", "tile") and node.args:
        of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if of == "np":
            yield _edit(node, f"np.concatenate([{ast.unparse(node.args[0])}] * 2, axis=-1)")
            yield _edit(node, f"np.repeat({', '.join(map(ast.unparse, node.args[:2]))}, axis=1)")
            yield _edit(node, f"np.tile({', '.join(map(ast.unparse, node.args[:2]))})")
        elif len(node.args) == 4:
            yield _edit(node, f"{of}.repeat_interleave({ast.unparse(node.args[1])}, dim=1)")
            yield _edit(node, f"{of}.repeat_interleave({ast.unparse(node.args[2])}, dim=2)")
    if isinstance(node, ast.Call) and _called(node) in ("concatenate", "cat", "concat") and node.args:
        parts = node.args[0]
        if isinstance(parts, (ast.List, ast.Tuple)) and len({ast.unparse(x) for x in parts.elts}) == 1:
            one, np_or_torch = ast.unparse(parts.elts[0]), ast.unparse(node.func).rpartition(".")[0]
            yield _edit(node, f"np.repeat({one}, 2, axis=-1)" if np_or_torch == "np" else
                        f"{one}.repeat_interleave(2, dim=-1)")  # fmt: skip


def _letters(node: Any, _: Scope) -> Iterator[Edit]:
    """The letters of einsum, or the names of rearrange: two of the result, or of an operand, in the other order."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and "->" in node.value):
        return
    sides = re.split(r"(->|,)", node.value)
    for at in range(0, len(sides), 2):
        parts = re.findall(r"\([^)]*\)|\w+", sides[at]) if " " in sides[at].strip() else list(sides[at])
        gap = " " if " " in sides[at].strip() else ""
        for i, j in itertools.combinations(range(len(parts)), 2):
            new = [*parts]
            new[i], new[j] = new[j], new[i]
            side = f"{gap}{gap.join(new)}{gap}"
            yield _edit(node, repr("".join([*sides[:at], side, *sides[at + 1 :]]).strip()))
        for part in parts:
            inner = re.fullmatch(r"\((\w+) (\w+)\)", part)
            if inner:
                yield _edit(node, repr(node.value.replace(part, f"({inner[2]} {inner[1]})")))


def _normalised(node: Any, _: Scope) -> Iterator[Edit]:
    """What is given a name, divided by its sum; or softmax of it."""
    if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None:
        value, whole = ast.unparse(node.value), _inner(node.value)
        yield _edit(node.value, f"{value} / {whole}.sum(-1, keepdims=True)")
        yield _edit(node.value, f"{whole}.softmax(-1)")
        yield _edit(node.value, f"softmax({value})")


def _turned(node: Any, _: Scope) -> Iterator[Edit]:
    """A matrix transposed, or not."""
    if isinstance(node, ast.Attribute) and node.attr == "T":
        yield _edit(node, ast.unparse(node.value))
    if _is_product(node) and isinstance(node.right, (ast.Name, ast.Attribute)):
        yield _edit(node.right, f"{ast.unparse(node.right)}.T")


def _with_scale(node: Any, names: Scope) -> Iterator[Edit]:
    """What is given a name, divided by the root of the features."""
    if isinstance(node, ast.Assign) and isinstance(node.value, (ast.BinOp, ast.Call)):
        value = ast.unparse(node.value)
        for name in names.variables:
            if re.fullmatch(r"d|dk|d_k|dim|hd|head_dim|d_head|head_size", name):
                yield _edit(node.value, f"{value} / {name} ** 0.5")


def _wrapped(node: Any, _: Scope) -> Iterator[Edit]:
    """What is returned, projected."""
    if isinstance(node, ast.Return) and node.value is not None:
        inner = ast.unparse(node.value)
        names = ("W_o", "c_proj", "proj", "out_proj", "w_o", "Wo", "fc_out", "to_out", "out", "o_proj")
        yield from (_edit(node.value, f"self.{name}({inner})") for name in names)
        yield _edit(node.value, f"{inner} @ W_o")


_ALL = (
    _axes, _roots, _comparisons, _inversions, _fills, _calls, _without, _numbers_beside, _symbols, _orders,
    _other_names, _wrapped, _indices, _signs, _halves, _letters, _normalised, _turned, _in_functions, _in_layers,
    _sides, _ranges, _interleaved, _with_scale, _products,
)  # fmt: skip
# What mends the mistakes whose ids start so.
_MENDS = {
    ("scale_", "scaled", "no_scale"): (
        _axes, _roots, partial(_symbols, others="*/"), _other_names, _without, _numbers_beside, _with_scale, _features,
    ),
    ("softmax_axis", "max_axis"): (_axes, _letters, _orders),
    ("no_softmax",): (_normalised, _calls, _in_functions, _without, _symbols),
    ("softmax_", "mean_", "argmax", "log_", "uniform", "relu", "softmin", "chunk_", "no_rescale"): (
        _calls, _without, _normalised, _numbers_beside, _symbols, _axes, _in_functions,
    ),
    ("mask_", "lens_", "sees_", "hides_", "causal_", "window_", "together", "no_mask"): (
        _comparisons, _inversions, _fills, _numbers_beside, _indices, _without, _calls, partial(_symbols, others="+-*"),
        _other_names, _ranges,
    ),
    ("swapped", "no_projection", "no_output", "weights_", "no_values", "no_w_v", "no_tanh", "no_transpose"): (
        _other_names, _orders, _numbers_beside, _letters, _turned, _wrapped, _in_layers, _in_functions, _products,
    ),
    ("heads_", "no_heads", "wrong_", "groups_", "group_", "first_group", "qkv_order", "keys_reshaped"): (
        _calls, _orders, _halves, _letters, _numbers_beside, _symbols, _without, _interleaved,
    ),
    ("sin_", "wrong_exponent", "position", "rope_", "offset_", "keys_not", "no_rotation", "batch_", "no_input"): (
        _numbers_beside, _calls, _signs, _halves, _symbols, _without, _orders, _other_names, _axes, _sides, _ranges,
    ),
}  # fmt: skip


def _of_mistake(id: str) -> Sequence[Callable[[Any, Scope], Iterator[Edit]]]:
    return next((changes for starts, changes in _MENDS.items() if id.startswith(starts)), _ALL)
