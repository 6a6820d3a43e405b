"""The GGUF reader on files that are right: round trips, alignments, split models, real vocabularies."""

import random
import time
from math import prod

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gguf_writer import ARRAY, BOOL, CODES, F32, STRING, U16, U32, array, key, model_of, scalar, u32
from zllmc.frontends.gguf import GGML_TYPES, GGUFError, read_gguf

F32_TYPE, Q4_K_TYPE = 0, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf") / "model.gguf"


def write(path, data):
    path.write_bytes(data)
    return path


# --- round trips -------------------------------------------------------------------------------------

INTEGERS = {kind: code for kind, code in CODES.items() if code in "BbHhIiQq"}


@st.composite
def values(draw):
    """A value type, its payload and what the reader must make of it."""
    kind = draw(st.sampled_from([*INTEGERS, F32, BOOL, STRING]))
    item = {
        F32: st.floats(width=32, allow_nan=False),
        BOOL: st.booleans(),
        STRING: st.text(max_size=12),
    }.get(kind)
    if item is None:
        bits = 8 * np.dtype(INTEGERS[kind]).itemsize
        signed = INTEGERS[kind].islower()
        item = (
            st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else st.integers(0, (1 << bits) - 1)
        )
    shape = draw(st.sampled_from(["scalar", "array", "nested"]))
    if shape == "scalar":
        value = draw(item)
        return kind, scalar(kind, value), value
    if shape == "array":
        items = draw(st.lists(item, max_size=5))
        return ARRAY, array(kind, items), items
    rows = draw(st.lists(st.lists(item, max_size=3), max_size=3))
    return ARRAY, array(ARRAY, [array(kind, row) for row in rows]), rows


@st.composite
def stored_tensors(draw, name):
    type_id = draw(st.sampled_from(sorted(GGML_TYPES)))
    kind = GGML_TYPES[type_id]
    ne = draw(st.lists(st.integers(1, 3), max_size=4))
    if ne:
        ne[0] *= kind.block
    elif kind.block > 1:
        ne = [kind.block]
    nbytes = prod(ne) // kind.block * kind.nbytes
    seed = draw(st.integers(0, 2**32))
    return name, ne, type_id, random.Random(seed).randbytes(nbytes)


@given(
    st.dictionaries(st.text(min_size=1, max_size=20), values(), max_size=6),
    st.lists(st.text(max_size=20), unique=True, max_size=5).flatmap(
        lambda names: st.tuples(*map(stored_tensors, names))
    ),
    st.sampled_from([1, 8, 32, 4096]),
    st.sampled_from([2, 3]),
)
@settings(max_examples=150)
def test_what_was_written_is_read_back(path, metadata, tensors, alignment, version):
    keys = [key(name, kind, payload) for name, (kind, payload, _) in metadata.items()]
    with read_gguf(write(path, model_of(tensors, keys, alignment=alignment, version=version))) as file:
        read = {name: value for name, value in file.metadata.items() if name != "general.alignment"}
        assert read == {name: value for name, (_, _, value) in metadata.items()}
        assert (file.version, file.alignment, file.paths) == (version, alignment, (path,))
        assert list(file.tensors) == [name for name, *_ in tensors]
        for name, ne, type_id, raw in tensors:
            tensor = file.tensors[name]
            assert tensor.shape == tuple(reversed(ne))
            assert (tensor.type_id, tensor.type_name) == (type_id, GGML_TYPES[type_id].name)
            assert tensor.nbytes == len(raw)
            assert tensor.data.tobytes() == raw


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_every_header_length_and_alignment_finds_its_tensors(path, alignment):
    tensors = [
        ("a", [3], F32_TYPE, b"A" * 12),
        ("b", [256, 2], Q4_K_TYPE, b"B" * 288),
        ("c", [1], F32_TYPE, b"CCCC"),
    ]
    for padding in range(64):
        keys = [key("padding", STRING, scalar(STRING, "x" * padding))]
        with read_gguf(write(path, model_of(tensors, keys, alignment=alignment))) as file:
            assert [file.tensors[name].data.tobytes() for name in "abc"] == [raw for *_, raw in tensors]


def test_files_of_the_gguf_package_are_read(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("general.languages", ["de", "日本語"])
    writer.add_tensor("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("half", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with read_gguf(path) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.block_count"] == 2
        assert file.metadata["general.languages"] == ["de", "日本語"]
        assert file.tensors["weight"].shape == (2, 3)
        assert file.tensors["weight"].data.view(np.float32).tolist() == [0, 1, 2, 3, 4, 5]
        assert file.tensors["half"].data.view(np.float16).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name", ["archs/llama-dense.gguf", "quants/llama-dense-Q4_K_M.gguf", "vocabs/ggml-vocab-llama-spm.gguf"]
)
def test_real_files_agree_with_the_gguf_package(conformance, name):
    expected = gguf.GGUFReader(conformance / name)
    with read_gguf(conformance / name) as file:
        fields = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for key_name, field in fields.items():
            assert file.metadata[key_name] == field.contents(), key_name
        assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
        for tensor in expected.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(reversed(tensor.shape.tolist()))
            assert ours.type_name == tensor.tensor_type.name
            assert ours.offset == tensor.data_offset
            assert ours.data.tobytes() == tensor.data.tobytes()


def test_each_tensor_has_its_own_type(conformance):
    with read_gguf(conformance / "quants/llama-dense-Q4_K_M.gguf") as file:
        assert {"F32", "Q4_K", "Q6_K"} <= {tensor.type_name for tensor in file.tensors.values()}


