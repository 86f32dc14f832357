"""What a constructor's argument, or a configuration's entry, is by its name; one that answers to any name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..._recognize import books_name

# Names of a constructor's arguments; the first that fits.
_SIZES = {
    "query_size": "query_dim q_dim dim_q d_q d_query d_in in_features input_dim in_dim d_input dim_in in_size "
    "input_size enc_dim dec_dim dec_hid_dim",
    "key_size": "key_dim k_dim kdim enc_hid_dim encoder_dim d_key",
    "value_size": "value_dim v_dim vdim d_value",
    "num_hiddens": "d_out attn_dim attention_dim out_dim units features channels embed_dimension embedding_dim n_units "
    "hidden hiddens embed d_attn model_dim dim_model width n_state attention_size attn_size attn_hidden size",
    "num_heads": "num_attention_heads nh n_attention_heads",
    "max_len": "context_length block_size max_seq_len max_seq_length seq_len n_ctx max_length max_position n_positions "
    "context_len ctx_len max_position_embeddings max_sequence_length t t_max length num_steps n_steps num_positions",
    "head_dim": "d_k d_v dk dv dim_head head_size d_head head_dimension",
    "base": "theta rope_theta",
    "num_layers": "n_layers n_layer depth",
    "vocab_size": "vocab",
    "window": "window_size window_len window_length sliding_window attention_window local_window",
    "chunk_size": "chunk chunk_len chunk_length kv_chunk_size key_chunk_size k_chunk_size tile_size",
    "temperature": "temp",
    "device": "",
    "dtype": "",
}
_NAMES = [
    "num_heads", "num_kv_heads", "head_dim", "num_hiddens", "query_size", "key_size", "value_size", "max_len",
    "dropout", "bias", "base", "num_layers", "vocab_size",
]  # fmt: skip

# What a word of a name that nobody knows says; the first that fits.
_WORDS = [
    ("(head|key|qk).*(size|dim|width|hid)|(size|dim|width).*head", "head_dim"), ("kv.*head|group", "num_kv_heads"),
    ("head|头", "num_heads"), ("name|type", "name"), ("drop|丢弃|暂退", "dropout"), ("prob|rate|^p_", "rate"),
    ("vocab", "vocab_size"), ("bias", "bias"),
    ("use|flash|enable|caus|is_|norm", "flag"), ("layer|idx|_id$|^id$|depth", "num_layers"),
    ("len|ctx|context|block|seq|pos|max|长", "max_len"),
    ("hid|emb|dim|wid|model|feat|size|chan|unit|state|inner|维|宽|隐", "num_hiddens"),
]  # fmt: skip


class _NestedSize(int):
    """A size of a configuration that may be one itself: config.model.width."""

    config: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    def __getitem__(self, name: str) -> Any:
        return self.config[name]


class Config(dict):  # type: ignore[type-arg]
    """A configuration that answers by whatever name a size is asked for: config.n_embd, config["emb_dim"].

    A name that nobody knows is guessed by its words; whether the guess is right, the layer's sizes tell.
    """

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__(known)
        vars(self)["asked"] = set()  # the book's names of what was asked for

    def __getitem__(self, name: str) -> Any:
        found = name if name in self else size_of(name)
        guessed = next((ours for words, ours in _WORDS if re.search(words, str(name).lower())), "")
        if not (found or guessed):
            raise KeyError(name)
        self.asked.add(found or guessed)
        if found:
            return super().__getitem__(found)
        x = super().__getitem__(guessed)
        if type(x) is int:
            x = _NestedSize(x)
            x.config = self
        return x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The size of this name, or the default."""
        return self[name] if size_of(name) or name in self else default


def size_of(name: str) -> str:
    """The book's name of a constructor's argument, or ""."""
    plain = name.lower()
    for ours, others in _SIZES.items():
        if plain == ours or plain in others.split():
            return ours
    if "drop" in plain or plain.endswith("_pdrop"):
        return "dropout"
    return books_name(name, _NAMES) or ("bias" if plain.endswith("bias") else "")
