"""The sentence about the line that differs, and what to write where the core has what that line does.

What to write has been tried: with these keywords the core gives the attention weights of the traced call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import functional
from .differing import FEATURES, HIDDEN, INPUTS, KEYS, ORDER, OUTPUT, QUERIES, SCORES, VALUES, WEIGHTS, Look, looks
from .traced import Step

_NEAR = 1e-4
_DOES = {  # operations, and what is said of them
    "layer_norm rms_norm group_norm batch_norm normalize norm": "normalises the {}",
    "tanh relu gelu elu silu selu sigmoid softplus leaky_relu exp log square pow sqrt rsqrt abs __pow__ hardtanh clamp "
    "clip clamp_min clamp_max softmax log_softmax": "takes {op} of the {}",
    "topk sort kthvalue max amax argmax": "looks for the largest of the {}",
    "mean avg_pool1d": "averages the {}",
    "sum cumsum": "sums the {}",
    "__add__ add add_ __radd__ __iadd__ baddbmm": "adds something to the {}",
    "__sub__ sub __rsub__": "subtracts from the {}",
    "mul mul_ __mul__ __rmul__ multiply div div_ __truediv__": "multiplies the {} by other numbers",
    "cat concat concatenate pad stack": "puts more beside the {}",
    "flip roll gather index_select": "changes the order of the {}",
    "masked_fill masked_fill_ where __setitem__": "hides others of the {}",
    "cdist cosine_similarity pairwise_distance": "compares queries and keys otherwise than by q k^T",
    "conv1d conv2d": "takes a convolution of the {}",
    "linear matmul bmm einsum __matmul__": "multiplies the {} otherwise than the core",
}  # fmt: skip
_OF = {op: words for ops, words in _DOES.items() for op in ops.split()}
_PLACE = ORDER.index
_SOFTMAX = ("softmax", "log_softmax", "exp")
_PRODUCTS = ("matmul", "bmm", "einsum", "__matmul__", "linear", "addmm", "baddbmm", "sum", "conv1d", "conv2d")


class _Way(NamedTuple):
    """What a line does to the scores, and the keywords with which the core does it, too.

    times   what queries are multiplied by before; None: nothing
    """

    words: str
    options: dict[str, Any]
    written: str
    times: Optional[Tensor] = None


class Told(NamedTuple):
    """What a line does, where it stands, and what may be done about it.

    known    whether the core does it, too, by the keywords that `rest` names
    product  whether it is a product, which may have been given another order of heads by lines before
    hides    whether it was found in a call with a mask, or lengths, alone
    """

    words: str = ""
    line: str = ""
    rest: str = ""
    known: bool = False
    product: bool = False
    hides: bool = False

    def __str__(self) -> str:
        return f"{' '.join(filter(None, (self.words, self.line)))}{self.rest}"


def what_differs(module: nn.Module, training: bool = False) -> Told:
    """What a call of it does otherwise than the core; without words where tracing shows nothing."""
    found = list(looks(module, training))
    if not found:
        return Told()
    with torch.no_grad():
        return _Telling(found[0], found[1] if len(found) > 1 else None).told()


class _Telling:
    """One look, and another with other inputs."""

    def __init__(self, look: Look, other: Optional[Look]) -> None:
        self.look, self.other, self.book = look, other, look.book
        self.first = look.first()
        self.function = "dot_product_attention" if look.book.w_v is None else "additive_attention"

    def told(self) -> Told:
        if self.first is None:
            return Told()
        step = self.look.trace.steps[self.first]
        given = self.look.given_to(step)
        if self.look.hides:
            words = "without a mask it is the core's, with one it is not:"
            return Told(words, _quoted(step), hides=True) if step.line else Told()
        if given.noun in (QUERIES, KEYS, FEATURES, SCORES):
            for way in self._ways():
                if self._gives(way):
                    where = self._line_of_scale() if [*way.options] == ["scale"] else step
                    first = "q" if way.times is None else "q * those numbers"
                    return Told(way.words, _quoted(where), f"; {self._call(first, way.written)} does that", True)
        if given.noun == SCORES and step.name in _SOFTMAX and abs(given.factor - 1) > _NEAR * 10:
            factor = given.factor * self.book.scale
            words, step = self._of_factor(self._written(factor, _factor_of(self.other))), self._line_of_scale()
        else:
            words = self._does(step, given.noun)
        return Told(words, _quoted(step), self._rest(step, given.noun), product=step.name in _PRODUCTS)

    def _call(self, first: str, *written: str) -> str:
        more = () if self.book.w_v is None else ("w_v",)
        return f"{self.function}({', '.join(x for x in (first, 'k', 'v', *more, *written) if x)})"

    # ---- in words ----------------------------------------------------------------------------------

    def _does(self, step: Step, noun: str) -> str:
        nouns = sorted({self.look.known[source].noun for source in step.sources} - {INPUTS}, key=_PLACE)
        several = " and ".join(nouns) if 0 < len(nouns) <= 2 else noun
        words = _OF.get(step.name, "makes something else of the {}")
        largest = self._largest() if noun == SCORES and "largest" in words else ""
        return largest or "it " + words.format(several, op=step.name.strip("_"))

    def _largest(self) -> str:
        """Of lines that keep as many scores in each row."""
        x = self._before_softmax(self.look)
        counts = set() if x is None else {int(n) for n in (x > HIDDEN).sum(-1).flatten()}
        kept = counts.pop() if len(counts) == 1 else 0
        return f"it keeps the {kept} largest scores of each query" if x is not None and 0 < kept < x.shape[-1] else ""

    def _of_factor(self, written: str) -> str:
        number = "" if self.book.plan.weights is None else f" = {self.book.scale:.4g}"  # or of a width that is ours
        usual = f"not by 1 / sqrt(d){number}," if self.book.w_v is None else "not taken as they are,"
        return f"scores are multiplied by {written}, {usual}"

    def _written(self, number: float, again: Optional[float]) -> str:
        """A number of their lines; those of parameters are not theirs here, and some follow from the features.

        again   what it is in the other look: one width alone does not tell 1 / q.shape[-1] from 1 / 3
        """
        if self.book.has_more:
            return "a number of its own"
        if self.other is not None and again is not None and self.other.book.q.shape[-1] != self.book.q.shape[-1]:
            for power, form in ((-1.0, "{} / q.shape[-1]"), (-0.5, "{} / q.shape[-1] ** 0.5"),
                                (0.5, "{} * q.shape[-1] ** 0.5")):  # fmt: skip
                times, others = number / self.book.q.shape[-1] ** power, again / self.other.book.q.shape[-1] ** power
                if abs(times - others) < _NEAR * 10 * abs(times):
                    return form.format(f"{times:.4g}").replace("1 * ", "")
        differs = again is not None and abs(again - number) > _NEAR * 10 * abs(number)
        return "a number that changes with the inputs" if differs else f"{number:.4g}"

    def _rest(self, step: Step, noun: str) -> str:
        """What may be done about it."""
        if noun in (QUERIES, KEYS, INPUTS):
            options = None if step.name in _PRODUCTS else self._of_own_product()
            return "" if options is None else f"; give what comes of it to {self._call('q', *options)}"
        if noun == VALUES and {self.look.known[source].noun for source in step.sources} == {VALUES}:
            return f"; give what comes of it to {self.function} as v"
        if noun == OUTPUT:
            return f"; keep it after {self.function}"
        return "; the core has no such step" if noun in (FEATURES, SCORES, WEIGHTS) else ""

    def _of_own_product(self) -> Optional[tuple[str, ...]]:
        """The keywords with which the core goes on from their own queries and keys; None where it does not."""
        steps = self.look.trace.steps
        last = next((i for i in range(len(steps) - 1, -1, -1) if steps[i].name == "softmax" and steps[i].sources), 0)
        x = self.look.trace.values(steps[last].sources[0]).float() if last else None
        for step in steps[self.first or 0 : last]:
            own = step.values[0]
            if x is None or step.name not in _PRODUCTS or len(step.sources) < 2 or own.numel() != x.numel():
                continue
            seen, own = x > HIDDEN, own.float().reshape(x.shape)
            scale = float((x * own)[seen].sum() / own[seen].square().sum())
            alike = _close(x[seen], scale * own[seen]) and _close(x.softmax(-1), steps[last].values[0].float())
            masks = seen.reshape(-1, *seen.shape[-2:])
            if alike and bool((masks == masks[0]).all()) and self._are_multiplied(steps[last].values[0], last + 1):
                _, _, mask = _of_mask(masks[0])
                usual = self.look.trace.values(step.sources[0]).shape[-1] ** -0.5
                same = abs(scale - usual) < _NEAR
                return mask, "" if same else f"scale={scale:.4g}"
        return None

    def _are_multiplied(self, weights: Tensor, first: int) -> bool:
        """Whether such weights, of all heads or of one, go into a product after the first steps."""
        wanted = [x.float().flatten().sort().values for x in (weights, weights[:, 0])]
        for one in self.look.trace.steps[first:]:
            given = (self.look.trace.values(source) for source in one.sources if one.name in _PRODUCTS)
            for x in (x.float().flatten() for x in given if x.is_floating_point()):
                if any(x.numel() == y.numel() and _close(x.sort().values, y) for y in wanted):
                    return True
        return False

    # ---- what the core does, too ----------------------------------------------------------------------

    def _gives(self, way: _Way) -> bool:
        """Whether the core's weights with these keywords are those that multiply values in the call."""
        book = self.book
        q = book.q if way.times is None else book.q * way.times
        try:
            q, k, v = (x.float().contiguous() for x in (q, book.k, book.v))
            _, weights = functional._attention(q, k, v, book.w_v, None, True, False, **way.options)
        except (TypeError, ValueError):
            return False
        return self._are_multiplied(weights, self.first or 0)

    def _before_softmax(self, look: Look) -> Optional[Tensor]:
        """The last scores (B, H, Q, K), or with one column more."""
        steps, (*batch, n_queries, n_keys) = look.trace.steps, look.book.scores.shape
        for i in range(len(steps) - 1, -1, -1):
            if steps[i].name in _SOFTMAX and steps[i].sources:
                x = look.trace.values(steps[i].sources[0]).float()
                if x.numel() == look.book.scores.numel() or x.shape[-1] == n_keys + 1:
                    return _as_heads(x, (*batch, n_queries, x.shape[-1]))
        return None

    def _ways(self) -> Iterator[_Way]:
        """What the scores before softmax say, likeliest first."""
        x, scores = self._before_softmax(self.look), self.book.scores
        other = None if self.other is None else self._before_softmax(self.other)
        if x is not None and other is not None and x.shape[-1] == scores.shape[-1] + 1:
            yield from self._sinks(x, other)
        elif x is not None and other is not None:
            yield from self._of_scores(x, other)
        one = _Way("softmax has one more in its sum", {"sinks": torch.zeros(scores.shape[1])}, "sinks=zeros(heads)")
        yield one

    def _of_scores(self, x: Tensor, other: Tensor) -> Iterator[_Way]:
        assert self.other is not None
        scores, book = self.book.scores, self.other.book
        seen, (n_queries, n_keys) = x > HIDDEN, other.shape[-2:]
        if not bool(
            seen.any() and (seen == seen[:1, :1]).all() and (seen[..., :n_queries, :n_keys] == (other > HIDDEN)).all()
        ):
            return
        words, options, written = _of_mask(seen[0, 0])
        change = (x - scores * self.book.scale).masked_fill(~seen, 0.0)
        again = (other - book.scores * book.scale).masked_fill(other <= HIDDEN, 0.0)
        joined = f"{written}, " if written else ""
        factor = _ratio(x[seen], scores[seen])
        if bool(change.abs().max() < _NEAR):
            if options:
                yield _Way(words, options, written)
        elif _close(x[seen], factor * scores[seen]):
            again = _ratio(other[other > HIDDEN], book.scores[other > HIDDEN])
            number = self._written(factor, again)
            if abs(again - factor) < _NEAR or "q.shape" in number:  # for fewer keys, too
                yield _Way(self._of_factor(number), {**options, "scale": factor}, f"{joined}scale={number}")
        elif _close(change, change[:1].expand_as(change)) and _close(
            change[: len(again), :, :n_queries, :n_keys], again
        ):
            yield from _of_positions(change[0], seen[0], options, joined)
        else:
            yield from self._of_each(x, seen, options, written)

    def _of_each(self, x: Tensor, seen: Tensor, options: dict[str, Any], written: str) -> Iterator[_Way]:
        """Of functions of each score: another factor for each head, or a cap."""
        scaled = self.book.scores * self.book.scale
        shown = scaled.masked_fill(~seen, 0.0)
        times = (x.masked_fill(~seen, 0.0) * shown).sum((-1, -2), keepdim=True) / shown.square().sum((-1, -2), True)
        if _close(x[seen], (times * scaled)[seen]):
            yield _Way("scores of each head are multiplied by a number", options, written, times)
        cap, joined = _cap(x[seen], scaled[seen]), f"{written}, " if written else ""
        if cap:
            c = "c" if self.book.has_more else f"{cap:.4g}"
            yield _Way(
                f"scores pass through {c} * tanh(scores / {c})", {**options, "softcap": cap}, f"{joined}softcap={c}"
            )

    def _sinks(self, x: Tensor, other: Tensor) -> Iterator[_Way]:
        """One column more, with a number of each head."""
        for column in (0, -1):
            sinks = x[..., column]
            if _close(sinks, sinks[:1, :, :1].expand_as(sinks)) and _close(sinks[:1, :, 0], other[:1, :, 0, column]):
                rest = x[..., 1:] if column == 0 else x[..., :-1]
                causal = {"causal": True} if bool((rest < HIDDEN).any()) else {}
                written = "causal=True, " if causal else ""
                yield _Way("softmax has one number of each head more in its sum", {**causal, "sinks": sinks[0, :, 0]},
                           f"{written}sinks=those numbers, of shape (heads,)")  # fmt: skip

    def _line_of_scale(self) -> Step:
        """The last step that multiplied scores."""
        steps, known = self.look.trace.steps, self.look.known
        for i in range(len(steps) - 1, -1, -1):
            one = known.get((i, 0))
            before = [known[source] for source in steps[i].sources if source in known]
            if one is not None and one.noun == SCORES and all(abs(x.factor - one.factor) > 1e-3 for x in before):
                return steps[i]
        assert self.first is not None
        return steps[self.first]


