"""Calls everything public many times, well and badly, and says what is left behind; exit status 1 if something is.

    LD_PRELOAD=<shim> PYTHONMALLOC=malloc python leaks.py REPETITIONS [control]

A leak leaves a block behind at each call, in every round.  What Python and NumPy keep for later (free lists, NumPy's
cache of small blocks) grows ever more slowly and stops: a round that leaves less than that clears the call.
`control` calls three things that do leak instead: a block of C, a Python object, a reference.
"""

import ctypes
import gc
import sys

import public_calls
from memory import shim

ROUNDS = 12
repetitions = int(sys.argv[1])
calls = {name: call for name, call in public_calls.GOOD.items()}
calls.update({f"{name} (refused)": lambda name=name: public_calls.refused(name) for name in public_calls.BAD})
if "control" in sys.argv:
    kept = []
    malloc = ctypes.CDLL(None).malloc
    array = public_calls.numbers(3)
    calls = {
        "control: block": lambda: malloc(16),
        "control: object": lambda: kept.append(object()),
        "control: reference": lambda: ctypes.pythonapi.Py_IncRef(ctypes.py_object(array.copy())),
        "control: none": lambda: array.copy(),
    }


def growth(call, n):
    gc.collect()
    before = shim.shim_live()
    for _ in range(n):
        call()
    gc.collect()
    return shim.shim_live() - before


missing = public_calls.names() - {name.split(",")[0] for name in public_calls.GOOD}
missing |= public_calls.names() - {name.split(",")[0] for name in public_calls.BAD} - {"show_config", "get_num_threads"}
if missing:
    sys.exit(f"no call is known of {sorted(missing)}")
leaking = []
gc.freeze()  # collections look at what the calls leave behind, not at all that was imported
for name, call in calls.items():
    gc.disable()  # layers know themselves through cycles; what is left of them is collected after each round
    grown = []
    while len(grown) < ROUNDS and (not grown or grown[-1] >= 0.9 * repetitions):
        grown.append(growth(call, repetitions))
    gc.enable()
    if len(grown) == ROUNDS:
        leaking.append(name)
        print(f"{name}: rounds of {repetitions} calls left {grown} blocks")
print(f"{len(calls)} calls, {len(leaking)} leak")
sys.exit(bool(leaking))
