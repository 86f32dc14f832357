"""The models of the book's attention chapters that d2l's package does not hold, for both generations.

Everything of attention is named as the book's text does (d2l.AdditiveAttention, d2l.MultiHeadAttention), so that the
same code runs with d2l's classes and, under mha_c.d2l.patch(), with ours.  `corpus` is the small one of examples/.
"""

import contextlib
import math
import time
from pathlib import Path

import torch
from torch import nn

CORPUS = Path(__file__).resolve().parents[2] / "examples" / "data" / "fra_eng_small.txt"


def is_eager(d2l):
    return hasattr(d2l, "EncoderBlock")  # the name of 0.17


def multi_head(make, d2l, dropout, bias):
    """A layer of `make`, d2l's or ours, for queries of 6, keys of 7 and values of 5 features."""
    sizes = (7, 6, 5) if is_eager(d2l) else ()
    return make.MultiHeadAttention(*sizes, 12, 3, dropout, bias=bias)


def bahdanau_decoder(d2l, vocab_size, embed_size, num_hiddens, num_layers, dropout=0.0):
    class Seq2SeqAttentionDecoder(d2l.AttentionDecoder):
        def __init__(self):
            super().__init__()
            sizes = (num_hiddens, num_hiddens) if is_eager(d2l) else ()
            self.attention = d2l.AdditiveAttention(*sizes, num_hiddens, dropout)
            self.embedding = nn.Embedding(vocab_size, embed_size)
            self.rnn = nn.GRU(embed_size + num_hiddens, num_hiddens, num_layers, dropout=dropout)
            self.dense = nn.Linear(num_hiddens, vocab_size) if is_eager(d2l) else nn.LazyLinear(vocab_size)

        def init_state(self, enc_outputs, enc_valid_lens, *args):
            outputs, hidden_state = enc_outputs
            return outputs.permute(1, 0, 2), hidden_state, enc_valid_lens

        def forward(self, X, state):
            enc_outputs, hidden_state, enc_valid_lens = state
            X = self.embedding(X).permute(1, 0, 2)
            outputs, self._attention_weights = [], []
            for x in X:
                query = torch.unsqueeze(hidden_state[-1], dim=1)
                context = self.attention(query, enc_outputs, enc_outputs, enc_valid_lens)
                x = torch.cat((context, torch.unsqueeze(x, dim=1)), dim=-1)
                out, hidden_state = self.rnn(x.permute(1, 0, 2), hidden_state)
                outputs.append(out)
                self._attention_weights.append(self.attention.attention_weights)
            outputs = self.dense(torch.cat(outputs, dim=0))
            return outputs.permute(1, 0, 2), [enc_outputs, hidden_state, enc_valid_lens]

        @property
        def attention_weights(self):
            return self._attention_weights

    return Seq2SeqAttentionDecoder()


def transformer_decoder(d2l, vocab_size, num_hiddens, ffn_hiddens, num_heads, num_layers, dropout):
    eager = is_eager(d2l)
    h = num_hiddens
    sizes = (h, h, h) if eager else ()

    class Block(nn.Module):
        def __init__(self, i):
            super().__init__()
            self.i = i
            norm = [h] if eager else h
            self.attention1 = d2l.MultiHeadAttention(*sizes, h, num_heads, dropout)
            self.addnorm1 = d2l.AddNorm(norm, dropout)
            self.attention2 = d2l.MultiHeadAttention(*sizes, h, num_heads, dropout)
            self.addnorm2 = d2l.AddNorm(norm, dropout)
            self.ffn = d2l.PositionWiseFFN(*((h,) if eager else ()), ffn_hiddens, h)
            self.addnorm3 = d2l.AddNorm(norm, dropout)

        def forward(self, X, state):
            enc_outputs, enc_valid_lens = state[0], state[1]
            key_values = X if state[2][self.i] is None else torch.cat((state[2][self.i], X), dim=1)
            state[2][self.i] = key_values
            dec_valid_lens = None
            if self.training:
                dec_valid_lens = torch.arange(1, X.shape[1] + 1, device=X.device).repeat(X.shape[0], 1)
            Y = self.addnorm1(X, self.attention1(X, key_values, key_values, dec_valid_lens))
            Z = self.addnorm2(Y, self.attention2(Y, enc_outputs, enc_outputs, enc_valid_lens))
            return self.addnorm3(Z, self.ffn(Z)), state

    class TransformerDecoder(d2l.AttentionDecoder):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, h)
            self.pos_encoding = d2l.PositionalEncoding(h, dropout)
            self.blks = nn.Sequential(*[Block(i) for i in range(num_layers)])
            self.dense = nn.Linear(h, vocab_size) if eager else nn.LazyLinear(vocab_size)

        def init_state(self, enc_outputs, enc_valid_lens, *args):
            return [enc_outputs, enc_valid_lens, [None] * num_layers]

        def forward(self, X, state):
            X = self.pos_encoding(self.embedding(X) * math.sqrt(h))
            self._attention_weights = [[None] * num_layers for _ in range(2)]
            for i, blk in enumerate(self.blks):
                X, state = blk(X, state)
                self._attention_weights[0][i] = blk.attention1.attention.attention_weights
                self._attention_weights[1][i] = blk.attention2.attention.attention_weights
            return self.dense(X), state

        @property
        def attention_weights(self):
            return self._attention_weights

    return TransformerDecoder()


