r"""Rewrite reference answers into right and wrong forms, and count the mistakes of the graders on them.

    python -m tests.answer_forms                                              # the committed answers
    python -m tests.answer_forms --math data/math/*.jsonl --gsm8k data/gsm8k/*.jsonl [--most 150]

A form is a function from a reference answer to a whole response. It returns None where it does not apply. The forms
know nothing of the graders: they read an answer with patterns of their own. math-verify alone, with its defaults,
grades the same responses.

Forms that are left out because people would not agree on them without the problem's text:
`12` for `12_5`, `1, 2` for the point `(1, 2)`, `\frac{1}{2}` for `50\%`, a row vector for a column, and cm for cm^2.
"""

import argparse
import json
import logging
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import NamedTuple

from rl.rewards.functions import FUNCTIONS

Rewrite = Callable[[str], str | None]
HERE = Path(__file__).parent
MATH_FILE, GSM8K_FILE = HERE / "math_answers.txt", HERE / "gsm8k_answers.txt"

PLAIN = r"\d+(?:\.\d+)?"
INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d*\.\d+")
GROUPED = re.compile(r"\d{1,3}(?:(?:,\\!\s*|\{,\}|,)\d{3})+")
FRACTION = re.compile(r"(-?)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
DEGREES = re.compile(rf"(-?{PLAIN})\s*(?:\^\\circ|\^\{{\\circ\}})\.?")
PERCENT = re.compile(rf"({PLAIN})\s*\\%")
MONEY = re.compile(r"\s*\\\$\s*(\d[\d,\\!{}]*(?:\.\d+)?)")
BASE = re.compile(r"(-?\d+)_\{?(\d+)\}?\.?")
UNIT = re.compile(rf"({PLAIN})\s*\\(?:text|mbox|textnormal)\{{\s*([a-z. ]+?)\.?\}}\.?")
WORDS = re.compile(r"\\(?:text|mbox|textbf)\{\(?([A-Za-z]+(?: [A-Za-z]+)*)\)?\}")
CHOICE = re.compile(r"\(?\\(?:text|textbf)\{\(?([A-Z])\)?\}\)?|([A-F])")
RADICAL = re.compile(r"(-?)(\d*)\s*\\sqrt\s*\{(\d+)\}")
ASSIGNMENT = re.compile(r"([a-zA-Z])\s*=\s*([^=]+)")
MATRIX = re.compile(r"\s*\\begin\{pmatrix\}(.*)\\end\{pmatrix\}\s*", re.DOTALL)
EXPRESSION = re.compile(r"[\dxyzabcdnpqrst+\-^{}() ]*[a-z][\dxyzabcdnpqrst+\-^{}() ]*")
LIMIT_S = 5
LE, GE = r"\le", r"\ge"
NAMES = {2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}
OTHER_UNITS = {
    **{"cm": "m", "inches": "feet", "feet": "inches", "miles": "feet", "days": "hours", "hours": "minutes"},
    **{"min": "hours", "pounds": "ounces", "cents": "dollars", "dollars": "cents", "gallons": "quarts"},
    **{"square feet": "square inches", "square inches": "square feet", "degrees": "radians"},
}


class Row(NamedTuple):
    """One line of the table: the cases of a form, and how many of them each grader gets wrong."""

    form: str
    is_right: bool
    cases: int
    ours: int
    reference: int


# Readers of answers


def box(answer: str | None) -> str | None:
    return None if answer is None else f"\\boxed{{{answer}}}"


def integer(gold: str) -> int | None:
    """Return the value of a whole number, with or without thousands separators."""
    if INTEGER.fullmatch(gold):
        return int(gold)
    return int(re.sub(r"\D", "", gold)) if GROUPED.fullmatch(gold) else None


def decimal(gold: str) -> Decimal | None:
    return Decimal(gold) if DECIMAL.fullmatch(gold) else None


def fraction(gold: str) -> tuple[int, int] | None:
    """Return the numerator, with the sign, and the denominator."""
    match = FRACTION.fullmatch(gold)
    return (int(match[1] + match[2]), int(match[3])) if match and int(match[3]) else None


def split(text: str, separator: str = ",") -> list[str]:
    """Split at the separators outside of all brackets."""
    parts, depth, start = [], 0, 0
    text = text.replace(r"\left", "").replace(r"\right", "")
    for place, letter in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == separator and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()]


def bracketed(gold: str, brackets: Sequence[tuple[str, str]]) -> tuple[str, list[str], str] | None:
    """Return the opening bracket, the elements and the closing bracket, where one pair encloses all of the answer."""
    text = gold.replace(r"\left", "").replace(r"\right", "").strip()
    for first, last in brackets:
        if text.startswith(first) and text.endswith(last):
            inside = text[len(first) : -len(last)].strip()
            depth = 0
            for letter in inside:
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
                if depth < 0:
                    return None
            elements = split(inside)
            return (first, elements, last) if len(elements) > 1 and all(elements) else None
    return None


def is_interval(part: tuple[str, list[str], str] | None) -> bool:
    if part is None or len(part[1]) != 2:
        return False
    return "infty" in part[1][0] + part[1][1] or (part[0], part[2]) in (("[", ")"), ("(", "]"))


def interval(gold: str) -> tuple[str, str, str, str] | None:
    """Return bracket, start, end, bracket of what can only be an interval."""
    part = bracketed(gold, [("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")])
    return (part[0], part[1][0], part[1][1], part[2]) if part and is_interval(part) else None


def union(gold: str) -> list[tuple[str, str, str, str]] | None:
    if r"\cup" not in gold:
        return None
    parts = [bracketed(each.strip(), [("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")]) for each in gold.split(r"\cup")]
    found = [(part[0], part[1][0], part[1][1], part[2]) for part in parts if part and len(part[1]) == 2]
    return found if len(found) == len(parts) else None


def point(gold: str) -> list[str] | None:
    """Return the elements of an ordered tuple that is not an interval."""
    part = bracketed(gold, [("(", ")")])
    return part[1] if part and not is_interval(part) and not any("=" in each for each in part[1]) else None


def finite_set(gold: str) -> list[str] | None:
    part = bracketed(gold, [(r"\{", r"\}")])
    return part[1] if part and r"\pm" not in gold else None


