"""The program that reads a whole folder of profiles, and reports the first fault.

    python -m gateway.profiles.profile_check < PATH_OF_THE_FOLDER

Standard output: JSON, `{"problem": "", "engines": 12}`. A process of its own, because all profiles
together take seconds of a processor and 100 MB.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gateway.errors import FitserveError
from gateway.profiles.profiles import Profiles


def read_everything(folder: Path) -> int:
    """Read every table, engine and rule of the folder. Returns the number of engine versions.

    Raises FitserveError.
    """
    profiles = Profiles(roots=(folder,))
    refs = [*profiles.engine_files, *profiles.diff_files]
    profiles.rules(profiles.engine(ref) for ref in refs)
    for name in profiles.snapshot_names():
        profiles.hardware(name)
    tables = (
        profiles.facts,
        profiles.gpus,
        profiles.images,
        profiles.instances,
        profiles.parsers,
        profiles.signatures,
        profiles.speed_knowledge,
        profiles.xids,
    )
    return len(refs) if all(table is not None for table in tables) else 0


def main() -> None:
    """Read the path from standard input, and print the report."""
    problem, count = "", 0
    try:
        count = read_everything(Path(sys.stdin.read()))
    except FitserveError as error:
        problem = str(error)
    except (ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem and not count:
        problem = "it describes no engine"
    print(json.dumps({"problem": problem, "engines": count}))  # noqa: T201


if __name__ == "__main__":
    main()
