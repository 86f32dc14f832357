"""Lines outside of plain functions: constants of classes, defaults, properties, static methods."""

import linecache

import pytest

from mha_c import teach

CLASSES = """
import numpy as np


class Mask:
    fill = -1e9

    def __call__(self, scores):
        allowed = np.tri(*scores.shape[-2:], dtype=bool)
        return np.where(allowed, scores, self.fill)


class Softmax:
    axis = -1

    def __call__(self, x):
        e = np.exp(x - x.max(axis=self.axis, keepdims=True))
        return e / e.sum(axis=self.axis, keepdims=True)


def attention(q, k, v):
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    return Softmax()(Mask()(scores)) @ v
"""

LAYER = """
import numpy as np


class Attention:
    def __init__(self, num_hiddens, num_heads):
        made = np.random.default_rng(1).normal(size=(4, num_hiddens, num_hiddens))
        self.W_q, self.W_k, self.W_v, self.W_o = made
        self.num_hiddens, self.num_heads = num_hiddens, num_heads

    @property
    def head_dim(self):
        return self.num_hiddens // self.num_heads

    @staticmethod
    def normalised(z):
        z = np.exp(z - z.max(axis=-1, keepdims=True))
        return z / z.sum(axis=-1, keepdims=True)

    def split(self, x):
        return np.stack(np.split(x, self.num_heads, axis=-1), axis=1)

    def __call__(self, x):
        q, k, v = (self.split(x @ w) for w in (self.W_q, self.W_k, self.W_v))
        w = self.normalised(np.einsum("bhqd,bhkd->bhqk", q, k) * self.head_dim**-0.5)
        return np.concatenate(list(np.moveaxis(w @ v, 1, 0)), axis=-1) @ self.W_o
"""

ROPE = """
import numpy as np


def turns(d, n, start=0, theta=10000.0):
    freqs = 1.0 / theta ** (np.arange(0, d, 2) / d)
    return np.exp(1j * np.outer(np.arange(start, start + n), freqs))


def rope(x, offset=0):
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turns(x.shape[-1], x.shape[-2], offset)
    return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)
"""


@pytest.mark.parametrize(
    ("text", "called", "kind", "right", "wrong"),
    [
        (CLASSES, "attention", "causal", "    fill = -1e9", "    fill = 1e9"),
        (CLASSES, "attention", "causal", "    axis = -1", "    axis = 1"),
        (LAYER, "Attention", "multi_head", "return z / z.sum(axis=-1, keepdims=True)", "return z"),
        (ROPE, "rope", "rope", "theta=10000.0", "theta=1000.0"),
    ],
)
def test_where_a_line_stands(judged, text, called, kind, right, wrong):
    assert text.count(right) == 1
    assert judged(text, called, kind=kind).judged[0].answer.ok
    answer = judged(text.replace(right, wrong), called, kind=kind).judged[0].answer
    assert answer.ok is False
    assert [line.number for line in answer.lines] == [text[: text.index(right)].count("\n") + 1]


WINDOW = """
import numpy as np


def band(n, window):
    diff = np.subtract.outer(np.arange(n), np.arange(n))
    keep = np.ones((n, n), dtype=bool)
    keep &= (diff >= 0) & (diff < window)
    return keep


def softmax(s):
    return np.exp(s) / np.exp(s).sum(-1, keepdims=True)


def attention(q, k, v, window):
    s = np.where(band(q.shape[1], window), q @ k.swapaxes(1, 2) / np.sqrt(q.shape[2]), -1e9)
    return softmax(s) @ v
"""

LOOP = """
import numpy as np


def normalised(row):
    exps = [np.exp(x - max(row)) for x in row]
    total = sum(exps)
    return [e / total for e in exps]


def one_query(q, ks, vs, n):
    scores = np.array([q @ k / np.sqrt(len(q)) for k in ks])
    scores[int(n):] = -1e9
    w = normalised(scores)
    return sum(w[j] * vs[j] for j in range(len(vs)))


def attention(queries, keys, values, valid_lens=None):
    out = []
    for b, (qs, ks, vs) in enumerate(zip(queries, keys, values)):
        lens = len(ks) if valid_lens is None else valid_lens[b]
        row_lens = np.broadcast_to(lens, len(qs))
        out.append([one_query(q, ks, vs, row_lens[i]) for i, q in enumerate(qs)])
    return np.array(out)
"""

