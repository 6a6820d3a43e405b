"""A Jinja environment in which a template can neither reach the process nor use it up.

Jinja's immutable sandbox keeps templates away from Python's internals and from changing what they are given.
It doesn't keep them from running for ever or filling the memory, so here every render has a budget: each turn
of a loop or a macro pays, and each operation pays for the size of what it reads and builds. Sizes are those
that a value has as text, with a list that occurs twice counted twice. No value may grow past a limit, so that
no single operation takes long.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# One unit is a turn of a loop, an item, or 256 characters: a microsecond or a few. Real templates spend a few
# hundred on a usual conversation; some go through all messages for each message.
UNITS_PER_RENDER = 2_000_000
UNITS_PER_MESSAGE = 5_000
UNITS_PER_MACRO_CALL = 40
CHARACTERS_PER_UNIT = 256
MAX_CHARACTERS = 16_000_000  # of one value
ITEM_CHARACTERS = 32  # what a value counts that isn't text
MAX_BITS = 4096  # of an integer
# Filters that chat templates have no use for, and whose work depends on more than the size of what they read.
REMOVED_FILTERS = (
    "batch",
    "center",
    "filesizeformat",
    "groupby",
    "pprint",
    "random",
    "round",
    "slice",
    "sum",
    "urlize",
    "wordwrap",
    "xmlattr",
)
# Filters that don't look into the items of what they are given, or give the items to other filters.
FLAT_FILTERS = frozenset(
    {"count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"}
    | {"reverse", "select", "selectattr"}
)
COMPARING_TESTS = frozenset(
    {
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
    }
    | {"in", "lower", "upper"}
)
PADDING_METHODS = frozenset({"center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"})


class OverBudget(SecurityError):
    """The template does more work, or builds larger values, than a chat template has reason to."""


class _Budget:
    """What one render may still spend, and the sizes of the containers it has met."""

    def __init__(self, units: int) -> None:
        self.units = units
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id; the object is kept so that its id stays its own

    def spend(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise OverBudget("it runs for too long")

    def spend_characters(self, characters: int) -> None:
        if characters > MAX_CHARACTERS:
            raise OverBudget(f"it builds a value of over {MAX_CHARACTERS} characters")
        self.spend(1 + characters // CHARACTERS_PER_UNIT)

    def spend_items(self, value: Any) -> None:
        """For work on a container that leaves its items alone."""
        if self.size(value) > MAX_CHARACTERS:
            raise OverBudget(f"it builds a value of over {MAX_CHARACTERS} characters")
        text = isinstance(value, str)
        self.spend(1 + (len(value) // CHARACTERS_PER_UNIT if text else _count(value)))

    def size(self, value: Any) -> int:
        """Characters of `value` as text, roughly. Containers are immutable here, so it stays right."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, range):
            return ITEM_CHARACTERS * len(value)
        if not isinstance(value, list | tuple | dict):
            return ITEM_CHARACTERS
        known = self._sizes.get(id(value))
        if known is None:
            self.spend(1 + len(value))
            items = [*value, *value.values()] if isinstance(value, dict) else value
            known = (value, ITEM_CHARACTERS + sum(map(self.size, items)))
            self._sizes[id(value)] = known
        return known[1]


