"""From kernel graphs to the execution plan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise

from zllmc.passes.memory import MemoryPlan, plan_memory
from zllmc.passes.schedule import Span, accesses, barriers
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.graph import Value
from zllmc.zllm_ir.kernel_graph import (
    KernelCall,
    KernelGraph,
    KernelNode,
    KVOperand,
    Operand,
    row_bytes,
    symbol,
)
from zllmc.zllm_ir.plan import (
    CHOSEN,
    CONTROL_CACHED,
    CONTROL_FIRST_ROW,
    CONTROL_WORDS,
    Buffer,
    EntryPoint,
    Launch,
    Plan,
    Pointer,
)
from zllmc.zllm_ir.types import TensorType

_IO = ("tokens", "positions", "control", "logits", "candidates", "candidate_ids", "chosen")
_PIECE_ROWS = 96  # of weights: what a piece does anew for all rows of x costs 3 % of it
_ATTENTION_PIECES = 64
_OUTPUTS = ("logits", "candidates", "candidate_ids", "tokens", "positions", "chosen")  # where each goes


def kernel_calls(graphs: Iterable[KernelGraph]) -> dict[str, KernelCall]:
    """Every kernel that the graphs need, by symbol, each once."""
    return {symbol(node.call): node.call for graph in graphs for node in graph.nodes}


def stored_weights(graphs: Iterable[KernelGraph]) -> dict[str, TensorType]:
    """The weights that the kernels read and the type in which they read each: what to pack, in this order,
    with nothing between the parts of joined ones.

    Raises an IRError where two kernels read the same weight in different types.
    """
    stored: dict[str, TensorType] = {}
    for graph in graphs:
        weights = set(graph.weights)
        for value, operand in _operands(graph):
            if value in weights and isinstance(operand, Operand):
                for part in graph.parts(value):
                    read = TensorType(operand.type.dtype, part.shape)
                    type = stored.setdefault(part.name, read)
                    if type != read:
                        raise IRError(f"{part.name} is read as {type} and as {read}")
    return stored


def make_plan(graphs: Mapping[str, KernelGraph], weights: Mapping[str, tuple[int, int]]) -> Plan:
    """The plan of all entry points, `graphs` by name; `weights` gives the offset and bytes of each in the
    weight file.

    Buffers, in order: weights, arena, every layer's state, tokens, positions, control, logits, and where a
    graph chooses tokens, candidates, their ids, and chosen. All entry points share them. A row of logits is
    padded to a multiple of ROW_PAD numbers.
    """
    memory = {name: plan_memory(graph) for name, graph in graphs.items()}
    buffers = [
        Buffer("weights", "weights", max((offset + size for offset, size in weights.values()), default=0)),
        Buffer("arena", "arena", max(m.peak for m in memory.values())),
        *_states(graphs.values()),
        *_io(graphs.values()),
    ]
    numbers = {buffer.name: i for i, buffer in enumerate(buffers)}
    if len(numbers) != len(buffers):
        raise IRError(f"buffers with the same name: {', '.join(b.name for b in buffers)}")
    entries = [_entry(graph, memory[name], numbers, weights) for name, graph in graphs.items()]
    return Plan(tuple(buffers), tuple(entries))


def pieces(call: KernelCall) -> int:
    """`Launch.pieces` of a call, where they gain anything: a product with many rows of x may begin anew so
    often, and the units of their attention go round anyhow."""
    if call.op == "attention_rows":
        return _ATTENTION_PIECES
    weight = call.operands[1] if call.op == "linear" else None
    if not isinstance(weight, Operand) or call.results[0].single_row:
        return 0
    return int(weight.type.shape[0]) // _PIECE_ROWS


def _operands(graph: KernelGraph) -> Iterator[tuple[Value, Operand | KVOperand]]:
    """Everything that kernels of the graph are given."""
    for node in graph.nodes:
        for value, operand in zip(node.inputs, node.call.operands, strict=True):
            if value is not None and operand is not None:
                yield value, operand


def _states(graphs: Iterable[KernelGraph]) -> list[Buffer]:
    states: dict[str, KVOperand] = {}
    for graph in graphs:
        for value, operand in _operands(graph):
            if isinstance(operand, KVOperand) and states.setdefault(value.name, operand) != operand:
                raise IRError(f"{value.name} is {operand} and {states[value.name]}")
    return [Buffer(name, "state", operand.layout.bytes) for name, operand in states.items()]


def _io(graphs: Collection[KernelGraph]) -> list[Buffer]:
    tokens = max(graph.max_tokens for graph in graphs)
    logits = max(graph.bytes_of(graph.results()[graph.outputs[0]]) for graph in graphs)
    slots = {node.slot for graph in graphs for node in graph.nodes}
    sizes = [4 * tokens, 4 * tokens, 4 * CONTROL_WORDS * len({None} | slots), logits]
    for graph in graphs:
        if _chooses(graph):
            results, (_, values, ids, *_) = graph.results(), graph.outputs
            sizes += [graph.bytes_of(results[values]), graph.bytes_of(results[ids]), 4 * CHOSEN]
    return [Buffer(name, "io", size) for name, size in zip(_IO, sizes, strict=False)]


def _chooses(graph: KernelGraph) -> bool:
    """Whether a pass ends with the choice of the next token."""
    return len(graph.outputs) > 1


def _start(weight: Value, graph: KernelGraph, weights: Mapping[str, tuple[int, int]]) -> int | None:
    """The offset of a weight, None for one that no kernel reads."""
    places = [weights[part.name] for part in graph.parts(weight) if part.name in weights]
    for (start, size), (next, _) in pairwise(places):
        if start + size != next:
            raise IRError(f"{weight.name}: its parts don't lie one after the other")
    return places[0][0] if places else None


def _entry(
    graph: KernelGraph, memory: MemoryPlan, numbers: Mapping[str, int], weights: Mapping[str, tuple[int, int]]
) -> EntryPoint:
    starts = {weight: _start(weight, graph, weights) for weight in graph.weights}
    fixed = {w: Pointer(numbers["weights"], at) for w, at in starts.items() if at is not None}
    fixed |= {s: Pointer(numbers[s.name], 0) for s in graph.states if s.name in numbers}
    fixed |= {v: Pointer(numbers["arena"], offset) for v, offset in memory.offsets.items()}
    places = {name: Pointer(numbers[name], 0) for name in _IO if name in numbers}
    # Two are words of the control block: the first row with logits, and, where a round counts it on, the
    # position: the cached length.
    places["first_row"] = Pointer(numbers["control"], 4 * CONTROL_FIRST_ROW)
    if _chooses(graph):
        places["positions"] = Pointer(numbers["control"], 4 * CONTROL_CACHED)
    fixed |= {value: places[value.name] for value in graph.inputs}
    fixed |= {value: places[name] for value, name in zip(graph.outputs, _OUTPUTS, strict=False)}
    results = graph.results()

    def pointer(value: Value, slot: int | None) -> Pointer:
        place = graph.place(value)
        start = fixed[place.base]
        row = slot * row_bytes(results[place.base]) if slot and place.base in results else 0
        return Pointer(start.buffer, start.offset + row + 4 * place.offset)

    def span(value: Value, slot: int | None) -> Span:
        base = graph.place(value).base
        start = fixed[base]
        if base not in results:
            return Span((start.buffer, slot), start.offset, start.offset + 1)
        if slot is None:
            return Span(start.buffer, start.offset, start.offset + graph.bytes_of(results[base]))
        size = row_bytes(results[base])
        return Span(start.buffer, start.offset + slot * size, start.offset + (slot + 1) * size)

    def launch(node: KernelNode, barrier: bool) -> Launch:
        block = Pointer(numbers["control"], 0 if node.slot is None else 4 * CONTROL_WORDS * (1 + node.slot))
        pointers = (pointer(v, node.slot) for v in (*node.inputs, *node.outputs) if v is not None)
        return Launch(symbol(node.call), (block, *pointers), barrier, node.slot, pieces(node.call))

    after = barriers(accesses(graph, span))
    launches = tuple(map(launch, graph.nodes, after))
    return EntryPoint(graph.name, graph.max_tokens, graph.max_rows, launches)
