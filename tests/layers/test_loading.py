"""What is loaded is data: nothing that a state_dict or a file holds is ever run, and a refused one changes nothing."""

import ast
import io
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

import mha_c
import needs

PACKAGE = Path(mha_c.__file__).parent
# Whoever uses one of these could run what a file says.  `import_module` is allowed where its argument is in the source.
RUNNERS = {"eval", "exec", "compile", "__import__", "execfile"}
MODULES = {"pickle", "marshal", "shelve", "dill", "joblib", "subprocess", "ctypes", "code", "runpy"}
LOADERS = {"load", "loads", "fromfile", "system", "popen", "unpickle"}
# JSON is numbers and words; Windows is asked for the processors of this process, through a function of its own.
HARMLESS = {"json.loads"}
# The book with a line changed, which is our own text, and what a student gives to have it run: in a process of its own,
# where it is a file; with a line of it changed, where it is told what the line should be.
OF_TEACH = "asking/mistakes", "puzzles", "grader/files", "why/traces"
RUN = {f"teach/{x}.py: {runs}" for x in OF_TEACH for runs in ("compile", "exec")}
ALLOWED = {"config.py: ctypes", "_verdict.py: subprocess", "teach/why/texts.py: compile"} | RUN


def found_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (name for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUNNERS:
                yield called.id
            if isinstance(called, ast.Attribute) and called.attr in LOADERS and ast.unparse(called) not in HARMLESS:
                yield ast.unparse(called)


def test_the_package_has_nothing_that_could_run_what_it_reads():
    breaches = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in found_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert breaches == ALLOWED


NOTED = []


class Runs:
    """Whoever calls it, pickles it or asks it for a number is noted."""

    def note(self, *args, **kwargs):
        NOTED.append(args)
        raise AssertionError("code of a state_dict was run")

    __call__ = __reduce__ = __reduce_ex__ = __float__ = __index__ = __int__ = note


def new_layer():
    return mha_c.MultiHeadAttention(4, 4, 4, 8, 2, 0.0, bias=True, rng=0)


def bits(layer):
    return {name: array.tobytes() for name, array in layer.state_dict().items()}


@pytest.mark.parametrize("entry", ["object", "object array", "structured", "text", "nested"])
def test_entries_that_are_no_numbers_are_not_run(entry):
    layer = new_layer()
    before = bits(layer)
    NOTED.clear()
    odd = {
        "object": Runs(),
        "object array": np.array([[Runs()] * 4] * 8, object),
        "structured": np.zeros((8, 4), [("a", "f4")]),
        "text": "__import__('os').system('true')",
        "nested": {"weight": Runs()},
    }[entry]
    with pytest.raises((TypeError, ValueError), match=r"W_q\.weight"):
        layer.load_state_dict({**layer.state_dict(), "W_q.weight": odd})
    assert not NOTED and bits(layer) == before


@pytest.mark.parametrize("name", ["{0.__class__}", "%s%n", "W_q.weight\0", "__class__", "../W_q.weight", ""])
def test_names_are_only_names(name):
    layer = new_layer()
    before = bits(layer)
    with pytest.raises(ValueError, match="is unexpected"):
        layer.load_state_dict({**layer.state_dict(), name: np.zeros(1)})
    assert bits(layer) == before


def test_state_through_a_file_without_pickle(tmp_path):
    """np.savez and np.load(allow_pickle=False), as the documentation says; a file that holds objects is refused."""
    layer, other = new_layer(), mha_c.MultiHeadAttention(4, 4, 4, 8, 2, 0.0, bias=True, rng=1)
    np.savez(tmp_path / "state.npz", **layer.state_dict())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        other.load_state_dict(file)
    assert bits(other) == bits(layer)
    np.savez(tmp_path / "odd.npz", **{**layer.state_dict(), "W_q.weight": np.array([print, None], object)})
    with np.load(tmp_path / "odd.npz", allow_pickle=False) as file, pytest.raises(ValueError):
        other.load_state_dict(file)
    assert bits(other) == bits(layer)


@pytest.mark.parametrize("cut", [0, 1, 100, 1000])
def test_a_truncated_file_changes_nothing(tmp_path, cut):
    layer = new_layer()
    before = bits(layer)
    np.savez(tmp_path / "state.npz", **layer.state_dict())
    whole = (tmp_path / "state.npz").read_bytes()
    with pytest.raises((ValueError, zipfile.BadZipFile)):
        with np.load(io.BytesIO(whole[: len(whole) - 1 - cut]), allow_pickle=False) as file:
            layer.load_state_dict(file)
    assert bits(layer) == before


def test_torch_files_are_read_as_weights_only(tmp_path):
    torch = needs.module("torch")
    module = mha_c.torch.MultiHeadAttention(8, 2, 0.0)
    module(*[torch.ones(1, 2, 4)] * 3)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    layer = mha_c.MultiHeadAttention(4, 4, 4, 8, 2, 0.0)
    layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert np.array_equal(layer.W_q.weight, module.W_q.weight.detach().numpy())


def _whole_modules():
    torch = needs.module("torch")
    import mha_c.torch as ours

    x, tokens = torch.randn(2, 5, 8), torch.arange(10).reshape(2, 5)
    encoded = torch.randn(7, 2, 16), torch.randn(2, 2, 16)
    decoder = ours.Seq2SeqAttentionDecoder(10, 8, 16, 2)
    return {
        "multi-head": (ours.MultiHeadAttention(8, 8, 8, 8, 2, 0.1, bias=True), (x, x, x, torch.tensor([3, 5]))),
        "many keys": (ours.MultiHeadAttention(8, 8, 8, 8, 4, 0.1), (x, *[torch.randn(2, 90, 8)] * 2)),
        "lazy": (ours.MultiHeadAttention(8, 2, 0.1), (x, x, x, torch.tensor([[1, 2, 3, 4, 5]] * 2))),
        "additive": (ours.AdditiveAttention(8, 8, 6, 0.1), (x, x, x, torch.tensor([0, 2]))),
        "dot": (ours.DotProductAttention(0.1), (x.double(), x.double(), x.double())),
        "bfloat16": (ours.MultiHeadAttention(8, 8, 8, 8, 2, 0.1).bfloat16(), (x.bfloat16(),) * 3),
        "decoder": (decoder, (tokens, decoder.init_state(encoded, torch.tensor([7, 3])))),
        "nn's": (ours.nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)),
        "grouped": (ours.GQAAttention(8, 2, 1, rope=True), (x, x, x, torch.tensor([3, 5]))),
        "of the GPT": (ours.CausalAttention(8, 2), (x,)),
        "course": (ours.variants.MultiHeadedSelfAttention(8, 2), (x,)),
        "summer": (ours.variants.MultiHeadSelfAttentionAISummer(8, 2), (x,)),
        "kernel": (ours.KernelAttention("gaussian", 2.0), (x, x, x)),
        "positions": (ours.PositionalEncoding(8, 0.1), (x,)),
    }


