"""What attention kernels are made for: the rows that share a pass over the keys, in tiles of registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zllmc.codegen.tir import Expr, Register, bind, const, local
from zllmc.targets.vector import VectorTarget
from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.kernel_graph import KEY_BLOCK, KVOperand, Operand

BLOCK = 64  # keys per step of the online softmax
SCALE_GROUP = 64  # elements of a q8 key or value that share a scale


@dataclass(frozen=True)
class Shape:
    """What is fixed at compile time. `rows`: that share a pass over the keys; `tile_rows`: of the largest
    register tile; `pairs`: products are those of pairs of i16, see `attention_pairs`."""

    target: VectorTarget
    cache: KVOperand
    rows: int
    tile_rows: int
    scale: float
    softcap: float
    pairs: bool

    @property
    def lanes(self) -> int:
        return self.target.lanes

    @property
    def head_dim(self) -> int:
        return self.cache.type.head_dim


@dataclass(frozen=True)
class Tiles:
    """`count` register tiles of `rows` query rows each, from a unit's row `first` on."""

    first: int
    rows: int
    count: Expr = 1


@dataclass(frozen=True)
class Tile:
    """Rows row … row + rows − 1 of a unit, which see the first `count` keys of a block. `asks`: for which of
    each two cache lines that come after the block's, 0 and 1, it asks memory."""

    row: Expr
    rows: int
    count: Expr
    asks: range

    @property
    def leads(self) -> bool:
        """Whether it is the first to read the block."""
        return 0 in self.asks


class Scratch:
    """What the softmax of a unit and its products share."""

    def __init__(self, shape: Shape) -> None:
        self.output = local("float32", shape.rows * shape.head_dim)  # Σ exp(s − max) · v
        # One tile's, within a block of keys:
        rows = -(-shape.tile_rows // shape.lanes) * shape.lanes
        self.scores = local("float32", shape.tile_rows * BLOCK)
        self.peaks = local("float32", rows)  # the block's largest scores
        self.rescale = local(
            "float32", rows
        )  # old max − new max, then exp: what came before takes this factor
        self.gain = local("float32", rows)  # peak − new max, then exp: what the block sums takes this one


def check(q: Operand, cache: KVOperand) -> tuple[int, int]:
    """(heads, head_dim); an IRError where no kernel fits."""
    heads, head_dim = (int(d) for d in q.type.shape[1:])
    if head_dim != cache.type.head_dim or heads % cache.type.kv_heads:
        raise IRError(f"attention: q is {q.type} and the state {cache.type}")
    if head_dim % 16:
        raise IRError(f"no attention kernel for head_dim {head_dim}: a multiple of 16 is needed")
    return heads, head_dim


def register_rows(target: VectorTarget) -> int:
    """Rows of a register tile: as many as can sum the scores of KEY_BLOCK keys in registers."""
    vectors = KEY_BLOCK // target.lanes
    return max(rows for rows in range(1, 13) if fits(target, rows * vectors, vectors))


def fits(target: VectorTarget, sums: int, shared: int) -> bool:
    """Whether the sums of a tile have registers, with the `shared` keys or values that all rows take and one
    row's broadcast factor."""
    return sums + shared + 1 <= target.registers


def chunk_vectors(shape: Shape, rows: int) -> int:
    """Vectors of a value that are summed at a time: as many as there are registers, within one scale."""
    vectors = shape.head_dim // shape.lanes
    one_scale = shape.cache.layout.groups <= 1
    return max(
        n
        for n in range(1, vectors + 1)
        if vectors % n == 0
        and fits(shape.target, rows * n, n)
        and (one_scale or SCALE_GROUP % (n * shape.lanes) == 0)
    )


def zeros(dtype: str, rows: int, vectors: int, lanes: int) -> list[list[Register]]:
    return [[Register(dtype, lanes, const(0, dtype, lanes)) for _ in range(vectors)] for _ in range(rows)]


def tree(combine: Callable[[Expr, Expr], Expr], values: list[Expr]) -> Expr:
    """All of a power of two of values, combined in pairs of pairs."""
    while len(values) > 1:
        values = [bind(combine(a, b)) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
