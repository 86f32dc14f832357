"""`convert` on torch's own attention and transformers; what it leaves alone, and what it says."""

import copy
import warnings

import pytest
import torch
from torch import nn

import needs
from mha_c import torch as mt


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}])
def test_torchs_multi_head_attention(sizes, batch_first):
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first, **sizes)
    parameters, ours = list(theirs.parameters()), theirs
    theirs = copy.deepcopy(theirs)
    assert mt.convert(ours) is ours and type(ours) is mt.nn.MultiheadAttention
    assert [id(x) for x in ours.parameters()] == [id(x) for x in parameters]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    q, k, v = (
        torch.randn(3, n, theirs.embed_dim if i == 0 else sizes.get(f"{name}dim", 8))
        for i, (name, n) in enumerate((("q", 4), ("k", 6), ("v", 6)))
    )
    padding = torch.arange(6)[None, :] >= torch.tensor([[6], [2], [3]])
    mask = torch.ones(4, 6, dtype=torch.bool).triu(1)
    calls = [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(4, 6)},
        {"attn_mask": torch.randn(6, 4, 6), "key_padding_mask": torch.randn(3, 6)},
        {"attn_mask": mask, "key_padding_mask": padding, "average_attn_weights": False},
        {"attn_mask": mask, "is_causal": True, "need_weights": False},
        {"need_weights": False},
    ]
    for options in calls:
        if "is_causal" in options and not needs.torch_has("torch.nn.MultiheadAttention.forward(is_causal)"):
            continue
        tensors = [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]
        try:
            wanted = theirs(*tensors, **options)
        except (RuntimeError, AssertionError) as error:  # a torch that takes no float key_padding_mask, or no hint
            assert "Mask tensor can take 0 and 1 values only" in str(error) or "Only allow causal mask" in str(error)
            continue
        torch.testing.assert_close(ours(*tensors, **options), wanted)
    torch.testing.assert_close(ours(q[0], k[0], v[0]), theirs(q[0], k[0], v[0]))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_convert_torchs_transformer():
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True)
    source, target = torch.randn(3, 5, 16), torch.randn(3, 4, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    padding = torch.arange(5)[None, :] >= torch.tensor([[5], [2], [3]])
    options = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    expected = model(source, target, **options)
    grads = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    before = list(model.parameters())
    assert mt.convert(model) is model
    assert sum(type(part) is mt.nn.MultiheadAttention for part in model.modules()) == 6
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]  # an optimizer goes on
    found = model(source, target, **options)
    torch.testing.assert_close(found, expected)
    largest = max(float(grad.abs().max()) for grad in grads)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), list(model.parameters())), grads, rtol=1e-3, atol=1e-5 * largest
    )
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(source, target, **options), expected)


@pytest.mark.skipif(not needs.torch_reads(), reason="nothing is read here")
def test_what_convert_leaves_alone():
    class Own(nn.MultiheadAttention):
        pass

    hooked = nn.MultiheadAttention(8, 2)
    hooked.register_forward_hook(lambda *_: None)
    extra = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    model = nn.ModuleList([Own(8, 2), hooked, nn.Linear(8, 8), mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), extra])
    kinds, theirs = [type(part) for part in model][:4], copy.deepcopy(extra)
    mt.convert(model)
    x = torch.randn(5, 3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[0](x, x, x)  # is read, and left
    assert [type(part) for part in model][:4] == kinds and type(extra) is mt.nn.MultiheadAttention
    x = torch.randn(5, 3, 8)
    torch.testing.assert_close(extra(x, x, x)[0], theirs(x, x, x)[0])  # left to torch
    shared = nn.MultiheadAttention(8, 2)
    pair = mt.convert(nn.ModuleList([shared, shared]))
    assert pair[0] is pair[1] is shared and type(shared) is mt.nn.MultiheadAttention


def test_convert_says_what_it_cannot_do():
    with pytest.raises(TypeError, match="takes a torch module, got int"):
        mt.convert(5)
    with pytest.warns(UserWarning, match=r"nothing to replace in Linear: it holds no class but torch's"):
        assert type(mt.convert(nn.Linear(8, 8))) is nn.Linear
    again = mt.convert(mt.DotProductAttention(0.0))  # ours already: nothing to say
    assert type(again) is mt.DotProductAttention


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_torchs_fast_path_calls_no_module():
    """What the words of `convert` say, and the switch that they name."""
    layer, calls = mt.convert(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)).eval(), []
    layer.self_attn.forward = lambda *args, **options: (
        calls.append(1) or type(layer.self_attn).forward(layer.self_attn, *args, **options)
    )
    x, enabled = torch.randn(2, 3, 16), torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            for on, n_calls in ((True, 0), (False, 1)):
                torch.backends.mha.set_fastpath_enabled(on)
                layer(x)
                assert len(calls) == n_calls
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
