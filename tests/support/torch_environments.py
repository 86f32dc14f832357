"""What runs with each torch: the table of docs/compatibility.md, a column a version of tools/torches.txt.

    python tests/support/torch_environments.py        prints the column of the torch that it finds

`test_environments.py` compares the column of the torch that it runs on.  A cell says "yes", or what this torch lacks.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # behind what is installed: the working tree, built in place
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

import needs
import torch_features

BEGIN = "<!-- made by `python tests/support/torch_environments.py`, a column for each torch -->"
END = "<!-- end of torches -->"
OF_FEATURES = {  # row: (the feature of torch_features.py, the name in torch that it stands on)
    "second derivatives": ("gradient penalty (`create_graph=True`)", "torch.autograd.grad"),
    "autocast to bfloat16": ("autocast to bfloat16", "torch.autocast"),
    "`torch.jit.trace`": ("`torch.jit.trace`", "torch.jit.trace"),
    "`torch.func`": ("`torch.func`: grad, vjp, jvp, jacrev", "torch.func"),
    "`torch.compile`": ("`torch.compile`, forward and backward", "torch.compile"),
    "`torch.export`": ("`torch.export`", "torch.export.export"),
}


def imported():
    import mha_c.torch as mt

    x = torch.ones(2, 3, 8, requires_grad=True)
    mt.MultiHeadAttention(8, 2, 0.1)(x, x, x, torch.tensor([1, 3])).sum().backward()
    return "yes" if x.grad is not None else "no"


def patched():
    import mha_c.d2l
    import third_generation

    for book in (*map(needs.d2l, needs.real_d2l.VERSIONS), third_generation):
        with mha_c.d2l.patch(book):
            assert hasattr(book.MultiHeadAttention, "_book")
    return "yes"


def of_feature(feature, name):
    from mha_c.torch import _private

    if not needs.torch_has(name):
        return "absent"
    if name == "torch.compile" and _private.compilers_go_around:
        return around()
    outcome = torch_features.outcome(feature)
    return {"equal": "yes", "works; d2l's does not": "yes", "neither works": "not d2l's either"}.get(outcome, outcome)


def around():
    """A compiled program with one of our layers in its middle gives what it gives as it is, gradients too."""
    import mha_c.torch as mt

    layer, lens = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.tensor([1, 3])
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def program(x):
        y = model(x)
        return model(layer(y, y, y, lens))

    outcomes = []
    for call in (program, torch.compile(program, backend="aot_eager")):
        x = torch.linspace(-1, 1, 48).reshape(2, 3, 8).requires_grad_()
        out = call(x)
        outcomes.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(*outcomes)
    return "around"


def chapters():
    """The Transformer's chapter of both generations trains as without us, 10 steps in float64."""
    import book_models
    import mha_c.d2l

    torch.set_default_dtype(torch.float64)
    try:
        for book in map(needs.d2l, needs.real_d2l.VERSIONS):
            curves = []
            for patched in (False, True):
                torch.manual_seed(0)
                with mha_c.d2l.patch(book) if patched else mha_c.d2l.Patched([]):
                    epochs = 1 if book_models.is_eager(book) else 3
                    *_, losses = book_models.train(book, "transformer", epochs=epochs)
                curves.append(torch.tensor(losses[:10]))
            assert len(curves[0]) == 10
            torch.testing.assert_close(curves[1], curves[0], rtol=1e-5, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
    return "yes"


def column():
    """{row: cell} of this torch."""
    found = {"`import mha_c.torch`, a step of training": imported(), "`patch()`, three generations": patched()}
    found["the book's chapters train as without us"] = chapters()
    for row, (feature, name) in OF_FEATURES.items():
        found[row] = of_feature(feature, name)
    return found


def version():
    return torch.__version__.partition("+")[0]


if __name__ == "__main__":
    import contextlib
    import io
    import warnings

    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        cells = column()
    print(f"| torch {version()} |")
    for name, cell in cells.items():
        print(f"| {name} | {cell} |")
