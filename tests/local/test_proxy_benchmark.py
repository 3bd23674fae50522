"""The benchmark of proxies runs, and its table names the measurements. The figures themselves are
nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.patience import hang_s

RUN = ROOT / "benchmarks" / "proxies" / "run.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN), *arguments],
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )


def test_a_small_run_measures_the_gateway_without_errors(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run(
        "--quick",
        "--rounds",
        "1",
        "--only",
        "fitserve,direct",
        "--parts",
        "request,chunk",
        "--json",
        str(file),
    )
    assert result.returncode == 0, result.stderr
    assert "| | fitserve | direct |" in result.stdout
    figures = json.loads(file.read_text())
    assert figures["missing"] == {}
    assert "keys on" in figures["about"]["fitserve"]
    for name in ("fitserve", "direct"):
        (figures_of_target,) = figures["rounds"][name]
        assert (figures_of_target["request_errors"], figures_of_target["chunk_errors"]) == (0, 0)
        assert figures_of_target["request_us"] > 0
        assert figures_of_target["chunk_us"] > 0


def test_unknown_names_are_refused() -> None:
    assert "There is no target apache" in run("--only", "apache").stderr
    assert "There is no part speed" in run("--parts", "speed").stderr


def test_a_section_of_the_page_is_replaced_and_the_rest_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n## One\n\na\n\n## Data plane\n\nold\n\n## Two\n\nb\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import report, pathlib;"
        " report.put_section(pathlib.Path(sys.argv[2]), *sys.argv[3:])"
    )
    for title, text in (("Data plane", "new"), ("Three", "c")):
        subprocess.run(
            [sys.executable, "-c", script, str(RUN.parent), str(page), title, text], check=True
        )
    assert (
        page.read_text()
        == "# Page\n\n## One\n\na\n\n## Data plane\n\nnew\n\n## Two\n\nb\n\n## Three\n\nc\n"
    )
