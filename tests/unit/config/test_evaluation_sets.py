"""Data sets of evaluations: each takes from ``evaluation`` what it does not name itself."""

import pytest

from realsys.config.evaluation_sets import evaluation_sets, sources_of_sets, verifier_arguments
from realsys.config.rules import check_verifiers
from realsys.errors import ConfigError
from tests.support.processes.config_trees import changed


def test_one_set_needs_no_settings():
    config = changed("evaluation.problems=7")
    [made] = evaluation_sets(config).values()
    assert (made.name, made.split, made.problems, made.samples, made.k) == ("eval", "eval", 7, 1, ())
    assert made.sampling == config.generation.sampling and made.verifier == config.data.verifier
    assert evaluation_sets(changed("evaluation.problems=0")) == {}


@pytest.mark.parametrize(("problems", "during"), [(16, [16]), (300, [256]), (0, [])])
def test_evaluation_during_training_has_no_more_problems(problems, during):
    sets = evaluation_sets(changed(f"evaluation.problems={problems}", "evaluation.every_steps=1"))
    assert [made.every_problems for made in sets.values()] == during


def test_set_takes_the_rest_from_evaluation():
    config = changed(
        "evaluation.samples=4",
        "evaluation.k=[2, 4]",
        "evaluation.sampling={temperature: 0.6}",
        "evaluation.sets={aime: {path: aime.jsonl, problems: 30, samples: 16}, greedy: {sampling: {temperature: 0}, "
        "samples: 1, k: [], every_steps: 5}}",
    )
    sets = evaluation_sets(config)
    assert list(sets) == ["eval", "aime", "greedy"]
    aime, greedy = sets["aime"], sets["greedy"]
    assert (aime.split, aime.problems, aime.every_problems, aime.samples, aime.k) == ("aime", 30, 30, 16, (2, 4))
    assert (greedy.split, greedy.samples, greedy.every_steps, greedy.sampling.temperature) == ("eval", 1, 5, 0.0)
    assert aime.sampling.temperature == 0.6 and list(sources_of_sets(config)) == ["aime"]


def test_evaluations_have_their_own_sampling():
    config = changed("generation.sampling.max_new_tokens=77", "evaluation.sampling={temperature: 0.6, top_p: 0.95}")
    sampling = evaluation_sets(config)["eval"].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.6, 0.95, 77)
    assert (config.generation.sampling.temperature, config.generation.sampling.top_p) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("evaluation.sampling={stop: [x]}", "evaluation.sampling.stop"),
        ("evaluation.sampling={top_p: 2.0}", "evaluation.sampling.top_p"),
        ("evaluation.sampling={temperature: 1.0e-9}", "evaluation.sampling.temperature"),
        ("evaluation.sampling={max_new_tokens: 1000000}", "evaluation.sampling.max_new_tokens"),
        ("evaluation.sampling={max_new_tokens: 1}", "evaluation.sampling.max_new_tokens"),
        ("evaluation.sets={train: {path: x.jsonl}}", "evaluation.sets.train"),
        ("evaluation.k=[2]", "evaluation.k"),
        ("evaluation.sets={eval: {path: x.jsonl}}", "evaluation.sets.eval.path"),
        ("evaluation.sets={a: {k: [9]}}", "evaluation.sets.a.k"),
        ("evaluation.sets={a: {sampling: {x: 1}}}", "evaluation.sets.a.sampling.x"),
        ("evaluation.sets={a: {verifier_args: {x: 1}}}", "evaluation.sets.a.verifier_args"),
    ],
)
def test_bad_setting_of_a_set_is_named(given, field):
    with pytest.raises(ConfigError) as refused:
        evaluation_sets(changed(given, "generation.sampling.min_new_tokens=2"))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("verifier", "field"),
    [
        ("verifier: code, verifier_args: {isolation: jail}", "verifier_args"),
        ("verifier: exact, verifier_args: {nope: 1}", "verifier_args"),
        ("verifier: judge, verifier_args: {a: 1}", "verifier_args.a"),
        ("verifier: nothing, verifier_args: {a: 1}", "verifier"),
    ],
)
def test_bad_verifier_names_its_set(verifier, field):
    config = changed("data.verifier=math", f"evaluation.sets={{he: {{{verifier}}}}}")
    with pytest.raises(ConfigError) as refused:
        check_verifiers(config)
    assert refused.value.field == f"evaluation.sets.he.{field}"


def test_each_verifier_has_one_set_of_arguments():
    config = changed(
        "evaluation.sets={a: {verifier: exact}, b: {verifier: exact, path: b.jsonl}}", "data.verifier=math"
    )
    assert verifier_arguments(config) == {"math": {}, "exact": {}}


NAMED, OTHER = "verifier: code, verifier_args: {limit: 1}", "verifier: code, verifier_args: {limit: 2}"


@pytest.mark.parametrize("sets", [f"a: {{{NAMED}}}, b: {{verifier: code}}", f"a: {{verifier: code}}, b: {{{NAMED}}}"])
def test_one_set_names_arguments_for_all(sets):
    sets = evaluation_sets(changed(f"evaluation.sets={{{sets}}}", "data.verifier=math"))
    assert sets["a"].verifier_args == sets["b"].verifier_args == {"limit": 1}


def test_two_sets_of_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"must be those of evaluation\.sets\.b"):
        evaluation_sets(changed(f"evaluation.sets={{a: {{{NAMED}}}, b: {{{OTHER}}}}}", "data.verifier=math"))


def test_bad_name_of_a_set_says_the_rule():
    with pytest.raises(ConfigError, match="must be 1 to 32 letters, digits, '_' or '-', and begin") as refused:
        changed("evaluation.sets={a.b: {problems: 3}}")
    assert refused.value.field == "evaluation.sets.a.b"
