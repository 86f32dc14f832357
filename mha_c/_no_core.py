"""The error of `import mha_c` if the compiled core is missing; Python would suggest a circular import."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent


def _installed() -> str:
    """What to do to use the mha_c that is installed."""
    of_make = FOLDER.parent / ".venv" / "bin" / "python"  # `make demo` has installed it there
    if of_make.exists():
        return f"start Python as `{of_make} -I`, which uses the mha_c that `make` has installed"
    return "leave that folder, or start Python as `python -I`, to use the mha_c that is installed"


def explained(error: ImportError) -> ImportError:
    """The error to raise instead of `error`, which importing the core has raised."""
    if find_spec("mha_c._core") is not None:
        return error  # the file exists but does not load: the loader's error says why
    others = ", ".join(sorted(path.name for path in FOLDER.glob("_core.*.*")))
    found = f" (built for another Python or system: {others})" if others else ""
    version = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if (FOLDER.parent / "csrc" / "mha.h").exists():
        return ImportError(
            f"mha_c was imported from its source folder, {FOLDER.parent}, where no C core is built for {version}"
            f"{found}: {_installed()}, or build in place there with `make dev` or `python setup.py build_ext --inplace`"
        )
    return ImportError(
        f"the compiled core of mha_c is missing from {FOLDER}: there is none for {version}{found}; install it again, "
        f"`pip install --force-reinstall` and the wheel file or the folder that it came from"
    )
