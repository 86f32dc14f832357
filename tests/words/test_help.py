"""help() of a layer: short, and first what a reader types."""

import abc
import pydoc
import re

import pytest

import mha_c


def test_help_of_a_layer_is_short_and_begins_with_an_example():
    text = pydoc.render_doc(mha_c.MultiHeadAttention, renderer=pydoc.plaintext)
    assert len([word for word in text.split() if word != "|"]) < 1200  # not lines: Python 3.13 breaks signatures
    first_screen = re.sub(r"\(\n[^)]*\)", "()", text).splitlines()[:24]  # signatures that are broken count as a line
    assert any(">>> mha(X, X, X" in line for line in first_screen)
    assert {"view", "backward", "attention_weights", "state_dict"} <= set(dir(mha_c.MultiHeadAttention))


@pytest.mark.parametrize("kind", [mha_c.MultiHeadAttention, mha_c.GQAAttention, mha_c.variants.SelfAttentionAISummer])
def test_a_layer_may_have_an_abstract_base_behind_it(kind):
    class Read(abc.ABC):
        @abc.abstractmethod
        def read(self): ...

    class Mine(kind, Read):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Mine(8, 2, 0.1)
    assert issubclass(Mine, Read)
