"""What `make wheels` and its checks do where this machine is not: other mirrors, other systems' wheels, WebAssembly."""

import hashlib
import importlib.machinery
import json
import os
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import needs
import tools

ROOT = Path(__file__).resolve().parents[2]
inputs = tools.load("tools/wheels/inputs.py")
platforms = tools.load("tools/wheels/platforms.py")
webassembly = tools.load("tools/wheels/webassembly.py")


def url(path):
    return path.as_uri()


def test_sources_come_from_the_first_place_that_has_them(tmp_path, capsys):
    """A place without the file, one that does not answer in a way that is known, one with another file: the next."""
    other, right = tmp_path / "other", tmp_path / "right"
    other.write_bytes(b"something else")
    right.write_bytes(b"the sources")
    digest = hashlib.sha256(b"the sources").hexdigest()
    places = [url(tmp_path / "none"), "mirror+file:/etc/apt/mirrors.txt/pool/x", url(other), url(right)]
    inputs.fetch(places, tmp_path / "archive", digest)
    assert (tmp_path / "archive").read_bytes() == b"the sources"
    assert len(capsys.readouterr().err.splitlines()) == 3
    with pytest.raises(SystemExit, match="nowhere to be had"):
        inputs.fetch(places[:3], tmp_path / "second", digest)
    assert not (tmp_path / "second").exists()


def test_every_system_has_a_place_for_the_sources(monkeypatch):
    """Debian's packages are asked for on Debian alone; the archive's own place always is."""
    for mirrors in ([], ["http://mirror.test/debian"]):
        monkeypatch.setattr(inputs, "debian_mirrors", lambda mirrors=mirrors: mirrors)
        for version, pinned in inputs.PINNED["cpython"].items():
            found = list(inputs.places(version, pinned["release"]))
            assert len(found) == len(mirrors) + 1 and found[-1].endswith(f"/Python-{pinned['release']}.tar.xz")
            assert found[-1].startswith("https://") and pinned["release"].startswith(version)


def test_a_candidate_of_a_python_is_spelled_as_each_place_does(monkeypatch):
    monkeypatch.setattr(inputs, "debian_mirrors", lambda: ["http://mirror.test/debian"])
    pool, own = "http://mirror.test/debian/pool/main/p/python3.15/python3.15_", "https://www.python.org/ftp/python/"
    candidate = [f"{pool}3.15.0~rc2.orig.tar.xz", f"{own}3.15.0/Python-3.15.0rc2.tar.xz"]
    assert list(inputs.places("3.15", "3.15.0rc2")) == candidate
    assert list(inputs.places("3.15", "3.15.1")) == [f"{pool}3.15.1.orig.tar.xz", f"{own}3.15.1/Python-3.15.1.tar.xz"]


@pytest.mark.parametrize("system, asked", [("ID=ubuntu\nID_LIKE=debian\n", False), ("NAME=x\nID=debian\n", True)])
def test_mirrors_that_cannot_be_read_are_left_out(system, asked, monkeypatch):
    said = "mirror+file:/etc/apt/mirrors.txt\nhttps://one.test/debian/\nhttps://one.test/debian-security/\n"
    monkeypatch.setattr(inputs, "LINUX", True)
    monkeypatch.setattr(inputs.Path, "read_text", lambda *_, **__: system)
    done = type("Done", (), {"stdout": said})
    monkeypatch.setattr(inputs.subprocess, "run", lambda *_, **__: done)
    assert inputs.debian_mirrors() == (["https://one.test/debian"] if asked else [])


