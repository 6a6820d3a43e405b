"""Vectors in memory that a tile of a product works on: unpacked weights, and its totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zllmc.codegen.block_sums import BlockSums
from zllmc.codegen.packing import STEPS, PackedLayout
from zllmc.codegen.tir import Expr, Memory, bind, bits, local, serial


def unit_names(layout: PackedLayout) -> list[str]:
    """Of the vectors that a unit is unpacked into."""
    names = [f"code{s}" for s in range(STEPS)]
    if layout.subs:
        names += [f"scale{sub}" for sub in range(layout.unit_subs)]
    else:
        names += [f"d{part}" for part in range(layout.parts)]
    return [*names, "minimum"] if layout.format.minimum else names


def unit_vectors(group: BlockSums, unit: Expr) -> dict[str, Expr]:
    """These vectors, by name."""
    layout = group.layout
    vectors = {f"code{s}": step for s, step in enumerate(group.steps(unit))}
    if layout.subs:
        vectors |= {f"scale{sub}": scale for sub, scale in enumerate(group.sub_scales(unit))}
        minimum = group.sub_minimum(unit) if layout.sub_mins else None
    else:
        scales = group.unit_scales(unit)
        minimum = scales.pop() if layout.format.minimum else None
        vectors |= {f"d{part}": d for part, d in enumerate(scales)}
    return vectors if minimum is None else vectors | {"minimum": minimum}


class UnitVectors:
    """The vectors of some units of each group, by name, in memory. All have the size of a register."""

    def __init__(self, names: Sequence[str], groups: int, lanes: int) -> None:
        self._size = 4 * lanes
        self.step = groups * self._size
        self._at = {name: i * self.step for i, name in enumerate(names)}
        self._dtype: dict[str, str] = {}
        self.stride = len(names) * self.step

    def allocate(self, units: int) -> None:
        self._memory = local("uint8", units * self.stride)

    def unpack(
        self,
        weights: Sequence[BlockSums],
        begin: Expr,
        end: Expr,
        vectors_of: Callable[[BlockSums, Expr], dict[str, Expr]],
    ) -> None:
        """Store what `vectors_of(group, unit)` gives of blocks begin … end − 1 of each group of weights."""
        units = weights[0].layout.units
        with serial(begin, end) as block:
            for group in weights:
                group.prepare(block)
            with serial(0, units) as u:
                unit = bind(block * units + u)
                slot = bind((unit - begin * units) * self.stride)
                for g, group in enumerate(weights):
                    self.store(slot, g, vectors_of(group, unit))

    def store(self, slot: Expr, group: int, vectors: dict[str, Expr]) -> None:
        """`slot`: the number of the unit times `stride`."""
        for name, value in vectors.items():
            self._dtype[name] = str(value.ty.dtype)
            at = slot + self._at[name] + group * self._size
            self._memory.store(at, bits(value, f"uint8x{self._size}"))

    def address(self, slot: Expr, group: int, name: str) -> Expr:
        """Those named after it come in steps of `step` bytes."""
        return self._memory.address(slot + self._at[name] + group * self._size)

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
