"""Final answers against references, one table for each class of answers that math-verify misreads."""

import pytest

from realsys.reward.final_answers import (
    after_thinking,
    boxes,
    final_answer,
    has_format,
    read_unit,
    rewrite,
    split_percent,
    split_unit,
    tidy_answer,
)
from realsys.reward.math_equality import check_reference, is_right, last_time, read_time

PERCENT = [
    (r"\boxed{50\%}", "0.5", True),
    (r"\boxed{50\%}", "1/2", True),
    (r"\boxed{0.5}", r"50\%", True),
    (r"\boxed{50}", r"50\%", True),
    (r"\boxed{50\%}", "50", True),
    (r"\boxed{50\%}", "50%", True),
    (r"\boxed{62.5\%}", r"\frac{5}{8}", True),
    (r"\boxed{62.5}", "62.5%", True),
    (r"\boxed{33\frac{1}{3}\%}", r"\frac{1}{3}", True),
    (r"\boxed{8 \%}", r"$8 \%$", True),
    (r"$\boxed{28}$ pct", r"$28\%$", True),
    (r"\boxed{\text{50%}}", "50%", True),
    ("It rose by 20 percent.", "0.2", True),
    ("50 percent", "50%", True),
    ("The answer is 50%.", "0.5", True),
    (r"The probability is \(25\%\).", "1/4", True),
    (r"\boxed{0.5\%}", "0.5", False),
    (r"\boxed{5\%}", "0.5", False),
    (r"\boxed{0.28\%}", r"28\%", False),
    (r"\boxed{12.5}", r"25\%", False),
]
SCIENTIFIC = [
    (r"\boxed{1.5e3}", "1500", True),
    (r"\boxed{1500}", "1.5e3", True),
    ("1.5e3", "1500", True),
    ("The answer is 1.5E3.", "1500", True),
    (r"\boxed{1.5 \times 10^3}", "1500", True),
    ("The answer is 1.5 x 10^3", "1500", True),
    ("1.5×10^3", "1500", True),
    (r"\boxed{1.5 \times 10^{-3}}", "0.0015", True),
    (r"\boxed{6.02 \cdot 10^{23}}", "6.02e23", True),
    (r"\boxed{10^{3}}", "1e3", True),
    (r"\boxed{1.6e-19}", r"1.6 \times 10^{-19}", True),
    (r"\boxed{1.6e-20}", r"1.6 \times 10^{-19}", False),
    (r"\boxed{0.0000002}", "0.0000001", False),
    (r"\boxed{6.03e23}", "6.02e23", False),
    (r"\boxed{1.5e3}", "1.5", False),
    ("1e3", "1", False),
]
TIME = [
    ("12:00", "12:00", True),
    (r"\boxed{12:00}", "12:00", True),
    (r"\boxed{4:30 \text{ p.m.}}", r"\text{4:30 p.m.}", True),
    (r"\boxed{16:30}", "4:30 p.m.", True),
    ("They arrive at 4:30 PM.", "4:30 p.m.", True),
    (r"\boxed{5 \text{ PM}}", "5:00 p.m.", True),
    (r"\boxed{\text{noon}}", "12:00", True),
    (r"\boxed{09:05}", "9:05", True),
    (r"\boxed{3:00 p.m.}", "3:00", True),
    (r"\boxed{1:00}", "12:00", False),
    (r"\boxed{3}", "12:00", False),
    (r"\boxed{4:30 a.m.}", "4:30 p.m.", False),
    (r"\boxed{4:30}", "4:30 p.m.", False),
    ("I think 12:00 or 1:00", "12:00", False),
    (r"\boxed{\frac{7}{32}}", "7:32", True),
    (r"\boxed{4:6}", "2:3", True),
]
BOXES = [
    (r"First \boxed{3}, so \boxed{4}.", "4", True),
    (r"First \boxed{3}, so \boxed{4}.", "3", False),
    (r"\boxed{3} and \boxed{4}", "4", True),
    (r"\boxed{3} and \boxed{4}", "3", False),
    (r"\boxed{3}\boxed{4}", "4", True),
    (r"\boxed{3} and \boxed{4}", "3,4", True),
    (r"\boxed{4}. Wait. \boxed{3}", "4", False),
    (r"So \boxed{255}. The final answer is $10$.", "10", True),
    (r"So \boxed{255}. The final answer is $10$.", "255", False),
    (r"\boxed{}", "4", False),
    (r"I see $4$. \boxed{???}", "4", False),  # the box counts, whatever else there is
]
HEDGED = [
    ("I think 6 or 7", "7", False),
    ("I think 6 or 7", "6", False),
    ("Either 6 or 7.", "7", False),
    ("I think 6 and 7", "7", False),
    ("between 6 and 7", "7", False),
    ("The answer is 6, maybe 7", "7", False),
    ("The answer is 7 or 6", "7", False),
    ("The answer is 6. Or maybe 7.", "7", False),
    ("The answer is 6 (or 7)", "7", False),
    ("It is 6, but it could be 7", "7", False),
    ("The answer is either 6 or 7 apples.", "7", False),
    ("The answer is $6$ or $7$.", "7", False),
    (r"\boxed{6} or \boxed{7}", "7", False),
    (r"\boxed{6 \text{ or } 7}", "7", False),
    (r"\boxed{7}, or maybe 8", "7", False),
    (r"\boxed{\frac{1}{2}} or \boxed{0.5}", "1/2", True),  # one value, twice
    ("6 or 7", "6, 7", True),
    ("I think 6 and 7", "6,7", True),
    ("x = 3 or x = -3", r"\pm 3", True),
    ("I think it is 7, not 6", "7", True),
    ("I think it is 7, not 6", "6", False),
    ("The answer is 7, since it is not 2 or 3.", "7", True),
    ("The number of multiples of 2 or 3 is 7", "7", True),
    ("We get 3 and then 12.", "12", True),
]
UNITS = [
    (r"\boxed{5\text{ cm}}", "5", True),
    (r"\boxed{5}", "5 cm", True),
    (r"\boxed{5 cm}", r"5\text{ cm}", True),
    (r"\boxed{5} cm", "5 cm", True),
    (r"\boxed{50 mm}", "5 cm", True),
    (r"\boxed{5 m/s}", "5", True),
    (r"\boxed{18\text{ km/h}}", r"5\,\mathrm{m/s}", True),
    (r"\boxed{2 \text{ hours}}", "120 minutes", True),
    (r"\boxed{1000\text{ mL}}", "1 L", True),
    (r"\boxed{100}", r"100\text{ square units}", True),
    (r"\boxed{90}", r"90^\circ", True),
    (r"\boxed{12 \text{ apples}}", "12", True),
    (r"\boxed{\$5}", "5", True),
    ("It weighs 5 kg.", "5000 g", True),
    ("It weighs 5 g.", "5 kg", False),
    (r"\boxed{5 m}", "5 cm", False),
    (r"\boxed{5} meters", "5 cm", False),
    ("The answer is 5 m.", "5 cm", False),
    (r"\boxed{15\text{ cm}^3}", r"15\text{ cm}^2", False),
    (r"\boxed{4}", "4t", False),  # a variable
    (r"\boxed{4t}", "4t", True),
    (r"\boxed{2}", "2ab", False),
]
COMPLEX = [
    (r"\boxed{e^{i\pi}}", "-1", True),
    (r"\boxed{-1}", r"e^{i\pi}", True),
    (r"\boxed{2i}", "(1+i)^2", True),
    (r"\boxed{3-2i}", "3+2i", False),
    (r"\boxed{-1}", "i^2 + n", False),  # a variable
]
COLLECTIONS = [
    (r"\boxed{2, 1}", "1, 2", True),
    ("1, 2", "1,2", True),
    ("2 and 1", "1,2", True),
    ("x = 1, x = 2", "1, 2", True),
    ("The solutions are 1 and 2.", "1, 2", True),
    (r"\boxed{\pm 3}", "3,-3", True),
    (r"\boxed{(1,2),(3,4)}", "(3,4),(1,2)", True),
    (r"\boxed{x=1, y=2}", "x=1, y=2", True),
    ("{1,2}", r"\{1,2\}", True),
    (r"\boxed{\{2,1\}}", "{1,2}", True),
    ("The interval is (1, 2].", "(1,2]", True),
    (r"\boxed{(-\infty, 3) \cup (5, \infty)}", "(-inf, 3) U (5, inf)", True),
    ("(-oo, 3) U (5, oo)", r"(-\infty, 3) \cup (5, \infty)", True),
    ("x in [0,1]", "[0,1]", True),
    (r"\boxed{x<2 \text{ or } x>5}", "x < 2 or x > 5", True),
    (r"\boxed{\emptyset}", r"\varnothing", True),
    (r"\boxed{\mathbb{R}}", r"(-\infty,\infty)", True),
    ("1, 2", "2", False),
    (r"\boxed{1}", "1,2", False),
    (r"\boxed{1,2,3}", "1,2", False),
    (r"\boxed{x=2, y=1}", "x=1, y=2", False),
    ("[1,2]", "(1,2]", False),
    (r"\boxed{(2,1)}", "(1,2)", False),
    (r"\boxed{\{1,2\}}", "(1,2)", False),
    (r"\boxed{(1,2)}", r"\{1,2\}", False),
]
THINKING = [
    (r"<think>\boxed{3}</think>The answer is \boxed{4}", "4", True),
    (r"<think>\boxed{3}</think>The answer is \boxed{4}", "3", False),
    ("so \\boxed{3}</think>\n\n4", "4", True),
    ("<think>4 or 5</think> 4", "4", True),
    (r"<think>\boxed{4}", "4", False),
    (r"<think>\boxed{4}</think>", "4", False),
]
NUMBERS_AND_NAMES = [
    ("1 1/2", "1.5", True),
    (r"\boxed{3/2}", "1 1/2", True),
    ("7,425,000", "7425000", True),
    ("**42**", "42", True),
    (r"\boxed{**42**}", "42", True),
    ("x^2+1", "x^2 + 1", True),
    ("The answer is A.", "A", True),
    (r"\boxed{\text{(C)}}", "C", True),
    (r"\boxed{\text{even}}", r"\text{even}", True),
    (r"\boxed{odd}", r"\text{even}", False),
    (r"\boxed{B}", "A", False),
    ("", "4", False),
    ("I do not know", "4", False),
]
TAGS = [
    ("<answer>5</answer>", "5", True),
    (r"<think>7</think><answer>$\frac{1}{2}$</answer>", "0.5", True),
    ("The answer is 5.\n<answer>6</answer>", "6", True),
    ("The answer is 5.\n<answer>6</answer>", "5", False),
    ("<answer>So it is 5.</answer>", "5", True),
    (r"<answer>\boxed{5}</answer> It took 6 steps.", "5", True),
    (r"<answer>5</answer> No: \boxed{6}", "6", True),
    ("<answer>6 or 7</answer>", "7", False),
    ("<answer></answer>", "5", False),
]
MONEY = [
    (r"\boxed{£3}", "3", True),
    (r"\boxed{12.50€}", "12.5", True),
    (r"\boxed{3 \text{ €}}", "€3", True),
    (r"\boxed{-₹12}", "-12", True),
    ("It costs $3.50.", "3.5", True),
    (r"\boxed{3 pounds}", "£3", True),
    (r"\boxed{300\text{ cents}}", r"\$3", True),
    (r"\boxed{3\text{ cents}}", r"\$3", False),
    (r"\boxed{€3}", r"\$3", False),
]
LONG_NUMBERS = [
    (r"\boxed{1\,234}", "1234", True),
    (r"\boxed{1000}", r"1\,000", True),
    (r"\boxed{12~345\;678}", "12345678", True),
    ("The answer is 1\u202f000.", "1000", True),
    ("The answer is 1 234 567.", "1234567", True),
    ("The answer is 1.234,56.", "1234.56", True),
    ("The answer is 1.234,56.", "1.234", False),
    ("The answer is 1\u202f000.", "1", False),
    (r"\boxed{(1.234,5)}", "(1.234,5)", True),
    (r"\boxed{12\text{ thousand}}", "12000", True),
    (r"\boxed{12{,}000{,}000}", r"12\text{ million}", True),
    (r"\boxed{\$2.5\text{ million dollars}}", "2500000", True),
    ("He has 3 dozen eggs.", "36", True),
    (r"\boxed{12\text{ thousand}}", r"12\text{ million}", False),
    (r"\boxed{2.5\text{ billion}}", "2.5", False),
    ("The answer is 5 million.", "5", False),
]
REPEATING = [
    (r"\boxed{0.\overline{3}}", r"\frac13", True),
    (r"\boxed{\frac{4}{11}}", r"0.\overline{36}", True),
    (r"\boxed{-0.1\bar 6}", "-1/6", True),
    (r"\boxed{2.\dot{9}}", "3", True),
    (r"\boxed{0.1666\ldots}", "1/6", True),
    ("The answer is 0.333...", "1/3", True),
    (r"\boxed{0.36}", r"0.\overline{36}", False),
    (r"\boxed{0.\overline{37}}", r"\frac{4}{11}", False),
    (r"\boxed{3.14159\ldots}", r"\pi", False),
]
EXACT = [
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", False),
    (r"\boxed{\frac{5}{6^{30}}}", r"\frac{1}{6^{30}}", False),
    (r"\boxed{1-\frac{1}{2^{60}}}", r"1-\frac{1}{2^{61}}", False),
    (r"\boxed{\frac{1}{12345678}}", r"\frac{1}{12345679}", False),
    (r"\boxed{2^{100}}", r"2^{100}+1", False),
    (r"\boxed{\sqrt{2}+\sqrt{3}}", r"\sqrt{5+2\sqrt{6}}", True),
    (r"\boxed{\sqrt{2}\sqrt{3}-\sqrt{6}}", "0", True),
    (r"\boxed{0.5}", "0", False),
    (r"\boxed{(\frac12)^{60}}", r"\frac{4}{2^{62}}", True),
    (r"\boxed{0.00000008100000664}", r"\frac{1}{12345678}", True),
]
#: what must not count is the last number of the answer
PARTS = [
    ("The answer is 2 2/3.", "2", False),
    ("The answer is 2 2/3.", "8/3", True),
    ("It takes 2 1/2 hours.", "2", False),
    ("It takes 2 1/2 hours.", "2.5", True),
    ("The answer is 3 1/4%.", "3", False),
    ("The answer is 4 10/3.", "10", False),
    ("The time is 5:30.", "5", False),
    ("The ratio is 3:4.", "3", False),
    ("The answer is 5 × 10.", "5", False),
    ("The grid has size 5 x 10.", "10", False),
    ("The grid has size 5 × 10.", "50", True),
    ("The grid is 5 by 10.", "10", False),
    ("So 5 × 10 = 50.", "50", True),
]
TABLES = [PERCENT, SCIENTIFIC, TIME, BOXES, HEDGED, UNITS, COMPLEX, COLLECTIONS, THINKING, NUMBERS_AND_NAMES]
TABLES += [TAGS, MONEY, LONG_NUMBERS, REPEATING, EXACT, PARTS]


