"""`zllmc verify`: an artifact's files against their checksums, its kernels and logits against a reference.

Kernels are checked where they will run: each launch of a real pass is replayed alone, on what earlier kernels
left in memory. The op's numpy reference gets the same operands, read back from that memory, so errors don't
add up and a wrong kernel can't hide behind another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.cache import cached_artifact
from zllmc.runtime.artifact import Artifact, ArtifactError, Manifest, check_weights, open_artifact
from zllmc.runtime.devices import Mode
from zllmc.runtime.engine import Engine
from zllmc.single_step import Machine, Step
from zllmc.terminal import note
from zllmc.wording import gib, one_line, table
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.fused_ops import is_a8
from zllmc.zllm_ir.kernel_graph import KVOperand, Operand

Array = NDArray[Any]

# Largest NMSE of one kernel's result given the same operands. Stored numbers may round the other way.
KERNEL_TOLERANCE = {"f32": 1e-9, "i32": 0.0, "a8": 1e-4, "a8_limited": 1e-4, "f16": 1e-6, "q8": 1e-4}
# The same where a kernel may round operands to i16: queries and weights, for the codes of a q8 cache; scales
# of quantized activations, where the largest one of a row sets the step.
I16_TOLERANCE = 1e-7

# The same of a model's logits on text, by the formats of its weights.
PLAIN_TOLERANCE = {"F32": 1e-6, "F16": 1e-4, "BF16": 1e-4}
BLOCK_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Comparison:
    """How far `actual` is from `expected`: NMSE is Σ(actual − expected)² / Σ expected²."""

    name: str
    max_error: float
    nmse: float
    tolerance: float
    top1: float | None = None  # fraction of rows with the same largest element

    @property
    def passed(self) -> bool:
        return self.nmse <= self.tolerance  # false for NaN


def cached_and_whole(
    model: Path, target: str, context: int | None, kv: str, progress: Callable[[str, int, int], None]
) -> Path:
    """The artifact of `model` in the cache. One that is damaged is compiled again, and the user told so."""
    cached = partial(cached_artifact, model, target=target, context=context, kv=kv, progress=progress)
    artifact = cached()
    try:
        check_weights(open_artifact(artifact))
    except ArtifactError as error:
        note(f"{error} It is in the cache, so this is done now.")
        return cached(replace=True)
    return artifact


def verify_artifact(
    artifact: Path,
    *,
    source: Path | None = None,
    against: Path | None = None,
    tokens: int = 24,
    tolerance: float | None = None,
    threads: int | None = None,
    device: Mode | None = None,
    as_json: bool = False,
) -> bool:
    """Prints all comparisons; whether all are within tolerance. Raises ArtifactError for a damaged file.

    `source` is the model that the artifact was compiled from, which the interpreter runs; without it only
    `against`, a file with `tokens` (n,) and `logits` (n, vocab), can be compared with. Without either, only
    the files are checked.
    """
    opened = open_artifact(artifact)
    check_weights(opened)
    kernels: list[Comparison] = []
    whole: list[Comparison] = []
    usual = logits_tolerance(opened.manifest)

    def check(name: str, ids: list[int], expected: Array, allowed: float) -> None:
        with Engine.open(artifact, threads=threads, device=device) as engine:
            whole.append(compare_logits(name, engine.logits(ids), expected, allowed))

    if against is not None:
        ids, expected = read_reference(against, opened.manifest)
        check(against.name, ids, expected, tolerance or usual)
    if source is not None:
        prefill = next(entry for entry in opened.plan.entries if entry.name == "prefill")
        most = min(prefill.max_tokens + 1, opened.manifest.context)
        if not 2 <= tokens <= most:
            raise ZllmcError(f"--tokens is {tokens:,}, but this artifact takes 2 to {most:,}")
        ids = np.random.default_rng(0).integers(0, opened.manifest.vocab, tokens).tolist()
        kernels = list(check_kernels(opened, source, ids, threads, device))
        expected = reference_logits(opened.manifest, source, ids)
        # Random tokens are harder than text: int8 activations alone move a deep model of 135M by 3e-3.
        allowed = tolerance or (5 * usual if usual == BLOCK_TOLERANCE else usual)
        check("interpreter", ids, expected, allowed)
    passed = all(comparison.passed for comparison in kernels + whole)
    if as_json:
        parts = {"kernels": kernels, "logits": whole}
        facts = {"passed": passed, "weights_bytes": opened.manifest.weights_bytes}
        print(json.dumps(facts | {k: [_plain(c) for c in v] for k, v in parts.items()}))
    else:
        print(f"files: as the compiler wrote them, with {gib(opened.manifest.weights_bytes)} of weights\n")
        _print(kernels, whole)
        if source is None and against is None:
            print(
                f"To check kernels and logits, name the model that this was compiled from "
                f"({one_line(opened.manifest.source.file)}) with --source, or logits with --against."
            )
        print("passed" if passed else "FAILED")
    return passed


def logits_tolerance(manifest: Manifest) -> float:
    """Largest NMSE of the logits: block formats are computed with int8 activations, others with floats."""
    return max(PLAIN_TOLERANCE.get(format, BLOCK_TOLERANCE) for format in manifest.formats)


def read_reference(path: Path, manifest: Manifest) -> tuple[list[int], Array]:
    """`tokens` and `logits` of a .npz file, or `logits_exact` where it has them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens = file["tokens"]
            logits = file["logits_exact" if "logits_exact" in file else "logits"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ZllmcError(f"{path}: can't be read as an .npz file with tokens and logits: {error}") from error
    if tokens.ndim != 1 or logits.shape != (len(tokens), manifest.vocab):
        raise ZllmcError(
            f"{path}: tokens {tokens.shape} and logits {logits.shape} don't fit each other and the "
            f"vocabulary of {manifest.vocab}"
        )
    return tokens.tolist(), logits


def reference_logits(manifest: Manifest, source: Path, ids: list[int]) -> Array:
    """The interpreter's logits (n, vocab) of the model as it was before any pass."""
    from zllmc.frontends.model import load_model
    from zllmc.zllm_ir.interpreter import Interpreter

    model = load_model(source, context=manifest.context, kv=manifest.kv)
    logits: Array = Interpreter(model.graph, model.weights).run(ids)[0]
    return logits


def compare_logits(name: str, actual: Array, expected: Array, tolerance: float) -> Comparison:
    """The mean over the vocabulary is taken off first: it changes no probability."""
    top1 = float((actual.argmax(-1) == expected.argmax(-1)).mean())
    a, e = (x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64) for x in (actual, expected))
    return compare(name, a, e, tolerance, top1)


