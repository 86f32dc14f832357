"""The torch modules: construction, state, modes, types, weights read back, and errors."""

import contextlib
import copy
import inspect
import pickle
import pydoc
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mha_c
import needs
from book_models import is_eager
from features import saved
from mha_c import torch as mt
from torch_modules import inputs, sized_layers

# --- Construction ------------------------------------------------------------------------------------


def test_both_generations_of_constructors():
    sized = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5, use_bias=True)
    assert [tuple(p.shape) for p in (sized.W_q.weight, sized.W_k.weight, sized.W_v.weight)] == [
        (20, 10),
        (20, 12),
        (20, 14),
    ]
    lazy = mt.MultiHeadAttention(num_hiddens=20, num_heads=5, dropout=0.5)
    assert type(lazy.W_q) is nn.LazyLinear and lazy.training
    lazy(*inputs())
    for layer in (sized, lazy):
        assert [name for name, _ in layer.named_children()] == ["attention", "W_q", "W_k", "W_v", "W_o"]
        assert all(type(getattr(layer, name)) is nn.Linear for name in ("W_q", "W_k", "W_v", "W_o"))
    additive = mt.AdditiveAttention(8, 0.1)
    additive(*inputs())
    assert type(additive.w_v) is type(additive.W_q) is type(additive.W_k) is nn.Linear
    assert list(mt.AdditiveAttention(2, 20, 8, 0.1).state_dict()) == ["W_k.weight", "W_q.weight", "w_v.weight"]


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: mt.MultiHeadAttention(100, 7, 0.0), ValueError),
        (lambda: mt.MultiHeadAttention(100, 0, 0.0), ValueError),
        (lambda: mt.MultiHeadAttention(100.0, 5, 0.0), TypeError),
        (lambda: mt.MultiHeadAttention(100, 5), TypeError),
        (lambda: mt.MultiHeadAttention(100, 5, 1.5), ValueError),
        (lambda: mt.DotProductAttention(-0.1), ValueError),
        (lambda: mt.DotProductAttention(0.1, empty_rows="nan"), ValueError),
        (lambda: mt.AdditiveAttention(4, 4, 0.1), TypeError),
    ],
)
def test_constructor_errors(make, error):
    with pytest.raises(error):
        make()


def test_xavier_hooks_find_the_projections():
    layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0)
    found = []
    layer.apply(lambda module: found.append(module) if type(module) is nn.Linear else None)
    assert found == [layer.W_q, layer.W_k, layer.W_v, layer.W_o]


def test_lazy_layer_draws_what_d2l_draws():
    d2l = needs.d2l("1.0.3")
    for name, arguments in (("MultiHeadAttention", (20, 5, 0.0, True)), ("AdditiveAttention", (20, 0.0))):
        states = []
        for layer in (getattr(mt, name)(*arguments), getattr(d2l, name)(*arguments)):
            tensors = inputs()
            torch.manual_seed(3)
            layer(*tensors, None)
            states.append(layer.state_dict())
        assert list(states[0]) == list(states[1])
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# --- State ---------------------------------------------------------------------------------------------


def test_state_dicts_load_both_ways(d2l):
    q, k, v = inputs()
    sizes = (12, 10, 14) if is_eager(d2l) else ()
    pairs = [
        (d2l.MultiHeadAttention(*sizes, 20, 5, 0.0, True), mt.MultiHeadAttention(20, 5, 0.0, True)),
        (d2l.AdditiveAttention(*sizes[:2], 16, 0.0), mt.AdditiveAttention(16, 0.0)),
    ]
    for theirs, ours in pairs:
        theirs(q, k, v, None)
        ours.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v, None))
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.mul_(1.5)
        theirs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v, None))
        assert repr(ours) == repr(theirs) or not lazy_layers_learn_their_sizes()


def lazy_layers_learn_their_sizes():
    """Whether a torch.nn.LazyLinear that loads weights notes their sizes at the first call."""
    linear = torch.nn.LazyLinear(3)
    linear.load_state_dict(torch.nn.Linear(2, 3).state_dict())
    linear(torch.ones(1, 2))
    return linear.in_features == 2


