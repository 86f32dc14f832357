"""A part that a reader replaces, hooks or wraps: called as d2l's own class calls it.

Every test runs its lines on d2l's own classes and under patch(): outputs, gradients and weights are equal, and whoever
watches sees the same numbers, as often and in the same order.
"""

import pytest
import torch
from torch import nn

import mha_c.d2l
import needs
from notebook import GENERATIONS, equal_under_patch, multi_head, of_a_generation, same_under_patch, wave
from whole_layers import LENS, called, inputs, layers

pytestmark = pytest.mark.usefixtures("float64")  # so that rounding is far below what is looked for
d2l = pytest.fixture(of_a_generation, params=GENERATIONS)


# --- What hooks see ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("hooked", ["W_q", "W_k", "W_v", "W_o", "w_v", "attention", "dropout", "all"])
@same_under_patch
def test_hooks_see_the_rows_that_d2ls_see(d2l, hooked, lens):
    found = []
    for layer in layers(d2l).values():
        layer(*inputs(), None)  # sizes
        events = []
        for name, child in layer.named_modules():
            if name and (hooked == "all" or name.rpartition(".")[2] == hooked):
                child.register_forward_hook(
                    lambda module, args, out, events=events: events.extend(
                        x.clone() for x in (*args, out) if isinstance(x, torch.Tensor)
                    )
                )
        outcome = called(layer, LENS[lens])
        found += [*outcome, torch.tensor(len(events)), *(x for x in events if isinstance(x, torch.Tensor))]
    return found


@pytest.mark.parametrize("lens", ["items", "none"])
@same_under_patch
def test_who_is_called_in_which_order(d2l, lens):
    found = []
    for layer in layers(d2l).values():
        names, order = {child: i for i, (_, child) in enumerate(layer.named_modules())}, []
        for kind in (
            nn.modules.module.register_module_forward_pre_hook,
            nn.modules.module.register_module_forward_hook,
        ):
            kind(lambda module, *_, names=names, order=order: order.append(names.get(module, -1)))
        try:
            layer(*inputs(), LENS[lens])  # the first call of a lazy layer, too
        finally:
            nn.modules.module._global_forward_pre_hooks.clear()
            nn.modules.module._global_forward_hooks.clear()
        found.append(torch.tensor(order))
    return found


def test_backward_hooks_see_the_gradients_that_d2ls_see(d2l):
    def notebook(d2l):
        layer, events = multi_head(d2l), []
        layer(*inputs(), None)
        for _, child in list(layer.named_modules())[1:]:
            child.register_full_backward_hook(lambda module, into, out: events.extend((*into, *out)))
        found = called(layer, LENS["items"])
        return [*found, *(x for x in events if x is not None)]

    equal_under_patch(d2l, notebook)


@same_under_patch
def test_a_range_that_an_observer_has_seen(d2l):
    """Observers of quantization note the largest number of each input."""
    layer, largest = multi_head(d2l), {}
    for name, child in layer.named_children():
        child.register_forward_pre_hook(lambda module, args, name=name: largest.update({name: args[0].abs().max()}))
    layer(*inputs(), LENS["items"])  # the first call: of a lazy layer, too
    return [largest[name].detach() for name in ("W_q", "W_k", "W_v", "W_o", "attention")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's, of its own quantization
@same_under_patch
def test_quantize_dynamic_with_lengths(d2l):
    """One scale for all rows: padding widens it as in d2l."""
    layer = multi_head(d2l, 16).eval()
    given = [torch.cat((x, 2 * x), -1).detach().float() for x in inputs()]
    with torch.no_grad():  # or d2l's could not be copied
        layer.float()(*given, None)
    quantized = needs.module("torch.ao.quantization").quantize_dynamic(layer, {nn.Linear}, torch.qint8)
    return [quantized(*given, LENS["items"]), quantized.attention.attention_weights]


# --- A function or a module of the reader's own -----------------------------------------------------------------------


def left_padding(X, valid_lens):
    if valid_lens is None:
        return torch.softmax(X, -1)
    lens = valid_lens.reshape(len(X), -1)[..., None]
    return torch.softmax(X.masked_fill(torch.arange(X.shape[-1]) < X.shape[-1] - lens, -1e6), -1)


def ignoring(X, valid_lens):
    return torch.softmax(X, -1)


def soft(X, valid_lens):
    if valid_lens is None:
        return torch.softmax(X, -1)
    lens = valid_lens.reshape(len(X), -1)[..., None]
    return torch.softmax(X - 0.1 * (torch.arange(X.shape[-1]) - lens).clamp(min=0), -1)


@pytest.mark.parametrize("own", [left_padding, ignoring, soft])
@pytest.mark.parametrize("lens", LENS)
def test_a_masked_softmax_of_ones_own(d2l, own, lens, monkeypatch):
    def notebook(d2l):
        monkeypatch.setattr(d2l, "masked_softmax", own)
        return [x for layer in layers(d2l).values() for x in called(layer, LENS[lens])]

    equal_under_patch(d2l, notebook)


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 5)])
def test_masks_in_the_place_of_lengths(d2l, shape, monkeypatch):
    """His function knows what he gives; d2l only repeats it for the heads."""

    def by_mask(X, mask):
        mask = mask if mask.dim() == 3 else mask[:, None]
        return torch.softmax(X.masked_fill(~mask, -1e6), -1)

    def notebook(d2l):
        monkeypatch.setattr(d2l, "masked_softmax", by_mask)
        mask = wave(*shape) < 0.3
        return [x for layer in layers(d2l).values() for x in called(layer, mask)]

    equal_under_patch(d2l, notebook)


