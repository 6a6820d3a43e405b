"""What the container readers share: memory-mapped files and the tensors that lie in them."""

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from zllmc.zllm_ir.errors import ZllmcError


class Mapped:
    """A context manager over memory-mapped model files."""

    mappings: tuple[mmap.mmap, ...]

    def close(self) -> None:
        """Unmap the files. Views that `StoredTensor.data` gave stay valid and hold their file open."""
        close_mappings(self.mappings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a model file: where its packed bytes lie and how to read them."""

    name: str
    shape: tuple[int, ...]  # row-major, (rows, columns) as in numpy: ggml's ne reversed
    type_id: int  # ggml's number for the type
    type_name: str  # ggml's name for the type, such as "Q4_K"
    nbytes: int
    path: Path  # the file that holds the bytes (a model may have several)
    offset: int  # of the first byte, from the start of that file
    mapping: mmap.mmap = field(repr=False, compare=False)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The packed bytes, uint8[nbytes], a read-only view of the mapped file: nothing is copied.

        The view keeps the mapping alive. Asking a closed file for a view raises ValueError.
        """
        return np.frombuffer(self.mapping, np.uint8, self.nbytes, self.offset)


def map_file(path: Path, error: type[ZllmcError]) -> mmap.mmap:
    """Map a whole file read-only; raise `error` if it can't be read or is empty."""
    if not os.path.isfile(path):  # asked before opening, because opening a pipe waits for its writer
        problem = "this is no regular file" if os.path.exists(path) else "there is no such file"
        raise error(f"{path}: {problem}. Check the path.")
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise error(f"{path}: the file is empty. Download it again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}. Check its permissions.") from cause


def close_mappings(mappings: Iterable[mmap.mmap]) -> None:
    """Unmap the files; one that a tensor's view still uses goes when the last view does."""
    for mapping in mappings:
        with suppress(BufferError):
            mapping.close()


def show(text: str) -> str:
    """Quote a name from a file for a message: one short line, control characters escaped."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
