"""The GGUF reader on files that are wrong: each is refused at once, in little memory, and usefully."""

import os
import re
import struct
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_writer import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U8,
    U32,
    array,
    key,
    model,
    model_of,
    scalar,
    string,
    tensor_info,
    u32,
    u64,
)
from zllmc.frontends.gguf import GGML_TYPES, MAX_ALIGNMENT, GGUFError, read_gguf
from zllmc.frontends.gguf_header import MAX_DEPTH, MAX_HEADER, MAX_ITEMS
from zllmc.zllm_ir.errors import ZllmcError

F32_TYPE, Q4_K_TYPE = 0, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


@pytest.fixture
def refused(path):
    """Check that the file is refused with a message that matches, in bounded time and memory."""

    def check(data, match):
        path.write_bytes(data)
        tracemalloc.start()
        started = time.process_time()
        try:
            with pytest.raises(GGUFError) as caught:
                read_gguf(path)
            assert time.process_time() - started < 0.2
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()
        message = str(caught.value)
        assert re.search(match, message), message
        assert message.startswith(f"{path}: ")
        assert "\n" not in message and len(message) < 1500

    return check


# --- not a GGUF file that can be read ----------------------------------------------------------------


def test_the_error_is_for_users():
    assert issubclass(GGUFError, ZllmcError)
    assert GGUFError.exit_code == 2


@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "the file is empty"),
        (b"GG", "magic number would take 4 bytes or more, of which 2 are there"),
        (b"PK\3\4" + bytes(64), "not a GGUF file: it starts with b'PK"),
        (b"tjgg" + bytes(64), "from before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (model(version=0), "version is 0; versions 2 and 3 are read"),
        (model(version=1), "version is 1; versions 2 and 3 are read"),
        (model(version=4), "version is 4.*Update zllmc"),
    ],
)
def test_other_files_are_refused_by_what_they_are(refused, data, match):
    refused(data, match)


@pytest.mark.parametrize("magic", [b"GGUF", b"FUGG"])
def test_big_endian_files_are_refused_by_name(refused, magic):
    refused(magic + struct.pack(">IQQ", 3, 1, 1) + bytes(64), "big-endian GGUF file.*gguf-convert-endian")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(GGUFError, match="no such file"):
        read_gguf(tmp_path / "absent.gguf")
    with pytest.raises(GGUFError, match="no such file"):
        read_gguf(tmp_path / ("x" * 5000))


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="no regular file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_every_truncation_is_refused(refused):
    keys = [
        key("name", STRING, string("x")),
        key("list", ARRAY, array(STRING, ["a", "b"])),
        key("numbers", ARRAY, array(F32, [1.0, 2.0])),
        key("flags", ARRAY, array(BOOL, [True, False])),
    ]
    data = model_of([("a", [256], Q4_K_TYPE, bytes(144)), ("b", [1], F32_TYPE, b"1234")], keys)
    for size in range(len(data)):
        refused(data[:size], "would take|the file ends at|the file is empty")


# --- counts and lengths ------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [64, 1 << 31, 1 << 32, (1 << 42) + 1, 1 << 63, (1 << 64) - 1])
class TestCountsThatTheFileCannotHold:
    def test_keys(self, refused, count):
        refused(model(key_count=count), f"{count} metadata keys would take")

    def test_tensors(self, refused, count):
        refused(model(tensor_count=count), f"{count} tensors would take")

    @pytest.mark.parametrize("kind", [U8, I32, F32, BOOL, STRING, ARRAY])
    def test_array_items(self, refused, count, kind):
        """With strings and 2^63 this is the 49-byte file that keeps other readers busy for ever."""
        data = model([key("k", ARRAY, u32(kind) + u64(count))], alignment=1)
        refused(data, rf"{count} \w+( \w+)? in metadata key 'k' would take \d+ bytes or more, of which 0 are")

    def test_string_bytes(self, refused, count):
        data = model([key("k", STRING, u64(count))], alignment=1)
        refused(data, f"metadata key 'k' (would take|claims) {count} bytes")

    def test_string_bytes_in_an_array(self, refused, count):
        payload = u32(STRING) + u64(2) + string("ok") + u64(count)
        refused(
            model([key("k", ARRAY, payload)], alignment=1), f"item 1 of metadata key 'k' would take {count}"
        )

    def test_key_name_bytes(self, refused, count):
        refused(
            model([u64(count) + bytes(5)], alignment=1),
            f"the name of metadata key 0 (would take|claims) {count} bytes",
        )

    def test_tensor_name_bytes(self, refused, count):
        infos = [u64(count) + bytes(16)]
        refused(model(infos=infos, alignment=1), f"the name of tensor 0 (would take|claims) {count} bytes")


def test_strings_have_a_largest_size(path):
    """A sparse file of 2 GiB: the bytes are there, and still no GiB string is read."""
    data = model([key("k", STRING, u64(1 << 30))], alignment=1)
    path.write_bytes(data)
    os.truncate(path, 2 << 30)
    with pytest.raises(GGUFError, match=f"claims {1 << 30} bytes; {MAX_HEADER} is the most"):
        read_gguf(path)


