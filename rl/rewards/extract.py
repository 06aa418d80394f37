r"""Find the final answer in a response: its boxes, its formulas in TeX delimiters, and its numbers.

Everything here is linear in the length of the text, or works on a window of fixed size, because a policy may learn to
write responses that are slow to grade.
"""

import math
import re
from collections.abc import Iterator

WINDOW = 10_000  # characters at the end of a response that are searched for an answer without a box

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$.,;]*(?:,|;|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\})[\s$]*")
_MATHEMATICS = re.compile(
    r"(?s)(?<!\\)\$\$((?:\\.|[^$\\])+)\$\$|(?<!\\)\$((?:\\.|[^$\\])+)\$|\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]"
)
_BETWEEN_MATHEMATICS = re.compile(r"\s*(?:,?\s*and|,?\s*or|,)\s*")
_ANNOUNCED = re.compile(r"(?i)\banswers?(?:\s+(?:is|are)\b\s*:?|\s*:)(?:\s*\*\*)?")
_END_OF_SENTENCE = re.compile(r"(?<!\\)[.!;](?:\s|$)|\n|\*\*")
_SPOKEN = re.compile(r"(?=.*\d).*?[a-zA-Z]+ [a-zA-Z]+ [a-zA-Z]+")

# A comma or a blank is part of a number only before groups of exactly three digits.
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d{1,3}(?: \d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)"
_NUMBER = re.compile(
    r"(?P<sign>(?<!\d)-(?:\$ ?)?)?"  # a minus between digits is a range
    r"(?:"
    rf"(?P<latex_whole>\d+)? ?\\frac ?\{{ ?(?P<top_sign>-?)(?P<top>{_UNSIGNED}) ?\}} ?\{{ ?(?P<bottom>{_UNSIGNED}) ?\}}"
    r"|(?P<whole>\d+) (?P<small_top>\d+)/(?P<small_bottom>\d+)"
    rf"|(?P<number>{_UNSIGNED})(?: ?/ ?\$?(?P<divisor>{_UNSIGNED}))?"
    r"(?: ?(?:\\times|\\cdot|\*|×) ?10\^\{?(?P<ten>-?\d{1,3})\}?|\^\{?(?P<power>\d{1,3})\}?)?"  # noqa: RUF001
    r")"
)
_BLANKS = re.compile(r"\\[,;: ]|[~\u00a0\u2009\u202f]")
_FONT = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
_THOUGHT = re.compile(r".*</think>", re.DOTALL)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|$)", re.DOTALL)
_MARKED_LINE = re.compile(r"####[ \t]*(?=[^\n]{0,20}?\d)([^\n#a-zA-Z][^\n#]*|\\boxed[^\n#]*)")
_LAST_LINE = re.compile(r"(?:^|\n)[ \t]*####[ \t]*([^\n#]+)\s*$")
_SUBSCRIPT = re.compile(r"\}?\$?_(?:\{(\d+)\}|(\d+))")
# Signs that a number is only a part of the answer: an operator beside it, or a word such as thousand.
_MORE = re.compile(
    r"(?<![a-zA-Z])[-+]|[*/^!×]|\\(?:times|cdot|div|pm|sqrt|binom|d?frac)|\b(?:thousand|[mb]illion|hundred|dozen)s?\b"  # noqa: RUF001
)
MAX_BOXES = 20  # maximum number of boxes that form one list
_NUMERIC = re.compile(r"[\s\d.,$%-]*\d[\s\d.,$%-]*")
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z}])\^(?:\d|\{\d+\})")


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""Return start, end and content of each closed `\boxed{...}` that is not inside of another one."""
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int] | None] = []  # per open brace: None, or the starts of its box and of its content
    for match in _BOX_OR_BRACE.finditer(text):
        token = match[0]
        if token == "{":
            opened.append(None)
        elif token == "}" and opened:
            box = opened.pop()
            if box is not None:
                while found and found[-1][0] > box[0]:
                    found.pop()
                found.append((box[0], match.end(), text[box[1] : match.start()]))
        elif len(token) > 2:
            opened.append((match.start(), match.end()))
    return found


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box. Boxes that are joined by a comma, `and` or `or` are one list."""
    found = [box for box in boxes(text) if box[2].strip()]
    if not found:
        return None
    contents = [found[-1][2].strip()]
    if base := _SUBSCRIPT.match(text[found[-1][1] :][:10]):
        contents[0] += f"_{{{base[1] or base[2]}}}"
    for (_, end, content), (start, _, _) in zip(found[-2 : -1 - MAX_BOXES : -1], found[:0:-1]):
        if not _BETWEEN_BOXES.fullmatch(text[end:start][:50]) or start - end > 50:
            break
        contents.insert(0, content.strip())
    return ", ".join(dict.fromkeys(contents))


