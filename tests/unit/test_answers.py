"""What counts as the same answer. Each group of cases is one point in which the graders or math-verify were wrong."""

import pytest

from rl.rewards.extract import boxes, final_answer, last_number_of, marked_number_of
from rl.rewards.functions import FUNCTIONS
from tests.answer_forms import GSM8K_FILE, MATH_FILE, read_lines


def math(response: str, answer: str, prompt: str = "") -> float:
    score = FUNCTIONS["math"](prompt, response, {"answer": answer})
    assert isinstance(score, float)
    return score


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        (r"\$18", r"\$18", 1.0),
        (r"\$18", "18", 1.0),
        (r"\$18", r"18\text{ dollars}", 1.0),
        (r"\$306,\!956.63", "306956.63", 1.0),
        (r" \$ 54.60", r"\$54.6", 1.0),
        (r"\$18", r"\$180", 0.0),
        (r"\$18", r"18\text{ cents}", 0.0),
        (r"\$\dfrac23 \approx \$0.67", r"\frac{2}{3}", 1.0),
    ],
)
def test_a_reference_answer_in_dollars(gold: str, answer: str, score: float) -> None:
    assert math(rf"\boxed{{{answer}}}", gold) == score


@pytest.mark.parametrize(
    ("response", "number"),
    [
        (r"\boxed{5\text{ dollars}} in 7 days", "5"),
        (r"\boxed{\text{5 dollars}} in 7 days", "5"),
        (r"\boxed{1{,}234} in 7 days", "1234"),
        (r"\boxed{\frac{1}{2}} in 7 days", "0.5"),
        (r"\boxed{-3\frac{1}{2}} in 7 days", "-3.5"),
        (r"\boxed{10\text{ m}^2} in 7 days", "10"),
        (r"\boxed{-\$5} in 7 days", "-5"),
        (r"\boxed{5 \text{ in 3 days}}", "5"),
        (r"\boxed{\mathbf{5}} in 7 days", "5"),
        (r"\boxed{\boxed{5}} in 7 days", "5"),
        (r"\boxed{\frac{1}{0}} in 7 days", None),
    ],
)
def test_a_box_with_braces_inside(response: str, number: str | None) -> None:
    assert marked_number_of(response) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (".18", "0.18"),
        ("-.18", "-0.18"),
        ("$.18", "0.18"),
        ("so...18", "18"),
        ("18/7", "2.57142857142857"),
        ("18 / 4", "4.5"),
        ("2 1/2", "2.5"),
        ("18 000", "18000"),
        (r"12\,345", "12345"),
        ("18 00", "0"),
        ("1,2345", "2345"),
        ("10-15", "15"),
        ("\u22127", "-7"),
        ("5^2", "25"),
        (r"1.8 \times 10^{3}", "1800"),
        ("9" * 400, None),
    ],
)
def test_the_number_that_a_text_ends_in(text: str, number: str | None) -> None:
    assert last_number_of(text) == number


