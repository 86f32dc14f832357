"""softcap, relative_bias and sinks against plain float64 mathematics: forward, gradients, weights, every mask."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import mha_c
import needs
from checks import same
from mha_c import _core, _reference, functional

TERMS = ("softcap", "relative_bias", "sinks", "lens", "bias", "keep_mask")


def mathematics(q, k, v, w_v=None, lens=None, **options):
    """(out, weights, lse) by `_reference`: plain float64 arrays."""
    options.update(return_weights=True, return_lse=True)
    if w_v is None:
        return _reference.dot_product_attention(q, k, v, lens, **options)
    return _reference.additive_attention(q, k, v, w_v, None, None, lens, **options)


@st.composite
def calls(draw):
    """(sizes, seed, keywords) of a small call; numbers are drawn from the seed."""
    group, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = {
        "batch": draw(st.integers(1, 2)), "heads": group * heads, "kv_heads": heads,
        "queries": draw(st.integers(1, 70)), "keys": draw(st.sampled_from([1, 2, 5, 17, 64, 65, 130, 600])),
        "features": draw(st.integers(1, 9)), "values": draw(st.integers(1, 6)),
    }  # fmt: skip
    wanted = {name: draw(st.booleans()) for name in TERMS}
    wanted["additive"] = draw(st.integers(0, 4)) == 0
    wanted["causal"] = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    wanted["window"] = draw(st.sampled_from([None, (0, 0), (3, 2), (40, 0)]))
    wanted["reach"] = draw(st.sampled_from([0, 1, 4, 30, 700]))
    wanted["sink"] = draw(st.sampled_from([0.0, -5.0, 20.0, 200.0, -np.inf]))
    wanted["empty_rows"] = draw(st.sampled_from(["zero", "uniform"]))
    return size, draw(st.integers(0, 2**32)), wanted


def numbers(size, seed, wanted, dtype):
    """((q, k, v, w_v), keywords of functional)."""
    rng = np.random.default_rng(seed)
    B, H, Q, K = (size[name] for name in ("batch", "heads", "queries", "keys"))

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q, k = 2 * draw(B, H, Q, size["features"]), draw(B, size["kv_heads"], K, size["features"])
    v = draw(B, size["kv_heads"], K, size["values"])
    options = {"causal": wanted["causal"], "window": wanted["window"], "empty_rows": wanted["empty_rows"]}
    if wanted["softcap"]:
        options["softcap"] = 2.5
    if wanted["relative_bias"]:
        options["relative_bias"] = draw(H, 2 * wanted["reach"] + 1)
    if wanted["sinks"]:
        options["sinks"] = draw(H) + dtype.type(wanted["sink"])
    if wanted["bias"]:
        options["bias"] = draw(1, H, Q, K)
    if wanted["keep_mask"]:
        options["keep_mask"] = rng.random((B, 1, Q, K)) < 0.8
    lens = rng.integers(0, K + 1, B) if wanted["lens"] else None
    return (q, k, v, draw(size["features"]) if wanted["additive"] else None), lens, options


def apply(arrays, lens, options, **more):
    q, k, v, w_v = arrays
    if w_v is None:
        return functional.dot_product_attention(q, k, v, lens, **options, **more)
    return functional.additive_attention(q, k, v, w_v, None, None, lens, **options, **more)


@pytest.mark.parametrize("softcap", [1e-30, 1e-39, 1e-46, 1e-310])
def test_the_smallest_caps(rng, isa, dtype, softcap):
    # Their inverse overflows; a score of 0 stays 0 all the same, and passes its gradient on undiminished.
    q, k, v, grad = rng.standard_normal((4, 1, 1, 3, 4)).astype(dtype)
    q[..., 0, :] = 0
    out, weights = functional.dot_product_attention(q, k, v, softcap=softcap, return_weights=True)
    np.testing.assert_array_equal(weights, np.full((1, 1, 3, 3), 1 / 3, dtype))
    np.testing.assert_allclose(out[0, 0], np.broadcast_to(v[0, 0].mean(0), (3, 4)), rtol=0, atol=1e-6)
    grad_q = functional.dot_product_attention_backward(grad, q, k, v, softcap=softcap)[0]
    without = functional.dot_product_attention_backward(grad[..., :1, :], q[..., :1, :], k, v)[0]
    np.testing.assert_allclose(grad_q[..., :1, :], without, rtol=0, atol=1e-6)
    assert not grad_q[..., 1:, :].any()


@pytest.mark.parametrize("softcap", [1e38, 1e39, 1e300, 1.7e308])
def test_the_largest_caps_are_none(rng, isa, dtype, softcap):
    q, k, v, grad = rng.standard_normal((4, 1, 1, 3, 4)).astype(dtype)
    capped = functional.dot_product_attention(q, k, v, softcap=softcap)
    tolerance = 20 * np.finfo(dtype).eps  # a few roundings of numbers of about 1
    np.testing.assert_allclose(capped, functional.dot_product_attention(q, k, v), rtol=0, atol=tolerance)
    found = functional.dot_product_attention_backward(grad, q, k, v, softcap=softcap)
    for gradient, wanted in zip(found, functional.dot_product_attention_backward(grad, q, k, v)):
        np.testing.assert_allclose(gradient, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("isa", [name for name, there in _core.isas() if there], indirect=True)
@hypothesis.given(call=calls())
@hypothesis.settings(max_examples=needs.draws(25, 400))
def test_forward(call, dtype, isa):
    arrays, lens, options = numbers(*call, dtype)
    out, weights, lse = apply(arrays, lens, options, return_weights=True, return_lse=True)
    wanted = mathematics(*arrays, lens, **options)
    # Scores of at most 20 carry 20 eps of the product's and the tanh's rounding, weights as much relative to
    # themselves; values are at most 5.
    limit = 60 * np.finfo(dtype).eps
    assert np.abs(out - wanted[0]).max(initial=0) < 5 * limit
    assert np.abs(weights - wanted[1]).max(initial=0) < limit
    assert (np.isneginf(lse) == np.isneginf(wanted[2])).all()
    there = np.isfinite(wanted[2])
    lse, theirs = lse[there], wanted[2][there]
    assert (np.abs(lse - theirs) <= limit * np.maximum(1, np.abs(theirs) / 20)).all()
    np.testing.assert_array_equal(apply(arrays, lens, options), out)


def loss_gradients(arrays, lens, options, grad_out):
    """Of q, k, v, w_v, bias, relative_bias, sinks by torch's autograd on the mathematics above, in float64."""
    torch = needs.module("torch")
    named = {"q": arrays[0], "k": arrays[1], "v": arrays[2], "w_v": arrays[3]}
    named |= {name: options.get(name) for name in ("bias", "relative_bias", "sinks")}
    t = {n: torch.from_numpy(a.astype(np.float64)).requires_grad_() for n, a in named.items() if a is not None}
    group = t["q"].shape[1] // t["k"].shape[1]
    q, k, v = t["q"], t["k"].repeat_interleave(group, 1), t["v"].repeat_interleave(group, 1)
    if "w_v" in t:
        s = torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ t["w_v"]
    else:
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    cap = options.get("softcap")
    s = s if cap is None else cap * torch.tanh(s / cap)
    n_q, n_k = s.shape[-2:]
    away = np.arange(n_k) - np.arange(n_q)[:, None] - (n_k - n_q if options["causal"] == "bottom_right" else 0)
    if "relative_bias" in t:
        reach = t["relative_bias"].shape[1] // 2
        s = s + t["relative_bias"][:, torch.from_numpy(np.clip(away, -reach, reach) + reach)]
    s = s + t["bias"] if "bias" in t else s
    _, weights, _ = mathematics(*arrays, lens, **{**options, "bias": None, "softcap": None, "relative_bias": None,
                                                  "sinks": None, "empty_rows": "zero"})  # fmt: skip
    s = s.masked_fill(torch.from_numpy(weights == 0), -torch.inf)
    if "sinks" in t:
        s = torch.cat([s, t["sinks"][:, None, None].expand(*s.shape[:-1], 1)], -1)
    empty = torch.isneginf(s).all(-1, keepdim=True)
    weights = torch.where(empty, 0, torch.softmax(s.masked_fill(empty, 0), -1))[..., :n_k]
    if options["empty_rows"] == "uniform" and "sinks" not in t:
        weights = torch.where(empty, 1 / n_k, weights)
    (weights @ v).backward(torch.from_numpy(grad_out.astype(np.float64)))
    return [t[name].grad.numpy() for name in ("q", "k", "v", "w_v", "bias", "relative_bias", "sinks") if name in t]


