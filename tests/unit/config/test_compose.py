"""Composition of the shipped files, and every kind of wrong input: one line that names the field."""

import functools
import json
import logging
import operator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from realsys.config.allocation import ACTOR
from realsys.config.compose import compose, fields, with_overrides
from realsys.config.dataflow import dataflow_of, role_settings
from realsys.config.fields import CONSTANT, EXPRESSED, RENAMED
from realsys.config.machine import Machine
from realsys.config.paths import read_config, write_config
from realsys.config.rules import check
from realsys.config.schema import Config, TinyModelConfig
from realsys.configs import __file__ as configs_file
from realsys.data.arith import make_tiny_model, write_char_tokenizer
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed

SHIPPED = sorted(path.stem for path in (Path(configs_file).parent / "experiment").glob("*.yaml"))
ALGORITHMS = sorted(path.stem for path in (Path(configs_file).parent / "algorithm").glob("*.yaml"))
MACHINE = Machine(cpus=8, memory_bytes=64 << 30)


@pytest.mark.parametrize("experiment", SHIPPED)
def test_every_shipped_experiment_is_valid(experiment, tmp_path):
    config = compose([f"experiment={experiment}"])
    assert config.experiment == experiment
    write_config(config, tmp_path / "config.json")
    assert read_config(tmp_path / "config.json") == config


def test_experiments_are_shipped():
    assert {"arith", "math"} <= set(SHIPPED)


#: what the shipped algorithms cannot know
TEACHERS = {
    "distill": ["roles.ref.path={folder}"],
    "distill_endpoint": ["rollout.agent_args.teachers.big=http://127.0.0.1:8000/v1"],
    "distill_topk": ["roles.ref.path={folder}"],
    "distill_topk_endpoint": ["rollout.agent_args.teachers.big=http://127.0.0.1:8000/v1"],
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_shipped_algorithm_is_valid(algorithm, tmp_path):
    write_char_tokenizer(tmp_path)
    make_tiny_model(TinyModelConfig(), tmp_path, seed=1)
    teacher = [text.format(folder=tmp_path) for text in TEACHERS.get(algorithm, [])]
    config = compose(["experiment=arith", f"algorithm={algorithm}", *teacher])
    check(config, MACHINE)
    assert ACTOR in dataflow_of(config).trained_roles


def test_field_overrides_algorithm_overrides_experiment():
    """The parts of a configuration override each other in this order."""
    config = compose(["experiment=arith", "algorithm=dapo", "train.ppo.eps_clip_higher=0.5"])
    assert (config.train.ppo.filter.max, config.train.ppo.eps_clip_higher) == (0.999, 0.5)
    assert config.train.optimizer.lr == 1e-4  # the experiment's


def test_comma_is_allowed_in_text_only():
    config = compose(["experiment=arith", "allocation=sglang.d1+actor.d2,ref.d1"])
    assert config.allocation == "sglang.d1+actor.d2,ref.d1"


def test_arith_fits_a_small_cpu_machine():
    """The shipped experiment passes all checks on two cores."""
    allocation = check(compose(["experiment=arith"]), Machine(cpus=2, memory_bytes=4 << 30))
    assert allocation.actor.world_size == 2


def test_math_has_the_settings_of_the_paper():
    config = compose(["experiment=math"])
    assert (config.train.batch_groups, config.rollout.group_size, config.train.ppo.minibatches) == (512, 16, 4)
    assert (config.train.optimizer.lr, config.train.optimizer.beta2, config.train.optimizer.eps) == (2e-5, 0.95, 1e-5)
    assert (config.data.max_prompt_tokens, config.generation.sampling.max_new_tokens) == (1024, 27648)
    assert config.asynchronous.max_staleness == 8
    assert (config.rollout.reward.correct, config.rollout.reward.wrong) == (5.0, -5.0)


def test_overrides_reach_every_depth_and_groups_switch():
    config = compose(
        [
            "experiment=arith",
            "generation=sglang",
            "name_store=etcd",
            "train.optimizer.lr=1",
            "generation.sglang.args.dtype=float32",
            "generation.sglang.args.max-total-tokens=4096",
            "seed=${train.total_steps}",
            "trial='7'",
        ]
    )
    assert config.generation.backend == "sglang" and config.cluster.name_store.backend == "etcd"
    assert config.train.optimizer.lr == 1.0
    assert config.generation.sglang.args == {"dtype": "float32", "max-total-tokens": 4096}
    assert config.seed == config.train.total_steps and config.trial == "7"


def test_experiment_of_ones_own(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - arith\nexperiment: mine\ntrain:\n  total_steps: 3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = compose(["experiment=mine"], config_dir=tmp_path)
    assert (config.experiment, config.train.total_steps, config.train.batch_groups) == ("mine", 3, 64)


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ("# my run\n# @package _global_\n", "'# @package _global_' is on line 2: it must be on line 1"),
        ("---\n#  @package _global_\n", "'#  @package _global_' is on line 2: it must be on line 1"),
        ("", "must have '# @package _global_' on line 1"),
    ],
)
def test_experiment_outside_the_root_names_its_file(tmp_path, head, problem):
    """Otherwise all of its fields would be below a section named experiment."""
    file = tmp_path / "experiment" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"{head}defaults:\n  - arith\ntrain:\n  total_steps: 3\n")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=mine"], config_dir=tmp_path)
    assert str(caught.value) == f"config: --config-dir={str(file)!r}: {problem}"
    file.write_text(f"\n#@package _global_\n{file.read_text().removeprefix(head)}")
    assert compose(["experiment=mine"], config_dir=tmp_path).train.total_steps == 3


