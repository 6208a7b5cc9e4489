"""What `/metrics` reports: requests, tokens, latencies, and the state of each replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from forge.generator.openai.prometheus import Counter, Gauge, Histogram, Metric, render

if TYPE_CHECKING:
    from forge.generator.engine import EngineStats
    from forge.generator.openai.requests_open import RequestRecord
    from forge.service.records import ServiceMetrics

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.requests = Counter(
            "forge_requests_total", "Requests that were answered, by route and HTTP status.", ("route", "status")
        )
        self.prompt_tokens = Counter("forge_prompt_tokens_total", "Tokens of prompts.")
        self.generation_tokens = Counter("forge_generation_tokens_total", "Sampled tokens.")
        self.duration = Histogram(
            "forge_request_duration_seconds",
            "Time from the arrival of a request to the end of its answer.",
            ("route",),
            bounds=_SECONDS,
        )
        self.first_token = Histogram(
            "forge_time_to_first_token_seconds",
            "Time from the arrival of a streamed request to its first token.",
            bounds=_SECONDS,
        )
        self.per_token = Histogram(
            "forge_time_per_output_token_seconds",
            "Mean time between the tokens of a streamed completion, after the first.",
            bounds=_TOKEN_SECONDS,
        )
        self.rejected = Counter(
            "forge_requests_rejected_total", "Requests that were refused before they were sent on.", ("reason",)
        )
        self.errors = Counter(
            "forge_generation_errors_total", "Requests whose generation failed, by class of the error.", ("error",)
        )
        self.num_retried = 0
        """Without those that the service itself has sent again."""
        self.retried = Counter("forge_request_retries_total", "Requests that were sent again, to another replica.")
        self.updates = Counter("forge_weight_updates_total", "Weight updates, by outcome.", ("outcome",))
        self.in_flight = Gauge("forge_requests_in_flight", "Requests that are being answered or wait.")
        self.queued = Gauge("forge_requests_queued", "Requests that wait because no replica is up.")
        self.draining = Gauge("forge_draining", "1 while the server finishes its requests before it ends.")
        self.replicas = Gauge("forge_replicas", "Replicas of the generator, by health.", ("health",))
        self.restarts = Counter("forge_replica_restarts_total", "Restarts of a replica.", ("replica",))
        self.running = Gauge("forge_completions_running", "Completions in progress in a replica.", ("replica",))
        self.waiting = Gauge("forge_completions_waiting", "Completions in the queue of a replica.", ("replica",))
        self.cache = Gauge("forge_kv_cache_usage_ratio", "Part of a replica's KV cache in use, 0 to 1.", ("replica",))
        self.version = Gauge("forge_weight_version", "Version of the weights that a replica serves.", ("replica",))

    def note(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.requests.add(1, record.route, str(record.status))
        if record.error is not None:
            self.errors.add(1, record.error)
        self.prompt_tokens.add(record.num_prompt_tokens)
        self.generation_tokens.add(record.num_tokens)
        self.duration.observe(record.seconds, record.route)
        if record.first_token_s is not None:
            self.first_token.observe(record.first_token_s)
            if record.token_s is not None:
                self.per_token.observe(record.token_s)

    def note_replicas(self, service: ServiceMetrics | None, stats: Mapping[int, EngineStats]) -> None:
        """Take over the replicas' state of this moment."""
        self.retried.set_total(self.num_retried + (0 if service is None else service.num_retried))
        for gauge in (self.replicas, self.running, self.waiting, self.cache, self.version):
            gauge.clear()
        if service is None:
            self.replicas.set(len(stats), "healthy")
        else:
            for health in ("starting", "healthy", "restarting", "given_up", "stopped"):
                self.replicas.set(sum(one.health == health for one in service.replicas), health)
            for one in service.replicas:
                self.restarts.set_total(one.restarts, str(one.index))
            self.queued.set(service.num_waiting)
        for index, engine in stats.items():
            self.running.set(engine.num_running, str(index))
            self.waiting.set(engine.num_waiting, str(index))
            self.cache.set(engine.cache_used, str(index))
            self.version.set(engine.version, str(index))

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return render([metric for metric in vars(self).values() if isinstance(metric, Metric)])
