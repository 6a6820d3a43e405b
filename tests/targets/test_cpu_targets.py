"""Every CPU target compiles a whole model on any machine, to objects that need nothing but the runtime."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from zllmc.compiler import compile_model
from zllmc.runtime.artifact import ArtifactError, open_artifact
from zllmc.targets.cpu import TARGETS, detect, parse
from zllmc.zllm_ir import host
from zllmc.zllm_ir.errors import ZllmcError
from zllmc.zllm_ir.host import host_architecture, host_flags

ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
# What the runtime provides: the errors of TVM's FFI, and what any C library has.
PROVIDED = {"TVMFFIErrorSetRaisedFromCStrParts", "memcpy", "memset"}
EXECUTOR_NEEDS = {"TVMFFIErrorSetRaised", "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef"} | {
    "syscall",
    "sched_yield",
    "clock_gettime",
}


def undefined_symbols(code: bytes) -> Iterator[str]:
    """Names that a little-endian ELF64 object leaves to the loader."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + i * size) for i in range(count)]
    symbols = next(h for h in headers if h[1] == 2)
    strings = headers[symbols[6]]
    for at in range(symbols[4] + 24, symbols[4] + symbols[5], 24):
        name_at, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", code, at)
        if section == 0:
            begin = strings[4] + name_at
            yield code[begin : code.index(b"\0", begin)].decode()


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_a_model_compiles_for_every_target(
    target, conformance: Path, kernel_cache: Path, tmp_path: Path
) -> None:
    source = conformance / "quants/llama-dense-Q4_K_M.gguf"
    output = compile_model(
        source, tmp_path / "x.zllm", target=str(target), context=64, kernel_cache=kernel_cache
    )
    architecture = target.triple.partition("-")[0]
    objects = sorted((output / "kernels").glob("*.o"))
    assert len(objects) > 10
    for path in objects:
        code = path.read_bytes()
        assert struct.unpack_from("<4sBB", code) == (b"\x7fELF", 2, 1)
        assert struct.unpack_from("<H", code, 0x12) == (ELF_MACHINE[architecture],)
        extra = EXECUTOR_NEEDS if path.stem == "executor" else set()
        assert set(undefined_symbols(code)) <= PROVIDED | extra, path.name
    if architecture == host_architecture() and target.requires <= host_flags():
        assert open_artifact(output).manifest.target == str(target)
    else:
        with pytest.raises(ArtifactError, match="was compiled for"):
            open_artifact(output)


def test_the_host_is_detected_and_names_are_checked() -> None:
    assert parse("cpu") == detect() and detect().requires <= host_flags()
    for target in TARGETS.values():
        assert parse(str(target)) == target
    with pytest.raises(ZllmcError, match="avx2"):
        parse("cpu:mmx")
    with pytest.raises(ZllmcError, match="cpu"):
        parse("abacus")


def test_a_process_that_is_refused_tile_registers_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = TARGETS["amx"]
    monkeypatch.setattr(host.Path, "read_text", lambda path: "flags : " + " ".join(amx.requires))
    for granted in (True, False):
        monkeypatch.setattr(host, "_has_tiles", lambda granted=granted: granted)
        assert (amx.requires <= host.host_flags.__wrapped__()) == granted
