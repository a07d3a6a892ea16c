"""Build a rank: load the model, size the cache, put the parts together."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from raysonar.config import CacheConfig, EngineConfig, MtpHidden, ParallelConfig
from raysonar.errors import ConfigurationError
from raysonar.model.balancing import ExpertBalancer
from raysonar.model.cache import KvCache, page_bytes
from raysonar.model.checkpoint import CheckpointReader
from raysonar.model.folder import ModelFolder, open_folder
from raysonar.model.loading import LoadedModel, load_model
from raysonar.model.spec import DeepseekSpec
from raysonar.model.tokenizer import Tokenizer
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.communicator import Communicator, Place
from raysonar.observe.timeline import Timeline
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.draft_model import check_draft_model, draft_cache_shapes
from raysonar.ranks.rank import Rank
from raysonar.ranks.slots import SlotTable
from raysonar.speculation.draft import Draft
from raysonar.speculation.grammar import GrammarCompiler
from raysonar.speculation.mtp import MtpDraft
from raysonar.speculation.sampler import SamplingTable
from raysonar.speculation.target_draft import LedDraft, TargetDraft

_DEVICES = 'use "auto", "cpu" or "cuda"'
DRAFT_MODEL_TOKENS = 3
"""Draft tokens of a draft model unless told otherwise."""
SMALL_CHECKPOINT = 64 << 20
"""Bytes up to which dtype "auto" is float32 on a CPU: a small bf16 matrix product costs oneDNN 10 us more than it takes
in fp32. Measured on the demo model: a decode step of 2.9 ms in fp32, of 4.4 ms in bf16."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a configuration and a model's folder come to, the same on every rank."""

    folder: ModelFolder
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    speculative_tokens: int
    draft: ModelFolder | None
    """Of the draft model, where there is one."""

    @property
    def mtp(self) -> bool:
        """Whether the target's MTP module drafts."""
        return self.speculative_tokens > 0 and self.draft is None

    def draft_on(self, place: Place) -> ModelFolder | None:
        """The draft model's folder on the first rank of a data-parallel row, which has it whole; None elsewhere."""
        return self.draft if place.tensor_rank == 0 else None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The cache and the tables of a rank, and the draft with what it carries."""

    cache: KvCache
    pages: int
    page_bytes: int
    """Of one page in all layers of this rank, a draft model's too."""
    slots: SlotTable
    sampling: SamplingTable
    draft: Draft | None


@contextmanager
def _short_of_memory() -> Iterator[None]:
    """Names the sizes that can be changed when an allocation fails."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's CPU allocator raises RuntimeError itself
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise ConfigurationError(
            f"the model, its KV cache and slots need more memory than there is ({error}): lower cache.pages or "
            "cache.memory_bytes, max_model_len or scheduling.max_running, or see that config.json is right"
        ) from error


@_short_of_memory()
def build_rank(
    config: EngineConfig, communicators: Sequence[Communicator], *, progress: bool = False
) -> tuple[Rank, RankInfo]:
    """Load everything that one rank needs; raises ConfigurationError or ModelFolderError when it cannot work.

    communicators: the rank's, one for each half of a step.
    """
    terms = settle(config, open_folder(config.model), find_device(config))
    model = load_model(
        terms.folder,
        dtype=terms.dtype,
        device=terms.device,
        communicators=communicators,
        mtp=terms.mtp,
        max_positions=terms.max_model_len,
        redundant_experts=redundant_experts(config.parallel),
        progress=progress,
    )
    draft, draft_folder = None, terms.draft_on(communicators[0].place)
    if draft_folder is not None:  # in the target's dtype, whose batches it shares
        draft = load_model(
            draft_folder, dtype=terms.dtype, device=terms.device, max_positions=terms.max_model_len, progress=progress
        ).target
    memory = allocate(config, terms, model, draft, communicators[0], terms.device)
    pages = memory.pages
    info = RankInfo(
        max_model_len=terms.max_model_len,
        pages=pages,
        page_size=config.cache.page_size,
        slots=config.scheduling.max_running,
        vocab=terms.folder.spec.vocab,
        speculative_tokens=terms.speculative_tokens,
        eos_token_ids=terms.folder.eos_token_ids,
        dtype=str(terms.dtype).removeprefix("torch."),
        device=str(terms.device),
        cache_bytes=(pages + 1) * memory.page_bytes,
        experts_travel=communicators[0].place.world > 1 and bool(model.moe_layers),
        processes=((socket.gethostname(), os.getpid()),),
    )
    device_wait = _wait_for_cuda if terms.device.type == "cuda" else None
    timeline = Timeline([communicator.track for communicator in communicators], device_wait)
    balancer = None
    if config.parallel.rebalance_steps:
        balancer = _balancer(terms, model, communicators)
    compiler = GrammarCompiler(lambda: Tokenizer.from_folder(terms.folder), terms.folder.spec.vocab)
    return Rank(model, memory.cache, memory.slots, memory.sampling, memory.draft, timeline, compiler, balancer), info


def _wait_for_cuda() -> None:
    """Of the stream that computes, not of those that communicate."""
    torch.cuda.current_stream().synchronize()


def redundant_experts(parallel: ParallelConfig) -> int | None:
    """A layer's expert slots beyond one an expert; None when experts stay where they are."""
    return parallel.redundant_experts if parallel.rebalance_steps else None


