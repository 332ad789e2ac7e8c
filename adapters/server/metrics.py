"""Prometheus metrics: what the engine says at the moment of the scrape, and what passed through this server.

Names have the meaning that vLLM's and LMDeploy's users know, under the prefix `corogen_`. Nothing is global: several
servers in one process do not meet, and PROMETHEUS_MULTIPROC_DIR has no effect. Belongs to the server's event loop.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Scope

from corogen.errors import EngineClosed

if TYPE_CHECKING:
    from prometheus_client import Metric

    from corogen.adapters.pipeline import Pipeline
    from corogen.outputs import Times

__all__ = ["CONTENT_TYPE_LATEST", "Histogram", "Metrics"]

_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Histogram:
    """Counts observations in buckets; `bounds` are inclusive upper ends."""

    def __init__(self, name: str, words: str, bounds: Sequence[float]) -> None:
        self.name, self.words, self._bounds = name, words, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model: str) -> HistogramMetricFamily:
        """As Prometheus wants it."""
        ends = [*(f"{bound:g}" if bound < 1e6 else str(bound) for bound in self._bounds), "+Inf"]
        found = HistogramMetricFamily(self.name, self.words, labels=["model_name"])
        found.add_metric([model], list(zip(ends, accumulate(self._counts), strict=True)), self._sum)
        return found


class Metrics(Collector):
    """All series of one server."""

    def __init__(self, pipe: Pipeline, model: str) -> None:
        self._pipe, self._model = pipe, model
        self.itl = Histogram("corogen_inter_token_latency_seconds", "Streamed: between two pieces", _PER_TOKEN)
        self.tpot = Histogram(
            "corogen_request_time_per_output_token_seconds", "Streamed: mean of a request after its first", _PER_TOKEN
        )
        self.prompt_len = Histogram("corogen_request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.answer_len = Histogram("corogen_request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._prompt_tokens = self._answer_tokens = 0
        self._answered: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        """The text that a scrape gets."""
        return generate_latest(self._registry)

    # ------------------------------------------------------------------ what routes tell

    def answered(self, scope: Scope, status: int) -> None:
        """An HTTP request ended; status 0: its client left before an answer began."""
        route = scope.get("route")
        path = getattr(route, "path", None) or "other"
        self._answered[path, str(status or "disconnected")] += 1

    def prompt(self, tokens: int) -> None:
        """A prompt was answered, or at least begun."""
        self._prompt_tokens += tokens
        self.prompt_len.observe(tokens)

    def generated(self, tokens: int) -> None:
        """So many more tokens of an answer came."""
        self._answer_tokens += tokens

    # ------------------------------------------------------------------ what a scrape gets

    def collect(self) -> Iterator[Metric]:
        """Everything, computed now."""
        yield from self._engine_families()
        yield self._counter("corogen_prompt_tokens", "Tokens of prompts that came over HTTP", self._prompt_tokens)
        yield self._counter("corogen_generation_tokens", "Tokens that were generated for them", self._answer_tokens)
        for histogram in (self.itl, self.tpot, self.prompt_len, self.answer_len):
            yield histogram.family(self._model)
        http = CounterMetricFamily("corogen_http_requests", "HTTP requests that ended", labels=["path", "status"])
        for labels, count in sorted(self._answered.items()):
            http.add_metric(labels, count)
        yield http

    def _engine_families(self) -> Iterator[Metric]:
        health = self._pipe.engine.health
        yield self._gauge("corogen_ready", "1 while requests are served", health.state.value == "ready")
        yield self._counter("corogen_worker_restarts", "Times that the workers were started again", health.restarts)
        try:
            stats = self._pipe.stats()
        except EngineClosed:
            return
        blocks = {"free": stats.blocks_free, "cached": stats.blocks_cached, "used": stats.blocks_used}
        total = sum(blocks.values())
        yield self._gauge("corogen_num_requests_running", "Requests that hold a slot", stats.running)
        yield self._gauge("corogen_num_requests_waiting", "Requests that wait for a slot", stats.waiting)
        yield self._gauge(
            "corogen_kv_cache_usage_perc", "Share of blocks in use; 1 is all", blocks["used"] / (total or 1)
        )
        yield self._labelled(GaugeMetricFamily, "corogen_kv_blocks", "Blocks of the KV cache", "state", blocks)
        yield self._counter("corogen_engine_steps", "Steps whose result has arrived", stats.steps)
        yield self._counter("corogen_num_preemptions", "Requests put back to free their blocks", stats.preemptions)
        yield self._counter("corogen_prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cached_tokens)
        ended = {reason: stats.ended.get(reason, 0) for reason in ("stop", "length", "abort", "timeout", "error")}
        words = "Requests that ended, by finish reason"
        yield self._labelled(CounterMetricFamily, "corogen_requests_ended", words, "finished_reason", ended)
        yield self._times(
            "corogen_time_to_first_token_seconds", "From arrival to the first token", stats.first_token_time
        )
        yield self._times("corogen_e2e_request_latency_seconds", "From arrival to the end", stats.request_time)
        yield self._times("corogen_request_queue_time_seconds", "From arrival until it first ran", stats.queue_time)
        yield self._times("corogen_engine_step_seconds", "Of the workers, a step", stats.step_time)

    def _times(self, name: str, words: str, times: Times) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, words, labels=["model_name"])
        ends = [(f"{bound:g}", count) for bound, count in times.buckets.items() if bound != math.inf]
        family.add_metric([self._model], [*ends, ("+Inf", times.count)], times.total_s)
        return family

    def _gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, words, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, words: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, words, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _labelled(self, kind: Any, name: str, words: str, label: str, values: dict[str, int]) -> Metric:
        family: Metric = kind(name, words, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)  # type: ignore[attr-defined]
        return family
