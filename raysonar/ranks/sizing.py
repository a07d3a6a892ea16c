"""What the ranks of a group will hold, in bytes, before a weight is read: a rank built on torch's meta device."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from raysonar.config import EngineConfig
from raysonar.errors import ConfigurationError
from raysonar.model.folder import open_folder
from raysonar.model.loading import build_model, check_mtp
from raysonar.model.spec import ModelSpec
from raysonar.model.weights import Slices, Weights
from raysonar.moe.communicator import Communicator, Place
from raysonar.ranks.build import (
    Terms,
    allocate,
    check_split,
    parse_device,
    redundant_experts,
    settle,
)
from raysonar.ranks.draft_model import check_tokenizers

USABLE = 0.9
"""The share of a rank's memory that it may plan to fill; activations, communication and the runtime need the rest."""
_META = torch.device("meta")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True)
class RankSize:
    """The bytes of one rank. Packed layouts (oneDNN's, on a CPU) may add a few; activations are not counted."""

    weights: Mapping[str, int]
    """By kind; "MTP module" is all of that module."""
    parameters: int
    """Elements of the weights."""
    tables: Mapping[str, int]
    """What each slot keeps beside its pages, and the rotary embeddings."""
    pages: int
    page_bytes: int
    """Of one page over all layers; one more page than `pages` is allocated."""

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def table_bytes(self) -> int:
        """All tables."""
        return sum(self.tables.values())

    @property
    def cache_bytes(self) -> int:
        """The KV cache."""
        return (self.pages + 1) * self.page_bytes

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.table_bytes + self.cache_bytes


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """A group's largest rank, its first, and the memory that a rank has."""

    model: Path
    terms: Terms
    tensor: int
    data: int
    slots: int
    page_size: int
    rank: RankSize
    memory: int
    """Bytes that a rank has."""

    @property
    def usable(self) -> int:
        """Bytes that a rank may fill."""
        return int(self.memory * USABLE)

    @property
    def room(self) -> int:
        """Pages that would fit beside weights and tables; below 0, those do not fit."""
        return (self.usable - self.rank.weight_bytes - self.rank.table_bytes) // self.rank.page_bytes - 1

    @property
    def notes(self) -> list[str]:
        """What to know when reading the figures."""
        folder, dtype = self.terms.folder, _name(self.terms.dtype)
        notes = []
        if folder.fp8:
            notes.append(f"the checkpoint is fp8; its weights are dequantised to {dtype} when loaded, and counted so")
        if not folder.tensors:
            notes.append("the folder has no weights: dtype and MTP module are as its config.json declares")
        held = self.rank.pages * self.page_size + 1  # a text's last token is never computed
        if held < self.terms.max_model_len:
            notes.append(f"requests are limited to {held:,} tokens: the cache holds no longer one")
        return notes

    def check(self) -> None:
        """Raises ConfigurationError when a rank cannot hold its part."""
        rank = self.rank
        if rank.bytes <= self.usable:
            return
        largest = max(rank.weights, key=lambda kind: rank.weights[kind])
        if self.room >= 2:
            advice = (
                f"engine.cache: {rank.pages} pages are too many, {self.room} fit "
                f"(cache.memory_bytes: {self.room * rank.page_bytes})"
            )
        else:
            advice = (
                f"engine.parallel: most of the weights are {largest}, {_readable(rank.weights[largest])}; use more "
                "ranks, or ranks with more memory"
            )
        raise ConfigurationError(
            f"{self.model} does not fit: a rank of {self.tensor * self.data} would hold {_readable(rank.bytes)} "
            f"({_readable(rank.weight_bytes)} weights, {_readable(rank.cache_bytes)} KV cache, "
            f"{_readable(rank.table_bytes)} tables), and may fill {_readable(self.usable)}, {USABLE:.0%} of the "
            f"{_readable(self.memory)} it has; {advice}"
        )

    def json(self) -> dict[str, object]:
        """Plain values; bytes are of the largest rank."""
        rank = self.rank
        return {
            "model": str(self.model),
            "device": str(self.terms.device),
            "dtype": _name(self.terms.dtype),
            "tensor": self.tensor,
            "data": self.data,
            "speculative_tokens": self.terms.speculative_tokens,
            "draft": None if self.terms.draft is None else str(self.terms.draft.path),
            "max_model_len": self.terms.max_model_len,
            "slots": self.slots,
            "weights": {**rank.weights, "total": rank.weight_bytes},
            "tables": {**rank.tables, "total": rank.table_bytes},
            "cache": {
                "pages": rank.pages,
                "page_size": self.page_size,
                "page_bytes": rank.page_bytes,
                "bytes_per_token": rank.page_bytes // self.page_size,
                "total": rank.cache_bytes,
                "pages_that_fit": max(self.room, 0),
            },
            "bytes": rank.bytes,
            "memory": self.memory,
            "usable": self.usable,
            "fits": rank.bytes <= self.usable,
            "notes": self.notes,
        }

    def text(self) -> str:
        """A table for people."""
        rank, terms = self.rank, self.terms
        world = self.tensor * self.data
        ranks = "1 rank" if world == 1 else f"{world} ranks ({self.tensor} tensor x {self.data} data)"
        tokens = rank.pages * self.page_size
        rows = [
            *((kind, size, "") for kind, size in rank.weights.items()),
            ("weights", rank.weight_bytes, f"{rank.parameters:,} parameters"),
            *((name, size, "") for name, size in rank.tables.items()),
            ("tables", rank.table_bytes, f"{self.slots} slots of {terms.max_model_len:,} tokens"),
            ("KV cache", rank.cache_bytes, f"{rank.pages:,} pages of {self.page_size} tokens: {tokens:,} tokens"),
            ("in all", rank.bytes, ""),
            ("may be filled", self.usable, f"{USABLE:.0%} of {_readable(self.memory)}"),
        ]
        sums = ("weights", "tables", "KV cache", "in all", "may be filled")
        lines = [f"{self.model}: {ranks}, {_name(terms.dtype)} on {terms.device}"]
        by = f", by {terms.draft.path}" if terms.draft is not None else ""
        lines.append(f"draft tokens a step: {terms.speculative_tokens}{by}")
        lines += [f"note: {note}" for note in self.notes]
        lines.append("bytes of a rank (of the largest, where shares differ):")
        for name, size, remark in rows:
            indent = "  " if name in sums else "    "
            lines.append(f"{indent + name:<26}{size:>18,}  {remark}".rstrip())
        if self.room > 0:
            lines.append(
                f"pages that fit: {self.room:,}, {self.room * self.page_size:,} tokens a data-parallel row, of "
                f"{rank.page_bytes // self.page_size:,} bytes each; cache.memory_bytes says how many are made"
            )
        return "\n".join(lines)


