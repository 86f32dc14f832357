"""The cases: which shapes, who takes part, how much work, and the ratio aimed at.

A case is built by `case.contenders(libs)`, which returns {name: function without arguments}; "mha_c" is
ours, the others are measured against it.  All of them compute the same thing from the same numbers.
M, A and G are the call sites of the book (d2l) by number; S are plain attention, as in
torch.nn.functional.scaled_dot_product_attention.
"""

from dataclasses import dataclass
from typing import Optional, Union

import numpy as np

SEED = 20
D2L = ("d2l 0.17.6", "d2l 1.0.3")  # the faster of the two counts


def lengths(kind, batch, queries, keys):
    """None; "random": (B,) in 1..K; "full": all K; "ramp": 1..Q for each query; or the numbers themselves."""
    if kind is None:
        return None
    if kind == "random":
        return np.random.default_rng(SEED).integers(1, keys + 1, batch)
    if kind == "full":
        return np.full(batch, keys)
    if kind == "ramp":
        return np.tile(np.arange(1, queries + 1), (batch, 1))
    return np.array(kind)


def draw(*shape):
    return np.random.default_rng([SEED, *shape]).standard_normal(shape, dtype=np.float32)


def visible(lens, batch, queries, keys):
    """(query, key) pairs to score, and rows of keys that any query sees."""
    if lens is None:
        return batch * queries * keys, batch * keys
    lens = np.broadcast_to(lens.reshape(batch, -1), (batch, queries))
    return int(lens.sum()), int(lens.max(axis=1).sum())


@dataclass(frozen=True)
class MultiHead:
    """MultiHeadAttention in eval mode; one input three times where `self_attention`, else keys = values."""

    name: str
    where: str
    batch: int
    queries: int
    keys: int
    num_hiddens: int
    num_heads: int
    lens: Union[str, list, None]
    self_attention: bool
    target: Optional[float] = None
    reference = D2L

    @property
    def shape(self):
        return f"{self.batch},{self.queries},{self.keys},{self.num_hiddens},{self.num_heads}"

    def flops(self):
        pairs, key_rows = visible(self.valid_lens(), self.batch, self.queries, self.keys)
        rows = 2 * self.batch * self.queries + 2 * key_rows  # through W_q and W_o, W_k and W_v
        return 2 * rows * self.num_hiddens**2 + 4 * pairs * self.num_hiddens

    def valid_lens(self):
        return lengths(self.lens, self.batch, self.queries, self.keys)

    def contenders(self, libs):
        torch = libs.torch
        x = draw(self.batch, self.queries, self.num_hiddens)
        y = x if self.self_attention else draw(self.batch, self.keys, self.num_hiddens)
        lens = self.valid_lens()
        tx = torch.from_numpy(x)
        ty = tx if self.self_attention else torch.from_numpy(y)
        tlens = None if lens is None else torch.from_numpy(lens)
        result, weights = {}, None
        for name, d2l in libs.d2l.items():
            sizes = (self.num_hiddens,) * 3 if name == D2L[0] else ()
            theirs = d2l.MultiHeadAttention(*sizes, self.num_hiddens, self.num_heads, 0.1).eval()
            theirs(tx, ty, ty, tlens)  # fixes the sizes of the lazy generation
            if weights is not None:
                theirs.load_state_dict(weights)
            weights = theirs.state_dict()
            result[name] = lambda module=theirs: module(tx, ty, ty, tlens)
        if self.lens != "ramp":  # nn.MultiheadAttention has one length per example
            result["nn.MultiheadAttention"] = self._torch_layer(torch, weights, tx, ty, tlens)
        ours = libs.mha_c.MultiHeadAttention(self.num_hiddens, self.num_heads, 0.1)
        ours.load_state_dict(weights)
        return {"mha_c": lambda: ours(x, y, y, lens), **result}

    def _torch_layer(self, torch, weights, tx, ty, tlens):
        layer = torch.nn.MultiheadAttention(self.num_hiddens, self.num_heads, bias=False, batch_first=True).eval()
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([weights[f"W_{part}.weight"] for part in "qkv"]))
            layer.out_proj.weight.copy_(weights["W_o.weight"])
        padding = None if tlens is None else torch.arange(self.keys)[None, :] >= tlens[:, None]
        return lambda: layer(tx, ty, ty, key_padding_mask=padding, need_weights=False)[0]


