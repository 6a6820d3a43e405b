"""Hugging Face folders, written from conformance files, give those files' logits."""

import json
import math
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models import DENSE, JUNK, File, limit, logits, nmse, open_file, reference
from zllmc.frontends.architectures import architectures
from zllmc.frontends.architectures.hf import KEYS, LAYER_TENSORS, TENSORS, DerivedTensor
from zllmc.frontends.model import load_model
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode
from zllmc.zllm_ir.verify import verify

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "sliding_window": 4096},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma": {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": None,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": None},
    "olmo2": {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "logits_scaling": 1.0,
        "residual_multiplier": 3.556558847427368,
        "attention_multiplier": 0.125,
    },
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"],
        "scale_emb": 12,
        "scale_depth": 3.556558847427368 * math.sqrt(2),
        "dim_model_base": 256,
    },
}
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
PERMUTED = {"llama", "granite", "minicpm"}  # GGUF files with q and k in norm order


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Tensors as (dtype, shape, bytes); the library's numpy interface has no BF16."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def write_folder(folder: Path, file: File, config: dict[str, Any]) -> Path:
    """A GGUF model as its authors would have published it."""
    arch = file.metadata["general.architecture"]
    names = {v: k for k, v in (LAYER_TENSORS | dict(architectures()[arch].hf_names)).items()}
    names["ffn_up"] = "mlp.gate_up_proj" if arch == "phi3" else "mlp.up_proj"
    top = {v: k for k, v in TENSORS.items()}
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, tensor in file.tensors.items():
        if name.startswith(("cls.", "rope_")):
            continue
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        new = f"model.layers.{layer[1]}.{names[layer[2]]}.{kind}" if layer else f"{top[stem]}.{kind}"
        type_name, data = tensor.type_name, tensor.data
        if arch in PERMUTED and layer and layer[2] in ("attn_q", "attn_k"):
            pairs = data.reshape(-1, 32, 2, data.size // tensor.shape[0])  # heads, pairs, two, bytes of a row
            data = pairs.swapaxes(1, 2)
        if arch.startswith("gemma") and "norm" in stem:
            type_name, data = "F32", (decode(FORMATS[type_name], data) - 1).astype("<f4")
        stored[new] = type_name, tensor.shape, data.tobytes()
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("arch", HF_CONFIGS)
def test_a_folder_gives_the_files_logits(conformance: Path, tmp_path: Path, arch: str) -> None:
    file = open_file(conformance, f"archs/{arch}-dense")
    folder = write_folder(tmp_path / arch, file, COMMON | HF_CONFIGS[arch])
    model = load_model(folder, context=256, kv="f32")
    tokens, expected = reference(conformance, f"archs/{arch}-dense")
    assert (model.architecture, model.container, model.name) == (arch, "hf", arch)
    assert nmse(expected, logits(model, tokens)) < 1e-10


def test_a_bf16_folder(conformance: Path, tmp_path: Path) -> None:
    file = open_file(conformance, "quants/llama-dense-BF16")
    config = COMMON | HF_CONFIGS["llama"] | {"intermediate_size": 256}
    model = load_model(write_folder(tmp_path / "m", file, config), context=256, kv="f32")
    tokens, expected = reference(conformance, "quants/llama-dense-BF16")
    assert nmse(expected, logits(model, tokens)) < 1e-10


@pytest.mark.parametrize(
    "arch, variant, scaling",
    [
        ("llama", "variants/llama-dense-rope-linear4", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama", "variants/llama-dense-rope-base500k", {"rope_theta": 500000.0}),
        ("llama", "variants/llama-dense-rope-base500k", {"rope_parameters": {"rope_theta": 5e5}}),
        (
            "qwen3",
            "variants/qwen3-dense-rope-yarn4",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        ),
        (
            "gemma3",
            "variants/gemma3-dense-rope-linear8",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            },
        ),
    ],
)
def test_a_folder_s_rope_scaling(
    conformance: Path, tmp_path: Path, arch: str, variant: str, scaling: dict[str, Any]
) -> None:
    file = open_file(conformance, f"archs/{arch}-dense")
    folder = write_folder(tmp_path / "m", file, COMMON | HF_CONFIGS[arch] | scaling)
    tokens, expected = reference(conformance, variant)
    error = nmse(expected, logits(load_model(folder, context=256, kv="f32"), tokens))
    assert error < limit(conformance, variant)


def test_a_folder_s_longrope_lists_are_the_files_factors(conformance: Path, tmp_path: Path) -> None:
    file = open_file(conformance, "archs/phi3-dense-longrope")
    lists = {
        f"{kind}_factor": file.tensors[f"rope_factors_{kind}.weight"].data.view("<f4").tolist()
        for kind in ("short", "long")
    }
    config = COMMON | HF_CONFIGS["phi3"]
    config |= {"original_max_position_embeddings": 256, "rope_scaling": {"type": "longrope", **lists}}
    folder = write_folder(tmp_path / "m", file, config)
    tokens, expected = reference(conformance, "archs/phi3-dense-longrope")
    assert nmse(expected, logits(load_model(folder, context=256, kv="f32"), tokens)) < 1e-10
    long = logits(load_model(folder, context=257, kv="f32"), tokens)
    np.testing.assert_allclose(long, logits(file.model(context=257), tokens), rtol=0, atol=1e-4)
    assert nmse(expected, long) > 1e-3


def test_a_folder_s_longrope_magnitude_grows_with_the_context(conformance: Path, tmp_path: Path) -> None:
    file = open_file(conformance, "archs/phi3-dense")
    config = COMMON | HF_CONFIGS["phi3"] | {"max_position_embeddings": 131072}
    config |= {"original_max_position_embeddings": 4096}
    config |= {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}}
    rope = load_model(write_folder(tmp_path / "m", file, config), context=256).facts.ropes[0]
    assert rope and rope.attn_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert rope.freq_scale == 1