def _quoted(step: Step) -> str:
    return f"in `{step.line}`" if step.line else ""


def _factor_of(look: Optional[Look]) -> Optional[float]:
    """What the scores are multiplied by where the look finds the first line that differs, if it finds one."""
    if look is None:
        return None
    first = look.first()
    return (1.0 if first is None else look.given_to(look.trace.steps[first]).factor) * look.book.scale


def _ratio(x: Tensor, scores: Tensor) -> float:
    """The factor of scores that x is nearest to."""
    return float((x * scores).sum() / scores.square().sum())


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=_NEAR, atol=_NEAR)


def _as_heads(x: Tensor, shape: tuple[int, ...]) -> Optional[Tensor]:
    """Scores in the core's order of axes, where theirs is one of the usual."""
    batch, heads, n_queries, n_keys = shape
    if tuple(x.shape[-2:]) != (n_queries, n_keys) or x.numel() != batch * heads * n_queries * n_keys:
        return None
    return x.transpose(0, 1) if tuple(x.shape[:2]) == (heads, batch) != (batch, heads) else x.reshape(shape)


def _of_mask(seen: Tensor) -> tuple[str, dict[str, Any], str]:
    """(words, keywords of the core, as they are written) for the keys (Q, K) that may be seen, of as many queries."""
    n_queries, n_keys = seen.shape
    if bool(seen.all()):
        return "", {}, ""
    uniform = {} if bool(seen.any(-1).all()) else {"empty_rows": "uniform"}
    away = torch.arange(n_queries)[:, None] - torch.arange(n_keys)
    left, right = int(away[seen].max()), int(-away[seen].min())
    band = (away <= left) & (-away <= right)
    if torch.equal(seen, away >= 0):
        return "the future is hidden", {"causal": True}, "causal=True"
    if torch.equal(seen, band) and left >= 0 and right >= 0:
        ends = None if left == n_queries - 1 else left, None if right == n_keys - 1 else right
        before, after = ("all" if end is None else end for end in ends)
        words = f"each query sees {before} of the keys before it, and {after} of those after it"
        return words, {"window": ends}, f"window={ends}"
    written = "keep_mask=that mask, True for what is seen"
    return "keys are hidden by their positions", {"keep_mask": seen, **uniform}, written


