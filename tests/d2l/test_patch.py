"""mha_c.d2l: patching the real d2l of both generations, its own training loops on our classes."""

import copy
import io
import pickle
import sys

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
