"""What a folder's safetensors files hold, from their headers alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysonar.errors import ModelFolderError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_NAME_LIMIT = 255  # characters; the file systems' own limit
_HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file."""

    file: Path
    dtype: str
    """As the format spells it: F32, BF16, F8_E4M3, ..."""
    shape: tuple[int, ...]
    bytes: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, from model.safetensors or else from the shards of its index.

    Raises ModelFolderError: no weights, a shard that the index names is missing or lacks a tensor, a truncated file.
    """
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ModelFolderError(f"{folder}: no weights: expected {SINGLE} or {INDEX}{_found_instead(folder)}")
    weight_map = _weight_map(folder / INDEX)
    headers = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise ModelFolderError(f"{folder / name}: {INDEX} says that it holds {tensor}, but it does not")
    return {tensor: headers[name][tensor] for tensor, name in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises ModelFolderError when the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > _HEADER_LIMIT:
            raise ModelFolderError(f"{file}: not a safetensors file ({size} bytes, header of {length} bytes)")
        text = opened.read(length)
    if len(text) < length:
        raise ModelFolderError(f"{file}: truncated: expected a header of {length} bytes, found {len(text)}")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: _stored(file, entry) for name, entry in entries.items()}
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{file}: not a safetensors file: its header cannot be read ({error})") from error
    if size != end:
        state = "truncated" if size < end else "too long"
        raise ModelFolderError(f"{file}: {state}: expected {end} bytes, found {size}")
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFolderError when it does not hold one."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{file}: expected a JSON object, found {type(values).__name__}")
    return values


def _stored(file: Path, entry: Mapping[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), end - begin)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{index}: expected a key weight_map with a file for each tensor, found {weight_map!r}")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or len(name) > _NAME_LIMIT:
            raise ModelFolderError(f"{index}: expected file names, found {repr(name)[:_NAME_LIMIT]}")
    missing = [name for name in sorted(set(weight_map.values())) if not (index.parent / name).is_file()]
    if missing:
        raise ModelFolderError(f"{index}: {len(missing)} shards that it names are missing: {', '.join(missing[:5])}")
    return weight_map


def _found_instead(folder: Path) -> str:
    others = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    return f"; found {', '.join(others[:5])}, which cannot be read without them" if others else ""
