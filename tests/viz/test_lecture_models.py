"""The lecture's trained models, right on what they have not seen and looking where they should; and own layers."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "mha_c" / "viz" / "playground_page" / "lecture_models.json"
TRAINED = json.loads(FILE.read_text(encoding="utf-8"))
IT, LAST, CAT, SOUP = 8, 10, 1, 6
FEMININE = {"cow", "mouse", "goat", "soup", "salad", "pear"}


def arrays(name):
    found = TRAINED[name]["weights"].items()
    return {
        key: (np.frombuffer(base64.b64decode(text), "<i2").reshape(rows, columns) / TRAINED["step"]).astype(np.float32)
        for key, (rows, columns, text) in found
    }


def layer(parts, heads):
    mha = mha_c.MultiHeadAttention(num_hiddens=32, num_heads=heads, dropout=0)
    mha.load_state_dict({f"{name}.weight": parts[name] for name in ("W_q", "W_k", "W_v", "W_o")})
    return mha


def read(sentences):
    """(whether "it" and the last word are held for feminine, weights) of sentences of eleven words."""
    parts, words = arrays("reference"), TRAINED["reference"]["words"]
    ids = np.array([[words.index(word) for word in sentence.split()] for sentence in sentences])
    ahead = np.concatenate([ids[:, 2:], np.zeros_like(ids[:, :2])], axis=1)
    keys = parts["word"][ids] + parts["place"]
    mha = layer(parts, 1)
    out = mha(keys + parts["later"][ahead], keys, keys)
    return (out @ parts["answer"].T)[:, [IT, LAST]].argmax(-1) == 1, mha.attention_weights[:, 0]


def test_the_file_is_small():
    assert FILE.stat().st_size <= 120_000


@pytest.mark.parametrize(("last", "referent"), [("tired", CAT), ("ill", CAT), ("cold", SOUP), ("salty", SOUP)])
def test_it_looks_at_what_it_stands_for_in_every_sentence_shown(last, referent):
    _, weights = read([f"the cat did not eat the soup because it was {last}"])
    assert weights[0, IT, referent] >= 0.8
    assert weights[0, IT, CAT + SOUP - referent] < 0.1


def test_pairs_of_noun_and_last_word_that_it_has_not_seen():
    """Which these are: the noun's number and the last word's leave the same when divided by 4, as the tool says."""
    animals, meals = "cat dog horse cow mouse goat".split(), "soup salad pear bread cake rice".split()
    made = []
    for n, last in enumerate("tired ill full shy cold stale burnt salty".split()):
        for a, animal in enumerate(animals):
            for m, meal in enumerate(meals):
                if (a if n < 4 else m) % 4 == n % 4:
                    made.append(
                        (f"the {animal} did not want the {meal} because it was {last}", animal if n < 4 else meal)
                    )
    found, weights = read([sentence for sentence, _ in made])
    right = found == np.array([[noun in FEMININE] for _, noun in made])
    assert len(made) == 72 and right.mean() >= 0.95
    looks = [weights[i, IT, sentence.split().index(noun)] for i, (sentence, noun) in enumerate(made)]
    assert np.mean(looks) >= 0.7


def test_each_article_looks_at_its_noun_in_every_sentence_shown():
    parts, told = arrays("translation"), TRAINED["translation"]
    for english, french in (
        ("the car is red .", "<bos> la voiture est rouge ."),
        ("the cat is red .", "<bos> le chat est rouge ."),
    ):
        source = [told["english"].index(word) for word in english.split()]
        last = [told["french"].index(word) for word in french.split()]
        keys = parts["source"][source] + parts["source_place"][: len(source)]
        queries = parts["target"][last] + parts["target_place"][: len(last)]
        mha = layer(parts, 2)
        out = mha(queries[None], keys[None], keys[None])[0] + queries
        said = [told["french"][i] for i in (out @ parts["next_word"].T).argmax(-1)]
        assert said == [*french.split()[1:], "<eos>"]
        assert mha.attention_weights[0, :, 0, 1].max() >= 0.8


# --- layer.playground() ----------------------------------------------------------------------------------------------

TEMPLATE = '<!DOCTYPE html><body data-mhac-page>\n<div class="mhac" data-mhac="playground"><p>text</p></div></body>'


@pytest.fixture
def page(tmp_path):
    """The place of a page as `mha_c playground` writes it; what is around its element is another test's matter."""
    (tmp_path / "playground.html").write_text(TEMPLATE, encoding="utf-8")
    return tmp_path / "playground.html"


