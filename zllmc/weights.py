"""The weight file: where each weight lies in it, and the packing of a model's weights for a target."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zllmc.codegen.packing import ROW_PAD, PackedLayout, layout_of, pack_rows
from zllmc.frontends.model import Model
from zllmc.targets.cpu import CpuTarget
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode, row_bytes
from zllmc.zllm_ir.types import TensorType

Progress = Callable[[str, int, int], None]  # stage, done, total
Piece = tuple[int, Callable[[], NDArray[np.uint8]]]  # where in the file, and what makes its bytes

_PACK_ELEMENTS = 1 << 22  # packed at a time by a thread: bounds the memory that packing takes
_PAGE = 4096


def place_weights(
    model: Model, stored: Mapping[str, TensorType], device: CpuTarget
) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each weight lies: (offset, bytes), in order; and the size of the file.

    A weight that kernels read in its block format is packed; the others are vectors, kept as f32. Raises a
    ZllmcError that names the tensor whose format no kernel reads.
    """
    offsets = {}
    end = 0
    for name, type in stored.items():
        if type.dtype == "f32":
            size = 4 * -(-prod(_shape(type)) // ROW_PAD) * ROW_PAD
        else:
            try:
                size = _layout(type, device).nbytes
            except ZllmcError as error:
                raise ZllmcError(f"{model.path}: tensor {name}: {error}") from error
        offsets[name] = (end, size)
        end += -(-size // _PAGE) * _PAGE
    return offsets, end


def write_weights(
    path: Path,
    model: Model,
    stored: Mapping[str, TensorType],
    offsets: Mapping[str, tuple[int, int]],
    device: CpuTarget,
    progress: Progress,
) -> None:
    """Pack all weights into `path`, on all processors, a few pieces in memory at a time."""
    total = sum(size for _, size in offsets.values())
    done = 0
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    pieces = (
        piece
        for name, type in stored.items()
        for piece in _pieces(model, name, type, offsets[name][0], device)
    )
    with path.open("wb") as file, ThreadPoolExecutor(processors) as pool:
        for offset, data in _in_order(pool, pieces, processors):
            file.seek(offset)
            file.write(data.data)
            done += data.nbytes
            progress("weights", done, total)
        last_offset, last_size = list(offsets.values())[-1]
        file.truncate(-(-(last_offset + last_size) // _PAGE) * _PAGE)


def _pieces(model: Model, name: str, type: TensorType, offset: int, device: CpuTarget) -> Iterator[Piece]:
    raw = model.weights[name]
    if type.dtype == "f32":
        formats = {w.name: w.type.dtype for w in model.graph.weights if isinstance(w.type, TensorType)}
        yield offset, partial(_vector, formats[name], _shape(type), raw)
        return
    layout = _layout(type, device)
    matrix = raw.reshape(layout.rows, row_bytes(layout.format, layout.columns))
    step = max(1, _PACK_ELEMENTS // layout.columns // ROW_PAD) * ROW_PAD
    for start in range(0, layout.rows, step):
        at = offset + start // layout.lanes * layout.group_bytes
        yield at, partial(_flat, layout, matrix[start : start + step])


def _in_order(pool: Executor, pieces: Iterable[Piece], ahead: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """The pieces' bytes in order, with `ahead` pieces in the making."""
    pending: deque[tuple[int, Future[NDArray[np.uint8]]]] = deque()
    for offset, make in pieces:
        pending.append((offset, pool.submit(make)))
        if len(pending) > ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for offset, future in pending:
        yield offset, future.result()


def _flat(layout: PackedLayout, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pack_rows(layout, rows).reshape(-1)


def _vector(format: str, shape: tuple[int, ...], raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    fmt = FORMATS[format]
    numbers = decode(fmt, raw.reshape(-1, row_bytes(fmt, shape[-1]))).reshape(-1)
    return np.pad(numbers, (0, -len(numbers) % ROW_PAD)).view(np.uint8)


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(int(d) for d in type.shape)


def _layout(type: TensorType, device: CpuTarget) -> PackedLayout:
    return layout_of(type.dtype, _shape(type), device.lanes)
