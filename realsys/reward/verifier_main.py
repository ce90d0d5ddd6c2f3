"""The inside of a verifier process: ``python -m realsys.reward.verifier_main JOURNAL SOCKET PARENT``.

Consumes batches from SOCKET; waits for the next one; ends when the other side is closed, or with its parent. Adds the
outcome of each item to the shared memory JOURNAL before it begins the next item; reports the count of them on SOCKET.
It leads its own session: a verifier that signals its group, or leaves processes behind, affects no other processes.
Only needed modules are imported, so that the process is small and starts fast.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import BinaryIO

import msgspec

from realsys.agent_runner.contract import NOT_OF_THE_USER, described, one_line
from realsys.cluster import failpoint
from realsys.cluster.prctl import die_with_parent
from realsys.config.doors import VERIFIER
from realsys.reward.verifier_protocol import (
    NO_VERDICT,
    RAISED,
    REFUSED,
    RESOURCES,
    BatchDone,
    JournalWriter,
    Loaded,
    NoVerdict,
    Outcome,
    VerifierBatch,
    decode_item,
    line,
)
from realsys.reward.verifiers.contract import Item, Verdict, Verifier, answer_problem, verdict_of, wrong_over_limit

_BATCH = msgspec.json.Decoder(VerifierBatch)
_BOUNDS = {
    resource.RLIMIT_AS: 4 << 30,  # a verifier that wants more gets MemoryError
    resource.RLIMIT_FSIZE: 256 << 20,  # bytes of one file that it writes; its printed output is one, too
    resource.RLIMIT_NOFILE: 1024,
    resource.RLIMIT_CORE: 0,
}
#: refusals of the system that a process may meet again and again
_SPENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EFBIG, errno.EBADF}


def main(argv: list[str]) -> None:
    outcomes, descriptor, parent = map(int, argv)
    # SIGKILL: a verifier may hang, and then nothing would read the end of the channel.
    if not die_with_parent(signal.SIGKILL, parent):
        sys.exit(0)
    failpoint.arm("verifier/0")
    for limit, bound in _BOUNDS.items():
        _, most = resource.getrlimit(limit)
        value = bound if most == resource.RLIM_INFINITY else min(bound, most)
        resource.setrlimit(limit, (value, value))
    journal = JournalWriter(outcomes)
    with socket.socket(fileno=descriptor) as channel, open(descriptor, "rb", closefd=False) as batches:
        channel.set_inheritable(False)  # what a verifier starts must not speak in its name
        os.register_at_fork(after_in_child=channel.close)
        serve(channel, batches, journal)


def serve(channel: socket.socket, batches: BinaryIO, journal: JournalWriter) -> None:
    """Answer batches until the channel closes. A batch without items loads its verifier."""
    verifiers: dict[str, Verifier] = {}
    channel.sendall(line(BatchDone(0, 0)))
    for data in batches:
        batch = _BATCH.decode(data)
        if batch.name in verifiers:
            verify_batch(verifiers[batch.name], batch, journal, lambda message: _answer(channel, message))
            continue
        try:
            loaded = VERIFIER.load(batch.name)
            verifiers[batch.name] = update_wrapper(partial(loaded, **batch.arguments), loaded)
            reply = Loaded(batch.serial, wrong_over_limit=wrong_over_limit(loaded))
        except Exception as error:  # the module is the user's: reported
            reply = Loaded(batch.serial, describe(error), spent=_is_spent(error) or _is_spent(error.__cause__))
        channel.sendall(line(reply))


def _answer(channel: socket.socket, message: msgspec.Struct) -> None:
    garbled = failpoint.failpoint("verifier.reply") == "garbage"
    channel.sendall(b"\xc1\n" if garbled else line(message))


def verify_batch(
    verifier: Verifier, batch: VerifierBatch, journal: JournalWriter, send: Callable[[msgspec.Struct], None]
) -> None:
    """Verify the items in order. Send one message for all of them, unless they take long."""
    process, reported = os.getpid(), time.monotonic()
    journal.end = 0
    count, told, spent = 0, 0, False
    for item in batch.items:
        if count > told and time.monotonic() - reported > batch.report_s:
            send(BatchDone(batch.serial, count))
            told, reported = count, time.monotonic()
        outcome, spent = _outcome(verifier, item, batch.check)
        if os.getpid() != process:  # the verifier forked, and returned in both processes
            os._exit(0)
        journal.append(outcome)
        count += 1
        if spent:
            break
    send(BatchDone(batch.serial, count, spent))


def _outcome(verifier: Verifier, item: msgspec.Raw, check: bool) -> tuple[bytes, bool]:
    """Return the line of the outcome, and True if the process lacks a resource of the system."""
    try:
        failpoint.failpoint("verifier.judge")
        return line(_judge(verifier, decode_item(item), check)), False
    except Exception as error:  # the request boundary: reported, never a verdict
        if _is_spent(error):
            return line(NoVerdict(RESOURCES, describe(error) + "; the process is replaced")), True
        return line(NoVerdict(RAISED, describe(error))), False


def _judge(verifier: Verifier, item: Item, check: bool) -> Outcome:
    """Return the verdict of the verifier, or of the check of its reference. Raises what the verifier raises."""
    if check:
        problem = answer_problem(verifier, item)
        return Verdict(correct=True) if problem is None else NoVerdict(REFUSED, one_line(problem))
    result = verifier(item)
    try:
        return verdict_of(result)
    except (TypeError, ValueError) as error:
        return NoVerdict(NO_VERDICT, describe(error))


def _is_spent(error: BaseException | None) -> bool:
    """Return True if the process lacks something that it may lack for good: memory, files, processes."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SPENT)


def describe(error: Exception) -> str:
    """Return an error in one line, with its place if that is in the user's code."""
    failed = described(error)
    is_of_the_user = ":" in failed["place"] and not os.path.realpath(failed["place"]).startswith(NOT_OF_THE_USER)
    return failed.in_words() if is_of_the_user else f"{failed['type']}: {failed['message']}"


if __name__ == "__main__":
    main(sys.argv[1:])
