"""Translating English to French with the book's Transformer (d2l 11.7, 10.7 in the first edition), trained by mha_c.

    python examples/transformer.py [--data fra.txt] [--epochs 60]

This takes a minute or two, and needs torch and matplotlib.  The sizes are the book's.  The program prints loss,
tokens/s, translations and their BLEU, and saves the attention weights of one sentence (decoder on encoder, each block
and head) and their heat maps.
"""

import math

import torch
import translation
from torch import nn

import mha_c.torch


class PositionalEncoding(nn.Module):
    """Adds sines and cosines of the position; `first` is the position of the first row."""

    def __init__(self, num_hiddens, dropout, max_len=1000):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(max_len)[:, None] / 10000 ** (torch.arange(0, num_hiddens, 2) / num_hiddens)
        self.register_buffer("P", torch.stack([angles.sin(), angles.cos()], dim=2).flatten(1), persistent=False)

    def forward(self, X, first=0):
        return self.dropout(X + self.P[first : first + X.shape[1]])


class AddNorm(nn.Module):
    """The residual connection, then layer normalization."""

    def __init__(self, num_hiddens, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.ln = nn.LayerNorm(num_hiddens)

    def forward(self, X, Y):
        return self.ln(self.dropout(Y) + X)


def feed_forward(num_hiddens, ffn_hiddens):
    return nn.Sequential(nn.Linear(num_hiddens, ffn_hiddens), nn.ReLU(), nn.Linear(ffn_hiddens, num_hiddens))


class EncoderBlock(nn.Module):
    def __init__(self, num_hiddens, ffn_hiddens, num_heads, dropout):
        super().__init__()
        h = num_hiddens
        self.attention = mha_c.torch.MultiHeadAttention(h, h, h, h, num_heads, dropout)
        self.addnorm1, self.addnorm2 = AddNorm(h, dropout), AddNorm(h, dropout)
        self.ffn = feed_forward(h, ffn_hiddens)

    def forward(self, X, lens):
        Y = self.addnorm1(X, self.attention(X, X, X, lens))
        return self.addnorm2(Y, self.ffn(Y))


class DecoderBlock(nn.Module):
    """Self-attention on the tokens so far, attention on the encoder, feed-forward."""

    def __init__(self, num_hiddens, ffn_hiddens, num_heads, dropout):
        super().__init__()
        h = num_hiddens
        self.attention1 = mha_c.torch.MultiHeadAttention(h, h, h, h, num_heads, dropout)
        self.attention2 = mha_c.torch.MultiHeadAttention(h, h, h, h, num_heads, dropout)
        self.addnorm1, self.addnorm2, self.addnorm3 = (AddNorm(h, dropout) for _ in range(3))
        self.ffn = feed_forward(h, ffn_hiddens)

    def forward(self, X, encoded, lens, earlier):
        """X (B, T, h); the block's inputs at earlier steps (B, S, h) or None.  Returns X and all inputs."""
        keys = X if earlier is None else torch.cat([earlier, X], dim=1)
        # Token t of this call may see the earlier ones and tokens up to t: a length for each query.
        n_before = keys.shape[1] - X.shape[1]
        visible = torch.arange(n_before + 1, keys.shape[1] + 1).expand(X.shape[0], -1)
        Y = self.addnorm1(X, self.attention1(X, keys, keys, visible))
        Z = self.addnorm2(Y, self.attention2(Y, encoded, encoded, lens))
        return self.addnorm3(Z, self.ffn(Z)), keys


class Transformer(nn.Module):
    """Encoder and decoder with `num_layers` blocks each."""

    def __init__(self, source_size, target_size, num_hiddens, ffn_hiddens, num_heads, num_layers, dropout):
        super().__init__()
        sizes = num_hiddens, ffn_hiddens, num_heads, dropout
        self.scale = math.sqrt(num_hiddens)
        self.source, self.target = nn.Embedding(source_size, num_hiddens), nn.Embedding(target_size, num_hiddens)
        self.position = PositionalEncoding(num_hiddens, dropout)
        self.encoder = nn.ModuleList(EncoderBlock(*sizes) for _ in range(num_layers))
        self.decoder = nn.ModuleList(DecoderBlock(*sizes) for _ in range(num_layers))
        self.dense = nn.Linear(num_hiddens, target_size)

    def encode(self, source, lens):
        X = self.position(self.source(source) * self.scale)
        for block in self.encoder:
            X = block(X, lens)
        return X

    def decode(self, tokens, encoded, lens, earlier):
        """Scores (B, T, vocabulary) of the next tokens, and the inputs of the blocks so far."""
        first = 0 if earlier[0] is None else earlier[0].shape[1]
        X, inputs = self.position(self.target(tokens) * self.scale, first), []
        for block, before in zip(self.decoder, earlier):
            X, seen = block(X, encoded, lens, before)
            inputs.append(seen)
        return self.dense(X), inputs

    def forward(self, source, lens, shifted):
        scores, _ = self.decode(shifted, self.encode(source, lens), lens, [None] * len(self.decoder))
        return scores

    def translate(self, source, lens, bos, eos, num_steps):
        """Token numbers up to eos, and the weights on the encoder (blocks, heads, steps, keys)."""
        encoded, earlier = self.encode(source, lens), [None] * len(self.decoder)
        token, found, weights = torch.tensor([[bos]]), [], []
        for _ in range(num_steps):
            scores, earlier = self.decode(token, encoded, lens, earlier)
            token = scores.argmax(dim=2)
            weights.append(torch.cat([block.attention2.attention_weights for block in self.decoder]))
            if int(token) == eos:
                break
            found.append(int(token))
        return found, torch.cat(weights, dim=2)


def main():
    parser = translation.arguments(__doc__.split("\n")[0], epochs=60)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--ffn-num-hiddens", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    corpus = translation.Corpus(options.data, options.pairs, options.num_steps)
    sizes = len(corpus.source_vocab), len(corpus.target_vocab)
    print(f"{len(corpus.pairs)} pairs, {sizes[0]} English and {sizes[1]} French tokens", flush=True)
    model = Transformer(
        *sizes, options.num_hiddens, options.ffn_num_hiddens, options.num_heads, options.num_layers, options.dropout
    )
    translation.train(model, corpus, options.epochs, options.batch_size, options.learning_rate)
    translation.show_translations(model, corpus, n_sentences=12)

    found, weights = translation.translate(model, corpus, options.sentence)
    source = [*translation.split(options.sentence), translation.EOS][: options.num_steps]
    target = [*found, translation.EOS][: weights.shape[2]]
    print(f"{options.sentence} => {' '.join(found)}")
    translation.save_attention(
        options.out, "transformer_attention", weights[..., : len(source)], "English", "French",
        [f"head {h}" for h in range(weights.shape[1])], (target, source),
    )  # fmt: skip


if __name__ == "__main__":
    main()
