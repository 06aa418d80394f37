"""The reward for short answers."""

from configs.environments.short_answer import answer_f1


def test_answer_f1() -> None:
    row = {"answer": "The Analytical Engine"}
    assert answer_f1("", "It is <answer>an analytical engine.</answer>", row) == {"score": 1.0, "exact": 1.0}
    assert answer_f1("", "<answer>x</answer><answer>Engine of Babbage</answer>", row)["score"] == 2 / 5
    assert answer_f1("", "the analytical engine", row) == {"score": 0.0, "exact": 0.0}
    assert answer_f1("", "<answer></answer>", row) == {"score": 0.0, "exact": 0.0}
