"""The language that the reader has chosen, for what is said in sentences: "en", or "zh" for Chinese.

MHA_C_LANGUAGE chooses it from outside, `teach.set_language` from inside; what knows no such language speaks English.
"""

import os

chosen = os.environ.get("MHA_C_LANGUAGE") or "en"


def choose(language: str) -> None:
    """From now on."""
    global chosen
    chosen = language
