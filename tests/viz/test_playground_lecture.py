"""The seven chapters of the page: their numbers beside NumPy in float64, formulas read back, lines copied."""

import base64
import contextlib
import io
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs
from checks import softmax
from playground_page import CLOSE, python_of, run_python

pytest_plugins = ["browser_fixtures", "playground_fixtures"]
ROOT = Path(__file__).resolve().parents[2]
TRAINED = json.loads((ROOT / "mha_c" / "viz" / "playground_page" / "lecture_models.json").read_text(encoding="utf-8"))


def trained(name):
    """A model's arrays in float64."""
    return {
        key: np.frombuffer(base64.b64decode(text), "<i2").reshape(rows, columns) / TRAINED["step"]
        for key, (rows, columns, text) in TRAINED[name]["weights"].items()
    }


def close(found, expected, atol=CLOSE):
    np.testing.assert_allclose(np.asarray(found, float), expected, rtol=0, atol=atol)


@pytest.fixture
def numbers(call, browser):
    """A chapter's numbers, as the page computes them of an address."""
    return lambda address: browser.run("return mha_c.numbers(arguments[0])", address)


# --- Numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gaussian", "boxcar", "epanechnikov", "constant"])
@pytest.mark.parametrize(("width", "at"), [(0.5, 2.5), (0.1, 0.05), (3, 4.4)])
def test_pooling(numbers, kernel, width, at):
    found = numbers(f"ch=pooling&kernel={kernel}&width={width}&at={at}")
    x, y = np.array(found["x"]), np.array(found["y"])
    draw = np.random.RandomState(1)
    assert found["x"] == sorted((5 * draw.random_sample(50)).round(2).tolist())
    places = np.array([*(np.arange(101) / 20), at])
    u = np.abs(places[:, None] - x) / width
    k = {"gaussian": np.exp(-(u**2) / 2), "boxcar": (u < 1) * 1.0, "epanechnikov": np.maximum(0, 1 - u),
         "constant": np.ones_like(u)}[kernel]  # fmt: skip
    k[k.sum(axis=1) == 0] = 1  # no key within the width: uniform
    weights = k / k.sum(axis=1, keepdims=True)
    close(found["weights"], weights[-1])
    close([*found["curve"], found["estimate"]], weights @ y, atol=1e-4)  # values up to 8


def reference(last):
    model = trained("reference")
    words = f"the cat did not eat the soup because it was {last}".split()
    ids = [TRAINED["reference"]["words"].index(word) for word in words]
    keys = model["word"][ids] + model["place"]
    queries = keys + model["later"][[*ids[2:], 0, 0]]
    return model, words, queries @ model["W_q"].T, keys @ model["W_k"].T, keys @ model["W_v"].T


@pytest.mark.parametrize(("last", "root", "query"), [("tired", "yes", 8), ("cold", "yes", 8), ("salty", "no", 10)])
def test_dot(numbers, last, root, query):
    model, words, q, k, v = reference(last)
    scores = q @ k.T / (np.sqrt(32) if root == "yes" else 1)
    weights = softmax(scores)
    found = numbers(f"ch=dot&last={last}&root={root}&query={query}")
    assert found["words"] == words and found["j"] == weights[query].argmax()
    close(found["scores"], scores, atol=1e-5 * np.abs(scores).max())
    close(found["weights"], weights, atol=CLOSE if root == "yes" else 1e-4)  # undivided scores reach 60
    close(found["output"], weights @ v, atol=1e-4)
    close(found["answers"], softmax(weights[query] @ v @ model["W_o"].T @ model["answer"].T), atol=1e-4)


@pytest.mark.parametrize(("draw", "gain"), [(1, 2), (5, 0.5)])
def test_additive(numbers, draw, gain):
    rng = np.random.RandomState(draw)
    q, k = (rng.standard_normal(shape).round(1) for shape in ((1, 20), (10, 2)))
    drawn = lambda rows, columns: rng.uniform(*(s * (6 / (rows + columns)) ** 0.5 for s in (-1, 1)), (rows, columns))  # noqa: E731
    W_q, W_k, w = drawn(8, 20), drawn(8, 2), drawn(1, 8)[0] * gain
    plane = np.tanh(q @ W_q.T + k @ W_k.T)
    found = numbers(f"ch=additive&draw={draw}&gain={gain}")
    close(found["plane"], plane)
    close(found["scores"], plane @ w)
    close(found["weights"], softmax(plane @ w))
    close(found["output"], softmax(plane @ w) @ np.arange(40).reshape(10, 4), atol=40 * CLOSE)


