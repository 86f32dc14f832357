"""check on tensors: functions, layers and classes in torch, d2l's own in both generations, and ours."""

import copy
import functools

import numpy as np
import pytest

import children
import mha_c
import needs
from mha_c import teach

torch = needs.module("torch")
F = torch.nn.functional
from zoo_students_torch import torch_dot_product, torch_multi_head  # noqa: E402


def test_a_mask_of_minus_infinity_and_a_softmax_over_wrong_axes():
    def over_queries(queries, keys, values, valid_lens=None):
        scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
        if valid_lens is not None:
            lens = valid_lens[:, None, None] if valid_lens.dim() == 1 else valid_lens[:, :, None]
            scores = scores.masked_fill(torch.arange(keys.shape[1]) >= lens, float("-inf"))
        return scores.softmax(1) @ values

    assert teach.check(over_queries, "dot_product").mistakes == ["softmax_axis"]
    answer = teach.check(torch_multi_head("softmax_axis_heads"), "multi_head")
    assert answer.mistakes == ["softmax_axis"] and "over the heads" in str(answer)


@pytest.mark.parametrize("generation", ["0.17.6", "1.0.3"])
def test_the_books_own_are_right(generation):
    d2l = needs.d2l(generation)
    mine = [d2l.masked_softmax, d2l.DotProductAttention, d2l.DotProductAttention(0.5), d2l.AdditiveAttention,
            d2l.MultiHeadAttention, d2l.PositionalEncoding, d2l.PositionalEncoding(8, 0.5)]  # fmt: skip
    if generation == "0.17.6":
        mine += [d2l.AdditiveAttention(3, 4, 8, 0.5), d2l.MultiHeadAttention(10, 12, 14, 20, 5, 0.5, True)]
        mine += [d2l.transpose_qkv, d2l.transpose_output]
    else:
        layer = d2l.MultiHeadAttention(100, 5, 0.5)  # sizes still open
        mine += [layer, layer.transpose_qkv, layer.transpose_output, d2l.AdditiveAttention(8, 0.5)]
    for each in mine:
        answer = teach.check(each)
        assert answer.ok, answer
        teach.laws(each).assert_all()


@pytest.mark.parametrize("package", ["mha_c", "mha_c.torch"])
def test_ours_are_right(package):
    ours = mha_c if package == "mha_c" else mha_c.torch
    mine = [ours.DotProductAttention, ours.DotProductAttention(0.5), ours.AdditiveAttention,
            ours.AdditiveAttention(8, 0.5), ours.AdditiveAttention(4, 3, 8, 0.5), ours.MultiHeadAttention,
            ours.MultiHeadAttention(8, 2, 0.5), ours.MultiHeadAttention(8, 7, 9, 8, 2, 0.5),
            ours.PositionalEncoding, ours.PositionalEncoding(8, 0.5), mha_c.masked_softmax]  # fmt: skip
    for each in mine:
        assert teach.check(each).ok, teach.check(each)
    assert teach.check(mha_c.transpose_qkv).ok and teach.check(mha_c.transpose_output).ok


def test_torchs_own_functions():
    attention = F.scaled_dot_product_attention
    answer = teach.check(functools.partial(attention, is_causal=True), "causal")
    assert answer.ok and "top left" in answer.notes[0]
    ignores = lambda queries, keys, values, mask=None: attention(queries, keys, values)  # noqa: E731
    assert teach.check(ignores, "dot_product").mistakes == ["mask_ignored"]
    assert teach.check(attention, "causal").mistakes == ["sees_future"]


