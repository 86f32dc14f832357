"""What a notebook does around d2l's classes works under patch() as it does without: both generations of d2l.

Each test is a few lines that a reader of the book would write, run on d2l's own classes and on ours in their place.
"""

import contextlib
import copy
import sys
import types

import pytest
import torch

import book_models
import mha_c.d2l
import mha_c.torch
import needs
from notebook import LENS, additive, equal_under_patch, multi_head, same_under_patch, wave

# --- Names of d2l that a notebook replaces -------------------------------------------------------------------


@same_under_patch
def test_a_scoring_function_of_ones_own_in_the_books_transformer(d2l, monkeypatch):
    class Mine(torch.nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = torch.nn.Dropout(dropout)

        def forward(self, queries, keys, values, valid_lens=None):
            away = (queries.unsqueeze(2) - keys.unsqueeze(1)).square().sum(-1)
            self.attention_weights = d2l.masked_softmax(-away, valid_lens)
            return self.dropout(self.attention_weights) @ values

    with monkeypatch.context() as patch:
        patch.setattr(d2l, "DotProductAttention", Mine)
        encoder, _ = book_models.build(d2l, "transformer", 20, 20)
    assert sum(type(part) is Mine for part in encoder.modules()) == 2
    out = encoder(torch.arange(14).reshape(2, 7), torch.tensor(LENS))
    return out, *encoder.attention_weights


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["masked_softmax", "sequence_mask", "transpose_qkv", "transpose_output"])
def test_functions_of_d2l_that_are_replaced(d2l, name, when, monkeypatch):
    """Also in the middle of a program: what is called is what stands there."""
    if not hasattr(d2l, name):
        pytest.skip(f"1.0 has no {name}")
    original = getattr(d2l, name)

    def mine(X, *args, **named):
        found = original(X, *args, **named)
        return found.flip(-1) if "transpose" in name else found.pow(2) if name == "masked_softmax" else found * 0.5

    def notebook(d2l):
        x, lens, found = wave(2, 4, 8), torch.tensor(LENS), []
        modules = multi_head(d2l), additive(d2l), d2l.DotProductAttention(0.0)
        for replaced in (False, True, False):
            with monkeypatch.context() as patch:
                if replaced:
                    patch.setattr(d2l, name, mine)
                for m in modules:
                    found += [m(x, x, x, lens), getattr(m, "attention", m).attention_weights]
        return found

    equal_under_patch(d2l, notebook)
    if when == "before":
        monkeypatch.setattr(d2l, name, mine)
        equal_under_patch(d2l, lambda d2l: [multi_head(d2l)(*[wave(2, 4, 8)] * 3, torch.tensor(LENS))])


def test_functions_replaced_under_a_compiler(d2l, monkeypatch):
    with mha_c.d2l.patch(d2l):
        m, x, original = multi_head(d2l).eval(), wave(2, 4, 8), d2l.masked_softmax
        compiled = torch.compile(m, backend="eager")
        with torch.no_grad():
            plain = m(x, x, x, None)
            torch.testing.assert_close(compiled(x, x, x, None), plain)
            monkeypatch.setattr(d2l, "masked_softmax", lambda X, lens: original(X, lens) ** 2)
            torch.testing.assert_close(compiled(x, x, x, None), m(x, x, x, None))
            assert (m(x, x, x, None) - plain).abs().max() > 1e-3


def test_what_a_notebook_put_into_d2l_before_stays(d2l, monkeypatch, capsys):
    class Mine(torch.nn.Module):
        pass

    theirs = d2l.MultiHeadAttention
    monkeypatch.setattr(d2l, "DotProductAttention", lambda dropout: Mine())
    with mha_c.d2l.patch(d2l):
        assert capsys.readouterr().out.splitlines()[:2] == [
            f"mha_c replaces MultiHeadAttention, AdditiveAttention in {d2l.__name__}",
            "it leaves DotProductAttention, which is not d2l's own",
        ]
        assert type(multi_head(d2l).attention) is Mine
        d2l.MultiHeadAttention = Mine
    assert d2l.MultiHeadAttention is Mine  # put there while ours were in: not ours to take back
    d2l.MultiHeadAttention = theirs


def test_classes_taken_while_patched_go_on(d2l):
    with mha_c.d2l.patch(d2l):
        kind, dot = d2l.MultiHeadAttention, d2l.DotProductAttention
    sizes = (8,) * 3 if book_models.is_eager(d2l) else ()
    assert type(kind(*sizes, 8, 2, 0.0).attention) is dot and dot is not d2l.DotProductAttention


@pytest.mark.parametrize("name", ["transpose_qkv", "transpose_output"])
@same_under_patch
def test_a_method_put_into_the_object(d2l, name):
    if book_models.is_eager(d2l):
        pytest.skip("0.17 has functions")
    m, x = multi_head(d2l), wave(2, 4, 8)
    before, old = m(x, x, x, None), getattr(m, name)
    setattr(m, name, lambda X: old(X).flip(-1))
    after = m(x, x, x, None)
    assert (after - before).abs().max() > 1e-3
    return before, after


# --- What d2l's constructors and bases give -----------------------------------------------------------------


