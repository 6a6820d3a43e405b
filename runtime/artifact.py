"""The artifact: a folder `NAME.zllm/` that holds all that it takes to run a model on one target.

manifest.json       facts of the model, the source and the target
plan.json           the execution plan (`zllm_ir.plan`)
kernels/*.o         relocatable objects, one per kernel, and the executor; on a GPU
                    sources with their prelude.h, and what the driver loads: cubins or code objects
weights.bin         weights packed for the target
checksums.json      of the pieces of weights.bin: bytes and CRC-32 of each, in order
tokenizer.json      for the `tokenizers` library
tokenizer_facts.json
chat_template.jinja where the model has one

The manifest has a digest of every file but two: the template, which users may change, and weights.bin. To sum
that up takes as long as to load it, so only `zllmc verify` compares it with its checksums.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import msgspec

from zllmc.runtime.processors import physical_cores
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.host import host_architecture, host_flags
from zllmc.zllm_ir.matrix_unit import MatrixInstruction
from zllmc.zllm_ir.plan import CHOSEN, CONTROL_WORDS, Plan, Pointer

FORMAT_VERSION = 4
_MOST_PIECES = 1 << 20
_UNCHECKED = ("manifest.json", "weights.bin", "chat_template.jinja")


class ArtifactError(ZllmcError):
    """An artifact that is incomplete, of another version, or for another machine."""


class Source(msgspec.Struct, frozen=True):
    """The model file that an artifact was compiled from."""

    file: str
    bytes: int
    sha256: str


class Gpu(msgspec.Struct, frozen=True):
    """What a driver must know of a GPU target: the `dialect` of the sources (cuda, hip, metal), lanes of a
    `subgroup`, and the layouts of its matrix instructions, which the emulated device computes by."""

    dialect: Literal["cuda", "hip", "metal"]
    subgroup: int
    matrix: tuple[MatrixInstruction, ...]


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """Of a piece of weights.bin; the pieces follow one another."""

    bytes: int
    crc32: int


# The suffixes of a kernel's source and of what the driver loads.
GPU_SUFFIXES = {"cuda": ("cu", "cubin"), "hip": ("hip", "hsaco"), "metal": ("metal", "metal")}


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
    triple: str  # of the CPU; empty for a GPU
    requires: tuple[str, ...]  # CPU flags
    gpu: Gpu | None
    layers: int
    vocab: int
    context: int
    kv: str
    kv_bytes_per_token: int
    weights_bytes: int
    source_weights_bytes: int
    files: dict[str, str]  # SHA-256 by path, as `digests` gives it
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
        """What runs on a CPU."""
        return [self.path / name for name in self.manifest.files if name.startswith("kernels/")]

    def gpu_kernels(self, suffix: str) -> dict[str, bytes]:
        """The files of a GPU's kernels that end in `suffix`, by the kernel's name."""
        names = (name for name in self.manifest.files if name.startswith("kernels/"))
        return {
            Path(name).stem: (self.path / name).read_bytes() for name in names if name.endswith(f".{suffix}")
        }

    @property
    def prelude(self) -> str:
        """What the sources of a GPU's kernels include."""
        return (self.path / "kernels" / "prelude.h").read_text(encoding="utf-8")


