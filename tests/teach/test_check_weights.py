"""teach.check of NumPy code whose weights come another way: in a dict, by a constructor, drawn by a generator."""

import numpy as np
import pytest

from mha_c import teach

SPLIT = """
import numpy as np

def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)

def heads(x, n):
    return x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2)

def joined(q, k, v):
    x = (softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])) @ v).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1)
"""


def test_weights_in_a_dict(judged):
    text = SPLIT + (
        "def multi_head_attention(queries, keys, values, params, n):\n"
        "    q, k = heads(queries @ params['Wq'] + params['bq'], n), heads(keys @ params['Wk'], n)\n"
        "    return joined(q, k, heads(values @ params['Wv'], n)) @ params['Wo'] + params['bo']\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")).as_dict()["checked"]
    assert entry["mistakes"] == ["scale_d"] and entry["lines"][0]["should_be"]
    (entry,) = judged(text.replace("keys @ params['Wk']", "keys @ params['Wq']")).as_dict()["checked"]
    assert entry["mistakes"] == ["swapped_projections"]
    (entry,) = judged(text.replace(" @ params['Wo'] + params['bo']", "")).as_dict()["checked"]
    assert entry["mistakes"] == ["no_output_projection"]
    (entry,) = judged(text.replace(" + params['bo']", " + 2 * params['bo']")).as_dict()["checked"]
    assert entry["mistakes"] == ["bias_wrong"]
    assert judged(text.replace("params['", "params.").replace("']", "")).ok


def test_biases_as_arguments(judged):
    text = SPLIT + (
        "def multi_head_attention(queries, keys, values, W_q, bq, W_k, bk, W_v, bv, W_o, bo, num_heads):\n"
        "    x = queries @ W_q + bq, keys @ W_k + bk, values @ W_v + bv\n"
        "    return joined(*(heads(each, num_heads) for each in x)) @ W_o + bo\n"
    )
    result = judged(text)
    assert result.ok and "biases" not in result.as_dict()["checked"][0]["text"]
    (entry,) = judged(text.replace("W_v + bv", "W_v")).as_dict()["checked"]
    assert entry["mistakes"] == ["bias_lost"] and "The bias of W_v has no effect" in entry["text"]
    (entry,) = judged(text.replace("@ W_o + bo", "@ W_o + bo + bo")).as_dict()["checked"]
    assert entry["mistakes"] == ["bias_wrong"] and "The bias of W_o" in entry["text"]


LAYER = """
class MultiHeadAttention:
    def __init__(self, d_model, n_heads, RNG):
        self.n = n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (DRAW for _ in range(4))

    def __call__(self, queries, keys, values):
        q, k, v = queries @ self.W_q, keys @ self.W_k, values @ self.W_v
        return joined(*(heads(x, self.n) for x in (q, k, v))) @ self.W_o
"""


@pytest.mark.parametrize(
    ("rng", "draw"),
    [
        ("rng", "rng.normal(size=(d_model, d_model))"),
        ("rng", "rng.randn(d_model, d_model)"),
        ("seed", "np.random.default_rng(seed).normal(size=(d_model, d_model))"),
        ("random_state", "random_state.uniform(-1, 1, (d_model, d_model))"),
        ("generator", "generator.standard_normal((d_model, d_model))"),
    ],
)
def test_a_constructor_that_draws(judged, rng, draw):
    text = SPLIT + LAYER.replace("RNG", rng).replace("DRAW", draw)
    assert judged(text).ok
    assert judged(text.replace("np.sqrt(q.shape[-1])", "1")).as_dict()["checked"][0]["mistakes"] == ["no_scale"]


def test_what_a_constructor_draws_is_not_one_number():
    class Layer:
        def __init__(self, d_model, num_heads, rng):
            self.num_heads = num_heads
            self.W_q, self.W_k, self.W_v, self.W_o = (rng.normal(size=(d_model, d_model)) for _ in range(4))
            if np.array_equal(self.W_q, self.W_k):
                raise ValueError

        def __call__(self, queries, keys, values):
            return teach.book.multi_head(
                queries, keys, values, None, self.W_q, self.W_k, self.W_v, self.W_o, self.num_heads
            )

    assert teach.check(Layer, "multi_head", mask="none").ok


