"""How much of the package stands in the traceback of an error."""

import traceback
from pathlib import Path

import mha_c


def frames_of_the_package(error):
    package = str(Path(mha_c.__file__).parent)
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(package)]
