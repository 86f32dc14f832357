"""The sentences of answers, whole, with named fields, and their translations: languages/zh.txt has the Chinese ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ... import _language
from ..._arguments.calls import refuses_at_the_call

SENTENCES = {
    "right": "Your {name} computes what the book's {kind} does: {count} of {count} probes, {given}.",
    "right_but": "Your {name} gives the numbers of the book's {kind}, but:",
    "right_with_mask": "Your {name} computes what the book's {kind} does with a mask in the place of lengths: {count} "
    "of {count} probes, {given}.",
    "arrays": "NumPy's arrays of float64",
    "tensors": "torch's tensors of float32",
    "in_one": "Yours differs from the book's in one thing: {says}.",
    "in_two": "Yours differs from the book's in two things: {says}.",
    "steps_first": "With (steps, batch, features) it is right: nn.MultiheadAttention takes that, unless "
    "batch_first=True.  If your task has the steps first, say so in the docstring: (steps, batch, features).",
    "nan": "The result is NaN where the book's has numbers.",
    "nan_grown": "exp of a large number is infinite in this line, and NaN comes of it: it must get at most 0.",
    "nan_first": "NaN appears first in this line: {why}.",
    "keys_not_turned": "the keys are not turned, the queries alone are",
    "precision": "Its numbers are right to about three digits: something in it is rounded, or computed in float16 or "
    "bfloat16.",
    "scale_fixed": "it multiplies scores by {factor}, whatever d is, not by 1 / sqrt(d)",
    "one_line": "Yours differs from the book's in one line: with it changed, all numbers are right.",
    "stage": "Up to this stage its numbers are the book's: {stage}.",
    "begins": "The first numbers that the book does not have are made here:",
    "and": "{one}, and {two}",
    "also": "{one}; {two}",
    "within": "Yours differs from the book's only where {form}, and in one thing: {says}.",
    "random": "Your {name} gives other numbers each time.",
    "random_drops": "Dropout must not act outside of training.",
    "random_other": "Numbers are drawn in each call: weights belong into the constructor, not into forward.",
    "random_lengths": "Keys and values have different lengths here, and torch reads memory beyond the shorter ones.",
    "unmade": "Your {name} raises an error when it is made: {error}\nin {line}",
    "dtype": "Inputs of {wanted} give a result of {got}; it should have their type.",
    "no_mask": "It takes no valid_lens and no mask, so it hides no key; the book's is {kind}({signature}).",
    "untried": "What its argument {argument} does was not tried: check does not know this name.  If it hides "
    "keys, call it mask or valid_lens; if not, give check a function without it.",
    "untried_made": "What its constructor's argument {argument} does was not tried.  Give check a layer that is made "
    "as you use it, in the place of the class.",
    "by_positions": "{name} is not like the book's {kind}, and its code says why it may be right: {word}.  No kind of "
    "check adds a number of positions to the scores.  Give check the same attention without it.",
    "not_understood": "check does not know what to give {name} for {arguments}.  Give check a function that makes "
    "these itself, and takes the arguments of the book.",
    "extra_parameter": "It has parameters that the book's {kind} has not: {names}.  At their first values they change "
    "nothing; as soon as they are trained, they do.",
    "bias_lost": "With {flag} there is no bias in {names}.",
    "bias_always": "With {flag} there is a bias in {names} all the same.",
    "bias_unused": "The bias of {names} has no effect: it is there, and not added.",
    "bias_wrong": "The bias of {names} is not just added to what the weight makes, as X W + b is: with other numbers "
    "in it than 0 the result is another.",
    "no_dropout": "It takes dropout, and in training nothing is dropped.",
    "dropout_on_scores": "Dropout acts on the scores, before softmax: a score of 0 is no weight of 0.  It belongs on "
    "the attention weights.",
    "dropout_elsewhere": "Dropout does not act on the attention weights alone, where the book has it.",
    "dropout_uneven": "In training the weights that stay are not all multiplied by one number: dropout acts twice, or "
    "weights are divided by their sum after it.",
    "dropout_factor": "In training, with dropout p = {p}, the weights that stay are multiplied by {factor}, not by "
    "1 / (1 - p) = {right}.",
    "dropout_share": "In training, with dropout p = {p}, {share} of the weights are dropped.",
    "dropout_kept": "In training each call drops the same weights: the mask of dropout is drawn once, not in "
    "each call.",
    "dropout_shared": "In training all items of a batch lose the same weights: they share one mask of dropout.",
    "dropout_of_sum": "In training dropout acts on another array than the sum X + P.",
    "returned_weights": "its second result is not the book's attention weights.",
    "kept_weights": "What it keeps as {name} is not the book's attention weights.",
    "besides": "With scores below -100, where the numbers of small probes do not show it: {says}.",
    "gradients": "Its gradients are not those that differences show: something in it, as detach() or numpy(), cuts the "
    "graph.",
    "shared_heads": "Its heads are one module, several times in a list ([head] * n): they share their weights.",
    "state": "A call depends on calls before it: with the same inputs it gives other numbers the second time.",
    "note_untried": "what a call does with {names} was not tried.",
    "note_empty": "where all keys of a query are hidden, it gives NaN; the book's function gives all of them "
    "one weight.",
    "many_keys": "With {count} keys the numbers are others.  Does something, as a window or a table, end before?",
    "changes_inputs": "It writes into {name}: the caller's array holds other numbers afterwards.",
    "together": "{one} and {two} each hide the right keys alone, but not in one call{why}.  A key that one of them "
    "hides must stay hidden.",
    "at_once": "Any two of {names} hide the right keys in one call, but all at once they do not.  A key that one of "
    "them hides must stay hidden.",
    "together_only": ": there only {name} has an effect",
    "together_either": ": there a key is hidden only if both hide it",
    "together_raises": "{one} and {two} each hide the right keys alone, but in one call it raises {type}: {error}\n"
    "in {line}",
    "not_taken": "Its form where {form} is not taken: {what}.",
    "read": "Read: {sections}",
    "smallest": "The smallest example ({count} of {all} probes differ):",
    "raises_in": "It raises {type}: {error}\nin {line}\nwith {shapes}",
    "here": "Here {error}",
    "exits": "Your {name} ends the program ({type}) when it is called.\nin {line}",
    "internal": "check itself failed: {error}\nin {place}\nThis says nothing about the code.  Please report it, with "
    "the code.",
    "raises": "Your {name} raises an error for {count} of {all} probes",
    "no_output": "Your {name} gives no output for {count} of {all} probes",
    "others_right": "; the others are right.",
    "others_differ": "; the others differ from the book's, too.",
    "shape": "Your {name} gives shape {got} where the book's {kind} gives {expected}",
    "gives_shape": "it gives shape {got} where the book's has {expected}",
    "other_shape": "; the numbers are right, in another shape",
    "transposed": "; transposed by {axes}, the numbers are right",
    "unknown": "Your {name} differs from the book's {kind}, and no known mistake explains it.",
    "laws_broken": "Laws that it breaks:\n  {laws}",
    "no_law_broken": "It breaks none of the laws.",
    "only_where": "  This is so wherever {form}, and nowhere else.",
    "note_writes": "it writes the mask into X, as the book's own does.  A caller who needs X afterwards passes a copy.",
    "note_itself": "it takes queries alone, so keys and values were the queries, too: self-attention.",
    "note_one_input": "its queries, keys and values were one X, as in self-attention: which of them a line reads was "
    "not tried.",
    "note_no_mask": "it takes no lengths and no mask, so no mask was tried.",
    "note_mask_none": "the task has no masks, so none was tried.",
    "note_values": "it takes no values, so keys were the values, too.",
    "note_keys": "it takes no keys, so values were the keys, too.",
    "note_weights_alone": "it gives the attention weights, since it takes no values; a caller multiplies them.",
    "note_second": "the queries are right: this is said of the keys.",
    "note_layout": "it was given {layout}.",
    "note_lens_of_items": "its {argument} is one length for each item, (batch,): with a length for each query, (batch, "
    "queries), which the book's takes, too, it gives no result of the right shape.",
    "note_outputs_first": "its weights are (outputs, inputs), as torch keeps them: X @ W.T.",
    "note_one_width": "its queries, keys and values were as wide as its result: with other widths, which the book's "
    "takes, too, it raises an error.",
    "note_one_length": "it was given as many queries as keys: other numbers, which the book's takes, too, its own "
    "check refuses.",
    "note_mask": "in {argument}, {says}.",
    "note_top_left": "with fewer queries than keys it counts from the first key (top left), as torch's is_causal "
    "does; the last queries of a sequence, which a decoder with a cache has, count from its end.",
    "note_pairs": "it turns neighbouring numbers as pairs (0 and 1, 2 and 3, ...), as the paper does; Llama's code"
    " turns halves: weights of one do not fit the other.",
    "note_halves": "it turns number j and number j + d / 2 as a pair (halves), as GPT-NeoX and Llama's code do; the"
    " paper turns neighbours: weights of one do not fit the other.",
    "note_rotary": "its queries and keys are turned by their positions (rotary), {pairs} as pairs.",
    "note_biases": "{names}: biases were 0 in each call, so what they do was not looked at.",
    "note_one_head": "nothing says a number of heads, so it was asked with one.",
    "note_projected_by": "its output is projected in another part of {name}, so it was compared without W_o.",
    "note_heads": "nothing says a number of heads; a number in its code fits, so it was asked with {heads}.",
    "note_width": "its scale is fixed when it is built: that of {width} features of queries and keys, so it was asked "
    "with so many.",
    "note_table": "it takes sizes and gives the table alone; a caller adds it to X.",
    "note_only_heads": "it takes no weights, so it was compared with heads of the inputs themselves, without "
    "projections.",
    "note_entry": "of what it gives, the entry {entry} was compared; the book's gives the output alone.",
    "note_float32": "its weights are of {type}; it was asked in float32, with float32 weights.",
    "note_overflow": "with scores of some thousands exp overflows in {type}, and the result is no number.  Subtract "
    "the maximum of each row before exp: softmax stays the same.",
    "note_taken_for": "it was taken for {kind}, because {why}; check(mine, kind), or --kind, compares with another.",
    "note_chosen": "this is so with {choice}; without it, its numbers are right.",
    "note_together": "it refuses {one} and {two} in one call, so each was tried alone.",
    "note_only": "in one call with {one} and {two}, only {name} has an effect; who needs both gives one mask that "
    "hides what either hides.",
    "note_unknown_used": "its argument {argument} was tried as a mask.",
}


def say(sentence: str, **fields: Any) -> str:
    """One of these sentences with its fields, in the chosen language."""
    return said(SENTENCES[sentence], **fields)


def said(english: str, **fields: Any) -> str:
    """A sentence of any table with its fields, in the chosen language; in English where it has no translation."""
    sentence = _translations.get(english, english)
    return sentence.format(**fields) if fields else sentence


# ---- languages -------------------------------------------------------------------------------------------------------

_FILES = {path.stem: path for path in (Path(__file__).parent / "languages").glob("*.txt")}
LANGUAGES = sorted(["en", *_FILES])
_translations: dict[str, str] = {}


@refuses_at_the_call
def set_language(language: str) -> None:
    """Choose the language of `check`, `laws`, `puzzle` and the pages of `view`; MHA_C_LANGUAGE does so from outside.

    >>> from mha_c import teach
    >>> def attention(queries, keys, values, valid_lens=None):
    ...     return teach.book.masked_softmax(queries @ keys.swapaxes(1, 2), valid_lens) @ values
    >>> teach.set_language("zh")
    >>> print(str(teach.check(attention)).splitlines()[0])
    你的实现与书中的只有一处不同：评分没有除以 sqrt(d)。
    >>> teach.set_language("en")

    Parameters
    ----------
    language : str
        "en", or "zh" for Chinese in the terms of the book's Chinese edition.

    Raises
    ------
    ValueError
        If there is no such language.
    """
    global _translations
    if language not in LANGUAGES:
        raise ValueError(f"language must be one of {', '.join(LANGUAGES)}, got {language!r}")
    _translations = translations(language)
    _language.choose(language)


def translations(language: str) -> dict[str, str]:
    """{an English sentence: the same in this language}, from the pairs of lines of its file."""
    if language not in _FILES:
        return {}
    lines = [line for line in _FILES[language].read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    lines = [line.replace("\\n", "\n") for line in lines]
    return dict(zip(lines[::2], lines[1::2]))


def _from_outside() -> None:
    chosen = os.environ.get("MHA_C_LANGUAGE") or "en"
    try:
        set_language(chosen)
    except ValueError as error:
        raise ValueError(f"MHA_C_LANGUAGE: {error}") from None


_from_outside()