def build(d2l, kind, source_size, target_size, num_hiddens=32, dropout=0.0, num_layers=2):
    """(encoder, decoder) of one chapter: "bahdanau" or "transformer"."""
    h = num_hiddens
    if kind == "bahdanau":
        encoder = d2l.Seq2SeqEncoder(source_size, h, h, num_layers, dropout)
        return encoder, bahdanau_decoder(d2l, target_size, h, h, num_layers, dropout)
    if is_eager(d2l):
        encoder = d2l.TransformerEncoder(source_size, h, h, h, h, [h], h, 64, 4, num_layers, dropout)
    else:
        encoder = d2l.TransformerEncoder(source_size, h, 64, 4, num_layers, dropout)
    return encoder, transformer_decoder(d2l, target_size, h, 64, 4, num_layers, dropout)


class NoPlot:
    """In the place of d2l's animated plots."""

    def __init__(self, *args, **kwargs):
        pass

    def add(self, *args):
        pass


@contextlib.contextmanager
def offline(d2l, losses):
    """0.17's d2l with our corpus and without plots; each training loss is appended to `losses`."""
    names = ["read_data_nmt", "Animator"]
    before = {name: getattr(d2l, name) for name in names}
    text, forward = CORPUS.read_text(encoding="utf-8"), d2l.MaskedSoftmaxCELoss.forward

    def noted(self, *args):
        loss = forward(self, *args)
        losses.append(float(loss.detach().sum()))
        return loss

    d2l.read_data_nmt, d2l.Animator, d2l.MaskedSoftmaxCELoss.forward = (lambda: text), NoPlot, noted
    try:
        yield
    finally:
        d2l.MaskedSoftmaxCELoss.forward = forward
        for name, value in before.items():
            setattr(d2l, name, value)


def lazy_data(d2l, batch_size=128):
    """1.0's data set over our corpus, as the book says to do it: another text in the place of the download."""

    class Data(d2l.MTFraEng):
        def _download(self):
            return CORPUS.read_text(encoding="utf-8")

    return Data(batch_size)


def train(d2l, kind, epochs, num_hiddens=32, dropout=0.0, learning_rate=0.005):
    """One chapter's training with d2l's own loop.  Returns (model, source vocabulary, target vocabulary, losses)."""
    losses = []
    if is_eager(d2l):
        with offline(d2l, losses):
            data, source, target = d2l.load_data_nmt(64, 10)
            model = d2l.EncoderDecoder(*build(d2l, kind, len(source), len(target), num_hiddens, dropout))
            d2l.train_seq2seq(model, data, learning_rate, epochs, target, torch.device("cpu"))
        return model, source, target, losses
    trainer, model, data = lazy_trainer(d2l, kind, epochs, num_hiddens, dropout, learning_rate, losses)
    trainer.fit(model, data)
    return model, data.src_vocab, data.tgt_vocab, losses


def lazy_trainer(d2l, kind, epochs, num_hiddens, dropout, learning_rate, losses):
    """1.0's trainer, and what it fits: the model and the data."""
    data = lazy_data(d2l)
    source, target = data.src_vocab, data.tgt_vocab
    encoder, decoder = build(d2l, kind, len(source), len(target), num_hiddens, dropout)
    model = d2l.Seq2Seq(encoder, decoder, tgt_pad=target["<pad>"], lr=learning_rate)
    model.plot = lambda key, value, train: losses.append(float(value.detach())) if train else None
    return d2l.Trainer(max_epochs=epochs, gradient_clip_val=1), model, data


class Timed:
    """Data that notes when a loop begins to read them, and how long it then takes until there are no more."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        began = time.perf_counter()
        yield from self.data
        self.seconds = time.perf_counter() - began


def one_epoch(d2l, kind, num_hiddens, dropout, learning_rate=0.005):
    """A function that trains one more epoch with d2l's own loop, and returns its seconds, without what is around it."""
    if not is_eager(d2l):
        trainer, model, data = lazy_trainer(d2l, kind, 0, num_hiddens, dropout, learning_rate, [])
        trainer.fit(model, data)  # for no epoch: everything is ready then

        def run():
            began = time.perf_counter()
            trainer.fit_epoch()
            return time.perf_counter() - began

        return run
    with offline(d2l, []):
        data, source, target = d2l.load_data_nmt(64, 10)
        model = d2l.EncoderDecoder(*build(d2l, kind, len(source), len(target), num_hiddens, dropout))
    data = Timed(data)

    def run():
        with offline(d2l, []):
            d2l.train_seq2seq(model, data, learning_rate, 1, target, torch.device("cpu"))
        return data.seconds

    return run


def translations(d2l, model, source, target, n_sentences=6):
    """[(English, French, translation)] of sentences that were trained on, by d2l's own prediction."""
    pairs = [line.split("\t") for line in CORPUS.read_text(encoding="utf-8").splitlines()[:500]]
    chosen = pairs[:: len(pairs) // n_sentences][:n_sentences]
    if is_eager(d2l):
        clean = [[d2l.preprocess_nmt(text) for text in pair] for pair in chosen]
        return [
            (english, french, d2l.predict_seq2seq(model, english, source, target, 10, torch.device("cpu"), True)[0])
            for english, french in clean
        ]
    data = lazy_data(d2l)
    predicted, _ = model.eval().predict_step(data.build(*zip(*chosen)), torch.device("cpu"), data.num_steps, True)
    found = []
    for (english, french), row in zip(chosen, predicted):
        words = []
        for word in target.to_tokens(row.tolist()):
            if word == "<eos>":
                break
            words.append(word)
        found.append((english, data._preprocess(french), " ".join(words)))
    return found
