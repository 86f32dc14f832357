"""help() of a layer: short, and first what a reader types."""

import abc
import importlib
import inspect
import pydoc
import re

import pytest

import mha_c
import needs

LAYERS = """MultiHeadAttention DotProductAttention AdditiveAttention GQAAttention CausalAttention KernelAttention
PositionalEncoding""".split()
SECOND = {  # edition of the book: what its constructors take
    "MultiHeadAttention": ["num_hiddens", "num_heads", "dropout", "bias"],
    "DotProductAttention": ["dropout"],
    "AdditiveAttention": ["num_hiddens", "dropout"],
    "PositionalEncoding": ["num_hiddens", "dropout", "max_len"],
}


@pytest.mark.parametrize("package", ["mha_c", "mha_c.torch"])
@pytest.mark.parametrize("name", LAYERS)
def test_help_shows_the_second_editions_constructor_and_lists_what_a_call_takes(package, name):
    """`?` and editors show the signature; the text has both forms, and a line for each argument of a call."""
    if package == "mha_c.torch":
        needs.module("torch")
    kind = getattr(importlib.import_module(package), name)
    given = [each for each in inspect.signature(kind).parameters.values() if each.kind is not each.KEYWORD_ONLY]
    if name in SECOND:
        assert [each.name for each in given] == SECOND[name]
    text = inspect.getdoc(kind)
    if hasattr(kind, "_forms"):
        first = max(kind._forms, key=len)
        assert f"{name}({first})" in re.sub(r"\(\s+", "(", re.sub(r"\s+", " ", text))
    call = text.partition("\nCall: ")[2].partition("\nParameters\n")[0]
    listed = re.findall(r"^([\w, ]+?)  (?=\S)", call, re.MULTILINE)
    arguments = {each for names in listed for each in names.split(", ")}
    method = kind.__call__ if package == "mha_c" else kind.forward
    always = {"self", "others", "causal" if name == "CausalAttention" else ""}
    assert {*inspect.signature(method).parameters} - always <= arguments
    assert "class" in inspect.getdoc(method)  # where the list is


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
