"""Reading weights: equal to what is stored, whole or in part, without copies; errors name file, tensor and shapes."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.checkpoints import (
    dequantised_twin,
    make_deepseek_v2,
    make_deepseek_v3,
    make_llama,
    read_weights,
    write_weights,
)
from support.memory import anonymous_bytes

from raysonar.errors import ModelFolderError
from raysonar.model.checkpoint import CheckpointReader
from raysonar.model.folder import open_folder

WIDE = {"hidden_size": 320, "intermediate_size": 200, "moe_intermediate_size": 136, "n_routed_experts": 4, "n_group": 2}
"""Dimensions of several 128-blocks, the last one partial."""


def read_all(folder, **options):
    """Every tensor of the folder but the scales, through the reader, in an order unlike that of the files."""
    opened = open_folder(folder)
    with CheckpointReader(opened, **options) as reader:
        names = sorted(
            (name for name in opened.tensors if not name.endswith("_scale_inv")), key=lambda name: name[::-1]
        )
        tensors = {name: reader.read(name, opened.tensors[name].shape) for name in names}
        reader.finish()
    return tensors


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_is_read_as_stored(tmp_path, shards, dtype):
    folder = make_deepseek_v3(tmp_path, mtp=1, dtype=dtype, shards=shards)
    stored, read = read_weights(folder), read_all(folder)
    assert stored.keys() == read.keys()
    assert len(read) > 100
    assert all(torch.equal(stored[name], read[name]) and stored[name].dtype == read[name].dtype for name in stored)


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shards", [1, 4])
def test_fp8_weights_are_multiplied_out(tmp_path, scales, dtype, shards):
    folder = make_deepseek_v3(
        tmp_path / "fp8", mtp=1, fp8=scales, dtype=torch.bfloat16, shards=shards, num_hidden_layers=2, **WIDE
    )
    expected = read_weights(dequantised_twin(folder, tmp_path / "twin", dtype))
    read = read_all(folder, dtype=dtype)
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
    assert read["model.layers.0.self_attn.o_proj.weight"].dtype == dtype


def test_fp8_weights_take_the_checkpoints_dtype_unless_told(tmp_path):
    read = read_all(make_deepseek_v3(tmp_path, fp8="float32", dtype=torch.bfloat16))
    assert {tensor.dtype for name, tensor in read.items() if not name.endswith("bias")} == {torch.bfloat16}


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("fp8")
    options = dict(WIDE, num_hidden_layers=1, first_k_dense_replace=1)
    folder = make_deepseek_v2(root / "fp8", fp8="float32", dtype=torch.float32, **options)
    return open_folder(folder), read_weights(dequantised_twin(folder, root / "twin"))


PARTS = st.tuples(st.integers(0, 320), st.integers(0, 320)).map(sorted)


@given(rows=PARTS, columns=st.one_of(st.none(), PARTS))
@settings(max_examples=60, deadline=None)
def test_any_part_of_a_tensor_equals_that_part_of_the_whole(fp8_folder, rows, columns):
    """Parts of fp8 weights need not keep to the blocks of their scales."""
    folder, whole = fp8_folder
    select = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
    with CheckpointReader(folder) as reader:
        for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"):
            part = reader.read(name, tuple(whole[name].shape), select)
            assert torch.equal(part, whole[name][select])


def test_parts_with_a_step_are_refused(fp8_folder):
    folder, whole = fp8_folder
    with CheckpointReader(folder) as reader, pytest.raises(ValueError, match="slices of step 1 only"):
        reader.read("lm_head.weight", tuple(whole["lm_head.weight"].shape), (slice(None, None, 2),))


def test_what_is_not_fp8_is_a_view_of_the_file_and_outlives_the_reader(tmp_path):
    """Anonymous memory must not grow by the tensors' size: they are pages of the file."""
    folder = make_llama(tmp_path, tokenizer=False)
    big = torch.ones(64, 1 << 18)
    stored = {name: tensor.clone() for name, tensor in read_weights(folder).items()}
    save_file(stored | {"big": big}, folder / "model.safetensors")
    opened = open_folder(folder)
    before = anonymous_bytes()
    with CheckpointReader(opened) as reader:
        read = reader.read("big", (64, 1 << 18))
    assert float(read.sum()) == big.numel()
    assert anonymous_bytes() - before < big.nbytes // 8


