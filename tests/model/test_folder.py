"""Opening a model folder: what it says of the model, and errors that name the file and the key at fault."""

import json
import math
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import DEEPSEEK, make_deepseek_v2, make_deepseek_v3, make_llama

from raysonar.errors import ModelFolderError
from raysonar.model.folder import open_folder


def rewrite(folder, file="config.json", **changes):
    """The folder's JSON file with some keys changed; None removes one."""
    values = json.loads((folder / file).read_text()) | changes
    (folder / file).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_tells_what_it_holds(tmp_path, shards):
    folder = open_folder(make_deepseek_v3(tmp_path / "name", mtp=1, dtype=torch.bfloat16, shards=shards))
    assert (folder.name, folder.has_mtp, folder.fp8, folder.checkpoint_dtype) == ("name", True, False, torch.bfloat16)
    assert (folder.bos_token_id, folder.eos_token_ids) == (0, (1,))
    assert folder.tensors["model.embed_tokens.weight"].shape == (384, 64)
    assert len({stored.file for stored in folder.tensors.values()}) == shards


def test_a_path_may_be_text(tmp_path):
    assert open_folder(str(make_llama(tmp_path))).path == tmp_path


@pytest.mark.parametrize("fp8", ["float32", "ue8m0"])
def test_fp8_folders_compute_in_bfloat16_unless_they_say_otherwise(tmp_path, fp8):
    made = make_deepseek_v3(tmp_path, fp8=fp8, dtype=torch.bfloat16)
    assert (open_folder(made).fp8, open_folder(made).checkpoint_dtype) == (True, torch.bfloat16)
    rewrite(made, dtype=None)
    assert open_folder(made).checkpoint_dtype == torch.bfloat16
    rewrite(made, dtype="float32")
    assert open_folder(made).checkpoint_dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_dtype_in_the_configuration_the_weights_tell(tmp_path, dtype):
    made = make_llama(tmp_path, dtype=dtype)
    rewrite(made, dtype=None)
    assert open_folder(made).checkpoint_dtype == dtype


def test_declared_modules_that_are_not_stored_do_not_count(tmp_path):
    """transformers declares one by default and never stores it."""
    made = make_deepseek_v3(tmp_path, mtp=0)
    rewrite(made, num_nextn_predict_layers=1)
    assert not open_folder(made).has_mtp


def test_two_modules_are_read_as_two(tmp_path):
    assert open_folder(make_deepseek_v3(tmp_path, mtp=2)).spec.mtp_modules == 2


def test_v2_has_no_module(tmp_path):
    assert not open_folder(make_deepseek_v2(tmp_path)).has_mtp


def test_end_tokens_of_both_files_are_joined(tmp_path):
    made = make_llama(tmp_path, eos_token_id=[5, 6])
    (made / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
    assert open_folder(made).eos_token_ids == (5, 6, 7)
    (made / "generation_config.json").write_text('{"eos_token_id": 400}')
    with pytest.raises(ModelFolderError, match=r"generation_config.json: eos_token_id: .*size 384, found 400"):
        open_folder(made)


def test_no_end_token_is_no_error(tmp_path):
    made = make_llama(tmp_path)
    rewrite(made, eos_token_id=None)
    assert open_folder(made).eos_token_ids == ()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ModelFolderError, match="nowhere: expected a model folder, found nothing there"):
        open_folder(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFolderError, match="file: expected a model folder, found a file there"):
        open_folder(tmp_path / "file")


def test_a_folder_that_is_not_a_model(tmp_path):
    with pytest.raises(ModelFolderError, match=r"not a model folder: expected a config.json in it"):
        open_folder(tmp_path)


def test_configurations_that_are_no_objects(tmp_path):
    made = make_llama(tmp_path)
    (made / "config.json").write_text("{'a': 1}")
    with pytest.raises(ModelFolderError, match=r"config.json: not valid JSON: .*line 1 column 2"):
        open_folder(made)
    (made / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match=r"config.json: expected a JSON object, found list"):
        open_folder(made)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"null", b"{", b"[" * 100_000, b'{"a":' * 3000])
