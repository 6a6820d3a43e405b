"""The arena and the barriers: against brute force, and by replaying plans on numpy, out of order."""

import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zllmc.frontends.model import Model, load_model
from zllmc.passes.batch import batch
from zllmc.passes.lower import lower
from zllmc.passes.memory import ALIGNMENT, Block, assign, plan_memory
from zllmc.passes.pipeline import run_passes
from zllmc.passes.plan import kernel_calls, make_plan, stored_weights
from zllmc.passes.schedule import Access, Span, barriers, groups
from zllmc.zllm_ir.graph import Value
from zllmc.zllm_ir.interpreter import Interpreter, KVState, bind_weight
from zllmc.zllm_ir.kernel_graph import KernelGraph, KVOperand, Operand, activation_row_bytes
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CONTROL_FIRST_ROW, CONTROL_TOKENS, CONTROL_WORDS, Launch, Plan, Pointer
from zllmc.zllm_ir.text import parse
from zllmc.zllm_ir.types import R, T

# --- the arena -------------------------------------------------------------------------------------------

blocks = st.builds(
    lambda first, length, size: Block(first, first + length, size),
    st.integers(0, 20),
    st.integers(0, 8),
    st.sampled_from([1, 64, 100, 128, 1000, 4096]),
)


@given(st.lists(blocks, max_size=30))
def test_blocks_in_use_at_the_same_time_never_overlap(blocks: list[Block]) -> None:
    offsets = assign(blocks)
    for i, (a, at) in enumerate(zip(blocks, offsets, strict=True)):
        assert at >= 0 and at % ALIGNMENT == 0
        for b, other in zip(blocks[:i], offsets[:i], strict=True):
            in_time = set(range(a.first, a.last + 1)) & set(range(b.first, b.last + 1))
            assert not in_time or at + a.bytes <= other or other + b.bytes <= at


def test_a_gap_is_used_before_the_arena_grows() -> None:
    whole, left, right = Block(0, 0, 256), Block(1, 3, 128), Block(1, 1, 128)
    later = Block(2, 3, 64)
    offsets = assign([whole, left, right, later])
    assert max(at + b.bytes for at, b in zip(offsets, [whole, left, right, later], strict=True)) == 256


# --- barriers --------------------------------------------------------------------------------------------

spans = st.builds(
    lambda buffer, start, size: Span(buffer, start, start + size),
    st.sampled_from(["a", "b"]),
    st.integers(0, 12),
    st.integers(1, 4),
)
accesses = st.builds(
    Access, st.lists(spans, max_size=3).map(tuple), st.lists(spans, min_size=1, max_size=2).map(tuple)
)


def touched(spans: tuple[Span, ...]) -> set[tuple[Any, int]]:
    return {(s.buffer, byte) for s in spans for byte in range(s.start, s.stop)}


def clash(a: Access, b: Access) -> bool:
    reads, writes = touched(b.reads), touched(b.writes)
    return bool(touched(a.writes) & (reads | writes) or touched(a.reads) & writes)


@given(st.lists(accesses, max_size=12))
def test_barriers_are_where_bytes_clash_and_nowhere_else(launches: list[Access]) -> None:
    after = barriers(launches)
    assert len(after) == len(launches) and all(after[-1:])
    number = groups(after)
    together = [
        [a for a, n in zip(launches, number, strict=True) if n == g]
        for g in range(1 + max(number, default=-1))
    ]
    for i, group in enumerate(together):
        assert not any(clash(a, b) for j, a in enumerate(group) for b in group[:j])
        if i:
            assert any(clash(group[0], before) for before in together[i - 1])


# --- whole plans -----------------------------------------------------------------------------------------


SLOTS = 3


def compiled(model: Model, max_tokens: int, max_rows: int) -> tuple[dict[str, KernelGraph], Plan]:
    graphs = {}
    for name, tokens in (("decode", 1), ("prefill", None)):
        graph = run_passes(model.graph, tokens=tokens, context=128, check=True)
        sizes = (1, 1) if tokens else (max_tokens, max_rows)
        graphs[name] = lower(graph, name=name, context=128, max_tokens=sizes[0], max_rows=sizes[1])
    graphs["batch"] = batch(graphs["decode"], graphs["prefill"], SLOTS)
    weights = {name: (64 * i, 64) for i, name in enumerate(stored_weights(graphs.values()))}
    return graphs, make_plan(graphs, weights)


