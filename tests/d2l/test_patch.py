"""mha_c.d2l: patching the real d2l of both generations, its own training loops on our classes, compare."""

import copy
import io
import pickle
import sys
import warnings

import pytest
import torch

import book_models
import mha_c.d2l
import needs
from mha_c import torch as mt

pytestmark = pytest.mark.filterwarnings("ignore:.*grid_sample.*:UserWarning")

NAMES = ["MultiHeadAttention", "DotProductAttention", "AdditiveAttention"]
OURS = tuple(getattr(mt, name) for name in NAMES)


# --- Patching -------------------------------------------------------------------------------------------


def test_patch_and_unpatch(d2l, capsys):
    originals = [getattr(d2l, name) for name in NAMES]
    patched = mha_c.d2l.patch(d2l)
    assert capsys.readouterr().out == f"mha_c replaces {', '.join(NAMES)} in {d2l.__name__}\n"
    ours = [getattr(d2l, name) for name in NAMES]
    assert all(issubclass(kind, getattr(mt, name)) and kind.__name__ == name for kind, name in zip(ours, NAMES))
    assert all(kind.__bases__[2:] == own.__bases__[: own.__bases__[0] is not torch.nn.Module]
               for kind, own in zip(ours, originals))  # fmt: skip
    assert d2l.__name__ in repr(patched)
    mha_c.d2l.patch(d2l)  # a second time does nothing
    assert capsys.readouterr().out == ""
    mha_c.d2l.unpatch(d2l)
    assert [getattr(d2l, name) for name in NAMES] == originals
    mha_c.d2l.unpatch()
    with mha_c.d2l.patch(d2l):
        assert d2l.MultiHeadAttention is ours[0]  # the same as before
        with mha_c.d2l.patch(d2l):
            pass
        assert d2l.MultiHeadAttention is ours[0]  # the inner one changed nothing
    assert [getattr(d2l, name) for name in NAMES] == originals


def test_patch_after_a_reload(d2l, monkeypatch):
    mha_c.d2l.patch(d2l)
    mha_c.d2l.unpatch(d2l)
    before = {name: getattr(d2l, name) for name in NAMES}
    written_again = {name: type(name, kind.__bases__, dict(vars(kind))) for name, kind in before.items()}
    with mha_c.d2l.patch(d2l):
        d2l.__dict__.update(written_again)
        mha_c.d2l.patch(d2l)
        assert all(issubclass(getattr(d2l, name), kind) for name, kind in zip(NAMES, OURS))
    assert all(getattr(d2l, name) is kind for name, kind in written_again.items())
    d2l.__dict__.update(before)
    with mha_c.d2l.patch(d2l):
        assert all(issubclass(getattr(d2l, name), kind) for name, kind in zip(NAMES, OURS))


def test_patch_finds_what_is_imported(d2l, monkeypatch):
    monkeypatch.setitem(sys.modules, "d2l.torch", d2l)
    with mha_c.d2l.patch():
        assert issubclass(d2l.AdditiveAttention, mt.AdditiveAttention)
    with pytest.raises(RuntimeError, match="has no MultiHeadAttention"):
        mha_c.d2l.patch(sys)


def test_models_go_on_after_unpatch(d2l):
    eager = book_models.is_eager(d2l)
    with mha_c.d2l.patch(d2l):
        if eager:
            block = d2l.EncoderBlock(24, 24, 24, 24, [100, 24], 24, 48, 8, 0.5)
            bert = d2l.BERTEncoder(50, 16, [16], 16, 32, 2, 2, 0.2, key_size=16, query_size=16, value_size=16)
        else:
            block = d2l.TransformerEncoderBlock(24, 48, 8, 0.5)
            bert = d2l.BERTEncoder(50, 16, 32, 2, 2, 0.2)
    assert isinstance(block.attention, mt.MultiHeadAttention)
    X, lens = torch.ones(2, 100, 24), torch.tensor([3, 2])
    assert block(X, lens).shape == (2, 100, 24)
    ids, segments = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)
    assert bert(ids, segments, None).shape == (2, 8, 16)
    assert bert(ids, segments, torch.tensor([3.0, 8.0])).shape == (2, 8, 16)  # the book's lengths are float32
    keys = [key for key in bert.state_dict() if "attention" in key]
    assert keys[0].startswith("blks.0.attention.W_q.weight") or keys[0].startswith("blks.block0.attention.W_q.weight")


