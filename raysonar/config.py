"""The typed, validated configuration: one small frozen model per room; unknown fields are errors."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from raysonar.errors import ConfigurationError

DType = Literal["auto", "float32", "bfloat16", "float16"]
MtpHidden = Literal["auto", "pre_norm", "post_norm"]
MTP_TOKENS = 4
"""Draft tokens of an MTP module at the most."""
ToolParserName = Literal["auto", "none", "deepseek_v3", "deepseek_v3.1"]
ReasoningParserName = Literal["auto", "none", "deepseek_r1"]
MicroBatching = Literal["auto", "never", "always"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheConfig(_Frozen):
    """The paged KV cache."""

    page_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens a page."""
    pages: Annotated[int, Field(ge=2)] | None = None
    """Pages in all; None takes what `memory_bytes` holds."""
    memory_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Bytes for the KV cache when `pages` is not given (never more than every slot at full length needs)."""
    prefix_caching: bool = True


class SpeculationConfig(_Frozen):
    """Speculation: with the model's own multi-token-prediction (MTP) module, or with a draft model."""

    draft: Path | None = None
    """A Hugging Face folder: a dense Llama with the model's tokenizer, which drafts; None: the MTP module does."""
    tokens: Annotated[int, Field(ge=0, le=8)] | None = None
    """Draft tokens a step, k, at most 4 of an MTP module; 0 switches speculation off. None is 3 with a draft model, 1
    with an MTP module, else 0."""
    hidden: MtpHidden = "auto"
    """Which of the target's hidden states feeds the MTP module, before or after the final norm; "auto" takes what the
    model's folder says (`mtp_hidden` in config.json), else before the norm."""
    recycled: MtpHidden = "auto"
    """Which of the MTP module's own hidden states feeds its next draft token, before or after `shared_head.norm`;
    "auto" takes the same as `hidden`."""

    @model_validator(mode="after")
    def _one_scheme(self) -> Self:
        if self.draft is None:
            if self.tokens is not None and self.tokens > MTP_TOKENS:
                raise ValueError(
                    f"tokens: {self.tokens} is for a draft model; an MTP module drafts at most {MTP_TOKENS}"
                )
            return self
        if self.tokens == 0:
            raise ValueError("draft: a draft model that drafts 0 tokens; leave it out, or give 1 or more tokens")
        for name in ("hidden", "recycled"):
            if getattr(self, name) != "auto":
                raise ValueError(f"{name}: it is for the MTP module, which does not run beside a draft model")
        return self


class SchedulingConfig(_Frozen):
    """Continuous batching."""

    max_running: Annotated[int, Field(ge=1, le=4096)] = 64
    """Slots: requests that run at once."""
    token_budget: Annotated[int, Field(ge=1)] = 1024
    """Tokens a step computes at the most; longer prompts are prefilled in chunks."""
    max_waiting: Annotated[int, Field(ge=1)] = 65536
    """Requests that may wait for a slot; one more is refused."""
    plans_in_flight: Annotated[int, Field(ge=1, le=4)] | None = None
    """Plans handed to the ranks before the first one's result is in; from 2 on, a step is planned on upper bounds while
    the one before it runs. None is 1 for a rank in this process, which does not run while the engine plans, and 2 for a
    group."""


class ParallelConfig(_Frozen):
    """The group of ranks, tensor x data of them, each a Ray actor (one rank alone lives in the engine's process)."""

    tensor: Annotated[int, Field(ge=1)] = 1
    """Ranks that share a row's attention, embedding and head; the model's heads must be a multiple of it."""
    data: Annotated[int, Field(ge=1)] = 1
    """Rows, each with requests, slots and pages of its own. Experts are spread over all ranks."""
    micro_batching: MicroBatching = "auto"
    """Whether steps run as two halves, of which one computes while the other's tokens travel to their experts or back.
    "auto" measures at start-up what layers take, and splits a step when that should be faster."""
    dispatch_dtype: Literal["auto", "float8"] = "auto"
    """What hidden states travel to their experts as: "auto" is the model's dtype; "float8" is e4m3 with a scale for
    each 128 values, half of bfloat16's bytes. Their experts' outputs come back in the model's dtype."""
    padded_dispatch_bytes: Annotated[int, Field(ge=0)] = 1 << 16
    """Tokens go to all ranks, which spares an exchange of sizes, while that sends no more bytes in vain than these, a
    rank and layer; else only to the ranks of their experts. What the link carries in one latency is about right."""
    rebalance_steps: Annotated[int, Field(ge=1)] | None = None
    """Every so many steps, experts move between ranks so that all have about the same to do; None: they stay."""
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    """A layer's expert slots beyond one an expert: the hottest experts get several replicas. Needs rebalance_steps."""
    placement: Literal["STRICT_PACK", "PACK", "SPREAD"] = "PACK"
    """Ray's strategy: all ranks on one node, on as few as can be, or on as many."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """How long placing and starting the ranks may take."""
    collective_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long a collective may wait for the slowest rank before the group fails."""

    @model_validator(mode="after")
    def _redundancy_needs_rebalancing(self) -> Self:
        if self.redundant_experts and self.rebalance_steps is None:
            raise ValueError("redundant_experts needs rebalance_steps: which experts are the hottest is measured")
        return self

    @property
    def world(self) -> int:
        """Ranks in the group."""
        return self.tensor * self.data


