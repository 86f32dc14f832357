"""tests/data/vectors.json is what tools/vectors.py writes, and what the core, the reference and d2l compute."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs
from mha_c import _reference, functional

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "tests" / "data" / "vectors.json").read_text(encoding="utf-8"))
CASES = [(kind, case) for kind, cases in VECTORS.items() for case in cases]


def test_the_file_is_what_its_tool_writes():
    spec = importlib.util.spec_from_file_location("vectors", ROOT / "tools" / "vectors.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    now = tool.vectors()
    assert list(now) == list(VECTORS)
    for kind, cases in now.items():
        for one, two in zip(cases, VECTORS[kind]):
            assert one["inputs"] == two["inputs"]
            np.testing.assert_allclose(one["output"], two["output"], rtol=1e-14, atol=1e-14)  # last bits
    assert (ROOT / "tests" / "data" / "vectors.json").stat().st_size < 40_000


def arrays(case):
    return {name: x if x is None or isinstance(x, int) else np.array(x) for name, x in case["inputs"].items()}


def by_core(kind, x):
    lens = x.get("valid_lens")
    if kind in ("masked_softmax", "transpose_qkv", "transpose_output"):
        return getattr(mha_c, kind)(*x.values())
    if kind == "positional_encoding":
        return mha_c.PositionalEncoding(x["X"].shape[-1], 0.0)(x["X"])
    if kind == "rope":
        return functional.rotary(x["X"], x["offset"] + np.arange(x["X"].shape[1]), interleaved=True)
    if kind == "causal_multi_head":
        heads = (x["X"] @ x[name] for name in ("W_q", "W_k", "W_v"))
        heads = [each.reshape(*each.shape[:2], x["num_heads"], -1).transpose(0, 2, 1, 3).copy() for each in heads]
        mask = x["mask"][:, None] if isinstance(x["mask"], np.ndarray) else None
        out = functional.dot_product_attention(*heads, causal=True, keep_mask=mask)
        return out.transpose(0, 2, 1, 3).reshape(x["X"].shape) @ x["W_o"]
    three = [x[name] for name in ("queries", "keys", "values")]
    mask = x["mask"] if isinstance(x.get("mask"), np.ndarray) else None
    if kind in ("causal", "window"):
        reach = (x["window"] - 1, 0) if kind == "window" else None
        return functional.dot_product_attention(*three, keep_mask=mask, causal="bottom_right", window=reach)
    if kind == "grouped":
        return functional.dot_product_attention(*three, keep_mask=mask)
    if kind == "dot_product":
        return functional.dot_product_attention(*three, lens)
    if kind == "additive":
        return functional.additive_attention(*three, x["w_v"], x["W_q"].T, x["W_k"].T, lens)
    layer = mha_c.MultiHeadAttention(x["W_o"].shape[0], x["num_heads"], 0.0, dtype=np.float64)
    layer.load_state_dict({f"{name}.weight": x[name].T.copy() for name in ("W_q", "W_k", "W_v", "W_o")})
    return layer(*three, lens)


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_the_core_computes_them(kind, case):
    table = 1e-7 if kind == "positional_encoding" else 0.0  # d2l's table of positions is float32
    np.testing.assert_allclose(by_core(kind, arrays(case)), case["output"], rtol=1e-12, atol=1e-13 + table)


def _steps(x):
    return x["queries"].shape[1], x["keys"].shape[1]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_the_reference_computes_them(kind, case):
    x = arrays(case)
    three = [x.get(name) for name in ("queries", "keys", "values")]
    if kind == "dot_product":
        out = _reference.dot_product_attention(*three, x["valid_lens"])
    elif kind == "causal":
        past = np.tri(*_steps(x), x["offset"], dtype=bool)
        out = _reference.dot_product_attention(*three, keep_mask=past & x["mask"])
    elif kind == "additive":
        out = _reference.additive_attention(*three, x["w_v"], x["W_q"].T, x["W_k"].T, x["valid_lens"])
    elif kind == "multi_head":
        weights = {f"{name}.weight": x[name].T for name in ("W_q", "W_k", "W_v", "W_o")}
        out = _reference.multi_head_attention(*three, weights, x["num_heads"], x["valid_lens"])[0]
    else:
        pytest.skip("no function of the reference")
    np.testing.assert_allclose(out, case["output"], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("generation", ["0.17.6", "1.0.3"])
def test_the_book_computes_them(generation):
    d2l, torch = needs.d2l(generation), needs.module("torch")
    for case in VECTORS["masked_softmax"]:
        X, lens = torch.tensor(case["inputs"]["X"]), case["inputs"]["valid_lens"]
        out = d2l.masked_softmax(X, None if lens is None else torch.tensor(lens))
        np.testing.assert_allclose(out, case["output"], rtol=1e-5)
    for case in VECTORS["positional_encoding"]:
        X = torch.tensor(case["inputs"]["X"])
        out = d2l.PositionalEncoding(X.shape[-1], 0.0)(X)
        np.testing.assert_allclose(out, case["output"], rtol=1e-5, atol=1e-6)
