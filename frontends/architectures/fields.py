"""Typed, checked access to a model file's facts, from GGUF metadata or a Hugging Face config.

Both kinds of file are read under GGUF's key names without the architecture's prefix
(`attention.head_count`); an error names the key that the file itself uses.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from zllmc.zllm_ir.errors import ZllmcError

N = TypeVar("N", int, float)

MAX_SIZE = 1 << 24  # of any width, count or length in a model


class ModelError(ZllmcError):
    """A model whose facts or tensors don't fit together; the message names the field or the tensor."""


@dataclass(frozen=True)
class Fields:
    """A file's fields. `values` is by GGUF name, `keys` has the file's own names where they differ.

    Numbers that are 0 mean "absent": converters write them for whatever an architecture doesn't have.
    """

    origin: str  # what messages start with
    values: Mapping[str, Any]
    keys: Mapping[str, str]
    prefix: str = ""

    def fail(self, name: str, problem: str) -> NoReturn:
        raise ModelError(f"{self.origin}: {self.keys.get(name, self.prefix + name)} {problem}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer in 1 … MAX_SIZE; an array of equal ones, one per layer, counts as one."""
        value = self.values.get(name)
        if isinstance(value, list) and value:
            if any(v != value[0] for v in value):
                self.fail(name, "differs between layers, which isn't supported")
            value = value[0]
        if value is None or (value == 0 and default is not None):
            return self._default(name, default)
        if type(value) is not int:
            self.fail(name, f"is {value!r:.40}, not an integer")
        if not 0 < value <= MAX_SIZE:
            self.fail(name, f"is {value}, not in 1 … {MAX_SIZE}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number in 1e-30 … 1e30."""
        value = self.values.get(name)
        if value is None or (value == 0 and default is not None):
            return self._default(name, default)
        if type(value) not in (int, float):
            self.fail(name, f"is {value!r:.40}, not a number")
        if not 1e-30 < value < 1e30:
            self.fail(name, f"is {value!r:.40}, not a positive number of any sense")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of exactly `count` such numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            self.fail(name, f"isn't a list of {count} numbers")
        if any(type(v) not in (int, float) or not 1e-30 < v < 1e30 for v in value):
            self.fail(name, "holds something other than positive numbers of any sense")
        return [float(v) for v in value]

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, f"is {value!r:.40}, not a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"is {value!r:.40}, not true or false")
        return value

    def layer_flags(self, name: str, layers: int, period: int) -> tuple[bool, ...]:
        """One flag per layer: given one by one, or as a period in which only the last layer is False.

        `period` is used where the file has neither; a period of 1 gives all False, 0 all True.
        """
        value = self.values.get(name, period)
        if isinstance(value, list):
            if len(value) < layers or any(v not in (0, 1) for v in value):
                self.fail(name, f"isn't a flag for each of the {layers} layers")
            return tuple(bool(v) for v in value[:layers])
        if type(value) is not int or value < 0:
            self.fail(name, f"is {value!r:.40}, neither a period nor a flag per layer")
        return tuple(value == 0 or i % value < value - 1 for i in range(layers))

    def _default(self, name: str, default: N | None) -> N:
        if default is None:
            self.fail(name, "is missing")
        return default
