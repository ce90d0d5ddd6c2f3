"""Processes on two hosts: each finds its own address, torch's ranks meet, and HTTP calls arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from realsys.config.dump import write_config
from realsys.config.paths import TrialPaths
from realsys.config.schema import Config
from tests.support.processes.netns import TwoHosts, missing, outputs

#: argv: config.json, rank. Prints the host, the advertised address of the torch store, the sum of both ranks, a reply.
RANK = """
import sys
from pathlib import Path
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
import asyncio
from realsys.cluster.http.http_client import HttpClient
from realsys.cluster.http.http_server import HttpServer
from realsys.cluster.network import take_address
from realsys.cluster.store.connect import make_name_store
from realsys.config.dump import read_config
from realsys.config.paths import TrialPaths
from realsys.train.megatron.device import prepare_device
from realsys.train.megatron.mesh import rendezvous

rank, path = int(sys.argv[2]), Path(sys.argv[1])
config = take_address(read_config(path))
paths = TrialPaths.of(config)
store = make_name_store(config, paths)

async def hello(request):
    return PlainTextResponse("hello")

async def answers(url):
    async with HttpClient() as http:
        return await http.answers(url, 10.0)

with rendezvous(store, "t/torch", rank, 2, config.cluster, prepare_device(rank, 1)):
    total = torch.tensor([rank + 1])
    torch.distributed.all_reduce(total)
    if rank == 0:
        server = HttpServer(Starlette(routes=[Route("/", hello)]), config.cluster.host)
        server.start()
        store.add("t/http", server.url)
    reached = asyncio.run(answers(store.wait("t/http", 20.0, "the server")))
    torch.distributed.barrier()
    if rank == 0:
        server.close()
    print(config.cluster.host, store.get("t/torch").rpartition(":")[0], total.item(), reached)
store.close()
"""
#: argv: config.json. Prints why the process may not register an address.
REFUSED = """
import sys
from pathlib import Path
from realsys.cluster.network import take_address
from realsys.config.dump import read_config
from realsys.errors import ConfigError
try:
    take_address(read_config(Path(sys.argv[1])))
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if problem := missing():
        pytest.skip(problem)
    with TwoHosts() as made:
        yield made


def written(folder: Path, **cluster: object) -> Path:
    """Write the configuration of a trial over two nodes; return the file."""
    settings = {"nodes": 2, "connect_timeout_s": 30.0, **cluster}
    config = Config.model_validate({"fileroot": str(folder), "trial": "t", "cluster": settings})
    paths = TrialPaths.of(config)
    paths.root.mkdir(parents=True)
    write_config(config, paths.config)
    return paths.config


@pytest.mark.parametrize("cluster", [{"interface": "10.77.5.0/24"}, {"host": "0.0.0.0"}], ids=["subnet", "wildcard"])
def test_ranks_and_http_meet_across_hosts(hosts: TwoHosts, tmp_path: Path, cluster: dict[str, str]) -> None:
    """The own name of each host resolves to 127.0.1.1, which gloo would take without an interface."""
    config = str(written(tmp_path, **cluster))
    ranks = [hosts.start(rank, RANK, config, str(rank)) for rank in range(2)]
    lines = [printed.splitlines()[-1] for printed in outputs(ranks, 90.0)]
    own = hosts.addresses if "interface" in cluster else ["0.0.0.0"] * 2
    assert lines == [f"{host} {hosts.addresses[0]} 3 True" for host in own]


def test_loopback_is_refused_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    [printed] = outputs([hosts.start(1, REFUSED, str(written(tmp_path)))], 60.0)
    assert "cluster.interface='': other hosts cannot reach 127.0.0.1" in printed
