"""All passes over the graph, in order, and the lowering of every entry point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zllmc.passes.batch import batch
from zllmc.passes.choose_token import choose_token
from zllmc.passes.fold_scales import fold_scales
from zllmc.passes.fuse_attention import PARTS, attention_parts, fuse_attention
from zllmc.passes.fuse_norm_add import fuse_norm_add
from zllmc.passes.fuse_quantize import fuse_quantize
from zllmc.passes.fuse_residual import fuse_residual
from zllmc.passes.fuse_rope_append import fuse_rope_append
from zllmc.passes.join_linears import join_linears
from zllmc.passes.lower import lower
from zllmc.passes.quantize_activations import quantize_activations
from zllmc.passes.rewrite import eliminate_dead
from zllmc.passes.select_early import select_early
from zllmc.passes.specialise import specialise
from zllmc.targets import Target
from zllmc.targets.cpu import CpuTarget
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.graph import Graph
from zllmc.zllm_ir.kernel_graph import KernelGraph, print_kernels
from zllmc.zllm_ir.picture import picture
from zllmc.zllm_ir.text import print_graph
from zllmc.zllm_ir.verify import verify

MAX_TOKENS = 512  # of one prefill pass
MAX_ROWS = 32  # of one pass whose logits can be asked for
MAX_BATCH = 8  # sequences of one decode pass, unless told otherwise


def lower_entries(
    graph: Graph,
    target: Target,
    *,
    context: int,
    max_batch: int = MAX_BATCH,
    dump: Path | None = None,
    check: bool = False,
) -> dict[str, KernelGraph]:
    """The kernel graphs of all entry points by name, for `target` and caches of `context` tokens.

    There is one for up to `max_batch` sequences unless that is 1. `dump` is a folder that gets one folder of
    numbered files, texts and pictures, for each; with `check`, the verifier runs after every pass.
    """
    entries = {}
    for name, tokens in (("decode", 1), ("prefill", None)):
        folder = dump / name if dump else None
        passed = run_passes(
            graph,
            tokens=tokens,
            context=context,
            attention_parts=attention_parts(target),
            limit_activations=isinstance(target, CpuTarget) and target.limits_activations,
            # Logits take long to get from a GPU to the host.
            chooses=isinstance(target, GpuTarget) and name == "decode",
            dump=folder,
            check=check,
        )
        entries[name] = lower(
            passed,
            name=name,
            context=context,
            max_tokens=tokens or MAX_TOKENS,
            max_rows=tokens or MAX_ROWS,
        )
    if max_batch > 1:
        entries["batch"] = batch(entries["decode"], entries["prefill"], max_batch)
    if dump is not None:
        for name, kernels in entries.items():
            (dump / name).mkdir(exist_ok=True)
            (dump / name / "99-kernels.txt").write_text(print_kernels(kernels), encoding="utf-8")
            (dump / name / "99-kernels.svg").write_text(picture(kernels), encoding="utf-8")
    return entries


def run_passes(
    graph: Graph,
    *,
    tokens: int | None,
    context: int,
    attention_parts: int = PARTS,
    limit_activations: bool = False,
    chooses: bool = False,
    dump: Path | None = None,
    check: bool = False,
) -> Graph:
    """The graph of one entry point, ready to lower: `tokens` is 1 for decode, None for prefill.

    `context` is the largest number of cached tokens; for `attention_parts` see `fuse_attention`, for
    `limit_activations` `quantize_activations`. With `chooses`, a decode step chooses its token. `dump` is a
    folder that gets the graph after every pass, as a text and as a picture, in numbered files; with `check`,
    the verifier runs after every pass.
    """
    passes: list[tuple[str, Callable[[Graph], Graph]]] = [
        ("input", lambda g: g),
        ("specialise", lambda g: specialise(g, tokens)),
        # Algebra: fewer ops over the same data, and fewer rows.
        ("select_early", select_early),
        ("fold_scales", fold_scales),
        ("fuse_residual", fuse_residual),
        ("fuse_norm_add", fuse_norm_add),
        ("fuse_rope_append", fuse_rope_append),
        ("fuse_attention", lambda g: fuse_attention(g, context, attention_parts)),
        # Launches: one over what several read.
        ("join_linears", join_linears),
        # Numbers: int8 activations for the block formats.
        ("quantize_activations", lambda g: quantize_activations(g, limit=limit_activations)),
        ("fuse_quantize", fuse_quantize),
        ("eliminate_dead", eliminate_dead),
        *([("choose_token", choose_token)] if chooses else []),
    ]
    for number, (name, run) in enumerate(passes):
        graph = run(graph)
        if check:
            verify(graph)
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{number:02}-{name}.txt").write_text(print_graph(graph), encoding="utf-8")
            (dump / f"{number:02}-{name}.svg").write_text(picture(graph), encoding="utf-8")
    return graph
