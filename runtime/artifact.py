"""The artifact: a folder `NAME.zllm/` that holds all that it takes to run a model on one target.

manifest.json       facts of the model, the source and the target
plan.json           the execution plan (`zllm_ir.plan`)
kernels/*.o         relocatable objects, one per kernel, and the executor
weights.bin         weights packed for the target
tokenizer.json      for the `tokenizers` library
tokenizer_facts.json
chat_template.jinja where the model has one
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.host import host_architecture, host_flags
from zllmc.zllm_ir.plan import Plan

FORMAT_VERSION = 1


class ArtifactError(ZllmcError):
    """An artifact that is incomplete, of another version, or for another machine."""


class Source(msgspec.Struct, frozen=True):
    """The model file that an artifact was compiled from."""

    file: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Facts of an artifact. Sizes are bytes."""

    format_version: int
    compiler: str
    tvm: str
    name: str
    architecture: str
    parameters: int
    formats: dict[str, int]  # packed bytes by block format
    source: Source
    target: str
    triple: str
    requires: tuple[str, ...]  # CPU flags
    layers: int
    vocab: int
    context: int
    kv: str
    kv_bytes_per_token: int
    weights_bytes: int
    source_weights_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Artifact:
    """An opened artifact; weights are mapped by the engine, not read here."""

    path: Path
    manifest: Manifest
    plan: Plan
    tokenizer: tuple[str, dict[str, Any]] | None  # for the `tokenizers` library, and its facts
    chat_template: str | None

    @property
    def weights(self) -> Path:
        return self.path / "weights.bin"

    @property
    def objects(self) -> list[Path]:
        return sorted((self.path / "kernels").glob("*.o"))


def open_artifact(path: Path) -> Artifact:
    """Read and check everything but the weights. Raises ArtifactError that says what does not fit."""
    path = Path(path)
    if not (path / "manifest.json").is_file():
        raise ArtifactError(f"{path} is no artifact: it has no manifest.json. Make one with `zllmc compile`.")
    try:
        head: dict[str, Any] = msgspec.json.decode((path / "manifest.json").read_bytes())
        version = head.get("format_version") if isinstance(head, dict) else None
        if version != FORMAT_VERSION:
            raise ArtifactError(
                f"{path} has artifact format {version}, this zllmc reads {FORMAT_VERSION}: "
                "compile the model again."
            )
        manifest = msgspec.convert(head, Manifest)
        plan = msgspec.json.decode((path / "plan.json").read_bytes(), type=Plan)
        tokenizer = None
        if (path / "tokenizer_facts.json").is_file():
            facts = msgspec.json.decode((path / "tokenizer_facts.json").read_bytes(), type=dict[str, Any])
            tokenizer = (path / "tokenizer.json").read_text(encoding="utf-8"), facts
        template = path / "chat_template.jinja"
        chat = template.read_text(encoding="utf-8") if template.is_file() else None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again.") from error
    _check_machine(path, manifest)
    artifact = Artifact(path, manifest, plan, tokenizer, chat)
    try:
        size = artifact.weights.stat().st_size
    except OSError as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again.") from error
    if size != manifest.weights_bytes:
        raise ArtifactError(
            f"{artifact.weights} has {size:,} bytes, its manifest says {manifest.weights_bytes:,}: "
            "compile the model again."
        )
    return artifact


def _check_machine(path: Path, manifest: Manifest) -> None:
    architecture = host_architecture()
    if not manifest.triple.startswith(architecture):
        raise ArtifactError(
            f"{path} was compiled for {manifest.triple}, this machine is {architecture}: compile it here."
        )
    missing = sorted(set(manifest.requires) - host_flags())
    if missing:
        raise ArtifactError(
            f"{path} was compiled for {manifest.target}; this machine's CPU lacks {', '.join(missing)}. "
            "Compile it here, or with --target cpu:avx2."
        )
