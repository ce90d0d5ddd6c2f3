"""Table of every field of the step log: name, unit, meaning, group. ``docs/metrics.md`` is made from it.

    record ──numbers──> {"staleness/mean": 1.5, ...} ──field_of──> Field, with the labels of an open name

A name is the path of a number in its record, joined by ``/``. The table has a name for each path. A part in braces
means any name: ``untrained/{reason}``, ``metrics/{name}``. The last such part of a
name may contain ``/``. Trackers, ``/metrics`` and the documentation use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from prometheus_client.core import GaugeMetricFamily

__all__ = ["FIELDS", "Field", "Found", "field_of", "names", "numbers"]


@dataclass(frozen=True, slots=True)
class Found:
    """A field and the parts of a name at its braces."""

    field: Field
    labels: Mapping[str, str]


def numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of all numbers of a record. Texts, lists and null have none; true is 1."""
    for key, value in record.items():
        if isinstance(value, float):
            yield f"{prefix}{key}", value
        elif isinstance(value, int):
            try:
                yield f"{prefix}{key}", float(value)
            except OverflowError:
                continue
        elif isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")


def names(record: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all fields of a record, of those without a number, too."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from names(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}"


@lru_cache(8192)  # names of users' metrics are not bounded
def field_of(kind: str, name: str) -> Found | None:
    """Return the entry of a field of the records of ``kind``; None if the table has none."""
    fields = FIELDS.get(kind, {})
    if exact := fields.get(name):
        return Found(exact, {})
    for pattern, field in fields.items():
        if "{" in pattern and (match := _expression(pattern).fullmatch(name)):
            return Found(field, match.groupdict())
    return None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    """Return the expression of a name with braces. Only the last part of the name may contain ``/``."""
    parts = [
        f"(?P<{part[1:-1]}>{'.+' if last else '[^/]+'})" if part.startswith("{") else re.escape(part)
        for part, last in _parts(pattern)
    ]
    return re.compile("/".join(parts))


def _parts(pattern: str) -> Iterator[tuple[str, bool]]:
    parts = pattern.split("/")
    for i, part in enumerate(parts):
        yield part, i == len(parts) - 1


# ---- the fields of each kind of record of the step log (``realsys.observe.step_fields``)


#: groups of fields, in the order of the documentation
GROUPS = ("bookkeeping", "reward", "length", "objective", "policy", "staleness", "waste", "agreement", "time", "memory")


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a kind of record.

    unit     unit of the number: tokens, s, bytes, share (0 to 1), nats, ...; "" for a text, a list or a plain number
    meaning  one phrase
    tracked  False: no curve, so trackers do not get it
    """

    name: str
    unit: str
    meaning: str
    group: str
    tracked: bool = True


_Row = tuple[str, str, str]  # name, unit, meaning


def _group(group: str, rows: Iterable[_Row], prefix: str = "", *, tracked: bool = True) -> list[Field]:
    return [Field(prefix + name, unit, meaning, group, tracked) for name, unit, meaning in rows]


def _table(*groups: list[Field]) -> dict[str, Field]:
    """Return the fields by name. A name that occurs twice is a defect of this table."""
    fields = [field for group in groups for field in group]
    table = {field.name: field for field in fields}
    if len(table) < len(fields):
        raise ValueError("a field occurs twice")
    return table


_KIND: list[_Row] = [("kind", "", "kind of the record"), ("time", "unix s", "time at which it was written")]

_OPTIMIZER: list[_Row] = [
    ("loss", "", "objective of this call, without weight decay"),
    ("lr", "", "learning rate"),
    ("grad_norm", "", "mean norm of the gradients before clipping, over the step's minibatches"),
    ("grad_norm_max", "", "largest of these norms; 0 in a step without signal"),
    ("optimizer_steps", "steps", "optimizer steps that were taken, one per minibatch"),
    ("zero_gradient_steps", "steps", "minibatches whose gradient was 0"),
    ("skipped_steps", "steps", "minibatches that were left out for a loss or gradient that is not finite"),
    ("skipped_steps_total", "steps", "the same since the start of the trainer"),
    ("tokens", "tokens", "loss tokens that were computed"),
    ("answer_tokens", "tokens", "loss tokens of the minibatches that count in the loss"),
    ("clip_fraction", "share", "share of the tokens at which the clip decides the loss"),
]

_POLICY: list[_Row] = [
    ("entropy_mean", "nats", "entropy of the distribution at each token"),
    ("kl_behav_prox_mean", "nats", "KL(behav || prox), k3: effect of the batch's staleness"),
    ("kl_prox_theta_mean", "nats", "KL(prox || theta), k3: distance that this step has moved"),
    ("kl_ref_mean", "nats", "KL(theta || ref), by kl.estimator; only with a reference model"),
    ("teacher_mass_mean", "share", "probability of the teacher's top k tokens under the teacher (loss=distill)"),
    ("dual_clip_fraction", "share", "share of the tokens that c_clip bounds"),
    ("capped_fraction", "share", "share of the tokens whose w is beyond its cap"),
    ("u_mean", "", "ratio u = exp(theta - prox), mean"),
    ("u_max", "", "ratio u, largest"),
    ("w_mean", "", "behaviour weight w = exp(prox - behav) before its cap, mean"),
    ("w_max", "", "behaviour weight w before its cap, largest"),
    ("w_squared_mean", "", "square of w before its cap, mean"),
    ("w_ess", "share", "effective sample size of w: (sum of w)² over the sum of w², over the number of tokens"),
    ("early_stopped", "0 or 1", "1 if early_stop_ratio or early_stop_kl left out the rest of the step"),
]

_PAIRS: list[_Row] = [
    ("pairs", "pairs", "pairs of a chosen and a rejected response (dpo, reward_model)"),
    ("accuracy", "share", "pairs whose chosen response is ahead; with sft loss tokens that no other token exceeds"),
    ("margin_mean", "", "reward or score of the chosen response minus that of the rejected one, mean"),
    ("chosen_reward_mean", "", "beta * log(policy / reference) of the chosen response, mean (dpo)"),
    ("rejected_reward_mean", "", "the same of the rejected response"),
    ("chosen_logprob_mean", "nats", "log-prob of the whole chosen response, mean (dpo)"),
    ("rejected_logprob_mean", "nats", "the same of the rejected response"),
    ("chosen_score_mean", "", "score of the chosen response, mean (reward_model)"),
    ("rejected_score_mean", "", "the same of the rejected response"),
]

_AGREEMENT: list[_Row] = [
    ("tokens", "tokens", "tokens scored by trainer and engine with the same weights"),
    ("difference_mean", "nats", "mean absolute difference of their log-probs"),
    ("difference_max", "nats", "largest absolute difference"),
    ("ratio", "", "exp of the mean signed difference"),
]

_CALLS = [
    *_group("agreement", _AGREEMENT, "stats/agreement/"),
    *_group(
        "agreement",
        [
            ("tokens", "tokens", "tokens whose proximal log-prob was computed"),
            ("logprob_difference_mean", "nats", "mean absolute difference of proximal and recorded log-prob"),
            ("logprob_difference_max", "nats", "the largest"),
        ],
        "stats/inf/",
    ),
    *_group(
        "policy",
        [
            ("ref_inf/tokens", "tokens", "tokens that the reference scored"),
            ("ref_inf/ref_logprob_mean", "nats", "mean log-prob under the reference"),
            ("advantages/tokens", "tokens", "tokens with an advantage of their own"),
            ("advantages/advantage_mean", "", "mean of the advantages before normalisation"),
            ("advantages/advantage_std", "", "standard deviation of the advantages before normalisation"),
            ("advantages/return_mean", "", "mean return of a token"),
            ("advantages/kl_ref_mean", "nats", "KL to the reference in the rewards (kl.place=reward)"),
        ],
        "stats/",
    ),
    *_group(
        "objective",
        [
            ("critic_inf/tokens", "tokens", "tokens with a value"),
            ("critic_inf/value_mean", "", "mean value before the step"),
            ("reward_inf/score_mean", "", "mean score of the reward model"),
            ("reward_inf/score_std", "", "standard deviation of its scores"),
            ("critic_train/value_mean", "", "mean value that the critic predicts"),
            ("critic_train/return_mean", "", "mean return that it is trained towards"),
            ("critic_train/explained_variance", "", "1 - Var(return - value) / Var(return); 1 is perfect"),
        ],
        "stats/",
    ),
    *_group("objective", _OPTIMIZER, "stats/critic_train/"),
    *_group(
        "objective", [("{name}", "", "statistic of your own call handler; of a further call: call/name")], "stats/"
    ),
]

_REWARD: list[_Row] = [
    ("reward_mean", "", "mean reward of the episodes"),
    ("reward_std", "", "standard deviation of these rewards"),
    ("accuracy", "share", "share of right episodes among those that are right or wrong; null without such"),
    ("signal/wrong", "share", "groups whose episodes are all wrong"),
    ("signal/right", "share", "groups whose episodes are all right"),
    ("signal/equal", "share", "groups whose episodes have equal rewards"),
    ("signal/batch_equal", "0 or 1", "1 if all rewards of the batch are equal"),
    ("verdict_failures/{cause}", "completions", "completions since the step before without a verdict, by cause"),
    ("metrics/{name}", "", "metric of agent, environment or verifier, mean over the episodes that have it"),
    ("script/{name}", "", "number that a training script has logged (`session.log`)"),
]

_LENGTH: list[_Row] = [
    ("groups", "groups", "groups in the batch"),
    ("episodes", "episodes", "episodes in the batch"),
    ("sequences", "rows", "rows in the batch"),
    ("tokens", "tokens", "tokens of the rows, prompts included"),
    ("answer_tokens", "tokens", "loss tokens of the rows"),
    ("length_mean", "tokens", "loss tokens of an episode, mean"),
    ("length_max", "tokens", "loss tokens of an episode, largest"),
    ("length_correct", "tokens", "mean over the right episodes; null without such"),
    ("length_wrong", "tokens", "mean over the wrong episodes; null without such"),
    ("truncated_fraction", "share", "episodes that were cut off"),
    ("length_biased", "0 or 1", "1 if the lengths of the batch are not those of the policy; else absent"),
]

_STALENESS: list[_Row] = [
    ("staleness/mean", "versions", "trained version minus version of a row's oldest token, mean"),
    ("staleness/max", "versions", "the same, largest"),
    ("staleness/min", "versions", "trained version minus version of a row's newest token, smallest"),
    ("interrupted_fraction", "share", "rows sampled by more than one version"),
    ("kept_keys_fraction", "share", "loss tokens that attended to keys of older weights"),
]

_WASTE: list[_Row] = [
    ("sampled_tokens", "tokens", "sampled tokens that are in the batch or were discarded since the step before"),
    ("untrained/{reason}", "share", "share of these that were not trained, by reason"),
    ("too_old", "share", "share lost to staleness over the last 20 steps"),
    ("length_ks", "", "KS distance between lengths of sampled and of trained completions, last 20 steps"),
    ("dropped_stale", "groups", "groups since the step before that were discarded as too old"),
    ("dropped_filtered", "groups", "groups since the step before that a filter refused"),
    ("refused", "rows", "rows since the step before that another trainer had been granted"),
]

_TIME: list[_Row] = [
    ("seconds/wait", "s", "waited for the batch"),
    ("seconds/switch", "s", "had a batch, and waited for devices that servers share"),
    ("seconds/inf", "s", "calls without optimizer step"),
    ("seconds/train", "s", "calls with optimizer step"),
    ("seconds/save", "s", "copied the weights"),
    ("seconds/publish", "s", "waited for the publication of the version before, reported the batch"),
    ("seconds/checkpoint", "s", "waited for a checkpoint or an export"),
    ("seconds/total", "s", "the whole step"),
    ("call_seconds/{call}", "s", "slowest rank of a call, without its wait for other calls"),
    ("train_tokens_per_s", "tokens/s", "tokens of the rows over the seconds of inf and train"),
    ("consumed_tokens_per_s", "tokens/s", "loss tokens over the seconds of the whole step"),
    ("transferred_bytes", "bytes", "arrays that ranks received from others"),
]

_MEMORY: list[_Row] = [
    ("memory/rank_bytes", "bytes", "host memory of a training rank, largest (resident set)"),
    ("memory/ranks_bytes", "bytes", "host memory of all training ranks together"),
    ("memory/master_bytes", "bytes", "host memory of the MasterWorker"),
    ("memory/server_bytes", "bytes", "host memory of a GenerationServer and what it started, largest"),
    ("memory/servers_bytes", "bytes", "host memory of all GenerationServers together"),
    ("memory/worker_bytes", "bytes", "host memory of a RolloutWorker, largest"),
    ("memory/workers_bytes", "bytes", "host memory of all RolloutWorkers together"),
    ("gpu/peak_bytes", "bytes", "most memory that torch held on one GPU during a call"),
    ("gpu/used_bytes", "bytes", "most memory in use on one GPU, of all processes"),
    ("gpu/utilisation", "share", "share of the time in which a GPU computed"),
    ("gpu/mfu/{call}", "share", "model FLOPs of a call over the peak of its GPUs"),
    ("gpu/hfu/{call}", "share", "the same with recomputed layers and logits"),
]

TRAIN = _table(
    _group(
        "bookkeeping",
        [
            *_KIND,
            ("step", "", "train step, from 1"),
            ("total", "steps", "planned steps"),
            ("version", "", "version of the weights that the step made"),
            ("tickets", "", "tickets of the batch, as ranges"),
        ],
        tracked=False,
    ),
    _group("reward", _REWARD),
    _group("length", _LENGTH),
    _group("objective", [("lr", "", "learning rate of the actor; 0 if it is not trained")]),
    _group("objective", _OPTIMIZER, "stats/"),
    _group("objective", _PAIRS, "stats/"),
    _group("policy", _POLICY, "stats/"),
    _CALLS,
    _group("staleness", _STALENESS),
    _group("staleness", [("staleness/histogram/{versions}", "rows", "rows by staleness")], tracked=False),
    _group("waste", _WASTE),
    _group("agreement", _AGREEMENT, "agreement/"),
    _group(
        "agreement",
        [("version", "", "version that the step trained"), ("warning", "", "what is wrong; empty if nothing is")],
        "agreement/",
        tracked=False,
    ),
    _group("time", _TIME),
    _group("memory", _MEMORY),
)

EVAL = _table(
    _group(
        "bookkeeping",
        [
            *_KIND,
            ("eval_id", "", "name of the evaluation: before, after, step-20, before.SET"),
            ("set", "", "data set"),
            ("step", "", "step of the weights"),
            ("version", "", "oldest version that sampled"),
            ("version_min", "", "oldest version that sampled"),
            ("version_max", "", "newest version that sampled"),
            ("incomplete", "", "why there are no numbers; empty if there are"),
            ("interval", "share", "95 % interval of the accuracy, [low, high]"),
            ("left_out_k", "", "k without pass@k, because failures took verdicts"),
            ("majority", "", "null if there is no majority vote"),
            ("majority_omitted", "", "why there is no majority vote"),
        ],
        tracked=False,
    ),
    _group(
        "reward",
        [
            ("accuracy", "share", "pass@1; null if incomplete, or without right and wrong"),
            ("stderr", "share", "standard error of the accuracy"),
            ("pass_at/{k}/value", "share", "pass@k"),
            ("pass_at/{k}/low", "share", "pass@k, lower end of the 95 % interval"),
            ("pass_at/{k}/high", "share", "pass@k, upper end of the 95 % interval"),
            ("majority/value", "share", "accuracy of the majority vote"),
            ("majority/low", "share", "the same, lower end of the 95 % interval"),
            ("majority/high", "share", "the same, upper end of the 95 % interval"),
            ("reward_mean", "", "mean reward of the completions"),
            ("metrics/{name}", "", "metric of agent, environment or verifier, mean over completions"),
            ("complete", "0 or 1", "1 if the evaluation has numbers"),
            ("problems", "problems", "problems of the set"),
            ("samples", "completions", "completions of each problem"),
            ("failed", "completions", "completions that failed"),
            ("unjudged", "problems", "problems left out because all their completions failed"),
        ],
    ),
    _group("length", [("length_mean", "tokens", "mean length of the completions")]),
    _group(
        "time",
        [
            ("seconds", "s", "from the request to the end"),
            ("restarts", "", "how often it was begun anew"),
            ("temperature", "", "sampling temperature"),
        ],
    ),
)

WARMUP = _table(
    _group(
        "bookkeeping",
        [*_KIND, ("step", "", "step of the warm-up, from 1"), ("total", "steps", "steps of the warm-up")],
        tracked=False,
    ),
    _group("objective", [("loss", "nats", "negative log-likelihood per token of the demonstrations")]),
    _group("objective", [("lr", "", "learning rate")]),
    _group("length", [("tokens", "tokens", "tokens of the demonstrations, prompts included")]),
    _group("time", [("seconds", "s", "duration of the step")]),
)

#: kind of record -> name -> field
FIELDS: Mapping[str, Mapping[str, Field]] = {
    "train": TRAIN,
    "eval": EVAL,
    "warmup": WARMUP,
    "phase": _table(_group("bookkeeping", [*_KIND, ("phase", "", "phase that begins")], tracked=False)),
    "recovered": _table(
        _group(
            "bookkeeping",
            [
                *_KIND,
                ("step", "", "last step that still holds; -1: none. It undoes the records of later steps"),
                ("incarnation", "", "incarnation of the trainer that continues"),
            ],
            tracked=False,
        )
    ),
    "used_up": _table(
        _group(
            "bookkeeping",
            [
                ("kind", "", "kind of the record"),
                ("step", "", "step that got no batch, because the prompts are used up"),
                ("reason", "", "why"),
            ],
            tracked=False,
        )
    ),
}


# ---- tables of all fields of the step log in docs/metrics.md. `make docs` writes them; a test compares them


BEGIN, END = "<!-- fields: written by `make docs` -->", "<!-- end of fields -->"

_TITLES = {
    "train": "`train`: a train step",
    "eval": "`eval`: an evaluation",
    "warmup": "`warmup`: a step of the supervised warm-up",
    "phase": "`phase`: a phase of the run begins",
    "recovered": "`recovered`: training continues from a checkpoint",
    "used_up": "`used_up`: the prompts ended before the planned steps",
}


def reference() -> str:
    """Return Markdown with a table for each kind of record."""
    return "\n".join(line for kind in FIELDS for line in _kind(kind)).strip() + "\n"


def rewrite(page: str) -> str:
    """Return ``page`` with new tables between the marks ``BEGIN`` and ``END``."""
    head, _, rest = page.partition(BEGIN)
    _, _, foot = rest.partition(END)
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{foot}"


def _kind(kind: str) -> Iterator[str]:
    yield f"### {_TITLES[kind]}\n"
    yield "| field | unit | meaning |\n|---|---|---|"
    for group in GROUPS:
        own = [field for field in FIELDS[kind].values() if field.group == group]
        if own and len({field.group for field in FIELDS[kind].values()}) > 1:
            yield f"| **{group}** | | |"
        names: dict[tuple[str, str], list[str]] = {}  # numbers of the same meaning have one row
        for field in own:
            names.setdefault((field.unit, field.meaning.replace("|", "\\|")), []).append(f"`{field.name}`")
        yield from (f"| {', '.join(same)} | {unit} | {meaning} |" for (unit, meaning), same in names.items())
    yield ""


# ---- points of curves from the records of the step log: the names and numbers that trackers and ``/metrics`` show


CURVES = ("train", "eval", "warmup")  # kinds of records with points
#: numbers of an evaluation that is not complete: the others would be those of the completions that ended first
_OF_INCOMPLETE = frozenset({"complete", "failed", "problems", "samples", "step"})


def shown_numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of a record, without what an evaluation that is not complete must not show."""
    is_incomplete = record.get("kind") == "eval" and record.get("complete") is False
    for name, value in numbers(record):
        if not is_incomplete or name in _OF_INCOMPLETE:
            yield name, value


def step_of(record: Mapping[str, Any]) -> int | None:
    """Return the place of a record on the axis of its curves; None without a readable step.

    The weights of an evaluation may be newer than the step after which it was due.
    """
    step, version = record.get("step"), record.get("version")
    if not isinstance(step, int):
        return None
    return max(step, version) if record.get("kind") == "eval" and isinstance(version, int) else step


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a record as trackers get them: ``train/reward_mean``, ``eval/{set}/accuracy``."""
    kind = str(record.get("kind"))
    prefix = f"eval/{record.get('set', 'eval')}" if kind == "eval" else kind
    found = ((_metric(kind, prefix, name), value) for name, value in shown_numbers(record))
    return {name: value for name, value in found if name}


@lru_cache(8192)
def _metric(kind: str, prefix: str, name: str) -> str:
    """Return the name of a metric; "" for a field that is no curve."""
    found = field_of(kind, name)
    return f"{prefix}/{name}" if found is None or found.field.tracked else ""


# ---- gauges of the newest numbers of the step log: ``realsys_train_*``, ``realsys_eval_*``, ``realsys_warmup_*``
#
#     stats/entropy_mean    -> realsys_train_stats_entropy_mean
#     untrained/{reason}    -> realsys_train_untrained{reason="stale"}
#     accuracy of a set     -> realsys_eval_accuracy{set="eval"}
#
# Name, unit and meaning are those of ``realsys.observe.step_fields`` (docs/metrics.md).


def curve_metrics(records: Iterable[Mapping[str, Any]]) -> list[GaugeMetricFamily]:
    """Return the gauges of all numbers in ``records``, the newest ones of the step log."""
    families: dict[str, GaugeMetricFamily] = {}
    for record in records:
        kind = str(record.get("kind"))
        own = {"set": str(record.get("set"))} if kind == "eval" else {}
        for name, value in shown_numbers(record):
            if found := field_of(kind, name):
                labels = {**own, **found.labels}
                family = families.setdefault(metric_name(kind, found.field), _family(kind, found.field, list(labels)))
                family.add_metric(list(labels.values()), value)
    return list(families.values())


def metric_name(kind: str, field: Field) -> str:
    """Return the name of a field in ``/metrics``: its path without the parts that are labels."""
    fixed = [part for part in field.name.split("/") if not part.startswith("{")]
    return "_".join(["realsys", kind, *fixed])


def _family(kind: str, field: Field, labels: list[str]) -> GaugeMetricFamily:
    unit = f" ({field.unit})" if field.unit else ""
    return GaugeMetricFamily(metric_name(kind, field), f"{field.meaning}{unit}", labels=labels)


if __name__ == "__main__":
    path = Path("docs/metrics.md")
    path.write_text(rewrite(path.read_text("utf-8")), encoding="utf-8")
