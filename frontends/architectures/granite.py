"""Granite (IBM) and MiniCPM (Hu et al. 2024): Llama with constant scales on its streams.

In GGUF `logit_scale` divides the logits; Facts has the factor.
"""

from dataclasses import replace

from zllmc.frontends.architectures.dense import Architecture, Facts
from zllmc.frontends.architectures.fields import Fields
from zllmc.frontends.architectures.llama import LLAMA


def granite(f: Fields, facts: Facts) -> Facts:
    rotates = f.flag("rope.scaling.finetuned", default=True)  # llama.cpp's switch for Granite's rope
    return replace(
        facts,
        embedding_scale=f.number("embedding_scale", default=1.0),
        residual_scale=f.number("residual_scale", default=1.0),
        logit_scale=1 / f.number("logit_scale"),
        ropes=facts.ropes if rotates else (None,) * facts.layers,
    )


def minicpm(f: Fields, facts: Facts) -> Facts:
    """Old files have none of the scales: they are those of MiniCPM 2B, whose base model is 256 wide."""
    return replace(
        facts,
        embedding_scale=f.number("embedding_scale", default=12.0),
        residual_scale=f.number("residual_scale", default=1.4 / facts.layers**0.5),
        logit_scale=1 / f.number("logit_scale", default=facts.width / 256),
    )


GRANITE: Architecture = replace(LLAMA, adjust=granite)

ARCHITECTURES = {
    "granite": replace(GRANITE, hf_classes=("GraniteForCausalLM",)),
    "granitemoe": GRANITE,  # its dense files
    "minicpm": replace(LLAMA, adjust=minicpm, hf_classes=("MiniCPMForCausalLM",)),
}
