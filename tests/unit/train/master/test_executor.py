"""The executor: order of calls, what it moves and clears, what it passes on and reports."""

import asyncio
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from realsys.algorithm import dataflows
from realsys.algorithm.balance import token_costs
from realsys.algorithm.redistribute import TransferPlan
from realsys.algorithm.token_losses import mask_group
from realsys.cluster.stream.codec import encode_message
from realsys.cluster.topology import Mesh, place, whole_mesh
from realsys.config.allocation import ACTOR, ParallelLayout, parse_allocation
from realsys.config.dataflow import Dataflow, FunctionCall
from realsys.errors import RemoteError, RewardError
from realsys.model_calls import (
    ClearRequest,
    KeepDroppedRequest,
    MfcReply,
    MfcRequest,
    MfcShare,
    SamplesArrived,
    Transfer,
    TransferRequest,
)
from realsys.train.master.executor import GraphExecutor, Ownership
from realsys.train.master.learned_rows import LearnedRows
from realsys.train.master.model_workers import ModelWorkers
from realsys.train.master.step import Warmup, WarmupParts, plan_roles
from realsys.train.master.step_statistics import batch_statistics
from realsys.train.requests import HoldRequest
from realsys.types import SampleMeta
from tests.support.processes.config_trees import changed
from tests.support.streams.simulated_workers import SimulatedWorkers
from tests.support.training.master_fakes import Run, run
from tests.support.training.sample_records import make_ref

EVERYTHING = (
    "train.ppo.critic.enabled=true",
    "train.ppo.skip_zero_advantage=false",
    "train.ppo.kl.coef=0.1",
    "train.ppo.kl.place=reward",
    "train.ppo.reward_model_weight=1",
)
NAMES = [f"s{i}" for i in range(8)]


def ref(name, reward=1.0):
    return make_ref(name, 5, 2, reward, False, 0)


def spread(mesh, minibatches=2):
    data = mesh.layout.data
    return [[[ref(n) for n in NAMES[m::minibatches][dp::data]] for dp in range(data)] for m in range(minibatches)]


def call(name, inputs, outputs="", role="actor", **more):
    return FunctionCall(name, role, name, frozenset(inputs.split()), frozenset(outputs.split()), **more)


def execute(flow, meshes, *, args=None, **settings):
    """One step; the samples have arrived at the actor's DP heads in turn, whatever the plans want."""
    count = 1 + max(worker for mesh in meshes.values() for worker in mesh.workers)
    weight = settings.pop("score_weight", 1.0)

    async def run():
        workers, ownership = SimulatedWorkers(flow, meshes, count, **settings), Ownership()
        for name, head in zip(NAMES, itertools.cycle(meshes["actor"].dp_heads())):
            for key in flow.source_keys:
                workers.held[head].add((key, name))
                ownership.add_owners([key], {name: frozenset([head])})
        async with workers.serving():
            executor = GraphExecutor(flow, meshes, workers, score_weight=weight)
            plans = {role: spread(mesh) for role, mesh in meshes.items()}
            results = await executor.run(plans, ownership, step=3, version=2, args=args or {})
            left = ownership.discard_samples(NAMES)
            assert {worker for worker, held in workers.held.items() if held} <= left.keys()
            assert ownership.discard_samples(NAMES) == {}
            await workers.clear(left)
            assert not any(workers.held.values()), "something is left after the step"
        return workers, results

    return asyncio.run(run())


def requests(workers, kind):
    return [sent for sent in workers.sent if isinstance(sent.payload, kind)]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
def test_ranks_get_what_they_read_only_once(layout):
    mesh = whole_mesh(ParallelLayout(*layout))
    turns = itertools.count(1)  # the n-th request that a worker gets to takes n turns
    workers, results = execute(dataflows.ppo(changed()), {"actor": mesh}, turns=lambda: next(turns))
    assert [sent.name for sent in requests(workers, MfcRequest)] == ["actor_inf", "actor_train"]
    assert results["actor_train"].stats == {"rank": float(mesh.dp_head(0))}
    slowest = results["actor_train"].seconds
    assert slowest >= results["actor_inf"].seconds + mesh.layout.world_size
    assert (workers.moved == 0) == (mesh.layout.world_size == 1)
    assert sum(result.received for result in results.values()) == workers.moved


