"""A Hugging Face model folder, opened: what the model is and where its tensors lie. No weights are read yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raysonar.errors import ModelFolderError
from raysonar.model.parse import ConfigReader, parse_spec
from raysonar.model.shards import StoredTensor, read_json, stored_tensors
from raysonar.model.spec import DeepseekSpec, ModelSpec

FP8_BLOCK = 128
"""Rows and columns that share a scale in fp8 checkpoints."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A model folder whose files are there, whole, and of a model that raysonar runs."""

    path: Path
    spec: ModelSpec
    checkpoint_dtype: torch.dtype
    """What the weights are meant to be computed in; bfloat16 for fp8 checkpoints unless they say otherwise."""
    fp8: bool
    """Linear layers are stored as e4m3 with a scale for each 128x128 block."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text: those of config.json, then those of generation_config.json."""
    bos_token_id: int | None
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    """What is stored, by name."""

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def has_mtp(self) -> bool:
        """Whether the weights hold an MTP module."""
        return isinstance(self.spec, DeepseekSpec) and self.spec.mtp_modules > 0


def open_folder(path: Path | str, *, weights: bool = True) -> ModelFolder:
    """Read a folder's config.json, generation_config.json and the headers of its safetensors files.

    weights: False does with a folder that holds no safetensors file at all; its MTP modules are then those that
    config.json declares. Raises ModelFolderError that names the file and the key or tensor at fault, with what was
    expected and found.
    """
    path = Path(path)
    if not path.is_dir():
        found = "a file" if path.is_file() else "nothing"
        raise ModelFolderError(f"{path}: expected a model folder, found {found} there")
    source = path / "config.json"
    if not source.is_file():
        raise ModelFolderError(f"{path}: not a model folder: expected a config.json in it")
    config = ConfigReader(read_json(source), source)
    spec = parse_spec(config)
    tensors = stored_tensors(path) if weights or any(path.glob("*.safetensors")) else {}
    if isinstance(spec, DeepseekSpec) and tensors:
        spec = replace(spec, mtp_modules=_stored_mtp_modules(spec, tensors))
    fp8 = _is_fp8(config)
    return ModelFolder(
        path=path,
        spec=spec,
        checkpoint_dtype=_checkpoint_dtype(config, fp8, tensors),
        fp8=fp8,
        eos_token_ids=_eos_token_ids(path, config, spec.vocab),
        bos_token_id=config.optional_integer("bos_token_id", None, least=0),
        tensors=tensors,
    )


def _stored_mtp_modules(spec: DeepseekSpec, tensors: Mapping[str, StoredTensor]) -> int:
    """Of the MTP modules that config.json declares, those whose tensors are stored.

    Many folders declare modules without storing them (transformers' default is 1, and it never saves them).
    """
    modules = 0
    while modules < spec.mtp_modules:
        prefix = f"model.layers.{spec.layers + modules}."
        if not any(name.startswith(prefix) for name in tensors):
            break
        modules += 1
    return modules


def _is_fp8(config: ConfigReader) -> bool:
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is None:
            continue
        quantization = config.section(key)
        quantization.choice("quant_method", ("fp8",))
        quantization.choice("fmt", ("e4m3",), "e4m3")
        quantization.choice("activation_scheme", ("dynamic",), "dynamic")
        if quantization.get("weight_block_size") != [FP8_BLOCK, FP8_BLOCK]:
            raise quantization.error("weight_block_size", f"[{FP8_BLOCK}, {FP8_BLOCK}]")
        return True
    return False


def _checkpoint_dtype(config: ConfigReader, fp8: bool, tensors: Mapping[str, StoredTensor]) -> torch.dtype:
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    if config.get(key) is not None:
        return _DTYPES[config.choice(key, tuple(_DTYPES))]
    if fp8:
        return torch.bfloat16
    embedding = tensors.get("model.embed_tokens.weight")
    return _STORED_DTYPES.get(embedding.dtype, torch.float32) if embedding else torch.float32


def _eos_token_ids(path: Path, config: ConfigReader, vocab: int) -> tuple[int, ...]:
    sources = [config]
    generation = path / "generation_config.json"
    if generation.is_file():
        sources.append(ConfigReader(read_json(generation), generation))
    ids: dict[int, None] = {}
    for source in sources:
        value: Any = source.get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            if type(token) is not int or not 0 <= token < vocab:
                raise source.error("eos_token_id", f"token ids below the vocabulary's size {vocab}")
            ids[token] = None
    return tuple(ids)
