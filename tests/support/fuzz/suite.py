"""Every decoder that is fuzzed, in one list."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.fuzz import files, models, sockets, stream
from tests.support.fuzz.targets import Target


@contextlib.contextmanager
def all_targets(folder: Path, *, torch: bool = True) -> Iterator[list[Target]]:
    """Build the targets, with their files in ``folder``.

    ``torch``: also those that need torch, such as a generation server, which take seconds to build.
    """
    with contextlib.ExitStack() as stack:

        def place(name: str) -> Path:
            (folder / name).mkdir()
            return folder / name

        found = [*stream.messages(), *stream.replies()]
        parts: list[tuple[str, Callable[[Path], Iterator[Target]]]] = [
            ("names", files.name_store),
            ("journal", files.journal),
            ("weights", files.weights),
            ("checkpoints", files.checkpoints),
            ("records", files.records),
            ("others", files.others),
            ("model", models.folder_of_a_model),
            ("verifier", models.verifier),
        ]
        if torch:
            parts.append(("tensors", models.tensors))
        for name, part in parts:
            found += part(place(name))
        found += [stack.enter_context(part()) for part in sockets.PARTS]
        found += stack.enter_context(stream.manager(place("manager")))
        if torch:
            found += stack.enter_context(stream.generation_server(place("server")))
        yield found
