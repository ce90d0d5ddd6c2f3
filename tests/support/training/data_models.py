"""A character tokenizer in a directory, made once per process, for tests of what needs one."""

import json
from pathlib import Path

from realsys.config.paths import TrialPaths
from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def char_tokenizer(directory: Path, template: str | None = None) -> TextTokenizer:
    write_char_tokenizer(directory)
    if template is not None:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return TextTokenizer(directory)


def jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trial(tmp_path: Path) -> TrialPaths:
    return TrialPaths(tmp_path)
