"""The dataflow graph: what is refused, what is ready when, and what the settings of PPO make of it."""

from dataclasses import replace

import pytest

from realsys.algorithm import dataflows
from realsys.config.dataflow import (
    KV_VERSIONS,
    Dataflow,
    FunctionCall,
    can_measure,
    check_calls,
    dataflow_of,
    is_supervised,
    role_settings,
    saved_roles,
    takes_prompts,
)
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed

CRITIC = ("train.ppo.critic.enabled=true", "train.ppo.skip_zero_advantage=false")


def call(name, inputs, outputs=""):
    return FunctionCall(name, "actor", name, frozenset(inputs.split()), frozenset(outputs.split()))


def shape(flow):
    """call -> (role, inputs, outputs)"""
    return {c.name: (c.role, " ".join(sorted(c.inputs)), " ".join(sorted(c.outputs))) for c in flow.calls}


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([call("a", "tokens"), call("a", "tokens")], "two calls have this name"),
        ([call("a", "tokens x")], "reads key 'x', which no call makes"),
        ([call("a", "tokens", "x"), call("b", "tokens", "x")], "makes key 'x', which a makes already"),
        ([call("a", "tokens", "tokens")], "which the stream makes already"),
        ([call("a", "y", "x"), call("b", "x", "y")], "a, b.*wait for one another"),
    ],
)
def test_bad_graph_is_refused_by_name(calls, message):
    with pytest.raises(ConfigError, match=message):
        Dataflow(calls)


def test_train_is_ready_only_after_inference():
    flow = dataflows.ppo(changed())
    assert [c.name for c in flow.ready(flow.source_keys, [])] == ["actor_inf"]
    assert flow.ready(flow.source_keys, ["actor_inf"]) == []
    assert [c.name for c in flow.ready(flow.source_keys | {"prox_logprobs"}, ["actor_inf"])] == ["actor_train"]
    assert flow.last_consumers()["tokens"] == {"actor_inf", "actor_train"}


def test_independent_calls_are_ready_together():
    """Plain PPO has no inference call; a call is ready when its keys exist."""
    flow = dataflows.ppo(changed("train.ppo.use_decoupled_loss=false"))
    assert shape(flow) == {"actor_train": ("actor", "behav_logprobs loss_mask tokens versions", "")}
    assert [c.name for c in dataflows.sft(changed()).ready(["tokens", "loss_mask"], [])] == ["sft"]
    diamond = Dataflow([call("inf", "tokens", "p"), call("ref", "loss_mask tokens", "r"), call("train", "p r")])
    assert [c.name for c in diamond.ready(["tokens", "loss_mask"], [])] == ["inf", "ref"]


@pytest.mark.parametrize(
    ("settings", "has_pass"),
    [
        ("", True),
        ("train.ppo.minibatches=1", False),
        ("train.ppo.minibatches=1 train.ppo.kl.coef=0.1", False),
        ("train.ppo.minibatches=1 train.ppo.kl.coef=0.1 train.ppo.kl.place=reward", True),
        ("train.ppo.use_decoupled_loss=interpolated", False),
    ],
)
def test_inference_pass_runs_only_where_its_result_is_new(settings, has_pass):
    flow = dataflows.ppo(changed(*settings.split(), "train.ppo.skip_zero_advantage=false"))
    assert ("actor_inf" in [c.name for c in flow.calls]) is has_pass
    [train] = [c for c in flow.calls if c.name == "actor_train"]
    assert ("prox_logprobs" in train.inputs, "versions" in train.inputs) == (has_pass, not has_pass)


def test_rewards_of_turns_need_advantages_of_tokens():
    flow = dataflows.ppo(changed("train.ppo.turn_rewards=true", "train.ppo.skip_zero_advantage=false"))
    assert "token_rewards" in flow.source_keys and "token_rewards" not in dataflows.ppo(changed()).source_keys
    assert shape(flow)["advantages"][1] == "behav_logprobs loss_mask prox_logprobs token_rewards"


