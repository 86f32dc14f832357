"""Children of the torch modules that are replaced, hooked or patched: called as d2l would call them."""

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt
from torch_modules import HOOKS, inputs


@pytest.mark.parametrize("kind", ["hook on W_q", "hook on attention", "Identity dropout", "parametrized", "subclass"])
def test_children_are_respected(kind):
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs()
    layer(*tensors, [3, 2])  # there is a plan before the change
    plain, factor = layer(*tensors, [3, 2]), 1
    if kind == "hook on W_q":
        seen = []
        layer.W_q.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        layer(*tensors, [3, 2])
        assert seen == [(2, 4, 20)]
    elif kind == "hook on attention":
        layer.attention.register_forward_hook(lambda module, args, out: seen.append(out.shape))
        seen = []
        layer(*tensors, [3, 2])
        assert seen == [(10, 4, 4)]
    elif kind == "Identity dropout":
        layer.attention.dropout = nn.Identity()
    elif kind == "parametrized":

        class Twice(nn.Module):
            def forward(self, weight):
                return 2 * weight

        nn.utils.parametrize.register_parametrization(layer.W_o, "weight", Twice())
        factor = 2
    else:

        class Scaled(nn.Linear):
            def forward(self, x):
                return 3 * super().forward(x)

        scaled = Scaled(20, 20, bias=False)
        scaled.load_state_dict(layer.W_o.state_dict())
        layer.W_o = scaled
        factor = 3
    torch.testing.assert_close(layer(*tensors, [3, 2]), factor * plain)
    assert layer.attention_weights.shape == (2, 5, 4, 6)


