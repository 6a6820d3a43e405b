"""GPU targets: their names, what is detected, and the layouts of their matrix instructions."""

import ctypes
import itertools
from collections import Counter
from pathlib import Path

import pytest

from zllmc.targets import all_targets, cpu, cuda, metal, parse, rocm
from zllmc.targets.gpu import GpuTarget
from zllmc.zllm_ir.errors import ZllmcError

GPUS = [t for t in all_targets() if isinstance(t, GpuTarget)]
MATRIX = {i: t for t in GPUS for i in t.matrix}  # instructions, each with a target that has it
BYTES = {"s8": 1, "f16": 2, "bf16": 2, "s32": 4, "f32": 4}


def test_every_name_is_parsed_and_unknown_ones_are_answered_with_those_that_exist() -> None:
    assert len(GPUS) == 17
    for target in all_targets():
        assert parse(str(target)) == target
    assert parse("cpu") == cpu.detect()
    for text, known in [("cuda:sm_10", "sm_90"), ("rocm:gfx9", "gfx1100"), ("metal:m1", "apple9")]:
        with pytest.raises(ZllmcError, match=known):
            parse(text)
    with pytest.raises(ZllmcError, match=r"abacus.*cpu:avx2.*cuda:sm_90.*rocm:gfx942.*metal:apple7"):
        parse("abacus:9")


@pytest.mark.parametrize("target", GPUS, ids=str)
def test_facts_are_plausible(target: GpuTarget) -> None:
    assert target.subgroup == (64 if target.name in ("gfx90a", "gfx942") else 32)
    assert target.static_shared_memory <= target.shared_memory
    product = target.product
    assert 100 < product.bandwidth < 10_000
    assert product.f16_matrix <= product.int8_matrix or target.dot4 is None
    assert product.int8_dot <= product.int8_matrix
    for inputs in ("s8", "f16", "bf16", "f32"):
        instruction = target.matrix_instruction(inputs)
        assert instruction is None or (instruction.inputs, instruction in target.matrix) == (inputs, True)


@pytest.mark.parametrize("instruction", MATRIX, ids=lambda i: f"{MATRIX[i]}-{i.inputs}")
def test_fragments_cover_their_tile_the_same_number_of_times(instruction) -> None:
    lanes = MATRIX[instruction].subgroup
    shapes = {
        "a": (instruction.m, instruction.k),
        "b": (instruction.k, instruction.n),
        "c": (instruction.m, instruction.n),
    }
    for operand, (rows, columns) in shapes.items():
        fragment = getattr(instruction, operand)
        assert (fragment.rows, fragment.columns) == (rows, columns)
        assert 1 << len(fragment.lane_bits) == lanes
        held = Counter(
            fragment.position(lane, element) for lane in range(lanes) for element in range(fragment.elements)
        )
        assert set(held) == set(itertools.product(range(rows), range(columns)))
        rdna3_input = "gfx11" in MATRIX[instruction].name and operand != "c"
        assert set(held.values()) == {2 if rdna3_input else 1}
        kind = instruction.accumulator if operand == "c" else instruction.inputs
        assert fragment.elements * BYTES[kind] % 4 == 0  # whole registers


