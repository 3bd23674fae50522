"""The admin API of folders with models, for somebody in search of one on this machine."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field

from gateway.domain import Value
from gateway.errors import BadRequest, Busy, NotFound, NotReady
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin", tags=["admin"])


class ModelFolder(Value):
    name: str
    path: str
    is_model: bool = Field(description="whether it has a config.json")


class ModelFolders(Value):
    """The folders in a folder, by name, without hidden ones and links."""

    path: str = Field(
        description="path of the folder; empty: the folders are those of the settings"
    )
    parent: str = Field(description="the folder around it; empty: those of the settings")
    folders: tuple[ModelFolder, ...]
    is_cut: bool = Field(description="whether there are more")


@router.get("/folders", responses=errors(BadRequest, NotFound, NotReady, Busy))
async def folders(
    request: Request,
    path: Annotated[
        str, Query(max_length=4096, description="a folder; empty: those of the settings")
    ] = "",
) -> ModelFolders:
    """The folders in a folder at or below one of FITSERVE_MODEL_FOLDERS. Links are not followed."""
    listing = await gateway_of(request).folders.folders(path)
    rows = tuple(ModelFolder(**row._asdict()) for row in listing.folders)
    return ModelFolders(
        path=listing.path, parent=listing.parent, folders=rows, is_cut=listing.is_cut
    )