def test_state_dicts_of_torchs_multi_head_attention():
    x = inputs(sizes=(16, 16, 16), keys=4)[0]
    ours = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0, bias=True)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(mt.to_torch_state(ours.state_dict()))
    torch.testing.assert_close(theirs(x, x, x)[0], ours(x, x, x))
    fresh = mt.MultiHeadAttention(16, 4, 0.0, bias=True)
    fresh.load_state_dict(mt.from_torch_state(theirs.state_dict()))
    torch.testing.assert_close(fresh(x, x, x), ours(x, x, x))
    other_sizes = mt.MultiHeadAttention(12, 16, 10, 16, 4, 0.0)
    theirs = nn.MultiheadAttention(16, 4, bias=False, kdim=12, vdim=10, batch_first=True)
    theirs.load_state_dict(mt.to_torch_state(other_sizes.state_dict()))
    other_sizes.load_state_dict(mt.from_torch_state(theirs.state_dict()))
    extra = nn.MultiheadAttention(16, 4, add_bias_kv=True)
    with pytest.raises(ValueError, match="bias_k"):
        mt.from_torch_state(extra.state_dict())


@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive"])
def test_numpy_layers_take_the_weights(name):
    layer = sized_layers()[name].eval()
    numpy_layer = (
        mha_c.AdditiveAttention(16, 0.0)
        if name == "additive"
        else mha_c.MultiHeadAttention(20, 5, 0.0, name.endswith("bias"))
    )
    numpy_layer.load_state_dict(layer.state_dict())
    tensors = inputs()
    with torch.no_grad():
        ours = layer(*tensors, [3, 2]).numpy()
    assert np.array_equal(ours, numpy_layer(*[x.numpy() for x in tensors], [3, 2]))
    layer.load_state_dict({key: torch.from_numpy(value) for key, value in numpy_layer.state_dict().items()})


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive"])
def test_copies_after_a_training_step(name, how):
    layer, tensors = sized_layers()[name], inputs(requires_grad=True)
    out = layer(*tensors, torch.tensor([3, 5]))
    out.sum().backward()
    if how == "save":
        twin = saved(layer, **needs.whole_modules())
    else:
        copies = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}
        twin = copies[how](layer)
    assert torch.equal(twin.attention_weights, layer.attention_weights)
    assert torch.equal(twin(*tensors, [3, 5]), out)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    if how != "copy":  # which shares parameters
        assert torch.equal(layer(*tensors, [3, 5]), out)
    assert not torch.equal(twin(*tensors, [3, 5]), out)


# --- Packed weights follow -----------------------------------------------------------------------------


def _optimizer_step(layer):
    torch.optim.Adam(layer.parameters(), lr=0.1).step()


def _new_data(layer):
    layer.W_q.weight.data = layer.W_q.weight.data * 2


def _transposed_data(layer):
    layer.W_o.weight.data = layer.W_o.weight.data.t()


def _averaged(layer):  # an exponential moving average as many write it: torch does not count these
    for parameter in layer.parameters():
        parameter.data.mul_(0.9).add_(0.1)


def _one_number(layer):
    layer.W_k.weight.data[0, 0] = 42


def _new_parameter(layer):
    layer.W_v.weight = nn.Parameter(layer.W_v.weight.detach() * 3)


def _new_module(layer):
    layer.W_v = nn.Linear(10, 20, bias=False)


def _doubled(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter *= 2


def _fresh(layer):
    for module in layer.children():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)


def _fewer_outputs(layer):
    layer.W_o.weight.data, layer.W_o.bias.data = layer.W_o.weight.data[:10], layer.W_o.bias.data[:10]


CHANGES = (
    *(_optimizer_step, _new_data, _transposed_data, _averaged, _one_number, _new_parameter, _new_module),
    *(_doubled, _fresh, _fewer_outputs),
)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_parameters_are_seen(change, grad):
    layer = mt.MultiHeadAttention(10, 10, 10, 20, 5, 0.0, bias=True)
    x = torch.randn(2, 4, 10)
    layer(x, x, x).sum().backward()
    with torch.set_grad_enabled(grad):
        before = layer(x, x, x)
        change(layer)
        after = layer(x, x, x)
        expected = copy.deepcopy(layer)(x, x, x)
    assert torch.equal(after, expected) and not torch.equal(after, before)