def test_a_constructor_that_takes_weights(judged):
    text = SPLIT + (
        "class MultiHeadAttention:\n"
        "    def __init__(self, W_q, W_k, W_v, W_o, n_heads):\n"
        "        self.W_q, self.W_k, self.W_v, self.W_o, self.n = W_q, W_k, W_v, W_o, n_heads\n"
        + LAYER[LAYER.index("    def __call__") :]
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("keys @ self.W_k", "keys @ self.W_q")).as_dict()["checked"]
    assert entry["mistakes"] == ["swapped_projections"] and entry["lines"]
    text = SPLIT + (
        "class AdditiveAttention:\n"
        "    def __init__(self, W_q, W_k, w_v):\n"
        "        self.W_q, self.W_k, self.w_v = W_q, W_k, w_v\n"
        "    def __call__(self, queries, keys, values):\n"
        "        x = (queries @ self.W_q)[:, :, None] + (keys @ self.W_k)[:, None]\n"
        "        return softmax(np.tanh(x) @ self.w_v) @ values\n"
    )
    assert judged(text).ok
    assert judged(text.replace("np.tanh(x)", "x")).as_dict()["checked"][0]["mistakes"] == ["no_tanh"]


@pytest.mark.parametrize("width", ["breite", "largeur", "n"])
def test_an_encoding_whose_width_has_any_name(judged, width):
    text = (
        "import numpy as np\n"
        "class PositionalEncoding:\n"
        f"    def __init__(self, {width}, max_len=50):\n"
        f"        i = np.arange({width})\n"
        f"        table = np.arange(max_len)[:, None] / 10000 ** (2 * (i // 2) / {width})\n"
        "        table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])\n"
        "        self.table = table[None]\n"
        "    def __call__(self, X):\n"
        "        return X + self.table[:, :X.shape[1]]\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("[:, None] /", "[:, None] *")).as_dict()["checked"]
    assert entry["mistakes"] == ["wrong_exponent"]


def test_one_head_of_fewer_features_than_its_input(judged):
    text = (
        SPLIT + "def self_attention(x, W_query, W_key, W_value):\n"
        "    q, k, v = x @ W_query, x @ W_key, x @ W_value\n"
        "    return softmax(q @ k.swapaxes(-1, -2) / k.shape[-1] ** 0.5) @ v\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("/ k.shape", "/ x.shape")).as_dict()["checked"]
    assert not entry["ok"] and entry["lines"][0]["should_be"].replace("q.", "k.").count("k.shape[-1]") == 1
    only_squares = text.replace("return", "return x * 0 +")
    (entry,) = judged(only_squares).as_dict()["checked"]
    assert entry["ok"] and "as wide as its result" in entry["text"]


def test_where_all_weights_are_alike_it_is_no_matter_of_masks(judged):
    text = (
        SPLIT + "def dot_product_attention(Q, K, V):\n"
        "    return softmax(np.array([[a @ b for b in K] for a in Q]) / Q.shape[-1] ** 0.5) @ V\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("a @ b for", "a @ a for")).as_dict()["checked"]
    assert entry["mistakes"] == ["uniform_weights"]


def test_a_pair_is_turned_each_on_its_own(judged):
    text = (
        "import numpy as np\n"
        "def turned(x):\n"
        "    angle = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])\n"
        "    y, c, s = np.empty_like(x), np.cos(angle), np.sin(angle)\n"
        "    y[..., ::2], y[..., 1::2] = x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s\n"
        "    return y\n"
        "def apply_rope(q, k):\n"
        "    q, k = turned(q), turned(k)\n"
        "    return q, k\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("return q, k", "return q, q")).as_dict()["checked"]
    assert not entry["ok"]
    (entry,) = judged(text.replace("turned(q), turned(k)", "turned(q), turned(-k)")).as_dict()["checked"]
    assert all("return" not in each["should_be"] for each in entry["lines"])


def test_weights_as_torch_keeps_them_are_a_note(judged):
    text = SPLIT + (
        "def multi_head_attention(queries, keys, values, W_q, W_k, W_v, W_o, num_heads):\n"
        "    x = queries @ W_q.T, keys @ W_k.T, values @ W_v.T\n"
        "    return joined(*(heads(each, num_heads) for each in x)) @ W_o.T\n"
    )
    (entry,) = judged(text).as_dict()["checked"]
    assert entry["ok"] and any("(outputs, inputs)" in note for note in entry["notes"])
    (entry,) = judged(text.replace(".T", "")).as_dict()["checked"]
    assert entry["ok"] and not any("(outputs, inputs)" in note for note in entry["notes"])


@pytest.mark.parametrize("names", ["n, d", "T, dim", "pos, d_model", "num_tokens, d_model"])
def test_a_table_by_its_sizes(judged, names):
    n, d = names.split(", ")
    text = (
        "import numpy as np\n"
        f"def positional_encoding({names}):\n"
        f"    angle = np.arange({n})[:, None] / 10000 ** (np.arange(0, {d}, 2) / {d})\n"
        f"    return np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape({n}, {d})\n"
    )
    assert judged(text).ok
    assert judged(text.replace("np.arange(0", "np.arange(2")).ok is False


@pytest.mark.parametrize(("names", "inputs"), [("n_h, n_a", "n_h n_h"), ("hid, mid", "hid hid"), ("s, t, u", "s t")])
def test_an_additive_class_whose_widths_have_any_names(judged, names, inputs):
    (q, k), hiddens = inputs.split(), names.split(", ")[-1]
    text = SPLIT + (
        "class BahdanauAttention:\n"
        f"    def __init__(self, {names}):\n"
        f"        self.W_q, self.W_k = np.ones(({q}, {hiddens})), np.ones(({k}, {hiddens}))\n"
        f"        self.w_v = np.ones({hiddens})\n"
        "    def __call__(self, state, memory):\n"
        "        x = np.tanh((state @ self.W_q)[:, None] + memory @ self.W_k) @ self.w_v\n"
        "        weights = softmax(x)\n"
        "        return (weights[:, :, None] * memory).sum(axis=1), weights\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("sum(axis=1)", "mean(axis=1)")).as_dict()["checked"]
    assert entry["mistakes"] == ["mean_for_sum"]


def test_weights_in_a_list(judged):
    text = SPLIT + (
        "def multi_head_attention(queries, keys, values, weights, num_heads):\n"
        "    Wq, bq, Wk, Wv, Wo = weights\n"
        "    x = queries @ Wq + bq, keys @ Wk, values @ Wv\n"
        "    return joined(*(heads(each, num_heads) for each in x)) @ Wo\n"
    )
    assert judged(text).ok
    (entry,) = judged(text.replace("values @ Wv", "values @ Wk")).as_dict()["checked"]
    assert entry["mistakes"] == ["swapped_projections"] and entry["lines"]
    (entry,) = judged(text.replace(" + bq", "")).as_dict()["checked"]
    assert entry["mistakes"] == ["bias_lost"]


def test_lengths_of_items_and_one_width_at_once(judged):
    text = (
        SPLIT + "def multi_head_attention(queries, keys, values, W_q, W_k, W_v, W_o, num_heads, lengths=None):\n"
        "    b, steps, d = queries.shape\n"
        "    x, size = (queries @ W_q, keys @ W_k, values @ W_v), d // num_heads\n"
        "    q, k, v = (each.reshape(b, -1, num_heads, size).swapaxes(1, 2) for each in x)\n"
        "    scores = q @ k.swapaxes(2, 3) / np.sqrt(size)\n"
        "    if lengths is not None:\n"
        "        scores = np.where(np.arange(keys.shape[1]) < lengths[:, None, None, None], scores, -1e9)\n"
        "    return (softmax(scores) @ v).swapaxes(1, 2).reshape(b, steps, d) @ W_o\n"
    )
    (entry,) = judged(text).as_dict()["checked"]
    assert entry["ok"] and len(entry["notes"]) == 2, entry["notes"]
    (entry,) = judged(text.replace(") < lengths", ") <= lengths")).as_dict()["checked"]
    assert entry["mistakes"] == ["mask_off_by_one"]
