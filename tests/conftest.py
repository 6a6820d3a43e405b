"""Where the shared reference data and the real models lie, for every tier of tests."""

import os
import pathlib
from collections.abc import Callable

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("ZLLMC_SHARED", REPOSITORY.parent / "shared"))
MODELS = pathlib.Path(os.environ.get("ZLLMC_MODELS", REPOSITORY / "models"))

# A Python that a test starts here would take the folder zllmc/ for the installed package.
os.environ["PYTHONSAFEPATH"] = "1"


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
