"""What is chosen at import, and what an import costs; each in a process of its own where that matters."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import children
import mha_c
from children import printed
from mha_c import _core

OFFERED = [name for name, available in _core.isas() if available]


# --- Configuration ---------------------------------------------------------------------------------


def test_show_config(capsys):
    config = mha_c.show_config()
    text = capsys.readouterr().out
    assert config["version"] == mha_c.__version__ and config["numpy"] == np.__version__
    assert config["isas"] == OFFERED and config["isa"] in OFFERED
    assert config["threads"] == mha_c.get_num_threads() and config["threads_from"]
    assert ("torch" in config) == ("torch" in sys.modules)
    for name in ("version", "processor", "isa", "threads", "threads_from", "numpy"):
        assert str(config[name]) in text
    assert len(text.splitlines()) == 6 + ("torch" in config)


def test_version():
    try:
        assert mha_c.__version__ == importlib.metadata.version("mha_c")
    except importlib.metadata.PackageNotFoundError:
        assert mha_c.__version__ == "unknown"


@pytest.mark.parametrize("isa", OFFERED)
def test_the_instruction_set_is_chosen_at_import(isa):
    code = "import mha_c; print(mha_c.show_config()['isa'])"
    out, warned = printed(code, MHA_C_ISA=isa)
    assert out.startswith(
        f"mha_c {mha_c.__version__} in {Path(mha_c.__file__).parent}\nisa {isa} (MHA_C_ISA;"
    ) and out.endswith(f"\n{isa}")
    assert not warned


@pytest.mark.parametrize("variables", [{}, {"MHA_C_ISA": ""}], ids=["no variable", "an empty one"])
def test_the_widest_instruction_set_is_the_default(variables):
    """A variable that is set after the import is too late."""
    code = "import os, mha_c; os.environ['MHA_C_ISA'] = 'scalar'; print(mha_c.show_config()['isa'])"
    out, warned = printed(code, **variables)
    assert out.endswith(f"\n{OFFERED[-1]}") and "(the widest; MHA_C_ISA changes it;" in out and not warned


@pytest.mark.parametrize("name", ["sse9", "AVX2", " scalar", *[n for n, offered in _core.isas() if not offered]])
def test_an_absent_instruction_set_fails_the_import(name):
    done = children.unchosen("-c", "import mha_c", status=None, MHA_C_ISA=name)
    assert done.returncode == 1
    refused = f"instruction set {name!r} is not available: this CPU offers {', '.join(OFFERED)} ("
    assert f"RuntimeError: MHA_C_ISA: {refused}" in done.stderr


# --- Import ------------------------------------------------------------------------------------------


def test_import_is_quiet_and_light():
    code = (
        "import mha_c, sys; mha_c.MultiHeadAttention(4, 2, 0.1); mha_c.variants; "
        "print(sorted({'torch', 'matplotlib', 'IPython', 'd2l'} & set(sys.modules)))"
    )
    done = children.unchosen("-W", "error", "-c", code)
    assert done.stdout.strip() == "[]" and not done.stderr


def test_import_takes_little_longer_than_numpys():
    """Two fifths of what NumPy's takes, 30 ms, in the same process: a busy machine is so for both.  Caches may be
    cold, so the best of a few counts, and twice that."""
    code = """
import time
before = time.process_time()
import numpy, numpy.random
between = time.process_time()
import mha_c
print((time.process_time() - between) / (between - before))
"""
    assert min(float(printed(code)[0]) for _ in range(4)) < 0.8
