"""Hugging Face folders in GGUF's terms: config.json fields, tensor names, and the few derived weights.

Sources: the configuration and modelling files of `transformers`. Its rotary embeddings pair element i with
i + dims/2 (neox) for every family; weights are used as they are, so q and k aren't permuted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zllmc.frontends.architectures.dense import Architecture, read_head_dim
from zllmc.frontends.architectures.fields import Fields, ModelError
from zllmc.frontends.architectures.rope import llama3_factors, yarn_magnitude
from zllmc.zllm_ir.formats import FORMATS, decode

KEYS = {  # GGUF's name: config.json's
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.use_sliding_window": "use_sliding_window",
    "attention.full_layers": "max_window_layers",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope.layers": "no_rope_layers",  # 1 where there is rope
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_local_experts",
}
ROPE_KEYS = {  # of rope_scaling or rope_parameters
    "rope.freq_base": "rope_theta",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.low_freq_factor": "low_freq_factor",
    "rope.scaling.high_freq_factor": "high_freq_factor",
    "rope.scaling.short_factor": "short_factor",
    "rope.scaling.long_factor": "long_factor",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",  # gate first, as GGUF has it
    "mlp.down_proj": "ffn_down",
}
ACTIVATIONS = {
    "silu": {"silu", "swish"},
    "gelu": {"gelu_pytorch_tanh", "gelu"},  # early Gemma configs say gelu, and mean its tanh form
}


@dataclass(frozen=True)
class DerivedTensor:
    """An F32 tensor that is computed from the folder's."""

    values: NDArray[np.float32]
    type_name: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def data(self) -> NDArray[np.uint8]:
        return self.values.astype("<f4").view(np.uint8)


@dataclass(frozen=True)
class OffsetNorm:
    """A norm's gain that is stored less an offset."""

    stored: Any
    offset: float
    type_name: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.stored.shape
        return shape

    @property
    def data(self) -> NDArray[np.uint8]:
        gain = decode(FORMATS[self.stored.type_name], self.stored.data) + np.float32(self.offset)
        return gain.astype("<f4").view(np.uint8)


def read_hf(
    origin: str, config: Mapping[str, Any], stored: Mapping[str, Any], family: Architecture
) -> tuple[Fields, dict[str, Any]]:
    """A folder's fields and tensors under GGUF's names, derived tensors added."""
    fields = _read_fields(origin, config, family)
    tensors = _rename(origin, stored, family)
    return _derive_rope_factors(fields, tensors)


def _read_fields(origin: str, config: Mapping[str, Any], family: Architecture) -> Fields:
    values = {name: config[key] for name, key in KEYS.items() if config.get(key) is not None}
    keys = dict(KEYS)

    def derive(name: str, value: Any, key: str) -> None:
        values[name], keys[name] = value, key

    reader = Fields(origin, config, {})
    for key in ("hidden_activation", "hidden_act"):
        if config.get(key) is not None:
            if config[key] not in ACTIVATIONS[family.activation]:
                reader.fail(key, f"is {config[key]!r:.40}, which isn't supported for this architecture")
            break
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config and config[key] is None:
            values[key] = 0.0
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        unknown = [t for t in layer_types if t not in ("full_attention", "sliding_attention")]
        if unknown:
            reader.fail("layer_types", f"has {unknown[0]!r:.40}, which isn't supported")
        local = [t == "sliding_attention" for t in layer_types]
        derive("attention.sliding_window_pattern", local, "layer_types")
    if config.get("query_pre_attn_scalar") is not None:
        derive("attention.scale", reader.number("query_pre_attn_scalar") ** -0.5, "query_pre_attn_scalar")
    if config.get("scale_emb") is not None:  # MiniCPM
        derive("embedding_scale", config["scale_emb"], "scale_emb")
    if config.get("scale_depth") is not None:
        depth = reader.number("scale_depth") / reader.integer("num_hidden_layers") ** 0.5
        derive("residual_scale", depth, "scale_depth")
    if config.get("dim_model_base") is not None:
        base = reader.integer("hidden_size") / reader.integer("dim_model_base")
        derive("logit_scale", base, "dim_model_base")
    if config.get("partial_rotary_factor") is not None:
        dims = int(read_head_dim(Fields(origin, values, keys)) * reader.number("partial_rotary_factor"))
        if dims < 2:
            reader.fail("partial_rotary_factor", "leaves no dimension to rotate")
        derive("rope.dimension_count", dims, "partial_rotary_factor")
    _read_rope(reader, config, values, keys)
    return Fields(origin, values, keys)


