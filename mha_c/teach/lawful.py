"""Laws that every right implementation obeys, however it is written: `laws` tries them without any reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .._arguments.calls import refuses_at_the_call
from .answers import NEAR, written
from .kinds import told
from .mistakes import KINDS
from .probes import Inputs
from .student import WEIGHTS, Student, Way, gradients_recorded, own_line

Run = Callable[[Inputs], Any]
Tried = Optional[tuple[str, Any, Any]]  # what was changed, what came of it, what should have; None: it does not apply
_ATTENTION = ("dot_product", "additive", "multi_head")


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
        lines = [f"{name}: {len(self.laws) - len(self.broken)} of {len(self.laws)} laws hold"]
        for law in self.laws:
            lines += [f"  {'holds ' if law.holds else 'BROKEN'}  {law.id}: {law.says}"]
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
    student = Student(mine, told(mine, kind))
    with gradients_recorded():
        (way, _), *_ = student.answers()
        return Laws(student.name, found(student, way))


def found(student: Student, way: Way) -> list[Law]:
    """How each law that applies stands."""

    def run(inputs: Inputs) -> Any:
        outcome = student(inputs, way)
        if outcome.error is not None:
            raise outcome.error
        return outcome.output

    kept = []
    for id, says, kinds, law in _LAWS:
        if student.kind in kinds and (id in ("items_apart", "prefix") or not student.attends_to_itself):
            tried = [_tried(law, run, inputs) for inputs in student.probes()]
            examples = [each for each in tried if each is not None]
            if examples:
                kept.append(Law(id, says, not any(examples), next(filter(None, examples), "")))
    if way.tensors and student.kind != "transpose_output":
        example = _gradients(student, way)
        kept.append(Law("gradients", "autograd's gradients are those that differences show", not example, example))
    return kept


def _tried(law: Callable[[Run, Inputs], Tried], run: Run, inputs: Inputs) -> Optional[str]:
    """A counterexample, "" if the law holds here, None if it does not apply."""
    try:
        tried = law(run, inputs)
        if tried is None:
            return None
        change, got, expected = tried
        if got.shape == np.shape(expected) and np.allclose(got, expected, NEAR, NEAR):
            return ""
        return f"{_shown(inputs)}\n{change}:\n{written({'expected': expected, 'got': got})}"
    except Exception as error:
        return f"{_shown(inputs)}\nit raises {type(error).__name__}: {error}  {own_line(error)}"


def _shown(inputs: Inputs) -> str:
    return written({name: x for name, x in inputs.items() if name not in WEIGHTS["multi_head"]})


# ---- the laws ------------------------------------------------------------------------------------------------------


def _rows_sum(run: Run, x: Inputs) -> Tried:
    if "X" in x:
        out = run(x)
        return "the sums of the rows", out.sum(axis=-1), np.ones(out.shape[:-1])
    out = run({**x, "values": np.ones_like(x["values"])})
    return "with values that are all 1", out, np.ones_like(out)


def _alike_values(run: Run, x: Inputs) -> Tried:
    first = {name: x[name][:, :1] for name in ("keys", "values")}
    alike = {**x, "values": np.repeat(first["values"], x["values"].shape[1], axis=1)}
    return "values all alike, beside a single key", run(alike), run({**x, **first, "valid_lens": None})


def _lengths_hide(run: Run, x: Inputs) -> Tried:
    if x.get("valid_lens") is None:
        return None
    if "X" in x:
        lens = x["valid_lens"].reshape(len(x["X"]), -1, 1)
        hidden = {"X": x["X"] + 3 * (np.arange(x["X"].shape[2]) >= lens)}
    else:
        lens = x["valid_lens"].reshape(len(x["keys"]), -1).max(axis=1)
        beyond = (np.arange(x["keys"].shape[1]) >= lens[:, None])[:, :, None]
        hidden = {name: x[name] + 3 * beyond for name in ("keys", "values")}
    return "3 added to all that lengths hide", run({**x, **hidden}), run(x)


def _future(run: Run, x: Inputs) -> Tried:
    last = np.arange(x["keys"].shape[1])[:, None] == x["keys"].shape[1] - 1
    later = {name: x[name] + 3 * last for name in ("keys", "values")}
    return "3 added to the last key and value, rows before it", run({**x, **later})[:, :-1], run(x)[:, :-1]


def _items(run: Run, x: Inputs) -> Tried:
    out, batched = run(x), x["X"] if "X" in x else x["queries"]
    folds = len(batched) > len(out)  # transpose_output: an item is num_heads rows
    rows = x["num_heads"] if folds else 1
    if len(batched) == rows:
        return None
    one = {name: x[name][:rows] for name in ("X", "queries", "keys", "values", "valid_lens") if x.get(name) is not None}
    alone = run({**x, **one})
    return "the first item of the batch alone", alone, out[: len(alone)]


def _permuted(run: Run, x: Inputs) -> Tried:
    if "X" in x:
        backwards = run({**x, "X": x["X"][..., ::-1].copy(), "valid_lens": None})[..., ::-1]
        return "keys in the opposite order", backwards, run({**x, "valid_lens": None})
    turned = {name: x[name][:, ::-1].copy() for name in ("keys", "values")}
    free = {**x, "valid_lens": None} if "valid_lens" in x else x
    return "keys and values in the opposite order", run({**free, **turned}), run(free)


def _one_query(run: Run, x: Inputs) -> Tried:
    name, lens = ("X" if "X" in x else "queries"), x.get("valid_lens")
    last = {name: x[name][:, -1:]}
    if lens is not None and lens.ndim == 2:
        last["valid_lens"] = lens[:, -1:]
    return "the last query alone", run({**x, **last}), run(x)[:, -1:]


_LAWS = [
    ("rows_sum_to_1", "the weights of a query sum to 1",
     ("masked_softmax", "dot_product", "additive", "causal"), _rows_sum),
    ("values_alike", "where values are all alike, weights do not matter", ("multi_head",), _alike_values),
    ("lengths_hide", "what lengths hide changes nothing", ("masked_softmax", *_ATTENTION), _lengths_hide),
    ("no_future", "the future changes nothing", ("causal",), _future),
    ("items_apart", "an item of the batch does not depend on its neighbours", tuple(KINDS), _items),
    ("keys_permuted", "keys and values permuted alike give the same", ("masked_softmax", *_ATTENTION), _permuted),
    ("query_alone", "a query's row alone gives its row", ("masked_softmax", *_ATTENTION), _one_query),
    ("prefix", "a shorter sequence gives the same rows", ("causal", "positional_encoding"), lambda run, x: (
        "without the last step", run({name: value[:, :-1] for name, value in x.items()}), run(x)[:, :-1])),
    ("same_addend", "what is added does not depend on X", ("positional_encoding",), lambda run, x: (
        "what is added to X, and what is added to 0", run(x) - x["X"], run({"X": 0 * x["X"]}))),
    ("circle", "each pair of columns is a sine and a cosine of one angle", ("positional_encoding",), lambda run, x: (
        "the length of each pair of columns, added to 0",
        np.hypot(*run({"X": 0 * x["X"]}).reshape(-1, 2).T), np.ones(x["X"].size // 2))),
    ("each_once", "each number stays, once", ("transpose_qkv", "transpose_output"), lambda run, x: (
        "all numbers in order", np.sort(run(x), axis=None), np.sort(x["X"], axis=None))),
]  # fmt: skip


def _gradients(student: Student, way: Way) -> str:
    """A counterexample: autograd's slope along a random direction, and that of differences."""
    torch: Any = sys.modules["torch"]
    rng = np.random.default_rng(1)
    inputs = student.probes()[-1]
    names = [name for name in ("queries", "keys", "values", "X") if name in inputs]
    for name in names:
        try:
            output, x = student.traced(inputs, way, name)
            direction = rng.standard_normal(x.shape)
            factors = torch.tensor(rng.standard_normal(tuple(output.shape)), dtype=output.dtype)
            total = (output * factors).sum()
            slope = torch.autograd.grad(total, x, allow_unused=True)[0] if total.requires_grad else None
        except Exception as error:
            return f"gradient of {name}: {type(error).__name__}: {error}"
        by_autograd = 0.0 if slope is None else float((slope * torch.tensor(direction, dtype=slope.dtype)).sum())
        moved = [student({**inputs, name: inputs[name] + step * direction}, way).output for step in (1e-2, -1e-2)]
        by_difference = float(((moved[0] - moved[1]) / 2e-2 * factors.detach().double().numpy()).sum())
        if abs(by_autograd - by_difference) > 2e-2 * (1 + abs(by_difference)):  # float32, and a curved function
            slopes = f"by autograd {by_autograd:.4f}, by differences {by_difference:.4f}"
            return f"{_shown(inputs)}\nalong a direction of {name}: {slopes}"
    return ""
