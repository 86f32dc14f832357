"""What the page of `view` says, in the language that the reader has chosen: mha_c/_language.py.

The texts of its scripts stand in the playground's table, playground_page/words.js; what Python says of the heads stands
here.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from .. import _language
from .page import FOLDER, SCRIPTS, asset

COLUMNS = {"de": 1, "zh": 2, "tr": 3}  # of the playground's table, whose first column is English
OF_PYTHON = {
    "zh": {
        "{how} {what}, {share} %": "{how}{what}，{share} %",
        "mostly": "主要看",
        "partly": "部分看",
        "the token itself": "词元自身",
        "the same position": "同一位置",
        "the previous token": "前一个词元",
        "the next token": "后一个词元",
        "the position before": "前一个位置",
        "the position after": "后一个位置",
        "the first token": "第一个词元",
        "the last token": "最后一个词元",
        "key {n}": "第 {n} 个键",
        "spread evenly": "均匀分布",
        "spread widely": "分布很广",
        "mixed": "混合",
        "no attention at all": "没有注意力",
        "only one key to look at": "只有一个键可看",
        "Attention weights": "注意力权重",
        "{title}: {heads}, {queries} queries x {keys} keys": "{title}：{heads}，{queries} 个查询 x {keys} 个键",
        "{n} head": "{n} 个头",
        "{n} heads": "{n} 个头",
        "head {n}": "头 {n}",
        "mean": "平均",
        "entropy {entropy} bits   confidence {confidence}": "熵 {entropy} 比特   置信度 {confidence}",
        "mean of the heads, queries down, keys across": "各头的平均，纵向是查询，横向是键",
        "queries down, keys across": "纵向是查询，横向是键",
        "Too large to show in full: {n} neighbouring queries and keys are joined into one cell.": "太大，无法全部显示："
        "相邻的 {n} 个查询和键合并成了一格。",
        "Examples 1 to {count} of {examples}.": "{examples} 个样本中的第 1 到 {count} 个。",
    }
}


def said(english: str, **fields: Any) -> str:
    """The sentence with its fields, in the reader's language, or in English where it has no words."""
    return OF_PYTHON.get(_language.chosen, {}).get(english, english).format(**fields)


def of_scripts() -> dict[str, Any]:
    """What the data of a page say of its language: its name, {a text of the scripts: the same}; nothing of English."""
    column = COLUMNS.get(_language.chosen)
    return {} if column is None else {"lang": _language.chosen, "words": _table(column)}


@cache
def _table(column: int) -> dict[str, str]:
    text = (FOLDER / "playground_page" / "words.js").read_text(encoding="utf-8").partition("const TABLE = ")[2]
    rows = json.loads(re.sub(r",\s*\]", "]", text.partition(";\n")[0]))
    scripts = "".join(asset(FOLDER / name) for name in SCRIPTS["view"][0])
    return {row[0]: row[column] for row in rows if json.dumps(row[0], ensure_ascii=False) in scripts}
