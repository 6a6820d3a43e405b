"""Where each value lies in the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zllmc.passes.schedule import barriers, groups, value_accesses
from zllmc.zllm_ir.graph import Value
from zllmc.zllm_ir.kernel_graph import KernelGraph

ALIGNMENT = 64  # bytes: a cache line, the widest vector


@dataclass(frozen=True)
class Block:
    """Memory that is in use from moment `first` to `last`, both included."""

    first: int
    last: int
    bytes: int

    def meets(self, other: Block) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class MemoryPlan:
    """Byte offsets of values in the arena, and how large it must be. Views and outputs aren't in it."""

    offsets: Mapping[Value, int]
    peak: int


def plan_memory(graph: KernelGraph) -> MemoryPlan:
    """Give every value that kernels compute a place in the arena; values in use at the same time never share.

    Time is counted in barriers: launches that may run together see each other's values as in use, so that
    sharing memory never costs a barrier. A linear writes over its residual where that isn't needed any more:
    the residual stream stays in one place.
    """
    results = graph.results()
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}  # launch that reads the value last
    for i, node in enumerate(graph.nodes):
        for value in node.outputs:
            first.setdefault(value, i)  # in a batch, each slot's launch computes a row
            last[value] = i
        for operand in node.inputs:
            if operand is not None:
                last[graph.place(operand).base] = i

    homes: dict[Value, Value] = {}  # value → the first of those in the same memory

    def home(value: Value, i: int) -> Value:
        """Of the result of launch `i`: the home of the residual that it replaces, or itself."""
        *others, residual = graph.nodes[i].inputs
        if graph.nodes[i].call.op != "linear" or residual is None or residual not in homes:
            return value
        ends = last[residual] == i and all(v is None or graph.place(v).base != residual for v in others)
        return homes[residual] if ends and results[residual] == results[value] else value

    moment = groups(barriers(value_accesses(graph)))
    blocks: dict[Value, Block] = {}
    for value in results:
        if value not in graph.outputs:
            own = homes[value] = home(value, first[value])
            block = Block(moment[first[value]], moment[last[value]], graph.bytes_of(results[value]))
            blocks[own] = replace(blocks[own], last=block.last) if own in blocks else block
    places = dict(zip(blocks, assign(list(blocks.values())), strict=True))
    offsets = {value: places[own] for value, own in homes.items()}
    peak = max((places[own] + block.bytes for own, block in blocks.items()), default=0)
    return MemoryPlan(offsets, _aligned(peak))


def assign(blocks: Sequence[Block]) -> list[int]:
    """Offsets at which no two blocks that meet in time overlap, multiples of ALIGNMENT.

    Largest first, each into the smallest gap between those it meets that fits (Pisarchyk & Lee 2020, "Greedy
    by size for offset calculation").
    """
    offsets = [0] * len(blocks)
    placed: list[int] = []
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i].bytes):
        taken = sorted(
            (offsets[j], offsets[j] + blocks[j].bytes) for j in placed if blocks[i].meets(blocks[j])
        )
        best, best_gap, end = None, 0, 0
        for start, stop in taken:
            gap = start - end
            if gap >= blocks[i].bytes and (best is None or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, _aligned(stop))
        offsets[i] = end if best is None else best
        placed.append(i)
    return offsets


def _aligned(bytes: int) -> int:
    return -(-bytes // ALIGNMENT) * ALIGNMENT
