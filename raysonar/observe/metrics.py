"""The metrics of an engine: names, meanings, and how each is read from its stats. Plain data: serving exports them.

Names are vLLM's (its prefix `vllm:` is `raysonar_` here) where it has the same figure. Counters are named without the
`_total` that Prometheus' text format puts behind them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from raysonar.observe.counters import EngineStats
from raysonar.observe.histogram import Histogram

PREFIX = "raysonar_"
Kind = Literal["gauge", "counter", "histogram"]
Value = float | Histogram | Mapping[str, float]
"""A mapping is by the value of the metric's label."""


@dataclass(frozen=True)
class Metric:
    """A figure with a name."""

    name: str
    kind: Kind
    meaning: str
    label: str | None = None
    """By which its value is a mapping."""

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus has it."""
        match self.kind:
            case "gauge":
                return (self.name,)
            case "counter":
                return (f"{self.name}_total",)
            case "histogram":
                return (f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum")


Reading = tuple[Metric, Value]
_Read = Callable[[EngineStats], Value]


def _positions(values: tuple[int, ...]) -> dict[str, float]:
    return {str(position): float(value) for position, value in enumerate(values)}


def _gauge(name: str, meaning: str, read: _Read, label: str | None = None) -> tuple[Metric, _Read]:
    return Metric(PREFIX + name, "gauge", meaning, label), read


def _counter(name: str, meaning: str, read: _Read, label: str | None = None) -> tuple[Metric, _Read]:
    return Metric(PREFIX + name, "counter", meaning, label), read


def _histogram(name: str, meaning: str, read: _Read) -> tuple[Metric, _Read]:
    return Metric(PREFIX + name, "histogram", meaning), read


_READERS: tuple[tuple[Metric, _Read], ...] = (
    _gauge("num_requests_running", "Answers that hold a slot", lambda s: s.running),
    _gauge("num_requests_waiting", "Answers that wait for a slot", lambda s: s.waiting),
    _gauge("kv_cache_usage_perc", "Pages in use, of all; 1 is full", lambda s: s.pages_referenced / s.pages),
    _gauge("num_slots", "Answers that can run at once", lambda s: s.slots),
    _gauge("num_kv_cache_pages", "Pages of the KV cache", lambda s: s.pages),
    _counter("prefix_cache_queries", "Tokens looked up in the prefix cache", lambda s: s.prefix_lookup_tokens),
    _counter("prefix_cache_hits", "Of them, found", lambda s: s.prefix_hit_tokens),
    _counter("num_preemptions", "Answers that gave up their slot for want of pages", lambda s: s.preemptions),
    _counter("recoveries", "Times that failed ranks were started again", lambda s: s.recoveries),
    _counter("prompt_tokens", "Tokens of prompts queued", lambda s: s.prompt_tokens),
    _counter("generation_tokens", "Tokens given out", lambda s: s.generated_tokens),
    _counter("request_success", "Answers that ended, by reason", lambda s: s.answers.finished, "finished_reason"),
    _histogram("request_prompt_tokens", "Tokens of an answer's prompt", lambda s: s.answers.prompt_tokens),
    _histogram("request_generation_tokens", "Tokens of an answer", lambda s: s.answers.generated_tokens),
    _histogram("time_to_first_token_seconds", "Arrival to first token", lambda s: s.answers.first_token),
    _histogram(
        "inter_token_latency_seconds",
        "Between tokens, each counted: those of one step share the time since the step before",
        lambda s: s.answers.between_tokens,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "An answer's time from first to last token, over its tokens after the first",
        lambda s: s.answers.per_token,
    ),
    _histogram("e2e_request_latency_seconds", "Arrival to end", lambda s: s.answers.whole),
    _histogram("request_queue_time_seconds", "Arrival to first slot", lambda s: s.answers.queue),
    _histogram("request_prefill_time_seconds", "First slot to first token", lambda s: s.answers.prefill),
    _histogram("request_decode_time_seconds", "First token to last token", lambda s: s.answers.decode),
    _counter("spec_decode_num_drafts", "Drafts verified, of one token or more", lambda s: (*s.drafted, 0)[0]),
    _counter("spec_decode_num_draft_tokens", "Draft tokens verified", lambda s: sum(s.drafted)),
    _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted", lambda s: sum(s.accepted)),
    _counter(
        "spec_decode_num_draft_tokens_per_pos",
        "Draft tokens verified, by position in the draft",
        lambda s: _positions(s.drafted),
        "position",
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft",
        lambda s: _positions(s.accepted),
        "position",
    ),
    _counter("steps", "Steps of the ranks", lambda s: s.steps),
    _counter("split_steps", "Of them, run as two micro-batches", lambda s: s.split_steps),
    _counter("step_decisions", "Steps by why they were split, or were not", lambda s: s.decisions.reasons, "reason"),
    _counter("step_seconds", "What steps took the ranks: waiting, verifying, drafting", lambda s: s.rank_seconds),
    _counter("step_waiting_for_plans_seconds", "Of it, waiting for plans", lambda s: s.wait_seconds),
    _counter(
        "step_exposed_communication_seconds",
        "Of it, blocked in waits for other ranks: communication that no computation hides",
        lambda s: s.exposed_seconds,
    ),
    _counter(
        "step_predicted_seconds",
        "What the cost model expected of steps, where there is one",
        lambda s: s.decisions.predicted_seconds,
    ),
    _counter("step_predicted_measured_seconds", "What those steps took", lambda s: s.decisions.measured_seconds),
    _counter(
        "step_prediction_error_seconds",
        "The differences of the two, each without its sign",
        lambda s: s.decisions.error_seconds,
    ),
    _counter(
        "expert_tokens",
        "Tokens that each rank's experts had, counted each time that they are placed anew",
        lambda s: s.expert_tokens,
        "rank",
    ),
    _gauge(
        "expert_load_imbalance",
        "The busiest rank's tokens over the mean, in the worst layer, when experts were last placed anew; 0 before",
        lambda s: s.expert_imbalance,
    ),
)

HTTP_REQUESTS = Metric(PREFIX + "http_requests", "counter", "HTTP responses of the ingress, by status", "status")
"""Counted by the ingress, not by an engine."""

CATALOGUE = (*(metric for metric, _ in _READERS), HTTP_REQUESTS)
"""Every metric."""


def engine_readings(stats: EngineStats) -> Iterator[Reading]:
    """Each of the engine's metrics with its value."""
    return ((metric, read(stats)) for metric, read in _READERS)
