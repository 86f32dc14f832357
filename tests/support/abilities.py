"""The page docs/what-each-layer-can-do.md: each layer does, or refuses with its reason, what each word says.

    python tests/support/abilities.py > docs/what-each-layer-can-do.md

A cell is found by trying: the word's function uses the layer as a reader would, and compares what comes with what the
word promises.  "yes", or "-" and the reason, which the layer's own error says; anything else is a failure of
`test_abilities.py`.
"""

import contextlib
import copy
import importlib
import io
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # behind what is installed: the working tree, built in place
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy as np

import mha_c
from mha_c import heads, teach
from mha_c._layer.lacks import lacking

BATCH, STEPS, FEATURES, HEADS = 2, 5, 8, 4
KINDS = {  # how each is made; the last one is of mha_c.torch alone
    "MultiHeadAttention": lambda side: side.MultiHeadAttention(8, 8, 8, 8, HEADS, 0.0),
    "DotProductAttention": lambda side: side.DotProductAttention(0.0),
    "AdditiveAttention": lambda side: side.AdditiveAttention(8, 8, 6, 0.0),
    "GQAAttention": lambda side: side.GQAAttention(8, HEADS, 2, rope=True),
    "CausalAttention": lambda side: side.CausalAttention(8, HEADS, rope=True),
    "KernelAttention": lambda side: side.KernelAttention(width=2.0),
    "nn.MultiheadAttention": lambda side: side.nn.MultiheadAttention(8, HEADS, batch_first=True),
}
WORDS, OF_TORCH, SAID = {}, set(), {}


def word(name, said, torch_alone=False):
    def add(function):
        WORDS[name], SAID[name] = function, said
        if torch_alone:
            OF_TORCH.add(name)
        return function

    return add


class Case:
    """A layer in evaluation, float64, and a call of it."""

    def __init__(self, side, kind):
        self.side, self.kind, self.module = side, kind, importlib.import_module(side)
        self.layer = KINDS[kind](self.module)
        x = np.random.default_rng(0).standard_normal((BATCH, STEPS, FEATURES))
        self.is_torch = side == "mha_c.torch"
        if self.is_torch:
            torch = importlib.import_module("torch")
            torch.manual_seed(0)
            self.layer = self.layer.double().eval()
            self.layer.requires_grad_(False)
            x = torch.from_numpy(x)
        self.x = x
        self.n_inputs = 1 if kind == "CausalAttention" else 3

    def call(self, x=None, layer=None, **named):
        out = (layer or self.layer)(*[self.x if x is None else x] * self.n_inputs, **named)
        return out[0] if isinstance(out, tuple) else out

    def causal(self, x=None):
        return self.call(x) if self.kind in ("CausalAttention", "GQAAttention") else self.call(x, causal=True)


def same(found, expected, atol=1e-10):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=atol)


@word("call(…, causal=True)", "each query sees the keys up to its own place")
def _(case):
    out, x = case.call(causal=True), copy.deepcopy(case.x)
    x[:, -1] += 1.0
    same(case.call(x, causal=True)[:, :-1], out[:, :-1])


@word("attention_weights", "of the last call, rows sum to 1")
def _(case):
    case.call()
    weights = np.asarray(case.layer.attention_weights)
    same(weights.sum(-1), np.ones(weights.shape[:-1]))
    assert weights.shape[-2:] == (STEPS, STEPS) and case.layer.attention_weights is case.layer.attention_weights


@word("view()", "the page of these weights")
def _(case):
    case.call()
    assert case.kind.split(".")[-1] in case.layer.view(tokens="a b c d e").text


@word("playground()", "the playground, opened at the layer")
def _(case):
    case.call()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "playground.html")
        page.write_text('<div class="mhac" data-mhac="playground"></div>')
        assert "data-mhac-own" in case.layer.playground("a b c d e", page=page).html()


