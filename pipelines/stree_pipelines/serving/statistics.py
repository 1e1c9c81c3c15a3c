"""Count what the server does, for Prometheus and for `usage`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as Total
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from stree.generation import DecodingStats, GenerationOutput
from stree.metrics import acceptance_length
from stree_pipelines.serving.engine_client import EngineClient

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
METRICS_TYPE = "text/plain; version=0.0.4"


@dataclass
class Moments:
    """Times of one answer, of the host's clock in seconds.

    Attributes:
        asked: When its request came.
        first: When its first token came; None before.
        last: When its last tokens came.
    """

    asked: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0


class TokenGaps:
    """Histogram of the times between tokens, which takes all tokens of a step at once."""

    def __init__(self, model: str) -> None:
        self.model, self.seconds, self._counts = model, 0.0, [0] * (len(_SECONDS) + 1)

    def observe(self, seconds: float, count: int) -> None:
        """Note so many tokens, each after so many seconds."""
        self._counts[bisect_left(_SECONDS, seconds)] += count
        self.seconds += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the histogram, for a registry."""
        bounds = [*map(str, map(float, _SECONDS)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens", labels=["model_name"]
        )
        family.add_metric([self.model], buckets, self.seconds)
        yield family


class Statistics:
    """Metrics under the names of vLLM, which dashboards and load generators read.

    For a tree, draft tokens are its nodes but the root, and positions are depths: at most one draft
    of a depth is accepted.
    """

    def __init__(self, engine: EngineClient, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}

        def total(name: str, text: str, *more: str) -> Total:
            return Total(name, text, ["model_name", *more], registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(
                name, text, ["model_name"], buckets=_SECONDS, registry=self.registry
            )
            return made.labels(**self._labels)

        self._drafts = total("vllm:spec_decode_num_drafts", "Trees that were verified")
        self._nodes = total("vllm:spec_decode_num_draft_tokens", "Nodes of these, roots left out")
        self._accepted = total("vllm:spec_decode_num_accepted_tokens", "Accepted drafts")
        self._by_depth = total(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by depth", "position"
        )
        self._prompt = total("vllm:prompt_tokens", "Tokens of prompts")
        self._cached = total("vllm:prefix_cache_hits", "Tokens of prompts that were not read again")
        self._new = total("vllm:generation_tokens", "Tokens of answers")
        self._ends = total("vllm:request_success", "Answers", "finished_reason")
        self._refused = total("stree:requests_refused", "Requests refused", "status")
        self._first = histogram("vllm:time_to_first_token_seconds", "Until the first token")
        self._between = TokenGaps(model)
        self.registry.register(self._between)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Until the last token")
        for name, text, value in (
            ("vllm:num_requests_running", "Answers under way", lambda: engine.num_running),
            ("vllm:num_requests_waiting", "Requests that wait", lambda: engine.num_waiting),
        ):
            gauge = Gauge(name, text, ["model_name"], registry=self.registry)
            gauge.labels(**self._labels).set_function(value)

    def note_tokens(self, moments: Moments, count: int) -> None:
        """Note that tokens of an answer have come; those of one step count alike."""
        now = time.perf_counter()
        if moments.first is None:
            moments.first = now
            self._first.observe(now - moments.asked)
        else:
            self._between.observe((now - moments.last) / count, count)
        moments.last = now

    def note_end(self, output: GenerationOutput, num_prompt: int, moments: Moments) -> None:
        """Count an answer that has ended."""
        stats, labels = output.stats, self._labels
        self._whole.observe(time.perf_counter() - moments.asked)
        self._ends.labels(finished_reason=output.finish_reason, **labels).inc()
        self._prompt.labels(**labels).inc(num_prompt)
        self._cached.labels(**labels).inc(stats.num_reused_tokens)
        self._new.labels(**labels).inc(len(output.tokens))
        self._drafts.labels(**labels).inc(num_trees(stats))
        self._nodes.labels(**labels).inc(num_drafts(stats))
        self._accepted.labels(**labels).inc(sum(stats.accepted_per_call))
        for accepted in stats.accepted_per_call:
            for depth in range(accepted):
                self._by_depth.labels(position=str(depth), **labels).inc()

    def note_refusal(self, status: int) -> None:
        """Count a request that got an error."""
        self._refused.labels(status=str(status), **self._labels).inc()

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)


class _Merged:
    """Metrics of several servers as one registry.

    Args:
        texts: What `Statistics.text` of each server gave, by the server's name.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def collect(self) -> Iterable[Metric]:
        """Return the metrics; every sample has its server's name as the label `replica`."""
        found: dict[str, Metric] = {}
        for name, text in self.texts.items():
            for each in text_string_to_metric_families(text):
                metric = found.setdefault(
                    each.name, Metric(each.name, each.documentation, each.type)
                )
                for sample in each.samples:
                    metric.add_sample(sample.name, {**sample.labels, "replica": name}, sample.value)
        return found.values()


def merged(texts: Mapping[str, str]) -> bytes:
    """Merge the metrics of several servers into one text that Prometheus reads.

    Args:
        texts: Metrics of each server by its name, which becomes the label `replica`.
    """
    return generate_latest(_Merged(texts))


def num_trees(stats: DecodingStats) -> int:
    """Return the number of calls that verified drafts."""
    return sum(depth > 0 for depth in stats.depth_per_call)


def num_drafts(stats: DecodingStats) -> int:
    """Return the number of drafts that were verified: nodes of trees, roots left out."""
    return stats.num_nodes - stats.num_calls


def usage_of(prompts: list[int], outputs: list[GenerationOutput]) -> dict[str, Any]:
    """Return the `usage` of a request: prompts by their lengths, and all answers."""
    stats = [each.stats for each in outputs]
    new = sum(len(each.tokens) for each in outputs)
    accepted = sum(sum(each.accepted_per_call) for each in stats)
    drafted, calls = sum(map(num_drafts, stats)), sum(each.num_calls for each in stats)
    histogram = Counter(count for each in stats for count in each.accepted_per_call)
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": new,
        "total_tokens": sum(prompts) + new,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_reused_tokens for each in stats)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "num_spec_steps": calls,
        "mean_acceptance_length": acceptance_length(stats),
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": [
            histogram[count] for count in range(max(histogram, default=-1) + 1)
        ],
    }
