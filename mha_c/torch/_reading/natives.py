"""Functions and classes of C by what they read and change; and whose files are whose."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
import os
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor, nn

from .recording import Files, Recorder
from .sizes import Ratio, Size

MODULE_FILE = nn.Module.__setattr__.__code__.co_filename
LAYERS = MODULE_FILE.rpartition("module.py")[0]
# Where records are made while the reader's lines run: Python writes the functions that make them.
RECORDS = Size.__new__.__code__.co_filename, Recorder.__init__.__code__.co_filename
# Functions of nn.Module that change nothing; others of that file, when a reader calls them, do.
HARMLESS = frozenset((
    "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__setattr__", "_named_members", "inner",
    "remove_from", "<lambda>", "<genexpr>", "<listcomp>", "_get_name", "_maybe_warn_non_full_backward_hook", "__init__",
    "__contains__", "__iter__", "__len__", "result_hooks",
))  # fmt: skip
# Of these what they walk through: all that is inside.
WALKS = frozenset((
    "children", "named_children", "modules", "named_modules", "parameters", "named_parameters", "buffers",
    "named_buffers", "get_submodule", "get_parameter", "get_buffer",
))  # fmt: skip
PURE = frozenset((
    "len", "isinstance", "issubclass", "min", "max", "sum", "abs", "all", "any", "sorted", "hasattr", "getattr",
    "iter", "next",
    "callable", "divmod", "round", "pow", "chr", "ord", "format", "repr", "hash", "bin", "hex", "ascii",
    "__build_class__",
))  # fmt: skip
# Those to which a size goes unseen: what they give is a plain number, or a range.
TAKE_SIZES = frozenset((math.log, math.log2, math.log10, math.isqrt, math.gcd, math.factorial, math.comb, math.perm,
                         math.ldexp, math.fsum, math.hypot, math.dist, math.pow, math.fmod, math.copysign,
                         range, slice, itertools.islice, itertools.repeat, itertools.count, bytes,
                         bytearray))  # fmt: skip
KINDS: tuple[Any, ...] = (
    str, bytes, tuple, int, float, complex, range, dict, list, set, frozenset, slice, collections.deque, type, property,
    type(dict().keys()), type(dict().values()), type(dict().items()), type(iter(())), type(_ for _ in ()),
    MethodType, FunctionType,
    torch.Size, torch.dtype, torch.device, np.generic, np.ndarray, staticmethod, super, BaseException, torch.finfo,
)  # fmt: skip
CHANGE = frozenset((
    "append", "extend", "insert", "pop", "clear", "update", "setdefault", "add", "remove", "discard", "popitem",
    "appendleft",
    "extendleft", "popleft", "sort", "reverse", "rotate", "__setitem__", "__delitem__", "__iadd__", "move_to_end",
    "__setattr__",
    "difference_update", "intersection_update", "symmetric_difference_update", "__delattr__", "fill", "put",
    "resize", "setflags",
    "itemset", "partition",
))  # fmt: skip
LIBRARIES = ("math", "operator", "_operator", "itertools", "functools", "_functools", "collections", "_collections",
"_abc", "cmath",
              "typing", "_typing")  # fmt: skip
TORCH_ASKS = frozenset((
    "is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_default_dtype",
    "is_autocast_cpu_enabled",
    "_get_tracing_state", "is_anomaly_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype",
    "get_autocast_cpu_dtype",
    "is_floating_point", "_jit_get_", "_is_tracing", "numel", "is_tensor",
))  # fmt: skip
PLAIN_TYPES = frozenset((
    int, float, bool, str, list, dict, tuple, set, frozenset, enumerate, zip, map, filter, reversed, super, type,
    property,
    object, complex, range, slice, bytes, collections.OrderedDict, collections.defaultdict, collections.deque,
    functools.partial,
    staticmethod, classmethod, torch.Size, torch.device, torch.dtype, torch.finfo, torch.iinfo, Tensor, nn.Parameter,
    itertools.chain, itertools.product, itertools.zip_longest, itertools.islice, itertools.repeat, itertools.accumulate,
    itertools.starmap, itertools.combinations, itertools.permutations, itertools.takewhile, operator.itemgetter,
    MethodType, FunctionType, ModuleType, BuiltinFunctionType, type(None), type(Ellipsis),
))  # fmt: skip


# Names by which attributes are read that no other name shows.
WHOLE = frozenset(
    (
        "__dict__",
        "__getattribute__",
        "__getattr__",
        "__getstate__",
        "__reduce__",
        "__reduce_ex__",
        "f_locals",
        "gi_frame",
    )
)


# Where torch's functions of Python stand that do no more than ask torch for others.
TORCH_FILES = frozenset((
    "nn/functional.py", "functional.py", "_tensor.py", "autograd/grad_mode.py", "amp/autocast_mode.py", "overrides.py",
    "_jit_internal.py", "_VF.py", "nn/parameter.py", "utils/_contextlib.py", "_C/_nn.py", "_utils.py",
    "autograd/function.py",
    "_namedtensor_internals.py", "_ops.py", "_classes.py", "_lowrank.py", "utils/_device.py", "nn/utils/parametrize.py",
    "_dynamo/mutation_guard.py",  # Module.__init__, once something was compiled
))  # fmt: skip


TORCH_FUNCTIONS = getattr(torch.matmul, "__self__", None)  # whose functions are torch's own
STANDARD = sys.prefix, sys.base_prefix, os.path.dirname(os.__file__)


def _is_standard(file: str) -> bool:
    return (file.startswith(STANDARD) and "site-packages" not in file) or file.startswith("<frozen")


is_standard: Callable[[str], bool] = Files(_is_standard).__getitem__  # a file of Python's own library, or of a record


ITERATORS: tuple[Any, ...] = (
    type(iter([])),
    type(iter({})),
    type(iter("")),
    type(iter(range(0))),
    zip,
    map,
    enumerate,
    filter,
    reversed,
)
VALUE_TYPES = frozenset((int, float, str, bool, type(None), bytes, Size, Ratio, list, dict, tuple, set, torch.Size,
torch.dtype,
                          torch.device, complex, range, slice))  # fmt: skip
