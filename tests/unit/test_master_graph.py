"""The dataflow graph: what is refused, and what is ready when."""

import pytest

from realsys.errors import ConfigError
from realsys.master.graph import Dataflow, FunctionCall, ppo_dataflow, sft_dataflow


def call(name: str, inputs: str, outputs: str = "") -> FunctionCall:
    return FunctionCall(name, "actor", name, frozenset(inputs.split()), frozenset(outputs.split()))


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
    flow = ppo_dataflow(decoupled=True)
    assert [c.name for c in flow.ready(flow.source_keys, [])] == ["actor_inf"]
    assert flow.ready(flow.source_keys, ["actor_inf"]) == []
    assert [c.name for c in flow.ready(flow.source_keys | {"prox_logprobs"}, ["actor_inf"])] == ["actor_train"]
    assert flow.last_consumers()["tokens"] == {"actor_inf", "actor_train"}


def test_plain_ppo_needs_no_inference_and_independent_calls_are_ready_together():
    assert [c.name for c in ppo_dataflow(decoupled=False).calls] == ["actor_train"]
    assert [c.name for c in sft_dataflow().ready(["tokens"], [])] == ["sft"]
    diamond = Dataflow([call("inf", "tokens", "p"), call("ref", "tokens", "r"), call("train", "p r")])
    assert [c.name for c in diamond.ready(["tokens"], [])] == ["inf", "ref"]
