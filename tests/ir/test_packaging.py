"""What users install, and what the repository holds."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from places import REPOSITORY

FOLDERS = ["zllm_ir", "frontends", "passes", "codegen", "targets", "runtime"]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
MAX_LINES = 400


def tracked() -> list[Path]:
    """The repository's files: those in the index, and new ones that are not ignored."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := REPOSITORY / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of the repository's files, built from a copy so that nothing left in build/ gets in."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        copy = source / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", built]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True, timeout=120)
    (path,) = built.iterdir()
    return zipfile.ZipFile(path)


def info(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"zllmc-{PROJECT['version']}.dist-info/{name}").decode()


def test_the_wheel_holds_every_package_file_and_nothing_else(wheel):
    expected = set()
    for path in tracked():
        parts = path.relative_to(REPOSITORY).parts
        if parts[0] == "zllmc":
            expected.add("/".join(parts))
        elif parts[0] in FOLDERS:
            expected.add("/".join(["zllmc", *parts]))
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected
    assert {f"zllmc/{folder}/__init__.py" for folder in FOLDERS} | {"zllmc/py.typed"} <= held


def test_the_wheel_carries_version_licence_and_command(wheel):
    metadata: Message = Parser().parsestr(info(wheel, "METADATA"))
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert info(wheel, "licenses/LICENSE") == (REPOSITORY / "LICENSE").read_text()
    assert info(wheel, "entry_points.txt").split() == ["[console_scripts]", "zllmc", "=", "zllmc.cli:main"]


def test_the_installed_command_can_be_loaded():
    (command,) = importlib.metadata.distribution("zllmc").entry_points.select(group="console_scripts")
    assert callable(command.load())


def test_every_file_is_utf8_text_and_names_no_machine_s_paths():
    path_of_a_machine = re.compile(r"(?<![\w.])/(?:work|farm|root|home|Users)/\w")
    for path in tracked():
        text = path.read_bytes().decode("utf-8")
        found = path_of_a_machine.search(text)
        assert found is None, f"{path}: {text[found.start() :].splitlines()[0]}"


def test_no_file_is_too_long_to_be_one_idea():
    lines = {str(path.relative_to(REPOSITORY)): path.read_bytes().count(b"\n") for path in tracked()}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
