"""What the two translation examples share: pairs of sentences, vocabularies, training, translating, BLEU, pictures.

The corpus is a text file in the format of fra-eng (http://www.manythings.org/anki/): English, tab, French, one pair
per line.  data/make_corpus.py makes data/fra_eng_small.txt; you can give the original file instead.
"""

import argparse
import collections
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import mha_c

HERE = Path(__file__).resolve().parent
PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"


# --- Sentences ------------------------------------------------------------------------------------------


def split(text):
    """Lower-case tokens of one sentence; each punctuation mark is a token."""
    text = text.lower().replace("\u202f", " ").replace("\xa0", " ")
    spaced = "".join(f" {c}" if c in ",.!?" else c for c in text)
    return spaced.split()


def read_pairs(path, n_pairs):
    """The first n_pairs lines with exactly two columns, as [(English tokens, French tokens)]."""
    pairs = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            columns = line.rstrip("\n").split("\t")
            if len(columns) == 2:
                pairs.append((split(columns[0]), split(columns[1])))
            if len(pairs) == n_pairs:
                break
    if not pairs:
        raise SystemExit(f"{path} has no lines of two columns separated by a tab")
    return pairs


class Vocab:
    """Tokens that occur at least twice, the most frequent first, and their numbers."""

    def __init__(self, sentences):
        counts = collections.Counter(token for sentence in sentences for token in sentence)
        self.tokens = [UNKNOWN, PAD, BOS, EOS] + [token for token, n in counts.most_common() if n > 1]
        self.number = {token: i for i, token in enumerate(self.tokens)}

    def __len__(self):
        return len(self.tokens)

    def encode(self, tokens, num_steps):
        """num_steps numbers: the tokens, <eos> and padding; and how many of them are not padding."""
        known = [self.number.get(token, 0) for token in tokens]
        numbers = [*known[: num_steps - 1], self.number[EOS]]
        return numbers + [self.number[PAD]] * (num_steps - len(numbers)), len(numbers)


class Corpus:
    """Tensors source (N, num_steps), source lengths (N,), target (N, num_steps), and the two vocabularies."""

    def __init__(self, path, n_pairs, num_steps):
        self.pairs, self.num_steps = read_pairs(path, n_pairs), num_steps
        self.source_vocab = Vocab(english for english, _ in self.pairs)
        self.target_vocab = Vocab(french for _, french in self.pairs)
        sources = [self.source_vocab.encode(english, num_steps) for english, _ in self.pairs]
        targets = [self.target_vocab.encode(french, num_steps) for _, french in self.pairs]
        self.source = torch.tensor([numbers for numbers, _ in sources])
        self.source_lens = torch.tensor([n for _, n in sources])
        self.target = torch.tensor([numbers for numbers, _ in targets])

    def batches(self, size):
        """In random order: source, lengths, decoder input (the target shifted right, after <bos>), target."""
        bos, order = self.target_vocab.number[BOS], torch.randperm(len(self.pairs))
        for rows in order.split(size):
            target = self.target[rows]
            shifted = torch.cat([torch.full((len(rows), 1), bos), target[:, :-1]], dim=1)
            yield self.source[rows], self.source_lens[rows], shifted, target


# --- Training ------------------------------------------------------------------------------------------


