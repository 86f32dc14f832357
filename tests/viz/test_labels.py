"""Which tokens stand at rows and columns."""

import numpy as np
import pytest

from mha_c.viz import interactive, labels


@pytest.mark.parametrize(
    "tokens, queries, keys",
    [
        (("good morning", "Servus"), ["good", "morning"], ["Servus"]),
        (("Servus", "good morning"), ["Servus"], ["good", "morning"]),
        (("the cat", "le chat"), ["the", "cat"], ["le", "chat"]),
        (("the", "cat"), ["the", "cat"], ["the", "cat"]),
        (["the", "cat"], ["the", "cat"], ["the", "cat"]),
        ("the cat", ["the", "cat"], ["the", "cat"]),
        ((["New York"], ["is", "big"]), ["New York"], ["is", "big"]),
    ],
)
def test_a_tuple_of_two_strings_is_two_sentences_where_one_has_a_blank(tokens, queries, keys):
    assert labels.pair_of(tokens, 0, 1) == (queries, keys)
    page = interactive.view(np.full((1, len(queries), len(keys)), 1 / len(keys)), tokens=tokens)
    assert all(token in page.text for token in (*queries, *keys))
