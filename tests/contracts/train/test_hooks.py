"""Hooks of a model function call, on real ranks: order, and offloading of a role."""

import pytest
import torch
from safetensors.torch import load_file

from realsys.cluster.topology import whole_mesh
from realsys.config.allocation import ParallelLayout
from realsys.errors import ModelError
from realsys.train.requests import CopyWeightsRequest, SaveWeightsRequest
from realsys.train.worker.call_handlers import CallOutcome
from realsys.weights.disk.manifest import DiskPlan
from tests.support.training.played_master import REFS, PlayedWorker, Script, call, load, make_config
from tests.support.training.train_ranks import run_ranks

SEEN: list[tuple[str, str]] = []  # calls of a forked rank


class Hooks:
    @staticmethod
    def a(role, request):
        SEEN.append(("a", role.name))

    @staticmethod
    def b(role, request):
        SEEN.append(("b", role.name))


class Probe:
    def run(self, role, request):
        SEEN.append(("run", request.mfc))
        return CallOutcome({"step": float(request.step)}, {"s": 0.5})


def test_hooks_run_in_order_on_every_rank(folders):
    config = make_config(roles={"ref": {"offload": "all"}})
    parts = [REFS[:5], REFS[5:]]
    a, b, probe = (f"{__name__}:{name}" for name in ("Hooks.a", "Hooks.b", "Probe"))

    def body(rank, device):
        script: Script = [
            load("ref", folders, trainable=False),
            call(probe, "ref", parts, before=[b, a], after=[a, b]),
            call("ref_inf", "ref", parts),
            call("ref_inf", "ref", parts, before=["onload"], after=["offload"]),
            call("ref_inf", "ref", parts, before=["onload"], after=["offload"]),
        ]
        _, probed, *inferences = PlayedWorker(script, rank, device, config, holders=[0, 1]).serve()
        return SEEN, probed.stats, probed.scores, [reply.stats for reply in inferences]

    expected = [("b", "ref"), ("a", "ref"), ("run", probe), ("a", "ref"), ("b", "ref")]
    for seen, stats, scores, (plain, offloaded, again) in run_ranks(
        2, body, config, meshes={"ref": whole_mesh(ParallelLayout(data=2))}
    ):
        assert seen == expected
        assert (stats, scores) == ({"step": 0.0}, {"s": 0.5})
        assert plain == offloaded == again and plain["tokens"] == sum(ref.loss_tokens for ref in REFS)


def test_an_offloaded_role_is_written_and_stays_offloaded(folders, tmp_path):
    config = make_config(roles={"ref": {"offload": "all"}})
    script: Script = [
        load("ref", folders, trainable=False),
        call("ref_inf", "ref", [REFS], before=["onload"], after=["offload"]),
        ("copy_weights", CopyWeightsRequest("ref", 1)),
        ("save_weights", SaveWeightsRequest("ref", 1, DiskPlan(str(tmp_path)))),
        call("ref_inf", "ref", [REFS]),
    ]

    def body(rank, device):
        worker = PlayedWorker(script, rank, device, config, holders=[0])
        with pytest.raises(ModelError):
            worker.serve()
        return worker.endpoint.errors

    [[error]] = run_ranks(1, body, config, meshes={"ref": whole_mesh(ParallelLayout())})
    assert "ref is offloaded: call 'onload' first" in error
    files = (folders["ref"] / "model.safetensors", tmp_path / "model-00001-of-00001.safetensors")
    before, after = map(load_file, files)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