@pytest.mark.parametrize("isa", [name for name, there in _core.isas() if there], indirect=True)
@hypothesis.given(call=calls())
@hypothesis.settings(max_examples=needs.draws(15, 300))
def test_gradients(call, dtype, isa):
    arrays, lens, options = numbers(*call, dtype)
    q, k, v, w_v = arrays
    grad_out = np.random.default_rng(call[1] + 1).standard_normal((*q.shape[:3], v.shape[3])).astype(dtype)
    if w_v is None:
        found = functional.dot_product_attention_backward(grad_out, q, k, v, lens, **options)
    else:
        found = functional.additive_attention_backward(grad_out, q, k, v, w_v, None, None, lens, **options)
    wanted = loss_gradients(arrays, lens, options, grad_out)
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        # As in test_forward; a gradient adds up to 2 x 70 rows of them, each of at most 10.
        assert np.abs(ours - theirs).max(initial=0) < 600 * np.finfo(dtype).eps * max(1, np.abs(theirs).max(initial=0))


def test_dropout_and_its_gradients(rng):
    """The same choice as without these terms; sinks are never dropped."""
    q, k, v = rng.standard_normal((3, 2, 2, 9, 4))
    terms = {"softcap": 1.5, "relative_bias": rng.standard_normal((2, 7)), "sinks": rng.standard_normal(2)}
    factors = _core.dropout_factors(np.empty((2, 2, 9, 9)), 0.4, 11)
    _, weights, _ = mathematics(q, k, v, **terms)
    out = functional.dot_product_attention(q, k, v, dropout=0.4, rng=11, **terms)
    np.testing.assert_allclose(out, (weights * factors) @ v, atol=1e-13)
    grad = rng.standard_normal(out.shape)
    grads = functional.dot_product_attention_backward(grad, q, k, v, dropout=0.4, rng=11, **terms)
    for name, found in zip(("relative_bias", "sinks"), grads[3:]):
        for at in np.ndindex(terms[name].shape):
            losses = []
            for step in (1e-5, -1e-5):
                moved = terms[name].copy()
                moved[at] += step
                _, w, _ = mathematics(q, k, v, **{**terms, name: moved})
                losses.append((((w * factors) @ v) * grad).sum())
            assert found[at] == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-7)


