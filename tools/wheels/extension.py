"""What setup.py in this folder tells setuptools on some Python, whichever one runs this; as JSON.

python tools/wheels/extension.py 3.15t
"""

import json
import sys
import sysconfig
from distutils.core import run_setup

import numpy  # noqa: F401  setup.py imports both; they must see the Python that there is
import setuptools  # noqa: F401

FIELDS = ("sources", "extra_compile_args", "define_macros", "py_limited_api")


def described(python):
    """{name: value} of the Extension, and "tag": the wheel's `py_limited_api`, or None."""
    known, free_threaded = sysconfig.get_config_var, python.endswith("t")
    sysconfig.get_config_var = lambda name: free_threaded if name == "Py_GIL_DISABLED" else known(name)
    sys.version_info = tuple(map(int, python.rstrip("t").split(".")))
    made = run_setup("setup.py", ["-q"], "init")
    (extension,) = made.ext_modules
    _, tag = made.command_options.get("bdist_wheel", {}).get("py_limited_api", (None, None))
    return {**{field: getattr(extension, field) for field in FIELDS}, "tag": tag}


if __name__ == "__main__":
    print(json.dumps(described(*sys.argv[1:])))