def test_changed_instruction_set(isa):
    layer, tensors = sized_layers()["multi-head with bias"], inputs()
    out = layer(*tensors)
    mha_c._core.set_isa("scalar")
    torch.testing.assert_close(layer(*tensors), out)
    with pytest.raises(RuntimeError) if isa != "scalar" else contextlib.nullcontext():
        mha_c._core.set_isa(isa)
        layer.attention_weights.sum()


# --- Modes, dropout -----------------------------------------------------------------------------


def test_dropout_follows_torchs_generator():
    layer, x = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.5), torch.randn(2, 8, 16)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(layer(x, x, x))
    assert torch.equal(*results) and not torch.equal(layer(x, x, x), results[0])
    state = torch.get_rng_state()
    layer(x, x, x, training=False)
    layer.eval()(x, x, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(layer(x, x, x, training=True), layer(x, x, x))
    plain = mt.MultiHeadAttention(16, 16, 16, 16, 4, 0.0)
    state = torch.get_rng_state()
    plain(x, x, x)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_dropout_modules_own_mode_decides():
    layer, x = mt.DotProductAttention(0.5).eval(), torch.randn(2, 8, 16)
    still = layer(x, x, x)
    layer.dropout.train()  # "Monte Carlo dropout"
    assert not torch.equal(layer(x, x, x), still)


def test_everything_dropped():
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 1.0), inputs(requires_grad=True)
    out = layer(*tensors)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in tensors)


# --- Types -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["multi-head", "multi-head with bias", "additive", "dot"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_floats(name, dtype):
    """Computed in float32, then rounded once: within one rounding of the float32 result."""
    if name == "dot":
        layer, tensors = mt.DotProductAttention(0.0), inputs(sizes=(12, 12, 14), requires_grad=True)
    else:
        layer, tensors = sized_layers()[name], inputs(requires_grad=True)
    layer.to(dtype)
    halves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    singles = [x.detach().float().requires_grad_() for x in halves]
    out = layer(*halves, torch.tensor([3, 2]))
    wide = copy.deepcopy(layer).float()
    expected = wide(*singles, torch.tensor([3, 2]))
    assert out.dtype == dtype and layer.attention_weights.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    out.float().sum().backward()
    expected.to(dtype).float().sum().backward()
    for half, single in zip([*halves, *layer.parameters()], [*singles, *wide.parameters()]):
        assert half.grad.dtype == dtype and torch.equal(half.grad, single.grad.to(dtype))


def test_errors_of_a_call():
    layer, (q, k, v) = sized_layers()["multi-head"], inputs()
    with pytest.raises(TypeError, match=r"float64.*\.to\(dtype\)"):
        layer(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="float"):
        layer(q, k.double(), v)
    with pytest.raises(TypeError, match="torch tensor, got ndarray"):
        layer(q.numpy(), k, v)
    with pytest.raises(TypeError, match="int64"):
        layer(q.long(), k, v)
    with pytest.raises(mha_c.ShapeError, match="queries"):
        layer(q[..., :3], k, v)
    with pytest.raises(mha_c.ShapeError, match="keys"):
        layer(q, k[:1], v)
    with pytest.raises(ValueError, match="valid_lens"):
        layer(q, k, v, torch.tensor([1, 2, 3]))
    with pytest.raises(TypeError, match="valid_lens"):
        layer(q, k, v, torch.tensor([True, False]))
    with pytest.raises(ValueError, match="valid_lens"):
        layer(q, k, v, torch.tensor([1.0, float("nan")]))
    with pytest.raises(mha_c.ShapeError, match=r"\(B, Q, features\)"):
        mt.MultiHeadAttention(20, 5, 0.0)(q[0], k[0], v[0])
    with pytest.raises(TypeError, match=r"queries on meta.*no numbers"):
        layer(q.to("meta"), k, v)
    with pytest.raises(TypeError, match=r"parameters on meta.*no numbers"):
        copy.deepcopy(layer).to("meta")(q, k, v)
    with pytest.raises(TypeError, match=r"k on meta.*no numbers"):
        mt.functional.dot_product_attention(q, q.to("meta"), q)


