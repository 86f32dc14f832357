"""benchmarks/devices.py runs whole: on the CPU, and on another device, with tiny sizes."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import own_device

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "devices.py"
OWN = own_device.load()


@pytest.fixture
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_devices", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "own"])
def test_it_prints_its_table(benchmark, device, monkeypatch, capsys):
    shapes = [(name, 2, 3, 4, 8, 2, has_lengths) for name, *_, has_lengths in benchmark.SHAPES]
    monkeypatch.setattr(benchmark, "SHAPES", shapes)
    monkeypatch.setattr(benchmark, "PLAIN", (1, 2, 5, 4))
    monkeypatch.setattr(benchmark, "LONG", ("long", 1, 6, 6, 8, 2, True))
    counters = {"reset_peak_memory_stats": lambda: None, "memory_allocated": lambda: 0,
                "max_memory_allocated": lambda: 3 << 20}  # fmt: skip
    for name, counter in counters.items():
        monkeypatch.setattr(torch.own, name, counter, raising=False)
    monkeypatch.setattr(sys, "argv", ["devices.py", "--device", device, "--seconds", "0.01"])
    benchmark.main()
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(device) and head.split() == ["case", "mha_c", "d2l", "d2l/mha_c"]
    assert len(rows) == 2 * (len(shapes) + 1) + (device == "own")
    assert [row.split()[0] for row in rows[:8:2]] == ["M7", "M10", "M12", "M14"]
    assert device == "cpu" or rows[-1].endswith("mha_c 3, d2l 3 MiB")
    for row in rows[: 2 * len(shapes)]:
        *_, ours, theirs, ratio = row.split()
        assert float(ours) >= 0 and float(theirs) >= 0 and float(ratio) > 0


def test_without_a_gpu_it_says_so(benchmark, monkeypatch):
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["devices.py"])
    with pytest.raises(SystemExit, match="no GPU"):
        benchmark.main()
