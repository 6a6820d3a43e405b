"""How a vector of a TIR type is held by the lanes of a unit, and arithmetic on elements packed in a word."""

from __future__ import annotations

from dataclasses import dataclass

from zllmc.targets.gpu import LANES
from zllmc.zllm_ir.errors import IRError

_BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "int32": 4, "uint32": 4}
_BYTES |= {"float32": 4, "int64": 8, "uint64": 8, "float64": 8}

# What holds one element in a variable, and in memory.
VALUE_TYPES = {"bool": "bool", "int8": "int", "uint8": "unsigned", "int16": "int", "uint16": "unsigned"}
VALUE_TYPES |= {"float16": "unsigned", "int32": "int", "uint32": "unsigned", "float32": "float"}
VALUE_TYPES |= {"int64": "long long", "uint64": "unsigned long long", "float64": "double"}
MEMORY_TYPES = VALUE_TYPES | {"int8": "signed char", "uint8": "unsigned char", "int16": "short"}
MEMORY_TYPES |= {"uint16": "unsigned short", "float16": "unsigned short"}

# Functions that a kernel prints along when it uses them, in the C++ that all dialects share.
HELPERS = {
    "min_of": "template <class T> {function}T min_of(T a, T b) {{ return a < b ? a : b; }}",
    "max_of": "template <class T> {function}T max_of(T a, T b) {{ return a > b ? a : b; }}",
    "iround": "{function}int iround(float x) {{ return int(frint(x)); }}",
    # Bytes and halves side by side: the neighbour's carry is kept out by clearing the top bits first.
    "add_x8": "{function}unsigned add_x8(unsigned a, unsigned b) {{\n"
    "  return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);\n}}",
    "sub_x8": "{function}unsigned sub_x8(unsigned a, unsigned b) {{\n"
    "  return ((a | 0x80808080u) - (b & 0x7f7f7f7fu)) ^ ((a ^ ~b) & 0x80808080u);\n}}",
    "add_x16": "{function}unsigned add_x16(unsigned a, unsigned b) {{\n"
    "  return ((a & 0x7fff7fffu) + (b & 0x7fff7fffu)) ^ ((a ^ b) & 0x80008000u);\n}}",
    "sub_x16": "{function}unsigned sub_x16(unsigned a, unsigned b) {{\n"
    "  return ((a | 0x80008000u) - (b & 0x7fff7fffu)) ^ ((a ^ ~b) & 0x80008000u);\n}}",
    # Two bytes to two halves.
    "widen_u8": "{function}unsigned widen_u8(unsigned v) {{ return (v & 0xffu) | (v & 0xff00u) << 8; }}",
    "widen_s8": "{function}unsigned widen_s8(unsigned v) {{\n"
    "  return ((unsigned)(int)(signed char)v & 0xffffu) | (unsigned)(int)(signed char)(v >> 8) << 16;\n}}",
    # 16 bytes at once, where each lane has its own address.
    "store_words": "{function}void store_words(\n"
    "    {shared}unsigned* to, unsigned a, unsigned b, unsigned c, unsigned d) {{\n"
    "  store16(({shared}unsigned char*)to, make_uint4(a, b, c, d));\n}}",
    # As halves: eight bytes, sixteen.
    "store_halves": "{function}void store_halves({shared}unsigned* to, unsigned a, unsigned b) {{\n"
    "  const uint2 low = bytes_to_f16(a), high = bytes_to_f16(b);\n"
    "  store16(({shared}unsigned char*)to, make_uint4(low.x, low.y, high.x, high.y));\n}}",
    "copy_halves": "{function}void copy_halves(\n"
    "    {shared}unsigned* low, {shared}unsigned* high, {device}const unsigned char* from) {{\n"
    "  const uint4 v = load16(from);\n"
    "  const uint2 a = bytes_to_f16(v.x), b = bytes_to_f16(v.y);\n"
    "  const uint2 c = bytes_to_f16(v.z), d = bytes_to_f16(v.w);\n"
    "  store16(({shared}unsigned char*)low, make_uint4(a.x, a.y, b.x, b.y));\n"
    "  store16(({shared}unsigned char*)high, make_uint4(c.x, c.y, d.x, d.y));\n}}",
    "load_floats": "{function}void load_floats({private}float* to, {device}const float* from) {{\n"
    "  const uint4 v = load16(({device}const unsigned char*)from);\n"
    "  to[0] = as_float(v.x);\n  to[1] = as_float(v.y);\n"
    "  to[2] = as_float(v.z);\n  to[3] = as_float(v.w);\n}}",
}


@dataclass(frozen=True)
class Words:
    """The part of one lane in a value of TIR type `dtype`."""

    dtype: str

    @property
    def element(self) -> str:
        return self.dtype.split("x")[0]

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return _BYTES[self.element]

    @property
    def elements(self) -> int:
        _, _, count = self.dtype.partition("x")
        return int(count or 1)

    @property
    def full(self) -> bool:
        """Whether every lane holds something of its own."""
        return self.elements >= LANES

    @property
    def each(self) -> int:
        """Elements of a lane."""
        if self.elements <= LANES:
            return 1
        if self.elements % LANES:
            raise IRError(f"no GPU source for {self.dtype}: not a multiple of {LANES} elements")
        return self.elements // LANES

    @property
    def lane_bytes(self) -> int:
        return self.each * self.size

    @property
    def value(self) -> str:
        """The C type of a variable that holds it."""
        return VALUE_TYPES[self.element] if self.each == 1 else self._word("unsigned")

    @property
    def memory(self) -> str:
        """The C type of it in memory."""
        return MEMORY_TYPES[self.element] if self.each == 1 else self._word("unsigned short")

    def _word(self, half: str) -> str:
        words = {2: half, 4: "unsigned", 8: "uint2", 16: "uint4"}
        if self.lane_bytes not in words:
            raise IRError(f"no GPU source for {self.dtype}: {self.lane_bytes} bytes a lane")
        return words[self.lane_bytes]

    def repeat(self, value: int) -> int:
        """`value` in every element of the word."""
        mask = (1 << 8 * self.size) - 1
        return sum((value & mask) << (8 * self.size * i) for i in range(self.each))
