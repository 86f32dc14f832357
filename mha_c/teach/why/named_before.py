"""The line before that gives a name to what another line reads: a number under a root, a factor, a partial function."""

from __future__ import annotations

import linecache
import re
from typing import Optional

from .noting import Place

TYPED = r"\s*(?::[^=]+)?"  # between a name and what it is given


def where_named(place: Place) -> Optional[Place]:
    """The line before that gives the number under a root its name."""
    found = re.search(r"sqrt\(\s*([A-Za-z_][\w.]*)\s*\)|([A-Za-z_][\w.]*) ?\*\* ?-?\(?(?:0?\.5|1 ?/ ?2)", place.text)
    name = next(filter(None, found.groups()), "") if found else ""
    name = name or next(iter(re.findall(r"\bself\.\w*scal\w*|\b\w*scale\w*\b|\bd_k\b", place.text)), "")
    if not name or (name.startswith("self.") and not re.search("scal|temp|d_k|sqrt", name)):
        return None
    start = 1 if name.startswith("self.") else max(1, place.number - 40)
    lines = [(n, linecache.getline(place.file, n)) for n in range(place.number - 1, start - 1, -1)]
    for number, text in lines:
        if re.match(rf"\s*{re.escape(name)}{TYPED}=[^=]", text):
            return place._replace(number=number, text=text.strip())
        if text.lstrip().startswith("def ") and not name.startswith("self."):
            return None
    return None


def where_a_number(place: Place) -> Optional[Place]:
    """The line before that names a factor of a line, if it is nothing but a number."""
    factors = re.findall(r"(?<=\* )[A-Za-z_]\w*|[A-Za-z_]\w*(?= \*)", place.text)
    for number in range(place.number - 1, max(0, place.number - 20), -1):
        text = linecache.getline(place.file, number).strip()
        if any(re.fullmatch(rf"{name}{TYPED}= [\d.]+", text) for name in factors):
            return place._replace(number=number, text=text)
    return None


def where_partial(place: Place) -> Optional[Place]:
    """The line of the file that fixes the arguments of a function which a line calls."""
    for number, text in enumerate(linecache.getlines(place.file), 1):
        made = re.match(rf"(\w+){TYPED}= *(functools\.)?partial\(", text)
        if made and re.search(rf"\b{made[1]}\(", place.text):
            return place._replace(number=number, text=text.strip())
    return None