class RecoveryConfig(_Frozen):
    """What the engine does about ranks that fail: it starts them again, and running requests go on."""

    restarts: Annotated[int, Field(ge=0)] = 5
    """Within `window_s`, failures to be mended at the most; the next one ends the engine."""
    window_s: Annotated[float, Field(gt=0)] = 600.0
    step_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """How long a step may take: ranks that are silent for longer have failed."""


class EngineConfig(_Frozen):
    """All that one engine needs."""

    model: Path
    """A Hugging Face folder: config.json, safetensors, tokenizer."""
    dtype: DType = "auto"
    """"auto" is the checkpoint's own (bfloat16 for fp8 checkpoints); float32 on a CPU for checkpoints up to 64 MiB."""
    device: str = "auto"
    """"auto" is "cuda" where there is one, else "cpu"."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of the rank; None leaves torch's default."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and answer together; None takes the model's positions."""
    cache: CacheConfig = CacheConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    parallel: ParallelConfig = ParallelConfig()
    recovery: RecoveryConfig = RecoveryConfig()


class LimitsConfig(_Frozen):
    """What one request may ask for; None is no limit beyond the engine's own."""

    max_body_bytes: Annotated[int, Field(ge=1)] = 32 << 20
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    max_answer_tokens: Annotated[int, Field(ge=1)] | None = None
    """More is refused; an answer for which no length was asked ends here."""
    max_requests_per_key: Annotated[int, Field(ge=1)] | None = None
    """That one API key may have at once, at each replica of the ingress."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """A request that is not answered by then is stopped; it may ask for less time, not for more."""


class ReplicasConfig(_Frozen):
    """How many engines serve the model, each a rank or a whole group: a number, or from `min` to `max` by the load."""

    min: Annotated[int, Field(ge=0)] = 1
    """With 0, a service that nobody asks ends its last engine; the next request starts one and waits for it."""
    max: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0)] | None = None
    """Requests that each engine should have at a time, those that wait included; None is three quarters of its slots,
    so that another one starts before requests have to wait."""
    upscale_delay_s: Annotated[float, Field(ge=0)] = 15.0
    """How long there must be more requests than that before engines are added."""
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0
    """How long there must be fewer before engines are taken away, once their requests have ended."""

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, value: object) -> object:
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return {"min": value, "max": value} if is_number else value

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max: {self.max} is less than min, {self.min}")
        return self

    @property
    def fixed(self) -> bool:
        """Whether there are always as many."""
        return self.min == self.max


class ServiceConfig(_Frozen):
    """The HTTP service around one engine, or several of the same kind."""

    engine: EngineConfig
    replicas: ReplicasConfig = ReplicasConfig()
    model_name: str | None = None
    """The name clients ask for; None takes the folder's name."""
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 1024
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long loading may take, and how long a request waits for an engine, one that its node boots for included."""
    api_keys_file: Path | None = None
    """A key a line, of which each request must have one; read again when it changes. None asks nobody."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages of other origins that may ask (CORS), as `https://example.org`; "*" is all."""
    limits: LimitsConfig = LimitsConfig()
    log_format: Literal["text", "json"] = "text"
    """Of the service's logs; "json" is an object a line."""
    trace_endpoint: str | None = None
    """The URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request; None makes none."""
    tool_parser: ToolParserName = "auto"
    """The format in which function calls are looked for in answers; "auto" is the one that the chat template writes."""
    reasoning_parser: ReasoningParserName = "auto"
    """"deepseek_r1" gives what answers say up to </think> as reasoning_content; "auto" does so where the chat template
    knows that mark."""

    @model_validator(mode="after")
    def _limits_of_keys_need_keys(self) -> Self:
        if self.limits.max_requests_per_key is not None and self.api_keys_file is None:
            raise ValueError("limits.max_requests_per_key needs api_keys_file: without keys nobody can be told apart")
        return self


def describe(error: ValidationError) -> str:
    """One line a fault: `field.path: what was wrong (got value)`."""
    return "; ".join(
        f"{'.'.join(str(part) for part in fault['loc']) or 'configuration'}: {fault['msg']} (got {fault['input']!r})"
        for fault in error.errors()
    )


def parse_service_config(values: dict[str, object]) -> ServiceConfig:
    """Validate plain values (from YAML). Raises ConfigurationError that names each field at fault."""
    try:
        return ServiceConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(describe(error)) from error
