"""Runs an artifact's launches one by one and reads operands back from memory, as the references take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc import targets
from zllmc.frontends.model import load_model
from zllmc.passes.pipeline import lower_entries
from zllmc.runtime.artifact import Artifact
from zllmc.runtime.devices import Mode, open_device
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.fused_ops import GROUP, is_a8
from zllmc.zllm_ir.interpreter import KVState, bind_weight
from zllmc.zllm_ir.kernel_graph import (
    KEY_BLOCK,
    QUAD,
    KernelGraph,
    KernelNode,
    KVOperand,
    Operand,
    activation_row_bytes,
    symbol,
)
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import (
    CONTROL_CACHED,
    CONTROL_FIRST_ROW,
    CONTROL_TOKENS,
    CONTROL_WORDS,
    EntryPoint,
    Launch,
    Pointer,
)
from zllmc.zllm_ir.types import R, T, fixed

Array = NDArray[Any]


class Machine:
    """An artifact's kernels and memory, with the kernel graphs that say what each launch means.

    Raises ZllmcError if `source`, compiled by this version, doesn't give the artifact's launches.
    """

    def __init__(
        self, artifact: Artifact, source: Path, threads: int | None = None, device: Mode | None = None
    ) -> None:
        manifest = artifact.manifest
        model = load_model(source, context=manifest.context, kv=manifest.kv)
        self.graphs = lower_entries(
            model.graph,
            targets.parse(manifest.target),
            context=manifest.context,
            max_batch=artifact.plan.max_batch,
        )
        self.entries = {entry.name: entry for entry in artifact.plan.entries}
        self.weights = model.weights
        self.names = {buffer.name: number for number, buffer in enumerate(artifact.plan.buffers)}
        for name, graph in self.graphs.items():
            made = [symbol(node.call) for node in graph.nodes]
            if made != [launch.kernel for launch in self.entries[name].launches]:
                raise ZllmcError(
                    f"{artifact.path} wasn't compiled from {source} by this zllmc: compile the model again."
                )
        self.device = open_device(artifact, threads, device)
        self.buffers = [
            self.device.load(artifact.weights)
            if buffer.kind == "weights"
            else self.device.allocate(max(buffer.bytes, 1))
            for buffer in artifact.plan.buffers
        ]

    def close(self) -> None:
        self.device.close()

    def launches(self, name: str, ids: list[int], cached: int) -> Iterator[Step]:
        """The launches of a pass over `ids` after `cached` tokens, with as many rows of logits as fit.

        Run each before asking for the next.
        """
        entry, graph = self.entries[name], self.graphs[name]
        first_row = max(0, len(ids) - entry.max_rows)
        control = np.zeros(CONTROL_WORDS, np.int32)
        control[[CONTROL_TOKENS, CONTROL_CACHED, CONTROL_FIRST_ROW]] = len(ids), cached, first_row
        positions = range(cached, cached + len(ids))
        for buffer, words in (("tokens", ids), ("positions", positions), ("control", control)):
            self.device.write(self.buffers[self.names[buffer]], np.asarray(words, np.int32))
        for node, launch in zip(graph.nodes, entry.launches, strict=True):
            yield Step(self, entry, graph, node, launch, len(ids), len(ids) - first_row, cached)

    def read(self, place: Pointer, dtype: Any, shape: tuple[int, ...], offset: int = 0) -> Array:
        """What memory holds `offset` bytes after `place`."""
        array: Array = self.device.read(self.buffers[place.buffer], dtype, shape, place.offset + offset)
        return array


@dataclass(frozen=True)
class Step:
    """One launch of a pass of `tokens` tokens after `cached` ones, with `rows` rows of logits."""

    machine: Machine
    entry: EntryPoint
    graph: KernelGraph
    node: KernelNode
    launch: Launch
    tokens: int
    rows: int
    cached: int

    @property
    def kernel(self) -> str:
        return self.launch.kernel

    def run(self) -> None:
        alone = EntryPoint(self.kernel, self.entry.max_tokens, self.entry.max_rows, (self.launch,))
        self.machine.device.record(alone, self.machine.buffers).replay(self.tokens)

    def reference(self) -> list[Array]:
        """What the results should be, given what memory holds now; call it before `run`."""
        op = OPS[self.node.call.op]
        pointers = iter(self._pointers())
        operands: list[Any] = []
        for value, operand in zip(self.node.inputs, self.node.call.operands, strict=True):
            if value is None or operand is None:
                operands.append(None)
                continue
            place = next(pointers)
            if value in self.graph.weights:
                parts = [bind_weight(v, self.machine.weights[v.name]) for v in self.graph.parts(value)]
                operands.append(parts[0] if len(parts) == 1 else np.concatenate([part[:] for part in parts]))
            elif isinstance(operand, KVOperand):
                operands.append(self._state(operand, place, self.cached + (0 if op.writes else self.tokens)))
            else:
                operands.append(self._tensor(operand, place))
        results = op.reference(*operands, **self.node.call.attributes)
        flat: list[Array] = []
        for result in results if isinstance(results, tuple) else (results,):
            flat += [result.keys, result.values] if isinstance(result, KVState) else [result]
        return flat

    def results(self) -> list[tuple[str, Array]]:
        """What memory holds of each result, and how it is stored; a written state last."""
        call = self.node.call
        present = [operand for operand in call.operands if operand is not None]
        pointers = self._pointers()
        read = [
            (operand.type.dtype, self._tensor(operand, place))
            for operand, place in zip(call.results, pointers[len(present) :], strict=True)
        ]
        if OPS[call.op].writes:
            operand, place = next(
                (o, p) for o, p in zip(present, pointers, strict=False) if isinstance(o, KVOperand)
            )
            state = self._state(operand, place, self.cached + self.tokens)
            read += [(operand.type.storage, state.keys), (operand.type.storage, state.values)]
        return read

    def _pointers(self) -> list[Pointer]:
        """Of the present operands and then the results; the first argument is the control block."""
        return [argument for argument in self.launch.args[1:] if isinstance(argument, Pointer)]

    def _tensor(self, operand: Operand, place: Pointer) -> Array:
        dtype, shape = operand.type.dtype, operand.type.shape
        if not shape:
            return np.int32(self.machine.read(place, np.int32, (1,))[0])  # type: ignore[return-value]
        rows = int(fixed(shape[0], {T: self.tokens, R: self.rows}))
        inner = tuple(int(d) for d in shape[1:])
        width = prod(inner)
        if is_a8(dtype):
            raw = self.machine.read(place, np.uint8, (rows, activation_row_bytes(width)))
            codes = raw[:, :width].view(np.int8).astype(np.float32)
            scales = raw[:, width : width + 4 * (width // GROUP)].copy().view(np.float32)
            return codes * np.repeat(scales, GROUP, axis=1)
        number = np.int32 if dtype == "i32" else np.float32
        words = self.machine.read(place, number, ((rows - 1) * operand.stride + width,))
        starts = np.arange(rows)[:, None] * operand.stride
        values: Array = words[starts + np.arange(width)].reshape(rows, *inner)
        return values

    def _state(self, operand: KVOperand, place: Pointer, tokens: int) -> KVState:
        """The first `tokens` keys and values, (tokens, kv_heads, head_dim) each."""
        kind, layout, capacity = operand.type, operand.layout, operand.capacity
        heads, width = kind.kv_heads, kind.head_dim

        def columns(offset: int, count: int) -> Array:
            """Those of a key block side by side, in f16."""
            return read(offset, "f2", (count, KEY_BLOCK), (1, 0))

        def rows(offset: int, count: int) -> Array:
            return read(offset, "f2", (KEY_BLOCK, count), (0, 1))

        def read(offset: int, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> Array:
            """What every block of 16 tokens has as `shape`, whose axes come in that order: tokens first."""
            blocks = self.machine.read(place, dtype, (heads, capacity // KEY_BLOCK, *shape), offset)
            blocks = blocks[:, : -(-tokens // KEY_BLOCK)].transpose(0, 1, *(2 + axis for axis in order))
            array = blocks.reshape(heads, blocks.shape[1] * KEY_BLOCK, prod(shape) // KEY_BLOCK)
            return array[:, :tokens].swapaxes(0, 1).astype(np.float32)

        if kind.storage == "f16":
            return KVState(kind, columns(layout.keys, width), rows(layout.values, width))
        keys = read(layout.keys, "i1", (width // QUAD, KEY_BLOCK, QUAD), (1, 0, 2))
        values = read(layout.values, "i1", (KEY_BLOCK // QUAD, width, QUAD), (2, 0, 1))
        scales = columns(layout.key_scales, layout.groups), rows(layout.value_scales, layout.groups)
        keys, values = (
            codes * np.repeat(scale, 64, axis=2)[..., :width]
            for codes, scale in zip((keys, values), scales, strict=True)
        )
        return KVState(kind, keys, values)