@pytest.mark.parametrize("term", [*TERMS, "additive"])
def test_one_query_of_heads_that_share_keys(term, isa, dtype):
    """Such heads may be computed as so many queries of one head: but each has its own sink, and its own biases."""
    size = {"batch": 2, "heads": 6, "kv_heads": 2, "queries": 1, "keys": 17, "features": 8, "values": 5}
    wanted = {"causal": None, "window": None, "reach": 4, "sink": 0.0, "empty_rows": "zero"}
    wanted.update({name: name == term for name in (*TERMS, "additive")})
    arrays, lens, options = numbers(size, 1, wanted, dtype)
    found = apply(arrays, lens, options, return_weights=True, return_lse=True)
    for ours, theirs in zip(found, mathematics(*arrays, lens, **options)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=50 * np.finfo(dtype).eps)


def test_many_keys_and_threads(rng, dtype):
    """Many key blocks, few queries: blocks that are tasks of their own, and joins; the bits do not tell."""
    q, k, v = (rng.standard_normal((1, 4, n, 32)).astype(dtype) for n in (3, 9000, 9000))
    terms = {"softcap": 5.0, "relative_bias": rng.standard_normal((4, 4001)).astype(dtype),
             "sinks": np.array([0, 5, -90, 120], dtype)}  # fmt: skip
    _core.get_num_threads()
    results = []
    for n in (1, 2, 3):
        _core.set_num_threads(n)
        results.append(functional.dot_product_attention(
            q, k, v, causal="bottom_right", return_weights=True, return_lse=True, **terms))  # fmt: skip
    wanted = mathematics(q, k, v, causal="bottom_right", **terms)
    for found in results:
        for ours, first, theirs in zip(found, results[0], wanted):
            np.testing.assert_array_equal(ours, first)
            assert np.abs(ours - theirs).max() < 100 * np.finfo(dtype).eps * max(1, np.abs(theirs).max() / 20)


