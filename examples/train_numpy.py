"""Train attention in plain NumPy: look symbols up in a dictionary that changes every time.

    python examples/train_numpy.py

An item is a dictionary, a few random pairs (key, value) of symbols, and questions, which are some of its keys; the
answer to each question is the value of that key.  This needs attention: queries are the embedded questions, keys and
values the embedded pairs, and the model has to learn to look where query and key are the same symbol.

    questions -- embed --- queries --.
    keys ------- embed --- keys ----- MultiHeadAttention -- linear -- scores of all values -- cross-entropy
    values ----- embed --- values --'

A training step has four parts: call the layer with training=True, compute the gradient of the loss with respect to its
output, pass that to `backward`, and move each parameter against its gradient.  The training takes about two seconds;
guessing would give a loss of log(20) = 3.0 and 5 % right answers.
"""

import argparse
import functools

import numpy as np

import mha_c

N_KEYS, N_VALUES, FEATURES = 30, 20, 32
PAIRS, QUESTIONS = 8, 4


def draw_items(rng, n_items):
    """keys (B, PAIRS) without repetition, values, how many pairs each dictionary has, questions, answers."""
    keys = rng.random((n_items, N_KEYS)).argsort(axis=1)[:, :PAIRS]
    values = rng.integers(0, N_VALUES, (n_items, PAIRS))
    n_pairs = rng.integers(2, PAIRS + 1, n_items)  # pairs beyond are padding, which the layer ignores
    asked = rng.integers(0, n_pairs[:, None], (n_items, QUESTIONS))
    return keys, values, n_pairs, np.take_along_axis(keys, asked, 1), np.take_along_axis(values, asked, 1)


class Adam:
    """Kingma and Ba 2015.  `parameters` have data and grad, as those of a layer."""

    def __init__(self, parameters, rate=0.002, beta1=0.9, beta2=0.99):
        self.parameters, self.rate, self.betas, self.steps = parameters, rate, (beta1, beta2), 0
        self.means = [[0.0, 0.0] for _ in parameters]  # of the gradient and of its square

    def step(self):
        self.steps += 1
        for p, means in zip(self.parameters, self.means):
            for i, (beta, sample) in enumerate(zip(self.betas, (p.grad, np.square(p.grad)))):
                means[i] = beta * means[i] + (1 - beta) * sample
            mean, square = (m / (1 - beta**self.steps) for m, beta in zip(means, self.betas))
            p.data = p.data - self.rate * mean / (np.sqrt(square) + 1e-8)


class Weight:
    """A parameter that is not the layer's: an embedding, or the weight of the last layer."""

    def __init__(self, rng, *shape):
        self.data = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        self.grad = None


class Lookup:
    """The model: two embeddings, a MultiHeadAttention, a linear layer."""

    def __init__(self, rng):
        self.of_keys, self.of_values = Weight(rng, N_KEYS, FEATURES), Weight(rng, N_VALUES, FEATURES)
        self.scores = Weight(rng, N_VALUES, FEATURES)
        self.mha = mha_c.MultiHeadAttention(num_hiddens=FEATURES, num_heads=4, dropout=0.1, rng=rng)

    def parameters(self):
        return [self.of_keys, self.of_values, self.scores, *self.mha.parameters()]

    def forward(self, keys, values, n_pairs, questions, training=False):
        """Scores of all values (B, QUESTIONS, N_VALUES)."""
        inputs = self.of_keys.data[questions], self.of_keys.data[keys], self.of_values.data[values]
        self.found = self.mha(*inputs, n_pairs, training=training)
        return self.found @ self.scores.data.T

    def backward(self, grad_scores, keys, values, questions):
        """Sets `grad` of all parameters."""
        self.scores.grad = np.einsum("bqv,bqf->vf", grad_scores, self.found)
        self.mha.zero_grad()
        grad_queries, grad_keys, grad_values = self.mha.backward(grad_scores @ self.scores.data)
        self.of_keys.grad, self.of_values.grad = (np.zeros_like(w.data) for w in (self.of_keys, self.of_values))
        np.add.at(self.of_keys.grad, questions, grad_queries)
        np.add.at(self.of_keys.grad, keys, grad_keys)
        np.add.at(self.of_values.grad, values, grad_values)


def cross_entropy(scores, answers):
    """(mean loss, its gradient with respect to the scores)"""
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    right = odds.reshape(-1, N_VALUES)[np.arange(answers.size), answers.reshape(-1)]
    grad = odds - np.eye(N_VALUES, dtype=scores.dtype)[answers]
    return -np.log(right + 1e-12).mean(), grad / answers.size


def progress(steps):
    """The steps to iterate over, and a function that prints a line meanwhile; with a bar if tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return range(steps), functools.partial(print, flush=True)  # in a pipe, too
    bar = tqdm(range(steps), unit="step")
    return bar, bar.write


def train(steps=400, batch=64, seed=0):
    """(model, list of the losses)"""
    rng = np.random.default_rng(seed)
    model, losses = Lookup(rng), []
    optimizer = Adam(model.parameters())
    steps, say = progress(steps)
    for step in steps:
        keys, values, n_pairs, questions, answers = draw_items(rng, batch)
        scores = model.forward(keys, values, n_pairs, questions, training=True)
        loss, grad_scores = cross_entropy(scores, answers)
        model.backward(grad_scores, keys, values, questions)
        optimizer.step()
        losses.append(loss)
        if step % 50 == 0:
            say(f"step {step:4}  loss {loss:.3f}")
    return model, losses


def main():
    parser = argparse.ArgumentParser(description="Train attention in plain NumPy on a lookup task.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, losses = train(options.steps, seed=options.seed)
    if losses:
        print(f"last 50 steps: loss {np.mean(losses[-50:]):.3f}")

    keys, values, n_pairs, questions, answers = draw_items(np.random.default_rng(options.seed + 1), 1000)
    found = model.forward(keys, values, n_pairs, questions).argmax(-1)
    print(f"new dictionaries: {(found == answers).mean():.1%} of the answers are right")

    print("\none dictionary, and where each question looked (mean of the heads, %):")
    weights = model.mha.attention_weights[0].mean(0)
    print("  key   ", *(f"{key:3}" for key in keys[0, : n_pairs[0]]))
    for question, row in zip(questions[0], weights):
        print(f"  ask {question:2}", *(f"{100 * w:4.0f}"[1:] for w in row[: n_pairs[0]]))


if __name__ == "__main__":
    main()
