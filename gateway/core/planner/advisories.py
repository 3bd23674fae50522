"""Published weaknesses of an engine version, in a sentence. Pure."""

from __future__ import annotations

from gateway.domain import Engine

_MOST_NAMED = 3


def advice(engine: Engine) -> str:
    """What is known against this version and which version is without it; "" where nothing is."""
    known = engine.advisories
    if not known:
        return ""
    named = ", ".join(one.id for one in known[:_MOST_NAMED])
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    fixes = [one.fixed_in for one in known if one.fixed_in]
    cure = f"from {max(fixes, key=_parts)} on it has none of them" if fixes else ""
    if len(fixes) < len(known):
        unfixed = len(known) - len(fixes)
        cure = f"of {unfixed} no fixed version is known"
    return f"Known weaknesses of {engine.ref}: {named}{more}; {cure}."


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]
