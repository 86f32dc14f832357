"""At most one line of the package stands before an answer: a reader sees the own line that is wrong, not ours."""

import contextlib
import inspect
import traceback

import numpy as np
import pytest

import mha_c
import mha_c.d2l
import needs
from frames import X, called, frames_of_the_package, layer
from mha_c import functional as F
from mha_c import variants

OF_SHAPES = {
    "features": (X[..., :4], X, X),
    "items of lists": (X.tolist(), X[:1].tolist(), X.tolist()),
    "an axis": (X[0], X, X),
    "three lengths": (X, X, X, [1, 2, 3]),
    "lengths of two queries": (X, X, X, np.ones((2, 2), int)),
}


@pytest.mark.parametrize("arguments", OF_SHAPES.values(), ids=OF_SHAPES)
@pytest.mark.parametrize("state", ["sizes known", "sizes open", "training"])
def test_one_frame_of_the_package_stands_before_an_error_of_shapes(arguments, state):
    one = layer().train(state == "training")
    if state == "sizes open" and arguments[0].__class__ is np.ndarray and arguments[0].shape == X.shape:
        one = mha_c.MultiHeadAttention(8, 2, 0.1)
    with pytest.raises(mha_c.ShapeError) as caught:
        one(*arguments)
    assert len(frames_of_the_package(caught.value)) <= 1


LAYERS = {
    "sizes known": layer,
    "sizes open": lambda: mha_c.MultiHeadAttention(8, 2, 0.1),
    "training": lambda: layer().train(),
    "dot product": lambda: mha_c.DotProductAttention(0.1),
    "additive": lambda: mha_c.AdditiveAttention(8, 0.1),
}
OF_A_CALL = {
    "a text": lambda one: one(X, X, "x"),
    "words": lambda one: one(X, X, ["the", "cat"]),
    "float16": lambda one: one(X.astype(np.float16), X, X),
    "two types": lambda one: one(X, X.astype(np.float64), X),
    "a keyword": lambda one: one(X, X, X, mask=3),
    "no keys": lambda one: one(X),
    "no values": lambda one: one(X, X),
    "lengths of words": lambda one: one(X, X, X, "abc"),
    "lengths of NaN": lambda one: one(X, X, X, [np.nan, 2]),
    "a mask of bool": lambda one: one(X, X, X, np.ones(2, bool)),
    "training": lambda one: one(X, X, X, training="yes"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OF_A_CALL.values(), ids=OF_A_CALL)
@pytest.mark.parametrize("one", LAYERS.values(), ids=LAYERS)
def test_and_before_any_error_of_arguments(mistake, one):
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake(one())
    assert len(frames_of_the_package(caught.value)) == 1


def public(*modules):
    """{name: what users call}, of these modules; results, which are built by us alone, are left out."""
    found = {}
    for module in modules:
        for name in dir(module):
            one = getattr(module, name)
            built = isinstance(one, type) and (issubclass(one, (tuple, Exception)) or name in RESULTS)
            if callable(one) and not name.startswith("_") and not built:
                found[f"{module.__name__}.{name}"] = one
    return found


RESULTS = (
    "Answer Importance Laws LayerSteps Page Patterns ProjectedKeyValues Puzzle Steps Tiles "
    "AttentionDecoder"  # the last is a base
).split()
TAKES_NOTHING = {"get_num_threads", "show_config", "safe_globals", "unpatch"}


def wrong_calls_of(*modules):
    for name, one in public(*modules).items():
        kinds = [one.kind for one in inspect.signature(one).parameters.values()]
        takes = sum(
            kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
        )
        if name.rpartition(".")[2] not in TAKES_NOTHING:
            yield name, one, ["words"] * takes


def check_frames_of(name, one, words):
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        with one(*words) if name.endswith("frozen") else contextlib.nullcontext(one(*words)):
            pass
    ours = frames_of_the_package(caught.value)
    assert len(ours) <= (2 if name.endswith("frozen") else 1), f"{name}: {[frame.name for frame in ours]}"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_one_frame_stands_before_the_answer_of_everything_that_users_call():
    needs.module("matplotlib")
    calls = list(wrong_calls_of(mha_c, F, variants, mha_c.heads, mha_c.viz, mha_c.teach, mha_c.d2l))
    assert len(calls) > 45
    for name, one, words in calls:
        if name.startswith("mha_c.d2l.compare"):
            needs.module("torch")
        check_frames_of(name, one, words)


def test_of_everything_in_torch_too():
    needs.module("torch")
    import mha_c.torch

    calls = list(wrong_calls_of(mha_c.torch, mha_c.torch.functional, mha_c.torch.variants))
    assert len(calls) > 25
    for name, one, words in calls:
        check_frames_of(name, one, words)


OF_TORCH = {
    "a text": lambda mt, T: mt.DotProductAttention(0.1)(T, T, "x"),
    "lengths of words": lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T, T, T, "x"),
    "a keyword": lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T, T, T, vl=3),
    "arrays": lambda mt, T: mt.AdditiveAttention(8, 0.1)(X, X, X),
    "no keys": lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T),
    "training": lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T, T, T, training="x"),
    "keys of a function": lambda mt, T: mt.functional.dot_product_attention(T, T[:1], T),
    "a kernel": lambda mt, T: mt.KernelAttention("gaussian")(T, T[:1], T),
    "grouped": lambda mt, T: mt.GQAAttention(8, 4, 2)(T, T[:1], T),
    "a position": lambda mt, T: mt.PositionalEncoding(8, 0.0)(T, start="x"),
    "the keys of project": lambda mt, T: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.1).project(T, T[:1]),
    "a variant": lambda mt, T: mt.variants.SelfAttentionAISummer(8)(T[0]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OF_TORCH.values(), ids=OF_TORCH)
