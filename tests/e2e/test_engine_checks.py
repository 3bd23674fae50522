"""The kept places that raise an error are those of the engines' published sources."""

from __future__ import annotations

import pytest

from gateway.diagnosis.checks.check_site import CheckSite, decode
from tests.conformance.kept import DownloadFolder
from tests.support.paths import ROOT
from tests.support.scripts import script_module
from tests.support.versions import SGLANG_REF, VLLM_REF

pytestmark = pytest.mark.engine

SOURCES = (VLLM_REF, SGLANG_REF)
# A whole version takes 20 s of CPU. These folders have the places of a start.
FOLDERS = {
    "vllm": ("vllm/config/", "vllm/engine/"),
    "sglang": ("sglang/srt/arg_groups/", "sglang/srt/server_args"),
}


@pytest.mark.parametrize("ref", SOURCES)
def test_the_places_of_the_sources_are_kept(ref: str) -> None:
    kind, _, version = ref.partition("==")
    script = script_module("engine-checks")
    sources = DownloadFolder(ROOT / ".cache/engines").sources(kind, version)
    files = {
        path: text
        for path, text in script.files_below(kind, sources).items()
        if path.startswith(FOLDERS[kind])
    }
    assert len(files) > 5
    places: list[CheckSite] = script.version_sites(kind, files)
    book = decode((ROOT / "profiles/engine_checks" / kind).read_bytes())
    bit = 1 << book.versions.index(version)
    assert {*places} == {
        site for site, mask in book.rows if mask & bit and site.path.startswith(FOLDERS[kind])
    }
    assert len(places) > 100
