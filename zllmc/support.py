"""What each target does with each format, asked of the code itself: nothing here is a list kept by hand.

No kernel is generated, and TVM is not imported. What decides whether a format has kernels is its packed
layout, which refuses what they can't unpack; the tests generate and run them for every format.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache

import zllmc.zllm_ir.ops  # noqa: F401  (registers the ops)
from zllmc.codegen.packing import layout_of
from zllmc.frontends.gguf import GGML_TYPES
from zllmc.passes.lower import lower
from zllmc.passes.pipeline import run_passes
from zllmc.targets import Target, all_targets, cuda, metal, rocm
from zllmc.targets.cpu import TARGETS, CpuTarget, detect
from zllmc.wording import table
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS
from zllmc.zllm_ir.graph import Builder, Graph
from zllmc.zllm_ir.kernel_graph import Operand
from zllmc.zllm_ir.types import T, TensorType

_WIDTH = 256  # of the probe: whole blocks of every format

# The columns of the matrix. GPUs of a kind differ in limits and matrix instructions, not in formats.
SHOWN: tuple[Target, ...] = (
    *TARGETS.values(),
    cuda.TARGETS["sm_90"],
    rocm.TARGETS["gfx1100"],
    metal.TARGETS["apple9"],
)


@dataclass(frozen=True)
class Support:
    """Four different states of a format on a target; none of them implies another.

    `parsed`: the GGUF reader knows the type. `reference`: the interpreter computes with it. `kernel`: the
    target's linear and embedding kernels read it packed. `default_path`: what the compiler makes of a model
    in this format uses them, for prompts and for decoding.
    """

    format: str
    target: str
    parsed: bool
    reference: bool
    kernel: bool
    default_path: bool


def support(format: str, target: Target) -> Support:
    reference = format in FORMATS
    kernel = reference and _has_layout(format, target)
    return Support(
        format,
        str(target),
        format in {type.name for type in GGML_TYPES.values()},
        reference,
        kernel,
        kernel and _on_default_path(format),
    )


def matrix() -> list[Support]:
    """Every known format on every target."""
    formats = [*FORMATS, *(type.name for type in GGML_TYPES.values() if type.name not in FORMATS)]
    return [support(format, target) for format in formats for target in all_targets()]


def show_targets(*, as_json: bool) -> None:
    """Prints the matrix, and which target this machine is."""
    cells = matrix()
    try:
        host = str(detect())
    except ZllmcError:  # it can still compile for others
        host = "none"
    if as_json:
        print(json.dumps({"host": host, "support": [asdict(cell) for cell in cells]}))
        return
    print("Targets")
    for target in all_targets():
        mark = "  (this machine)" if str(target) == host else ""
        print(f"  {target}: {_description(target)}{mark}")
    print("\nFormats: parsed by the GGUF reader, computed by the reference interpreter, and for each target:")
    print("whether kernels read it packed, and whether models compiled by default use them")
    rows = [["format", "parsed", "reference", *map(str, SHOWN)]]
    by_place = {(cell.format, cell.target): cell for cell in cells}
    for format in dict.fromkeys(cell.format for cell in cells):
        of = [by_place[format, str(target)] for target in SHOWN]
        rows.append([format, _word(of[0].parsed), _word(of[0].reference), *map(_kernel_words, of)])
    print(table(rows, indent="  "))


def _description(target: Target) -> str:
    if isinstance(target, CpuTarget):
        return f"{target.triple}, needs {', '.join(sorted(target.requires))}"
    matrix = ", ".join(dict.fromkeys(instruction.inputs for instruction in target.matrix)) or "none"
    return f"like {target.product.name}; subgroups of {target.subgroup}, matrix units {matrix}"


def _word(state: bool) -> str:
    return "yes" if state else "no"


def _kernel_words(cell: Support) -> str:
    return f"kernel {_word(cell.kernel)}, default {_word(cell.default_path)}"


def _has_layout(format: str, target: Target) -> bool:
    try:
        layout_of(format, (_WIDTH, _WIDTH), target.lanes)
    except ZllmcError:
        return False
    return True


@cache
def _on_default_path(format: str) -> bool:
    """Whether the passes leave a matrix in this format packed until a kernel reads it."""
    for name, tokens in (("decode", 1), ("prefill", None)):
        graph = run_passes(_probe(format), tokens=tokens, context=64)
        lowered = lower(graph, name=name, context=64, max_tokens=tokens or 16, max_rows=1)
        packed = {
            node.call.op
            for node in lowered.nodes
            for operand in node.call.operands
            if isinstance(operand, Operand) and operand.type.dtype == format
        }
        if not packed >= {"linear", "embedding"}:
            return False
    return True


def _probe(format: str) -> Graph:
    """A model of one matrix."""
    g = Builder("probe")
    tokens = g.input("tokens", TensorType("i32", (T,)))
    first_row = g.input("first_row", TensorType("i32", ()))
    matrix = g.weight("matrix", TensorType(format, (_WIDTH, _WIDTH)))
    return g.finish(g.linear(g.select_rows(g.embedding(tokens, matrix), first_row), matrix))
