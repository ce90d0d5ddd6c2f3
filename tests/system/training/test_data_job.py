"""A run on a mixture of data sets in other layouts, stopped and continued after its sources are gone."""

from collections import Counter

import pytest

from realsys.config.paths import read_config
from realsys.data.prompts import open_splits
from realsys.manager.ledger.events import Granted
from realsys.manager.ledger.journal import read_journal
from realsys.manager.ledger.prompt_order import PromptOrder
from tests.support.data.data_rows import jsonl
from tests.support.jobs.job_models import make_qwen3
from tests.support.jobs.jobs import command, run
from tests.support.jobs.ledgers import check_ledger
from tests.system.training.test_math_job import SMALL

pytestmark = pytest.mark.system


def test_mixture_continues_without_loss_or_repeat(tmp_path):
    """Every position of the order is granted once, in both parts of the run, and shares are those of the weights."""
    gsm8k = [{"question": f"What is {k} + 3?", "answer": f"{k} + 3\n#### {k + 3}"} for k in range(12)]
    slime = [{"prompt": f"Double {k}.", "label": 2 * k, "metadata": {"level": k}} for k in range(4)]
    files = [jsonl(tmp_path / "gsm8k.jsonl", gsm8k), jsonl(tmp_path / "slime.jsonl", slime)]
    mixture = ", ".join(f"{{path: {path}, weight: 1}}" for path in files)

    def train(steps):
        argv = command(
            *(text for text in SMALL if not text.startswith(("train.total_steps", "data.eval_fraction", "evaluation"))),
            f"fileroot={tmp_path / 'runs'}",
            "trial=mixed",
            f"model.path={model}",
            f"data.mixture=[{mixture}]",
            "data.eval_fraction=0",
            "evaluation.problems=0",
            f"train.total_steps={steps}",
        )
        return run(tmp_path / "runs" / "math" / "mixed", argv).completed()

    model = make_qwen3(tmp_path / "model")
    train(3)
    for path in files:
        path.unlink()
    job = train(6)
    check_ledger(job, batch_groups=4, eta=4, prompts=24)
    grants = [
        event for event, _ in read_journal(job.paths.ledger) if isinstance(event, Granted) and event.position >= 0
    ]
    order = PromptOrder(read_config(job.paths.config).seed, 24)
    positions = [event.position for event in grants]
    assert positions == list(range(len(positions))) and len(positions) >= 24
    assert all(event.prompt_index == order.at(event.position) for event in grants)
    lines = open_splits(read_config(job.paths.config), job.paths).train
    first_epoch = [lines[order.at(position)].prompt.split()[0] for position in positions[:24]]
    assert Counter(first_epoch) == {"What": 12, "Double": 12}
