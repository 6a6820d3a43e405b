"""Many rows of x against weights of plain floats on a GPU's matrix units, whose sums stay in f32 registers.

x is rounded to the weights' type, to nearest even (halves also to the largest one, where x is larger), as
packed weights have it rounded to 8 bits; products are exact. A unit that multiplies f32, as Metal's, takes
every plain format and rounds nothing.

What a thread loads of a piece goes to registers before the piece ahead of it is multiplied, and to shared
memory after that, so that no one waits for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from zllmc.codegen.dot import Dot
from zllmc.codegen.matrix_tile import CHUNKS, PART, ROWS, Block, Finish, MatrixUnit, X
from zllmc.codegen.packing import PackedLayout
from zllmc.codegen.tir import Expr, Kernel, LaneArray, Memory, bind, bits, broadcast, call, cast, const, when


@dataclass
class PlainTiles:
    """The tiles of one product. `memory`: the kernel's x, in f32 rows, and weight."""

    layout: PackedLayout
    dot: Dot
    unit: MatrixUnit
    memory: dict[str, Memory]
    x_stride: int  # floats
    finish: Finish

    @property
    def _chunk(self) -> int:
        """Columns of a chunk."""
        return self.unit.columns // CHUNKS

    @property
    def _rows(self) -> int:
        """Of W, of which a lane loads a chunk at a time: two of 16 bits, which come in one word."""
        return 4 // self.unit.element_bytes

    def run(self, kernel: Kernel, tokens: Expr, units: int, shared: Memory) -> None:
        """All tiles for `tokens` rows of x, by blocks of `units` vector units, which share SHARED_WORDS."""
        lanes, it = self.dot.lanes, self.unit.instruction
        block = Block(self.unit, lanes, kernel, units, shared)
        pieces = self.layout.columns // self.unit.columns
        with block.tiles(tokens, self.layout.groups) as (group, token):
            totals = {(n, m): LaneArray("float32", it.c.elements, lanes) for n, m, _ in block.outputs}
            for n, m, element in block.outputs:
                totals[n, m].set(element, const(0, "float32", lanes))
            x = [
                [LaneArray("float32", 4, lanes) for _ in range(self._chunk // 4)] for _ in self._chunks(block)
            ]
            w = [LaneArray("uint32", 4 * self._rows, lanes) for _ in self._jobs(block)]
            with block.pieces(pieces) as (step, odd):
                with when(step < pieces):
                    self._fetch_x(block, x, token, tokens, step)
                    self._fetch_w(block, w, group, step)
                with when(tirx.all(step > 0, token + block.m < tokens)):
                    self._multiply(block, 1 - odd, totals)
                with when(step < pieces):
                    self._put_x(block, x, odd)
                    self._put_w(block, w, odd)
            results = (totals[n, m].get(element) for n, m, element in block.outputs)
            block.store(results, group, token, tokens, self.layout.groups, self.finish)

    # -- loads ---------------------------------------------------------------------------------------------

    def _chunks(self, block: Block) -> Iterator[tuple[Expr, Expr]]:
        """The chunks of x that each lane moves: row and chunk."""
        threads = block.units * self.dot.lanes
        for first in range(0, ROWS * CHUNKS, threads):
            number = bind(block.thread + block.const(first))
            yield bind(number // block.const(CHUNKS)), bind(number % block.const(CHUNKS))

    def _fetch_x(
        self, block: Block, x: Sequence[Sequence[LaneArray]], token: Expr, tokens: Expr, piece: Expr
    ) -> None:
        """Rows after the last one repeat it."""
        lanes = self.dot.lanes
        last_row = broadcast(bind(tokens - 1), lanes)
        first = broadcast(bind(piece * self.unit.columns), lanes)
        for arrays, (row, chunk) in zip(x, self._chunks(block), strict=True):
            begin = tirx.min(broadcast(token, lanes) + row, last_row) * block.const(self.x_stride)
            at = bind(begin + first + chunk * block.const(self._chunk))
            for i, array in enumerate(arrays):
                call("load_floats", array.pointer, self.memory["x"].address(at + block.const(4 * i)))

    def _put_x(self, block: Block, x: Sequence[Sequence[LaneArray]], odd: Expr) -> None:
        for arrays, (row, chunk) in zip(x, self._chunks(block), strict=True):
            values = [array.get(i) for array in arrays for i in range(4)]
            if self.unit.element_bytes == 4:
                words = [bits(value, f"uint32x{self.dot.lanes}") for value in values]
            else:
                words = [self._rounded(*values[i : i + 2]) for i in range(0, len(values), 2)]
            call("store_words", block.address(odd, row + block.const(X), chunk), *words)

    def _rounded(self, low: Expr, high: Expr) -> Expr:
        """Two floats as the matrix unit's inputs, in a word."""
        function = f"pack_{self.unit.instruction.inputs}"
        return T.call_pure_extern(f"uint32x{self.dot.lanes}", function, low, high)

    def _jobs(self, block: Block) -> Iterator[tuple[Expr, Expr, Expr, Expr]]:
        """The chunks of W that each lane moves, of `_rows` neighbouring rows: the job's number; the group of
        rows in the tile, and which of its neighbours; the chunk."""
        across = self.dot.lanes // self._rows
        lane = bind(block.ramp(const(0, "int32")))
        for first in range(0, self._job_count, block.units):
            number = bind(block.inside + first)
            chunk = bind(tirx.truncmod(number, CHUNKS // self._rows) * self._rows)
            chunks = bind(broadcast(chunk, self.dot.lanes) + lane // block.const(across))
            yield (
                number,
                bind(tirx.truncdiv(number, CHUNKS // self._rows)),
                lane % block.const(across),
                chunks,
            )

    @property
    def _job_count(self) -> int:
        return ROWS // self.dot.lanes * CHUNKS // self._rows

    def _fetch_w(self, block: Block, w: Sequence[LaneArray], group: Expr, piece: Expr) -> None:
        """Groups of rows after the last one repeat it."""
        lanes = self.dot.lanes
        for array, (number, inside, rows, chunk) in zip(w, self._jobs(block), strict=True):
            with when(number < self._job_count):
                at = T.Cast("int64", tirx.min(group + inside, self.layout.groups - 1))
                record = self.memory["weight"].from_(at * const(self.layout.group_bytes, "int64"))
                column = broadcast(piece * self.unit.columns, lanes) + chunk * block.const(self._chunk)
                first = bind(column * block.const(lanes // self._rows) + rows)
                places = [first + block.const(i * (lanes // self._rows)) for i in range(self._chunk)]
                if self._rows == 2:
                    words = record.view("uint32")
                    values = [words.buffer[place] for place in places]
                else:
                    values = [bits(w, f"uint32x{lanes}") for w in self._floats(record, places)]
                for i, value in enumerate(values):
                    array.set(i, value)

    def _floats(self, record: Memory, places: Sequence[Expr]) -> list[Expr]:
        match self.layout.format.plain:
            case "f32":
                memory = record.view("float32")
                return [memory.buffer[place] for place in places]
            case "f16":
                memory = record.view("float16")
                return [cast(memory.buffer[place], "float32") for place in places]
        memory, half = record.view("uint16"), const(16, "uint32", self.dot.lanes)
        wide = [cast(memory.buffer[place], "uint32") << half for place in places]
        return [bits(w, f"float32x{self.dot.lanes}") for w in wide]

    def _put_w(self, block: Block, w: Sequence[LaneArray], odd: Expr) -> None:
        lanes = self.dot.lanes
        low, half = const(0xFFFF, "uint32", lanes), const(16, "uint32", lanes)
        for array, (number, inside, rows, chunk) in zip(w, self._jobs(block), strict=True):
            with when(number < self._job_count):
                first = bind(broadcast(inside * lanes, lanes) + rows * block.const(self._rows))
                words = [array.get(i) for i in range(self._chunk)]
                if self._rows == 1:
                    call("store_words", block.address(odd, first, chunk), *words)
                    continue
                pairs = list(zip(words[::2], words[1::2], strict=True))
                lower = [bind(a & low | b << half) for a, b in pairs]
                upper = [bind(a >> half | b & const(0xFFFF0000, "uint32", lanes)) for a, b in pairs]
                # Every other four lanes begin with the upper row: even rows alone would use half the banks.
                turned = bind(rows // block.const(4) % block.const(2))
                for i in range(2):
                    is_lower = turned == block.const(i)
                    words = [tirx.Select(is_lower, *pair) for pair in zip(lower, upper, strict=True)]
                    row = first + (turned ^ block.const(i))
                    call("store_words", block.address(odd, row, chunk), *words)

    # -- products ------------------------------------------------------------------------------------------

    def _multiply(self, block: Block, odd: Expr, totals: dict[tuple[int, int], LaneArray]) -> None:
        """Add the piece in buffer `odd` to this subgroup's totals."""
        it = self.unit.instruction
        for column in range(0, self.unit.columns, it.k):
            a = {m: block.x(odd, m, column) for m in range(0, PART, it.m)}
            for n in range(0, PART, it.n):
                b = block.w(odd, n, column)
                for m, x in a.items():
                    call(self.unit.function, totals[n, m].pointer, x.pointer, b.pointer)
