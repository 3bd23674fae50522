"""The program as users type it, as a process with a data folder of its own."""

import os
import subprocess
import tempfile

from tests.support import forked

# The data folder of commands, away from the user's own.
DATA = tempfile.TemporaryDirectory(prefix="fitserve-")


def fitserve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")}
    keep["FITSERVE_DATA_DIR"] = DATA.name
    return forked.run(arguments, {**keep, **environment})