CAUSAL = """
import numpy as np


def scaled(d):
    return lambda s: s / np.sqrt(d)


def hidden(s):
    i, j = np.ogrid[: s.shape[1], : s.shape[2]]
    return np.where(j <= i, s, -np.inf)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chain(x, *functions):
    for function in functions:
        x = function(x)
    return x


def step(q, keys, values):
    s = np.array(keys) @ q / np.sqrt(q.size)
    return np.exp(s) / np.exp(s).sum() @ np.array(values)


def attention(q, k, v):
    return chain(np.einsum("bqd,bkd->bqk", q, k), scaled(q.shape[2]), hidden, softmax) @ v


def decode(queries, keys, values):
    out = []
    for qs, ks, vs in zip(queries, keys, values):
        past_keys, past_values, rows = [], [], []
        for q, k, v in zip(qs, ks, vs):
            past_keys.append(k)
            past_values.append(v)
            rows.append(step(q, past_keys, past_values))
        out.append(rows)
    return np.array(out)
"""


@pytest.mark.parametrize(
    ("text", "called", "kind", "right", "wrong", "should_be"),
    [
        (WINDOW, "attention", "window", "keep &= (diff >= 0) & (diff < window)",
         "keep & ((diff >= 0) & (diff < window))", "keep = keep & "),
        (WINDOW, "attention", "window", "(diff >= 0) & (diff < window)", "np.abs(diff) < window", "(diff < window)"),
        (WINDOW, "attention", "window", "(diff >= 0) & (diff < window)", "diff >= 0", "(diff < window)"),
        (LOOP, "attention", "dot_product", "return [e / total for e in exps]", "return exps", "/ sum(exps) for"),
        (LOOP, "attention", "dot_product", "one_query(q, ks, vs, row", "one_query(q, vs, ks, row", "(q, ks, vs, row"),
        (CAUSAL, "attention", "causal", "j <= i, s", "j >= i, s", "j <= i, s"),
        (CAUSAL, "attention", "causal", "scaled(q.shape[2]), hidden, softmax", "scaled(q.shape[2]), softmax, hidden",
         "softmax)"),
        (CAUSAL, "decode", "causal", "q, past_keys, past_values)", "q, past_keys[-2:], past_values[-2:])",
         "q, past_keys, past_values)"),
        (CAUSAL, "attention", "causal", "e / e.sum(-1, keepdims=True)", "e / e.sum()", "e.sum(-1, keepdims=True)"),
        (LAYER, "Attention", "multi_head", "return self.num_hiddens // self.num_heads", "return self.num_hiddens",
         "self.num_hiddens // self.num_heads"),
        (LAYER, "Attention", "multi_head", "for w in (self.W_q, self.W_k, self.W_v)",
         "for w in (self.W_k, self.W_q, self.W_v)", "(self.W_q, self.W_k, self.W_v)"),
    ],
)  # fmt: skip
def test_what_it_should_be(judged, text, called, kind, right, wrong, should_be):
    assert text.count(right) == 1
    answer = judged(text.replace(right, wrong), called, kind=kind).judged[0].answer
    assert answer.ok is False
    assert [line.number for line in answer.lines] == [text[: text.index(right)].count("\n") + 1]
    assert should_be in answer.lines[0].should_be


IN_DICTS = """
import numpy as np


class Attention:
    def __init__(self, n_embd, n_head):
        g = np.random.default_rng(0)
        self.n_head = n_head
        self.c_attn = {"w": g.normal(size=(n_embd, 3 * n_embd)), "b": g.normal(size=3 * n_embd)}
        self.params = {"Wo": g.normal(size=(n_embd, n_embd)), "bo": g.normal(size=n_embd)}

    def forward(self, x):
        n = x.shape[1]
        y = x @ self.c_attn["w"] + self.c_attn["b"]
        heads = []
        for q, k, v in zip(*(np.split(each, self.n_head, axis=-1) for each in np.split(y, 3, axis=-1))):
            s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + (1 - np.tri(n)) * -1e10
            e = np.exp(s - s.max(-1, keepdims=True))
            heads.append(e / e.sum(-1, keepdims=True) @ v)
        return np.concatenate(heads, axis=-1) @ self.params["Wo"] + self.params["bo"]
"""


