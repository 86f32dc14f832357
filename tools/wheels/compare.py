"""make compare-wheels: wheels built on this very system beside those of `make wheels`, for the Python that runs this.

    python tools/wheels/compare.py build/native dist

For each wheel of the first folder that this Python can import, and its counterpart in the second: the same files but
for the page that `make wheels` adds, the same bytes in all of them but the compiled module, the same name of that
module, the same metadata that decides about an installation; and, on every instruction set of this CPU, the same bits
as results of the calls that tools/record_bits.py draws, whichever compiler made the kernels.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

TOOLS = Path(__file__).resolve().parents[1]
FIELDS = ["Name", "Version", "Requires-Python", "Requires-Dist", "Provides-Extra", "License-Expression", "Classifier"]


def that_fit(folder):
    """{(interpreter, ABI): wheel} of those that this very Python may install, whatever its system calls itself."""
    here, found = set(sys_tags()), {}
    for wheel in sorted(Path(folder).glob("*.whl")):
        tags = parse_wheel_filename(wheel.name)[3]
        found.update({(tag.interpreter, tag.abi): wheel for tag in tags if tag in here})
    return found


def contents(wheel):
    """({file: bytes} of the package, its module's name, {field: values} of the metadata).  setuptools puts the platform
    into the module's name on 3.15; Python loads either."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = [text for name, text in files.items() if name.endswith(".dist-info/METADATA")]
    message = Parser().parsestr(metadata.decode())
    package = {name: text for name, text in files.items() if name.startswith("mha_c/")}
    (module,) = [name for name in package if name.startswith("mha_c/_core.") and name.endswith((".so", ".pyd"))]
    del package[module]
    module = re.sub(r"(\.abi3t?)-[\w-]+\.so$", r"\1.so", module)
    return package, module, {field: sorted(message.get_all(field, [])) for field in FIELDS}


def unpacked(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return str(folder)


def bits(action, file, folder):
    command = [sys.executable, str(TOOLS / "record_bits.py"), action, str(file)]
    environment = {**os.environ, "PYTHONPATH": folder}
    environment.pop("MHA_C_ISA", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, (done.stdout + done.stderr).strip()


def differences(ours, theirs):
    """What differs between two wheels, as sentences."""
    (files, module, metadata), (others, other_module, other_metadata) = contents(ours), contents(theirs)
    yield from (f"{name} is in one of them only" for name in sorted(files.keys() ^ others.keys()))
    yield from (f"{name} differs" for name in sorted(files.keys() & others.keys()) if files[name] != others[name])
    if module != other_module:
        yield f"modules are {module} and {other_module}"
    yield from (f"{field}: {metadata[field]} and {other_metadata[field]}" for field in FIELDS
                if metadata[field] != other_metadata[field])  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "bits.json"
        places = [unpacked(wheel, Path(folder) / str(i)) for i, wheel in enumerate((ours, theirs))]
        status, said = bits("record", record, places[0])
        if status == 0:
            print(said.replace(f" in {record}", " on the native wheel"))
            status, said = bits("compare", record, places[1])
        print(said)
        if status != 0:
            yield "results differ"


def main(native, cross):
    own, others = that_fit(native), that_fit(cross)
    pairs = [(own[interface], others[interface]) for interface in sorted(own.keys() & others.keys())]
    if not pairs:
        raise SystemExit(f"{native} and {cross} have no wheel in common for this Python")
    found = []
    for ours, theirs in pairs:
        print(f"{ours.name}\n{theirs.name}")
        found += list(differences(ours, theirs))
    print(*found, f"{len(found)} differences in {len(pairs)} pairs of wheels", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
