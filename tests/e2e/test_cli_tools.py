"""info, targets, verify and bench."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np
import pytest

import zllmc
from processes import Run
from zllmc.runtime.artifact import digests
from zllmc.targets import all_targets
from zllmc.zllm_ir.formats import FORMATS

pytest_plugins = ("cli_fixtures",)

Compiled = Callable[..., pathlib.Path]


def test_info_of_a_model(run: Run, gguf: pathlib.Path) -> None:
    facts = json.loads(run("info", gguf, "--json").out)
    assert (facts["architecture"], facts["parameters"], facts["layers"]) == ("llama", 64192, 1)
    assert facts["kv_bytes_per_token"] == {"f16": 128, "q8": 72}
    assert facts["targets"] == {str(target): {"F32": True} for target in all_targets()}
    text = run("info", gguf).out
    assert "cuda:sm_80, sm_86, " in text
    assert "blk.*.ffn_gate.weight" in text and "bpe (gpt-2)" in text and "KV f16 (128 B/token)" in text


def test_info_of_an_artifact(run: Run, artifact: pathlib.Path) -> None:
    assert json.loads(run("info", artifact, "--json").out)["context"] == 512
    assert "llama 64k F32 | weights" in run("info", artifact).out


def test_info_shows_what_an_unsupported_model_is(
    run: Run, conformance: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMATS, "IQ1_M")
    done = run("info", conformance / "quants" / "llama-dense-IQ1_M.gguf")
    assert done.code == 2 and "no kernel for" in done.out and "IQ1_M" in done.err


def test_targets_keeps_four_states_apart(run: Run) -> None:
    result = json.loads(run("targets", "--json").out)
    cells = {(cell["format"], cell["target"]): cell for cell in result["support"]}

    def states(format: str, target: str) -> list[bool]:
        return [cells[format, target][s] for s in ("parsed", "reference", "kernel", "default_path")]

    for target in map(str, all_targets()):
        for format in "Q4_K", "F16", "IQ1_M":
            assert states(format, target) == [True, True, True, True]
        assert states("Q8_1", target) == [True, False, False, False]


def test_targets_and_info_do_without_the_compiler(gguf: pathlib.Path) -> None:
    """TVM alone takes longer to import than either should take."""
    program = f"""