@pytest.fixture
def called():
    mha = mha_c.MultiHeadAttention(num_hiddens=16, num_heads=4, dropout=0, bias=True, rng=0)
    x = np.random.default_rng(1).standard_normal((2, 5, 16)).astype(np.float32)
    mha(x, x, x, [3, 5])
    return mha, x


def inside(shown):
    """What the page finds of the layer."""
    (text,) = re.findall(r'<script type="application/json" data-mhac-own>(.*?)</script>', shown.html())
    return json.loads(text)


def test_the_page_has_the_weights_of_the_last_call(page, called):
    mha, _ = called
    own = inside(mha.playground("the cat sat", page=page))
    np.testing.assert_array_equal(np.float32(own["weights"]), mha.attention_weights[0])
    assert own["qt"] == own["kt"] == ["the", "cat", "sat", "<pad>", "<pad>"] and own["W"] is None
    second = inside(mha.playground(page=page, example=1))
    np.testing.assert_array_equal(np.float32(second["weights"]), mha.attention_weights[1])
    assert second["qt"] == list("01234")


def test_with_inputs_it_has_all_that_the_layer_computes_with(page, called):
    mha, x = called
    own = inside(mha.playground("a b c d e", inputs=x, valid_lens=[3, 5], example=1, page=page))
    for name, i in (("W_q", 0), ("W_k", 1), ("W_v", 2), ("W_o", 3)):
        np.testing.assert_array_equal(np.float32(own["W"][i]), getattr(mha, name).weight)
        np.testing.assert_array_equal(np.float32(own["bias"][i]), getattr(mha, name).bias)
    np.testing.assert_array_equal(np.float32(own["queries"]), x[1])
    assert own["lens"] == [5] * 5 and own["heads"] == 4


def test_it_is_saved_and_shown(page, called, tmp_path):
    mha, x = called
    shown = mha.playground("a b c d e", inputs=(x, x, x), page=page)
    assert shown.save(tmp_path / "lecture.html").read_text(encoding="utf-8") == shown.html()
    assert shown._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert "4 head(s), 5 queries x 5 keys" in repr(shown)


def test_words_are_data(page, called):
    mha, _ = called
    words = ["</script>", "<b>", "a", "b", "c"]
    assert inside(mha.playground(words, page=page))["qt"] == words


def test_the_page_is_the_packages_own_or_one_that_is_given(called, tmp_path):
    mha, _ = called
    own = mha.playground()
    assert len(inside(own)["weights"]) == 4 and len(own.html()) > 300_000
    with pytest.raises(FileNotFoundError, match=r"lost\.html"):
        mha.playground(page=tmp_path / "lost.html")
    (tmp_path / "other.html").write_text("<p>", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.html is not the page"):
        mha.playground(page=tmp_path / "other.html")


def test_what_does_not_fit_is_refused(page, called):
    mha, x = called
    with pytest.raises(mha_c.ShapeError, match="keys have 7 features, the layer takes 16"):
        mha.playground(inputs=(x, x[..., :7], x), page=page)
    with pytest.raises(mha_c.ShapeError, match=r"queries must be \(rows, features\)"):
        mha.playground(inputs=x[0, 0], page=page)
    with pytest.raises(ValueError, match=r"one array, or \(queries, keys, values\), got 2"):
        mha.playground(inputs=(x, x), page=page)
    with pytest.raises(ValueError, match=r"example must lie in 0\.\.1, got 2"):
        mha.playground(example=2, page=page)
    with pytest.raises(ValueError, match="at most 64 of each"):
        mha_c.viz.playground(np.full((1, 65, 65), 1 / 65), page=page)
    with pytest.raises(TypeError, match="DotProductAttention has no W_q"):
        mha_c.DotProductAttention(0).playground(inputs=x, page=page)
    wide = mha_c.MultiHeadAttention(num_hiddens=300, num_heads=2, dropout=0)
    wide(x, x, x)
    with pytest.raises(ValueError, match="more than 256 features"):
        wide.playground(inputs=x, page=page)


def test_what_watch_has_seen_opens_the_same_page(page):
    torch = needs.module("torch")
    import mha_c.torch

    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    with mha_c.torch.watch() as seen:
        torch.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
    own = inside(seen.playground(tokens="a b c d", page=page))
    np.testing.assert_array_equal(np.float32(own["weights"]), seen.calls[0].weights[0].numpy())
    with pytest.raises(ValueError, match="call must be below 1"):
        seen.playground(3, page=page)