def test_composition_leaves_no_state_behind():
    handlers = list(logging.getLogger().handlers)
    compose(["experiment=arith", "seed=3"])
    assert compose(["experiment=arith"]).seed == Config().seed
    assert not GlobalHydra.instance().is_initialized()
    assert logging.getLogger().handlers == handlers


WRONG_VALUES = [
    ("train.bach_groups=1", "did you mean train.batch_groups?"),
    ("batch_groups=1", "did you mean train.batch_groups?"),
    ("optimiser=sgd", "did you mean train.optimizer or "),
    ("asynchronous.eta=1", "did you mean asynchronous.max_staleness?"),
    ("train.quite_something_else=1", "unknown field"),
    ("train.batch_groups=many", "valid integer"),
    ("train.batch_groups=1.5", "valid integer"),
    ("train.batch_groups=true", "valid integer"),
    ("train.batch_groups=null", "valid integer"),
    ("train.batch_groups=0", "greater than 0"),
    ("train.ppo.gamma=1.5", "less than or equal to 1"),
    ("train.optimizer.lr=-0.1", "greater than 0"),
    ("train.optimizer.lr=2000.0", "less than or equal to 1"),
    ("warmup.optimizer.lr=10", "less than or equal to 1"),
    ("train.optimizer.beta1=1.0", "less than 1"),
    ("train.optimizer.weight_decay=500", "less than or equal to 10"),
    ("train.ppo.eps_clip=20", "less than or equal to 1"),
    ("train.ppo.eps_clip_higher=28", "less than or equal to 10"),
    ("generation.sampling.temperature=100", "less than or equal to 10"),
    ("rollout.reward.correct=.nan", "finite number"),
    ("train.ppo.reward_model_weight=.inf", "finite number"),
    ("manager.routing=stiky", "did you mean sticky?"),
    ("trial=7", "must be text"),
    ("trial=a/b", "letters, digits"),
    ("trial=''", "letters, digits"),
    ("train=3", "is a section"),
    ("cluster.name_store=etcd", "e.g. cluster.name_store.backend"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG_VALUES)
def test_wrong_value_names_its_field(text, problem):
    with pytest.raises(ConfigError) as caught:
        changed(text)
    assert caught.value.field == text.partition("=")[0]
    assert problem in str(caught.value) and "\n" not in str(caught.value)


KNOWN = "known: arith, arith_agents, arith_chat, arith_multi_turn, arith_tools, arith_verifiers, distill, dpo, math"
WRONG_OVERRIDES = [
    # overrides, the field named, a part of the problem
    (
        [],
        "experiment",
        "experiment=arith|arith_agents|arith_chat|arith_multi_turn|arith_tools|arith_verifiers|distill|dpo|",
    ),
    (["experiment=aritth"], "experiment", "did you mean arith?"),
    (["experiment=nothing"], "experiment", KNOWN),
    (["experiment=3"], "experiment", KNOWN),
    (["generation=tgi"], "generation", "known: embedded, sglang, vllm"),
    (["train.bach_groups=1"], "train.bach_groups", "did you mean train.batch_groups?"),
    (["+train.extra=1"], "train.extra", "unknown field"),
    (["train"], "train", "write field=value"),
    (["=3"], "override", "names no field"),
    (["seed=1,2"], "seed", "one value only: a list is written [a,b]; realsys sweep runs"),
    (["seed=x", "train.total_steps=y", "warmup.steps=z"], "seed", "(also wrong: train.total_steps, warmup.steps)"),
    (["seed={1"], "seed", "cannot be read"),
    (["cluster.slurm.options=[--mail-type=END]"], "cluster.slurm.options", "cluster.slurm.options=\"['...','...']\""),
    (["cluster.slurm.options=--mail-type=END"], "cluster.slurm.options", "put each text of the list in quotes"),
    (["seed=${no.such}"], "seed", "not found"),
    (["train.total_steps=???"], "train.total_steps", "issing"),
    (["~train.batch_groups"], "train.batch_groups", "cannot be deleted"),
    (["~generation"], "generation", "cannot be left out"),
    (["hydra.verbose=true"], "hydra.verbose", "hydra's own"),
]


@pytest.mark.parametrize(("overrides", "field", "problem"), WRONG_OVERRIDES, ids=lambda value: str(value)[:40])
def test_wrong_override_names_its_field(overrides, field, problem):
    chosen = any(text.startswith("experiment=") for text in overrides) or not overrides
    with pytest.raises(ConfigError) as caught:
        compose(overrides if chosen else ["experiment=arith", *overrides])
    assert caught.value.field == field
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_config_dir_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        compose(["experiment=arith"], config_dir=tmp_path / "none")


def test_broken_file_of_ones_own_is_named(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("train: [1, 2\n")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=mine"], config_dir=tmp_path)
    assert "mine" in str(caught.value) and "\n" not in str(caught.value)


def test_optimizer_of_a_role_is_that_of_the_actor_but_for_its_own_fields():
    config = compose(["experiment=arith", "train.optimizer.clip_grad=3", "roles.critic.optimizer.lr=0.5"])
    actor, critic = config.train.optimizer, role_settings(config, "critic").optimizer
    assert critic == actor.model_copy(update={"lr": 0.5}) and critic.clip_grad == 3
    for word, problem in (("lr=10", "lr: must be less than or equal to 1"), ("rate=1", "rate: unknown field")):
        with pytest.raises(ConfigError, match=f"roles.critic.optimizer=.*: {problem}"):
            compose(["experiment=arith", f"roles.critic.optimizer.{word}"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seed": "x"}', '{"sed": 1}', None])
def test_dump_that_is_not_ours_is_named(tmp_path, text):
    problem = r"config\.json"
    if text is None:
        problem = "not found: the folder is not a trial"
    else:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_config(tmp_path / "config.json")


@pytest.mark.parametrize("field", [*RENAMED, *EXPRESSED, *CONSTANT])
def test_field_of_an_earlier_build_is_refused_and_a_stored_one_is_read(tmp_path, field, caplog):
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=arith", f"+{field}=7"])
    new = RENAMED.get(field) or EXPRESSED.get(field, ("",))[0]
    told = f"is {new} now" if new else f"it is always {CONSTANT[field]!r}"
    assert f"{field}=7: " in str(caught.value) and told in str(caught.value) and caught.value.exit_code == 2
    value, present, warning = STORED.get(field, (7, [], f"{field}=7 has no effect"))
    config = read_config(stored(tmp_path, {field: value}))
    assert config == with_overrides(Config(), present)
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


#: field of an earlier build -> a value of a stored trial, what it is now, and the warning
STORED = {
    "asynchronous.max_head_offpolicyness": (7, ["asynchronous.max_staleness=7"], ""),
    "agreement.max_difference": (0.5, ["train.engine_check=0.5"], ""),
    "agreement.sample_tokens": (0, ["train.engine_check=0"], ""),
    "train.ppo.critic.loss": ("huber", ["train.ppo.critic.huber_delta=10.0"], ""),
    "train.ppo.filter.equal_rewards": (True, ["train.ppo.filter.accept=unequal_rewards"], ""),
    "train.ppo.turn_gamma": (0.5, ["train.ppo.turn_rewards=0.5"], ""),
    "train.ppo.kl.adaptive": (True, ["train.ppo.kl.target=0.1"], ""),
    "train.ppo.reward_model.enabled": (True, ["train.ppo.reward_model_weight=1"], ""),
    "train.ppo.reward_model.weight": (0.5, [], ""),
    "rollout.agent_limits.tool_s": (7.0, ["rollout.agent_args.tool_s=7.0"], ""),
    "evaluate_only": (True, ["train.loop=evaluate"], ""),
    "generation.embedded.on_gpu": (True, ["model.small_on_gpu=true"], ""),
    "model.float32_on_gpu": (True, ["model.small_on_gpu=true"], ""),
    **{
        f"generation.sampling.{name}_penalty": (0.5, [f"generation.sampling.penalties.{name}=0.5"], "")
        for name in ("repetition", "presence", "frequency")
    },
    "record.samples": (False, ["record.keep_steps=0"], ""),
    **{f"{phase}.optimizer.momentum": (0.8, [], "") for phase in ("train", "warmup")},
    "generation.threads": (7, ["cluster.threads=7"], ""),
    "train.threads": (7, ["cluster.threads=7"], ""),
    **{
        f"cluster.slurm.{name}": ("x", [f"cluster.slurm.options=['--{name}=x']"], "")
        for name in ("constraint", "qos", "reservation")
    },
    "roles.custom": ({"teacher": {"path": "/t"}}, ["roles.teacher.path=/t"], ""),
    "rollout.reward.judge": ({"model": "m"}, [], ""),
}


def stored(folder, values):
    """Write the file of a trial of an earlier build with these values."""
    tree = json.loads((Path(__file__).parent / "earlier_config.json").read_text())
    for field, value in values.items():
        if field == "asynchronous.max_head_offpolicyness":
            del tree["asynchronous"]["max_staleness"]
        *sections, name = field.split(".")
        functools.reduce(operator.getitem, sections, tree)[name] = value
    path = folder / "config.json"
    path.write_text(json.dumps(tree))
    return path


def test_trial_of_an_earlier_build_has_the_same_settings(tmp_path, caplog):
    assert read_config(stored(tmp_path, {})) == Config() and not caplog.text


def test_stored_settings_of_the_judge_are_arguments_of_each_judge(tmp_path):
    sets = {"open": {"verifier": "judge"}, "math": {"verifier": "math"}}
    given = {"data.verifier": "judge", "evaluation.sets": sets, "rollout.reward.judge": {"model": "m"}}
    config = read_config(stored(tmp_path, given))
    users = (config.data, config.evaluation.sets["open"], config.evaluation.sets["math"])
    assert [user.verifier_args for user in users] == [{"model": "m"}, {"model": "m"}, {}]


def test_dump_is_replaced_whole(tmp_path):
    path = tmp_path / "config.json"
    write_config(Config(), path)
    write_config(Config(seed=9), path)
    assert read_config(path).seed == 9
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_fields_are_the_leaves_of_the_schema():
    paths = list(fields())
    assert "train.ppo.advantage.leave_one_out" in paths and "train" not in paths
    assert len(paths) == len(set(paths))


def test_stored_configuration_takes_overrides():
    config = Config(seed=9)
    texts = [
        "evaluation.sampling.temperature=0",
        "generation.sampling.stop=[a,b]",
        "allocation=serve.d2+actor.d2,critic.d1",
    ]
    made = with_overrides(config, texts)
    assert (made.seed, made.evaluation.sampling, made.generation.sampling.stop) == (9, {"temperature": 0}, ["a", "b"])
    assert made.allocation == "serve.d2+actor.d2,critic.d1"


def test_override_keeps_the_rest_of_its_section():
    config = Config.model_validate({"data": {"verifier_args": {"rubric": "Is ${x}$ right?"}, "eval_fraction": 0.5}})
    data = with_overrides(config, ["data={verifier_args: {a: 1}, verifier: judge}"]).data
    assert (data.verifier_args, data.verifier, data.eval_fraction) == (
        {"rubric": "Is ${x}$ right?", "a": 1},
        "judge",
        0.5,
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("experiment=math", "the trial's own settings are used"),
        ("nope.x=1", "unknown field"),
        ("seed=a", "must be a valid integer"),
        ("seed", "write field=value"),
    ],
)
def test_wrong_override_of_a_stored_configuration_is_named(text, problem):
    with pytest.raises(ConfigError, match=problem):
        with_overrides(Config(), [text])
