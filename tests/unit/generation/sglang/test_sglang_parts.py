"""SGLang's command line and environment, and the bookkeeping of requests: pure parts."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from realsys.config.backend_rules import SGLANG, sglang_options
from realsys.config.schema import SamplingConfig, SglangConfig
from realsys.errors import ConfigError, GenerationError
from realsys.generation.backend import ONE_NODE
from realsys.generation.child.engine import needs_tokenizer
from realsys.generation.child.requests import EVENT_TOKENS, SplitRequest, _record_phases
from realsys.generation.protocol import CONTINUES, SamplingParams
from realsys.generation.sampling_rules import completion_seed, read_tokenizer
from realsys.generation.sglang.api import Reply, _Stream
from realsys.generation.sglang.backend import _launch
from realsys.generation.sglang.process import CPU_SUPPORT, Launch
from tests.support.processes.config_trees import changed
from tests.support.serving.generation_models import make_tokenizer
from tests.support.timelines.made_up import recording

GPU = Launch(
    python="/venv/bin/python",
    model_path=Path("/models/m"),
    dtype="bfloat16",
    fp32_head=False,
    context=1000,
    tensor=2,
    seed=7,
    threads=1,
    gpus=True,
    options={},
)


def flags_of(launch: Launch) -> dict[str, str | None]:
    """Option -> value; None for a flag alone."""
    words = launch.command(1234)[3:]
    pairs = itertools.zip_longest(words, words[1:])
    return {a: b if b and not b.startswith("--") else None for a, b in pairs if a.startswith("--")}


def test_command_on_a_gpu():
    assert GPU.command(1234)[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    assert flags_of(GPU) == {
        "--dtype": "bfloat16",
        "--context-length": "1016",  # sixteen more than ours, so that only our own check refuses
        "--tp-size": "2",
        "--random-seed": "7",
        "--log-level": "warning",
        "--skip-tokenizer-init": None,
        "--incremental-streaming-output": None,
        "--enable-priority-scheduling": None,
        "--disable-priority-preemption": None,
        "--model-path": "/models/m",
        "--host": "127.0.0.1",
        "--port": "1234",
    }


def test_logits_in_fp32_are_a_flag():
    assert "--enable-fp32-lm-head" in flags_of(replace(GPU, fp32_head=True))


@pytest.mark.parametrize(("server", "lent"), [(0, False), (1, True)])
def test_server_that_takes_turns_saves_memory(server, lent):
    config = changed("generation.backend=sglang", "allocation=serve.d1+serve.d1|d1")
    launch = _launch(Path("/m"), config, server, ONE_NODE, None)
    assert ("--enable-memory-saver" in flags_of(launch), launch.shared) == (lent, lent)


def test_command_on_a_cpu():
    cpu = replace(GPU, gpus=False)
    assert cpu.command(1)[2] == "realsys_sglang_cpu.server"
    flags = flags_of(cpu)
    assert (flags["--device"], flags["--attention-backend"]) == ("cpu", "torch_native")
    assert flags["--max-total-tokens"] == "65536"
    assert flags_of(replace(cpu, context=40_000))["--max-total-tokens"] == str(2 * 40_016)


def test_sglang_with_tokenizer_does_not_skip_it():
    assert "--skip-tokenizer-init" not in flags_of(replace(GPU, tokenizer=True))


@pytest.mark.parametrize(
    ("sampling", "options", "needed"),
    [
        ({}, {}, False),  # it would only make text that no caller reads
        ({"stop": ["end"]}, {}, True),
        ({"min_new_tokens": 1}, {}, True),
        ({}, {"skip-tokenizer-init": False}, True),
        ({"stop": ["end"]}, {"skip-tokenizer-init": True}, False),
    ],
)
def test_tokenizer_is_loaded_only_if_needed(sampling, options, needed):
    assert needs_tokenizer(SamplingConfig(**sampling), options) is needed


@pytest.mark.parametrize(("policy", "ordered"), [("lof", True), ("lpm", False)])
def test_priorities_are_left_out_for_policies_without_them(policy, ordered):
    """SGLang does not start with both."""
    flags = flags_of(replace(GPU, options={"schedule-policy": policy}))
    assert ("--enable-priority-scheduling" in flags, "--disable-priority-preemption" in flags) == (ordered, ordered)


def test_options_of_the_user_replace_ours():
    given = {"tp-size": 4, "enable-metrics": True, "log-level": False, "random-seed": None, "cuda-graph-bs": [1, 2]}
    command = replace(GPU, options=given).command(1)
    text = " ".join(command)
    assert "--tp-size 4" in text and "--tp-size 2" not in text
    assert "--enable-metrics --cuda-graph-bs 1 2" in text
    assert "--log-level" not in text and "--random-seed" not in text


def test_options_accept_underscores_and_dashes():
    settings = SglangConfig(args={"max_total_tokens": 5, "--mem-fraction-static": 0.7})
    assert sglang_options(settings) == {"max-total-tokens": 5, "mem-fraction-static": 0.7}


def test_environment_is_that_of_another_interpreter():
    inherited = {"PATH": "/bin", "PYTHONPATH": "/realsys", "VIRTUAL_ENV": "/venv", "CUDA_VISIBLE_DEVICES": "1,2"}
    env = GPU.environment(inherited)
    assert (env["PATH"], env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"]) == ("/bin", "1,2", "1")
    assert "PYTHONPATH" not in env and "VIRTUAL_ENV" not in env
    assert env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    cpu = replace(GPU, gpus=False).environment(inherited)
    assert (cpu["PYTHONPATH"], cpu["CUDA_VISIBLE_DEVICES"]) == (str(CPU_SUPPORT), "")
    assert (CPU_SUPPORT / "realsys_sglang_cpu" / "server.py").is_file()
    files = [next(Path(path).glob("realsys_*.py")).name for path in receiving(GPU)["PYTHONPATH"].split(os.pathsep)]
    assert files == ["realsys_sglang.py", "realsys_group.py"]


def receiving(launch):
    return replace(launch, receives=True).environment({})


def test_interpreter_is_chosen_in_order(tmp_path):
    package = replace(SGLANG, venv=tmp_path)

    def chosen(python: str = "") -> str:
        return package.interpreter(python, gpus=False)

    assert chosen("/other/python") == "/other/python"
    assert chosen() == sys.executable
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    assert chosen() == str(python)
    # Its torch is for CPUs.
    assert package.interpreter("", gpus=True) == sys.executable


def test_missing_sglang_is_named_with_what_to_do(tmp_path):
    package = replace(SGLANG, venv=tmp_path)
    with pytest.raises(ConfigError, match="make sglang-cpu"):
        package.check("", gpus=False)
    install = f"`pip install sglang=={SGLANG.version}`$"
    with pytest.raises(ConfigError, match=f"of a virtual environment of its own with {install}"):
        package.check("", gpus=True)


def test_tested_version_is_the_pinned_one():
    pins = (CPU_SUPPORT / "no-deps.txt").read_text("utf-8").splitlines()
    assert f"sglang=={SGLANG.version}" in pins


# ---- requests


def request(**params: object) -> SplitRequest:
    sampling = SamplingParams(**{"max_new_tokens": 6, **params})
    return SplitRequest.of("r", np.asarray([1, 2], np.int32), sampling, (96,), 5)


def reply(tokens: list[int], kind: str = "length", spans: list[tuple[str, int, int]] | None = None) -> Reply:
    """Decode a reply from JSON."""
    meta = {
        "id": "x",
        "finish_reason": {"type": kind, "matched": tokens[-1] if kind == "stop" else None, "length": 1},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "e2e_latency": 0.1,
    }
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return msgspec.json.decode(msgspec.json.encode({"output_ids": tokens, "meta_info": meta}), type=Reply)


def test_pieces_say_what_is_wanted_in_sglangs_words():
    one = request(n=2, top_p=0.5, min_new_tokens=3, stop=("x",))
    first, second = one.pieces(itertools.count())
    assert first.input_ids == [1, 2]
    seeds = [piece.sampling_params.pop("sampling_seed") for piece in (first, second)]
    assert seeds == [completion_seed(5, 0), completion_seed(5, 1)]
    assert first.sampling_params == {
        "top_p": 0.5,
        "max_new_tokens": 6,
        "stream_interval": EVENT_TOKENS,
        "min_new_tokens": 3,
        "stop": ["x"],
        "stop_token_ids": [96],
        "no_stop_trim": True,
    }
    assert first.rid != second.rid and len(first.rid) == len(second.rid)


def test_snapshots_have_each_token_once():
    """Each takes the new tokens only: a completion may be long, and there is a snapshot every two seconds."""
    one = request(n=2, max_new_tokens=40_000)
    one.sent_at, heard = 3, reply(list(range(90)))
    one.hear(1, heard)
    assert one.snapshot(moved=0).completions[1].tokens.tolist() == list(range(90))
    for each in (heard.output_ids, heard.meta_info.output_token_logprobs):
        each[:80] = [None] * 80  # not read again
    one.hear(1, msgspec.structs.replace(heard, output_ids=[*heard.output_ids, 91, 92]))
    heard.meta_info.output_token_logprobs += [(-1.0, 91, None), (-1.5, 92, None)]
    first, second = one.snapshot(moved=0).completions
    assert first.tokens.tolist() == [] and second.tokens.tolist() == [*range(90), 91, 92]
    assert second.logprobs.tolist() == [-0.5] * 90 + [-1.0, -1.5] and second.segments == [(3, 92)]


def test_rest_of_an_interrupted_completion_is_before_new_prompts():
    one = request(n=2)
    assert [piece.priority for piece in one.pieces(itertools.count())] == [0, 0]
    one.recalled = True
    one.take([reply([3, 4], "abort"), reply([], "abort")], 1)
    assert [piece.priority for piece in one.pieces(itertools.count())] == [CONTINUES, CONTINUES]
    assert request(priority=CONTINUES).pieces(itertools.count())[0].priority == CONTINUES


def test_seeds_of_answers_differ_and_fit_sglang():
    seeds = {completion_seed(seed, answer) for seed in (0, 1, 2**63 - 1) for answer in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_spans_become_segments():
    one = request()
    one.take([reply([3, 4, 96], "stop", [("default", 0, 2), ("7", 2, 3)])], None)
    [result] = one.results()
    assert result.segments == [(-1, 2), (7, 1)]
    assert (result.finish_reason, result.matched) == ("stop", 96)
    assert result.tokens.tolist() == [3, 4, 96]
    assert not one.open


def test_interrupted_completion_continues_from_its_tokens():
    one = request(min_new_tokens=3)
    one.recalled = True
    one.take([reply([3, 4], "abort")], 1)
    [piece] = one.pieces(itertools.count())
    assert piece.input_ids == [1, 2, 3, 4]
    assert (piece.sampling_params["max_new_tokens"], piece.sampling_params["min_new_tokens"]) == (4, 1)
    one.recalled = True
    one.take([reply([5], "abort")], 1)
    one.take([reply([6, 7, 8], "length")], 2)
    [result] = one.results()
    assert result.segments == [(1, 3), (2, 3)]
    assert result.finish_reason == "length"


def test_completion_interrupted_at_its_limit_has_finished():
    one = request()
    one.recalled = True
    one.take([reply([3, 4, 5, 6, 7, 8], "abort")], 1)
    assert one.results()[0].finish_reason == "length"


@pytest.mark.parametrize(("aborted", "recalled"), [(True, True), (False, False)])
def test_abort_ends_the_completion(aborted, recalled):
    one = request()
    one.aborted, one.recalled = aborted, recalled
    one.take([reply([3], "abort")], 1)
    assert one.results()[0].finish_reason == "abort"
    assert not one.open


@pytest.mark.parametrize(
    ("prefix", "earlier", "later", "kept", "matched"),
    [
        (0, "ab", "cxyz", "abc", "bc"),  # began in an earlier piece
        (2, "", "cxyz", "c", "bc"),  # began before this request
        (0, "", "cxyz", "cxyz", None),  # the prompt is no part of the answer
        (0, "a", "xyz", "axyz", None),
    ],
)
def test_stop_string_across_pieces_ends_the_completion(tmp_path, prefix, earlier, later, kept, matched):
    def ids(text: str) -> list[int]:
        return [ord(letter) - ord("0") for letter in text]

    make_tokenizer(tmp_path)
    sampling = SamplingParams(max_new_tokens=8, stop=("bc",), answer_prefix=prefix)
    one = SplitRequest.of("r", np.asarray(ids("ab"), np.int32), sampling, (), 5, read_tokenizer(tmp_path))
    if earlier:
        one.recalled = True
        one.take([reply(ids(earlier), "abort")], 1)
        one.recalled = False
    one.take([reply(ids(later), "length")], 2)
    [result] = one.results()
    assert result.tokens.tolist() == ids(kept)
    assert len(result.logprobs) == len(kept) == sum(count for _, count in result.segments)
    assert (result.finish_reason, result.matched) == (("stop", matched) if matched else ("length", None))


def test_stop_string_across_pieces_respects_min_new_tokens(tmp_path):
    make_tokenizer(tmp_path)
    sampling = SamplingParams(max_new_tokens=30, min_new_tokens=12, stop=("bc",))
    one = SplitRequest.of("r", np.asarray([1], np.int32), sampling, (), 5, read_tokenizer(tmp_path))
    b, c, x = (ord(letter) - ord("0") for letter in "bcx")
    one.recalled = True
    one.take([reply([b], "abort")], 1)
    one.take([reply([c] + [x] * 20, "length")], 1)
    assert len(one.results()[0].tokens) == 22


def test_tokens_without_their_versions_are_an_error():
    with pytest.raises(GenerationError, match="without weight_versions") as error:
        request().take([reply([3, 4])], None)
    assert error.value.retryable
    with pytest.raises(GenerationError, match=r"2 tokens but 2 log-probs and versions of \[1\]"):
        request().take([reply([3, 4], "length", [("1", 0, 1)])], None)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"e2e_latency": 3.0}, [("decode", 3.0)]),
        (
            {"e2e_latency": 3.0, "queue_time": 1.0, "forward_entry_time": 50.0, "prefill_finished_time": 50.5},
            [("queue", 1.0), ("prefill", 0.5), ("decode", 1.5)],
        ),
        ({"e2e_latency": 3.0, "queue_time": 9.0}, [("queue", 3.0), ("decode", 0.0)]),
    ],
)
def test_times_of_sglang_become_spans(tmp_path, times, expected):
    """SGLang tells the first of them always, the others with its --enable-metrics only."""
    meta = {"finish_reason": {"type": "stop"}, **times}
    reply = msgspec.convert({"output_ids": [1, 2], "meta_info": meta}, Reply)
    with recording(tmp_path) as spans:
        _record_phases("r#0", 1_000_000_000, reply, 4)
    assert [(span.name, round(span.seconds, 3)) for span in spans()] == expected
    assert spans()[-1].facts == {"version": 4, "tokens": 2}


# ---- streams


def event(ids, end, index=0, finish=None, logprobs=None):
    """A line of SGLang's stream. The log-prob of token t is -t."""
    meta = {"completion_tokens": end, "finish_reason": finish}
    meta["output_token_logprobs"] = [[-token, token, None] for token in (ids if logprobs is None else logprobs)]
    return b"data: " + json.dumps({"output_ids": ids, "index": index, "meta_info": meta}).encode()


