"""Compiled models on the CPU against llama.cpp's logits and tokens, and against themselves.

Tolerances are NMSE. Plain weights (F32, F16, BF16) are computed in f32, so what remains is the f16 KV cache:
llama.cpp itself moves by up to 4e-6 when it keeps f16 instead of f32. Block formats are computed with int8
activations, which cost llama.cpp between 2e-4 and 1e-3 on these files. Where two ways to compute the same
differ in an f32's last bits, an activation near a boundary of two int8 codes takes the other one: ways that
are exchangeable stay well below what the int8 activations cost as such.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from compiled import write_gguf
from models import ARCHS, DENSE, File, logits, nmse, open_file, reference
from zllmc.codegen import packing
from zllmc.codegen.packing import layout_of
from zllmc.compiler import compile_model
from zllmc.runtime.engine import Engine
from zllmc.targets.cpu import TARGETS, CpuTarget, detect
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.formats import FORMATS, decode, row_bytes
from zllmc.zllm_ir.host import host_flags

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

PLAIN = {"F32", "F16", "BF16"}
REQUIRED = PLAIN | {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
REQUIRED |= {"IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"}
REQUIRED |= {"TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0"}
PLAIN_LIMIT, INT8_LIMIT = 1e-5, 2e-3
SAME_PLAIN, SAME_INT8 = 1e-6, 5e-4  # the same numbers in another order
Q8_LIMIT = 2e-3  # 8 bits for keys and values instead of f16: measured 2e-5 to 9e-4
TARGET = detect()


def has_kernels(format: str) -> bool:
    try:
        layout_of(format, (256, 256), TARGET.lanes)
    except ZllmcError:
        return False
    return True


def formats(name: str) -> set[str]:
    return set(DENSE[name].get("types", PLAIN))  # aliases and variants have F16 matrices


def is_plain(name: str) -> bool:
    return formats(name) <= PLAIN


COMPILED = [name for name in DENSE if all(map(has_kernels, formats(name)))]
# What an alias or a variant changes has nothing to do with chunks.
FILES = [name for name in COMPILED if "file" in DENSE[name]]


def test_every_required_format_is_compiled_in_some_entry() -> None:
    assert set().union(*map(formats, COMPILED)) >= REQUIRED


# --- against llama.cpp ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPILED)
def test_logits_are_llama_cpps(conformance: Path, compiled: Callable[..., Path], name: str) -> None:
    tokens, expected = reference(conformance, name)
    with Engine.open(compiled(name), threads=2) as engine:
        error = nmse(expected, engine.logits(tokens.tolist()))
    if is_plain(name):
        assert error < PLAIN_LIMIT
    else:
        native = nmse(expected, np.load(conformance / f"{name}.npz")["logits_native"])
        assert error < min(INT8_LIMIT, 3 * native)


@pytest.mark.parametrize("name", ARCHS)
def test_greedy_tokens_are_llama_cpps(conformance: Path, compiled: Callable[..., Path], name: str) -> None:
    data = np.load(conformance / f"{name}.npz")
    with Engine.open(compiled(name), threads=2) as engine:
        session = engine.session()
        found = [int(session.prefill(data["tokens"][:16].tolist()).argmax())]
        while len(found) < 32:
            found.append(int(session.decode(found[-1]).argmax()))
    assert found == data["greedy"].tolist()


@dataclass
class Tensor:
    """A tensor for a file that a test makes."""

    shape: tuple[int, ...]
    type_name: str
    data: np.ndarray


def test_matrices_may_be_f32(conformance: Path, compiled: Callable[..., Path], tmp_path: Path) -> None:
    file = open_file(conformance, "archs/llama-dense")
    for name, tensor in file.tensors.items():
        fmt = FORMATS[tensor.type_name]
        numbers = decode(fmt, tensor.data.reshape(-1, row_bytes(fmt, tensor.shape[-1])))
        file.tensors[name] = Tensor(tensor.shape, "F32", numbers.astype(np.float32).view(np.uint8))
    tokens, expected = reference(conformance, "archs/llama-dense")
    with Engine.open(compiled(write_gguf(file, tmp_path / "f32.gguf")), threads=2) as engine:
        assert engine.manifest.formats.keys() == {"F32"}
        assert nmse(expected, engine.logits(tokens.tolist())) < PLAIN_LIMIT


@pytest.mark.parametrize("name", ["archs/llama-dense", "quants/llama-dense-Q4_K_M"])
@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t != TARGET], ids=str)
def test_targets_below_this_machines_best_are_right_too(
    conformance: Path, kernel_cache: Path, tmp_path: Path, target: CpuTarget, name: str
) -> None:
    if target.triple != TARGET.triple or not target.requires <= host_flags():
        pytest.skip(f"{target} doesn't run here")
    tokens, expected = reference(conformance, name)
    model = conformance / f"{name}.gguf"
    options = {"target": str(target), "kernel_cache": kernel_cache}
    artifact = compile_model(model, tmp_path / "x.zllm", context=64, **options)
    with Engine.open(artifact, threads=2) as engine:
        limit = PLAIN_LIMIT if is_plain(name) else INT8_LIMIT
        assert nmse(expected, engine.logits(tokens.tolist())) < limit


def test_a_format_without_kernels_is_named_with_its_tensor(
    conformance: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SCALE_KINDS", ("f16",))
    message = (
        r"llama-dense-MXFP4\.gguf: tensor [\w.]+: no CPU kernel for MXFP4: its scale is e8m0_half, not f16"
    )
    with pytest.raises(ZllmcError, match=message):
        compile_model(conformance / "quants/llama-dense-MXFP4.gguf", tmp_path / "x.zllm", context=64)
    assert not list(tmp_path.iterdir())


# --- against itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_one_pass_is_chunks_is_token_by_token(
    conformance: Path, compiled: Callable[..., Path], name: str
) -> None:
    tokens = reference(conformance, name)[0].tolist()
    with Engine.open(compiled(name), threads=2) as engine:
        every_row = engine.logits(tokens)
        for sizes in ([48], [16, 32], [1, 47], [5] * 9 + [3], [1] * 48):
            session = engine.session()
            ends = np.cumsum(sizes)
            found = [
                session.prefill(tokens[end - size : end]).copy()
                for size, end in zip(sizes, ends, strict=True)
            ]
            assert nmse(every_row[ends - 1], np.array(found)) < (SAME_PLAIN if is_plain(name) else SAME_INT8)


@pytest.mark.parametrize("name", ["archs/gemma2-dense", "archs/phi3-dense", "quants/llama-dense-Q4_K_M"])
def test_logits_do_not_depend_on_the_number_of_threads(
    conformance: Path, compiled: Callable[..., Path], name: str
) -> None:
    tokens = reference(conformance, name)[0].tolist()
    found = []
    for threads in (1, 2, 3):
        with Engine.open(compiled(name), threads=threads) as engine:
            session = engine.session()
            steps = [session.decode(id).copy() for id in tokens]
            found.append(np.concatenate([engine.logits(tokens), steps]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


# --- the KV cache --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["archs/gemma-dense", "archs/gemma3-dense", "quants/llama-dense-Q4_0"])
def test_a_q8_cache_changes_the_logits_a_little(
    conformance: Path, compiled: Callable[..., Path], name: str
) -> None:
    tokens, expected = reference(conformance, name)
    found = {}
    for kv in ("f16", "q8"):
        with Engine.open(compiled(name, kv=kv), threads=2) as engine:
            assert engine.manifest.kv == kv
            found[kv] = engine.logits(tokens.tolist())
    assert 1e-6 < nmse(found["f16"], found["q8"]) < Q8_LIMIT
    assert nmse(expected, found["q8"]) < Q8_LIMIT


def with_heads(file: File, heads: int, kv_heads: int, head_dim: int) -> File:
    """The model with other attention matrices, drawn at random as wide as those that it had."""
    random = np.random.default_rng(heads * head_dim)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "output": heads}
    for name in [n for n in file.tensors if ".attn_" in n and ".attn_norm" not in n]:
        old = file.tensors[name].data.view(np.float16)
        rows = sizes[name.split(".")[2].removeprefix("attn_")] * head_dim
        shape = (256, rows) if "output" in name else (rows, 256)
        matrix = random.normal(0, old.std(dtype=np.float64), shape).astype(np.float16)
        file.tensors[name] = Tensor(shape, "F16", matrix.view(np.uint8))
    heads_and_widths = {"attention__head_count": heads, "attention__head_count_kv": kv_heads}
    widths = ("attention__key_length", "attention__value_length", "rope__dimension_count")
    return file.set(**heads_and_widths, **dict.fromkeys(widths, head_dim))


@pytest.mark.parametrize("kv, limit", [("f16", 1e-7), ("q8", 1e-5)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, 32), (6, 2, 80), (8, 2, 128), (2, 1, 256)])
def test_heads_of_every_size_and_grouping(
    conformance: Path,
    compiled: Callable[..., Path],
    tmp_path: Path,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv: str,
    limit: float,
) -> None:
    """Against the interpreter, which rounds keys and values as the cache does. Both may round a number that
    lies between two codes the other way."""
    file = with_heads(open_file(conformance, "archs/llama-dense"), heads, kv_heads, head_dim)
    tokens = np.random.default_rng(0).integers(0, 128, 40).tolist()
    expected = logits(file.model(context=64, kv=kv), tokens)
    with Engine.open(compiled(write_gguf(file, tmp_path / "heads.gguf"), kv=kv), threads=2) as engine:
        assert nmse(expected, engine.logits(tokens)) < limit
        session = engine.session()
        steps = np.array([session.decode(id).copy() for id in tokens])
        assert nmse(expected, steps) < limit
