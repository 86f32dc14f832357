"""What mha_c.torch does where a torch lacks a name that torch promises to nobody: each is taken away."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import children
import mha_c.torch
import needs
from mha_c.torch._call.autograd import LayerFunction

ROOT = Path(__file__).resolve().parents[2]
TAKE_AWAY = """
import sys, torch
*places, name = path.split(".")
owner = torch
for place in places[1:]:
    owner = getattr(owner, place)
old = getattr(owner, name)
if isinstance(owner, type):  # one of C, which keeps its own: hidden
    setattr(owner, name, None)
else:
    delattr(owner, name)
try:
    import mha_c.torch as mt
except ImportError as error:
    sys.exit(f"ImportError: {error}")
setattr(owner, name, old)  # for torch, which uses it itself
from mha_c.torch import _private, functional
torch.manual_seed(0)
layer, x = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), torch.randn(2, 50, 8, requires_grad=True)


def step():
    x.grad = None
    out = layer(x, x, x, torch.tensor([3, 50]))
    (out.sum() + layer.attention_weights.square().sum()).backward()
    return out.detach(), layer.attention_weights.detach() + 0, x.grad.clone()
"""
OTHER_NUMPY = """  # as torch before 2.3 has it, which was built for NumPy 1, where NumPy 2 is installed
import sys, torch
def from_numpy(array):
    raise RuntimeError("Numpy is not available")
torch.from_numpy = from_numpy
try:
    import mha_c.torch
except ImportError as error:
    sys.exit(f"ImportError: {error}")
"""
NEEDED = [
    "torch._C._get_tracing_state",
    "torch._C._set_tracing_state",
    "torch._C._are_functorch_transforms_active",
    "torch.autograd.forward_ad._current_level",
    "torch._C._len_torch_function_stack",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._disabled_torch_function_impl",
]
MISSED = {  # what holds without it, in a program that goes on
    "torch.Tensor.__dlpack_c_exchange_api__": """
assert _private.tensor_exchange == (torch._C._to_dlpack, torch.from_numpy)
""",
    "torch.library.register_vmap": """
assert not _private.has_operators
drops = mt.MultiHeadAttention(8, 8, 8, 8, 2, 0.5)
torch.func.grad(lambda x: drops(x, x, x).sum())(x.detach())
""",
    "torch.nn.functional.scaled_dot_product_attention": """
assert _private.fused_attention is None
torch.jit.trace(layer, (x.detach(),) * 3)
""",
    "torch.compiler.is_compiling": """
assert not _private.is_compiling()
""",
    "torch.compiler.is_exporting": """
assert not _private.is_exporting()
""",
    "torch.get_autocast_dtype": """
with torch.autocast("cpu", torch.bfloat16):
    assert layer(x, x, x).dtype is torch.bfloat16
""",
    "torch._C._is_any_autocast_enabled": """
assert _private.autocasting_anywhere is _private.autocasting
with torch.autocast("cpu", torch.bfloat16):
    assert layer(x, x, x).dtype is torch.bfloat16
""",
    "torch.autograd.function.BackwardCFunction.apply": """
node = layer(x, x, x).grad_fn
assert type(node).apply is torch.autograd.function.BackwardCFunction.apply
""",
    "torch.Tensor.is_cpu": """
assert mt.functional.dot_product_attention(x, x, x).shape == x.shape
""",
    "torch.overrides._get_current_function_mode_stack": """
with torch.device("cpu"):
    assert _private.in_mode()
""",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": """
assert not _private.in_mode()
""",
    "torch.nn.modules.module._global_forward_hooks": """
calls = []
hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module) and None)
layer(x, x, x)
assert layer.W_q in calls and layer.attention in calls
hook.remove()
""",
    "torch.autograd.profiler._is_profiler_enabled": """
with torch.profiler.profile() as seen, torch.no_grad():
    layer(x, x, x)
assert not any("mha_c::layer_forward" in event.key for event in seen.key_averages())
""",
    "torch.Tensor._make_wrapper_subclass": """
layer(x, x, x)
weights = layer.attention_weights
assert type(weights) is torch.Tensor and weights.requires_grad
assert type(layer.attention.attention_weights) is torch.Tensor
""",
    "torch._C.DisableTorchFunctionSubclass": """