def test_versions_of_keys_are_read_if_engines_keep_keys():
    """The recorded log-probs of tokens on kept keys are not compared, whatever the algorithm."""
    for settings, read in ((), False), (("asynchronous.kv_on_update=keep",), True):
        flow = dataflow_of(changed(*settings))
        [inference] = [call for call in flow.calls if call.handler == "actor_inf"]
        assert (KV_VERSIONS in inference.inputs, KV_VERSIONS in flow.source_keys) == (read, read)
    own = changed("asynchronous.kv_on_update=keep", f"train.ppo.algorithm={HERE}:own")
    assert KV_VERSIONS not in dataflow_of(own).source_keys


def test_kl_in_the_loss_reads_the_reference():
    """The reference's log-probs become an input of the training call."""
    assert shape(dataflows.ppo(changed("train.ppo.kl.coef=0.1"))) == {
        "actor_inf": ("actor", "behav_logprobs loss_mask tokens versions", "prox_logprobs"),
        "ref_inf": ("ref", "loss_mask tokens", "ref_logprobs"),
        "actor_train": ("actor", "behav_logprobs loss_mask prox_logprobs ref_logprobs tokens", ""),
    }


def test_everything_at_once():
    flow = dataflows.ppo(
        changed(*CRITIC, "train.ppo.kl.coef=0.1", "train.ppo.kl.place=reward", "train.ppo.reward_model_weight=1")
    )
    assert shape(flow) == {
        "reward_inf": ("reward", "loss_mask tokens", "scores"),
        "actor_inf": ("actor", "behav_logprobs loss_mask tokens versions", "prox_logprobs"),
        "ref_inf": ("ref", "loss_mask tokens", "ref_logprobs"),
        "critic_inf": ("critic", "loss_mask tokens", "values"),
        "advantages": ("actor", "behav_logprobs prox_logprobs ref_logprobs scores values", "advantages returns"),
        "actor_train": ("actor", "advantages behav_logprobs loss_mask prox_logprobs scores tokens", ""),
        "critic_train": ("critic", "loss_mask returns tokens values", ""),
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


IN_TURN = ("allocation=serve.d1|d2", *CRITIC, "train.ppo.kl.coef=0.1", "roles.ref.offload=all")


def hooks_of(flow):
    return {c.name: (len(c.pre_hooks), len(c.post_hooks)) for c in flow.calls}


def test_roles_stay_until_the_servers_have_their_turn():
    """Each call brings its role in. The master lets all leave; those whose offload is set leave after their calls."""
    config = changed(*IN_TURN)
    hooks = hooks_of(dataflow_of(config))
    assert [name for name, (_, offload) in hooks.items() if offload] == ["ref_inf"]
    assert {onload for onload, _ in hooks.values()} == {1}
    assert hooks_of(dataflows.sft(config)) == {"sft": (1, 0)}
    assert {role_settings(config, role).offload for role in ("actor", "critic", "ref")} == {"all"}


@pytest.mark.parametrize("change", ["allocation=serve.d1+d2", "allocation=auto", "train.loop=evaluate"])
def test_roles_stay_if_no_server_takes_turns(change):
    config = changed(*IN_TURN, change)
    assert role_settings(config, "actor").offload == "none"
    assert hooks_of(dataflow_of(config))["actor_train"] == (0, 0)


OWN = Dataflow([FunctionCall("actor_train", "actor", "actor_train", frozenset({"tokens"}), trains=True)])


def own(config):
    return OWN


def no_graph(config):
    return [OWN]


def misspells(config):
    return config.train.ppo.no_such_field


HERE = "tests.unit.config.test_dataflow"


def test_own_algorithm_is_found_by_import_string():
    assert shape(dataflow_of(changed(f"train.ppo.algorithm={HERE}:own"))) == shape(OWN)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (f"{HERE}:OWN", "is not an algorithm: it must be a function (config), not Dataflow"),
        (f"{HERE}:call", r"is not an algorithm: it must take (config), it takes (name"),
        (f"{HERE}:no_graph", "must return a Dataflow, not list"),
        (f"{HERE}:misspells", "raised: AttributeError: 'PPOConfig' object has no attribute 'no_such_field'"),
    ],
)
def test_bad_algorithm_is_one_line(algorithm, problem):
    with pytest.raises(ConfigError) as caught:
        dataflow_of(changed(f"train.ppo.algorithm={algorithm}"))
    assert str(caught.value).startswith(f"config: train.ppo.algorithm='{algorithm}': {problem}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "readers"),
    [
        ((), []),
        (("rollout.agent=multi_turn",), []),
        (("rollout.gateway.sampling=request",), ["actor_inf", "ref_inf", "actor_train"]),
        (("rollout.agent=my.agent:Agent",), ["actor_inf", "ref_inf", "actor_train"]),
    ],
)
def test_language_models_read_temperatures_of_agents(overrides, readers):
    """Where no agent can choose one, the graph is as before. A critic needs none."""
    flow = dataflow_of(changed(*CRITIC, "train.ppo.kl.coef=0.1", *overrides))
    assert [call.name for call in flow.calls if "temperatures" in call.inputs] == readers
    assert ("temperatures" in flow.source_keys) == bool(readers)


