"""A graph as a picture: SVG that any browser shows. A layer is drawn once, whatever their number.

Boxes stand in rows by the longest path to them. What a node reads of weights and states is in its box;
lines are the values that it reads of other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from html import escape

from zllmc.zllm_ir.graph import Graph, Node, Value
from zllmc.zllm_ir.kernel_graph import KernelGraph, KernelNode
from zllmc.zllm_ir.types import TensorType

_WIDTH, _LINE, _GAP_X, _GAP_Y, _MARGIN = 260, 16, 28, 26, 40
_COLOURS = (  # of the first whose word is in the op's name
    ("linear", "#d6e6fb"),
    ("attention", "#ffe2c4"),
    ("norm", "#dcf3d8"),
    ("embedding", "#f7d9e8"),
    ("append", "#e9ddfa"),
    ("rope", "#e9ddfa"),
    ("", "#eeeeee"),
)


@dataclass(eq=False)
class _Box:
    title: str
    lines: list[str]
    after: list[_Box]  # the boxes whose values it reads
    row: int = 0
    x: float = 0.0
    y: float = 0.0
    height: float = field(init=False)

    def __post_init__(self) -> None:
        self.row = 1 + max((box.row for box in self.after), default=-1)
        self.height = _LINE * (1 + len(self.lines)) + 10


def picture(graph: Graph | KernelGraph) -> str:
    """The graph as the text of an SVG file."""
    rows: dict[int, list[_Box]] = {}
    for box in _boxes(graph):
        rows.setdefault(box.row, []).append(box)
    widest = max((len(row) for row in rows.values()), default=1)
    width = widest * (_WIDTH + _GAP_X) - _GAP_X + 4 * _MARGIN
    y = 2.0 * _MARGIN
    for _, row in sorted(rows.items()):
        # A box stands as much to the left among its neighbours as what it reads.
        row.sort(key=lambda box: sum(b.x for b in box.after) / max(1, len(box.after)))
        left = (width - len(row) * (_WIDTH + _GAP_X) + _GAP_X) / 2
        for place, box in enumerate(row):
            box.x, box.y = left + place * (_WIDTH + _GAP_X), y
        y += max(box.height for box in row) + _GAP_Y
    boxes = [box for row in rows.values() for box in row]
    title = f"{graph.name}: {len(graph.nodes)} {'kernels' if isinstance(graph, KernelGraph) else 'ops'}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + _MARGIN:.0f}"'
            ' font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN}" font-size="16">{escape(title)}</text>',
            *(_line(source, box) for box in boxes for source in box.after),
            *map(_drawn, boxes),
            "</svg>\n",
        ]
    )


def _boxes(graph: Graph | KernelGraph) -> list[_Box]:
    """The nodes in order, of which a run of equal layers is the first one and a box for the others."""
    weights = set(graph.weights)
    given = {*graph.inputs, *graph.states} | weights

    def reads_others(node: Node | KernelNode) -> bool:
        return any(v is not None and v not in given for v in node.inputs)

    # First what reads no other node, so that a table of angles among the layers does not end their run.
    nodes: list[Node | KernelNode] = sorted(graph.nodes, key=reads_others)
    first, length, count = _layers([_key(node, weights) for node in nodes])
    makers: dict[Value, _Box] = {}
    boxes: list[_Box] = []
    more: _Box | None = None
    for number, node in enumerate(nodes):
        owners = [_owner(graph, v) for v in node.inputs if v is not None]
        sources = list(dict.fromkeys(makers[v] for v in owners if v in makers))
        layer = (number - first) // length if length else 0
        if 1 <= layer < count and number >= first:
            if more is None:
                lines = [f"{length} nodes each; formats and windows may differ"]
                more = _Box(f"… {count - 1} more like this", lines, sources)
                boxes.append(more)
            more.after += [source for source in sources if source is not more and source not in more.after]
            box = more
        else:
            own = [f"{v.name}  {v.type}" for v in node.inputs if v is not None and v in given]
            box = _Box(_op(node), [*own, *_results(node)], sources)
            boxes.append(box)
        makers |= dict.fromkeys(node.outputs, box)
    return boxes


def _layers(keys: Sequence[object]) -> tuple[int, int, int]:
    """Where the longest run of equal parts begins, the length of a part (0 without), and how many there are.
    A run ends with a part: what precedes the first layer may look like the end of one."""
    best = (0, 0, 0)
    for length in range(2, len(keys) // 2 + 1):
        begin = 0
        for end in range(length, len(keys) + 1):  # keys[begin:end] repeats every `length`
            if end < len(keys) and keys[end] == keys[end - length]:
                continue
            count = (end - begin) // length
            if count > 1 and count * length > best[1] * best[2]:
                best = (end - count * length, length, count)
            begin = end - length + 1
    return best


def _key(node: Node | KernelNode, weights: Set[Value]) -> str:
    """What is equal for nodes of two layers that do the same. Formats, windows and splits may differ."""
    return f"{_op(node)} {[v.shape for v in node.inputs if v is not None and v in weights]}"


def _op(node: Node | KernelNode) -> str:
    return node.op if isinstance(node, Node) else node.call.op


def _results(node: Node | KernelNode) -> list[str]:
    types = [str(v.type) for v in node.outputs if isinstance(v.type, TensorType)]
    return [f"→ {', '.join(types)}"] if types else []


def _owner(graph: Graph | KernelGraph, value: Value) -> Value:
    """The value whose memory this one lies in."""
    return value if isinstance(graph, Graph) else graph.place(value).base


def _line(source: _Box, box: _Box) -> str:
    """From the bottom of one box to the top of another; around what stands between."""
    x0, y0 = source.x + _WIDTH / 2, source.y + source.height
    x1, y1 = box.x + _WIDTH / 2, box.y
    bend = (y1 - y0) / 2
    aside = 0 if box.row == source.row + 1 else (_WIDTH / 2 + _GAP_X) * (1 if x1 >= x0 else -1) * 1.4
    points = [(x0, y0), (x0 + aside, y0 + bend), (x1 + aside, y1 - bend), (x1, y1)]
    begin, *curve = (f"{x:.0f},{y:.0f}" for x, y in points)
    return f'<path d="M{begin} C{" ".join(curve)}" fill="none" stroke="#888"/>'


def _drawn(box: _Box) -> str:
    colour = next(colour for word, colour in _COLOURS if word in box.title)
    text = [
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{_WIDTH}" height="{box.height:.0f}" rx="6"'
        f' fill="{colour}" stroke="#555"/>'
    ]
    for number, line in enumerate([box.title, *box.lines]):
        y = box.y + _LINE * (number + 1)
        style = ' font-weight="bold"' if number == 0 else ' font-size="10"'
        shown = line if len(line) <= 46 else line[:45] + "…"
        text.append(f'<text x="{box.x + 8:.0f}" y="{y:.0f}"{style}>{escape(shown)}</text>')
    return "\n".join(text)
