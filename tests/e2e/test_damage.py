"""Damaged artifacts and model files that cannot be compiled: one clear error each, and never a crash."""

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zllmc.compiler
from compiled import write_gguf
from gguf_writer import F32, STRING, U32, key, model, scalar, string, tensor_info, u32
from models import DENSE, open_file
from zllmc.cli import main
from zllmc.frontends.gguf import read_gguf
from zllmc.runtime.artifact import FORMAT_VERSION, ArtifactError, check_weights, digests, open_artifact
from zllmc.runtime.engine import Engine
from zllmc.zllm_ir.errors import ZllmcError

pytestmark = pytest.mark.skipif(not DENSE, reason="no conformance data: set ZLLMC_SHARED")

NAME = "archs/llama-dense"


# --- damaged artifacts -----------------------------------------------------------------------------------


@pytest.fixture
def artifact(compiled: Callable[..., Path], tmp_path: Path) -> Path:
    """An artifact to damage."""
    return shutil.copytree(compiled(NAME), tmp_path / "x.zllm")


def refused(artifact: Path, match: str) -> None:
    with pytest.raises(ArtifactError, match=match) as raised:
        Engine.open(artifact, threads=1)
    assert str(artifact) in str(raised.value)
    assert len(str(raised.value)) < 500 and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["weights.bin", "plan.json", "manifest.json", "kernels/executor.o"])
@pytest.mark.parametrize("how", ["missing", "empty", "half", "longer", "folder"])
def test_a_file_that_is_not_whole_is_named(artifact: Path, name: str, how: str) -> None:
    path = artifact / name
    data = path.read_bytes()
    path.unlink()
    match how:
        case "empty":
            path.touch()
        case "half":
            path.write_bytes(data[: len(data) // 2])
        case "longer":
            path.write_bytes(data + b"\0")
        case "folder":
            path.mkdir()
    refused(artifact, "damaged|no artifact" if name == "manifest.json" else f"damaged .*{name}")


def test_a_missing_kernel_and_a_flipped_bit_in_one_are_named(artifact: Path) -> None:
    kernel = next(p for p in artifact.glob("kernels/*.o") if p.name.startswith("linear"))
    data = kernel.read_bytes()
    kernel.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    refused(artifact, f"damaged .*{kernel.name} is not what the compiler wrote")
    kernel.unlink()
    refused(artifact, f"damaged .*{kernel.name}")


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 1.0])
def test_a_flipped_bit_anywhere_in_the_weights_is_found_where_it_is(artifact: Path, place: float) -> None:
    check_weights(open_artifact(artifact))
    data = bytearray((artifact / "weights.bin").read_bytes())
    flipped = int(place * (len(data) - 1))
    data[flipped] ^= 1
    (artifact / "weights.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"damaged .*weights\.bin") as raised:
        check_weights(open_artifact(artifact))
    found = re.search(r"in bytes ([\d,]+) to ([\d,]+)\)", str(raised.value))
    assert found
    start, end = (int(number.replace(",", "")) for number in found.groups())
    assert start <= flipped < end


@pytest.mark.parametrize("checksums", ["[]", "[[-4,0],[{0},0]]", "[[7,0]]", "[[{0}]]", "{{}}"])
def test_checksums_that_do_not_fit_the_weights_are_refused(artifact: Path, checksums: str) -> None:
    size = (artifact / "weights.bin").stat().st_size
    (artifact / "checksums.json").write_text(checksums.format(size + 4 * ("-4" in checksums)))
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"files": digests(artifact)}))
    with pytest.raises(ArtifactError, match=r"damaged"):
        check_weights(open_artifact(artifact))


def test_weights_without_checksums_are_not_taken_for_whole(artifact: Path) -> None:
    (artifact / "checksums.json").unlink()
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"files": digests(artifact)}))
    with pytest.raises(ArtifactError, match="has no checksums: compile the model again"):
        check_weights(open_artifact(artifact))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("format_version", 99, f"has artifact format 99, this zllmc reads {FORMAT_VERSION}"),
        ("format_version", "1", "has artifact format 1,"),
        ("triple", "sparc64-unknown-linux-gnu", "compiled for sparc64-unknown-linux-gnu, this machine is"),
        ("requires", ["avx2", "time-travel"], "this machine's CPU lacks .*time-travel"),
        ("weights_bytes", 4096, r"weights\.bin has [\d,]+ bytes instead of 4,096"),
        ("weights_bytes", -1, "damaged"),
        ("context", 1 << 40, "no room for a context of 1,099,511,627,776"),
        ("vocab", 1 << 40, "bytes for logits"),
        ("vocab", None, "damaged .*vocab"),
        ("vocab", 1 << 80, "damaged"),
        ("files", {}, r"damaged .*plan\.json"),
        ("files", {"kernels/../../../x": ""}, "damaged .*its own file"),
        ("files", {"/etc/hostname": ""}, "damaged .*its own file"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    artifact: Path, field: str, value: Any, message: str
) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {field: value}))
    refused(artifact, message)