class Progress:
    """A bar of tqdm if that is installed, else our own; `note` is shown after it."""

    def __init__(self, total, label):
        self.total, self.label, self.done, self.bar = total, label, 0, None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self.bar = tqdm(total=total, desc=label)

    def step(self, note):
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(note)
            self.bar.update()
        elif sys.stderr.isatty() or self.done * 10 // self.total != (self.done - 1) * 10 // self.total:  # each tenth
            filled = 30 * self.done // self.total
            end = "\r" if sys.stderr.isatty() and self.done != self.total else "\n"
            shown = f"{self.label} [{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}  {note}"
            print(shown, end=end, file=sys.stderr, flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def initialize(module):
    """Xavier-uniform weights, as in the book, for each nn.Linear and nn.GRU, including those inside mha_c's layers."""
    if type(module) is nn.Linear:
        nn.init.xavier_uniform_(module.weight)
    if type(module) is nn.GRU:
        for name, parameter in module.named_parameters():
            if "weight" in name:
                nn.init.xavier_uniform_(parameter)


def train(model, corpus, epochs, batch_size, learning_rate):
    """Adam on the cross-entropy of the next token, gradients clipped to length 1; returns the loss of each epoch."""
    model.apply(initialize)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loss_of = nn.CrossEntropyLoss(ignore_index=corpus.target_vocab.number[PAD])
    losses, n_tokens, start = [], 0, time.perf_counter()
    model.train()
    progress = Progress(epochs, "epochs")
    for _ in range(epochs):
        total = n_batches = 0
        for source, lens, shifted, target in corpus.batches(batch_size):
            optimizer.zero_grad()
            loss = loss_of(model(source, lens, shifted).flatten(0, 1), target.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total, n_batches = total + loss.item(), n_batches + 1
            n_tokens += int((target != corpus.target_vocab.number[PAD]).sum())
        losses.append(total / n_batches)
        progress.step(f"loss {losses[-1]:.3f}")
    progress.close()
    rate = n_tokens / (time.perf_counter() - start)
    if losses:
        print(f"loss {losses[-1]:.3f} after {epochs} epochs, {rate:,.0f} tokens/s")
    return losses


# --- Translating --------------------------------------------------------------------------------------


def translate(model, corpus, sentence):
    """(French tokens, attention weights as the model's `translate` gives them) of an English sentence."""
    numbers, length = corpus.source_vocab.encode(split(sentence), corpus.num_steps)
    vocab = corpus.target_vocab
    model.eval()
    with torch.no_grad():
        found, weights = model.translate(
            torch.tensor([numbers]), torch.tensor([length]), vocab.number[BOS], vocab.number[EOS], corpus.num_steps
        )
    return [vocab.tokens[i] for i in found], weights


def bleu(predicted, expected, k=2):
    """The book's BLEU of two lists of tokens, with n-grams up to length k."""
    if not predicted:
        return 0.0
    score = math.exp(min(0.0, 1 - len(expected) / len(predicted)))
    for n in range(1, min(k, len(predicted)) + 1):
        left = collections.Counter(tuple(expected[i : i + n]) for i in range(len(expected) - n + 1))
        right = collections.Counter(tuple(predicted[i : i + n]) for i in range(len(predicted) - n + 1))
        matches = sum((left & right).values())
        score *= (matches / (len(predicted) - n + 1)) ** 0.5**n
    return score


def show_translations(model, corpus, n_sentences):
    """Prints translations of sentences spread over the corpus, with BLEU; returns the mean."""
    step = max(1, len(corpus.pairs) // n_sentences)
    scores = []
    for english, french in corpus.pairs[::step][:n_sentences]:
        found, _ = translate(model, corpus, " ".join(english))
        scores.append(bleu(found, french))
        print(f"{' '.join(english):<28} => {' '.join(found):<36} bleu {scores[-1]:.3f}")
    print(f"mean bleu {np.mean(scores):.3f}")
    return float(np.mean(scores))


def save_attention(out, name, weights, xlabel, ylabel, titles, tokens):
    """weights (rows, columns, queries, keys) to <out>/<name>.npz, and their heat maps to <out>/<name>.png."""
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / f"{name}.npz", weights=np.asarray(weights), keys=tokens[1], queries=tokens[0])
    written = [f"{name}.npz"]
    try:
        figure = mha_c.show_heatmaps(weights, xlabel, ylabel, titles=titles, figsize=None, tokens=tokens)
        figure.savefig(out / f"{name}.png", bbox_inches="tight")
        written.append(f"{name}.png")
    except ImportError as missing:
        print(f"no heat map: {missing}")
    print(f"attention weights {tuple(weights.shape)}: {', '.join(str(out / file) for file in written)}")


def arguments(description, **defaults):
    """The command line that both examples understand."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "fra_eng_small.txt", help="pairs, two columns")
    parser.add_argument("--pairs", type=int, default=600, help="how many lines of it")
    parser.add_argument("--epochs", type=int, default=defaults["epochs"])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.005)
    parser.add_argument("--num-hiddens", type=int, default=32)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--num-steps", type=int, default=10, help="tokens of a sentence, including <eos>")
    parser.add_argument("--sentence", default="She takes the car.", help="the one whose attention is drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build"), help="where the weights and the picture go")
    return parser
