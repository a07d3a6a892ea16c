"""Reading the weights of a model folder: by name, checked, through mmap, one shard mapped at a time."""

import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from raysonar.errors import ModelFolderError
from raysonar.kernels.fp8 import dequantize_blocks
from raysonar.model.folder import FP8_BLOCK, ModelFolder
from raysonar.model.shards import INDEX, StoredTensor
from raysonar.model.spec import DeepseekSpec

Slices = tuple[slice, ...]
_PLAIN = ("F32", "BF16", "F16")
_E4M3, _SCALES = "F8_E4M3", ("F32", "F8_E8M0")
_SHOWN = 5


class CheckpointReader:
    """The tensors of a folder, in any order; reading in the order of the files maps each of them once.

        with CheckpointReader(folder, progress=True) as reader:
            embedding = reader.read("model.embed_tokens.weight", (vocab, hidden))
            ...
            reader.finish()

    A tensor that is not fp8 is a view of the mapped file: it costs no memory of its own until it is copied or moved,
    and it keeps the mapping alive. An fp8 weight is multiplied out to `dtype` (None: the checkpoint's own).
    """

    def __init__(self, folder: ModelFolder, *, dtype: torch.dtype | None = None, progress: bool = False) -> None:
        self._folder = folder
        self._dtype = dtype or folder.checkpoint_dtype
        self._unread = dict(folder.tensors)
        self._open = ExitStack()
        self._file: Path | None = None
        self._shard: Any = None
        self._bar = tqdm(
            total=sum(stored.bytes for stored in folder.tensors.values()),
            desc=f"loading {folder.name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            file=sys.stderr,
            disable=not progress,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; tensors already read stay valid."""
        self._shard, self._file = None, None
        self._open.close()
        self._bar.close()

    def has(self, name: str) -> bool:
        """Whether the folder holds a tensor of this name."""
        return name in self._folder.tensors

    def read(self, name: str, shape: tuple[int, ...], select: Slices | None = None) -> torch.Tensor:
        """The tensor of this name, or of it what `select` names.

        Args:
            name: as stored.
            shape: what the whole tensor must have.
            select: a slice (of step 1) for each of the first dimensions; it need not keep to the blocks of an fp8
                weight.

        Raises:
            ModelFolderError: missing, of another shape, or of a type that cannot be read.
        """
        stored = self._checked(name, shape)
        if select is not None and any(part.step not in (None, 1) for part in select):
            raise ValueError(f"{name}: slices of step 1 only, not {select}")
        if stored.dtype == _E4M3:
            return self._read_fp8(name, stored, select)
        if stored.dtype not in _PLAIN:
            raise _fault(stored, name, f"a dtype of {', '.join(_PLAIN)}", stored.dtype)
        return self._take(name, stored, select)

    def skip(self, name: str) -> None:
        """Leave a tensor, and its scales, to another rank."""
        for each in (name, f"{name}_scale_inv"):
            if stored := self._unread.pop(each, None):
                self._bar.update(stored.bytes)

    def finish(self) -> None:
        """Raises ModelFolderError when weights were left unread: a sign that config.json describes another model."""
        left = [name for name, stored in self._unread.items() if stored.bytes and not self._may_be_left(name)]
        if left:
            shown = ", ".join(left[:_SHOWN]) + (", ..." if len(left) > _SHOWN else "")
            kind = self._folder.spec.__class__.__name__.removesuffix("Spec")
            raise ModelFolderError(
                f"{self._unread[left[0]].file}: {len(left)} tensors are not part of the {kind} model that config.json "
                f"describes: {shown}"
            )

    def _checked(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        stored = self._folder.tensors.get(name)
        if stored is None:
            files = {tensor.file for tensor in self._folder.tensors.values()}
            where = next(iter(files)) if len(files) == 1 else self._folder.path / INDEX
            raise ModelFolderError(f"{where}: tensor {name}: expected shape {list(shape)}, found no such tensor")
        if stored.shape != shape:
            raise _fault(stored, name, f"shape {list(shape)}", f"{list(stored.shape)}")
        return stored

    def _read_fp8(self, name: str, stored: StoredTensor, select: Slices | None) -> torch.Tensor:
        scale_name = f"{name}_scale_inv"
        if not self._folder.fp8:
            raise _fault(stored, name, f"a dtype of {', '.join(_PLAIN)} (no quantization_config)", stored.dtype)
        if len(stored.shape) != 2:
            raise _fault(stored, name, "a matrix (fp8 in blocks)", f"shape {list(stored.shape)}")
        rows, columns = stored.shape
        scale_shape = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        scale_stored = self._checked(scale_name, scale_shape)
        if scale_stored.dtype not in _SCALES:
            raise _fault(scale_stored, scale_name, f"a dtype of {', '.join(_SCALES)}", scale_stored.dtype)
        whole = (slice(None), slice(None))
        wanted = [part.indices(size)[:2] for part, size in zip((*(select or ()), *whole), stored.shape, strict=False)]
        blocks = tuple(slice(start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in wanted)
        covering = tuple(slice(part.start * FP8_BLOCK, part.stop * FP8_BLOCK) for part in blocks)
        scale = self._take(scale_name, scale_stored, blocks)
        weight = self._take(name, stored, covering)
        plain = dequantize_blocks(weight, scale, (FP8_BLOCK, FP8_BLOCK), self._dtype)
        inner = tuple(
            slice(start - outer.start, stop - outer.start)
            for (start, stop), outer in zip(wanted, covering, strict=True)
        )
        return plain[inner]

    def _take(self, name: str, stored: StoredTensor, select: Slices | None) -> torch.Tensor:
        """The stored values, uncopied."""
        try:
            if stored.file != self._file:
                self._shard, self._file = None, None
                self._open.close()
                self._shard = self._open.enter_context(safe_open(stored.file, framework="pt", device="cpu"))
                self._file = stored.file
            tensor: torch.Tensor = self._shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{stored.file}: tensor {name}: cannot be read: {error}") from error
        if self._unread.pop(name, None):
            self._bar.update(stored.bytes)
        return tensor if select is None else tensor[select]

    def _may_be_left(self, name: str) -> bool:
        """Buffers that old files hold, a tied head, and what lies behind the last layer: MTP modules."""
        spec = self._folder.spec
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        if name == "lm_head.weight":
            return spec.tied_embeddings
        if name.startswith("model.layers.") and isinstance(spec, DeepseekSpec):
            layer = name.split(".")[2]
            return layer.isdecimal() and int(layer) >= spec.layers
        return False


def _fault(stored: StoredTensor, name: str, expected: str, found: str) -> ModelFolderError:
    return ModelFolderError(f"{stored.file}: tensor {name}: expected {expected}, found {found}")
