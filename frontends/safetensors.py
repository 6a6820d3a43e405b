"""Reader of Hugging Face model folders: config.json and memory-mapped *.safetensors files.

Format: https://huggingface.co/docs/safetensors: a 64-bit header length, a JSON header that maps names to
dtype, shape and byte range, then the data, which the ranges must cover without gap or overlap. The header
is parsed here, because the library's numpy interface copies tensors and has no BF16.
"""

import json
import mmap
import os
import struct
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from zllmc.frontends.container import Mapped, StoredTensor, map_file, show
from zllmc.zllm_ir.errors import ZllmcError


class SafetensorsError(ZllmcError):
    """A model folder that can't be read; the message names the file, the place and what to do."""


class _DType(NamedTuple):
    type_id: int  # ggml's number for the same type
    nbytes: int


DTYPES = {"F32": _DType(0, 4), "F16": _DType(1, 2), "BF16": _DType(30, 2)}

MAX_HEADER = 32 << 20  # bytes of JSON; 100 000 tensors need some 15 MiB
MAX_JSON_FILE = 32 << 20
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)

DOWNLOAD_AGAIN = "The file is damaged or its download is incomplete: download it again."


@dataclass(frozen=True)
class HFFolder(Mapped):
    """An open Hugging Face model folder. A context manager.

    A tensor's `type_name` is F32, F16 or BF16, its `type_id` is ggml's number for that type.
    """

    path: Path
    config: dict[str, Any]  # config.json
    tensors: dict[str, StoredTensor]  # of all *.safetensors files of the model
    tokenizer_files: dict[str, Path]  # by file name: those of TOKENIZER_FILES that the folder has
    paths: tuple[Path, ...]  # the *.safetensors files
    mappings: tuple[mmap.mmap, ...] = field(repr=False, compare=False)


def read_hf_folder(path: str | Path) -> HFFolder:
    """Open a folder that holds config.json and the model's *.safetensors files.

    Raises SafetensorsError if something is missing, damaged, hostile or of a dtype that isn't read.
    """
    folder = Path(path)
    if not os.path.isdir(folder):
        raise SafetensorsError(f"{folder}: there is no such folder. Name the model's folder.")
    config = _read_json_file(folder / "config.json")
    weight_map = _read_weight_map(folder)
    names = sorted(set(weight_map.values())) if weight_map else [_only_file(folder)]

    missing = [name for name in names if not os.path.isfile(folder / name)]
    if missing:
        listed = ", ".join(map(show, missing[:8])) + (" and more" if len(missing) > 8 else "")
        raise SafetensorsError(
            f"{folder}: {len(missing)} of the {len(names)} files that {INDEX} lists are missing: {listed}. "
            "Download them into the folder."
        )
    paths = tuple(folder / name for name in names)
    mappings = tuple(map_file(path, SafetensorsError) for path in paths)
    tensors: dict[str, StoredTensor] = {}
    for file, mapping in zip(paths, mappings, strict=True):
        for name, tensor in _read_file(file, mapping).items():
            if name in tensors:
                raise SafetensorsError(
                    f"{file}: tensor {show(name)} is also in {tensors[name].path.name}. "
                    "The files are of different models: download them again."
                )
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].path.name != file_name:
            raise SafetensorsError(
                f"{folder / file_name}: tensor {show(name)} isn't in this file, where {INDEX} places it. "
                "Download the folder's files of one version again."
            )
    found = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    return HFFolder(folder, config, tensors, found, paths, mappings)


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index; empty if the folder has no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    weight_map = _read_json_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SafetensorsError(f"{path}: the index has no object weight_map. {DOWNLOAD_AGAIN}")
    for tensor, name in weight_map.items():
        # A plain name: the index must not lead out of the folder.
        if not isinstance(name, str) or not name.endswith(".safetensors") or set(name) & set('/\\:"\0'):
            file = show(name) if isinstance(name, str) else "something that isn't text"
            raise SafetensorsError(
                f"{path}: the index places tensor {show(tensor)} in {file}: not the plain name of a "
                f".safetensors file. {DOWNLOAD_AGAIN}"
            )
    return weight_map


