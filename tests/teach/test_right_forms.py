"""check: right code in forms that others teach: results, types, signatures, and what is fixed when it is built."""

import threading

import numpy as np
import pytest

import needs
from mha_c import teach

BOOK = teach.book


def multi_head(torch, returned=lambda out, weights: out, heads=None):
    """A class of torch; `heads`: a number that its code alone has."""
    nn = torch.nn

    class Attention(nn.Module):
        def __init__(self, d_model=8, num_heads=2):
            super().__init__()
            if heads is None:
                self.num_heads = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

        def forward(self, queries, keys, values, mask=None):
            parts = 4 if heads else self.num_heads
            pairs = (self.W_q, queries), (self.W_k, keys), (self.W_v, values)
            q, k, v = (f(x).unflatten(-1, (parts, -1)).transpose(1, 2) for f, x in pairs)
            scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], float("-inf"))
            weights = scores.softmax(-1)
            return returned(self.W_o((weights @ v).transpose(1, 2).flatten(2)), weights)

    return Attention


class Given:
    def __init__(self, out, weights):
        self.attentions, self.hidden = weights, out


@pytest.mark.parametrize(
    ("returned", "entry"),
    [
        (lambda out, weights: (out,), ""),
        (lambda out, weights: [out, weights], ""),
        (lambda out, weights: (weights, out), "[1]"),
        (lambda out, weights: {"output": out, "weights": weights}, "output"),
        (lambda out, weights: {"weights": weights, "y": out}, "y"),
        (Given, "hidden"),
    ],
)
def test_an_output_in_a_tuple_a_dict_or_an_object(returned, entry):
    answer = teach.check(multi_head(needs.module("torch"), returned), "multi_head")
    assert answer.ok and (f"the entry {entry} was compared" in str(answer)) == bool(entry), answer
    wrong = teach.check(
        multi_head(needs.module("torch"), lambda out, weights: returned(out * 2, weights)), "multi_head"
    )
    assert wrong.ok is False


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16"])
def test_a_layer_of_another_precision(name):
    torch = needs.module("torch")
    assert teach.check(multi_head(torch)(8, 2).to(getattr(torch, name)), "multi_head").ok


def test_torch_whose_default_is_float64():
    torch = needs.module("torch")
    torch.set_default_dtype(torch.float64)
    try:
        assert teach.check(multi_head(torch), "multi_head").ok
    finally:
        torch.set_default_dtype(torch.float32)


def test_sizes_and_weights_before_the_input():
    """The adapters of CS336."""

    def heads(X, W, num_heads):
        return (X @ W.T).reshape(*X.shape[:2], num_heads, -1).swapaxes(1, 2)

    def run_attention(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, x, wrong=False):
        q, k, v = (heads(x, W, num_heads) for W in (q_proj_weight, k_proj_weight, v_proj_weight))
        scores = q @ k.swapaxes(2, 3) / np.sqrt(d_model if wrong else d_model // num_heads)
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -1e9)
        return (BOOK.softmax(scores, -1) @ v).swapaxes(1, 2).reshape(x.shape) @ o_proj_weight.T

    def run_rope(d_k, theta, max_seq_len, in_query_or_key, token_positions):
        assert theta == 10000 and d_k == in_query_or_key.shape[-1] and max_seq_len > token_positions.max()
        return BOOK.rope(in_query_or_key, token_positions[0])

    def run_wrong(d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features):
        weights = q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight
        return run_attention(d_model, num_heads, *weights, in_features, wrong=True)

    assert teach.check(run_attention, "causal_multi_head").ok and teach.check(run_rope).ok
    assert teach.check(run_wrong, "causal_multi_head").mistakes == ["scale_num_hiddens"]


def test_arguments_that_follow_from_the_inputs_or_have_numbers_as_defaults():
    def attention(q, k, v, d_k, mask, dropout, fill=-1e6, eps=1e-12):
        scores = np.where(mask, q @ k.swapaxes(-1, -2) / np.sqrt(d_k), fill)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return dropout(weights / (weights.sum(-1, keepdims=True) + eps)) @ v

    assert teach.check(attention).ok


@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_only_the_code_counts(causal):
    torch = needs.module("torch")
    answer = teach.check(multi_head(torch, heads=4)(16), "multi_head")
    assert answer.ok and "it was asked with 4" in str(answer)


def test_a_scale_that_is_fixed_when_the_layer_is_built():
    class Attention:
        def __init__(self, temperature):
            self.scale = 1 / temperature

        def __call__(self, queries, keys, values, valid_lens=None):
            return BOOK.masked_softmax(queries @ keys.swapaxes(1, 2) * self.scale, valid_lens) @ values

    answer = teach.check(Attention(4.0), "dot_product")
    assert answer.ok and "that of 16 features" in str(answer) and teach.check(Attention, "dot_product").ok
    assert teach.check(Attention(3.3), "dot_product").ok is False