def test_json_that_cannot_be_read_is_the_folders_fault(tmp_path, file, text):
    made = make_llama(tmp_path, shards=2)
    (made / file).write_bytes(text)
    with pytest.raises(ModelFolderError, match=file):
        open_folder(made)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.sampled_from([*sorted(DEEPSEEK), "rope_scaling", "dtype", "architectures", "quantization_config"]),
    value=st.sampled_from([0, -1, 3, 2**31, 10**30, 1.5, math.nan, "x", "", None, True, [], [1], [[]], {}, {"a": 1}]),
)
def test_any_value_of_any_key_is_taken_or_the_folders_fault(tmp_path, key, value):
    made = tmp_path / "model"
    if not made.exists():
        make_deepseek_v3(made, mtp=1)
    config = made / "config.json"
    original = config.read_text()
    config.write_text(json.dumps(json.loads(original) | {key: value}))
    try:
        with suppress(ModelFolderError):
            open_folder(made)
    finally:
        config.write_text(original)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method: expected fp8, found 'g"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size: expected \[128, 128\], found no such"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size: expected \[128, 128\], found \[64, 64\]",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
            "activation_scheme: expected dynamic, found 'static'",
        ),
        ({"compression_config": {"quant_method": "int4"}}, "compression_config.quant_method: expected fp8"),
        ({"dtype": "int8"}, "dtype: expected float32 or bfloat16 or float16, found 'int8'"),
        ({"eos_token_id": "x"}, "eos_token_id: expected token ids"),
        ({"intermediate_size": 10**30}, r"intermediate_size: expected an integer below 2\^31, found 10000"),
        ({"bos_token_id": -1}, "bos_token_id: expected an integer of at least 0, found -1"),
    ],
)
def test_configurations_that_cannot_be_honoured(tmp_path, change, says):
    made = make_llama(tmp_path)
    rewrite(made, **change)
    with pytest.raises(ModelFolderError, match=f"config.json: .*{says}"):
        open_folder(made)


def test_no_weights(tmp_path):
    made = make_llama(tmp_path)
    (made / "model.safetensors").rename(made / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match=r"no weights: expected model.safetensors or .* found pytorch_model.bin"):
        open_folder(made)
    (made / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFolderError, match=r"no weights: expected model.safetensors or .*index.json$"):
        open_folder(made)


def test_a_shard_that_is_missing(tmp_path):
    made = make_deepseek_v3(tmp_path, shards=3)
    (made / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"index.json: 1 shards .* missing: model-00002-of-00003.safetensors"):
        open_folder(made)


def test_an_index_that_is_wrong(tmp_path):
    made = make_deepseek_v3(tmp_path, shards=2)
    index = made / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ModelFolderError, match=r"model-00002-of-00002.safetensors: .* lm_head.weight, but it does not"):
        open_folder(made)
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../model.safetensors"}}))
    with pytest.raises(ModelFolderError, match=r"expected file names, found '../model.safetensors'"):
        open_folder(made)
    for name in (5, None, [], {"a": 1}, "", "..", "/etc/passwd", "x" * 5000):
        index.write_text(json.dumps({"weight_map": weight_map | {"lm_head.weight": name}}))
        with pytest.raises(ModelFolderError, match=r"index.json: (expected file names, found|1 shards .* are missing)"):
            open_folder(made)
    index.write_text("{}")
    with pytest.raises(ModelFolderError, match=r"index.json: expected a key weight_map"):
        open_folder(made)


@pytest.mark.parametrize("keep", [0.0, 4.0, 100.0, 0.5, 0.999])
def test_a_truncated_file_is_named_with_both_sizes(tmp_path, keep):
    """Cut inside the length (bytes), the header, and the data (fractions of the file)."""
    made = make_deepseek_v3(tmp_path, shards=2)
    file = made / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    kept = int(keep) if keep >= 1 or keep == 0 else int(len(whole) * keep)
    file.write_bytes(whole[:kept])
    with pytest.raises(ModelFolderError, match=r"model-00002-of-00002.safetensors: ") as raised:
        open_folder(made)
    if kept > 8:
        assert "truncated: expected" in str(raised.value)
    assert str(kept if kept != 100 else 92) in str(raised.value)


def test_a_file_that_is_too_long_or_no_safetensors(tmp_path):
    made = make_llama(tmp_path)
    file = made / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"more")
    with pytest.raises(ModelFolderError, match=f"too long: expected {len(whole)} bytes, found {len(whole) + 4}"):
        open_folder(made)
    file.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelFolderError, match="not a safetensors file"):
        open_folder(made)
    file.write_bytes(struct.pack("<Q", 4) + b"[{}]")
    with pytest.raises(ModelFolderError, match="not a safetensors file: its header cannot be read"):
        open_folder(made)


def test_a_single_file_wins_over_an_index_as_in_transformers(tmp_path):
    made = make_llama(tmp_path, shards=2)
    tensors = {}
    for file in made.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, made / "model.safetensors")
    assert {stored.file.name for stored in open_folder(made).tensors.values()} == {"model.safetensors"}
