"""The weight file: the same bytes however they are packed, and a model's file that doesn't stay in memory."""

import mmap
import pathlib
import re
import zlib
from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import pytest

from zllmc.codegen.build import build_kernels
from zllmc.codegen.kernel_cache import KernelCache
from zllmc.frontends.model import load_model
from zllmc.passes.pipeline import lower_entries
from zllmc.passes.plan import stored_weights
from zllmc.targets import parse
from zllmc.weights import Pack, _unmap, load_packers, pack_jobs, place_weights, write_weights
from zllmc.zllm_ir.errors import ZllmcError


# The widths of layouts: 4, 8, 16 and 32 rows.
@pytest.mark.parametrize("target", ["cpu:dotprod", "cpu:avx2", "cpu:avx512vnni", "cuda:sm_80"])
def test_kernels_of_this_machine_pack_for_every_target_what_numpy_does(
    conformance: pathlib.Path, kernel_cache: pathlib.Path, tmp_path: pathlib.Path, target: str
) -> None:
    device = parse(target)
    model = load_model(conformance / "quants/gemma3-dense-Q4_K_M.gguf", context=64)
    stored = stored_weights(lower_entries(model.graph, device, context=64).values())
    offsets, size = place_weights(model, stored, device)
    jobs = pack_jobs(stored, device)
    assert len(jobs) > 1
    objects = build_kernels(list(jobs.values()), KernelCache(kernel_cache), lambda done, total: None)
    seen: list[int] = []

    def packed(packers: Mapping[str, Pack]) -> bytes:
        path = tmp_path / "weights.bin"
        checksums = write_weights(
            path, model, stored, offsets, size, device, packers, lambda _, done, total: seen.append(done)
        )
        data = path.read_bytes()
        ends = list(accumulate(checksum.bytes for checksum in checksums))
        assert ends[-1] == size
        pieces = [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert [zlib.crc32(piece) for piece in pieces] == [checksum.crc32 for checksum in checksums]
        return data

    by_kernels = packed(load_packers(jobs, objects))
    assert len(by_kernels) == size
    assert seen == sorted(seen) and seen[-1] == sum(size for _, size in offsets.values())
    assert by_kernels == packed({})


def test_a_machine_that_is_no_target_packs_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ZllmcError("no CPU target fits this machine")

    monkeypatch.setattr("zllmc.weights.detect", refuse)
    assert load_packers(pack_jobs({}, parse("cpu:avx2")), {}) == {}


def test_a_mapped_file_leaves_memory_when_it_is_packed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model").write_bytes(bytes(32 << 20))
    with (tmp_path / "model").open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    before = resident()
    assert data.sum() == 0
    assert resident() > before + (24 << 20)
    _unmap(data[4099:-1].reshape(-1, 2)[8:])
    assert resident() < before + (8 << 20)
    _unmap(np.zeros(5, np.uint8))  # no file: nothing to do


def resident() -> int:
    """Bytes of mapped files in this process's memory."""
    found = re.search(r"RssFile:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
