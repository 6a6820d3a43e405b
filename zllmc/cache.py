"""Artifacts of models that are run without being compiled first, kept under the user's cache folder.

An artifact's key covers all that decides its content: the model's files, the compiler's own sources, the
target with its features, and the flags. So an entry never goes stale, and nothing has to be invalidated.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from zllmc import targets
from zllmc.runtime import artifact as artifact_format
from zllmc.runtime.artifact import ArtifactError
from zllmc.zllm_ir.errors import ZllmcError

if TYPE_CHECKING:
    from zllmc.runtime.devices import Mode
    from zllmc.runtime.engine import Engine

Progress = Callable[[str, int, int], None]  # stage, done, total

_SAMPLE = 1 << 20  # bytes of a file's beginning and end that go into its key
_SHARD = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.DOTALL)
_COMPILER = ("zllm_ir", "frontends", "passes", "codegen", "targets")


def _silent(stage: str, done: int, total: int) -> None:
    pass


def load(
    model: Path | str,
    *,
    threads: int | None = None,
    device: Mode | None = None,
    target: str = "cpu",
    context: int | None = None,
    kv: str = "f16",
    progress: Progress = _silent,
) -> Engine:
    """Open an artifact, or compile a model (as `zllmc.compile` takes it) into the cache and open that.

    `threads` and `device` are those of `Engine.open`, the other options those of the compilation. Raises
    ZllmcError if the model can't be compiled or doesn't fit this machine.
    """
    from zllmc.runtime.engine import Engine

    model = Path(model)
    artifact = artifact_of(model, target=target, context=context, kv=kv, progress=progress)
    try:
        return Engine.open(artifact, threads=threads, device=device)
    except ArtifactError:
        if artifact == model:
            raise
        # Somebody damaged the cache.
        artifact = cached_artifact(
            model, target=target, context=context, kv=kv, progress=progress, replace=True
        )
        return Engine.open(artifact, threads=threads, device=device)


def artifact_of(
    model: Path,
    *,
    target: str = "cpu",
    context: int | None = None,
    kv: str = "f16",
    progress: Progress = _silent,
) -> Path:
    """`model` itself if it is an artifact, otherwise its artifact in the cache."""
    if is_artifact(model):
        return model
    return cached_artifact(model, target=target, context=context, kv=kv, progress=progress)


def is_artifact(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def cache_folder() -> Path:
    """`$ZLLMC_CACHE`, or `zllmc` in the user's cache folder."""
    if folder := os.environ.get("ZLLMC_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zllmc"


def kernel_cache() -> Path:
    """Where compiled kernels are kept, for all models."""
    return cache_folder() / "kernels"


def cached_artifact(
    model: Path,
    *,
    target: str = "cpu",
    context: int | None = None,
    kv: str = "f16",
    progress: Progress = _silent,
    replace: bool = False,
) -> Path:
    """The artifact of `model` in the cache, compiled now if it isn't there, or in any case with `replace`.

    Of several processes that want the same artifact at once, one compiles and the others wait for it.
    """
    flags = f"{targets.parse(target)} context={context} kv={kv}"
    digest = hashlib.sha256(f"{_model_key(model)} {_compiler_key()} {flags}".encode()).hexdigest()[:16]
    folder = cache_folder() / "models"
    artifact = folder / f"{model.resolve().stem}-{digest}.zllm"
    if is_artifact(artifact) and not replace:
        return artifact
    with _locked(folder / f".{digest}.lock"):
        if is_artifact(artifact) and not replace:
            return artifact
        for left in folder.glob(f".{escape(artifact.name)}-*"):  # by a compile that was killed
            shutil.rmtree(left, ignore_errors=True)
        from zllmc.compiler import compile_model

        return compile_model(
            model,
            artifact,
            target=target,
            context=context,
            kv=kv,
            kernel_cache=kernel_cache(),
            progress=progress,
        )


def _model_key(model: Path) -> str:
    """A digest of the model's files: names, sizes, times of change, and the content of both ends.

    The beginning of a model file holds its metadata; hashing gigabytes of weights would take longer than
    starting the model, and a change that leaves all of these as they were doesn't happen by accident.
    """
    digest = hashlib.sha256()
    for path in _files(model):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            digest.update(file.read(_SAMPLE))
            file.seek(max(_SAMPLE, status.st_size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    """The files that a model is made of: a folder's, all shards of a split file, or the one."""
    if model.is_dir():
        return sorted(path for path in model.iterdir() if path.is_file())
    if not os.path.isfile(model):  # asked before opening: opening a pipe waits for its writer
        problem = "this is no regular file" if os.path.exists(model) else "there is no such file"
        raise ZllmcError(f"{model}: {problem}. Check the path.")
    shard = _SHARD.fullmatch(model.name)
    if shard is None:
        return [model]
    return sorted(
        path
        for path in model.parent.iterdir()
        if path.is_file() and (other := _SHARD.fullmatch(path.name)) and other.groups() == shard.groups()
    )


def _compiler_key() -> str:
    """A digest of the compiler's sources and of TVM's version. Found without importing any of them."""
    from importlib.metadata import version

    digest = hashlib.sha256(version("apache-tvm").encode())
    here = Path(__file__)
    sources = [here.with_name("compiler.py"), here.with_name("weights.py"), Path(artifact_format.__file__)]
    for name in _COMPILER:
        spec = find_spec(f"zllmc.{name}")
        for place in (spec.submodule_search_locations or []) if spec else []:
            sources += sorted([*Path(place).rglob("*.py"), *Path(place).rglob("*.h")])
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an advisory lock on `path`; the system releases it when the process ends, however it does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ZllmcError(
            f"compiled models are kept in {path.parent}, which cannot be written: {error.strerror}. "
            "Name another folder in $ZLLMC_CACHE, or choose one with `zllmc compile MODEL -o FOLDER`."
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
