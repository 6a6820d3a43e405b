"""Llama (Touvron et al. 2023), and the families that are the same computation under another name.

The defaults of `Architecture` and `Facts` describe this family: RMS norm before each half of a layer,
rotary grouped-query attention, a gated feed-forward network, optional biases.
"""

from dataclasses import replace

from zllmc.frontends.architectures.dense import Architecture, Facts, Layer, local_layers
from zllmc.frontends.architectures.fields import Fields
from zllmc.zllm_ir.graph import Value


def block(layer: Layer, x: Value) -> Value:
    x = layer.add(x, layer.attention(layer.norm(x, "attn_norm")))
    return layer.add(x, layer.ffn(layer.norm(x, "ffn_norm")))


def mistral(f: Fields, facts: Facts) -> Facts:
    """Every layer has the window, where the config has one (the first Mistral 7B)."""
    return replace(facts, windows=local_layers(f, facts, period=0)[1])


def mistral3(f: Fields, facts: Facts) -> Facts:
    """Ministral 3 makes queries larger beyond the original context; within it the factor is exactly 1."""
    original = f.integer("rope.scaling.original_context_length", default=facts.trained_context)
    if f.number("attention.temperature_scale", default=0.0) and facts.context > original:
        f.fail(
            "attention.temperature_scale",
            f"needs scaled queries in a context of more than {original} tokens, which isn't supported: "
            "take a smaller context",
        )
    return facts


def smollm3(f: Fields, facts: Facts) -> Facts:
    """No positions in every fourth layer (SmolLM3; GGUF has no key for it)."""
    rotates = f.layer_flags("rope.layers", facts.layers, period=4)
    return replace(facts, ropes=tuple(r if on else None for r, on in zip(facts.ropes, rotates, strict=True)))


LLAMA = Architecture(block, rope_style="norm")

ARCHITECTURES = {
    "llama": replace(LLAMA, hf_classes=("LlamaForCausalLM",)),
    "mistral": replace(LLAMA, adjust=mistral, hf_classes=("MistralForCausalLM",)),  # folders only
    "mistral3": replace(LLAMA, adjust=mistral3, hf_classes=("Ministral3ForCausalLM",)),
    "smollm3": replace(LLAMA, adjust=smollm3, hf_classes=("SmolLM3ForCausalLM",)),
    "deci": LLAMA,
    "ernie4_5": LLAMA,
    "internlm2": LLAMA,
    "nanbeige": LLAMA,
    "xverse": LLAMA,
}
