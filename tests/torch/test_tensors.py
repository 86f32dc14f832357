"""Tensors that the core takes without NumPy in between: results, layouts, what is refused, the way round it."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import children
import mha_c
import mha_c.torch as mt
import needs
from binding_calls import assert_leaks_nothing
from mha_c import _core
from mha_c.torch import _private
from torch_modules import leaves

NONE = (None,) * 4
FakeTensorMode = needs.name_of_torch("torch._subclasses.FakeTensorMode")


@pytest.mark.parametrize("kind", ["multi-head", "additive", "dot"])
@pytest.mark.parametrize("which", ["qqq", "qkk", "qqv", "qkq", "qkv"])
@pytest.mark.parametrize("lens", [None, [3, 0, 7]])
def test_gradients_of_a_tensor_in_several_places_add_up(kind, which, lens):
    layer = {
        "multi-head": lambda: mt.MultiHeadAttention(6, 6, 6, 6, 2, 0.0, bias=True),
        "additive": lambda: mt.AdditiveAttention(6, 6, 8, 0.0),
        "dot": lambda: mt.DotProductAttention(0.0),
    }[kind]().double()
    tensors = dict(zip("qkv", leaves(*[(3, 7, 6)] * 3, dtype=torch.float64)))
    lens = None if lens is None else torch.tensor(lens)
    out = layer(*[tensors[name] for name in which], lens)
    apart = [tensors[name].detach().clone().requires_grad_() for name in which]
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(layer(*apart, lens), [*apart, *layer.parameters()], grad)
    names = sorted(set(which), key=which.index)
    found = torch.autograd.grad(out, [*[tensors[name] for name in names], *layer.parameters()], grad)
    for i, name in enumerate(names):
        total = sum(expected[j] for j, other in enumerate(which) if other == name)
        torch.testing.assert_close(found[i], total, rtol=1e-12, atol=1e-13)  # sums of three terms, order aside
    for ours, theirs in zip(found[len(names) :], expected[3:]):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["multi-head", "additive"])
@pytest.mark.parametrize("lens", [None, [5, 2, 7]])
def test_gradients_of_permuted_keys(kind, lens):
    layer = mt.MultiHeadAttention(6, 6, 6, 6, 2, 0.0) if kind == "multi-head" else mt.AdditiveAttention(6, 6, 8, 0.0)
    q, steps = leaves((3, 4, 6), (7, 3, 6))
    lens = None if lens is None else torch.tensor(lens)
    grads = []
    for keys in (steps.permute(1, 0, 2), steps.permute(1, 0, 2).contiguous()):
        out = layer(q, keys, keys, lens)
        grads.append(torch.autograd.grad(out, [q, steps, *layer.parameters()], torch.ones_like(out)))
    for permuted, dense in zip(*grads):
        assert torch.equal(permuted, dense)


def test_the_gradient_of_permuted_keys_lies_as_they_do():
    layer = mt.AdditiveAttention(6, 6, 8, 0.0)
    q, steps = leaves((3, 1, 6), (7, 3, 6))
    keys = steps.permute(1, 0, 2)
    out = layer(q, keys, keys)
    assert torch.autograd.grad(out.sum(), keys)[0].stride() == keys.stride()


def refused():
    yield torch.complex(torch.ones(2, 3, 6), torch.ones(2, 3, 6)).conj().imag  # says nothing of its sign to DLPack
    yield torch._neg_view(torch.ones(2, 3, 6))
    yield torch.ones(2, 3, 6, device="meta")
    yield torch.ones(2, 3, 6).to_sparse()
    yield torch._efficientzerotensor((2, 3, 6))
    yield torch.ones(2, 3, 6, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tensors_between_addresses():
    """Numbers that begin within a word are copied first: sanitizers see it where they are not."""

    def askew(tensor):
        room = bytearray(2 + tensor.nbytes)
        room[2:] = tensor.numpy().tobytes()
        return torch.frombuffer(room, dtype=tensor.dtype, offset=2, count=tensor.numel()).reshape(tensor.shape)

    layer, x, lens = mt.MultiHeadAttention(6, 6, 6, 6, 2, 0.0), torch.randn(2, 3, 6), torch.tensor([3, 2])
    with torch.no_grad():
        expected = layer(x, x, x, lens)
        layer.W_k.weight = torch.nn.Parameter(askew(layer.W_k.weight))
        assert layer.W_k.weight.data_ptr() % 4 == 2
        assert torch.equal(layer(askew(x), x, askew(x), askew(lens)), expected)


def test_tensors_without_plain_memory():
    for tensor in refused():
        with pytest.raises(BufferError):
            _core.layer_forward(tensor, tensor, tensor, None, NONE, None, 1, "zero", 0.0, 0)
    for tensor in (next(refused()), torch._efficientzerotensor((2, 3, 6))):  # computed by torch then
        for call in (mt.DotProductAttention(0.0), mt.functional.dot_product_attention):
            torch.testing.assert_close(call(*[tensor] * 3), call(*[tensor.resolve_neg() + 0] * 3))
    x = torch.ones(1, 2, 4)
    with pytest.raises(ValueError, match=r"keep_mask.*uint8"):
        mt.functional.dot_product_attention(x, x, x, keep_mask=torch.full((2, 2), 2, dtype=torch.uint8))
    with pytest.raises(mha_c.ShapeError, match="rank"):
        x = torch.ones(3, 6)
        _core.layer_forward(x, x, x, None, NONE, None, 1, "zero", 0.0, 0)


SERVED = torch.Tensor, torch.nn.Parameter, torch.ones(1).is_neg, torch.get_num_threads


def test_bad_capsules():
    for capsule in (None, 42, torch.Tensor):
        with pytest.raises((TypeError, ValueError)):
            _core.serve_tensors(capsule, *SERVED)


@pytest.mark.parametrize("method", [None, torch.Tensor.is_neg, torch.ones(1).sum, lambda: False])
def test_what_is_not_the_method_of_a_tensor_is_not_called(method):
    with pytest.raises(TypeError, match="is_neg"):
        _core.serve_tensors(_private.tensor_exchange, *SERVED[:2], method, SERVED[3])


class Exchange(ctypes.Structure):
    """DLPack's functions, as in csrc/python/torch/tensors.c."""

    _fields_ = [("version", ctypes.c_uint32 * 2)] + [
        (name, ctypes.c_void_p) for name in ("older", "allocate", "share", "adopt", "look", "stream")
    ]


