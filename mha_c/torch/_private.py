"""What mha_c.torch asks of torch by name, from torch 1.12 on: the only module that knows which torch has what.

Each thing is found by a list of names, the newest first; what a torch may lack altogether is a feature with a name of
its own (`has_operators`), which other modules ask for.  Nobody compares versions.

Names that show whether a call must take another way are needed: without them results could be wrong without a warning,
so the import raises an error.  Without one of the others something is slower, is not shown, or is not offered.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.autograd import profiler as torch_profiler

OLDEST = "1.12"  # the oldest version that is tested


def _found(*paths: str) -> Any:
    """The object of the first of these names that torch has; None where it has none."""
    for path in paths:
        place: Any = torch
        for name in path.split(".")[1:]:
            place = getattr(place, name, None)
        if place is not None:
            return place
    return None


def _needed(*paths: str) -> Any:
    found = _found(*paths)
    if found is None:
        raise ImportError(
            f"mha_c.torch needs {' or '.join(paths)}, which torch {torch.__version__} does not have: install another "
            f"torch (the oldest that is tested is {OLDEST}), or a newer mha_c"
        )
    return found


def _takes(function: Any, *arguments: Any) -> bool:
    try:
        function(*arguments)
    except RuntimeError:
        return False
    return True


def _never(*_: Any) -> bool:
    return False


# --- Needed -------------------------------------------------------------------------------------------

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it says the same at the first use, and goes on
        torch.from_numpy(np.zeros(1))
except RuntimeError:
    raise ImportError(
        f"torch {torch.__version__} cannot use NumPy {np.__version__}: torch before 2.3 was built for NumPy 1.  Write "
        f"pip install 'numpy<2', or install a newer torch, and start Python again"
    ) from None

# Through which the core reads tensors and makes them: functions of C in a capsule, or two built-in functions.
tensor_exchange = _found("torch.Tensor.__dlpack_c_exchange_api__")
if tensor_exchange is None:
    tensor_exchange = _needed("torch._C._to_dlpack"), torch.from_numpy
# Whether it takes bools: the functions do.
has_dlpack_of_bools = not isinstance(tensor_exchange, tuple) or _takes(
    tensor_exchange[0], torch.zeros(1, dtype=torch.bool, device="cpu")
)
tracing_state = _needed("torch._C._get_tracing_state")  # not None: torch.jit.trace, or ONNX by it, records the call
is_tracing = _needed("torch._C._is_tracing")  # the same question in half the time, but not for compilers
set_tracing_state = _needed("torch._C._set_tracing_state")  # None: stops the recording for a while
_needed("torch.autograd.forward_ad._current_level")
# Whether modes are active: a number of them, or the one that is, or None.
n_function_modes = _needed("torch._C._len_torch_function_stack", "torch._C._get_torch_function_mode")
n_dispatch_modes = _needed("torch._C._len_torch_dispatch_stack", "torch._C._get_torch_dispatch_mode")
_function_modes = _found("torch.overrides._get_current_function_mode_stack")
_dispatch_modes = _found("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_disabled_function = _needed("torch._C._disabled_torch_function_impl")  # Parameter's: it changes nothing
has_transforms = _found("torch.func") is not None
in_functorch = _needed("torch._C._are_functorch_transforms_active") if has_transforms else _never  # inside torch.func


def in_transform() -> bool:
    """Whether a call is inside torch.func or forward-mode AD, which need more than numbers and a gradient."""
    return in_functorch() or forward_ad._current_level >= 0


# --- Features ----------------------------------------------------------------------------------------

# Operators of our own, which compilers and exporters can follow; without these, torch's operations compute there.
has_operators = _found("torch.library.register_vmap") is not None


def surely(condition: Any) -> Any:
    """Whether a condition on sizes holds that a compiler may have as symbols: False if only the data tell."""
    from torch.fx.experimental import symbolic_shapes  # compilers have imported it

    guard = getattr(symbolic_shapes, "guard_or_false", None)
    return guard is not None and guard(condition)


# Compilers from before they knew the slots of types end in errors inside our layers: they go around these, so that a
# program is compiled up to a layer and behind it.
_compiler = _found("torch._C._dynamo.eval_frame")
compilers_go_around = _compiler is not None and _found("torch._C._dynamo.get_type_slots") is None


def _no_compiler() -> bool:
    """False; a compiler that has come so far, into a layer, gives up here, as it does not know globals()."""
    return not globals()


def leave_to_python(package: str) -> None:
    """Mark all functions of a package that are loaded, so that a compiler that goes around them runs them as is."""
    if compilers_go_around:
        modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] == package]
        for function in {one for module in modules for one in _functions_of(module, package)}:
            function._torchdynamo_disable = True
            _leave_code(function.__code__)


def _functions_of(place: Any, package: str) -> Iterator[Any]:
    """The functions of a module or class, also those of methods and properties, and those inside decorators.

    Those that Python writes for a record are of no package: compiled by torch 2.11, its `_replace` gives an empty one.
    """
    of_record = hasattr(place, "_fields")
    for value in list(vars(place).values()):
        parts = [value]
        for part in parts:
            inside = (getattr(part, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))
            parts += [each for each in inside if each is not None]
            if isinstance(part, FunctionType) and (of_record or part.__module__.split(".")[0] == package):
                yield part
        if isinstance(value, type) and value.__module__ == getattr(place, "__module__", place.__name__):
            yield from _functions_of(value, package)


def _leave_code(code: Any) -> None:
    if hasattr(_compiler, "skip_code"):
        _compiler.skip_code(code)
    else:
        action = _compiler._FrameAction
        _compiler.set_code_exec_strategy(code, _compiler._FrameExecStrategy(action.SKIP, action.DEFAULT))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            _leave_code(part)


def in_python(function: Any, *arguments: Any) -> Any:
    """The call of a function that compilers cannot follow: they compile what comes before and behind it."""
    before = _compiler.set_eval_frame(None)
    try:
        return function(*arguments)
    finally:
        _compiler.set_eval_frame(before)


if _compiler is not None and not compilers_go_around:
    in_python._torchdynamo_disable = True  # type: ignore[attr-defined]
    _leave_code(in_python.__code__)

# Inside a compiler, and inside torch.export.
is_compiling = _no_compiler if compilers_go_around else _found("torch.compiler.is_compiling") or _never
is_exporting = _found("torch.compiler.is_exporting") or _never

# torch's own fused attention, where it takes a scale and shared key heads; else None: the formulas compute.
fused_attention = _found("torch.nn.functional.scaled_dot_product_attention")
if "enable_gqa" not in (getattr(fused_attention, "__doc__", None) or ""):
    fused_attention = None

# Autocast on the CPU, and on another device.
if _found("torch.get_autocast_dtype"):
    autocasting: Any = functools.partial(torch.is_autocast_enabled, "cpu")
    autocast_type: Any = functools.partial(torch.get_autocast_dtype, "cpu")
    autocasting_on: Any = torch.is_autocast_enabled
else:
    autocasting, autocast_type = _needed("torch.is_autocast_cpu_enabled"), _needed("torch.get_autocast_cpu_dtype")

    def autocasting_on(device: str) -> bool:
        return bool(device == "cuda" and torch.is_autocast_enabled())


# Whether autocast may be on for the CPU: asked of all devices at once, where torch can, in a fifth of the time.
autocasting_anywhere: Any = _found("torch._C._is_any_autocast_enabled") or autocasting

if _found("torch.Tensor.is_cpu"):

    def on_cpu(tensor: Tensor) -> bool:
        """Whether it is in the CPU's memory."""
        return tensor.is_cpu

    quickly_on_cpu: Any = operator.attrgetter("is_cpu")  # the same, which compilers do not know, in half the time
