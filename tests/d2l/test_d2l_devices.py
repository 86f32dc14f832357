"""Both generations of d2l and of its chapters on another device than the CPU, with and without patch()."""

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import book_models
import device_features
import mha_c.d2l
import own_device
from features import weights_of
from mha_c import torch as ours

# Sums of some tens of terms around 1, thrice behind one another, in another order.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-11}

# And a real one, where there is one.
DEVICES = [own_device.load(), *(torch.device("cuda", i) for i in range(min(1, torch.cuda.device_count())))]


@pytest.fixture(params=DEVICES, ids=str)
def own(request):
    return request.param


def pair(d2l, own, kind, dtype=torch.float32, dropout=0.0, **sizes):
    """d2l's layer and ours on the device, with the same weights."""
    torch.manual_seed(0)
    eager = book_models.is_eager(d2l)
    forms = {
        "MultiHeadAttention": ((12, 12, 12, 12, 3, dropout), (12, 3, dropout)),
        "AdditiveAttention": ((12, 12, 8, dropout), (8, dropout)),
        "DotProductAttention": ((dropout,), (dropout,)),
    }
    arguments = forms[kind][0 if eager else 1]
    theirs, mine = getattr(d2l, kind)(*arguments), getattr(ours, kind)(*arguments)
    x = torch.zeros(1, 1, 12)
    theirs(x, x, x, torch.tensor([1]))
    mine(x, x, x)
    mine.load_state_dict(theirs.state_dict())
    return theirs.to(own, dtype), mine.to(own, dtype)


LENS = {"none": None, "item": [3, 6], "query": [[1, 2, 3, 9], [6, 4, 5, 1]], "empty": [3, 0]}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "AdditiveAttention", "DotProductAttention"])
def test_layers_give_what_d2ls_give(own, d2l, kind, lens, dtype):
    found = []
    for layer in pair(d2l, own, kind, dtype):
        rng = torch.Generator().manual_seed(1)
        inputs = [torch.randn(2, n, 12, generator=rng, dtype=dtype).to(own).requires_grad_() for n in (4, 6, 6)]
        given = None if LENS[lens] is None else torch.tensor(LENS[lens], device=own)
        out = layer(*inputs, given)
        loss = out.square().sum() + weights_of(layer).square().sum()
        found.append([out, weights_of(layer), *torch.autograd.grad(loss, [*inputs, *layer.parameters()])])
    for a, b in zip(*found):
        scale = max(1.0, float(a.detach().abs().max()))
        torch.testing.assert_close(b.cpu(), a.cpu(), rtol=0, atol=TOLERANCES[dtype] * scale)


def losses(d2l, own, kind, dropout):
    """Of some steps of a chapter's training."""
    torch.manual_seed(0)
    encoder, decoder = book_models.build(d2l, kind, 20, 20, num_hiddens=16, dropout=dropout)
    source, target = torch.randint(20, (2, 6, 7), generator=torch.Generator().manual_seed(2))
    lens = torch.tensor([7, 3, 1, 5, 2, 7])

    def run(device):
        outputs = encoder(source.to(device), lens.to(device))
        found, _ = decoder(target.to(device), decoder.init_state(outputs, lens.to(device)))
        return found

    run("cpu")  # lazy sizes
    encoder, decoder = encoder.to(own), decoder.to(own)
    torch.manual_seed(3)
    parameters = [*encoder.parameters(), *decoder.parameters()]
    trainer, shown = torch.optim.Adam(parameters, lr=0.01), []
    for _ in range(4):
        loss = nn.functional.cross_entropy(run(own).flatten(0, 1), target.flatten().to(own))
        trainer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1)
        trainer.step()
        shown.append(float(loss.detach()))
    weights = decoder.attention_weights
    first = weights[0][0] if kind == "transformer" else weights[0]
    return [*shown, float(first.detach().square().sum())]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("kind", ["bahdanau", "transformer"])
def test_chapters_train_as_without_us(own, d2l, kind, dropout, monkeypatch, capsys):
    monkeypatch.setattr(nn, "GRU", nn.RNN)  # torch has a GRU cell for foreign devices that this one lacks
    found = []
    for plain in (not dropout, False):  # what drops is drawn otherwise, but repeated by the seed
        with contextlib.nullcontext() if plain else mha_c.d2l.patch(d2l):
            found.append(losses(d2l, own, kind, dropout))
    assert found[0][0] > found[0][3] and found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "AdditiveAttention", "DotProductAttention"])
def test_convert_and_patch_before_and_behind_the_move(own, d2l, kind, capsys):
    theirs, _ = pair(d2l, own, kind)
    x, lens = torch.randn(2, 5, 12), torch.tensor([3, 5], device=own)
    inputs = [x.to(own)] * 3
    with torch.no_grad():
        wanted = theirs(*inputs, lens)
    with mha_c.d2l.patch(d2l):
        built, _ = pair(d2l, torch.device("cpu"), kind)
    made = [
        ours.convert(copy.deepcopy(theirs)), ours.convert(copy.deepcopy(theirs).cpu()).to(own),
        ours.convert(copy.deepcopy(theirs)).cpu().to(own), built.to(own),
    ]  # fmt: skip
    for layer in made:
        assert isinstance(layer, getattr(ours, kind))
        layer.load_state_dict({name: value.cpu() for name, value in theirs.state_dict().items()})
        torch.testing.assert_close(layer(*inputs, lens).cpu(), wanted.cpu(), rtol=0, atol=1e-5)
    back = layer.cpu()(x, x, x, lens.cpu())
    torch.testing.assert_close(back, wanted.cpu(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_decoder_of_the_bahdanau_chapter(own, d2l, dtype, monkeypatch):
    """mha_c.torch.Seq2SeqAttentionDecoder beside the book's text on d2l's attention: scores, weights, gradients."""
    monkeypatch.setattr(nn, "GRU", nn.RNN)
    theirs = book_models.bahdanau_decoder(d2l, 10, 8, 16, 2)
    mine = ours.Seq2SeqAttentionDecoder(10, 8, 16, 2)
    outputs, hidden = torch.randn(5, 3, 16, dtype=dtype).to(own), torch.randn(2, 3, 16, dtype=dtype).to(own)
    words, lens = torch.randint(10, (3, 4)), torch.tensor([5, 2, 3])
    theirs(words, theirs.init_state((torch.zeros(5, 3, 16), torch.zeros(2, 3, 16)), lens))  # lazy sizes
    mine.load_state_dict(theirs.state_dict())
    found = []
    for decoder in (theirs.to(own, dtype), mine.to(own, dtype)):
        leaf = outputs.clone().requires_grad_()
        state = decoder.init_state((leaf, hidden), lens.to(own))
        scores, state = decoder(words.to(own), state)
        more, _ = decoder(words[:, :1].to(own), state)  # as in prediction
        loss = scores.square().sum() + more.square().sum()
        grads = torch.autograd.grad(loss, [leaf, *dict(sorted(decoder.named_parameters())).values()])
        found.append([scores, more, *decoder.attention_weights, *grads])
    for a, b in zip(*found, strict=True):
        scale = max(1.0, float(a.detach().abs().max()))
        torch.testing.assert_close(b.cpu(), a.cpu(), rtol=0, atol=TOLERANCES[dtype] * scale)


@pytest.mark.filterwarnings("ignore")  # of torch's, about what it will drop one day
def test_the_table_of_the_docs():
    text = (Path(__file__).resolve().parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    begin, end = text.index(device_features.BEGIN), text.index(device_features.END)
    assert text[begin:end].split("\n", 1)[1].strip() == device_features.ON_DEVICES.table(device_features.outcome)