import sys
from pathlib import Path
from zllmc.info import show_info
from zllmc.support import show_targets
show_targets(as_json=True)
show_info(Path({str(gguf)!r}), as_json=True)
sys.exit("tvm" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_verify_passes_a_right_artifact(
    run: Run, artifact: pathlib.Path, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    tokens = np.arange(10, 40, dtype=np.int32)
    np.savez(tmp_path / "ref.npz", tokens=tokens, logits=zllmc.load(artifact).logits(tokens.tolist()))
    done = run("verify", artifact, "--source", gguf, "--against", tmp_path / "ref.npz", "--json")
    result = json.loads(done.out)
    assert done.code == 0 and result["passed"]
    ops = {kernel["name"].split("_")[0] for kernel in result["kernels"]}
    assert {"embedding", "linear", "rms", "rope", "attention", "glu"} <= ops
    assert [c["name"] for c in result["logits"]] == ["ref.npz", "interpreter"]
    assert result["logits"][0]["nmse"] == 0 and result["logits"][0]["top1"] == 1


def test_verify_reads_a_quantized_cache(run: Run, gguf: pathlib.Path) -> None:
    done = run("verify", gguf, "--kv", "q8", "--context", "100")
    assert done.code == 0, done.out


def test_verify_reads_quantized_activations(run: Run, conformance: pathlib.Path, compiled: Compiled) -> None:
    source = conformance / "quants" / "gemma3-dense-Q8_0.gguf"
    done = run("verify", compiled(source), "--source", source)
    assert done.code == 0 and "rms_norm_quantize" in done.out, done.out


def test_verify_finds_a_wrong_weight(
    run: Run, artifact: pathlib.Path, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    broken = shutil.copytree(artifact, tmp_path / "broken.zllm")
    weights = bytearray((broken / "weights.bin").read_bytes())
    weights[3] = 0x45  # the exponent of the first element
    (broken / "weights.bin").write_bytes(weights)
    done = run("verify", broken)
    assert done.code == 2 and "weights.bin is not what the compiler wrote in bytes 0 to " in done.err

    # What a compiler that is wrong would write, with the checksums of that.
    (broken / "checksums.json").write_text(json.dumps([[len(weights), zlib.crc32(weights)]]))
    manifest = json.loads((broken / "manifest.json").read_bytes())
    (broken / "manifest.json").write_text(json.dumps(manifest | {"files": digests(broken)}))
    done = run("verify", broken, "--source", gguf)
    assert done.code == 1 and "OUT OF TOLERANCE" in done.out and "FAILED" in done.out


def test_verify_checks_at_least_the_files(run: Run, artifact: pathlib.Path) -> None:
    done = run("verify", artifact)
    assert done.code == 0 and "as the compiler wrote them" in done.out and "--source" in done.out


def test_verify_compiles_a_damaged_model_in_the_cache_again(
    run: Run, gguf: pathlib.Path, cache: pathlib.Path
) -> None:
    os.utime(gguf, (4, 4))
    before = set(cache.glob("models/*.zllm"))
    assert run("verify", gguf, "--context", "100").code == 0
    (entry,) = set(cache.glob("models/*.zllm")) - before
    with (entry / "weights.bin").open("r+b") as file:
        file.write(b"damage")
    done = run("verify", gguf, "--context", "100")
    assert done.code == 0 and f"{entry} is damaged" in done.err
    assert run("verify", gguf, "--context", "100").err == ""


def test_verify_finds_wrong_logits(run: Run, artifact: pathlib.Path, tmp_path: pathlib.Path) -> None:
    tokens = np.arange(10, dtype=np.int32)
    logits = zllmc.load(artifact).logits(tokens.tolist())
    np.savez(tmp_path / "ref.npz", tokens=tokens, logits=logits[::-1])
    assert run("verify", artifact, "--against", tmp_path / "ref.npz").code == 1


def test_verify_refuses_what_it_cannot_compare(
    run: Run, artifact: pathlib.Path, gguf: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    np.savez(tmp_path / "odd.npz", tokens=np.zeros(3, np.int32), logits=np.zeros((3, 7), np.float32))
    (tmp_path / "bad.npz").write_bytes(b"no zip")
    for options in (
        ["--against", tmp_path / "odd.npz"],
        ["--against", tmp_path / "bad.npz"],
        ["--source", gguf, "--tokens", 514],
    ):
        done = run("verify", artifact, *options)
        assert done.code == 2 and done.err.count("\n") == 1


def test_bench_measures(run: Run, artifact: pathlib.Path) -> None:
    sizes = ("--prompt", "40", "--tokens", "8", "--depth", "20", "--repeat", "2", "--threads", "1")
    result = json.loads(run("bench", artifact, *sizes, "--profile", "--json").out)
    assert result["prefill"]["tokens_per_s"] > 0 and result["decode"]["tokens_per_s"] > 0
    assert len(result["decode"]["s"]) == 2 and result["threads"] == 1
    assert 0 < result["first_token"]["s"] < 10 and result["load"]["s"] > 0
    assert result["memory"]["peak_bytes"] > 10 << 20
    assert sum(kernel["launches"] for kernel in result["profile"]["decode"]) > 8
    text = run("bench", artifact, *sizes, "--profile").out
    assert "tokens/s" in text and "time to first token" in text and "linear_F32" in text


def test_bench_decodes_batches(run: Run, artifact: pathlib.Path) -> None:
    sizes = ("--prompt", "9", "--tokens", "4", "--repeat", "2", "--threads", "1", "--batch", "1,3")
    result = json.loads(run("bench", artifact, *sizes, "--profile", "--json").out)
    assert [batch["size"] for batch in result["batches"]] == [1, 3]
    assert all(batch["tokens_per_s"] > 0 and len(batch["s"]) == 2 for batch in result["batches"])
    launches = {name: sum(k["launches"] for k in kernels) for name, kernels in result["profile"].items()}
    assert launches["decode"] < launches["batch"] < 3 * launches["decode"]
    assert "decode 4 tokens of 3 sequences" in run("bench", artifact, *sizes).out
    for wrong, message in (("2,9", "takes 1 to 8"), ("0,1", "takes 1 to 8"), ("2;3", "list of numbers")):
        done = run("bench", artifact, *sizes[:-1], wrong)
        assert done.code == 2 and message in done.err


def test_bench_counts_the_bytes_that_a_token_moves(
    run: Run, conformance: pathlib.Path, compiled: Compiled
) -> None:
    artifact = compiled(conformance / "quants" / "gemma3-dense-Q8_0.gguf")
    sizes = ("--prompt", "4", "--tokens", "2", "--repeat", "1", "--json")
    moved = json.loads(run("bench", artifact, *sizes).out)["traffic"]
    assert 0.9 < moved["moved_over_packed"] < 1.2


def test_bench_refuses_more_than_the_context(run: Run, artifact: pathlib.Path) -> None:
    done = run("bench", artifact, "--prompt", "600")
    assert done.code == 2 and "512" in done.err


@pytest.mark.parametrize("command", ["", "compile", "run", "verify", "bench"])
def test_help_has_examples(run: Run, command: str) -> None:
    done = run(*command.split(), "--help")
    assert done.code == 0 and "zllmc " in done.out.split("Examples:")[1]
    assert "..." not in done.out.split("Options:")[1]  # a summary that was cut off
