"""The base URL of an external engine, checked and in one normal form."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_VISIBLE = re.compile(r"[!-~]+", re.ASCII)
_HOST = re.compile(
    r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
    r"(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*",
    re.ASCII,
)
_PATH = re.compile(r"(/([\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)*", re.ASCII)
_PORTS = {"http": 80, "https": 443}


def endpoint_url(text: str) -> str:
    """`text` as scheme://host[:port][/path]/v1. Raises ValueError with a sentence."""
    # The part before an @ may be a password.
    label = "The endpoint" if "@" in text else ascii(text[:200])
    if not _VISIBLE.fullmatch(text):
        # urlsplit silently drops tabs and ends of lines. A host in another script can look like
        # another host.
        raise ValueError(
            f"{label} has a blank, a control character or a character beyond ASCII, or is empty."
        )
    try:
        url_parts = urlsplit(text)
        host = url_parts.hostname or ""
        port = url_parts.port
        if url_parts.netloc.rpartition("@")[2].startswith("["):
            host = f"[{ipaddress.IPv6Address(host).compressed}]"
    except ValueError:
        raise ValueError(f"{label} is not a URL.") from None
    default = _PORTS.get(url_parts.scheme)
    if default is None:
        raise ValueError(f"{label} is not a URL that begins with http:// or https://.")
    if "@" in url_parts.netloc or "?" in text or "#" in text:
        raise ValueError(
            f"{label} has more than a base URL has: no user, password, query or fragment."
        )
    # An interface in an IPv6 address ("%eth0") means something only on one machine.
    if "%" in host or not (host.startswith("[") or _HOST.fullmatch(host)):
        raise ValueError(f"{label} names no host.")
    if port == 0:
        raise ValueError(f"{label} names port 0, where nothing can listen.")
    path = url_parts.path.rstrip("/")
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.lower().replace("%2e", ".").split("/")):
        raise ValueError(f"{label} has a path that no base URL has.")
    authority = host if port in (None, default) else f"{host}:{port}"
    return f"{url_parts.scheme}://{authority}{path.removesuffix('/v1')}/v1"
