"""What the error numbers of NVIDIA's driver mean (profiles/xids.yaml)."""

from __future__ import annotations

from pydantic import Field

from gateway.domain import Value


class Xid(Value):
    """One error number of the driver."""

    means: str
    action: str = Field(description="what NVIDIA's catalog asks for first")
    lost: bool = Field(description="the GPU does no work until it was reset; else only the application is hurt")


class XidTable(Value):
    source: str
    xids: dict[int, Xid]
