"""Agreement of the verifier ``math`` with graded answers, through the verifier processes of a run.

    python -m benchmarks.math_verifier --cases FILE.jsonl [--processes 2]

Each line of FILE has ``gold`` (reference), ``pred`` (completion), ``expected`` (1 right, 0 wrong) and ``source``.
Lines without ``gold`` are skipped.

    agreement      share of the cases whose verdict is the expected one; a case without a verdict does not agree
    disagreements  the other cases, in the file only: line, reference, end of the completion, expected and given verdict
    cpu_ms         CPU time per case of the verifier processes, with the check of its reference (in ``meta``)
    refused        references that a run would refuse before it starts (in ``meta``)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
from pathlib import Path
from typing import Any

from benchmarks._table import report
from realsys.config.schema_rollout import RewardConfig
from realsys.errors import RewardError
from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item, Verdict

_SHOWN = 160  # characters of a reference, and of the end of a completion


def read_cases(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) | {"line": number} for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)]
    return [line for line in lines if "gold" in line]


async def judge(cases: list[dict[str, Any]], processes: int) -> tuple[list[Verdict | BaseException], int, Any]:
    """Return the verdicts, the number of refused references, and the failures by cause."""
    pool = VerifierPool(processes, ItemLimits.of(RewardConfig()))
    try:
        calls = (pool.verify("math", Item("", case["pred"], case["gold"])) for case in cases)
        verdicts = await asyncio.gather(*calls, return_exceptions=True)
        failures = pool.take_failures()
        references = {case["gold"] for case in cases}
        problems = await asyncio.gather(*(pool.check_answer("math", Item("", "", text)) for text in references))
        return verdicts, sum(problem is not None for problem in problems), failures
    finally:
        await pool.close()


def cpu_s() -> float:
    """Return the CPU time of the ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(case: dict[str, Any], verdict: Verdict | BaseException) -> dict[str, Any] | None:
    """Return the disagreement with a case, or None."""
    if isinstance(verdict, BaseException) and not isinstance(verdict, RewardError):
        raise verdict
    given = verdict.correct if isinstance(verdict, Verdict) else f"no verdict: {verdict}"
    if given is bool(case["expected"]):
        return None
    shown = {"gold": case["gold"][-_SHOWN:], "pred": case["pred"][-_SHOWN:]}
    return {"line": case["line"], "source": case["source"], **shown, "expected": bool(case["expected"]), "given": given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True, help="JSONL file of graded answers")
    parser.add_argument("--processes", type=int, default=2, help="verifier processes")
    arguments = parser.parse_args()
    cases = read_cases(arguments.cases)
    asyncio.run(judge(cases[:1], arguments.processes))
    start_s = cpu_s()
    verdicts, refused, failures = asyncio.run(judge(cases, arguments.processes))
    differences = [difference for pair in zip(cases, verdicts, strict=True) if (difference := compare(*pair))]
    rows = []
    for source in [*dict.fromkeys(case["source"] for case in cases), "all"]:
        count = sum(source in (case["source"], "all") for case in cases)
        differ = [difference for difference in differences if source in (difference["source"], "all")]
        rows.append(
            {"source": source, "cases": count, "agreement": 100 * (1 - len(differ) / count), "disagreements": differ}
        )
    cpu_ms = 1e3 * (cpu_s() - 2 * start_s) / len(cases)  # both pools start their processes
    meta = {"processes": arguments.processes, "cpu_ms": round(cpu_ms, 2), "refused": refused, "failures": failures}
    report("math_verifier", rows, meta)


if __name__ == "__main__":
    main()
