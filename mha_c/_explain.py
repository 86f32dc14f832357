"""`mha_c.explain`: what a call will do and why, in words.

The facts come from the compiled core, which takes them from the same plan that the call follows
(csrc/layer/explain.c).  This module only finds out which call is meant, and turns the facts into sentences.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

import numpy as np

from . import _core, functional
from ._arguments import calls, scalars
from ._arguments.arrays import floats, to_array, to_arrays
from ._arguments.calls import INPUTS, refuses_at_the_call
from ._arguments.options import OPTIONS, core_options, projected
from ._decoder.caches import KeyValueCache, ProjectedKeyValues, by_name, check_steps, most, step_counts
from ._decoder.rolling import options_of_rows
from ._decoder.steps import DecodingLayer, check_cache
from ._layer.call import AttentionLayer
from ._layer.description import BOOK_NAMES, LOOKED, describe
from ._layer.plan import Plan
from ._recognize import THREE_LINES
from .config import SECONDS, in_words, threads_of

if TYPE_CHECKING:
    from ._types import Array

    Facts = dict[str, Any]

__all__ = ["Explanation", "explain"]


class Explanation:
    """The result of `explain`: it prints as two lines; `detail` says all, `as_dict()` returns the facts behind it."""

    def __init__(self, title: str, facts: Facts, summary: str, lines: Sequence[tuple[str, str]]) -> None:
        self._facts, self._text = facts, f"{title}\n  {summary}"
        width = max(len(label) for label, _ in lines)
        self._detail = "\n".join([title, *(f"  {label:<{width}}  {text}" for label, text in lines)])

    @property
    def detail(self) -> str:
        """What the call will do and why, a line for each of its steps: `print(explain(...).detail)`."""
        return self._detail

    def as_dict(self) -> Facts:
        """A copy of the facts, named as in csrc/mha_explain.h; times are in seconds, sizes in bytes."""
        return copy.deepcopy(self._facts)

    def __repr__(self) -> str:
        return self._text


@refuses_at_the_call
def explain(call: Union[AttentionLayer, Callable[..., Any]], *args: Any, **options: Any) -> Explanation:
    """Explain which kernels, tiles and threads a call would use, how much memory, and why.

    >>> import numpy as np, mha_c
    >>> _ = mha_c.set_num_threads(1)
    >>> X = np.ones((2, 4, 100), dtype=np.float32)
    >>> layer = mha_c.MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)
    >>> explained = mha_c.explain(layer, X, X, X, valid_lens=[3, 2])
    >>> explained  # doctest: +ELLIPSIS
    MultiHeadAttention, float32: 2 items, 5 heads, 4 queries, 4 keys
      the compiled core (...), one thread; ... KiB during the call, 640 B kept; .detail says why
    >>> print(explained.detail)  # doctest: +ELLIPSIS
    MultiHeadAttention, float32: 2 items, 5 heads, 4 queries, 4 keys
      kernels    ...
      W_q        8 rows of 100 features -> 100
      W_k        5 of 8 rows of 100 features -> 100: no query sees the others
      W_v        5 of 8 rows of 100 features -> 100: no query sees the others
      threads    one: 9.6 us of work, less than the 30 us that waking another one is worth
      attention  4 keys in one block (of up to 512): a plain softmax, straight to the result
      tiles      4 queries at a time; 2 tasks of 4 queries of up to 5 items or heads
                 few keys: scores stand transposed, a vector holding one key's scores of several queries
      threads    one: 0.384 us of work, less than the 30 us that waking another one is worth
      W_o        8 rows of 100 features -> 100
      threads    one: there is one task, so nothing to share
      memory     ... KiB during the call; 640 B kept: the weights, which are fewer than queries and keys

    `explain` computes no result and changes nothing: it draws no random numbers and initialises no weights.

    Parameters
    ----------
    call : layer or function
        A layer of mha_c or mha_c.torch, functional.dot_product_attention or functional.additive_attention.
    *args : Any
        The positional arguments of the call; for a layer also (queries, kv), where kv is the result of its `project`.
    **options : Any
        The keyword arguments of the call.

    Returns
    -------
    Explanation
        Prints as two lines: the call, and what computes it, with how many threads and how much memory.  `detail` is
        the text with every step; `as_dict()` returns the same facts by name.  Times are estimates: by them the core
        chooses the number of threads.  What computes the call of a torch module depends on its tensors' device and
        on what observes the call (a compiler, a transform, hooks).

    Raises
    ------
    TypeError
        If `call` is none of these.  Other errors are those of the call itself.
    """
    if isinstance(call, AttentionLayer):
        return _explain_layer(call, *_arguments(call, args, options))
    if hasattr(type(call), "_explained"):
        _arguments(call, args, options)
        return _explain_module(call, args, options)  # as they are given: a reader's class is read by form
    if call is functional.dot_product_attention or call is functional.additive_attention:
        return _explain_function(call, args, options)
    why = _why_left(call)
    if why is None:
        raise _not_a_layer(call)
    name = type(call).__name__
    facts = {"call": name, "way": "general", "why": f"its own lines: {why}"}
    lines = [("way", facts["why"]), ("instead", THREE_LINES.replace("\n", "\n" + " " * 7))]
    return Explanation(name, facts, facts["why"], lines)


def _why_left(call: Any) -> Optional[str]:
    """Why `convert` has left a module; None where it has not."""
    found = LOOKED.get(call) if hasattr(call, "named_modules") else None
    return None if found is None else str(found.reason)


def _not_a_layer(call: Any) -> TypeError:
    """The error for what is no layer: it names the layers inside, or what makes one."""
    name: Any = getattr(call, "__name__", type(call).__name__)
    modules: Any = getattr(call, "named_modules", dict)
    inside = [path for path, one in modules() if hasattr(type(one), "_explained")]
    layers = [path for path in inside if path.rpartition(".")[0] not in inside]
    if layers:
        one = f"explain(model.get_submodule({layers[0]!r}), ...)"
        return TypeError(
            f"explain takes one attention layer, and {name} holds {', '.join(map(repr, layers[:4]))}: write {one}"
        )
    if modules is not dict:
        name = (
            f"{type(call).__module__}.{name}: mha_c.torch.convert makes its attention one, d2l's, torch's or your own, "
            f"or says what differs.  {THREE_LINES}"
        )
    return TypeError(
        f"explain takes an attention layer of mha_c, functional.dot_product_attention or "
        f"functional.additive_attention (for NumPy), and then the arguments of the call; got {name}"
    )


# --- Which call ---------------------------------------------------------------------------------------


def _arguments(layer: Any, args: tuple[Any, ...], options: Facts) -> tuple[tuple[Any, ...], Facts]:
    """The arguments of a call, refused in the words of the call."""
    call = "forward" if hasattr(type(layer), "forward") else "__call__"
    signature = inspect.signature(getattr(type(layer), call))
    _, *parameters = signature.parameters.values()
    kinds, known = {each.kind for each in parameters}, {each.name for each in parameters}
    if not known.issuperset(options) and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise calls.misnamed(layer, call, [name for name in options if name not in known])
    needed = [x.name for x in parameters if x.default is x.empty and x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    names = ", ".join(needed if needed and "queries" not in known else INPUTS[:3])
    advice = f"explain needs the arguments of the call, too: explain(layer, {names})"
    if not args and not options:
        raise TypeError(advice)
    try:
        bound = signature.bind(layer, *args, **options)
    except TypeError as error:
        raise TypeError(f"{type(layer).__name__}: {error}.  {advice}") from None
    return bound.args[1:], bound.kwargs


def _explain_layer(layer: AttentionLayer, args: tuple[Any, ...], options: Facts) -> Explanation:
    (queries, keys, values), given, training, cache = layer._asked(*args, **options)
    projected: tuple[str, ...] = ()
    if isinstance(layer, DecodingLayer) and type(keys) is ProjectedKeyValues:
        projected = keys._projections
        keys, values, valid_lens = layer._projected_arguments(keys, values, given.valid_lens)
        given = given._replace(valid_lens=valid_lens)
    inputs, _ = to_arrays((queries, "queries"), (keys, "keys"), (values, "values"))
    plan = layer._current_plan(inputs[0]) or layer._plan_of_zeros(inputs)
    in_training = layer.training if training is None else scalars.flag(training, "training")
    steps: dict[str, Facts] = {}
    if cache is not None:
        check_cache(cache, in_training)
        counts = step_counts(given.valid_lens, cache.batch, inputs[0].shape[1])
        masks = layer._seen_of_steps(given, cache, counts, inputs[0].shape[1])  # type: ignore[attr-defined]
        steps, inputs, lens, seen = _of_steps(layer, plan, inputs, cache, counts, masks)
        projected = tuple(steps)
    else:
        lens, seen = layer._given_options(given, *inputs[:2])
    facts = _core.explain_layer(
        *inputs, lens, *plan.without(projected).in_core, layer._dropout.p if in_training else 0.0, 0, in_training, seen
    )
    projections = {**steps, **facts["projections"]}
    names = describe(layer)
    labels = dict(zip(BOOK_NAMES, names.labels))
    facts["projections"] = {label: projections[name] for name, label in labels.items() if name in projections}
    return _explanation(type(layer).__name__, {"dtype": inputs[0].dtype.name, **facts}, names.names[3])


def _of_steps(
    layer: Any, plan: Plan, inputs: Any, cache: KeyValueCache, counts: Any, masks: Any
) -> tuple[dict[str, Facts], Any, Any, Any]:
    """Of a call with a cache: the facts of the new steps' projections, and the inputs, lengths and options of its
    attention."""
    queries, *rows = inputs
    check_steps(cache.batch, by_name(queries, *rows))
    after = cache._check(layer._weights_of_cache(plan), counts)
    packed = dict(zip(BOOK_NAMES, plan.in_core[0]))
    steps, seen = {}, []
    for name, x in zip(("W_k", "W_v"), rows):
        features = x.shape[2]
        if packed[name] is not None:
            steps[name] = _core.explain_linear(x, packed[name])
            features = packed[name][2][0]
        n_keys = cache._n_keys(after, queries.shape[1])
        seen.append(np.broadcast_to(x.dtype.type(0), (cache.batch, n_keys, features)))
    in_order = n_keys == most(after)
    lens = cache._visible_keys(after, queries.shape[1]) if in_order else None
    return steps, (queries, *seen), lens, options_of_rows(cache, after, masks) if masks and in_order else None


def _explain_module(module: Any, args: tuple[Any, ...], options: Facts) -> Explanation:
    name, facts = type(module).__name__, module._explained(*args, **options)
    way = [("way", facts["why"])] if "why" in facts else []
    if "projections" in facts:
        return _explanation(name, facts, "W_o", way)
    if "by" in facts:
        kept = f"{in_words(facts['kept_bytes'])} kept, to compute the weights when they are read"
        way += [("attention", facts["by"])]
        way += [("memory", f"{in_words(facts['scratch_bytes'])} beside what torch's kernels need; {kept}")]
    counted = f": {_counted(facts)}" if "attention" in facts else ""  # a call that is not read has no sizes
    title = f"{name}, {facts['dtype']} on {facts['device']}{counted}"
    return Explanation(title, {"call": name, **facts}, facts["why"], way)


def _explain_function(function: Callable[..., Any], args: tuple[Any, ...], options: Facts) -> Explanation:
    bound = inspect.signature(function).bind(*args, **options)
    bound.apply_defaults()
    given = bound.arguments
    (q, k, v), _ = to_arrays((given["q"], "q"), (given["k"], "k"), (given["v"], "v"))
    projections: dict[str, Facts] = {}
    w_v = None
    if "w_v" in given:
        w_v = to_array(given["w_v"], "w_v")
        q = _projected(q, "q", given["W_q"], "W_q", w_v, projections)
        k = _projected(k, "k", given["W_k"], "W_k", w_v, projections)
    given["rng"] = 0 if given["dropout"] else None  # else a Generator would lose a number
    *in_order, terms = core_options(q, k, given["valid_lens"], **{name: given[name] for name in OPTIONS})
    outputs = given["return_weights"], given["return_lse"]
    attention = _core.explain_attention(*(q, k, v, w_v, *in_order, *outputs, terms))
    if terms is not None:
        reach = None if terms[0] is None else terms[0].shape[1] // 2
        attention["score_terms"] = {"softcap": terms[1], "reach": reach, "sinks": terms[2] is not None}
    facts = {"projections": projections, "attention": attention, "scratch_bytes": attention["scratch_bytes"]}
    return _explanation(function.__name__, {"dtype": q.dtype.name, **facts})


def _projected(x: Array, name: str, weight: Any, weight_name: str, w_v: Array, projections: dict[str, Facts]) -> Array:
    """An array of the shape of x W^T without its numbers; adds the facts of the product to `projections`."""
    if weight is None:
        return x
    checked: Array = projected(x[..., :0, :], name, weight, weight_name, w_v.shape[0])  # all checks
    projections[weight_name] = _core.explain_linear(floats(x, name), (to_array(weight, weight_name), None))
    return np.broadcast_to(checked.dtype.type(0), (*x.shape[:-1], w_v.shape[0]))


# --- In words -------------------------------------------------------------------------------------------


def _explanation(name: str, facts: Facts, output: str = "", way: Sequence[tuple[str, str]] = ()) -> Explanation:
    """The facts in sentences; `output` names the projection that comes after the attention."""
    attention = facts["attention"]
    inputs = {name: projection for name, projection in facts["projections"].items() if name != output}
    lines = [*way, ("kernels", _kernels(attention["kernels"]))]
    sliced, share = facts.get("n_slices", 1) > 1, ("threads", _threads(attention["share"]))
    if sliced:
        items = f"{facts['slice_items']} of {_count(attention['batch'], 'item')} at a time through all steps"
        lines += [("slices", f"{items}, each finding what the last left in cache"), share]
    lines += _projections(inputs, not sliced)
    lines += [("attention", _blocks(attention)), ("tiles", _tiles(attention, sliced))]
    lines += [("", text) for text in _remarks(attention)]
    lines += [] if sliced else [share]
    if output in facts["projections"]:
        lines += _projections({output: facts["projections"][output]}, not sliced)
    lines.append(("memory", _bytes_in_words(facts)))
    facts = {"call": name, **facts, "threads_of": threads_of()[0]}
    return Explanation(f"{name}, {facts['dtype']}: {_counted(facts)}", facts, _summary(facts), lines)


def _summary(facts: Facts) -> str:
    """What computes the call, with how many threads and how much memory, in one line."""
    attention = facts["attention"]
    shares = [attention["share"], *(projection["share"] for projection in facts["projections"].values())]
    n_threads = max(share["n_threads"] for share in shares)
    threads = "one thread" if n_threads == 1 else f"{n_threads} threads{_whose()}"
    kept = f", {in_words(facts['kept_bytes'])} kept" if "kept" in facts else ""
    by = f"{facts.get('why', 'the compiled core')} ({attention['kernels']['isa']})"
    return f"{by}, {threads}; {in_words(facts['scratch_bytes'])} during the call{kept}; .detail says why"


def _counted(facts: Facts) -> str:
    sizes = [("item", "batch"), ("head", "heads"), ("query", "queries"), ("key", "keys")]
    return ", ".join(_count(facts["attention"][key], word) for word, key in sizes)


def _count(n: int, word: str) -> str:
    many = "queries" if word == "query" else word + "s"
    return f"{n} {word if n == 1 else many}"


def _kernels(kernels: Facts) -> str:
    offered = [name for name, available in _core.isas() if available]
    why = "the widest this CPU offers" if kernels["isa"] == offered[-1] else f"though this CPU offers {offered[-1]}"
    return (
        f"{kernels['isa']}, {why}: {_count(kernels['lanes'], 'number')} in a vector, products in register tiles of "
        f"{kernels['tile_rows']} x {kernels['tile_columns']}"
    )


def _projections(projections: dict[str, Facts], with_threads: bool) -> list[tuple[str, str]]:
    """One line per projection, and a line about threads after each run of projections that share them."""
    lines: list[tuple[str, str]] = []
    for i, (name, projection) in enumerate(projections.items()):
        n, needed = projection["rows"], projection["rows_needed"]
        of, rest = ("", "") if needed == n else (f"{needed} of ", ": no query sees the others")
        features = f"{projection['in_features']} features -> {projection['out_features']}"
        lines.append((name, f"{of}{_count(n, 'row')} of {features}{rest}"))
        following = list(projections.values())[i + 1 : i + 2]
        if with_threads and (not following or following[0]["share"] != projection["share"]):
            lines.append(("threads", _threads(projection["share"])))
    return lines


def _blocks(attention: Facts) -> str:
    keys, block, n = attention["keys"], attention["key_block"], attention["most_blocks"]
    if n == 0:
        return "no query sees a key"
    if n == 1:
        inside = "in one block" if keys <= block else "in blocks, of which each query needs one"
        return f"{_count(keys, 'key')} {inside} (of up to {block}): a plain softmax, straight to the result"
    return f"{keys} keys in blocks of {block}, up to {n} for a query: a softmax of each, joined one after another"


def _tiles(attention: Facts, sliced: bool) -> str:
    queries, tasks, n_heads = attention["task_queries"], attention["share"]["n_tasks"], attention["task_heads"]
    group = attention["heads"] // attention["kv_heads"] if attention["kv_heads"] else 1
    if sliced:  # then n_tasks counts the slices
        tasks = -(-attention["batch"] * attention["heads"] // n_heads) * -(-attention["queries"] // queries)
    heads = f" of up to {n_heads} items or heads" if n_heads > group else f" of {group} heads" if group > 1 else ""
    up_to = "up to " if queries and attention["queries"] % queries else ""
    text = f"{_count(attention['tile_queries'], 'query')} at a time; "
    return text + f"{_count(tasks, 'task')} of {up_to}{_count(queries, 'query')}{heads}"


def _remarks(attention: Facts) -> list[str]:
    """Sentences on things that only some calls have."""
    done, total, terms = attention["n_tiles"], attention["n_tiles_all"], attention.get("score_terms")
    remarks = []
    if terms is not None:
        parts = [f"capped at {terms['softcap']:g}"] if terms["softcap"] else []
        if terms["reach"] is not None:
            parts.append(f"with a bias by distance, up to {_count(terms['reach'], 'key')} away")
        parts += ["with a sink for each head"] if terms["sinks"] else []
        remarks.append(f"scores {', '.join(parts)}: in each tile, where it stands")
    if done < total:
        remarks.append(f"{done} of {total} tiles are computed: no query of the others sees a key there")
    if attention["by_columns"]:
        remarks.append("few keys: scores stand transposed, a vector holding one key's scores of several queries")
    if attention["n_splits"] > 1:
        remarks.append(f"few queries on many keys: each of the {attention['n_splits']} key blocks is a task of its own")
    if attention["weights_again"]:
        remarks.append("the weights follow in a second pass, when every row's largest score and sum are known")
    return remarks


def _threads(share: Facts) -> str:
    n, most, reason, tasks = share["n_threads"], share["most_threads"], share["reason"], share["n_tasks"]
    work, least, each = (in_words(share[name], SECONDS) for name in ("seconds", "least_seconds", "least_each"))
    if reason == "one task":
        return f"one: there is {'one task, so ' if tasks else ''}nothing to share"
    if reason == "little work":
        return f"one: {work} of work, less than the {least} that waking another one is worth"
    if reason == "all" and most == 1:
        return f"one: set_num_threads allows no more ({work} of work in {_count(tasks, 'task')})"
    whose = _whose()
    if reason == "work":
        return f"{n} of {most}{whose}: {work} of work, and each should get {each} of it"
    if reason == "tasks":
        return f"{n} of {most}{whose}: there are {_count(tasks, 'task')}, with {work} of work"
    return f"{n}{whose}, all that set_num_threads allows: {work} of work in {_count(tasks, 'task')}"


def _whose() -> str:
    return " of torch" if threads_of()[0] == "torch" else ""


def _bytes_in_words(facts: Facts) -> str:
    text = f"{in_words(facts['scratch_bytes'])} during the call"
    if "kept" not in facts:
        return text
    what = "the weights, which are fewer than queries and keys"
    if facts["kept"] != "weights":
        what = "queries and keys as they were scored, from which the weights are computed when read"
    return f"{text}; {in_words(facts['kept_bytes'])} kept: {what}"