class Replay:
    """Runs a plan's launches on numpy: values lie in real bytes where the plan says, and the launches between
    two barriers run in reverse, which must make no difference."""

    def __init__(self, model: Model, graphs: dict[str, KernelGraph], plan: Plan) -> None:
        self.graphs, self.plan = graphs, plan
        self.entries = {entry.name: entry for entry in plan.entries}
        self.weights = {w: bind_weight(w, model.weights[w.name]) for w in model.graph.weights}
        for joined, parts in (item for graph in graphs.values() for item in graph.joined.items()):
            self.weights[joined] = np.concatenate([self.weights[part][:] for part in parts])
        self.states = [{s: KVState.empty(s.type) for s in model.graph.states} for _ in range(SLOTS)]
        self.memory = [
            np.full(0 if b.kind in ("weights", "state") else b.bytes, 0xFF, np.uint8) for b in plan.buffers
        ]
        self.numbers = {buffer.name: i for i, buffer in enumerate(plan.buffers)}

    def words(self, name: str) -> Any:
        return self.memory[self.numbers[name]].view(np.int32)

    def cached(self, sequence: int) -> int:
        return len(next(iter(self.states[sequence].values())).keys)

    def run(self, name: str, tokens: Any, rows: int, sequence: int = 0) -> Any:
        """Logits (rows, vocab) of the last `rows` tokens of one sequence."""
        self.sequence, start = sequence, self.cached(sequence)
        return self.replay(name, tokens, np.arange(start, start + len(tokens)), rows)

    def run_batch(self, tokens: Any) -> Any:
        """Logits (n, vocab) after one more token for each of the first n sequences."""
        return self.replay("batch", tokens, [self.cached(i) for i in range(len(tokens))], len(tokens))

    def replay(self, name: str, tokens: Any, positions: Any, rows: int) -> Any:
        count = len(tokens)
        self.dims = {T: count, R: rows}
        self.words("tokens")[:count] = tokens
        self.words("positions")[:count] = positions
        self.words("control")[[CONTROL_TOKENS, CONTROL_FIRST_ROW]] = count, count - rows
        entry, graph = self.entries[name], self.graphs[name]
        pending: list[int] = []
        for i, launch in enumerate(entry.launches):
            if launch.slot is None or launch.slot < count:
                pending.append(i)
            if launch.barrier:
                for j in reversed(pending):
                    self.launch(entry.launches[j], graph, j)
                pending = []
        assert not pending
        (logits,) = graph.outputs
        return self.read(Pointer(self.numbers["logits"], 0), graph.results()[logits])

    def launch(self, launch: Launch, graph: KernelGraph, index: int) -> None:
        node = graph.nodes[index]
        assert launch.slot == node.slot
        block = 0 if launch.slot is None else 1 + launch.slot
        assert launch.args[0] == Pointer(self.numbers["control"], block * 4 * CONTROL_WORDS)
        states = self.states[self.sequence if launch.slot is None else launch.slot]
        pointers = iter(launch.args[1:])
        given = [None if v is None else (v, next(pointers)) for v in node.inputs]
        operands = [
            None if g is None else self.operand(states, *g, o)
            for g, o in zip(given, node.call.operands, strict=True)
        ]
        results = OPS[node.call.op].reference(*operands, **node.call.attributes)
        results = results if isinstance(results, tuple) else (results,)
        for result in results:
            if isinstance(result, KVState):
                (state,) = (v for v in node.inputs if v in states)
                states[state] = result
        arrays = [r for r in results if not isinstance(r, KVState)]
        for array, operand, pointer in zip(arrays, node.call.results, pointers, strict=True):
            self.write(pointer, operand, array)

    def operand(
        self, states: dict[Value, KVState], value: Value, pointer: Pointer, operand: Operand | KVOperand
    ) -> Any:
        if value in self.weights:
            assert self.plan.buffers[pointer.buffer].kind == "weights"
            return self.weights[value]
        if isinstance(operand, KVOperand):
            assert self.plan.buffers[pointer.buffer].name == value.name
            return states[value]
        return self.read(pointer, operand)

    def rows(self, pointer: Pointer, operand: Operand, row_bytes: int) -> Any:
        """The value's bytes (rows, row_bytes of data)."""
        first = operand.type.shape[0] if operand.type.shape else 1
        count = self.dims.get(first) or int(first)
        stride = activation_row_bytes(operand.width) if operand.type.dtype == "a8" else 4 * operand.stride
        memory = self.memory[pointer.buffer][pointer.offset :]
        assert (count - 1) * stride + row_bytes <= memory.size
        return np.lib.stride_tricks.as_strided(memory, (count, row_bytes), (stride, 1))

    def read(self, pointer: Pointer, operand: Operand) -> Any:
        shape = [self.dims.get(d) or int(d) for d in operand.type.shape]
        width = operand.width
        if operand.type.dtype == "a8":
            raw = self.rows(pointer, operand, width + width // 8).copy()
            codes = raw[:, :width].view(np.int8).reshape(len(raw), -1, 32)
            return (codes * raw[:, width:].copy().view(np.float32)[..., None]).reshape(shape)
        raw = self.rows(pointer, operand, 4 * width).copy()
        return raw.view({"f32": np.float32, "i32": np.int32}[operand.type.dtype]).reshape(shape)

    def write(self, pointer: Pointer, operand: Operand, array: Any) -> None:
        width = operand.width
        array = array.reshape(len(array), width)
        if operand.type.dtype == "a8":
            groups = array.reshape(len(array), -1, 32)
            scales = np.abs(groups).max(axis=2) / np.float32(127)
            codes = np.rint(groups / np.maximum(scales, 1e-30)[..., None]).astype(np.int8)
            parts = [codes.reshape(len(array), -1).view(np.uint8), scales.astype(np.float32).view(np.uint8)]
            self.rows(pointer, operand, width + width // 8)[:] = np.concatenate(parts, axis=1)
        else:
            # Kernels may write the padding too.
            padded = np.full((len(array), operand.stride), np.nan, np.float32)
            padded[:, :width] = array
            self.rows(pointer, operand, 4 * operand.stride)[:] = padded.view(np.uint8)


@pytest.mark.parametrize(
    "name",
    [
        "archs/llama-dense",
        "archs/gemma2-dense",
        "archs/phi3-dense",
        "archs/olmo2-dense",
        "archs/qwen3-dense",
        "archs/granite-dense",
        "quants/llama-dense-Q8_0",
    ],
)
def test_a_plan_computes_the_model(name: str, conformance: pathlib.Path) -> None:
    model = load_model(conformance / f"{name}.gguf", context=128)
    graphs, plan = compiled(model, max_tokens=8, max_rows=4)
    replay = Replay(model, graphs, plan)
    tokens = np.arange(14) * 5 % 100
    expected = Interpreter(run_passes(model.graph, tokens=None, context=128), model.weights).run(tokens)[0]
    found = [
        replay.run("prefill", tokens[:8], rows=1),
        replay.run("decode", tokens[8:9], rows=1),
        replay.run("prefill", tokens[9:13], rows=3),
        replay.run("decode", tokens[13:], rows=1),
    ]
    wanted = expected[[7, 8, 10, 11, 12, 13]]
    error = np.mean(np.square(np.concatenate(found) - wanted)) / np.var(wanted)
    assert error < 1e-5  # keys and values are rounded to f16


@pytest.mark.parametrize("name", ["archs/gemma2-dense", "archs/phi3-dense", "quants/llama-dense-Q8_0"])
def test_a_batch_computes_each_of_its_sequences(name: str, conformance: pathlib.Path) -> None:
    model = load_model(conformance / f"{name}.gguf", context=128)
    graphs, plan = compiled(model, max_tokens=8, max_rows=4)
    assert kernel_calls(graphs.values()) == kernel_calls([graphs["decode"], graphs["prefill"]])
    batched, alone = Replay(model, graphs, plan), Replay(model, graphs, plan)
    for sequence, length in enumerate((7, 1, 3)):
        for replay in (batched, alone):
            replay.run("prefill", np.arange(length) * 11 % 100 + sequence, rows=1, sequence=sequence)
    for tokens in ([5, 6, 7], [8, 9], [3], [10, 11, 12]):
        expected = np.array([alone.run("decode", [t], rows=1, sequence=i)[0] for i, t in enumerate(tokens)])
        # Sums of more rows may be ordered otherwise, and then int8 codes be rounded the other way.
        error = np.square(batched.run_batch(tokens) - expected).mean(axis=1) / expected.var(axis=1)
        assert error.max() < 1e-3
    assert [batched.cached(sequence) for sequence in range(SLOTS)] == [11, 4, 5]


def test_slots_of_a_batch_do_not_wait_for_each_other(conformance: pathlib.Path) -> None:
    model = load_model(conformance / "quants/llama-dense-Q8_0.gguf", context=128)
    _, plan = compiled(model, max_tokens=64, max_rows=1)
    waits = {entry.name: sum(launch.barrier for launch in entry.launches) for entry in plan.entries}
    assert waits["batch"] == waits["decode"]


def test_projections_of_the_same_input_are_one_launch_or_run_together(conformance: pathlib.Path) -> None:
    model = load_model(conformance / "quants/gemma3-dense-Q4_K_M.gguf", context=128)
    graphs, plan = compiled(model, max_tokens=64, max_rows=1)
    for entry in plan.entries:
        ops = [node.call.op for node in graphs[entry.name].nodes]
        group = groups([launch.barrier for launch in entry.launches])
        norms = [i for i, op in enumerate(ops) if op == "rms_norm_quantize"]
        assert ops[norms[0] + 1 : norms[0] + 3] == ["linear", "rope_table"]  # q, k and v
        assert ops[norms[1] + 1 : norms[1] + 3] == ["linear", "glu_quantize"]  # gate and up
        # In the second layer, v has more bits than q and k.
        assert ops[norms[2] + 1 : norms[2] + 3] == ["linear", "linear"]
        assert group[norms[2]] < group[norms[2] + 1] == group[norms[2] + 2] < group[norms[2] + 3]
        # norm, qkv, rope, attention in two steps, output, norm, norm, gate and up, glu, down, norm.
        ends = {"decode": 3, "prefill": 4, "batch": 3}[entry.name]  # embedding, select_rows, norm, head
        assert group[-1] + 1 == 12 * model.facts.layers + ends


def test_products_of_many_rows_come_in_pieces(conformance: pathlib.Path) -> None:
    """One for 96 rows of weights."""
    model = load_model(conformance / "quants/llama-dense-Q8_0.gguf", context=128)
    graphs, plan = compiled(model, max_tokens=64, max_rows=1)
    seen = set()
    for entry in plan.entries:
        for node, launch in zip(graphs[entry.name].nodes, entry.launches, strict=True):
            rows = node.call.results[0].width if node.call.op == "linear" else 0
            many = not node.call.results or not node.call.results[0].single_row
            seen.add(launch.pieces)
            assert launch.pieces == (64 if node.call.op == "attention_rows" else rows // 96 * many)
    assert seen == {0, 1, 2, 5, 64}


def test_the_residual_stream_stays_in_one_place(conformance: pathlib.Path) -> None:
    model = load_model(conformance / "archs/llama-dense.gguf", context=128)
    graphs, _ = compiled(model, max_tokens=64, max_rows=1)
    memory = plan_memory(graphs["prefill"])
    stream = [n.outputs[0] for n in graphs["prefill"].nodes if n.call.op == "embedding"]
    stream += [n.outputs[0] for n in graphs["prefill"].nodes if n.call.op == "linear" and n.inputs[3]]
    assert len(stream) == 1 + 2 * model.facts.layers
    # The last layer goes on with the wanted rows only.
    assert [value.shape[0] for value in stream[-2:]] == [R, R]
    assert len({memory.offsets[value] for value in stream[:-2]}) == 1
    assert len({memory.offsets[value] for value in stream[-2:]}) == 1


@pytest.mark.parametrize(
    ("operands", "returned"),
    [
        ("%0, @half, -, %1", "%2, %1"),  # needed later
        ("%1, @half, -, %1", "%2, %0"),  # read as x, too
        ("%0, @half, -, @x", "%2, %1"),  # not in the arena
    ],
)
def test_a_residual_in_use_is_not_overwritten(operands: str, returned: str) -> None:
    a, b = returned.split(", ")
    graph = parse(f"""\
graph g
input x: f32[T, 64]
weight half: F16[64, 64]
%0: f32[T, 64] = scale(@x) {{'value': 1.0}}
%1: f32[T, 64] = scale(@x) {{'value': 2.0}}
%2: f32[T, 64] = linear({operands}) {{'alpha': 1.0}}
%3: f32[T, 64] = add({a}, {b})
return %3
""")
    kernels = lower(graph, name="prefill", context=64, max_tokens=4, max_rows=1)
    offsets = {value.name: at for value, at in plan_memory(kernels).offsets.items()}
    assert len({offsets["0"], offsets["1"], offsets["2"]}) == 3


def test_the_arena_holds_what_is_in_use_at_once_and_little_more(conformance: pathlib.Path) -> None:
    model = load_model(conformance / "archs/llama-dense.gguf", context=128)
    graphs, plan = compiled(model, max_tokens=64, max_rows=1)
    row = 4 * model.facts.width
    # The stream, its norm, q, k, v (k and v half as wide), cos and sin.
    together = 64 * (row + row + 2 * row + 2 * 4 * model.facts.head_dim // 2)
    assert together <= plan_memory(graphs["prefill"]).peak <= 1.25 * together
    assert plan.buffers[1].bytes == max(plan_memory(g).peak for g in graphs.values())