def test_llama3_scaling_is_the_files_rope_freqs(conformance: Path, tmp_path: Path) -> None:
    factor, low, high, original = 8.0, 1.0, 4.0, 64
    expected = []
    for i in range(32):
        wavelength = 2 * math.pi * 10000.0 ** (2 * i / 64)
        if wavelength < original / high:
            expected.append(1.0)
        elif wavelength > original / low:
            expected.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append(1 / ((1 - smooth) / factor + smooth))
    assert 1 < expected[8] < factor  # all three cases occur
    file = open_file(conformance, "archs/llama-dense")
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    config = COMMON | HF_CONFIGS["llama"] | {"rope_scaling": scaling}
    folder = load_model(write_folder(tmp_path / "m", file, config), context=256, kv="f32")
    file.tensors["rope_freqs.weight"] = DerivedTensor(np.array(expected, np.float32))
    tokens = reference(conformance, "archs/llama-dense")[0]
    assert nmse(logits(file.model(), tokens), logits(folder, tokens)) < 1e-10


@pytest.mark.parametrize(
    "config, magnitude",
    [
        ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        (
            {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            (1 + 0.1 * math.log(40)) / (1 + 0.05 * math.log(40)),
        ),
        ({"factor": 40.0}, 1 + 0.1 * math.log(40)),
        ({"factor": 40.0, "attention_factor": 1.5}, 1.5),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_a_folder_s_yarn_magnitude(
    conformance: Path, tmp_path: Path, config: dict[str, float], magnitude: float
) -> None:
    file = open_file(conformance, "archs/qwen3-dense")
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 64, **config}
    folder = write_folder(tmp_path / "m", file, COMMON | HF_CONFIGS["qwen3"] | {"rope_scaling": scaling})
    rope = load_model(folder, context=256).facts.ropes[0]
    assert rope and rope.attn_factor * (1 + 0.1 * math.log(config["factor"])) == pytest.approx(magnitude)


@pytest.mark.parametrize(
    "arch, changes, message",
    [
        ("llama", {"architectures": ["BertModel"]}, "'BertModel' isn't supported.*LlamaForCausalLM"),
        ("llama", {"architectures": None}, "None isn't supported"),
        ("llama", {"hidden_size": None}, "hidden_size is missing"),
        ("llama", {"num_attention_heads": "4"}, "num_attention_heads is '4', not an integer"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic"}}, "rope_scaling.rope_type is 'dynamic'"),
        ("llama", {"rope_scaling": [1]}, "rope_scaling isn't an object"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor is -1"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings is missing"),
        ("gemma3", {"layer_types": ["full_attention", "linear"]}, "layer_types has 'linear'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types isn't a flag for each of the 2 layers"),
        ("llama", {"num_local_experts": 8}, "num_local_experts isn't 0"),
        ("qwen2", {"partial_rotary_factor": 0.001}, "partial_rotary_factor leaves no dimension"),
    ],
)
def test_wrong_configs_are_named(
    conformance: Path, tmp_path: Path, arch: str, changes: dict[str, Any], message: str
) -> None:
    file = open_file(conformance, f"archs/{arch}-dense")
    folder = write_folder(tmp_path / "m", file, COMMON | HF_CONFIGS[arch] | changes)
    with pytest.raises(ZllmcError, match=message):
        load_model(folder, context=256)


def test_a_folder_s_unknown_tensor_is_named(conformance: Path, tmp_path: Path) -> None:
    file = open_file(conformance, "archs/llama-dense")
    folder = write_folder(tmp_path / "m", file, COMMON | HF_CONFIGS["llama"])
    write_safetensors(folder / "model.safetensors", {"model.vision.weight": ("F32", (1,), b"1234")})
    with pytest.raises(ZllmcError, match=r"tensor 'model\.vision\.weight' isn't known"):
        load_model(folder, context=256)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_config_gives_a_valid_graph_or_an_error_for_the_user(
    conformance: Path, tmp_path: Path, data: st.DataObject
) -> None:
    arch = data.draw(st.sampled_from(["llama", "gemma3", "phi3", "minicpm"]))
    file = open_file(conformance, f"archs/{arch}-dense")
    folder = write_folder(tmp_path / "m", file, {})
    config = COMMON | HF_CONFIGS[arch]
    keys = [*KEYS.values(), "rope_scaling", "rope_parameters", "layer_types", "scale_emb", "dim_model_base"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        config[key] = data.draw(JUNK)
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(ZllmcError):
        verify(load_model(folder, context=256).graph)
