"""The worker of a server's further part, with a script in place of SGLang's interpreter."""

import pytest

from realsys.cluster.process import INIT_ADDRESS, NODE_RANK, NODES, read_errors
from realsys.config.paths import write_config
from realsys.config.schema import GenerationConfig, ModelConfig, SglangConfig
from tests.support.processes.tester_trial import Trial
from tests.support.serving.qwen_models import write_qwen

pytestmark = pytest.mark.processes

START = "from realsys.workers.generation_part import main; main()"


def test_part_reports_the_end_of_its_engine(tmp_path):
    """Server 3 of two parts: its second part is worker 7. The launcher starts both again."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/arguments\necho no route to host\nexit 3\n")
    python.chmod(0o755)
    trial = Trial(tmp_path)
    generation = GenerationConfig(backend="sglang", sglang=SglangConfig(python=str(python), args={"pp-size": 2}))
    model = ModelConfig(path=str(write_qwen(tmp_path, "1.5B")))
    write_config(trial.config.model_copy(update={"model": model, "generation": generation}), trial.paths.config)
    try:
        span = {NODE_RANK: "1", NODES: "2", INIT_ADDRESS: "10.0.0.5:25003"}
        trial.ends(trial.run(START, 7, **span), 1)
    finally:
        trial.close()
    words = (tmp_path / "arguments").read_text()
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.5:25003" in words
    assert f"--random-seed {trial.config.seed + 3}" in words
    [error] = read_errors(trial.paths.errors)
    assert (error.kind, error.index) == ("generation_part", 7)
    assert error.message == "SGLang exited with code 3; its last lines: no route to host"
