"""dot_product_attention beside ONNX's operator Attention, in onnx's own reference implementation, with its softcap."""

import numpy as np
import pytest

import needs
from mha_c import functional

onnx = needs.module("onnx")
ReferenceEvaluator = needs.module("onnx.reference").ReferenceEvaluator
CASES = "plain", "scale", "causal", "bool", "float", "grouped", "masked rows", "lengths", "window"


def attention_of_onnx(q, k, v, mask=None, lens=None, opset=23, **attributes):
    """The operator itself in onnx's evaluator."""
    names = ["q", "k", "v", "mask" if mask is not None else "", "", "", "lens" if lens is not None else ""]
    while not names[-1]:
        names.pop()
    given = {"q": q, "k": k, "v": v, "mask": mask, "lens": lens}
    given = {name: x for name, x in given.items() if x is not None}
    helper = onnx.helper
    types = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in given.items()}
    values = [helper.make_tensor_value_info(name, types[name], x.shape) for name, x in given.items()]
    out = helper.make_tensor_value_info("out", types["q"], None)
    node = helper.make_node("Attention", names, ["out"], **attributes)
    graph = helper.make_graph([node], "attention", values, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, given)[0]


@pytest.mark.parametrize("softcap", [0.0, 0.25, 2.0, 50.0])  # attributes are float32
@pytest.mark.parametrize("case", CASES)
def test_softcap_is_onnxs(case, softcap, dtype, rng):
    """Cap, then mask, then softmax.  Attention of opset 23; 24 has lengths, 25 windows."""
    heads, kv_heads, n = 4, 2 if case == "grouped" else 4, 6
    q, k, v = (3 * rng.standard_normal(shape).astype(dtype) for shape in
               ((2, heads, n, 8), (2, kv_heads, 7, 8), (2, kv_heads, 7, 5)))  # fmt: skip
    theirs, own = {"softcap": softcap}, {"softcap": softcap or None}
    if case == "scale":
        theirs["scale"] = own["scale"] = 0.25
    elif case == "causal":
        theirs["is_causal"], own["causal"] = 1, "top_left"
    elif case in ("bool", "masked rows"):
        theirs["mask"] = own["keep_mask"] = rng.random((2, 1, n, 7)) < 0.6
        if case == "masked rows":
            theirs["mask"][0, 0, 2] = False
    elif case == "float":
        theirs["mask"] = own["bias"] = rng.standard_normal((n, 7)).astype(dtype)
        theirs["mask"][1, 3] = -np.inf
    elif case == "lengths":
        theirs["lens"], own["valid_lens"], theirs["opset"] = np.array([7, 3]), [7, 3], 24
    elif case == "window":
        theirs.update(left_window_size=2, right_window_size=1, opset=25)
        own["window"] = (2, 1)
    if case == "float":
        theirs["mask"] = theirs["mask"].astype(np.float64)
    expected = attention_of_onnx(*(x.astype(np.float64) for x in (q, k, v)), **theirs)
    found = functional.dot_product_attention(q, k, v, **own)
    # Scores of at most 30 or so, rounded once each way; means of values of at most 10.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1000 * np.finfo(dtype).eps)
    if case == "masked rows":
        assert (found[0, :, 2] == 0).all()
    if softcap:  # and the cap matters
        own["softcap"] = None
        assert np.abs(found - functional.dot_product_attention(q, k, v, **own)).max() > 1e-3
