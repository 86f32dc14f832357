"""`project` and `project_keys`: gradients, training, and every way that a call can take.  Decoding in evaluation is
test_torch_decoding.py's."""

import copy
import pickle

import pytest
import torch

import mha_c
import needs
import own_device
from mha_c import torch as ours

KINDS = {
    "dot": lambda dropout=0.0: ours.DotProductAttention(dropout),
    "additive": lambda dropout=0.0: ours.AdditiveAttention(4, 4, 6, dropout),
    "lazy additive": lambda dropout=0.0: ours.AdditiveAttention(6, dropout),
    "multi-head": lambda dropout=0.0: ours.MultiHeadAttention(4, 4, 4, 6, 2, dropout, bias=True),
    "lazy multi-head": lambda dropout=0.0: ours.MultiHeadAttention(6, 2, dropout),
}
LENS = torch.tensor([2, 5])
FakeTensorMode = needs.name_of_torch("torch._subclasses.FakeTensorMode")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def inputs(*, grad=False):
    torch.manual_seed(5)
    return torch.randn(2, 3, 4, requires_grad=grad), torch.randn(2, 5, 4, requires_grad=grad)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def outcomes(module, call, queries, encoded):
    """Output, weights and all gradients of a loss on both, of two calls with one dropout."""
    torch.manual_seed(7)
    found = []
    for x, lens in ((queries, None), (2 * queries, LENS)):
        found += [call(x, lens), module.attention_weights * 1]
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in found)
    return [*found, *torch.autograd.grad(loss, [queries, encoded, *module.parameters()], allow_unused=True)]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("way", ["usual", "hooked", "another child"])
def test_gradients_are_those_of_a_call_without_it(kind, dropout, way):
    module, (queries, encoded) = KINDS[kind](dropout), inputs(grad=True)
    module(queries, encoded, encoded)
    called = []
    if way == "hooked":
        list(module.children())[-1].register_forward_hook(lambda *_: called.append(1))
    elif way == "another child" and kind != "dot":
        module.W_k = torch.nn.Sequential(module.W_k)
    expected = outcomes(module, lambda x, lens: module(x, encoded, encoded, lens), queries, encoded)
    kv = module.project(encoded, encoded)
    found = outcomes(module, lambda x, lens: module(x, kv, valid_lens=lens), queries, encoded)
    close([x for x in found if x is not None], [x for x in expected if x is not None])
    assert called or way != "hooked"
    if "additive" in kind:
        keys = module.project_keys(encoded)
        found = outcomes(module, lambda x, lens: module(x, keys, encoded, lens), queries, encoded)
        close(found, expected)
        assert type(keys) is type(kv) and isinstance(keys, ours.ProjectedKeyValues)


def test_a_first_call_may_be_that_of_project(kind):
    module, (queries, encoded) = KINDS[kind](), inputs()
    if "lazy" in kind:
        needs.torch_does("a deep copy of a lazy module", lambda: copy.deepcopy(module))
    for grad in (True, False):
        other = copy.deepcopy(module)
        with torch.set_grad_enabled(grad):
            kv = other.project(encoded, encoded)
            close([other(queries, kv)], [other(queries, encoded, encoded)])


def test_weights_that_have_changed_are_noticed(kind):
    """In training too, where nobody compares numbers."""
    module, (queries, encoded) = KINDS[kind](), inputs()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            kv = module.project(encoded, encoded)
            module(queries, kv)
            for name, parameter in dict(module.named_parameters()).items():
                with torch.no_grad():
                    parameter.add_(1)
                if name.startswith(("W_k", "W_v")):
                    with pytest.raises(ValueError, match=r"projected by another W_k or W_v.*project again"):
                        module(queries, kv)
                    kv = module.project(encoded, encoded)
                module(queries, kv)


def test_a_buffer_of_a_projection_that_has_changed_is_noticed():
    """As the mask of a pruned weight, or the scale of a quantized one."""
    module, (queries, encoded) = KINDS["multi-head"](), inputs()
    module.W_k = torch.nn.Sequential(module.W_k, torch.nn.BatchNorm1d(encoded.shape[1]).eval())
    kv = module.project(encoded, encoded)
    module(queries, kv)
    module.W_k[1].running_var.mul_(2)
    with pytest.raises(ValueError, match="project again"):
        module(queries, kv)


def test_weights_that_have_been_replaced_are_noticed(kind):
    """As averaged ones take the place of others for an evaluation: no count of changes tells it."""
    module, (queries, encoded) = KINDS[kind](), inputs()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            kv = module.project(encoded, encoded)
            for name, parameter in dict(module.named_parameters()).items():
                before, parameter.data = parameter.data, parameter.data + 1
                if name.startswith(("W_k", "W_v")):
                    with pytest.raises(ValueError, match="projected by another W_k or W_v"):
                        module(queries, kv)
                parameter.data = before
            module(queries, kv)