@dataclass(frozen=True)
class Additive:
    """AdditiveAttention in eval mode; in a decoder, keys = values are the permuted outputs of an encoder."""

    name: str
    where: str
    batch: int
    queries: int
    keys: int
    num_hiddens: int
    query_size: int
    key_size: int
    value_size: Optional[int]  # None: keys and values are one array
    lens: Union[str, list, None]
    target: Optional[float] = None
    reference = D2L

    @property
    def shape(self):
        return f"{self.batch},{self.queries},{self.keys},{self.num_hiddens}"

    def flops(self):
        pairs, key_rows = visible(self.valid_lens(), self.batch, self.queries, self.keys)
        projections = 2 * self.num_hiddens * (self.batch * self.queries * self.query_size + key_rows * self.key_size)
        # one addition, one tanh, one multiply-add for each pair and feature
        return projections + pairs * (4 * self.num_hiddens + 2 * (self.value_size or self.key_size))

    def valid_lens(self):
        return lengths(self.lens, self.batch, self.queries, self.keys)

    def contenders(self, libs):
        torch = libs.torch
        q = draw(self.batch, self.queries, self.query_size)
        k = draw(self.keys, self.batch, self.key_size).transpose(1, 0, 2)
        v = k if self.value_size is None else draw(self.batch, self.keys, self.value_size)
        lens = self.valid_lens()
        tq, tk = torch.from_numpy(q), torch.from_numpy(k)
        tv = tk if v is k else torch.from_numpy(v)
        tlens = None if lens is None else torch.from_numpy(lens)
        result, weights = {}, None
        for name, d2l in libs.d2l.items():
            sizes = (self.key_size, self.query_size) if name == D2L[0] else ()
            theirs = d2l.AdditiveAttention(*sizes, self.num_hiddens, 0.1).eval()
            theirs(tq, tk, tv, tlens)
            if weights is not None:
                theirs.load_state_dict(weights)
            weights = theirs.state_dict()
            result[name] = lambda module=theirs: module(tq, tk, tv, tlens)
        ours = libs.mha_c.AdditiveAttention(self.num_hiddens, 0.1)
        ours.load_state_dict(weights)
        return {"mha_c": lambda: ours(q, k, v, lens), **result}


