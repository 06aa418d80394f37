r"""Decide whether two answers in LaTeX are the same. This module handles notation; math-verify compares mathematics.

    text --normalize--> text --+-- words, times, numbers in a base      compared as text
                               +-- percent signs and units              compared, then removed
                               +-- sets, tuples, intervals, matrices    compared element by element
                               +-- everything else                      compared by math-verify

math-verify alone accepts an anagram for a word, `12_5` for `12_6`, `n\%` for `n`, and a set for an interval.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from rl.rewards.extract import boxed_answer, final_answer
from rl.rewards.notation import TEXT, is_too_hard, key_of, letters_of, normalize, split_unit

logging.getLogger("math_verify").setLevel(logging.ERROR)  # without this it warns that its time limits are off
MAX_ANSWER = 2000  # characters; reference answers are far shorter
PARSED_TAIL = 1000  # without a marked answer, this many characters at the end of a response are parsed
MAX_DEPTH = 4  # maximum nesting of an answer, such as a list of tuples
_SCALE = re.compile(r"\b(?:thousand|million|billion|hundred|dozen|squared|cubed|factorial)\b")
_TOKEN = re.compile(
    r"\\begin|\\end|\\cup|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\\[{}]|\\[a-zA-Z]+|\\.|[()\[\]{},;]|\b(?:and|or)\b"
)
_JOINTS = re.compile(r",|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|and|or")
_OPENING, _CLOSING = ("(", "[", r"\{", "{", r"\begin"), (")", "]", r"\}", "}", r"\end")
_BRACKETS = re.compile(r"([(\[])(.*)([)\]])|(\\\{)(.*)(\\\})", re.DOTALL)
_VARIABLE = r"(?:[a-zA-Z]|\\[a-z]+)(?: ?\( ?[a-zA-Z] ?\))?"
_MEMBER = re.compile(rf"{_VARIABLE} ?\\in ?(?![a-zA-Z])")
_BUILDER = re.compile(rf"\\\{{ ?({_VARIABLE}) ?(?:\\in ?\(-\\infty,\\infty\) ?)?(?:\\mid|\||:) ?(.*)\\\}}")
_RELATION = re.compile(r"(\\(?:le|ge|ne)(?![a-zA-Z])|<|>)")
_ASSIGNED = re.compile(r"((?:[a-zA-Z]|\\[a-z]+|[A-Z]{2}|[a-zA-Z]\([a-zA-Z]\))(?:_\{?\w+\}?)?)\s*=\s*(.+)", re.DOTALL)
_MATRIX = re.compile(r"\\begin ?\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end ?\{\1\}", re.DOTALL)
_SIMPLE = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<whole>\d+)? ?\\frac ?\{ ?(?P<top>-?\d+) ?\} ?\{ ?(?P<bottom>-?\d+) ?\}"
    r"|(?P<mixed>\d+) (?P<small_top>\d+)/(?P<small_bottom>\d+)"
    r"|(?P<number>\d+(?:\.\d*)?)(?: ?/ ?(?P<divisor>\d+)| ?(?:\\times|\\cdot) ?10 ?\^ ?\{? ?(?P<ten>-?\d{1,2}) ?\}?)?)"
)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_SHORT_UNIT = re.compile(r"(.*[\d}]) ?[mgshl]")
_ASKS_FOR_PERCENT = re.compile(
    r"(?i)\b(?:what|which|nearest|as an?|find the|determine the|compute the|how many)\b[^.?!]{0,60}\bpercent"
)


class Shape(NamedTuple):
    kind: str  # scalar, list, union, matrix, determinant, or the two brackets, such as "()"
    elements: list[str]
    columns: int = 0


def is_same(gold: str, response: str, prompt: str = "") -> bool:
    """Return whether a response is right. If the prompt asks for a percentage, the percent sign is optional."""
    wanted = reference(gold)
    got = final_answer(response)
    if got is None:
        return _is_same_unmarked(wanted, response)
    if len(got) > MAX_ANSWER or (is_too_hard(got) and normalize(got) != normalize(wanted)):
        return False
    return same_answers(wanted, got, is_percent_optional=_ASKS_FOR_PERCENT.search(prompt) is not None)


def reference(text: str) -> str:
    """Return the final answer of a reference, which may be a worked solution."""
    text = text.rpartition("####")[2].strip()
    if (boxed := boxed_answer(text)) is not None:
        text = boxed
    elif len(re.findall(r"(?<!\\)\$", text)) > 1:
        text = final_answer(text) or text
    if not text.strip():
        raise ValueError("the reference answer is empty; give a number, mathematics or text")
    return text


def same_answers(gold: str, answer: str, is_percent_optional: bool = False) -> bool:
    """Return whether two final answers are the same."""
    return _same(normalize(gold), normalize(answer), 0, is_percent_optional)


def text_of(response: str) -> str | None:
    """Return the final answer of a response in a canonical form, which is the same for most equal answers."""
    got = final_answer(response)
    if got is None:
        parsed = _parse_response(response)
        return str(parsed[0]) if parsed else None
    if len(got) > MAX_ANSWER or is_too_hard(got):
        return got[:MAX_ANSWER]
    return _canonical(normalize(got), 0) or None


def _same(gold: str, answer: str, depth: int, is_percent_optional: bool = False) -> bool:
    if not gold or not answer or depth > MAX_DEPTH:
        return False
    gold_key, key = key_of(gold), key_of(answer)
    if gold_key is not None or key is not None:
        return _same_keys(gold, answer, gold_key, key)
    if gold.replace(" ", "") == answer.replace(" ", ""):
        return True
    if gold.endswith(r"\%") or answer.endswith(r"\%"):
        return _same_percents(gold, answer, depth, is_percent_optional)
    if set(_SCALE.findall(gold)) != set(_SCALE.findall(answer)):
        return False
    (gold, gold_unit), (answer, unit) = split_unit(gold), split_unit(answer)
    if gold_unit and unit and gold_unit != unit:
        return False
    gold, answer = _unwrap(gold), _unwrap(answer)
    (variable, interval), (other, other_interval) = _as_interval(gold), _as_interval(answer)
    if interval and other_interval and (not variable or not other or variable == other):
        gold, answer = interval, other_interval
    return _same_shapes(gold, answer, _shape(gold), _shape(answer), depth)


def _same_keys(gold: str, answer: str, gold_key: str | None, key: str | None) -> bool:
    if gold_key is not None and key is not None:
        is_list = ", " in gold_key, ", " in key
        return gold_key == key or (is_list[0] != is_list[1] and letters_of(gold) == letters_of(answer))
    known, other = (gold_key, answer) if gold_key is not None else (key, gold)
    # The choice `(B)` may be written as the variable `b`, and a time without spaces.
    return known == letters_of(other) and "\\" not in TEXT.sub("", other)


def _same_percents(gold: str, answer: str, depth: int, is_percent_optional: bool) -> bool:
    wanted, got = (text.removesuffix(r"\%").strip() for text in (gold, answer))
    is_percent = wanted != gold.strip(), got != answer.strip()
    if all(is_percent):
        return _same(wanted, got, depth + 1)
    if is_percent_optional and _same(wanted, got, depth + 1):
        return True
    sides = [side.strip() for side in re.split(r"=|\\approx", gold)]
    if len(sides) > 1:
        return any(_same(normalize(side), answer, depth + 1, is_percent_optional) for side in sides)
    wanted, got = (rf"\frac{{{value}}}{{100}}" if is_one else value for value, is_one in zip((wanted, got), is_percent))
    return _is_equal(wanted, got)


def _unwrap(text: str) -> str:
    r"""Turn `x \in S` into `S`, and `\{x : condition\}` into the condition. Return other texts unchanged."""
    if match := _BUILDER.fullmatch(text):
        return match[2].strip()
    return _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text


def _as_interval(text: str) -> tuple[str, str]:
    """Turn an inequality into its variable and an interval or union. Return two empty texts if that is impossible.
    Return other texts unchanged, with an empty variable."""
    if not _RELATION.search(text):
        return "", text
    pieces = _split(text)
    joints = {piece for piece in pieces if piece == r"\cup" or _JOINTS.fullmatch(piece)}
    found = [_one_interval(piece) for piece in pieces if piece not in joints]
    variable, parts = found[0][0], [part for _, part in found]
    if not variable or any(other != variable for other, _ in found):
        return "", ""
    if any("and" in joint for joint in joints):  # the intersection of two half-lines
        parts.sort(key=lambda part: not part.startswith(r"(-\infty,"))
        match = re.fullmatch(r"\(-\\infty,(.*)\n(.*),\\infty\)", "\n".join(parts))
        if match is None:
            return "", ""
        parts = [f"{match[2]},{match[1]}"]
    return variable, r" \cup ".join(parts)


def _one_interval(inequality: str) -> tuple[str, str]:
    """Turn `x < b`, `a > x` or `a < x < b` into its variable and interval. Return two empty texts for all else."""
    turned = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne"}
    sides = [side.strip() for side in _RELATION.split(inequality)]
    if len(sides) == 5:
        start, first, variable, second, end = sides
        if first in (">", r"\ge"):
            start, first, second, end = end, turned[second], turned[first], start
        if {first, second} <= {"<", r"\le"} and re.fullmatch(_VARIABLE, variable):
            return variable, f"{'(' if first == '<' else '['}{start},{end}{')' if second == '<' else ']'}"
    if len(sides) == 3:
        variable, relation, bound = sides
        if not re.fullmatch(_VARIABLE, variable) or variable in (r"\infty", r"\pi"):
            variable, relation, bound = bound, turned[relation], variable
        if re.fullmatch(_VARIABLE, variable) and bound:
            below, above = rf"(-\infty,{bound}", rf"{bound},\infty)"
            return variable, {
                **{"<": f"{below})", ">": f"({above}", r"\le": f"{below}]", r"\ge": f"[{above}"},
                r"\ne": rf"{below}) \cup ({above}",
            }[relation]
    return "", ""


def _tokens(text: str, num_kinds: int = len(_OPENING)) -> Iterator[tuple[re.Match[str], int]]:
    """Yield brackets, separators and LaTeX commands, each with the number of brackets that are open after it. Only the
    first `num_kinds` kinds of brackets are counted."""
    opening, closing, depth = _OPENING[:num_kinds], _CLOSING[:num_kinds], 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in opening) - (match[0] in closing)
        yield match, depth


def _split(text: str) -> list[str]:
    """Split at separators outside of all brackets. Return the pieces with the separators between them."""
    pieces, start = [], 0
    for match, depth in _tokens(text):
        if depth == 0 and (match[0] == r"\cup" or _JOINTS.fullmatch(match[0])):
            pieces += [text[start : match.start()].strip(), match[0]]
            start = match.end()
    pieces.append(text[start:].strip())
    return [piece for piece in pieces if piece]


def _shape(text: str) -> Shape:
    if match := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in match[2].strip().removesuffix(r"\\").split(r"\\")]
        if len({len(row) for row in rows}) == 1:
            kind = "determinant" if match[1] in ("vmatrix", "Vmatrix") else "matrix"
            return Shape(kind, [entry.strip() for row in rows for entry in row], len(rows[0]))
    pieces = _split(text)
    if r"\cup" in pieces:
        return Shape("union", [piece for piece in pieces if piece != r"\cup"])
    elements = [piece for piece in pieces if not _JOINTS.fullmatch(piece)]
    if len(elements) > 1:
        return Shape("list", [each for element in elements for each in _plus_and_minus(element)])
    end = next((token.end() for token, depth in _tokens(text, 3) if depth == 0), 0)  # of the first bracket pair
    if end == len(text) and (match := _BRACKETS.fullmatch(text)):
        first, inside, last = (group for group in match.groups() if group is not None)
        elements = [piece for piece in _split(inside) if not _JOINTS.fullmatch(piece)]
        if len(elements) > 1 or first == r"\{":
            return Shape(first + last, [each for element in elements for each in _plus_and_minus(element)])
    both = _plus_and_minus(text)
    return Shape("list", both) if len(both) > 1 else Shape("scalar", [text])


def _plus_and_minus(text: str) -> list[str]:
    first, sign, second = text.partition(r"\pm")
    return [f"{first}+{second}", f"{first}-{second}"] if sign and r"\pm" not in second else [text]


def _same_shapes(gold: str, answer: str, wanted: Shape, got: Shape, depth: int) -> bool:
    kinds = {wanted.kind, got.kind}
    if kinds == {"scalar"}:
        return _same_scalars(gold, answer, depth)
    if kinds <= {"list", r"\{\}"}:
        return _same_in_any_order(wanted.elements, got.elements, depth)
    if kinds == {"union"}:
        return _same_in_any_order(wanted.elements, got.elements, depth) or _is_equal(gold, answer)
    if len(kinds) == 1 or kinds in ({"list", "()"}, {"list", "scalar"}, {r"\{\}", "scalar"}):
        has_same_size = (len(wanted.elements), wanted.columns) == (len(got.elements), got.columns)
        return has_same_size and all(_same(*pair, depth + 1) for pair in zip(wanted.elements, got.elements))
    return "determinant" not in kinds and bool(kinds & {"matrix", "union", "scalar"}) and _is_equal(gold, answer)


def _same_in_any_order(wanted: list[str], got: list[str], depth: int) -> bool:
    if len(wanted) != len(got):
        return False
    left = list(got)
    for element in wanted:
        match = next((other for other in left if _same(element, other, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_scalars(gold: str, answer: str, depth: int) -> bool:
    """Compare two numbers, expressions or equations."""
    if r"\approx" in gold + answer:
        wanted, got = ([side.strip() for side in text.split(r"\approx") if side.strip()] for text in (gold, answer))
        if len(got) > 2 or (len(got) == 2 and not _is_about(*got)):
            return False  # several guesses
        return any(_same(normalize(one), normalize(two), depth + 1) for one in wanted for two in got)
    assigned = _ASSIGNED.fullmatch(gold)
    if "=" in answer and "=" not in gold:
        return _same(gold, answer.rpartition("=")[2].strip(), depth + 1)
    if assigned and "=" not in answer:
        return _same(assigned[2].rpartition("=")[2].strip(), answer, depth + 1)
    if "=" in gold and "=" not in answer and not re.search("[a-zA-Z]", gold.replace(r"\frac", "")):
        return any(_same(side.strip(), answer, depth + 1) for side in gold.split("="))
    return _is_equal(gold, answer)


def _is_about(one: str, other: str) -> bool:
    """Return whether the second side is within 1 % of the first."""
    try:
        exact, rounded = (float(_parse(normalize(side))[0].evalf()) for side in (one, other))
    except (AttributeError, IndexError, TypeError, ValueError, OverflowError):
        return False
    return abs(exact - rounded) <= 0.01 * abs(exact)


def _simple(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal, a fraction or a mixed number. Return None for anything else."""
    match = _SIMPLE.fullmatch(text)
    if match is None or len(text) > 100:
        return None
    try:
        if match["top"]:
            value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
        elif match["mixed"]:
            value = int(match["mixed"]) + Fraction(int(match["small_top"]), int(match["small_bottom"]))
        else:
            value = Fraction(match["number"]) / int(match["divisor"] or 1) * Fraction(10) ** int(match["ten"] or 0)
    except ZeroDivisionError:
        return None
    return -value if match["sign"] == "-" else value


