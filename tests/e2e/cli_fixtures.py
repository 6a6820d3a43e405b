"""A small model, its artifact, a cache of their own, and commands run in this process."""

import io
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import zllmc
from processes import Result, Run
from tiny import tiny_model
from zllmc.cli import main


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, kernel_cache: pathlib.Path) -> Iterator[pathlib.Path]:
    folder = tmp_path_factory.mktemp("cache")
    kernel_cache.mkdir(exist_ok=True)
    (folder / "kernels").symlink_to(kernel_cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZLLMC_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def gguf(cache: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def artifact(gguf: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    return zllmc.compile(gguf, gguf.with_suffix(".zllm"), context=512, kernel_cache=cache / "kernels")


@pytest.fixture
def run(cache: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, which is faster than a new one."""

    def run(*arguments: Any, stdin: str | None = None) -> Result:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(int(exit.value.code or 0), out, err)

    return run