REFUSED = {
    "lengths": lambda q, k, v: (q, k, v, torch.tensor([1, 2, 3])),
    "a scalar": lambda q, k, v: (q, k, v, torch.tensor(3)),
    "two axes": lambda q, k, v: (q, k, v, torch.ones(2, 5)),
    "features": lambda q, k, v: (k, k, v),
    "features of values": lambda q, k, v: (q, k, k),
    "keys": lambda q, k, v: (q, k[:, 1:], v),
    "items": lambda q, k, v: (q[:1], k, v),
    "rank": lambda q, k, v: (q[0], k, v),
    "type": lambda q, k, v: (q.double(), k, v),
    "NaN": lambda q, k, v: (q, k, v, torch.tensor([1.0, float("nan")])),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("hooked", ["attention", "attention.dropout", "W_q", "W_o"])
def test_a_hook_changes_no_error(hooked, what):
    messages = []
    for with_hook in (False, True):
        layer = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5)
        if with_hook:  # the book's lines then fail where they do, and say why in our words
            layer.get_submodule(hooked).register_forward_hook(lambda *args: None)
        with pytest.raises((ValueError, TypeError)) as refused:
            layer(*REFUSED[what](*inputs()))
        messages.append((refused.type, str(refused.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("how", ["core", "hook", "half", "no gradients"])
@pytest.mark.parametrize("sizes", ["known", "open"])
def test_a_refused_call_draws_no_number_and_sets_no_size(sizes, how, what):
    layer = mt.MultiHeadAttention(*(() if sizes == "open" else (12, 10, 14)), 20, 5, 0.5)
    tensors = inputs()
    if sizes == "known":
        layer(*tensors)
    elif what.startswith("features"):
        pytest.skip("the first call sets them")
    elif how == "hook":
        pytest.skip("each projection is initialised by its own call, as in d2l")
    if how == "hook":
        layer.attention.register_forward_hook(lambda *args: None)
    if how == "half":
        layer, tensors = layer.half(), [x.half() for x in tensors]
    before = torch.get_rng_state()
    with torch.set_grad_enabled(how != "no gradients"), pytest.raises((ValueError, TypeError)):
        layer(*REFUSED[what](*tensors))
    assert torch.equal(torch.get_rng_state(), before)
    assert (type(layer.W_q) is nn.LazyLinear) == (type(layer.W_o) is nn.LazyLinear) == (sizes == "open")
    layer(*tensors)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("what", ["keys", "items", "lengths", "type"])
def test_a_refused_call_of_a_function_draws_no_number(what):
    q, _, v = inputs(sizes=(14, 12, 14))
    k, before = v.clone(), torch.get_rng_state()
    q, k, v, *lens = REFUSED[what](q, k, v)
    for dropped in (mt.functional.dot_product_attention, mt.nn.MultiheadAttention(14, 2, 0.5, batch_first=True)):
        before = torch.get_rng_state()
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            if dropped is mt.functional.dot_product_attention:
                dropped(q, k, v, *lens, dropout=0.5)
            else:
                dropped(q, k, v, *[torch.ones(3, 3, dtype=torch.bool) for _ in lens])
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["attention", "attention.dropout", "W_q", "W_k", "W_v", "W_o"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_inner_modules(name, hook):
    """Each is called as often, with tensors of the same shapes, as d2l's."""
    d2l = needs.d2l("0.17.6")
    seen = []
    for layer in (d2l.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0)):
        tensors, calls = inputs(requires_grad=True), []
        layer(*tensors, None)
        handle = getattr(layer.get_submodule(name), hook)(lambda module, *args, calls=calls: calls.append(shapes(args)))
        layer(*tensors, None).sum().backward()
        handle.remove()
        layer(*tensors, None)
        seen.append(calls)
    assert seen[0] and seen[0] == seen[1]


def shapes(value):
    if isinstance(value, tuple):
        return tuple(map(shapes, value))
    return None if value is None else tuple(value.shape)


@pytest.mark.parametrize("name", ["W_q", "W_k", "W_v", "W_o"])
def test_a_hook_changes_nothing_that_dropout_drops(name):
    """What is dropped depends on seed, item, head, query and key, whoever looks at a projection."""
    layer, found = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5), []
    for _ in range(2):
        tensors = inputs(requires_grad=True)
        torch.manual_seed(1)
        out = layer(*tensors, [3, 2])
        grads = torch.autograd.grad(out.square().sum(), [*tensors, *layer.parameters()])
        found.append([out, *grads, layer.attention_weights, layer.attention.attention_weights])
        layer.get_submodule(name).register_forward_hook(lambda *_: None)
    for with_hook, without in zip(*found[::-1]):
        torch.testing.assert_close(with_hook, without)


def test_a_hook_may_change_what_passes():
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs()
    plain = layer(*tensors, [3, 2])
    for name, factor in (("attention.dropout", 2), ("attention", 2), ("W_o", 2), ("W_v", 2)):
        handle = layer.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)
        torch.testing.assert_close(layer(*tensors, [3, 2]), factor * plain)
        handle.remove()
    additive = mt.AdditiveAttention(12, 10, 16, 0.0)
    other, _ = additive(*tensors, [3, 2]), additive.dropout.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(additive(*tensors, [3, 2]), 2 * other)
    assert torch.equal(layer(*tensors, [3, 2]), plain), "not as before the hooks"


@pytest.mark.parametrize("name", ["attention", "attention.dropout", "W_q", "W_o"])
@pytest.mark.parametrize("how", ["instance", "subclass", "class"])
def test_a_replaced_forward_is_called(name, how, monkeypatch):
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs()
    layer(*tensors, [3, 2])  # the usual way first
    child, calls = layer.get_submodule(name), []
    kind = type(child)

    def forward(self, *args, original=kind.forward):
        calls.append(self)
        return original(self, *args)

    if how == "instance":
        child.forward = forward.__get__(child)
    elif how == "subclass":
        child.__class__ = type("Own", (kind,), {"forward": forward})
    else:
        monkeypatch.setattr(kind, "forward", forward)
    layer(*tensors, [3, 2])
    assert child in calls


@pytest.mark.parametrize("name", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_global_hooks_see_the_inner_modules(name):
    seen, layer, tensors = set(), mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs(requires_grad=True)
    layer(*tensors, [3, 2])
    handle = getattr(nn.modules.module, f"register_module_{name}")(lambda module, *_: seen.add(module))
    try:
        layer(*tensors, [3, 2]).sum().backward()
        found, seen = seen, set()
        additive = mt.AdditiveAttention(12, 10, 16, 0.0)
        additive(*tensors).sum().backward()
    finally:
        handle.remove()
    assert found == set(layer.modules()) and seen == set(additive.modules())


@pytest.mark.parametrize("owner, name", [(nn.functional, "linear"), (nn.Linear, "__call__"), (nn.Linear, "forward")])
def test_projections_that_somebody_replaced(owner, name, monkeypatch):
    d2l, tensors = needs.d2l("0.17.6"), inputs()
    layer, theirs = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), d2l.MultiHeadAttention(12, 10, 14, 20, 5, 0.0)
    theirs.load_state_dict(layer.state_dict())
    lens, plain = torch.tensor([3, 2]), getattr(owner, name)
    before = layer(*tensors, lens)
    monkeypatch.setattr(owner, name, lambda *args, **named: 2 * plain(*args, **named))
    torch.testing.assert_close(layer(*tensors, lens), theirs(*tensors, lens))
    monkeypatch.undo()
    assert torch.equal(layer(*tensors, lens), before)


def test_methods_of_a_subclass_are_called():
    class Own(mt.MultiHeadAttention):
        def transpose_output(self, X):
            return 2 * super().transpose_output(X)

    layer, tensors = Own(12, 10, 14, 20, 5, 0.0), inputs()
    plain = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(*tensors, [3, 2]), 2 * plain(*tensors, [3, 2]))


