"""Between tensors and the compiled core: views of their memory, lengths, seeds, threads, and checks of tensors.

A CPU tensor and the ndarray of its `numpy()` share memory, with the same strides; nothing is copied here.
The core also takes the tensors themselves (csrc/python/torch/tensors.c), which is much faster.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn, Optional

import numpy as np
import torch
from torch import Tensor

from .. import _core
from .._arguments.arrays import nested, to_lengths
from .._arguments.core_refusals import bool_bias
from .._arguments.scalars import tokens, words
from ..config import share_torch_threads
from ._private import (
    FakeTensor,
    autocast_type,
    autocasting_on,
    has_dlpack_of_bools,
    in_functorch,
    in_transform,
    is_exporting,
    is_of_a_transform,
    on_cpu,
    tensor_exchange,
    tracing_state,
)
from ._private import autocasting as autocasting
from ._private import is_compiling as is_compiling

if TYPE_CHECKING:
    from .._types import Array

FLOATS = (torch.float32, torch.float64)  # what the core computes in
_CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)  # computed in float32, then rounded


def exporting() -> bool:
    """Whether the call is recorded for programs without mha_c: torch.export, torch.jit.trace, ONNX by either."""
    return is_exporting() or tracing_state() is not None


def recorded_or_transformed() -> bool:
    """Whether a call is more than its numbers: inside a compiler, an exporter, torch.func or forward-mode AD."""
    return is_compiling() or exporting() or in_transform()


PLAIN = frozenset((Tensor, torch.nn.Parameter))  # classes without operations of their own


def refuse_transforms(name: str) -> None:
    if in_transform():
        raise RuntimeError(f"{name} has neither torch.func transforms nor forward-mode AD; use .backward()")
    if exporting():
        raise RuntimeError(f"{name} cannot be exported or traced: mha_c has no form of it that runs without mha_c")


def result_type(dtype: torch.dtype) -> torch.dtype:
    """Type of a layer's result for queries of this type: the same, or, as in torch's own layers, that of autocast."""
    return autocast_type() if autocasting() and dtype is not torch.float64 else dtype


def autocast_on(tensor: Tensor) -> bool:
    """Whether autocast is on for the tensor's device."""
    device = tensor.device.type
    if device == "cpu" or device == "meta":
        return bool(device == "cpu" and autocasting())
    return bool(autocasting_on(device))


def float32_if_half(tensor: Any) -> Any:
    """The tensor, 16-bit floats as float32, in which the formulas compute them; other types unchanged."""
    return tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor


def has_numbers(tensor: Tensor) -> bool:
    """Whether its numbers can be read, and stay valid: no fake or meta tensor, none of a transform, no exporter."""
    if type(tensor) not in PLAIN or tensor.is_meta or is_compiling() or exporting():
        return False
    return not (in_functorch() and is_of_a_transform(tensor))


def elsewhere(value: Any) -> bool:
    """Whether it is a tensor that is not in the CPU's memory: on a GPU, or on device meta, without numbers."""
    return isinstance(value, Tensor) and not on_cpu(value)


def array(tensor: Tensor) -> Array:
    """The tensor's own memory as an ndarray."""
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def optional_array(tensor: Optional[Tensor]) -> Optional[Array]:
    return None if tensor is None else array(tensor)


def mask_for_core(mask: Any) -> Any:
    """A mask as the core takes it: the tensor, or its array where torch gives no bools by DLPack."""
    if has_dlpack_of_bools or mask is None:
        return mask
    try:
        return array(mask)
    except (TypeError, RuntimeError):  # no plain memory, which the core refuses in its own words
        return mask


def without_subclass(tensor: Any) -> Any:
    """A tensor of a subclass (of fastai, torchvision) as a plain tensor, which the core takes."""
    return tensor if tensor is None or type(tensor) in PLAIN else tensor.as_subclass(Tensor)


def optional_tensor(value: Optional[Array]) -> Optional[Tensor]:
    return None if value is None else torch.from_numpy(value)


def lengths(valid_lens: Any) -> Any:
    """valid_lens as the core reads them; it checks type, shape and values.  BufferError on other devices."""
    if elsewhere(valid_lens):
        raise BufferError("valid_lens is not in the CPU's memory")
    if type(valid_lens) is Tensor and valid_lens.dtype is torch.int64:
        return valid_lens.numpy()
    return to_lengths(valid_lens)


# From now on the core takes tensors, and computes calls with tensors on as many threads as torch does, and on the same.
_core.serve_tensors(
    tensor_exchange, Tensor, torch.nn.Parameter, torch.empty(0, device="cpu").is_neg, torch.get_num_threads
)
share_torch_threads()


def check_inputs(**named: Any) -> None:
    """Raise our own errors, clearer than torch's, for arguments that are not tensors of floats."""
    for name, value in named.items():
        usual = type(value) is Tensor and on_cpu(value) and not value.is_nested
        if usual and value.dtype in FLOATS and value.layout is torch.strided:
            continue
        check_tensors(**{name: value})
        if value.is_nested:
            raise TypeError(nested(name))
        if name == "bias" and value.dtype is torch.bool:
            bool_bias(name)
        if value.layout is not torch.strided or not value.is_floating_point():
            dense = value.layout is torch.strided
            whole = dense and not (value.is_complex() or value.is_floating_point() or value.dtype is torch.bool)
            embed = tokens(name, value.dtype, tuple(value.shape)) if whole else None
            if embed is not None:
                raise TypeError(embed)
            got, write = (value.dtype, "float") if dense else (value.layout, "to_dense")
            raise TypeError(
                f"{name} must be a dense tensor of float32, float64, bfloat16 or float16, got {got}: write "
                f"{name}.{write}()"
            )


