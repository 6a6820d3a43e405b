"""Vectors in memory that a tile of a product works on: unpacked weights, and its totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zllmc.codegen.tir import Expr, Memory, bind, bits, local


class UnitVectors:
    """The vectors of some units of each group, by name, in memory. All have the size of a register."""

    def __init__(self, names: Sequence[str], groups: int, lanes: int) -> None:
        self._size = 4 * lanes
        step = groups * self._size
        self._at = {name: i * step for i, name in enumerate(names)}
        self._dtype: dict[str, str] = {}
        self.stride = len(names) * step

    def allocate(self, units: int) -> None:
        self._memory = local("uint8", units * self.stride)

    def store(self, slot: Expr, group: int, vectors: dict[str, Expr]) -> None:
        """`slot`: the number of the unit times `stride`."""
        for name, value in vectors.items():
            self._dtype[name] = str(value.ty.dtype)
            at = slot + self._at[name] + group * self._size
            self._memory.store(at, bits(value, f"uint8x{self._size}"))

    def load(self, slot: Expr, group: int, name: str) -> Expr:
        at = slot + self._at[name] + group * self._size
        return bits(self._memory.load(at, self._size), self._dtype[name])


@dataclass(frozen=True)
class TotalVectors:
    """f32 vectors of each row and group in memory, at element `at`."""

    memory: Memory
    at: Expr
    groups: int
    lanes: int

    def behind(self, distance: Expr) -> TotalVectors:
        return TotalVectors(self.memory, bind(self.at + distance), self.groups, self.lanes)

    def get(self, r: int, g: int) -> Expr:
        return self.memory.load(self.at + (r * self.groups + g) * self.lanes, self.lanes)

    def set(self, r: int, g: int, value: Expr) -> None:
        self.memory.store(self.at + (r * self.groups + g) * self.lanes, value)