def test_hidden_values_do_not_matter(rng):
    """NaN in hidden keys and values changes no result and no gradient, with capped scores too."""
    q, k, v = rng.standard_normal((3, 2, 2, 8, 4))
    terms = {"softcap": 1.5, "relative_bias": rng.standard_normal((2, 7)), "sinks": rng.standard_normal(2),
             "causal": True}  # fmt: skip
    grad, lens = rng.standard_normal((2, 2, 8, 4)), [5, 8]
    spoiled_k, spoiled_v = k.copy(), v.copy()
    spoiled_k[0, :, 5:], spoiled_v[0, :, 5:] = np.nan, np.nan
    spoiled_k[:, :, 7], spoiled_v[:, :, 7] = np.nan, np.inf  # only the last row of item 1 sees it
    clean = functional.dot_product_attention(q, k, v, lens, **terms)
    out = functional.dot_product_attention(q, spoiled_k, spoiled_v, lens, **terms)
    np.testing.assert_array_equal(out[0], clean[0])
    np.testing.assert_array_equal(out[1, :, :7], clean[1, :, :7])
    grad[1, :, 7] = 0
    grads = functional.dot_product_attention_backward(grad[:1], q[:1], spoiled_k[:1], spoiled_v[:1], lens[:1], **terms)
    wanted = functional.dot_product_attention_backward(grad[:1], q[:1], k[:1], v[:1], lens[:1], **terms)
    same(grads, wanted)


def test_alibi_and_t5(rng):
    """The helpers' tables give the published biases, however long the sequence."""
    q, k, v = rng.standard_normal((3, 1, 4, 50, 8))
    away = np.arange(50) - np.arange(50)[:, None]
    slopes = functional.alibi_slopes(4)
    table = -slopes[:, None] * np.abs(np.arange(-49, 50))
    far = (-slopes[:, None, None] * np.abs(away))[None]
    np.testing.assert_allclose(
        functional.dot_product_attention(q, k, v, causal=True, relative_bias=table),
        functional.dot_product_attention(q, k, v, causal=True, bias=far), atol=1e-14,
    )  # fmt: skip
    learned = rng.standard_normal((32, 4))
    table = learned[functional.t5_buckets(np.arange(-20, 21), max_distance=20)].T
    bias = learned[functional.t5_buckets(away, max_distance=20)].transpose(2, 0, 1)
    np.testing.assert_allclose(
        functional.dot_product_attention(q, k, v, relative_bias=table),
        functional.dot_product_attention(q, k, v, bias=bias[None]), atol=1e-14,
    )  # fmt: skip