def test_what_is_missing_is_said():
    layer, (q, k, v) = sized_layers()["multi-head"], inputs()
    alike = r"keys, values\.  For self-attention write layer\(X, X, X\)"
    for arguments, missing in (
        ((q, k), "values"), ((None, k, v), "queries"), ((q, None, v), "keys"), ((q,), alike),
        ((), "queries, keys, values"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^MultiHeadAttention is called .*: {missing}$"):
            layer(*arguments)
    with pytest.raises(TypeError, match=r"^k must be a torch tensor, got NoneType"):
        mt.functional.dot_product_attention(q, None, q)
    for error in (mha_c.ShapeError, RuntimeError):  # ours, and torch's
        with pytest.raises(error, match=r"size mismatch for W_q\.weight"):
            layer.load_state_dict({key: torch.zeros(3, 3) for key in layer.state_dict()})
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({})


def test_device_meta_and_fake_tensors():
    needs.operators()
    from torch._subclasses import FakeTensorMode

    with torch.device("meta"):
        layers = [mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True), mt.AdditiveAttention(8, 8, 4, 0.5),
                  mt.MultiHeadAttention(8, 2, 0.1), mt.DotProductAttention(0.1)]  # fmt: skip
    x, lens = torch.randn(2, 3, 8), torch.tensor([1, 3])
    meta = x.to("meta")
    for layer in layers:
        out = layer(meta, meta, meta, lens)
        assert out.is_meta and out.shape == (2, 3, 8) and layer.attention_weights.is_meta
    assert mt.functional.dot_product_attention(meta, meta, meta, lens, dropout=0.5, rng=3).is_meta
    real = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True)
    layers[0].load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(layers[0].eval()(x, x, x, lens), real.eval()(x, x, x, lens))
    with FakeTensorMode():
        fake = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5, True)
        y = torch.randn(2, 3, 8)
        assert fake(y, y, y, torch.tensor([1, 3])).shape == (2, 3, 8) and fake.attention_weights.shape == (2, 2, 3, 3)
        with torch.no_grad():
            fake(y, y, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of any fake tensor
        assert copy.deepcopy(fake).attention_weights.shape == (2, 2, 3, 3)


@pytest.mark.parametrize("fake", ["inputs", "module", "keys", "lengths", "q", "bias", "W_q", "softcap"])
def test_fake_tensors_among_real_ones(fake):
    needs.operators()
    from torch._subclasses import FakeTensorMode

    def made(what, *shape):
        with FakeTensorMode() if fake in what.split() or fake == "inputs" else contextlib.nullcontext():
            return torch.ones(*shape)

    with FakeTensorMode() if fake == "module" else contextlib.nullcontext():
        layer = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5)
    q, keys = made("q", 2, 3, 8), made("keys", 2, 3, 8)
    with pytest.raises(TypeError, match=r"fake tensors, which are without numbers|has no NumPy form"):
        if fake in ("inputs", "module", "keys", "lengths"):
            layer(q, keys, keys, made("lengths", 2).long() if fake != "lengths" else made("lengths", 2))
        elif fake == "W_q":
            mt.functional.additive_attention(q, keys, keys, torch.ones(4), made("W_q", 4, 8), torch.ones(4, 8))
        else:
            cap = 2.0 if fake == "softcap" else None
            mt.functional.dot_product_attention(q, keys, keys, bias=made("bias softcap", 3, 3), softcap=cap)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = torch.ones(2, 3, 8)
        assert layer(y, y, y).shape == y.shape and mt.functional.dot_product_attention(y, y, q).shape == y.shape


LENGTHS = (
    *(None, [3, 2], np.array([3, 2]), torch.tensor([2.5, 1.5]), torch.tensor([3, 2]).int()),
    *(torch.tensor([3, 2]).bfloat16(), torch.tensor([3.0, 2.0], requires_grad=True)),
    torch.tensor([[3] * 4, [2] * 4]),
)


@pytest.mark.parametrize("lens", LENGTHS)
def test_forms_of_lengths(lens):
    layer, tensors = sized_layers()["multi-head"], inputs()
    expected = layer(*tensors, None if lens is None else torch.tensor([3, 2]))
    assert torch.equal(layer(*tensors, lens), expected)


