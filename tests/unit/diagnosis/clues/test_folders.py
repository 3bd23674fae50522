"""Folders of components in a failure, and the variables that move them."""

import pytest

from gateway.diagnosis.clues.folders import ComponentFolders
from gateway.diagnosis.signature import ComponentFolder
from gateway.domain import Scalar

FOLDERS = ComponentFolders(
    [
        ComponentFolder(
            variable="FROB_KERNELS",
            path="frob_kernels",
            frames=r"frob/fetch\.py:",
            local_copy="the kernels",
            source="frob",
        ),
        ComponentFolder(variable="FROB_CACHE", path=r"/\.frob(?:/|\Z)", source="frob"),
    ]
)


@pytest.mark.parametrize(
    ("message", "frames", "values"),
    [
        (
            "Permission denied: '/opt/site-packages/frob_kernels/a.lock'",
            (),
            {
                "beyond_home": "yes",
                "folder_variable": "FROB_KERNELS",
                "local_copy": "the kernels",
            },
        ),
        ("Permission denied: '/.frob'", (), {"folder_variable": "FROB_CACHE"}),
        ("Permission denied: '/home/x/.frob/y'", (), {"folder_variable": "FROB_CACHE"}),
        ("Permission denied: '/models/x'", (), {"beyond_home": "yes"}),
        (
            "no answer",
            ("frob/fetch.py:get", "http/client.py:send"),
            {"folder_variable": "FROB_KERNELS", "local_copy": "the kernels"},
        ),
        # A path says more than the code that met it.
        ("denied: '/root/.frob'", ("frob/fetch.py:get",), {"folder_variable": "FROB_CACHE"}),
        ("Permission denied", (), {}),
        ("a 3/4 of /", (), {}),
    ],
)
def test_a_path_or_the_traceback_names_the_folder(
    message: str, frames: tuple[str, ...], values: dict[str, Scalar]
) -> None:
    assert FOLDERS.locate(message, frames) == values
