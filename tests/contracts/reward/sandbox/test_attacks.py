"""Attacks on the sandbox: none gains a verdict, changes the outside, stays, or reaches the next program."""

import asyncio
import os

import pytest

from realsys.reward.pool import ItemLimits, VerifierPool
from tests.support.sandbox.attacks import code_tests, honest, passes_unguarded, read_attacks
from tests.support.sandbox.surroundings import ENVIRONMENT, Outside, opened

ATTACKS = {attack.name: attack for attack in read_attacks()}
BOUND_S = 30.0  # bound on the time of a verdict, on a machine with other work
SECRET = "0123456789abcdef"

pytestmark = pytest.mark.needs("bwrap")


class Judge:
    """A pool with one verifier process, which judges attacks and honest programs in turn."""

    def __init__(self):
        self._runner = asyncio.Runner()
        self._pool = VerifierPool(1, ItemLimits(20.0, BOUND_S))

    def judge(self, item):
        async def within():
            async with asyncio.timeout(BOUND_S):
                return (await self._pool.verify("code", item)).correct

        return self._runner.run(within())

    def close(self):
        self._runner.run(self._pool.close())
        self._runner.close()


@pytest.fixture(scope="module")
def judge():
    os.environ[ENVIRONMENT] = SECRET
    judge = Judge()
    assert judge.judge(honest("calls"))
    yield judge
    judge.close()
    del os.environ[ENVIRONMENT]


@pytest.fixture
def outside(tmp_path):
    with opened(Outside(tmp_path)) as outside:
        yield outside


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, attack in ATTACKS.items() for kind in attack.kinds])
def test_attack_gains_nothing(judge, outside, name, kind):
    attack, before = ATTACKS[name], len(outside.processes())
    item = attack.item(kind, outside.source())
    verdicts = [judge.judge(item) for _ in range(attack.runs)]
    if not attack.is_right:
        assert verdicts == [False] * attack.runs
    assert judge.judge(honest(kind, attack.task)), "the next program must pass"
    assert outside.changes() == []
    assert len(outside.processes()) <= before, "processes of the attack are left"


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.gains_unguarded])
def test_attack_gains_without_isolation(outside, tmp_path, name):
    """Otherwise the attack would test nothing."""
    attack, environment = ATTACKS[name], {**os.environ, ENVIRONMENT: SECRET}
    tests = code_tests(attack.kinds[-1], attack.task, outside.source())
    assert passes_unguarded(attack.program(), tests, tmp_path, environment)


def test_suite_has_every_kind_of_attack():
    assert len(ATTACKS) >= 100
    assert {kind for attack in ATTACKS.values() for kind in attack.kinds} == {"stdio", "calls", "source", "mapped"}
