"""All passes together, by the numbers that they must keep."""

import pathlib

import numpy as np
import pytest

from zllmc.frontends.model import Model, load_model
from zllmc.passes.pipeline import run_passes
from zllmc.zllm_ir.graph import Graph
from zllmc.zllm_ir.interpreter import Interpreter
from zllmc.zllm_ir.text import parse

FAMILIES = ["llama", "gemma2", "gemma3", "phi3", "qwen3", "granite", "olmo2"]
TOKENS = np.arange(12) * 7 % 128


def logits(graph: Graph, model: Model) -> np.ndarray:
    """Of every one of TOKENS, in one pass or in one for each token."""
    interpreter = Interpreter(graph, model.weights)
    if graph.inputs[0].shape != (1,):
        return interpreter.run(TOKENS)[0]
    return np.concatenate([interpreter.run([token])[0] for token in TOKENS])


@pytest.mark.parametrize("tokens", [None, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_keep_the_logits(family: str, tokens: int | None, conformance: pathlib.Path) -> None:
    model = load_model(conformance / f"archs/{family}-dense.gguf", context=128, kv="f32")
    graph = run_passes(model.graph, tokens=tokens, context=128, check=True)
    kept = {n.op for n in graph.nodes}
    assert not kept & {"add", "scale", "rope", "kv_append", "attention", "merge_heads", "split_heads"}
    before, after = logits(model.graph, model), logits(graph, model)
    assert np.abs(after - before).max() < 3e-6 * np.abs(before).max()


@pytest.mark.parametrize("tokens", [None, 1])
@pytest.mark.parametrize("name", ["llama-dense-Q8_0", "gemma3-dense-Q4_K_M"])
def test_quantized_activations_stay_within_their_tolerance(
    name: str, tokens: int | None, conformance: pathlib.Path
) -> None:
    model = load_model(conformance / f"quants/{name}.gguf", context=128, kv="f32")
    graph = run_passes(model.graph, tokens=tokens, context=128, check=True)
    before, after = logits(model.graph, model), logits(graph, model)
    error = np.mean(np.square(after - before)) / np.var(before)
    assert 0 < error < 2e-3


def test_dumps_number_the_passes(tmp_path: pathlib.Path, conformance: pathlib.Path) -> None:
    model = load_model(conformance / "archs/llama-dense.gguf", context=128)
    graph = run_passes(model.graph, tokens=1, context=128, dump=tmp_path)
    files = sorted(tmp_path.glob("*.txt"))
    assert files[0].name == "00-input.txt"
    assert parse(files[0].read_text()) == model.graph
    assert parse(files[-1].read_text()) == graph
