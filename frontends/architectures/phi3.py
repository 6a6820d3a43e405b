"""Phi 3 and Phi 4 (Abdin et al. 2024): fused projections, and longrope in the long-context models."""

from dataclasses import replace

from zllmc.frontends.architectures.dense import Architecture, Facts, Layer, local_layers
from zllmc.frontends.architectures.fields import Fields
from zllmc.zllm_ir.graph import Value


def block(layer: Layer, x: Value) -> Value:
    x = layer.add(x, layer.attention(layer.norm(x, "attn_norm")))
    return layer.add(x, layer.fused_ffn(layer.norm(x, "ffn_norm")))


def phi3(f: Fields, facts: Facts) -> Facts:
    return replace(facts, windows=local_layers(f, facts, period=0)[1])


ARCHITECTURES = {"phi3": Architecture(block, adjust=phi3, hf_classes=("Phi3ForCausalLM",))}
