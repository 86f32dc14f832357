"""What a reader's module computes: from names and small calls to a `Plan`."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, Optional

from torch import Tensor, nn

from ..._recognize import weights_of
from . import forms
from .compared import Compared, Unlike, isolated, layouts_of, tensors_of
from .dropping import with_dropout
from .masks import cases, with_lengths, with_masks, without_switches
from .plan import AXES, LAST, NEEDED, Plan
from .rotating import most_positions, rotaries, tables_for


def fitted(module: nn.Module) -> Plan:
    """The plan of a module; Unlike where it has none."""
    with isolated():
        compared = Compared(module)
        plan = _based(compared)
        for step in (_with_left_out, _with_kept, _with_gradients, _with_flags, _with_ones, with_lengths, with_masks,
                     without_switches, with_dropout):  # fmt: skip
            plan = step(compared, plan)
        _check_large_scores(compared, plan)
        if compared.printed.getvalue():
            raise Unlike("it prints")
        return plan


def layouts_to_try(compared: Compared, kind: str) -> list[tuple[tuple[int, int], list[tuple[str, str]]]]:
    """For each rank of queries and keys, the axes that they may have."""
    found = [((3, 3), [("BQC", "BQC"), ("QBC", "QBC")]), ((2, 2), [("QC", "QC")])]
    one_query = ((2, 3), [("BC", "BQC"), ("BC", "QBC")])
    if kind == "dot":
        return [found[0], ((4, 4), [("BHQC", "BHQC")]), found[1], *([] if "values" in compared.roles else [one_query])]
    if kind == "additive":  # of one query
        found[0][1].extend([("B1C", "BQC"), ("1BC", "BQC"), ("1BC", "QBC")])
        found += [one_query]
    return found


def _based(compared: Compared) -> Plan:
    """What names and a first call tell: the kind, the weights, axes, whether it is causal, what it gives."""
    ways = with_more_heads(compared, list(weights_of(compared.own))) or [None]
    if ways[0] is not None and ways[0].unused(compared.own):
        raise Unlike(f"it holds {', '.join(ways[0].unused(compared.own)[:3])}, which the book's has not")
    kind = "dot" if ways == [None] else "additive" if "w_v" in ways[0].parts else "multi_head"
    by_place = [x for x in inspect.signature(compared.module.forward).parameters.values() if x.kind < x.VAR_POSITIONAL]
    plan = Plan(kind, compared.takes, None, {}, len(by_place), most_keys=compared.most_keys)
    width = 0 if ways[0] is None else ways[0].sizes(compared.own)["W_q"][1] // ways[0].num_heads
    tables: Any = tables_for(compared.roles, width)
    for table, features in itertools.product(tables, [4, *widths(compared.own)] if kind == "dot" else [4]):
        compared.table, compared.width, compared.runs = table, features, False
        found = _with_layouts(compared, plan, ways)
        if not found.layouts:
            continue
        found = found._replace(features=_only_features(compared, found))
        root = found.features**0.5
        if not (root and root == round(root) and (3, 3) in found.layouts):  # a temperature of 2.0 means no features
            most = found.most_keys if found.rotary is None else most_positions(compared.own, width)
            compared.most_keys = min(found.most_keys, most)
            return found._replace(most_keys=compared.most_keys)
    if not compared.runs and ways[0] is not None and "W_o" in ways[0].parts:
        sizes, heads = ways[0].sizes(compared.own), ways[0].num_heads
        if sizes["W_q"][0] * heads == sizes["W_o"][0] > sizes["W_q"][0]:
            what = f"features of one head, {sizes['W_q'][0]}, and all heads share it"
            raise Unlike(f"its {ways[0].places()['W_q']} takes the {what}; the book's takes all features of a row")
    other = compared.other_result
    raise Unlike(f"result {other} of its call is neither its output nor its weights" if other else "")


def widths(module: nn.Module) -> list[int]:
    """For how many features numbers in it, or in its parts, may be the scale: n, or its root, or one over that."""
    held = [x for part in module.modules() for x in vars(part).values() if type(x) in (int, float) and x > 0]
    held += [float(x) for x in tensors_of(module) if x.numel() == 1 and x > 0]
    squares = {round(n) for x in held for n in (x, x * x, 1 / (x * x)) if abs(n - round(n)) < 1e-4 * n}
    return sorted(n for n in squares if 1 < n <= 4096 and n != 4)


def _only_features(compared: Compared, plan: Plan) -> int:
    """How many features its scale is for, if it is for one number of them; else 0."""
    if plan.kind != "dot":
        return 0
    width = compared.width
    compared.width = 5 if width != 5 else 6
    follows = all(_gives(compared, plan, given) for given in cases(compared, plan))
    compared.width = width
    return 0 if follows else width


def _with_layouts(compared: Compared, plan: Plan, ways: list[Any]) -> Plan:
    """The plan with all the layouts in which a first call gives what ours does."""
    for ranks, choices in layouts_to_try(compared, plan.kind):
        before = plan
        squares = (False, True) if "keys" in compared.roles else (False,)
        for alike, layouts, square in itertools.product(_by_features(compared, ways), choices, squares):
            found = _hit(compared, plan, alike, ranks, layouts, square)
            if found is not None:
                plan = found
                break
        if plan is before and ranks == (3, 3) and compared.runs and plan.kind != "additive":
            break  # it takes these, and gives something else
    return plan


def _by_features(compared: Compared, ways: list[Any]) -> list[list[Any]]:
    """The ways that take inputs of the same sizes, together."""
    found: dict[Any, list[Any]] = {}
    for way in ways:
        found.setdefault(compared.features(way), []).append(way)
    return list(found.values())


def with_more_heads(compared: Compared, ways: list[Any]) -> list[Any]:
    """The ways, and those with more heads where no attribute says how many there are."""
    found = list(ways)
    for way in ways:
        width, shared = (way.sizes(compared.own)[name][1] for name in ("W_q", "W_k"))
        if way.num_heads == 1 and "w_v" not in way.parts and width:
            more = [n for n in (2, 4, 8, 3, 6, 12, 16, 5, 10, 32) if width % n == 0 and n < width]
            kv = {n: n * shared // width for n in more if n * shared % width == 0 and shared}  # they may share keys
            found += [way._replace(num_heads=n, num_kv_heads=kv.get(n, n)) for n in more]
    return found


def _hit(compared: Compared, plan: Plan, ways: Any, ranks: Any, layouts: Any, square: bool) -> Optional[Plan]:
    """The plan with these layouts, if a call with them gives what ours does."""
    given = compared.inputs(ways[0], layouts, square)
    results = list(compared.firsts(given, layouts))
    if not results:
        return None
    plan = plan._replace(given=frozenset((("keys" in given, "values" in given),)))
    known: Any = [(plan.weights, plan.causal, plan.rotary)]
    if not plan.layouts:
        turns = rotaries(compared.own, compared.table) if plan.kind == "multi_head" else iter(())
        every = itertools.chain([None], turns)
        known = ((*way, turn) for turn in every for way in itertools.product(ways, (False, True)))
    new = plan._replace(layouts={**plan.layouts, ranks: layouts}, square=plan.square or square)
    for way, causal, rotary in known:
        new = new._replace(weights=way, causal=causal, rotary=rotary)
        try:
            found = compared.ours(new, given)
        except Exception:  # weights that do not fit together in this way
            continue
        if found is None:
            continue
        key = compared.key(new, given)
        for result, filled in results:
            form = forms.form_of(result, found.out, found.weights, key[0])
            if forms.is_known(form):
                return new._replace(flags={**plan.flags, key: form}, needs=plan.needs.union(filled))
            if forms.is_several(form) and "out" in forms.names(form):
                compared.other_result = 1 + forms.names(form).index("?")
    return None


def _with_left_out(compared: Compared, plan: Plan) -> Plan:
    """Which of keys and values may be left out."""
    may = [role for _, role, default in plan.takes if role in ("keys", "values") and default is None]
    for roles in ((), *((role,) for role in may), tuple(may)):
        has_keys, has_values = (role in compared.roles and role not in roles for role in ("keys", "values"))
        tried = plan._replace(given=frozenset(((has_keys, has_values),)))
        given = cases(compared, tried)
        if roles and given and all(_gives(compared, tried, each) for each in given):
            plan = plan._replace(given=plan.given | tried.given)
    return plan


def _gives(compared: Compared, plan: Plan, given: dict[str, Any]) -> bool:
    """Whether a call gives what ours does; with a mask that hides nothing where it needs one."""
    try:
        found, key = compared.ours(plan, given), compared.key(plan, given)
    except Exception:
        return False
    return found is not None and any(
        forms.form_of(result, found.out, found.weights, key[0]) == plan.flags[key]
        for result, _ in compared.firsts(given, layouts_of(plan, given))
    )


def _with_gradients(compared: Compared, plan: Plan) -> Plan:
    """The same plan, unless results agree and gradients do not."""
    for given in [] if plan.needs else cases(compared, plan):
        if not compared.agrees(plan, given) and compared.agrees(plan, given, lenient=True):
            raise Unlike("its results are right, and their gradients are not: is something detached?")
    return plan


def _check_large_scores(compared: Compared, plan: Plan) -> None:
    """Scores of a few hundred: some lines cut them off, which small numbers do not show."""
    compared.own.eval()
    for given in [] if plan.needs else cases(compared, plan, 6)[:1]:
        given = {role: x.detach() * 20 if role in ("queries", "keys") else x for role, x in given.items()}
        found = compared.ours(plan, given)
        assert found is not None
        again = compared.again(plan, given, found)
        for a, b in zip(forms.tensors(compared.call(given)), forms.tensors(again)):
            if bool(((a - b).abs() > 0.02 * b.abs().max()).any()):  # rounding of such scores; NaN is not greater
                raise Unlike("large scores are cut off")


def _with_flags(compared: Compared, plan: Plan) -> Plan:
    """Parameters that are switches: what comes of the other position of each."""
    if plan.needs:
        return plan
    flags = dict(plan.flags)
    for given in cases(compared, plan):
        for name, role, default in plan.takes:
            if role or not isinstance(default, bool):
                continue
            switched = {**given, name: not default}
            before = _state(compared.own)
            try:
                result, found = compared.call(switched), compared.ours(plan, switched)
            except Exception:
                continue
            if _changed(before, _state(compared.own)).keys() - {(path, name) for path, name, *_ in plan.kept}:
                continue  # it keeps more than weights, as a cache
            key = compared.key(plan, switched)
            form = "?" if found is None else forms.form_of(result, found.out, found.weights, key[0])
            if forms.is_known(form):
                flags[key] = form
    return plan._replace(flags=flags)


def _with_ones(compared: Compared, plan: Plan) -> Plan:
    """The same plan, but for calls with one item, one query or one key, where the lines give something else then."""
    names, refused = [name for name, role, _ in plan.takes if not role], set()
    switches = [dict(zip(names, values)) for values in {values for _, values in plan.flags}]
    for axis in AXES:
        compared.one = axis
        for given in cases(compared, plan):
            switched = [{**given, **each} for each in switches]
            known = [each for each in switched if compared.key(plan, each) in plan.flags]
            alike = _gives(compared, plan, given) if plan.needs else all(compared.agrees(plan, each) for each in known)
            if not alike:
                refused.add((layouts_of(plan, given), axis))
    compared.one = ""
    return plan._replace(more_than_one=frozenset(refused))


def _with_kept(compared: Compared, plan: Plan) -> Plan:
    """What a call leaves in attributes: weights in some form; what else it leaves, nobody can keep up."""
    shown: dict[tuple[str, str], dict[str, str]] = {}
    requires = {}
    for given in cases(compared, plan, 1):
        before, key = _state(compared.own), compared.key(plan, given)
        found, layout = compared.ours(plan, given), key[0]
        assert found is not None
        for result, _ in compared.firsts(given, layouts_of(plan, given)):
            if forms.form_of(result, found.out, found.weights, layout) == plan.flags[key]:
                break
        values = _changed(before, _state(compared.own))
        made = [(path, name, getattr(part, name, None)) for path, part in compared.own.named_modules() if path
                for name in getattr(type(part), "_kept_names", ())]  # fmt: skip
        inside = {(path, name): value for path, name, value in made}
        for (path, name), value in {**values, **inside}.items():
            form = forms.form_of_weights(value, found.weights)
            if form == "?" or name in compared.buffers or (path and (path, name) not in inside):
                raise Unlike(f"its call also sets {name}" if not path else f"a call of {path} in it sets {name}")
            shown.setdefault((path, name), {})[layout] = form
            requires[path, name] = bool(value.requires_grad) or (path, name) in inside
    return plan._replace(kept=tuple((*key, shape, requires[key]) for key, shape in shown.items()))


_INTERNAL = frozenset((*nn.Module().__dict__, LAST, "_compared_tables"))


def _state(module: nn.Module) -> dict[tuple[str, str], Any]:
    """{(path, name): (a value, what shows that it was changed in place)} of attributes and buffers."""
    found = {}
    for path, part in module.named_modules():
        if not type(part).__module__.startswith("mha_c."):
            for name, value in {**part._buffers, **vars(part)}.items():
                if name not in _INTERNAL:
                    found[path, name] = value, _mark(value)
    return found


def _mark(value: Any) -> int:
    if isinstance(value, (list, dict, set)):
        return len(value)
    return int(value._version) if isinstance(value, Tensor) and not value.is_inference() else 0


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> dict[tuple[str, str], Any]:
    """{(path, name): the value now} of what is another one, or holds something else."""
    none = NEEDED, 0
    return {key: now for key, (now, mark) in after.items()
            if before.get(key, none)[0] is not now or before.get(key, none)[1] != mark}  # fmt: skip