def _is_equal(gold: str, answer: str) -> bool:
    """Compare with math-verify. Compare plain numbers first, because math-verify rounds them to six decimals."""
    if _simple(gold) is not None and (match := _SHORT_UNIT.fullmatch(answer)):
        answer = match[1]  # `5 m` has a unit if the reference is a plain number; otherwise `m` is a variable
    numbers = _simple(gold), _simple(answer)
    if numbers[0] is not None and numbers[1] is not None:
        if numbers[0] == numbers[1]:
            return True
        is_exact = "." not in gold + answer
        if is_exact or abs(numbers[0] - numbers[1]) > abs(numbers[0]) / 10_000:
            return False
    return _verify(_parse(gold), _parse(answer))


def _verify(gold: Sequence[Any], answer: Sequence[Any]) -> bool:
    from math_verify import verify

    return bool(verify(list(gold), list(answer), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parse(latex: str) -> tuple:
    """Parse LaTeX. math-verify's own time limit, an alarm signal, is off, because the reward server limits the time."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Units are already removed. With units=True, math-verify would remove the `c` of `a + b + c`.
    writing = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    config = [LatexExtractionConfig(normalization_config=writing)]
    if _TRIGONOMETRY.search(latex):  # math-verify would read degrees as radians
        latex = re.sub(r"(\d+(?:\.\d+)?) ?\^\\circ ?", r"(\\frac{\1 \\pi}{180})", latex)
    return tuple(parse(f"${latex}$", config, parsing_timeout=None))  # type: ignore[arg-type]


def _parse_response(response: str) -> list:
    from math_verify import parse

    text = response[-PARSED_TAIL:]
    return [] if is_too_hard(text) else parse(text.replace(r"\$", "$"), parsing_timeout=None)  # type: ignore[arg-type]


def _is_same_unmarked(gold: str, response: str) -> bool:
    """Grade a response without a marked answer. First try its last line, then what math-verify finds near its end."""
    last = response.strip().rpartition("\n")[2][-MAX_ANSWER:].strip("* ")
    if is_too_hard(last):
        return False
    if same_answers(gold, last):
        return True
    wanted = normalize(gold)
    if key_of(wanted) is not None or wanted.endswith(r"\%") or last.rstrip(" .").endswith("%"):
        return False
    return _verify(_parse(split_unit(wanted)[0]), _parse_response(response))


def _canonical(text: str, depth: int) -> str:
    if depth > MAX_DEPTH:
        return text
    if (key := key_of(text)) is not None:
        return key
    if text.endswith(r"\%"):
        return _canonical(text.removesuffix(r"\%").strip(), depth + 1) + "%"
    text = _unwrap(split_unit(text)[0])
    text = _as_interval(text)[1] or text
    shape = _shape(text)
    if shape.kind != "scalar":
        elements = [_canonical(element, depth + 1) for element in shape.elements]
        if shape.kind in ("list", r"\{\}", "union"):
            return "{" + ", ".join(sorted(elements)) + "}" if len(elements) > 1 else "".join(elements)
        return shape.kind[:-1] + ", ".join(elements) + shape.kind[-1:]
    if match := _ASSIGNED.fullmatch(text):
        return _canonical(match[2].rpartition("=")[2].strip(), depth + 1)
    if "=" in text and not re.search("[a-zA-Z]", re.sub(r"\\[a-z]+", "", text.rpartition("=")[0])):
        return _canonical(text.rpartition("=")[2].strip(), depth + 1)  # such as 2 + 3 = 5
    if (number := _simple(text)) is not None:
        return str(number)
    parsed = _parse(text)
    return str(parsed[0]) if parsed else text