@pytest.mark.parametrize(
    "allocation",
    [
        "sglang.d1+actor.d2",
        "sglang.d1+actor.d2m2,critic.m2,ref.p2",
        "sglang.d1+actor.d2+critic.p2+ref.d3+reward.d1",
        "sglang.d1+actor.d1,critic.d4+ref.d2,reward.m2",
    ],
)
def test_roles_find_inputs_on_shared_and_separate_workers(allocation):
    flow = dataflows.ppo(changed(*EVERYTHING))
    meshes = place(parse_allocation(allocation), flow.roles)
    _, results = execute(flow, meshes, score=lambda sample_id: 0.5)
    assert {name: result.stats["rank"] for name, result in results.items()} == {
        call.name: float(meshes[call.role].dp_head(0)) for call in flow.calls
    }


def test_transfers_between_idle_workers_precede_their_calls():
    meshes = {"actor": Mesh(ParallelLayout(), (0,)), "ref": Mesh(ParallelLayout(tensor=2), (1, 2))}
    flow = Dataflow([call("a", "tokens"), call("r", "tokens", role="ref")], source_keys={"tokens"})
    workers, _ = execute(flow, meshes)
    assert [(sent.name, sent.workers) for sent in workers.sent[:3]] == [
        ("transfer 0", [0, 1, 2]),
        ("a", [0]),
        ("r", [1, 2]),
    ]
    (moving,) = requests(workers, TransferRequest)
    assert sorted(r.sample_id for r in moving.payloads[1].sequences) == NAMES


def test_transfer_to_busy_worker_delays_no_source_call():
    meshes = {"actor": Mesh(ParallelLayout(), (0,)), "ref": Mesh(ParallelLayout(), (1,))}
    flow = Dataflow(
        [
            call("long", "", role="ref"),
            call("first", "tokens", "values"),
            call("second", "tokens values"),
            call("there", "values", role="ref"),
        ],
        source_keys={"tokens"},
    )
    turns = iter([1, 50] + [1] * 100)  # worker 0 begins `first`, worker 1 `long`
    workers, _ = execute(flow, meshes, turns=lambda: next(turns))
    assert [sent.name for sent in workers.sent[:5]] == ["long", "first", "second", "transfer 3", "there"]


def test_key_is_cleared_everywhere_after_last_reader():
    meshes = {"actor": whole_mesh(ParallelLayout(data=2)), "ref": Mesh(ParallelLayout(), (2,))}
    calls = [
        call("ref_inf", "tokens", "ref_logprobs", role="ref"),
        call("actor_inf", "tokens behav_logprobs", "prox_logprobs"),
        call("advantages", "ref_logprobs behav_logprobs", "advantages"),
        call("actor_train", "tokens advantages prox_logprobs"),
    ]
    workers, _ = execute(Dataflow(calls), meshes)
    order = [sent.name.split()[0] for sent in workers.sent]
    first = ["transfer", "transfer", "ref_inf", "actor_inf"]  # at the same time
    assert order == [*first, "transfer", "advantages", "clear", "actor_train", "clear"]
    early, late = requests(workers, ClearRequest)
    # `versions`, which nothing reads, goes along; prox_logprobs and advantages are still to be read
    assert early.payload.keys == ["behav_logprobs", "ref_logprobs", "versions"]
    assert late.payload.keys == []
    for sent in (early, late):
        assert {name for request in sent.payloads.values() for name in request.sample_ids} == set(NAMES)
        assert sorted(sent.payloads) == [0, 1, 2]


def test_large_batch_is_planned_off_the_loop(monkeypatch):
    """With thousands of rows each takes tens of milliseconds, in which the loop would serve nothing else."""
    threads: dict[str, int] = {}

    def watch(kind, name):
        function = getattr(kind, name)

        def watched(*args):
            threads[name] = threading.get_ident()
            return function(*args)

        monkeypatch.setattr(kind, name, watched)

    for kind, name in ((TransferPlan, "by_worker"), (Ownership, "add_transfers"), (Ownership, "discard_keys")):
        watch(kind, name)
    monkeypatch.setattr("realsys.train.master.executor._OFF_LOOP", len(NAMES))
    meshes = {"actor": whole_mesh(ParallelLayout(data=2))}
    execute(Dataflow([call("first", "tokens", "values"), call("second", "values")], {"tokens"}), meshes)
    assert set(threads) == {"by_worker", "add_transfers", "discard_keys"}
    assert threading.get_ident() not in threads.values()