@pytest.mark.parametrize("kind", ["bahdanau", "transformer"])
def test_the_books_toys(d2l, kind):
    with mha_c.d2l.patch(d2l):
        encoder, decoder = book_models.build(d2l, kind, 10, 12, num_hiddens=16)
    X, lens = torch.zeros(4, 7, dtype=torch.long), torch.tensor([7, 3, 1, 2])
    state = decoder.init_state(encoder(X, lens), lens)
    output, state = decoder(X, state)
    assert output.shape == (4, 7, 12) and state[0].shape == (4, 7, 16)
    output.sum().backward()
    assert all(p.grad is not None for p in [*encoder.parameters(), *decoder.parameters()])
    copy.deepcopy(decoder)  # d2l's own cannot be copied now: its weights hold the graph
    if kind == "bahdanau":
        assert [tuple(w.shape) for w in decoder.attention_weights] == [(4, 1, 7)] * 7
    else:
        assert torch.cat(encoder.attention_weights, 0).reshape(2, 4, -1, 7).shape == (2, 4, 28, 7)
        assert [[tuple(w.shape) for w in part] for part in decoder.attention_weights] == [[(16, 7, 7)] * 2] * 2
        assert d2l.numpy(decoder.attention_weights[0][0]).shape == (16, 7, 7)


# --- The book's own training loops --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bahdanau", "transformer"])
def test_the_loss_curve_is_d2ls(d2l, kind, float64, capsys):
    """20 steps in float64, without dropout: the same losses to 1e-3 (here 1e-9), step by step."""
    curves = []
    for patched in (False, True):
        torch.manual_seed(0)
        with mha_c.d2l.patch(d2l) if patched else mha_c.d2l.Patched([]):
            model, *_, losses = book_models.train(d2l, kind, epochs=2 if book_models.is_eager(d2l) else 5)
        attentions = [part for part in model.modules() if type(part).__name__ in NAMES]
        assert attentions and all(isinstance(part, OURS) == patched for part in attentions)
        assert len(losses) >= 20
        curves.append(torch.tensor(losses[:20]))
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(curves[1], curves[0], rtol=1e-9, atol=0)
    assert curves[1][-1] < 0.7 * curves[1][0]


@pytest.mark.parametrize("version", needs.real_d2l.VERSIONS[:1])
def test_a_short_training_translates(version, capsys):
    """30 epochs of the Transformer with dropout, by 0.17's loop: sentences it has seen come out right."""
    d2l = needs.d2l(version)
    torch.manual_seed(0)  # with other numbers it may need more epochs
    with mha_c.d2l.patch(d2l):
        model, source, target, losses = book_models.train(d2l, "transformer", epochs=30, dropout=0.1)
        found = book_models.translations(d2l, model, source, target, n_sentences=8)
    scores = [d2l.bleu(translated, french, k=2) for _, french, translated in found]
    assert sum(losses[-10:]) < 0.1 * sum(losses[:10])
    assert sum(score == 1 for score in scores) >= 6, found


# --- compare -------------------------------------------------------------------------------------------------


def test_compare_leaves_a_model_as_it_is():
    """Gradients, modes of each part, running statistics."""
    attention, norm = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.nn.BatchNorm1d(5)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm, self.dropout = attention, norm, torch.nn.Dropout(0.5).eval()

        def forward(self, x):
            return self.dropout(self.norm(self.attention(x, x, x)[0]))

    net, x = Net(), torch.randn(4, 5, 8)
    net(x).square().sum().backward()
    before, grads = copy.deepcopy(net.state_dict()), [p.grad.clone() for p in net.parameters()]
    mha_c.d2l.compare(net, x, seconds=0.01, show=False)
    assert type(attention) is torch.nn.MultiheadAttention
    assert net.training and norm.training and not net.dropout.training
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), grads))


