"""The weight file: where each weight lies in it, and the packing of a model's weights for a target."""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from zllmc.codegen.build import Job
from zllmc.codegen.packing import ROW_PAD, PackedLayout, layout_of, pack_call, pack_rows
from zllmc.frontends.model import Model
from zllmc.runtime.artifact import Checksum
from zllmc.runtime.cpu import load_objects, native_function
from zllmc.runtime.processors import physical_cores
from zllmc.targets import Target
from zllmc.targets.cpu import detect
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, Bytes, decode, row_bytes
from zllmc.zllm_ir.kernel_graph import symbol
from zllmc.zllm_ir.types import TensorType

Progress = Callable[[str, int, int], None]  # stage, done, total
Pack = Callable[[PackedLayout, Bytes], Bytes]  # like `pack_rows`
# Where in the file, the model's bytes, and what makes the file's bytes of them.
Piece = tuple[int, Bytes, Callable[[Bytes], Bytes]]

_PACK_ELEMENTS = 1 << 23  # packed at a time by a thread: bounds the memory that packing takes


def place_weights(
    model: Model, stored: Mapping[str, TensorType], device: Target
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
        end += size  # a multiple of a cache line; joined weights have nothing between them
    return offsets, end


def pack_jobs(stored: Mapping[str, TensorType], device: Target) -> dict[str, Job]:
    """The kernels that pack these weights, by format: for this machine, whatever `device` is. Empty where it
    is none of the targets."""
    try:
        host = detect()
    except ZllmcError:
        return {}
    formats = dict.fromkeys(type.dtype for type in stored.values() if type.dtype != "f32")
    return {format: (pack_call(format, device.lanes), host) for format in formats}


def load_packers(jobs: Mapping[str, Job], objects: Mapping[Job, bytes]) -> dict[str, Pack]:
    """The functions in the objects of `pack_jobs`."""
    if not jobs:
        return {}
    module = load_objects([objects[job] for job in jobs.values()])
    return {
        format: partial(_pack, native_function(module, symbol(call))) for format, (call, _) in jobs.items()
    }


def _pack(kernel: Any, layout: PackedLayout, raw: Bytes) -> Bytes:
    if rest := -len(raw) % layout.row_pad:
        raw = np.concatenate([raw, np.zeros((rest, raw.shape[1]), np.uint8)])
    groups = len(raw) // layout.lanes
    packed: Bytes = np.empty((groups, layout.group_bytes), np.uint8)
    control = np.array([groups, layout.columns // layout.format.block], np.int32)
    kernel(0, 1, *(ctypes.c_void_p(array.ctypes.data) for array in (control, raw, packed)))
    return packed


def write_weights(
    path: Path,
    model: Model,
    stored: Mapping[str, TensorType],
    offsets: Mapping[str, tuple[int, int]],
    size: int,
    device: Target,
    packers: Mapping[str, Pack],
    progress: Progress,
) -> list[Checksum]:
    """Pack all weights into `path`, on all cores, a piece at a time on each; the checksums of the pieces.

    `offsets` and `size` are those of `place_weights`. A format that has no packer is packed in numpy.
    """
    total = sum(size for _, size in offsets.values())
    done = 0
    checksums = {}
    with path.open("wb") as file:
        file.truncate(size)
        pool = ThreadPoolExecutor(physical_cores())
        try:
            writing = [
                pool.submit(_write, file.fileno(), *piece)
                for name, type in stored.items()
                for piece in _pieces(
                    model, name, type, offsets[name][0], device, packers.get(type.dtype, pack_rows)
                )
            ]
            for future in as_completed(writing):
                start, checksum = future.result()
                checksums[start] = checksum
                done += checksum.bytes
                progress("weights", done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return [checksums[start] for start in sorted(checksums)]


def _write(file: int, start: int, raw: Bytes, make: Callable[[Bytes], Bytes]) -> tuple[int, Checksum]:
    """Write a piece in its place, and say what should now be there."""
    data = make(raw)
    _unmap(raw)
    left, offset = data.data.cast("B"), start
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
    return start, Checksum(data.nbytes, zlib.crc32(data.data))


def _unmap(raw: Bytes) -> None:
    """Let go of the pages of a mapped file, or they count as this process's memory. They come back from the
    system's cache if they are read again."""
    base: Any = raw
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        start = raw.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
        aligned = start // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, aligned, start + raw.nbytes - aligned)


def _pieces(
    model: Model, name: str, type: TensorType, offset: int, device: Target, pack: Pack
) -> Iterator[Piece]:
    raw = model.weights[name]
    if type.dtype == "f32":
        formats = {w.name: w.type.dtype for w in model.graph.weights if isinstance(w.type, TensorType)}
        yield offset, raw, partial(_vector, formats[name], _shape(type))
        return
    layout = _layout(type, device)
    matrix = raw.reshape(layout.rows, row_bytes(layout.format, layout.columns))
    step = max(1, _PACK_ELEMENTS // layout.columns // layout.row_pad) * layout.row_pad
    for start in range(0, layout.rows, step):
        at = offset + start // layout.lanes * layout.group_bytes
        yield at, matrix[start : start + step], partial(pack, layout)


def _vector(format: str, shape: tuple[int, ...], raw: Bytes) -> Bytes:
    fmt = FORMATS[format]
    numbers = decode(fmt, raw.reshape(-1, row_bytes(fmt, shape[-1]))).reshape(-1)
    return np.pad(numbers, (0, -len(numbers) % ROW_PAD)).view(np.uint8)


def _shape(type: TensorType) -> tuple[int, ...]:
    return tuple(int(d) for d in type.shape)


def _layout(type: TensorType, device: Target) -> PackedLayout:
    return layout_of(type.dtype, _shape(type), device.lanes)
