"""Graphs over the same inputs, written as texts."""

from collections.abc import Callable
from textwrap import dedent

from zllmc.zllm_ir.graph import Graph
from zllmc.zllm_ir.text import parse, print_graph
from zllmc.zllm_ir.verify import verify

HEADER = """\
graph g
input tokens: i32[T]
input first_row: i32[]
input x: f32[T, 64]
input y: f32[T, 64]
input k: f32[T, 32]
input v: f32[T, 32]
input cos: f32[T, 8]
input sin: f32[T, 8]
weight table: F16[100, 64]
weight gain: F32[64]
weight head_gain: F32[16]
weight bias: F32[64]
weight half: F16[64, 64]
weight packed: Q8_0[64, 64]
weight packed2: Q8_0[32, 64]
weight bias2: F32[32]
weight narrow: Q4_0[64, 64]
state kv: kv.f16[2, 16]
"""


def graph_of(lines: str) -> Graph:
    graph = parse(HEADER + dedent(lines))
    verify(graph)
    return graph


def expect(result: Graph, lines: str) -> None:
    """The graph's nodes are these lines, and it obeys the rules of the IR."""
    verify(result)
    assert print_graph(result).removeprefix(HEADER) == dedent(lines)


def unchanged(run: Callable[[Graph], Graph], lines: str) -> None:
    graph = graph_of(lines)
    assert run(graph) == graph
