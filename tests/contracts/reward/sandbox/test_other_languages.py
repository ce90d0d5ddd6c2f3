"""Programs of other languages: compiled and run in the sandbox, by the verifier ``code``."""

import asyncio

import pytest

from realsys.reward.pool import ItemLimits, VerifierPool
from realsys.reward.verifiers.contract import Item

pytestmark = pytest.mark.needs("bwrap")

PROGRAMS = {
    "bash": "read -r n\necho $((FACTOR * n))\n",
    "c": '#include <stdio.h>\nint main(void) { long n; scanf("%ld", &n); printf("%ld\\n", FACTOR * n); }\n',
    "cpp": "#include <iostream>\nint main() { long n; std::cin >> n; std::cout << FACTOR * n << std::endl; }\n",
    "javascript": 'const n = parseInt(require("fs").readFileSync(0)); console.log(FACTOR * n);\n',
}
#: programs that name their input
BY_NAME = {
    "bash": "echo $((FACTOR * $(cat /dev/stdin)))\n",
    "c": PROGRAMS["c"].replace("scanf(", 'fscanf(fopen("/dev/stdin", "r"), '),
    "cpp": "#include <fstream>\n" + PROGRAMS["cpp"].replace("std::cin", 'std::ifstream("/dev/stdin")'),
    "javascript": PROGRAMS["javascript"].replace("readFileSync(0)", 'readFileSync("/dev/stdin")'),
}
NEEDS = {"bash": "bash", "c": "gcc", "cpp": "g++", "javascript": "node"}
LANGUAGES = [pytest.param(name, marks=pytest.mark.needs(command)) for name, command in NEEDS.items()]


def item(language, program):
    stdio = [{"stdin": f"{n}\n", "stdout": f"{2 * n}\n"} for n in (3, 5)]
    tests = {"language": language, "stdio": stdio, "time_limit_s": 5.0}
    return Item("", f"```\n{program}```", "", {"code_tests": tests})


def with_pool(body, **arguments):
    async def run():
        pool = VerifierPool(1, ItemLimits(120.0, 240.0), {"code": {"total_s": 200.0, **arguments}})
        try:
            return await body(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def verdicts(language, *programs, **arguments):
    async def judge(pool):
        return [(await pool.verify("code", item(language, program))).correct for program in programs]

    return with_pool(judge, **arguments)


@pytest.mark.parametrize("language", LANGUAGES)
def test_right_program_passes_and_wrong_fails(language):
    right, wrong = (PROGRAMS[language].replace("FACTOR", factor) for factor in "23")
    by_name = BY_NAME[language].replace("FACTOR", "2")
    assert verdicts(language, right, wrong, "this is no program (", by_name) == [True, False, False, True]


@pytest.mark.needs("gcc")
def test_attacks_on_the_compiler_gain_nothing(tmp_path):
    """The compiler reads no file of the user, and ends if its memory, time or output does not."""
    secret, right = tmp_path / "secret.h", PROGRAMS["c"].replace("FACTOR", "2")
    secret.write_text("\n")
    attacks = [
        f'#include "{secret}"\n{right}',
        f'#include "/etc/shadow"\n{right}',
        f'__asm__(".incbin \\"{secret}\\"");\n{right}',
        '#include "main.c"\n#include "main.c"\n',
        f"char block[1L << 40] = {{1}};\n{right}",
        right.replace("{ long", "{ for (;;) if (__builtin_popcount(0)) break; else fork(); long"),
    ]
    assert verdicts("c", *attacks, right) == [False] * len(attacks) + [True]


def test_language_of_the_settings_is_used():
    settings = {"shell": {"source": "main.sh", "run": ["sh", "main.sh"]}}
    right = "read -r n\necho $((2 * n))\n"
    assert verdicts("shell", right, right.replace("2", "3"), languages=settings) == [True, False]


@pytest.mark.parametrize(
    ("language", "problem"),
    [
        ("absent", "language 'absent' needs no-such-compiler, which is not found"),
        ("cobol", "language 'cobol' is not known: set data.verifier_args.languages.cobol"),
        ("bash", None),
    ],
)
def test_missing_compiler_is_found_with_the_data(language, problem):
    absent = {"source": "a.x", "compile": ["no-such-compiler", "a.x"], "makes": "a", "run": ["./a"]}

    async def check(pool):
        return await pool.check_answer("code", item(language, ""))

    found = with_pool(check, languages={"absent": absent})
    assert found is None if problem is None else problem in found