def test_compare(d2l, capsys):
    sizes = (24, 24, 24) if book_models.is_eager(d2l) else ()
    module, X = d2l.MultiHeadAttention(*sizes, 24, 8, 0.5), torch.randn(2, 10, 24)
    state = torch.get_rng_state()
    result = mha_c.d2l.compare(module, X, X, X, torch.tensor([3, 2]), seconds=0.05)
    shown = capsys.readouterr().out
    assert f"MultiHeadAttention on {result['processor']}, " in shown and "largest difference" in shown
    low, high = result["forward_range"]
    assert f"{result['forward_ratio']:.2f} times as fast ({low:.2f} to {high:.2f})" in shown and 0 < low <= high
    assert result["largest_difference"] < 1e-6
    assert result["forward_ratio"] == result["forward_us"] / result["forward_ours_us"] > 0
    assert result["training_ratio"] == result["training_us"] / result["training_ours_us"] > 0
    assert module.training and type(module).__module__ == d2l.__name__
    assert all(p.grad is None for p in module.parameters())
    torch.set_rng_state(state)
    encoder, _ = book_models.build(d2l, "transformer", 20, 20)
    ids, lens = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
    assert mha_c.d2l.compare(encoder, ids, lens, seconds=0.05, show=False)["largest_difference"] < 1e-5
    with pytest.raises(ValueError, match="no attention module"):
        mha_c.d2l.compare(torch.nn.Linear(3, 3), torch.ones(3), show=False)
    with torch.no_grad():  # backward passes are timed even so
        result = mha_c.d2l.compare(module, X, X, X, torch.tensor([3, 2]), seconds=0.05, show=False)
    assert result["training_us"] > 1.2 * result["forward_us"]


@pytest.mark.filterwarnings("error:convert")
def test_compare_takes_no_model_that_has_ours(d2l):
    with mha_c.d2l.patch(d2l):
        patched, _ = book_models.build(d2l, "transformer", 20, 20)
    inputs = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
    for model in (patched, mt.convert(patched), torch.nn.Sequential(mt.MultiHeadAttention(8, 2, 0.0))):
        with pytest.raises(ValueError, match=r"attention is mha_c's|0 is mha_c's"):
            mha_c.d2l.compare(model, *inputs)


def test_convert(d2l):
    with torch.no_grad():
        encoder, decoder = book_models.build(d2l, "transformer", 20, 20)
        ids, lens = torch.randint(0, 20, (3, 6)), torch.tensor([3, 2, 6])
        expected, weights = encoder(ids, lens), encoder.attention_weights
        before = list(encoder.parameters())
        assert mt.convert(encoder) is encoder
        assert type(encoder.blks[0].attention) is mt.MultiHeadAttention
        assert [id(p) for p in encoder.parameters()] == [id(p) for p in before]
        torch.testing.assert_close(encoder(ids, lens), expected)
        for found, old in zip(encoder.attention_weights, weights):
            torch.testing.assert_close(found + 0, old)
        encoder, decoder = book_models.build(d2l, "bahdanau", 20, 20)
        state = decoder.init_state(encoder(ids), lens)
        expected = decoder(ids, state)[0]
        torch.testing.assert_close(mt.convert(decoder)(ids, state)[0], expected)
        assert type(decoder.attention) is mt.AdditiveAttention
    single = d2l.DotProductAttention(0.3)
    single.layer, single.attention_weights = 7, torch.ones(1, 2, 3)
    assert type(mt.convert(single)) is mt.DotProductAttention and single.dropout.p == 0.3
    assert single.layer == 7 and not hasattr(single, "attention_weights") and not hasattr(single, "board")
    lazy = mt.convert(d2l.MultiHeadAttention(*((8, 8, 8) if book_models.is_eager(d2l) else ()), 8, 2, 0.0))
    X = torch.ones(2, 3, 8)
    lazy(X, X, X).sum().backward()
    assert type(lazy.W_q) is torch.nn.Linear and repr(lazy).startswith("MultiHeadAttention(\n  (attention)")


