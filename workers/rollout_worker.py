"""A RolloutWorker process: many rollouts on one event loop, rewards from its verifiers. Stateless."""

from __future__ import annotations

import uvloop

from realsys.cluster.aio import stop_event
from realsys.cluster.stream.push_pull import Pusher, PushLimits
from realsys.cluster.stream.security import keys_for
from realsys.cluster.topology import receivers_of
from realsys.cluster.worker import WorkerContext, worker_main
from realsys.config.allocation import parse_allocation
from realsys.config.backend_rules import backend_rules
from realsys.data.prompts import PromptDataset
from realsys.data.tokenizer import TextTokenizer
from realsys.generation.client import GenerationClient
from realsys.manager.client import ManagerClient
from realsys.observe.dropped_groups import DroppedWriter
from realsys.reward.open_verifiers import open_verifiers
from realsys.rollout import agents, environments
from realsys.rollout.gateway.gateway import gateway_of
from realsys.rollout.group_player import group_player
from realsys.rollout.resumable_engine import ResumableEngine
from realsys.rollout.stores import DroppedStore, EvaluationStore
from realsys.rollout.worker_loop import RolloutLoop, RolloutLoopParts


async def serve(ctx: WorkerContext) -> None:
    """Build the parts, roll out until asked to stop, close them."""
    config, cluster, names = ctx.config, ctx.config.cluster, ctx.names
    model = ctx.paths.base_model(config)
    tokenizer = TextTokenizer(model)
    prompts = PromptDataset(config, ctx.paths, tokenizer)
    allocation = parse_allocation(config.allocation)
    # Time for a server to restart and to load its weights.
    start_s = backend_rules(config).start_timeout_s() + config.manager.update_timeout_s
    training_s = cluster.request_timeout_s if allocation.lent else 0.0  # in which lent servers sleep
    manager = ManagerClient(
        lambda: ctx.store.wait(names.gserver_manager, cluster.start_timeout_s, "the address of the gserver_manager"),
        ctx.token,
        retry_timeout_s=cluster.connect_timeout_s,
        no_server_retry_timeout_s=training_s + start_s,
        check_alive=ctx.check_alive,
    )
    heads = allocation.actor.data
    pusher = Pusher(
        lambda dp: ctx.store.wait(names.pull(dp), cluster.start_timeout_s, f"the push-pull address of DP head {dp}"),
        receivers_of(ctx.index, config.rollout.workers, heads),
        ctx.name,
        keys=keys_for(cluster.host, ctx.paths.keys),
        # A head is away while the trainer restarts. A group that waits costs nothing; one that is given up costs an
        # attempt.
        limits=PushLimits(push_timeout_s=cluster.request_timeout_s),
        check_alive=ctx.check_alive,
    )
    generation = GenerationClient.of(config.generation, ctx.token, ctx.check_alive)
    verifiers = await open_verifiers(ctx)
    agent = agents.AgentsOfRows(config, tokenizer, environments.build(config, tokenizer, verifiers))
    gateway = gateway_of(config, tokenizer, ctx.index, ctx.check_alive)
    ctx.count(lambda: {"bad_messages": pusher.bad_messages, **gateway.counts()})
    engine = ResumableEngine(manager, generation)
    dropped = DroppedStore(DroppedWriter(ctx.paths.dropped, ctx.name, config.record.dropped_groups))
    player = group_player(config, agent, engine, tokenizer.eos_token_ids, gateway, dropped)
    evaluations = EvaluationStore(ctx.paths.evaluations, tokenizer, ctx.incarnation)
    loop = RolloutLoop(
        RolloutLoopParts(manager, player, prompts, pusher, verifiers, evaluations),
        ctx.name,
        incarnation=ctx.incarnation,
        max_groups=config.rollout.max_concurrent,
        group_size=config.rollout.sampled_episodes,
        touch_s=config.manager.rollout_lease_s / 4,
    )
    try:
        ctx.set_state("rolling out")
        await loop.run(stop_event(ctx))
    finally:
        ctx.store.interrupt()  # the event loop waits for its threads, and one may wait for an address
        await agent.close()
        await gateway.close()
        await verifiers.close()
        await pusher.close()
        await generation.close()
        await manager.close()


def main() -> None:
    worker_main("rollout_worker", lambda ctx: uvloop.run(serve(ctx)))


if __name__ == "__main__":
    main()
