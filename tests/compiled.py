"""Conformance models, also changed ones, as GGUF files for the compiler."""

from pathlib import Path
from typing import Any

from gguf_writer import ARRAY, BOOL, F64, I64, STRING, array, key, model_of, scalar
from models import DENSE, File, open_entry
from places import SHARED
from zllmc.frontends.gguf import GGML_TYPES

_TYPE_IDS = {kind.name: id for id, kind in GGML_TYPES.items()}
_KINDS = {bool: BOOL, int: I64, float: F64, str: STRING}


def entry_file(name: str, folder: Path) -> Path:
    """The GGUF file of a conformance entry: its own, or its base changed as the manifest says."""
    if own := DENSE[name].get("file"):
        return SHARED / "conformance" / str(own)
    return write_gguf(open_entry(SHARED / "conformance", name), folder / f"{Path(name).name}.gguf")


def write_gguf(file: File, path: Path) -> Path:
    """Write metadata and tensors as they are."""
    keys = [key(name, *_field(value)) for name, value in file.metadata.items()]
    tensors = [
        (name, list(reversed(t.shape)), _TYPE_IDS[t.type_name], t.data.tobytes())
        for name, t in file.tensors.items()
    ]
    path.write_bytes(model_of(tensors, keys))
    return path


def _field(value: Any) -> tuple[int, bytes]:
    """GGUF's type and payload of a Python value, at full width: reading it gives the same value."""
    if isinstance(value, list):
        return ARRAY, array(_KINDS[type(value[0])] if value else I64, value)
    return _KINDS[type(value)], scalar(_KINDS[type(value)], value)