@pytest.mark.parametrize(("completion", "reference", "right"), [case for table in TABLES for case in table])
def test_final_answer_equals_reference(completion, reference, right):
    assert is_right(completion, reference) is right


@pytest.mark.parametrize(
    "reference",
    [
        *(r"28\%", "50%", "12:00", "4:30 p.m.", "7:32", "1.5e3", "{1,2}", "(1,2]", "[0,1)", "1, 2", "-5", "1,000"),
        *(
            "x^2+1",
            "x = 5",
            "2ab",
            "abc",
            "A",
            r"\text{Evelyn}",
            "5 cm",
            r"\pm 3",
            r"\frac{1}{2}",
            "1 1/2",
            r"\emptyset",
        ),
        *(r"So it is \boxed{3}.", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "(1,2),(3,4)", r"-\infty", "10^{23}"),
    ],
)
def test_usable_reference_equals_itself(reference):
    assert check_reference(reference) is None


@pytest.mark.parametrize("reference", [r"900,\!000,\!000", r"\$32,\!348", "$f(x)=ax+b$, where $b$ is an integer"])
def test_reference_of_a_real_data_set_equals_itself(reference):
    assert check_reference(reference) is None


@pytest.mark.parametrize("reference", ["", "$", "???", r"\frac{1", r"\boxed{", "1/0", r"\frac{0}{0}", "25:00"])
def test_unreadable_reference_is_named(reference):
    assert check_reference(reference) == "it is no mathematical expression"