def size_group(config: EngineConfig, *, memory: int | None = None) -> GroupSize:
    """Size a group; its folder needs no weights.

    memory: bytes that a rank has; None takes the CUDA device's, or on a CPU this machine's, shared by the ranks. Raises
    ConfigurationError or ModelFolderError when the model cannot be served so, or nothing says what memory there is.
    """
    folder = open_folder(config.model, weights=False)
    check_split(folder, config.parallel)
    terms = settle(config, folder, parse_device(config), weights=False)
    check_mtp(folder, terms.mtp)
    if terms.draft is not None:
        check_tokenizers(terms.draft, folder)
    parallel = config.parallel
    available = _memory(terms.device, parallel.world) if memory is None else memory
    return GroupSize(
        model=config.model,
        terms=terms,
        tensor=parallel.tensor,
        data=parallel.data,
        slots=config.scheduling.max_running,
        page_size=config.cache.page_size,
        rank=size_rank(config, terms, Place(rank=0, tensor=parallel.tensor, data=parallel.data)),
        memory=available,
    )


def size_rank(config: EngineConfig, terms: Terms, place: Place) -> RankSize:
    """Build the rank that stands at `place` without any memory, and count. The first ranks' shares are the largest."""
    spec, positions = terms.folder.spec, terms.max_model_len
    weights = _Ledger(spec, terms.dtype, place, redundant=redundant_experts(config.parallel))
    draft, rotation = None, 0
    with torch.inference_mode():
        model = build_model(spec, weights, mtp=terms.mtp, max_positions=positions)
        if (own := terms.draft_on(place)) is not None:
            whole = _Ledger(own.spec, terms.dtype, Place(), kind="draft model")
            draft = build_model(own.spec, whole, mtp=False, max_positions=positions).target
            weights.take(whole)
            rotation = draft.rotation.nbytes
        memory = allocate(config, terms, model, draft, weights.communicators[0], _META)
    tables = {
        "slots": held_bytes(memory.slots),
        "sampling": held_bytes(memory.sampling),
        "rotary embeddings": model.target.rotation.nbytes + rotation,
    }
    if terms.mtp:
        tables["carried by the draft"] = held_bytes(memory.draft)
    return RankSize(
        weights=dict(weights.bytes),
        parameters=weights.parameters,
        tables=tables,
        pages=memory.pages,
        page_bytes=memory.page_bytes,
    )


