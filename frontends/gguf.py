"""Reader of GGUF model files: memory-mapped, lazy, and safe on hostile input.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Every length, count and offset is compared with the bytes that the file has left before it is used, in
Python integers, which don't wrap. Tensor bytes are never touched while a file is opened.
"""

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zllmc.frontends.container import Mapped, StoredTensor, map_file, show
from zllmc.frontends.gguf_header import CONVERT_AGAIN, DOWNLOAD_AGAIN, MAX_KEY, GGUFError, Header

GGUFTensor = StoredTensor


class GGMLType(NamedTuple):
    name: str
    block: int  # values per block
    nbytes: int  # bytes per block


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
    42: GGMLType("Q2_0", 64, 18),
}
REMOVED_TYPES = {4, 5, 31, 32, 33, 36, 37, 38}  # Q4_2, Q4_3 and the repacked Q4_0 and IQ4_NL
FIRST_IK_TYPE = 96  # ik_llama.cpp numbers its own types from here

MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUFFile(Mapped):
    """An open GGUF model: one file, or all shards of a split one. A context manager.

    `metadata` holds Python values (int, float, bool, str, or lists of these, nested as in the file).
    A split model's metadata, version and alignment are those of its first shard.
    """

    metadata: Mapping[str, Any]
    tensors: dict[str, GGUFTensor]  # of all shards, in file order
    paths: tuple[Path, ...]
    version: int
    alignment: int
    mappings: tuple[mmap.mmap, ...] = field(repr=False, compare=False)


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF model, given its file, any shard of it, or a folder that holds exactly one model.

    Raises GGUFError if the model is damaged, incomplete, hostile or of an unknown kind.
    """
    path = Path(path)
    if os.path.isdir(path):  # unlike Path's, false for an impossible name too
        path = _only_model(path)
    given = _read_shard(path)
    others = [other for other in _shard_paths(given) if other != path]
    shards = sorted([given, *map(_read_shard, others)], key=lambda shard: shard.path)
    if others:
        _check_split(shards)

    tensors: dict[str, GGUFTensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise GGUFError(
                    f"{shard.path}: tensor {show(name)} is also in {tensors[name].path.name}. "
                    "The shards are of different models: download them again."
                )
            tensors[name] = tensor
    first = shards[0]
    return GGUFFile(
        first.metadata,
        tensors,
        tuple(shard.path for shard in shards),
        first.version,
        first.alignment,
        tuple(shard.mapping for shard in shards),
    )


# --- split models ------------------------------------------------------------------------------------

SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class _Shard(NamedTuple):
    path: Path
    mapping: mmap.mmap
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def _only_model(folder: Path) -> Path:
    """The one model in the folder: its file, or any one of its shards."""
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        shard = SHARD_NAME.fullmatch(path.name)
        models.setdefault(f"{shard['prefix']}-of-{shard['count']}" if shard else path.name, path)
    if not models:
        raise GGUFError(f"{folder}: the folder holds no .gguf file. Name a model file.")
    if len(models) > 1:
        names = ", ".join(path.name for path in list(models.values())[:8])
        raise GGUFError(f"{folder}: the folder holds {len(models)} models ({names}). Name one of them.")
    return next(iter(models.values()))


def _shard_paths(shard: _Shard) -> list[Path]:
    """The files of the model that `shard` belongs to, itself included, in order."""
    count = shard.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise GGUFError(f"{shard.path}: split.count is {count!r:.40}, not a number. {DOWNLOAD_AGAIN}")
    name = SHARD_NAME.fullmatch(shard.path.name)
    named_count = int(name["count"]) if name else 1
    if count <= 1 and named_count <= 1:
        return [shard.path]
    if name is None:
        raise GGUFError(
            f"{shard.path}: this is one of {count} shards (split.count), but its name doesn't say which. "
            f"Rename the shards to NAME-00001-of-{count:05}.gguf and so on."
        )
    if count != named_count:
        raise GGUFError(
            f"{shard.path}: the name says {named_count} shards, the key split.count says {count}. "
            "Restore the file's original name or download it again."
        )
    names = [f"{name['prefix']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    present = set(os.listdir(shard.path.parent))
    missing = [name for name in names if name not in present]
    if missing:
        listed = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
        raise GGUFError(
            f"{shard.path}: {len(missing)} of the model's {count} shards are missing from its folder: "
            f"{listed}. Put them beside it."
        )
    return [shard.path.with_name(name) for name in names]


def _check_split(shards: list[_Shard]) -> None:
    """Check that the shards number themselves as their names do, and hold all tensors together."""
    for index, shard in enumerate(shards):
        number, count = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if (number, count) != (index, len(shards)):  # split.no counts from 0, names from 1
            raise GGUFError(
                f"{shard.path}: the name says shard {index + 1} of {len(shards)}, but its keys are "
                f"split.no = {number!r:.40} (expected {index}) and split.count = {count!r:.40}. "
                "Restore the shards' original names or download them again."
            )
    found = sum(len(shard.tensors) for shard in shards)
    total = shards[0].metadata.get("split.tensors.count", found)
    if total != found:
        raise GGUFError(
            f"{shards[0].path}: split.tensors.count promises {total!r:.40} tensors over all shards, "
            f"the shards hold {found}. Download all shards of one version again."
        )


# --- one file ----------------------------------------------------------------------------------------


def _read_shard(path: Path) -> _Shard:
    mapping = map_file(path, GGUFError)
    header = Header(path, mapping)
    version = _read_version(header)
    tensor_count = header.number("Q", "the tensor count")
    key_count = header.number("Q", "the metadata key count")
    metadata = _read_metadata(header, key_count)

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment.bit_count() != 1 or not 0 < alignment <= MAX_ALIGNMENT:
        raise header.error(
            f"general.alignment is {alignment!r:.40}, not a power of two up to {MAX_ALIGNMENT}", CONVERT_AGAIN
        )
    infos = list(_read_tensor_infos(header, tensor_count))
    data_start = -(-header.position // alignment) * alignment
    tensors = _place_tensors(header, infos, data_start, alignment)
    return _Shard(path, mapping, version, alignment, metadata, tensors)


def _read_version(header: Header) -> int:
    magic = header.raw(4, "the magic number")
    if magic == b"FUGG":
        raise _big_endian(header.path)
    if magic != b"GGUF":
        old = magic[::-1] in (b"ggml", b"ggmf", b"ggjt", b"ggla")
        hint = (
            "It is from before GGUF: convert the model again."
            if old
            else "It is a Git LFS pointer: run `git lfs pull`."
            if magic == b"vers"
            else "Name a .gguf file, or the folder of a Hugging Face model."
        )
        raise GGUFError(f"{header.path}: not a GGUF file: it starts with {magic!r}, not b'GGUF'. {hint}")
    version: int = header.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise _big_endian(header.path)
    if version not in (2, 3):
        advice = CONVERT_AGAIN if version < 2 else "Update zllmc."
        raise header.error(f"the GGUF version is {version}; versions 2 and 3 are read", advice)
    return version


def _big_endian(path: Path) -> GGUFError:
    return GGUFError(
        f"{path}: this is a big-endian GGUF file; only little-endian ones are read. Take the little-endian "
        "file of the model, or convert it with `gguf-convert-endian FILE little` from the gguf package."
    )


def _read_metadata(header: Header, count: int) -> dict[str, Any]:
    header.expect(count, 13, "metadata keys")  # a key length, a value type, a value of one byte
    metadata: dict[str, Any] = {}
    for index in range(count):
        key = header.string(f"the name of metadata key {index}", MAX_KEY)
        if key in metadata:
            raise header.error(f"metadata key {show(key)} occurs twice", CONVERT_AGAIN)
        what = f"metadata key {show(key)}"
        metadata[key] = header.value(header.number("I", what), what)
    return metadata


class _TensorInfo(NamedTuple):
    name: str
    ne: list[int]  # ggml's order: columns first
    type_id: int
    offset: int  # from the start of the data section


def _read_tensor_infos(header: Header, count: int) -> Iterator[_TensorInfo]:
    header.expect(count, 24, "tensors")  # name length, dimension count, type, offset
    for index in range(count):
        name = header.string(f"the name of tensor {index}")
        what = f"tensor {show(name)}"
        n_dims = header.number("I", what)
        if n_dims > MAX_DIMS:
            raise header.error(f"{what} claims {n_dims} dimensions; {MAX_DIMS} is the most", DOWNLOAD_AGAIN)
        ne = [header.number("Q", what) for _ in range(n_dims)]
        yield _TensorInfo(name, ne, header.number("I", what), header.number("Q", what))


def _place_tensors(
    header: Header, infos: list[_TensorInfo], data_start: int, alignment: int
) -> dict[str, GGUFTensor]:
    """Check type, shape and place of each tensor: known, whole blocks, aligned, in order, in the file."""
    tensors: dict[str, GGUFTensor] = {}
    file_size = len(header.mapping)
    used, user = 0, ""  # the data section is taken up to here, last by this tensor
    for name, ne, type_id, offset in infos:

        def error(problem: str, advice: str = DOWNLOAD_AGAIN, name: str = name) -> GGUFError:
            return GGUFError(f"{header.path}: tensor {show(name)} {problem}. {advice}")

        if name in tensors:
            raise error("occurs twice", CONVERT_AGAIN)
        kind = GGML_TYPES.get(type_id)
        if kind is None:
            raise error(f"has type {type_id}, {_unknown_type(type_id)}", _known_types())
        if 0 in ne:
            raise error(f"has no values: its dimensions are {ne}", CONVERT_AGAIN)
        row = ne[0] if ne else 1
        if row % kind.block:
            raise error(
                f"has rows of {row} values, which aren't whole {kind.name} blocks of {kind.block}",
                "Quantise it again: a row that isn't a multiple of the block needs another type.",
            )
        nbytes = prod(ne) // kind.block * kind.nbytes
        if offset % alignment:
            raise error(f"has offset {offset}, which isn't a multiple of the alignment {alignment}")
        if offset < used:
            raise error(
                f"has offset {offset}, before byte {used} where {show(user)} ends: "
                "tensors overlap or are out of order"
            )
        start = data_start + offset
        if start + nbytes > file_size:
            raise error(f"takes bytes {start} to {start + nbytes}, but the file ends at byte {file_size}")
        used, user = offset + nbytes, name
        shape = tuple(reversed(ne))
        tensors[name] = StoredTensor(
            name, shape, type_id, kind.name, nbytes, header.path, start, header.mapping
        )
    return tensors


def _unknown_type(type_id: int) -> str:
    if type_id >= FIRST_IK_TYPE:
        return "which is one of the ik_llama.cpp fork's own types, and not of ggml"
    if type_id in REMOVED_TYPES:
        return "which ggml has removed"
    return "which isn't known here"


def _known_types() -> str:
    names = ", ".join(f"{kind.name} ({type_id})" for type_id, kind in GGML_TYPES.items())
    return f"Take a file that was quantised with the known types: {names}."
