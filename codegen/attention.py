"""Attention of a pass's tokens over the KV cache."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from zllmc.codegen.attention_cache import Head
from zllmc.codegen.attention_pairs import has_pairs
from zllmc.codegen.attention_shape import Shape, Tiles, check, register_rows
from zllmc.codegen.attention_unit import Unit
from zllmc.codegen.rows import row_count, signature
from zllmc.codegen.tir import Expr, Kernel, bind, broadcast, const, hold, serial
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KernelCall, KVOperand, Operand
from zllmc.zllm_ir.plan import CONTROL_CACHED

UNITS = 64  # of work in a short prompt: as many threads as can share it, twice


def attention_rows(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The kernel of `attention_rows`: q (T, H, E) and a KV state → f32 (T, H·E).

    Units of rows of one kv head go round the threads; every other head counts them backwards, since later
    ones see more keys.
    """
    q_operand, cache = call.operands
    if not isinstance(q_operand, Operand) or not isinstance(cache, KVOperand):
        raise IRError("attention_rows takes queries and a state")
    heads, head_dim = check(q_operand, cache)
    attributes = call.attributes
    rows, pairs = register_rows(target), has_pairs(target, cache)
    # Bringing keys and values into pairs takes as long as a dozen rows do: many share it.
    most, room = (8, 64 << 10) if pairs else (4, 24 << 10)
    shape = Shape(
        target,
        cache,
        rows=rows * max(1, min(most, room // (2 * 4 * head_dim * rows))),
        tile_rows=rows,
        scale=attributes["scale"],
        softcap=attributes["softcap"],
        pairs=pairs,
    )
    kv_heads, group, window = cache.type.kv_heads, heads // cache.type.kv_heads, attributes["window"]

    with Kernel(name, **signature(call)) as k:
        control, q, memory, out = k.arguments
        tokens, cached = row_count(q_operand, control), bind(control.load(CONTROL_CACHED))
        rows_per_head = tokens * group
        per_unit: Expr = shape.rows
        if pairs:  # fewer where there wouldn't be enough units, whatever the threads: so goes what is rounded
            wanted = hold(tirx.truncdiv(rows_per_head * kv_heads, UNITS * rows) + 1)
            per_unit = hold(tirx.min(wanted * rows, shape.rows))
        units_per_head = hold(tirx.truncdiv(rows_per_head + per_unit - 1, per_unit))
        unit = Unit(shape)
        units = bind(units_per_head * kv_heads)
        with serial(0, tirx.truncdiv(units - k.thread + k.threads - 1, k.threads)) as turn:
            number = hold(k.thread + turn * k.threads)
            kv_head = hold(tirx.truncdiv(number, units_per_head))
            place = bind(number - kv_head * units_per_head)
            backwards = tirx.EQ(tirx.truncmod(kv_head, 2), 1)
            first = hold(tirx.Select(backwards, units_per_head - 1 - place, place) * per_unit)
            count = hold(tirx.min(per_unit, rows_per_head - first))
            tiles = hold(tirx.truncdiv(count + (rows - 1), rows))

            with serial(0, tiles * rows) as i:
                row = hold(tirx.min(first + i, rows_per_head - 1))  # a last tile's spare rows repeat the last
                token = hold(tirx.truncdiv(row, group))
                high = bind(cached + token + 1)
                low = tirx.max(high - window, 0) if window else 0
                at = token * q_operand.stride + (kv_head * group + row - token * group) * head_dim
                unit.start(i, q, at, low, high)

            begin = hold(tirx.truncdiv(unit.low.load(0), KEY_BLOCK) * KEY_BLOCK)
            unit.attend(
                Head(cache, memory, kv_head, shape.lanes),
                begin,
                unit.high.load(count - 1),
                [Tiles(0, rows, tiles)],
            )

            with serial(0, count) as i:
                token = hold(tirx.truncdiv(first + i, group))
                at = bind(
                    token * call.results[0].stride + (kv_head * group + first + i - token * group) * head_dim
                )
                inverse = bind(broadcast(const(1.0, "float32") / unit.total(i), shape.lanes))
                with serial(0, head_dim // shape.lanes) as v:
                    o = unit.output.load(i * head_dim + v * shape.lanes, shape.lanes)
                    out.store(at + v * shape.lanes, o * inverse)
    return k.function
