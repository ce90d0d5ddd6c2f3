"""Processes on two hosts: each finds its own address, torch's ranks meet, and HTTP calls arrive."""

import pytest

from realsys.cluster.stream.security import ensure_keys
from realsys.config.paths import TrialPaths, write_config
from realsys.config.schema import Config
from tests.support.processes.netns import Hosts, outputs

pytestmark = pytest.mark.needs("netns")

#: argv: config.json, rank. Rank 0 plays the MasterWorker, too. Prints the host, the advertised address of the torch
#: store, the sum of both ranks, a reply.
RANK = """
import contextlib
import sys
from pathlib import Path
import torch
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
import asyncio
from realsys.cluster.http_client import HttpClient
from realsys.cluster.http_server import HttpServer
from realsys.cluster.network import split_host_port, take_address
from realsys.cluster.names.connect import make_name_store
from realsys.config.paths import read_config
from realsys.config.paths import TrialPaths
from realsys.train.megatron.device import prepare_device
from realsys.cluster.stream.security import keys_for
from realsys.train.megatron.rendezvous import rendezvous
from tests.support.processes.seats import NAMES, announced, make_seat, master_of

rank, path = int(sys.argv[2]), Path(sys.argv[1])
config = take_address(read_config(path))
paths = TrialPaths.of(config)
store = make_name_store(config, paths)

async def hello(request):
    return PlainTextResponse("hello")

async def answers(url):
    async with HttpClient() as http:
        return await http.answers(url, 10.0)

keys = keys_for(config.cluster.host, paths.keys)
master = master_of(store, "1", config.cluster.host, keys) if rank == 0 else contextlib.nullcontext()
with master, rendezvous(make_seat(config, store, rank, 2, keys), prepare_device(rank, 1)):
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
    print(config.cluster.host, split_host_port(announced(store, NAMES.torch_store).address)[0], total.item(), reached)
store.close()
"""
#: argv: config.json. Prints why the process may not register an address.
REFUSED = """
import sys
from pathlib import Path
from realsys.cluster.network import take_address
from realsys.config.paths import read_config
from realsys.errors import ConfigError
try:
    take_address(read_config(Path(sys.argv[1])))
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module", params=["ipv4", "ipv6"])
def hosts(request):
    with Hosts(2, ipv6=request.param == "ipv6") as made:
        yield made


def written(folder, **cluster):
    """Write the configuration of a trial over two nodes; return the file."""
    settings = {"nodes": 2, "connect_timeout_s": 30.0, **cluster}
    config = Config.model_validate({"fileroot": str(folder), "trial": "t", "cluster": settings})
    paths = TrialPaths.of(config)
    paths.root.mkdir(parents=True)
    write_config(config, paths.config)
    ensure_keys(paths.keys)
    return paths.config


@pytest.mark.parametrize("wildcard", [False, True], ids=["subnet", "wildcard"])
def test_ranks_and_http_meet_across_hosts(hosts, tmp_path, wildcard):
    """The own name of each host resolves to 127.0.1.1, which gloo would take without an interface."""
    every = "::" if ":" in hosts.subnet else "0.0.0.0"
    config = str(written(tmp_path, **({"host": every} if wildcard else {"interface": hosts.subnet})))
    ranks = [hosts.start(rank, RANK, config, str(rank)) for rank in range(2)]
    lines = [printed.splitlines()[-1] for printed in outputs(ranks, 90.0)]
    own = [every] * 2 if wildcard else hosts.addresses
    assert lines == [f"{host} {hosts.addresses[0]} 3 True" for host in own]


def test_loopback_is_refused_on_two_hosts(hosts, tmp_path):
    [printed] = outputs([hosts.start(1, REFUSED, str(written(tmp_path)))], 60.0)
    assert "cluster.interface='': other hosts cannot reach 127.0.0.1" in printed
