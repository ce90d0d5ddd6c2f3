"""One row in the layout of each published data set, and the answer or tests that it has."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from realsys.config.paths import TrialPaths
from realsys.data.arith import write_char_tokenizer
from realsys.data.tokenizer import TextTokenizer

Values = dict[str, Any]


def packed_cases(cases: list[Values]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def stdin_case(given: str, expected: str) -> Values:
    return {"input": given, "output": expected, "testtype": "stdin"}


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 6 * 3?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "18"},
    "extra_info": {"split": "train", "index": 0},
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve: 6 * 3. The last line is Answer: $Answer."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "18", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
SLIME = {"prompt": "What is 6 * 3?", "label": "18", "metadata": {"level": 2}}
GSM8K = {"question": "Six threes?", "answer": "6 * 3 = <<6*3=18>>18 eggs.\n#### 18"}
MATH = {
    "problem": "Compute $6 \\cdot 3$.",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "First \\boxed{17}? No: \\boxed{18}.",
}
DEEPSCALER = {"problem": "Compute 6 * 3.", "answer": "18", "solution": "It is \\boxed{18}."}
LIVECODEBENCH = {
    "question_title": "Double",
    "question_content": "Print twice the number.",
    "platform": "atcoder",
    "question_id": "abc1",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([stdin_case("1\n", "2\n")]),
    "private_test_cases": packed_cases([stdin_case("5\n", "10\n")]),
    "metadata": "{}",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef double(x: int) -> int:\n    """Return twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function double that doubles a number.",
    "code": "def double(x):\n    return 2 * x",
    "test_list": ["assert double(1) == 2", "assert double(2) == 4"],
    "test_setup_code": "",
    "challenge_test_list": ["assert double(0) == 0"],
}
CODE_CONTESTS = {
    "name": "76_B. Double",
    "description": "Print twice the number.",
    "public_tests": {"input": ["1\n"], "output": ["2\n"]},
    "private_tests": {"input": ["2\n"], "output": ["4\n"]},
    "generated_tests": {"input": ["3\n"], "output": ["6\n"]},
    "source": 2,
    "difficulty": 8,
    "solutions": {"language": [3], "solution": ["print(2 * int(input()))"]},
    "time_limit": {"seconds": 1, "nanos": 500_000_000},
    "memory_limit_bytes": 256 << 20,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MESSAGES = {
    "messages": [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": "Is it warm in Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "31 degrees"},
        {"role": "assistant", "content": "Yes, 31 degrees."},
    ],
    "tools": TOOLS,
}
OWN = {"prompt": "What is 6 * 3?", "answer": "18", "level": 1}

#: layout -> row
ROWS: dict[str, Values] = {
    "verl": VERL,
    "dapo": DAPO,
    "slime": SLIME,
    "gsm8k": GSM8K,
    "math": MATH,
    "deepscaler": DEEPSCALER,
    "livecodebench": LIVECODEBENCH,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "code_contests": CODE_CONTESTS,
    "messages": MESSAGES,
    "realsys": OWN,
}


# ---- Settings with which experiment=arith makes few rows: the check of a command then takes no seconds


FEW_ROWS = (
    "data.arith.train_size=400",
    "data.arith.eval_size=32",
    "data.arith.demo_size=400",
    "evaluation.problems=16",
)


# ---- A character tokenizer in a directory, made once per process, for tests of what needs one


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
