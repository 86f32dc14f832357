"""The core in a browser, as scripts call it: numbers beside NumPy's in float64, the bits of the package, errors."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from mha_c import _core
from mha_c import _reference as reference
from mha_c.viz import whole_page
from playground_page import CLOSE

pytest_plugins = ["browser_fixtures", "playground_fixtures"]
ROOT = Path(__file__).resolve().parents[2]


def test_the_package_has_the_core_that_its_sources_make(page):
    """What `pip install` brings, which has no compiler for browsers: any change of what the page holds is committed."""
    made = (ROOT / "build" / "playground" / "core.wasm").read_bytes()
    assert whole_page.CORE.read_bytes() == made, "the sources make another core: make playground, then commit it"
    assert page.read_text(encoding="utf-8") == whole_page.whole_page(repository=os.environ.get("MHA_C_REPOSITORY"))


def drawn(rng):
    """A call with whatever it may have, as options of the page and as what the reference takes."""
    queries, keys, heads = int(rng.integers(1, 20)), int(rng.integers(1, 70)), int(rng.choice([1, 1, 2, 4]))
    head_dim, value_dim = int(rng.integers(1, 17)), int(rng.integers(1, 9))
    additive = bool(rng.random() < 0.3)
    options = {
        "q": rng.standard_normal((queries, heads * head_dim)).round(3).tolist(),
        "k": rng.standard_normal((keys, heads * head_dim)).round(3).tolist(),
        "v": rng.standard_normal((keys, heads * value_dim)).round(3).tolist(),
        "heads": heads,
        "kind": "additive" if additive else "dot",
    }
    if additive:
        options["w"] = rng.standard_normal(head_dim).round(3).tolist()
    if rng.random() < 0.5:
        options["validLens"] = rng.integers(0, keys + 1, queries).tolist()
    if rng.random() < 0.3:
        options["causal"] = str(rng.choice(["top_left", "bottom_right"]))
    if rng.random() < 0.3:
        options["window"] = [int(rng.integers(0, 9)), None if rng.random() < 0.5 else int(rng.integers(0, 9))]
    if rng.random() < 0.3:
        options["scale"] = round(rng.uniform(0.1, 2), 3)
    if rng.random() < 0.3:
        options["softcap"] = round(rng.uniform(1, 5), 3)
    if rng.random() < 0.5:
        options["emptyRows"] = "uniform"
    return options


def textbook(options):
    """(output, weights) of a call in float64."""
    options = dict(options)
    heads, kind, w = options.pop("heads"), options.pop("kind"), options.pop("w", None)
    q, k, v = (np.stack(np.split(np.array(options.pop(name)), heads, axis=1))[None] for name in "qkv")
    lens = options.pop("validLens", None)
    options["empty_rows"] = options.pop("emptyRows", "zero")
    if kind == "dot":
        output, weights = reference.dot_product_attention(q, k, v, lens and [lens], return_weights=True, **options)
    else:
        output, weights = reference.additive_attention(
            q, k, v, w, None, None, lens and [lens], return_weights=True, **options
        )
    return np.concatenate(output[0], axis=1), weights[0]


def test_two_hundred_drawn_calls_are_numpys(call):
    rng = np.random.default_rng(26)
    for _ in range(200):
        options = drawn(rng)
        found = call(**options)
        output, weights = textbook(options)
        assert isinstance(found, dict), (found, options)
        np.testing.assert_allclose(found["output"], output, rtol=0, atol=CLOSE)
        np.testing.assert_allclose(
            found["weights"], weights if options["heads"] > 1 else weights[0], rtol=0, atol=CLOSE
        )


# --- The book's numbers ----------------------------------------------------------------------------------------------

VALUES = np.arange(40.0).reshape(10, 4).tolist()  # both items of the book's batch
KEYS = np.ones((10, 2)).tolist()


@pytest.mark.parametrize(("length", "printed"), [(2, [2.0, 3.0, 4.0, 5.0]), (6, [10.0, 11.0, 12.0, 13.0])])
@pytest.mark.parametrize("kind", ["dot", "additive"])
def test_the_books_toy_prints_what_the_book_prints(call, kind, length, printed):
    more = {"kind": kind, **({"w": [0.3, -0.8]} if kind == "additive" else {})}
    found = call(q=[[0.4, -1.7]], k=KEYS, v=VALUES, validLens=length, **more)
    assert np.round(found["output"], 4).tolist() == [printed]
    assert np.round(found["weights"], 4).tolist() == [[round(1 / length, 4)] * length + [0] * (10 - length)]


# --- The same bits ---------------------------------------------------------------------------------------------------


@pytest.fixture
def scalar():
    """The package's kernels that every machine has."""
    before = _core.isa()
    _core.set_isa("scalar")
    yield _core
    _core.set_isa(before)


def bits(numbers):
    return np.asarray(numbers, np.float32).view(np.uint32).ravel().tolist()


