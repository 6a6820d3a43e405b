"""The bounded reader of a GGUF file's header: numbers, strings and arrays, each checked before it is read."""

import mmap
import struct
from pathlib import Path
from typing import Any

from zllmc.zllm_ir.errors import ZllmcError

MAX_HEADER = 256 << 20  # bytes; the largest vocabularies make headers of some 20 MiB
MAX_ITEMS = 1 << 22  # keys, tensors and array items of one header; those vocabularies make 1.5 million
MAX_KEY = 65535  # bytes, from the format's description
MAX_DEPTH = 4  # of arrays in arrays

DOWNLOAD_AGAIN = "The file is damaged or its download is incomplete: download it again."
CONVERT_AGAIN = "Convert the model again with a current llama.cpp."


class GGUFError(ZllmcError):
    """A GGUF file that can't be read; the message names the file, the place and what to do."""


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9


class Header:
    """Reads a file's header front to back, never past its end, and never more than the limits allow.

    `what` names the thing that is read, for the message if it doesn't fit.
    """

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.position = 0
        self.end = min(len(mapping), MAX_HEADER)
        self.items = 0

    def error(self, problem: str, advice: str) -> GGUFError:
        return GGUFError(f"{self.path}: in the header, before byte {self.position}: {problem}. {advice}")

    def expect(self, count: int, item_size: int, what: str) -> None:
        """Refuse a count of items that the bytes left, at `item_size` or more each, can't hold."""
        if count * item_size > self.end - self.position:
            raise self.too_long(count * item_size, f"{count} {what}")
        self.items += count
        if self.items > MAX_ITEMS:
            raise self.error(
                f"with {count} {what} the header has over {MAX_ITEMS} items", "No known model needs as many."
            )

    def too_long(self, size: int, what: str) -> GGUFError:
        left = self.end - self.position
        if self.end < len(self.mapping):
            advice = f"Headers are read up to {MAX_HEADER >> 20} MiB, and no known model needs as much."
        else:
            advice = DOWNLOAD_AGAIN
        return self.error(f"{what} would take {size} bytes or more, of which {left} are there", advice)

    def take(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they start."""
        start = self.position
        if size > self.end - start:
            raise self.too_long(size, what)
        self.position += size
        return start

    def raw(self, size: int, what: str) -> bytes:
        start = self.take(size, what)
        return self.mapping[start : start + size]

    def number(self, code: str, what: str) -> Any:
        """One little-endian number; `code` is struct's."""
        return struct.unpack_from(f"<{code}", self.mapping, self.take(struct.calcsize(code), what))[0]

    def string(self, what: str, longest: int = MAX_HEADER) -> str:
        size = self.number("Q", what)
        if size > longest:
            raise self.error(f"{what} claims {size} bytes; {longest} is the most", DOWNLOAD_AGAIN)
        try:
            return self.raw(size, what).decode()
        except UnicodeDecodeError as cause:
            raise self.error(f"{what} isn't UTF-8 ({cause.reason})", CONVERT_AGAIN) from cause

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind == BOOL:
            return self.booleans(1, what)[0]
        if kind == STRING:
            return self.string(what)
        if kind == ARRAY:
            return self.array(what, depth + 1)
        raise self.error(f"{what} has value type {kind}, which GGUF doesn't define", DOWNLOAD_AGAIN)

    def array(self, what: str, depth: int) -> list[Any]:
        if depth > MAX_DEPTH:
            raise self.error(f"{what} nests arrays deeper than {MAX_DEPTH}", CONVERT_AGAIN)
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in SCALARS:
            size = struct.calcsize(SCALARS[kind])
            self.expect(count, size, f"numbers in {what}")
            start = self.take(count * size, what)
            return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.mapping, start))
        if kind == BOOL:
            self.expect(count, 1, f"truth values in {what}")
            return self.booleans(count, what)
        if kind == STRING:
            self.expect(count, 8, f"strings in {what}")
            return self.strings(count, what)
        if kind != ARRAY:
            raise self.error(f"{what} has items of type {kind}, which GGUF doesn't define", DOWNLOAD_AGAIN)
        self.expect(count, 12, f"arrays in {what}")
        return [self.value(kind, what, depth) for _ in range(count)]

    def booleans(self, count: int, what: str) -> list[bool]:
        raw = self.raw(count, what)
        if raw.translate(None, b"\0\1"):
            raise self.error(f"{what} holds a truth value other than 0 and 1", DOWNLOAD_AGAIN)
        return [byte == 1 for byte in raw]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings; the loop is written out because vocabularies have 500 000 of them."""
        mapping, position, end = self.mapping, self.position, self.end
        length_of = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    self.position = position
                    raise self.too_long(8, f"the length of item {len(texts)} of {what}")
                position = start + length_of(mapping, position)[0]
                if position > end:
                    self.position = start
                    raise self.too_long(position - start, f"item {len(texts)} of {what}")
                texts.append(mapping[start:position].decode())
        except UnicodeDecodeError as cause:
            raise self.error(f"item {len(texts)} of {what} isn't UTF-8", CONVERT_AGAIN) from cause
        self.position = position
        return texts