@pytest.mark.parametrize("released", [False, True])
def test_a_torch_that_makes_no_tensor_of_a_result(released):
    """Whether it had one already, whose end gives the array back, or none: nothing is freed twice."""
    capsule, name = torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"
    address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    fails = Exchange.from_buffer_copy(Exchange.from_address(address(capsule, name)))
    asked = []

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def adopt(managed, _):
        asked.append(managed)
        if released:  # managed: version (two numbers of 32 bits), owner, release
            release = ctypes.c_void_p.from_address(managed + 16).value
            ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(release)(managed)
        return -1  # and no exception, which ctypes would not let through

    fails.adopt = ctypes.cast(adopt, ctypes.c_void_p)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    q = torch.randn(1, 2, 3, 4)
    expected = mt.functional.dot_product_attention(q, q, q)
    _core.serve_tensors(new(ctypes.addressof(fails), name, None), *SERVED)
    try:
        for _ in range(3):
            with pytest.raises(SystemError, match=r"without (setting an )?exception"):
                _core.attention_forward(q, q, q)
    finally:
        _core.serve_tensors(capsule, *SERVED)
    assert len(asked) == 3 and torch.equal(mt.functional.dot_product_attention(q, q, q), expected)


def test_results_outlive_everything_and_threads():
    import gc
    import threading

    layer = mt.DotProductAttention(0.0)
    (x,) = leaves((2, 5, 4))
    out = layer(x, x, x).detach()
    copy = out.clone()
    del layer, x
    gc.collect()
    assert torch.equal(out, copy)
    thread = threading.Thread(target=lambda box: box.clear(), args=([out],))
    del out
    thread.start()
    thread.join()


def test_leaks_nothing():
    layer = mt.MultiHeadAttention(6, 6, 6, 6, 2, 0.1)
    q, steps = leaves((3, 4, 6), (7, 3, 6))
    bias = torch.zeros(4, 7, requires_grad=True)
    keep = torch.ones(4, 7, dtype=torch.bool)

    def function():
        out, _ = mt.functional.dot_product_attention(
            q, steps.permute(1, 0, 2), steps.permute(1, 0, 2), bias=bias, keep_mask=keep, return_weights=True
        )
        out.sum().backward()

    def step():
        keys = steps.permute(1, 0, 2)
        layer(q, keys, keys, torch.tensor([1, 2, 3])).sum().backward()

    def wrong():
        with pytest.raises(BufferError):
            _core.layer_forward(q, next(refused()), q, None, NONE, None, 1, "zero", 0.0, 0)

    assert_leaks_nothing([step, function, wrong])


ELSEWHERE = """
import torch
from torch._subclasses import FakeTensorMode
with FakeTensorMode() if {fake} else torch.device("meta"):
    import mha_c.torch as mt
if not {fake}:
    x = torch.ones(2, 3, 4)
    assert len({{mt.DotProductAttention(0.5)(x, x, x).sum().item() for _ in range(20)}}) > 1
"""


def test_the_import_does_not_depend_on_the_default_device():
    needs.of_torch("torch._subclasses.FakeTensorMode", "torch.set_default_device")
    for status, said in children.each_alone([ELSEWHERE.format(fake=fake) for fake in (False, True)]).values():
        assert status == 0, said


