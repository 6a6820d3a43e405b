"""What kernel families ask of any target: the vector unit that they are written for."""

from __future__ import annotations

from typing import Protocol


class VectorTarget(Protocol):
    """A vector has `lanes` f32 elements, and `registers` of them stay at hand; `dot` names how int8 products
    are summed, see `codegen.dot`; `float64` says whether there is such arithmetic at a bearable speed. As
    many as `units` can meet in a kernel: those of a GPU's block; 1 on a CPU."""

    @property
    def lanes(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def dot(self) -> str: ...
    @property
    def float64(self) -> bool: ...
    @property
    def units(self) -> int: ...
