"""What a dry run says that a rank holds is what a rank holds."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make_deepseek_v2, make_deepseek_v3, make_llama, read_weights

from raysonar.config import CacheConfig, EngineConfig, ParallelConfig, SchedulingConfig, SpeculationConfig
from raysonar.errors import ConfigurationError, ModelFolderError
from raysonar.model.folder import open_folder
from raysonar.moe.communicator import Communicator, Place
from raysonar.ranks.build import build_rank, settle
from raysonar.ranks.sizing import RankSize, size_group, size_rank

DATA = Path(__file__).parents[1] / "support" / "data"
V3, V2_LITE = DATA / "deepseek-v3", DATA / "deepseek-v2-lite"
GB = 10**9
NOT_LOADED = "not loaded"


def config_of(folder: Path, tensor: int = 1, data: int = 1, **options: Any) -> EngineConfig:
    defaults = {
        "device": "cpu",
        "cache": CacheConfig(pages=9),
        "scheduling": SchedulingConfig(max_running=3),
        "parallel": ParallelConfig(tensor=tensor, data=data),
    }
    return EngineConfig(model=folder, **{**defaults, **options})


def sizes(config: EngineConfig) -> list[RankSize]:
    """Of every rank."""
    terms = settle(config, open_folder(config.model, weights=False), torch.device("cpu"))
    return [size_rank(config, terms, place) for place in places(config)]


def places(config: EngineConfig) -> list[Place]:
    parallel = config.parallel
    return [Place(rank=rank, tensor=parallel.tensor, data=parallel.data) for rank in range(parallel.world)]


def held(root: object) -> int:
    """Bytes of the tensors that can be reached from an object; of memory that several share, once."""
    seen: set[int] = set()
    found: dict[object, int] = {}

    def visit(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.is_mkldnn:  # packed: as large as it is unpacked, but for padding
                found[id(value)] = value.numel() * value.itemsize
            else:
                found[value.untyped_storage().data_ptr() or id(value)] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for each in value:
                visit(each)
        elif type(value).__module__.startswith("raysonar."):
            for each in vars(value).values():
                visit(each)

    visit(root)
    return sum(found.values())


MODELS: dict[str, Callable[[Path], Path]] = {
    "v3": lambda folder: make_deepseek_v3(folder, mtp=1),
    "v3 in fp8": lambda folder: make_deepseek_v3(folder, mtp=1, fp8="float32"),
    "v3 tied, no latent query": lambda folder: make_deepseek_v3(folder, tie_word_embeddings=True, q_lora_rank=None),
    "v2": lambda folder: make_deepseek_v2(folder),
    "llama": lambda folder: make_llama(folder, num_key_value_heads=4),
}
DRAFTS: dict[str, Callable[[Path], Path]] = {"draft": lambda folder: make_llama(folder)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    root = tmp_path_factory.mktemp("sizing")

    def make(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else (MODELS | DRAFTS)[name](folder)

    return make


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_a_rank_holds_what_was_said(made: Callable[[str], Path], name: str, tensor: int, data: int) -> None:
    config = config_of(made(name), tensor, data)
    for place, size in zip(places(config), sizes(config), strict=True):
        rank, info = build_rank(config, [Communicator(place, None, None)] * 2)
        assert size.bytes == held(rank)
        assert size.cache_bytes == info.cache_bytes == held(rank._cache)
        assert size.weight_bytes + size.tables["rotary embeddings"] == held((rank._target, module_of(rank)))
        assert (size.pages, size.table_bytes > 0) == (info.pages, True)


def module_of(rank: Any) -> object:
    return rank._draft._module if rank._draft else None


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (2, 2)])
def test_a_draft_model_is_whole_on_the_first_rank_of_each_row_and_pages_are_equally_many(
    made: Callable[[str], Path], tensor: int, data: int
) -> None:
    draft = SpeculationConfig(draft=made("draft"))
    plain, config = (
        config_of(made("v2"), tensor, data, cache=CacheConfig(memory_bytes=100_000), speculation=speculation)
        for speculation in (SpeculationConfig(), draft)
    )
    stored = sum(4 * tensor.numel() for tensor in read_weights(made("draft")).values())
    for place, size, without in zip(places(config), sizes(config), sizes(plain), strict=True):
        rank, info = build_rank(config, [Communicator(place, None, None)] * 2)
        first = place.tensor_rank == 0
        assert size.bytes == held(rank)
        assert size.weights.get("draft model", 0) == (stored if first else 0)
        assert size.weight_bytes - without.weight_bytes == (stored if first else 0)
        assert size.page_bytes - without.page_bytes == (2 * (2 * 16) * 2 * 16 * 4 if first else 0)
        assert size.cache_bytes == info.cache_bytes
        assert info.pages == size.pages == sizes(config)[0].pages < without.pages
        assert sizes(config)[0].page_bytes * size.pages <= 100_000
    assert "draft tokens a step: 3, by" in size_group(config).text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_dtype_in_which_weights_are_held_is_counted(made: Callable[[str], Path], dtype: Any) -> None:
    config = config_of(made("v3"), dtype=dtype)
    rank, _ = build_rank(config, [Communicator(Place(), None, None)] * 2)
    (size,) = sizes(config)
    assert size.bytes == held(rank)
    assert size.weight_bytes < 0.6 * sizes(config_of(made("v3")))[0].weight_bytes


def test_kinds_are_those_of_the_checkpoints_tensors(made: Callable[[str], Path]) -> None:
    stored: Counter[str] = Counter()
    for name, tensor in read_weights(made("v3")).items():
        stored[kind_of(name)] += 4 * tensor.numel()
    del stored[NOT_LOADED]
    config = config_of(made("v3"))
    assert sizes(config)[0].weights == dict(stored)
    for size in sizes(config_of(made("v3"), tensor=2, data=2)):
        assert size.weights["routed experts"] == stored["routed experts"] // 4
        assert size.weights["shared experts"] == stored["shared experts"]
        for halved in ("embedding", "head", "dense MLP"):
            assert size.weights[halved] == stored[halved] // 2
        assert stored["attention"] // 2 < size.weights["attention"] < stored["attention"]


def kind_of(name: str) -> str:
    """Told by other means than the code under test. Of the MTP module, embedding and head are not loaded."""
    if name.startswith("model.layers.3."):
        return NOT_LOADED if "embed_tokens" in name or "shared_head.head" in name else "MTP module"
    rules = {
        ".self_attn.": "attention",
        ".shared_experts.": "shared experts",
        ".experts.": "routed experts",
        ".mlp.gate.": "routers",
        ".mlp.": "dense MLP",
        "embed_tokens": "embedding",
        "lm_head": "head",
        "norm": "norms",
    }
    return next(kind for mark, kind in rules.items() if mark in name)


def test_the_first_rank_is_the_largest_and_the_ranks_have_all_experts_between_them(
    made: Callable[[str], Path],
) -> None:
    whole = sizes(config_of(made("v3")))[0].weights["routed experts"]
    first, *others = sizes(config_of(made("v3"), data=3))  # 8 experts: 3, 3 and 2
    assert max(other.bytes for other in others) == first.bytes > others[-1].bytes
    assert sum(size.weights["routed experts"] for size in (first, *others)) == whole
    assert size_group(config_of(made("v3"), data=3)).rank == first


def test_replicas_of_experts_are_counted(made: Callable[[str], Path]) -> None:
    parallel = ParallelConfig(data=2, redundant_experts=2, rebalance_steps=8)
    config = config_of(made("v2"), parallel=parallel)
    plain = sizes(config_of(made("v2"), data=2))
    for place, size, without in zip(places(config), sizes(config), plain, strict=True):
        rank, _ = build_rank(config, [Communicator(place, None, None)] * 2)
        experts = [layer.moe._experts for layer in rank._target.layers if layer.moe is not None]
        assert size.weights["routed experts"] == sum(map(held, experts))
        assert size.weights["routed experts"] * 4 == without.weights["routed experts"] * 5  # 10 slots for 8 experts
        assert size.bytes - without.bytes == size.weight_bytes - without.weight_bytes > 0


def test_published_models_have_the_published_numbers() -> None:
    """671 B and 15.7 B parameters; per layer of V3, in fp8: 187 MB attention, 44 MB an expert, shared or routed."""
    v3 = size_group(config_of(V3, speculation=SpeculationConfig(tokens=0)), memory=GB).rank
    assert v3.parameters == pytest.approx(671e9, rel=1e-3)
    assert v3.weights["attention"] / 2 / 61 == pytest.approx(187e6, rel=1e-2)
    assert v3.weights["routed experts"] / 2 / 58 / 256 == pytest.approx(44e6, rel=1e-2)
    assert v3.weights["shared experts"] / 2 / 58 == pytest.approx(44e6, rel=1e-2)
    assert v3.page_bytes == 16 * 61 * (512 + 64) * 2
    v2_lite = size_group(config_of(V2_LITE), memory=GB).rank
    assert v2_lite.parameters == pytest.approx(15.7e9, rel=1e-3)


def test_a_config_alone_says_dtype_and_mtp_module_and_that_fp8_weights_grow() -> None:
    size = size_group(config_of(V3, tensor=8, data=2), memory=141 * GB)
    assert (size.terms.dtype, size.terms.speculative_tokens) == (torch.bfloat16, 1)
    assert size.rank.weights["MTP module"] > GB
    assert "dequantised to bfloat16" in " ".join(size.notes)
    assert "no weights" in " ".join(size.notes)
    assert size_group(config_of(V2_LITE), memory=GB).terms.speculative_tokens == 0


def test_what_is_there_in_part_is_still_refused(tmp_path: Path) -> None:
    folder = make_deepseek_v3(tmp_path / "model", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="1 shards that it names are missing"):
        size_group(config_of(folder))


def test_what_cannot_fit_is_refused_by_name_and_numbers() -> None:
    fits = size_group(config_of(V3, tensor=8, data=2), memory=141 * GB)
    fits.check()
    with pytest.raises(
        ConfigurationError, match=r"deepseek-v3 does not fit: a rank of 16 .*\(94\.1 GB weights.*72\.0 GB.*80\.0 GB"
    ) as refused:
        size_group(config_of(V3, tensor=8, data=2), memory=80 * GB).check()
    assert "most of the weights are routed experts, 81.7 GB" in str(refused.value)
    pages = CacheConfig(pages=fits.room + 1)
    with pytest.raises(ConfigurationError, match=rf"{fits.room + 1} pages are too many, {fits.room} fit"):
        size_group(config_of(V3, tensor=8, data=2, cache=pages), memory=141 * GB).check()
    size_group(config_of(V3, tensor=8, data=2, cache=CacheConfig(pages=fits.room)), memory=141 * GB).check()


@pytest.mark.parametrize(
    ("folder", "options", "message"),
    [
        (V3, {"tensor": 3}, "3 ranks cannot share the 128 attention heads"),
        (V2_LITE, {"speculation": SpeculationConfig(tokens=1)}, "has no MTP module"),
        (V3, {"max_model_len": 1 << 20}, "more than the 163840 positions"),
        (V3, {"cache": CacheConfig(memory_bytes=1 << 20)}, "hold 0 pages of 1142784 bytes"),
        (V3, {"device": "cuda"}, "no CUDA device here to ask"),
    ],
)
def test_what_cannot_work_is_refused_without_weights_too(folder: Path, options: dict[str, Any], message: str) -> None:
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(ConfigurationError, match=message):
        size_group(config_of(folder, **options))


def test_on_a_cpu_the_ranks_share_the_machines_memory(made: Callable[[str], Path]) -> None:
    alone, shared = (size_group(config_of(made("v3"), data=data)) for data in (1, 4))
    assert alone.memory == pytest.approx(4 * shared.memory, abs=4)
    assert alone.usable < alone.memory
