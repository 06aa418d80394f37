r"""Normalize answers in LaTeX, and tell words, times, numbers in a base and units from mathematics.

normalize     unifies signs, fonts, blanks, fractions and thousands
key_of        the text by which words, a time or a number in a base are compared
split_unit    removes the unit of an answer
is_too_hard   whether parsing an answer may take minutes
"""

import re

MAX_FONTS = 4  # maximum number of font commands that are removed
MAX_NESTING, MAX_SIGNS = 20, 20  # maximum nesting of brackets and number of equal signs in an answer that is parsed
_HARD = re.compile(
    r"\^ ?\{? ?-?\d{5,}|\d ?\^ ?[({]* ?\d+ ?\^|[a-z][^()]{0,40}\) ?\^ ?\{? ?\d{3,}"
    r"|\d{4,} ?!|! ?\)? ?!|binom ?\{? ?\d{5,}|\\(?:int|sum|prod)(?![a-z])"
)
_SIGNS = {
    **{"\u2212": "-", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "×": r"\times ", "·": r"\cdot "},  # noqa: RUF001
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "θ": r"\theta ", "∈": r"\in "},  # noqa: RUF001
    **{"\u00a0": " ", "\u2009": " ", "\u202f": " "},
}
_FONT = r"text(?:normal|rm|bf|it|sf)|math(?:rm|bf|it|sf)|mbox|hbox|operatorname|boldsymbol|bold"
_MATH_FONT = re.compile(r"\\(?:mathbf|boldsymbol|bold|bm|underline|emph|texttt)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_PMATRIX = r"\\begin{pmatrix}\1\\end{pmatrix}"
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\{,\}|,\\!\s*|\\,)(?=\d{3}(?!\d))", ""),  # thousands
        (r"\\!|\\(?:bf|rm|large|Large|LARGE|huge)(?![a-zA-Z])", ""),
        (r"\{,\}", ","),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\phantom\s*(?:\{[^{}]*\}|[^\\{])", " "),
        (rf"\\(?:{_FONT})\s*\{{", r"\\text{"),
        (r"\\text\s*\{\s*(-?(?:\\?\$)?[\d.,]+)\s*\}", r"\1"),
        (r"\\text\s*\{\s*(-?(?:\\?\$)?[\d.,/]+)\s+([a-zA-Z][^{}]*)\}", r"\1 \\text{ \2}"),
        (r"[(\[]\s*\\begin\s*\{(?:array\}\s*\{[lcr|]*|matrix)\}(.*)\\end\s*\{(?:array|matrix)\}\s*[)\]]", _PMATRIX),
        (r"^\( ?[a-zA-Z](?: ?, ?[a-zA-Z])+ ?\) ?= ?(?=\()", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\w)", r"\\frac\1{\2}"),
        (r"\\frac\s*(\\[a-z]+)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\degrees?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\\text\{\s*(?:per\s?cent|pct|\\?%)\s*\}|\s*\bpercent\b|\\?%", r"\\%"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\neq(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\text\{\s*infinity\s*\}|\binfinity\b", r"\\infty "),
        (r"\+\s*\\infty", r"\\infty"),
        (r"√ ?\(([^()]*)\)|√ ?(\d+)", r"\\sqrt{\1\2}"),
        (r"\\overline\s*\{([A-Z]{2})\}", r"\1"),
        (r"^\\text\s*\{(?:(?!\bnot\b|n't)[^{}]){0,40}\b(?:is|are|[aA]nswer ?:) ?:? *\}", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\mathbb\s*\{?R\}?|\\text\{\s*all real numbers\s*\}", r"(-\\infty,\\infty)"),
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d])", lambda match: match[0].replace(" ", "")),
        (r"(?<![\d\w.])\.(?=\d)", "0."),
        (r"\s+", " "),
    )
]
_OPENING, _CLOSING = ("(", "[", r"\{"), (")", "]", r"\}")
_BRACKET_OR_THOUSANDS = re.compile(r"\\?[()\[\]{}]|(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BASE = re.compile(r"\(?(-?[0-9A-Z]+)\)? ?(?:_|\(?(?:in )?base) ?\{? ?\(?(\d+|[a-z]+)\)? ?\}?\)?")
_NAMES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen"),
]
_TIME = re.compile(r"\d{1,2}(?: ?: ?\d{1,2}){1,2} ?(?:[ap] ?\.? ?m\b)?\.?", re.IGNORECASE)
_WORD = re.compile(r"[a-z]+|\d+")
FILLERS = {"and", "or", "option", "options", "choice", "the"}
_BARE_WORDS = re.compile(r"[A-Za-z][A-Za-z .,;()'-]*")
_UNITS = [  # each with its other names
    *("cm centimeter centimeters centimetre centimetres", "mm millimeter millimeters", "km kilometer kilometers"),
    *("m meter meters metre metres", "inch in inches", "foot ft feet", "yard yd yards", "mile mi miles", "mph"),
    *("second s sec seconds", "minute min mins minutes", "hour h hr hrs hours", "day days", "week weeks"),
    *("month months", "year years yr yrs", "gram g grams", "kilogram kg kilograms", "ounce oz ounces"),
    *("pound lb lbs pounds", "gallon gal gallons", "quart qt quarts", "liter liters litre litres", "cent cents"),
    *("dollar dollars usd", "euro euros", "degree degrees deg", "radian rad radians"),
]
_UNIT_OF = {name: unit.split()[0] for unit in _UNITS for name in unit.split()}
_MONEY = re.compile(r"\\?\$ ?")
_UNIT_IN_TEXT = re.compile(r"(.*[^\s,;&]) ?\\text\s*\{([^{}]*[a-zA-Z][^{}]*)\}(?: ?\^ ?\{? ?[23] ?\}?)?", re.DOTALL)
_UNIT_IN_LETTERS = re.compile(r"(-?[\d.,/]+)( ?)([a-zA-Z][a-zA-Z. ]*?)\.?(?: ?\^ ?\{? ?[23] ?\}?)?")
_DEGREES = re.compile(r"([^a-zA-Z\\]*(?:\\frac ?\{[\d.]+\} ?\{[\d.]+\})?) ?\^\\circ ?([CF]?)")


