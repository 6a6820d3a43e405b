"""The architectures: facts, graphs, and logits of the reference interpreter against llama.cpp's."""

import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import ARCHS, DENSE, JUNK, limit, logits, nmse, open_entry, open_file, reference
from zllmc.frontends import architectures as package
from zllmc.frontends.architectures.hf import KEYS
from zllmc.frontends.model import load_model
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.interpreter import Interpreter
from zllmc.zllm_ir.text import parse, print_graph
from zllmc.zllm_ir.verify import verify

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")


def test_the_conformance_entries_of_every_dense_family_are_run() -> None:
    families = {Path(name).name.split("-")[0] for name in ARCHS}
    assert families >= {"llama", "mistral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite"}
    assert families >= {"phi3", "smollm3", "olmo2", "minicpm", "deci", "internlm2", "nanbeige", "xverse"}
    assert len([n for n in DENSE if n.startswith("quants/")]) >= 15
    assert len([n for n in DENSE if n.startswith("variants/")]) >= 6


# --- against llama.cpp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_logits_are_llama_cpps(conformance: Path, name: str) -> None:
    tokens, expected = reference(conformance, name)
    model = open_entry(conformance, name).model()
    verify(model.graph)
    assert nmse(expected, logits(model, tokens)) < limit(conformance, name)


@pytest.mark.parametrize("name", sorted({DENSE[n].get("file", n) for n in ARCHS}))
def test_greedy_tokens_are_llama_cpps(conformance: Path, name: str) -> None:
    name = name.removesuffix(".gguf")
    data = np.load(conformance / f"{name}.npz")
    model = open_entry(conformance, name).model()
    interpreter = Interpreter(model.graph, model.weights)
    found, chunk = [], data["tokens"][:16]
    for _ in range(32):
        found.append(int(interpreter.run(chunk, all_rows=False)[0].argmax()))
        chunk = found[-1:]
    assert found == data["greedy"].tolist()


@pytest.mark.parametrize("name", ["archs/llama-dense", "archs/gemma2-dense", "archs/olmo2-dense"])
def test_one_pass_is_chunks_is_token_by_token(conformance: Path, name: str) -> None:
    tokens, expected = reference(conformance, name)
    model = open_entry(conformance, name).model()
    for size in (1, 7, 33):
        interpreter = Interpreter(model.graph, model.weights)
        parts = [interpreter.run(tokens[i : i + size])[0] for i in range(0, len(tokens), size)]
        assert nmse(expected, np.concatenate(parts)) < 1e-10


@pytest.mark.parametrize("kv, limit", [("f16", 1e-5), ("q8", 1e-3)])
def test_a_smaller_cache_changes_the_logits_a_little(conformance: Path, kv: str, limit: float) -> None:
    tokens, expected = reference(conformance, "archs/llama-dense")
    error = nmse(expected, logits(open_file(conformance, "archs/llama-dense").model(kv=kv), tokens))
    assert 1e-10 < error < limit


@pytest.mark.parametrize("name", ARCHS)
def test_text_form_parses_back(conformance: Path, name: str) -> None:
    graph = open_entry(conformance, name).model(kv="q8").graph
    assert parse(print_graph(graph)) == graph


def test_load_model_opens_a_file(conformance: Path) -> None:
    path = conformance / "archs" / "llama-dense.gguf"
    model = load_model(path, context=64)
    assert (model.architecture, model.container, model.path) == ("llama", "gguf", path)
    assert model.parameters == 656640
    assert set(model.weights) == {w.name for w in model.graph.weights}
    assert [str(s.type) for s in model.graph.states] == ["kv.f16[2, 64]"] * 2
    assert [v.name for v in model.graph.inputs] == ["tokens", "positions", "first_row"]
    assert [str(v.type) for v in model.graph.outputs] == ["f32[R, 128]", "kv.f16[2, 64]", "kv.f16[2, 64]"]


# --- what families do ----------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding(conformance: Path) -> None:
    file = open_file(conformance, "archs/llama-dense")
    untied = logits(file.model(), [1, 2, 3])
    file.tensors["output.weight"] = file.tensors["token_embd.weight"]
    same = logits(file.model(), [1, 2, 3])
    del file.tensors["output.weight"]
    model = file.model()
    np.testing.assert_array_equal(logits(model, [1, 2, 3]), same)
    assert not np.allclose(untied, same)
    assert model.parameters == 656640 - 128 * 256


