"""The Hugging Face folder reader: what was written is read back, and wrong folders are refused clearly."""

import json
import os
import random
import struct
import time
import tracemalloc
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from zllmc.frontends.safetensors import DTYPES, INDEX, MAX_HEADER, SafetensorsError, read_hf_folder


def packed(header, data=b""):
    """A .safetensors file from its header, a JSON value or the text itself."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4}')
    return tmp_path


@pytest.fixture(scope="module")
def reused_folder(tmp_path_factory):
    """One folder for all examples of a property."""
    folder = tmp_path_factory.mktemp("hf")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refused(folder):
    """Check that a folder with this weight file is refused at once with a message that matches."""

    def check(data, match):
        (folder / "model.safetensors").write_bytes(data)
        started = time.process_time()
        with pytest.raises(SafetensorsError, match=match) as caught:
            read_hf_folder(folder)
        assert time.process_time() - started < 0.5
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000

    return check


# --- right folders -----------------------------------------------------------------------------------


@st.composite
def stored_tensors(draw):
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    seed = draw(st.integers(0, 2**32))
    return dtype, shape, random.Random(seed).randbytes(prod(shape) * DTYPES[dtype].nbytes)


@given(
    st.dictionaries(st.text(max_size=20).filter("__metadata__".__ne__), stored_tensors(), max_size=6),
    st.randoms(),
)
@settings(max_examples=100)
def test_what_was_written_is_read_back(reused_folder, tensors, order):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = entry(dtype, shape, len(data), len(data) + len(raw))
        data += raw
    entries = list(header.items())
    order.shuffle(entries)  # the header's order is free, unlike the data's
    (reused_folder / "model.safetensors").write_bytes(packed(dict(entries), data))
    with read_hf_folder(reused_folder) as file:
        assert file.tensors.keys() == tensors.keys()
        for name, (dtype, shape, raw) in tensors.items():
            tensor = file.tensors[name]
            assert (tensor.type_name, tensor.shape, tensor.nbytes) == (dtype, tuple(shape), len(raw))
            assert tensor.data.tobytes() == raw


def test_files_of_the_safetensors_library_are_read(folder):
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "h": np.arange(5, dtype=np.float16)}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    with read_hf_folder(folder) as file:
        assert file.config == {"model_type": "llama", "hidden_size": 4}
        assert file.tensors["w"].shape == (2, 3)
        assert (file.tensors["w"].type_id, file.tensors["h"].type_id) == (0, 1)
        for name, values in arrays.items():
            assert file.tensors[name].data.tobytes() == values.tobytes()


def test_views_are_read_only_and_outlive_the_folder(folder):
    save_file({"w": np.ones(2, np.float32)}, folder / "weights.safetensors")
    with read_hf_folder(folder) as file:
        view = file.tensors["w"].data
    assert view.view(np.float32).tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_tokenizer_files_are_found(folder):
    save_file({"w": np.ones(2, np.float32)}, folder / "model.safetensors")
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text("{}")
    found = read_hf_folder(folder).tokenizer_files
    assert found == {name: folder / name for name in ("tokenizer.json", "chat_template.jinja")}


@pytest.fixture
def shards(folder):
    """A model of two weight files with their index."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": np.ones(2, np.float32)}, folder / names[0])
    save_file({"b": np.zeros(3, np.float32)}, folder / names[1])
    write_index(folder, {"a": names[0], "b": names[1]})
    return [folder / name for name in names]


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 20}, "weight_map": weight_map}))


def test_an_index_joins_its_files(folder, shards):
    save_file({"a": np.ones(9, np.float32)}, folder / "consolidated.safetensors")  # another copy of the model
    with read_hf_folder(folder) as file:
        assert file.paths == tuple(shards)
        assert {name: tensor.path for name, tensor in file.tensors.items()} == {
            "a": shards[0],
            "b": shards[1],
        }


# --- wrong folders -----------------------------------------------------------------------------------


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(SafetensorsError, match="no such folder"):
        read_hf_folder(tmp_path / "absent")


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(SafetensorsError, match=r"config\.json: there is no such file"):
        read_hf_folder(tmp_path)


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(SafetensorsError, match=r"no \.safetensors file.*\.bin files aren't read"):
        read_hf_folder(folder)


def test_a_missing_index_is_named(folder, shards):
    (folder / INDEX).unlink()
    with pytest.raises(SafetensorsError, match=rf"2 \.safetensors files .*no {INDEX}"):
        read_hf_folder(folder)


def test_a_missing_shard_is_named(folder, shards):
    shards[1].unlink()
    with pytest.raises(SafetensorsError, match=r"1 of the 2 files .* missing: 'model-00002-of-00002"):
        read_hf_folder(folder)


def test_a_tensor_that_the_index_misplaces_is_named(folder, shards):
    write_index(folder, {"a": shards[1].name, "b": shards[1].name, "c": shards[0].name})
    with pytest.raises(SafetensorsError, match=r"00002-of-00002\.safetensors: tensor 'a' isn't in this file"):
        read_hf_folder(folder)


