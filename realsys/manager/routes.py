"""The manager's HTTP surface: a route for each row of ``operations``, the metrics, and the routes of its caller's page.

Bodies are msgspec Structs, decoded from and encoded to the raw request: no pydantic on the hot routes. State-changing
calls need the trial's token (``realsys.cluster.http_server``). An error is one line: {"error": "..."}.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from realsys.cluster.http_server import Admission, Guard
from realsys.cluster.lease import CheckAlive, unleased
from realsys.errors import MALFORMED, RealsysError
from realsys.manager.commit_loop import ManagerService
from realsys.manager.decisions import ManagerState
from realsys.manager.messages import BadCall, OlderTrainer, Refusal, RefusalReason
from realsys.manager.operations import OPERATIONS, Operation, admission, servers
from realsys.observe.step_fields import curve_metrics
from realsys.observe.step_log import StepRecord

log = logging.getLogger(__name__)

MAX_BODY = 4 << 20  # bytes; a /trained of 10,000 tickets is 200 kB


@dataclass(frozen=True, slots=True)
class Pages:
    """Routes for people and for Prometheus.

    routes   further routes
    secret   paths of them that need the token
    records  reads the newest records of the step log for /metrics; it runs in a thread
    """

    routes: Collection[BaseRoute] = ()
    secret: Collection[str] = ()
    records: Callable[[], list[StepRecord]] = list


NO_PAGES = Pages()


class ManagerApp:
    """Builds the routes to the service."""

    def __init__(
        self,
        service: ManagerService,
        token: str,
        refresh: Callable[[], Awaitable[None]],
        check_alive: CheckAlive = unleased,
        pages: Pages = NO_PAGES,
    ) -> None:
        """``refresh`` reads the published version from the name store: a watch may lag behind the caller."""
        self._service = service
        self._token = token
        self._refresh = refresh
        self._check_alive = check_alive
        self._pages = pages

    def build(self) -> Guard:
        """Return the routes behind the guard that checks token, size and lease for all of them."""
        routes: list[BaseRoute] = [self._route(operation) for operation in OPERATIONS]
        routes += [Route("/metrics", self._metrics), *self._pages.routes]
        secret = (*(operation.path for operation in OPERATIONS if operation.secret), *self._pages.secret)
        return Guard(
            Starlette(routes=routes),
            Admission(self._token, secret, self._check_alive),
            max_body=MAX_BODY,
            error=lambda message: {"error": message},
        )

    def _route(self, operation: Operation[Any, Any]) -> Route:
        """Return the route of an operation: decode, call, encode; every refusal becomes its status here."""
        decoder = msgspec.json.Decoder(operation.request) if operation.is_post else None

        async def argument(request: Request) -> Any:
            if decoder is None:
                return next(iter(request.path_params.values()), None)
            try:
                return decoder.decode(await request.body())
            except MALFORMED as error:
                raise BadCall(str(error)) from error

        async def endpoint(request: Request) -> Response:
            try:
                body = await argument(request)
                if operation.refresh:
                    await self._refresh()
                reply = await self._service.call(operation, body, request.is_disconnected)
                if operation.log_line is not None:
                    log.info(operation.log_line(body, reply))
                return _json(reply)
            except Refusal as refusal:
                if isinstance(refusal, BadCall | OlderTrainer):
                    log.warning("%s: %s", operation.path, refusal)
                prefix = f"{operation.path}: " if isinstance(refusal, BadCall) else ""
                return _json({"error": f"{prefix}{refusal}"}, refusal.status)
            except ClientDisconnect:
                return Response(status_code=400)
            except RealsysError as error:
                log.error("%s: %s", operation.path, error)
                return _json({"error": str(error)}, 500)

        return Route(operation.path, endpoint, methods=["POST" if operation.is_post else "GET"])

    async def _metrics(self, request: Request) -> Response:
        records = await asyncio.to_thread(self._pages.records)
        body, content_type = render_metrics(self._service.state, self._service.clock(), records)
        return Response(body, headers={"content-type": content_type})


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


# ---- the manager's state and the newest numbers of the step log, in Prometheus' text format
#
# Both are read at scrape time. No label is a ticket's id.


class StateCollector(Collector):
    """One scrape of the state at ``now``."""

    def __init__(self, state: ManagerState, now: float, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """``records``: the newest ones of the step log."""
        self._state = state
        self._now = now
        self._records = records

    def collect(self) -> Iterator[Metric]:
        yield from self._admission()
        yield from self._ledger()
        yield from self._servers()
        yield from self._updates()
        yield from self._verdicts()
        state = self._state
        yield gauge("realsys_workers", "workers with a heartbeat", len(state.workers))
        yield labelled("realsys_process_memory_bytes", "resident memory", "process", state.memory())
        peaks = {server.name: peak for server in state.servers.all() if (peak := server.load.get("gpu_peak_bytes"))}
        text = "most memory that torch has held on one GPU of the process"
        yield labelled("realsys_process_gpu_peak_bytes", text, "process", peaks)
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
        if isinstance(agreement := self._state.master.get("agreement"), dict):
            text = "1 while log-probs of trainer and engine drift apart"
            yield gauge("realsys_agreement_warning", text, float(bool(agreement.get("warning"))))
        yield from curve_metrics(self._records)

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

    def _servers(self) -> Iterator[Metric]:
        families = {
            "version": GaugeMetricFamily("realsys_server_version", "verified version", labels=["server"]),
            "running": GaugeMetricFamily("realsys_server_running", "reserved sequences", labels=["server"]),
            "tokens_per_s": GaugeMetricFamily("realsys_server_tokens_per_second", "finished tokens", labels=["server"]),
            "update_s": GaugeMetricFamily("realsys_server_update_seconds", "last weight update", labels=["server"]),
        }
        loads = {
            "retained_tokens": ("cached for later turns", GaugeMetricFamily),
            "prefilled_tokens": ("prompt tokens computed", CounterMetricFamily),
            "reused_tokens": ("prompt tokens found in the cache", CounterMetricFamily),
            "evicted_tokens": ("prompt tokens computed again, for want of rows in the cache", CounterMetricFamily),
        }
        reported = {key: kind(f"realsys_server_{key}", text, labels=["server"]) for key, (text, kind) in loads.items()}
        up = GaugeMetricFamily("realsys_server_up", "1 for the state the server is in", labels=["server", "state"])
        for row in servers(self._state, self._now):
            up.add_metric([row["name"], row["state"]], 1)
            for key, family in families.items():
                family.add_metric([row["name"]], -1 if row[key] is None else row[key])
            for key, family in reported.items():
                if row["load"]:
                    family.add_metric([row["name"]], row["load"][key])
        yield up
        yield from (*families.values(), *reported.values())


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)


def labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def render_metrics(state: ManagerState, now: float, records: Iterable[Mapping[str, Any]] = ()) -> tuple[bytes, str]:
    """Return body and content type of one scrape. ``records``: the newest ones of the step log."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StateCollector(state, now, records))
    return generate_latest(registry), CONTENT_TYPE_LATEST
