"""How a GPU's attention is cut: the rows of a unit, the units of a block, the keys of a tile."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from zllmc.codegen.attention_shape import check
from zllmc.codegen.tir import Expr, bind, const
from zllmc.targets.gpu import LANES, GpuTarget
from zllmc.zllm_ir.attention_ops import SPLIT_KEYS
from zllmc.zllm_ir.errors import IRError, ZllmcError
from zllmc.zllm_ir.kernel_graph import QUAD, KernelCall, KVOperand, Operand

CHUNK = 16  # bytes that a lane moves at once
_SUMS = 96  # registers of a lane for scores and outputs
_ROWS = 8  # of a unit, at most
_BLOCK_ROWS = 32  # of a block that shares its tiles: more would not pay for what they wait


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed at compile time. `rows`: query rows of a unit; `keys`: of a tile; `units`: of a block;
    `shared`: whether these share tiles, or have their own."""

    q: Operand
    cache: KVOperand
    rows: int
    keys: int
    units: int
    shared: bool
    scale: float
    softcap: float
    window: int

    @property
    def head_dim(self) -> int:
        return self.cache.type.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return int(self.q.type.shape[1]) // self.cache.type.kv_heads

    @property
    def itemsize(self) -> int:
        return {"f16": 2, "q8": 1}[self.cache.type.storage]

    @property
    def together(self) -> int:
        """Codes that lie together, to be summed over: elements of a key, or an element of as many values."""
        return {"f16": 1, "q8": QUAD}[self.cache.type.storage]

    def low_of(self, high: Expr) -> Expr:
        """The first key that a row sees whose last one is high − 1."""
        return bind(tirx.max(high - self.window, 0)) if self.window else const(0, "int32")

    @property
    def scale_groups(self) -> int:
        """Groups of elements of a key or value whose sums are scaled together."""
        return max(1, self.cache.layout.groups)

    @property
    def tile_bytes(self) -> int:
        return self.keys * self.head_dim * self.itemsize

    @property
    def weights(self) -> int:
        """Of a unit: [row][group][key]."""
        return self.rows * self.scale_groups * self.keys

    @property
    def shared_bytes(self) -> int:
        queries = self.rows * (self.units if self.shared else 1) * self.head_dim
        tiles = self.tile_bytes * (1 if self.shared else self.units)
        return 4 * (queries + self.units * (self.weights + 2 * self.rows)) + tiles

    @property
    def sums(self) -> int:
        """Registers of a lane for scores and outputs."""
        return self.rows * (self.keys // LANES + -(-self.head_dim // LANES) + 2)

    @property
    def at_once(self) -> int:
        """Chunks that a lane loads before it stores the first: a unit's own tile as a whole, if there are
        registers for it."""
        return 8 if self.shared or self.tile_bytes > 16 * CHUNK * LANES else 16

    @property
    def resident(self) -> int:
        """Blocks that a multiprocessor has registers for: while some wait, others compute."""
        return 3 if self.sums < 64 and self.at_once == 8 else 2


def attention_shape(call: KernelCall, target: GpuTarget) -> AttentionShape:
    """The shape of an `attention_rows` or `attention_partial`. Raises ZllmcError where none fits."""
    q, cache = call.operands
    if not isinstance(q, Operand) or not isinstance(cache, KVOperand):
        raise IRError(f"{call.op} takes queries and a state")
    check(q, cache)
    attributes = call.attributes
    shared = call.op == "attention_rows"

    def shape(rows: int, keys: int, units: int) -> AttentionShape:
        facts = attributes["scale"], attributes["softcap"], attributes["window"]
        return AttentionShape(q, cache, rows, keys, units, shared, *facts)

    group = shape(1, LANES, 1).group
    crews = [1, 2, 4]
    if not shared:  # no more than a part has tiles, when the cache is full
        part = -(-cache.capacity // attributes["splits"] // SPLIT_KEYS) * SPLIT_KEYS
        crews = [units for units in crews if units * LANES <= part]
    subgroup = target.subgroup // LANES
    found = [
        s
        for keys in ((2 * LANES, LANES) if shared else (LANES,))
        for units in crews
        for rows in ((1, 2, 4, _ROWS) if shared else range(1, min(group, _ROWS) + 1))
        if units % subgroup == 0
        and (s := shape(rows, keys, units)).shared_bytes <= target.static_shared_memory
        and s.sums <= _SUMS
        and (shared or 4 * rows * s.head_dim <= s.tile_bytes)  # where the units' outputs meet
    ]
    if not found:
        raise ZllmcError(f"no attention over {cache.type} fits {target.static_shared_memory} bytes of memory")
    if shared:
        return max(found, key=lambda s: (min(s.units * s.rows, _BLOCK_ROWS), s.keys, s.rows))
    return max(found, key=lambda s: (-group // s.rows, s.units, -s.rows))  # the fewest read keys anew
