"""Which launches must wait for the ones before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zllmc.zllm_ir.graph import Value
from zllmc.zllm_ir.kernel_graph import KernelGraph, KernelNode
from zllmc.zllm_ir.op import OPS


@dataclass(frozen=True)
class Span:
    """Bytes `start` … `stop` − 1 of a buffer."""

    buffer: object
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Access:
    """What one launch reads and writes."""

    reads: tuple[Span, ...]
    writes: tuple[Span, ...]

    def conflicts(self, other: Access) -> bool:
        """Whether the two must not run at the same time."""
        pairs = [(self.writes, other.writes), (self.writes, other.reads), (self.reads, other.writes)]
        return any(a.overlaps(b) for left, right in pairs for a in left for b in right)


def barriers(accesses: Sequence[Access]) -> list[bool]:
    """Of every launch, whether all threads must finish it before any starts the next.

    Launches since the last barrier run at the same time, so the next one may join them only if it conflicts
    with none. The order is kept; the last launch ends with a barrier.
    """
    after = [False] * len(accesses)
    together: list[Access] = []
    for i, access in enumerate(accesses):
        if any(access.conflicts(other) for other in together):
            after[i - 1] = True
            together = []
        together.append(access)
    return [*after[:-1], True] if after else []


def groups(after: Sequence[bool]) -> list[int]:
    """The number of barriers before each launch: launches with the same number run together."""
    return list(accumulate(after[:-1], initial=0)) if after else []


def accesses(graph: KernelGraph, span: Callable[[Value, int | None], Span]) -> list[Access]:
    """The accesses of every launch. `span` gives where a value is, or its row and the state of a slot.
    Nothing writes weights."""
    weights = set(graph.weights)

    def access(node: KernelNode) -> Access:
        op = OPS[node.call.op]
        state = [node.inputs[op.operands.index(op.writes)]] if op.writes else []
        return Access(
            tuple(span(v, node.slot) for v in node.inputs if v is not None and v not in weights),
            tuple(span(v, node.slot) for v in (*node.outputs, *state) if v is not None),
        )

    return [access(node) for node in graph.nodes]


def value_accesses(graph: KernelGraph) -> list[Access]:
    """The accesses of every launch if each value had memory of its own: the true dependencies."""

    def span(value: Value, slot: int | None) -> Span:
        first, stop = (0, graph.max_tokens) if slot is None else (slot, slot + 1)
        return Span(graph.place(value).base, first, stop)

    return accesses(graph, span)
