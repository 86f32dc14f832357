"""The functions of torch by name: what each is to a reading."""

from __future__ import annotations

from typing import Any, NamedTuple

from .rules import RULES

# Facts of a tensor that are part of a call's form, or sizes: no node.
FACTS = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "dtype", "device", "is_cuda", "is_cpu", "numel", "nelement",
    "__len__",
    "is_floating_point", "is_complex", "is_sparse", "is_quantized", "is_meta", "is_nested", "layout", "requires_grad",
    "is_tensor", "is_mps", "is_mkldnn", "is_xpu", "element_size", "itemsize", "names", "is_signed", "get_device",
    "result_type", "promote_types", "can_cast", "is_inference", "finfo", "iinfo", "is_same_size",
    "__hash__", "is_vulkan", "is_ipu", "is_ort", "is_mtia", "is_maia", "__dir__", "__class__", "is_conj", "is_neg",
))  # fmt: skip
# A tensor's numbers as Python's: they decide what comes next.
DATA = frozenset((
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "equal",
    "allclose", "is_nonzero", "__contains__", "__repr__", "__format__", "__str__", "nonzero", "masked_select", "unique",
    "unique_consecutive", "argwhere", "__reversed__",
))  # fmt: skip
DROPOUT = frozenset(("dropout", "dropout_"))
# Modes that torch asks for as functions: `grad_enabled` of each node has what matters.
SILENT = frozenset((
    "_set_grad_enabled", "is_grad_enabled", "set_grad_enabled", "__enter__", "__exit__", "is_autocast_enabled",
    "is_inference_mode_enabled", "_is_view", "get_default_dtype", "is_autocast_cpu_enabled",
))  # fmt: skip

_DUNDERS = {
    "__add__": "add", "__sub__": "sub", "__mul__": "mul", "__truediv__": "div", "__div__": "div", "__pow__": "pow",
    "__matmul__": "matmul", "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not", "__neg__": "neg", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le",
    "__gt__": "gt", "__ge__": "ge", "__abs__": "abs", "__mod__": "remainder", "__floordiv__": "floor_divide",
    "__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_", "__idiv__": "div_",
    "__ipow__": "pow_", "__iand__": "bitwise_and_", "__ior__": "bitwise_or_", "__ixor__": "bitwise_xor_",
    "__pos__": "positive", "__imod__": "remainder_",
}  # fmt: skip
# The same with its two arguments the other way round.
_REFLECTED = {
    "__radd__": "add", "__rsub__": "sub", "rsub": "sub", "__rmul__": "mul", "__rtruediv__": "div", "__rdiv__": "div",
    "__rpow__": "pow", "__rmatmul__": "matmul", "__rand__": "bitwise_and", "__ror__": "bitwise_or",
    "__rxor__": "bitwise_xor", "__rfloordiv__": "floor_divide", "__rmod__": "remainder",
}  # fmt: skip
_OTHER_NAMES = {
    "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "absolute": "abs", "clip": "clamp",
    "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim", "concat": "cat", "concatenate": "cat",
    "arctan": "atan", "special_expit": "sigmoid", "square_": "square_", "clip_": "clamp_", "divide_": "div_",
    "multiply_": "mul_", "subtract_": "sub_", "matrix_transpose": "mT", "__rshift__": "", "swapaxes_": "transpose_",
    "special_softmax": "softmax", "special_logsumexp": "logsumexp", "inner": "inner", "row_stack": "vstack",
}  # fmt: skip


class FunctionKind(NamedTuple):
    """What a function is that torch is asked for.

    name       the plain name, whatever way it was called by
    reflected  whether its two arguments are the other way round
    way        "fact" of FACTS, "silent" of SILENT, "data" of DATA, "pure" of RULES; "" of others, which are not read
    writes     whether it writes its first argument in place
    """

    name: str
    reflected: bool
    way: str
    writes: bool


_known: dict[Any, FunctionKind] = {}


def function_kind(function: Any) -> FunctionKind:
    """The same of each function once."""
    found = _known.get(function)
    if found is None:
        name = str(getattr(function, "__name__", ""))
        if name in ("__get__", "__set__", "__delete__"):
            attribute = str(getattr(getattr(function, "__self__", None), "__name__", ""))
            name = attribute if name == "__get__" else f"{attribute}.{name}"
        reflected = name in _REFLECTED
        name = _REFLECTED.get(name) or _DUNDERS.get(name) or _OTHER_NAMES.get(name, name)
        ways = {"fact": name in FACTS, "silent": name in SILENT, "data": name in DATA, "pure": is_pure(name)}
        way = next((way for way, there in ways.items() if there), "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        found = _known[function] = FunctionKind(name, reflected, way, writes)
    return found


def is_pure(name: str) -> bool:
    """Whether a function gives the same for the same, and does nothing else but write what it is given (name ends in
    _)."""
    if name in RULES:
        return True
    return name.endswith("_") and not name.endswith("__") and name[:-1] in RULES
