"""In fp32 the logits equal transformers' classes to 1e-4, over the options of the published models and beyond.

Each case is prefilled at once, and again in chunks through the paged cache with the last tokens decoded one by one.
"""

import pytest
import torch
from support.checkpoints import (
    VOCAB,
    YARN,
    dequantised_twin,
    make_deepseek_v2,
    make_deepseek_v3,
    make_llama,
    read_weights,
    reference_model,
    write_weights,
)
from support.forward import PagedRun, run_in_chunks
from support.grid import pairwise

from raysonar.model.folder import open_folder
from raysonar.model.loading import load_model

TOLERANCE = 1e-4
LENGTH = 40
CHUNKS = (1, 13, 19, 1, 1, 1, 2, 1, 1)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SHORT_YARN = YARN | {"original_max_position_embeddings": 16}
ROPES = [
    PLAIN,
    SHORT_YARN,
    SHORT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    SHORT_YARN | {"mscale": 0.5, "mscale_all_dim": 1.2},
    {key: value for key, value in SHORT_YARN.items() if not key.startswith("mscale")},
]
SHARED_OPTIONS = {
    "q_lora_rank": [24, None],
    "rope_parameters": ROPES,
    "first_k_dense_replace": [0, 1, 3],
    "n_shared_experts": [0, 1, 2],
    "tie_word_embeddings": [False, True],
    "rms_norm_eps": [1e-6, 1e-2],
}
V3 = pairwise(
    SHARED_OPTIONS
    | {
        "groups": [(1, 1), (2, 1), (4, 2), (4, 4)],
        "norm_topk_prob": [True, False],
        "routed_scaling_factor": [2.5, 1.0],
        "rope_interleave": [True, False],
        "num_experts_per_tok": [2, 1, 4],
    }
)
V2 = pairwise(
    SHARED_OPTIONS
    | {
        "routing": [("greedy", 1, 1), ("group_limited_greedy", 4, 2), ("group_limited_greedy", 2, 1)],
        "norm_topk_prob": [False, True],
        "routed_scaling_factor": [1.0, 16.0],
        "num_experts_per_tok": [2, 1, 4],
    }
)
LLAMA = pairwise(
    {
        "num_key_value_heads": [1, 2, 4],
        "head_dim": [16, 24],
        "tie_word_embeddings": [False, True],
        "rms_norm_eps": [1e-6, 1e-2],
        "rope_parameters": [
            PLAIN,
            PLAIN | {"rope_type": "linear", "factor": 4.0},
            SHORT_YARN,
            PLAIN
            | {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ],
    }
)


def sequences(rows=2, length=LENGTH, seed=0):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def load(folder, dtype=torch.float32, **options):
    return load_model(open_folder(folder), dtype=dtype, device=torch.device("cpu"), **options)


def expected_logits(folder, tokens):
    with torch.inference_mode():
        return reference_model(folder)(tokens).logits


def assert_equal_logits(folder, reference_folder=None):
    tokens = sequences()
    expected = expected_logits(reference_folder or folder, tokens)
    assert expected.std() > 0.3  # logits of a model that says something
    loaded = load(folder)
    for chunks in ((LENGTH,), CHUNKS):
        logits = loaded.target.logits(run_in_chunks(loaded, tokens, chunks).flatten(0, 1))
        torch.testing.assert_close(logits.view_as(expected), expected, atol=TOLERANCE, rtol=0)


def named(case):
    return ",".join(str(value["rope_type"] if isinstance(value, dict) else value) for value in case.values())


@pytest.mark.parametrize("case", V3, ids=named)
def test_deepseek_v3(tmp_path, case):
    groups, top_groups = case.pop("groups")
    assert_equal_logits(make_deepseek_v3(tmp_path, n_group=groups, topk_group=top_groups, tokenizer=False, **case))


def test_experts_of_rejected_groups_stay_out_where_every_biased_score_is_negative(tmp_path):
    """They are masked with -inf: zeros in their place would win. (Older versions of transformers filled in zeros.)"""
    folder = make_deepseek_v3(tmp_path, first_k_dense_replace=0)
    tensors = read_weights(folder)
    biases = {name: bias - 3.0 for name, bias in tensors.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    write_weights(folder, tensors | biases)
    assert_equal_logits(folder)


@pytest.mark.parametrize("case", V2, ids=named)
def test_deepseek_v2(tmp_path, case):
    method, groups, top_groups = case.pop("routing")
    options = {"topk_method": method, "n_group": groups, "topk_group": top_groups, **case}
    assert_equal_logits(make_deepseek_v2(tmp_path, tokenizer=False, **options))


@pytest.mark.parametrize("case", LLAMA, ids=named)
def test_llama(tmp_path, case):
    assert_equal_logits(make_llama(tmp_path, tokenizer=False, **case))


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("shards", [1, 3])
def test_fp8_checkpoints_equal_their_weights_multiplied_out(tmp_path, scales, shards):
    folder = make_deepseek_v3(
        tmp_path / "fp8", fp8=scales, shards=shards, dtype=torch.bfloat16, hidden_size=192, intermediate_size=300
    )
    assert_equal_logits(folder, dequantised_twin(folder, tmp_path / "twin"))


def test_bfloat16_weights_computed_in_fp32(tmp_path):
    assert_equal_logits(make_deepseek_v3(tmp_path, dtype=torch.bfloat16))


@pytest.mark.parametrize("make", [make_deepseek_v3, make_deepseek_v2, make_llama])
def test_bfloat16_strays_no_further_from_fp32_than_transformers_does(tmp_path, make):
    folder, tokens = make(tmp_path, dtype=torch.bfloat16), sequences(rows=4)
    exact = expected_logits(folder, tokens)
    with torch.inference_mode():
        theirs = reference_model(folder, torch.bfloat16)(tokens).logits.float()
    loaded = load(folder, torch.bfloat16)
    ours = loaded.target.logits(run_in_chunks(loaded, tokens, (LENGTH,)).flatten(0, 1)).view_as(exact)
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("make", [make_deepseek_v3, make_llama])
def test_rows_of_different_lengths_share_a_batch(tmp_path, make):
    """Prefill of one row beside decode of others, rows joining late, in every step another mixture."""
    folder, tokens = make(tmp_path), sequences(rows=4)
    expected = expected_logits(folder, tokens)
    loaded = load(folder)
    run = PagedRun(loaded, rows=4, length=LENGTH)
    done = [0] * 4
    generator = torch.Generator().manual_seed(1)
    while min(done) < LENGTH:
        sizes = torch.randint(0, 8, (4,), generator=generator).tolist()
        part = {
            row: tokens[row, done[row] : done[row] + size].tolist()
            for row, size in enumerate(sizes)
            if size and done[row] < LENGTH
        }
        if not part:
            continue
        for row, hidden in run.step(part).items():
            logits, at = run.logits(hidden), done[row]
            torch.testing.assert_close(logits, expected[row, at : at + len(hidden)], atol=TOLERANCE, rtol=0)
            done[row] += len(hidden)
    assert done == [LENGTH] * 4