def check_tensors(**named: Any) -> None:
    """The same of what is no tensor at all."""
    for name, value in named.items():
        if not isinstance(value, Tensor):
            if isinstance(value, str):
                raise TypeError(words(name))
            raise TypeError(
                f"{name} must be a torch tensor, got {type(value).__name__}: write torch.as_tensor({name}), or use "
                f"mha_c, which has the same layers and functions for arrays"
            )


def check_devices(**named: Any) -> None:
    """Raise an error unless all tensors of a call are on one device; lengths may always be on the CPU."""
    places: dict[torch.device, list[str]] = {}
    for name, value in named.items():
        for x in value if type(value) is tuple else (value,):
            if isinstance(x, Tensor) and name not in places.setdefault(x.device, []):
                places[x.device].append(name)
    if len(places) > 1 and places.get(_CPU) == ["valid_lens"]:
        del places[_CPU]
    if len(places) > 1:
        listed = "; ".join(f"{', '.join(names)} on {device}" for device, names in places.items())
        advice = "move them to one (.to(device))"
        if any(device.type == "meta" for device in places):
            advice = (
                "those on meta have no numbers: load the module's weights (.to_empty(device='cpu'), "
                "load_state_dict(..., assign=True)), or have all tensors of the call on meta"
            )
        raise TypeError(f"the tensors of a call are on different devices: {listed}; {advice}")


def refuse_half_fake(**named: Any) -> None:
    """Raise an error for fake tensors mixed with real ones, unless their mode allows that."""
    if is_compiling():
        return
    fake = {name: value for name, value in named.items() if isinstance(value, FakeTensor)}
    real = [name for name, value in named.items() if isinstance(value, Tensor) and name not in fake]
    if fake and real and not all(value.fake_mode.allow_non_fake_inputs for value in fake.values()):
        raise TypeError(
            f"fake tensors, which are without numbers: {', '.join(fake)}; real ones: {', '.join(real)}; make the "
            f"module and all tensors of the call under one FakeTensorMode, or give it allow_non_fake_inputs=True"
        )


def refuse_types(**types: torch.dtype) -> NoReturn:
    """Raise the error for inputs and parameters of different types."""
    listed = ", ".join(f"{name} {dtype}" for name, dtype in types.items())
    if len(set(types.values())) == 1:
        raise TypeError(f"the tensors of a call must be floats: {listed}; convert them (.float())")
    raise TypeError(
        f"the tensors of a call have different types: {listed}; convert the inputs (.float(), .double()) or the module "
        f"(.to(dtype))"
    )


def common_type(**named: Any) -> torch.dtype:
    """The type of the computation: that of all tensors, or float32 for 16-bit floats, also mixed with float32.

    named   tensors, or tuples of tensors; None where there is none
    """
    groups = {name: [value] if isinstance(value, Tensor) else value or () for name, value in named.items()}
    found = {name: [x.dtype for x in group if x is not None] for name, group in groups.items()}
    types = set().union(*found.values())
    if len(types) == 1 and types.issubset(FLOATS):
        return types.pop()
    if not types <= {torch.float32, *HALVES}:
        refuse_types(**{name: dtypes[0] for name, dtypes in found.items() if dtypes})
    return torch.float32


_local = threading.local()
SEEDS = 2**63 - 1


def draw_seed(generator: Optional[torch.Generator] = None) -> int:
    """A number below SEEDS from torch's generator: torch.manual_seed makes it repeatable."""
    try:
        room, number = _local.room
    except AttributeError:  # the first draw of this thread
        room, number = _new_room()
    if generator is None:  # without the keyword: saves a tenth of a microsecond
        room.random_(0, SEEDS)
    else:
        room.random_(0, SEEDS, generator=generator)
    return int(number.item())


def _new_room() -> tuple[Tensor, Array]:
    """A tensor to draw into, and its memory as an array, which reads four times as fast; the thread keeps both."""
    number = np.zeros((), np.int64)
    with torch.inference_mode(False):  # later calls write it outside that mode
        room = torch.from_numpy(number)  # on the CPU, whatever the default device
    if type(room) is Tensor:  # under FakeTensorMode it is a fake one, without this memory
        _local.room = room, number
    return room, number


def draw_seed_tensor(generator: Optional[torch.Generator] = None) -> Tensor:
    """The number of `draw_seed` as a tensor, for compilers, which cannot read numbers of tensors."""
    if generator is None:
        return torch.randint(0, SEEDS, (), device="cpu")
    return torch.randint(0, SEEDS, (), generator=generator, device="cpu")


def seed_tensor(seed: int) -> Tensor:
    """A seed as a tensor of int64, which the operators read as 64 bits without sign."""
    return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, device="cpu")
