"""Mistakes of the first hour, each with words of the answer: the argument that is wrong, and what to write."""

import re

import numpy as np
import pytest

import mha_c
import mha_c.d2l
import needs
from frames import X, called, frames_of_the_package, layer
from mha_c import functional as F
from mha_c import variants

LONG = np.ones((2, 6, 8), np.float32)


def attend(**named):
    return F.dot_product_attention(X, X, X, **named)


def first(state):
    return {**state, "W_q.weight": np.ones((3, 3))}


# what was written: (the call, the words of the answer, in order)
NUMPY = {
    # --- constructors
    "MultiHeadAttention(100, 5)": (lambda: mha_c.MultiHeadAttention(100, 5), "is missing dropout; call it"),
    "MultiHeadAttention(100)": (lambda: mha_c.MultiHeadAttention(100), "is missing num_heads and dropout"),
    "MultiHeadAttention()": (lambda: mha_c.MultiHeadAttention(), "is missing num_hiddens, num_heads and dropout"),
    "sizes without dropout": (
        lambda: mha_c.MultiHeadAttention(key_size=8, query_size=8, value_size=8, num_hiddens=8, num_heads=2),
        "is missing dropout",
    ),
    "heads before hiddens": (lambda: mha_c.MultiHeadAttention(5, 100, 0.5), r"num_hiddens \(5\).*swapped"),
    "heads that do not divide": (
        lambda: mha_c.MultiHeadAttention(100, 7, 0.5), r"\(100\).*num_heads \(7\): take 5 or 10 heads"
    ),
    "more heads than there can be": (lambda: mha_c.MultiHeadAttention(8, 9, 0.5), r"num_heads \(9\): take 8 heads"),
    "a size too few": (lambda: mha_c.MultiHeadAttention(8, 8, 8, 2, 0.5), "is missing a size.*looks like dropout"),
    "no heads": (lambda: mha_c.MultiHeadAttention(100, 0, 0.5), "num_heads must be.*got 0"),
    "a float as a size": (lambda: mha_c.MultiHeadAttention(100.0, 5, 0.5), "num_hiddens must be.*got 100.0.*write 100"),
    "a text as a size": (lambda: mha_c.MultiHeadAttention("100", 5, 0.5), "num_hiddens must be.*got '100'"),
    "dropout as the bias": (lambda: mha_c.MultiHeadAttention(100, 100, 5, 0.5), "the bias; call it"),
    "num_head=": (lambda: mha_c.MultiHeadAttention(num_hiddens=8, num_head=2, dropout=0.1), "mean num_heads"),
    "embed_dim=": (lambda: mha_c.MultiHeadAttention(embed_dim=8, num_heads=2, dropout=0.1), "mean num_hiddens"),
    "d_model=": (lambda: mha_c.MultiHeadAttention(d_model=8, num_heads=2, dropout=0.1), "mean num_hiddens"),
    "n_heads=": (lambda: mha_c.MultiHeadAttention(num_hiddens=8, n_heads=2, dropout=0.1), "mean num_heads"),
    "dropout_p=": (lambda: mha_c.MultiHeadAttention(8, 2, dropout_p=0.1), "mean dropout"),
    "kdim=": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, kdim=8), "mean key_size"),
    "an unknown keyword": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, colour=8), "'colour'.*call it in one"),
    "bias=3": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, 3), "bias must be True or False, got 3"),
    "bias= and use_bias=": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, bias=True, use_bias=True), "give one"),
    "dropout of 2": (lambda: mha_c.DotProductAttention(2), "dropout must be between 0 and 1, got 2"),
    "dropout in percent": (lambda: mha_c.MultiHeadAttention(8, 2, 50), "dropout must be between 0 and 1, got 50"),
    "no dropout": (lambda: mha_c.DotProductAttention(), "dropout"),
    "AdditiveAttention(8)": (lambda: mha_c.AdditiveAttention(8), "is missing dropout"),
    "three sizes": (lambda: mha_c.AdditiveAttention(8, 8, 0.1), "AdditiveAttention.*is missing a size"),
    "dtype of whole numbers": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, dtype=int), "dtype must be float32"),
    "dtype of 16 bits": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, dtype="float16"), "dtype must be float32"),
    "rng as text": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, rng="0"), "rng must be"),
    "an old RandomState": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, rng=np.random.RandomState(0)), r"default_rng\("),
    "empty_rows of another kind": (lambda: mha_c.DotProductAttention(0.1, empty_rows="nan"), "'uniform' or 'zero'"),
    # --- calls
    "lengths in the place of keys": (lambda: called(X, [3, 3], X, X), "keys looks like lengths.*the order is"),
    "other features than at first": (lambda: called(X[..., :4], X, X), "W_q expects 8.*make a new one"),
    "layer(X)": (lambda: called(X), r"keys, values\.  For self-attention write layer\(X, X, X\)"),
    "layer(X, X)": (lambda: called(X, X), "missing or None: values"),
    "None for keys": (lambda: called(X, None, X), "missing or None: keys|keys must be an array"),
    "one item without its axis": (lambda: called(X[0], X[0], X[0]), r"queries has shape \(3, 8\).*queries\[None\]"),
    "four axes": (lambda: called(X[None], X[None], X[None]), "queries has shape.*rank 4.*expected rank 3"),
    "other features": (lambda: called(X[..., :4], X, X), "queries has 4 features.*W_q expects 8"),
    "other items": (lambda: called(X, X[:1], X[:1]), "keys has batch size 1.*queries has 2"),
    "other keys than values": (lambda: called(X, X, LONG), "values has 6 keys, but keys has 3"),
    "lists of whole numbers": (lambda: called([[[1] * 8]] * 2, X, X), r"queries.*np.array\(queries, np.float32\)"),
    "an array of whole numbers": (lambda: called(X.astype(int), X, X), r"queries.*np.asarray\(queries, np.float32\)"),
    "two types": (lambda: called(X, X.astype(float), X), r"keys has dtype float64.*keys.astype\(np.float32\)"),
    "complex numbers": (lambda: called(X + 1j, X, X), "queries has dtype complex.*expected float32"),
    "a text": (lambda: called("the cat", X, X), r"queries must.*got words: .*a vector for each word.*view\(tokens="),
    "words": (lambda: called("the cat sat".split(), X, X), r"queries must.*got words: .*view\(tokens="),
    "a ragged list": (lambda: called([[[1.0, 2.0], [1.0]]], X, X), "queries is.*rows differ in.*pad.*valid_lens"),
    "a masked array": (lambda: called(np.ma.masked_less(X, 0), X, X), r"queries is a masked array.*filled.*valid_lens"),
    "lengths as the third argument": (lambda: called(X, X, np.array([1, 2]), X), "order is MultiHeadAttention"),
    "three lengths for two items": (lambda: called(X, X, X, [1, 2, 3]), r"valid_lens.*\(3,\).*\(2,\)"),
    "one length": (lambda: called(X, X, X, 3), r"valid_lens.*a length for each item.*write \[3\] \* 2"),
    "a mask as lengths": (lambda: called(X, X, X, [True, False]), r"valid_lens has dtype bool.*mask.sum\(-1\)"),
    "a mask of all pairs": (lambda: called(X, X, X, np.ones((2, 3, 3), bool)), "valid_lens has dtype bool.*keep_mask"),
    "a length of NaN": (lambda: called(X, X, X, [1.0, np.nan]), "valid_lens must be finite.*position 1"),
    "texts as lengths": (lambda: called(X, X, X, ["a", "b"]), "valid_lens must.*got words"),
    "mask=": (lambda: called(X, X, X, mask=np.ones((3, 3))), r"keep_mask=mask\[:, None, None\].*mask.sum\(-1\)"),
    "attn_mask=": (lambda: called(X, X, X, attn_mask=np.ones((3, 3))), "keep_mask=attn_mask.*valid_lens"),
    "key_padding_mask=": (lambda: called(X, X, X, key_padding_mask=np.ones((2, 3))), r"valid_lens=\(~key_padding"),
    "is_causal=": (lambda: called(X, X, X, is_causal=True), "write causal=True$"),
    "context=": (lambda: called(X, context=X, values=X), "did you mean keys"),
    "dim=": (lambda: mha_c.MultiHeadAttention(dim=8, num_heads=2, dropout=0.0), "did you mean num_hiddens"),
    "valid_len=": (lambda: called(X, X, X, valid_len=[1, 2]), "did you mean valid_lens"),
    "need_weights=": (lambda: called(X, X, X, need_weights=True), r"layer.attention_weights.*It is called with \("),
    "average_attn_weights=": (lambda: called(X, X, X, average_attn_weights=False), r"layer.attention_weights after"),
    "window= of a layer": (lambda: called(X, X, X, window=(1, 0)), "keep_mask= hides any.*functional.*has a window"),
    "batch_first=": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1, batch_first=True), "inputs are always .batch, tokens"),
    "query=": (lambda: called(query=X, keys=X, values=X), "queries"),
    "training='yes'": (lambda: called(X, X, X, training="yes"), "training must be True or False"),
    "layer.forward(...)": (lambda: layer().forward(X, X, X), "call the layer itself"),
    "layer.cuda()": (lambda: layer().cuda(), r"mha_c.torch.MultiHeadAttention"),
    "layer.to('cuda')": (lambda: layer().to("cuda"), r"mha_c.torch.MultiHeadAttention"),
    # --- weights and parameters
    "weights before a call": (lambda: layer().attention_weights, "call the layer first"),
    "backward before a call": (lambda: layer().backward(X), "training=True"),
    "a gradient of another shape": (
        lambda: (lambda one: (one(X, X, X, training=True), one.backward(LONG)))(layer()),
        r"grad_output has shape \(2, 6, 8\).*\(2, 3, 8\)",
    ),
    "weights written in place": (lambda: layer().W_q.weight.__setitem__(0, 1.0), "read-only"),
    "a weight of an open size": (lambda: mha_c.MultiHeadAttention(8, 2, 0.1).W_q.weight, "set by the first call"),
    "a weight that does not fit": (
        lambda: setattr(layer().W_q, "weight", np.ones((3, 3))), r"W_q.weight must have shape \(8, 8\), got \(3, 3\)"
    ),
    "a step that does not fit": (
        lambda: layer().parameters()[0].__isub__(np.ones((2, 8, 8))), r"W_q.weight must have shape \(8, 8\)"
    ),
    "a kernel that is not known": (lambda: mha_c.KernelAttention("tri"), "'epanechnikov' or 'constant', got 'tri'"),
    "a weight of another shape": (
        lambda: layer().load_state_dict(first(layer().state_dict())), r"W_q.weight must.*\(8, 8\), got \(3, 3\)"
    ),
    "a state without a weight": (lambda: layer().load_state_dict({}), "W_q.weight is missing"),
    "a list as a state": (lambda: layer().load_state_dict([1]), "state_dict must map names to arrays"),
    "a cache in training": (
        lambda: (lambda one: one.train()(X, X, X, cache=one.new_cache(2, 9)))(layer()), r"call eval\(\) first"
    ),
    "a full cache": (lambda: (lambda one: one(X, X, X, cache=one.new_cache(2, 2)))(layer()), "room for 2 steps"),
    # --- functions
    "mask= of a function": (lambda: attend(mask=np.ones((3, 3), bool)), "write keep_mask=mask, where True = may"),
    "attn_mask= of a function": (lambda: attend(attn_mask=np.ones((3, 3))), "are added is bias=attn_mask"),
    "key_padding_mask= of a function": (lambda: attend(key_padding_mask=X > 0), r"=~key_padding_mask\[:, None"),
    "enable_gqa= of a function": (lambda: attend(enable_gqa=True), "leave it out: fewer heads of keys"),
    "is_causal= of a function": (lambda: attend(is_causal=True), "did you mean causal"),
    "causl=": (lambda: attend(causl=True), "did you mean causal"),
    "lens=": (lambda: attend(lens=[1, 2]), "did you mean valid_lens"),
    "numbers as keep_mask": (lambda: attend(keep_mask=np.ones((3, 3))), "keep_mask.*expected bool.*as bias"),
    "a bool bias": (lambda: attend(bias=np.ones((3, 3), bool)), "bias.*keep_mask"),
    "a mask of another size": (lambda: attend(keep_mask=np.ones((3, 4), bool)), r"keep_mask.*\(3, 4\).*\(2, 3, 3\)"),
    "causal of two sizes": (lambda: F.dot_product_attention(X, LONG, LONG, causal=True), "'top_left'.*'bottom_right'"),
    "window as a number": (lambda: attend(window=2), r"window must be.*, got 2: write \(2, 2\), or \(2, 0\)"),
    "scale of NaN": (lambda: attend(scale=np.nan), "scale must.*NaN"),
    # --- pictures and modules
    "show_heatmaps(layer)": (lambda: mha_c.show_heatmaps(layer(), "a", "b"), "give its attention_weights"),
    "view of one row": (lambda: mha_c.viz.view(np.ones(3)), r"weights must have rank 2 \(queries, keys\)"),
    "view before a call": (lambda: layer().view(), "call the layer first"),
    "a page as a picture": (lambda: mha_c.viz.view(np.eye(3)).save("a.png"), r"name it a.html; a picture is.*savefig"),
    "view(token=)": (lambda: layer().view(token="a b"), r"view\(\).*'token': did you mean tokens\?"),
    "too many tokens": (lambda: mha_c.viz.view(np.ones((3, 3)) / 3, tokens="a b c d"), "4 tokens for 3 queries"),
    "mha_c.patch": (lambda: mha_c.patch(), r"did you mean mha_c\.d2l\.patch\?"),
    "mha_c.check": (lambda: mha_c.check, r"did you mean mha_c\.teach\.check\?"),
    "mha_c.view": (lambda: mha_c.view, r"did you mean mha_c\.viz\.view\?"),
    "mha_c.dot_product_attention": (lambda: mha_c.dot_product_attention, r"mha_c\.functional\.dot_product_attention\?"),
    "mha_c.MultiheadAttention": (lambda: mha_c.MultiheadAttention, r"did you mean mha_c\.MultiHeadAttention\?"),
    "x of other features": (lambda: variants.MultiHeadedSelfAttention(8, 2)(X[..., :4]), "x.*8"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", NUMPY)
def test_the_answer_names_the_argument_and_what_to_write(mistake):
    call, words = NUMPY[mistake]
    if "heatmaps" in mistake:
        needs.module("matplotlib")
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as caught:
        call()
    text = str(caught.value)
    assert re.search(words, text, re.DOTALL), text
    assert len(text) < 700 and "NoneType" not in text and "_core" not in text
    assert len(frames_of_the_package(caught.value)) <= 1


def test_there_are_enough():
    assert len(NUMPY) + len(TORCH) >= 77


TORCH = {
    "two arguments": (lambda mt, T: mt.MultiHeadAttention(100, 5), "is missing dropout"),
    "heads before hiddens": (lambda mt, T: mt.MultiHeadAttention(5, 100, 0.5), "swapped"),
    "embed_dim=": (lambda mt, T: mt.MultiHeadAttention(embed_dim=8, num_heads=2, dropout=0.1), "mean num_hiddens"),
    "layer(X)": (
        lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T),
        r"keys, values\.  For self-attention write layer\(X, X, X\)",
    ),
    "layer(X, X)": (lambda mt, T: mt.DotProductAttention(0.1)(T, T), "missing or None: values"),
    "layer()": (lambda mt, T: mt.AdditiveAttention(8, 0.1)(), "missing or None: queries, keys, values"),
    "arrays": (lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(X, X, X), r"queries.*torch.as_tensor\(queries\)"),
    "arrays of a function": (lambda mt, T: mt.functional.dot_product_attention(X, X, X), r"q.*torch.as_tensor\(q\)"),
    "whole numbers": (lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T.long(), T, T), "queries.*float32"),
    "whole numbers alone": (
        lambda mt, T: mt.DotProductAttention(0.1)(T.int(), T.int(), T.int()),
        r"queries must.*float32.*got torch.int32.*write queries\.float\(\)",
    ),
    "names of torch.nn": (
        lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(query=T, key=T, value=T),
        "did you mean queries",
    ),
    "a text": (lambda mt, T: mt.DotProductAttention(0.1)("the cat", T, T), "queries must.*got words"),
    "a whole model": (
        lambda mt, T: mha_c.explain(needs.module("torch").nn.Sequential(mt.MultiHeadAttention(8, 2, 0.1)), T),
        r"Sequential holds '0': write explain\(model.get_submodule\('0'\)",
    ),
    "two types": (lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T.double(), T, T), r"different types.*\.to\(dtype\)"),
    "other features": (lambda mt, T: mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.1)(T[..., :4], T, T), "queries has 4"),
    "one item without its axis": (lambda mt, T: mt.DotProductAttention(0.1)(T[0], T[0], T[0]), r"queries\[None\]"),
    "three lengths": (lambda mt, T: mt.DotProductAttention(0.1)(T, T, T, [1, 2, 3]), r"valid_lens.*\(2,\)"),
    "a mask as lengths": (lambda mt, T: mt.DotProductAttention(0.1)(T, T, T, T > 0), "valid_lens has dtype bool"),
    "attn_mask=": (lambda mt, T: mt.DotProductAttention(0.1)(T, T, T, attn_mask=T), "keep_mask=attn_mask.*valid_lens"),
    "valid_len=": (lambda mt, T: mt.DotProductAttention(0.1)(T, T, T, valid_len=[1, 2]), "did you mean valid_lens"),
    "mask= of a function": (lambda mt, T: mt.functional.dot_product_attention(T, T, T, mask=T), "write keep_mask=mask"),
    "weights before a call": (
        lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1).attention_weights,
        "^MultiHeadAttention has no.*call the layer first",
    ),
    "devices": (lambda mt, T: mt.DotProductAttention(0.1)(T, T.to("meta"), T), "queries.*on cpu.*on meta"),
    "lengths of words": (lambda mt, T: mt.DotProductAttention(0.1)(T, T, T, "abc"), "valid_lens must.*got words"),
    "lengths in words": (
        lambda mt, T: mt.MultiHeadAttention(8, 2, 0.1)(T, T, T, ["two", "three"]),
        "valid_lens must.*got words",
    ),
    "no lengths": (lambda mt, T: mt.sequence_mask(T, None), "valid_len must hold integers or floats, got None"),
    "a module as a state": (
        lambda mt, T: mt.to_torch_state(mt.DotProductAttention(0.1)),
        r"state_dict.*m.state_dict\(\)",
    ),
    "compare of a function": (lambda mt, T: mha_c.d2l.compare(len, T), "compare takes a torch module"),
    "compare of a layer of arrays": (
        lambda mt, T: mha_c.d2l.compare(mha_c.MultiHeadAttention(8, 2, 0.1), T),
        r"got MultiHeadAttention of arrays, whose calls are the core's already \(mha_c\.torch\.Multi",
    ),
    "compare without inputs": (
        lambda mt, T: mha_c.d2l.compare(needs.module("torch").nn.Linear(8, 8)),
        r"calls the module with what follows it, compare\(model, X\): .*'input'",
    ),
    "convert of a layer of arrays": (
        lambda mt, T: mt.convert(mha_c.DotProductAttention(0.1)),
        "got DotProductAttention of arrays, whose calls are",
    ),
    "patch(3)": (lambda mt, T: mha_c.d2l.patch(3), "patch takes the imported module d2l.torch"),
    "unpatch('words')": (lambda mt, T: mha_c.d2l.unpatch("words"), r"unpatch takes .* write mha_c\.d2l\.unpatch\(\)"),
    "unpatch(a module)": (lambda mt, T: mha_c.d2l.unpatch(np), "numpy has no MultiHeadAttention.*is it d2l.torch"),
    "patch(mha_c)": (lambda mt, T: mha_c.d2l.patch(mha_c), "mha_c is ours: patch takes"),
}


@pytest.mark.parametrize("mistake", TORCH)
def test_the_answer_in_torch(mistake):
    torch = needs.module("torch")
    import mha_c.torch

    call, words = TORCH[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as caught:
        call(mha_c.torch, torch.ones(2, 3, 8))
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)
    assert len(frames_of_the_package(caught.value)) <= 1