def _of_positions(change: Tensor, seen: Tensor, options: dict[str, Any], joined: str) -> Iterator[_Way]:
    """Of numbers (H, Q, K) that are added and do not follow from the inputs."""
    n_heads, n_queries, n_keys = change.shape
    away = torch.arange(n_keys) - torch.arange(n_queries)[:, None]
    most = max(n_queries, n_keys) - 1
    table = torch.zeros(n_heads, 2 * most + 1)
    table[:, (away + most)[seen[0]]] = change[:, seen[0]]
    if bool((table[:, away + most].masked_fill(~seen, 0.0) - change).abs().max() < _NEAR):
        slopes = -table[:, most - 1]
        distances = torch.arange(-most, most + 1).abs()
        is_linear = _close(change, (-slopes[:, None] * distances)[:, away + most].masked_fill(~seen, 0.0))
        alibi = "ALiBi: slopes times distances are" if is_linear else "numbers of the distance of query and key are"
        table_of = "-slopes[:, None] * abs(arange(-R, R + 1))" if is_linear else "their table (heads, 2R + 1)"
        yield _Way(f"{alibi} added to the scores", {**options, "relative_bias": table},
                   f"{joined}relative_bias={table_of}")  # fmt: skip
    bias = change[None] if n_heads > 1 else change
    words = "numbers of the positions are added to the scores"
    yield _Way(words, {**options, "bias": bias}, f"{joined}bias=those numbers")


def _cap(x: Tensor, scores: Tensor) -> float:
    """The c of c * tanh(scores / c), or 0."""
    largest = int(scores.abs().argmax())
    wanted, s = float(x[largest].abs()), scores[largest].abs().double()
    low, high = 1e-3, 1e6
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if float(middle * torch.tanh(s / middle)) < wanted else (low, middle)
    return low if wanted < float(s) and _close(x, (low * torch.tanh(scores.double() / low)).to(x.dtype)) else 0.0
