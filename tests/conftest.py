"""Where the shared reference data lies, for every tier of tests."""

import os
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("ZLLMC_SHARED", REPOSITORY.parent / "shared"))


@pytest.fixture(scope="session")
def conformance() -> pathlib.Path:
    """The folder with small models, reference logits, codec and tokenizer vectors."""
    folder = SHARED / "conformance"
    if not folder.is_dir():
        pytest.skip(f"no conformance data at {folder}: set ZLLMC_SHARED")
    return folder
