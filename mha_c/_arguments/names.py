"""What a name was meant to be: the words for names that do not exist, in calls and in the package."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

_ASKING_WEIGHTS = "need_weights", "return_attention_scores", "output_attentions"

# What others call it: torch, Keras, JAX, Hugging Face, and the book's other editions.
ELSEWHERE = {
    **dict.fromkeys(("embed_dim", "d_model", "hidden_size", "units", "num_hidden", "hiddens"), "num_hiddens"),
    **dict.fromkeys(("nhead", "n_heads", "n_head", "heads", "num_attention_heads"), "num_heads"),
    **dict.fromkeys(("p", "dropout_p", "dropout_rate", "drop", "attention_dropout"), "dropout"),
    **dict.fromkeys(("kdim", "key_dim"), "key_size"),
    **dict.fromkeys(("vdim", "value_dim"), "value_size"),
    **dict.fromkeys(("qdim", "query_dim"), "query_size"),
    **dict.fromkeys(("query", "q"), "queries"),
    **dict.fromkeys(("key", "k"), "keys"),
    **dict.fromkeys(("value", "v"), "values"),
    **dict.fromkeys(("valid_len", "lengths", "lens", "seq_len", "sequence_length"), "valid_lens"),
    **dict.fromkeys(("is_causal", "use_causal_mask"), "causal"),
    **dict.fromkeys(("mask", "attn_mask", "attention_mask"), "keep_mask"),
    **dict.fromkeys(("attn_bias", "attention_bias", "position_bias", "score_bias"), "bias"),
    **dict.fromkeys(("seed", "generator", "random_state"), "rng"),
    **dict.fromkeys(_ASKING_WEIGHTS, "return_weights"),
}

# What others have and a layer here has not, and what to write instead: of its call, and of its constructor.
_OF_WEIGHTS = (
    "leave it out, and read layer.attention_weights after the call: (B, heads, Q, K), or (B, Q, K) of one head"
)
INSTEAD = {
    **dict.fromkeys((*_ASKING_WEIGHTS, "return_weights", "average_attn_weights"), _OF_WEIGHTS),
    "window": "keep_mask= hides any keys, and mha_c.functional.dot_product_attention has a window",
    "batch_first": "leave it out: inputs are always (batch, tokens, features)",
    **dict.fromkeys(("add_bias_kv", "add_zero_attn"), "torch.nn.MultiheadAttention alone has it"),
}


def meant(name: str, known: Iterable[str]) -> str:
    """The one of the known names that was probably meant; "" if none is near."""
    names: Collection[str] = list(known)
    if ELSEWHERE.get(name) in names:
        return ELSEWHERE[name]
    near = difflib.get_close_matches(name.lower(), [one.lower() for one in names], 1, 0.75)
    return next((one for one in names if near and one.lower() == near[0]), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to end or go on a sentence with; "" if no known name is near."""
    found = meant(name, known)
    return f": did you mean {found}?" if found else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """Names as a sentence has them: "a", "a and b", "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
