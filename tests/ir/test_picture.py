"""Pictures of graphs: well-formed, and a box for whatever differs."""

import pathlib
import xml.etree.ElementTree as ET

import pytest

from zllmc.frontends.model import load_model
from zllmc.passes.pipeline import lower_entries
from zllmc.targets.cpu import detect
from zllmc.zllm_ir.graph import Builder
from zllmc.zllm_ir.picture import _layers, picture
from zllmc.zllm_ir.types import T, TensorType

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def lines(svg: str) -> int:
    return len(list(ET.fromstring(svg).iter(f"{SVG}path")))


def test_a_node_is_a_box_with_its_weights_and_a_line_for_what_it_reads() -> None:
    g = Builder("a<b")
    x = g.input("x", TensorType("f32", (T, 8)))
    w = g.weight("w & v", TensorType("Q8_0", (8, 8)))
    h = g.linear(x, w, None, None)
    svg = picture(g.finish(g.add(h, h)))
    assert texts(svg) == [
        "a<b: 2 ops",
        "linear", "x  f32[T, 8]", "w & v  Q8_0[8, 8]", "→ f32[T, 8]",
        "add", "→ f32[T, 8]",
    ]  # fmt: skip
    assert lines(svg) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_layers_are_drawn_once_although_their_windows_differ(family: str, conformance: pathlib.Path) -> None:
    model = load_model(conformance / f"archs/{family}-dense.gguf", context=128)
    layers = len(model.graph.states)
    shown = texts(picture(model.graph))
    assert f"… {layers - 1} more like this" in shown
    assert shown.count("attention") == 1
    assert sum("output_norm.weight" in text for text in shown) == 1
    decode = lower_entries(model.graph, detect(), context=128, max_batch=1)["decode"]
    assert f"… {layers - 1} more like this" in texts(picture(decode))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("abc", (0, 0, 0)),
        ("xababab", (1, 2, 3)),
        ("babababy", (1, 2, 3)),  # the parts end where the run ends
        ("abcabcabcz", (0, 3, 3)),
        ("", (0, 0, 0)),
    ],
)
def test_the_longest_run_of_equal_parts(keys: str, expected: tuple[int, int, int]) -> None:
    assert _layers(keys) == expected