def test_weights_in_dicts_that_a_layer_keeps(judged):
    for name in ("w", "weight", "kernel"):
        text = IN_DICTS.replace('"w"', f'"{name}"')
        assert judged(text, "Attention", kind="causal_multi_head").judged[0].answer.ok
    wrong = IN_DICTS.replace("np.sqrt(q.shape[-1])", "q.shape[-1]")
    answer = judged(wrong, "Attention", kind="causal_multi_head").judged[0].answer
    assert answer.mistakes == ["scale_d"] and answer.lines[0].text.startswith("s = q @ k.swapaxes")


GPT = """
import numpy as np


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def attend(q, k, v, mask):
    return softmax(q @ k.T / np.sqrt(q.shape[-1]) + mask) @ v


class Attention:
    def __init__(self, n_embd, n_head):
        g = np.random.default_rng(0)
        self.n_head = n_head
        self.c_attn = {"w": g.normal(size=(n_embd, 3 * n_embd)), "b": g.normal(size=3 * n_embd)}
        self.c_proj = {"w": g.normal(size=(n_embd, n_embd)), "b": g.normal(size=n_embd)}

    def one(self, x):
        parts = np.split(x @ self.c_attn["w"] + self.c_attn["b"], 3, axis=-1)
        hidden = (1 - np.tri(len(x))) * -1e10
        heads = [attend(*each, hidden) for each in zip(*(np.split(part, self.n_head, axis=-1) for part in parts))]
        return np.hstack(heads) @ self.c_proj["w"] + self.c_proj["b"]

    def forward(self, x):
        return np.stack([self.one(each) for each in x])
"""

SUMS = """
import numpy as np


def joined(q, k, v):
    b, h, n, d = q.shape
    q = q.reshape(b, k.shape[1], -1, n, d)
    s = np.einsum("bgrnd,bgmd->bgrnm", q, k) / np.sqrt(d)
    e = np.exp(s)
    p = e / e.sum(-1, keepdims=True)
    o = np.einsum("bgrnm,bgmd->bgrnd", p, v)
    return o.reshape(b, h, n, v.shape[-1])


def sharp(q, k, v):
    s = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(q.shape[1], dtype=bool), s, -1e9)
    s = s - s.max(-1, keepdims=True)
    s = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    return s @ v
"""


@pytest.mark.parametrize(
    ("text", "called", "kind", "right", "wrong", "should_be"),
    [
        (GPT, "Attention", "causal_multi_head", " + mask) @ v", ") @ v", " + mask) @ v"),
        (GPT, "Attention", "causal_multi_head", "(1 - np.tri(len(x))) *", "np.tri(len(x)) *", "(1 - np.tri(len(x))) *"),
        (ROPE, "rope", "rope", "np.exp(1j * np", "np.exp(-1j * np", "np.exp(1j * np"),
        (SUMS, "joined", "grouped", "o.reshape(b", "o.swapaxes(1, 2).reshape(b", "return o.reshape(b"),
        (SUMS, "sharp", "causal", "np.exp(s) / np.exp(s).sum", "s / s.sum", "np.exp(s) / np.exp(s).sum"),
    ],
)
def test_what_is_missing_or_turned(judged, text, called, kind, right, wrong, should_be):
    assert judged(text, called, kind=kind).judged[0].answer.ok
    test_what_it_should_be(judged, text, called, kind, right, wrong, should_be)


def test_what_is_made_of_a_string_has_no_text_of_a_command(monkeypatch):
    """Python 3.13 keeps the text of `python -c` under the name that exec gives to whatever it runs."""
    command = ["import sys; run(sys.stdin.readline())\n"]
    monkeypatch.setitem(linecache.cache, "<string>", (len(command[0]), None, command, "<string>"))
    mine = eval("lambda X, valid_lens: book.softmax(X, -1)", {"book": teach.book})
    answer = teach.check(mine, "masked_softmax")
    assert answer.mistakes == ["no_mask"] and "stdin" not in str(answer), answer
    assert linecache.getlines("<string>") == command
