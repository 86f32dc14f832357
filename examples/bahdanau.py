"""Translating English to French with Bahdanau attention (d2l 11.4, 10.4 in the first edition), trained by mha_c.

    python examples/bahdanau.py [--data fra.txt] [--epochs 150]

This takes some five minutes, and needs torch and matplotlib.  The sizes are the book's.  The program prints loss,
tokens/s, translations and their BLEU, and saves the attention weights of one sentence and their heat map.
"""

import torch
import translation
from torch import nn

import mha_c.torch


class Encoder(nn.Module):
    """A GRU over the embedded sentence: outputs (T, B, num_hiddens) and the last hidden states."""

    def __init__(self, vocab_size, embed_size, num_hiddens, num_layers, dropout):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size, num_hiddens, num_layers, dropout=dropout)

    def forward(self, source):
        return self.rnn(self.embedding(source).permute(1, 0, 2))


class Translator(nn.Module):
    """Encoder and attention decoder."""

    def __init__(self, source_size, target_size, embed_size, num_hiddens, num_layers, dropout):
        super().__init__()
        self.encoder = Encoder(source_size, embed_size, num_hiddens, num_layers, dropout)
        self.decoder = mha_c.torch.Seq2SeqAttentionDecoder(target_size, embed_size, num_hiddens, num_layers, dropout)

    def forward(self, source, lens, shifted):
        scores, _ = self.decoder(shifted, self.decoder.init_state(self.encoder(source), lens))
        return scores

    def translate(self, source, lens, bos, eos, num_steps):
        """Token numbers up to eos, and the weights (steps, keys)."""
        state = self.decoder.init_state(self.encoder(source), lens)
        token, found, weights = torch.tensor([[bos]]), [], []
        for _ in range(num_steps):
            scores, state = self.decoder(token, state)
            token = scores.argmax(dim=2)
            weights.append(self.decoder.attention_weights[0][0, 0])
            if int(token) == eos:
                break
            found.append(int(token))
        return found, torch.stack(weights)


def main():
    options = translation.arguments(__doc__.split("\n")[0], epochs=150).parse_args()
    torch.manual_seed(options.seed)
    corpus = translation.Corpus(options.data, options.pairs, options.num_steps)
    sizes = len(corpus.source_vocab), len(corpus.target_vocab)
    print(f"{len(corpus.pairs)} pairs, {sizes[0]} English and {sizes[1]} French tokens", flush=True)
    model = Translator(*sizes, options.num_hiddens, options.num_hiddens, options.num_layers, options.dropout)
    translation.train(model, corpus, options.epochs, options.batch_size, options.learning_rate)
    translation.show_translations(model, corpus, n_sentences=12)

    found, weights = translation.translate(model, corpus, options.sentence)
    source = [*translation.split(options.sentence), translation.EOS][: options.num_steps]
    target = [*found, translation.EOS][: len(weights)]
    print(f"{options.sentence} => {' '.join(found)}")
    translation.save_attention(
        options.out, "bahdanau_attention", weights[None, None, :, : len(source)], "English", "French", None,
        (target, source),
    )  # fmt: skip


if __name__ == "__main__":
    main()
