"""Which tokens stand at rows and columns of a page."""

import numpy as np
import pytest

from mha_c.viz import view
from view_pages import drawn_weights

SENTENCE = "the cat sat on the mat".split()
weights = pytest.fixture(drawn_weights)


TOKENS = {  # of one example: (what is given, the queries' tokens, the keys')
    "a sentence": ("a b", ["a", "b"], ["a", "b"]),
    "a list of words": (["the", "cat"], ["the", "cat"], ["the", "cat"]),
    "an array of numbers": (np.array([7, 8]), ["7", "8"], ["7", "8"]),
    "none": (None, None, None),
    "a tuple of two words is one sentence": (("the", "cat"), ["the", "cat"], ["the", "cat"]),
    "a tuple of two sentences": (("the cat", "le chat"), ["the", "cat"], ["le", "chat"]),
    "of two lengths": (("a b", "c d e"), ["a", "b"], ["c", "d", "e"]),
    "the second of one word": (("good morning", "Servus"), ["good", "morning"], ["Servus"]),
    "the first of one word": (("Servus", "good morning"), ["Servus"], ["good", "morning"]),
    "a tuple of two lists": ((["New York"], ["is", "big"]), ["New York"], ["is", "big"]),
}


@pytest.mark.parametrize("case", TOKENS)
def test_one_example(case):
    tokens, queries, keys = TOKENS[case]
    rows, columns = len(queries or "ab"), len(keys or "abc")
    page = view(np.full((1, rows, columns), 1 / columns), tokens=tokens)
    (panel,) = page.data["panels"]
    assert (panel["qt"], panel["kt"]) == (queries, keys)
    assert all(token in page.text for token in (*(queries or ()), *(keys or ())))


def test_several_examples_have_tokens_of_their_own(weights):
    page = view([weights(2, 1, 1, 2)], [["a"], (["b"], ["c", "d"])], valid_lens=[1, 2])
    assert [(panel["qt"], panel["kt"]) for panel in page.data["panels"]] == [(["a"], ["a"]), (["b"], ["c", "d"])]


def test_what_follows_the_tokens_is_padding(weights):
    padded = np.zeros((2, 8, 8))
    padded[:, :, :6] = weights(2, 8, 6)
    panel = view(padded, SENTENCE).data["panels"][0]
    assert (panel["q"], panel["k"], panel["qt"], panel["kt"]) == (6, 6, SENTENCE, SENTENCE)
    with pytest.raises(ValueError, match="6 tokens for 8 keys, and the keys after them"):  # then it is no padding
        view(weights(2, 8, 8), SENTENCE)
    assert view(weights(2, 8, 8), SENTENCE, valid_lens=[6]).data["panels"][0]["k"] == 6
    with pytest.raises(ValueError, match="6 tokens for 4 queries"):
        view(weights(4, 4), SENTENCE)
    with pytest.raises(ValueError, match="6 tokens for 5 keys"):
        view(weights(6, 5), SENTENCE)


def test_decoders_have_their_own_tokens_on_both_sides_of_self_attention(weights):
    target, source = "il a perdu".split(), "he lost his dog .".split()
    page = view([[weights(2, 3, 3)], [weights(2, 3, 5)]], (target, source))
    assert [panel["kt"] for panel in page.data["panels"]] == [target, source]


def test_valid_lens_cut_the_keys(weights):
    for lens in ([3, 4], np.array([[2, 3], [4, 1]])):
        page = view(weights(2, 3, 2, 5), valid_lens=lens)
        assert [panel["k"] for panel in page.data["panels"]] == [3, 4]