def test_what_was_projected_without_gradients_says_so():
    module, (queries, encoded) = KINDS["multi-head"](), inputs()
    with torch.no_grad():
        kv = module.project(encoded, encoded)
        expected = module(queries, kv)
    with pytest.raises(RuntimeError, match=r"is not differentiable: .*project with gradients enabled"):
        module(queries, kv)
    kv = module.requires_grad_(False).project(encoded, encoded)  # recorded, but of nothing
    out = module(queries.requires_grad_(), kv)
    close([out], [expected])
    assert torch.autograd.grad(out.sum(), queries)[0].any()


def test_it_is_its_own(kind):
    """What the caller does with the keys and lengths later changes nothing."""
    module, (queries, encoded), lens = KINDS[kind](), inputs(), LENS.clone()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            own, own_lens = encoded.clone(), lens.clone()
            kv = module.project(own, own, own_lens)
            expected = module(queries, encoded, encoded, lens)
            own.zero_(), own_lens.zero_()
            close([module(queries, kv), module(queries.flip(0), kv.reorder([1, 0]))], [expected, expected.flip(0)])
            assert kv.shape[:2] == (2, 5) and repr(kv).startswith("ProjectedKeyValues(shape=(2, 5, ")


@pytest.mark.parametrize("training", [False, True])
def test_dropout_without_gradients(kind, training):
    """As of a call without `project`: the same weights are dropped."""
    module, (queries, encoded) = KINDS[kind](0.5).train(training), inputs()
    module(queries, encoded, encoded)
    with torch.no_grad():
        kv, found = module.project(encoded, encoded), []
        for call in (lambda: module(queries, encoded, encoded), lambda: module(queries, kv)):
            torch.manual_seed(3)
            found += [call(), module.attention_weights + 0]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
        assert not torch.equal(module(queries, kv, training=not training), found[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lazy" not in kind])  # whose sizes are set by then
def test_compilers_and_transforms(kind):
    needs.compilers()
    module, (queries, encoded) = KINDS[kind](), inputs()

    def decode(queries, encoded):
        kv = module.project(encoded, encoded)
        return module(queries, kv, valid_lens=LENS) + module(2 * queries, kv)

    expected = decode(queries, encoded)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(torch.compile(decode, backend="eager")(queries, encoded), expected)
    of_encoded = torch.func.grad(lambda x: decode(queries, x).square().sum())(encoded)
    x = encoded.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(decode(queries, x).square().sum(), x)[0], of_encoded)
    half = decode(queries.bfloat16(), encoded.bfloat16()) if kind == "dot" else None
    assert half is None or half.dtype is torch.bfloat16


def test_tensors_that_have_no_memory_of_their_own(kind):
    """In evaluation: negated views, and fake tensors, among which the book's decoder gives shapes."""
    module, (queries, _) = KINDS[kind](), inputs()
    encoded = torch.randn(2, 5, 4, dtype=torch.complex64).conj().imag
    assert encoded.is_neg()
    with torch.no_grad():
        close([module(queries, module.project(encoded, encoded, LENS))], [module(queries, encoded, encoded, LENS)])
        if hasattr(module, "project_keys"):
            found = module(queries, module.project_keys(encoded), encoded)
            close([found], [module(queries, encoded, encoded)])
        with FakeTensorMode():
            fake, (queries, encoded) = KINDS[kind.replace("lazy ", "")](), inputs()  # torch draws no fake lazy ones
            shape = fake(queries, encoded, encoded).shape
            assert fake(queries, fake.project(encoded, encoded)).shape == shape
            decoder = ours.Seq2SeqAttentionDecoder(7, 4, 4, 1).eval()
            state = decoder.init_state((torch.zeros(5, 2, 4), torch.zeros(1, 2, 4)), None)
            assert decoder(torch.zeros(2, 3, dtype=torch.int64), state)[0].shape == (2, 3, 7)


def test_the_books_decoder_with_an_attention_of_its_owner():
    class Owned(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, queries, keys, values, valid_lens):
            return self.inner(queries, keys, values, valid_lens)

        @property
        def attention_weights(self):
            return self.inner.attention_weights

    class Subclass(ours.AdditiveAttention):
        def forward(self, queries, keys, values, valid_lens):
            scores = self.w_v(torch.tanh(self.W_q(queries).unsqueeze(2) + self.W_k(keys).unsqueeze(1)))
            self.attention_weights = ours.masked_softmax(scores.squeeze(-1), valid_lens)
            return self.attention_weights @ values

    decoder, words = ours.Seq2SeqAttentionDecoder(7, 4, 4, 1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    state, found = decoder.init_state((torch.randn(5, 2, 4), torch.randn(1, 2, 4)), LENS), []
    subclass, seen, inner = Subclass(4, 4, 4, 0.0), [], decoder.attention
    subclass.load_state_dict(decoder.attention.state_dict())
    for attention in (decoder.attention, Owned(decoder.attention), subclass):
        decoder.attention = attention
        found.append([decoder(words, state)[0], *decoder.attention_weights])
    close(found[0], found[1])
    close(found[0], found[2])
    decoder.attention = inner
    inner.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    close(found[0][:1], [decoder(words, state)[0]])
    assert [tuple(x.shape) for x in seen[0]] == [(2, 1, 4), (2, 5, 4), (2, 5, 4), (2,)]


def test_the_cpu_waits_for_what_it_reads_of_the_device(monkeypatch):
    """Orders for keys on the CPU: not looked at before they are there."""
    own, layer, to = own_device.load(), KINDS["multi-head"](), torch.Tensor.to
    q, k = inputs()
    kv, order = layer.project(k, k, LENS), torch.tensor([1, 0]).to(own)

    def refusing(tensor, *args, **options):
        found = to(tensor, *args, **options)
        assert not (options.get("non_blocking") and found.is_cpu and not tensor.is_cpu)
        return found

    monkeypatch.setattr(torch.Tensor, "to", refusing)
    assert torch.equal(layer(q, kv.reorder(order)), layer(q, kv.reorder([1, 0])))
    with pytest.raises(ValueError, match="a place in the batch"):
        kv.reorder(torch.tensor([1, -1]).to(own))
    assert torch.equal(layer(q, layer.project(k, k, LENS.to(own))), layer(q, kv))


def test_a_cache_may_leave_inference_mode(kind):
    """Filled or put in order there, it goes on under no_grad as well, on every device."""
    layer, (_, x) = KINDS[kind]().eval(), inputs()
    layer(x, x, x)
    found = []
    for device, mode in (("cpu", torch.no_grad), (own_device.load(), torch.inference_mode)):
        layer.to(device)
        steps, cache = x.to(device), layer.new_cache(2, 20)
        with mode():
            layer(steps, steps, steps, cache=cache)
        for _ in range(2):
            with torch.no_grad():
                found.append(layer(steps, steps, steps, cache=cache).cpu())
            with mode():
                cache.reorder([1, 0])
    close(found[2:], found[:2])


def test_copies(kind):
    module, (queries, encoded) = KINDS[kind](), inputs()
    with torch.no_grad():
        module(queries, encoded, encoded)
        kv = module.project(encoded, encoded, LENS)
        for other in (copy.deepcopy(kv), pickle.loads(pickle.dumps(kv))):
            assert torch.equal(module(queries, other), module(queries, kv))


@pytest.mark.parametrize("device", ["cpu", "own"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_know_the_weights_by_their_numbers(kind, device, copied):
    """Of what no numbers are looked at otherwise: what leads gradients, and what is on a device."""
    device = own_device.load() if device == "own" else device
    module, (queries, encoded) = KINDS[kind]().eval(), (x.to(device) for x in inputs())
    module.to("cpu")(*(x.cpu() for x in (queries, encoded, encoded)))
    module.to(device).requires_grad_(False)
    kv, cache = module.project(encoded, encoded, [2, 5]), module.new_cache(2, 16)
    with torch.no_grad():
        module(encoded, encoded, encoded, cache=cache)
        for other, both in ((copied(kv), copied((module, kv))), (copied(copied(kv)), (copied(module), copied(kv)))):
            close([module(queries, other), both[0](queries, both[1])], [module(queries, kv)] * 2)
        twin, twins = copied(cache), copied((module, cache))
        if device == "cpu":
            twin, twins = copy.copy(cache), copied((module, copy.copy(cache)))
        wanted = module(encoded, encoded, encoded, cache=cache)
        found = [module(encoded, encoded, encoded, cache=twin), twins[0](encoded, encoded, encoded, cache=twins[1])]
        close(found, [wanted, wanted])
        if "dot" in kind:
            return
        early, changes = copied(kv), copied(cache)
        module.W_k.weight.mul_(2)
        for call in (lambda: module(queries, early), lambda: module(queries, copied(kv)),
                     lambda: module(encoded, encoded, encoded, cache=changes)):  # fmt: skip
            with pytest.raises(ValueError, match=r"projected by another|filled by another"):
                call()


def test_ill_formed_calls():
    module, (queries, encoded) = KINDS["additive"](), inputs()
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            kv, keys = module.project(encoded, encoded), module.project_keys(encoded, [2, 3])
            with pytest.raises(TypeError, match="together with the keys"):
                module(queries, kv, encoded)
            with pytest.raises(TypeError, match="values"):
                module(queries, keys)
            with pytest.raises(TypeError, match="queries"):
                module(None, keys, encoded)
            with pytest.raises(mha_c.ShapeError, match="queries has shape"):
                module(queries[0], kv)
            with pytest.raises(mha_c.ShapeError, match="values"):
                module(queries, keys, encoded[:, :2])
            with pytest.raises(mha_c.ShapeError, match="keys must have shape"):
                module.project_keys(encoded[0])
            with pytest.raises(mha_c.ShapeError, match="values must have shape"):
                module.project(encoded, encoded[:, :2])
            with pytest.raises(TypeError, match=r"torch\.float64"):
                module.project(encoded, encoded.double())
