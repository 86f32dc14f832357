"""Attention in processes that this one starts: python workers.py METHOD, and functions that the children import.

METHOD is fork, spawn or forkserver (multiprocessing), or loader-fork, loader-spawn (torch's DataLoader), or module-fork
and its like, which hand torch modules over.  The parent has used the thread pool before, so a forked child inherits its
memory without its threads.
"""

import multiprocessing
import sys

import numpy as np

import mha_c

N_JOBS = 6
HANGS = 600  # seconds: a worker that never answers, whatever else the machine does


def attend(seed):
    """The bits of a call that is large enough for several threads."""
    mha_c.set_num_threads(3)
    x = np.random.default_rng(seed).standard_normal((2, 96, 64), dtype=np.float32)
    layer = mha_c.MultiHeadAttention(64, 4, 0.0, rng=0)
    out = layer(x, x, x, [50, 96])
    return out.tobytes() + layer.attention_weights.tobytes()


class Examples:
    """A data set whose examples are computed where the loader's workers are."""

    def __len__(self):
        return N_JOBS

    def __getitem__(self, i):
        return np.frombuffer(attend(i), np.float32).copy()


def copy_weights(*pairs):
    for module, weights in pairs:
        weights.copy_(module.attention_weights.detach())


def hand_over(method):
    """Modules that have been called, as arguments of a process."""
    import torch

    import mha_c.torch as mt

    if method == "fork":  # torch's own threads do not survive it: a softmax in a child of a parent that had them hangs
        torch.set_num_threads(1)
    x = torch.randn(2, 9, 64)
    calls = [  # of which weights are kept, and what they are computed from
        (mt.MultiHeadAttention(64, 64, 64, 64, 4, 0.0), (x, x, x, torch.tensor([3, 9])), False),
        (mt.variants.MultiHeadedSelfAttention(8, 4), (x[..., :8],), True),
    ]
    pairs = []
    for module, inputs, grad in calls:
        with torch.set_grad_enabled(grad):
            module(*inputs)
        pairs.append((module, torch.zeros(module.attention_weights.shape).share_memory_()))
    child = torch.multiprocessing.get_context(method).Process(target=copy_weights, args=pairs)
    child.start()
    child.join(HANGS)
    assert child.exitcode == 0, "a child ended with an error"
    for module, found in pairs:  # unread until now
        assert torch.equal(found, module.attention_weights.detach()), "a child's weights differ"


def main(method):
    if method.startswith("module-"):
        hand_over(method.split("-")[1])
        return
    expected = [attend(seed) for seed in range(N_JOBS)]
    if method.startswith("loader-"):
        import torch

        context = method.split("-")[1]
        loader = torch.utils.data.DataLoader(
            Examples(), num_workers=2, batch_size=None, multiprocessing_context=context, timeout=HANGS
        )
        found = [item.tobytes() for item in (np.asarray(x) for x in loader)]
    else:
        with multiprocessing.get_context(method).Pool(2) as pool:
            found = pool.map_async(attend, range(N_JOBS)).get(timeout=HANGS)
    assert found == expected, "a child's bits differ"
    assert [attend(seed) for seed in range(N_JOBS)] == expected, "the parent's bits differ afterwards"


if __name__ == "__main__":
    main(sys.argv[1])