def by_heads(x, heads):
    return x.reshape(len(x), heads, -1).transpose(1, 0, 2)


@pytest.mark.parametrize("heads", [0, 1, 4, 32])
def test_heads(numbers, heads):
    model, told = trained("translation"), TRAINED["translation"]
    source, target = "the car is red .".split(), "<bos> la voiture est rouge .".split()
    keys = model["source"][[told["english"].index(word) for word in source]] + model["source_place"][:5]
    queries = model["target"][[told["french"].index(word) for word in target]] + model["target_place"][:6]
    found = numbers(f"ch=heads&heads={heads}")
    q, k, v = (by_heads(x @ model[w].T, heads or 2) for x, w in ((queries, "W_q"), (keys, "W_k"), (keys, "W_v")))
    weights = softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]))
    joined = (weights @ v).transpose(1, 0, 2).reshape(6, 32)
    close(found["weights"], weights)
    close(found["joined"], joined, atol=1e-4)
    close(found["output"], joined @ model["W_o"].T, atol=1e-4)


def test_the_two_heads_look_where_the_chapter_says(numbers):
    """For "la": head 1 at "the", head 0 at "car"; and the sentence stands on the page."""
    found = numbers("ch=heads")
    first = np.asarray(found["weights"])[:, 0]
    assert [found["kt"][at] for at in first.argmax(axis=1)] == ["car", "the"] and first.max(axis=1).min() > 0.8


@pytest.mark.parametrize(("length", "causal"), [(9, "no"), (6, "yes"), (0, "no"), (11, "yes")])
def test_masks(numbers, length, causal):
    _, words, q, k, _ = reference("tired")
    scores = q @ k.T / np.sqrt(32)
    sees = (np.arange(11) < length) & (np.tri(11, dtype=bool) if causal == "yes" else True) & np.ones((11, 11), bool)
    found = numbers(f"ch=masks&len={length}&causal={causal}")
    assert found["sees"] == sees.tolist()
    assert found["words"] == words[:length] + ["<pad>"] * (11 - length)
    hidden = np.where(sees, scores, -np.inf)
    hidden[~sees.any(axis=1)] = 0
    close(found["weights"], softmax(hidden))
    close(found["before"], softmax(scores))
    close(found["scores"], scores, atol=1e-4)


@pytest.mark.parametrize(("d", "factor"), [(64, 1), (512, 0.5), (1, 4)])
def test_root(numbers, d, factor):
    found = numbers(f"ch=root&d={d}&factor={factor}")
    rng = np.random.RandomState(1)
    q, k = (rng.standard_normal((n, d)).astype(np.float32).astype(float) for n in (256, 16))
    scores = q @ k.T
    close(
        [found["variance"], found["scaledVariance"]],
        [scores.var(), (scores * factor).var() / d],
        atol=1e-5 * scores.var(),
    )
    for name, x in (("raw", scores), ("scaled", scores * factor / np.sqrt(d))):
        p = softmax(x)
        jacobian = np.einsum("qi,ij->qij", p, np.eye(16)) - p[:, :, None] * p[:, None, :]
        expected = [
            -(p * np.log2(p, where=p > 0, out=np.zeros_like(p))).sum(1).mean(),
            np.linalg.norm(jacobian, axis=(1, 2)).mean(),
        ]
        close([found["here"][name]["entropy"], found["here"][name]["jacobian"]], expected, atol=2e-4)  # scores up to 90


def test_rows_of_the_padding_are_grey(turn):
    """One line through a row of the scores has many colours, one through a row of the padding those of its cells and of
    the gaps between them."""
    shown = turn("ch=masks&len=6&causal=no")
    scores = ".mhac-grid[data-name=S] canvas"
    width, height = shown.run("const c = R.querySelector(arguments[0]); return [c.width, c.height]", scores)
    words, padding = (
        len(shown.colours(scores, round(0.4 * width), round(height * part), round(0.5 * width), 1))
        for part in (0.6, 0.96)
    )
    assert padding <= 4 < words


# --- Formulas --------------------------------------------------------------------------------------------------------


def computed(text):
    """What is written, as a number: signs and products in words of Python."""
    for found, put in (("−", "-"), (" · ", " * "), ("²⁰", "**20"), ("²", "**2"), ("[", "("), ("]", ")")):
        text = text.replace(found, put)
    text = re.sub(r"√([\d.]+)", r"np.sqrt(\1)", text)
    text = re.sub(r"\|([^|]*)\|", r"abs(\1)", text)
    text = re.sub(r"(tanh|exp)\(", r"np.\1(", text)
    return eval(text, {"np": np, "max": max, "abs": abs})


