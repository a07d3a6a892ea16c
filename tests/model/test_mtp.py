"""The MTP module against a plain reference, which itself equals transformers' module."""

import pytest
import torch
from support.checkpoints import VOCAB, dequantised_twin, make_deepseek_v3, reference_model
from support.forward import PagedRun
from support.mtp_reference import MtpReference
from transformers.modeling_layers import MtpModel

from raysonar.errors import ConfigurationError
from raysonar.model.folder import open_folder
from raysonar.model.loading import load_model

LENGTH = 24
CHUNKS = (1, 9, 1, 1, 7, 4, 1)


def tokens_and_hidden(folder, post_norm=False):
    """Two sequences [2, LENGTH + 1] and the target's hidden states of their first LENGTH tokens, by transformers."""
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    model, kept = reference_model(folder), []
    model.model.norm.register_forward_hook(lambda _, inputs, output: kept.append(output if post_norm else inputs[0]))
    with torch.inference_mode():
        model(tokens[:, :LENGTH])
    return tokens, kept[0]


def load(folder):
    return load_model(open_folder(folder), dtype=torch.float32, device=torch.device("cpu"), mtp=True)


def run_module(loaded, tokens, hidden, chunks):
    """The module's hidden states [2, LENGTH, hidden], fed in chunks through the paged cache."""
    run, parts, start = PagedRun(loaded, rows=2, length=LENGTH), [], 0
    for size in chunks:
        at = slice(start, start + size)
        shifted = {row: tokens[row, start + 1 : start + 1 + size].tolist() for row in range(2)}
        out = run.draft(shifted, {row: hidden[row, at] for row in range(2)})
        parts.append(torch.stack([out[0], out[1]]))
        start += size
    return torch.cat(parts, 1)


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ],
    ids=",".join,
)
def test_the_module_equals_the_reference(tmp_path, options, post_norm):
    folder = make_deepseek_v3(tmp_path, mtp=1, **options)
    tokens, hidden = tokens_and_hidden(folder, post_norm)
    reference, loaded = MtpReference(folder), load(folder)
    for chunks in ((LENGTH,), CHUNKS):
        out = run_module(loaded, tokens, hidden, chunks)
        for row in range(2):
            expected, expected_logits = reference(tokens[row, 1:], hidden[row])
            assert expected_logits.std() > 0.3
            torch.testing.assert_close(out[row], expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(loaded.mtp.logits(out[row]), expected_logits, atol=1e-4, rtol=0)
            torch.testing.assert_close(loaded.mtp.norm(out[row]), reference.norm(expected), atol=1e-4, rtol=1e-4)


def test_the_reference_equals_transformers_module(tmp_path):
    """transformers feeds the state after the final norm, and gives the module's own after its norm."""
    folder = make_deepseek_v3(tmp_path, mtp=1)
    tokens, hidden = tokens_and_hidden(folder, post_norm=True)
    reference, main = MtpReference(folder), reference_model(folder)
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]  # how it finds a module: 61 in V3
    theirs = MtpModel.from_pretrained(main).eval()
    with torch.inference_mode():
        expected = theirs.forward_layer(0, hidden, torch.arange(LENGTH)[None], None, input_ids=tokens[:, 1:])
    for row in range(2):
        out, _ = reference(tokens[row, 1:], hidden[row])
        torch.testing.assert_close(reference.norm(out), expected[row], atol=1e-5, rtol=1e-5)


def test_an_fp8_module_equals_the_reference_on_its_weights_multiplied_out(tmp_path):
    folder = make_deepseek_v3(tmp_path / "fp8", mtp=1, fp8="ue8m0", dtype=torch.bfloat16, shards=2)
    twin = dequantised_twin(folder, tmp_path / "twin")
    tokens, hidden = tokens_and_hidden(twin)
    out = run_module(load(folder), tokens, hidden, CHUNKS)
    for row in range(2):
        torch.testing.assert_close(out[row], MtpReference(twin)(tokens[row, 1:], hidden[row])[0], atol=1e-4, rtol=1e-4)


def test_the_target_is_the_same_with_its_module_loaded(tmp_path):
    folder = make_deepseek_v3(tmp_path, mtp=1)
    tokens, _ = tokens_and_hidden(folder)
    runs = []
    for mtp in (False, True):
        loaded = load_model(open_folder(folder), dtype=torch.float32, device=torch.device("cpu"), mtp=mtp)
        runs.append(PagedRun(loaded, rows=1, length=LENGTH).step({0: tokens[0, :LENGTH].tolist()})[0])
    assert torch.equal(runs[0], runs[1])


def test_a_module_that_is_not_there_is_asked_for_in_vain(tmp_path):
    with pytest.raises(ConfigurationError, match="has no MTP module"):
        load(make_deepseek_v3(tmp_path, mtp=0))
