"""Opens a model file or folder: picks the architecture, checks the facts, and builds the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from zllmc.frontends.architectures import architectures
from zllmc.frontends.architectures.dense import Architecture, Facts, build_dense, read_facts
from zllmc.frontends.architectures.fields import MAX_SIZE, Fields, ModelError
from zllmc.frontends.architectures.hf import read_hf
from zllmc.frontends.gguf import read_gguf
from zllmc.frontends.safetensors import read_hf_folder
from zllmc.zllm_ir.graph import Graph

KV_STORAGE = ("f16", "q8", "f32")


class StoredTensor(Protocol):
    """A tensor of a container: `data` are its packed bytes, uint8, read when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type_name(self) -> str: ...

    @property
    def data(self) -> NDArray[np.uint8]: ...


@dataclass(frozen=True)
class TensorBytes(Mapping[str, NDArray[np.uint8]]):
    """The packed bytes of a graph's weights by name: views of the mapped file, made when asked for."""

    tensors: Mapping[str, StoredTensor]

    def __getitem__(self, name: str) -> NDArray[np.uint8]:
        return self.tensors[name].data

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@dataclass(frozen=True)
class Model:
    """A model ready to compile: its facts, its graph, and where the graph's weights are."""

    name: str
    architecture: str
    facts: Facts
    graph: Graph
    weights: TensorBytes
    path: Path
    container: Literal["gguf", "hf"]
    metadata: Mapping[str, Any]  # GGUF metadata, or config.json

    @property
    def parameters(self) -> int:
        """Numbers in the graph's weights; a tied head counts once."""
        return sum(prod(w.shape) for w in self.graph.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(self.weights[w.name].nbytes for w in self.graph.weights)


def load_model(path: str | Path, *, context: int, kv: str = "f16") -> Model:
    """Open a GGUF file, a shard of a split one, a folder with one, or a Hugging Face model folder.

    `context` is the number of tokens that a sequence may reach; models with longrope compute differently
    beyond their original context. `kv` is how keys and values are kept: f16, q8, or f32 (reference).
    Raises a ZllmcError that names the wrong field or tensor, or the architectures that are supported.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        folder = read_hf_folder(path)
        return model_from_hf(folder.config, folder.tensors, path=path, context=context, kv=kv)
    file = read_gguf(path)
    return model_from_gguf(file.metadata, file.tensors, path=path, context=context, kv=kv)


def model_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    path: Path,
    context: int,
    kv: str = "f16",
) -> Model:
    """The model of GGUF metadata and tensors; `path` only says where they are from."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{path}: general.architecture is missing: it isn't a language model.")
    known = architectures()
    if architecture not in known:
        supported = ", ".join(sorted(known))
        raise ModelError(
            f"{path}: the architecture {architecture!r:.60} isn't supported; these are: {supported}."
        )
    prefix = architecture + "."
    values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    values["tokens"] = metadata.get("tokenizer.ggml.tokens")
    fields = Fields(str(path), values, {}, prefix)
    facts, graph, weights = _build(architecture, known[architecture], fields, tensors, context, kv)
    name = metadata.get("general.name")
    name = name if isinstance(name, str) else path.stem
    return Model(name, architecture, facts, graph, weights, path, "gguf", metadata)


def model_from_hf(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    path: Path,
    context: int,
    kv: str = "f16",
) -> Model:
    """The model of a Hugging Face config and tensors; `path` only says where they are from."""
    known = architectures()
    classes = config.get("architectures")
    given = classes[0] if isinstance(classes, list) and classes else None
    architecture = next((name for name, a in known.items() if given in a.hf_classes), None)
    if architecture is None:
        supported = ", ".join(sorted(c for a in known.values() for c in a.hf_classes))
        raise ModelError(f"{path}: the architecture {given!r:.60} isn't supported; these are: {supported}.")
    family = replace(known[architecture], rope_style="neox")
    fields, tensors = read_hf(str(path), config, tensors, family)
    facts, graph, weights = _build(architecture, family, fields, tensors, context, kv)
    return Model(path.resolve().name, architecture, facts, graph, weights, path, "hf", config)


def _build(
    name: str,
    family: Architecture,
    fields: Fields,
    tensors: Mapping[str, StoredTensor],
    context: int,
    kv: str,
) -> tuple[Facts, Graph, TensorBytes]:
    if not 0 < context <= MAX_SIZE:
        raise ModelError(f"a context of {context} tokens: it must be in 1 … {MAX_SIZE}.")
    if kv not in KV_STORAGE:
        raise ModelError(f"a KV cache in {kv!r}: it must be one of {', '.join(KV_STORAGE)}.")
    facts = read_facts(name, family, fields, tensors, context)
    graph = build_dense(family, facts, tensors, kv, fields.origin)
    return facts, graph, TensorBytes({w.name: tensors[w.name] for w in graph.weights})