WRITTEN = [
    "ch=pooling", "ch=pooling&kernel=epanechnikov&at=1", "ch=dot", "ch=dot&last=cold&root=no&query=10", "ch=additive",
    "ch=additive&key=0&unit=5&gain=8", "ch=heads", "ch=heads&heads=4&head=3&query=2", "ch=masks",
    "ch=masks&causal=yes&query=4", "ch=masks&len=0", "ch=root", "ch=root&d=512&factor=2", "ch=cost", "text=a+b+c&d=2",
    "kind=additive&heads=2&causal=top_left&row=2", "from=nadaraya&kind=distance&kernel=boxcar&row=3&column=2",
]  # fmt: skip


@pytest.mark.parametrize("address", WRITTEN)
def test_what_a_formula_says_is_so(turn, address):
    """Each equation whose left side is all numbers; with operands of two to four decimals, two of the result hold."""
    shown = turn(address)
    checked = 0
    for line in shown.texts(".mhac-arith"):
        for part in re.split(r";\s+", line):
            sides = [side.strip().replace(" MiB", "") for side in part.split(" = ")]
            for left, right in zip(sides, sides[1:]):
                left = re.sub(r".*(: | are )", "", left).strip()
                if "…" in left or re.search(r"[A-Za-zα-ωΣ₂]", re.sub(r"exp|tanh|max", "", left)):
                    continue
                value = computed(left)
                stated = float(right.replace("−", "-").split()[0])
                assert value == pytest.approx(stated, rel=0.03, abs=0.03), (address, part)
                checked += 1
    assert checked


@pytest.mark.parametrize("generation", [None, "1.0.3", "0.17.6"])
def test_the_layer_that_is_copied_computes_what_is_shown(turn, monkeypatch, generation):
    shown = turn("ch=heads&heads=4")
    if generation:
        package = types.ModuleType("d2l")
        package.torch = needs.d2l(generation)
        monkeypatch.setitem(sys.modules, "d2l", package)
        monkeypatch.setitem(sys.modules, "d2l.torch", package.torch)
    names = run_python(python_of(shown), book=bool(generation))
    found = shown.browser.run("return mha_c.numbers('ch=heads&heads=4')")
    close(names["output"], found["output"], atol=1e-4)
    close(names["weights"], found["weights"])
    if generation:
        close(names["book"].numpy(), found["output"], atol=1e-4)


@pytest.mark.parametrize(
    "address", ["ch=dot&last=cold", "ch=additive", "ch=masks&causal=yes", "ch=pooling&kernel=boxcar&at=3.75"]
)
def test_a_chapter_that_is_copied_computes_what_is_shown(turn, address):
    shown = turn(address)
    names = run_python(python_of(shown))
    found = shown.browser.run("return mha_c.numbers(arguments[0])", address)
    if "pooling" in address:
        close(names["output"][0, 0], found["estimate"], atol=1e-4)
    elif "additive" in address:
        close(names["output"][0], found["output"], atol=1e-3)  # values up to 39
    else:
        close(names["weights"], found["weights"], atol=1e-4)


def test_why_root_d_is_copied(turn):
    """The lines print what the page says, undivided and divided."""
    shown = turn("ch=root&d=32&factor=2")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(python_of(shown), {})
    found = shown.browser.run("return mha_c.numbers('ch=root&d=32&factor=2')")
    printed = np.array([re.findall(r"\d+\.\d+", line) for line in said.getvalue().splitlines()], float)
    here = [found["here"][name] for name in ("raw", "scaled")]
    variances = found["variance"], found["scaledVariance"]
    close(printed, [[v, each["entropy"], each["jacobian"]] for v, each in zip(variances, here)], atol=2e-3)


def test_the_cost_is_copied(turn):
    """The lines measure both ways in Python."""
    shown = turn("ch=cost&largest=256&depth=32")
    threads = mha_c.get_num_threads()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(python_of(shown), {})
    finally:
        mha_c.set_num_threads(threads)
    lines = re.findall(r"n = (\d+): naive ([\d.]+) ms, tiled ([\d.]+) ms, .* apart (.*)", said.getvalue())
    assert [int(n) for n, *_ in lines] == [64, 128, 256]
    assert all(float(naive) > 0 and float(tiled) > 0 and float(apart) < CLOSE for _, naive, tiled, apart in lines)