SCALES = {
    "a constant of the file": "D = 64\ndef mine(q, k, v):\n    return attend(q @ k.mT / D**0.5) @ v",
    "another function's": """
D = 64
def scale():
    return D**-0.5
def mine(q, k, v):
    return attend(q @ k.mT * scale()) @ v
""",
    "a closure": "def make(d):\n    return lambda q, k, v: attend(q @ k.mT / d**0.5) @ v\nmine = make(16)",
    "a lambda that is kept": """
class Mine(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scaled = lambda x: x / d**0.5
    def forward(self, q, k, v):
        return attend(self.scaled(q @ k.mT)) @ v
mine = Mine(16)
""",
    "a buffer": """
class Mine(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.register_buffer("root", torch.tensor(float(d)).sqrt())
    def forward(self, q, k, v):
        return attend(q @ k.mT / self.root) @ v
mine = Mine(16)
""",
    "a part": """
class Scale(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.number = d**-0.5
    def forward(self, x):
        return x * self.number
class Mine(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = Scale(d)
    def forward(self, q, k, v):
        return attend(self.scale(q @ k.mT)) @ v
mine = Mine(16)
""",
}


@pytest.mark.parametrize("kept", SCALES)
def test_a_scale_that_is_kept(kept):
    """In whatever it is kept; of another number beside it, and of a literal in the call, no size is right."""
    needs.module("torch")
    start = "import torch\nfrom torch import nn\ndef attend(s):\n    return s.softmax(-1)\n"

    def judged(text):
        room = {}
        exec(start + text, room)
        return teach.check(room["mine"], "dot_product", mask="none")

    answer = judged(SCALES[kept])
    assert answer.ok and "features of queries and keys" in str(answer), answer
    for old, new in (("D = 64", "D = 3.3"), ("(16)", "(3.3)")):
        if old in SCALES[kept]:
            assert judged(SCALES[kept].replace(old, new)).mistakes == ["scale_fixed"]


def test_a_scale_that_is_a_literal_in_the_call_is_right_for_no_size():
    def mine(queries, keys, values, valid_lens=None):
        return BOOK.masked_softmax(queries @ keys.swapaxes(1, 2) / 8.0, valid_lens) @ values

    assert teach.check(mine, "dot_product").mistakes == ["scale_fixed"]


@pytest.mark.parametrize("names", [("n_embd", "n_head"), ("d_hidn", "head_count"), ("model.width", "model.heads")])
def test_a_configuration_of_any_names(names):
    torch = needs.module("torch")
    width, heads = names
    room = {"torch": torch, "parent": multi_head(torch)}
    text = f"""
class Mine(parent):
    def __init__(self, config):
        super().__init__(config.{width}, config.{heads})
"""
    exec(text, room)
    assert teach.check(room["Mine"], "multi_head").ok
    exec(text.replace(width, "quux").replace(heads, "quux"), room)
    answer = teach.check(room["Mine"], "multi_head")
    assert answer.ok is None and "what config holds" in str(answer)


@pytest.mark.parametrize(
    "names", [("rng", "heads", "representation_dimension"), ("random_seed", "num_heads", "d_model")]
)
def test_a_constructor_that_takes_what_draws_its_weights(names):
    """A course's layer in NumPy draws them itself, of a generator or a seed that must be given."""
    text = """
class Mine:
    def __init__(self, HEADS: int, WIDTH: int, DRAWS):
        drawn = np.random.default_rng(DRAWS)
        self.num_heads, self.d = HEADS, WIDTH
        self.W_q, self.W_k, self.W_v, self.W_o = (drawn.standard_normal((self.d, self.d)) for _ in range(4))

    def __call__(self, queries, keys, values, valid_lens=None):
        weights = self.W_q, self.W_k, self.W_v, self.W_o
        return BOOK.multi_head(queries, keys, values, valid_lens, *weights, self.num_heads)
"""
    room = {"np": np, "BOOK": BOOK}
    draws, heads, width = names
    exec(text.replace("DRAWS", draws).replace("HEADS", heads).replace("WIDTH", width), room)
    assert teach.check(room["Mine"], "multi_head").ok


class Options(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    "held", [threading.Lock(), (i for i in range(3)), Options(a=1)], ids=["lock", "generator", "any name"]
)
def test_a_layer_that_cannot_be_copied(held):
    layer = multi_head(needs.module("torch"))(8, 2)
    layer.held = held
    assert teach.check(layer, "multi_head").ok and layer.held is held