assert _private.as_plain_tensor is torch._C.DisableTorchFunction
""",
    "torch._C._functorch.is_functorch_wrapped_tensor": """
q = x.detach()[:, :4]
torch.func.grad(lambda q: functional.dot_product_attention(q, q, q, torch.tensor([2.5, 3.0])).sum())(q)
""",
    "torch._subclasses.FakeTensor": """
assert _private.FakeTensor == ()
""",
    "torch._subclasses.FakeTensorMode": """
assert _private.FakeTensorMode == ()
""",
}
NOTHING = "torch.cuda.is_available"  # not asked for by a call on the CPU
WITH = "print(*[x.double().sum().item() for x in step()])"


# Importing torch takes seconds: one process does it, with what torch imports at its first backward pass, and forks one
# for each name, whose words go to files.  A fork ends at once: Python's own end of it, object by object in pages that
# were shared, takes most of a second.
FORKS = """
import json, os, sys, torch, traceback
try:
    import torch.fx.experimental.symbolic_shapes
except ImportError:  # of older versions
    pass
folder, programs = sys.argv[1], json.loads(sys.argv[2])
for path, code in programs.items():
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{path}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
        status = 1
        try:
            exec(code, {"path": path, "__name__": "__main__"})
            status = 0
        except SystemExit as end:
            print(end, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    with open(f"{folder}/{path}.status", "w") as file:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=file)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(path): exit status, output and errors of the program without the name at that path."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    folder = tmp_path_factory.mktemp("without")
    programs = {path: TAKE_AWAY for path in NEEDED} | {path: TAKE_AWAY + MISSED[path] + WITH for path in MISSED}
    programs.update({NOTHING: TAKE_AWAY + WITH, "numpy": OTHER_NUMPY})
    children.python("-c", FORKS, folder, json.dumps(programs))
    return lambda path: [(folder / f"{path}.{kind}").read_text() for kind in ("status", 1, 2)]


@pytest.mark.parametrize("path", NEEDED)
def test_the_import_says_what_it_needs(path, run):
    needs.of_torch(path)
    status, _, errors = run(path)
    version = re.escape(torch.__version__)
    assert int(status) == 1
    names = rf"{re.escape(path)}( or \S+)?"
    assert re.match(rf"ImportError: mha_c\.torch needs {names}, which torch {version} does not", errors)


def test_the_import_says_that_torch_cannot_use_this_numpy(run):
    status, _, errors = run("numpy")
    assert int(status) == 1
    versions = rf"torch {re.escape(torch.__version__)} cannot use NumPy {re.escape(np.__version__)}"
    assert re.match(rf"ImportError: {versions}: .*pip install 'numpy<2', or install a newer torch", errors)


@pytest.mark.parametrize("path", MISSED)
def test_a_call_goes_on_without_it(path, run):
    needs.of_torch(path)
    status, found, errors = run(path)
    assert int(status) == 0, errors
    assert [float(x) for x in found.split()] == pytest.approx([float(x) for x in run(NOTHING)[1].split()], rel=1e-5)


def test_names_of_torchs_own_stand_in_one_module():
    """No other module of mha_c.torch reaches into torch._C, or for a name of torch that begins with an underscore,
    but its version and where its files are."""
    of_torch = r"torch\._(?!_(?:version|file)__)\w|\b(?:Tensor|Function|forward_ad|nn\.modules\.module)\._[a-z]\w+|_C\b"
    private = re.compile(of_torch)
    for path in (ROOT / "mha_c" / "torch").glob("**/*.py"):
        if path.name != "_private.py":
            code = re.sub(r'"""[\s\S]*?"""|#[^\n]*|"[^"\n]*"', "", path.read_text())
            assert private.findall(code) == [], path.name


def test_autograd_calls_backward_itself():
    x = torch.randn(2, 3, 8)
    for layer in mha_c.torch.MultiHeadAttention(8, 8, 8, 8, 2, 0.0), mha_c.torch.DotProductAttention(0.0):
        out = layer(x, x, x.requires_grad_())
        assert type(out.grad_fn).apply is LayerFunction.backward