def test_arrays_have_a_largest_count(path):
    data = model([key("k", ARRAY, u32(U8) + u64(MAX_ITEMS))], alignment=1)
    path.write_bytes(data)
    os.truncate(path, MAX_HEADER + 1)
    with pytest.raises(GGUFError, match=f"has over {MAX_ITEMS} items"):
        read_gguf(path)


def test_a_key_name_has_a_largest_size(refused):
    refused(model([key("x" * 65536, U8, b"1")]), "claims 65536 bytes; 65535 is the most")


# --- metadata ----------------------------------------------------------------------------------------


def nested(depth):
    payload = array(U8, [1])
    for _ in range(depth - 1):
        payload = array(ARRAY, [payload])
    return key("k", ARRAY, payload)


def test_arrays_nest_up_to_a_depth(path, refused):
    path.write_bytes(model([nested(MAX_DEPTH)]))
    assert read_gguf(path).metadata["k"] == [[[[1]]]]
    refused(model([nested(MAX_DEPTH + 1)]), "'k' nests arrays deeper than 4")
    refused(model([nested(5000)]), "'k' nests arrays deeper than 4")


@pytest.mark.parametrize("kind", [13, 255, (1 << 32) - 1])
def test_unknown_value_types_are_refused(refused, kind):
    refused(model([key("k", kind, bytes(16))]), f"metadata key 'k' has value type {kind}")
    refused(model([key("k", ARRAY, u32(kind) + u64(0))]), f"metadata key 'k' has items of type {kind}")


def test_a_key_that_occurs_twice_is_refused(refused):
    refused(model([key("k", U8, b"1"), key("k", U8, b"2")]), "metadata key 'k' occurs twice")


@pytest.mark.parametrize(
    "data, match",
    [
        (model([key(b"\xff", U8, b"1")]), "the name of metadata key 0 isn't UTF-8"),
        (model([key("k", STRING, string(b"a\xc3"))]), "metadata key 'k' isn't UTF-8"),
        (model([key("k", ARRAY, array(STRING, ["a", b"\x80"]))]), "item 1 of metadata key 'k' isn't UTF-8"),
        (model_of([(b"\xfe", [1], F32_TYPE, bytes(4))]), "the name of tensor 0 isn't UTF-8"),
    ],
)
def test_text_that_is_not_utf8_is_refused(refused, data, match):
    refused(data, match)


def test_truth_values_other_than_0_and_1_are_refused(refused):
    refused(model([key("k", BOOL, b"\2")]), "'k' holds a truth value other than 0 and 1")
    refused(model([key("k", ARRAY, u32(BOOL) + u64(2) + b"\1\xff")]), "'k' holds a truth value")


def test_names_in_messages_are_short_and_escaped(refused):
    name = "\x1b[2J\n" + "x" * 60000
    refused(model([key(name, U8, b"1"), key(name, U8, b"1")]), r"'\\x1b\[2J\\nxxx")


@pytest.mark.parametrize("alignment", [0, 3, 33, MAX_ALIGNMENT * 2, 1 << 30, 1 << 31, (1 << 32) - 1])
def test_alignments_that_are_no_small_power_of_two_are_refused(refused, alignment):
    keys = [key("general.alignment", U32, u32(alignment))]
    refused(model(keys), f"general.alignment is {alignment}, not a power of two")


@pytest.mark.parametrize(
    "kind, payload",
    [(STRING, string("32")), (BOOL, b"\1"), (F32, scalar(F32, 32.0)), (I32, scalar(I32, -32))],
)
def test_alignments_that_are_no_count_are_refused(refused, kind, payload):
    refused(model([key("general.alignment", kind, payload)]), "general.alignment is .*not a power of two")


# --- tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_dims", [5, 1 << 20, (1 << 32) - 1])
def test_more_than_four_dimensions_are_refused(refused, n_dims):
    refused(model(infos=[string("w") + u32(n_dims) + bytes(64)]), f"tensor 'w' claims {n_dims} dimensions")


@pytest.mark.parametrize(
    "ne",
    [
        [(1 << 42) + 1],
        [1 << 62],
        [(1 << 64) - 1],
        [1 << 32, 1 << 32],  # the count wraps to 0 in 64 bits
        [1 << 31, 1 << 31, 4],
        [1 << 63, 2],
        [(1 << 64) - 1] * 4,
        [4, (1 << 60) + 1],  # 16 times that wraps to 16
    ],
)
@pytest.mark.parametrize("type_id", [F32_TYPE, 1, 24])
def test_sizes_that_wrap_in_64_bits_are_refused(refused, ne, type_id):
    refused(
        model(infos=[tensor_info("w", ne, type_id, 0)], data=bytes(64)), "tensor 'w' takes bytes .* file ends"
    )