def notebook_class():
    """A class as a notebook defines it: the book's text over two lines that exercises change."""

    class DotProductAttention(torch.nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = torch.nn.Dropout(dropout)

        def forward(self, queries, keys, values, valid_lens=None):
            scores = torch.bmm(queries, keys.transpose(1, 2)) / queries.shape[-1] ** 0.5
            self.attention_weights = masked(self.changed(scores), valid_lens)
            return self.mixed(self.attention_weights, values)

        changed = staticmethod(lambda scores: scores)

        def mixed(self, weights, values):
            return torch.bmm(self.dropout(weights), values)

    def masked(scores, lens):
        if lens is None:
            return torch.softmax(scores, -1)
        lens = lens[:, None] if lens.dim() == 1 else lens
        hidden = torch.arange(scores.shape[-1]) >= lens[..., None]
        return torch.softmax(scores.masked_fill(hidden, -1e6), -1)

    own = {"forward": DotProductAttention.forward}
    return type("DotProductAttention", (DotProductAttention,), own)


CHANGES = {  # a line of the class, as an exercise changes it
    "a window": ("changed", staticmethod(lambda scores: scores + torch.full(scores.shape[-2:], -1e6).triu(9))),
    "no scale": ("changed", staticmethod(lambda scores: scores * 2)),
    "dropout of the result": ("mixed", lambda self, weights, values: self.dropout(weights @ values)),
    "no dropout": ("mixed", lambda self, weights, values: weights @ values),
    "more in training": ("mixed", lambda self, weights, values: self.dropout(weights) @ values * (1 + self.training)),
    "no gradient": ("mixed", lambda self, weights, values: self.dropout(weights.detach()) @ values),
}


WORDS = {
    "a window": "computes something other than an attention of the book",
    "no scale": "differs: scores are divided by 2, not by sqrt(d)|computes something other",
    "dropout of the result": "dropout drops the output, not the attention weights",
    "no dropout": "dropout is not used: no attention weights are dropped",
    "more in training": "it computes something else in training",
    "no gradient": "differs: its results are right, and their gradients are not",
}


@pytest.mark.parametrize("change", CHANGES)
def test_convert_leaves_what_an_exercise_changed(change):
    """A class that has a name of d2l's and computes something else."""
    kind = notebook_class()
    setattr(kind.__base__, *CHANGES[change])
    model, x = torch.nn.Sequential(kind(0.1)), torch.randn(2, 4, 8)
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=f"left as they were: 0 .*DotProductAttention.* {WORDS[change]}"):
        mt.convert(model)
    assert type(model[0]) is kind and torch.equal(state, torch.get_rng_state())
    assert not hasattr(model[0], "attention_weights") and model[0].training
    model[0](x, x, x)


def test_convert_compares_formulas_not_a_models_numbers(d2l):
    """Where W_o starts with zeros, every formula gives zeros."""

    def forward(self, queries, keys, values, valid_lens):
        return 2 * d2l.MultiHeadAttention.forward(self, queries, keys, values, valid_lens)

    sizes = (8, 8, 8) if book_models.is_eager(d2l) else ()
    kinds = [type("MultiHeadAttention", (d2l.MultiHeadAttention,), {"forward": forward}), d2l.MultiHeadAttention]
    x = torch.randn(2, 4, 8)
    for kind, expected in zip(kinds, (kinds[0], mt.MultiHeadAttention)):
        module = kind(*sizes, 8, 2, 0.0)
        module(x, x, x, None)
        torch.nn.init.zeros_(module.W_o.weight)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            mt.convert(module)
        assert type(module) is expected and len(told) == (expected is kind), kind
        assert not module.W_o.weight.any()


def test_convert_knows_the_books_text():
    kind = notebook_class()
    module, x = kind(0.1), torch.randn(2, 4, 8)
    module(x, x, x)
    weights = module.attention_weights
    assert mt.convert(module) is module and isinstance(module, kind) and mha_c.explain(module, x, x, x)
    assert module.training and module.dropout.p == 0.1 and module.attention_weights is weights
    kind.__base__.changed = staticmethod(lambda scores: scores + torch.full(scores.shape[-2:], -1e6).triu(1))
    causal = mt.convert(kind(0.1))
    assert mha_c.explain(causal, x, x, x).as_dict()["way"] == "core"


