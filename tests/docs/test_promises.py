"""docs/promises.md and SECURITY.md name tests, targets and files: all of them exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("page", ["docs/promises.md", "SECURITY.md"])
def test_what_the_pages_name_exists(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`((?:tests|tools|csrc)/[\w/.]+)`", text)) | set(re.findall(r"\]\(([\w/.]+)\)", text))
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"`make ([\w-]+)`", text))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_every_promise_has_a_test():
    text = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text, re.MULTILINE)
    held = [by for promise, by in rows if promise not in ("promise", "command") and not promise.startswith("`make")]
    assert len(held) > 20 and all("`" in by for by in held)
