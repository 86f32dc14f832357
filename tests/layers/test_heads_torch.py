"""mha_c.heads with torch: modules of ours, of d2l and of torch itself, and weights that are computed anew."""

import importlib

import numpy as np
import pytest

import needs
from measured_heads import HEADS, HIDDENS, LENS, drawn_batch, numpy_layer, squared
from mha_c import heads

layer, batch = pytest.fixture(numpy_layer), pytest.fixture(drawn_batch)


# --- torch ------------------------------------------------------------------------------------------


def torch_layers(torch):
    """The same layer four times: ours for torch, and d2l's of both generations where they are at hand."""
    import mha_c.torch

    made = {"mha_c": mha_c.torch.MultiHeadAttention(HIDDENS, HIDDENS, HIDDENS, HIDDENS, HEADS, 0.3, bias=True).double()}
    for version, sizes in (("0.17.6", [HIDDENS] * 3), ("1.0.3", [])):
        try:
            d2l = needs.real_d2l.load(version)
        except FileNotFoundError:
            continue
        made[version] = d2l.MultiHeadAttention(*sizes, HIDDENS, HEADS, 0.3, bias=True).double()
        x = torch.zeros(1, 1, HIDDENS, dtype=torch.float64)
        made[version](x, x, x, None)
    state = {name: torch.from_numpy(array) for name, array in numpy_layer().state_dict().items()}
    for module in made.values():
        module.load_state_dict(state)
    return made


def test_torch_modules_give_the_same_numbers(layer, batch):
    torch = needs.module("torch")
    expected = heads.importance(layer, batch, "all", loss=squared)
    tensors = tuple(torch.as_tensor(part) for part in batch)

    def loss(module, batch):
        x, y, lens = batch
        return ((module(x, x, x, lens) - y) ** 2).mean()

    x = tensors[0]
    for module in torch_layers(torch).values():
        module.W_o.weight.requires_grad_(False)
        found = heads.importance(module, tensors, "all", loss=loss)
        assert module.training and not module.W_o.weight.requires_grad and module.W_q.weight.grad is None
        assert found.baseline == pytest.approx(expected.baseline, rel=1e-12)
        for method in heads.METHODS:
            np.testing.assert_allclose(found.scores[method], expected.scores[method], rtol=1e-8, err_msg=method)
        by_output = heads.importance(module, (x, x, x, tensors[2]))
        np.testing.assert_allclose(by_output, heads.importance(layer, (batch[0],) * 3 + (LENS,)), rtol=1e-8)


def test_pruned_torch_modules(batch):
    torch = needs.module("torch")
    x, lens = torch.as_tensor(batch[0]), torch.as_tensor(batch[2])
    expected = heads.prune(numpy_layer(), [0, 2])(batch[0], batch[0], batch[0], LENS)
    for module in torch_layers(torch).values():
        model = torch.nn.ModuleDict({"block": module}).eval()
        heads.prune(model, [("block", 0), ("block", 2)])
        out = module(x, x, x, lens)
        np.testing.assert_allclose(out.detach(), expected, rtol=0, atol=1e-14)
        assert module.W_q.out_features == 16 and module.W_o.in_features == 16 and module.num_heads == 2
        assert all(p.requires_grad and p.is_leaf for p in module.parameters())
        out.sum().backward()
        assert module.W_v.weight.grad.shape == (16, HIDDENS)


def test_layers_of_other_courses_for_torch():
    torch = needs.module("torch")
    from mha_c.torch import variants as torch_variants

    module = torch_variants.MultiHeadedSelfAttention(12, 3)
    x = torch.randn(2, 5, 12)
    heads.prune(module, heads.importance(module, x, "confidence").ranked()[:1])
    assert module.num_heads == 2 and module(x).shape == x.shape and module.attention_weights.shape == (2, 2, 5, 5)


def test_layers_show_themselves(layer, batch):
    torch = needs.module("torch")
    import mha_c.torch

    x = batch[0][:1]
    layer(x, x, x)
    tokens = "the cat sat on it".split()
    page = layer.view(tokens=tokens, title="Ours")
    assert page.text.startswith("Ours: 4 heads, 5 queries x 5 keys") and all(token in page.html() for token in tokens)
    tensor = torch.as_tensor(x)
    for module in (
        torch_layers(torch)["mha_c"],
        mha_c.torch.variants.MultiHeadedSelfAttention(HIDDENS, HEADS).double(),
    ):
        module(*([tensor] * (1 if hasattr(module, "d_model") else 3)))
        assert f"{type(module).__name__}: 4 heads, 5 queries x 5 keys" in module.view(tokens).text
    decoder = mha_c.torch.Seq2SeqAttentionDecoder(vocab_size=10, embed_size=8, num_hiddens=16, num_layers=1)
    decoder(
        torch.zeros(2, 3, dtype=torch.long), decoder.init_state((torch.zeros(7, 2, 16), torch.zeros(1, 2, 16)), None)
    )
    assert "1 head, 3 queries x 7 keys" in decoder.view().text
    with pytest.raises(AttributeError, match="call the layer first"):
        mha_c.DotProductAttention(0).view()


def test_the_attention_of_torch_itself(batch):
    torch = needs.module("torch")
    module = torch.nn.MultiheadAttention(HIDDENS, HEADS, batch_first=True).double()
    x, y = (torch.as_tensor(part) for part in batch[:2])

    def loss(module, batch):
        x, y = batch
        return ((module(x, x, x)[0] - y) ** 2).mean()

    found = heads.importance(module, (x, y), ["ablation", "gradient"], loss=loss)
    with torch.no_grad():
        whole = float(loss(module, (x, y)))
        module.out_proj.weight[:, :8] = 0
        assert found.scores["ablation"][0] == pytest.approx(float(loss(module, (x, y))) - whole, rel=1e-9)
    with pytest.raises(ValueError, match="keeps no attention_weights"):
        heads.importance(module, (x, y), "entropy", loss=loss)
    with pytest.raises(TypeError, match="must fill embed_dim"):
        heads.prune(module, [0])


@pytest.mark.parametrize("role", ["W_o", "W_q"])
@pytest.mark.parametrize("kind", ["weight_norm", "pruned", "several"])
def test_weights_that_are_computed_anew_are_refused(role, kind):
    """What is changed in them would have no effect: each head would seem to matter nothing."""
    torch = needs.module("torch")
    import mha_c.torch

    layer, x = mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(2, 3, 8)
    linear, calls = getattr(layer, role), [lambda: heads.prune(layer, [0])]
    if kind == "weight_norm":
        torch.nn.utils.parametrizations.weight_norm(linear)
    elif kind == "pruned":
        importlib.import_module("torch.nn.utils.prune").random_unstructured(linear, "weight", 0.5)
    else:
        setattr(layer, role, torch.nn.Sequential(linear))
    if role == "W_o":
        calls.append(lambda: heads.importance(layer, (x, x, x)))
        calls.append(lambda: heads.importance(layer, (x, x, x), "gradient", loss=lambda part, data: part(*data).sum()))
    for call in calls:
        with pytest.raises(TypeError, match=f"{role} must be a torch.nn.Linear whose weight"):
            call()
    assert layer.num_heads == 2 and layer(x, x, x).shape == x.shape
    assert heads.importance(layer, (x, x, x), "entropy").scores["entropy"].shape == (2,)
