"""The conformance models as files that a test can change, and how to compare logits."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from places import SHARED
from zllmc.frontends.architectures import architectures
from zllmc.frontends.gguf import read_gguf
from zllmc.frontends.model import Model, model_from_gguf
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.interpreter import Interpreter

MANIFEST = SHARED / "conformance" / "manifest.json"
ENTRIES = json.loads(MANIFEST.read_text())["entries"] if MANIFEST.is_file() else []


def is_dense(entry: dict[str, Any]) -> bool:
    """Entries that this version computes: dense families, in formats that are described."""
    name = entry.get("rename_arch") or entry.get("arch") or Path(entry["base"]).stem.rsplit("-", 1)[0]
    experts = "-moe" in (entry.get("file") or entry["base"])
    return name in architectures() and not experts and set(entry.get("types", {})) <= set(FORMATS)


DENSE = {e["npz"].removesuffix(".npz"): e for e in ENTRIES if is_dense(e)}
ARCHS = [name for name in DENSE if name.startswith("archs/")]


@dataclass
class File:
    """A conformance file's metadata and tensors, free to change."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]

    def model(self, context: int = 256, kv: str = "f32") -> Model:
        return model_from_gguf(self.metadata, self.tensors, path=Path("test.gguf"), context=context, kv=kv)

    def set(self, **fields: Any) -> "File":
        """Change fields of the architecture; `__` stands for a dot, None removes a field."""
        for name, value in fields.items():
            key = f"{self.metadata['general.architecture']}.{name.replace('__', '.')}"
            self.metadata[key] = value
            if value is None:
                del self.metadata[key]
        return self


def open_file(conformance: Path, name: str) -> File:
    file = read_gguf(conformance / f"{name}.gguf")
    return File(dict(file.metadata), dict(file.tensors))


def open_entry(conformance: Path, name: str) -> File:
    """An entry's file, or its base with what the manifest overrides, renames and drops."""
    entry = DENSE[name]
    file = open_file(conformance, (entry.get("file") or entry["base"]).removesuffix(".gguf"))
    file.metadata |= entry.get("override", {})
    if new := entry.get("rename_arch"):
        old = file.metadata["general.architecture"]
        file.metadata = {re.sub(f"^{old}\\.", f"{new}.", k): v for k, v in file.metadata.items()}
        file.metadata["general.architecture"] = new
    if drop := entry.get("drop_tensors"):
        file.tensors = {k: v for k, v in file.tensors.items() if not re.search(drop, k)}
    return file


def reference(conformance: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, logits), the logits that aren't from a table of GELU values in F16 where there are such."""
    data = np.load(conformance / f"{name}.npz")
    return data["tokens"], data["logits_exact" if "logits_exact" in data else "logits"]


def logits(model: Model, tokens: Any) -> np.ndarray:
    result: np.ndarray = Interpreter(model.graph, model.weights).run(tokens)[0]
    return result


def nmse(expected: np.ndarray, found: np.ndarray) -> float:
    a, b = (x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64) for x in (expected, found))
    return float(np.sum((a - b) ** 2) / np.sum(a**2))


def limit(conformance: Path, name: str) -> float:
    """Gemma's quantized and varied files were computed with the F16 GELU table, all others exactly."""
    exact = "logits_exact" in np.load(conformance / f"{name}.npz") or "gemma" not in name
    return 1e-10 if exact else 2e-7


# What a hostile file may have in any field.
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-1, 3), st.floats(), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), st.text(max_size=5)),
)