def test_more_rows_than_the_file_holds_are_refused(refused):
    infos = [tensor_info("w", [256, (1 << 42) + 1], Q4_K_TYPE, 0)]
    refused(model(infos=infos, data=bytes(144)), "tensor 'w' takes bytes .* but the file ends at byte")


@pytest.mark.parametrize("ne", [[0], [4, 0], [0, 1 << 63]])
def test_tensors_without_values_are_refused(refused, ne):
    refused(model(infos=[tensor_info("w", ne, F32_TYPE, 0)]), "tensor 'w' has no values")


def test_rows_that_are_no_whole_blocks_are_refused(refused):
    """896 columns, as in Qwen2.5-0.5B, can't be K-quants, although 2 rows of 896 would fill 7 blocks."""
    infos = [tensor_info("w", [896, 2], Q4_K_TYPE, 0)]
    refused(
        model(infos=infos, data=bytes(7 * 144)), "rows of 896 values, which aren't whole Q4_K blocks of 256"
    )


def test_a_scalar_of_a_block_type_is_refused(refused):
    refused(model(infos=[tensor_info("w", [], Q4_K_TYPE, 0)], data=bytes(144)), "rows of 1 values")


@pytest.mark.parametrize(
    "type_id, reason",
    [
        (43, "which isn't known here"),
        (95, "which isn't known here"),
        (4, "which ggml has removed"),
        (31, "which ggml has removed"),
        (38, "which ggml has removed"),
        (96, "which is one of the ik_llama.cpp fork's own types"),
        (139, "which is one of the ik_llama.cpp fork's own types"),
        ((1 << 32) - 1, "which is one of the ik_llama.cpp fork's own types"),
    ],
)
def test_unknown_types_name_the_tensor_the_type_and_the_known_types(refused, type_id, reason):
    data = model(infos=[tensor_info("blk.0.w", [256], type_id, 0)], data=bytes(1024))
    refused(data, f"tensor 'blk.0.w' has type {type_id}, {reason}")
    for kind in GGML_TYPES.values():
        refused(data, rf"\b{kind.name} \(")


def test_offsets_off_the_alignment_are_refused(refused):
    infos = [tensor_info("w", [1], F32_TYPE, 16)]
    refused(model(infos=infos, data=bytes(64)), "offset 16, which isn't a multiple of the alignment 32")


@pytest.mark.parametrize("second", [0, 32])
def test_tensors_that_overlap_are_refused(refused, second):
    infos = [tensor_info("a", [16], F32_TYPE, 0), tensor_info("b", [1], F32_TYPE, second)]
    refused(model(infos=infos, data=bytes(128)), f"'b' has offset {second}, before byte 64 where 'a' ends")


def test_tensors_out_of_order_are_refused(refused):
    infos = [tensor_info("a", [1], F32_TYPE, 64), tensor_info("b", [1], F32_TYPE, 0)]
    refused(model(infos=infos, data=bytes(128)), "'b' has offset 0, before byte 68 where 'a' ends")


@pytest.mark.parametrize("offset", [64, 1 << 40, (1 << 64) - 32])
def test_offsets_past_the_file_are_refused(refused, offset):
    infos = [tensor_info("w", [1], F32_TYPE, offset)]
    refused(model(infos=infos, data=bytes(64)), "tensor 'w' takes bytes .* but the file ends at byte")


def test_a_tensor_name_that_occurs_twice_is_refused(refused):
    infos = [tensor_info("w", [1], F32_TYPE, 0), tensor_info("w", [1], F32_TYPE, 32)]
    refused(model(infos=infos, data=bytes(64)), "tensor 'w' occurs twice")


# --- mutations of a real file ------------------------------------------------------------------------

EXTREMES = [u64(n) for n in (0, 1, 255, 1 << 31, 1 << 32, (1 << 42) + 1, 1 << 62, 1 << 63, (1 << 64) - 1)]


@pytest.fixture(scope="module")
def real(conformance):
    """A real file's header, and the whole file's size."""
    source = conformance / "archs/llama-dense.gguf"
    with read_gguf(source) as file:
        start = min(tensor.offset for tensor in file.tensors.values())
    return source.read_bytes()[:start], source.stat().st_size


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=4) | st.sampled_from(EXTREMES)
    ),
    min_size=1,
    max_size=6,
)


@given(edits, st.none() | st.floats(0, 1))
@settings(max_examples=400)
def test_a_damaged_file_reads_or_is_refused(real, path, edits, cut):
    header, size = real
    damaged = bytearray(header)
    for place, patch in edits:
        start = int(place * len(header))
        damaged[start : start + len(patch)] = patch
    path.write_bytes(damaged)
    os.truncate(path, size if cut is None else int(cut * 2 * len(header)))  # the tensors' bytes are a hole

    tracemalloc.start()
    started = time.process_time()
    try:
        with read_gguf(path) as file:
            for tensor in file.tensors.values():
                assert len(tensor.data) == tensor.nbytes
    except GGUFError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - started < 1
    assert peak < 4 << 20
