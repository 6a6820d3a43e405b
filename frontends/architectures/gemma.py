"""Gemma 1, 2 and 3 (2024-2025): scaled embeddings, GELU, then also norms after each half of a layer,
local layers between global ones, soft caps (2), and norms on each head of q and k (3).
"""

from dataclasses import replace

from zllmc.frontends.architectures import llama
from zllmc.frontends.architectures.dense import Architecture, Facts, Layer, local_layers
from zllmc.frontends.architectures.fields import Fields
from zllmc.zllm_ir.graph import Value


def gemma2_block(layer: Layer, x: Value) -> Value:
    y = layer.attention(layer.norm(x, "attn_norm"))
    x = layer.add(x, layer.norm(y, "post_attention_norm"))
    y = layer.ffn(layer.norm(x, "ffn_norm"))
    return layer.add(x, layer.norm(y, "post_ffw_norm"))


def gemma3_block(layer: Layer, x: Value) -> Value:
    q, k, v = layer.qkv(layer.norm(x, "attn_norm"))
    y = layer.attend(layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm"), v)
    x = layer.add(x, layer.norm(y, "post_attention_norm"))
    y = layer.ffn(layer.norm(x, "ffn_norm"))
    return layer.add(x, layer.norm(y, "post_ffw_norm"))


def gemma(f: Fields, facts: Facts) -> Facts:
    return replace(facts, embedding_scale=facts.width**0.5)


def gemma2(f: Fields, facts: Facts) -> Facts:
    """Every second layer is local, with the same rope unless the file gives it another base."""
    local, windows = local_layers(f, facts, period=2, window=4096)
    rope = facts.rope
    local_rope = replace(rope, base=f.number("rope.freq_base_swa", default=rope.base))
    return replace(
        gemma(f, facts),
        attention_scale=_attention_scale(f, facts, layers_27b=46),
        attention_softcap=_softcap(f, "attn_logit_softcapping", default=50.0),
        logit_softcap=_softcap(f, "final_logit_softcapping", default=30.0),
        windows=windows,
        ropes=tuple(local_rope if is_local else rope for is_local in local),
    )


def gemma3(f: Fields, facts: Facts) -> Facts:
    """Five of six layers are local, with a rope that isn't scaled and has a base of its own."""
    local, windows = local_layers(f, facts, period=6)
    rope = facts.rope
    local_rope = rope.plain(f.number("rope.freq_base_swa", default=10000.0))
    return replace(
        gemma(f, facts),
        attention_scale=_attention_scale(f, facts, layers_27b=62),
        logit_softcap=_softcap(f, "final_logit_softcapping", default=0.0),
        windows=windows,
        ropes=tuple(local_rope if is_local else rope for is_local in local),
    )


def _attention_scale(f: Fields, facts: Facts, layers_27b: int) -> float:
    """The 27B models scale by the width per head, which isn't their head width; GGUF files may not say so."""
    width_per_head = facts.width // facts.heads if facts.layers == layers_27b else facts.head_dim
    return f.number("attention.scale", default=width_per_head**-0.5)


def _softcap(f: Fields, name: str, default: float) -> float:
    """A cap of 0 in the file switches it off; the default is for files without the key."""
    return 0.0 if f.values.get(name) == 0 else f.number(name, default)


POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA = Architecture(llama.block, activation="gelu", hf_norm_offset=1.0)

ARCHITECTURES = {
    "gemma": replace(GEMMA, adjust=gemma, hf_classes=("GemmaForCausalLM",)),
    "gemma2": replace(
        GEMMA, block=gemma2_block, adjust=gemma2, hf_classes=("Gemma2ForCausalLM",), hf_names=POST_NORMS
    ),
    "gemma3": replace(
        GEMMA, block=gemma3_block, adjust=gemma3, hf_classes=("Gemma3ForCausalLM",), hf_names=POST_NORMS
    ),
}
