"""Whole files of courses: the attention is judged, and never the model, the block, or a helper by its name."""

from pathlib import Path

import pytest

import needs

COURSES = Path(__file__).parent / "courses"
# {file: (what is judged of it; a line, what a student wrote instead, the mistake that this is)}
FILES = {
    "char_gpt": (["MultiHeadAttention"], "wei = F.softmax(wei, dim=-1)", "wei = F.softmax(wei, dim=1)", "softmax_axis"),
    "tutorial": (["MultiheadAttention", "PositionalEncoding"], "/ math.sqrt(d_k)", "/ d_k", "scale_d"),
    "chapter": (
        ["AdditiveAttention", "MultiHeadAttention", "PositionalEncoding"],
        "keys.transpose(1, 2)) / math.sqrt(d)", "keys.transpose(1, 2)) / d", "scale_d",
    ),
    "cs336": (
        ["run_scaled_dot_product_attention", "run_multihead_self_attention", "run_rope"],
        "x1 * cos - x2 * sin", "x1 * cos + x2 * sin", "rope_direction",
    ),
    "cs224n": (
        ["CausalSelfAttention"],
        "self.mask[:, :, :T, :T] == 0, -1e10", "self.mask[:, :, :T, :T] == 0, 0", "mask_zero",
    ),
    "bert": (["BertSelfAttention"], "/ math.sqrt(self.attention_head_size)", "/ self.attention_head_size", "scale_d"),
    "translation": (["BahdanauAttention"], "torch.tanh(self.Wa(query) + self.Ua(keys))",
                    "self.Wa(query) + self.Ua(keys)", "no_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_attentions_of_a_course_file_are_judged(judged, name):
    needs.module("torch")
    expected, line, instead, mistake = FILES[name]
    text = (COURSES / f"{name}.txt").read_text(encoding="utf-8")
    right = judged(text)
    assert [each.name for each in right.judged] == expected and not right.left
    assert right.ok, str(right)
    assert text.count(line) == 1
    wrong = judged(text.replace(line, instead))
    assert wrong.ok is False and mistake in [id for each in wrong.judged for id in each.as_dict()["mistakes"]]


RIGHT = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
def attention(queries, keys, values, valid_lens=None):
    scores = queries @ keys.swapaxes(1, 2) / np.sqrt(queries.shape[-1])
    if valid_lens is not None:
        scores = np.where(np.arange(keys.shape[1]) < valid_lens.reshape(len(scores), -1, 1), scores, -1e6)
    return softmax(scores) @ values
"""


@pytest.mark.parametrize(
    ("more", "left"),
    [
        ("class Encoder:\n    def __init__(self, num_hiddens, num_heads): raise NotImplementedError('of students')\n"
         "    def __call__(self, x): return x\n", {"Encoder": "unmade"}),
        ("def plot_attention(weights, words, file): raise OSError(file)\n", {"plot_attention": "not_sure"}),
        ("def split_data(data, share): return data[:share], data[share:]\n", {"split_data": "not_sure"}),
        ("class PositionWiseFFN:\n    def __call__(self, x): return x * 2\n", {}),
        ("class AttentionOptions:\n    heads = 2\n", {}),
    ],
)  # fmt: skip
def test_what_is_no_attention_beyond_doubt_makes_no_file_wrong(judged, more, left):
    """It is left out, and said; alone it is no verdict; named, it is judged."""
    report = judged(RIGHT + more)
    assert report.ok and [each.name for each in report.judged] == ["attention"]
    assert {name: problem["id"] for name, problem in report.as_dict()["left_out"].items()} == left
    assert all(f"Left out: {name}: " in str(report) for name in left)
    assert judged(more).ok is None
    wrong = judged(RIGHT.replace("np.sqrt(queries.shape[-1])", "1") + more)
    assert wrong.ok is False and [each.answer.mistakes for each in wrong.judged] == [["no_scale"]]


def test_a_part_is_judged_where_its_whole_cannot_be(judged):
    """The whole has no verdict, so the file has none, unless the part is wrong."""
    whole = "def attention_of_codes(queries, keys, values, valid_lens, codebook):\n"
    whole += "    return attention(queries, keys, values, valid_lens)\n"
    report = judged(RIGHT + whole)
    assert report.ok is None and [each.ok for each in report.judged] == [None, True]
    assert judged(RIGHT.replace("np.sqrt(queries.shape[-1])", "1") + whole).ok is False


def test_a_class_that_cannot_be_made_is_judged_as_the_file_made_it(judged):
    torch = needs.module("torch")
    del torch
    text = (COURSES / "cs224n.txt").read_text(encoding="utf-8").replace("config.n_head", "config.quux")
    text = text.replace(
        "super().__init__()\n        assert", "super().__init__()\n        assert config.quux == 2\n        assert"
    )
    made = "\nmodel = GPT(GPTConfig(9, 8, n_embd=8, quux=2, n_layer=1))\n"
    assert judged(text).judged[0].ok is not True
    assert judged(text + made).judged[0].ok


def test_a_part_is_judged_too_where_nothing_is_known_of_what_is_wrong_with_its_whole(judged):
    """The innermost attention says which line it is; the whole is right with a right part."""
    whole = """
def my_attention(queries, keys, values, valid_lens=None):
    output = attention(queries, keys, values, valid_lens)
    return np.tanh(output - output.mean(axis=1, keepdims=True)) ** 3
"""
    report = judged(RIGHT + whole)
    assert [(each.name, each.ok) for each in report.judged] == [("my_attention", False), ("attention", True)]
    both = judged(RIGHT.replace("np.sqrt(queries.shape[-1])", "queries.shape[-1]") + whole)
    assert [each.answer.mistakes for each in both.judged] == [["unknown"], ["scale_d"]]


BESIDE = """
class Wrapper{name}(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = BertSelfAttention(config)
        self.{linear} = nn.Linear(config.hidden_size, config.hidden_size)
"""


def test_without_an_output_projection_it_is_right_where_its_holder_has_one(judged):
    """A block's linear layers are no projection of its attention."""
    needs.module("torch")
    alone = (COURSES / "bert.txt").read_text(encoding="utf-8").partition("class BertSelfOutput")[0]
    for name, right in {"Attention": True, "AttentionBlock": False}.items():
        report = judged(alone + BESIDE.format(name=name, linear="dense"), "BertSelfAttention")
        assert report.ok is right, str(report)
        assert right or report.judged[0].answer.mistakes == ["no_output_projection"]
