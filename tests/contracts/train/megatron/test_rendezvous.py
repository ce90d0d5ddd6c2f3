"""Ranks that meet: in the right start, past keys of earlier starts, within their time, and not after SIGTERM."""

import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from realsys.cluster.names.connect import make_name_store
from realsys.cluster.network import advertised_host, join_host_port, split_host_port
from realsys.cluster.topology import Mesh
from realsys.config import schema_cluster
from realsys.config.allocation import ParallelLayout
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from realsys.errors import WaitTimeout
from realsys.train.megatron.mesh import form_meshes
from realsys.train.megatron.rendezvous import rendezvous
from tests.support.processes.seats import NAMES, announce, announced, make_seat, master_of
from tests.support.processes.tester_trial import Trial
from tests.support.training.train_ranks import run_ranks

BOUND_S = 60.0
#: far below the time limit of the rendezvous, with room for a busy machine
STOP_BOUND_S = 30.0  # shorter than the timeout of any wait, longer than a slow machine needs


def config_in(folder, **cluster):
    return Config.model_validate({"fileroot": str(folder), "cluster": cluster})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_ranks_meet_through_the_name_store(tmp_path, host):
    config = config_in(tmp_path, host=host)

    def body(rank, device):
        store = make_name_store(config, TrialPaths.of(config))
        with rendezvous(make_seat(config, store, rank, 2), device) as master:
            assert master == given
            mesh = Mesh(ParallelLayout(data=2), (0, 1))
            groups = form_meshes({"actor": mesh}, rank, config.cluster, device)["actor"]
            value = torch.tensor([rank + 1])
            torch.distributed.all_reduce(value, group=groups.data)
            there, _ = split_host_port(announced(store, NAMES.torch_store).address)
            torch.distributed.barrier()
        store.close()
        assert there == advertised_host(host)  # not 0.0.0.0, which no peer can reach
        return int(value.item()), groups.data_rank

    store = make_name_store(config, TrialPaths.of(config))
    with master_of(store, "1") as given:
        assert run_ranks(2, body, config, joined=False) == [(3, 0), (3, 1)]
    store.close()


def test_leftover_keys_lead_no_rank_astray(tmp_path):
    """A start was killed, and its leases still run. At the address of its store a socket accepts, and says nothing."""
    config = config_in(tmp_path)

    def body(rank, device):
        store = make_name_store(config, TrialPaths.of(config))
        if rank == 2:  # the MasterWorker of the new start, which comes late
            leftover.accept()  # rank 1 has tried
            with master_of(store, "2") as address:
                store.wait("met", BOUND_S, "the ranks")
            return address
        with rendezvous(make_seat(config, store, rank, 2), device) as master:
            torch.distributed.barrier()
            if rank == 0:
                store.add("met", "")
        store.close()
        return master

    store = make_name_store(config, TrialPaths.of(config))
    with socket.create_server(("127.0.0.1", 0)) as dead:
        gone = join_host_port(*dead.getsockname())
    with socket.create_server(("127.0.0.1", 0)) as leftover:
        announce(store, NAMES.request_reply, "1", f"tcp://{gone}")
        announce(store, NAMES.torch_store, "1", join_host_port(*leftover.getsockname()))
        first, second, address = run_ranks(3, body, config, joined=False)
    assert first == second == address
    assert announced(store, NAMES.torch_store).incarnation == "2"
    store.close()


def test_living_master_of_a_lost_machine_gets_no_rank(tmp_path):
    """It still answers when the ranks of the next start look for theirs."""
    config = config_in(tmp_path)

    def body(_, device):
        store = make_name_store(config, TrialPaths.of(config))
        seat = replace(make_seat(config, store, 0, 1), start="run.2")
        with master_of(store, "2", start="run.2") as present, master_of(store, "1", start="run.1"):
            late = threading.Timer(1.0, announce, (store, NAMES.request_reply, "2", present, "run.2"))
            late.start()
            with rendezvous(seat, device) as master:
                late.join()
        store.close()
        return master == present

    assert run_ranks(1, body, config, joined=False) == [True]


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "model_worker/1; see their logs"), (1, "model_worker/0 to join start 1 of the trainer")]
)
def test_missing_rank_is_named_in_time(tmp_path, rank, missing, monkeypatch):
    """The limit of the start is not that of a node that is lost."""
    monkeypatch.setattr(schema_cluster.ClusterConfig, "start_timeout_s", 1.5)
    config = config_in(tmp_path)

    def body(_, device):
        store = make_name_store(config, TrialPaths.of(config))
        began = time.monotonic()
        with (
            pytest.raises(WaitTimeout) as raised,
            master_of(store, "1"),
            rendezvous(make_seat(config, store, rank, 2), device),
        ):
            pass
        return str(raised.value), time.monotonic() - began

    [(message, took_s)] = run_ranks(1, body, config, joined=False)
    assert message.startswith(f"waited 1.5 s for {missing}")
    assert took_s < 1.5 + STOP_BOUND_S


CONNECTING = """
    from realsys.train.megatron.device import prepare_device
    from realsys.train.megatron.rendezvous import RankSeat, rendezvous
    seat = RankSeat(1, 2, ctx.config.cluster, ctx.store, ctx.names, ctx.register, None, ctx.on_stop)
    with rendezvous(seat, prepare_device(1, 1)):
        pass
""".strip()


def test_sigterm_ends_a_rank_that_connects(tmp_path):
    """Rank 0 is a socket that accepts and says nothing, as a host does that has just frozen. TCPStore waits in C++."""
    trial = Trial(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(BOUND_S)
        announce(trial.store, trial.names.request_reply, "1", "tcp://127.0.0.1:1")
        announce(trial.store, trial.names.torch_store, "1", join_host_port(*silent.getsockname()))
        try:
            process = trial.start(CONNECTING)
            connections = [silent.accept()[0] for _ in range(2)]  # a plain one, and that of TCPStore
            process.terminate()
            process.wait(STOP_BOUND_S)
            trial.ends(process, 143)
        finally:
            trial.close()
    for connection in connections:
        connection.close()
