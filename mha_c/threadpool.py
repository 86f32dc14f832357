"""Lets threadpoolctl, and with it joblib and scikit-learn, see and limit the threads of mha_c.  Optional.

>>> import mha_c
>>> mha_c.threadpool.register()                        # doctest: +SKIP
>>> with threadpoolctl.threadpool_limits(limits=1):    # doctest: +SKIP
...     layer(queries, keys, values)                   # on one thread, like BLAS and OpenMP

threadpoolctl recognizes a library by its file name, and does not know ours: so `register` must be called.
`limits={"mha_c": 2}` limits mha_c only.  No other module imports threadpoolctl.
"""

from __future__ import annotations

import os
from typing import Any

from . import _core, config

__all__ = ["register"]
__dir__ = __all__.copy  # what dir() and completion show

_registered: list[Any] = []


def register() -> None:
    """Add mha_c to the libraries of `threadpool_limits` and `threadpool_info` in this process; call it once.

    Raises
    ------
    ImportError
        If threadpoolctl is not installed (mha_c does not depend on it: pip install threadpoolctl).

    Examples
    --------
    >>> import mha_c.threadpool, threadpoolctl
    >>> mha_c.threadpool.register()
    >>> "mha_c" in [found["user_api"] for found in threadpoolctl.threadpool_info()]
    True
    """
    import threadpoolctl

    if _registered:
        return
    ours = os.path.realpath(_core.__file__)

    class Controller(threadpoolctl.LibController):  # type: ignore[misc]
        user_api = internal_api = "mha_c"
        filename_prefixes = (os.path.basename(ours).lower(),)
        check_symbols = ("PyInit__core", "PyModExport__core")  # the second since Python 3.15

        def get_num_threads(self) -> int:
            return _core.get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            config.limit_threads(num_threads)

        def get_version(self) -> str:
            return config.version()

        def set_additional_attributes(self) -> None:
            if os.path.realpath(self.filepath) != ours:  # another package's _core, without our symbols
                self.dynlib = None

    threadpoolctl.register(Controller)
    _registered.append(Controller)