@word("explain(layer, …)", "which kernels, tiles and threads a call uses")
def _(case):
    facts = mha_c.explain(case.layer, *[case.x] * case.n_inputs).as_dict()
    found = [facts["attention"][name] for name in ("batch", "queries", "keys")]
    assert found == [BATCH, STEPS, STEPS] and facts["scratch_bytes"] > 0


@word("cost(layer, …)", "arithmetic, bytes and time, of sizes or of a call")
def _(case):
    by_call = mha_c.cost(case.layer, *[case.x] * case.n_inputs)
    by_sizes = mha_c.cost(case.layer, STEPS, batch=BATCH, features=FEATURES, measure=False)
    assert by_call.steps == by_sizes.steps and by_call.flops > 0 and by_call.seconds > 0


@word("new_cache()", "decodes step by step")
def _(case):
    cache, whole = case.layer.new_cache(BATCH, STEPS), case.causal()
    for i in range(STEPS):
        same(case.call(case.x[:, i : i + 1], cache=cache), whole[:, i : i + 1])


@word("project()", "keys and values of an encoder, projected once")
def _(case):
    layer = case.layer
    if hasattr(layer, "causal"):
        layer.causal = False
    kv = layer.project(case.x, case.x)
    same(layer(case.x[:, :2], kv), layer(case.x[:, :2], case.x, case.x))


@word("heads.importance", "how much each head matters")
def _(case):
    found = heads.importance(case.layer, (case.x,) * case.n_inputs)
    assert len(found.names) == HEADS and (found.scores["ablation"] > 0).all()


@word("heads.prune", "heads are removed, the others compute what they did")
def _(case):
    heads.prune(copy.deepcopy(case.layer), [0, 1])
    silenced = copy.deepcopy(case.layer)
    weight = np.asarray(silenced.W_o.weight).copy()
    weight[:, :4] = 0
    state = {**{name: np.asarray(x) for name, x in silenced.state_dict().items()}, "W_o.weight": weight}
    silenced.load_state_dict(state)
    expected = case.call(layer=silenced)
    heads.prune(case.layer, [0, 1])
    assert case.layer.num_heads == HEADS - 2
    same(case.call(), expected)


@word("state_dict", "loads in the layer's twin, NumPy and torch, and back")
def _(case):
    if case.kind == "nn.MultiheadAttention":  # its twin is torch's own
        twin = importlib.import_module("torch").nn.MultiheadAttention(8, HEADS, batch_first=True).double().eval()
        twin.load_state_dict(case.layer.state_dict())
        case.layer.load_state_dict(twin.state_dict())
        same(twin(case.x, case.x, case.x)[0].detach(), case.call())
        return
    there = Case("mha_c" if case.is_torch else "mha_c.torch", case.kind)
    there.layer.load_state_dict(case.layer.state_dict())
    same(there.call(), case.call(), 1e-6)  # the angles of rope are float32 in torch
    expected = case.call()
    case.layer.load_state_dict(there.layer.state_dict())
    same(case.call(), expected, 1e-6)


@word("teach.steps(layer, …)", "a player of each intermediate matrix")
def _(case):
    out = case.call()
    matrices = teach.steps(case.layer, case.x)
    found = matrices.matrices["output"] if hasattr(matrices, "matrices") else matrices.output
    same(found, out[0])


@word("watch", "notes the calls inside a model", torch_alone=True)
def _(case):
    with case.module.watch() as seen:
        case.call()
    assert len(seen.calls) == 1
    case.call()
    same(np.asarray(seen.calls[0].weights).reshape(-1), np.asarray(case.layer.attention_weights).reshape(-1), 1e-6)