def _balancer(terms: Terms, model: LoadedModel, communicators: Sequence[Communicator]) -> ExpertBalancer:
    @contextmanager
    def open_weights() -> Iterator[Weights]:
        with CheckpointReader(terms.folder, dtype=terms.dtype) as reader:
            yield Weights(reader, dtype=terms.dtype, device=terms.device, communicators=communicators)

    return ExpertBalancer(model.moe_layers, communicators[0], open_weights)


def settle(config: EngineConfig, folder: ModelFolder, device: torch.device, *, weights: bool = True) -> Terms:
    """Raises ConfigurationError for what the model cannot do. weights: False does with a draft model without any."""
    max_model_len = _max_model_len(config, folder)
    draft = None
    if config.speculation.draft is not None:
        draft = open_folder(config.speculation.draft, weights=weights)
        check_draft_model(draft, folder, max_model_len)
    return Terms(
        folder=folder,
        device=device,
        dtype=_dtype(config, folder, device),
        max_model_len=max_model_len,
        speculative_tokens=_speculative_tokens(config, folder),
        draft=draft,
    )


def allocate(
    config: EngineConfig,
    terms: Terms,
    model: LoadedModel,
    draft: Transformer | None,
    communicator: Communicator,
    device: torch.device,
) -> Memory:
    """Everything but the weights. Raises ConfigurationError when the cache's bytes do not hold two pages.

    draft: the draft model, on a rank that has it. The number of pages is the same on the ranks that do not.
    """
    slots, page_size = config.scheduling.max_running, config.cache.page_size
    pages_per_slot = -(-terms.max_model_len // page_size)
    one_page = page_bytes(model.cache_shapes, page_size, terms.dtype)
    draft_page = page_bytes(draft_cache_shapes(terms.draft), page_size, terms.dtype)
    pages = _pages(config.cache, one_page + draft_page, slots * pages_per_slot)

    def make_cache(shapes: list[tuple[int, int]]) -> KvCache:
        return KvCache(shapes, pages=pages, page_size=page_size, dtype=terms.dtype, device=device)

    cache = make_cache(model.cache_shapes)
    sampling = SamplingTable(slots, terms.folder.spec.vocab, device)
    scheme: Draft | None = None
    if model.mtp is not None:
        post_norm, recycle_post_norm = _hidden_choice(config, terms.folder)
        scheme = MtpDraft(
            model.target,
            model.mtp,
            cache,
            sampling,
            slots=slots,
            post_norm=post_norm,
            recycle_post_norm=recycle_post_norm,
        )
    elif terms.draft is not None:
        own = TargetDraft(draft, make_cache(draft.cache_shapes), sampling) if draft is not None else None
        scheme = own if communicator.place.tensor == 1 else LedDraft(own, sampling, communicator)
    # a row writes up to 1 + k tokens behind its last known one
    length = terms.max_model_len + terms.speculative_tokens + 1
    table = SlotTable(slots, length, pages_per_slot, device)
    return Memory(
        cache=cache,
        pages=pages,
        page_bytes=one_page + (draft_page if draft is not None else 0),
        slots=table,
        sampling=sampling,
        draft=scheme,
    )


def check_split(folder: ModelFolder, parallel: ParallelConfig) -> None:
    """Raises ConfigurationError for a model that the group cannot share out."""
    spec, tensor = folder.spec, parallel.tensor
    if parallel.dispatch_dtype != "auto":
        if parallel.world == 1:
            raise ConfigurationError(
                f'parallel.dispatch_dtype: "{parallel.dispatch_dtype}" is for tokens that travel between ranks, and '
                'there is one rank; use "auto", or parallel.tensor or parallel.data above 1'
            )
        if not (isinstance(spec, DeepseekSpec) and spec.moe):
            raise ConfigurationError(
                f'parallel.dispatch_dtype: "{parallel.dispatch_dtype}" is for tokens that travel to their experts, and '
                f'{folder.path} has no experts; use "auto"'
            )
    if parallel.rebalance_steps and (parallel.world == 1 or not (isinstance(spec, DeepseekSpec) and spec.moe)):
        raise ConfigurationError(
            "parallel.rebalance_steps: there are no experts to move; it needs a mixture-of-experts model on two or "
            "more ranks (parallel.tensor, parallel.data)"
        )
    counts = {"attention heads": spec.mla.heads if isinstance(spec, DeepseekSpec) else spec.heads}
    if not isinstance(spec, DeepseekSpec):
        counts["key-value heads"] = spec.kv_heads
    for name, count in counts.items():
        if count % tensor:
            raise ConfigurationError(
                f"parallel.tensor: {tensor} ranks cannot share the {count} {name} of {folder.path} evenly; "
                f"use a divisor of {count}"
            )


def find_device(config: EngineConfig) -> torch.device:
    """Where the ranks are to be. Raises ConfigurationError when there is no such device here."""
    device = parse_device(config)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device: {config.device!r} was asked for, but torch finds no CUDA device here")
    return device


def parse_device(config: EngineConfig) -> torch.device:
    """The device that is asked for, whether it is here or not."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise ConfigurationError(f"device: {config.device!r} is not a device; {_DEVICES}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device: {config.device!r} is not supported; {_DEVICES}")
    return device


def _dtype(config: EngineConfig, folder: ModelFolder, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        size = sum(file.stat().st_size for file in folder.path.glob("*.safetensors"))
        small = 0 < size <= SMALL_CHECKPOINT
        return torch.float32 if device.type == "cpu" and small else folder.checkpoint_dtype
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _speculative_tokens(config: EngineConfig, folder: ModelFolder) -> int:
    speculation = config.speculation
    if speculation.tokens is not None:
        return speculation.tokens
    return int(folder.has_mtp) if speculation.draft is None else DRAFT_MODEL_TOKENS


def _max_model_len(config: EngineConfig, folder: ModelFolder) -> int:
    positions = folder.spec.max_positions
    if config.max_model_len is None:
        return positions
    if config.max_model_len > positions:
        raise ConfigurationError(
            f"max_model_len: {config.max_model_len} is more than the {positions} positions of {folder.path}"
        )
    return config.max_model_len


def _pages(cache: CacheConfig, one_page: int, useful: int) -> int:
    """Pages to allocate: as asked for, else what the memory holds, never more than all slots at full length use."""
    if cache.pages is not None:
        return cache.pages
    pages = min(cache.memory_bytes // one_page, useful)
    if pages < 2:
        raise ConfigurationError(
            f"cache.memory_bytes: {cache.memory_bytes} bytes hold {pages} pages of {one_page} bytes; give it at least "
            f"{2 * one_page}, or a smaller cache.page_size"
        )
    return pages


def _hidden_choice(config: EngineConfig, folder: ModelFolder) -> tuple[bool, bool]:
    """Whether the MTP module is fed (the target's, its own) hidden states after the norm."""
    assert isinstance(folder.spec, DeepseekSpec)

    def post(choice: MtpHidden, automatic: bool) -> bool:
        return automatic if choice == "auto" else choice == "post_norm"

    fed = post(config.speculation.hidden, folder.spec.mtp_hidden == "post_norm")
    return fed, post(config.speculation.recycled, fed)
