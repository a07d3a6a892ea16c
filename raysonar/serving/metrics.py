"""Metrics on their way to Prometheus: through Ray's agent on each node, and as text for GET /metrics."""

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.util import metrics as ray_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raysonar.observe.histogram import Histogram
from raysonar.observe.metrics import Metric, Reading, Value

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""
EXPORT_PERIOD_S = 1.0

Readings = Callable[[], Iterable[Reading]]
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """What one process has to say: its readings, and the labels that are common to them."""

    labels: Labels
    readings: list[Reading]


def replica_labels(model: str) -> dict[str, str]:
    """The labels of this process's figures. Outside of Serve the replica is empty."""
    try:
        replica = str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        replica = ""
    return {"model_name": model, "replica": replica}


def exposition(sources: Iterable[Source]) -> bytes:
    """All sources' readings in Prometheus' text format; they must have the same label names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(sources)))
    return generate_latest(registry)


class _Collector:
    """What prometheus_client asks for families."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        """One family a metric, with every source's samples."""
        families: dict[Metric, _Family] = {}
        for source in self._sources:
            for metric, value in source.readings:
                if metric not in families:
                    families[metric] = _family(metric, list(source.labels))
                _add(families[metric], metric, value, list(source.labels.values()))
        yield from families.values()


_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


def _family(metric: Metric, labels: list[str]) -> _Family:
    names = labels if metric.label is None else [*labels, metric.label]
    match metric.kind:
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.meaning, labels=names)
        case "counter":
            return CounterMetricFamily(metric.name, metric.meaning, labels=names)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.meaning, labels=names)


def _add(family: _Family, metric: Metric, value: Value, labels: list[str]) -> None:
    if isinstance(family, HistogramMetricFamily):
        assert isinstance(value, Histogram)
        family.add_metric(labels, value.cumulative(), value.sum)
        return
    for label, number in _by_label(metric, value):
        family.add_metric(labels if label is None else [*labels, label], number)


def _by_label(metric: Metric, value: Value) -> Iterator[tuple[str | None, float]]:
    """A gauge's or counter's numbers by the value of the metric's label, None where it has none."""
    if metric.label is None:
        assert isinstance(value, int | float)
        yield None, value
    else:
        assert isinstance(value, Mapping)
        yield from value.items()


class StatusCounter:
    """Counts the responses of the application inside it by their HTTP status."""

    def __init__(self, app: ASGIApp, counts: "Counter[str]") -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[str(message["status"])] += 1
            await send(message)

        await self._app(scope, receive, counted)


class RayExporter:
    """Hands readings to Ray's agent once a second, on a thread of its own, until it is stopped."""

    def __init__(self, readings: Readings, labels: Labels) -> None:
        """`readings` is called on the exporter's thread; `labels` are common to all."""
        self._readings, self._labels = readings, labels
        self._exported: dict[Metric, _Exported] = {}
        self._stopped = threading.Event()
        threading.Thread(target=self._work, name="raysonar-metrics", daemon=True).start()

    def stop(self) -> None:
        """End the thread; may be called again."""
        self._stopped.set()

    def _work(self) -> None:
        while not self._stopped.wait(EXPORT_PERIOD_S):
            for metric, value in self._readings():
                if metric not in self._exported:
                    self._exported[metric] = _EXPORTED[metric.kind](metric, self._labels)
                self._exported[metric].update(value)


class _Exported(ABC):
    """One metric at Ray's agent."""

    def __init__(self, metric: Metric, labels: Labels) -> None:
        self._metric, self._labels = metric, dict(labels)
        self._tag_keys = (*labels, *([] if metric.label is None else [metric.label]))

    @abstractmethod
    def update(self, value: Value) -> None:
        """Bring Ray's figure up to this one."""

    def _by_tags(self, value: Value) -> Iterator[tuple[dict[str, str], str | None, float]]:
        for label, number in _by_label(self._metric, value):
            own = {} if label is None or self._metric.label is None else {self._metric.label: label}
            yield {**self._labels, **own}, label, number


class _Gauge(_Exported):
    def __init__(self, metric: Metric, labels: Labels) -> None:
        super().__init__(metric, labels)
        self._gauge = ray_metrics.Gauge(metric.name, metric.meaning, self._tag_keys)

    def update(self, value: Value) -> None:
        for tags, _, number in self._by_tags(value):
            self._gauge.set(number, tags)


class _Counter(_Exported):
    def __init__(self, metric: Metric, labels: Labels) -> None:
        super().__init__(metric, labels)
        self._counter = ray_metrics.Counter(metric.name, metric.meaning, self._tag_keys)
        self._counted: dict[str | None, float] = {}

    def update(self, value: Value) -> None:
        for tags, label, number in self._by_tags(value):
            more = number - self._counted.get(label, 0)
            if more > 0:
                self._counter.inc(more, tags)
            self._counted[label] = number


class _Histogram(_Exported):
    """Ray takes single observations and passes on only how many fell into each bucket; so a bucket's growth is handed
    over as that many values inside it. Ray makes a `_sum` of the buckets' middles; GET /metrics has the sum itself.
    """

    def __init__(self, metric: Metric, labels: Labels) -> None:
        super().__init__(metric, labels)
        self._histogram: ray_metrics.Histogram | None = None
        self._counted: list[int] = []

    def update(self, value: Value) -> None:
        assert isinstance(value, Histogram)
        if self._histogram is None:
            bounds = list(value.bounds)
            self._histogram = ray_metrics.Histogram(self._metric.name, self._metric.meaning, bounds, self._tag_keys)
            self._counted = [0] * len(value.counts)
        inside = [*value.bounds, 2 * value.bounds[-1]]
        for bucket, count in enumerate(value.counts):
            for _ in range(count - self._counted[bucket]):
                self._histogram.observe(inside[bucket], self._labels)
        self._counted = value.counts


_EXPORTED: Mapping[str, type[_Exported]] = {"gauge": _Gauge, "counter": _Counter, "histogram": _Histogram}
