"""Qwen 2 (biases on q, k, v) and Qwen 3 (a norm on each head of q and k)."""

from dataclasses import replace

from zllmc.frontends.architectures import llama
from zllmc.frontends.architectures.dense import Architecture, Facts, Layer
from zllmc.frontends.architectures.fields import Fields
from zllmc.zllm_ir.graph import Value


def qwen3(layer: Layer, x: Value) -> Value:
    q, k, v = layer.qkv(layer.norm(x, "attn_norm"))
    q, k = layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm")
    x = layer.add(x, layer.attend(q, k, v))
    return layer.add(x, layer.ffn(layer.norm(x, "ffn_norm")))


def windows(f: Fields, facts: Facts) -> Facts:
    """Folders may ask for a window in the upper layers; released models don't, and GGUF has no key for it."""
    if not f.flag("attention.use_sliding_window", default=False):
        return facts
    full = f.integer("attention.full_layers", default=facts.layers)
    window = f.integer("attention.sliding_window")
    return replace(facts, windows=tuple(window if i >= full else 0 for i in range(facts.layers)))


ARCHITECTURES = {
    "qwen2": Architecture(llama.block, adjust=windows, hf_classes=("Qwen2ForCausalLM",)),
    "qwen3": Architecture(qwen3, adjust=windows, hf_classes=("Qwen3ForCausalLM",)),
}