def test_training_for_one_call_beside_a_dropout_of_ones_own():
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.5), inputs()
    layer.attention.dropout.register_forward_hook(lambda *_: None)
    layer(*tensors, training=True)
    with pytest.raises(ValueError, match="mode of the module's own dropout"):
        layer(*tensors, training=False)
    layer.eval()
    assert torch.equal(layer(*tensors, training=False), layer(*tensors))


def test_additive_attention_inside_multi_head():
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs()
    layer.attention = mt.AdditiveAttention(4, 4, 8, 0.0)
    q, k, v = (layer.transpose_qkv(W(x)) for W, x in zip((layer.W_q, layer.W_k, layer.W_v), tensors))
    lens = torch.tensor([3, 2]).repeat_interleave(5)
    expected = layer.W_o(layer.transpose_output(layer.attention(q, k, v, lens)))
    torch.testing.assert_close(layer(*tensors, torch.tensor([3, 2])), expected)
    assert layer.attention_weights.shape == (2, 5, 4, 6)


def test_a_profiler_finds_the_calls():
    needs.of_torch("torch.autograd.profiler._is_profiler_enabled")
    layer, tensors = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0), inputs()
    with torch.profiler.profile() as profile:
        with torch.no_grad():
            plain = layer(*tensors)
        layer(*tensors).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"mha_c::layer_forward", "LayerFunction", "LayerFunctionBackward"} <= names
    assert torch.equal(plain, layer(*tensors))


@pytest.mark.parametrize("kind", ["bias", "another class", "hook", "pre-hook of all modules", "parametrized"])
def test_children_of_the_labelled_variant(kind):
    layer, x = mt.variants.MultiHeadedSelfAttention(12, 3), torch.randn(2, 5, 12)
    plain, seen, handle = layer(x), [], None
    if kind == "bias":
        layer.query_projection = nn.Linear(12, 12)
    elif kind == "another class":
        layer.query_projection = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 12))
    elif kind == "hook":
        layer.final_linear_layer.register_forward_hook(lambda module, args, out: seen.append("final_linear_layer"))
    elif kind == "parametrized":
        torch.nn.utils.parametrizations.weight_norm(layer.query_projection)
        with torch.no_grad():
            layer.query_projection.parametrizations.weight.original0.mul_(2)
    else:
        handle = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: seen.extend(n for n, child in layer.named_children() if child is module)
        )
    q, k, v = (child(x).unflatten(2, (3, 4)).transpose(1, 2) for child in list(layer.children())[:3])
    weights = torch.softmax(q @ k.transpose(2, 3) / 2, -1)
    wanted = layer.final_linear_layer((weights @ v).transpose(1, 2).flatten(2))
    seen.clear()
    try:
        torch.testing.assert_close(layer(x), wanted)
    finally:
        if handle is not None:
            handle.remove()
    torch.testing.assert_close(layer.attention_weights, weights)
    changes = kind in ("bias", "another class", "parametrized")
    assert torch.allclose(wanted, plain, atol=1e-6) != changes
    assert seen == (
        [] if changes else ["final_linear_layer"] if kind == "hook" else [n for n, _ in layer.named_children()]
    )