def test_heads_of_a_width_each_without_a_projection_behind_them():
    """LLMs-from-scratch's wrapper takes the width of one head; gpt.py's has a projection of the model's own width."""
    torch = needs.module("torch")
    nn = torch.nn

    class Head(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))

        def forward(self, x):
            scores = self.query(x) @ self.key(x).transpose(1, 2) / self.key.out_features**0.5
            return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1) > 0, -torch.inf).softmax(-1) @ self.value(x)

    class Wrapper(nn.Module):
        def __init__(self, d_in, d_out, num_heads):
            super().__init__()
            self.heads = nn.ModuleList(Head(d_in, d_out) for _ in range(num_heads))

        def forward(self, x):
            return torch.cat([head(x) for head in self.heads], dim=-1)

    class OfTheModel(nn.Module):
        def __init__(self, num_heads, head_size):
            super().__init__()
            self.heads = nn.ModuleList(Head(32, head_size) for _ in range(num_heads))
            self.proj = nn.Linear(32, 32)

        def forward(self, x):
            return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))

    assert teach.check(Wrapper).ok and teach.check(OfTheModel).ok


# ---- what ends all, and is an answer ---------------------------------------------------------------------------------


class Stop(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "id", "ok"),
    [(SystemExit(0), "exits", None), (Stop("enough"), "raises", False), (Mute(), "raises", False),
     (MemoryError(), "raises", False)],
)  # fmt: skip
def test_an_error_of_any_class_is_an_answer(error, id, ok):
    def attention(queries, keys, values, valid_lens=None):
        raise error

    answer = teach.check(attention)
    assert answer.mistakes == [id] and answer.ok is ok and "line" in str(answer)


def test_a_result_that_fits_into_no_memory_is_an_answer():
    def attention(queries, keys, values, valid_lens=None):
        return np.broadcast_to(0.0, (10**6, 10**6))

    answer = teach.check(attention)
    assert answer.ok is False and "(1000000, 1000000)" in str(answer)


def test_a_failure_of_check_itself_is_an_answer(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("of check")

    monkeypatch.setattr(teach.checks.checking, "rounds", fail)
    answer = teach.check(BOOK.dot_product, "dot_product")
    assert answer.mistakes == ["internal"] and answer.ok is None and "ZeroDivisionError: of check" in str(answer)


def test_a_table_of_numbers_alone_has_a_type_of_its_own():
    """No input says which: NumPy's is of float64, and a name may say steps in its own way."""
    torch = needs.module("torch")

    def get_positional_encoding_matrix(timesteps, d_model):
        angles = np.arange(timesteps)[:, None] / 10000 ** (np.arange(d_model) // 2 * 2 / d_model)
        angles[:, 0::2], angles[:, 1::2] = np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])
        return torch.from_numpy(angles)

    assert teach.check(get_positional_encoding_matrix).ok, teach.check(get_positional_encoding_matrix)


def test_names_of_sizes_that_stand_beside_no_heads():
    """A base was taken for the number of heads; two widths are those of inputs and outputs."""
    torch = needs.module("torch")
    nn = torch.nn

    class RoPE(nn.Module):
        def __init__(self, head_dim: int, rope_base: int, max_seq_len: int):
            super().__init__()
            angles = torch.arange(max_seq_len)[:, None] / rope_base ** (torch.arange(0, head_dim, 2) / head_dim)
            self.cos, self.sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

        def forward(self, x, position_ids):
            one, two = x.chunk(2, -1)
            return x * self.cos[position_ids][:, None] + torch.cat([-two, one], -1) * self.sin[position_ids][:, None]

    class SelfAttention(nn.Module):
        def __init__(self, input_dimension: int, output_dimension: int, number_of_heads: int):
            super().__init__()
            self.number_of_heads = number_of_heads
            self.query, self.key, self.value = (nn.Linear(input_dimension, output_dimension) for _ in range(3))
            self.out = nn.Linear(output_dimension, output_dimension)

        def forward(self, x):
            q, k, v = (
                each(x).unflatten(2, (self.number_of_heads, -1)).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            weights = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
            return self.out((weights @ v).transpose(1, 2).flatten(2))

    for mine in (RoPE, SelfAttention):
        assert teach.check(mine).ok, teach.check(mine)


def test_a_scale_of_a_configuration_is_not_invented():
    """It may be sqrt(d), or one over it: with one of them the code is wrong."""
    torch = needs.module("torch")

    class Mine(multi_head(torch)):
        def __init__(self, config):
            super().__init__(config.d_model, config.n_head)
            self.scale = config.scale

    answer = teach.check(Mine, "multi_head")
    assert answer.ok is None and "what config holds" in str(answer)
