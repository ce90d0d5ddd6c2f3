"""Every error a user of realsys can meet.

RealsysError
├── ConfigError           a field of the configuration is wrong (exit code 2)
├── DataError             a line of a dataset is wrong (exit code 2)
├── ModelError            a model directory is wrong or does not fit the layout (exit code 2)
├── NameStoreError        the name store did not answer, or refused
│   ├── KeyMissing        the key is not there
│   └── KeyExists         the key is there already and replace was not asked for
├── WaitTimeout           a bounded wait ran out; says what was waited for
├── StreamError           a message could not be sent, or a peer answered with an error
│   └── RemoteError       the peer's handler raised; carries its traceback
├── DecodeError           bytes that are no message of ours
├── WeightsError          a weight version is missing, truncated, corrupt, or not the one asked for
├── CheckpointError       a checkpoint cannot be written, is torn or corrupt, or belongs to another model
├── RecordError           a recorded step is missing, or is not what was written (exit code 2)
├── GenerationError       a generation server refused or failed a request
├── RewardError           a verifier raised, hung or died; never turned into a reward
├── AgentError            an agent or environment raised, or returned an episode that cannot be trained
├── LedgerError           an event that the rollout ledger cannot accept
├── StuckError            the run can make no further progress; says why
├── NotFiniteError        training met NaN or inf too many times in a row; names the samples
├── WorkerLost            a worker's lease lapsed or its process ended
└── Fenced                this process lost its own lease and must stop

The message of each is one line: which process or field, which value, what to do.
"""

from __future__ import annotations

import msgspec

#: what msgspec raises for bytes that are not what was asked for: shape and values, encoding, nesting without end
MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError)


class RealsysError(Exception):
    """Base of all; ``exit_code`` is what the command returns when this ends it, ``permanent`` that it will again."""

    exit_code = 1
    permanent = False


class ConfigError(RealsysError):
    """A field of the configuration is wrong. ``field`` is its dotted path."""

    exit_code = 2
    permanent = True

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field, self.value, self.problem = field, value, problem
        super().__init__(f"config: {field}={value!r}: {problem}")


class DataError(RealsysError):
    """A record of a dataset is wrong. The message names file and line."""

    exit_code = 2
    permanent = True


class ModelError(RealsysError):
    """A model directory is unusable, or its sizes do not divide by the layout."""

    exit_code = 2
    permanent = True


class NameStoreError(RealsysError):
    """The name store did not answer, or refused."""


class KeyMissing(NameStoreError):
    """The key is not in the name store."""


class KeyExists(NameStoreError):
    """The key is in the name store already."""


class WaitTimeout(RealsysError):
    """A bounded wait ran out. The message says what was waited for, and for how long."""


class StreamError(RealsysError):
    """A message could not be delivered."""


class RemoteError(StreamError):
    """The handler at the other end raised. ``remote_traceback`` is its text."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(message)


class DecodeError(RealsysError):
    """Bytes that are no message of ours."""


class WeightsError(RealsysError):
    """A weight version is missing, truncated, corrupt, or not the one asked for."""


class CheckpointError(RealsysError):
    """A checkpoint cannot be written, is incomplete, torn or corrupt, or does not fit the model that is to load it."""


class RecordError(RealsysError):
    """A recorded step is missing, or what is there is not what was written."""

    exit_code = 2
    permanent = True


class GenerationError(RealsysError):
    """A generation server refused or failed a request. ``retryable``: another server may do it."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        self.retryable = retryable
        super().__init__(message)


class RewardError(RealsysError):
    """A verifier raised, hung or died. Never turned into a reward."""


class AgentError(RealsysError):
    """An agent or environment raised, or returned an episode that cannot be trained. Never turned into a reward.

    ``defect``: type and place of the exception, or the message; equal for the same defect in another episode.
    """

    def __init__(self, message: str, *, defect: str = "") -> None:
        self.defect = defect or message
        super().__init__(message)


class LedgerError(RealsysError):
    """An event that the rollout ledger cannot accept."""


class StuckError(RealsysError):
    """The run can make no further progress; the message says why."""

    permanent = True


class NotFiniteError(RealsysError):
    """Optimizer steps of ``role`` were skipped in a row for NaN or inf. ``sample_ids``: of the last one."""

    permanent = True
    #: more ids than this do not go into the message
    SHOWN = 16

    def __init__(self, role: str, skipped: int, sample_ids: list[str]) -> None:
        self.role, self.skipped, self.sample_ids = role, skipped, sample_ids
        more = f" and {len(sample_ids) - self.SHOWN} more" if len(sample_ids) > self.SHOWN else ""
        super().__init__(
            f"{role}: {skipped} optimizer steps in a row skipped because loss or gradient was not finite "
            f"(train.max_skipped_steps); samples of the last one: {', '.join(sample_ids[: self.SHOWN])}{more}"
        )


class WorkerLost(RealsysError):
    """A worker's lease lapsed or its process ended."""


class Fenced(RealsysError):
    """This process lost its own lease and must stop at once."""
