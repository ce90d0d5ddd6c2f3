"""Distillation from the real SGLang or vLLM, on a CPU: its scores of given tokens, and a student that learns."""

import asyncio

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from realsys.config.fields import arguments_of
from realsys.config.schema import TinyModelConfig
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer
from realsys.errors import StuckError
from realsys.rollout.agents.distill import DistillArguments, Teacher
from tests.support.jobs.jobs import run_arith
from tests.support.serving.generation_models import reference_logprobs
from tests.support.serving.sglang_server import needs_sglang, needs_vllm, sglang_engine, vllm_engine

pytestmark = pytest.mark.system
CONTEXT = 512
TOP_K = 6
ROUTES = {"sglang": "/generate", "vllm": "/v1"}
PRESETS = {"sglang": "distill_topk_endpoint", "vllm": "distill_endpoint"}


@pytest.fixture(scope="module", params=sorted(ROUTES))
def teacher(request, tmp_path_factory):
    """Folder and address of a teacher, and the preset that learns from it."""
    (needs_sglang if request.param == "sglang" else needs_vllm)()
    folder = tmp_path_factory.mktemp("teacher")
    write_char_tokenizer(folder)
    make_tiny_model(TinyModelConfig(), folder, seed=7)
    # with a tokenizer, as a server of its own has one
    if request.param == "sglang":
        engine = sglang_engine(
            folder, f"generation.sglang.args={{context-length: {CONTEXT}, skip-tokenizer-init: false}}"
        )
    else:
        options = f"args={{max-model-len: {CONTEXT}, skip-tokenizer-init: false}}"
        engine = vllm_engine(folder, f"generation.backend_args.{options}")
    engine.start()
    try:
        yield folder, engine._traffic.run.child.url + ROUTES[request.param], PRESETS[request.param]
    finally:
        engine.close()


@pytest.mark.timeout(700)
def test_scores_are_the_log_probs_of_the_model(teacher):
    folder, url, _ = teacher
    tokenizer, model = TextTokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt, completion = (
        tokenizer.encode_prompt("a1b2=", chat=False),
        [*tokenizer.encode_text("a0+1=1;b1+2=3"), tokenizer.vocab_size - 1],
    )

    async def scores():
        given = arguments_of(DistillArguments, {"teachers": {"only": url}}, "")
        only = Teacher("only", given, tokenizer, CONTEXT, TOP_K)
        try:
            calls = [only.score(prompt + completion[:size], len(prompt)) for size in (1, 5, len(completion))]
            return await asyncio.wait_for(asyncio.gather(*calls), 300)
        finally:
            await only.close()

    expected = reference_logprobs(model, prompt, completion, 1.0).detach()
    of_tokens = np.array([float(expected[place, token]) for place, token in enumerate(completion)])
    for found, (tokens, logprobs) in asyncio.run(scores()):
        count = len(found)
        np.testing.assert_allclose(found, of_tokens[:count], atol=1e-3)
        assert tokens.shape == logprobs.shape == (count, TOP_K)
        np.testing.assert_allclose(logprobs, np.sort(expected[:count], 1)[:, : -TOP_K - 1 : -1], atol=1e-3)
        np.testing.assert_allclose(logprobs, np.take_along_axis(np.asarray(expected[:count]), tokens, 1), atol=1e-3)


@pytest.mark.timeout(700)
def test_other_tokenizer_is_refused_by_its_texts(teacher, tmp_path):
    write_char_tokenizer(tmp_path, chat=True)

    async def scores():
        own = arguments_of(DistillArguments, {"teachers": {"only": teacher[1]}}, "")
        only = Teacher("only", own, TextTokenizer(tmp_path), CONTEXT)
        try:
            await asyncio.wait_for(only.score(list(range(4, 20)), 8), 300)
        finally:
            await only.close()

    with pytest.raises(StuckError, match="another vocabulary: token"):
        asyncio.run(scores())


@pytest.mark.timeout(700)
def test_student_approaches_its_teacher(teacher, tmp_path):
    _, url, preset = teacher
    settings = [f"algorithm={preset}", f"rollout.agent_args.teachers.only={url}", "train.total_steps=5"]
    rate = ["train.optimizer.lr=1e-3", "train.optimizer.warmup_fraction=0", "asynchronous.max_staleness=0"]
    job = run_arith(tmp_path, "distill", *settings, *rate, timeout_s=600).completed()
    divergence = [step["metrics"]["teacher_kl"] for step in job.records("train")]
    assert len(divergence) == 5 and divergence[-1] < divergence[0] / 2, divergence


@pytest.mark.timeout(400)
def test_top_k_of_a_role_teaches_more_than_samples(tmp_path):
    """The exact gradient over the teacher's top tokens against its estimate: same steps, same rate."""
    write_char_tokenizer(tmp_path / "teacher")
    make_tiny_model(TinyModelConfig(), tmp_path / "teacher", seed=7)
    settings = [f"roles.ref.path={tmp_path / 'teacher'}", "allocation=sglang.d1+actor.d1+ref.d1", "warmup.steps=5"]
    settings += ["train.optimizer.lr=1e-3", "train.optimizer.warmup_fraction=0", "asynchronous.max_staleness=0"]
    settings += ["evaluation.problems=0", "train.total_steps=4"]
    sampled, top_k = (
        [
            step["stats"]
            for step in run_arith(tmp_path, name, f"algorithm={name}", *settings).completed().records("train")
        ]
        for name in ("distill", "distill_topk")
    )
    losses = [step["loss"] for step in top_k]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, losses
    ours, theirs = ([step["advantages/kl_ref_mean"] for step in steps] for steps in (top_k, sampled))
    assert all(losses[step] < ours[step] for step in (0, 1)), "the divergence over top tokens is a lower bound"
    assert ours[0] == pytest.approx(theirs[0], rel=1e-3), "the first batch is the same"
    assert sum(ours[1:]) < sum(theirs[1:]), (ours, theirs)
