#!/usr/bin/env bash
# On a machine with torch and a GPU, without a network, in less than eight minutes: builds the core, runs the tests of
# devices beside d2l on the GPU, times benchmarks/devices.py, and leaves two files to take home.
#
#     tools/gpu.sh --prepare      once, with a network: what the tests need goes to build/gpu-tools and .cache
#     tools/gpu.sh [FOLDER]       there: FOLDER (build/gpu) gets tests.txt and devices.txt
#
# PYTHON is the Python that has torch (python3); SECONDS_IN_ALL ends what takes longer (450).
# Exit status: 0 all passed and was timed; 1 something failed or was ended; 3 there is no GPU, so nothing was timed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
limit=${SECONDS_IN_ALL:-450}
tools=$PWD/build/gpu-tools

if [ "${1:-}" = --prepare ]; then
    set -e
    # of Python alone, so they serve whichever Python is there
    "$python" -m pip install -q --upgrade --target "$tools" pytest 'hypothesis<6.140' setuptools
    make books
    echo "Take along: the clone with build/gpu-tools and .cache, which git ignores."
    exit
fi

out=${1:-build/gpu}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD:$tools${PYTHONPATH:+:$PYTHONPATH}" # what is built here, then the tools
failed=0

# step NAME SECONDS COMMAND...: what it prints is shown, kept at the end of FILE, and ended after so long, or at the limit.
step() {
    local name=$1 seconds=$2 file=$3 status left=$((limit - SECONDS))
    shift 3
    [ "$left" -lt "$seconds" ] && seconds=$left
    if [ "$seconds" -le 0 ]; then
        echo "*** $name: no time is left of $limit s ***" | tee -a "$file"
        failed=1
        return
    fi
    echo "--- $name, at most $seconds s"
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee -a "$file"
    status=${PIPESTATUS[0]}
    if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
        echo "*** $name: ended after $seconds s ***" | tee -a "$file"
    elif [ "$status" -ne 0 ]; then
        echo "*** $name: exit status $status ***" | tee -a "$file"
    fi
    [ "$status" -eq 0 ] || failed=1
}

machine() {
    "$python" - << 'END'
import importlib.util, platform, sys
try:
    import numpy, torch
except ImportError as error:
    print(f"*** {sys.executable} cannot import torch and NumPy: {error}.  PYTHON=... names the one that can ***")
    sys.exit(1)
missing = [name for name in ("pytest", "hypothesis", "setuptools") if importlib.util.find_spec(name) is None]
if missing:
    print(f"*** {sys.executable} has no {', '.join(missing)}: `tools/gpu.sh --prepare`, with a network, fetches them ***")
    sys.exit(1)
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
print(f"GPU {gpu}; torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")
sys.exit(0 if torch.cuda.is_available() else 3)
END
}

said=$(machine)
there=$?
echo "$said"
[ "$there" -eq 0 ] || [ "$there" -eq 3 ] || exit 1
echo "$said" > "$out/tests.txt"
echo "$said" > "$out/devices.txt"
chosen=(-k cuda)
if [ "$there" -eq 3 ]; then
    echo "*** torch finds no GPU here: the tests run on a device of their own, and nothing is timed ***" | tee -a "$out/tests.txt"
    chosen=()
fi

step build 150 "$out/tests.txt" "$python" setup.py -q build_ext --inplace
step tests 240 "$out/tests.txt" "$python" -m pytest -q -p no:cacheprovider -rfEs "${chosen[@]}" \
    tests/torch/test_devices.py tests/torch/test_devices_while_decoding.py tests/d2l/test_d2l_devices.py
if [ "$there" -eq 0 ]; then
    step times 120 "$out/devices.txt" "$python" benchmarks/devices.py
else
    echo "*** not timed: torch finds no GPU here ***" >> "$out/devices.txt"
fi
echo "$SECONDS s; $out/tests.txt and $out/devices.txt"
[ "$failed" -eq 0 ] || exit 1
exit "$there"