def test_hooks_and_arguments_reach_the_workers():
    calls = [call("a", "tokens", pre_hooks=("onload",), post_hooks=("mine", "offload"))]
    workers, _ = execute(
        Dataflow(calls, {"tokens"}), {"actor": whole_mesh(ParallelLayout())}, args={"a": {"lr": 0.25}, "b": {"lr": 1.0}}
    )
    (sent,) = requests(workers, MfcRequest)
    assert (sent.payload.pre_hooks, sent.payload.post_hooks) == (["onload"], ["mine", "offload"])
    assert (sent.payload.args, sent.payload.step, sent.payload.version) == ({"lr": 0.25}, 3, 2)


# ---- scores

SCORED = Dataflow(
    [
        call("reward_inf", "tokens", "scores", role="reward"),
        call("before", "tokens"),
        call("after", "tokens scores"),
        call("other", "tokens scores", role="reward"),
    ],
    source_keys={"tokens"},
)
SCORED_MESHES = {"actor": whole_mesh(ParallelLayout(tensor=2)), "reward": Mesh(ParallelLayout(data=2), (1, 2))}


def test_rewards_include_scores_on_every_role():
    workers, results = execute(
        SCORED, SCORED_MESHES, score=lambda sample_id: 0.25 * int(sample_id[1:]), score_weight=2.0
    )
    rewards = {
        sent.name: {r.sample_id: r.reward for m in sent.payload.minibatches for part in m for r in part}
        for sent in requests(workers, MfcRequest)
    }
    assert rewards["before"] == rewards["reward_inf"] == dict.fromkeys(NAMES, 1.0)
    total = {"s0": 1.0, "s1": 1.5, "s2": 2.0, "s3": 2.5, "s4": 3.0, "s5": 3.5, "s6": 4.0, "s7": 4.5}
    assert rewards["after"] == rewards["other"] == total
    assert results["reward_inf"].scores == {name: 0.25 * i for i, name in enumerate(NAMES)}


@pytest.mark.parametrize(("score", "found"), [(None, "no score"), (math.nan, "nan"), (math.inf, "inf")])
def test_sample_without_finite_score_ends_step(score, found):
    some: Callable[[str], float | None] = lambda sample_id: score if sample_id in ("s5", "s6") else 1.0  # noqa: E731
    with pytest.raises(RewardError, match=rf"reward_inf \(role reward\), step 3: 2 of 8 samples .* is s5: {found}"):
        execute(SCORED, SCORED_MESHES, score=some)


# ---- failures


class OneFails(SimulatedWorkers):
    """Call b is answered with an error, call a never."""

    def __init__(self, *args):
        super().__init__(*args)
        self.pending: asyncio.Future[list[MfcReply]] = asyncio.get_running_loop().create_future()

    def run_mfc(self, mesh, payload):
        if payload.mfc == "b":
            failed: asyncio.Future[list[MfcReply]] = asyncio.get_running_loop().create_future()
            failed.set_exception(RemoteError("model_worker/0: b: out of memory"))
            return failed
        return self.pending


def test_failing_call_ends_step_and_cancels_others():
    mesh = whole_mesh(ParallelLayout())
    flow = Dataflow([call(n, "tokens") for n in ("a", "b")], source_keys={"tokens"})

    async def run():
        workers = OneFails(flow, {"actor": mesh}, 1)
        executor = GraphExecutor(flow, {"actor": mesh}, workers)
        ownership = Ownership({"tokens": {"s": frozenset([0])}, "loss_mask": {"s": frozenset([0])}})
        with pytest.raises(RemoteError, match="out of memory"):
            await executor.run({"actor": [[[ref("s")]]]}, ownership, step=1, version=0, args={})
        assert workers.pending.cancelled()

    asyncio.run(run())


# ---- Which learning rate, version and rows a step's calls get, and how the staleness of mixed samples is counted


STEPS = 5

# ceil(0.4 * 5) = 2 steps of warm-up, then a cosine over 3: 0.1 + 0.9 * (1 + cos(pi * k / 3)) / 2
RATES = [0.5, 1.0, 0.775, 0.325, 0.1]


def schedule(section):
    fields = {"lr": 1.0, "warmup_fraction": 0.4, "schedule": "cosine", "min_lr_ratio": 0.1}
    return [f"{section}.{name}={value}" for name, value in fields.items()]


