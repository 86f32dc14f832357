"""What several tests of teach use."""

import sys

import pytest

from mha_c.teach.grader import files


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Writes a file and judges it; afterwards Python is as it was."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    modules = {*sys.modules}

    def judge(text, name=None, kind=None, file="mine.py", **options):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return files.judged(str(path), name, kind, **options)

    yield judge
    for each in {*sys.modules} - modules:
        if str(tmp_path) in str(getattr(sys.modules[each], "__file__", "")):
            del sys.modules[each]
