"""Rules over several fields, the file system and the machine: each bad case names the field to change."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realsys.algorithm import dataflows
from realsys.config.allocation import parse_allocation
from realsys.config.dataflow import Dataflow, FunctionCall, dataflow_of
from realsys.config.machine import Machine
from realsys.config.rules import check, check_made_model, check_models
from realsys.errors import ConfigError, ModelError
from realsys.generation.backend import Backend
from tests.support.processes.config_trees import changed

CPU = Machine(cpus=8, memory_bytes=64 << 30)
GPU1 = Machine(cpus=16, memory_bytes=64 << 30, gpus=("0",), torch_has_cuda=True)
GPU8 = Machine(cpus=64, memory_bytes=512 << 30, gpus=tuple("01234567"), torch_has_cuda=True)
CRITIC = ["train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false"]
SGLANG = ["generation.backend=sglang", "generation.sglang.python=/bin/true"]

SFT = ["train.ppo.algorithm=sft", "warmup.steps=0"]
GROUP_MEAN = ["train.ppo.advantage.mean=group"]
DISTRIBUTED = "train.distributed_optimizer=true"
TEACHER = ["train.ppo.kl.coef=1", "allocation=sglang.d1+d1"]
TOP_K = ["train.ppo.loss=distill", "train.ppo.loss_args.top_k=4", "train.ppo.use_decoupled_loss=false"]
TRUNCATE = ["train.ppo.behav_imp_weight_mode=truncate"]
ETCD = ["cluster.name_store.backend=etcd", "cluster.name_store.start=true"]
WRONG = [
    (["allocation=sglang.d1m2+d1"], "allocation", "embedded engine must have m1"),
    (["data.kind=arith", "data.arith.second_tries=0.5"], "data.arith.feedback", "must be set"),
    (["allocation=sglang.d60+d8"], "allocation", "too many for 8 CPU cores"),
    (["allocation=d2"], "allocation", "must have exactly one inference part (serve.), joined by '+'"),
    (["allocation=tgi.d1+d1"], "allocation", "exactly one inference part"),
    ([*SFT, "allocation=d2", "train.loop=evaluate"], "allocation", "exactly one inference part"),
    ([*SFT, "allocation=d2"], "evaluation.problems", "allocation=d2 has none: set it to 0, or add them"),
    ([*SFT, "allocation=d2", "evaluation.problems=0", "evaluation.sets={x: {problems: 3}}"], "sets.x.problems", "to 0"),
    (["allocation=sglang.d1+m8"], "allocation", "num_attention_heads 4 of the tiny model does not divide by m8"),
    (["allocation=sglang.d1+p4"], "allocation", "2 layers of the tiny model are fewer than p4"),
    (["model.tiny.num_key_value_heads=3"], "model.tiny.num_key_value_heads", "must divide"),
    (["model.tiny.head_dim=33"], "model.tiny.head_dim", "must be even"),
    (["train.batch_groups=1", "train.ppo.minibatches=16"], "train.batch_groups", "fewer than 16 minibatches"),
    (["warmup.batch=1", "allocation=sglang.d1+d2"], "warmup.batch", "2 data-parallel ranks"),
    (["generation.embedded.context_length=247"], "generation.embedded.context_length", "= 248"),
    (["train.microbatch_tokens=100"], "train.microbatch_tokens", "= 248"),
    (["train.inference_microbatch_tokens=300"], "inference_microbatch_tokens", "train.microbatch_tokens (8192)"),
    (["generation.sampling.min_new_tokens=201"], "generation.sampling.min_new_tokens", "max_new_tokens (200)"),
    (["model.tiny.max_position_embeddings=100"], "generation.sampling.max_new_tokens", "100 positions"),
    (["rollout.max_concurrent=1000"], "rollout.max_concurrent", "generation.embedded.max_queued"),
    (["rollout.group_size=1"], "rollout.group_size", "at least 2 episodes"),
    (["train.ppo.c_clip=0.5"], "train.ppo.c_clip", "above 1"),
    (["train.ppo.advantage.leave_one_out=true", "train.ppo.advantage.mean=batch"], "leave_one_out", "mean=group"),
    (["train.ppo.advantage.recentre=true", "train.ppo.advantage.mean=batch"], "recentre", "advantage.mean=group"),
    (["rollout.reward.correct=0"], "rollout.reward.correct", "above rollout.reward.wrong"),
    (["data.arith.max_operands=3", "data.arith.min_operands=5"], "data.arith.max_operands", "min_operands (5)"),
    (["evaluation.problems=2000"], "evaluation.problems", "eval_size=1024"),
    (["data.arith.demo_size=10"], "data.arith.demo_size", "warmup.batch needs 64"),
    (["train.total_epochs=1", "data.arith.train_size=10"], "data.arith.train_size", "less than one batch"),
    (["cluster.lease_s=3"], "cluster.lease_s", "twice cluster.heartbeat_s"),
    (["cluster.ports=20000-"], "cluster.ports", "must be low-high"),
    (["cluster.ports=20000-19999"], "cluster.ports", "the lower one first"),
    (["cluster.ports=0-99999"], "cluster.ports", "between 1 and 65535"),
    (["cluster.name_store.backend=etcd", "cluster.name_store.address=here"], "cluster.name_store.address", "host:port"),
    ([ETCD[0], "cluster.name_store.address='a:1, b:2'"], "name_store.address", "several with commas between them"),
    ([*ETCD, "cluster.name_store.address=a:1,b:2"], "cluster.name_store.start", "name one address only"),
    (["cluster.gpus_per_node=8"], "cluster.gpus_per_node", "=8: describes other machines: set cluster.nodes too"),
    (["fileroot=/dev/null/runs"], "fileroot", "cannot write"),
    (["data.kind=arith", "data.train=/dev"], "data.train", "data.kind=arith makes its own data"),
    (["data.kind=arith", "data.eval=reasoning_gym:chain_sum"], "data.eval", "data.kind=arith makes its own data"),
    (["data.kind=jsonl"], "data.train", "JSONL"),
    (["data.kind=jsonl", "data.train=/no/such.jsonl"], "data.train", "not a readable file"),
    (["data.kind=jsonl", "data.train=/dev", "data.layout=gsm"], "data.layout", "unknown layout"),
    (["data.kind=jsonl", "data.train=/dev", "data.layout_args={a: 1}"], "data.layout", "name the layout"),
    (["data.kind=jsonl", "data.train=/dev", "data.layout=gsm8k", "data.layout_args={a: 1}"], "data.layout_args", "fit"),
    (["data.kind=jsonl", "data.train=/dev", "data.mixture=[{path: /dev}]"], "data.train", "must be empty"),
    (["data.kind=jsonl", "data.mixture=[{path: /no/such}]"], "data.mixture[0].path", "not a readable file"),
    (["model.path=/no/such/model"], "model.path", "hf download ORGANISATION"),
    ([*SGLANG, "generation.sglang.python=/no/python"], "generation.sglang.python", "not an executable"),
    ([*SGLANG, "generation.sglang.args={host: 0.0.0.0}"], "generation.sglang.args.host", "set by realsys"),
    ([*SGLANG, "generation.sglang.args={node_rank: 1}"], "generation.sglang.args.node_rank", "set by realsys"),
    ([*SGLANG, "generation.sglang.args={model_path: /m}"], "generation.sglang.args.model_path", "set by realsys"),
    ([*SGLANG, "generation.sglang.args={enable-fp32-lm-head: true}"], "args.enable-fp32-lm-head", "set by realsys"),
    ([*SGLANG, "generation.sglang.args={tp-size: 1, tp_size: 2}"], "args.tp_size", "the same option as tp-size"),
    ([*SGLANG, "generation.sglang.args={lora-paths: {a: b}}"], "args.lora-paths", "must be a number"),
    ([*SGLANG, "generation.sampling.penalties.presence=0.5"], "penalties.presence", "include it in the log-probs"),
    ([*SGLANG, "generation.sampling.min_new_tokens=5"], "min_new_tokens", "include it in the log-probs"),
    ([*SGLANG, "rollout.max_concurrent=1000"], "rollout.max_concurrent", "lower it"),
    # roles and where they sit
    (["allocation=sglang.d1+d1+judge.d1"], "allocation", "role 'judge', which the dataflow does not call"),
    ([*CRITIC, "train.batch_groups=1", "allocation=sglang.d1+d1+critic.d4"], "train.batch_groups", "of the critic"),
    ([*CRITIC, "allocation=sglang.d1+d1+critic.m8"], "allocation", "does not divide by m8 of role critic"),
    (["train.ppo.kl.coef=0.1", "allocation=sglang.d1+d1,ref.p4"], "allocation", "fewer than p4 of role ref"),
    (["train.ppo.early_stop_ratio=1.0"], "train.ppo.early_stop_ratio", "must be above 1"),
    (["train.ppo.kl.coef=0.1", "roles.ref.offload=optimizer"], "roles.ref.offload", "must be none or all"),
    (["train.ppo.reward_model_weight=1"], "roles.reward.path", "ForSequenceClassification"),
    # settings of the algorithm that exclude each other
    ([f"train.ppo.algorithm={__name__}:misspelt_hook"], "actor_inf.pre_hooks", "='onlaod': unknown hook: use one of"),
    ([f"train.ppo.loss={__name__}:CPU"], "train.ppo.loss", "must be a function (inputs, **arguments), not Machine"),
    ([f"train.ppo.loss={__name__}:own_loss"], "train.ppo.loss_args", "missing a required argument: 'scale'"),
    (["train.ppo.loss_args={eps: 0.2}"], "train.ppo.loss_args", "must be empty for loss=ppo"),
    ([*TOP_K, "train.ppo.loss_args={}"], "train.ppo.loss_args.top_k", "required"),
    ([*TOP_K, "train.ppo.loss_args.top_k=0"], "train.ppo.loss_args.top_k", "greater than 0"),
    ([*TOP_K, "train.ppo.loss_args.beta=1.5"], "train.ppo.loss_args.beta", "less than or equal to 1"),
    ([*TOP_K, "train.ppo.loss_args.tau=1"], "train.ppo.loss_args.tau", "unknown"),
    ([*TOP_K, "train.ppo.use_decoupled_loss=true"], "train.ppo.use_decoupled_loss", "set algorithm=distill_topk"),
    (
        [*TOP_K, "train.ppo.kl.coef=1", f"train.ppo.algorithm={__name__}:without_teacher"],
        ".algorithm",
        "reads teacher_",
    ),
    (TOP_K, "rollout.agent", "asks no teacher, whose tokens the loss reads: set distill"),
    (["train.ppo.algorithm=sft", "warmup.steps=2"], "warmup.steps", "must be 0: train.ppo.algorithm=sft learns from"),
    (["train.ppo.algorithm=sft", "train.ppo.loss_args={beta: 0.2}"], "train.ppo.loss_args.beta", "unknown"),
    (["train.ppo.algorithm=dpo", "train.ppo.loss_args={bta: 0.2}"], "train.ppo.loss_args.bta", "beta"),
    (["train.ppo.algorithm=dpo", "train.ppo.loss_args={beta: 0.0}"], "train.ppo.loss_args.beta", "greater than 0"),
    (["train.ppo.algorithm=dpo", "train.ppo.loss_args={loss_type: kto}"], "train.ppo.loss_args.loss_type", "ipo"),
    (["train.ppo.algorithm=reward_model", "train.ppo.loss_args={center: -1.0}"], "train.ppo.loss_args.center", "0"),
    (["train.ppo.loss=gspo", "train.ppo.c_clip=3"], "train.ppo.c_clip", "loss=gspo"),
    ([*TRUNCATE, "train.ppo.behav_imp_weight_cap=0"], "train.ppo.behav_imp_weight_mode", "needs a cap: set"),
    (["train.ppo.kl.target=0.1"], "train.ppo.kl.coef", "must be above 0"),
    (["train.ppo.filter.min=0.9", "train.ppo.filter.max=0.1"], "train.ppo.filter.min", "filter.max (0.1)"),
    (["rollout.group_size=1", "train.ppo.filter.accept=unequal_rewards"], "rollout.group_size", "at least 2 episodes"),
    (["rollout.group_size=4", "rollout.keep.episodes=4"], "rollout.keep.episodes", "below rollout.group_size (4)"),
    (["rollout.keep.episodes=1", *GROUP_MEAN], "rollout.keep.episodes", "must be at least 2"),
    (["rollout.keep.episodes=2", "rollout.keep.by=best", *GROUP_MEAN], "rollout.keep.by", "mean=group subtracts them"),
    (["data.curriculum.min=0.9", "data.curriculum.max=0.8"], "data.curriculum.min", "data.curriculum.max (0.8)"),
    (["rollout.oversample=100000"], "rollout.max_concurrent", "are more than the servers run and queue"),
    (["train.ppo.overlong.buffer=1000"], "train.ppo.overlong.buffer", "max_new_tokens (200)"),
    (["train.ppo.critic.enabled=true"], "train.ppo.skip_zero_advantage", "the tokens differ in advantage"),
    (["train.ppo.lam=0.9"], "train.ppo.lam", "without a critic"),
    ([DISTRIBUTED, "train.optimizer.name=sgd"], "train.optimizer.name", "must be adam"),
    ([DISTRIBUTED, "warmup.optimizer.name=sgd"], "warmup.optimizer.name", "AdamW only"),
]


@pytest.mark.parametrize(("overrides", "field", "problem"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_combination_names_the_field_to_change(overrides, field, problem):
    config = changed(*overrides)
    with pytest.raises(ConfigError) as caught:
        check(config, CPU)
    assert caught.value.field.endswith(field)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "allocation",
    ["serve.d1+d2p2m2", "d1p2m1+serve.d4", "sglang.d2p1m1+d4", "embedded.d1+actor.d2p2,ref.m2", "d2+ref.d1+serve.d1"],
)
def test_layouts_that_fit(allocation):
    assert check(changed(f"allocation={allocation}", "train.ppo.kl.coef=0.1"), CPU) == parse_allocation(allocation)


HERE = "tests.unit.config.test_checks"


def misspelt_hook(config):
    return Dataflow([replace(call, pre_hooks=("onlaod",)) for call in dataflows.ppo(config).calls])


def without_teacher(config):
    inputs = frozenset({"tokens", "behav_logprobs", "versions"})
    return Dataflow([FunctionCall("actor_train", "actor", "actor_train", inputs, trains=True)])


def judged(config):
    """PPO, and a call of role judge whose handler the test chooses by the seed."""
    handler = (f"{HERE}:Judge", "ref_inf")[config.seed]
    call = FunctionCall("judge_inf", "judge", handler, frozenset({"tokens"}), frozenset({"ref_logprobs"}))
    return Dataflow([*dataflows.ppo(config).calls, call])


class Judge:
    def run(self, role, request): ...


def own_loss(inputs, scale): ...


OWN_LOSS = ["train.ppo.loss_args={scale: 2.0}", f"train.ppo.loss={HERE}:own_loss"]


def test_own_loss_may_read_every_setting():
    check(changed(*OWN_LOSS, "train.ppo.c_clip=3"), CPU)


TINY = Machine(cpus=1, memory_bytes=1 << 30)
SMALL = Machine(cpus=8, memory_bytes=4 << 30)
SHARE = "cluster.share_gpus=true"
KEYS = "asynchronous.kv_reuse_versions=1"
MANY = ("allocation=sglang.d2+d2", "rollout.workers=80")
ONE = "allocation=serve.d1+d1"
SLOW = ("cluster.nodes=1", ONE, "model.small_on_gpu=false")
SPARE = ("cluster.nodes=1", "cluster.spare_nodes=1", ONE)
FOUR = (
    *("cluster.nodes=4", "cluster.gpus_per_node=8", "cluster.cpus_per_node=64", "model.dtype=bfloat16"),
    *("cluster.name_store.backend=etcd", "allocation=serve.d24+d8"),
)
LATE = "backend='file': 2 nodes may see its files late.*add name_store=etcd"
ALLOWED = "cluster.name_store.file_between_hosts=true"
TURNS = "allocation=serve.d2|d2"
FAST = (*SGLANG, "model.dtype=bfloat16", "model.head_dtype=float32")
OWN, WIDE = f"generation.backend={__name__}:Own", "generation.sglang.args={tp-size: 2}"
NO_CUDA, GROUP = replace(GPU8, torch_has_cuda=False), "weights.transport=group"


class Own(Backend):
    """A backend that says nothing about sleep."""

    def build(self, parts):
        raise NotImplementedError


PAIRS = [
    # a machine and overrides that pass, a machine and overrides that do not, the message
    ((GPU8, *MANY, "cluster.name_store.backend=etcd"), (GPU8, *MANY), "86 processes are too many.*name_store=etcd"),
    ((CPU, KEYS, "asynchronous.kv_on_update=keep"), (CPU, KEYS), "kv_reuse_versions=1: has no keys.*set it to keep"),
    ((CPU, "allocation=sglang.d2+d4"), (TINY, "allocation=sglang.d2+d4"), r"need about \d+\.\d GiB, 1\.0 GiB are free"),
    # SGLang runs in a further process, whose memory counts
    ((SMALL, ONE), (SMALL, ONE, *SGLANG), r"need about 4\.\d GiB, 4\.0 GiB are free"),
    # a server may share the GPU of a rank; two ranks need two GPUs
    ((GPU1, ONE, SHARE), (GPU1, "allocation=serve.d1+d2", SHARE), "2 training ranks need a GPU each, and there are 1"),
    # servers that use devices of ranks in turn
    ((CPU, TURNS), (CPU, TURNS, "train.loop=evaluate"), "has no training ranks to share with: join their part with +"),
    ((CPU, TURNS), (CPU, TURNS, SHARE), "share_gpus=True: 2 servers use devices.* in turn, .*: set it to false"),
    ((CPU, TURNS), (CPU, TURNS, "asynchronous.interruptible=false"), "cannot keep completions.*: set it to true"),
    (
        (CPU, TURNS),
        (CPU, TURNS, "train.offload=optimizer"),
        "2 servers use devices .*leaves the weights there: set it to none or all",
    ),
    (
        (CPU, TURNS),
        (CPU, TURNS, *SGLANG),
        "'sglang': 2 servers .* cannot release its memory on a CPU: join .*embedded",
    ),
    ((GPU8, TURNS, *FAST), (GPU8, TURNS, *FAST, OWN), "'.*:Own': 2 servers .* cannot release its memory: join"),
    ((GPU8, TURNS, *FAST), (GPU8, TURNS, *FAST, WIDE), "a server has 2 GPUs by the options of sglang, and 1 by m"),
    ((GPU8, TURNS, *FAST), (NO_CUDA, TURNS, *FAST), "only servers have GPUs here: join"),
    ((CPU, TURNS), (CPU, TURNS, GROUP), "ranks send what they have on their GPUs"),
    # a plan for other machines ignores this one
    ((TINY, *FOUR), (CPU, *FOUR, "cluster.cpus_per_node=1", "rollout.workers=134"), "1 CPU cores; at most 32 on node0"),
    ((CPU, *SLOW), (CPU, *SLOW, "cluster.gpus_per_node=2"), "backend='embedded': is slow on GPUs"),
    ((GPU1, *SLOW), (GPU1, *SLOW, "cluster.gpus_per_node=2"), "backend='embedded': is slow on GPUs"),
    ((CPU, "cluster.nodes=2", ONE, ALLOWED), (CPU, "cluster.nodes=2", ONE), LATE),
    ((CPU, *SPARE, ALLOWED), (CPU, *SPARE), LATE),
    ((CPU, "cluster.nodes=1", ONE), (CPU, *SPARE), LATE),
    (
        (CPU, ONE, SHARE, "model.small_on_gpu=false"),
        (GPU1, ONE, SHARE, "model.small_on_gpu=false"),
        "backend='embedded': is slow on GPUs.*set generation=sglang",
    ),
    (
        (CPU, ONE, SHARE, *SGLANG, "model.small_on_gpu=false"),
        (GPU1, ONE, SHARE, *SGLANG, "model.small_on_gpu=false"),
        "dtype='float32': has no fast attention.*set model.dtype=bfloat16",
    ),
]


@pytest.mark.parametrize(("passes", "fails", "message"), PAIRS, ids=[message[:30] for _, _, message in PAIRS])
def test_wrong_pair_is_refused_beside_good_one(passes, fails, message):
    """Each pair of machine and settings differs in little from one that is accepted."""
    machine, *overrides = passes
    check(changed(*overrides), machine)
    machine, *overrides = fails
    with pytest.raises(ConfigError, match=message):
        check(changed(*overrides), machine)


def test_data_files_of_a_jsonl_experiment(tmp_path):
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "1+1", "answer": "2"}\n')
    base = ["allocation=sglang.d1+d1", f"data.train={train}", f"model.path={hf_model(tmp_path)}"]
    check(changed(*base, experiment="math"), CPU)
    with pytest.raises(ConfigError, match=r"data\.demos"):
        check(changed(*base, "warmup.steps=1", experiment="math"), CPU)
    with pytest.raises(ConfigError, match=r"data\.demos.*train\.ppo\.algorithm=sft learns from demonstrations"):
        check(changed(*base, *SFT, experiment="math"), CPU)
    with pytest.raises(ConfigError, match=r"data\.eval_fraction"):
        check(changed(*base, "data.eval_fraction=0", experiment="math"), CPU)
    with pytest.raises(ConfigError, match=r"model\.path"):
        check(changed(*base, "model.path=''", experiment="math"), CPU)


def hf_model(folder, **changes):
    model = folder / "hf"
    model.mkdir(exist_ok=True)
    hf = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "vocab_size": 152,
        "max_position_embeddings": 32768,
    }
    (model / "config.json").write_text(json.dumps({**hf, **changes}))
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    return model


MODELS: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: hf_model(p, intermediate_size=63), "intermediate_size 63 .* does not divide by m2"),
    (lambda p: hf_model(p, num_hidden_layers=1), "1 layers .* are fewer than p2"),
    (lambda p: hf_model(p, num_hidden_layers="x"), "num_hidden_layers='x' must be a positive integer"),
    (lambda p: hf_model(p, architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel'. is not supported for qwen2"),
    (lambda p: hf_model(p, max_position_embeddings=128), "128 positions"),
    (lambda p: (hf_model(p) / "tokenizer.json").unlink(), "no tokenizer.json"),
    (lambda p: (hf_model(p) / "model.safetensors").unlink(), "no \\*.safetensors"),
    (lambda p: (hf_model(p) / "config.json").unlink(), "config.json: not found"),
    (lambda p: (hf_model(p) / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
    (lambda p: (hf_model(p) / "config.json").write_text("[]"), "config.json: must contain a JSON object"),
]


@pytest.mark.parametrize(("spoil", "problem"), MODELS, ids=[problem[:30] for _, problem in MODELS])
def test_model_directory_that_does_not_fit(tmp_path, spoil, problem):
    overrides = [f"model.path={tmp_path / 'hf'}", "allocation=sglang.d1+p2m2"]
    hf_model(tmp_path)
    check(changed(*overrides), CPU)
    spoil(tmp_path)
    with pytest.raises((ConfigError, ModelError), match=problem) as caught:
        check(changed(*overrides), CPU)
    assert caught.value.exit_code == 2


TOKENS = {"a": 0, "b": 1, "<end>": 2}


def tokenizer(vocab=TOKENS, added=()):
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": list(added)})  # type: ignore[call-overload]


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (tokenizer(), {}, ""),
    (tokenizer({**TOKENS, "<pad>": 3}), {"vocab_size": 160}, ""),  # may know more
    (tokenizer({"b": 1, "a": 0}, [{"id": 2, "content": "<end>"}]), {}, ""),
    (tokenizer([["a", -1.0], ["b", -2.0], ["<end>", 0.0]]), {}, ""),  # a unigram model's
    (tokenizer({"a": 1, "b": 0, "<end>": 2}), {}, "tokenizer differs .* token 0, 'a', is 'b'"),
    (tokenizer({"a": 0, "b": 1}), {}, "token 2, '<end>', is missing"),
    (tokenizer(), {"vocab_size": 148}, "vocab_size 148 is less than the actor's 152"),
    ("{}", {}, "vocabulary cannot be read: KeyError"),
    ("[]", {}, "cannot be read"),
]


@pytest.mark.parametrize(("other", "sizes", "problem"), OTHERS, ids=[str(i) for i in range(len(OTHERS))])
@pytest.mark.parametrize("made", [False, True])
def test_other_models_must_share_the_actors_vocabulary(tmp_path, other, sizes, problem, made):
    """``made``: the actor's model is made at the start, after the check of everything else."""
    (tmp_path / "beside").mkdir()
    actor, ref = hf_model(tmp_path), hf_model(tmp_path / "beside", **sizes)
    (actor / "tokenizer.json").write_text(tokenizer())
    (ref / "tokenizer.json").write_text(other)
    own = [] if made else [f"model.path={actor}"]
    config = changed(*own, f"roles.ref.path={ref}", "train.ppo.kl.coef=0.1", "allocation=sglang.d1+d1")

    def whole():
        allocation = check(config, CPU)
        if made:
            check_made_model(actor, config, allocation, dataflow_of(config))

    if not problem:
        whole()
        return
    with pytest.raises((ConfigError, ModelError), match=problem) as caught:
        whole()
    assert str(ref) in str(caught.value) and "\n" not in str(caught.value)
    if isinstance(caught.value, ConfigError):
        assert caught.value.field == "roles.ref.path"


