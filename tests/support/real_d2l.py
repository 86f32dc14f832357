"""The real d2l packages, both generations, loaded side by side.

`pip install --no-deps --target .cache/d2l-<version> d2l==<version>` (the Makefile does it) leaves one
folder per version; MHA_C_D2L_DIR names another parent folder.  Each version's d2l/torch.py is executed
under a module name of its own, with empty stand-ins for what it imports at the top but the attention
classes never use, so that neither torchvision nor pandas and the like need to be there.
"""

import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path

VERSIONS = ("0.17.6", "1.0.3")  # sized constructors; lazily sized constructors
STAND_INS = (
    *("torchvision", "torchvision.transforms", "PIL", "pandas", "requests", "IPython"),
    *("matplotlib_inline", "scipy", "scipy.spatial"),
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


def load(version):
    """The module d2l.torch of one version; FileNotFoundError if that version is not installed."""
    name = "real_d2l_" + version.replace(".", "_")
    if name in sys.modules:
        return sys.modules[name]
    stand_ins = list(STAND_INS)
    try:
        import matplotlib.pyplot  # noqa: F401  before the stand-ins: it needs the real PIL
    except ImportError:
        stand_ins += ["matplotlib", "matplotlib.pyplot"]
    if not source(version).is_file():
        raise FileNotFoundError(f"d2l {version} is not in {source(version).parents[1]}")
    spec = importlib.util.spec_from_file_location(name, source(version))
    module = importlib.util.module_from_spec(spec)
    before = {stand_in: sys.modules.get(stand_in) for stand_in in stand_ins}
    sys.modules.update({stand_in: StandIn(stand_in) for stand_in in stand_ins})
    sys.modules[name] = module  # d2l refers to itself through sys.modules[__name__]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another project's source
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for stand_in, original in before.items():
            if original is None:
                del sys.modules[stand_in]
            else:
                sys.modules[stand_in] = original
    return module