@pytest.mark.parametrize("part", ["W_q", "W_k", "W_v", "W_o", "attention.dropout", "dropout", "w_v"])
@same_under_patch
def test_a_module_of_ones_own(d2l, part):
    class Mixed(nn.Module):
        """Mixes rows, hidden ones too."""

        def __init__(self, old):
            super().__init__()
            self.old = old

        def forward(self, x):
            found = self.old(x)
            return found + 0.1 * found.mean(1, keepdim=True)

    found = []
    for layer in layers(d2l).values():
        layer(*inputs(), None)
        *outer, name = part.split(".")
        owner = layer
        for one in outer:
            owner = getattr(owner, one, None)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, Mixed(getattr(owner, name)))
        found += called(layer, LENS["items"])
    return found


@same_under_patch
def test_a_projection_that_takes_tokens(d2l):
    """An embedding in the place of W_q: whole numbers of rank 2 are what it reads."""
    found, tokens = [], torch.tensor([[0, 3, 1, 2], [1, 1, 0, 3]])
    for layer in layers(d2l).values():
        layer(*inputs(), None)
        if hasattr(layer, "W_q"):
            layer.W_q = nn.Embedding.from_pretrained(wave(4, 8), freeze=False)
            found += called(layer, LENS["items"], tokens, *inputs()[1:])
    return found


@same_under_patch
def test_a_pre_hook_that_changes_the_features(d2l):
    found = []
    for layer in layers(d2l).values():
        layer(*inputs(), None)
        if hasattr(layer, "W_q"):
            layer.W_q.register_forward_pre_hook(lambda module, args: (torch.cat((args[0], -args[0]), -1),))
            found += called(layer, LENS["items"], inputs()[0][..., :4].detach(), *inputs()[1:])
    return found


@pytest.mark.parametrize("how", ["plain", "hook on W_q", "hook on dropout", "grad of grad"])
@pytest.mark.parametrize(
    "lens", [torch.tensor([1, 1]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]])], ids=["items", "queries"]
)
def test_scores_of_a_query_that_sees_one_key_have_no_gradient(d2l, how, lens):
    """Exactly none, as in d2l, where an optimizer such as Adam would make whole steps of rounding noise."""

    def notebook(d2l):
        zero = []
        for layer in layers(d2l).values():
            layer(*inputs(), None)
            if how.startswith("hook"):
                inner = (
                    layer.W_q
                    if how.endswith("W_q") and hasattr(layer, "W_q")
                    else getattr(layer, "attention", layer).dropout
                )
                inner.register_forward_hook(lambda *_: None)
            queries, keys, values = inputs()
            learned = [
                queries,
                keys,
                *(W.weight for n in ("W_q", "W_k", "w_v") for W in [getattr(layer, n, None)] if W),
            ]
            loss = layer(queries, keys, values, lens).square().sum()
            zero += torch.autograd.grad(loss, learned, create_graph=how == "grad of grad")
        assert not any(x.any() for x in zero)
        return zero

    equal_under_patch(d2l, notebook)


@pytest.mark.parametrize("hooked", [True, False])
def test_heads_of_ones_own_are_split_in_the_books_order(hooked):
    """Each projection, then its heads: who prints shapes in both sees them as in the book."""

    def notebook(d2l):
        class Own(d2l.MultiHeadAttention):
            def transpose_qkv(self, X):
                order.append(0)
                return 2 * super().transpose_qkv(X)

        torch.manual_seed(0)
        order, layer = [], Own(8, 2, 0.0)
        layer(*inputs(), None)
        for number, child in enumerate(layer.children(), 1):
            if hooked:
                child.register_forward_hook(lambda *_, number=number: order.append(number))
        return [*called(layer, LENS["items"]), torch.tensor(order)]

    equal_under_patch(needs.d2l("1.0.3"), notebook)


# --- A first call -----------------------------------------------------------------------------------------------------


def lazy(layer):
    """The layer with sizes that its first call sets, as in d2l 1.0."""
    for name, child in layer.named_children():
        if type(child) is nn.Linear:
            setattr(layer, name, nn.LazyLinear(child.out_features, bias=False))
    return layer


@pytest.mark.parametrize("hooked", [True, False])
def test_a_first_call_calls_each_projection_once(d2l, hooked):
    def notebook(d2l):
        found = []
        for layer in map(lazy, layers(d2l).values()):
            shapes = []
            if hooked:
                for name in ("W_q", "W_k", "W_v", "W_o", "w_v"):
                    child = getattr(layer, name, None)
                    if child is not None:
                        child.register_forward_hook(
                            lambda module, args, out, shapes=shapes: shapes.append(args[0].shape)
                        )
                        child.register_forward_hook(lambda module, args, out: args[0].max() and None)
            found += called(layer, LENS["items"])
            found += [torch.tensor(tuple(shape)) for shape in shapes]
            assert not any(isinstance(child, nn.LazyLinear) for child in layer.children())
        return found

    equal_under_patch(d2l, notebook)


def test_a_plain_first_call_calls_no_projection(d2l, monkeypatch):
    """The core computes it whole; the sizes are set without a call."""
    with mha_c.d2l.patch(d2l):
        made = [lazy(layer) for layer in layers(d2l).values()]
    for layer in made:
        seen, before = [], nn.Module._call_impl

        def call(self, *args, seen=seen, before=before, **named):
            seen.append(self)
            return before(self, *args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "_call_impl", call)
            layer(*inputs(), LENS["items"])
        assert [one for one in seen if isinstance(one, nn.Linear)] == []
        assert all(type(child) in (nn.Linear, nn.Dropout) for child in layer.modules() if not list(child.children()))
