"""The caller's rounding mode, flush-to-zero and traps: kept, and used by every thread; in a process of its own."""

import os
import sys

import pytest

import mha_c
import needs
from prepared import python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes by functions of POSIX")


ROUNDING = {"downward": 0x400, "upward": 0x800, "towards zero": 0xC00}


@pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="the name of glibc, the numbers of x86-64's modes"
)
@pytest.mark.parametrize("mode", ROUNDING)
def test_rounding_mode_of_the_caller(mode):
    """Kept, used by every thread alike, and the result is right to a little more than usual."""
    printed = python(
        """
        libm = ctypes.CDLL("libm.so.6")
        mode = int(sys.argv[1])
        exact = np.frombuffer(right, np.float32)
        bits = set()
        for threads in 1, 3:
            mha_c.set_num_threads(threads)
            libm.fesetround(mode)
            out = layer(x, x, x, [50, 96])
            kept = libm.fegetround() == mode
            libm.fesetround(0)
            assert kept
            bits.add(out.tobytes())
        # Directed rounding errs by up to twice as much, and all errors in one direction: a few dozen sums of 64 terms.
        print(len(bits) == 1, np.abs(out.ravel() - exact).max() < 64 * 2**-23 * np.abs(exact).max(), call())
        """,
        str(ROUNDING[mode]),
    )
    assert printed.strip() == "True True True"


def test_flush_to_zero_of_the_caller():
    """torch.set_flush_denormal sets it for the calling thread: kept, and results change by no more than subnormals."""
    needs.module("torch")
    printed = python(
        """
        import torch
        tiny = np.float32(1e-42)
        assert torch.set_flush_denormal(True)
        flushed = float(tiny * np.float32(1)) == 0
        out = layer(x, x, x, [50, 96])
        kept = (float(tiny * np.float32(1)) == 0) == flushed
        torch.set_flush_denormal(False)
        # Weights below 1e-38 may vanish; they are factors of values around 1.
        print(kept, np.abs(out.ravel() - np.frombuffer(right, np.float32)).max() <= 1e-36, call())
        """
    )
    assert printed.strip() == "True True True"


@pytest.mark.skipif(sys.platform != "linux", reason="feenableexcept is glibc's")
@pytest.mark.parametrize("name", [name for name, offered in mha_c._core.isas() if offered and name != "scalar"])
def test_floating_point_traps_of_the_caller(name):
    """With division by zero, overflow and invalid operations trapped, finite inputs raise none of them.

    Of plain C compilers may make code that works out what is then not chosen.
    """
    printed = python(
        """
        mha_c._core.set_isa(sys.argv[1])
        libm = ctypes.CDLL("libm.so.6")
        lens = np.arange(192).reshape(2, 96) % 97
        few, few_lens = np.ascontiguousarray(x[:, :10]), np.arange(20).reshape(2, 10) % 11
        calls = [
            lambda: F.dot_product_attention(x, x, x, lens, causal="top_left"),
            lambda: F.dot_product_attention(few, few, few, few_lens),
            lambda: layer(x, x, x, lens),
            lambda: layer(few, few, few, few_lens),
        ]
        expected = [call() for call in calls]
        libm.feenableexcept(1 | 4 | 8)
        found = [call() for call in calls]
        libm.fedisableexcept(1 | 4 | 8)
        print(all(a.tobytes() == b.tobytes() for a, b in zip(expected, found)))
        """,
        name,
    )
    assert printed.strip() == "True"
