"""What C finds of a layer's children, for the calls, is what Python finds, for compilers; no record can mislead it."""

import pytest
import torch
from torch import nn

from mha_c import _core
from mha_c import torch as mt
from mha_c.torch._call import children as layer_children
from torch_modules import HOOKS


def changes(layer):
    """(what, how) for each way in which a child may come to do something else."""
    children = [(name, child) for name, child in layer.named_modules() if name]
    for name, child in children:
        for hook in HOOKS:
            yield f"{hook} {name}", lambda child=child, hook=hook: getattr(child, hook)(lambda *_: None)
        yield f"forward of {name}", lambda child=child: setattr(child, "forward", child.forward)
        yield f"type of {name}", lambda child=child: setattr(child, "__class__", type("Own", (type(child),), {}))
        yield f"no {name}", lambda name=name: layer.get_submodule(".".join(name.split(".")[:-1]))._modules.pop(
            name.split(".")[-1])  # fmt: skip
        for parameter in dict(child.named_parameters(recurse=False)):
            yield f"no {parameter} of {name}", lambda child=child, parameter=parameter: child._parameters.pop(parameter)
        if isinstance(child, nn.Linear):
            yield f"None as weight of {name}", lambda child=child: child._parameters.update(weight=None)
            yield f"{name} given back", lambda child=child: child._parameters.update(bias=None)  # the one plain change
    yield "children in no dictionary", lambda: layer.__dict__.update(_modules=[])


LAYERS = [
    lambda: mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.1, True), lambda: mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.1),
    lambda: mt.AdditiveAttention(12, 10, 16, 0.1), lambda: mt.DotProductAttention(0.1),
]  # fmt: skip


@pytest.mark.parametrize("make", LAYERS, ids=["biases", "multi-head", "additive", "dot product"])
def test_parts_of_a_layer(make, monkeypatch):
    """What C finds is what Python finds, for compilers, whatever has been done to a child; nothing is remembered."""
    for i, (what, _) in enumerate(changes(make())):
        layer = make()
        linears = {name: child for name, child in layer.named_modules() if isinstance(child, nn.Linear)}
        parts = _core.layer_parts(layer, layer._layout)
        assert parts is not None and [id(x) for x in parts[0] if x is not None] == [
            id(x) for name in ("weight", "bias") for place in ("W_q", "W_k", "W_v", "W_o", "w_v") if place in linears
            for x in [getattr(linears[place], name)] if x is not None
        ]  # fmt: skip
        assert parts[2] is parts[1]["_modules"]["dropout"] and same(parts, layer_children.parts_in_python(layer))
        list(changes(layer))[i][1]()
        parts = _core.layer_parts(layer, layer._layout)
        assert (parts is not None) == what.endswith("given back"), what
        if what.startswith("children"):
            continue
        assert same(parts, layer_children.parts_in_python(layer)), what
    layer = make()
    for name in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        handle = getattr(nn.modules.module, f"register_module_{name}")(lambda *_: None)
        found = _core.layer_parts(layer, layer._layout), layer_children.parts_in_python(layer)
        handle.remove()
        assert found == (None, None) and _core.layer_parts(layer, layer._layout) is not None
    for kind, name in [
        (nn.Linear, "forward"), (nn.Linear, "__call__"), (nn.functional, "linear"), (nn.Dropout, "forward"),
        (mt.MultiHeadAttention, "transpose_qkv"),
    ]:  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, lambda *_: None)
            found = _core.layer_parts(layer, layer._layout), layer_children.parts_in_python(layer)
        assert (found[0] is None) == (kind is not mt.MultiHeadAttention or type(layer) is kind)
        assert same(*found) and _core.layer_parts(layer, layer._layout) is not None


def same(parts, others):
    if parts is None or others is None:
        return parts is others
    return all(x is y for x, y in zip((*parts[0], *parts[1:]), (*others[0], *others[1:])))


def test_a_layout_that_is_none():
    layer = mt.DotProductAttention(0.1)
    layout = layer._layout
    for bad in (None, (), tuple(layout[:-1]), layout._replace(words=("forward",)), layout._replace(words=None)):
        with pytest.raises(TypeError, match=r"Layout of mha_c\.torch"):
            _core.layer_parts(layer, bad)
    other = mt.AdditiveAttention(3, 3, 4, 0.0)
    for bad in ({"slots": ((9, "W_q"),)}, {"slots": ((-1, "W_q"),)}, {"hooks": ("_nothing",)}, {"dropout": nn.Linear}):
        assert _core.layer_parts(other, other._layout._replace(**bad)) is None
    for name in layout._fields:
        for bad in (3, None, (), (3,), ((3, 4, 5),), "abcdefghi"):
            nn.Module.changed = True  # the interpreter then looks names up anew, which a pending exception would break
            del nn.Module.changed
            try:
                _core.layer_parts(layer, layout._replace(**{name: bad}))
            except (SystemError, TypeError):
                pass  # which it is does not matter: no memory but Python's own is looked at
    with pytest.raises(RuntimeError, match="layer_parts: more than 128 objects"):
        _core.layer_parts(other, other._layout._replace(slots=other._layout.slots * 200))
    assert _core.layer_parts(None, layout) is None and _core.layer_parts(torch.zeros(3), layout) is None


def test_packed_weights_that_are_none():
    """What C finds in the place of `frozen`'s record is used only if it is one."""
    layer = mt.MultiHeadAttention(12, 10, 14, 20, 5, 0.0)
    with mt.frozen(layer):
        packed = layer._frozen
        assert packed is not None and _core.layer_parts(layer, layer._layout)[3] is packed
        for bad in (packed[:2], (), 3, [*packed]):
            layer.__dict__["_frozen"] = bad
            assert _core.layer_parts(layer, layer._layout)[3] is None
        layer.__dict__["_frozen"] = packed
