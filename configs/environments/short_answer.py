"""The reward of configs/search_qa_qwen2.5_3b.yaml."""

import re
import string
from collections import Counter
from typing import Any


def answer_f1(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    """Return the F1 of the words between the last <answer> tags and those of the row's answer, as SQuAD counts them.
    Without tags, the score is 0. The part `exact` says whether all words are equal."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    got, wanted = plain_words(tagged[-1] if tagged else ""), plain_words(row["answer"])
    shared = sum((Counter(got) & Counter(wanted)).values())
    return {
        "score": 2 * shared / (len(got) + len(wanted)) if shared else 0.0,
        "exact": float(bool(got) and got == wanted),
    }


def plain_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in letters.split() if word not in ("a", "an", "the")]