def _count(value: Any) -> int:
    return len(value) if isinstance(value, list | tuple | dict | range) else 0


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def budget(messages: int = 0) -> Iterator[None]:
    """Templates are compiled and rendered inside such a block, in one thread."""
    token = _budget.set(_Budget(UNITS_PER_RENDER + UNITS_PER_MESSAGE * messages))
    try:
        yield
    finally:
        _budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with the budget built in."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self.read,
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _ShortNamespace
        for name in REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters["fromjson"] = json.loads
        self.filters = {name: self._paying(name, function) for name, function in self.filters.items()}
        for name in COMPARING_TESTS:
            self.tests[name] = self._paying(name, self.tests[name])

    def parse(self, source: str, name: str | None = None, filename: str | None = None) -> nodes.Template:
        """The template's syntax tree, with the payments written into it."""
        tree = super().parse(source, name, filename)
        _AddPayments().visit(tree)
        tree.set_environment(self)
        return tree

    # Called by the payments.

    def turn(self, units: int) -> str:
        _budget.get().spend(units)
        return ""

    def counted(self) -> bool:
        _budget.get().spend(1)
        return True

    def read(self, value: Any) -> Any:
        """Pays for an operation that reads all of `value`."""
        spending = _budget.get()
        spending.spend_characters(spending.size(value))
        return value

    def built(self, value: Any) -> Any:
        """Pays for a new value, whose items are old ones."""
        _budget.get().spend_items(value)
        return value

    # Called by what Jinja makes of the template.

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__self__", None) is self:  # a payment
            return function(*args)
        method = getattr(function, "__wrapped__", function)  # Jinja wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | list | tuple | dict):
            if method.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            self._before_method(owner, method.__name__, args, kwargs)
        return self.built(super().call(context, function, *args, **kwargs))

    def getitem(self, value: Any, key: Any) -> Any:
        item = super().getitem(value, key)
        return self.built(item) if isinstance(key, slice) else item

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spending = _budget.get()
        if isinstance(left, int) and isinstance(right, int):
            factor = right if operator == "**" else 1
            if (left.bit_length() + right.bit_length()) * abs(factor) > MAX_BITS:
                raise OverBudget("it computes a number that is too large")
        elif operator == "*":
            times = [abs(side) for side in (left, right) if isinstance(side, int)]
            size = sum(spending.size(side) for side in (left, right) if not isinstance(side, int))
            spending.spend_characters(size * max(times, default=1))
        else:
            if operator == "%" and isinstance(left, str):
                _check_widths(left)
            spending.spend_characters(spending.size(left) + spending.size(right))
        return super().call_binop(context, operator, left, right)

    def _before_method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pays for a method of a text or container, by what it reads and, if that is more, builds."""
        spending = _budget.get()
        size = spending.size(owner) + sum(map(spending.size, [*args, *kwargs.values()]))
        if isinstance(owner, str):
            if name in PADDING_METHODS:
                raise SecurityError(f"the method {name!r} of a text isn't allowed")
            if name == "format":
                _check_widths(owner)
            if name == "join" and args:
                size += len(owner) * len(args[0])
            if name == "replace":
                size += _replaced(owner, *args)
            if name in ("split", "rsplit") and args and args[0]:
                size += ITEM_CHARACTERS * owner.count(args[0])
        spending.spend_characters(size)

    def _paying(self, name: str, function: Any) -> Callable[..., Any]:
        """A filter or test with payment for its arguments and its result."""

        @functools.wraps(function)  # keeps Jinja's mark for a first argument that is the environment or such
        def paid(*args: Any, **kwargs: Any) -> Any:
            spending = _budget.get()
            marked = 1 if hasattr(function, "jinja_pass_arg") else 0
            value, *rest = args[marked:] or (None,)
            if name in FLAT_FILTERS:
                spending.spend_items(value)
                return self.built(function(*args, **kwargs))
            size = sum(map(spending.size, [value, *rest, *kwargs.values()]))
            if name == "join":
                value = list(value)
                separator = rest[0] if rest else kwargs.get("d", "")
                size += spending.size(value) + len(str(separator)) * len(value)
            elif name == "replace":
                size += _replaced(str(value), *map(str, rest[:2]))
            elif name == "indent":
                width = rest[0] if rest else kwargs.get("width", 4)
                lines = str(value).count("\n") + 1
                size += lines * (len(width) if isinstance(width, str) else abs(int(width)))
            elif name == "format":
                _check_widths(str(value))
            spending.spend(_count(value))
            spending.spend_characters(size)
            return self.built(function(*args[:marked], value, *rest, **kwargs))

        return paid


class _ShortNamespace(Namespace):
    """Jinja's writes out all that it holds, which changes, so that its size couldn't be known."""

    def __repr__(self) -> str:
        return "<Namespace>"


class GenerationTag(Extension):
    """`{% generation %}` marks what the model wrote, for training; in a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _AddPayments(NodeTransformer):
    """Loops and macros pay for each turn, and what joins, compares or collects values for the values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_payment("counted", lineno=node.lineno), node.test, lineno=node.lineno)
        return _pay_each_turn(node, 1)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        return _pay_each_turn(node, UNITS_PER_MACRO_CALL)

    visit_CallBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_paid(part, "read") for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _paid(node.expr, "read")
        for operand in node.ops:
            operand.expr = _paid(operand.expr, "read")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _paid(node, "built")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _paid(node, "built")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _paid(node, "built") if node.ctx == "load" else node


def _pay_each_turn(node: nodes.For | nodes.Macro | nodes.CallBlock, units: int) -> nodes.Node:
    fixed_text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
    price = nodes.Const(units + fixed_text // CHARACTERS_PER_UNIT, lineno=node.lineno)
    node.body.insert(0, nodes.Output([_payment("turn", price, lineno=node.lineno)], lineno=node.lineno))
    return node


def _paid(node: nodes.Expr, method: str) -> nodes.Expr:
    # Most comparisons are with a constant, which costs nothing.
    return node if isinstance(node, nodes.Const) else _payment(method, node, lineno=node.lineno)


def _payment(method: str, *args: nodes.Expr, lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=lineno)
    return nodes.Call(function, [*args], [], None, None, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: Jinja's own filter escapes HTML, which changes the prompt."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise SecurityError("tojson's indent must be between 0 and 16")
    if separators is not None and sum(map(len, separators)) > 16:
        raise SecurityError("tojson's separators are too long")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _replaced(text: str, old: str = "", new: str = "", *_: Any) -> int:
    """Characters that `text.replace(old, new)` inserts."""
    return text.count(old) * len(new)


def _check_widths(pattern: str) -> None:
    """Refuses formats that pad to a width of four digits or more, or to one that comes from an argument."""
    if re.search(r"\d{4}|%[^%]*\*|\{[^{}]*\{", pattern):
        raise SecurityError("a format with such a width isn't allowed")
