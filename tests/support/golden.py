"""Files that a version of the package has written: every later one reads them (RELEASING.md: for ever).

    python tests/support/golden.py tests/data/0.1.0 [torch]

writes those of the version at hand, at its release, with the oldest NumPy and torch, whose files all others read:
pickled layers, whole torch modules, state dicts of both, and what each layer computed.  tests/layers/test_golden.py
reads all of them.
"""

import pickle
import sys
from pathlib import Path

import numpy as np

import mha_c

DATA = Path(__file__).resolve().parents[1] / "data"
LENS = [2, 4]


def inputs():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, n, size)).astype(np.float32) for n, size in ((3, 5), (4, 6), (4, 7))]


def layers(package):
    """The same layers of `mha_c` and of `mha_c.torch`, with weights that nothing has drawn."""
    made = {
        "multi_head": package.MultiHeadAttention(6, 5, 7, 8, 2, 0.0, bias=True),
        "additive": package.AdditiveAttention(6, 5, 8, 0.0),
        "dot_product": package.DotProductAttention(0.0),
    }
    for name, layer in made.items():
        state = layer.state_dict()
        for i, (key, value) in enumerate(sorted(state.items())):
            numbers = np.linspace(-1, 1, value.size if package is mha_c else value.numel(), dtype=np.float32) + i / 8
            state[key] = numbers.reshape(tuple(value.shape))
        if state and package is not mha_c:
            import torch

            state = {key: torch.from_numpy(value.copy()) for key, value in state.items()}
        if name != "dot_product":
            layer.load_state_dict(state)
    return made


def called(name, layer, arrays):
    """The dot products need queries and keys of one length."""
    q, k, v = arrays
    return layer(q, k[..., :5] if name == "dot_product" else k, v, LENS)


def write_numpy(folder):
    for name, layer in layers(mha_c).items():
        outputs = called(name, layer, inputs())
        np.savez(folder / f"{name}.npz", outputs=outputs, **layer.state_dict())
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(layer, protocol=4))


def write_torch(folder):
    import torch

    import mha_c.torch

    tensors = [torch.from_numpy(x) for x in inputs()]
    for name, layer in layers(mha_c.torch).items():
        layer.eval()
        called(name, layer, tensors)
        torch.save(layer.state_dict(), folder / f"{name}.state.pt")
        torch.save(layer, folder / f"{name}.module.pt")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_torch(target) if "torch" in sys.argv[2:] else write_numpy(target)
