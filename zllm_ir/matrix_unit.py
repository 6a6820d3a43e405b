"""Instructions of GPUs that multiply small matrices, and where the elements of their operands lie."""

from __future__ import annotations

from dataclasses import dataclass

Offset = tuple[int, int]  # rows, columns


@dataclass(frozen=True)
class Fragment:
    """Where the elements of one operand of a matrix instruction lie.

    Each lane of a subgroup holds `elements` of the operand, packed into its registers in order (four int8,
    two f16 or bf16, or one f32 to a register, low bits first). All layouts are sums over bits: element e of
    lane l lies at the sum of `lane_bits[i]` over the set bits i of l and of `element_bits[i]` over the set
    bits of e. A lane bit with offset (0, 0) means that lanes differing in it hold the same elements.
    """

    rows: int
    columns: int
    lane_bits: tuple[Offset, ...]
    element_bits: tuple[Offset, ...]

    @property
    def elements(self) -> int:
        """Elements per lane."""
        return 1 << len(self.element_bits)

    def position(self, lane: int, element: int) -> Offset:
        """(row, column) of a lane's element."""
        bits = [b for i, b in enumerate(self.lane_bits) if lane >> i & 1]
        bits += [b for i, b in enumerate(self.element_bits) if element >> i & 1]
        return sum(row for row, _ in bits), sum(column for _, column in bits)


@dataclass(frozen=True)
class MatrixInstruction:
    """One instruction: C (M×N) += A (M×K) × B (K×N), executed by a whole subgroup.

    `name` is the instruction as its documentation spells it. `inputs`: `s8`, `f16`, `bf16` or `f32`;
    `accumulator`: `s32` or `f32`.
    """

    name: str
    m: int
    n: int
    k: int
    inputs: str
    accumulator: str
    a: Fragment
    b: Fragment
    c: Fragment