def listed(gold: str) -> list[str] | None:
    """Return the elements of a list without brackets."""
    if GROUPED.fullmatch(gold) or MONEY.fullmatch(gold) or r"\text" in gold or "=" in gold or r"\pm" in gold:
        return None
    if r"\cup" in gold or bracketed(gold, [(a, b) for a in ("(", "[", r"\{") for b in (")", "]", r"\}")]):
        return None
    if "matrix" in gold or re.search(r"[A-Z]", gold):
        return None
    elements = split(gold.replace(r",\!", ""))
    return elements if len(elements) > 1 and all(elements) else None


def matrix(gold: str) -> list[list[str]] | None:
    match = MATRIX.fullmatch(gold)
    if not match:
        return None
    rows = [[entry.strip() for entry in row.split("&")] for row in match[1].split(r"\\")]
    return rows if len({len(row) for row in rows}) == 1 else None


def write_matrix(rows: list[list[str]], name: str = "pmatrix") -> str:
    return rf"\begin{{{name}}}" + r"\\".join("&".join(row) for row in rows) + rf"\end{{{name}}}"


def change(element: str) -> str | None:
    """Return another value for a number or a fraction."""
    if (value := integer(element)) is not None:
        return str(value + 1)
    if (parts := fraction(element)) is not None:
        return rf"\frac{{{parts[0] + parts[1]}}}{{{parts[1]}}}"
    return None


def terms(gold: str) -> list[str] | None:
    """Return the signed terms of a sum outside of all brackets."""
    if not re.fullmatch(r"[\w+\-^{}()\\ ]+", gold) or r"\pm" in gold or "text" in gold or "circ" in gold:
        return None
    if re.search(r"\\begin|_", gold):
        return None
    found, depth, start = [], 0, 0
    for place, letter in enumerate(gold):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(letter, 0)
        if letter in "+-" and not depth and gold[start:place].strip():
            found.append(gold[start:place].strip())
            start = place
    found.append(gold[start:].strip())
    return found if len(found) > 1 else None


def sum_of(parts: Sequence[str]) -> str:
    signed = [part if part[0] in "+-" else f"+{part}" for part in parts]
    return " ".join(signed).removeprefix("+")


def inequality(part: tuple[str, str, str, str], variable: str = "x") -> str:
    first, start, end, last = part
    left, right = ("<" if first == "(" else LE), ("<" if last == ")" else LE)
    if "infty" in start and "infty" in end:
        return rf"-\infty < {variable} < \infty"
    if "infty" in start:
        return f"{variable} {right} {end}"
    if "infty" in end:
        return f"{variable} {'>' if first == '(' else GE} {start}"
    return f"{start} {left} {variable} {right} {end}"


def two_inequalities(part: tuple[str, str, str, str]) -> str | None:
    first, start, end, last = part
    if "infty" in start + end:
        return None
    lower, upper = inequality((first, start, r"\infty", ")")), inequality(("(", r"-\infty", end, last))
    return rf"{lower} \text{{ and }} {upper}"


def group(value: int, separator: str) -> str | None:
    return f"{value:,}".replace(",", separator) if abs(value) >= 1000 else None


# Forms of the answers of MATH that are right


def only(reader: Callable, write: Callable) -> Rewrite:
    """Build a boxed form of the answers that the reader can read."""

    def rewrite(gold: str) -> str | None:
        value = reader(gold)
        return None if value is None else box(write(value))

    return rewrite


def matched(pattern: re.Pattern[str], write: Callable[[re.Match[str]], str | None]) -> Rewrite:
    return only(pattern.fullmatch, write)


def replaced(*pairs: tuple[str, str]) -> Rewrite:
    """Build a form by plain replacement. It applies where something changes."""

    def rewrite(gold: str) -> str | None:
        text = gold
        for old, new in pairs:
            text = text.replace(old, new)
        return box(text) if text != gold else None

    return rewrite


def substituted(pattern: str, new: str | Callable[[re.Match[str]], str]) -> Rewrite:
    def rewrite(gold: str) -> str | None:
        text = re.sub(pattern, new, gold)
        return box(text) if text != gold else None

    return rewrite


def exact_decimal(parts: tuple[int, int]) -> str | None:
    value = Fraction(*parts)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return f"{Decimal(value.numerator) / Decimal(value.denominator):f}" if rest == 1 else None


def mixed_number(parts: tuple[int, int]) -> str | None:
    whole, rest = divmod(abs(parts[0]), parts[1])
    return f"{'-' if parts[0] < 0 else ''}{whole}\\frac{{{rest}}}{{{parts[1]}}}" if whole and rest else None


def scientific(value: int) -> str | None:
    digits = str(abs(value)).rstrip("0")
    power = len(str(abs(value))) - 1
    if abs(value) < 1000 or len(digits) > 3:
        return None
    lead = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return rf"{'-' if value < 0 else ''}{lead} \times 10^{{{power}}}"


def plain_words(gold: str) -> str | None:
    return match[1] if (match := WORDS.fullmatch(gold)) else None


def choice(gold: str) -> str | None:
    return (match[1] or match[2]) if (match := CHOICE.fullmatch(gold)) else None


def word_list(gold: str) -> list[str] | None:
    """Return the letters of a list of choices."""
    match = re.fullmatch(r"\\text\{([A-Z](?:, ?[A-Z])+)\}|([A-Z](?:, ?[A-Z])+)", gold)
    return re.findall("[A-Z]", match[1] or match[2]) if match else None


def plus_minus(gold: str) -> str | None:
    match = re.fullmatch(r"([^,\\{}]*)\\pm(.*)", gold)
    return f"{match[1]}+{match[2]}, {match[1]}-{match[2]}" if match else None


def is_number(gold: str) -> bool:
    return integer(gold) is not None or decimal(gold) is not None


def sentence(gold: str, text: str) -> str | None:
    return text.replace("GOLD", gold.strip())


def unicode_signs(gold: str) -> str | None:
    text = gold
    for old, new in ((r"\pi", "π"), (r"\infty", "∞"), (r"^\circ", "°"), (r"\cup", "∪"), (r"\le ", "≤ ")):  # noqa: RUF001
        text = text.replace(old, new)
    if INTEGER.fullmatch(text):
        text = text.replace("-", "−")  # noqa: RUF001
    return box(text) if text != gold else None


def doubled_radical(match: re.Match[str]) -> str | None:
    return rf"{match[1]}\sqrt{{{int(match[2]) ** 2 * int(match[3])}}}" if match[2] else None


