"""Reads Prometheus' text format."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Of all series."""
        return {sample.name for sample in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of a series' samples that have these labels; 0 when there are none."""
        return sum(sample.value for sample in self.of(name) if labels.items() <= sample.labels.items())

    def of(self, name: str) -> list:
        """A series' samples."""
        return [sample for sample in self._samples if sample.name == name]

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Of each sample of a series."""
        return [sample.labels for sample in self.of(name)]
