"""patch() where d2l is a file in a program's own folder: `from mydir import d2l`."""

import importlib
import sys

import pytest

import mha_c.d2l
import real_d2l


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An imported package mydir with a copy of d2l's classes in mydir.d2l."""
    folder = tmp_path / "mydir"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "d2l.py").write_text(real_d2l.source("1.0.3").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "d2l.torch", raising=False)  # a test before this one may have imported it
    with real_d2l.stand_ins():
        yield importlib.import_module("mydir.d2l")
    for name in ("mydir", "mydir.d2l"):
        sys.modules.pop(name)


def test_the_module_that_has_the_classes_is_named(own_folder, capsys):
    mha_c.d2l.patch()
    mha_c.d2l.unpatch()
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "mha_c will replace the attention classes of d2l.torch once it is imported"
    (line,) = [one for one in others if one.startswith("mydir.d2l ")]
    said = "mydir.d2l has classes of these names: import mydir.d2l; mha_c.d2l.patch(mydir.d2l) replaces them now"
    assert line == said
    scope = {"mha_c": mha_c}
    exec(said.partition(": ")[2].partition(" replaces")[0], scope)
    assert own_folder.MultiHeadAttention.__mro__[1].__module__.startswith("mha_c.")
    mha_c.d2l.unpatch(own_folder)
