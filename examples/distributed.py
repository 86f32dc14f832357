"""The book's Transformer (d2l 1.0, chapter 11) with mha_c's attention, trained by several processes.

    pip install d2l==1.0.3 --no-deps          # and what it needs: matplotlib, pandas, requests
    torchrun --nproc-per-node 2 examples/distributed.py [--epochs 30] [--checkpoints build/checkpoints]

Training is data parallel: every process has the whole model (DistributedDataParallel) and its share of each batch, and
the losses are those of one process on the whole batch.  Rank 0 alone shows progress and, at the end, translations.
After each epoch all processes save together; a run that was killed continues from its last complete checkpoint when you
start it again, and `torchrun --max-restarts 3` does this automatically.  It takes minutes, like transformer.py, and
needs torch.
"""

import contextlib
import datetime
import math
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as saving
import translation
from d2l import torch as d2l
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import mha_c.d2l


class DecoderBlock(nn.Module):
    """That of the book's section 11.7.5, which is not in d2l's package."""

    def __init__(self, num_hiddens, ffn_hiddens, num_heads, dropout):
        super().__init__()
        self.attention1 = d2l.MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.attention2 = d2l.MultiHeadAttention(num_hiddens, num_heads, dropout)
        self.addnorm1, self.addnorm2, self.addnorm3 = (d2l.AddNorm(num_hiddens, dropout) for _ in range(3))
        self.ffn = d2l.PositionWiseFFN(ffn_hiddens, num_hiddens)

    def forward(self, X, encoded, lens):
        visible = torch.arange(1, X.shape[1] + 1).repeat(X.shape[0], 1)  # token t sees those up to t
        Y = self.addnorm1(X, self.attention1(X, X, X, visible))
        Z = self.addnorm2(Y, self.attention2(Y, encoded, encoded, lens))
        return self.addnorm3(Z, self.ffn(Z))


class Transformer(nn.Module):
    """d2l's encoder and the book's decoder."""

    def __init__(self, source_size, target_size, num_hiddens, ffn_hiddens, num_heads, num_layers, dropout):
        super().__init__()
        self.encoder = d2l.TransformerEncoder(source_size, num_hiddens, ffn_hiddens, num_heads, num_layers, dropout)
        self.scale = math.sqrt(num_hiddens)
        self.embedding = nn.Embedding(target_size, num_hiddens)
        self.position = d2l.PositionalEncoding(num_hiddens, dropout)
        self.blocks = nn.ModuleList(
            DecoderBlock(num_hiddens, ffn_hiddens, num_heads, dropout) for _ in range(num_layers)
        )
        self.dense = nn.LazyLinear(target_size)

    def forward(self, source, lens, shifted):
        encoded = self.encoder(source, lens)
        X = self.position(self.embedding(shifted) * self.scale)
        for block in self.blocks:
            X = block(X, encoded, lens)
        return self.dense(X)

    def translate(self, source, lens, bos, eos, num_steps):
        """Token numbers up to eos, and None instead of weights."""
        tokens = [bos]
        while len(tokens) <= num_steps and tokens[-1] != eos:
            tokens.append(int(self(source, lens, torch.tensor([tokens]))[0, -1].argmax()))
        return [token for token in tokens[1:] if token != eos], None


# --- Checkpoints ----------------------------------------------------------------------------------------


def save(folder, epoch, model, optimizer):
    """All ranks write together; only then `latest` names the new checkpoint, and the previous one is removed."""
    names = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    saving.save(names, checkpoint_id=folder / f"epoch-{epoch}")
    if dist.get_rank() == 0:
        mark = folder / "latest.new"
        mark.write_text(str(epoch))
        os.replace(mark, folder / "latest")
        for old in folder.glob("epoch-*"):
            if old.name != f"epoch-{epoch}":
                shutil.rmtree(old)


def resume(folder, model, optimizer):
    """The number of epochs that are already done."""
    latest = folder / "latest"
    done = int(latest.read_text()) if latest.exists() else 0
    if done:
        names = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        saving.load(names, checkpoint_id=folder / f"epoch-{done}")
        set_state_dict(model, optimizer, model_state_dict=names["model"], optim_state_dict=names["optimizer"])
    return done


# --- Training -------------------------------------------------------------------------------------------


def train_epoch(model, optimizer, batches, pad):
    """Adam on the cross-entropy of the next token; returns the mean loss per token over all ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sums = torch.zeros(2)
    for batch in batches:
        source, lens, shifted, target = (x[rank::n] for x in batch)
        count = (batch[3] != pad).sum()
        optimizer.zero_grad()
        scores = model(source, lens, shifted).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, target.flatten(), ignore_index=pad, reduction="sum")
        (loss * n / count).backward()  # the ranks' gradients are averaged
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), (target != pad).sum()])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def train(options, corpus):
    """This rank's share of the training; then rank 0 translates."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = len(corpus.source_vocab), len(corpus.target_vocab)
    torch.manual_seed(options.seed)
    model = Transformer(
        *sizes, options.num_hiddens, options.ffn_num_hiddens, options.num_heads, options.num_layers, options.dropout
    )
    model(*next(corpus.batches(2))[:3])  # d2l's layers take their sizes from their first inputs
    model.apply(translation.initialize)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=options.learning_rate)
    done = resume(options.checkpoints, parallel, optimizer)
    if rank == 0:
        print(f"{n} processes, {len(corpus.pairs)} pairs, {done} of {options.epochs} epochs done already", flush=True)
    progress = translation.Progress(options.epochs - done, "epochs") if rank == 0 and done < options.epochs else None
    for epoch in range(done, options.epochs):
        torch.manual_seed(options.seed + epoch)  # one order of the sentences for all,
        batches = list(corpus.batches(options.batch_size))
        torch.manual_seed((options.seed + epoch) * n + rank)  # and dropout of each rank's own, the same when resumed
        parallel.train()
        loss = train_epoch(parallel, optimizer, batches, corpus.target_vocab.number[translation.PAD])
        save(options.checkpoints, epoch + 1, parallel, optimizer)
        if progress:
            progress.step(f"loss {loss:.3f}")
            print(f"epoch {epoch + 1} loss {loss:.6f}", flush=True)
    if progress:
        progress.close()
    if rank == 0:
        translation.show_translations(model, corpus, n_sentences=6)


def main():
    parser = translation.arguments(__doc__.split("\n")[0], epochs=30)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--ffn-num-hiddens", type=int, default=64)
    parser.add_argument("--checkpoints", type=Path, default=Path("build") / "checkpoints")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    rank = dist.get_rank()
    with contextlib.redirect_stdout(None if rank else sys.stdout):
        mha_c.d2l.patch()
    if rank == 0:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
    train(options, translation.Corpus(options.data, options.pairs, options.num_steps))
    # The DistributedDataParallel went with train's frame.  One that outlives its group can hang the process: it then
    # ends gloo's threads with Python's lock in hand, for which they may be waiting (seen with torch 2.13).
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