def train_five_steps():
    async def body():
        job = Run(*schedule("train.optimizer"), f"train.total_steps={STEPS}", f"asynchronous.max_staleness={STEPS}")
        job.arrive(*[(5.0, -5.0)] * (2 * STEPS))
        assert await job.serve(job.train()) == STEPS
        return job

    finished: Run = run(body)
    return finished


def test_train_rates_match_table():
    job = train_five_steps()
    rates = {call.step: call.args["lr"] for call in job.calls() if call.mfc == "actor_train"}
    assert sorted(rates) == [1, 2, 3, 4, 5]
    assert [rates[step] for step in sorted(rates)] == pytest.approx(RATES)
    assert [record["lr"] for record in job.records] == pytest.approx(RATES)


def test_calls_get_version_before_step():
    """Step k trains version k - 1. Workers compare the versions of tokens with it (``agreement/...``)."""
    calls = train_five_steps().calls()
    assert {(call.step, call.version) for call in calls} == {(step, step - 1) for step in range(1, STEPS + 1)}


def test_actor_plan_balances_computed_rows():
    """Group 0 has no gradient, because its rewards are equal; the critic computes it all the same."""
    rows = [(40, 1.0, 0), (10, 1.0, 0), *((10, float(k % 2), 1) for k in range(4))]
    refs = [make_ref(f"{k}", length, 2, reward, False, group) for k, (length, reward, group) in enumerate(rows)]
    meshes = dict.fromkeys([ACTOR, "critic"], whole_mesh(ParallelLayout(data=2)))
    config = changed("train.ppo.minibatches=1", "train.ppo.critic.minibatches=1")
    plan = plan_roles(config, meshes, dict.fromkeys(meshes, token_costs), refs)
    [actor], [critic] = plan[ACTOR], plan["critic"]
    assert [sum(ref.length for ref in rank if ref.group == 1) for rank in actor] == [20, 20]
    assert sorted(sum(ref.length for ref in rank) for rank in critic) == [40, 50]


class DemoWorkers(SimulatedWorkers):
    """Simulated workers that also load demonstrations."""

    def load_rows(self, head, lines, split):
        samples = []
        for sample_id in lines:
            samples.append(SampleMeta(sample_id, sample_id, 0, 8, 3, 0.0, False, 0, 0, head))
            self.held[head] |= {(key, sample_id) for key in ("tokens", "loss_mask")}
        future = asyncio.get_running_loop().create_future()
        future.set_result(SamplesArrived(samples))
        return future


def test_warmup_rates_match_table():
    config = changed(*schedule("warmup.optimizer"), f"warmup.steps={STEPS}", "warmup.batch=4")
    flow, meshes = dataflows.sft(config), place(parse_allocation("serve.d1+d2"), [ACTOR])
    records: list[dict[str, Any]] = []

    async def body():
        workers: Any = DemoWorkers(flow, meshes, 2)
        workers.report = {call.name: {"stats": {"loss": 1.0}} for call in flow.calls}
        executor = GraphExecutor(flow, meshes, workers)
        step_log: Any = records
        rows = LearnedRows(workers, meshes[ACTOR], lines=10, held_out=0, batch=4, seed=1)
        parts = WarmupParts(rows, meshes[ACTOR], token_costs, workers, executor, step_log)
        async with workers.serving():
            await Warmup(config.warmup, parts).run()
        assert not any(workers.held.values())
        return [sent.payload for sent in workers.sent if isinstance(sent.payload, MfcRequest)]

    calls: list[MfcRequest] = run(body)
    assert [call.args["lr"] for call in calls] == pytest.approx(RATES)
    assert [record["lr"] for record in records] == pytest.approx(RATES)


def test_staleness_counts_oldest_token():
    """Weights changed while two of the three rows were sampled. Version 5 trains on them."""
    spans = [(1, 4), (3, 5), (4, 4)]
    samples = [
        SampleMeta(f"t{i}.0/0.0", f"t{i}", 0, 8, 3, 1.0, False, oldest, newest, 0)
        for i, (oldest, newest) in enumerate(spans)
    ]
    statistics = batch_statistics(samples, version=5)
    assert statistics["staleness"] == {"min": 0, "mean": 7 / 3, "max": 4, "histogram": {"1": 1, "2": 1, "4": 1}}
    assert statistics["interrupted_fraction"] == 2 / 3


