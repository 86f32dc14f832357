"""A reader's module beside the core's attention: both are called with the same small inputs.

Everything happens on a copy with other numbers, in float32 on the CPU; random numbers, modes and gradients stay.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn

from ..._recognize import Weights, arguments
from .._call.inputs import copied
from .._private import HOOKS
from . import forms
from .plan import AXES, MASKS, NEEDED, Found, Plan, arranged, at, attended, inputs_of
from .rotating import Table, given_for


class Unlike(Exception):
    """Why a module is not computed by the core."""


class Weighing(nn.Module):
    """Stands in the place of a dropout: multiplies by a factor, where it acts."""

    acts = False
    p = 0.0  # which lines may read that call torch's function

    def forward(self, x: Tensor) -> Tensor:
        return weighed(x) if self.acts else x


def weighed(x: Tensor) -> Tensor:
    """The factor is one of the number itself, so that the order of axes does not matter, as it does not for dropout."""
    return x * (x + 0.5)


def same(x: Tensor) -> Tensor:
    return x


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """No trace of what is called inside: random numbers, modes of gradients, warnings, what is printed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # waking others would take longer than these small calls
        stack.callback(setattr, _local, "comparing", is_comparing())
        _local.comparing = True
        yield


class _Local(threading.local):
    comparing = False


_local = _Local()


def is_comparing() -> bool:
    """Whether this thread calls copies of a module now, to compare them."""
    return _local.comparing


def with_numbers(module: nn.Module) -> Any:
    """A copy on the CPU in float32 with random weights and without hooks.  (A model's own weights may be zeros or all
    equal, and different formulas then give the same results.)  The first call draws the weights of lazy modules."""
    module = copied(module)
    module = module.to_empty(device="cpu") if any(x.is_meta for x in module.parameters()) else module.cpu()
    module = module.float()
    for part in module.modules():
        for hooks in HOOKS:
            if getattr(part, hooks, None) and not isinstance(part, nn.modules.lazy.LazyModuleMixin):
                part.__dict__[hooks] = type(getattr(part, hooks))()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in module.parameters():
            if not nn.parameter.is_lazy(x):
                x.requires_grad_(True)
                x.normal_(std=max(x.shape[-1:] or (1,)) ** -0.5, generator=generator)
    return module


