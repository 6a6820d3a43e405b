"""Whole models compiled for GPUs and run on the emulated device, against llama.cpp's logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiled import entry_file
from models import DENSE, nmse, reference
from zllmc.compiler import compile_model
from zllmc.runtime.engine import Engine
from zllmc.zllm_ir.plan import CONTROL_CACHED, CONTROL_TOKENS, Pointer

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

PLAIN_LIMIT, INT8_LIMIT = 1e-5, 2e-3  # NMSE, as for the CPU's kernels (tests/cpu/test_conformance.py)
ON_EVERY_TARGET = {
    "cuda:sm_90": "quants/llama-dense-Q4_K_M",
    "rocm:gfx1100": "archs/gemma3-dense",
    "rocm:gfx942": "quants/qwen2-dense-Q4_K_M",
    "metal:apple9": "quants/qwen3-dense-Q4_0",
}
# The other families on the target that needs no compiler: the kernels are the same.
FAMILIES = ["gemma", "gemma2", "granite", "minicpm", "olmo2", "phi3", "phi3-dense-longrope"]
MODELS = [*ON_EVERY_TARGET.items()]
MODELS += [("metal:apple9", f"archs/{name if '-' in name else name + '-dense'}") for name in FAMILIES]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """`artifact(target, name)`: the conformance model compiled, once."""
    folder = tmp_path_factory.mktemp("gpu")
    compiled: dict[tuple[str, str], Path] = {}

    def artifact(target: str, name: str) -> Path:
        if (target, name) not in compiled:
            compiled[target, name] = compile_model(
                entry_file(name, folder),
                folder / f"{len(compiled)}.zllm",
                target=target,
                context=256,
                kernel_cache=folder / "kernels",
            )
        return compiled[target, name]

    return artifact


@pytest.fixture(autouse=True)
def emulator_in(emulator_cache, monkeypatch):
    monkeypatch.setenv("ZLLMC_CACHE", str(emulator_cache))


@pytest.mark.parametrize(("target", "name"), MODELS)
def test_logits_are_llama_cpps_in_prefill_decode_and_batches(conformance, artifact, target, name):
    tokens, expected = reference(conformance, name)
    ids = tokens.tolist()
    plain = set(DENSE[name].get("types", {"F16"})) <= {"F32", "F16", "BF16"}
    limit = PLAIN_LIMIT if plain else INT8_LIMIT
    with Engine.open(artifact(target, name), device="emulate") as engine:
        assert nmse(expected, engine.logits(ids)) < limit
        session = engine.session()
        session.prefill(ids[:13])
        assert nmse(expected[13:20], np.stack([session.decode(i).copy() for i in ids[13:20]])) < limit
        batch = [engine.session() for _ in range(3)]
        for count, member in enumerate(batch, 2):
            member.prefill(ids[:count])
        assert nmse(expected[2:5], engine.decode_batch(batch, ids[2:5])) < limit


def test_a_replayed_decode_equals_single_launches_while_the_cache_grows(artifact):
    path = artifact("metal:apple9", ON_EVERY_TARGET["metal:apple9"])
    with Engine.open(path, device="emulate") as engine:
        session = engine.session()
        replayed, ids = [], [1]
        for _ in range(50):  # over three blocks of 16 keys
            replayed.append(session.decode(ids[-1]).copy())
            ids.append(int(np.argmax(replayed[-1])))

        plan, buffers = engine._plan, engine._buffers
        numbers = {buffer.name: i for i, buffer in enumerate(plan.buffers)}
        entry = next(entry for entry in plan.entries if entry.name == "decode")
        control = np.zeros(plan.buffers[numbers["control"]].bytes // 4, np.int32)
        for position, logits in enumerate(replayed):
            control[[CONTROL_TOKENS, CONTROL_CACHED]] = 1, position
            for name, words in (
                ("control", control),
                ("tokens", np.array([ids[position]], np.int32)),
                ("positions", np.array([position], np.int32)),
            ):
                engine.device.write(buffers[numbers[name]], words)
            for launch in entry.launches:
                arguments = [(buffers[a.buffer], a.offset) for a in launch.args if isinstance(a, Pointer)]
                engine.device.launch(launch.kernel, launch.grid, launch.threads, arguments)
            eager = engine.device.read(buffers[numbers["logits"]], np.float32, (len(logits),))
            np.testing.assert_array_equal(eager, logits)