def test_kept_keys_are_a_share_of_trained_tokens():
    samples = [
        SampleMeta(
            f"t{i}.0/0.0", f"t{i}", 0, 8, 4, 1.0, False, 3, 4, 0, version_tokens=[(3, 3), (4, 1)], kept_tokens=kept
        )
        for i, kept in enumerate((0, 3))
    ]
    assert batch_statistics(samples, version=4)["kept_keys_fraction"] == 3 / 8
    masked = mask_group(samples, 4)
    assert [sample.kept_tokens for sample in masked] == [0, 1]


def test_signal_shares_count_groups():
    """One group is all wrong, one is mixed, one is all right with different rewards."""
    outcomes = {"t0": [(0.0, False), (0.0, False)], "t1": [(0.0, False), (1.0, True)], "t2": [(1.0, True), (2.0, True)]}
    samples = [
        SampleMeta(f"{ticket}.0/{k}.0", ticket, 0, 8, 3, reward, False, 1, 1, 0, episode=k, correct=correct)
        for ticket, group in outcomes.items()
        for k, (reward, correct) in enumerate(group)
    ]
    shares = batch_statistics(samples, version=1)["signal"]
    assert shares == {"wrong": 1 / 3, "right": 1 / 3, "equal": 1 / 3, "batch_equal": 0.0}


# ---- Each ModelWorker is sent its own part of a request, and nothing of the others


MESH = Mesh(ParallelLayout(data=2, tensor=2), (0, 1, 2, 3))
REFS = {name: make_ref(name, 4, 2, 1.0, False, 0) for name in "abcd"}


class SentStream:
    """Keeps the payload of each worker."""

    def __init__(self):
        self.payloads: dict[int, bytes] = {}
        self.handler = ""

    def scatter(self, payloads, handler, *args, **kwargs):
        self.payloads, self.handler = payloads, handler
        return asyncio.get_running_loop().create_future()


def sent(send, kind):
    """Return worker -> the request that it decodes."""

    async def body():
        stream: Any = SentStream()
        send(ModelWorkers(stream, {"actor": MESH}, 1.0))
        return stream.payloads

    return {worker: msgspec.msgpack.decode(data, type=kind) for worker, data in asyncio.run(body()).items()}


def test_rank_is_sent_sequences_of_its_data_rank():
    a, b, c, d = REFS.values()
    request = MfcRequest("actor_inf", "actor", "actor_inf", 3, 2, [[[a], [b, c]], [[d], []]], {"lr": 0.5})
    shares = sent(lambda workers: workers.run_mfc(MESH, request), MfcShare)
    assert {worker: share.own for worker, share in shares.items()} == {
        0: [[a], [d]],
        1: [[a], [d]],
        2: [[b, c], []],
        3: [[b, c], []],
    }
    assert {(share.request.step, share.request.args["lr"]) for share in shares.values()} == {(3, 0.5)}
    assert not any(share.request.minibatches for share in shares.values())


def test_worker_is_sent_its_transfers_and_arrays_only():
    requests = {w: TransferRequest([Transfer(0, [w], ["a"], ["tokens"])], [REFS["a"]]) for w in (1, 3)}
    encoded = {worker: encode_message(request) for worker, request in requests.items()}
    assert sent(lambda workers: workers.transfer(encoded), TransferRequest) == requests
    cleared = sent(lambda workers: workers.clear({2: ["a", "b"], 3: ["c"]}, ["values"]), ClearRequest)
    assert cleared == {2: ClearRequest(["a", "b"], ["values"]), 3: ClearRequest(["c"], ["values"])}
    held = sent(lambda workers: workers.hold(5, {2: {"tokens": ["a"]}}), HoldRequest)
    assert held == {worker: HoldRequest(5, {"tokens": ["a"]} if worker == 2 else {}) for worker in range(4)}


def test_too_old_group_is_sent_to_its_owner():
    async def body():
        stream: Any = SentStream()
        ModelWorkers(stream, {"actor": MESH}, 1.0).keep_dropped({1: KeepDroppedRequest("masked", 4, [])})
        return stream

    stream = asyncio.run(body())
    assert stream.handler == "keep_dropped" and stream.payloads.keys() == {1}
    assert msgspec.msgpack.decode(stream.payloads[1], type=KeepDroppedRequest).next_version == 4
