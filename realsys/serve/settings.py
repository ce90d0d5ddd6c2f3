"""Settings of a training service which no field of the configuration has: its port, its model's name, and its callers.

    options, keys file ──`realsys serve`──> serve.json of the trial, mode 0600 ──read_settings──> MasterWorker

A keys file is YAML, an entry for each owner of models:

    alice: {key: tml-..., models: 8}
    bob: {key: tml-...}
"""

from __future__ import annotations

import secrets
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from realsys.errors import MALFORMED, ConfigError

#: beginning of each key; the SDK refuses others
KEY_PREFIX = "tml-"
#: characters of a key; one that can be guessed would give a stranger the models of its owner
SHORTEST_KEY = 20

_Positive = Annotated[int, msgspec.Meta(ge=1)]
#: names are folders of the trial
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_Key = Annotated[str, msgspec.Meta(pattern=rf"^{KEY_PREFIX}[!-~]+$", min_length=SHORTEST_KEY, max_length=1000)]


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A caller, and its limits.

    key              what its calls have in the header X-API-Key
    models           tenants that it may have at a time
    tokens_per_call  tokens of one call, prompts and completions together
    calls_waiting    calls of a model that have no result yet
    samples          prompts that are being sampled
    name             of the entry; no field of the file
    """

    key: _Key
    models: _Positive = 4
    tokens_per_call: _Positive = 1_000_000
    calls_waiting: _Positive = 64
    samples: _Positive = 8192
    name: str = ""


_Owners = Annotated[dict[_Name, Owner], msgspec.Meta(min_length=1)]


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a service. ``checkpoint_every``: optimizer steps of a tenant between saves of its state."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    model_name: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}$")]
    owners: _Owners
    checkpoint_every: _Positive = 10

    def __post_init__(self) -> None:
        _check_keys(self.owners)


def new_key() -> str:
    """Return a key that no one can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def read_settings(path: Path) -> ServeSettings:
    """Read serve.json. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServeSettings)
    except FileNotFoundError:
        problem = "not found: a trial with train.loop=serve is begun with realsys serve"
    except (OSError, *MALFORMED) as error:
        problem = f"cannot be read: {error}"
    raise ConfigError(path.name, str(path), problem)


def read_owners(path: Path) -> dict[str, Owner]:
    """Read a keys file. Raises ConfigError."""
    import yaml  # only the launcher reads such a file

    try:
        text = path.read_text("utf-8")
        node, tree = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("must have an entry for each owner: NAME: {key: tml-...}")
        names = Counter(key.value for key, _ in node.value)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        owners: dict[str, Owner] = msgspec.convert(tree, _Owners)
        _check_keys(owners)
    except (OSError, ValueError, yaml.YAMLError, *MALFORMED) as error:
        raise ConfigError("--keys", str(path), f"cannot be used: {' '.join(str(error).split())}") from None
    return owners


def _check_keys(owners: dict[str, Owner]) -> None:
    """Raise ValueError if two owners have the same key."""
    if named := [name for name, owner in owners.items() if owner.name]:
        raise ValueError(f"{named[0]} has a field name: an owner is called as its entry")
    by_key: dict[str, str] = {}
    for name, owner in owners.items():
        if (other := by_key.setdefault(owner.key, name)) != name:
            raise ValueError(f"{other} and {name} have the same key")