def normalize(text: str) -> str:
    """Unify the signs, fonts, blanks, fractions and thousands of an answer. Units and brackets stay."""
    text = text.strip()
    if text.startswith("$") and text.endswith("$"):
        text = text.strip("$")
    for sign, command in _SIGNS.items():
        text = text.replace(sign, command)
    text = _unwrap_fonts(text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = _join_thousands(text.strip(" ."))
    text = re.sub(r"^\(?(-?\d+)\)? ?_ ?(?:10|\{ ?10 ?\})$", r"\1", text)  # base 10 is the default
    while text.startswith("{") and text.endswith("}") and _closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    text = text.strip().rstrip(".,;: ").strip()
    name = TEXT.sub(r"\1", text).strip().lower()
    return str(_NAMES.index(name)) if name in _NAMES else text


def is_too_hard(text: str) -> bool:
    """Return whether a parser or sympy may take minutes: towers of powers, huge factorials, deep nesting, long chains
    of operators. No reference answer is like that."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING or any(text.count(sign) > MAX_SIGNS for sign in "/:|^!-") or bool(_HARD.search(text))


def _unwrap_fonts(text: str) -> str:
    r"""Remove bold fonts around mathematics: `\mathbf{\frac{1}{2}}` is a fraction. Words become `\text{...}`."""
    for _ in range(MAX_FONTS):
        match = _MATH_FONT.search(text)
        if match is None or (end := _closing_brace(text, match.end())) is None:
            break
        inside = text[match.end() : end]
        is_words = re.fullmatch(r"[A-Za-z (),.]*", inside) is not None
        text = text[: match.start()] + (rf"\text{{{inside}}}" if is_words else inside) + text[end + 1 :]
    return text


def _closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the one before `start`."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def _join_thousands(text: str) -> str:
    """Drop the commas of `1,234`, but not in brackets, where they separate elements. A plain brace only groups."""
    depth = 0

    def join(match: re.Match[str]) -> str:
        nonlocal depth
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING and depth > 0)
        return match[0] if depth else match[0].replace(",", "")

    return _BRACKET_OR_THOUSANDS.sub(join, text)


def key_of(text: str) -> str | None:
    """Return the text by which words, a time or a number in a base is compared, or None for mathematics."""
    bare = re.sub(r"\s+", " ", TEXT.sub(r"\1", text)).strip()
    if ("_" in bare or "base" in bare) and (match := _BASE.fullmatch(bare.rpartition("=")[2].strip())):
        base = str(_NAMES.index(match[2])) if match[2] in _NAMES else match[2]
        return f"{match[1].upper()} in base {base}" if base.isdigit() else None
    if ":" in bare and _TIME.fullmatch(bare):
        words = _WORD.findall(re.sub(r"([ap])\W*m\b", r"\1m", bare.lower()))
        return ":".join(str(int(word)) if word.isdigit() else word for word in words)
    core = text.strip(" ().,")
    is_wrapped = core.startswith(r"\text") and TEXT.fullmatch(core.replace(" }", "}")) is not None
    if not is_wrapped:
        only_text = _BARE_WORDS.fullmatch(bare.strip(" ()")) is not None
        is_word = any(len(word) > 2 and word not in FILLERS for word in re.findall("[A-Za-z]+", bare))
        is_letter = re.fullmatch(r"\(?[A-Z]\)?|[A-Z](?:(?:, ?| ?and ?| ?or ?|; ?)[A-Z])+", bare.strip()) is not None
        if not only_text or not (is_word or is_letter):
            return None
    elif not re.search("[A-Za-z]", bare):
        return None
    words = [word for word in _WORD.findall(bare.lower()) if word not in FILLERS]
    if words and all(len(word) == 1 for word in words):
        return ", ".join(sorted(words))  # options of a multiple choice, in any order
    return "".join(words) or None


def letters_of(text: str) -> str:
    return "".join(word for word in _WORD.findall(TEXT.sub(r"\1", text).lower()) if word not in FILLERS)


def split_unit(text: str) -> tuple[str, str | None]:
    """Return the answer without its unit, and the unit if it is known. Unknown units are dropped."""
    unit: str | None = None
    if "$" in text:
        unit, text = "dollar", _MONEY.sub("", text).strip()
    if match := _UNIT_IN_TEXT.fullmatch(text):
        words = _WORD.findall(match[2].lower())
        if not {"and", "or"} & set(words) and not TEXT.fullmatch(match[1]):
            unit = unit or next((_UNIT_OF[word] for word in words if word in _UNIT_OF), None)
            return match[1].strip(), unit
    if (match := _DEGREES.fullmatch(text)) and re.search(r"\d", match[1]):
        return match[1].strip(), "degree"
    if match := _UNIT_IN_LETTERS.fullmatch(text):
        words = _WORD.findall(match[3].lower())
        known = next((_UNIT_OF[word] for word in words if word in _UNIT_OF and len(word) > 1), None)
        if known or (match[2] and any(len(word) > 2 and word not in FILLERS for word in words)):
            return match[1], known or unit
    return text, unit
