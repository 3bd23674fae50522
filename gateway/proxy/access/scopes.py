"""The scope that each route of the application needs. The data plane answers inference itself.

read    shows the gateway's state and changes nothing
admin   changes something, reads a file or URL of the caller, or shows logs with parts of prompts
open    needs no key
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from starlette import types
from starlette.routing import BaseRoute, Match, Route

from gateway.keys import Scope

SCOPES: dict[tuple[str, str], Scope | Literal["open"]] = {
    ("GET", "/"): "open",
    ("GET", "/page/{version}/{name:path}"): "open",
    ("GET", "/health"): "open",
    ("GET", "/healthz"): "open",
    ("GET", "/auth/ways"): "open",
    ("GET", "/auth/login"): "open",
    ("GET", "/auth/callback"): "open",
    ("POST", "/auth/token"): "open",
    ("POST", "/auth/logout"): "open",
    ("GET", "/version"): "read",
    ("GET", "/readyz"): "open",
    ("GET", "/metrics"): "read",
    ("GET", "/admin/docs"): "read",
    ("GET", "/admin/openapi.json"): "read",
    ("GET", "/admin/hardware"): "read",
    ("GET", "/admin/machines"): "read",
    ("GET", "/admin/prepared"): "read",
    ("GET", "/admin/live"): "read",
    ("POST", "/admin/calibrate"): "admin",
    ("GET", "/admin/backup"): "admin",
    ("GET", "/admin/disk"): "read",
    ("GET", "/admin/disk/models"): "read",
    ("GET", "/admin/events"): "read",
    ("GET", "/admin/facts"): "read",
    ("POST", "/admin/facts"): "admin",
    ("DELETE", "/admin/facts/{number}"): "admin",
    ("GET", "/admin/knowledge"): "read",
    ("POST", "/admin/knowledge"): "admin",
    ("POST", "/admin/knowledge/rollback"): "admin",
    ("GET", "/admin/keys"): "admin",
    ("POST", "/admin/keys"): "admin",
    ("DELETE", "/admin/keys/{name}"): "admin",
    ("PUT", "/admin/keys/{name}/budget"): "admin",
    ("GET", "/admin/key-groups"): "admin",
    ("PUT", "/admin/key-groups/{name}"): "admin",
    ("DELETE", "/admin/key-groups/{name}"): "admin",
    ("GET", "/admin/models"): "read",
    ("POST", "/admin/models"): "admin",
    ("GET", "/admin/models/{name:path}"): "read",
    ("GET", "/admin/models/{name:path}/history"): "read",
    ("POST", "/admin/models/{name:path}/rollback"): "admin",
    ("GET", "/admin/models/{name:path}/logs"): "admin",
    ("GET", "/admin/models/{name:path}/bench"): "read",
    ("GET", "/admin/models/{name:path}/launch"): "admin",
    ("POST", "/admin/models/{name:path}/bench"): "admin",
    ("GET", "/admin/models/{name:path}/tune"): "read",
    ("POST", "/admin/models/{name:path}/tune"): "admin",
    ("DELETE", "/admin/models/{name:path}/tune"): "admin",
    ("POST", "/admin/models/{name:path}/tune/apply"): "admin",
    ("POST", "/admin/models/{name:path}/retry"): "admin",
    ("POST", "/admin/models/{name:path}/start"): "admin",
    ("POST", "/admin/models/{name:path}/stop"): "admin",
    ("POST", "/admin/models/{name:path}/unload"): "admin",
    ("PATCH", "/admin/models/{name:path}"): "admin",
    ("DELETE", "/admin/models/{name:path}"): "admin",
    ("POST", "/admin/plan"): "admin",
    ("POST", "/admin/pull"): "admin",
    ("GET", "/admin/folders"): "admin",
    ("POST", "/admin/search"): "admin",
    ("GET", "/admin/search/{name}"): "admin",
    ("GET", "/admin/requests"): "read",
    ("DELETE", "/admin/requests/{id:path}"): "admin",
    ("GET", "/admin/usage"): "read",
    ("GET", "/admin/transcripts"): "admin",
    ("DELETE", "/admin/transcripts"): "admin",
    ("GET", "/admin/transcripts/state"): "read",
    ("GET", "/admin/transcripts/export"): "admin",
    ("GET", "/admin/transcripts/{id}"): "admin",
    ("POST", "/admin/transcripts/{id}/replay"): "admin",
    ("GET", "/v1/files"): "inference",
    ("POST", "/v1/files"): "inference",
    ("GET", "/v1/files/{file_id}"): "inference",
    ("DELETE", "/v1/files/{file_id}"): "inference",
    ("GET", "/v1/files/{file_id}/content"): "inference",
    ("GET", "/v1/batches"): "inference",
    ("POST", "/v1/batches"): "inference",
    ("GET", "/v1/batches/{batch_id}"): "inference",
    ("POST", "/v1/batches/{batch_id}/cancel"): "inference",
}


class Scopes:
    """Finds the row of a request by the routes' own matching, so that no spelling of a path leads
    to another row."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self.routes = [route for route in routes if isinstance(route, Route)]

    def required_scope(self, scope: types.Scope) -> Scope | Literal["open"]:
        """The scope for a request. A route without a row needs `admin`. Any key with `read` gets a
        404 for an unknown path."""
        match, path = self.find(scope)
        if match is Match.FULL:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            return SCOPES.get((method, path), "admin")
        return "admin" if match is Match.PARTIAL else "read"

    def find(self, scope: types.Scope) -> tuple[Match, str]:
        """The best match of the routes, and the path of that route. Partial: the route accepts
        other methods."""
        best_match = Match.NONE
        path = ""
        for route in self.routes:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return match, route.path
            if match is Match.PARTIAL:
                best_match = match
                path = route.path
        return best_match, path