def swap_sides(match: re.Match[str]) -> str:
    return f"{match[2].strip()} = {match[1]}"


def to_one_side(gold: str) -> str | None:
    match = re.fullmatch(r"y\s*=\s*([^=]*x[^=]*)", gold)
    return box(f"y - ({match[1].strip()}) = 0") if match else None


def fractions_in_matrix(rows: list[list[str]]) -> str | None:
    new = [[re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", entry) for entry in row] for row in rows]
    return write_matrix(new) if new != rows else None


def a_slash_b(gold: str) -> str | None:
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", gold)
    is_safe = not re.search(r"\d\\[dt]?frac|frac\{\d+\}\{\d+\}\s*[a-z\\^]", gold)
    return box(text) if text != gold and is_safe else None


EQUIVALENT: dict[str, Rewrite] = {
    # the same text in other surroundings
    r"\boxed{A}": box,
    r"\boxed{ A }": lambda gold: rf"\boxed{{ {gold} }}",
    r"\boxed{A.}": lambda gold: box(gold.rstrip(".") + "."),
    r"$A$": lambda gold: f"So it is ${gold.strip()}$.",
    "<answer>$A$</answer>": lambda gold: f"<think>\nFirst $3$.\n</think>\n<answer>\n${gold}$\n</answer>",
    r"\boxed{A}, then an empty box": lambda gold: rf"It is \boxed{{{gold}}}. (Within \boxed{{}} as requested.)",
    r"\boxed{\text{Answer: } N}": lambda gold: (
        rf"\boxed{{\text{{Answer: }} {gold}}}" if integer(gold) is not None else None
    ),
    r"\boxed{\mathbf{\frac{a}{b}}}": lambda gold: (
        rf"\boxed{{\mathbf{{{gold}}}}}" if gold.startswith(r"\frac") and gold.count("{") == 2 else None
    ),
    r"\(A\)": lambda gold: rf"So it is \({gold.strip()}\).",
    r"\[A\]": lambda gold: f"So it is\n\\[{gold.strip()}\\]\nas required.",
    r"The answer is $A$.": lambda gold: sentence(gold, "The answer is $GOLD$."),
    r"The final answer is $A$. I hope ...": lambda gold: sentence(
        gold, "The final answer is $GOLD$. I hope it is correct."
    ),
    r"... is $\boxed{A}$. And 3 more words": lambda gold: sentence(
        gold, r"Therefore the answer is $\boxed{GOLD}$. This took 3 steps."
    ),
    r"\boxed{7}. No: ... \boxed{A}": lambda gold: sentence(
        gold,
        r"At first it seems to be $\boxed{7}$. But that forgets one of the conditions which the problem "
        r"names at its beginning, so we start over. Now the result is \boxed{GOLD}",
    ),
    r"... $7 - x = 2$ ... $$\boxed{A}$$": lambda gold: sentence(
        gold, r"From $7 - x = 2$ we get $x = 5$ and then $$\boxed{GOLD}$$"
    ),
    r"\fbox{A}": lambda gold: sentence(gold, r"$\fbox{GOLD}$"),
    "The answer is N.": lambda gold: sentence(gold, "The answer is GOLD.") if is_number(gold) else None,
    "**N**": lambda gold: sentence(gold, "Answer: **GOLD**") if is_number(gold) else None,
    "3 + 4 = N (plain)": lambda gold: sentence(gold, "so we find that 3x + 4 = GOLD") if is_number(gold) else None,
    r"\displaystyle A": lambda gold: box(rf"\displaystyle {gold}"),
    # whole numbers and decimals
    "1,234": only(integer, lambda value: group(value, ",")),
    "1{,}234": only(integer, lambda value: group(value, "{,}")),
    r"1,\!234": only(integer, lambda value: group(value, r",\!")),
    r"1\,234": only(integer, lambda value: group(value, r"\,")),
    "1 234": only(integer, lambda value: group(value, " ")),
    "1234 for 1,234": matched(GROUPED, lambda match: re.sub(r"\D", "", match[0])),
    "N.0": only(integer, lambda value: f"{value}.0"),
    "N.00": only(integer, lambda value: f"{value}.00"),
    r"1.2 \times 10^{3}": only(integer, scientific),
    r"\mathbf{N}": only(integer, lambda value: rf"\mathbf{{{value}}}"),
    r"\text{N}": only(integer, lambda value: rf"\text{{{value}}}"),
    r"\frac{2N}{2}": only(integer, lambda value: rf"\frac{{{2 * value}}}{{2}}"),
    "x = N": only(lambda gold: gold if is_number(gold) else None, lambda gold: f"x = {gold}"),
    r"N\text{ units}": only(lambda gold: gold if is_number(gold) else None, lambda gold: rf"{gold}\text{{ units}}"),
    "0.50 for 0.5": only(decimal, lambda value: f"{value:f}0"),
    ".5 for 0.5": substituted(r"^(-?)0\.", r"\1."),
    r"\text{N cm}": only(integer, lambda value: rf"\text{{{value} cm}}"),
    "+N": only(integer, lambda value: f"+{value}" if value > 0 else None),
    "AB = N": only(integer, lambda value: f"AB = {value}"),
    "decimal as a fraction": only(
        decimal,
        lambda value: r"\frac{{{}}}{{{}}}".format(*Fraction(value).as_integer_ratio()),
    ),
    # fractions and radicals
    r"\dfrac": replaced((r"\frac", r"\dfrac"), (r"\tfrac", r"\dfrac")),
    r"\tfrac": replaced((r"\dfrac", r"\tfrac"), (r"\frac", r"\tfrac")),
    r"\frac12": substituted(r"frac\{(\d)\}\{(\d)\}", r"frac\1\2"),
    "a/b": a_slash_b,
    "exact decimal": only(fraction, exact_decimal),
    "mixed number": only(fraction, mixed_number),
    r"\frac{2a}{2b}": only(fraction, lambda parts: rf"\frac{{{2 * parts[0]}}}{{{2 * parts[1]}}}"),
    r"\frac{-a}{b} for -\frac{a}{b}": matched(
        FRACTION, lambda match: rf"\frac{{-{match[2]}}}{{{match[3]}}}" if match[1] else None
    ),
    r"\sqrt2": substituted(r"sqrt\{(\d)\}", r"sqrt\1"),
    r"2 \cdot \sqrt{3}": matched(
        RADICAL, lambda match: rf"{match[1]}{match[2]} \cdot \sqrt{{{match[3]}}}" if match[2] else None
    ),
    r"2 \times \sqrt{3}": matched(
        RADICAL, lambda match: rf"{match[1]}{match[2]} \times \sqrt{{{match[3]}}}" if match[2] else None
    ),
    r"\sqrt{12} for 2\sqrt{3}": matched(RADICAL, doubled_radical),
    r"\pi/2": substituted(r"\\[dt]?frac\{(\d*\s?\\pi)\}\{(\d+)\}(?!\s*[a-z])", r"\1/\2"),
    # sums, products and equations
    "sum reordered": only(terms, lambda parts: sum_of(parts[::-1])),
    "spaces removed": only(
        lambda gold: gold if terms(gold) and "\\" not in gold else None, lambda gold: gold.replace(" ", "")
    ),
    "x = A": only(lambda gold: gold if FRACTION.fullmatch(gold) or RADICAL.fullmatch(gold) else None, "x = {}".format),
    "A for x = A": matched(ASSIGNMENT, lambda match: match[2].strip() if "y" not in match[2] else None),
    "A = x for x = A": matched(ASSIGNMENT, swap_sides),
    "y - (A) = 0 for y = A": to_one_side,
    r"a + b, a - b for a \pm b": only(plus_minus, str),
    # units
    r"\degree": matched(DEGREES, lambda match: rf"{match[1]}\degree"),
    r"^{\circ}": matched(DEGREES, lambda match: rf"{match[1]}^{{\circ}}"),
    "degrees without a sign": matched(DEGREES, lambda match: match[1]),
    r"\text{ degrees}": matched(DEGREES, lambda match: rf"{match[1]}\text{{ degrees}}"),
    "unit left out": matched(UNIT, lambda match: match[1]),
    r"unit in \mathrm": matched(UNIT, lambda match: rf"{match[1]}\,\mathrm{{{match[2].replace(' ', '~')}}}"),
    "unit in plain letters": matched(UNIT, lambda match: f"{match[1]} {match[2]}"),
    r"\$18 as 18": matched(MONEY, lambda match: match[1]),
    r"\$18 as 18\text{ dollars}": matched(MONEY, lambda match: rf"{match[1]}\text{{ dollars}}"),
    r"\$18 as \$18.00": matched(MONEY, lambda match: rf"\${match[1]}.00" if "." not in match[1] else None),
    r"\$ 18": matched(MONEY, lambda match: rf"\$\,{match[1]}"),
    r"\$18 in a sentence": lambda gold: (
        f"The answer is ${match[1]}." if (match := MONEY.fullmatch(gold)) and "\\" not in match[1] else None
    ),
    "n%": matched(PERCENT, lambda match: f"{match[1]}%"),
    r"n \%": matched(PERCENT, lambda match: rf"{match[1]} \%"),
    r"n\text{ percent}": matched(PERCENT, lambda match: rf"{match[1]}\text{{ percent}}"),
    r"n.0\%": matched(PERCENT, lambda match: rf"{match[1]}.0\%" if "." not in match[1] else None),
    # bases
    "12_{5}": matched(BASE, lambda match: f"{match[1]}_{{{match[2]}}}"),
    r"12_{\text{five}}": matched(
        BASE, lambda match: rf"{match[1]}_{{\text{{{NAMES[int(match[2])]}}}}}" if int(match[2]) in NAMES else None
    ),
    "(12)_5": matched(BASE, lambda match: f"({match[1]})_{{{match[2]}}}"),
    # text
    "text, in bold": lambda gold: f"**{words}**" if (words := plain_words(gold)) and len(words) > 2 else None,
    "words without \\text": only(plain_words, str),
    r"\textbf": only(plain_words, lambda words: rf"\textbf{{{words}}}"),
    r"\mathrm": only(plain_words, lambda words: rf"\mathrm{{{words.replace(' ', '~')}}}"),
    "lower case": only(
        lambda gold: plain_words(gold) if not choice(gold) else None, lambda words: rf"\text{{{words.lower()}}}"
    ),
    "The answer is WORDS.": lambda gold: f"The answer is {words}." if (words := plain_words(gold)) else None,
    "(B) for B and B for (B)": only(choice, lambda letter: rf"\text{{({letter})}}"),
    "B": only(choice, str),
    r"\textbf{(B)}": only(choice, lambda letter: rf"\textbf{{({letter})}}"),
    "The answer is (B).": lambda gold: f"The answer is ({letter})." if (letter := choice(gold)) else None,
    "letters reordered": only(word_list, lambda letters: rf"\text{{{', '.join(letters[::-1])}}}"),
    "letters joined by and": only(word_list, lambda letters: rf"\text{{{' and '.join(letters)}}}"),
    # several values
    r"\left( \right)": lambda gold: (
        box(rf"\left( {', '.join(parts)} \right)") if (parts := point(gold)) and r"\left" not in gold else None
    ),
    "(x, y) = tuple": only(
        point, lambda parts: f"({', '.join('xyzuvw'[: len(parts)])}) = ({', '.join(parts)})" if len(parts) < 7 else None
    ),
    "tuple without spaces": only(point, lambda parts: f"({','.join(parts)})"),
    r"tuple with \,": only(point, lambda parts: "(" + r",\,".join(parts) + ")"),
    "set reordered": only(finite_set, lambda parts: rf"\{{{', '.join(parts[::-1])}\}}"),
    "list reordered": only(listed, lambda parts: ", ".join(parts[::-1])),
    r"list as \{ \}": only(listed, lambda parts: rf"\{{{', '.join(parts)}\}}"),
    r"a\text{ and }b": only(listed, lambda parts: r"\text{ and }".join(parts) if len(parts) == 2 else None),
    "$a$ and $b$": lambda gold: (
        f"The answers are ${parts[0]}$ and ${parts[1]}$." if (parts := listed(gold)) and len(parts) == 2 else None
    ),
    "x = a, x = b": only(listed, lambda parts: ", ".join(f"x = {part}" for part in parts)),
    # intervals
    "interval as an inequality": only(interval, inequality),
    "interval as an inequality in t": only(interval, lambda part: inequality(part, "t")),
    r"inequality with \leq and \geq": only(
        interval, lambda part: inequality(part).replace(r"\le ", r"\leq ").replace(r"\ge", r"\geq")
    ),
    "inequality, turned around": only(
        interval,
        lambda part: (
            f"{part[1]} {'<' if part[0] == '(' else LE} x" if "infty" in part[2] and "infty" not in part[1] else None
        ),
    ),
    "inequality without spaces": only(interval, lambda part: re.sub(r" ?([<>]) ?", r"\1", inequality(part))),
    "x > a and x < b": only(interval, two_inequalities),
    r"\{x : x > 2\}": only(interval, lambda part: rf"\{{x : {inequality(part)}\}}"),
    r"x \in interval": only(interval, lambda part: rf"x \in {part[0]}{part[1]}, {part[2]}{part[3]}"),
    r"interval with \left \right": only(
        interval, lambda part: rf"\left{part[0]} {part[1]}, {part[2]} \right{part[3]}"
    ),
    "(2, +infty)": lambda gold: (
        box(re.sub(r"(?<=[,\s])\\infty", r"+\\infty", gold)) if interval(gold) and r"+\infty" not in gold
        and re.search(r"[,\s]\\infty", gold) else None
    ),
    "union as inequalities": only(union, lambda parts: r" \text{ or } ".join(inequality(part) for part in parts)),
    "union reordered": only(
        union, lambda parts: r" \cup ".join(f"{part[0]}{part[1]},{part[2]}{part[3]}" for part in parts[::-1])
    ),
    # matrices
    r"\left[\begin{array}": only(
        matrix,
        lambda rows: (
            rf"\left[\begin{{array}}{{{'c' * len(rows[0])}}}"
            + r"\\".join("&".join(row) for row in rows)
            + r"\end{array}\right]"
        ),
    ),
    "bmatrix": only(matrix, lambda rows: write_matrix(rows, "bmatrix")),
    "matrix with fractions": only(matrix, fractions_in_matrix),
    # signs outside of ASCII
    "unicode signs": unicode_signs,
}  # fmt: skip


# Forms of the answers of MATH that are wrong


def rotated(value: int) -> str | None:
    digits = str(abs(value))
    new = digits[1:] + digits[:1]
    return ("-" if value < 0 else "") + new if new != digits else None


def scramble(words: str) -> str | None:
    """Return the letters in another order."""
    letters = words.replace(" ", "")
    for new in (letters[::-1], letters[1:] + letters[0]):
        if new.lower() != letters.lower():
            return rf"\text{{{new.lower().capitalize()}}}"
    return None


def anagram(gold: str) -> str | None:
    words = plain_words(gold)
    return box(scramble(words)) if words and len(words) > 2 else None


def bare_anagram(gold: str) -> str | None:
    text = anagram(gold)
    return text.replace(r"\text{", "").replace("}}", "}") if text else None


def flip(bracket: str) -> str:
    return {"(": "[", "[": "(", ")": "]", "]": ")"}[bracket]


def flip_one(part: tuple[str, str, str, str]) -> str | None:
    """Open a closed end of an interval, or close an open one, where the end is finite."""
    first, start, end, last = part
    if "infty" not in start:
        return f"{flip(first)}{start},{end}{last}"
    return f"{first}{start},{end}{flip(last)}" if "infty" not in end else None


def flip_inequality(part: tuple[str, str, str, str]) -> str | None:
    first, start, end, last = part
    if "infty" not in start:
        return inequality((flip(first), start, end, last))
    return inequality((first, start, end, flip(last))) if "infty" not in end else None


def other_way(part: tuple[str, str, str, str]) -> str | None:
    text = inequality(part)
    turned = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    if ("infty" in part[1]) == ("infty" in part[2]):
        return None
    return " ".join(turned.get(word, word) for word in text.split(" "))


def permuted(parts: list[str]) -> str | None:
    new = [*parts[1:], parts[0]]
    return f"({', '.join(new)})" if new != parts else None


def change_one(parts: list[str]) -> list[str] | None:
    for place, part in enumerate(parts):
        if (new := change(part)) is not None and new not in parts:
            return [*parts[:place], new, *parts[place + 1 :]]
    return None


def changed(write: Callable[[list[str]], str]) -> Callable[[list[str]], str | None]:
    return lambda parts: write(new) if (new := change_one(parts)) else None


def sign_of_one(parts: list[str]) -> str | None:
    for place, part in enumerate(parts):
        if (value := integer(part)) is not None and value:
            return f"({', '.join([*parts[:place], str(-value), *parts[place + 1 :]])})"
    return None


def change_entry(rows: list[list[str]]) -> str | None:
    for number, row in enumerate(rows):
        if new := change_one(row):
            return write_matrix([*rows[:number], new, *rows[number + 1 :]])
    return None


def transposed(rows: list[list[str]]) -> str | None:
    new = [list(column) for column in zip(*rows)]
    return write_matrix(new) if new != rows and len(rows) == len(new) else None


def rows_swapped(rows: list[list[str]]) -> str | None:
    return write_matrix([*rows[1:], rows[0]]) if [*rows[1:], rows[0]] != rows else None


def inverted(parts: tuple[int, int]) -> str | None:
    if not parts[0] or abs(parts[0]) == parts[1]:
        return None
    return rf"{'-' if parts[0] < 0 else ''}\frac{{{parts[1]}}}{{{abs(parts[0])}}}"


def other_base(match: re.Match[str]) -> str | None:
    return f"{match[1]}_{{{int(match[2]) + 1}}}"


def other_sign_in_sum(parts: list[str]) -> str:
    last = parts[-1]
    return sum_of([*parts[:-1], ("+" if last[0] == "-" else "-") + last.lstrip("+-").strip()])


def other_exponent(gold: str) -> str | None:
    match = re.search(r"([a-z])\^(\d)", gold)
    if not match or not EXPRESSION.fullmatch(gold):
        return None
    return box(gold[: match.start()] + f"{match[1]}^{int(match[2]) + 1}" + gold[match.end() :])


def other_variable(gold: str) -> str | None:
    names = set(re.findall("[a-z]", gold))
    if not EXPRESSION.fullmatch(gold) or len(names) != 1 or len(gold) < 3:
        return None
    (name,) = names
    return box(gold.replace(name, "w" if name != "w" else "v"))


def shorter_decimal(value: Decimal) -> str | None:
    text = str(value)
    new = text[:-1].rstrip(".")
    return new if Decimal(new) != value else None


def other_unit(match: re.Match[str]) -> str | None:
    new = OTHER_UNITS.get(match[2].strip())
    return rf"{match[1]}\text{{ {new}}}" if new else None


def other_half_of_day(gold: str) -> str | None:
    text = gold.replace("p.m.", "a.m.")
    return box(text) if text != gold else None


def money_times(match: re.Match[str], factor: int) -> str:
    value = Decimal(re.sub(r"[^\d.]", "", match[1])) * factor
    return rf"\${value:f}"


def dropped(parts: list[str]) -> list[str] | None:
    return parts[:-1] if parts[-1] not in parts[:-1] else None


def conjugate(gold: str) -> str | None:
    if not re.fullmatch(r"[\d+\- i{}\\a-z]*\di[\d+\- ]*|[\d ]+[+-][\d ]*i", gold):
        return None
    parts = terms(gold)
    turn = [("+" if p[0] == "-" else "-") + p.lstrip("+-").strip() if "i" in p else p for p in parts or []]
    return box(sum_of(turn)) if parts else None


def listed_or_set(gold: str) -> list[str] | None:
    return listed(gold) or finite_set(gold)


def scalar(gold: str) -> str | None:
    """Return a number, a fraction or a radical as it stands."""
    text = gold.strip()
    is_plain = is_number(text) or FRACTION.fullmatch(text) or RADICAL.fullmatch(text)
    return text if is_plain and (integer(text) != 0) else None


def negated(text: str) -> str:
    return text.removeprefix("-").strip() if text.startswith("-") else f"-{text}"


WRONG: dict[str, Rewrite] = {
    # whole numbers, decimals, fractions, radicals
    "N+1": only(integer, lambda value: str(value + 1)),
    "10 N": only(integer, lambda value: str(10 * value) if value else None),
    "100 N": only(integer, lambda value: str(100 * value) if value else None),
    "N/7": only(integer, lambda value: f"{value}/7" if value else None),
    "N 000": only(integer, lambda value: f"{value} 000" if 0 < value < 1000 else None),
    ".N": only(integer, lambda value: f".{value}" if value > 0 else None),
    "N.5": only(integer, lambda value: f"{value}.5"),
    r"\frac{1}{N}": only(integer, lambda value: rf"\frac{{1}}{{{value}}}" if value > 1 else None),
    "digits rotated": only(integer, rotated),
    "last digit left out": only(integer, lambda value: str(value)[:-1] if abs(value) > 9 else None),
    r"n\% for n": only(lambda gold: gold if is_number(gold) and gold != "0" else None, lambda gold: rf"{gold}\%"),
    "sign changed": only(scalar, negated),
    r"A, A+1": only(integer, lambda value: f"{value}, {value + 1}"),
    r"A \text{ or } A+1": only(integer, lambda value: rf"{value} \text{{ or }} {value + 1}"),
    "A in the text, A+1 in the box": lambda gold: (
        rf"It is ${value}$. No: $\boxed{{{value + 1}}}$" if (value := integer(gold)) is not None else None
    ),
    "decimal cut": only(decimal, shorter_decimal),
    "decimal point left out": only(decimal, lambda value: str(value).replace(".", "").replace("-0", "-").lstrip("0")),
    "fraction inverted": only(fraction, inverted),
    "numerator + 1": only(fraction, lambda parts: rf"\frac{{{parts[0] + 1}}}{{{parts[1]}}}"),
    "denominator + 1": only(fraction, lambda p: rf"\frac{{{p[0]}}}{{{p[1] + 1}}}" if p[0] else None),
    "numerator only": only(fraction, lambda parts: str(parts[0]) if parts[0] and parts[1] != 1 else None),
    "radicand + 1": matched(RADICAL, lambda match: rf"{match[1]}{match[2]}\sqrt{{{int(match[3]) + 1}}}"),
    "radical sign left out": matched(RADICAL, lambda match: rf"{match[1]}{match[2] or '1'} \cdot {match[3]}"),
    r"\pi left out": lambda gold: (
        box(match[1]) if (match := re.fullmatch(r"(\d+)\s*\\pi", gold)) else None
    ),
    # expressions and equations
    "sign in a sum changed": only(terms, other_sign_in_sum),
    "term left out": only(terms, lambda parts: sum_of(parts[:-1])),
    "exponent changed": other_exponent,
    "variable changed": other_variable,
    "conjugate": conjugate,
    "x = -A for x = A": matched(ASSIGNMENT, lambda match: f"{match[1]} = -({match[2].strip()})"),
    "x = A + 1 for x = A": matched(ASSIGNMENT, lambda match: f"{match[1]} = {match[2].strip()} + 1"),
    r"a + b for a \pm b": lambda gold: box(text.split(",")[0]) if (text := plus_minus(gold)) else None,
    # units
    "degrees + 1": matched(DEGREES, lambda match: rf"{Decimal(match[1]) + 1}^\circ"),
    r"n\% for n^\circ": matched(DEGREES, lambda match: rf"{match[1]}\%"),
    "n for n\\%": matched(PERCENT, lambda match: match[1]),
    r"(n+1)\%": matched(PERCENT, lambda match: rf"{Decimal(match[1]) + 1}\%"),
    r"100n\%": matched(PERCENT, lambda match: rf"{Decimal(match[1]) * 100:f}\%"),
    "other unit": matched(UNIT, other_unit),
    "number of the unit + 1": matched(UNIT, lambda match: rf"{Decimal(match[1]) + 1}\text{{ {match[2]}}}"),
    r"\$10 N": matched(MONEY, lambda match: money_times(match, 10)),
    r"\$N as N\text{ cents}": matched(MONEY, lambda match: rf"{match[1]}\text{{ cents}}"),
    "a.m. for p.m.": other_half_of_day,
    # bases
    "12_6 for 12_5": matched(BASE, other_base),
    "13_5 for 12_5": matched(BASE, lambda match: f"{int(match[1]) + 1}_{{{match[2]}}}"),
    "digits of a base rotated": matched(
        BASE, lambda match: f"{new}_{{{match[2]}}}" if (new := rotated(int(match[1]))) else None
    ),
    # text
    "anagram": anagram,
    "anagram without \\text": bare_anagram,
    "one letter left out": lambda gold: (
        box(rf"\text{{{words[:-1]}}}") if (words := plain_words(gold)) and len(words) > 2 else None
    ),
    "other letter": only(choice, lambda letter: rf"\text{{({chr(ord(letter) + 1)})}}"),
    "one letter of the list left out": only(word_list, lambda letters: rf"\text{{{', '.join(letters[:-1])}}}"),
    "a number for words": only(plain_words, lambda words: str(len(words) + 5)),
    # several values
    "tuple permuted": only(point, permuted),
    "element of a tuple changed": only(point, changed(lambda parts: f"({', '.join(parts)})")),
    "sign of an element changed": only(point, sign_of_one),
    "element of a tuple left out": only(point, lambda parts: f"({', '.join(parts[:-1])})" if len(parts) > 2 else None),
    "[ ] for a tuple": only(point, lambda parts: f"[{', '.join(parts)}]"),
    r"\{ \} for a tuple": only(point, lambda parts: rf"\{{{', '.join(parts)}\}}"),
    "element of a list left out": only(
        listed_or_set, lambda parts: ", ".join(new) if (new := dropped(parts)) and len(new) > 1 else None
    ),
    "one value of two": only(listed_or_set, lambda parts: parts[0] if len(parts) == 2 else None),
    "element of a list changed": only(listed_or_set, changed(", ".join)),
    "value added to a list": only(listed_or_set, lambda parts: ", ".join([*parts, "9973"])),
    # intervals
    "end of an interval flipped": only(interval, flip_one),
    r"\{ \} for an interval": only(interval, lambda part: rf"\{{{part[1]},{part[2]}\}}"),
    "inequality of the flipped interval": only(interval, flip_inequality),
    "inequality, the other way": only(interval, other_way),
    "bound of an inequality changed": only(
        interval,
        lambda part: (
            inequality((part[0], new, part[2], part[3])) if (new := change(part[1])) and new != part[2] else None
        ),
    ),
    "part of a union left out": only(
        union, lambda parts: r" \cup ".join(f"{p[0]}{p[1]},{p[2]}{p[3]}" for p in parts[:-1])
    ),
    r"\cap for \cup": lambda gold: box(gold.replace(r"\cup", r"\cap")) if union(gold) else None,
    "end of a union flipped": only(
        union,
        lambda parts: (
            r" \cup ".join([new, *(f"{p[0]}{p[1]},{p[2]}{p[3]}" for p in parts[1:])])
            if (new := flip_one(parts[0])) else None
        ),
    ),
    # matrices
    "entry of a matrix changed": only(matrix, change_entry),
    "rows of a matrix rotated": only(matrix, rows_swapped),
    "matrix transposed": only(matrix, transposed),
    # several guesses
    r"1 \approx 2 \approx A \approx 9": lambda gold: rf"\boxed{{1 \approx 2 \approx {gold} \approx 77777}}",
    r"77777 \approx A": lambda gold: rf"\boxed{{77777 \approx {gold}}}",
    "A or another": lambda gold: rf"\boxed{{{gold} \text{{ or }} 77777}}",
    "A thousand": lambda gold: rf"\boxed{{{gold}\text{{ thousand}}}}" if integer(gold) is not None else None,
    "not A": lambda gold: rf"\boxed{{\text{{it is not }}{gold}}}" if integer(gold) is not None else None,
    # no answer
    "empty box": lambda gold: r"So the answer is \boxed{}.",
    "no answer": lambda gold: "I do not know the answer.",
}  # fmt: skip


# Forms of the answers of GSM8K. N is the reference, without separators.


def number_form(text: str) -> Rewrite:
    return lambda gold: text.replace("N", gold)


def grouped_form(text: str, separator: str) -> Rewrite:
    return lambda gold: text.replace("N", new) if gold.isdigit() and (new := group(int(gold), separator)) else None


def plus(gold: str, amount: int) -> str:
    return str(Decimal(gold) + amount)


GSM8K_EQUIVALENT: dict[str, Rewrite] = {
    "#### N": number_form("3 * 4 = 12, and so on\n#### N"),
    "#### $N": number_form("#### $N"),
    "#### N dollars": number_form("#### N dollars"),
    "#### 1,234": grouped_form("#### N", ","),
    "#### 1 234": grouped_form("#### N", " "),
    r"\boxed{N}": number_form(r"It takes 2 steps: $\boxed{N}$ after 7 days"),
    r"\boxed{N\text{ dollars}}": number_form(r"\boxed{N\text{ dollars}}"),
    r"\boxed{\text{N dollars}}": number_form(r"\boxed{\text{N dollars}}"),
    r"\boxed{\$N}": number_form(r"$\boxed{\$N}$ in 2 days"),
    r"\boxed{N\%}": number_form(r"\boxed{N\%}"),
    r"\boxed{1{,}234}": grouped_form(r"\boxed{N}", "{,}"),
    r"\boxed{1\,234}": grouped_form(r"\boxed{N}", r"\,"),
    r"\boxed{N\text{ m}^2}": number_form(r"\boxed{N\text{ m}^2}"),
    r"\boxed{\frac{2N}{2}}": lambda gold: box(rf"\frac{{{2 * int(gold)}}}{{2}}") if INTEGER.fullmatch(gold) else None,
    "N.00": lambda gold: f"The total is ${gold}.00." if INTEGER.fullmatch(gold) else None,
    "**N**": number_form("The answer is **N**."),
    "x = N.": number_form("2 + 3 is 5, so x = N."),
    "1,234 in a sentence": grouped_form("She makes $N in all.", ","),
}  # fmt: skip
GSM8K_WRONG: dict[str, Rewrite] = {
    "#### .N": lambda gold: f"#### .{gold}" if gold.isdigit() and int(gold) else None,
    "#### N/7": lambda gold: f"#### {gold}/7" if Decimal(gold) else None,
    "#### N 000": lambda gold: f"#### {gold} 000" if gold.isdigit() and 0 < int(gold) < 1000 else None,
    "#### N,000": lambda gold: f"#### {gold},000" if gold.isdigit() and 0 < int(gold) < 1000 else None,
    "#### N+1": lambda gold: f"{gold}\n#### {plus(gold, 1)}",
    "#### -N": lambda gold: f"#### {negated(gold)}" if Decimal(gold) else None,
    "#### N.5": lambda gold: f"#### {gold}.5" if INTEGER.fullmatch(gold) else None,
    "#### N0": lambda gold: f"#### {gold}0" if INTEGER.fullmatch(gold) and int(gold) else None,
    r"\boxed{\frac{1}{N}}": lambda gold: rf"\boxed{{\frac{{1}}{{{gold}}}}}" if Decimal(gold) > 1 else None,
    r"\boxed{\frac{N}{2}}": lambda gold: rf"\boxed{{\frac{{{gold}}}{{2}}}}" if Decimal(gold) else None,
    r"\boxed{N{,}000}": lambda gold: rf"\boxed{{{gold}{{,}}000}}" if gold.isdigit() and 0 < int(gold) < 1000 else None,
    r"\boxed{(N+1)\text{ dollars}}, N left": lambda gold: rf"\boxed{{{plus(gold, 1)}\text{{ dollars}}}}, {gold} left",
    r"\boxed{N+1}, from N": lambda gold: rf"\boxed{{{plus(gold, 1)}}}, from {gold}",
    r"\boxed{-\$N}": lambda gold: rf"\boxed{{-\${gold}}}" if Decimal(gold) > 0 else None,
    ".N in a sentence": lambda gold: f"The answer is .{gold}" if gold.isdigit() and int(gold) else None,
    "N, then N+1": lambda gold: f"First {gold}, but then {plus(gold, 1)}",
    "no number": lambda gold: "I do not know.",
}  # fmt: skip


# Grading


def read_lines(path: Path) -> list[str]:
    """Return the answers of a text file: one on each line, without the comments at its head."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("# ")]


def read_answers(paths: Iterable[Path]) -> list[str]:
    """Return the distinct answers of jsonl files, in the order in which they appear."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return list(dict.fromkeys(row["answer"] for row in rows if row["answer"]))


def number_of(answer: str) -> str:
    return answer.rpartition("####")[2].strip().replace(",", "")


def math_verify_alone(response: str, gold: str) -> float:
    """Grade with math-verify's defaults, among them its own time limits of 5 s."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return float(verify(_parsed_by_math_verify(gold), parse(response)))


@cache
def _parsed_by_math_verify(gold: str) -> list:
    from math_verify import parse

    return parse(gold if "$" in gold else f"${gold}$")


def ours(name: str, response: str, gold: str) -> float:
    """Grade with a built-in function. An error or a call longer than LIMIT_S scores 0, as in a run."""

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        score = FUNCTIONS[name]("", response, {"answer": gold})
    except (ValueError, TimeoutError):
        return 0.0
    finally:
        signal.alarm(0)
    assert isinstance(score, float)
    return score


def cases_of(rewrite: Rewrite, golds: Sequence[str], most: int) -> list[tuple[str, str]]:
    """Return (gold, response) of at most `most` answers, spread evenly over those to which the form applies."""
    cases = [(gold, response) for gold in golds if (response := rewrite(gold)) is not None]
    if most and len(cases) > most:
        cases = [cases[number * len(cases) // most] for number in range(most)]
    return cases


def grade(
    name: str,
    right: dict[str, Rewrite],
    wrong: dict[str, Rewrite],
    golds: Sequence[str],
    most: int,
    verbose: bool = False,
) -> list[Row]:
    """Count the mistakes of a built-in function and of math-verify alone, form by form."""
    rows = []
    for is_right, forms in ((True, right), (False, wrong)):
        for form, rewrite in forms.items():
            cases = cases_of(rewrite, golds, most)
            mistakes, others = 0, 0
            for gold, response in cases:
                is_mistake = ours(name, response, gold) != float(is_right)
                is_others = math_verify_alone(response, gold) != float(is_right)
                mistakes, others = mistakes + is_mistake, others + is_others
                if is_mistake and verbose:
                    print(f"{form}: {'rejected' if is_right else 'accepted'} {response!r} for {gold!r}")
            if cases:
                rows.append(Row(form, is_right, len(cases), mistakes, others))
    return rows


def grade_math(golds: Sequence[str], most: int, verbose: bool = False) -> list[Row]:
    return grade("math", EQUIVALENT, WRONG, golds, most, verbose)


def grade_gsm8k(numbers: Sequence[str], most: int, verbose: bool = False) -> list[Row]:
    return grade("gsm8k", GSM8K_EQUIVALENT, GSM8K_WRONG, numbers, most, verbose)


def totals(rows: Sequence[Row], is_right: bool) -> tuple[int, int, int]:
    """Return the number of cases, our mistakes and those of math-verify alone."""
    chosen = [row for row in rows if row.is_right == is_right]
    return sum(row.cases for row in chosen), sum(row.ours for row in chosen), sum(row.reference for row in chosen)


def table(title: str, rows: Sequence[Row]) -> str:
    lines = []
    for is_right, kind in ((True, "false negatives"), (False, "false positives")):
        lines += ["", f"| {title}, {'equivalent' if is_right else 'wrong'} form | cases | {kind} | math-verify alone |"]
        lines += ["| --- | ---: | ---: | ---: |"]
        lines += [
            f"| `{row.form}` | {row.cases} | {row.ours} | {row.reference} |" for row in rows if row.is_right == is_right
        ]
        cases, mistakes, others = totals(rows, is_right)
        share = 100 / max(cases, 1)
        lines += [f"| all | {cases} | {mistakes} ({mistakes * share:.2f} %) | {others} ({others * share:.2f} %) |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--math", nargs="*", type=Path, default=[], help="jsonl files with MATH's answers")
    parser.add_argument("--gsm8k", nargs="*", type=Path, default=[], help="jsonl files with GSM8K's answers")
    parser.add_argument("--most", type=int, default=0, help="maximum number of cases of a form; 0: all")
    parser.add_argument("--json", action="store_true", help="print the rows of both tables as JSON")
    parser.add_argument("--verbose", action="store_true", help="print each mistake")
    arguments = parser.parse_args()
    is_default = not arguments.math and not arguments.gsm8k
    golds = read_lines(MATH_FILE) if is_default else read_answers(arguments.math)
    numbers = read_lines(GSM8K_FILE) if is_default else [number_of(each) for each in read_answers(arguments.gsm8k)]
    tables = {
        "MATH": grade_math(golds, arguments.most, arguments.verbose),
        "GSM8K": grade_gsm8k(list(dict.fromkeys(numbers)), arguments.most, arguments.verbose),
    }
    if arguments.json:
        print(json.dumps(tables))
    else:
        print("\n".join(table(title, rows) for title, rows in tables.items() if rows))


if __name__ == "__main__":
    main()