def _only_file(folder: Path) -> str:
    """The name of the folder's weight file, when there is no index."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in names:
        return "model.safetensors"
    if not names:
        raise SafetensorsError(
            f"{folder}: the folder holds no .safetensors file. Download the model's .safetensors files; "
            "PyTorch's .bin files aren't read."
        )
    if len(names) > 1:
        raise SafetensorsError(
            f"{folder}: the folder holds {len(names)} .safetensors files ({', '.join(names[:8])}) and no "
            f"{INDEX}. Download the index too."
        )
    return names[0]


def _read_file(path: Path, mapping: mmap.mmap) -> dict[str, StoredTensor]:
    """Parse and check one file's header."""
    size = len(mapping)
    if size < 8:
        raise SafetensorsError(f"{path}: the file has {size} bytes, too few for a header. {DOWNLOAD_AGAIN}")
    (length,) = struct.unpack_from("<Q", mapping)
    if length > min(size - 8, MAX_HEADER):
        raise SafetensorsError(
            f"{path}: the header claims {length} bytes; the file has {size - 8} after the length, and "
            f"{MAX_HEADER} is the most. {DOWNLOAD_AGAIN}"
        )
    header = _parse_object(path, mapping[8 : 8 + length])
    header.pop("__metadata__", None)
    data_start = 8 + length

    tensors = [_read_tensor(path, name, entry, data_start, mapping) for name, entry in header.items()]
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset != end:
            raise SafetensorsError(
                f"{path}: tensor {show(tensor.name)} starts at byte {tensor.offset}, but the tensor before "
                f"it ends at byte {end}: tensors overlap or leave a gap. {DOWNLOAD_AGAIN}"
            )
        end += tensor.nbytes
    if end != size:
        raise SafetensorsError(
            f"{path}: the tensors end at byte {end}, but the file at byte {size}. {DOWNLOAD_AGAIN}"
        )
    return {tensor.name: tensor for tensor in tensors}


def _read_tensor(path: Path, name: str, entry: Any, data_start: int, mapping: mmap.mmap) -> StoredTensor:
    def error(problem: str, advice: str = DOWNLOAD_AGAIN) -> SafetensorsError:
        return SafetensorsError(f"{path}: tensor {show(name)} {problem}. {advice}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise error("isn't described by exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise error("has a dtype that isn't text")
    kind = DTYPES.get(dtype)
    if kind is None:
        raise error(f"has dtype {show(dtype)}", f"Take a model whose tensors are of {', '.join(DTYPES)}.")
    if not _are_counts(shape) or 0 in shape:
        raise error("has a shape that isn't a list of positive integers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise error("has data_offsets that aren't two integers")
    begin, end = offsets
    nbytes = prod(shape) * kind.nbytes
    if end - begin != nbytes:
        raise error(f"of {shape} {dtype} takes {nbytes} bytes, but data_offsets span {end - begin}")
    if data_start + end > len(mapping):
        raise error(f"ends at byte {data_start + end}, but the file at byte {len(mapping)}")
    return StoredTensor(name, tuple(shape), kind.type_id, dtype, nbytes, path, data_start + begin, mapping)


MAX_DIMS = 8
MAX_COUNT = 1 << 63


def _are_counts(value: Any) -> bool:
    """Whether the JSON value is a short list of integers from 0 up (`True` and 1.0 are none)."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(item) is int and 0 <= item < MAX_COUNT for item in value)
    )


def _read_json_file(path: Path) -> dict[str, Any]:
    mapping = map_file(path, SafetensorsError)
    with mapping:
        if len(mapping) > MAX_JSON_FILE:
            raise SafetensorsError(
                f"{path}: the file has {len(mapping)} bytes; {MAX_JSON_FILE} is the most. {DOWNLOAD_AGAIN}"
            )
        return _parse_object(path, mapping[:])


def _parse_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse a JSON object; a name that occurs twice in an object is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise SafetensorsError(f"{path}: the name {show(twice)} occurs twice. {DOWNLOAD_AGAIN}")
        return members

    try:
        value = json.loads(text.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise SafetensorsError(f"{path}: the JSON is nested too deeply. {DOWNLOAD_AGAIN}") from None
    except ValueError as cause:  # not UTF-8, not JSON, or a number of thousands of digits
        raise SafetensorsError(f"{path}: not valid JSON: {cause}. {DOWNLOAD_AGAIN}") from cause
    if not isinstance(value, dict):
        raise SafetensorsError(f"{path}: the JSON isn't an object. {DOWNLOAD_AGAIN}")
    return value