def test_stream_joins_the_tokens_of_its_events():
    """Events may have all tokens again, or only some of them."""
    heard = []
    stream = _Stream(2, lambda index, reply: heard.append((index, list(reply.output_ids))))
    lines = [
        event([3], 1),
        event([7, 8], 2, 1),
        b"",
        event([3, 4], 2),
        event([5], 3),
        event([8], 2, 1, logprobs=[7, 8]),
    ]
    for line in [*lines, event([], 3, finish={"type": "length"}), b"data: [DONE]"]:
        stream.take(line)
    first, second = stream.replies
    assert (first.output_ids, first.logprobs(), first.finish.type) == ([3, 4, 5], [-3.0, -4.0, -5.0], "length")
    assert (second.output_ids, second.logprobs()) == ([7, 8], [-7.0, -8.0])
    assert heard == [(0, [3]), (1, [7, 8]), (0, [3, 4]), (0, [3, 4, 5]), (1, [7, 8]), (0, [3, 4, 5])]
    with pytest.raises(GenerationError, match="without an end"):
        assert second.finish


@pytest.mark.parametrize(
    ("line", "message", "retryable"),
    [
        (event([5], 3), "does not follow its first 1 tokens", True),
        (event([4, 5], 2), "does not follow", True),
        (event([4], 2, logprobs=[3, 4, 4]), "does not follow", True),
        (event([4], 2, index=1), "piece 1, which was not sent", True),
        (event([4], 2, finish={"type": "abort", "message": "bad grammar", "status_code": 400}), "bad grammar", False),
        (event([4], 2, finish={"type": "abort", "message": "overload", "status_code": 503}), "overload", True),
        (b'data: {"error": {"message": "too long", "code": 400}}', "too long", False),
        (b'data: {"index": 0}', "an event without tokens", True),
        (b"data: {", "reply cannot be read", True),
    ],
)
def test_stream_refuses_what_does_not_continue_it(line, message, retryable):
    stream = _Stream(1, lambda index, reply: None)
    stream.take(event([3], 1))
    with pytest.raises(GenerationError, match=message) as refused:
        stream.take(line)
    assert refused.value.retryable == retryable
