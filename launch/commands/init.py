"""Write a file to start from: the training loop that `realsys run` executes, for you to change."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from realsys import loops
from realsys.errors import ConfigError
from realsys.launch.words import command_line


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=["loop"], help="loop: a training loop")
    parser.add_argument("file", type=Path, metavar="FILE.py", help="file to write; it must not exist")


def run(args: Namespace) -> int:
    """Write the file. Raises ConfigError if it exists, OSError."""
    if args.file.suffix != ".py":
        raise ConfigError("FILE.py", str(args.file), "must end with .py")
    text = Path(loops.__file__).read_text(encoding="utf-8")
    try:
        with args.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError("FILE.py", str(args.file), "exists: choose another name") from None
    print(f"wrote {args.file}: {command_line('run', 'experiment=arith', f'train.loop={args.file}')}")
    return 0