def test_calls_of_torch_modules_too(mistake):
    torch = needs.module("torch")
    import mha_c.torch

    with pytest.raises((TypeError, ValueError)) as caught:
        mistake(mha_c.torch, torch.ones(2, 3, 8))
    assert len(frames_of_the_package(caught.value)) == 1


def test_a_program_that_was_given_to_us_keeps_its_frames():
    def of_the_reader(one, batch):
        return one(batch, X[:1], X)

    with pytest.raises(mha_c.ShapeError) as caught:
        mha_c.heads.importance(layer(), X, loss=of_the_reader)
    assert "of_the_reader" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_an_error_that_no_check_made_keeps_its_frames(monkeypatch):
    class Odd:
        def __array__(self, *given, **named):
            raise ValueError("the reader's own")

    with pytest.raises(ValueError, match="the reader's own") as caught:
        called(X, X, Odd())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "__array__"

    monkeypatch.setattr("mha_c._layer.call.to_arrays", len)  # a bug of ours: no `raise`, but an operation says it
    with pytest.raises(TypeError, match=r"len\(\)") as caught:
        called(X, X, X)
    assert len(frames_of_the_package(caught.value)) > 1


@pytest.mark.parametrize("state", ["sizes known", "sizes open", "hooked"])
def test_and_in_torch(state):
    torch = needs.module("torch")
    import mha_c.torch

    T = torch.ones(2, 3, 8)
    one = mha_c.torch.MultiHeadAttention(*((8, 2, 0.1) if state == "sizes open" else (8, 8, 8, 8, 2, 0.1)))
    if state == "hooked":
        one.W_q.register_forward_hook(lambda *given: None)
    for arguments in (T[0], T, T), (T, T[:1], T), (T, T, T, [1, 2, 3]), (T[..., :3], T, T):
        with pytest.raises(mha_c.ShapeError) as caught:
            one(*arguments)
            one(T, T, T)  # the first call may have set the sizes
        assert len(frames_of_the_package(caught.value)) <= 1


OF_FUNCTIONS = {
    "a batch": lambda one, X: one.functional.dot_product_attention(X, X[:1], X),
    "a bias": lambda one, X: one.functional.dot_product_attention(X, X, X, bias=X[:, :1, :2]),
    "a text": lambda one, X: one.functional.dot_product_attention(X, X, "x"),
    "words for lengths": lambda one, X: one.functional.dot_product_attention(X, X, X, valid_lens="x"),
    "a corner": lambda one, X: one.functional.dot_product_attention(X, X, X, causal="left"),
    "a projection": lambda one, X: one.functional.additive_attention(X, X, X, X[0, 0], X[0], X[0]),
    "a part": lambda one, X: one.functional.merge(X, X[..., 0], X[:1], X[..., 0]),
    "a summary": lambda one, X: one.functional.weights_summary(X, X[:1]),
    "an odd pair": lambda one, X: one.functional.rotary(X[..., :3], X[0, :, 0]),
    "lengths": lambda one, X: one.masked_softmax(X, X[0, 0]),
    "lengths of steps": lambda one, X: one.sequence_mask(X[0], X[0, 0]),
    "heads": lambda one, X: one.transpose_qkv(X, 3),
    "heads of an output": lambda one, X: one.transpose_output(X, 3),
    "positions": lambda one, X: one.PositionalEncoding(8, 0.0)(X[..., :3]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OF_FUNCTIONS.values(), ids=OF_FUNCTIONS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_and_in_functions(mistake, library):
    if library == "numpy":
        one, given = mha_c, X
    else:
        given = needs.module("torch").ones(2, 3, 8)
        import mha_c.torch as one
    with pytest.raises((TypeError, ValueError)) as caught:
        mistake(one, given)
    assert len(frames_of_the_package(caught.value)) == 1 and caught.value.__context__ is None


@pytest.mark.parametrize("lengths", ["x", ["a", "b"], [[1], [2, 3]], {}])
def test_lengths_that_torch_cannot_read_are_refused_in_our_words(lengths):
    T = needs.module("torch").ones(2, 3, 8)
    import mha_c.torch

    with pytest.raises((TypeError, ValueError), match=r"^valid_lens ") as caught:
        mha_c.torch.MultiHeadAttention(8, 2, 0.1)(T, T, T, lengths)
    assert len(frames_of_the_package(caught.value)) == 1