@pytest.mark.parametrize(
    ("response", "score"), [("#### 18", 1.0), ("#### .18", 0.0), ("#### 18/7", 0.0), ("#### 18 000", 0.0)]
)
def test_the_whole_number_after_the_mark_counts(response: str, score: float) -> None:
    assert FUNCTIONS["gsm8k"]("", response, {"answer": "#### 18"}) == score


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12345", r"12\,345"),
        ("12345", "12 345"),
        (r"71^\circ", r"71\degree"),
        (r"71^\circ", "71°"),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}^\circ"),
        (r"(2,\infty)", "x > 2"),
        (r"(2,\infty)", "2<x"),
        (r"(2,\infty)", r"\{x \mid x > 2\}"),
        ("[1,3)", r"1 \leq x < 3"),
        ("[1,3)", r"x \ge 1 \text{ and } x < 3"),
        (r"(-\infty,2)\cup[3,\infty)", r"x < 2 \text{ or } x \ge 3"),
        (r"(-\infty,3)\cup(3,\infty)", r"x \ne 3"),
        (r"-80\leq g(x)\leq 82", "[-80,82]"),
        (r"\tan 15^\circ", r"2 - \sqrt{3}"),
        ("a + b + c", "c + b + a"),
        (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\left[\begin{array}{c} \frac12 \\ 3 \end{array}\right]"),
        (r"3 \pm 2 \sqrt{2}", r"3 - 2\sqrt{2}, 3 + 2\sqrt{2}"),
        (r"8\!:\!34 \text{ p.m.}", r"8:34\text{ PM}"),
        ("16200", r"1.62 \times 10^4"),
        ("12_5", r"12_{\text{five}}"),
        (r"\text{A5}_{11}", "A5_{11}"),
        ("(2,3)", "(x, y) = (2, 3)"),
    ],
)
def test_the_same_answer_in_other_signs(gold: str, answer: str) -> None:
    assert math(rf"\boxed{{{answer}}}", gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("12_5", "12_6"),
        ("12_5", r"12_{\text{six}}"),
        (r"\text{east}", r"\text{seat}"),
        ("east", "seat"),
        ("LQSX", "XSQL"),
        ("50", r"50\%"),
        ("50", r"50\text{ percent}"),
        (r"50\%", "50"),
        (r"(2,\infty)", r"\{2,\infty\}"),
        ("(1,2)", r"\{1,2\}"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        (r"[2,\infty)", "x > 2"),
        (r"(2,\infty)", "x < 2"),
        ("5", r"5 \text{ or } 6"),
        ("5", "x > 5"),
        (r"10\text{ inches}", r"10\text{ feet}"),
        (r"8\!:\!34 \text{ p.m.}", r"8:34 \text{ a.m.}"),
        (r"\tan 15^\circ", r"\tan 15"),
        ("10t + 12", "10 + 12"),
        (r"\dfrac{1}{29,\!322,\!216}", "0"),
        (r"\frac{1}{3}", "0.33"),
    ],
)
def test_another_answer_in_similar_signs(gold: str, answer: str) -> None:
    assert math(rf"\boxed{{{answer}}}", gold) == 0.0


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1.0),
        (r"\text{Evelyn}", r"\boxed{evelyn}", 1.0),
        (r"\text{Evelyn}", "The answer is Evelyn.", 1.0),
        (r"\text{Evelyn}", "Evelyn", 1.0),
        (r"\text{Evelyn}", r"\boxed{\text{Carla}}", 0.0),
        ("east", r"\boxed{\text{east}}", 1.0),
        (r"\text{(B)}", r"\boxed{B}", 1.0),
        (r"\text{(B)}", "The answer is (B).", 1.0),
        ("B", r"\boxed{\textbf{(B)}}", 1.0),
        (r"\text{(B)}", r"\boxed{C}", 0.0),
        (r"\text{A,C}", r"\boxed{\text{C and A}}", 1.0),
        (r"\text{A,C}", r"\boxed{A}", 0.0),
        (r"\text{Softball, Kickball, Picnic}", r"\boxed{\text{Softball, Kickball, Picnic}}", 1.0),
        (r"\text{Softball, Kickball, Picnic}", r"\boxed{\text{Picnic, Kickball, Softball}}", 0.0),
        (r"\mbox{four}", r"\boxed{4}", 1.0),
    ],
)
def test_an_answer_in_words(gold: str, response: str, score: float) -> None:
    assert math(response, gold) == score