def test_the_page_names_the_pythons_that_browsers_get_a_wheel_for():
    built = re.search(r"^build = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    page = " ".join((ROOT / "docs" / "webassembly.md").read_text().split())
    (said,) = re.findall(r"\(`pyemscripten`, PEP 783\): for Python (3\.\d+),.* and for (3\.\d+)\. ", page)
    assert json.loads(built) == [f"cp{version.replace('.', '')}-*" for version in said]


# --- WebAssembly ------------------------------------------------------------------------------------------------------


def module(imports, exports):
    """A module's bytes: imports (name, description), exports (name, kind), between other sections."""

    def text(word):
        return bytes([len(word)]) + word.encode()

    def section(kind, parts):
        body = bytes([len(parts)]) + b"".join(parts)
        return (
            bytes([kind, len(body) | 128, 0]) + body if len(body) < 128 else None
        )  # a length in more bytes than needed

    sections = [
        section(1, [b"\x60\0\0"]),
        section(2, [text("env") + text(name) + description for name, description in imports]),
        section(7, [text(name) + bytes([kind, 0]) for name, kind in exports]),
        section(0, [b"\4name"]),
    ]
    return b"\0asm\1\0\0\0" + b"".join(sections)


def test_names_of_webassembly():
    kinds = {
        "memory": b"\2\1\1\x80\2",
        "table": b"\1\x70\0\1",
        "__stack_pointer": b"\3\x7f\1",
        "exp": b"\0\0",
        "tag": b"\4\0\0",
    }
    exports = [("PyInit__core", 0), ("__wasm_call_ctors", 0)]
    found = webassembly.names(module(list(kinds.items()), exports))
    assert found == (["PyInit__core", "__wasm_call_ctors"], list(kinds))
    with pytest.raises(AssertionError, match="not WebAssembly"):
        webassembly.names(b"\x7fELF1234")


# --- What is built for whom -------------------------------------------------------------------------------------------


def built():
    """{platform's tag: {(interpreter, ABI): module's name}} of all that `make wheels` builds."""
    return {
        platform.tag: {
            (interface.python, abi): interface.module(platform)
            for interface in platforms.INTERFACES
            if interface.exists_on(platform)
            for abi in interface.abi.split(".")
        }
        for platform in platforms.PLATFORMS
    }


def test_every_platform_has_the_stable_abis():
    """abi3t, too: only 3.14t, which has none, has no wheel for 64-bit ARM Windows."""
    stable = {("cp39", "abi3"), ("cp315", "abi3"), ("cp315", "abi3t")}
    for tag, modules in built().items():
        assert modules.keys() - stable == (set() if tag == "win_arm64" else {("cp314", "cp314t")})
        assert stable <= modules.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="the module has another name elsewhere")
def test_a_python_loads_the_module_of_the_wheel_that_it_takes():
    tags = needs.module("packaging.tags").sys_tags()  # the best first
    modules = next(them for tag, them in built().items() if tag.startswith("manylinux") and os.uname().machine in tag)
    taken = [modules[tag.interpreter, tag.abi] for tag in tags if (tag.interpreter, tag.abi) in modules]
    if not taken:
        pytest.skip("`make wheels` builds nothing for this Python")
    assert taken[0].replace("_core", "", 1) in importlib.machinery.EXTENSION_SUFFIXES


# --- Which wheels fit here --------------------------------------------------------------------------------------------


def a_wheel(folder, module="_core.abi3.so", **files):
    """A wheel of a package with these files in mha_c/viz/."""
    path = folder / "mha_c-0.1.0-cp39-abi3-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"mha_c/{module}", b"")
        archive.writestr("mha_c-0.1.0.dist-info/METADATA", "Name: mha_c\n")
        for name, text in files.items():
            archive.writestr(f"mha_c/viz/{name}.html", text)
    return path


def test_the_files_of_two_wheels_are_compared(tmp_path):
    needs.module("packaging")
    compare = tools.load("tools/wheels/compare.py")
    package, _, _ = compare.contents(a_wheel(tmp_path, document="<html>"))
    assert list(package) == ["mha_c/viz/document.html"]


@pytest.mark.parametrize(
    ("suffix", "same"),
    [("abi3-x86_64-linux-gnu", "abi3"), ("abi3t-aarch64-linux-musl", "abi3t"), ("cpython-314t-darwin", None)],
)
def test_modules_are_one_with_the_platform_in_their_name_and_without(tmp_path, suffix, same):
    needs.module("packaging")
    compare = tools.load("tools/wheels/compare.py")
    _, module, _ = compare.contents(a_wheel(tmp_path, module=f"_core.{suffix}.so"))
    assert module == f"mha_c/_core.{same or suffix}.so"


def test_wheels_of_this_very_system_are_compared(tmp_path):
    needs.module("packaging")
    compare = tools.load("tools/wheels/compare.py")
    names = [
        "mha_c-0.1.0-cp39-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "mha_c-0.1.0-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl",
        "mha_c-0.1.0-cp39-abi3-musllinux_1_2_x86_64.whl",
        "mha_c-0.1.0-cp39-abi3-musllinux_1_2_aarch64.whl",
        "mha_c-0.1.0-cp39-abi3-macosx_11_0_x86_64.whl",
        "mha_c-0.1.0-cp39-abi3-macosx_11_0_arm64.whl",
        "mha_c-0.1.0-cp39-abi3-win_amd64.whl",
        "mha_c-0.1.0-cp39-abi3-win_arm64.whl",
    ]
    newer = [name.replace("cp39-abi3", "cp315-abi3.abi3t") for name in names]
    for name in names + newer:
        Path(tmp_path, name).touch()
    found = compare.that_fit(tmp_path)
    if sys.version_info >= (3, 15):
        key = ("cp315", "abi3t" if sysconfig.get_config_var("Py_GIL_DISABLED") else "abi3")
        assert found.pop(key).name in newer
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # to such a Python none of the others is its own
        assert found == {}
        return
    assert list(found) == [("cp39", "abi3")] and found["cp39", "abi3"].name in names
    if Path("/lib/x86_64-linux-gnu/libc.so.6").exists():
        assert found["cp39", "abi3"].name == names[0]
