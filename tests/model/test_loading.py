"""Loading a whole model: a fault of its weights is an error that names file, tensor and shapes; memory stays low."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.checkpoints import make_deepseek_v3, make_llama, read_weights, write_weights

from raysonar.errors import ModelFolderError
from raysonar.model.folder import open_folder
from raysonar.model.loading import load_model


def load(folder, mtp=False):
    return load_model(open_folder(folder), dtype=torch.float32, device=torch.device("cpu"), mtp=mtp)


FAULTS = [
    ("model.embed_tokens.weight", None, r"\[384, 64\], found no such tensor"),
    ("model.layers.0.mlp.down_proj.weight", None, r"\[64, 96\], found no such tensor"),
    ("model.layers.2.mlp.experts.7.up_proj.weight", None, r"\[32, 64\], found no such tensor"),
    ("model.layers.1.mlp.gate.e_score_correction_bias", None, r"\[8\], found no such tensor"),
    ("model.layers.1.self_attn.kv_b_proj.weight", (112, 17), r"\[112, 16\], found \[112, 17\]"),
    ("model.layers.1.mlp.experts.0.gate_proj.weight", (33, 64), r"\[32, 64\], found \[33, 64\]"),
    ("lm_head.weight", (64, 384), r"\[384, 64\], found \[64, 384\]"),
    ("model.layers.3.eh_proj.weight", (64, 64), r"\[64, 128\], found \[64, 64\]"),
    ("model.layers.3.shared_head.norm.weight", None, r"\[64\], found no such tensor"),
]


@pytest.mark.parametrize(("name", "shape", "says"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path, name, shape, says):
    folder = make_deepseek_v3(tmp_path, mtp=1)
    tensors = read_weights(folder)
    del tensors[name]
    write_weights(folder, tensors if shape is None else tensors | {name: torch.zeros(shape)})
    with pytest.raises(ModelFolderError, match=rf"model.safetensors: tensor {name}: expected shape {says}"):
        load(folder, mtp=True)


def test_weights_of_another_model_are_noticed(tmp_path):
    """A configuration with a layer less than the weights have."""
    folder = make_llama(tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 1}))
    with pytest.raises(ModelFolderError, match=r"9 tensors are not part of the Llama model .*: model.layers.1"):
        load(folder)


@pytest.mark.parametrize("mtp", [False, True])
def test_stored_modules_may_go_unused(tmp_path, mtp):
    assert (load(make_deepseek_v3(tmp_path, mtp=2), mtp=mtp).mtp is not None) == mtp


WATCHED_LOADING = """
import sys
import torch
from raysonar.model.checkpoint import CheckpointReader
from raysonar.model.folder import open_folder
from raysonar.model.loading import load_model
from support.memory import anonymous_bytes

torch.set_num_threads(1)
torch.randn(64, 64) @ torch.randn(64, 64)
levels, read = [anonymous_bytes()], CheckpointReader.read

def watched(self, *arguments):
    levels.append(anonymous_bytes())
    return read(self, *arguments)

CheckpointReader.read = watched
loaded = load_model(open_folder(sys.argv[1]), dtype=torch.float32, device=torch.device("cpu"))
levels.append(anonymous_bytes())
print(len(levels), levels[-1] - levels[0], max(levels) - levels[0])
"""


def test_loading_holds_the_weights_once(tmp_path):
    """Anonymous memory: the model's own copy, and holes that repacking leaves in the heap; files are only mapped."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 16}
    folder = make_deepseek_v3(tmp_path, shards=3, num_hidden_layers=4, tokenizer=False, **sizes)
    total = sum(stored.bytes for stored in open_folder(folder).tensors.values())
    search = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_LOADING, str(folder)],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reads, held, peak = map(int, done.stdout.split())
    assert reads > 200
    assert total > 80_000_000
    assert 0.95 * total < held <= peak < 1.4 * total