def _read_rope(
    reader: Fields, config: Mapping[str, Any], values: dict[str, Any], keys: dict[str, str]
) -> None:
    """rope_scaling, or the newer rope_parameters, which may be one per kind of layer."""
    section = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(section)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        reader.fail(section, "isn't an object")
    if "full_attention" in given:
        local = given.get("sliding_attention") or {}
        given = given["full_attention"]
        if not isinstance(given, dict) or not isinstance(local, dict):
            reader.fail(section, "isn't an object for each kind of layer")
        if "rope_theta" in local:
            values["rope.freq_base_swa"] = local["rope_theta"]
    for name, key in ROPE_KEYS.items():
        if given.get(key) is not None:
            values[name], keys[name] = given[key], f"{section}.{key}"
    scaling = Fields(reader.origin, given, {}, section + ".")
    kind = given.get("rope_type") or given.get("type") or "default"
    keys["rope.scaling.type"] = f"{section}.rope_type"
    values["rope.scaling.type"] = {"default": "none", "su": "longrope", "llama3": "none"}.get(str(kind), kind)
    values["llama3"] = kind == "llama3"
    if kind in ("su", "longrope"):
        key = "original_max_position_embeddings"
        original = Fields(reader.origin, {key: config.get(key, given.get(key))}, {}).integer(key)
        values["rope.scaling.original_context_length"] = original
        keys["rope.scaling.original_context_length"] = key
        growth = scaling.number("factor", default=reader.integer("max_position_embeddings") / original)
        values.pop("rope.scaling.factor", None)  # longrope's lists scale the frequencies
        if "rope.scaling.attn_factor" not in values and growth > 1 and original > 1:
            values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(growth) / math.log(original))
    if kind == "yarn":
        factor = scaling.number("factor")
        magnitude = scaling.number("attention_factor", default=0.0)
        mscale, all_dims = (scaling.number(k, default=0.0) for k in ("mscale", "mscale_all_dim"))
        if not magnitude and mscale and all_dims:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dims)
        if magnitude:  # read_rope multiplies by YaRN's own, which the config replaces
            values["rope.scaling.attn_factor"] = magnitude / yarn_magnitude(factor)


def _rename(origin: str, stored: Mapping[str, Any], family: Architecture) -> dict[str, Any]:
    layer_names = LAYER_TENSORS | dict(family.hf_names)
    tensors: dict[str, Any] = {}
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # rope_table computes it
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"model\.layers\.(\d{1,4})\.(.+)", stem)
        new = (
            f"blk.{int(match[1])}.{layer_names[match[2]]}"
            if match and match[2] in layer_names
            else TENSORS.get(stem)
        )
        if new is None or kind not in ("weight", "bias"):
            raise ModelError(f"{origin}: tensor {name[:80]!r} isn't known for this architecture.")
        if family.hf_norm_offset and new.endswith("norm"):
            tensor = OffsetNorm(tensor, family.hf_norm_offset)
        tensors[f"{new}.{kind}"] = tensor
    return tensors


def _derive_rope_factors(fields: Fields, tensors: dict[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """Frequency divisors as the weights that GGUF has for them."""
    dims = fields.integer("rope.dimension_count", default=read_head_dim(fields))
    if fields.values["llama3"]:
        tensors["rope_freqs.weight"] = DerivedTensor(llama3_factors(fields, dims))
        fields = replace(
            fields, values={k: v for k, v in fields.values.items() if k != "rope.scaling.factor"}
        )
    for length in ("long", "short"):
        if fields.values["rope.scaling.type"] == "longrope":
            factors = fields.numbers(f"rope.scaling.{length}_factor", dims // 2)
            tensors[f"rope_factors_{length}.weight"] = DerivedTensor(np.array(factors, np.float32))
    return fields, tensors
