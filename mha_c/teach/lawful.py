"""Laws that every right implementation obeys, however it is written: `laws` tries them without any reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call
from .asking.answers import NEAR, own_line, written
from .asking.fitting import probes_for
from .asking.forms import Way
from .asking.making import Unmade
from .asking.masks import CannotSay
from .asking.mistakes import KINDS
from .asking.probes import Inputs
from .asking.rounds import as_mask, may_be_a_mask, rounds, run_of, runs
from .asking.student import WEIGHTS, Round, Student, gradients_recorded
from .asking.written import as_written
from .checks.students import student_of
from .words.sentences import said

Attend = Callable[[Inputs], Any]
Tried = Optional[tuple[str, Any, Any]]  # what was changed, what came of it, what should have; None: it does not apply
_ATTENTION = ("dot_product", "additive", "multi_head")
_FOLDED = "transpose_output"
_WAYS = 8  # of giving a mask: the likeliest


class Law(NamedTuple):
    """One law, and how an implementation stands to it.

    Not meant to be constructed directly.

    Attributes
    ----------
    id : str
        The name of the law.
    says : str
        The law in a sentence.
    holds : bool
        Whether the implementation obeys it.
    example : str
        The counterexample in numbers; "" where the law holds.

    Examples
    --------
    >>> from mha_c import teach
    >>> law = teach.laws(lambda X, valid_lens: X, "masked_softmax").laws[0]
    >>> law.id, law.holds
    ('rows_sum_to_1', False)
    """

    id: str
    says: str
    holds: bool
    example: str


class Laws:
    """The result of `laws`.

    Not meant to be constructed directly.

    Attributes
    ----------
    laws : list of Law
        All that apply.
    broken : list of str
        The ids of those that do not hold.
    ok : bool
        Whether all hold.
    text : str
        What is printed: each law, and the counterexamples.

    Examples
    --------
    >>> from mha_c import teach
    >>> found = teach.laws(teach.book.masked_softmax, "masked_softmax")
    >>> found.ok, found.broken
    (True, [])
    """

    def __init__(self, name: str, found: Sequence[Law]) -> None:
        self.laws = list(found)
        self.broken = [law.id for law in self.laws if not law.holds]
        self.ok = not self.broken
        held, every = len(self.laws) - len(self.broken), len(self.laws)
        lines = [said("{name}: {held} of {every} laws hold", name=name, held=held, every=every)]
        for law in self.laws:
            named = said("{id}: {says}", id=law.id, says=law.says)
            lines += [f"  {said('holds' if law.holds else 'BROKEN'):<6}  {named}"]
            lines += [f"          {line}" for line in law.example.splitlines()]
        self.text = "\n".join(lines)

    def __repr__(self) -> str:
        return self.text

    def assert_all(self) -> None:
        """Raise an AssertionError with the counterexamples, unless all laws hold."""
        if not self.ok:
            raise AssertionError(self.text)


@refuses_at_the_call
def laws(mine: Any, kind: Optional[str] = None) -> Laws:
    """Test an implementation by the laws of attention: no reference, no known mistakes, any sizes.

    Parameters
    ----------
    mine, kind : as in `check`
        The implementation, and its kind.

    Returns
    -------
    Laws
        `.ok`, `.broken`, a text with counterexamples; `.assert_all()` is one line of a test.

    Raises
    ------
    TypeError, ValueError
        As in `check`: if `mine` cannot be called, or if the kind is unknown.

    Examples
    --------
    >>> from mha_c import teach
    >>> teach.laws(teach.book.dot_product, "dot_product").assert_all()
    >>> teach.laws(lambda X, valid_lens: X, "masked_softmax").broken
    ['rows_sum_to_1', 'lengths_hide']
    """
    with gradients_recorded():
        try:
            student = student_of(as_written(mine), kind)
            asked = rounds(student)[0]
            tried = runs(student, asked)[:_WAYS]
            if may_be_a_mask(asked):
                tried += runs(student, as_mask(asked))[:_WAYS]
        except Unmade as error:
            cause = error.__cause__ or error
            example = f"{type(cause).__name__}: {cause}  {own_line(cause)}"
            return Laws(mine.__name__, [Law("made", said("a layer can be made"), False, example)])
        every = [found(student, run.way, run.asked) for run in tried]
        # What a mask means is not told: the way that breaks the fewest laws is meant.
        return Laws(student.name, min(every, key=lambda laws: sum(not law.holds for law in laws)))


def found(student: Student, way: Way, asked: Round) -> list[Law]:
    """How each law that applies stands."""

    def run(inputs: Inputs) -> Any:
        outcome = student(inputs, way, asked)
        if outcome.error is not None:
            raise outcome.error
        return outcome.output

    kept = []
    for id, says, kinds, law in _LAWS:
        if "heads" in way.layout and id in ("items_apart", "query_alone"):
            continue
        # It may give weights; and where keys are the values, values alone cannot be changed.
        if student.values_are_keys and id in ("rows_sum_to_1", "keys_permuted", "values_alike"):
            continue
        if student.kind in kinds and (id in ("items_apart", "prefix") or not student.attends_to_itself):
            tried = [_tried(law, run, inputs) for inputs in probes_for(student, asked, way.layout)]
            examples = [each for each in tried if each is not None]
            if examples:
                kept.append(Law(id, said(says), not any(examples), next(filter(None, examples), "")))
    if way.tensors and way.layout in ("batch", "grouped") and not (student.sizes_of_table or student.kind == _FOLDED):
        example = gradients(student, way, asked)
        says = said("autograd's gradients are those that differences show")
        kept.append(Law("gradients", says, not example, example))
    return kept


def _tried(law: Callable[[Attend, Inputs], Tried], run: Attend, inputs: Inputs) -> Optional[str]:
    """A counterexample, "" if the law holds here, None if it does not apply."""
    try:
        tried = law(run, inputs)
        if tried is None:
            return None
        change, got, expected = tried
        if got.shape == np.shape(expected) and np.allclose(got, expected, NEAR, NEAR):
            return ""
        shown = written({said("expected"): expected, said("got"): got})
        return f"{_shown(inputs)}\n{said('{change}:', change=change)}\n{shown}"
    except CannotSay:
        return None
    except Exception as error:
        raises = said("it raises {type}: {error}", type=type(error).__name__, error=error)
        return f"{_shown(inputs)}\n{raises}  {own_line(error)}"


def _shown(inputs: Inputs) -> str:
    return written({name: x for name, x in inputs.items() if name not in WEIGHTS["multi_head"]})


# ---- the laws ------------------------------------------------------------------------------------------------------


def _rows_sum(run: Attend, x: Inputs) -> Tried:
    if "X" in x:
        out = run(x)
        return said("the sums of the rows"), out.sum(axis=-1), np.ones(out.shape[:-1])
    out = run({**x, "values": np.ones_like(x["values"])})
    return said("with values that are all 1"), out, np.ones_like(out)


def _alike_values(run: Attend, x: Inputs) -> Tried:
    first = {name: x[name][:, :1] for name in ("keys", "values")}
    alike = {**x, "values": np.repeat(first["values"], x["values"].shape[1], axis=1)}
    return said("values all alike, beside a single key"), run(alike), run({**_free(x), **first})


def _lengths_hide(run: Attend, x: Inputs) -> Tried:
    seen = _seen(x)
    if seen is None:
        return None
    if "X" in x and "W_q" not in x:
        hidden = {"X": x["X"] + 3 * ~seen}
    elif "X" in x:
        return None
    else:
        beyond = ~seen.any(axis=-2)[..., None]
        hidden = {name: x[name] + 3 * beyond for name in ("keys", "values")}
    return said("3 added to all that lengths or a mask hide"), run({**x, **hidden}), run(x)


def _seen(x: Inputs) -> Any:
    """Which keys each query sees, as lengths or a mask say; None where there are none."""
    lens, mask = x.get("valid_lens"), x.get("mask")
    if isinstance(mask, np.ndarray):
        return mask
    if lens is None:
        return None
    keys = x["X"].shape[2] if "X" in x else x["keys"].shape[1]
    return np.arange(keys) < lens.reshape(len(lens), -1, 1)


def _future(run: Attend, x: Inputs) -> Tried:
    names = ("X",) if "X" in x else ("keys", "values")
    steps = x[names[0]].shape[1]
    if "X" not in x and x["queries"].shape[1] != steps:
        return None
    last = np.arange(steps)[:, None] == steps - 1
    later = {name: x[name] + 3 * last for name in names}
    return said("3 added to the last step, rows before it"), run({**x, **later})[:, :-1], run(x)[:, :-1]


def _far(run: Attend, x: Inputs) -> Tried:
    steps = x["keys"].shape[1]
    if steps <= x["window"]:
        return None
    far = np.arange(steps)[:, None] < steps - x["window"]
    moved = {name: x[name] + 3 * far for name in ("keys", "values")}
    says = said("3 added to all that is farther than the window, the last row")
    return says, run({**x, **moved})[:, -1:], run(x)[:, -1:]


def _prefix(run: Attend, x: Inputs) -> Tried:
    rows = ("X", "queries", "keys", "values")
    if "queries" in x and x["queries"].shape[1] != x["keys"].shape[1]:
        return None
    short = {name: value[:, :-1] if name in rows else value for name, value in x.items()}
    if isinstance(x.get("mask"), np.ndarray):
        short["mask"] = x["mask"][:, :-1, :-1]
    return said("without the last step"), run(short), run(x)[:, :-1]


def _relative(run: Attend, x: Inputs) -> Tried:
    alike = {**x, "X": np.repeat(x["X"][:, :1], max(x["X"].shape[1], 3), axis=1)}
    out = run(alike)
    products = (out[:, 1:] * out[:, :-1]).sum(axis=-1)
    return (
        said("of a vector at each step, the product of neighbours"),
        products,
        np.repeat(products[:, :1], products.shape[1], 1),
    )


def _group_shares(run: Attend, x: Inputs) -> Tried:
    queries = np.repeat(x["queries"][:, :1], x["queries"].shape[1], axis=1)
    share = queries.shape[1] // x["keys"].shape[1]
    out = run({**x, "queries": queries})
    return said("all heads with one query: heads of a group"), out, np.repeat(out[:, ::share], share, axis=1)


def _items(run: Attend, x: Inputs) -> Tried:
    out, batched = run(x), x["X"] if "X" in x else x["queries"]
    folds = "num_heads" in x and len(batched) > len(out)  # transpose_output: an item is num_heads rows
    rows = x["num_heads"] if folds else 1
    if len(batched) == rows:
        return None
    names = ("X", "queries", "keys", "values", "valid_lens", "mask")
    one = {name: x[name][:rows] for name in names if isinstance(x.get(name), np.ndarray)}
    alone = run({**x, **one})
    return said("the first item of the batch alone"), alone, out[: len(alone)]


def _permuted(run: Attend, x: Inputs) -> Tried:
    free = _free(x)
    if "X" in x:
        backwards = run({**free, "X": x["X"][..., ::-1].copy()})[..., ::-1]
        return said("keys in the opposite order"), backwards, run(free)
    turned = {name: x[name][..., ::-1, :].copy() for name in ("keys", "values")}
    return said("keys and values in the opposite order"), run({**free, **turned}), run(free)


def _free(x: Inputs) -> Inputs:
    """The same, with nothing hidden."""
    return {**x, **({"valid_lens": None} if "valid_lens" in x else {}), **({"mask": True} if "mask" in x else {})}


def _one_query(run: Attend, x: Inputs) -> Tried:
    name, lens = ("X" if "X" in x else "queries"), x.get("valid_lens")
    last = {name: x[name][..., -1:, :]}
    if lens is not None and lens.ndim == 2:
        last["valid_lens"] = lens[:, -1:]
    if isinstance(x.get("mask"), np.ndarray):
        last["mask"] = x["mask"][..., -1:, :]
    return said("the last query alone"), run({**x, **last}), run(x)[..., -1:, :]


_LAWS = [
    ("rows_sum_to_1", "the weights of a query sum to 1",
     ("masked_softmax", "dot_product", "additive", "causal", "window", "grouped"), _rows_sum),
    ("values_alike", "where values are all alike, weights do not matter", ("multi_head",), _alike_values),
    ("lengths_hide", "what lengths hide changes nothing", ("masked_softmax", *_ATTENTION), _lengths_hide),
    ("no_future", "the future changes nothing", ("causal", "window", "causal_multi_head"), _future),
    ("far_past", "keys farther than the window change nothing", ("window",), _far),
    ("items_apart", "an item of the batch does not depend on its neighbours", tuple(KINDS), _items),
    ("keys_permuted", "keys and values permuted alike give the same",
     ("masked_softmax", "grouped", *_ATTENTION), _permuted),
    ("query_alone", "a query's row alone gives its row", ("masked_softmax", "grouped", *_ATTENTION), _one_query),
    ("group_shares", "heads of a group share keys and values", ("grouped",), _group_shares),
    ("prefix", "a shorter sequence gives the same rows",
     ("causal", "window", "causal_multi_head", "rope", "positional_encoding"), _prefix),
    ("same_lengths", "turning changes no vector's length", ("rope",), lambda run, x: (
        said("the lengths of all vectors"), np.linalg.norm(run(x), axis=-1), np.linalg.norm(x["X"], axis=-1))),
    ("relative", "products depend on the distance alone", ("rope",), _relative),
    ("same_addend", "what is added does not depend on X", ("positional_encoding",), lambda run, x: (
        said("what is added to X, and what is added to 0"), run(x) - x["X"], run({"X": 0 * x["X"]}))),
    ("circle", "each pair of columns is a sine and a cosine of one angle", ("positional_encoding",), lambda run, x: (
        said("the length of each pair of columns, added to 0"),
        np.hypot(*run({"X": 0 * x["X"]}).reshape(-1, 2).T), np.ones(x["X"].size // 2))),
    ("each_once", "each number stays, once", ("transpose_qkv", "transpose_output"), lambda run, x: (
        said("all numbers in order"), np.sort(run(x), axis=None), np.sort(x["X"], axis=None))),
]  # fmt: skip


def gradients(student: Student, way: Way, asked: Round) -> str:
    """A counterexample: autograd's slope along a random direction, and that of differences."""
    torch: Any = sys.modules["torch"]
    rng = np.random.default_rng(1)
    inputs = run_of(student, asked, way).probes[-1]  # the last that can be given this way
    names = [name for name in ("queries", "keys", "values", "X") if name in student.takes.values()]
    for name in names:
        try:
            output, x = student.traced(inputs, way, asked, name)
            direction = rng.standard_normal(x.shape)
            factors = torch.tensor(rng.standard_normal(tuple(output.shape)), dtype=output.dtype)
            total = (output * factors).sum()
            slope = torch.autograd.grad(total, x, allow_unused=True)[0] if total.requires_grad else None
        except Exception as error:
            return said("gradient of {name}: {error}", name=name, error=f"{type(error).__name__}: {error}")
        by_autograd = 0.0 if slope is None else float((slope * torch.tensor(direction, dtype=slope.dtype)).sum())
        moved = [
            student({**inputs, name: inputs[name] + step * direction}, way, asked).output for step in (1e-2, -1e-2)
        ]
        by_difference = float(((moved[0] - moved[1]) / 2e-2 * factors.detach().double().numpy()).sum())
        if abs(by_autograd - by_difference) > 2e-2 * (1 + abs(by_difference)):  # float32, and a curved function
            slopes = said(
                "along a direction of {name}: by autograd {one}, by differences {two}",
                name=name, one=f"{by_autograd:.4f}", two=f"{by_difference:.4f}",
            )  # fmt: skip
            return f"{_shown(inputs)}\n{slopes}"
    return ""
