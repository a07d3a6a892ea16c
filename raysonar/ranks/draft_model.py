"""Whether a folder holds a draft model for a target, and what its cache needs."""

from raysonar.errors import ConfigurationError
from raysonar.model.folder import ModelFolder
from raysonar.model.llama import cache_shape
from raysonar.model.spec import LlamaSpec
from raysonar.model.tokenizer import Tokenizer


def check_draft_model(draft: ModelFolder, target: ModelFolder, max_model_len: int) -> None:
    """Raises ConfigurationError for a folder that cannot draft for this target."""
    spec = draft.spec
    if not isinstance(spec, LlamaSpec):
        raise ConfigurationError(
            f"speculation.draft: {draft.path} is a mixture of experts or has latent attention; a draft model is a "
            "dense one (LlamaForCausalLM)"
        )
    if spec.vocab != target.spec.vocab:
        raise ConfigurationError(
            f"speculation.draft: {draft.path} has a vocabulary of {spec.vocab} tokens, {target.path} one of "
            f"{target.spec.vocab}; a draft model needs the same"
        )
    if spec.max_positions < max_model_len:
        raise ConfigurationError(
            f"speculation.draft: {draft.path} has {spec.max_positions} positions, fewer than the {max_model_len} that "
            f"requests may take; set max_model_len to {spec.max_positions} or less"
        )


def check_tokenizers(draft: ModelFolder, target: ModelFolder) -> None:
    """Raises ConfigurationError when a token is not the same in both folders, as far as they have tokenizers."""
    ours, theirs = Tokenizer.from_folder(target), Tokenizer.from_folder(draft)
    if not (ours.available and theirs.available):
        return
    for token in range(max(ours.vocab_size, theirs.vocab_size)):
        a, b = ours.id_to_piece(token), theirs.id_to_piece(token)
        if a != b:
            raise ConfigurationError(
                f"speculation.draft: token {token} is {b!r} in {draft.path} and {a!r} in {target.path}; a draft model "
                "needs the same tokenizer"
            )


def draft_cache_shapes(draft: ModelFolder | None) -> list[tuple[int, int]]:
    """(kv_heads, width) of each layer of the draft model, which is not split; none without one."""
    if draft is None or not isinstance(draft.spec, LlamaSpec):
        return []
    return [cache_shape(draft.spec)] * draft.spec.layers