def takes_of(module: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """(name, role, default) of the parameters of a call."""
    roles = arguments(module)
    first = {role: name for name, role in reversed([*roles.items()])}
    every = inspect.signature(module.forward).parameters.values()
    own = [x for x in every if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    # One parameter of lengths is told, and one table of each kind; with another one its own lines run.
    told = [roles.get(x.name, "") if first.get(roles.get(x.name, "")) == x.name else "" for x in own]
    masks = [x.name for x in own if roles.get(x.name) == "mask"]
    of_masks = dict(itertools.zip_longest(masks, MASKS[: len(masks)], fillvalue=""))
    told = [of_masks.get(x.name, role) for x, role in zip(own, told)]
    return tuple((x.name, role, NEEDED if x.default is x.empty else x.default) for x, role in zip(own, told))


class Compared:
    """One module beside the core's attention."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.takes = takes_of(module)
        self.roles = [role for _, role, _ in self.takes]
        if any(default is NEEDED and not role for _, role, default in self.takes):
            name = next(name for name, role, default in self.takes if default is NEEDED and not role)
            raise Unlike(f"its argument {name} is none of an attention's")
        self.own = with_numbers(module).eval()
        self.drops = _weighing(self.own)
        self.printed = io.StringIO()
        self.tables = [x for x in tensors_of(self.own) if x.dim() > 1 and x.shape[-1] == x.shape[-2] > 1]
        self.most_keys = min((int(x.shape[-1]) for x in self.tables), default=1 << 62)
        self.buffers = {name for part in self.own.modules() for name in part._buffers}
        self.errors: list[Exception] = []
        self.table: Optional[Table] = None  # of angles, which its calls are given
        self.width = 4  # of queries, keys and values that are not projected
        self.one = ""  # the axis, of AXES, that has a length of 1
        self.fewer = False  # whether its calls are of one item and a query less
        self.other_result = 0  # which of its results is no attention's, where another one is: from 1
        self.runs = False  # whether a call of it has given anything

    # ---- calls -----------------------------------------------------------------------------------------

    def sizes(self, weights: Optional[Weights]) -> tuple[int, int, int]:
        """B, Q, K, all different and none of them a number of heads; 1 where `one` says so."""
        heads = (weights.num_heads, weights.num_kv_heads) if weights else ()
        found = [n for n in (2, 3, 5, 4, 6, 7) if n not in heads][:3]
        counts = zip(AXES, (found[0], found[1], min(found[2], self.most_keys)))
        n_items, n_queries, n_keys = (1 if axis == self.one else n for axis, n in counts)
        return (1, n_queries - 1, n_keys) if self.fewer else (n_items, n_queries, n_keys)

    def features(self, weights: Optional[Weights]) -> tuple[int, int, int]:
        """Of queries, keys and values."""
        if weights is None:
            return self.width, self.width, self.width
        into = {name: size or out for name, (size, out) in weights.sizes(self.own).items()}
        return into["W_q"], into["W_k"], into.get("W_v", into["W_k"])

    def inputs(self, weights: Optional[Weights], layouts: tuple[str, str], square: bool, seed: int = 0, many: int = 0,
               leaves_out: tuple[str, ...] = ()) -> dict[str, Any]:  # fmt: skip
        """{role: an input} of these layouts."""
        batch, n_queries, n_keys = self.sizes(weights)
        n_keys = many or n_keys
        if layouts[0] in ("BC", "1BC", "B1C"):
            n_queries = 1
        elif square or not {"keys", "values"} & {*self.roles} - {*leaves_out}:
            n_queries = n_keys
        generator, features = torch.Generator().manual_seed(seed), self.features(weights)
        found: dict[str, Any] = {}
        roles = [role for role in ("queries", "keys", "values") if role in self.roles and role not in leaves_out]
        for role, size in zip(("queries", "keys", "values"), features):
            rows, layout = (n_queries, layouts[0]) if role == "queries" else (n_keys, layouts[1])
            shape = {
                "BQC": (batch, rows, size), "QBC": (rows, batch, size), "1BC": (1, batch, size), "BC": (batch, size),
                "B1C": (batch, 1, size), "QC": (rows, size), "BHQC": (batch, 3, rows, size),
            }[layout]  # fmt: skip
            if role in roles:
                found[role] = torch.randn(shape, generator=generator, dtype=torch.float32).requires_grad_(True)
        if self.table is not None:
            found.update(given_for(self.table, n_keys))
        return found

    def call(self, given: dict[str, Any]) -> Any:
        """The module's own result.  Flags are given by their names."""
        named = {name: given[role or name] for name, role, _ in self.takes if (role or name) in given}
        named.update({name: None for name, role, default in self.takes if default is NEEDED and role not in given})
        with contextlib.redirect_stdout(self.printed):
            return self.own(**named)

    def firsts(self, given: dict[str, Any], layouts: tuple[str, str]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """(result of a first call, what was given beside the inputs): lengths, or a mask, that hide nothing where it
        needs them.  Whether a mask of ones hides nothing, or all, is not known yet."""
        for filled in self.filled(given, layouts):
            try:
                result = self.call({**given, **filled})
            except Exception as error:
                self.errors.append(error)
                continue
            self.runs = True
            yield result, filled
            if not filled:
                return

    def filled(self, given: dict[str, Any], layouts: tuple[str, str]) -> Iterator[dict[str, Any]]:
        yield {}
        q = arranged(given["queries"], layouts[0])
        k = arranged(given["keys"], layouts[1]) if "keys" in given else q
        n, rows, keys = q.shape[0], q.shape[-2], k.shape[-2]
        if "valid_lens" in self.roles:
            yield {"valid_lens": torch.full((n,), keys)}
        if "mask" in self.roles:
            for shape in ((n, 1, rows, keys), (n, rows, keys), (rows, keys), (n, keys)):
                yield {"mask": torch.ones(shape, dtype=torch.bool)}
                yield {"mask": torch.zeros(shape, dtype=torch.bool)}

    def ours(self, plan: Plan, given: dict[str, Any], drop: Callable[[Tensor], Tensor] = same) -> Optional[Found]:
        """What the core gives; None where the plan does not take these."""
        inputs = inputs_of(plan._replace(needs=frozenset()), given)
        if inputs is None:
            return None
        found = attended(plan, self.own, inputs, 0.0, "", drop)
        out_drop = self.drops.get(plan.out_dropout)
        return found if out_drop is None else found._replace(out=out_drop(found.out))

    def again(self, plan: Plan, given: dict[str, Any], found: Found) -> Any:
        """The result of a call by the core, in the form that the plan says."""
        key = self.key(plan, given)
        return forms.given(plan.flags[key], found.out, lambda each: forms.shaped(found.weights, each), key[0])

    def agrees(self, plan: Plan, given: dict[str, Any], drop: Any = same, seed: Optional[int] = None,
               lenient: bool = False, ignores: str = "") -> bool:  # fmt: skip
        """Whether both give the same, in the form that the plan says, and have the same gradients.

        seed      of torch's generator, for both: dropout by functions
        lenient   rows of NaN may have other numbers in ours
        ignores   a role that ours are not given
        """
        key = self.key(plan, given)
        form = plan.flags.get(key)
        try:
            _seeded(seed)
            result = self.call(given)
            self.runs = True
            _seeded(seed)
            given = {role: x for role, x in given.items() if role != ignores}
            found = self.ours(plan, given, drop)
        except Exception as error:
            self.errors.append(error)
            return False
        if found is None or form is None:
            return False
        again = self.again(plan, given, found)
        pairs = list(zip(forms.tensors(result), forms.tensors(again)))
        if len(forms.tensors(result)) != len(forms.tensors(again)):
            return False
        if not all(forms.near(torch.where(a.isnan(), b, a) if lenient and a.shape == b.shape else a, b)
                   for a, b in pairs):  # fmt: skip
            return False
        for path, name, shapes, *_ in plan.kept:
            own = getattr(at(self.own, path), name)
            if not lenient and not forms.near(own, forms.shaped(found.weights, shapes[key[0]])):
                return False
        if lenient:
            return True
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        leaves += [x for x in self.own.parameters() if x.requires_grad]
        return forms.all_near(_gradients(result, form, leaves), _gradients(again, form, leaves))

    def key(self, plan: Plan, given: dict[str, Any]) -> Any:
        """(layout of queries, values of the flags): which form a result has."""
        return layouts_of(plan, given)[0], tuple(
            given.get(name, default) for name, role, default in self.takes if not role
        )


def layouts_of(plan: Plan, given: dict[str, Any]) -> tuple[str, str]:
    """The axes of queries and keys in a call."""
    keys = given.get("keys", given.get("values", given["queries"]))
    return plan.layouts.get((given["queries"].dim(), keys.dim()), ("", ""))


def _weighing(module: nn.Module) -> dict[str, Weighing]:
    """{path: what stands in the place of a dropout}, everywhere inside the module."""
    made: dict[int, Weighing] = {}
    found = {}
    for name, part in list(module.named_modules()):
        for own, child in list(part._modules.items()):
            if type(child) is nn.Dropout:
                if child.inplace:
                    raise Unlike(f"its {own} changes weights in place")
                if id(child) not in made:
                    found[f"{name}.{own}".strip(".")] = made[id(child)] = Weighing()
                part._modules[own] = made[id(child)]
    return found


def _seeded(seed: Optional[int]) -> None:
    if seed is not None:
        torch.manual_seed(seed)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Buffers, and tensors that are plain attributes."""
    yield from module.buffers()
    for part in module.modules():
        yield from (x for name, x in vars(part).items() if isinstance(x, Tensor) and not x.requires_grad)


def _gradients(result: Any, form: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Of the output, or of weights where there is no output."""
    pairs = list(zip(forms.names(result), forms.names(form)))
    wanted = [x for x, each in pairs if str(each).startswith("out")] or [x for x, each in pairs if each is not None]
    loss: Any = sum(x.square().sum() for x in wanted)
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, found)]