@pytest.mark.parametrize("mode", ["fresh", "after a call", "after a training step"])
def test_whole_torch_modules_are_read_as_weights_only(mode):
    """With the classes that safe_globals names; their results, and the weights of the last call, are the same."""
    torch = needs.module("torch")
    import mha_c.torch as ours

    for name, (module, args) in _whole_modules().items():
        if name == "lazy" or mode != "fresh":
            out = module(*args)
            out = out[0] if isinstance(out, tuple) else out
            if out.requires_grad:
                out.float().sum().backward()
        if mode == "after a call":
            module.eval()(*args)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(file, weights_only=True)
        file.seek(0)
        with torch.serialization.safe_globals(ours.safe_globals()):
            twin = torch.load(file, weights_only=True)
        assert type(twin) is type(module)
        if mode != "fresh" and isinstance(getattr(module, "attention_weights", None), torch.Tensor):
            assert torch.equal(twin.attention_weights, module.attention_weights), name
        found, expected = twin.eval()(*args), module.eval()(*args)
        pairs = zip(found, expected) if isinstance(found, tuple) else [(found, expected)]
        assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)), name
    assert not set(torch.serialization.get_safe_globals()) & set(ours.safe_globals())


def test_what_a_file_may_not_do():
    """What was kept of a call is anybody's: other sizes are an error, packed weights and rows are not taken over."""
    torch = needs.module("torch")
    import mha_c.torch as ours

    module, x = ours.DotProductAttention(0.0), torch.ones(1, 90, 4)
    module(x, x, x)
    state = module.__getstate__()
    kept, *others = state["_last"]
    assert kept[1] is None and all(not isinstance(part, np.ndarray) for part in kept)
    state["_last"] = (*kept[:2], kept[2][:, :5], *kept[3:]), *others
    state["_frozen"] = module
    twin = ours.DotProductAttention(0.0)
    twin.__setstate__(state)
    assert twin._frozen is None
    with pytest.raises(ValueError, match=r"saved|shape"):
        _ = twin.attention_weights + 0


