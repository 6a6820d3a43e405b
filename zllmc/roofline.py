"""`zllmc bench --model-only`: what a plan would take on a GPU's peaks, without the GPU.

Each launch takes as long as its bytes at the memory's bandwidth or its operations at their peak, whichever
is longer ("Roofline", Williams et al. 2009), and the wait for the launch before. That is a bound from below
which no kernel reaches; it shows where a plan spends its time, and what fusing would save.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zllmc import targets
from zllmc.frontends.model import load_model
from zllmc.passes.pipeline import lower_entries
from zllmc.passes.traffic import bytes_moved
from zllmc.targets.gpu import GpuTarget, Product
from zllmc.wording import table
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, KernelGraph, KVOperand, Operand

# From the end of a kernel to the start of the next one of a graph: an assumption, of the right size.
LAUNCH_SECONDS = 1.5e-6


@dataclass(frozen=True)
class Estimate:
    """Of one op's launches in a pass: bytes, operations and seconds."""

    op: str
    launches: int
    bytes: int
    operations: int
    seconds: float


def estimate(graph: KernelGraph, product: Product, *, tokens: int, cached: int) -> list[Estimate]:
    """Of every op in a pass of `tokens` tokens after `cached` ones, the slowest first."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for node, traffic in zip(
        graph.nodes, bytes_moved(graph, tokens=tokens, rows=1, cached=cached), strict=True
    ):
        moved = traffic.weights + traffic.activations + traffic.state
        operations = _operations(node.call, tokens, cached)
        seconds = max(moved / (product.bandwidth * 1e9), operations / _peak(node.call, product, tokens))
        for i, value in enumerate((1, moved, operations, seconds + LAUNCH_SECONDS)):
            totals[node.call.op][i] += value
    rows = [Estimate(op, int(n), int(b), int(o), s) for op, (n, b, o, s) in totals.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _operations(call: KernelCall, tokens: int, cached: int) -> int:
    """Multiplications and additions of the products; what is done once for each element is not counted."""
    match call.op:
        case "linear":
            weight = call.operands[1]
            if isinstance(weight, Operand):
                rows, columns = (int(d) for d in weight.type.shape)
                return 2 * rows * columns * (1 if call.results[0].single_row else _rows(call, tokens))
        case "attention_rows" | "attention_partial":
            q, state = call.operands[:2]
            if isinstance(q, Operand) and isinstance(state, KVOperand):
                window = call.attributes.get("window") or cached + tokens
                keys = sum(min(cached + 1 + i, window) for i in range(tokens))
                return 4 * q.width * keys  # q · k, and the sum of values
    return 0


def _rows(call: KernelCall, tokens: int) -> int:
    """Rows of a linear in a prefill pass: the head has one."""
    return 1 if str(call.results[0].type.shape[0]) == "R" else tokens


def _peak(call: KernelCall, product: Product, tokens: int) -> float:
    """Operations a second. An int8 dot instruction counts four products where an f32 one has one. Matrix
    units take int8 or halves for packed weights, whichever is faster, and halves for F16 and BF16."""
    weight = call.operands[1] if call.op == "linear" else None
    if not isinstance(weight, Operand) or weight.type.dtype == "F32":
        return 1e12 * product.int8_dot / 4
    plain = weight.type.dtype in ("F16", "BF16")
    if tokens >= 16:
        return 1e12 * (product.f16_matrix if plain else max(product.int8_matrix, product.f16_matrix))
    return 1e12 * product.int8_dot / (4 if plain else 1)


def run_model_only(model: Path, text: str, *, prompt: int, depth: int, as_json: bool) -> None:
    """Prints, for each entry point, what it moves and computes and the least time that it can take on the GPU
    target `text`. Raises ZllmcError for any other target."""
    target = targets.parse(text)
    if not isinstance(target, GpuTarget):
        raise ZllmcError(f"--model-only reckons on a GPU's peaks; {target} is none. Measure it instead.")
    capacity = -(-(prompt + depth + 1) // KEY_BLOCK) * KEY_BLOCK
    graph = load_model(model, context=capacity, kv="f16").graph
    graphs = lower_entries(graph, target, context=capacity)
    passes = {
        "decode": estimate(graphs["decode"], target.product, tokens=1, cached=depth),
        "prefill": estimate(
            graphs["prefill"], target.product, tokens=min(prompt, graphs["prefill"].max_tokens), cached=depth
        ),
    }
    counts = {"decode": 1, "prefill": min(prompt, graphs["prefill"].max_tokens)}
    result: dict[str, Any] = {
        "model": model.name,
        "target": str(target),
        "product": target.product.name,
        "entries": {
            name: {
                "tokens": counts[name],
                "launches": sum(e.launches for e in rows),
                "bytes": sum(e.bytes for e in rows),
                "operations": sum(e.operations for e in rows),
                "seconds": sum(e.seconds for e in rows),
                "ops": [vars(e) for e in rows],
            }
            for name, rows in passes.items()
        },
    }
    if as_json:
        print(json.dumps(result))
        return
    print(f"{model.name} on {target} ({target.product.name}, {target.product.bandwidth:,.0f} GB/s)")
    for name, rows in passes.items():
        total = result["entries"][name]
        print(f"\n{name}, {counts[name]:,} tokens after {depth:,}: {_time(total['seconds'])}")
        print(table([["op", "launches", "MB", "GOP", "time", "share"], *_lines(rows, total["seconds"])]))
        rate = counts[name] / total["seconds"]
        bound = total["bytes"] / (target.product.bandwidth * 1e9) / total["seconds"]
        print(f"at most {rate:,.0f} tokens/s, with {bound:.0%} of the memory bandwidth")


def _lines(rows: Iterable[Estimate], seconds: float) -> list[list[str]]:
    return [
        [
            row.op,
            f"{row.launches:,}",
            f"{row.bytes / 1e6:,.2f}",
            f"{row.operations / 1e9:,.3f}",
            _time(row.seconds),
            f"{row.seconds / seconds:.0%}",
        ]
        for row in rows
    ]


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"
