"""Where the repository, the shared reference data and the real models lie."""

import os
import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
SHARED = pathlib.Path(os.environ.get("ZLLMC_SHARED", REPOSITORY.parent / "shared"))
MODELS = pathlib.Path(os.environ.get("ZLLMC_MODELS", REPOSITORY / "models"))
