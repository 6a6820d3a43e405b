"""The choice of the next token: the largest logits, by vector units for a part each, and one that merges.

A unit holds its candidates in registers, as integers that order as the logits do. Each step takes the largest
of all lanes' best, by two reductions, and puts the candidate that comes after it in its place. How many are
wanted, one or all k, is in the control block: then a greedy round takes no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.rows import share, signature, tensors
from zllmc.codegen.tir import (
    Expr,
    Kernel,
    Memory,
    Register,
    bind,
    bits,
    broadcast,
    const,
    lanes_of,
    llvm,
    local,
    rolled,
    serial,
    when,
)
from zllmc.codegen.vector_math import typed
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.choice_ops import PART
from zllmc.zllm_ir.kernel_graph import KernelCall
from zllmc.zllm_ir.plan import CONTROL_BEST

_INFINITY = 0x7F800000  # the bits of +inf, which are also its key
_MAGNITUDE = 0x7FFFFFFF
_NOTHING = -(2**31)  # a key below all others


def top_k_partial(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """f32 logits (1, V) → f32 (parts, k), i32 (parts, k): see `choice_ops.top_k_partial`."""
    (logits,) = tensors(call)
    parts, k = (int(d) for d in call.results[0].type.shape)
    stride, vocab, lanes = call.results[0].stride, logits.width, target.lanes
    with Kernel(name, **signature(call)) as kernel:
        control, x, values, ids = kernel.arguments
        begin, end = share(kernel, parts)
        with serial(begin, end) as part:
            keys = []
            for offset in range(0, PART, lanes):
                id = bind(T.ramp(part * PART + offset, 1, lanes))
                last = const(vocab - 1, "int32", lanes)
                key = _key(x.load(id if vocab % PART == 0 else tirx.min(id, last)))
                if vocab % PART:
                    key = tirx.Select(id <= last, key, const(_key_of_minus_infinity(), "int32", lanes))
                keys.append(Register("int32", lanes, key))

            def take(step: Expr, key: Expr, place: Expr) -> Expr:
                values.store(part * stride + step, _value(key))
                ids.store(part * stride + step, part * PART + place)
                return const(_NOTHING, "int32")

            _largest(keys, _wanted(control, k), take)
    return kernel.function


def choose(call: KernelCall, target: VectorTarget, name: str) -> Any:
    """The parts of `top_k_partial` → the k largest logits, the next token and its position, and the token
    among those chosen: see `choice_ops.choose`. One unit does it all."""
    given, lanes = tensors(call)[0], target.lanes
    parts, k, stride = int(given.type.shape[0]), given.width, given.stride
    # `position` and `chosen` are written where they were read from.
    with Kernel(name, noalias=False, **signature(call)) as kernel:
        control, values, ids, position, _, top, top_ids, token, next_position, chosen = kernel.arguments
        with when(kernel.thread == 0):
            now = bind(position.load(0))
            starts = range(0, parts, lanes)
            taken = local("int32", lanes * len(starts))  # of each part
            keys = []
            for start in starts:
                taken.store(start, const(0, "int32", lanes))
                part = bind(T.ramp(const(start, "int32"), 1, lanes))
                last = const(parts - 1, "int32", lanes)
                key = _key(values.load(tirx.min(part, last) * const(stride, "int32", lanes)))
                keys.append(
                    Register("int32", lanes, tirx.Select(part <= last, key, const(_NOTHING, "int32", lanes)))
                )
            best, best_id = Register("int32", 1, const(0, "int32")), Register("int32", 1, const(0, "int32"))

            def take(step: Expr, key: Expr, part: Expr) -> Expr:
                index = bind(taken.load(part))
                id = bind(ids.load(part * stride + index))
                with when(step == 0):
                    best.set(key)
                    best_id.set(id)
                top.store(step, _value(key))
                top_ids.store(step, id)
                taken.store(part, index + 1)
                following = tirx.min(index + 1, k - 1)  # a part without more has given all k
                return _key(values.load(part * stride + following))

            _largest(keys, _wanted(control, k), take)
            is_finite = tirx.And(best.get() < _INFINITY, best.get() > _key_of_minus_infinity())
            chosen.store(
                tirx.truncmod(now, call.results[-1].width),
                tirx.Select(is_finite, best_id.get(), const(-1, "int32")),
            )
            token.store(0, best_id.get())
            next_position.store(0, now + 1)
    return kernel.function


def _wanted(control: Memory, k: int) -> Expr:
    """How many of the largest logits the pass is asked for."""
    return bind(tirx.Select(control.load(CONTROL_BEST) == 0, const(k, "int32"), const(1, "int32")))


def _largest(keys: list[Register], count: Expr, take: Callable[[Expr, Expr, Expr], Expr]) -> None:
    """`take(step, key, place)` for the `count` largest keys, of equal ones the lowest place first: element i
    of register j has place j · lanes + i. It gives the key that takes this one's place."""
    lanes = keys[0].lanes
    places = [bind(T.ramp(const(j * lanes, "int32"), 1, lanes)) for j in range(len(keys))]
    lowest = const(_NOTHING, "int32", lanes)
    with rolled(0, count) as step:
        best, at = keys[0].get(), places[0]
        for register, place in zip(keys[1:], places[1:], strict=True):
            key = register.get()
            larger = key > best
            best, at = bind(tirx.Select(larger, key, best)), bind(tirx.Select(larger, place, at))
        key = bind(_max_of_lanes(best))
        # The lowest place is the largest after negation.
        negated = tirx.Select(best == broadcast(key, lanes), const(0, "int32", lanes) - at, lowest)
        place = bind(const(0, "int32") - _max_of_lanes(negated))
        following = bind(take(step, key, place))
        for register, own in zip(keys, places, strict=True):
            here = own == broadcast(place, lanes)
            register.set(tirx.Select(here, broadcast(following, lanes), register.get()))


def _max_of_lanes(x: Expr) -> Expr:
    return llvm("llvm.vector.reduce.smax", "int32", x)


def _key(x: Expr) -> Expr:
    """Floats as integers of the same order. Both zeros are equal, and what is no number is +inf."""
    lanes = lanes_of(x)
    word = bind(bits(x, typed("int32", lanes)))
    magnitude = bind(word & const(_MAGNITUDE, "int32", lanes))
    word = bind(
        tirx.Select(
            magnitude > const(_INFINITY, "int32", lanes),
            const(_INFINITY, "int32", lanes),
            tirx.Select(magnitude == const(0, "int32", lanes), const(0, "int32", lanes), word),
        )
    )
    return _turned(word)


def _value(key: Expr) -> Expr:
    """The float of a key."""
    return bits(_turned(key), typed("float32", lanes_of(key)))


def _turned(word: Expr) -> Expr:
    """The magnitude of negative floats grows downwards; its own inverse."""
    lanes = lanes_of(word)
    return bind(word ^ ((word >> const(31, "int32", lanes)) & const(_MAGNITUDE, "int32", lanes)))


def _key_of_minus_infinity() -> int:
    return ~_INFINITY