def test_a_tensor_in_two_shards_is_refused(folder, shards):
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, shards[1])
    with pytest.raises(SafetensorsError, match="tensor 'a' is also in model-00001"):
        read_hf_folder(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        "model.bin",
        7,
        ["x"],
        None,
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(folder, shards, name):
    write_index(folder, {"a": shards[0].name, "b": name})
    with pytest.raises(
        SafetensorsError, match=r"tensor 'b' in .*: not the plain name of a \.safetensors file"
    ):
        read_hf_folder(folder)


@pytest.mark.parametrize("name", ["x" * 5000 + ".safetensors", "\ud800.safetensors"])
def test_an_index_with_impossible_names_is_refused(folder, shards, name):
    write_index(folder, {"a": name})
    with pytest.raises(SafetensorsError, match="1 of the 1 files"):
        read_hf_folder(folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_an_index_without_a_weight_map_is_refused(folder, weight_map):
    write_index(folder, weight_map)
    with pytest.raises(SafetensorsError, match="no object weight_map"):
        read_hf_folder(folder)


@pytest.mark.parametrize(
    "text, match",
    [
        (b"[]", "the JSON isn't an object"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "the name 'a' occurs twice"),
        (b'{"a":' + b"[" * 100000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_bad_config_is_refused(folder, text, match):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(SafetensorsError, match=rf"config\.json: .*{match}"):
        read_hf_folder(folder)


@pytest.mark.parametrize("dtype", ["I64", "F64", "F8_E4M3", "BOOL", "f32"])
def test_other_dtypes_are_refused_by_name(refused, dtype):
    refused(
        packed({"x.w": entry(dtype, [2], 0, 16)}, bytes(16)),
        rf"tensor 'x\.w' has dtype '{dtype}'.*F32, F16, BF16",
    )


@pytest.mark.parametrize(
    "described, match",
    [
        (7, "isn't described by exactly"),
        ({"dtype": "F32", "shape": [1]}, "isn't described by exactly"),
        (entry(["F32"], [1], 0, 4), "dtype that isn't text"),
        (entry("F32", 1, 0, 4), "shape that isn't"),
        (entry("F32", [1.0], 0, 4), "shape that isn't"),
        (entry("F32", [True], 0, 4), "shape that isn't"),
        (entry("F32", [-1, -1], 0, 4), "shape that isn't"),
        (entry("F32", [0], 0, 0), "shape that isn't"),
        (entry("F32", [1] * 9, 0, 4), "shape that isn't"),
        (entry("F32", [1 << 64], 0, 4), "shape that isn't"),
        (entry("F32", [1], -4, 0), "data_offsets that aren't"),
        (entry("F32", [1], 0, "4"), "data_offsets that aren't"),
        (entry("F32", [2], 0, 4), "takes 8 bytes, but data_offsets span 4"),
        (entry("F32", [1], 4, 0), "takes 4 bytes, but data_offsets span -4"),
        (entry("F32", [1 << 62, 1 << 62], 0, 0), "takes .* bytes, but data_offsets span 0"),
        (entry("F32", [1 << 60], 0, 1 << 62), "ends at byte .*, but the file at byte"),
    ],
)
def test_a_tensor_that_is_described_wrongly_is_named(refused, described, match):
    refused(packed({"w": described}, bytes(4)), f"tensor 'w' .*{match}")


@pytest.mark.parametrize(
    "first, second, size, match",
    [
        ((0, 8), (4, 12), 12, "tensor 'b' starts at byte .* overlap or leave a gap"),
        ((0, 8), (0, 8), 8, "tensor 'b' starts at byte .* overlap or leave a gap"),
        ((0, 8), (12, 20), 20, "tensor 'b' starts at byte .* overlap or leave a gap"),
        ((4, 12), (12, 20), 20, "tensor 'a' starts at byte .* overlap or leave a gap"),
        ((0, 8), (8, 16), 20, "tensors end at byte .* but the file at byte"),
    ],
)
def test_tensors_must_fill_the_file_without_overlap(refused, first, second, size, match):
    refused(packed({"a": entry("F32", [2], *first), "b": entry("F32", [2], *second)}, bytes(size)), match)


@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "the file is empty"),
        (b"1234567", "7 bytes, too few for a header"),
        (struct.pack("<Q", 1), "header claims 1 bytes; the file has 0"),
        (struct.pack("<Q", (1 << 64) - 1) + bytes(8), "header claims 18446744073709551615 bytes"),
        (packed(b"[" * 100000), "nested too deeply"),
        (packed(b'{"w": {}, "w": {}}'), "the name 'w' occurs twice"),
        (
            packed(b'{"' + b'":1,"'.join(b"%d" % (n % 50000) for n in range(60000)) + b'":1}'),
            "'0' occurs twice",
        ),
        (packed(b"\xff"), "not valid JSON"),
        (packed([]), "isn't an object"),
    ],
)
def test_a_bad_header_is_refused(refused, data, match):
    refused(data, match)


def test_headers_have_a_largest_size(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 30))
    os.truncate(path, 2 << 30)
    with pytest.raises(SafetensorsError, match=f"{MAX_HEADER} is the most"):
        read_hf_folder(folder)


whole_file = packed({name: entry("F16", [2, 2], 8 * i, 8 * i + 8) for i, name in enumerate("abc")}, bytes(24))


@given(
    st.lists(st.tuples(st.integers(0, len(whole_file) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.none() | st.integers(0, len(whole_file)),
)
@settings(max_examples=300)
def test_a_damaged_file_reads_or_is_refused(reused_folder, edits, cut):
    damaged = bytearray(whole_file)
    for place, value in edits:
        damaged[place] = value
    (reused_folder / "model.safetensors").write_bytes(damaged[:cut])
    tracemalloc.start()
    try:
        with read_hf_folder(reused_folder) as file:
            for tensor in file.tensors.values():
                assert len(tensor.data) == tensor.nbytes
    except SafetensorsError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
