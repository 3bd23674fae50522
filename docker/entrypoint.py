"""Become the user `fitserve` (65532) with the group of the Docker socket, then run the command.

The socket's group number differs from machine to machine, so no image can know it. Started as
root with only the capabilities SETUID and SETGID, as compose.yaml starts the agent, this reads the
number and gives up root. Any other user, such as the gateway's, changes nothing.
"""

import os
import stat
import sys
from pathlib import Path

USER = 65532
SOCKET = "/var/run/docker.sock"


def socket_groups() -> list[int]:
    try:
        found = Path(SOCKET).stat()
    except OSError:
        return []
    # A socket of group root stays out of reach: then the operator decides, with `group_add`.
    return [found.st_gid] if stat.S_ISSOCK(found.st_mode) and found.st_gid != 0 else []


def main() -> None:
    if os.getuid() == 0:
        os.setgroups(socket_groups())
        os.setgid(USER)
        os.setuid(USER)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
