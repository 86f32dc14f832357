"""Where the dropout of a reader's module acts: told by factors in its place, or by torch's own random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout as torch_dropout

from ..._recognize import CONFIGS, books_name, root_of
from .compared import Compared, Unlike, Weighing, weighed
from .masks import all_cases
from .plan import Plan, at


def with_dropout(compared: Compared, plan: Plan) -> Plan:
    """Where dropout acts, told by factors in its place, or by torch's own random numbers."""
    cases = all_cases(compared, plan)
    numbers = {path: value for path, value in _numbers(compared.own)}
    for path in numbers:
        _set(compared.own, path, 0.0)
    for training in (False, True):
        compared.own.train(training)
        if not all(compared.agrees(plan, given) for given in cases):
            raise Unlike("it computes something else in training" if training else "")
    for paths in _alike(compared.drops):
        for path in paths:
            compared.drops[path].acts = True
        plan = _place_of_drop(compared, plan, paths, cases)
        for path in paths:
            compared.drops[path].acts = False
    for paths in _alike(numbers):
        plan = _place_of_number(compared, plan, paths, cases)
    return _checked_drops(compared, plan)


def _alike(paths: Any) -> list[tuple[str, ...]]:
    """Paths that differ in a number alone, as those of heads in a list do, together."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(".".join(word for word in path.split(".") if not word.isdigit()), []).append(path)
    return [tuple(group) for group in found.values()]


def _place_of_drop(compared: Compared, plan: Plan, paths: tuple[str, ...], cases: Any) -> Plan:
    if all(compared.agrees(plan, given) for given in cases):
        return plan
    for dropped in (False, True):
        tried = plan._replace(dropout=paths, dropped_weights=dropped)
        if not plan.dropout and all(compared.agrees(tried, given, weighed) for given in cases):
            return tried
    tried = plan._replace(out_dropout=paths[0])
    if not plan.out_dropout and len(paths) == 1 and all(compared.agrees(tried, given) for given in cases):
        return tried
    raise Unlike(f"{paths[0]} drops something other than the attention weights")


def _checked_drops(compared: Compared, plan: Plan) -> Plan:
    """Ours drop weights, and perhaps the output, too."""
    if plan.out_dropout and not (plan.dropout or _ends_the_output(compared, plan)):
        raise Unlike(f"{plan.out_dropout} drops the output, not the attention weights")
    if compared.drops and not (plan.dropout or plan.out_dropout):
        raise Unlike(f"{next(iter(compared.drops))} is not used: no attention weights are dropped")
    return plan


def _ends_the_output(compared: Compared, plan: Plan) -> bool:
    """Whether the dropout of the output belongs to the projection there: beside it in a Sequential, or by its name.
    Elsewhere somebody may have meant to drop the weights."""
    own = plan.weights.parts.get("W_o", ()) if plan.weights is not None else ()
    around, _, name = plan.out_dropout.rpartition(".")
    words = [word for word in name.lower().split("_") if not word.startswith("drop")]
    if not own or root_of("_".join(words)) == "o" or "resid" in words:
        return bool(own)
    return type(at(compared.own, around)) is nn.Sequential and own[0].weight.startswith(f"{around}.")


def _numbers(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Attributes that may be the probability of a dropout by a function."""
    for path, part in module.named_modules():
        if isinstance(part, Weighing):
            yield f"{path}.p".strip("."), part.p
            continue
        for name, value in vars(part).items():
            if _is_rate(name, value):
                yield f"{path}.{name}".strip("."), value
        for holder in CONFIGS:  # self.config.attn_pdrop
            for name, value in getattr(vars(part).get(holder), "__dict__", {}).items():
                if _is_rate(name, value):
                    yield f"{path}.{holder}.{name}".strip("."), value


def _is_rate(name: str, value: Any) -> bool:
    return type(value) in (float, int) and 0 <= value < 1 and bool(books_name(name, ["dropout"]))


def _set(module: nn.Module, path: str, value: float) -> None:
    owner, _, name = path.rpartition(".")
    setattr(at(module, owner), name, value)


def drop_nothing(module: nn.Module) -> None:
    """Set all probabilities that are numbers to 0."""
    for path in [path for path, _ in _numbers(module)]:
        _set(module, path, 0.0)


def _place_of_number(compared: Compared, plan: Plan, paths: tuple[str, ...], cases: Any) -> Plan:
    def drop(weights: Tensor) -> Tensor:
        return torch_dropout(weights, 0.5)

    try:
        for path in paths:
            _set(compared.own, path, 0.5)
        if all(compared.agrees(plan, given) for given in cases):
            return plan
        for dropped in (False, True):
            tried = plan._replace(dropout=paths, dropped_weights=dropped)
            if not plan.dropout and all(compared.agrees(tried, given, drop, 3) for given in cases):
                compared.own.eval()
                if all(compared.agrees(plan, given) for given in cases):
                    return tried
                raise Unlike("dropout acts in evaluation, too")
        raise Unlike(f"dropout of {paths[0]} acts elsewhere than on the attention weights")
    finally:
        for path in paths:
            _set(compared.own, path, 0.0)
        compared.own.train()