# JSON knows no -0: bits are what the page returns.
RUN = """
const numbers = mha_c[arguments[0]](...arguments[1].map((x) => Array.isArray(x) ? Float32Array.from(x) : x));
return Array.from(new Uint32Array(numbers.buffer));
"""


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (6, 16, 33), (17, 70, 129), (64, 64, 64), (50, 40, 600)])
def test_products_have_the_bits_of_the_scalar_kernels(call, browser, scalar, shape):
    rows, columns, depth = shape
    rng = np.random.default_rng(rows)
    x, weight = (rng.standard_normal(size).astype(np.float32) for size in ((rows, depth), (columns, depth)))
    found = browser.run(
        RUN, "linear", [x.ravel().astype(float).tolist(), weight.ravel().astype(float).tolist(), *shape]
    )
    assert found == bits(scalar.linear(x, (weight, None)))


# --- Errors ----------------------------------------------------------------------------------------------------------

PLAIN = {"q": [[1, 2]], "k": [[1, 2], [3, 4], [5, 6]], "v": [[1], [2], [3]]}
WRONG = [
    ({"q": [[1, None]]}, r"q\[0\]\[1\] must be a finite number, got null"),
    ({"q": [[1, 1e39]]}, r"q\[0\]\[1\] must be a finite number, got 1e\+39"),
    ({"q": []}, "q must have at least one row, got 0"),
    ({"q": [[]]}, r"q\[0\] must have at least one number, got 0"),
    ({"q": [1, 2]}, r"q\[0\] must be a row of numbers, got 1"),
    ({"q": "abc"}, 'q must be a list of rows of numbers, got "abc"'),
    ({"k": [[1, 2], [3], [5, 6]]}, r"k\[1\] has 1 number, k\[0\] has 2"),
    ({"k": [[1], [2], [3]]}, r"k has 1 feature \(3 × 1\), q has 2 \(1 × 2\)"),
    ({"v": [[1]]}, r"v has 1 row \(1 × 1\), k has 3 \(3 × 2\)"),
    ({"v": None}, "v must be a list of rows of numbers, got null"),
    ({"kind": "cosine"}, 'kind must be "dot" or "additive", got "cosine"'),
    ({"kind": "additive"}, "w must be a list of 2 numbers, got undefined"),
    ({"kind": "additive", "w": [1]}, "w has 1 number, q has 2 features"),
    ({"kind": "additive", "w": [1, "2"]}, r'w\[1\] must be a finite number, got "2"'),
    ({"w": [1, 2]}, 'w is an argument of kind "additive"'),
    ({"validLens": 4}, "validLens must be a whole number from 0 to 3, the rows of k, got 4"),
    ({"validLens": [-1]}, r"validLens\[0\] must be a whole number from 0 to 3.*got -1"),
    ({"validLens": [1, 2]}, "validLens has 2 lengths, q has 1 row"),
    ({"validLens": 1.5}, "validLens must be a whole number.*got 1.5"),
    ({"causal": True}, "causal: true asks for as many queries as keys, got 1 and 3"),
    ({"causal": "left"}, 'causal must be false, true, "top_left" or "bottom_right", got "left"'),
    ({"window": 3}, r"window must be \[left, right\], got 3"),
    ({"window": [1, -2]}, r"window\[1\] must be null or a whole number of keys, 0 or more, got -2"),
    ({"scale": "1"}, 'scale must be a finite number, got "1"'),
    ({"softcap": 0}, "softcap must be a number above 0, got 0"),
    ({"heads": 0}, "heads must be a whole number, 1 or more, got 0"),
    ({"heads": 2}, "v has 1 feature, which cannot be split into 2 heads"),
    ({"dropout": 1.5}, "dropout must be a number from 0 to 1, got 1.5"),
    ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
    ({"emptyRows": "nan"}, 'emptyRows must be "zero" or "uniform", got "nan"'),
    ({"valid_lens": 2}, "valid_lens is no argument of attention: they are q, k, v, kind"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_errors_name_the_argument_what_it_is_and_what_it_should_be(call, change, message):
    found = call(**{**PLAIN, **change})
    assert isinstance(found, str) and re.search(message, found), found
    assert call(**PLAIN)["output"], "and the next call works"


def test_numbers_that_are_none_are_errors_too(call, browser):
    for number in ("NaN", "Infinity", "-Infinity"):
        script = (
            f"try {{ mha_c.attention({{q: [[{number}]], k: [[1]], v: [[1]]}}); }} catch (e) {{ return e.message; }}"
        )
        assert browser.run(script) == f"q[0][0] must be a finite number, got {number}"
    script = "try { mha_c.attention(); } catch (error) { return error.message; }"
    assert browser.run(script).startswith("attention takes one object")


def test_typed_arrays_are_rows_too(call, browser):
    script = "return mha_c.attention({q: [new Float32Array([1, 2])], k: [Float64Array.of(1, 2)], v: [[7]]}).output"
    assert browser.run(script) == [[7]]


def test_the_example_of_the_page_on_browsers_runs(call, browser):
    text = (Path(__file__).resolve().parents[2] / "docs" / "browser.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```js\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = browser.run(f"return (async () => {{ {script}; return [output, weights]; }})()")
    np.testing.assert_allclose(found[0], [[1]])  # its window ends at the query's own key
    np.testing.assert_allclose(found[1], [[1, 0]])