else:

    def on_cpu(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    quickly_on_cpu = on_cpu


_has_resizable = _found("torch.UntypedStorage.resizable") is not None


def has_own_memory(tensor: Tensor) -> bool:
    """Whether its numbers are known to lie in memory of torch's own, not another's, as NumPy's."""
    return _has_resizable and tensor.untyped_storage().resizable()


# What two tensors of a type must have in common, in one call.
quickly_seen: Any = operator.attrgetter(
    "dtype", "requires_grad", "shape", "is_cpu" if _found("torch.Tensor.is_cpu") else "device"
)


def _unflatten(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    axis %= x.dim()
    known = math.prod(size for size in sizes if size != -1)
    whole = [x.shape[axis] // known if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:axis], *whole, *x.shape[axis + 1 :])


# An axis as several.  Before torch.unflatten there was, tracers recorded the method with names of dimensions, which
# no program can hold.
unflatten: Any = _unflatten
if _found("torch.unflatten"):

    def unflatten(x: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:  # the method: compilers know it, tracers too
        return x.unflatten(axis, sizes)


# --- Missed -------------------------------------------------------------------------------------------

# Global hooks of all modules.  Without these names there might be a hook, so children are called one by one.
HOOKS: tuple[str, ...] = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks")
if hasattr(nn.Module, "register_full_backward_pre_hook"):
    HOOKS = *HOOKS, "_backward_pre_hooks"
GLOBAL_HOOKS = tuple(getattr(nn.modules.module, f"_global{hooks}", {"unknown": None}) for hooks in HOOKS)


class _NoProfiler:
    _is_profiler_enabled = False


# A flag of a module, read at each call.  Without it the profiler does not show ours by name.
profiler: Any = torch_profiler if hasattr(torch_profiler, "_is_profiler_enabled") else _NoProfiler

# For tensors that compute their numbers at the first use; without both, weights are computed when they are read.
make_wrapper = _found("torch.Tensor._make_wrapper_subclass")
as_plain_tensor = _found("torch._C.DisableTorchFunctionSubclass", "torch._C.DisableTorchFunction")
has_wrappers = None not in (make_wrapper, as_plain_tensor)

# Without it tensors of torch.func are never checked: lengths of NaN are not refused there.
functorch: Any = _found("torch._C._functorch")
is_of_a_transform = _found("torch._C._functorch.is_functorch_wrapped_tensor") or (lambda tensor: True)

# For fake tensors; without it torch itself, later, reports fake tensors that are mixed with real ones.
FakeTensor: Any = _found("torch._subclasses.FakeTensor") or ()

# Modes that are no reason to call children one by one; without these names they are a reason.
FakeTensorMode: Any = _found("torch._subclasses.FakeTensorMode") or ()
try:
    from torch.utils._device import DeviceContext as DeviceContext  # the mode of torch.device
except ImportError:
    DeviceContext = ()


def in_mode() -> bool:
    """Whether a mode wants to see each of torch's operations, of which a call of the core is none.

    Not that of torch.device, which sees new tensors alone, nor that of `watch`, which sees layers whole, nor that of
    fake tensors, of which torch's operations make fake ones.
    """
    return _in_mode(n_function_modes, _function_modes, DeviceContext) or _in_mode(
        n_dispatch_modes, _dispatch_modes, FakeTensorMode
    )


def observed() -> bool:
    """Whether somebody sees or transforms torch's operations, of which a call of the core is none: a compiler, a
    tracer, torch.func, forward-mode AD, a mode."""
    return is_compiling() or observed_at_once()


def observed_at_once() -> bool:
    """The same of a call that no compiler reads."""
    if is_tracing() or in_functorch() or forward_ad._current_level >= 0:
        return True
    return bool(n_function_modes() or n_dispatch_modes()) and in_mode()


def layers_are_seen() -> bool:
    """Whether somebody watches, or reads, the calls of layers in this thread."""
    return bool(n_function_modes()) and any(map(_sees_layers, _function_modes() if _function_modes else ()))


def _in_mode(active: Any, modes: Any, harmless: Any) -> bool:
    found = active()
    if not found:  # each backward pass of a layer asks
        return False
    return not all(isinstance(mode, harmless) or _sees_layers(mode) for mode in (modes() if modes else [found]))


def _sees_layers(mode: Any) -> bool:
    return getattr(mode, "sees_layers", False) is True


def any_overridden(*tensors: Any) -> bool:
    """Whether one is of a class with a __torch_function__ or a __torch_dispatch__ of its own, which it wants called."""
    return any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) and _has_overrides(type(x)) for x in tensors)


def _has_overrides(kind: type[Tensor]) -> bool:
    if kind is Tensor or kind is nn.Parameter:  # the compiler of 2.15 finds Tensor's methods not to be themselves
        return False
    function: Any = kind.__torch_function__
    inherited = Tensor.__torch_function__.__func__, _disabled_function
    own = getattr(function, "__func__", function) not in inherited
    return own or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def of_all_examples(tensor: Tensor) -> Tensor:
    """A tensor left by a call inside torch.func, read after the transform; after vmap it has an axis in front.

    AttributeError, as if there had been no call, where this torch has no name for it.
    """
    while has_transforms and functorch.is_functorch_wrapped_tensor(tensor):
        axis = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else 0
        tensor = functorch.get_unwrapped(tensor).movedim(axis, 0)
    return tensor


def written_down(value: Any) -> bool:
    """Whether an exporter has made it, a tensor without numbers; a torch that does not tell shows those."""
    converter = getattr(getattr(value, "fake_mode", None), "fake_tensor_converter", None)
    return bool(getattr(converter, "export", False))


def quick_apply(function: type[Function]) -> Any:
    """torch's `apply` in C++; autograd then calls `function.backward` itself.

    What torch's own methods in Python do before is for torch.func, and for functions with a `vjp`: forward it takes as
    long as a small layer, backward 1 % of a training step.  Without these names they are called.
    """
    node: Any = getattr(function, "_backward_cls", None)
    if node is not None and _found("torch.autograd.function.BackwardCFunction.apply"):
        node.apply = function.backward
    return getattr(super(Function, function), "apply", function.apply)


def constant_to_compilers(function: Any) -> Any:
    """Mark the function: compilers call it once.  A torch without this mark traces into it, and adds more guards."""
    function._dynamo_marked_constant = True
    return function


def without_tracing(x: Tensor) -> tuple[int, ...]:
    """The sizes of x as numbers; a tracer does not record this."""
    state = tracing_state()
    set_tracing_state(None)
    try:
        return tuple(x.shape)
    finally:
        set_tracing_state(state)


# Whether a part of the model is being called that will be computed again in the backward pass; without the name no such
# part is recognized, and the backward pass of one that was watched raises torch's error.
_hooks_of_saved: Any = _found("torch._C._autograd._top_saved_tensors_default_hooks") or (lambda ignore_tracing: None)


def checkpointing() -> bool:
    return _hooks_of_saved(True) is not None


CHECKPOINT = "torch.utils.checkpoint"


def is_checkpointed() -> bool:
    """Whether the call is inside torch.utils.checkpoint, which wants the same tensors saved when it runs again: told by
    the frames, as its reentrant form has no hooks, and others' hooks change nothing for it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != CHECKPOINT:
        frame = frame.f_back
    return frame is not None