@pytest.mark.parametrize("text", ["", "null", "[]", "7", "{", "[" * 100_000, "\xff"])
def test_a_manifest_that_is_none_is_refused(artifact: Path, text: str) -> None:
    (artifact / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(artifact, "damaged|artifact format None")


def edit_plan(artifact: Path, edit: Callable[[Any], Any]) -> None:
    """Change the plan, and the manifest's digest of it."""
    plan = json.loads((artifact / "plan.json").read_bytes())
    edit(plan)
    (artifact / "plan.json").write_text(json.dumps(plan))
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"files": digests(artifact)}))


def first_launch(plan: Any) -> Any:
    return plan["entries"][0]["launches"][0]


def put(items: Any, key: Any, value: Any) -> None:
    items[key] = value


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda p: put(first_launch(p)["args"], 1, [99, 0]), "into buffer 99, which is not there"),
        (lambda p: put(first_launch(p)["args"], 1, [-1, 0]), "into buffer -1, which is not there"),
        (lambda p: put(first_launch(p)["args"], 1, [0, -64]), "points -64 bytes into buffer 0"),
        (
            lambda p: put(first_launch(p)["args"], 1, [0, p["buffers"][0]["bytes"]]),
            "into buffer 0, .*smaller",
        ),
        (lambda p: put(first_launch(p)["args"], 1, "x"), "damaged"),
        (lambda p: put(first_launch(p), "kernel", "no_such"), "calls no_such, which is not there"),
        (lambda p: put(first_launch(p), "kernel", "../executor"), r"calls \.\./executor"),
        (lambda p: put(p["buffers"][0], "bytes", 1 << 40), "bytes for weights"),
        (lambda p: put(p["buffers"][0], "kind", "heap"), "damaged .*heap"),
        (lambda p: put(p["buffers"][1], "bytes", -1), "-1 bytes for arena"),
        (lambda p: put(p["buffers"][2], "bytes", 64), "no room for a context of 64"),
        (lambda p: put(p["buffers"][-1], "bytes", 64), "64 bytes for logits"),
        (lambda p: put(p["buffers"][-1], "name", "tokens"), "a name twice"),
        (lambda p: put(p["buffers"][-1], "name", "else"), "0 bytes for logits"),
        (lambda p: put(p["entries"][0], "max_tokens", 1 << 30), "bytes for tokens"),
        (lambda p: put(p["entries"][0], "max_rows", 0), "takes 1 tokens and 0 rows"),
        (lambda p: put(p["entries"][0], "name", "other"), "no decode or no prefill"),
        (lambda p: p["entries"].pop(1), "no decode or no prefill"),
        (lambda p: put(p["entries"][2], "max_tokens", 16), r"576 bytes for control, which take 1,088"),
        (lambda p: put(p["entries"][2]["launches"][7], "slot", 8), "batch has a launch for slot 8"),
        (lambda p: put(first_launch(p), "slot", 0), "decode has a launch for slot 0"),
        (lambda p: put(first_launch(p), "pieces", -1), "decode has a launch in -1 pieces"),
        (
            lambda p: put(first_launch(p), "pieces", 1 << 40),
            "decode has a launch in 1,099,511,627,776 pieces",
        ),
        (lambda p: p.pop("buffers"), "damaged .*buffers"),
    ],
)
def test_a_plan_that_reaches_outside_is_refused(
    artifact: Path, edit: Callable[[Any], Any], message: str
) -> None:
    edit_plan(artifact, edit)
    refused(artifact, message)


def test_an_artifact_may_be_moved_and_its_template_changed(artifact: Path, tmp_path: Path) -> None:
    edit_plan(artifact, lambda plan: None)
    (artifact / "chat_template.jinja").write_text("{{ messages }}")
    Engine.open(artifact.rename(tmp_path / "moved"), threads=1).close()


# --- files that cannot be compiled -----------------------------------------------------------------------


@pytest.fixture
def cli_refuses(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[Path, str], None]:
    """Checks that `zllmc compile` refuses the file as it should: at once, in a line that says why."""

    def check(path: Path, match: str) -> None:
        monkeypatch.setenv("ZLLMC_CACHE", str(tmp_path / "cache"))
        output = tmp_path / "out.zllm"
        begin = time.process_time()
        with pytest.raises(SystemExit) as exit:
            main(["compile", str(path), "-o", str(output)])
        assert time.process_time() - begin < 1
        out, err = capfd.readouterr()
        assert (exit.value.code, out) == (2, "")
        assert re.fullmatch(r"zllmc: .*\n", err) and re.search(match, err), err
        assert len(err) < 1500 and path.name in err
        assert not output.exists()

    return check


DATA = bytes(1024)
ALONE = [key("general.architecture", STRING, string("llama"))]


