"""The real Prometheus server scrapes a manager, and answers queries about it."""

import asyncio
import json
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager

import pytest

from realsys.errors import WaitTimeout
from tests.support.ledger.manager_trial import drive
from tests.support.polling import poll
from tests.support.processes.ports import lasting_ports
from tests.support.run_logs import append, evaluation, recovered, train

pytestmark = pytest.mark.needs("prometheus")

BOUND_S = 60.0
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: realsys
    static_configs: [{{targets: ["{target}"]}}]
"""
#: fields of a train step as a run logs them -> query
STEP = {
    "accuracy": 0.75,
    "reward_std": 0.5,
    "length_mean": 40.0,
    "train_tokens_per_s": 900.0,
    "stats": {
        "loss": 0.1,
        "kl_ref_mean": 0.2,
        "entropy_mean": 1.5,
        "clip_fraction": 0.3,
        "grad_norm": 2.0,
        "w_ess": 0.9,
    },
    "staleness": {"mean": 1.25, "max": 4, "histogram": {"0": 8, "4": 2}},
    "untrained": {"stale": 0.125, "failed": 0.25},
    "memory": {"rank_bytes": 3e9},
    "gpu": {"mfu": {"actor_train": 0.4}, "peak_bytes": 5e9},
}
QUERIES = {
    "realsys_train_reward_mean": 70.0,
    "realsys_train_accuracy": 0.75,
    "realsys_train_length_mean": 40.0,
    "realsys_train_train_tokens_per_s": 900.0,
    "realsys_train_stats_loss": 0.1,
    "realsys_train_stats_kl_ref_mean": 0.2,
    "realsys_train_stats_entropy_mean": 1.5,
    "realsys_train_stats_clip_fraction": 0.3,
    "realsys_train_stats_grad_norm": 2.0,
    "realsys_train_stats_w_ess": 0.9,
    "realsys_train_staleness_mean": 1.25,
    'realsys_train_staleness_histogram{versions="4"}': 2.0,
    "sum(realsys_train_untrained)": 0.375,
    "realsys_train_memory_rank_bytes": 3e9,
    'realsys_train_gpu_mfu{call="actor_train"}': 0.4,
    'realsys_eval_accuracy{set="eval"}': 0.07,
    "realsys_model_version": 0.0,
}


@contextmanager
def prometheus(folder, target):
    """Run a server that scrapes ``target``; yield its address."""
    (port,) = lasting_ports(1)
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(CONFIG.format(target=target))
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with log.open("w") as output:
        server = subprocess.Popen(["prometheus", *options], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(BOUND_S)


def values(address, query):
    """Return the present values of a query; [] while the server does not answer."""
    try:
        found = _get(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
    except OSError:
        return []
    return [float(series["value"][1]) for series in found["data"]["result"]]


def _get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def test_prometheus_scrapes_every_number(tmp_path):
    def look(address, steps):
        poll(lambda: values(address, "up") == [1.0], "the first scrape", BOUND_S)
        append(steps, train(6), train(7, **STEP), evaluation(7))
        poll(lambda: values(address, "realsys_train_step") == [7.0], "the step", BOUND_S)
        found = {query: values(address, query) for query in QUERIES}
        assert found == {query: [pytest.approx(value)] for query, value in QUERIES.items()}
        meta = _get(f"{address}/api/v1/targets/metadata?metric=realsys_train_staleness_mean")["data"][0]
        assert meta["type"] == "gauge" and meta["help"].endswith("mean (versions)")
        append(steps, recovered(3))
        poll(lambda: values(address, "realsys_train_step") == [], "the roll-back", BOUND_S)

    async def scenario(t):
        await t.ready()
        with prometheus(tmp_path, t.url.removeprefix("http://")) as address:
            try:
                await asyncio.to_thread(look, address, t.steps)
            except WaitTimeout as error:
                log = (tmp_path / "prometheus.log").read_text()
                raise AssertionError(f"{error}\n{log}") from None

    drive(tmp_path, scenario)