def final_answer(response: str) -> str | None:
    """Return the text of the final answer, or None if it cannot be isolated.

    These are tried in order: the last box, `####` in the last line, an announcement such as "the answer is", the last
    formula in TeX delimiters, and a short text in answer tags or after the thinking.
    """
    part = answer_part(response)
    if (boxed := boxed_answer(part)) is not None:
        return boxed
    text = part[-WINDOW:]
    if marked := _LAST_LINE.search(text):
        return marked[1].strip()
    if announced := list(_ANNOUNCED.finditer(text)):
        tail = text[announced[-1].end() :]
        sentence = _END_OF_SENTENCE.split(tail, maxsplit=1)[0].strip()
        run = next(_runs(tail), None)
        if run is not None and tail.find(run[0]) <= 50:
            return ", ".join(run)
        if _SPOKEN.match(sentence):
            return None  # the answer is inside a longer sentence, so the caller must parse it
        if sentence and len(sentence) <= 200:
            return sentence
    if runs := list(_runs(text)):
        return ", ".join(runs[-1])
    return part.strip() if part != response and 0 < len(part.strip()) <= 200 else None


def answer_part(response: str) -> str:
    """Return the text after the thinking, or the content of its last pair of answer tags if it has one."""
    after = _THOUGHT.sub("", response, count=1) if "</think>" in response else response
    after = after if after.strip() else response
    tagged = _TAGGED.findall(after) if "<answer>" in after else []
    return tagged[-1] if tagged else after


def _runs(text: str) -> Iterator[list[str]]:
    """Yield lists of formulas in TeX delimiters. Formulas joined by a comma, `and` or `or` are in one list."""
    run: list[str] = []
    end = 0
    for match in _MATHEMATICS.finditer(text):
        if run and not _BETWEEN_MATHEMATICS.fullmatch(text[end : match.start()][:20]):
            yield run
            run = []
        run.append(next(group for group in match.groups() if group is not None).strip())
        end = match.end()
    if run:
        yield run


def last_number_of(text: str) -> str | None:
    """Return the last number of the text in a canonical form: equal numbers give equal strings."""
    numbers = list(_NUMBER.finditer(_plain(text)))
    return _value(numbers[-1]) if numbers else None


def marked_number_of(text: str) -> str | None:
    """Return the number in the last box, or after the last `####` that a number follows, whichever comes later.
    Without either, return the number that is announced as the answer, or else the last number."""
    text = answer_part(text)
    found = [box for box in boxes(text) if box[2].strip()]
    mark = next(iter([*_MARKED_LINE.finditer(text)][-1:]), None)
    if mark and not (found and found[-1][0] > mark.end()):
        first = _NUMBER.search(line := _plain(mark[1]))
        return _value(first) if first and not _MORE.match(line[first.end() :].lstrip()) else None
    if found:
        return _only_number(_without_text(found[-1][2]))
    for announced in [*_ANNOUNCED.finditer(text[-WINDOW:])][-1:]:
        sentence = _plain(_END_OF_SENTENCE.split(text[-WINDOW:][announced.end() :], maxsplit=1)[0])
        numbers = [*_NUMBER.finditer(sentence)]
        if numbers:
            return _value(numbers[-1 if "=" in sentence else 0])
    return last_number_of(text)


def _only_number(box: str) -> str | None:
    """Return the only number in a box. Return None if it has no number, several numbers, or anything to compute.

    In an equation, only the text after the last `=` counts.
    """
    text = _plain(box).rpartition("=")[2]
    numbers = [*_NUMBER.finditer(text)]
    if len(numbers) != 1:
        return None
    rest = text[: numbers[0].start()] + " " + text[numbers[0].end() :]
    return None if _MORE.search(rest.replace(r"\text{}", "")) else _value(numbers[0])


def _plain(text: str) -> str:
    text = text.replace("{,}", ",").replace(r"\!", "").replace(r"\$", "$").replace("\u2212", "-")
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    return _POWER_OF_UNIT.sub("", _BLANKS.sub(" ", text))


def _without_text(box: str) -> str:
    r"""Drop the words of a box: `5\text{ dollars for 2 days}` is 5. A box that is all words is kept."""
    text = _FONT.sub(lambda match: match[1] if _NUMERIC.fullmatch(match[1]) else r"\text{}", box)
    return text if re.search(r"\d", text) else box


def _value(match: re.Match[str]) -> str | None:
    try:
        if match["top"]:
            value = _float(match["latex_whole"]) + _float(match["top"]) / _float(match["bottom"])
        elif match["whole"]:
            value = _float(match["whole"]) + _float(match["small_top"]) / _float(match["small_bottom"])
        else:
            value = _float(match["number"]) / (_float(match["divisor"]) if match["divisor"] else 1.0)
            value *= 10.0 ** int(match["ten"] or 0)
            value **= int(match["power"] or 1)
    except (ZeroDivisionError, OverflowError):
        return None
    if not math.isfinite(value):
        return None
    is_negative = bool(match["sign"]) != bool(match["top_sign"])
    return f"{(-value if is_negative else value) + 0.0:.15g}"


def _float(digits: str | None) -> float:
    return float((digits or "0").replace(",", "").replace(" ", ""))