def original(case):
    """The book's, or torch's, module that the layer takes the place of, with the same weights."""
    import real_d2l
    import third_generation

    name, torch = case.kind, importlib.import_module("torch")
    if name == "nn.MultiheadAttention":
        theirs = torch.nn.MultiheadAttention(8, HEADS, batch_first=True)
    elif name == "AdditiveAttention":
        theirs = real_d2l.load("0.17.6").AdditiveAttention(8, 8, 6, 0.0)
    elif name == "CausalAttention":
        theirs = third_generation.GPT.CausalAttention(8, HEADS, rope=True)
    elif name == "GQAAttention":
        theirs = third_generation.GQAAttention(8, HEADS, 2, rope=True)
    elif name == "MultiHeadAttention":
        theirs = third_generation.MultiHeadAttention(8, HEADS, 0.0)
        theirs(*[torch.zeros(1, 1, 8)] * 3, None)
    else:
        theirs = third_generation.DotProductAttention(0.0)
    return theirs.eval()


def call_of(case, module):
    x = case.x.float()
    lens = () if case.kind in ("CausalAttention", "nn.MultiheadAttention") else (None,)
    return (x, x, x, *lens)


@word("convert", "the book's or torch's module becomes this layer", torch_alone=True)
def _(case):
    check_told(case, "convert")
    theirs = original(case)
    first = theirs(*call_of(case, theirs))
    ours = case.module.convert(theirs)
    assert ours is theirs and isinstance(ours, type(case.layer))
    found = ours(*call_of(case, ours))
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, first))):
        same(one.detach(), other.detach(), 1e-5)


@word("d2l.compare", "the original and this layer side by side", torch_alone=True)
def _(case):
    check_told(case, "compare")
    theirs = original(case)
    found = importlib.import_module("mha_c.d2l").compare(theirs, *call_of(case, theirs), seconds=0.01, show=False)
    assert found["largest_difference"] < 1e-5 and found["forward_ratio"] > 0


def check_told(case, name):
    """Where there is no original there is nothing to convert: the class says so."""
    if name in lacking(type(case.layer)):
        raise TypeError(f"{case.kind} has no {name}: {lacking(type(case.layer))[name]}")


def outcome(side, kind, name):
    """What the cell says: "yes", "- reason", or what is wrong."""
    case = Case(side, kind)
    key = name.partition("(")[0].rpartition(".")[2]
    reason = lacking(type(case.layer)).get({"call": "causal"}.get(key, key))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            WORDS[name](case)
    except Exception as error:
        if reason is not None and f": {reason}" in str(error):
            return f"- {reason}"
        return f"BROKEN: {type(error).__name__}: {str(error)[:200]}"
    return "yes" if reason is None else "BROKEN: works, though the class says that it does not"


def cells():
    for name in WORDS:
        for kind in KINDS:
            for side in ("mha_c", "mha_c.torch"):
                if not (side == "mha_c" and (name in OF_TORCH or kind.startswith("nn."))):
                    yield side, kind, name


HEAD = """# What each layer can do

<!-- made by `python tests/support/abilities.py`, which tries every cell; `test_abilities.py` holds it -->

A reader who has learnt one layer finds the same words at the next. Each "yes" was tried, as a reader would, on the
layer of `mha_c` (NumPy) and on the module of `mha_c.torch`. A "-" says that the word means nothing there; the reason,
which the layer's own error says too, is below. `watch`, `convert` and `d2l.compare` are about torch's modules;
`nn.MultiheadAttention` is the twin of torch's module, in `mha_c.torch.nn`.
"""


def page():
    found = {}
    for side, kind, name in cells():
        found.setdefault((kind, name), set()).add(outcome(side, kind, name))
    kinds = [f"`{kind}`" for kind in KINDS]
    lines = [HEAD, f"| | {' | '.join(kinds)} |", f"|---|{'---|' * len(kinds)}"]
    for name in WORDS:
        texts = [" / ".join(sorted(found[kind, name])) for kind in KINDS]
        row = " | ".join(text.partition(" ")[0] for text in texts)
        lines.append(f"| `{name}`: {SAID[name]} | {row} |")
    lines += ["", "## Why not", ""]
    for kind in KINDS:
        for name in WORDS:
            for text in sorted(found[kind, name] - {"yes"}):
                lines.append(f"- `{kind}`, `{name}`: {text.removeprefix('- ')}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
