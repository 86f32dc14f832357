"""The small trained layer of the package: each head finds its word, also in sentences that it has not read."""

import numpy as np
import pytest

from mha_c import teach
from mha_c.teach.players import trained_layer

SENTENCE = "the {} did not {} the {} because it was {}"
ANIMALS, MEALS = "cat dog horse cow mouse goat".split(), "soup salad pear bread cake rice".split()
OF_ANIMALS, OF_MEALS = "tired ill full shy".split(), "cold stale burnt salty".split()
EAT, IT, LAST, ANIMAL, MEAL = 4, 8, 10, 1, 6


def looked_at(sentence):
    """(heads, words, words): the weights."""
    layer, X, tokens = teach.trained(sentence)
    assert tokens == sentence.split() and X.shape == (1, len(tokens), 32)
    layer(X, X, X)
    return layer.attention_weights[0]


def test_the_file_is_small():
    assert trained_layer.FILE.stat().st_size <= 12_000


@pytest.mark.parametrize(("last", "referent"), [("tired", ANIMAL), ("ill", ANIMAL), ("cold", MEAL), ("salty", MEAL)])
def test_each_head_finds_its_word_in_the_sentences_of_the_pages(last, referent):
    before, noun, subject, meaning = looked_at(SENTENCE.format("cat", "eat", "soup", last))
    assert np.diagonal(before, -1).min() >= 0.9
    assert min(noun[ANIMAL - 1, ANIMAL], noun[MEAL - 1, MEAL]) >= 0.9
    assert subject[EAT, ANIMAL] >= 0.9
    assert meaning[IT, referent] >= 0.9 and meaning[LAST, referent] >= 0.9
    itself = [i for i in range(11) if i not in (IT, LAST, 0, 5)]  # two words are "the": each may find the other
    assert meaning[itself, itself].min() >= 0.9


def test_the_default_is_the_sentence_of_the_pages():
    assert " ".join(teach.trained()[2]) == SENTENCE.format("cat", "eat", "soup", "tired")


def test_pairs_of_noun_and_last_word_that_it_has_not_read():
    """Which these are: the noun's number and the last word's leave the same when divided by 4."""
    found = []
    for n, last in enumerate(OF_ANIMALS + OF_MEALS):
        for a, animal in enumerate(ANIMALS):
            for m, meal in enumerate(MEALS):
                if (a if n < 4 else m) % 4 == n % 4:
                    weights = looked_at(SENTENCE.format(animal, "want", meal, last))
                    found.append(weights[3, IT, ANIMAL if n < 4 else MEAL])
    assert len(found) == 72 and min(found) >= 0.8


@pytest.mark.parametrize(
    ("sentence", "words"),
    [
        ("the cat sat", r"the words sat; it takes 1 to 11 of these: because bread"),
        ("", "0 words"),
        ("the " * 12, "12 words"),
    ],
)
def test_other_words_are_refused(sentence, words):
    with pytest.raises(ValueError, match=words):
        teach.trained(sentence)
    assert looked_at("the cat was tired").shape == (4, 4, 4)