@dataclass(frozen=True)
class Grouped:
    """GQAAttention of the book's third generation, causal, of one input: beside its lines on torch."""

    name: str
    where: str
    batch: int
    queries: int
    num_hiddens: int
    num_heads: int
    num_kv_heads: int
    target: Optional[float] = None
    reference = ("torch SDPA",)

    @property
    def shape(self):
        return f"{self.batch},{self.queries},{self.num_hiddens},{self.num_heads}/{self.num_kv_heads}"

    def flops(self):
        share = self.num_kv_heads / self.num_heads
        projections = 2 * self.batch * self.queries * self.num_hiddens**2 * (2 + 2 * share)
        return projections + 2 * self.batch * self.queries**2 * self.num_hiddens  # half of all pairs

    def layer(self, mha_c):
        sizes = self.num_hiddens, self.num_heads, self.num_kv_heads
        return mha_c.GQAAttention(*sizes, rng=SEED)

    def contenders(self, libs):
        torch, ours = libs.torch, self.layer(libs.mha_c)
        x = draw(self.batch, self.queries, self.num_hiddens)
        tx = torch.from_numpy(x)
        linear, attend = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
        W_q, W_k, W_v, W_o = (torch.tensor(ours.state_dict()[f"W_{part}.weight"]) for part in "qkvo")

        def theirs():
            rows = (
                linear(tx, W).reshape(*tx.shape[:2], -1, self.num_hiddens // self.num_heads) for W in (W_q, W_k, W_v)
            )
            out = attend(*(x.transpose(1, 2) for x in rows), is_causal=True, enable_gqa=True)
            return linear(out.transpose(1, 2).reshape(tx.shape), W_o)

        return {"mha_c": lambda: ours(x, x, x), "torch SDPA": theirs}


@dataclass(frozen=True)
class Plain:
    """Attention without projections, (B, H, Q or K, D)."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    causal: bool = False
    target: Optional[float] = None
    where = "attention alone"
    reference = ("torch SDPA",)

    @property
    def name(self):
        size = f"{self.queries}" if self.queries == self.keys else f"{self.queries}x{self.keys}"
        few = f"b{self.batch}" if self.batch == 8 else ""  # of the same as a larger case
        return f"S{size}d{self.head_dim}" + few + ("c" if self.causal else "")

    @property
    def shape(self):
        size = f"{self.queries}" if self.queries == self.keys else f"{self.queries}x{self.keys}"
        return f"{self.batch},{self.heads},{size},{self.head_dim}" + (" causal" if self.causal else "")

    def flops(self):
        pairs = self.queries * self.keys // (2 if self.causal else 1)
        return 4 * self.batch * self.heads * pairs * self.head_dim

    def contenders(self, libs):
        torch = libs.torch
        q = draw(self.batch, self.heads, self.queries, self.head_dim)
        k, v = draw(2, self.batch, self.heads, self.keys, self.head_dim)
        tq, tk, tv = (torch.from_numpy(array) for array in (q, k, v))
        attend = torch.nn.functional.scaled_dot_product_attention
        ours = libs.mha_c.functional.dot_product_attention
        return {
            "mha_c": lambda: ours(q, k, v, causal=self.causal),
            "torch SDPA": lambda: attend(tq, tk, tv, is_causal=self.causal),
        }


CASES = [
    MultiHead("M1", "multi-head attention, first example", 2, 4, 6, 100, 5, [3, 2], False, target=15),
    MultiHead("M2", "self-attention, first example", 2, 4, 4, 100, 5, [3, 2], True),
    MultiHead("M3", "encoder, first example", 2, 100, 100, 24, 8, [3, 2], True, target=8),
    MultiHead("M4", "decoder, first example, a length per query", 2, 100, 100, 24, 8, "ramp", True),
    MultiHead("M5", "Transformer of d2l 0.17", 64, 10, 10, 32, 4, "random", True, target=8),
    MultiHead("M6", "Transformer of d2l 0.17 predicting", 1, 1, 10, 32, 4, "random", False, target=20),
    MultiHead("M7", "Transformer of d2l 1.0", 128, 9, 9, 256, 4, "random", True, target=2),
    MultiHead("M8", "Transformer of d2l 1.0 predicting", 4, 1, 9, 256, 4, "random", False, target=4),
    MultiHead("M9", "BERT, first example", 2, 8, 8, 768, 4, None, True),
    MultiHead("M10", "BERT pre-training, batch 64 of 512", 64, 64, 64, 128, 2, "random", True, target=2.2),
    MultiHead("M11", "BERT encoding", 1, 10, 10, 128, 2, "full", True, target=10),
    MultiHead("M12", "BERT-small, batch 64 of 512", 64, 128, 128, 256, 4, "random", True, target=1.8),
    MultiHead("M13", "BERT-base, 512 tokens, batch 1", 1, 512, 512, 768, 12, "full", True, target=1.4),
    MultiHead("M14", "vision transformer, batch 16 of 128", 16, 37, 37, 512, 8, None, True, target=1.2),
    Additive("A1", "scoring functions, first example", 2, 1, 10, 8, 20, 2, 4, [2, 6]),
    Additive("A2", "Bahdanau decoder of d2l 0.17", 64, 1, 10, 32, 32, 32, None, "random", target=8),
    Additive("A3", "Bahdanau decoder of d2l 1.0", 128, 1, 9, 256, 256, 256, None, "random", target=2.5),
    Additive("A4", "Bahdanau decoder of d2l 1.0 predicting", 4, 1, 9, 256, 256, 256, None, "random"),
    Additive("A5", "Bahdanau decoder, first example", 4, 1, 7, 16, 16, 16, None, None, target=8),
    Grouped("G1", "language model of the third generation", 1, 128, 256, 8, 2),
    Grouped("G2", "language model of the third generation, batch 32 of 64 tokens", 32, 64, 128, 4, 2),
    # Pairs that must not differ: a length that is no multiple of any vector, hidden keys beside seen ones.
    Plain(1, 12, 127, 127, 64, target=1.5),
    Plain(1, 12, 128, 128, 64, target=1.5),
    Plain(1, 12, 128, 128, 64, causal=True, target=1.6),
    Plain(1, 12, 512, 512, 64, target=1.3),
    Plain(1, 12, 512, 512, 64, causal=True, target=1.7),
    Plain(1, 12, 2048, 2048, 64, target=1.2),
    Plain(1, 12, 2048, 2048, 64, causal=True, target=1.3),
    Plain(1, 8, 4096, 4096, 64, target=1.2),
    Plain(1, 8, 4096, 4096, 64, causal=True, target=1.3),
    Plain(1, 4, 512, 512, 128, target=1.15),
    Plain(1, 4, 512, 512, 128, causal=True, target=1.4),
    Plain(8, 8, 37, 37, 64),  # 2.4 MB of queries, keys, values and results: in the cache; those of 64 items are not
    Plain(64, 8, 37, 37, 64, target=2.5),
    Plain(64, 8, 37, 37, 64, causal=True, target=2.5),
    Plain(64, 4, 10, 10, 8, target=6),
    Plain(64, 4, 10, 10, 8, causal=True, target=6),
    Plain(1, 32, 1, 2048, 128, target=1.0),
]
GEOMETRIC_MEAN_TARGET = 5  # of the M and A cases with the default number of threads
