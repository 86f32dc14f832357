"""How a student is asked: in rounds, one for each parameter that hides keys, with probes that fit, in likely ways."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from .forms import LAYOUTS, Way, doubled
from .kinds import told
from .making import Unmade
from .masks import CannotSay
from .masks import ways as mask_ways
from .mistakes import function
from .probes import Inputs, probes
from .student import CAUSAL, WEIGHTS, Outcome, Round, Student, gradients_recorded

OF_LENS = ("masked_softmax", "dot_product", "additive", "multi_head")  # kinds that hide by lengths; the others by masks
_KEPT = 4  # layouts and shapes of masks that are tried in full


class Run(NamedTuple):
    """A student, one way to ask it, the probes, what came of them, and what should have."""

    student: Student
    asked: Round
    form: str
    way: Way
    probes: list[Inputs]
    outcomes: list[Outcome]
    right: list[Any]


def rounds(student: Student) -> list[Round]:
    """The comparisons that exercise all that may hide a key; without any, the one of the kind."""
    kind, own = student.kind, _forms(student)
    of_mask = (f"{kind}_of_mask",) if kind in OF_LENS else own
    made = []
    for name, role in student.takes.items():
        if role == "valid_lens":
            made.append(Round(own, "lens", name))
        elif role == "mask":
            made.append(Round(of_mask, "mask", name))
        elif role == "causal" and kind not in CAUSAL:
            made.append(Round(("causal",) if kind == "dot_product" else of_mask, "flag", name))
        elif role == "window" and kind in ("dot_product", "causal"):
            made.append(Round(("window",), "window", name))
    if not any(each.role in ("lens", "mask") for each in made):
        made.insert(0, Round(own))
    return made


def untried(student: Student) -> list[str]:
    """The parameters that no round exercises, and whose name does not say that they hide nothing."""
    asked = {each.parameter for each in rounds(student)}
    known = {*student.arguments, "base", "positions", "offset", "-"}
    known |= {"causal"} if student.kind in CAUSAL else set()
    return [name for name, role in student.takes.items() if name not in asked and role not in known]


def _forms(student: Student) -> tuple[str, ...]:
    if student.is_chunked:
        return ("chunked",)
    if student.kind == "causal_multi_head":
        return ("causal_multi_head", "causal_multi_head_rope", "causal_multi_head_rope_halves")
    return ("rope", "rope_halves") if student.kind == "rope" else (student.kind,)


# ---- probes --------------------------------------------------------------------------------------------------------


def probes_for(student: Student, asked: Round, layout: str = "batch") -> list[Inputs]:
    """The probes that it can be asked in a round: the same objects each time."""
    key = asked, "heads" in layout
    if key not in student.kept:
        student.kept[key] = _made_for(student, asked, layout)
    return student.kept[key]


def _made_for(student: Student, asked: Round, layout: str) -> list[Inputs]:
    made = [_fitting(student, each, asked) for each in probes(asked.forms[0], student.sizes)]
    made = [each for each in made if _is_answerable(student, each, asked)]
    if student.layers is not None and student.is_class and made:
        fitting = [each for each in made if student.layers.at(each) is not None]
        if not fitting:  # it makes a layer of its own size
            student.layers.any(made[-1])
            student.layers.own_size = True
            student.sizes = student.layers.sizes(student.layers.any(made[-1]))
            return _made_for(student, asked, layout)
        made = fitting
    return [doubled(each) for each in made] if "heads" in layout else made


def _fitting(student: Student, inputs: Inputs, asked: Round) -> Inputs:
    """A probe, without what the student does not take in this round."""
    inputs = dict(inputs)
    if "valid_lens" in inputs and asked.role != "lens":
        inputs["valid_lens"] = None
    if "mask" in inputs and asked.role == "flag":
        queries, keys = (inputs[name].shape[-2] for name in (("queries", "keys") if "keys" in inputs else ("X", "X")))
        past = np.tri(queries, keys, dtype=bool)
        inputs["mask"] = np.broadcast_to(past, (len(inputs["queries"]), queries, keys)) if queries == keys else True
        if student.kind == "grouped" and queries == keys:
            inputs["mask"] = inputs["mask"][:, None]
    elif "mask" in inputs and asked.role not in ("lens", "mask"):
        inputs["mask"] = True
    if student.has_one_head and "W_o" in inputs:
        inputs["num_heads"] = 1
        if not student.has_output:
            inputs["W_o"] = np.eye(len(inputs["W_o"]))
    if student.attends_to_itself:
        inputs.update(keys=inputs["queries"], values=inputs["queries"])
    elif student.values_are_keys:
        inputs["values"] = inputs["keys"]
    return inputs


def _is_answerable(student: Student, inputs: Inputs, asked: Round) -> bool:
    given, hiding = {*student.takes.values()}, inputs.get("mask", inputs.get("valid_lens"))
    for name, weight in (("keys", "W_k"), ("values", "W_v")):
        if weight in inputs and name in inputs and len(inputs[weight]) != inputs[name].shape[-1]:
            return False
    if student.attends_to_itself and not _fits_itself(inputs, hiding):
        return False
    if inputs.get("offset") and not {"offset", "positions"} & given:
        return False
    if student.kind == "window" or asked.forms[0] == "window":
        return "window" in given and inputs["queries"].shape[1] == inputs["keys"].shape[1]
    return asked.role != "flag" or inputs.get("mask", True) is not True or asked.forms[0] == "causal"


def _fits_itself(inputs: Inputs, hiding: Any) -> bool:
    """Whether lengths and masks are those of as many keys as there are queries."""
    steps = inputs["queries"].shape[1]
    if not isinstance(hiding, np.ndarray):
        return True
    return (
        hiding.shape[-1] == steps and hiding.shape[-2] == steps if hiding.dtype == bool else int(hiding.max()) <= steps
    )


# ---- ways ----------------------------------------------------------------------------------------------------------


def runs(student: Student, asked: Round, means: Optional[str] = None) -> list[Run]:
    """What comes of the probes, for each way that leads somewhere: the fewest errors and other types first."""
    found: list[tuple[tuple[int, int], int, Run]] = []
    for way in _ways(student, asked, means):
        run = _run(student, asked, way)
        failed = sum(outcome.error is not None for outcome in run.outcomes)
        failed += sum(_is_misshapen(*pair) for pair in zip(run.outcomes, run.right)) if way.layout != "batch" else 0
        failed += way.tensors and failed < len(run.outcomes) and not takes_graphs(run)
        types = sum(outcome.dtype not in ("", way.dtype) for outcome in run.outcomes)
        found.append(((failed, types), len(found), run))
    ordered = [run for _, _, run in sorted(found, key=lambda each: each[:2])]
    useful = [run for run in ordered if any(outcome.error is None for outcome in run.outcomes)]
    return _distinct(useful) or ordered[:1]


def _run(student: Student, asked: Round, way: Way, most: Optional[int] = None) -> Run:
    kept, outcomes = [], []
    for inputs in probes_for(student, asked, way.layout)[:most]:
        try:
            outcomes.append(student(inputs, way, asked))
            kept.append(inputs)
        except CannotSay:
            continue
    return Run(student, asked, asked.forms[0], way, kept, outcomes, [output(function(asked.forms[0]), x) for x in kept])


def _ways(student: Student, asked: Round, means: Optional[str]) -> list[Way]:
    """The ways worth trying, the likeliest first."""
    bases = [Way(*each) for each in itertools.product(_types(student), *_turns(student))]
    read = range(_readings(student))
    bases = [way._replace(weights=number) for way in bases for number in read]
    batched = [False, True] if "positions" in student.takes.values() else [False]
    bases = [way._replace(batched=each) for way in bases for each in batched]
    laid = _best([[way._replace(layout=layout) for layout in LAYOUTS[student.kind]] for way in bases], student, asked)
    if asked.role != "mask":
        return laid
    past = student.kind in CAUSAL
    masked = [[way._replace(mask=mask) for mask in mask_ways(way.layout, means, past)] for way in laid]
    return list(itertools.chain.from_iterable(_usable(each, student, asked) for each in masked))


def _best(choices: list[list[Way]], student: Student, asked: Round) -> list[Way]:
    """Of each list the way whose first probes, where nothing is hidden, have outputs of the right shape."""
    free = asked if asked.role in ("", "lens") else asked._replace(role="")
    found = []
    for ways in choices:
        tried = [_run(student, free, way, 2) for way in ways[: 1 if len(ways) == 1 else None]]
        bad = [sum(_is_misshapen(*pair) for pair in zip(run.outcomes, run.right)) for run in tried]
        found.append(ways[bad.index(min(bad))])
    return found


def _usable(ways: list[Way], student: Student, asked: Round) -> list[Way]:
    """Those whose axes are taken: of each meaning and type, in the likeliest shapes."""
    by_axes: dict[str, list[Way]] = {}
    for way in ways:
        assert way.mask is not None
        by_axes.setdefault(way.mask.axes, []).append(way)
    bad = {}
    for axes, those in by_axes.items():
        run = _run(student, asked, those[0])
        pairs = list(zip(run.probes, run.outcomes, run.right))
        # Where an output is misshapen without any mask, its shape says nothing of masks.
        always = any(_is_misshapen(got, right) and inputs["mask"] is True for inputs, got, right in pairs)
        failed = [got.error is not None if always else _is_misshapen(got, right) for _, got, right in pairs]
        bad[axes] = sum(failed) / max(len(failed), 1)
    chosen = sorted(by_axes, key=lambda axes: bad[axes])[:_KEPT]
    chosen = [axes for axes in chosen if bad[axes] == bad[chosen[0]]]
    return [way for axes in chosen for way in by_axes[axes]]


def _is_misshapen(outcome: Outcome, right: Any) -> bool:
    return outcome.output is None or (right is not None and outcome.output.shape != right.shape)


def _types(student: Student) -> list[bool]:
    torch: Any = sys.modules.get("torch")
    module = getattr(getattr(torch, "nn", None), "Module", ())
    if issubclass(student.mine, module) if student.is_class else isinstance(student.mine, module):
        return [True]
    types = [False, True] if torch else [False]
    if torch and any(x is torch for x in getattr(student.mine, "__globals__", {}).values()):
        types.reverse()
    return types


def _turns(student: Student) -> tuple[list[bool], list[bool]]:
    """Whether weights that are arguments are turned, and whether w_v is a matrix."""
    as_arguments = student.kind in WEIGHTS and not student.has_weights
    return [False, True] if as_arguments else [False], [
        False,
        True,
    ] if as_arguments and student.kind == "additive" else [False]


def _readings(student: Student) -> int:
    if student.layers is None or not student.has_weights:
        return 1
    layer = student.layers.any(probes(student.kind)[0]) if student.is_class else student.layers.at({})
    return len(student.layers.weights(layer))


def _distinct(found: list[Run]) -> list[Run]:
    """Without those that have the same outcomes as one before."""
    seen, kept = set(), []
    for run in found:
        key = (
            run.way.tensors,
            run.way.layout,
            *(x.output.tobytes() if x.output is not None else str(x.error) for x in run.outcomes),
        )
        if key not in seen:
            kept.append(run)
        seen.add(key)
    return kept


def takes_graphs(run: Run) -> bool:
    """Whether tensors that need gradients are taken, too: NumPy's functions take only those that need none."""
    if run.way.layout not in ("batch", "grouped"):
        return True
    inputs = next(inputs for inputs, outcome in zip(run.probes, run.outcomes) if outcome.error is None)
    try:
        run.student.traced(inputs, run.way, run.asked, "X" if "X" in inputs else "queries")
    except Exception:
        return False
    return True