def test_convert_in_other_types_and_after_training(d2l):
    sizes = (8, 8, 8) if book_models.is_eager(d2l) else ()
    for dtype in (torch.float64, torch.bfloat16):
        module, x = d2l.MultiHeadAttention(*sizes, 8, 2, 0.1), torch.randn(2, 4, 8, dtype=dtype)
        module.to(dtype)
        module(x, x, x, None).sum().backward()
        before = [(x, x.clone(), x.grad.clone()) for x in module.parameters()]
        assert type(mt.convert(module)) is type(mt.convert(module.eval())) is mt.MultiHeadAttention
        assert type(module.attention) is mt.DotProductAttention
        for own, (x, numbers, grad) in zip(module.parameters(), before):
            assert own is x and torch.equal(x, numbers) and torch.equal(x.grad, grad)


# --- d2l's own classes while ours stand in their place -------------------------------------------------------------


def own_classes(d2l):
    """Each of d2l's classes, a subclass of one, and arguments."""

    class Doubled(d2l.MultiHeadAttention):
        def forward(self, *arguments):
            return 2 * super().forward(*arguments)

    sizes = (8, 8, 8) if book_models.is_eager(d2l) else ()
    return [
        (d2l.MultiHeadAttention, (*sizes, 8, 2, 0.0)), (d2l.AdditiveAttention, (*sizes[:2], 6, 0.0)),
        (d2l.DotProductAttention, (0.0,)), (Doubled, (*sizes, 8, 2, 0.0)),
    ]  # fmt: skip


def test_names_taken_before_and_subclasses(d2l):
    classes, x, lens = own_classes(d2l), torch.randn(2, 3, 8), torch.tensor([2, 3])
    outcomes = []
    for patched in (False, True, False):
        with mha_c.d2l.patch(d2l) if patched else mha_c.d2l.Patched([]):
            for kind, arguments in classes:
                torch.manual_seed(0)
                module = kind(*arguments)
                assert type(module) is kind
                outcomes.append(module(x, x, x, lens))
                module.attention = module.attention_weights = None
                twin = copy.copy(module)
                assert type(copy.deepcopy(module)) is type(twin) is kind and vars(twin).keys() == vars(module).keys()
    third = len(outcomes) // 3
    for plain, while_patched, after in zip(*(outcomes[i * third : (i + 1) * third] for i in range(3))):
        torch.testing.assert_close(while_patched, plain)
        assert torch.equal(after, plain)


def test_models_saved_whole(d2l):
    """A file names a class; loading it makes what d2l has under that name then."""
    x, lens = torch.randn(2, 3, 8), torch.tensor([2, 3])
    for kind, arguments in own_classes(d2l)[:3]:
        theirs, name = kind(*arguments), kind.__name__
        expected = theirs(x, x, x, lens)
        for part in theirs.modules():  # d2l's own weights hold the graph, which no file can
            if hasattr(part, "attention_weights"):
                part.attention_weights = None
        before = pickle.dumps(theirs)
        with mha_c.d2l.patch(d2l):
            files = [before, pickle.dumps(theirs), pickle.dumps(theirs, protocol=2)]  # torch.save has protocol 2
            inside = [pickle.loads(file) for file in files]
            file = io.BytesIO()
            torch.save(theirs, file)
        after = [pickle.loads(file) for file in files]
        after.append(torch.load(io.BytesIO(file.getvalue()), **needs.whole_modules()))
        assert all(isinstance(module, getattr(mt, name)) for module in inside)
        assert all(type(module) is kind for module in after)
        for module in inside + after:
            torch.testing.assert_close(module(x, x, x, lens), expected)
        ours = pickle.dumps(inside[0])
        assert b"mha_c" not in ours and type(pickle.loads(ours)) is kind  # it loads where there is no mha_c
        torch.testing.assert_close(pickle.loads(ours)(x, x, x, lens), expected)
        assert type(copy.deepcopy(inside[0])) is type(copy.copy(inside[0])) is type(inside[0])
        with mha_c.d2l.patch(d2l):
            again = pickle.loads(ours)
            assert type(again) is type(inside[0]) and b"mha_c" not in pickle.dumps(again)
            torch.testing.assert_close(again(x, x, x, lens), expected)


def test_a_file_of_a_patched_program_needs_no_mha_c(d2l):
    theirs = d2l.DotProductAttention(0.0)
    with mha_c.d2l.patch(d2l):
        assert b"mha_c" not in pickle.dumps(theirs)
