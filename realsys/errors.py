"""All errors that a user of realsys can meet.

RealsysError
├── ConfigError           a field of the configuration is wrong (exit code 2)
├── DataError             a line of a dataset is wrong (exit code 2)
├── ModelError            a model directory is wrong or does not fit the layout (exit code 2)
├── DeviceError           a process was given a GPU that it cannot use (exit code 2)
├── NameStoreError        the name store did not answer, or refused
│   ├── KeyMissing        the key does not exist
│   └── KeyExists         the key exists and replace was not set
├── WaitTimeout           a wait reached its time limit; the message names the awaited thing
│   └── TooFewGroups      `session.rollout.wait` reached the time limit of the script
├── StreamError           a message could not be sent, or a peer answered with an error
│   └── RemoteError       the peer's handler raised; carries its traceback
├── DecodeError           bytes that are not a message of realsys
├── WeightsError          a weight version is missing, truncated, corrupt, or not the requested one
├── CheckpointError       a checkpoint cannot be written, is incomplete or corrupt, or belongs to another model
├── RecordError           a recorded step is missing or was changed (exit code 2)
├── GenerationError       a generation server refused or failed a request
├── RewardError           a verifier raised, hung or died; never becomes a reward
├── SandboxError          the sandbox of programs failed; never the result of a program
├── AgentError            an agent or environment raised, or returned an episode that cannot be trained
├── LedgerError           an event that the rollout ledger cannot accept
├── StuckError            the run cannot make further progress; the message gives the reason
├── PromptsUsedUp         no further batch can come from the epochs, after at least one: training ends
├── ScriptError           the training loop of train.loop raised; the message has file and line
├── SessionLost           the trainer was started anew under a training script, from its last checkpoint
├── Stopped               a call of a training script after the request to stop; its last version is saved
├── StaleBatch            a training script would train tokens that are older than asynchronous.max_staleness
├── NotFiniteError        training met NaN or inf too many times in a row; the message names the samples
├── WorkerLost            a worker's lease lapsed or its process ended
└── Fenced                this process lost its own lease and must stop

Each message is one line. It names the process or field, the problem, and the remedy.
"""

from __future__ import annotations

import msgspec

#: exceptions of msgspec for bytes it cannot decode: wrong shape or values, wrong encoding, unlimited nesting
MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError)


class RealsysError(Exception):
    """Base of all errors of realsys.

    exit_code  exit code of the command that this error ends
    permanent  a restart would meet the same error again
    """

    exit_code = 1
    permanent = False


class ConfigError(RealsysError):
    """A field of the configuration is wrong. ``field`` is its dotted path."""

    exit_code = 2
    permanent = True

    def __init__(self, field: str, value: object, problem: str) -> None:
        self.field = field
        self.value = value
        self.problem = problem
        super().__init__(f"config: {field}={value!r}: {problem}")


class DataError(RealsysError):
    """A record of a dataset is wrong. The message names file and line."""

    exit_code = 2
    permanent = True


class ModelError(RealsysError):
    """A model directory is unusable, or its sizes do not divide by the layout."""

    exit_code = 2
    permanent = True


class DeviceError(RealsysError):
    """A process was given a GPU that it cannot use, or this torch has no kernel for it. A restart would not help."""

    exit_code = 2
    permanent = True


class NameStoreError(RealsysError):
    """The name store did not answer, or refused."""


class KeyMissing(NameStoreError):
    """The key does not exist in the name store."""


class KeyExists(NameStoreError):
    """The key exists in the name store."""


class WaitTimeout(RealsysError):
    """A wait reached its time limit. The message names the awaited thing and the limit."""


class TooFewGroups(WaitTimeout):
    """The groups that a training script waits for have not arrived in its time. They are kept for its next wait."""


class StreamError(RealsysError):
    """A message could not be delivered."""


class RemoteError(StreamError):
    """The handler of the peer raised. ``remote_traceback`` is the text of its traceback."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        self.remote_traceback = remote_traceback
        super().__init__(message)


class DecodeError(RealsysError):
    """The bytes are not a message of realsys."""


class WeightsError(RealsysError):
    """A weight version is missing, truncated, corrupt, or not the requested one."""


class CheckpointError(RealsysError):
    """A checkpoint cannot be written, is incomplete or corrupt, or does not fit the model that loads it."""


class RecordError(RealsysError):
    """A recorded step is missing, or its files were changed."""

    exit_code = 2
    permanent = True


class GenerationError(RealsysError):
    """A generation server refused or failed a request. ``retryable``: another server may succeed."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        self.retryable = retryable
        super().__init__(message)


class ServerBusy(GenerationError):
    """The queue of a generation server is full. The server is well."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class ServerSilent(GenerationError):
    """A call of a generation server made no progress within its time limit. The server may be well."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class ServerFailed(GenerationError):
    """A generation server refused or reset the connection, does not serve, or sent an unreadable reply."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class RewardError(RealsysError):
    """One completion has no verdict: its verifier raised, hung or died. This never becomes a reward.

    The episode leaves the loss, and the others of its group stay. ``cause``: one of
    ``realsys.reward.verifier_protocol.CAUSES``.
    """

    def __init__(self, message: str, cause: str = "died") -> None:
        super().__init__(message)
        self.cause = cause


class NoVerifierError(RealsysError):
    """No verifier process can be started, or none can load the verifier. No completion is the cause."""


class SandboxError(RealsysError):
    """The sandbox of programs failed, or this machine has none. This is never the result of a program."""


class AgentError(RealsysError):
    """An agent or environment raised, or returned an episode that cannot be trained. This never becomes a reward.

    ``defect``: type and place of the exception, or the message. Equal defects of two episodes have equal text.
    """

    def __init__(self, message: str, *, defect: str = "") -> None:
        self.defect = defect or message
        super().__init__(message)


class LedgerError(RealsysError):
    """An event that the rollout ledger cannot accept."""


class StuckError(RealsysError):
    """The run cannot make further progress. The message gives the reason."""

    permanent = True


class PromptsUsedUp(RealsysError):
    """All prompts of ``train.total_epochs`` have ended, and a batch was trained before: training ends well."""


class ScriptError(RealsysError):
    """A training script raised. Started again, it would raise again."""

    permanent = True


class SessionLost(RealsysError):
    """The trainer of a training script was started anew: begin the loop again, after the last checkpoint."""


class Stopped(RealsysError):
    """The run was asked to stop, or the trainer ends: a training script must end, too. Its last version is saved."""


class StaleBatch(RealsysError):
    """A training script would train tokens that are more than ``asynchronous.max_staleness`` versions old."""


class NotFiniteError(RealsysError):
    """Optimizer steps of ``role`` were skipped in a row for NaN or inf. ``sample_ids`` are those of the last step."""

    permanent = True
    #: ids in the message; more are only counted
    SHOWN = 16

    def __init__(self, role: str, skipped: int, sample_ids: list[str]) -> None:
        self.role = role
        self.skipped = skipped
        self.sample_ids = sample_ids
        more = f" and {len(sample_ids) - self.SHOWN} more" if len(sample_ids) > self.SHOWN else ""
        super().__init__(
            f"{role}: {skipped} optimizer steps in a row skipped because loss or gradient was not finite; "
            f"samples of the last one: {', '.join(sample_ids[: self.SHOWN])}{more}"
        )


class WorkerLost(RealsysError):
    """A worker's lease lapsed or its process ended."""


class Fenced(RealsysError):
    """This process lost its own lease and must stop immediately."""