def test_longrope_takes_the_long_factors_beyond_the_original_context_only(conformance: Path) -> None:
    file = open_file(conformance, "archs/phi3-dense-longrope")
    short, long = (file.model(context=n).facts.ropes[0] for n in (256, 257))
    assert short is not None and short.factors == "rope_factors_short.weight"
    assert long is not None and long.factors == "rope_factors_long.weight"


def test_smollm3_has_no_positions_in_every_fourth_layer(conformance: Path) -> None:
    file = open_entry(conformance, "archs/smollm3-dense")
    for name in [n for n in file.tensors if n.startswith("blk.1.")]:
        for i in range(2, 8):
            file.tensors[name.replace("blk.1.", f"blk.{i}.")] = file.tensors[name]
    ropes = file.set(block_count=8).model().facts.ropes
    assert [i for i, rope in enumerate(ropes) if rope is None] == [3, 7]


@pytest.mark.parametrize(
    "arch, fields, windows",
    [
        ("gemma2", {}, (32, 0)),
        ("gemma2", {"attention__sliding_window": None, "attention__sliding_window_pattern": None}, (4096, 0)),
        ("gemma3", {"attention__sliding_window_pattern": None}, (32, 32)),  # five of six
        ("gemma3", {"attention__sliding_window_pattern": [0, 1]}, (0, 32)),
        ("gemma3", {"attention__sliding_window": 0}, (0, 0)),
        ("olmo2", {"attention__sliding_window_pattern": 2}, (32, 0)),
        ("olmo2", {"attention__sliding_window": None}, (0, 0)),
        ("phi3", {"attention__sliding_window": 20}, (20, 20)),
        ("llama", {"attention__sliding_window": 20}, (0, 0)),
    ],
)
def test_windows(conformance: Path, arch: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert open_file(conformance, f"archs/{arch}-dense").set(**fields).model().facts.windows == windows


def test_local_layers_have_a_rope_of_their_own(conformance: Path) -> None:
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 1e6}
    gemma3 = open_file(conformance, "archs/gemma3-dense").set(**scaling, rope__freq_base_swa=None)
    local, main = gemma3.model().facts.ropes
    assert local and (local.base, local.freq_scale) == (10000.0, 1.0)
    assert main and (main.base, main.freq_scale) == (1e6, 1 / 8)
    olmo3 = open_file(conformance, "archs/olmo2-dense").set(**scaling, rope__freq_base_swa=None)
    local, main = olmo3.model().facts.ropes
    assert local and (local.base, local.freq_scale) == (1e6, 1.0)
    assert main and (main.base, main.freq_scale) == (1e6, 1 / 8)


def test_gemma_27b_scales_by_its_width_per_head(conformance: Path) -> None:
    file = open_file(conformance, "archs/gemma2-dense")
    for name in [n for n in file.tensors if n.startswith("blk.1.")]:
        for i in range(2, 46):
            file.tensors[name.replace("blk.1.", f"blk.{i}.")] = file.tensors[name]
    fields = {"block_count": 46, "attention__sliding_window_pattern": None, "attention__scale": None}
    wide = file.set(**fields, attention__head_count=4).model()
    assert wide.facts.attention_scale == 64**-0.5  # 256 wide, 4 heads: the same by both rules
    del file.tensors["blk.45.attn_norm.weight"]
    with pytest.raises(ZllmcError, match=r"blk\.45\.attn_norm\.weight is missing"):
        file.model()


def test_minicpm_without_scales_takes_those_of_its_first_model(conformance: Path) -> None:
    none = {"embedding_scale": None, "residual_scale": None, "logit_scale": None}
    facts = open_file(conformance, "archs/minicpm-dense").set(**none).model().facts
    assert facts.embedding_scale == 12
    assert facts.residual_scale == pytest.approx(1.4 / math.sqrt(2))
    assert facts.logit_scale == 1  # 256 / width


def test_granite_without_finetuned_rope_has_no_positions(conformance: Path) -> None:
    file = open_file(conformance, "archs/granite-dense")
    model = file.set(rope__scaling__finetuned=False).model()
    assert not [n for n in model.graph.nodes if n.op.startswith("rope")]