@pytest.mark.parametrize("reference", ["Paris", "yes", "it depends", "no solution", "None", "about 5", "It is 5"])
def test_reference_in_words_is_refused(reference):
    """In a box it would be a product of variables; without one it would never be found in a completion."""
    assert "it is a text" in (check_reference(reference) or "")


def test_reference_that_was_a_list_is_refused():
    assert "list" in (check_reference('["1","2"]') or "")


# ---- Where the final answer of a completion is, and whether it has the wanted format


@pytest.mark.parametrize(
    ("completion", "rest"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("<think>a", None),
        ("<think>a</think>", ""),
    ],
)
def test_thinking_part_is_cut_off(completion, rest):
    assert after_thinking(completion) == rest


def test_boxes_end_at_their_own_brace():
    found = boxes(r"\boxed{\frac{1}{2}} and \fbox {\{1\}} and \boxed{\boxed{3}} and \boxed{4")
    assert [box.content for box in found] == [r"\frac{1}{2}", r"\{1\}", r"\boxed{3}"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}, then \boxed{2} cm.", r"2\text{ cm}"),
        (r"\boxed{2} percent of it", r"2\%"),
        ("So x is 1, 2.", "1, 2"),
        ("Two birds sit on 3 trees in the garden.", None),
        (r"\boxed{" + "1" * 3000 + "}", None),
    ],
)
def test_answer_is_found(completion, answer):
    final = final_answer(completion)
    assert final is not None and final.answer == answer


