"""What others call an argument, and what a name was meant to be that does not exist, in calls and in the package."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

_ASKING_WEIGHTS = "need_weights", "return_attention_scores", "output_attentions"
CAUSAL = "is_causal", "use_causal_mask"


class OtherNames(NamedTuple):
    """What others call an argument, in one line of words, by where a word says so.

    anywhere     in calls, constructors and attributes of anybody's attention, and in calls of ours
    constructor  in constructors alone: in a call the word says nothing, or another thing
    ours         in calls and constructors of ours, as torch, Keras, JAX, Hugging Face or other editions call it; of
                 others in constructors, where those have words of their own
    """

    anywhere: str = ""
    constructor: str = ""
    ours: str = ""


# By the names of the book, and of ours.  Where a word stands in two rows, the first row has it.
OTHERS = {
    "head_dim": OtherNames(
        "d_k dim_head d_head head_size dim_per_head per_head_dim d_keys depth head_width 头维度 每头维度",
        constructor="d_v dk dv head_dimension",
    ),
    "query_size": OtherNames(
        "d d_k 查询维度 查询大小 输入维度",
        constructor="q_dim dim_q d_q d_query d_in in_features input_dim in_dim d_input dim_in in_size input_size "
        "enc_dim dec_dim dec_hid_dim decoder_dim decoder_hidden_dim decoder_hidden_size decoder_size",
        ours="qdim query_dim",
    ),
    "key_size": OtherNames(
        "键维度 键大小",
        constructor="k_dim context_dim enc_hid_dim encoder_dim encoder_hidden_dim encoder_hidden_size encoder_size "
        "d_key",
        ours="kdim key_dim",
    ),
    "value_size": OtherNames("值维度 值大小", constructor="v_dim d_value", ours="vdim value_dim"),
    "num_hiddens": OtherNames(
        "hidden_size d_model embed_dim hidden_dim hiddens num_hidden dim emb d_out n_embd emb_dim embed_size weidu "
        "隐藏维度 隐藏单元数 隐藏大小 隐藏层大小 模型维度 嵌入维度 特征维度 维度",
        constructor="attn_dim attention_dim inner_dim out_dim features channels embed_dimension embedding_dim n_units "
        "hidden embed d_attn model_dim dim_model width n_state attention_size attn_size attn_hidden size",
        ours="units",
    ),
    "num_heads": OtherNames(
        "n_heads heads h H nhead n_head nheads num_head num_attention_heads head_num toushu tou_shu "
        "头数 头数量 注意力头数 ヘッド数 헤드수",
        constructor="nh n_attention_heads",
    ),
    "max_len": OtherNames(
        "max_length context_length block_size 最大长度 上下文长度",
        constructor="max_seq_len max_seq_length seq_len n_ctx max_position n_positions context_len ctx_len "
        "max_position_embeddings max_sequence_length t t_max length num_steps n_steps num_positions "
        "timesteps max_steps",
    ),
    "base": OtherNames(constructor="theta rope_theta rope_base rotary_base freq_base base_freq"),
    "num_layers": OtherNames(constructor="n_layers n_layer depth"),
    "vocab_size": OtherNames(constructor="vocab"),
    "window": OtherNames(
        constructor="window_size window_len window_length sliding_window attention_window local_window",
    ),
    "chunk_size": OtherNames(
        constructor="chunk chunk_len chunk_length kv_chunk_size key_chunk_size k_chunk_size tile_size",
    ),
    "temperature": OtherNames(constructor="temp"),
    "device": OtherNames(constructor="device"),
    "dtype": OtherNames(constructor="dtype"),
    "queries": OtherNames(
        "query q x_q q_x hidden decoder_hidden dec_hidden decoder_state hidden_state chaxun 查询 クエリ 쿼리",
    ),
    "keys": OtherNames(
        "key k x_kv kv_x x_k encoder_outputs encoder_output encoder_out enc_outputs enc_output enc_out "
        "encoder_hidden_states encoder_states encoder_hidden enc_hidden enc_states memory context annotations "
        "features key_value_states kv_states kv jian 键 キー 키",
    ),
    "values": OtherNames("value v vals val x_v zhi 值 バリュー 밸류 값"),
    "X": OtherNames("x input inputs in_features in_query_or_key scores score s a logits hidden_states スコア"),
    "valid_lens": OtherNames(
        "valid_len valid_length valid_lengths lens lengths length seq_lens seq_lengths 有效长度 有効長",
        ours="seq_len sequence_length",
    ),
    "w_v": OtherNames("wv v_a va v_t vt w_a"),
    "num_kv_heads": OtherNames(
        "n_kv_heads n_kv_head kv_heads num_key_value_heads num_kv_groups n_kv n_kv_groups kv_groups"
    ),
    "dropout": OtherNames(
        "dropout_p drop p dropout_rate dropout_prob attn_dropout attn_pdrop attn_drop attention_dropout p_dropout "
        "丢弃率 丢弃概率 暂退率 暂退概率",
    ),
    "bias": OtherNames("use_bias qkv_bias 偏置 使用偏置", ours="attn_bias attention_bias position_bias score_bias"),
    "rng": OtherNames(ours="seed generator random_state"),
    "return_weights": OtherNames(ours=" ".join(_ASKING_WEIGHTS)),
    "causal": OtherNames(ours=" ".join(CAUSAL)),
    "keep_mask": OtherNames(ours="mask attn_mask attention_mask"),
}

# Names of masks in other libraries, and whether True hides a key there; None: in some of them.
MASKS = {
    **dict.fromkeys(("attention_mask", "keep_mask", "key_mask", "value_mask"), False),
    **dict.fromkeys((f"{of}key_padding_mask" for of in ("", "src_", "tgt_", "memory_")), True),
    **dict.fromkeys((f"{of}mask" for of in ("", "attn_", "src_", "tgt_", "memory_", "padding_", "pad_")), None),
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


def _ours() -> dict[str, str]:
    """{word: the argument of ours}; a letter alone says enough of few."""
    found: dict[str, str] = {}
    for ours, others in OTHERS.items():
        for word in f"{others.anywhere} {others.ours}".split():
            if len(word) > 1 or word in "qkvp":
                found.setdefault(word, ours)
    return found


_OURS = _ours()


def meant(name: str, known: Iterable[str]) -> str:
    """The one of the known names that was probably meant; "" if none is near."""
    names: Collection[str] = list(known)
    if _OURS.get(name) in names:
        return _OURS[name]
    near = difflib.get_close_matches(name.lower(), [one.lower() for one in names], 1, 0.75)
    return next((one for one in names if near and one.lower() == near[0]), "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to end or go on a sentence with; "" if no known name is near."""
    found = meant(name, known)
    return f": did you mean {found}?" if found else ""


def listed(names: Sequence[str], word: str = "and") -> str:
    """Names as a sentence has them: "a", "a and b", "a, b and c"."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))
