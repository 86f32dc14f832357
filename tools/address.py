"""make address REPOSITORY=https://...: the address of the repository on every page, in every notebook and on the site.

    python tools/address.py https://example.org/mha_c

Until the address is known, it stands everywhere as ADDRESS-OF-THE-REPOSITORY; a paragraph that begins with this word
says what to write there, and goes when it is known.  Site, notebooks to download and the package's own page are made of
these files, so that nothing else has to be told.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNKNOWN = "ADDRESS-OF-THE-REPOSITORY"
PAGES = ["*.md", "docs/*.md", "docs/*/*.md", "examples/notebooks/*.md", "benchmarks/*.md", "mha_c/viz/whole_page.py"]
CITED = "CITATION.cff"
EXPLAINED = re.compile(rf"^`?{UNKNOWN}`? .*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def filled_in(text, address):
    """The text with the address in the place of the word, or as it is where the address is not known."""
    return EXPLAINED.sub("", text).replace(UNKNOWN, address) if address else text


def main(address):
    if not re.fullmatch(r"https://[^\s/]+/\S*[^\s/]", address):
        raise SystemExit(f"an address is like https://example.org/mha_c, got {address!r}: make address REPOSITORY=...")
    changed = 0
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        before = path.read_text(encoding="utf-8")
        after = filled_in(before, address)
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed += 1
    cited = ROOT / CITED
    text = cited.read_text(encoding="utf-8")
    if "\nrepository-code:" not in text:
        cited.write_text(text.replace("\nlicense:", f'\nrepository-code: "{address}"\nlicense:', 1), encoding="utf-8")
        changed += 1
    print(f"{changed} files have the address {address}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