def test_progress_counts_every_byte_once_on_standard_error(tmp_path, capfd):
    folder = make_deepseek_v3(tmp_path / "demo", shards=3)
    read_all(folder, progress=True)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "loading demo: 100%" in captured.err
    read_all(folder)
    assert capfd.readouterr().err == ""


def test_a_missing_tensor_is_named_with_its_file_and_shape(tmp_path):
    for shards, file in ((1, "model.safetensors"), (2, "model.safetensors.index.json")):
        opened = open_folder(make_llama(tmp_path / str(shards), shards=shards))
        with CheckpointReader(opened) as reader:
            assert not reader.has("model.norm.bias")
            with pytest.raises(ModelFolderError) as raised:
                reader.read("model.norm.bias", (64,))
        assert str(raised.value) == (
            f"{opened.path / file}: tensor model.norm.bias: expected shape [64], found no such tensor"
        )


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path):
    opened = open_folder(make_llama(tmp_path))
    with CheckpointReader(opened) as reader, pytest.raises(ModelFolderError) as raised:
        reader.read("lm_head.weight", (384, 65))
    file = opened.path / "model.safetensors"
    assert str(raised.value) == f"{file}: tensor lm_head.weight: expected shape [384, 65], found [384, 64]"


def test_other_dtypes_are_refused(tmp_path):
    folder = make_llama(tmp_path)
    stored = read_weights(folder)
    write_weights(folder, stored | {"model.norm.weight": stored["model.norm.weight"].to(torch.int8)})
    with CheckpointReader(open_folder(folder)) as reader, pytest.raises(ModelFolderError, match="found I8"):
        reader.read("model.norm.weight", (64,))


NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{NAME}_scale_inv": None}, rf"tensor {NAME}_scale_inv: expected shape \[1, 1\], found no such tensor"),
        (
            {f"{NAME}_scale_inv": torch.ones(2, 1)},
            rf"tensor {NAME}_scale_inv: expected shape \[1, 1\], found \[2, 1\]",
        ),
        (
            {f"{NAME}_scale_inv": torch.ones(1, 1, dtype=torch.int32)},
            rf"tensor {NAME}_scale_inv: expected a dtype of F32, F8_E8M0, found I32",
        ),
        ({NAME: torch.zeros(64, 48).to(torch.float8_e5m2)}, rf"tensor {NAME}: expected a dtype of .*, found F8_E5M2"),
    ],
)
def test_broken_fp8_weights_are_named(tmp_path, change, says):
    folder = make_deepseek_v3(tmp_path, fp8="float32")
    stored = read_weights(folder) | change
    write_weights(folder, {name: tensor for name, tensor in stored.items() if tensor is not None})
    with CheckpointReader(open_folder(folder)) as reader, pytest.raises(ModelFolderError, match=says):
        reader.read(NAME, (64, 48))


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path):
    folder = make_deepseek_v3(tmp_path / "fp8", fp8="float32")
    plain = make_deepseek_v3(tmp_path / "plain")
    shutil.copy(plain / "config.json", folder / "config.json")
    with (
        CheckpointReader(open_folder(folder)) as reader,
        pytest.raises(ModelFolderError, match="no quantization_config"),
    ):
        reader.read(NAME, (64, 48))


def test_weights_left_unread_are_a_sign_of_another_model(tmp_path):
    opened = open_folder(make_llama(tmp_path))
    with CheckpointReader(opened) as reader:
        for name in list(opened.tensors)[2:]:
            reader.read(name, opened.tensors[name].shape)
        left = ", ".join(list(opened.tensors)[:2])
        with pytest.raises(ModelFolderError, match=f"2 tensors are not part of the Llama model .*: {left}"):
            reader.finish()


def test_modules_old_buffers_and_a_tied_head_may_be_left(tmp_path):
    folder = make_deepseek_v3(tmp_path, mtp=1, tie_word_embeddings=True)
    stored = read_weights(folder)
    extra = {
        "lm_head.weight": stored["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    write_weights(folder, stored | extra)
    opened = open_folder(folder)
    with CheckpointReader(opened) as reader:
        for name in stored:
            if not name.startswith("model.layers.3."):
                reader.read(name, opened.tensors[name].shape)
        reader.finish()


def test_a_file_cut_after_it_was_opened_is_named(tmp_path):
    opened = open_folder(make_llama(tmp_path))
    file = opened.path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with (
        CheckpointReader(opened) as reader,
        pytest.raises(ModelFolderError, match=r"model.safetensors: tensor lm_head"),
    ):
        reader.read("lm_head.weight", (384, 64))
