"""GET /metrics: the manager's state in Prometheus' text format, read at scrape time. No label is a ticket's id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from realsys.manager.messages import RefusalReason
from realsys.manager.overview import admission, servers
from realsys.manager.state import ManagerState


class StateCollector(Collector):
    """One scrape of the state at ``now``."""

    def __init__(self, state: ManagerState, now: float) -> None:
        self._state = state
        self._now = now

    def collect(self) -> Iterator[Metric]:
        yield from self._admission()
        yield from self._ledger()
        yield from self._servers()
        yield from self._updates()
        yield from self._verdicts()
        yield from self._agreement()
        yield from self._untrained()
        yield from self._gpu()
        state = self._state
        yield gauge("realsys_workers", "workers with a heartbeat", len(state.workers))
        tokens = state.throughput.tokens
        yield gauge("realsys_generated_tokens_per_second", "tokens of finished completions", tokens.rate(self._now))
        yield CounterMetricFamily("realsys_generated_tokens", "tokens of finished completions", tokens.total)
        refused = CounterMetricFamily(
            "realsys_refused", "peers, requests and messages refused, by cause", labels=["worker", "cause"]
        )
        for name, beat in state.workers.items():
            for cause, count in beat.counters.items():
                refused.add_metric([name, cause], count)
        yield refused

    def _admission(self) -> Iterator[Metric]:
        view = admission(self._state)
        yield gauge("realsys_model_version", "published version", self._state.version)
        yield gauge("realsys_admission_counted", "N of the staleness inequality, groups", view["counted"])
        yield gauge("realsys_admission_capacity", "largest N that is admitted, groups", view["capacity"])
        reasons = {reason: float(view["reason"] == reason) for reason in get_args(RefusalReason)}
        yield labelled("realsys_admission_refused", "1 for the reason nothing is granted", "reason", reasons)

    def _ledger(self) -> Iterator[Metric]:
        counts = self._state.ledger.counts
        yield labelled("realsys_tickets", "tickets by state", "state", counts.by_state())
        yield CounterMetricFamily("realsys_attempts", "granted attempts", counts.attempts)
        yield CounterMetricFamily("realsys_training_starts", "starts of the trainer", counts.starts)
        yield labelled("realsys_tickets_dropped", "dropped tickets by reason", "reason", counts.dropped_by_reason)
        shares = self._state.ledger.rates.shares()
        yield labelled("realsys_prompts_share", "share of prompts by their success rate", "success", shares)
        reissued = CounterMetricFamily("realsys_reissues", "attempts that were lost", labels=["cause"])
        for cause, number in counts.reissued_by_cause.items():
            reissued.add_metric([cause], number)
        yield reissued

    def _updates(self) -> Iterator[Metric]:
        updates = self._state.servers.updates
        took = HistogramMetricFamily(
            "realsys_weight_update_seconds", "weight updates of all servers, by stage", labels=["stage"]
        )
        for stage, histogram in updates.histograms.items():
            took.add_metric([stage.removesuffix("_s")], histogram.cumulative(), histogram.total)
        yield took
        yield CounterMetricFamily("realsys_weight_update_failures", "weight updates that failed", updates.failures)

    def _verdicts(self) -> Iterator[Metric]:
        """Yield the state of the verifiers of each RolloutWorker, as its last finished rollout reported it."""
        waiting = GaugeMetricFamily(
            "realsys_verdicts_waiting", "completions that wait for a verifier process", labels=["worker"]
        )
        undecided = CounterMetricFamily(
            "realsys_verdicts_undecided", "completions that two judgements left without a verdict", labels=["worker"]
        )
        for worker, counts in self._state.throughput.verdicts.items():
            waiting.add_metric([worker], counts[0])
            undecided.add_metric([worker], counts[1])
        failures = CounterMetricFamily(
            "realsys_verdict_failures", "completions whose verifier failed or exceeded a limit", labels=["cause"]
        )
        for cause, count in self._state.throughput.verdict_failures.items():
            failures.add_metric([cause], count)
        yield waiting
        yield undecided
        yield failures

    def _agreement(self) -> Iterator[Metric]:
        """Yield the agreement of the last train step, if it had tokens of the version that it trained."""
        view = self._state.master.get("agreement")
        if not isinstance(view, dict):
            return
        for key in ("tokens", "difference_mean", "difference_max", "ratio"):
            if isinstance(view.get(key), int | float):
                yield gauge(f"realsys_agreement_{key}", f"log-probs of trainer against engine: {key}", view[key])
        yield gauge("realsys_agreement_warning", "1 while they drift apart", float(bool(view.get("warning"))))

    def _untrained(self) -> Iterator[Metric]:
        """Yield what the last train step said about sampled tokens that are not trained."""
        shares = self._state.master.get("untrained")
        if isinstance(shares, dict):
            text = "share of sampled tokens that were not trained, by reason"
            yield labelled("realsys_untrained_share", text, "reason", shares)
        for key, text in (
            ("too_old", "share of sampled tokens lost to staleness, last 20 steps"),
            ("length_ks", "KS distance of the lengths of sampled and trained completions, last 20 steps"),
        ):
            if isinstance(value := self._state.master.get(key), int | float):
                yield gauge(f"realsys_{key}", text, value)

    def _gpu(self) -> Iterator[Metric]:
        """Yield the use of the GPUs in the last train step; nothing without GPUs."""
        use = self._state.master.get("gpu")
        if not isinstance(use, dict):
            return
        if isinstance(shares := use.get("mfu"), dict):
            text = "model FLOPs of the training ranks over the peak of their GPUs, last step"
            yield labelled("realsys_gpu_mfu", text, "call", shares)
        for key, text in (
            ("peak_bytes", "most memory that torch held on a GPU of a training rank, last step"),
            ("used_bytes", "most memory in use on a GPU of a training rank, all processes, last step"),
            ("utilisation", "share of the time in which the GPUs of the training ranks computed, last step"),
        ):
            if isinstance(value := use.get(key), int | float):
                yield gauge(f"realsys_gpu_{key}", text, value)

    def _servers(self) -> Iterator[Metric]:
        families = {
            "version": GaugeMetricFamily("realsys_server_version", "verified version", labels=["server"]),
            "running": GaugeMetricFamily("realsys_server_running", "reserved sequences", labels=["server"]),
            "tokens_per_s": GaugeMetricFamily("realsys_server_tokens_per_second", "finished tokens", labels=["server"]),
            "update_s": GaugeMetricFamily("realsys_server_update_seconds", "last weight update", labels=["server"]),
        }
        up = GaugeMetricFamily("realsys_server_up", "1 for the state the server is in", labels=["server", "state"])
        for row in servers(self._state, self._now):
            up.add_metric([row["name"], row["state"]], 1)
            for key, family in families.items():
                family.add_metric([row["name"]], -1 if row[key] is None else row[key])
        yield up
        yield from families.values()


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)


def labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def render_metrics(state: ManagerState, now: float) -> tuple[bytes, str]:
    """Return body and content type of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(state, now))
    return generate_latest(registry), CONTENT_TYPE_LATEST
