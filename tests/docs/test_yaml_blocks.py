"""Each experiment that a page shows as YAML can be composed."""

import re
from pathlib import Path

import pytest
import yaml

from realsys.config.compose import compose
from realsys.launch.launchers.contract import check_launcher

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    (page.name, block)
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
]


def test_pages_have_such_blocks():
    assert {page for page, _ in BLOCKS} == {"cluster.md", "configuration.md", "rewards.md"}


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_block_composes(page, block, tmp_path):
    name = yaml.safe_load(block)["experiment"]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / f"{name}.yaml").write_text(block, encoding="utf-8")
    config = compose([f"experiment={name}"], config_dir=tmp_path)
    assert config.experiment == name
    check_launcher(config)