FIRST_USES = {
    "inference mode": torch.inference_mode,
    "fake": FakeTensorMode,
    "fake among real": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", FIRST_USES)
def test_a_first_use_in_a_mode_leaves_the_thread_as_it_was(mode):
    """What a thread keeps for its random numbers is made at its first call with dropout, whatever mode that is in."""
    needs.of_torch(*["torch.set_default_device"] * (mode == "meta"))
    if mode.startswith("fake"):  # without these functions results are made by torch.from_numpy, which gives fake ones
        needs.operators()
        needs.of_torch("torch.Tensor.__dlpack_c_exchange_api__")
        needs.fake_modes_in_threads()
    layer, x = mt.DotProductAttention(0.5), torch.ones(2, 3, 4)

    def in_thread():
        torch.manual_seed(0)
        with FIRST_USES[mode]():
            layer(x, x, x)
        found = [layer(x, x, x) for _ in range(20)]
        generator = torch.Generator().manual_seed(0)
        found += [mt.functional.dot_product_attention(x, x, x, dropout=0.5, rng=generator) for _ in range(20)]
        return {out.sum().item() for out in found}

    with ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(in_thread).result()) > 2


def test_the_tape_is_saved_where_it_is_large():
    layer = mt.DotProductAttention(0.0)
    for n in (4, 300):
        (x,) = leaves((8, n, 64))
        out = layer(x, x, x)  # with whose end a torch may free what its node has saved
        node = out.grad_fn
        assert (len(node.saved_tensors) > 3) == (n == 300)  # 3: queries, keys, values; a result of 8 or of 600 KiB


def test_weights_as_tensors():
    """A projection of tensors: (weight, bias), read at the call; parameters too; other layouts by a copy."""
    q, keys, *weights, bias = (x.detach() for x in leaves((2, 4, 6), (2, 5, 6), *[(6, 6)] * 4, (6,)))
    weights, bias = [torch.nn.Parameter(weight) for weight in weights], torch.nn.Parameter(bias)

    def call(projections):
        return _core.layer_forward(q, keys, keys, None, projections, None, 2, "zero", 0.0, 0)[0]

    def arrays(weights):
        return tuple((weight.detach().numpy(), bias.detach().numpy()) for weight in weights)

    expected = call(arrays(weights))
    assert torch.equal(call(tuple((weight, bias) for weight in weights)), expected)
    transposed = [weight.detach().T.contiguous().T for weight in weights]
    assert torch.equal(call(tuple((weight, bias) for weight in transposed)), expected)
    with torch.no_grad():
        weights[2][1, 3] = 5.0
        weights[0].data[2] += 1
    expected = call(arrays(weights))
    assert torch.equal(call(tuple((weight, bias) for weight in weights)), expected)
    for tensor_without_memory in refused():
        with pytest.raises((BufferError, TypeError, mha_c.ShapeError)):
            call(((tensor_without_memory, None), None, None, None))


@pytest.mark.parametrize("scores", ["dot", "additive"])
@pytest.mark.parametrize("v_size", [8, 3])
def test_the_output_lies_in_memory_as_the_queries_do(scores, v_size):
    """As that of torch's own function: a model joins the heads by a view.  Heads that are one are no columns."""
    x, k, v, w_v = leaves((2, 5, 3, 8), (2, 1, 7, 8), (2, 1, 7, v_size), (8,))
    f = mt.functional
    call = f.dot_product_attention if scores == "dot" else lambda *qkv: f.additive_attention(*qkv, w_v)
    turned, dense = call(x.transpose(1, 2), k, v), call(x.transpose(1, 2).contiguous(), k, v)
    assert torch.equal(turned, dense) and dense.is_contiguous()
    joined = turned.transpose(1, 2)
    assert joined.is_contiguous() and joined.flatten(2)._base is not None
    grads = [torch.autograd.grad(out.square().sum(), (x, k, v)) for out in (turned, dense)]
    assert all(map(torch.equal, *grads))
    assert call(x[:, :, :1].transpose(1, 2).expand(2, 3, 5, 8), k, v).is_contiguous()


@pytest.mark.parametrize("given", [[[[1.0, 2.0]]], np.ones((1, 1, 2), np.float32), None], ids=["list", "array", "None"])
def test_what_is_no_tensor_is_told_so(given):
    layer, x = mt.MultiHeadAttention(4, 2, 0.0), torch.ones(1, 1, 2)
    theirs = mt.nn.MultiheadAttention(2, 1, batch_first=True)
    calls = [
        lambda: mt.masked_softmax(given),
        lambda: mt.masked_softmax(given, [1]),
        lambda: mt.sequence_mask(given, [1]),
        lambda: mt.transpose_qkv(given, 2),
        lambda: mt.transpose_output(given, 2),
        lambda: layer.transpose_qkv(given),
        lambda: theirs(given, x, x),
        lambda: theirs(x, x, given),
        lambda: theirs(x, x, x, attn_mask=[[True]] if given is None else given),
        lambda: mt.Seq2SeqAttentionDecoder(4, 2, 2, 1).init_state((given, x)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"must be a torch tensor, got .*, or use mha_c, which has the same"):
            call()
    with pytest.raises(TypeError, match="frozen takes a torch module, got"), mt.frozen(given):
        pass
    with pytest.raises(TypeError, match=r"X must be a dense tensor of float32.*got torch.int64"):
        mt.masked_softmax(torch.ones(1, 1, 2, dtype=torch.long), [1])
