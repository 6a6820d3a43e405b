"""Attention on a GPU: which keys and query rows a block takes, and how its units share them.

Many tokens: the units of a block have different rows, and share every tile. One token: they have the same
rows, and tiles of their own, each a part of the block's part of the keys; in the end they meet and merge.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from tvm import tirx

from zllmc.codegen.attention_gpu_shape import AttentionShape
from zllmc.codegen.attention_tile import Rows, Tile, over_lanes
from zllmc.codegen.rows import pieces, row_count, share, signature
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    barrier,
    bind,
    block_array,
    broadcast,
    cast,
    const,
    serial,
    when,
)
from zllmc.codegen.vector_math import exp2, fma
from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.attention_ops import SPLIT_KEYS
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, Operand
from zllmc.zllm_ir.plan import CONTROL_CACHED


def attention_rows(call: KernelCall, shape: AttentionShape, name: str) -> Any:
    """The kernel of `attention_rows`: q (T, H, E) and a KV state → f32 (T, H·E).

    A block takes `units · rows` rows of one kv head at a time. Those that see the most keys come first.
    """
    (result,) = call.results
    kv_heads, group, width = shape.cache.type.kv_heads, shape.group, shape.head_dim
    rows, units = shape.rows, shape.units
    with Kernel(name, **signature(call)) as k:
        control, q, state, out = k.arguments
        tokens, cached = row_count(shape.q, control), bind(control.load(CONTROL_CACHED))
        unit, block, blocks = _place(k, units)
        queries = block_array("float32", units * rows * width)
        weights = block_array("float32", units * shape.weights)
        memory = block_array("uint32", shape.tile_bytes // 4)
        mine = Rows(shape, queries, bind(unit * (rows * width)), weights, bind(unit * shape.weights))
        in_head = bind(tokens * group)
        per_head = bind(tirx.truncdiv(in_head + (units * rows - 1), units * rows))
        with serial(0, tirx.truncdiv(per_head * kv_heads - 1 - block + blocks, blocks)) as round:
            item = bind(block + round * blocks)
            kv_head = bind(tirx.truncmod(item, kv_heads))
            first = bind((per_head - 1 - tirx.truncdiv(item, kv_heads)) * (units * rows))
            last = bind(tirx.min(first + units * rows, in_head) - 1)

            def token_of(row: Expr) -> Expr:
                return bind(tirx.truncdiv(row, group))

            def home(operand: Operand, row: Expr, kv_head: Expr = kv_head) -> Expr:
                token = token_of(row)
                return bind(token * operand.stride + (kv_head * group + row - token * group) * width)

            # Spare rows repeat the last.
            indices = [bind(tirx.min(first + unit * rows + i, last)) for i in range(rows)]
            high = [bind(cached + token_of(row) + 1) for row in indices]
            for i, row in enumerate(indices):
                mine.put_query(i, q, home(shape.q, row))
            mine.start(high)
            begin = shape.low_of(cached + token_of(first) + 1)
            begin = bind(tirx.truncdiv(begin, KEY_BLOCK) * KEY_BLOCK)
            end = bind(cached + token_of(last) + 1)
            tile = Tile(shape, state, memory, kv_head, unit, units)
            with serial(0, tirx.truncdiv(end - begin + (shape.keys - 1), shape.keys)) as step:
                tile.begin(begin + step * shape.keys, end)
                mine.attend(tile)
            for i in range(rows):
                with when(first + unit * rows + i <= last):
                    at = home(result, bind(first + unit * rows + i))
                    inverse = bind(const(1.0, "float32") / over_lanes("unit_add", mine.sum[i].get()))
                    for (offset, n), output in zip(mine.places, mine.output[i], strict=True):
                        out.store(at + offset, output.get() * broadcast(inverse, n))
    return k.function


def attention_partial(call: KernelCall, shape: AttentionShape, name: str) -> Any:
    """The kernel of `attention_partial`: q (1, H, E) and a KV state → f32 (H, splits · (E + 2)).

    A block takes a part of one kv head's keys, for `rows` of the query heads that share it; its units take
    tiles in turn. Few keys leave parts empty: the units of all blocks share those.
    """
    (result,) = call.results
    splits = call.attributes["splits"]
    kv_heads, group, width = shape.cache.type.kv_heads, shape.group, shape.head_dim
    rows, units = shape.rows, shape.units
    sets = -(-group // rows)  # of rows
    with Kernel(name, **signature(call)) as k:
        control, q, state, out = k.arguments
        unit, block, blocks = _place(k, units)
        total = bind(control.load(CONTROL_CACHED) + 1)
        start = bind(tirx.truncdiv(shape.low_of(total), KEY_BLOCK) * KEY_BLOCK)
        per_split = tirx.truncdiv(total - start + (splits - 1), splits)
        part = bind(tirx.truncdiv(per_split + (SPLIT_KEYS - 1), SPLIT_KEYS) * SPLIT_KEYS)
        parts = bind(tirx.truncdiv(total - start + (part - 1), part))  # those with keys

        queries = block_array("float32", rows * width)
        weights = block_array("float32", units * shape.weights)
        memory = block_array("uint32", units * shape.tile_bytes // 4)
        met = block_array("float32", 2 * units * rows)  # maxima, then sums: [row][unit]
        own = memory.from_(cast(unit, "int64") * (shape.tile_bytes // 4))
        mine = Rows(shape, queries, const(0, "int32"), weights, bind(unit * shape.weights))

        with serial(0, tirx.truncdiv(kv_heads * sets * parts - 1 - block + blocks, blocks)) as round:
            item = bind(block + round * blocks)
            split = bind(tirx.truncmod(item, parts))
            kv_head = bind(tirx.truncdiv(item, parts * sets))
            first = bind((tirx.truncdiv(item, parts) - kv_head * sets) * rows)
            begin = bind(start + split * part)
            end = bind(tirx.min(begin + part, total))
            heads = [bind(kv_head * group + tirx.min(first + i, group - 1)) for i in range(rows)]
            for i, head in enumerate(heads):
                with when(tirx.EQ(unit, i % units)):
                    mine.put_query(i, q, bind(head * width))
            mine.start([total] * rows)
            barrier()
            tile = Tile(shape, state, own, kv_head, const(0, "int32"), 1)
            tiles = bind(tirx.truncdiv(end - begin + (shape.keys - 1), shape.keys))
            with serial(0, tirx.truncdiv(tiles - 1 - unit + units, units)) as step:
                tile.begin(begin + (step * units + unit) * shape.keys, end)
                mine.attend(tile)
            tile.meet()
            for i in range(rows):
                for (offset, _), output in zip(mine.places, mine.output[i], strict=True):
                    own.view("float32").store(i * width + offset, output.get())
                met.store(i * units + unit, mine.maximum[i].get())
                met.store((rows + i) * units + unit, over_lanes("unit_add", mine.sum[i].get()))
            barrier()
            _merge_units(shape, unit, memory.view("float32"), met, first, kv_head, result, split, splits, out)
            barrier()

        zero = const(0.0, "float32")
        empty = bind(tirx.max(splits - parts, 1))
        first, last = share(k, kv_heads * group * (splits - parts))
        with serial(first, last) as number:
            head = bind(tirx.truncdiv(number, empty))
            split = bind(parts + number - head * empty)
            at = bind(head * result.stride)
            for offset, n in mine.places:
                out.store(at + split * width + offset, broadcast(zero, n))
            out.store(at + splits * width + split, const(-math.inf, "float32"))
            out.store(at + splits * (width + 1) + split, zero)
    return k.function


def _merge_units(
    shape: AttentionShape,
    unit: Expr,
    outputs: Memory,
    met: Memory,
    first: Expr,
    kv_head: Expr,
    result: Operand,
    split: Expr,
    splits: int,
    out: Memory,
) -> None:
    """The block's units' outputs, put together as `attention_merge` does: a row is one unit's work."""
    width, units, rows = shape.head_dim, shape.units, shape.rows
    with serial(0, tirx.truncdiv(rows - 1 - unit + units, units)) as turn:
        row = bind(turn * units + unit)
        with when(first + row < shape.group):
            maxima = [bind(met.load(row * units + u)) for u in range(units)]
            maximum = bind(functools.reduce(tirx.max, maxima))
            factors = [bind(exp2(m - maximum)) for m in maxima]
            sums = [met.load((rows + row) * units + u) * f for u, f in enumerate(factors)]
            at = bind((kv_head * shape.group + first + row) * result.stride)
            for offset, n in pieces(width, LANES):
                total = const(0.0, "float32", n)
                for u, factor in enumerate(factors):
                    part = outputs.load(u * (shape.tile_bytes // 4) + row * width + offset, n)
                    total = fma(broadcast(factor, n), part, total)
                out.store(at + split * width + offset, total)
            out.store(at + splits * width + split, maximum)
            out.store(at + splits * (width + 1) + split, functools.reduce(lambda a, b: a + b, sums))


def _place(k: Kernel, units: int) -> tuple[Expr, Expr, Expr]:
    """This unit within its block, the block, and how many there are."""
    unit, block = bind(tirx.truncmod(k.thread, units)), bind(tirx.truncdiv(k.thread, units))
    return unit, block, tirx.truncdiv(k.threads, units)