def test_a_percent_sign_is_optional_where_the_prompt_asks_for_a_percentage() -> None:
    asked = "What percent of the marbles are red?"
    for prompt, score in ((asked, 1.0), ("A shirt is 20 percent off. What does it cost?", 0.0)):
        assert math(r"\boxed{50}", r"50\%", prompt) == score
        assert math(r"\boxed{50\%}", "50", prompt) == score
    assert math(r"\boxed{50\%}", "0.5") == 1.0, "as a number it is a half"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1} was wrong, so \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} \boxed{", r"\frac{1}{2}"),
        ("The answer is $5$, where $x$ is the width.", "5"),
        ("First $4$, then $5$.", "5"),
        ("The answers are $1$ and $2$.", "1, 2"),
        (r"The answer is 12,\! 000.", r"12,\! 000"),
        ("The answer is the number of apples, which is 18.", None),
        ("nothing", None),
    ],
)
def test_the_final_answer_as_it_is_written(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


def test_hostile_braces_take_linear_time() -> None:
    assert boxes(r"\boxed{" * 200_000) == []
    assert len(boxes(r"\boxed{1}" * 100_000)) == 100_000


def test_every_reference_answer_is_the_same_as_itself() -> None:
    assert [gold for gold in read_lines(MATH_FILE) if math(rf"\boxed{{{gold}}}", gold) != 1.0] == []
    for number in read_lines(GSM8K_FILE):
        assert FUNCTIONS["gsm8k"]("", f"#### {number}", {"answer": f"so\n#### {number}"}) == 1.0


@pytest.mark.parametrize(
    ("name", "responses"),
    [
        ("gsm8k", ["#### 1234", r"\boxed{1{,}234\text{ cm}}", r"\boxed{\frac{2468}{2}}", "$1,234.00", "1 234"]),
        ("math", [r"\boxed{\frac{1}{2}}", r"\boxed{0.5\text{ cm}}", r"\boxed{x = \tfrac12}", "The answer is 1/2."]),
        ("math", [r"\boxed{(2,\infty)}", r"\boxed{x > 2}", r"$x \in \left(2, \infty\right)$"]),
        ("math", [r"\boxed{\text{East}}", r"\boxed{east}", "The answer is east."]),
        ("math", [r"\boxed{1, 2}", r"\boxed{\{2, 1\}}", "$1$ and $2$"]),
    ],
)
def test_equal_answers_are_equal_votes(name: str, responses: list[str]) -> None:
    votes = {FUNCTIONS[name].answer(response) for response in responses}  # type: ignore[attr-defined]
    assert len(votes) == 1 and None not in votes


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("9", "<think>hmm 3</think><answer>9</answer>"),
        ("9", "<think>\nlet me think $3$\n</think>\n<answer>\n9\n</answer>"),
        ("9", "<answer>The answer is 9</answer>"),
        (r"\frac{14}{3}", r"It is \boxed{\frac{14}{3}}. (I put it within \boxed{} as requested.)"),
        ("52_8", r"\boxed{$52_8$}"),
        ("52_8", r"\boxed{N = 52_8}"),
        ("52_8", r"$\boxed{52}_8$"),
        ("52_8", "#### 52_8"),
        (r"3\sqrt{13}", r"#### 3\sqrt{13}"),
        (r"\frac{7}{2}", r"\boxed{\mathbf{\frac{7}{2}}}"),
        (r"\frac{7}{2}", r"\boxed{\mathbf{{{{{{\frac{7}{2}}}}}}}}"),
        ("9", r"\boxed{{\bf 9}}"),
        ("9", r"\boxed{x\!=\!9}"),
        ("9", r"\boxed{x\>=\>9}"),
        (r"\$36", r"\boxed{\$36\text{ per day}}"),
        ("720", r"\boxed{\text{Answer: } 720}"),
        (r"\pi", r"\boxed{\pi \approx 3.14}"),
    ],
)
def test_answers_as_models_write_them(gold: str, response: str) -> None:
    assert math(response, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("137", r"\approx ".join(map(str, range(1, 160)))),
        ("(2,3)", r"(1\approx 2\approx 3,1\approx 2\approx 3)"),
        ("12", r"77777\approx 12"),
        ("12", r"12\approx 77777"),
        ("9", r"9\text{ thousand}"),
        ("9", "9 thousand"),
        ("9", r"\text{it is not true that it is }9"),
        (r"(2,\infty)", "x>2 and"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}"),
    ],
)
def test_what_a_policy_could_try_instead_of_an_answer(gold: str, answer: str) -> None:
    assert math(rf"\boxed{{{answer}}}", gold) == 0.0
    FUNCTIONS["math"].answer(rf"\boxed{{{answer}}}")  # type: ignore[attr-defined]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "answer",
    [
        *("9^{9^{9^9}}", "10^{1000000000}", "99999999!", "((9!)!)!", r"\binom{10000000}{5000000}", "(x+1)^{100000}"),
        *("/".join(map(str, range(1, 60))), "(" * 990 + ")" * 990, "|x" * 900, "2^{" * 400, "{" * 1900, "-" * 1900),
        *(r"\int_0^1 \sin(x^x)\cos(e^x)\,dx", "(a+b+c+d+e)^{300}"),
    ],
    ids=lambda answer: answer[:20],
)
def test_an_answer_that_would_take_minutes_is_not_parsed(answer: str) -> None:
    """A parser or sympy would take minutes. The pool's time limit would end that after ten seconds for each answer."""
    for response in (rf"\boxed{{{answer}}}", f"The answer is ${answer}$.", answer):
        assert math(response, "137") == 0.0
        FUNCTIONS["math"].answer(response)  # type: ignore[attr-defined]


def test_a_percent_sign_is_optional_where_the_prompt_asks_for_percent() -> None:
    assert math(r"\boxed{50\%}", "50", "What percent of them are red?") == 1.0
    assert math(r"\boxed{50\%}", "50", "The tax is 20 percent. How many apples are there?") == 0.0


def test_equal_answers_are_equal_texts() -> None:
    texts = {FUNCTIONS["math"].answer(text) for text in ("#### $18.00", r"\boxed{3 \times 6 = 18}", r"\boxed{18}")}  # type: ignore[attr-defined]
    assert texts == {"18"}