def test_mistral3_refuses_contexts_that_need_scaled_queries(conformance: Path) -> None:
    file = open_entry(conformance, "archs/mistral3-dense").set(attention__temperature_scale=0.1)
    file.model(context=256)
    with pytest.raises(ZllmcError, match=r"mistral3\.attention\.temperature_scale .*256 tokens"):
        file.model(context=257)


@pytest.mark.parametrize(
    "factor, fields, magnitude",
    [
        (4.0, {}, 1 + 0.1 * math.log(4)),
        (1.0, {}, 1.0),
        (40.0, {"yarn_log_multiplier": 1.0}, 1.0),
        (40.0, {"yarn_log_multiplier": 0.5}, (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40))),
        (4.0, {"attn_factor": 1.25}, 1.25 * (1 + 0.1 * math.log(4))),
        (4.0, {"yarn_attn_factor": 3.0}, 1 + 0.1 * math.log(4)),  # YaRN computes this one itself
    ],
)
def test_yarn_magnitude(conformance: Path, factor: float, fields: dict[str, float], magnitude: float) -> None:
    file = open_file(conformance, "archs/qwen3-dense").set(
        rope__scaling__type="yarn",
        rope__scaling__factor=factor,
        **{f"rope__scaling__{k}": v for k, v in fields.items()},
    )
    graph = file.model().graph
    (table,) = [n for n in graph.nodes if n.op == "rope_table"]
    assert table.attributes["attn_factor"] * (1 + 0.1 * math.log(factor)) == pytest.approx(magnitude)


# --- files that don't fit ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("block_count", None, "block_count is missing"),
        ("block_count", 3, "block_count is 3, but the file has tensors of 2 layers"),
        ("block_count", 1 << 20, "1000 is the most"),
        ("block_count", 0, "block_count is 0"),
        ("embedding_length", "256", "embedding_length is '256', not an integer"),
        ("embedding_length", 1 << 62, "embedding_length is 4611686018427387904, not in"),
        (
            "embedding_length",
            128,
            r"token_embd.weight has the shape \(128, 256\), the facts give \(128, 128\)",
        ),
        ("attention.head_count", -4, "head_count is -4"),
        ("attention.head_count", True, "head_count is True, not an integer"),
        ("attention.head_count", [4, 2], "head_count differs between layers"),
        ("attention.head_count_kv", 3, "head_count is 4, not a multiple of the 3 kv heads"),
        ("attention.key_length", 60, "attention.value_length differs from the key length 60"),
        ("attention.key_length", 1 << 20, "4096 is the most"),
        ("attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon is missing"),
        ("attention.layer_norm_rms_epsilon", math.nan, "layer_norm_rms_epsilon is nan"),
        ("feed_forward_length", 64, "blk.0.ffn_gate.weight has the shape"),
        ("rope.dimension_count", 66, "rope.dimension_count is 66"),
        ("rope.dimension_count", 33, "rope.dimension_count is 33, not an even number"),
        ("rope.freq_base", -1.0, "rope.freq_base is -1.0"),
        ("rope.freq_base", 1.0, "rope.freq_base is 1.0, not above 1"),
        ("rope.scaling.type", "dynamic", "rope.scaling.type is 'dynamic', not one of none, linear"),
        ("rope.scaling.type", 3, "rope.scaling.type is 3, not a string"),
        ("rope.scaling.factor", math.inf, "rope.scaling.factor is inf"),
        ("expert_count", 8, "mixtures of experts aren't supported yet"),
    ],
)
def test_wrong_facts_are_named(conformance: Path, field: str, value: Any, message: str) -> None:
    file = open_file(conformance, "archs/llama-dense").set(**{field.replace(".", "__"): value})
    with pytest.raises(ZllmcError, match=message) as raised:
        file.model()
    assert str(raised.value).startswith("test.gguf: ")


