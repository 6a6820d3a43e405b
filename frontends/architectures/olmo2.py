"""OLMo 2 (2024) and OLMo 3: norms after each half of a layer, and on the whole of q and of k.

OLMo 3 adds local layers, three of four, whose rope isn't scaled.
"""

from dataclasses import replace

from zllmc.frontends.architectures.dense import Architecture, Facts, Layer, local_layers
from zllmc.frontends.architectures.fields import Fields
from zllmc.zllm_ir.graph import Value


def block(layer: Layer, x: Value) -> Value:
    q, k, v = layer.flat_qkv(x)
    q, k = layer.norm(q, "attn_q_norm"), layer.norm(k, "attn_k_norm")
    y = layer.attend(layer.heads(q), layer.heads(k), layer.heads(v))
    x = layer.add(x, layer.norm(y, "post_attention_norm"))
    return layer.add(x, layer.norm(layer.ffn(x), "post_ffw_norm"))


def olmo3(f: Fields, facts: Facts) -> Facts:
    local, windows = local_layers(f, facts, period=4)
    rope = facts.rope
    base = f.number("rope.freq_base_swa", default=rope.base)
    ropes = tuple(rope.plain(base) if is_local else rope for is_local in local)
    return replace(facts, windows=windows, ropes=ropes)


ARCHITECTURES = {
    "olmo2": Architecture(
        block,
        adjust=olmo3,
        hf_classes=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
        hf_names={
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    )
}
