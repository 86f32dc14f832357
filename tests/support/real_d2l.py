"""The real d2l packages, of all generations, loaded side by side.

`pip install --no-deps --target .cache/d2l-<version> d2l==<version>` (the Makefile does it) leaves one
folder per version; MHA_C_D2L_DIR names another parent folder.  Each version's d2l/torch.py is executed
under a module name of its own, with empty stand-ins for what it imports at the top but the attention
classes never use, so that neither torchvision nor pandas and the like need to be there.
"""

import contextlib
import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path

VERSIONS = ("0.17.6", "1.0.3")  # sized constructors; lazily sized constructors
STAND_INS = (
    *("torchvision", "torchvision.transforms", "PIL", "pandas", "requests", "IPython"),
    *("matplotlib_inline", "scipy", "scipy.spatial", "regex"),
)


class StandIn(types.ModuleType):
    """A module that has every name, each of them callable and without effect."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return self


def source(version):
    """The path of that version's d2l/torch.py, whether or not it is there."""
    parent = os.environ.get("MHA_C_D2L_DIR") or Path(__file__).resolve().parents[2] / ".cache"
    return Path(parent) / f"d2l-{version}" / "d2l" / "torch.py"


@contextlib.contextmanager
def stand_ins():
    """What d2l's source imports at its top and attention never uses is there."""
    names = list(STAND_INS)
    try:
        import matplotlib.pyplot  # noqa: F401  before the stand-ins: it needs the real PIL
    except ImportError:
        names += ["matplotlib", "matplotlib.pyplot"]
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: StandIn(name) for name in names})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another project's source
            yield
    finally:
        for name, original in before.items():
            if original is None:
                del sys.modules[name]
            else:
                sys.modules[name] = original


def load(version):
    """The module d2l.torch of one version; FileNotFoundError if that version is not installed."""
    if not source(version).is_file():
        raise FileNotFoundError(f"d2l {version} is not in {source(version).parents[1]}")
    return load_file("real_d2l_" + version.replace(".", "_"), source(version))


def load_file(name, path):
    """The module of this name, which that d2l/torch.py defines."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # d2l refers to itself through sys.modules[__name__]
    try:
        with stand_ins():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