@pytest.mark.parametrize("top_k", [152, 153])
def test_top_k_is_at_most_the_vocabulary(tmp_path, top_k):
    config = changed(f"model.path={hf_model(tmp_path)}", *TOP_K, f"train.ppo.loss_args.top_k={top_k}", *TEACHER)
    with pytest.raises(ConfigError, match="exceed the vocabulary's 152") if top_k > 152 else contextlib.nullcontext():
        check(config, CPU)


@pytest.mark.parametrize(("seed", "refused"), [(0, False), (1, True)])
def test_only_own_handlers_read_other_tokens(tmp_path, seed, refused):
    """A handler of the user knows what it does; a built-in one feeds the actor's token ids to every role."""
    (tmp_path / "beside").mkdir()
    actor, other = hf_model(tmp_path), hf_model(tmp_path / "beside", vocab_size=148)
    settings = [f"model.path={actor}", f"roles.judge={{path: {other}}}", f"train.ppo.algorithm={HERE}:judged"]
    config = changed(*settings, "allocation=sglang.d1+d1", f"seed={seed}")
    allocation = parse_allocation(config.allocation)
    with pytest.raises(ConfigError, match="roles.judge.path") if refused else contextlib.nullcontext():
        check_models(config, allocation, dataflow_of(config))


def test_linear_scaling_adds_positions_llama3_does_not(tmp_path):
    """A file with llama3 states the positions after stretching."""
    linear = {"type": "linear", "factor": 4.0}
    llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 64
    config = changed(f"model.path={tmp_path / 'hf'}")
    hf_model(tmp_path, max_position_embeddings=128, rope_scaling=linear)
    check(config, CPU)
    hf_model(tmp_path, max_position_embeddings=128, rope_scaling=llama3)
    with pytest.raises(ConfigError, match="128 positions"):
        check(config, CPU)


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model"])
def test_supervised_run_needs_neither_servers_nor_prompts(algorithm, tmp_path):
    demos = tmp_path / "demos.jsonl"
    demos.write_text('{"prompt": "a", "response": "b", "rejected": "c"}\n')
    words = [f"train.ppo.algorithm={algorithm}", "warmup.steps=0", "evaluation.problems=0", "allocation=d2"]
    words += [f"model.path={hf_model(tmp_path)}", f"data.demos={demos}", "train.ppo.minibatches=1"]
    assert check(changed(*words, experiment="math"), CPU).inference.data == 0
    with pytest.raises(ConfigError, match="data.train"):
        check(changed(*words[1:], "allocation=serve.d1+d2", experiment="math"), CPU)
