"""`zllmc info`: what a model or an artifact is, and what it would take to run it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from zllmc.cache import is_artifact
from zllmc.frontends.chat_template import chat_templates_from_gguf, chat_templates_from_hf
from zllmc.frontends.container import StoredTensor
from zllmc.frontends.gguf import read_gguf
from zllmc.frontends.model import Model, model_from_gguf, model_from_hf
from zllmc.frontends.safetensors import read_hf_folder
from zllmc.frontends.tokenizer import tokenizer_from_gguf, tokenizer_from_hf
from zllmc.runtime.artifact import Manifest, open_artifact
from zllmc.support import support
from zllmc.targets import all_targets
from zllmc.wording import count, gib, harmless, headline, one_line, table
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.types import KVType

CONTEXTS = (2048, 8192, 32768, 131072)
KV_STORAGE = ("f16", "q8")


def show_info(path: Path, *, as_json: bool) -> None:
    """Prints the facts; raises ZllmcError after them if the model can't be compiled."""
    if is_artifact(path):
        _show_artifact(open_artifact(path).manifest, as_json=as_json)
        return
    facts, problem = describe(path)
    if as_json:
        print(json.dumps(facts | {"problem": problem and str(problem)}))
    else:
        _print_model(facts)
    if problem is not None:
        raise problem


def describe(path: Path) -> tuple[dict[str, Any], ZllmcError | None]:
    """Facts of a model as JSON-ready values, and what keeps zllmc from compiling it, if anything does."""
    metadata: Mapping[str, Any]
    is_folder = (path / "config.json").is_file()
    if is_folder:
        folder = read_hf_folder(path)
        metadata, tensors = folder.config, folder.tensors
        architecture = next(iter(metadata.get("architectures") or ["?"]))
    else:
        file = read_gguf(path)
        metadata, tensors = file.metadata, file.tensors
        architecture = metadata.get("general.architecture", "?")
    facts: dict[str, Any] = {
        "file": str(path),
        "architecture": str(architecture),
        "parameters": sum(prod(tensor.shape) for tensor in tensors.values()),
        "weights_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": _groups(tensors.values()),
        "tokenizer": _tokenizer(path, metadata, is_folder),
        "chat_template": _template(path, metadata, is_folder),
    }

    def model(kv: str) -> Model:
        make = model_from_hf if is_folder else model_from_gguf
        return make(metadata, tensors, path=path, context=CONTEXTS[0], kv=kv)

    problem = None
    try:
        models = {kv: model(kv) for kv in KV_STORAGE}
        facts |= _dimensions(models["f16"]) | {
            "kv_bytes_per_token": {kv: _kv_bytes(m) for kv, m in models.items()}
        }
    except ZllmcError as error:
        problem = error
    facts["targets"] = _targets(tensors.values())
    return facts, problem


def _targets(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, bool]]:
    """For each target, which of the formats of the matrices its kernels read."""
    formats = sorted({tensor.type_name for tensor in tensors if len(tensor.shape) == 2})
    return {
        str(target): {format: support(format, target).default_path for format in formats}
        for target in all_targets()
    }


def _dimensions(model: Model) -> dict[str, Any]:
    f = model.facts
    return {
        "layers": f.layers,
        "width": f.width,
        "ffn_width": f.ffn_width,
        "heads": f.heads,
        "kv_heads": f.kv_heads,
        "head_dim": f.head_dim,
        "vocab": f.vocab,
        "trained_context": f.trained_context,
        "window": max(f.windows),
        "tied_head": all(w.name != "output.weight" for w in model.graph.weights),
    }


def _kv_bytes(model: Model) -> int:
    return sum(s.type.bytes_per_token for s in model.graph.states if isinstance(s.type, KVType))