@dataclass
class FakeTensor:
    shape: tuple[int, ...]
    type_name: str


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("blk.1.ffn_up.weight", None, "tensor blk.1.ffn_up.weight is missing"),
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        ("output_norm.weight", FakeTensor((255,), "F32"), r"output_norm.weight has the shape \(255,\)"),
        ("output_norm.weight", FakeTensor((256, 1), "F32"), "output_norm.weight has the shape"),
        ("blk.0.attn_q.weight", FakeTensor((256, 256), "Q8_1"), "attn_q.weight has type Q8_1, which can't"),
        ("blk.0.attn_q.bias", FakeTensor((255,), "F32"), r"attn_q.bias has the shape \(255,\)"),
        (
            "blk.0.attn_q.scale",
            FakeTensor((1,), "F32"),
            "tensors that llama doesn't have: blk.0.attn_q.scale",
        ),
        ("blk.0.attn_sinks.weight", FakeTensor((4,), "F32"), "llama doesn't have: blk.0.attn_sinks.weight"),
        ("blk.2.attn_q.weight", FakeTensor((256, 256), "F16"), "block_count is 2, but .* 3 layers"),
        ("rope_freqs.weight", FakeTensor((31,), "F32"), r"rope_freqs.weight has the shape \(31,\)"),
    ],
)
def test_wrong_tensors_are_named(
    conformance: Path, name: str, tensor: FakeTensor | None, message: str
) -> None:
    file = open_file(conformance, "archs/llama-dense")
    file.tensors[name] = tensor
    if tensor is None:
        del file.tensors[name]
    with pytest.raises(ZllmcError, match=message):
        file.model()


def test_more_tokens_than_embeddings_are_refused(conformance: Path) -> None:
    file = open_file(conformance, "archs/llama-dense")
    file.metadata["tokenizer.ggml.tokens"] = ["x"] * 129
    with pytest.raises(ZllmcError, match=r"129 tokens, token_embd\.weight only 128 rows"):
        file.model()


@pytest.mark.parametrize("name", ["bert", "", 7, None])
def test_an_unknown_architecture_is_named_with_the_known_ones(conformance: Path, name: Any) -> None:
    file = open_file(conformance, "archs/llama-dense")
    file.metadata["general.architecture"] = name
    expected = f"{name!r} isn't supported.*gemma3.*llama.*qwen2" if isinstance(name, str) else "missing"
    with pytest.raises(ZllmcError, match=expected):
        file.model()


@pytest.mark.parametrize("settings, message", [({"context": 0}, "context of 0"), ({"kv": "f8"}, "'f8'")])
def test_wrong_settings_are_refused(conformance: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ZllmcError, match=message):
        load_model(conformance / "archs" / "llama-dense.gguf", **{"context": 8, **settings})


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["llama", "gemma3", "phi3", "minicpm", "qwen3"]), st.data())
def test_any_metadata_gives_a_valid_graph_or_an_error_for_the_user(
    conformance: Path, arch: str, data: st.DataObject
) -> None:
    file = open_file(conformance, f"archs/{arch}-dense")
    used = [
        *KEYS,
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.dimension_count",
    ]
    for key in data.draw(st.lists(st.sampled_from(used), min_size=1, max_size=3)):
        file.metadata[f"{arch}.{key}"] = data.draw(JUNK)
    with suppress(ZllmcError):
        verify(file.model().graph)


# --- a new family --------------------------------------------------------------------------------------

MADE_UP = '''
from zllmc.frontends.architectures.dense import Architecture

def block(layer, x):
    """Attention and feed-forward side by side, from one norm."""
    h = layer.norm(x, "attn_norm")
    return layer.add(layer.add(x, layer.attention(h)), layer.ffn(h))

ARCHITECTURES = {"parallel": Architecture(block, activation="relu2")}
'''


@pytest.fixture
def one_more_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "parallel.py").write_text(MADE_UP)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield
    sys.modules.pop(f"{package.__name__}.parallel", None)


@pytest.mark.usefixtures("one_more_family")
def test_a_dense_family_is_added_by_one_file(conformance: Path) -> None:
    file = open_file(conformance, "archs/qwen2-dense")
    file.metadata = {k.replace("qwen2.", "parallel."): v for k, v in file.metadata.items()}
    file.metadata["general.architecture"] = "parallel"
    for i in range(2):
        del file.tensors[f"blk.{i}.ffn_norm.weight"]
    model = file.model()
    verify(model.graph)
    assert np.isfinite(logits(model, [1, 2, 3])).all()
    assert [n.attributes["act"] for n in model.graph.nodes if n.op == "glu"] == ["relu2"] * 2
