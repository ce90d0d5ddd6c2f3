"""Commands that read the recorded steps of a trial."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from realsys.launch.arguments.base import Command, add_json, add_trial, preload_workers


def _add_recorded(parser: ArgumentParser) -> None:
    add_trial(parser)
    parser.add_argument("--step", type=int, metavar="N", help="default: the last recorded step")


def _replay(args: Namespace) -> int:
    from realsys.launch.commands.replay import replay

    preload_workers(args)
    return replay(args.trial_dir, args.step)


def _add_samples(parser: ArgumentParser) -> None:
    _add_recorded(parser)
    parser.add_argument(
        "--eval", nargs="?", const="", metavar="ID", help="completions of this evaluation (default: the newest)"
    )
    parser.add_argument("--set", default="", metavar="NAME", help="with --eval: only this data set")
    parser.add_argument("--dropped", action="store_true", help="groups that were not trained: dropped, failed, too old")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts to show, 0: all (default: 4; with --json: all)")
    add_json(parser, "print one JSON object per sample")
    filters = parser.add_argument_group("filters")
    filters.add_argument("--ticket", "--problem", dest="group", default="", metavar="ID", help="only this prompt")
    verdicts = filters.add_mutually_exclusive_group()
    for verdict, what in (("correct", "right"), ("wrong", "wrong"), ("unjudged", "not judged")):
        verdicts.add_argument(
            f"--{verdict}", dest="verdict", action="store_const", const=verdict, help=f"only {what} completions"
        )
    filters.add_argument("--truncated", action="store_true", help="only completions that were cut at their limit")
    filters.add_argument("--min-reward", type=float, metavar="R", help="reward of at least R")
    filters.add_argument("--max-reward", type=float, metavar="R", help="reward of at most R")
    filters.add_argument("--min-staleness", type=int, metavar="N", help="oldest token at least N versions behind")
    filters.add_argument("--min-tokens", type=int, metavar="N", help="at least N sampled tokens")
    filters.add_argument("--grep", default="", metavar="TEXT", help="prompt or completion has this text, in any case")
    filters.add_argument("--longest", action="store_true", help="the longest completions first")


def _samples(args: Namespace) -> int:
    from realsys.launch.commands.samples import Options, show_samples
    from realsys.observe.samples.filters import Filter

    chosen = Filter(
        verdict=args.verdict or "any",
        truncated=args.truncated,
        reward_min=args.min_reward,
        reward_max=args.max_reward,
        stale_min=args.min_staleness,
        tokens_min=args.min_tokens,
        text=args.grep,
        group=args.group,
        order="longest" if args.longest else "source",
    )
    options = Options(chosen, args.step, args.eval, args.set, args.dropped, args.limit, args.json)
    return show_samples(args.trial_dir, options)


COMMANDS = (
    Command("replay", "repeat a recorded train step and compare it bit for bit", _add_recorded, _replay),
    Command(
        "samples",
        "show samples of a train step or an evaluation",
        _add_samples,
        _samples,
        "Show the samples of a recorded train step with their rewards, the completions of an evaluation (--eval), or "
        "groups that were not trained (--dropped).",
    ),
)