def test_block_sizes_agree_with_the_gguf_package():
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package says 40; ggml's block has two halves and 32 bytes
            assert GGML_TYPES[int(kind)] == (kind.name, block, nbytes)


def test_block_sizes_agree_with_the_codec_vectors(conformance):
    paths = list((conformance / "codecs").glob("*.npz"))
    assert paths
    for npz in paths:
        with np.load(npz) as vectors:
            described = (npz.stem, int(vectors["block_size"]), int(vectors["type_size"]))
            assert GGML_TYPES[int(vectors["ggml_type"])] == described


def test_a_large_vocabulary_opens_fast(conformance):
    started = time.process_time()
    with read_gguf(conformance / "vocabs/ggml-vocab-llama-bpe.gguf") as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 128256
        assert len(file.metadata["tokenizer.ggml.merges"]) == 280147
    assert time.process_time() - started < 0.5


def test_views_are_read_only_and_outlive_the_file(path):
    with read_gguf(write(path, model_of([("a", [3], F32_TYPE, b"A" * 12)]))) as file:
        view = file.tensors["a"].data
    assert view.tobytes() == b"A" * 12
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_a_closed_file_gives_no_new_views(path):
    with read_gguf(write(path, model_of([("a", [3], F32_TYPE, b"A" * 12)]))) as file:
        pass
    with pytest.raises(ValueError, match="closed"):
        _ = file.tensors["a"].data


# --- split models ------------------------------------------------------------------------------------


def split_keys(number, count, total):
    return [
        key("split.no", U16, scalar(U16, number)),
        key("split.count", U16, scalar(U16, count)),
        key("split.tensors.count", U32, u32(total)),
    ]


@pytest.fixture
def shards(tmp_path):
    """A model of three shards; only the first one describes the model, as llama.cpp writes them."""
    paths = []
    for number in range(3):
        keys = split_keys(number, 3, 4)
        tensors = [(f"t{number}", [4], F32_TYPE, bytes([number]) * 16)]
        if number == 0:
            keys.append(key("general.architecture", STRING, scalar(STRING, "llama")))
            tensors.append(("extra", [4], F32_TYPE, b"x" * 16))
        paths.append(write(tmp_path / f"big-{number + 1:05}-of-00003.gguf", model_of(tensors, keys)))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2, "folder"])
def test_any_shard_or_the_folder_opens_the_whole_model(shards, given):
    with read_gguf(shards[0].parent if given == "folder" else shards[given]) as file:
        assert file.paths == tuple(shards)
        assert list(file.tensors) == ["t0", "extra", "t1", "t2"]
        assert file.metadata["general.architecture"] == "llama"
        assert file.tensors["t2"].path == shards[2]
        assert file.tensors["t2"].data.tobytes() == b"\2" * 16


def test_a_missing_shard_is_named(shards):
    shards[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of the model's 3 shards are missing.*big-00002-of-00003\.gguf"):
        read_gguf(shards[2])


def test_a_shard_of_another_place_is_refused(shards):
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(GGUFError, match=r"00002-of.*split\.no = 2 \(expected 1\)"):
        read_gguf(shards[0])


def test_a_shard_without_split_keys_is_refused(shards):
    shards[1].write_bytes(model_of([]))
    with pytest.raises(GGUFError, match=r"split\.no = None"):
        read_gguf(shards[0])


def test_shards_that_miss_tensors_are_refused(shards):
    shards[1].write_bytes(model_of([], split_keys(1, 3, 4)))
    with pytest.raises(GGUFError, match="promises 4 tensors over all shards, the shards hold 3"):
        read_gguf(shards[0])


def test_a_tensor_in_two_shards_is_refused(shards):
    shards[1].write_bytes(model_of([("t2", [4], F32_TYPE, bytes(16))], split_keys(1, 3, 4)))
    with pytest.raises(GGUFError, match=r"tensor 't2' is also in big-00002-of-00003\.gguf"):
        read_gguf(shards[0])


def test_a_renamed_shard_is_refused(shards):
    with pytest.raises(GGUFError, match=r"one of 3 shards.*NAME-00001-of-00003"):
        read_gguf(shards[1].rename(shards[1].with_name("renamed.gguf")))


def test_a_name_that_contradicts_split_count_is_refused(shards):
    with pytest.raises(GGUFError, match=r"name says 2 shards, the key split\.count says 3"):
        read_gguf(shards[1].rename(shards[1].with_name("big-00002-of-00002.gguf")))


def test_a_split_count_that_is_no_number_is_refused(path):
    keys = [key("split.count", STRING, scalar(STRING, "three"))]
    with pytest.raises(GGUFError, match=r"split\.count is 'three', not a number"):
        read_gguf(write(path, model_of([], keys)))


def test_a_single_shard_opens(tmp_path):
    path = write(
        tmp_path / "m-00001-of-00001.gguf", model_of([("a", [1], F32_TYPE, b"abcd")], split_keys(0, 1, 1))
    )
    assert list(read_gguf(path).tensors) == ["a"]


def test_a_folder_with_several_models_lists_them(shards):
    write(shards[0].with_name("small.gguf"), model_of([]))
    with pytest.raises(GGUFError, match=r"2 models \(big-00001-of-00003\.gguf, small\.gguf\)"):
        read_gguf(shards[0].parent)


def test_a_folder_without_models_is_refused(tmp_path):
    with pytest.raises(GGUFError, match=r"no \.gguf file"):
        read_gguf(tmp_path)