def compare(
    name: str, actual: Array, expected: Array, tolerance: float, top1: float | None = None
) -> Comparison:
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    # A softmax over nothing has the maximum −∞, which kernels may keep as a very large negative number.
    nothing = (a <= -1e30) & (e <= -1e30)
    a[nothing] = e[nothing] = 0
    error = a - e
    scale = float((e**2).sum())
    nmse = float((error**2).sum()) / scale if scale else float((error**2).sum())
    return Comparison(name, float(np.abs(error).max(initial=0)), nmse, tolerance, top1)


def _tolerance(step: Step, storage: str) -> float:
    call = step.node.call
    caches = [operand.type for operand in call.operands if isinstance(operand, KVOperand)]
    over_q8 = call.op.startswith("attention") and any(it.storage == "q8" for it in caches)
    x = call.operands[0]
    of_a8 = call.op == "linear" and isinstance(x, Operand) and is_a8(x.type.dtype)
    return I16_TOLERANCE if storage == "f32" and (over_q8 or of_a8) else KERNEL_TOLERANCE[storage]


def check_kernels(
    artifact: Artifact, source: Path, ids: list[int], threads: int | None, device: Mode | None = None
) -> Iterator[Comparison]:
    """Each kernel once, at its first launch: of a prefill of all `ids` but the last, then of its decode."""
    machine = Machine(artifact, source, threads, device)
    seen: set[str] = set()
    try:
        for entry, part, cached in (("prefill", ids[:-1], 0), ("decode", ids[-1:], len(ids) - 1)):
            for step in machine.launches(entry, part, cached):
                if step.kernel in seen:
                    step.run()
                    continue
                seen.add(step.kernel)
                expected = step.reference()
                step.run()
                pairs = zip(step.results(), expected, strict=True)
                parts = [compare(step.kernel, a, e, _tolerance(step, storage)) for (storage, a), e in pairs]
                yield max(parts, key=lambda c: (not c.passed, c.nmse / (c.tolerance or 1)))
    finally:
        machine.close()


def _plain(c: Comparison) -> dict[str, Any]:
    numbers = {"max_error": c.max_error, "nmse": c.nmse, "tolerance": c.tolerance, "top1": c.top1}
    return {"name": c.name, "passed": c.passed} | numbers


def _print(kernels: list[Comparison], whole: list[Comparison]) -> None:
    for title, comparisons in (("kernel", kernels), ("logits against", whole)):
        if not comparisons:
            continue
        rows = [[title, "max error", "NMSE", "tolerance", "top-1", ""]]
        for c in comparisons:
            top1 = "" if c.top1 is None else f"{100 * c.top1:.1f}%"
            numbers = [f"{c.max_error:.2e}", f"{c.nmse:.2e}", f"{c.tolerance:.0e}", top1]
            rows.append([c.name, *numbers, "" if c.passed else "OUT OF TOLERANCE"])
        print(table(rows) + "\n")
