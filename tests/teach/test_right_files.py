"""check: right code as files of real courses have it: weights in dicts, steps before the batch, layers upon a base."""

import numpy as np
import pytest

import needs


def answer(report):
    """The answer on the one name that was judged."""
    (each,) = report.judged
    return each.answer


DICTS = """
import numpy as np
def linear(x, w, b):
    return x @ w + b
def mha(x, c_attn, c_proj, n_head):
    qkv = np.split({joint}, 3, axis=-1)
    q, k, v = (np.stack(np.split(each, n_head, axis=-1)) for each in qkv)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + (1 - np.tri(len(x))) * -1e10
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    heads = weights / weights.sum(-1, keepdims=True) @ v
    return linear(np.concatenate(heads, axis=-1), **c_proj)
"""


@pytest.mark.parametrize("joint", ["linear(x, **c_attn)", 'x @ c_attn["w"] + c_attn["b"]'])
def test_weights_in_dicts(judged, joint):
    """As picoGPT and its followers keep them."""
    text = DICTS.format(joint=joint)
    assert answer(judged(text)).ok
    wrong = answer(judged(text.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")))
    assert wrong.mistakes == ["scale_d"] and wrong.lines[0].text.startswith("scores ="), wrong


def test_a_weight_that_is_no_array_is_not_judged(judged):
    """Its error is one of what check gives, not of the code."""
    found = answer(judged(DICTS.format(joint="x @ c_attn.weight")))
    assert (found.ok, found.mistakes) == (None, ["untried"]) and "c_attn" in str(found), found


TIME_FIRST = """
class MultiHeadAttention(Base):
    def forward(self, query, key, value, mask=None):
        n, m, C = query.shape
        def heads(x): return x.view(len(x), m, self.h, C // self.h)
        q, k, v = heads(self.q(query)), heads(self.k(key)), heads(self.v(value))
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) / (C // self.h) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, -1e9)
        x = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(1), v)
        return self.o(x.reshape(n, m, C))
"""
BASE = """
import torch
from torch import nn
class Base(nn.Module):
    {says}
    def __init__(self, d_model, heads, verbose: bool):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
"""


def test_steps_before_the_batch_in_masks_and_in_what_a_base_class_says(judged):
    """(queries, keys, batch), and a flag that the constructor needs."""
    needs.module("torch")
    says = '"""The inputs are [seq_len, batch_size, d_model]."""'
    found = answer(judged(BASE.format(says=says) + TIME_FIRST, "MultiHeadAttention", "multi_head"))
    assert found.ok and "(queries, keys, batch)" in str(found) and "(steps, batch, features)" in str(found), found


ROPE = """
import torch
def apply_rope(x):
    {says}
    d = x.shape[-1]
    angle = torch.arange(x.shape[0])[:, None] * 10000.0 ** -(torch.arange(0, d, 2) / d)
    angle = torch.cat([angle, angle], 1)[:, None, None]
    half = torch.cat([-x[..., d // 2:], x[..., :d // 2]], -1)
    return x * angle.cos() + half * angle.sin()
"""


def test_rotations_of_steps_before_the_batch(judged):
    needs.module("torch")
    found = answer(judged(ROPE.format(says='"""x: [seq_len, batch_size, heads, d]"""')))
    assert found.ok and "(steps, batch, heads, features)" in str(found), found
    silent = answer(judged(ROPE.format(says="")))
    assert silent.mistakes == ["batch_for_steps"] and "(steps, batch" in str(silent), silent


LAYERS = """
import numpy as np
class Param:
    def __init__(self, *shape): self.data, self.grad = np.random.rand(*shape), np.zeros(shape)
class Linear:
    def __init__(self, d_in, d_out):
        {held}
    def forward(self, x):
        {product}
class Dropout:
    def __init__(self, rate): self.rate, self.training = rate, True
    def forward(self, x, training):
        return x * (np.random.rand(*x.shape) > self.rate) / (1 - self.rate) if training else x
class MultiHeadAttention:
    def __init__(self, n_heads, d_model, d_query, d_value, rate=0.1):
        self.h, self.training = n_heads, True
        self.wq, self.wk = Linear(d_model, n_heads * d_query), Linear(d_model, n_heads * d_query)
        self.wv, self.wo = Linear(d_model, n_heads * d_value), Linear(n_heads * d_value, d_model)
        self.drop = Dropout(rate)
    def split(self, x):
        return x.reshape(*x.shape[:2], self.h, -1).transpose(0, 2, 1, 3)
    def forward(self, q, k, v, mask=None{argument}):
        q, k, v = self.split(self.wq.forward(q)), self.split(self.wk.forward(k)), self.split(self.wv.forward(v))
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(mask, scores, -1e9)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = self.drop.forward(weights / weights.sum(-1, keepdims=True), {training})
        return self.wo.forward((weights @ v).transpose(0, 2, 1, 3).reshape(len(q), q.shape[2], -1))
"""
HELD = [
    ("self.W, self.b = np.ones((d_in, d_out)), np.zeros(d_out)", "return x @ self.W + self.b"),
    ("self.w, self.b, self.dw = np.ones((d_out, d_in)), np.zeros(d_out), None", "return x @ self.w.T + self.b"),
    ("self.w, self.b = Param(d_in, d_out), Param(d_out)", "return x @ self.w.data + self.b.data"),
]


@pytest.mark.parametrize(("held", "product"), HELD)
@pytest.mark.parametrize(("argument", "training"), [(", training=True", "training"), ("", "self.training")])
def test_layers_of_numpy_made_of_layers(judged, held, product, argument, training):
    """Parts of their own keep the weights, and an argument or an attribute says that it trains."""
    text = LAYERS.format(held=held, product=product, argument=argument, training=training)
    found = answer(judged(text))
    assert found.ok and found.mask == "attend", found
    wrong = answer(judged(text.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")))
    assert wrong.mistakes == ["scale_d"] and wrong.lines[0].text.startswith("scores ="), wrong
    always = answer(judged(text.replace("if training else x", "")))
    assert always.mistakes == ["dropout_in_eval"], always


def test_an_attention_of_an_encoder_and_a_decoder_has_two_widths(judged):
    needs.module("torch")
    found = answer(
        judged("""
import torch
from torch import nn
class BahdanauAttention(nn.Module):
    def __init__(self, encoder_hidden_dim, decoder_hidden_dim, attention_dim):
        super().__init__()
        self.W1, self.W2 = nn.Linear(encoder_hidden_dim, attention_dim), nn.Linear(decoder_hidden_dim, attention_dim)
        self.V = nn.Linear(attention_dim, 1)
    def forward(self, encoder_outputs, decoder_hidden):
        assert encoder_outputs.shape[2] == self.W1.in_features and decoder_hidden.shape[1] == self.W2.in_features
        scores = self.V(torch.tanh(self.W1(encoder_outputs) + self.W2(decoder_hidden.unsqueeze(1)))).squeeze(-1)
        return torch.bmm(scores.softmax(1).unsqueeze(1), encoder_outputs).squeeze(1)
""")
    )
    assert found.ok, found


@pytest.mark.parametrize("name", ["query_key_size", "d_tensor", "feature_dim"])
def test_a_width_by_a_name_in_no_table(judged, name):
    text = f"""
import numpy as np
class ScaledDotProductAttention:
    def __init__(self, {name}):
        self.scale = np.sqrt({name})
    def __call__(self, q, k, v):
        s = q @ k.swapaxes(-1, -2) / self.scale
        e = np.exp(s - s.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) @ v
"""
    assert answer(judged(text)).ok
    (each,) = judged(text.replace("self.scale =", f"assert {name} == 1000\n        self.scale =")).judged
    assert (each.ok, each.problem.id) == (None, "not_judged") and name in each.text  # the guess may be wrong


def test_values_stand_for_keys_too(judged):
    """Luong's: attention(query, value)."""
    found = answer(
        judged("""
import numpy as np
def attention(query, value):
    s = query @ value.swapaxes(1, 2) / np.sqrt(value.shape[-1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ value
""")
    )
    assert found.ok and "it takes no keys" in str(found), found


def test_a_bias_of_the_sum_of_queries_and_keys_is_none_of_the_numbers(judged):
    needs.module("torch")
    found = answer(
        judged("""
import torch
from torch import nn
class AdditiveAttention(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.query_proj, self.key_proj = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.rand(d_model).uniform_(-0.1, 0.1))
        self.score_proj = nn.Linear(d_model, 1)
    def forward(self, query, key, value):
        hidden = self.query_proj(query)[:, :, None] + self.key_proj(key)[:, None] + self.bias
        return self.score_proj(torch.tanh(hidden)).squeeze(-1).softmax(-1) @ value
""")
    )
    assert found.ok, found


@pytest.mark.parametrize("names", ["W_a U_a v_a", "W1 W2 V", "W_dec W_enc v", "a U v", "attn_q attn_k energy"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_weights_of_additive_attention_by_a_papers_names(judged, names, order):
    """In any order: what multiplies the queries tells."""
    w, u, v = names.split()
    text = f"""
import numpy as np
def additive(queries, keys, values, {", ".join(names.split()[i] for i in order)}):
    hidden = np.tanh((queries @ {w})[:, :, None] + (keys @ {u})[:, None])
    e = np.exp(hidden @ {v})
    return e / e.sum(-1, keepdims=True) @ values
"""
    assert answer(judged(text)).ok
    assert answer(judged(text.replace("np.tanh", ""))).mistakes == ["no_tanh"]


def test_an_answer_on_many_numbers_of_another_shape_can_be_read():
    """expected and got have no place in common."""
    from mha_c.teach.asking.answers import Example

    text = str(Example({}, np.zeros((9, 9, 9)), np.ones((9, 9, 9, 9, 9))))
    assert "(9, 9, 9)" in text and "(9, 9, 9, 9, 9)" in text


@pytest.mark.parametrize("name", ["max_sequence_len", "n_timesteps", "longest_context"])
def test_how_many_steps_at_most_by_a_name_in_no_table(judged, name):
    """Taken for a number of heads, 1, its mask hid nothing."""
    needs.module("torch")
    found = answer(
        judged(f"""
import torch
from torch import nn
class SingleHeadAttention(nn.Module):
    def __init__(self, embed_dim: int, head_size: int, {name}: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(embed_dim, head_size, bias=False) for _ in range(3))
        self.register_buffer("causal_mask", torch.tril(torch.ones({name}, {name})))
    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = self.causal_mask[:x.shape[1], :x.shape[1]] == 0
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
""")
    )
    assert found.ok, found


def test_a_mask_of_the_queries_hides_no_key(judged):
    text = """
import numpy as np
def attention(query, key, value, q_padding_mask=None, v_padding_mask=None):
    s = query @ key.swapaxes(1, 2) / np.sqrt(key.shape[-1])
    if v_padding_mask is not None:
        s = np.where(v_padding_mask[:, None], s, -1e9)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ value
"""
    found = answer(judged(text))
    assert found.ok and found.mask == "attend", found
    assert answer(judged(text.replace("s = np.where(", "np.where("))).mistakes == ["mask_ignored"]


MODEL = """
class LayerNorm:
    def __init__(self, d): self.gamma = np.ones(d)
    def forward(self, x): return x / x.std(-1, keepdims=True) * self.gamma
class Block:
    def __init__(self, n_heads, d_model):
        self.attention = MultiHeadAttention(n_heads, d_model, d_model // n_heads, d_model // n_heads)
        self.norm = LayerNorm(d_model)
    def forward(self, x): return self.norm.forward(x + self.attention.forward(x, x, x))
class GPT:
    def __init__(self, vocab_size, d_model, n_heads, n_layers):
        self.table, self.blocks = np.ones((vocab_size, d_model)), [Block(n_heads, d_model) for _ in range(n_layers)]
        self.norm = LayerNorm(d_model)
    def forward(self, ids):
        x = self.table[ids]
        for block in self.blocks:
            x = block.forward(x)
        return self.norm.forward(x)
"""


def test_the_attention_of_a_model_of_numpy_is_judged(judged):
    """Its blocks hold the same weights, deeper: they are no attention."""
    text = LAYERS.format(held=HELD[0][0], product=HELD[0][1], argument="", training="self.training") + MODEL
    report = judged(text)
    assert report.ok and [each.name for each in report.judged] == ["MultiHeadAttention"], report
    wrong = judged(text.replace("np.sqrt(q.shape[-1])", "q.shape[-1]"))
    assert [each.answer.mistakes for each in wrong.judged] == [["scale_d"]], wrong
