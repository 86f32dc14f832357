"""The signatures of the constructors: tools that bind calls to them accept both forms, as the constructors do."""

import importlib
import inspect
from unittest import mock

import pytest

import needs

FORMS = {
    "MultiHeadAttention": [(100, 5, 0.5), (100, 5, 0.5, True), (8, 8, 8, 8, 2, 0.5), (8, 8, 8, 8, 2, 0.5, True)],
    "AdditiveAttention": [(8, 0.1), (8, 8, 8, 0.1)],
}
NAMED = {
    "MultiHeadAttention": [
        {"num_hiddens": 8, "num_heads": 2, "dropout": 0.1, "empty_rows": "zero"},
        {"num_hiddens": 8, "num_heads": 2, "dropout": 0.1, "use_bias": True},
    ],
    "AdditiveAttention": [{"num_hiddens": 8, "dropout": 0.1}],
}
WRONG = {"MultiHeadAttention": [(), (1,), (8, 8)], "AdditiveAttention": [(), (1,), (8, 8, 0.1)]}


@pytest.mark.parametrize("world", ["mha_c", "mha_c.torch"])
@pytest.mark.parametrize("name", FORMS)
def test_a_signature_binds_both_forms(world, name):
    if world == "mha_c.torch":
        needs.module("torch")
    kind = getattr(importlib.import_module(world), name)
    spec = mock.create_autospec(kind)
    for call in (inspect.signature(kind).bind, spec, kind):
        for arguments in FORMS[name]:
            call(*arguments)
        for named in NAMED[name]:
            call(**named)
        for arguments in WRONG[name]:
            with pytest.raises(TypeError):
                call(*arguments)


@pytest.mark.parametrize("world", ["mha_c", "mha_c.torch"])
def test_the_signature_of_a_call_shows_what_it_takes_and_no_more(world):
    if world == "mha_c.torch":
        needs.module("torch")
    kind = importlib.import_module(world).MultiHeadAttention
    call = inspect.signature(kind.forward if world == "mha_c.torch" else kind.__call__)
    masks = ["keep_mask", "bias"]
    assert [*call.parameters] == [
        "self",
        "queries",
        "keys",
        "values",
        "valid_lens",
        "causal",
        *masks,
        "training",
        "cache",
    ]
    call.bind("layer", "queries", "keys", "values")
    with pytest.raises(TypeError, match="keys"):
        call.bind("layer", "queries")