class Layer(torch.nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.rate = dropout

    def forward(self, queries, keys, values, valid_lens=None):
        weights = mha_c.torch.functional.dot_product_attention(
            queries, keys, values, valid_lens, empty_rows="uniform", return_weights=True
        )[1]
        return F.dropout(weights, self.rate) @ values  # acts at any time

    def untouched(self):
        return self.training


def test_dropout_in_evaluation():
    assert teach.check(Layer, "dot_product").mistakes == ["dropout_in_eval"]
    assert teach.check(Layer(), "dot_product").mistakes == ["dropout_in_eval"]
    assert teach.check(lambda q, k, v, lens=None: Layer()(q, k, v, lens), "dot_product").mistakes == ["dropout_in_eval"]
    assert teach.check(Layer(0.0), "dot_product").ok


def test_the_students_layer_stays_as_it_is():
    layer = torch_multi_head()(8, 2)
    out = layer(*[torch.ones(1, 3, 8, requires_grad=True)] * 3)
    layer.kept = out  # with its graph, as d2l's layers keep their weights
    before = copy.deepcopy(layer.state_dict())
    assert teach.check(layer, "multi_head").ok
    assert layer.training and all(torch.equal(before[name], x) for name, x in layer.state_dict().items())


def test_gradients_that_are_cut():
    def cut(queries, keys, values, valid_lens=None):
        return torch_dot_product()(0.0)(queries, keys.detach(), values, valid_lens)

    assert teach.check(cut, "dot_product").mistakes == ["gradients"]
    laws = teach.laws(cut, "dot_product")
    assert laws.broken == ["gradients"]
    assert "along a direction of keys: by autograd 0.0000" in str(laws)


def test_types():
    exact = torch_dot_product()(0.0)
    double = teach.check(lambda q, k, v, lens=None: exact(q, k, v, lens).double(), "dot_product")
    half = teach.check(lambda q, k, v, lens=None: exact(q, k, v, lens).to(torch.bfloat16).float(), "dot_product")
    assert double.mistakes == ["dtype"] and "float64" in str(double)
    assert half.mistakes == ["precision"]  # numbers of three digits


def encode(X):
    """NumPy's, in a module that knows torch, whose tensors it takes, too: then its numbers are of another type."""
    steps, hiddens = X.shape[1:]
    angles = np.arange(steps)[:, None] / 10000 ** (np.arange(0, hiddens, 2) / hiddens)
    return X + np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(steps, hiddens)


def test_arrays_are_given_where_tensors_would_change_their_type():
    assert teach.check(encode, "positional_encoding").ok


def test_torch_is_not_imported():
    code = """if 1:
        import sys
        from mha_c import teach
        def mine(queries, keys, values, valid_lens=None):
            return teach.book.dot_product(queries, keys, values, valid_lens)
        assert teach.check(mine, "dot_product").ok and teach.laws(mine, "dot_product").ok
        assert "torch" not in sys.modules and "matplotlib" not in sys.modules
    """
    children.python("-c", code)


def test_numpys_functions_are_graded_alike_where_torch_is_known():
    """mha_c.masked_softmax takes tensors, too, but none that need gradients: no law of gradients is theirs."""

    def mine(queries, keys, values, valid_lens=None):
        assert torch  # a module that knows torch is given tensors first
        scores = queries @ keys.swapaxes(1, 2) / queries.shape[-1]
        return mha_c.masked_softmax(scores, valid_lens) @ values

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):  # of the cell that grades
        with mode():
            assert teach.check(mine, "dot_product").mistakes == ["scale_d"]
            laws = teach.laws(mine, "dot_product")
            assert laws.ok and "gradients" not in [law.id for law in laws.laws]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cell_without_gradients_tells_the_same_of_gradients(mode):
    def attention(queries, keys, values, valid_lens=None):
        return torch_dot_product()(0.0)(queries, keys, values, valid_lens)

    with mode():
        laws = teach.laws(attention, "dot_product")
        assert not torch.is_grad_enabled()
    assert laws.ok and laws.laws[-1].id == "gradients"


# ---- parameters that learn, and change nothing at first --------------------------------------------------------------


class Gated(torch.nn.Module):
    def __init__(self, num_hiddens, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (torch.nn.Linear(num_hiddens, num_hiddens) for _ in range(4))
        self.gate = torch.nn.Parameter(torch.ones(num_heads, 1, 1))
        self.shift = torch.nn.Parameter(torch.zeros(num_hiddens), requires_grad=False)

    def forward(self, X):
        q, k, v = (W(X).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) * self.gate
        return self.W_o((weights @ v).transpose(1, 2).flatten(2)) + self.shift


def test_a_gate_that_is_open_at_first():
    layer = Gated(8, 2)
    for mine in (Gated, layer):
        answer = teach.check(mine)
        assert answer.mistakes == ["extra_parameter"] and "has not: gate." in str(answer), answer
    assert (layer.gate == 1).all()
    layer.gate.requires_grad_(False)
    assert teach.check(layer).ok


def test_a_function_written_in_c():
    if not hasattr(F, "scaled_dot_product_attention"):
        pytest.skip("this torch has none")
    for kind in (None, "dot_product"):
        answer = teach.check(F.scaled_dot_product_attention, kind)
        assert answer.ok and answer.mask == "attend" and "True lets a key be seen" in str(answer), answer
    assert not teach.check(F.scaled_dot_product_attention, "dot_product", mask="hide").ok
    assert teach.check(F.scaled_dot_product_attention, "causal").mistakes == ["sees_future"]