def held_bytes(holder: object) -> int:
    """Of the tensors that are an object's attributes."""
    return sum(value.nbytes for value in vars(holder).values() if isinstance(value, torch.Tensor))


class _Shapes:
    """A checkpoint that holds every tensor it is asked for, as a shape alone."""

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...], select: Slices | None = None) -> torch.Tensor:
        whole = torch.empty(shape, device=_META)
        return whole if select is None else whole[select]

    def skip(self, name: str) -> None:
        pass


class _Ledger(Weights):
    """Gives modules shapes, and keeps account of them by kind."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        place: Place,
        *,
        redundant: int | None = None,
        kind: str | None = None,
    ) -> None:
        """kind: of all tensors; None tells them apart by their names."""
        communicators = [Communicator(place, None, None)] * 2  # never used: nothing runs on the meta device
        super().__init__(_Shapes(), dtype=dtype, device=_META, communicators=communicators, redundant_experts=redundant)
        self._layers, self._kind = spec.layers, kind
        self.bytes: Counter[str] = Counter()
        self.parameters = 0

    def take(self, other: "_Ledger") -> None:
        """Add another model's account to this one."""
        self.bytes += other.bytes
        self.parameters += other.parameters

    def tensor(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, select: Slices | None = None
    ) -> torch.Tensor:
        return self._count(_kind(name, self._layers), super().tensor(name, *shape, dtype=dtype, select=select))

    def stacked(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, rows: Slices | None = None
    ) -> torch.Tensor:
        name, _ = parts[0]
        kind = "head" if name == _EMBEDDING else _kind(name, self._layers)  # a tied head is a copy
        return self._count(kind, super().stacked(parts, in_features, rows=rows))

    def _count(self, kind: str, made: torch.Tensor) -> torch.Tensor:
        self.bytes[self._kind or kind] += made.nbytes
        self.parameters += made.numel()
        return made


def _kind(name: str, layers: int) -> str:
    """What a tensor belongs to."""
    parts = name.split(".")
    if name.startswith("model.layers.") and int(parts[2]) >= layers:
        return "MTP module"
    for mark, kind in (
        ("self_attn", "attention"),
        ("shared_experts", "shared experts"),
        ("experts", "routed experts"),
        ("gate", "routers"),
        ("mlp", "dense MLP"),
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
    ):
        if mark in parts:
            return kind
    return "norms"


def _memory(device: torch.device, ranks: int) -> int:
    """Bytes that a rank has here."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigurationError("device: there is no CUDA device here to ask for its memory; give --device-memory")
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _readable(size: int) -> str:
    """In decimal units, as memory is sold."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
