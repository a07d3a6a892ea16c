"""Dimensions small enough to train in a second."""

from raysonar.training.demo_draft import DraftConfig
from raysonar.training.demo_model import DemoConfig

VOCABULARY = 400
TINY = DemoConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=8,
)
TINY_DRAFT = DraftConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48)