@pytest.mark.parametrize(
    ("completion", "formatted"),
    [
        (r"<think>2+2</think>\boxed{4}", True),
        (r"2+2</think>\boxed{4}", True),  # the prompt has opened the thinking part
        (r"\boxed{4}", False),
        ("<think>2+2</think>4", False),
        (r"<think></think>\boxed{4}", False),
        (r"<think>2+2\boxed{4}", False),
        (r"<think>a</think><think>b</think>\boxed{4}", False),
    ],
)
def test_format_is_thinking_then_box(completion, formatted):
    assert has_format(completion) is formatted


# ---- Notations that are rewritten before math-verify reads them, times of day and units


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1.5e3", "1500"),
        ("-2E-2", "-0.02"),
        (r"3 \times 10^{4}.", "30000."),
        ("x^2 e3 2e", "x^2 e3 2e"),
        (r"x^2 \times 10^3", r"x^2 \times 10^3"),
        ("1e9999", "1e9999"),
        (r"2 \times 10^{3}!", r"2 \times 10^{3}!"),
    ],
)
def test_scientific_notation_is_written_out(text, written):
    assert rewrite(text) == written


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        ("1 3/4", "7/4"),
        ("2 5/4", "2 5/4"),
        ("{1,2}", r"\{1,2\}"),
        ("x in [0,1]", r"x \in [0,1]"),
        ("5.", "5"),
        ("1 000", "1000"),
    ],
)
def test_answer_is_tidied(text, tidied):
    assert tidy_answer(text) == tidied


