"""What leaks.py and failing_memory.py share: the preloaded shim.

Both run with LD_PRELOAD=<the built memory_shim.c> PYTHONMALLOC=malloc, so that every allocation of Python, NumPy and
the core goes through the shim and can be counted and refused.
"""

import ctypes

shim = ctypes.CDLL(None)
shim.shim_live.restype = shim.shim_stop.restype = shim.shim_refuse_threads.restype = ctypes.c_long
shim.shim_fail.argtypes = ctypes.c_long, ctypes.c_long
shim.shim_fail.restype = None
