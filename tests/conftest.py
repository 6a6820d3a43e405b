"""The shared reference data, the real models and compiled ones, for every tier of tests."""

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from places import MODELS, SHARED

# A Python that a test starts here would take the folder zllmc/ for the installed package.
os.environ["PYTHONSAFEPATH"] = "1"

# On a busy machine a test may wait for any time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def conformance() -> pathlib.Path:
    """The folder with small models, reference logits, codec and tokenizer vectors."""
    folder = SHARED / "conformance"
    if not folder.is_dir():
        pytest.skip(f"no conformance data at {folder}: set ZLLMC_SHARED")
    return folder


@pytest.fixture(scope="session")
def models() -> Callable[[str], pathlib.Path]:
    """Finds a real model by its file name. A test without its model is skipped, or fails where
    ZLLMC_REQUIRE_MODELS, a list of file names with spaces between them, has that name."""

    def find(name: str) -> pathlib.Path:
        path = MODELS / name
        if not path.is_file():
            required = name in os.environ.get("ZLLMC_REQUIRE_MODELS", "").split()
            (pytest.fail if required else pytest.skip)(f"no {name} in {MODELS}: set ZLLMC_MODELS")
        return path

    return find


@pytest.fixture(scope="session", autouse=True)
def build_without_workers() -> None:
    """Tests run in parallel already, and this process imports TVM once, but workers would for every model."""
    from zllmc.codegen import build

    build._worker_count = lambda jobs, processes: 0


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One cache of compiled kernels for all workers of this run: conformance models share most kernels."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel-cache"


@pytest.fixture(scope="session")
def compiled(
    conformance: pathlib.Path, kernel_cache: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., pathlib.Path]]:
    """The artifact of a conformance entry or a model file: `compiled(model, context=64, kv="f16")`. Each is
    compiled once by a worker, and must not be changed."""
    from compiled import entry_file
    from zllmc.compiler import compile_model

    folder = tmp_path_factory.mktemp("compiled")
    done: dict[Any, pathlib.Path] = {}

    def compile(model: str | pathlib.Path, *, context: int = 64, kv: str = "f16") -> pathlib.Path:
        key = model, context, kv
        if key not in done:
            file = entry_file(model, folder) if isinstance(model, str) else model
            output = folder / f"{len(done)}-{file.stem}.zllm"
            done[key] = compile_model(file, output, context=context, kv=kv, kernel_cache=kernel_cache)
        return done[key]

    yield compile
    shutil.rmtree(folder)  # pytest keeps the folders of three runs, and real models are large