def test_percent_sign_or_word_is_split():
    assert split_percent(r"50 \%") == ("50", True) and split_percent("5 percent") == ("5", True)
    assert split_percent("50") == ("50", False) and split_percent("%") == ("%", False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00", 43200),
        (r"\text{4:30 p.m.}", 59400),
        ("12:15 AM", 900),
        ("midnight", 0),
        ("24:00", 0),
        ("1:02:03", 3723),
        ("25:00", None),
        ("13:00 pm", None),
        ("2:3", None),
        ("5", None),
    ],
)
def test_time_of_day_is_read(text, seconds):
    time = read_time(text)
    assert (time.seconds if time else None) == seconds


def test_last_time_counts():
    time = last_time("From 3:00 p.m. to 4:30 p.m. it rained")
    assert time is not None and time.seconds == 59400


@pytest.mark.parametrize(
    ("text", "body", "unit"),
    [
        (r"5\text{ cm}", "5", "cm"),
        (r"9.8\,\mathrm{m/s^2}", "9.8", "m/s^2"),
        ("60 miles per hour", "60", "mph"),
        ("3 square feet", "3", "ft^2"),
        (r"15\mbox{ cm}^2", "15", "cm^2"),
        ("5cm", "5", "cm"),
        ("4t", "4t", None),
        (r"\text{even}", r"\text{even}", None),
        (r"12 \text{ apples}", "12", None),
        ("6 or 7", "6 or 7", None),
    ],
)
def test_unit_is_split_from_answer(text, body, unit):
    assert split_unit(text) == (body, read_unit(unit) if unit else None)


def test_units_of_one_quantity_differ_in_size():
    assert read_unit("km/h").powers == read_unit("m/s").powers != read_unit("m").powers
    assert read_unit("L") == read_unit("cubic m").__class__(read_unit("m^3").powers, read_unit("L").size)
    assert read_unit("furlongs") is None
