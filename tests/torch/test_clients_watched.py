"""mha_c.torch.watch on small random models of a public library, in the form in which they compute their own softmax:
each attention that a model itself can return is seen, with its numbers.  `make clients`."""

import os

import pytest
import torch

from mha_c import torch as mt

pytestmark = pytest.mark.filterwarnings("ignore")
IDS, MASK, IMAGE = torch.arange(3, 17).reshape(2, 7), torch.ones(2, 7, dtype=torch.long), torch.ones(2, 3, 32, 32)
MASK[0, 4:] = 0
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SMALL, "vocab_size": 50}
SHARED = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {**SMALL, "image_size": 32, "patch_size": 8}
PAIR = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 50, "pad_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip
PADDED, BOTH = {"input_ids": IDS, "attention_mask": MASK}, {"input_ids": IDS, "decoder_input_ids": IDS}
MODELS = {  # {name: (settings, inputs)}
    "Bert": (TEXT, PADDED), "Roberta": ({**TEXT, "pad_token_id": 1}, PADDED), "MPNet": (TEXT, PADDED),
    "Electra": ({**TEXT, "embedding_size": 32}, PADDED), "Albert": ({**TEXT, "embedding_size": 32}, PADDED),
    "DistilBert": ({"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 50}, PADDED),
    "DebertaV2": ({**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, PADDED),
    "GPT2": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}, PADDED),
    "GPTNeo": ({"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 50, "window_size": 4,
                "attention_types": [[["global", "local"], 1]]}, {"input_ids": IDS}),
    "GPTNeoX": (TEXT, PADDED), "GPTJ": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 50},
                                        {"input_ids": IDS}),
    "Bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}, PADDED),
    "OPT": ({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 50,
             "word_embed_proj_dim": 32}, PADDED),
    "Llama": (SHARED, PADDED), "Phi": (SHARED, PADDED), "Mistral": ({**SHARED, "sliding_window": 4}, PADDED),
    "Qwen2": (SHARED, PADDED), "Qwen3": ({**SHARED, "head_dim": 8}, PADDED),
    "Gemma": ({**SHARED, "head_dim": 8}, PADDED),
    "Gemma2": ({**SHARED, "head_dim": 8}, PADDED), "Mixtral": ({**SHARED, "num_local_experts": 2}, PADDED),
    "Falcon": ({"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}, PADDED),
    "T5": ({"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50}, BOTH),
    "Bart": (PAIR, BOTH), "Marian": (PAIR, BOTH), "ViT": (PICTURE, {"pixel_values": IMAGE}),
    "DeiT": (PICTURE, {"pixel_values": IMAGE}), "Beit": (PICTURE, {"pixel_values": IMAGE}),
    "CLIPVision": (PICTURE, {"pixel_values": IMAGE}),
    "Whisper": ({**PAIR, "num_mel_bins": 8, "max_source_positions": 10, "bos_token_id": 1, "eos_token_id": 2},
                {"input_features": torch.ones(2, 8, 20), "decoder_input_ids": IDS}),
}  # fmt: skip


def returned(out):
    """The attention weights that a model gives."""
    names = "encoder_attentions", "decoder_attentions", "cross_attentions", "attentions"
    return [x for name in names for x in getattr(out, name, None) or ()]


@pytest.mark.parametrize("name", MODELS)
def test_each_attention_is_seen(name):
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers as library
    except ImportError:
        if os.environ.get("MHA_C_CLIENTS") == "1":
            raise
        pytest.skip("needs transformers: make clients")
    settings, inputs = MODELS[name]
    torch.manual_seed(0)
    config = getattr(library, f"{name}Config")(**settings)
    config._attn_implementation = "eager"
    model = getattr(library, f"{name}Model")(config).eval()
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True)
        with mt.watch(model, compute="torch") as seen:
            found = model(**inputs, output_attentions=True)
    assert torch.equal(found[0], expected[0]) and len(seen) == len(returned(expected)) > 0
    left = [call.weights for call in seen]
    for weights in returned(expected):
        alike = [i for i, x in enumerate(left) if x.shape == weights.shape and torch.equal(x, weights)]
        assert alike, f"{tuple(weights.shape)} is not seen"
        del left[alike[0]]
    assert all(call.name and dict(model.named_modules())[call.name] is not None for call in seen)
