"""Decoding with a cache, on tensors: the rules of test_decoding.py, and what only torch can ask."""

import copy
import gc
import pickle
import threading
import tracemalloc

import numpy as np
import pytest

import mha_c
import needs
from decoding_layers import KINDS, causal_lens, layer_of

torch = needs.module("torch")
import mha_c.torch as ours  # noqa: E402


def module_of(kind, dtype=torch.float32):
    layer = layer_of(kind, np.dtype(str(dtype)[6:]) if dtype in (torch.float32, torch.float64) else np.dtype("float32"))
    if kind == "dot":
        module = ours.DotProductAttention(0.3)
    elif kind == "additive":
        module = ours.AdditiveAttention(24, 24, 16, 0.3)
    else:
        module = ours.MultiHeadAttention(24, 24, 24, 24, 4, 0.3, "biases" in kind)
    module.to(dtype).load_state_dict({name: torch.from_numpy(x) for name, x in layer.state_dict().items()})
    return module.eval(), layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_numpy_layer(kind, dtype, rng):
    module, layer = module_of(kind, dtype)
    x = torch.from_numpy(rng.standard_normal((2, 9, 24))).to(dtype)
    caches = module.new_cache(2, 20), layer.new_cache(2, 20)
    whole = module(x, x, x, torch.from_numpy(np.array(causal_lens(2, 0, 9)))).detach()
    parts = []
    with torch.no_grad():
        for new in x.split([4, 1, 1, 3], dim=1):
            parts.append(module(new, new, new, cache=caches[0]))
            theirs = layer(new.numpy(), new.numpy(), new.numpy(), cache=caches[1])
            assert torch.equal(parts[-1], torch.from_numpy(theirs))
            np.testing.assert_array_equal(module.attention_weights, layer.attention_weights)
        assert torch.equal(torch.cat(parts, 1), whole)
        for cache in caches:
            cache.reorder([1, 0, 1])
        new = torch.from_numpy(rng.standard_normal((3, 2, 24))).to(dtype)
        out = module(new, new, new, torch.tensor([2, 1, 0]), cache=caches[0])
        np.testing.assert_array_equal(out, layer(*[new.numpy()] * 3, [2, 1, 0], cache=caches[1]))
    assert caches[0].lengths.tolist() == [11, 10, 9] and isinstance(caches[0].lengths, torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", [None, [1, 6], [[1, 6, 2], [0, 3, 6]], [0, 4]])
def test_projected(kind, lens, rng):
    module, _ = module_of(kind)
    queries, encoded = (torch.from_numpy(rng.standard_normal((2, n, 24))).float() for n in (3, 6))
    with torch.no_grad():
        kv = module.project(encoded, encoded, lens)
        whole = module(queries, encoded, encoded, lens)
        assert torch.equal(module(queries, kv), whole)
        assert torch.equal(module(queries.flip(0), kv.reorder([1, 0])), whole.flip(0))
        if lens == [0, 4]:
            with pytest.raises(ValueError, match="a length of 0 asks for the mean of all 6 values"):
                module(queries, module.project(encoded, encoded, [1, 4]), valid_lens=lens)
        encoded.zero_()  # the projection is its own, also where nothing projects
        assert torch.equal(module(queries, kv), whole)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dot"])
def test_one_changed_number_is_noticed(kind, rng):
    """However it is changed, and wherever it stands."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    names = [name for name in module.state_dict() if name.startswith(("W_k", "W_v"))]
    for name in names:
        weight = module.get_parameter(name)
        for change in ("data", "numpy", "copy_"):
            with torch.no_grad():
                cache, kv = module.new_cache(1, 4), module.project(x, x)
                module(x, x, x, cache=cache)
                at = int(rng.integers(weight.numel()))
                if change == "data":
                    weight.data.view(-1)[at] += 1
                elif change == "numpy":
                    weight.detach().numpy().reshape(-1)[at] += 1
                else:
                    weight.copy_(weight + 1e-3)
                with pytest.raises(ValueError, match="cache was filled by another W_k or W_v"):
                    module(x, x, x, cache=cache)
                with pytest.raises(ValueError, match="project again"):
                    module(x, kv)


def test_refusals(rng):
    module, _ = module_of("multi-head")
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    cache = module.new_cache(1, 3)
    with pytest.raises(RuntimeError, match="a cache leads no gradient back"):
        module(x, x, x, cache=cache)
    with torch.no_grad():
        kv = module.project(x, x)
        with pytest.raises(ValueError, match="evaluation"):
            module.train()(x, x, x, cache=cache)
        module.eval()
        with pytest.raises(TypeError, match="new_cache"):
            module(x, x, x, cache=layer_of("dot", np.float32).new_cache(1, 2))
        with pytest.raises(TypeError, match="together with the keys"):
            module(x, kv, x)
        module(x, x, x, cache=cache)
        with pytest.raises(ValueError, match="room for 3 steps"):
            module(x, x, x, cache=cache)
        with pytest.raises(mha_c.ShapeError, match="same new steps"):
            module(x, x[:, :1], x[:, :1], cache=cache)
        handle = module.W_k.register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="without hooks"):
            module(x, x, x, cache=cache)
        handle.remove()
        with pytest.raises(TypeError, match="values"):
            module(x, x)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert module(x[:, :1], x[:, :1], x[:, :1], cache=cache).shape == (1, 1, 24)  # nothing records gradients


def test_lazy_halves_and_copies(rng):
    lazy = ours.MultiHeadAttention(8, 2, 0.1).eval()
    x = torch.from_numpy(rng.standard_normal((1, 4, 6))).float()
    with torch.no_grad():
        cache = lazy.new_cache(1, 8)
        steps = [lazy(new, new, new, cache=cache) for new in x.split(1, dim=1)]
        whole = lazy(x, x, x, torch.arange(1, 5)[None])
        assert torch.equal(torch.cat(steps, 1), whole)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert other.lengths.tolist() == [4] and lazy(x, x, x, cache=other).shape == (1, 4, 8)
        half = copy.deepcopy(lazy).bfloat16()
        cache, kv = half.new_cache(1, 8), half.project(x.bfloat16(), x.bfloat16())
        steps = [half(new, new, new, cache=cache) for new in x.bfloat16().split(1, dim=1)]
        assert steps[0].dtype is torch.bfloat16
        # Inputs, weights and results have 8 bits; keys and values keep float32 here.
        assert (torch.cat(steps, 1).float() - whole).abs().max() < 0.05
        assert torch.equal(half(x.bfloat16(), kv), half(x.bfloat16(), x.bfloat16(), x.bfloat16()))


# --- What a module remembers: decoders that hand over all earlier steps each time -------------------------


@pytest.fixture
def used(monkeypatch):
    """How many rows went through W_k and W_v in calls that could go on from the one before."""
    from mha_c.torch._decoder import repeated_keys

    rows = []

    def counted(queries, keys, values, *options):
        rows.append(keys.shape[1])
        assert values.shape[1] == keys.shape[1] == options[-2]
        return layer_step(queries, keys, values, *options)

    layer_step = repeated_keys.layer_step
    monkeypatch.setattr(repeated_keys, "layer_step", counted)
    return rows


@pytest.fixture(autouse=True)
def small_calls_too(monkeypatch):
    monkeypatch.setattr("mha_c.torch._decoder.repeated_keys.LEAST", 0)


def without_memory(module, *args):
    fresh = copy.deepcopy(module)
    fresh._remembers = False
    return fresh(*args)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
def test_a_growing_sequence_and_an_encoder(batch, grad, rng):
    module, _ = module_of("multi-head with biases")
    cross, _ = module_of("multi-head with biases")
    x, encoded = (torch.from_numpy(rng.standard_normal((batch, n, 24))).float() for n in (70, 9))
    lens = torch.arange(batch) * 4 + 1
    with torch.set_grad_enabled(grad):
        for n in range(1, 71):
            args = x[:, n - 1 : n], x[:, :n], x[:, :n].clone(), None
            args = (args[0], args[1].clone(), args[2], None) if n % 2 else (args[0], args[1], args[1], None)
            out = module(*args)
            assert out.requires_grad == grad and torch.equal(out, without_memory(module, *args))
            assert torch.equal(module.attention_weights, module.attention.attention_weights.reshape(batch, 4, 1, n))
            args = x[:, n - 1 : n], encoded, encoded, lens
            assert torch.equal(cross(*args), without_memory(cross, *args))


def test_each_row_is_projected_once(used, rng):
    module, _ = module_of("multi-head")
    x = torch.from_numpy(rng.standard_normal((2, 70, 24))).float()
    with torch.no_grad():
        for n in range(1, 71):
            keys = x[:, :n].clone()
            module(x[:, n - 1 : n], keys, keys)
    assert used == [2] + [1] * 68  # the first call shows only where a sequence begins


def test_every_change_is_noticed(rng):
    """Of any earlier row, of any weight, of shapes: the fresh result, to the bit."""
    module, _ = module_of("multi-head with biases")
    x = torch.from_numpy(rng.standard_normal((1, 12, 24))).float()
    with torch.no_grad():
        for n in range(1, 9):
            module(x[:, n - 1 : n], x[:, :n], x[:, :n])
        for row in (1, 4, 7, 0):
            x[0, row, int(rng.integers(24))] += 1
            assert torch.equal(
                module(x[:, :1], x[:, :8], x[:, :8]), without_memory(module, x[:, :1], x[:, :8], x[:, :8])
            )
            module(x[:, :1], x[:, :8], x[:, :8])
        for parameter in module.parameters():
            at = int(rng.integers(parameter.numel()))
            parameter.data.view(-1)[at] += 0.5
            found = module(x[:, :1], x[:, :8], x[:, :8])
            assert torch.equal(found, without_memory(module, x[:, :1], x[:, :8], x[:, :8]))
            parameter.view(-1)[at] += 0.5  # counted by torch
        y = x + 1
        assert torch.equal(module(x[:, :1], x[:, :9], y[:, :9]), without_memory(module, x[:, :1], x[:, :9], y[:, :9]))
        module(x[:, :1], x[:, :9], x[:, :9])
        assert torch.equal(module(x[:, :1], x[:, :9], y[:, :9]), without_memory(module, x[:, :1], x[:, :9], y[:, :9]))
        assert torch.equal(module(x[:, :1], x[:, :3], x[:, :3]), without_memory(module, x[:, :1], x[:, :3], x[:, :3]))
        assert torch.equal(module(x[:, :1], x, x), without_memory(module, x[:, :1], x, x))
        two = x.repeat(2, 1, 1)
        assert torch.equal(module(two[:, :1], two, two), without_memory(module, two[:, :1], two, two))
        with pytest.raises(ValueError, match=r"keys|values"):
            module(x[:, :1], x, x[:, :5])
    assert copy.deepcopy(module).__dict__.get("_memory") is None
    assert pickle.loads(pickle.dumps(module)).__dict__.get("_memory") is None


def test_gradients_of_what_was_remembered(rng):
    module, _ = module_of("multi-head with biases", torch.float64)
    x = torch.from_numpy(rng.standard_normal((2, 6, 24))).requires_grad_()
    module(x[:, :1], x, x)
    out = module(x[:, :1], x, x)
    assert "Remembered" in type(out.grad_fn).__name__
    plain = copy.deepcopy(module)
    plain._remembers = False
    wanted = plain(x[:, :1], x, x)
    ours_ = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    theirs = torch.autograd.grad(wanted.square().sum(), [x, *plain.parameters()])
    for a, b in zip(ours_, theirs):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    out = module(x[:, :1], x, x)
    with torch.no_grad():
        module.W_k.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("version", needs.real_d2l.VERSIONS)
def test_the_books_decoder_uses_it(version, used, capsys):
    import book_models
    import mha_c.d2l

    d2l = needs.d2l(version)
    with mha_c.d2l.patch(d2l):
        encoder, decoder = (part.eval() for part in book_models.build(d2l, "transformer", 30, 30, 32))
    X, lens = torch.arange(10).reshape(1, 10), torch.tensor([7])

    def translate():
        state, token, found = decoder.init_state(encoder(X, lens), lens), torch.ones(1, 1, dtype=torch.int64), []
        for _ in range(12):
            scores, state = decoder(token, state)
            token = scores.argmax(2)
            found.append(scores)
        return torch.cat(found, 1)

    first = translate()
    # Two blocks: 10 encoder rows once (at the second step), 2 + 10 x 1 rows of the decoder's own.
    assert sum(used) == 2 * (10 + 2 + 10)
    for module in decoder.modules():
        if isinstance(module, ours.MultiHeadAttention):
            module._remembers = False
    again = translate()
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_a_small_call_is_not_remembered(monkeypatch):
    """Comparing its weights would take longer than projecting its rows."""
    monkeypatch.setattr("mha_c.torch._decoder.repeated_keys.LEAST", 24 * 50)
    module, _ = module_of("multi-head with biases")
    with torch.no_grad():
        for n in (49, 50):
            assert "_memory" not in module.__dict__
            module(torch.ones(1, 1, 24), torch.ones(1, n, 24), torch.ones(1, n, 24))
    assert "_memory" in module.__dict__


def held(module, keys, *after):
    """Bytes that a module holds more than before: three calls with one query, then what else is done to it."""
    def call(n):
        rows = keys[:, :n]
        with torch.no_grad():
            module(keys[:, :1], rows, rows)

    call(1)
    gc.collect()
    tracemalloc.start()
    try:
        for n in (keys.shape[1] - 1, keys.shape[1] - 1, keys.shape[1]):
            call(n)
        for step in after:
            step(module)
        module.attention._last = None
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_memory_is_as_large_as_what_it_remembers():
    module, _ = module_of("multi-head")
    keys = torch.randn(4, 500, 24)
    weights = 2 * 24 * 24 * 4
    room = 1 + 40 / 500  # some rows more, for the next tokens
    assert held(module, keys) <= 3 * room * keys.nbytes + weights  # keys, and their projections by W_k and W_v
    rows = keys[:, :20]
    with torch.no_grad():  # a shorter sequence that begins in the same way
        module(rows[:, :1], rows, rows)
    assert sum(x.nbytes for x in module._memory._inputs) <= 60 * 4 * 24 * 4


FORGETTING = {
    "train": lambda module: module.train(),
    "eval of the model around it": lambda module: torch.nn.Sequential(module).eval(),
    "load_state_dict": lambda module: module.load_state_dict(module.state_dict()),
    "load_state_dict around it": lambda module: torch.nn.Sequential(module).load_state_dict(
        torch.nn.Sequential(module).state_dict()
    ),
    "double": lambda module: torch.nn.Sequential(module).double(),
}


@pytest.mark.parametrize("name", FORGETTING)
def test_what_a_module_forgets(name):
    """Nothing but the parameters stays."""
    module, _ = module_of("multi-head")
    keys = torch.randn(4, 500, 24)
    assert held(module, keys, FORGETTING[name]) < keys.nbytes / 4


def test_threads_share_a_memory():
    """Several sequences decoded at once by one module: each gets what it would get alone."""
    module, _ = module_of("multi-head with biases")
    torch.manual_seed(0)
    sequences = [torch.randn(1, 40, 24) for _ in range(4)]
    for x in sequences[1:]:
        x[:, 0] = sequences[0][:, 0]  # so that they look like going on from one another
    with torch.no_grad():
        expected = [[without_memory(module, x[:, :1], x[:, :n], x[:, :n]) for n in range(1, 41)] for x in sequences]
    found = [[None] * 40 for _ in sequences]

    def decode(which):
        x = sequences[which]
        with torch.no_grad():
            for n in [*range(1, 41)] * 3:
                found[which][n - 1] = module(x[:, :1], x[:, :n], x[:, :n])

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_forward_mode_is_refused():
    module, _ = module_of("multi-head with biases")
    x = torch.ones(1, 1, 24)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode AD"):
        module(x, x, x, cache=module.new_cache(1, 4))


def matrices_compared(monkeypatch):
    """A list that gains an element whenever two matrices are compared, number by number."""
    from mha_c._decoder import caches

    def counted(a, b):
        if a is not b and np.ndim(a) == 2:
            compared.append(1)
        return same_array(a, b)

    compared, same_array = [], caches.same_array
    monkeypatch.setattr(caches, "same_array", counted)
    return compared


@pytest.mark.parametrize("kind", KINDS)
def test_frozen(kind, monkeypatch, rng):
    """The same bits; the weights of what is kept are looked at once, and again as soon as they are not frozen."""
    module, _ = module_of(kind)
    x = torch.from_numpy(rng.standard_normal((2, 6, 24))).float()
    compared = matrices_compared(monkeypatch)
    matrices = ["W_k", "W_v"] if "multi-head" in kind else ["W_k"] if kind == "additive" else []
    with torch.no_grad():
        whole, cache = module(x, x, x, torch.arange(1, 7).repeat(2, 1)), module.new_cache(2, 9)
        crossed, kv = module(x, x, x), module.project(x, x)
        compared.clear()
        for _ in range(2):
            cache.clear()
            with ours.frozen(module):
                for i, new in enumerate(x.split(1, dim=1)):
                    assert torch.equal(module(new, new, new, cache=cache)[:, 0], whole[:, i])
                    assert torch.equal(module(x, kv), crossed)
            assert len(compared) == len(matrices)  # those of kv; the cache was empty
            compared.clear()
        module(x[:, :1], x[:, :1], x[:, :1], cache=cache)
        assert len(compared) == len(matrices)
        if kind != "dot":
            module.W_k.weight.data.view(-1)[3] += 1
            with ours.frozen(module):
                with pytest.raises(ValueError, match="another W_k or W_v"):
                    module(x[:, :1], x[:, :1], x[:, :1], cache=cache)
                with pytest.raises(ValueError, match="another W_k or W_v"):
                    module(x, kv)


def test_what_is_kept_inside_frozen_shares_its_copies(rng):
    """Of the weights alone, and of those that were frozen; it outlives frozen, and pickling."""
    module, _ = module_of("multi-head with biases")
    x = torch.from_numpy(rng.standard_normal((2, 60, 24))).float()
    with torch.no_grad():
        plain = module.project(x, x), module(x, x, x)
        with ours.frozen(module):
            caches, kv = [module.new_cache(2, 60) for _ in range(2)], module.project(x, x)
            for cache in caches:
                module(x, x, x, cache=cache)
            for W_k, b_k, W_v, _ in (cache._weights for cache in caches):
                assert W_k is kv._weights[0] and W_v is kv._weights[2] and b_k is not kv._weights[1]
                assert not np.shares_memory(W_k, module.W_k.weight.detach().numpy())
            assert np.array_equal(kv._keys, plain[0]._keys) and np.array_equal(kv._values, plain[0]._values)
            assert torch.equal(module(x, kv), plain[1])
            again = pickle.loads(pickle.dumps(kv))
            assert torch.equal(module(x, again), plain[1])
        assert torch.equal(module(x, kv), plain[1])
        module.W_v.weight.data.view(-1)[-1] += 1
        for kept in (kv, again):
            with pytest.raises(ValueError, match="project again"):
                module(x, kept)
        caches.append(copy.deepcopy(caches[0]))
        for cache in caches:
            with pytest.raises(ValueError, match="cache was filled by another W_k or W_v"):
                module(x[:, :0], x[:, :0], x[:, :0], cache=cache)
        with ours.frozen(module):
            assert module.project(x, x)._weights[0] is not kv._weights[0]


def test_frozen_biases_are_looked_at(rng):
    """They are no part of what is frozen."""
    module, _ = module_of("multi-head with biases")
    x = torch.from_numpy(rng.standard_normal((1, 2, 24))).float()
    for name in ("W_k", "W_v"):
        with torch.no_grad(), ours.frozen(module):
            cache, kv = module.new_cache(1, 9), module.project(x, x)
            for _ in range(2):  # the second knows that the weights are frozen
                module(x, x, x, cache=cache)
                module(x, kv)
            getattr(module, name).bias[5] += 1
            with pytest.raises(ValueError, match="cache was filled by another W_k or W_v"):
                module(x, x, x, cache=cache)
            with pytest.raises(ValueError, match="project again"):
                module(x, kv)


@pytest.mark.parametrize("grad", [False, True])
def test_frozen_modules_remember_too(grad, used, monkeypatch, rng):
    """The same bits, packed weights are not looked at, biases at each call; not where gradients are recorded."""
    module, _ = module_of("multi-head with biases")
    x = torch.from_numpy(rng.standard_normal((2, 40, 24))).float()
    compared = matrices_compared(monkeypatch)
    with torch.set_grad_enabled(grad), ours.frozen(module):
        for n in range(1, 41):
            args = x[:, n - 1 : n], x[:, :n], x[:, :n]
            assert torch.equal(module(*args), without_memory(module, *args))
            if n == 30:
                with torch.no_grad():
                    module.W_v.bias[3] += 1
        assert used == [2] + [1] * 28 + [31] + [1] * 9
        assert len(compared) == (2 * 38 if grad else 0)  # at each call that goes on from another one
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"W_k\.weight"), ours.frozen(module):
        module(*args)
        module.W_k.weight.data.view(-1)[3] += 1
    with torch.no_grad():
        assert torch.equal(module(*args), without_memory(module, *args))