# --- From NumPy layers to torch modules ---------------------------------------------------------------

WITH_WEIGHTS = {
    "MultiHeadAttention": lambda m: m.MultiHeadAttention(6, 4, 5, 8, 2, 0.1, bias=True),
    "MultiHeadAttention, sizes open": lambda m: m.MultiHeadAttention(8, 2, 0.1, bias=True),
    "AdditiveAttention": lambda m: m.AdditiveAttention(6, 4, 8, 0.1),
    "MultiHeadedSelfAttention": lambda m: m.variants.MultiHeadedSelfAttention(8, 2),
    "SelfAttentionAISummer": lambda m: m.variants.SelfAttentionAISummer(8),
    "MultiHeadSelfAttentionAISummer": lambda m: m.variants.MultiHeadSelfAttentionAISummer(8, 2),
}


@pytest.mark.parametrize("kind", WITH_WEIGHTS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_numpy_layers_state_loads_into_its_twin_alone_and_inside_a_model(kind, assign):
    torch, build = needs.module("torch"), WITH_WEIGHTS[kind]
    theirs = mha_c.MultiHeadAttention(6, 4, 5, 8, 2, 0.1, bias=True) if "open" in kind else build(mha_c)
    state = theirs.state_dict()
    for prefix in ("", "0."):
        twin = build(mha_c.torch)
        module = torch.nn.Sequential(twin, torch.nn.Linear(2, 2)) if prefix else twin
        rest = {name: value for name, value in module.state_dict().items() if name.startswith("1.")}
        given = {prefix + name: array for name, array in state.items()} | rest
        assert not any(module.load_state_dict(given, assign=assign))
        assert all(type(given[prefix + name]) is np.ndarray for name in state)  # the caller's dict is the caller's
        for name, array in state.items():
            parameter = twin.get_parameter(name)
            assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
            np.testing.assert_array_equal(parameter.detach().numpy(), array)
            array += 1  # theirs is a copy
            assert (parameter.detach().numpy() != array).all()
            array -= 1
    if "open" not in kind:
        with pytest.raises(RuntimeError, match="size mismatch"):
            build(mha_c.torch).load_state_dict({**state, next(iter(state)): np.ones((3, 2))})


def test_a_numpy_layers_state_loads_into_d2ls_module(d2l):
    """Under `patch` as it is; beside it by the one line that docs/from-d2l.md shows."""
    torch, is_eager = needs.module("torch"), needs.module("book_models").is_eager
    sizes = (8,) * 4 if is_eager(d2l) else (8,)
    layer = mha_c.MultiHeadAttention(*sizes, 2, 0.0, bias=True, rng=0)
    X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    expected, tensor = layer(X, X, X, [3, 2]), torch.from_numpy(X)
    with mha_c.d2l.patch(d2l):
        patched = d2l.MultiHeadAttention(*sizes, 2, 0.0, bias=True)
        patched.load_state_dict(layer.state_dict())
    page = Path(__file__).resolve().parents[2] / "docs" / "from-d2l.md"
    (line,) = re.findall(r"`(theirs\.load_state_dict\(\{.*)`", page.read_text(encoding="utf-8"))
    module = d2l.MultiHeadAttention(*sizes, 2, 0.0, bias=True)
    exec(line, {"torch": torch, "theirs": module, "ours": layer})
    for loaded in (patched, module):
        found = loaded(tensor, tensor, tensor, torch.tensor([3, 2])).detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # float32, sums of 8
