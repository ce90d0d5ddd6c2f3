"""Choice of the member, and repetition of failed calls. The channels are never used."""

import grpc
import pytest

from realsys.cluster.names.etcd_store import EtcdAccess, EtcdMembers
from realsys.errors import NameStoreError


class Answer(grpc.RpcError):
    def __init__(self, code, details):
        self._code = code
        self._details = details

    def code(self):
        return self._code

    def details(self):
        return self._details


class Asked:
    """Calls of members: the first ones fail."""

    def __init__(self, *failures):
        self.failures = list(failures)
        self.addresses: list[str] = []
        self.moves = 0
        self.members = EtcdMembers("a:1,b:2,c:3", EtcdAccess(), self._moved, 60.0, 60.0)

    def _moved(self):
        self.moves += 1

    def __call__(self, member, **_):
        self.addresses.append(member.address)
        if self.failures:
            raise self.failures.pop(0)
        return "reply"


NO_LEADER = Answer(grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader")
WAITED = Answer(grpc.StatusCode.UNKNOWN, "context deadline exceeded")
FULL = Answer(grpc.StatusCode.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")


def test_next_member_is_asked_until_one_answers():
    asked = Asked(NO_LEADER, WAITED)
    assert asked.members.call(asked, "read k") == "reply"
    assert sorted(asked.addresses) == ["a:1", "b:2", "c:3"] and asked.moves == 2
    assert asked.members.call(asked, "read k") == "reply"
    assert asked.addresses[-1] == asked.addresses[-2], "it stays with the member that answered"
    asked.members.close()


@pytest.mark.parametrize(("known", "limit"), [(False, "0.01 s"), (True, "0.3 s")])
def test_known_etcd_is_waited_for(known, limit):
    """A worker that starts while etcd is away; the launcher has found etcd at this address."""
    members = EtcdMembers("a:1", EtcdAccess(), lambda: None, 0.01, 0.3, known=known)

    def fail(*_, **__):
        raise NO_LEADER

    with pytest.raises(NameStoreError, match=f"did not answer within {limit}"):
        members.call(fail, "read k")
    members.close()


def test_calls_end_when_the_store_closes():
    asked = Asked(*[NO_LEADER] * 1000)
    asked.members.interrupt()
    with pytest.raises(NameStoreError, match="no leader"):
        asked.members.call(asked, "list k")
    assert len(asked.addresses) == 1
    asked.members.close()


@pytest.mark.parametrize(
    ("failure", "repeatable", "moves", "problem"),
    [
        (NO_LEADER, False, 1, "cannot add k: etcd at a:1,b:2,c:3 .*etcdserver"),
        (FULL, False, 0, "cannot add k: etcd at a:1,b:2,c:3 .*etcdserver"),
        (FULL, True, 0, "RESOURCE_EXHAUSTED"),
    ],
)
def test_call_that_must_not_be_repeated_fails_once(failure, repeatable, moves, problem):
    asked = Asked(failure)
    with pytest.raises(NameStoreError, match=problem):
        asked.members.call(asked, "add k", repeatable=repeatable)
    assert len(asked.addresses) == 1 and asked.moves == moves
    asked.members.close()