def test_an_attention_is_a_module_of_d2l():
    d2l = needs.d2l("1.0.3")

    def notebook(d2l):
        class Mine(d2l.MultiHeadAttention):
            def __init__(self, num_hiddens, num_heads, dropout, lr=0.1):
                super().__init__(num_hiddens, num_heads, dropout)
                self.save_hyperparameters()

            def loss(self, y_hat, y):
                return (y_hat - y).square().mean()

        m, x = Mine(8, 2, 0.0, lr=0.3), wave(2, 4, 8)
        m.plot = lambda *args, **named: None
        assert isinstance(m, d2l.Module) and isinstance(multi_head(d2l), d2l.Module)
        assert m.hparams == {"num_hiddens": 8, "num_heads": 2, "dropout": 0.0, "lr": 0.3} and m.board is not None
        m(x, x, x, torch.tensor(LENS))
        optimizer = m.configure_optimizers()
        m.training_step((x, x, x, torch.tensor(LENS), 0.5)).backward()
        optimizer.step()
        with torch.no_grad():  # d2l's own cannot be copied while its attention weights have a graph
            m(x, x, x, None)
        twin = copy.deepcopy(m)
        assert isinstance(twin, d2l.Module) and twin.lr == 0.3
        return m(x, x, x, torch.tensor(LENS)), *twin.parameters()

    equal_under_patch(d2l, notebook)
    assert not isinstance(multi_head(d2l), mha_c.torch.MultiHeadAttention)


def test_bias_as_a_number(d2l):
    def notebook(d2l):
        sizes, x = (8,) * 3 if book_models.is_eager(d2l) else (), wave(2, 4, 8)
        modules = [d2l.MultiHeadAttention(*sizes, 8, 2, 0.0, bias) for bias in (0, 1, True)]
        assert [m.W_o.bias is not None for m in modules] == [False, True, True]
        return [m(x, x, x, None) for m in modules]

    equal_under_patch(d2l, notebook)
    with mha_c.d2l.patch(d2l), pytest.raises(TypeError, match="bias must be True or False"):
        d2l.MultiHeadAttention(*((8,) * 3 if book_models.is_eager(d2l) else ()), 8, 2, 0.0, 2)


# --- Names taken before, d2l imported later ------------------------------------------------------------------


def test_names_taken_before_are_listed(d2l, monkeypatch, capsys):
    notebook, library = sys.modules["__main__"], types.ModuleType("my_models")
    monkeypatch.setitem(sys.modules, "my_models", library)
    monkeypatch.setattr(notebook, "MHA", d2l.MultiHeadAttention, raising=False)
    monkeypatch.setattr(notebook, "DotProductAttention", d2l.DotProductAttention, raising=False)
    library.MultiHeadAttention = d2l.MultiHeadAttention
    monkeypatch.setitem(sys.modules, d2l.__name__, d2l)
    with mha_c.d2l.patch(d2l):
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not patched")]
        assert [line.partition(";")[0] for line in lines] == [
            f"not patched: {name} was imported before patch()"
            for name in ("MHA in __main__", "DotProductAttention in __main__", "MultiHeadAttention in my_models")
        ]
        for line in lines:
            exec(line.partition("import it again: ")[2], vars(notebook))
        assert notebook.MHA is d2l.MultiHeadAttention is library.MultiHeadAttention
        assert notebook.DotProductAttention is d2l.DotProductAttention
        mha_c.d2l.unpatch()
        mha_c.d2l.patch(d2l)


@pytest.mark.parametrize("version", needs.real_d2l.VERSIONS)
@pytest.mark.parametrize("way", ["patch", "with", "unpatch"])
def test_patch_before_d2l_is_imported(version, way, monkeypatch, capsys):
    needs.d2l(version)
    for name in ("d2l", "d2l.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(needs.real_d2l.source(version).parents[1])
    patched = mha_c.d2l.patch()
    assert capsys.readouterr().out.startswith("mha_c will replace the attention classes of d2l.torch once")
    mha_c.d2l.patch()  # a second time changes nothing
    if way == "unpatch":
        mha_c.d2l.unpatch()
    with needs.real_d2l.stand_ins(), patched if way == "with" else contextlib.nullcontext():
        from d2l import torch as d2l

        own = sys.modules["d2l.torch"].MultiHeadAttention.__mro__
        assert (mha_c.torch.MultiHeadAttention in own) == (way != "unpatch")
        if way != "unpatch":
            x = wave(2, 4, 8)
            assert multi_head(d2l)(x, x, x, torch.tensor(LENS)).shape == (2, 4, 8)
    mha_c.d2l.unpatch()
    assert not issubclass(d2l.MultiHeadAttention, mha_c.torch.MultiHeadAttention)
    assert not any(type(finder).__module__.startswith("mha_c") for finder in sys.meta_path)
    for name in ("d2l", "d2l.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_patch_tells_of_classes_that_the_notebook_has_typed(d2l, monkeypatch, capsys):
    main = sys.modules["__main__"]
    for name in ("MultiHeadAttention", "DotProductAttention"):
        monkeypatch.setattr(main, name, type(name, (torch.nn.Module,), {"__module__": "__main__"}), raising=False)
    with mha_c.d2l.patch(d2l):
        shown = capsys.readouterr().out
    line = "MultiHeadAttention, DotProductAttention of this notebook: mha_c.torch.convert(model) makes them fast, too"
    assert line in shown.splitlines()