# Elements named one by one in the documents, as (operand, lane, element) → (row, column).
STATED = {
    # PTX ISA: groupID = lane / 4, threadID = lane % 4
    ("cuda:sm_80", "f16"): {
        ("a", 0, 1): (0, 1), ("a", 0, 2): (8, 0), ("a", 0, 4): (0, 8), ("a", 31, 7): (15, 15),
        ("b", 1, 0): (2, 0), ("b", 4, 3): (9, 1), ("c", 5, 0): (1, 2), ("c", 5, 3): (9, 3),
    },
    ("cuda:sm_80", "bf16"): {("a", 31, 7): (15, 15), ("b", 4, 3): (9, 1), ("c", 5, 3): (9, 3)},
    ("cuda:sm_80", "s8"): {
        ("a", 0, 3): (0, 3), ("a", 1, 4): (8, 4), ("a", 0, 8): (0, 16), ("a", 31, 15): (15, 31),
        ("b", 0, 4): (16, 0), ("b", 7, 1): (13, 1), ("c", 31, 3): (15, 7),
    },
    # RDNA3: lanes 16 to 31 hold what lanes 0 to 15 do; register v of C holds rows 2v and 2v + 1
    ("rocm:gfx1100", "s8"): {
        ("a", 3, 15): (3, 15), ("a", 19, 15): (3, 15), ("b", 18, 5): (5, 2),
        ("c", 2, 3): (6, 2), ("c", 18, 3): (7, 2),
    },
    # RDNA4: the upper lanes hold the upper half of K; register v of C holds rows v and v + 8
    ("rocm:gfx1201", "f16"): {
        ("a", 3, 7): (3, 7), ("a", 19, 0): (3, 8), ("b", 18, 5): (13, 2),
        ("c", 2, 3): (3, 2), ("c", 18, 3): (11, 2),
    },
    # CDNA: i = lane % 16, k = 4 * (lane / 16) + element; C's row = 4 * (lane / 16) + register
    ("rocm:gfx942", "f16"): {
        ("a", 17, 2): (1, 6), ("b", 50, 3): (15, 2), ("c", 33, 1): (9, 1),
    },
    ("rocm:gfx942", "s8"): {("a", 17, 2): (1, 10), ("b", 63, 7): (31, 15), ("c", 63, 3): (15, 15)},
    ("rocm:gfx90a", "bf16"): {("a", 17, 2): (1, 6), ("b", 50, 3): (15, 2), ("c", 33, 1): (9, 1)},
    ("rocm:gfx90a", "s8"): {("a", 17, 2): (1, 6), ("b", 63, 3): (15, 15), ("c", 16, 0): (4, 0)},
    # MLX: row (lane / 4 & 4) + lane / 2 % 4, column (lane / 4 & 2) * 2 + lane % 2 * 2 + element
    ("metal:apple7", "f16"): {
        ("a", 9, 0): (0, 6), ("b", 18, 1): (5, 1), ("c", 6, 0): (3, 0), ("c", 31, 1): (7, 7),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "inputs"), STATED)
def test_fragments_hold_what_the_documents_state(name: str, inputs: str) -> None:
    target = parse(name)
    assert isinstance(target, GpuTarget)
    instruction = target.matrix_instruction(inputs)
    for (operand, lane, element), position in STATED[name, inputs].items():
        assert getattr(instruction, operand).position(lane, element) == position, (operand, lane, element)


def test_a_capability_gets_the_newest_target_that_it_can_run() -> None:
    expected = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90"}
    expected |= {(10, 0): "sm_100", (10, 3): "sm_100", (12, 0): "sm_120", (12, 1): "sm_120"}
    for capability, name in expected.items():
        target = cuda.for_capability(*capability)
        assert target is not None and target.name == name
    assert cuda.for_capability(7, 5) is None and cuda.for_capability(11, 0) is None


class Driver:
    """libcuda.so.1 on a machine whose only GPU has this compute capability."""

    def __init__(self, major: int, minor: int):
        self.values = {75: major, 76: minor}

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGet(self, device, ordinal: int) -> int:
        return 0

    def cuDeviceGetAttribute(self, value, attribute: int, device) -> int:
        value._obj.value = self.values[attribute]
        return 0


def test_an_nvidia_gpu_is_detected_and_its_absence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(8, 9))
    assert parse("cuda").name == "sm_89"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(7, 5))
    with pytest.raises(ZllmcError, match=r"7\.5.*cuda:sm_80"):
        parse("cuda")

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ZllmcError, match=r"driver.*cuda:sm_90"):
        parse("cuda")


def write_node(nodes: Path, number: int, version: int) -> None:
    (nodes / str(number)).mkdir(parents=True)
    text = f"cpu_cores_count 0\nwave_front_size 32\ngfx_target_version {version}\n"
    (nodes / str(number) / "properties").write_text(text)


def test_an_amd_gpu_is_detected_and_its_absence_is_told(tmp_path: Path) -> None:
    with pytest.raises(ZllmcError, match=r"no AMD GPU.*rocm:gfx1100"):
        rocm.detect(tmp_path)
    for number, version in enumerate([0, 90006, 90010, 90402, 100300, 110501, 120001]):
        write_node(tmp_path, number, version)
    names = ["gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1151", "gfx1201"]
    assert rocm.detected_names(tmp_path) == names
    assert rocm.detect(tmp_path).name == "gfx90a"  # the first that there is a target for
    write_node(tmp_path / "old", 1, 90006)
    with pytest.raises(ZllmcError, match=r"gfx906.*rocm:gfx1100"):
        rocm.detect(tmp_path / "old")


def test_an_apple_chip_gets_its_gpu_family() -> None:
    chips = [
        "Apple M1",
        "Apple M2 Ultra",
        "Apple M3 Max",
        "Apple M4 Pro",
        "Apple M5",
        "Apple M99",
        "Intel(R)",
    ]
    names = [t and t.name for t in map(metal.for_chip, chips)]
    assert names == ["apple7", "apple8", "apple9", "apple9", "apple10", None, None]


def test_a_mac_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(ZllmcError, match=r"Mac.*metal:apple9"):
        parse("metal")