def test_layouts_and_shared_inputs():
    layer = mt.MultiHeadAttention(12, 12, 12, 12, 3, 0.0)
    base = torch.randn(5, 2, 24)
    dense = base.permute(1, 0, 2)[..., ::2].contiguous()
    for x in (base.permute(1, 0, 2)[..., ::2], dense.flip(0).flip(0), dense.clone(), nn.Parameter(dense)):
        torch.testing.assert_close(layer(x, x, x), layer(dense, dense.clone(), dense.clone()))
    same = [x.clone().requires_grad_() for x in [dense] * 3]
    layer(same[0], same[0], same[0]).square().sum().backward()
    apart = [x.clone().requires_grad_() for x in [dense] * 3]
    layer(*apart).square().sum().backward()
    torch.testing.assert_close(same[0].grad, sum(x.grad for x in apart))
    pair = [x.clone().requires_grad_() for x in [dense] * 2]
    layer(pair[0], pair[1], pair[1]).square().sum().backward()
    torch.testing.assert_close(pair[1].grad, apart[1].grad + apart[2].grad)


def test_empty_sizes():
    layer = mt.MultiHeadAttention(12, 12, 12, 12, 3, 0.5)
    for batch, queries in ((0, 4), (2, 0)):
        x, y = torch.randn(batch, queries, 12, requires_grad=True), torch.randn(batch, 3, 12, requires_grad=True)
        out = layer(x, y, y)
        out.sum().backward()
        assert out.shape == (batch, queries, 12) and x.grad.shape == x.shape
        assert torch.equal(layer.W_k.weight.grad, torch.zeros(12, 12))


# --- What editors show, and what torch's modules have --------------------------------------------------


def test_constructors_show_their_arguments():
    shown = inspect.signature(mt.MultiHeadAttention)
    assert str(shown).startswith("(key_size, query_size, value_size, num_hiddens, num_heads, dropout, bias=False, *, ")
    assert list(shown.parameters)[7:] == ["empty_rows", "device", "dtype"]
    assert list(inspect.signature(mt.AdditiveAttention).parameters)[:4] == [
        "key_size", "query_size", "num_hiddens", "dropout",
    ]  # fmt: skip
    page = re.sub(r"[\s|]", "", pydoc.render_doc(mt.MultiHeadAttention))  # from Python 3.13 on, an argument a line
    assert "MultiHeadAttention(key_size,query_size,value_size,num_hiddens,num_heads,dropout,bias=False" in page

    class Own(mt.MultiHeadAttention):
        def __init__(self, width):
            super().__init__(width, 2, 0.0)

    assert list(inspect.signature(Own).parameters) == ["width"] and Own(8).num_heads == 2


@pytest.mark.parametrize("make", [
    lambda **place: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, True, **place),
    lambda **place: mt.MultiHeadAttention(8, 2, 0.0, **place),
    lambda **place: mt.AdditiveAttention(8, 8, 6, 0.0, **place),
    lambda **place: mt.AdditiveAttention(6, 0.0, **place),
])  # fmt: skip
def test_device_and_dtype_as_torchs_modules_have(make):
    layer, x = make(dtype=torch.float64), torch.randn(2, 3, 8, dtype=torch.float64)
    assert layer(x, x, x).dtype is torch.float64
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert {p.device.type for p in make(device="meta").parameters()} == {"meta"}
    assert {p.dtype for p in make().parameters()} == {torch.float32}


def test_reset_parameters_draws_as_a_new_layer_does():
    for make in (lambda: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0, True), lambda: mt.AdditiveAttention(8, 8, 6, 0.0)):
        layer = make()
        before = [p.clone() for p in layer.parameters()]
        torch.manual_seed(3)
        layer.reset_parameters()
        torch.manual_seed(3)
        for own, fresh, old in zip(layer.parameters(), make().parameters(), before):
            assert torch.equal(own, fresh) and not torch.equal(own, old)
    mt.MultiHeadAttention(8, 2, 0.0).reset_parameters()  # lazy: drawn in the first call
    mt.DotProductAttention(0.0).reset_parameters()