def test_errors(rng):
    q = rng.standard_normal((1, 2, 3, 4))
    run = functional.dot_product_attention
    for options, kind, message in (
        ({"softcap": 0}, ValueError, "softcap must be above 0"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": np.nan}, ValueError, "softcap"),
        ({"softcap": 10**400}, ValueError, "softcap is too large for a float"),
        ({"softcap": np.inf}, ValueError, "softcap must be above 0 and finite"),
        ({"softcap": True}, TypeError, "softcap"),
        ({"relative_bias": np.ones((2, 4))}, mha_c.ShapeError, r"shape \(2, 4\), expected \(H, 2R \+ 1\) with H = 2"),
        ({"relative_bias": np.ones((3, 5))}, mha_c.ShapeError, "H = 2"),
        ({"relative_bias": np.ones(5)}, mha_c.ShapeError, "relative_bias"),
        ({"relative_bias": np.ones((2, 5), np.float32)}, TypeError, "relative_bias"),
        ({"sinks": np.ones(3)}, mha_c.ShapeError, "sinks"),
        ({"sinks": np.ones(2, int)}, TypeError, "sinks"),
    ):
        with pytest.raises(kind, match=message):
            run(q, q, q, **options)
        with pytest.raises(kind, match=message):
            functional.dot_product_attention_backward(q, q, q, q, **options)


# --- torch ------------------------------------------------------------------------------------------------


def torch_call(rng, n_q=6, n_k=8):
    torch = needs.module("torch")
    q, k, v = (torch.from_numpy(rng.standard_normal((2, 2, n, 4))).requires_grad_() for n in (n_q, n_k, n_k))
    terms = {
        "relative_bias": torch.from_numpy(rng.standard_normal((2, 7))).requires_grad_(),
        "sinks": torch.from_numpy(rng.standard_normal(2)).requires_grad_(),
    }
    return torch, (q, k, v), terms


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_torch_is_equal(dropout, rng):
    torch, tensors, terms = torch_call(rng)
    from mha_c.torch import functional as ours

    more = {"softcap": 1.5, "causal": "bottom_right", "dropout": dropout, "rng": 5}
    out = ours.dot_product_attention(*tensors, torch.tensor([5, 8]), **terms, **more)
    arrays = [x.detach().numpy() for x in tensors]
    plain = {name: x.detach().numpy() for name, x in terms.items()}
    np.testing.assert_array_equal(out.detach(), functional.dot_product_attention(*arrays, [5, 8], **plain, **more))
    grad = rng.standard_normal(out.shape)
    grads = torch.autograd.grad(out, [*tensors, *terms.values()], torch.from_numpy(grad))
    wanted = functional.dot_product_attention_backward(grad, *arrays, [5, 8], **plain, **more)
    same([x.numpy() for x in grads], wanted)


def test_torch_derivatives_of_every_kind(rng):
    torch, tensors, terms = torch_call(rng, 3, 4)
    from mha_c.torch import functional as ours

    def run(q, k, v, table, sinks):
        return ours.dot_product_attention(q, k, v, softcap=1.5, causal=True, window=(2, 0), relative_bias=table,
                                          sinks=sinks, return_weights=True, return_lse=True)  # fmt: skip

    tensors = [x[:1, :, :3].detach().requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(run, (*tensors, *terms.values()))
    assert torch.autograd.gradgradcheck(run, (*tensors, *terms.values()))
    table = torch.func.grad(lambda t: run(*tensors, t, terms["sinks"])[0].sum())(terms["relative_bias"])
    wanted = torch.autograd.grad(run(*tensors, *terms.values())[0].sum(), terms["relative_bias"])[0]
    torch.testing.assert_close(table, wanted)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torch_derivatives_of_rows_with_nothing_but_a_sink_of_minus_infinity(rng):
    torch, tensors, _ = torch_call(rng, 3, 4)
    from mha_c.torch import functional as ours

    sinks = torch.tensor([-torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    tensors = [*tensors, sinks]

    def run(q, k, v, sinks):
        more = {"empty_rows": "uniform", "return_weights": True, "return_lse": True}
        return ours.dot_product_attention(q, k, v, torch.tensor([0, 3]), sinks=sinks, **more)

    out, weights, lse = run(*tensors)
    assert (out[0, 0] == 0).all() and (weights[0, 0] == 0).all() and torch.isneginf(lse[0, 0]).all()
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    for found in (torch.func.grad(lambda *x: run(*x)[0].square().sum(), argnums=(0, 1, 2, 3))(*tensors), grads):
        torch.testing.assert_close(torch.autograd.grad(run(*tensors)[0].square().sum(), tensors), found)
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(sum(x.square().sum() for x in grads), tensors))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0].detach(), torch.ones_like(tensors[0]))
        found = torch.autograd.forward_ad.unpack_dual(run(dual, *tensors[1:])[0])
        torch.testing.assert_close(found.primal, out)
        assert torch.isfinite(found.tangent).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_as_flex_attention(rng):
    torch, (q, k, v), terms = torch_call(rng, 33, 33)
    flex = needs.module("torch.nn.attention.flex_attention")
    from mha_c.torch import functional as ours

    q, k, v, table = (x.detach() for x in (q, k, v, terms["relative_bias"]))

    def score_mod(score, b, h, i, j):
        return 2 * torch.tanh(score / 2) + table[h, (j - i).clamp(-3, 3) + 3]

    causal = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 33, 33, device="cpu")
    with torch.no_grad():
        theirs = flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=causal)
        out = ours.dot_product_attention(q, k, v, causal=True, softcap=2, relative_bias=table)
        torch.testing.assert_close(out, theirs, rtol=0, atol=1e-12)
        # A sink is what the output's share of the log-sum-exp says: out * sigmoid(lse - sink).
        whole, lse = ours.dot_product_attention(q, k, v, causal=True, return_lse=True)
        found = ours.dot_product_attention(q, k, v, causal=True, sinks=terms["sinks"])
        torch.testing.assert_close(found, whole * torch.sigmoid(lse - terms["sinks"][:, None])[..., None])


def test_torch_halves_and_compilers(rng):
    torch, tensors, terms = torch_call(rng)
    from mha_c.torch import functional as ours

    def run(q, k, v, table, sinks):
        return ours.dot_product_attention(q, k, v, causal="top_left", softcap=3, relative_bias=table, sinks=sinks)

    inputs = [x.detach() for x in (*tensors, *terms.values())]
    whole = run(*inputs)
    half = run(*[x.bfloat16() for x in inputs])
    assert half.dtype is torch.bfloat16 and (half - whole).abs().max() < 0.1  # inputs and output have 8 bits
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), whole)
    for name, wrong in (("relative_bias", torch.zeros(2, 4).double()), ("sinks", torch.zeros(3).double())):
        for function in (run, compiled):
            given = dict(zip(("q", "k", "v", "table", "sinks"), inputs))
            given["table" if name == "relative_bias" else name] = wrong
            with pytest.raises(Exception, match=name):
                function(*given.values())
