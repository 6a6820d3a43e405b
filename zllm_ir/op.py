"""What an op is, and the table of all of them.

An op is declared by its reference: a numpy function whose positional parameters are the operands
(a default of None makes one optional) and whose keyword-only parameters are the attributes:

    @register(infer=lambda x, weight, eps: x)
    def rms_norm(x, weight, *, eps):
        ...

So the signature, the semantics and the documentation cannot drift apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from zllmc.zllm_ir.errors import IRError
from zllmc.zllm_ir.types import Type

_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Op:
    """An op's signature, type rule, effect, and reference semantics.

    `writes` names the state operand that the op replaces: its new value is the op's output, so order
    between reads and writes of state is dataflow.
    """

    name: str
    operands: tuple[str, ...]
    optional: frozenset[str]
    attrs: Mapping[str, Any]
    infer: Callable[..., Type | tuple[Type, ...]]
    reference: Callable[..., Any]
    writes: str | None

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.reference) or ""

    def bind(self, operands: Iterable[Any]) -> tuple[Any, ...]:
        """The operands in full, with None for optional ones that are absent."""
        given = tuple(operands)
        if len(given) > len(self.operands):
            raise IRError(f"{self.name} takes {len(self.operands)} operands, got {len(given)}")
        full = given + (None,) * (len(self.operands) - len(given))
        for name, value in zip(self.operands, full, strict=True):
            if value is None and name not in self.optional:
                raise IRError(f"{self.name} needs operand {name!r}")
        return full

    def bind_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes in declared order, defaults filled in."""
        unknown = set(attrs) - set(self.attrs)
        if unknown:
            raise IRError(f"{self.name} has no attribute {', '.join(sorted(unknown))}")
        full = {name: attrs.get(name, default) for name, default in self.attrs.items()}
        missing = [name for name, value in full.items() if value is _REQUIRED]
        if missing:
            raise IRError(f"{self.name} needs attribute {', '.join(missing)}")
        return full

    def infer_types(self, operands: Iterable[Type | None], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
        """The outputs' types; an IRError if the operands or attributes don't fit the op or each other."""
        given = tuple(operands)
        try:
            types = self.infer(*given, **attrs)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            # A rule reads ranks and kinds without asking: what isn't there doesn't fit.
            raise IRError(
                f"{self.name} doesn't fit its operands ({', '.join(map(str, given))}) and attributes "
                f"{dict(attrs)}: {error}"
            ) from error
        return types if isinstance(types, tuple) else (types,)


OPS: dict[str, Op] = {}

Reference = TypeVar("Reference", bound=Callable[..., Any])


def register(
    infer: Callable[..., Type | tuple[Type, ...]], writes: str | None = None
) -> Callable[[Reference], Reference]:
    """Declare the decorated numpy reference as the op of its name."""

    def declare(reference: Reference) -> Reference:
        parameters = inspect.signature(reference).parameters.values()
        operands = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        attrs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        name = reference.__name__
        OPS[name] = Op(
            name,
            tuple(p.name for p in operands),
            frozenset(p.name for p in operands if p.default is None),
            attrs,
            infer,
            reference,
            writes,
        )
        return reference

    return declare