def _groups(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """Tensors that differ only in the layer's number, together."""
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for tensor in tensors:
        name = re.sub(r"\b\d+\b", "*", tensor.name)
        group = groups.setdefault(
            (name, tensor.shape),
            {"name": name, "shape": list(tensor.shape), "count": 0, "bytes": 0, "types": {}},
        )
        group["count"] += 1
        group["bytes"] += tensor.nbytes
        group["types"][tensor.type_name] = group["types"].get(tensor.type_name, 0) + 1
    return list(groups.values())


def _tokenizer(path: Path, metadata: Mapping[str, Any], is_folder: bool) -> dict[str, Any]:
    try:
        facts = (tokenizer_from_hf(path) if is_folder else tokenizer_from_gguf(metadata)).facts
    except ZllmcError as error:
        return {"problem": str(error)}
    names = ("kind", "pre", "vocab_size", "bos_token", "eos_token", "add_bos", "eog_ids")
    return {name: facts[name] for name in names}


def _template(path: Path, metadata: Mapping[str, Any], is_folder: bool) -> str | None:
    templates = chat_templates_from_hf(path) if is_folder else chat_templates_from_gguf(metadata)
    return templates.get("default")


def _print_model(facts: Mapping[str, Any]) -> None:
    def line(name: str, value: str) -> None:
        print(f"{name:<13} {harmless(value)}")

    line("model", facts["file"])
    line("architecture", facts["architecture"])
    line("parameters", f"{count(facts['parameters'])} ({facts['parameters']:,})")
    if "layers" in facts:
        line(
            "structure",
            f"{facts['layers']} layers of width {facts['width']:,}, feed-forward {facts['ffn_width']:,}, "
            f"{facts['heads']} heads of {facts['head_dim']} on {facts['kv_heads']} kv heads",
        )
        window = f", some layers see {facts['window']:,}" if facts["window"] else ""
        line("context", f"trained for {facts['trained_context']:,} tokens{window}")
        line("vocabulary", f"{facts['vocab']:,} tokens, {'tied' if facts['tied_head'] else 'separate'} head")
    line("tokenizer", _tokenizer_line(facts["tokenizer"]))
    template = facts["chat_template"]
    line(
        "chat template",
        "none"
        if template is None
        else one_line(template.strip().splitlines()[0] if template.strip() else ""),
    )

    rows = [["tensors", "count", "shape", "types", "size"]]
    for group in facts["tensors"]:
        types = ", ".join(
            name if n == group["count"] else f"{name} ({n})" for name, n in group["types"].items()
        )
        shape = " × ".join(map(str, group["shape"]))
        rows.append(
            [
                one_line(group["name"], 60),
                str(group["count"]),
                shape,
                types,
                f"{group['bytes'] / 1e6:,.1f} MB",
            ]
        )
    print("\n" + table(rows))
    if "kv_bytes_per_token" in facts:
        print(
            "\n"
            + _memory_table(facts["weights_bytes"], facts["kv_bytes_per_token"], facts["trained_context"])
        )
    print("\ntargets")
    alike: dict[tuple[str, str], list[str]] = {}  # names of targets by kind and what there is to say
    for target, formats in facts["targets"].items():
        kind, _, name = target.partition(":")
        missing = [format for format, supported in formats.items() if not supported]
        what = f"no kernel for {', '.join(missing)}" if missing else "kernels for all formats"
        alike.setdefault((kind, what), []).append(name)
    for (kind, what), names in alike.items():
        print(f"  {kind}:{', '.join(names)}: {what}")


def _memory_table(weights: int, kv_bytes: Mapping[str, int], trained: int) -> str:
    contexts = sorted({n for n in CONTEXTS if n < trained} | {trained})
    rows = [["memory", *(f"KV {kv} ({size:,} B/token)" for kv, size in kv_bytes.items())]]
    for n in contexts:
        rows.append([f"context {n:,}", *(gib(weights + size * n) for size in kv_bytes.values())])
    return table(rows)


def _tokenizer_line(facts: Mapping[str, Any]) -> str:
    if "problem" in facts:
        return f"can't be used: {facts['problem']}"
    kind = facts["kind"] + (f" ({facts['pre']})" if facts["pre"] else "")
    bos = f"BOS {facts['bos_token']!r}{' added' if facts['add_bos'] else ''}, " if facts["bos_token"] else ""
    return f"{kind}, {bos}EOS {facts['eos_token']!r}, {len(facts['eog_ids'])} tokens end an answer"


def _show_artifact(manifest: Manifest, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(manifest).decode())
        return
    source = manifest.source
    formats = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in manifest.formats.items())
    for name, value in (
        ("artifact", headline(manifest)),
        ("name", one_line(manifest.name)),
        ("parameters", f"{manifest.parameters:,}"),
        ("formats", formats),
        ("KV", manifest.kv),
        ("target", manifest.target + (f" ({manifest.triple})" if manifest.triple else "")),
        ("source", f"{one_line(source.file)}, {source.bytes:,} bytes, sha256 {source.sha256}"),
        ("compiled by", f"zllmc {manifest.compiler}, TVM {manifest.tvm}"),
        *(("note", text) for text in manifest.notes),
    ):
        print(f"{name:<13} {harmless(value)}")
    print(
        "\n"
        + _memory_table(manifest.weights_bytes, {manifest.kv: manifest.kv_bytes_per_token}, manifest.context)
    )