def output(made: Any, inputs: Inputs) -> Any:
    """What a reference gives, None if it raises."""
    try:
        with np.errstate(all="ignore"):
            return made(**inputs)
    except Exception:
        return None


# ---- whom to ask -----------------------------------------------------------------------------------------------------


def student_of(mine: Any, kind: Optional[str], weights: Optional[Mapping[str, str]] = None) -> Student:
    """The student; a layer of one input whose kind is not told is causal if its numbers are."""
    chosen = told(mine, kind)
    student = Student(mine, chosen, weights)
    if kind is None and chosen == "multi_head" and student.attends_to_itself:
        try:
            other = Student(mine, "causal_multi_head", weights)
            with gradients_recorded():
                return other if _hides_the_future(other) else student
        except (Unmade, TypeError):
            return student
    return student


def _hides_the_future(student: Student) -> bool:
    """Whether a change of the last step leaves the others as they are."""
    run = runs(student, Round(rounds(student)[0].forms))[0]
    inputs, outcome = max(zip(run.probes, run.outcomes), key=lambda pair: pair[0]["X"].shape[1])
    later = inputs["X"].copy()
    later[:, -1] += 3
    changed = student({**inputs, "X": later}, run.way, run.asked).output
    if changed is None or outcome.output is None or changed.ndim < 2:
        return False
    return bool(np.allclose(changed[:, :-1], outcome.output[:, :-1], 1e-4, 1e-4))