def test_dataflow_is_built_once_per_config():
    first, second = changed(), changed("train.ppo.use_decoupled_loss=false")
    assert dataflow_of(first) is dataflow_of(first)
    assert shape(dataflow_of(second)) != shape(dataflow_of(first))
    copied = first.model_copy(update={"train": second.train})
    assert shape(dataflow_of(copied)) == shape(dataflow_of(second)), "a copy is another configuration"


class NeedsScale:
    def __init__(self, scale):
        self.scale = scale

    def run(self, role, request):
        return None


class RunsNothing:
    pass


class RunsWithoutRole:
    def run(self, request):
        return None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"handler": "actor_infe"}, "handler='actor_infe': unknown call handler: use one of actor_inf, actor_train, "),
        ({"handler": "no_such_module_:A"}, "handler='no_such_module_:A': no module named 'no_such_module_'"),
        ({"handler": f"{HERE}:own"}, "is not a call handler: it must be a class with run(role, request), not function"),
        ({"handler": f"{HERE}:RunsNothing"}, "is not a call handler: the class lacks run"),
        ({"handler": f"{HERE}:NeedsScale"}, "is not a call handler: its constructor: it must take (), it takes"),
        ({"handler": f"{HERE}:RunsWithoutRole"}, "it must take (self, role, request), it takes (self, request)"),
        ({"pre_hooks": ("onlaod",)}, "pre_hooks='onlaod': unknown hook: use one of offload, onload, or"),
        ({"post_hooks": (f"{HERE}:own",)}, "is not a hook: it must take (role, request), it takes (config)"),
    ],
)
def test_bad_handler_or_hook_names_its_call(change, problem):
    good = FunctionCall("first", "actor", "actor_inf", frozenset({"tokens"}), pre_hooks=("onload",))
    check_calls(Dataflow([good]))
    with pytest.raises(ConfigError) as caught:
        check_calls(Dataflow([good, replace(good, name="second", **change)]))
    assert str(caught.value).startswith("config: dataflow.second.")
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_checkpoint_has_what_no_directory_has():
    def saved(*overrides):
        config = changed(*CRITIC, "train.ppo.kl.coef=0.1", *overrides)
        return saved_roles(config, dataflow_of(config))

    assert saved("warmup.steps=0") == ["actor", "critic"]
    assert saved("warmup.steps=1") == ["actor", "critic", "ref"], "the reference is the warmed-up actor"
    assert saved("warmup.steps=1", "roles.ref.path=/models/ref") == ["actor", "critic"]


@pytest.mark.parametrize(
    ("algorithm", "prompts", "supervised"),
    [("ppo", True, False), ("sft", False, True), ("dpo", False, True), ("serve", False, False)],
)
def test_algorithm_says_which_rows_a_run_trains_on(algorithm, prompts, supervised):
    config = changed(f"train.ppo.algorithm={algorithm}")
    assert (takes_prompts(config), is_supervised(config)) == (prompts, supervised)


@pytest.mark.parametrize(("handler", "measures"), [("sft", True), ("my_module:Mine", False)])
def test_held_out_rows_are_not_given_to_a_handler_that_would_train_on_them(handler, measures):
    call = FunctionCall("sft", "actor", handler, frozenset({"tokens"}), trains=True)
    assert can_measure(Dataflow([call], {"tokens"}, "demonstrations")) == measures