def digests(path: Path) -> dict[str, str]:
    """SHA-256 by path of the files in the folder `path` that must stay as the compiler wrote them."""
    files = {f.relative_to(path).as_posix(): f for f in path.rglob("*") if f.is_file()}
    return {name: _digest(files[name].read_bytes()) for name in sorted(files) if name not in _UNCHECKED}


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
        _check_machine(path, manifest)
        for name in manifest.files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name} as its own file")
        content = {name: (path / name).read_bytes() for name in manifest.files}
        for name, data in content.items():
            if _digest(data) != manifest.files[name]:
                raise ValueError(f"{name} is not what the compiler wrote")
        size = (path / "weights.bin").stat().st_size
        if size != manifest.weights_bytes:
            raise ValueError(f"weights.bin has {size:,} bytes instead of {manifest.weights_bytes:,}")
        plan = msgspec.json.decode(content["plan.json"], type=Plan)
        _check_plan(plan, manifest)
        tokenizer = None
        if "tokenizer.json" in content:
            facts = msgspec.json.decode(content["tokenizer_facts.json"], type=dict[str, Any])
            tokenizer = content["tokenizer.json"].decode(), facts
        template = path / "chat_template.jinja"
        chat = template.read_text(encoding="utf-8") if template.is_file() else None
    except (OSError, ValueError, KeyError, RecursionError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again.") from error
    return Artifact(path, manifest, plan, tokenizer, chat)


def check_weights(artifact: Artifact) -> None:
    """Read all of weights.bin and compare it with its checksums. Raises ArtifactError that says which bytes
    are not what the compiler wrote."""
    path = artifact.path
    if "checksums.json" not in artifact.manifest.files:
        raise ArtifactError(f"{path} is of an older zllmc and has no checksums: compile the model again.")
    try:
        pieces = msgspec.json.decode((path / "checksums.json").read_bytes(), type=list[Checksum])
        ends = list(accumulate(piece.bytes for piece in pieces))
        if ends != sorted(ends) or ends[-1:] != [artifact.manifest.weights_bytes]:
            raise ValueError("its checksums are of another weights.bin")
        with artifact.weights.open("rb", buffering=0) as file:

            def wrong(end: int, piece: Checksum) -> str | None:
                start = end - piece.bytes
                is_right = zlib.crc32(os.pread(file.fileno(), piece.bytes, start)) == piece.crc32
                return None if is_right else f"{start:,} to {end:,}"

            with ThreadPoolExecutor(physical_cores()) as readers:
                places = list(filter(None, readers.map(wrong, ends, pieces)))
        if places:
            more = f" and {len(places) - 1:,} more pieces" if places[1:] else ""
            raise ValueError(f"weights.bin is not what the compiler wrote in bytes {places[0]}{more}")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again.") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_machine(path: Path, manifest: Manifest) -> None:
    if manifest.gpu:
        return  # the driver looks at its device
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


def _check_plan(plan: Plan, manifest: Manifest) -> None:
    """Raises ValueError for a plan that could reach outside its buffers or that the engine cannot drive."""
    sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
    entries = {entry.name: entry for entry in plan.entries}
    if len(sizes) != len(plan.buffers) or len(entries) != len(plan.entries):
        raise ValueError("its plan has a name twice")
    if not entries.keys() >= {"decode", "prefill"}:
        raise ValueError("its plan has no decode or no prefill")
    tokens = max(entry.max_tokens for entry in plan.entries)
    rows = max(entry.max_rows for entry in plan.entries)
    least = {
        "tokens": 4 * tokens,
        "positions": 4 * tokens,
        "control": 4 * CONTROL_WORDS * (1 + plan.max_batch if "batch" in entries else 1),
        "logits": 4 * rows * manifest.vocab,
    }
    if "chosen" in sizes:
        least |= {"candidates": 4, "candidate_ids": sizes.get("candidates", 0), "chosen": 4 * CHOSEN}
    for name, size in least.items():
        if sizes.get(name, 0) < size:
            raise ValueError(f"its plan has {sizes.get(name, 0):,} bytes for {name}, which take {size:,}")
    states = sum(buffer.bytes for buffer in plan.buffers if buffer.kind == "state")
    if states < manifest.context * manifest.kv_bytes_per_token:
        raise ValueError(f"its plan has no room for a context of {manifest.context:,}")
    for buffer in plan.buffers:
        if buffer.bytes < 0 or (buffer.kind == "weights" and buffer.bytes > manifest.weights_bytes):
            raise ValueError(f"its plan has {buffer.bytes:,} bytes for {buffer.name}")
    for entry in plan.entries:
        if not 1 <= entry.max_rows <= entry.max_tokens:
            raise ValueError(f"{entry.name} takes {entry.max_tokens} tokens and {entry.max_rows} rows")
        suffixes = GPU_SUFFIXES[manifest.gpu.dialect] if manifest.gpu else ("o",)
        slots = range(plan.max_batch) if entry.name == "batch" else ()
        for launch in entry.launches:
            if launch.slot is not None and launch.slot not in slots:
                raise ValueError(f"{entry.name} has a launch for slot {launch.slot}")
            if not 0 <= launch.pieces <= _MOST_PIECES:
                raise ValueError(f"{entry.name} has a launch in {launch.pieces:,} pieces")
            if any(f"kernels/{launch.kernel}.{suffix}" not in manifest.files for suffix in suffixes):
                raise ValueError(f"{entry.name} calls {launch.kernel}, which is not there")
            if manifest.gpu and min(*launch.grid, launch.threads) < 1:
                raise ValueError(f"{entry.name} has a launch of {launch.kernel} without threads")
            for argument in launch.args:
                if isinstance(argument, Pointer) and not (
                    0 <= argument.buffer < len(plan.buffers)
                    and 0 <= argument.offset < plan.buffers[argument.buffer].bytes
                ):
                    raise ValueError(
                        f"{launch.kernel} in {entry.name} points {argument.offset:,} bytes into buffer "
                        f"{argument.buffer}, which is not there or smaller"
                    )
