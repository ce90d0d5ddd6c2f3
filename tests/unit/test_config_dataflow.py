"""The dataflow graph: what is refused, what is ready when, and what the settings of PPO make of it."""

import pytest

from realsys.config.dataflow import (
    ALGORITHMS,
    Dataflow,
    FunctionCall,
    dataflow_of,
    ppo_dataflow,
    register_algorithm,
    saved_roles,
    sft_dataflow,
)
from realsys.errors import ConfigError
from tests.config_trees import changed

CRITIC = ("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false")


def call(name: str, inputs: str, outputs: str = "") -> FunctionCall:
    return FunctionCall(name, "actor", name, frozenset(inputs.split()), frozenset(outputs.split()))


def shape(flow: Dataflow) -> dict[str, tuple[str, str, str]]:
    """call -> (role, inputs, outputs)"""
    return {c.name: (c.role, " ".join(sorted(c.inputs)), " ".join(sorted(c.outputs))) for c in flow.calls}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call("a", "tokens"), call("a", "tokens")], "two calls have this name"),
        ([call("a", "tokens x")], "reads key 'x', which nothing makes"),
        ([call("a", "tokens", "x"), call("b", "tokens", "x")], "makes key 'x', which a makes already"),
        ([call("a", "tokens", "tokens")], "which the stream makes already"),
        ([call("a", "y", "x"), call("b", "x", "y")], "a, b.*wait for one another"),
    ],
)
def test_bad_graph_is_refused_by_name(calls, message):
    with pytest.raises(ConfigError, match=message):
        Dataflow(calls)


def test_train_is_ready_only_after_inference():
    flow = ppo_dataflow(changed())
    assert [c.name for c in flow.ready(flow.source_keys, [])] == ["actor_inf"]
    assert flow.ready(flow.source_keys, ["actor_inf"]) == []
    assert [c.name for c in flow.ready(flow.source_keys | {"prox_logprobs"}, ["actor_inf"])] == ["actor_train"]
    assert flow.last_consumers()["tokens"] == {"actor_inf", "actor_train"}


def test_plain_ppo_needs_no_inference_and_independent_calls_are_ready_together():
    flow = ppo_dataflow(changed("train.ppo.use_decoupled_loss=false"))
    assert shape(flow) == {"actor_train": ("actor", "behav_logprobs tokens", "")}
    assert [c.name for c in sft_dataflow(changed()).ready(["tokens"], [])] == ["sft"]
    diamond = Dataflow([call("inf", "tokens", "p"), call("ref", "tokens", "r"), call("train", "p r")])
    assert [c.name for c in diamond.ready(["tokens"], [])] == ["inf", "ref"]


def test_a_kl_in_the_loss_adds_the_reference_to_what_training_reads():
    assert shape(ppo_dataflow(changed("train.ppo.kl.coef=0.1"))) == {
        "actor_inf": ("actor", "behav_logprobs tokens versions", "prox_logprobs"),
        "ref_inf": ("ref", "tokens", "ref_logprobs"),
        "actor_train": ("actor", "behav_logprobs prox_logprobs ref_logprobs tokens", ""),
    }


def test_everything_at_once():
    flow = ppo_dataflow(
        changed(*CRITIC, "train.ppo.kl.coef=0.1", "train.ppo.kl.place=reward", "train.ppo.reward_model.enabled=true")
    )
    assert shape(flow) == {
        "reward_inf": ("reward", "tokens", "scores"),
        "actor_inf": ("actor", "behav_logprobs tokens versions", "prox_logprobs"),
        "ref_inf": ("ref", "tokens", "ref_logprobs"),
        "critic_inf": ("critic", "tokens", "values"),
        "advantages": (
            "actor",
            "behav_logprobs prox_logprobs ref_logprobs scores values",
            "advantages returns",
        ),
        "actor_train": ("actor", "advantages behav_logprobs prox_logprobs scores tokens", ""),
        "critic_train": ("critic", "returns tokens values", ""),
    }
    assert flow.roles == ["reward", "actor", "ref", "critic"]
    assert flow.trained_roles == ["actor", "critic"]
    first = flow.ready(flow.source_keys, [])
    assert [c.name for c in first] == ["reward_inf", "actor_inf", "ref_inf", "critic_inf"]
    assert flow.last_consumers()["ref_logprobs"] == {"advantages"}


def test_offloaded_roles_are_brought_in_for_their_calls():
    config = changed("train.ppo.kl.coef=0.1", "roles.ref.offload=all")
    hooks = {c.name: (c.pre_hooks, c.post_hooks) for c in dataflow_of(config).calls}
    assert hooks == {"actor_inf": ((), ()), "ref_inf": (("onload",), ("offload",)), "actor_train": ((), ())}


def test_an_algorithm_of_ones_own_is_found_by_name_and_taken_only_once(monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_items", dict(ALGORITHMS._items))
    own = Dataflow([FunctionCall("actor_train", "actor", "mine", frozenset({"tokens"}), trains=True)])
    register_algorithm("mine")(lambda config: own)
    config = changed("train.ppo.algorithm=mine")
    assert shape(dataflow_of(config)) == shape(own)
    with pytest.raises(ConfigError, match=r"'mine': this algorithm is registered already, by .*test_config_dataflow"):
        register_algorithm("mine")(lambda config: own)
    with pytest.raises(
        ConfigError, match=r"train\.ppo\.algorithm='other': unknown algorithm; known: mine, ppo \(yours"
    ):
        dataflow_of(changed("train.ppo.algorithm=other"))
    with pytest.raises(ConfigError, match=r"plugins\.dataflow='no_such_module_': cannot be imported"):
        dataflow_of(changed("plugins.dataflow=[no_such_module_]"))


@pytest.mark.parametrize(("text", "problem"), [("def f(:", "SyntaxError: "), ("1 / 0", "ZeroDivisionError: ")])
def test_a_plugin_that_does_not_import_is_one_line(text, problem, tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"plugins\.dataflow='broken_plugin': cannot be imported: {problem}"):
        dataflow_of(changed("plugins.dataflow=[broken_plugin]"))


def test_a_checkpoint_has_what_no_directory_has():
    def saved(*overrides):
        config = changed(*CRITIC, "train.ppo.kl.coef=0.1", *overrides)
        return saved_roles(config, dataflow_of(config))

    assert saved("warmup.steps=0") == ["actor", "critic"]
    assert saved("warmup.steps=1") == ["actor", "critic", "ref"], "the reference is the warmed-up actor"
    assert saved("warmup.steps=1", "roles.ref.path=/models/ref") == ["actor", "critic"]
