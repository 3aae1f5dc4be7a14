"""HDR histograms of latencies: three significant digits from a microsecond to an hour, and exact to merge."""

from __future__ import annotations

from collections.abc import Sequence

from hdrh.histogram import HdrHistogram

METRICS = ("ttft_scheduled", "ttft_sent", "e2e_scheduled", "e2e_sent", "tpot", "itl", "lag", "hints")
QUANTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
HIGHEST_US = 3_600_000_000
DIGITS = 3


class Latencies:
    """One histogram a metric; values go in and come out in seconds and are kept as whole microseconds."""

    def __init__(self) -> None:
        self._of = {name: HdrHistogram(1, HIGHEST_US, DIGITS) for name in METRICS}

    def add(self, metric: str, seconds: float) -> None:
        """A value above an hour counts as an hour."""
        self._of[metric].record_value(min(max(round(seconds * 1e6), 1), HIGHEST_US))

    def merge(self, encoded: dict[str, str]) -> None:
        """Adds histograms that another process encoded."""
        for name, text in encoded.items():
            self._of[name].decode_and_add(text.encode())

    def encode(self) -> dict[str, str]:
        """Metric to base64 of the compressed histogram (V2 format), without empty ones."""
        return {name: each.encode().decode() for name, each in self._of.items() if each.get_total_count()}

    def count(self, metric: str) -> int:
        return int(self._of[metric].get_total_count())

    def quantile(self, metric: str, percent: float) -> float:
        """Seconds that `percent` of the values do not exceed; NaN without values."""
        return self.curve(metric, [percent])[0]

    def mean(self, metric: str) -> float:
        return float(self._of[metric].get_mean_value()) / 1e6 if self.count(metric) else float("nan")

    def maximum(self, metric: str) -> float:
        return float(self._of[metric].get_max_value()) / 1e6 if self.count(metric) else float("nan")

    def curve(self, metric: str, percents: Sequence[float]) -> list[float]:
        """As `quantile` for several, in one pass: each pass visits tens of thousands of buckets."""
        if not self.count(metric):
            return [float("nan")] * len(percents)
        values = self._of[metric].get_percentile_to_value_dict(percents)
        return [float(values[percent]) / 1e6 for percent in percents]
