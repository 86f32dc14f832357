"""What people call things: which of the book's arguments a parameter is, which of its weights an attribute is."""

from __future__ import annotations

import inspect
import re
from typing import Any

OTHERS = {  # the book's names, and others for the same
    "queries": "query q x_q q_x hidden decoder_hidden dec_hidden decoder_state hidden_state chaxun 查询 クエリ 쿼리",
    "keys": "key k x_kv kv_x x_k encoder_outputs encoder_output encoder_out enc_outputs enc_output enc_out "
    "encoder_hidden_states encoder_states encoder_hidden enc_hidden enc_states memory context annotations features "
    "key_value_states kv_states kv jian 键 キー 키",
    "values": "value v x_v zhi 值 バリュー 밸류 값",
    "X": "x input inputs in_features in_query_or_key scores score s a logits hidden_states スコア",
    "valid_lens": "valid_len valid_length valid_lengths lens lengths length seq_lens seq_lengths 有效长度 有効長",
    "w_v": "wv v_a va v_t vt w_a",
    "num_heads": "n_heads heads h H nhead n_head nheads num_head num_attention_heads head_num "
    "toushu tou_shu 头数 头数量 注意力头数 ヘッド数 헤드수",
    "num_kv_heads": "n_kv_heads n_kv_head kv_heads num_key_value_heads num_kv_groups n_kv",
    "head_dim": "d_k dim_head d_head head_size dim_per_head per_head_dim d_keys depth head_width 头维度 每头维度",
    "num_hiddens": "hidden_size d_model embed_dim hidden_dim hiddens num_hidden dim emb d_out n_embd emb_dim "
    "embed_size weidu 隐藏维度 隐藏单元数 隐藏大小 隐藏层大小 模型维度 嵌入维度 特征维度 维度",
    "max_len": "max_length context_length block_size 最大长度 上下文长度",
    "query_size": "d d_k 查询维度 查询大小 输入维度", "key_size": "键维度 键大小", "value_size": "值维度 值大小",
    "dropout": "dropout_p drop p dropout_rate dropout_prob attn_dropout attn_pdrop attn_drop attention_dropout "
    "p_dropout 丢弃率 丢弃概率 暂退率 暂退概率",
    "bias": "use_bias qkv_bias 偏置 使用偏置",
}  # fmt: skip
HEADS = ("num_heads", *OTHERS["num_heads"].split())
CONFIGS = "config", "cfg", "conf", "args", "hparams", "configuration", "params", "opt"
_MORE_HEADS = re.compile("(n|num|number|count)?_?(of_)?((attn|attention|self|q|query)_)?(h|heads?)(_?(num|count))?")
_WRITTEN_IN_C = {"scaled_dot_product_attention": ("query", "key", "value", "attn_mask")}  # no signature tells these

# Words of a weight's name that say nothing: W_q, fc_q, linear_q, q_lin, to_q, w_qs, query_projection are one.
_FILL = (
    "w wt weight weights fc lin linear proj projection project to layer dense net map attn attention self mat matrix "
    "transform in u mapping mappings maps projector"
).split()
_CHINESE_FILL = re.compile("线性|投影|映射|变换|权重|矩阵|层")  # the same in words that nothing separates
_ROOTS = {
    "q": "q qs wq wqs uq query queries toqueries toquery toq 查询", "k": "k ks wk wks uk key keys tokeys tokey tok 键",
    "v": "v vs wv wvs uv value values val tovalues tovalue tov 值",
    "o": "o wo w0 out outs output outputs concat final unify unifyheads combine merge joint 输出",
    "qkv": "qkv wqkv", "kv": "kv wkv",
}  # fmt: skip
_ROOT = {word: root for root, words in _ROOTS.items() for word in words.split()}
_WHOLE = {  # names that are made of such words alone, or stand in for a name
    "in_proj": "qkv", "c_attn": "qkv", "query_key_value": "qkv", "c_proj": "o", "proj": "o", "projection": "o",
    "fc": "o", "linear": "o", "dense": "o", "w_0": "o", "w": "o", "fc_o": "o", "last": "o",
}  # fmt: skip


def books_name(name: str, wanted: list[str]) -> str:
    """Which of the wanted names of the book `name` stands for, or ""."""
    for each in wanted:
        if name.lower() == each.lower() or name.lower() in OTHERS.get(each, "").lower().split():
            return each
        if each.startswith("W_") and root_of(name) == each[2:]:
            return each
    return ""


def heads_of(layer: Any) -> int:
    """The number of heads that a layer's attributes, or those of its configuration, say; 0 where they say none."""
    held = {name: x for name, x in getattr(layer, "__dict__", {}).items() if _counts(x)}
    found: list[Any] = [x for name in HEADS for x in [getattr(layer, name, None)] if _counts(x)]
    spelt = {re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_"): x for name, x in held.items()}
    found += [x for name, x in spelt.items() if _MORE_HEADS.fullmatch(name)]
    held_by = [getattr(layer, name, None) for name in CONFIGS]
    configs: list[Any] = [each if type(each) is dict else getattr(each, "__dict__", {}) for each in held_by]
    found += [each[name] for each in configs for name in HEADS if _counts(each.get(name))]
    return int(found[0]) if found else 0


def _counts(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def root_of(name: str) -> str:
    """What a weight of this name makes: "q", "k", "v", "o", "qkv", "kv", or "" where the name does not say."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    name = name[: -len("_weight")] if name.endswith("_weight") else name
    if name in _WHOLE:
        return _WHOLE[name]
    words = _CHINESE_FILL.sub("", "".join(word for word in name.split("_") if word not in _FILL))
    several = "".join(sorted(words, key="qkv".find)) if len(words) > 1 and {*words} <= {*"qkv"} else ""
    return _ROOT.get(several or words, "")  # kqv, vk: in another order


def parameters(mine: Any) -> list[inspect.Parameter]:
    """Of a call; none where it is written in C and not known, or takes any number of them."""
    call = mine if inspect.isroutine(mine) else getattr(mine, "forward", None) or mine.__call__
    try:
        found = list(inspect.signature(call).parameters.values())[isinstance(mine, type) :]  # without self
    except (TypeError, ValueError):
        known = _WRITTEN_IN_C.get(getattr(mine, "__name__", ""), ())
        default = {"attn_mask": None}
        return [
            inspect.Parameter(
                name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default.get(name, inspect.Parameter.empty)
            )
            for name in known
        ]
    named = [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named if any(p.kind is not p.KEYWORD_ONLY for p in named) or len(named) == len(found) else []
