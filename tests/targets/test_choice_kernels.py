"""The kernels that choose a token, on emulated GPUs: exactly what their references give, with ties."""

from __future__ import annotations

import numpy as np
import pytest

from zllmc import targets
from zllmc.codegen.gpu import kernel_source
from zllmc.runtime.emulator import EmulatedDevice
from zllmc.zllm_ir import choice_ops
from zllmc.zllm_ir.kernel_graph import ROW_PAD, KernelCall, Operand
from zllmc.zllm_ir.op import OPS
from zllmc.zllm_ir.plan import CHOSEN, CONTROL_BEST, CONTROL_CACHED, CONTROL_WORDS
from zllmc.zllm_ir.types import TensorType

VOCABULARIES = {"cuda:sm_90": 262_144, "rocm:gfx1100": 1300, "rocm:gfx942": 512, "metal:apple9": 50}
CACHED = 77


def operand(type: TensorType) -> Operand:
    return Operand(type, -(-Operand(type).width // ROW_PAD) * ROW_PAD)


def call_of(op: str, operands: list[Operand], **attrs: int) -> KernelCall:
    results = OPS[op].infer_types([o.type for o in operands], attrs)
    return KernelCall(op, tuple(attrs.items()), tuple(operands), tuple(map(operand, results)))


class Choice:
    """Both kernels for rows of `vocab` logits, on the emulated device of a target."""

    def __init__(self, name: str, vocab: int, cache) -> None:
        target = targets.parse(name)
        one = operand(TensorType("i32", (1,)))
        self.k = min(64, vocab)
        partial = call_of("top_k_partial", [operand(TensorType("f32", (1, vocab)))], k=self.k)
        chosen = operand(TensorType("i32", (1, CHOSEN)))
        self.calls = [partial, call_of("choose", [*partial.results, one, chosen])]
        self.sources = [kernel_source(call, target) for call in self.calls]
        texts = {f"{s.name}.{target.dialect}": s.text for s in self.sources}
        reverse = name == "rocm:gfx1100"
        self.device = EmulatedDevice(
            texts, target.dialect, target.subgroup, reverse=reverse, optimize=False, cache=cache
        )

    def run(self, logits: np.ndarray, best: int) -> dict[str, np.ndarray]:
        """What both leave in memory: values and ids of the parts, then the results of the choice."""
        control = np.zeros(CONTROL_WORDS, np.int32)
        control[[CONTROL_CACHED, CONTROL_BEST]] = CACHED, best
        given = self._buffer(control), self._buffer(logits), self._buffer(np.arange(CHOSEN, dtype=np.int32))
        control_buffer, row, chosen = given
        partial, choice = self.calls
        rows = int(partial.results[0].type.shape[0])
        parts = [self.device.allocate(4 * rows * r.stride) for r in partial.results]
        top = [self.device.allocate(4 * r.stride) for r in choice.results[:2]]
        token, position = (self.device.allocate(4), 0), (control_buffer, 4 * CONTROL_CACHED)
        places = [(buffer, 0) for buffer in (*parts, chosen, *top)]
        arguments = [
            [(control_buffer, 0), (row, 0), *places[:2]],
            [(control_buffer, 0), *places[:2], position, places[2], *places[3:], token, position, places[2]],
        ]
        for source, pointers in zip(self.sources, arguments, strict=True):
            self.device.launch(source.name, (source.blocks, 1), source.threads, pointers)

        def read(place, dtype, width, stride):
            return self.device.read(place[0], dtype, (rows if place in places[:2] else 1, stride))[:, :width]

        found = {
            name: read(place, dtype, r.width, r.stride)
            for name, place, dtype, r in zip(
                ("values", "ids", "top", "top_ids"),
                (*places[:2], *places[3:]),
                (np.float32, np.int32) * 2,
                (*partial.results, *choice.results),
                strict=False,
            )
        }
        words = self.device.read(control_buffer, np.int32, (CONTROL_WORDS,))
        found |= {"token": self.device.read(token[0], np.int32, (1,)), "position": words[[CONTROL_CACHED]]}
        return found | {"chosen": self.device.read(chosen, np.int32, (1, CHOSEN))}

    def _buffer(self, array: np.ndarray):
        buffer = self.device.allocate(array.nbytes)
        self.device.write(buffer, array)
        return buffer


@pytest.fixture(scope="module", params=VOCABULARIES)
def choice(request, emulator_cache):
    return Choice(request.param, VOCABULARIES[request.param], emulator_cache)


def expected(logits: np.ndarray, k: int) -> dict[str, np.ndarray]:
    values, ids = choice_ops.top_k_partial(logits, k=k)
    position, chosen = np.array([CACHED], np.int32), np.arange(CHOSEN, dtype=np.int32)[None]
    results = choice_ops.choose(values, ids, position, chosen)
    names = "top", "top_ids", "token", "position", "chosen"
    return {"values": values, "ids": ids} | dict(zip(names, results, strict=True))


def rows(vocab: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(vocab)
    ties = np.round(8 * random.standard_normal((1, vocab))).astype(np.float32) / 4  # with zeros of both signs
    last = np.where(np.arange(vocab) < vocab - 3, np.float32(-np.inf), ties)
    broken = ties.copy()
    broken[0, vocab // 2 :: 7] = np.nan
    return {"ties": ties, "few": last, "broken": broken, "none": np.full_like(ties, -np.inf)}


def test_all_candidates(choice):
    (_, vocab) = choice.calls[0].operands[0].type.shape
    for logits in rows(vocab).values():
        found = choice.run(logits, 0)
        for name, array in expected(logits, choice.k).items():
            np.testing.assert_array_equal(found[name], array, name)


def test_only_the_best(choice):
    (_, vocab) = choice.calls[0].operands[0].type.shape
    for logits in rows(vocab).values():
        found = choice.run(logits, 1)
        for name, array in expected(logits, choice.k).items():
            width = 1 if name in ("values", "ids", "top", "top_ids") else None
            np.testing.assert_array_equal(found[name][..., :width], array[..., :width], name)


def test_no_more_than_the_best_is_computed_where_only_that_is_wanted(choice):
    (_, vocab) = choice.calls[0].operands[0].type.shape
    poison = choice.run(rows(vocab)["ties"], 1)["top_ids"][0, 1:]
    assert (poison == -1).all() and len(poison)