@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "the file is empty"),
        (b"#!/bin/sh\necho hello\n", "not a GGUF file"),
        (model(key_count=1 << 63), "metadata keys would take"),
        (model(ALONE, tensor_count=(1 << 42) + 1), "tensors would take"),
        (model(ALONE, [tensor_info("w", [1 << 32, 1 << 32], 0, 0)], DATA), "'?w'?"),
        (model(ALONE, [tensor_info("w", [256], 99, 0)], DATA), "type 99"),
        (model([key("general.alignment", U32, u32(0))]), "general.alignment is 0"),
        (model([key("general.architecture", STRING, string("bert"))]), "'bert' isn't supported.*llama"),
        (model([key("general.architecture", STRING, string("\x1b[2J\n"))]), "isn't supported"),
        (model(), "general.architecture is missing"),
        (model(ALONE), "llama.* is missing"),
        (model([*ALONE, key("llama.block_count", F32, scalar(F32, 2.0))]), "not an integer|is missing"),
    ],
)
def test_files_that_are_no_models_are_refused(
    cli_refuses: Callable[[Path, str], None], tmp_path: Path, data: bytes, match: str
) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    cli_refuses(tmp_path / "model.gguf", match)


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.5, 0.999])
def test_truncated_models_are_refused(
    cli_refuses: Callable[[Path, str], None], conformance: Path, tmp_path: Path, keep: float
) -> None:
    data = (conformance / f"{NAME}.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(data[: int(len(data) * keep)])
    cli_refuses(tmp_path / "model.gguf", "would take|the file ends at byte")


@pytest.mark.parametrize(
    "name, match",
    [
        ("archs/llama-moe", "mixtures of experts aren't supported yet"),
        ("archs/gpt2-dense", "'gpt2' isn't supported"),
    ],
)
def test_models_that_are_not_supported_are_refused(
    cli_refuses: Callable[[Path, str], None], conformance: Path, name: str, match: str
) -> None:
    cli_refuses(conformance / f"{name}.gguf", match)


@dataclass
class Doubles:
    """A tensor in a type that no model has its weights in."""

    shape: tuple[int, ...]
    type_name = "F64"

    @property
    def data(self) -> np.ndarray:
        return np.zeros(self.shape)


def test_a_model_in_an_unknown_format_is_refused(
    cli_refuses: Callable[[Path, str], None], conformance: Path, tmp_path: Path
) -> None:
    file = open_file(conformance, NAME)
    file.tensors["blk.0.attn_q.weight"] = Doubles(file.tensors["blk.0.attn_q.weight"].shape)
    path = write_gguf(file, tmp_path / "model.gguf")
    cli_refuses(path, r"blk\.0\.attn_q\.weight has type F64, which can't")


def test_a_model_that_lacks_a_tensor_or_has_an_unknown_tokenizer_is_refused(
    cli_refuses: Callable[[Path, str], None], conformance: Path, tmp_path: Path
) -> None:
    file = open_file(conformance, NAME)
    file.metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "novel"}
    cli_refuses(write_gguf(file, tmp_path / "model.gguf"), "novel")
    del file.tensors["blk.1.ffn_up.weight"]
    cli_refuses(write_gguf(file, tmp_path / "model.gguf"), r"blk\.1\.ffn_up\.weight is missing")


def test_folders_and_what_is_no_file_are_refused(
    cli_refuses: Callable[[Path, str], None], tmp_path: Path
) -> None:
    cli_refuses(tmp_path / "absent.gguf", "no such file")
    (tmp_path / "empty").mkdir()
    cli_refuses(tmp_path / "empty", "")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    cli_refuses(tmp_path / "broken", "config.json")
    os.mkfifo(tmp_path / "pipe.gguf")
    cli_refuses(tmp_path / "pipe.gguf", "no regular file")


@pytest.mark.parametrize("name", [NAME, "quants/gemma3-dense-Q4_K_M"])
def test_flipped_bytes_in_a_header_never_crash_the_compiler(
    conformance: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some flips still give a model, some are refused. The kernels' own code is left out: it takes no
    numbers from the file that the passes before have not checked."""
    monkeypatch.setattr(zllmc.compiler, "build_kernels", lambda jobs, *_, **__: dict.fromkeys(jobs, b""))
    monkeypatch.setattr(zllmc.compiler, "pack_jobs", lambda *_: {})
    source = conformance / f"{name}.gguf"
    data = source.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(source).tensors.values())
    draw, refusals, tries = random.Random(0), 0, 60
    for _ in range(tries):
        changed = bytearray(data)
        for _ in range(draw.choice([1, 2, 8])):
            changed[draw.randrange(header)] = draw.choice([0, 255, draw.randrange(256)])
        path = tmp_path / "model.gguf"
        path.write_bytes(changed)
        begin = time.process_time()
        try:
            zllmc.compiler.compile_model(path, tmp_path / "x.zllm", context=64)
        except ZllmcError as error:
            refusals += 1
            assert len(str(error)) < 1500
        assert time.process_time() - begin < 1
    assert 0 < refusals < tries
