"""Messages about failed reward functions: one per kind, with the line of the user's code; and when a run ends."""

import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import Config, ConfigError, RewardConfig
from rl.rewards.failure import RewardFailure, describe_error, find_place, one_line, read_failure
from rl.rewards.totals import Totals, total
from rl.rollout.failures import MAX_KINDS, CallsFailed, FailureLog
from rl.run.build import error_if_all_fail
from rl.watch.reports import ServiceUnavailable
from rl.world.messages import Mailbox
from tests.mails import Mark, connected, take

KEY_ERROR = RewardFailure("score", "KeyError", "KeyError: 'answre'", "my/rewards.py:12", "prompt 3: 'a', response: 'b'")


def totals_of(num_ok: int, num_failed: int) -> Totals:
    return total(
        [{"status": "ok", "parts": {"f": 1.0}}] * num_ok + [{"status": "error", "parts": {"f": 0.0}}] * num_failed
    )


def tell(mail: Mailbox, *failures: RewardFailure) -> None:
    """Send failures to rank 0, and wait until its log has them."""
    mail.send(0, CallsFailed(list(failures)))
    mail.send(0, Mark())


def test_each_kind_is_shown_once_whichever_rank_reports_it(capfd: pytest.CaptureFixture[str]) -> None:
    with connected(3) as mails:
        log = FailureLog(mails[0], ConfigError)
        other_line = RewardFailure("score", "KeyError", "KeyError: 'x'", "my/rewards.py:30")
        for mail in mails:
            tell(
                mail, KEY_ERROR, RewardFailure("score", "KeyError", "KeyError: 'other'", "my/rewards.py:12"), other_line
            )
            tell(mail, *(RewardFailure("score", "timeout", "it took long", f"my/rewards.py:{line}") for line in (5, 6)))
            take(mails[0], Mark)
            take(mails[0], Mark)
        log.check(totals_of(5, 15), step=1, is_training=True, num_expected=20)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "oneworld: the reward function score failed at my/rewards.py:12: KeyError: 'answre' (prompt 3: 'a', response: "
        "'b'). The sample scores 0. More failures of this kind are only counted, in reward/errors",
        "oneworld: the reward function score failed at my/rewards.py:30: KeyError: 'x'. The sample scores 0. More "
        "failures of this kind are only counted, in reward/errors",
        "oneworld: the reward function score failed at my/rewards.py:5: it took long. The sample scores 0. More "
        "failures of this kind are only counted, in reward/timeouts",
    ]
    log.summarize()
    assert capfd.readouterr().out == (
        "oneworld: the reward functions failed for 15 of 20 samples: 6 x score: KeyError at my/rewards.py:12, "
        "6 x score: timeout at my/rewards.py:5, 3 x score: KeyError at my/rewards.py:30\n"
    )


def test_endless_kinds_of_failures_do_not_flood_the_console(capfd: pytest.CaptureFixture[str]) -> None:
    with connected(1) as (mail,):
        log = FailureLog(mail, ConfigError)
        log.summarize()
        tell(mail, *(RewardFailure("score", f"Error{number}", "", "") for number in range(3 * MAX_KINDS)))
    output = capfd.readouterr()
    assert len(output.err.splitlines()) == MAX_KINDS and output.out == ""
    assert output.err.splitlines()[-1].endswith(
        f"the last message about reward functions, because there were {MAX_KINDS} kinds"
    )


@pytest.mark.parametrize(
    ("batches", "ends_in"),  # each batch: whether it is trained on, samples that succeed and that fail
    [
        ([(True, 0, 56)], "56 samples of step 1"),
        ([(False, 0, 8)], "8 samples of the evaluation"),
        ([(False, 8, 0), (True, 0, 56)], "56 samples of step 1"),
        ([(False, 1, 7), (True, 1, 55), (True, 0, 56), (False, 0, 8)], ""),  # later ones never end it
        ([(True, 1, 55), (False, 0, 8)], ""),  # the evaluation is not before the first step
        ([(True, 0, 0)], ""),
        # Rounds with a token limit: the first responses that end are few.
        ([(True, 0, 1)], ""),
        ([(True, 0, 1), (True, 0, 0), (True, 0, 55)], "56 samples of step 1"),
        ([(True, 0, 1), (True, 1, 0), (True, 0, 99)], ""),
    ],
)
def test_a_run_ends_if_nothing_of_its_first_step_or_evaluation_is_scored(
    batches: list[tuple[bool, int, int]], ends_in: str
) -> None:
    def run(all_failed: type[Exception] | None) -> None:
        with connected(1) as (mail,):
            log = FailureLog(mail, all_failed)
            tell(mail, KEY_ERROR, KEY_ERROR, RewardFailure("score", "timeout", "", ""))
            for is_training, num_ok, num_failed in batches:
                log.check(totals_of(num_ok, num_failed), 1, is_training, num_expected=56 if is_training else 8)

    run(None)
    if not ends_in:
        return run(ConfigError)
    with pytest.raises(ConfigError) as caught:
        run(ConfigError)
    why = "" if "evaluation" in ends_in else ", so there is nothing to learn from"
    text = (
        f"reward.function: none of the {ends_in} could be scored{why}. In 2 cases, "
        "besides 1 other kind of failures, the reward function score failed at my/rewards.py:12: KeyError: 'answre' "
        "(prompt 3: 'a', response: 'b'). What to change: correct the function, or the columns of the data that it "
        "reads. `train.py --plan` checks it in seconds. To run in spite of this, set reward.stop_if_all_fail=false"
    )
    assert str(caught.value) == text
    with pytest.raises(ServiceUnavailable) as caught_later:
        run(ServiceUnavailable)
    added = ". The run was resumed, so the cause may be temporary, and a restart tries again"
    assert str(caught_later.value) == text + added


def test_only_a_resumed_run_may_be_restarted() -> None:
    config = Config()
    assert error_if_all_fail(config, is_resumed=False) is ConfigError
    assert error_if_all_fail(config, is_resumed=True) is ServiceUnavailable
    config = dataclasses.replace(config, reward=RewardConfig(stop_if_all_fail=False))
    assert error_if_all_fail(config, is_resumed=True) is None


SOURCE = """
import functools, json, helper

def plain(text):
    value = text
    return json.loads(value)

def helped(text):
    return helper.parse(text)

def library(text):
    return helper.of_package(text)

def wrapped(function):
    @functools.wraps(function)
    def call(*arguments):
        return function(*arguments)
    return call

decorated = wrapped(plain)

class Grader:
    def __call__(self, text):
        return json.loads(text)

grader = Grader()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = tmp_path / "env" / "site-packages"
    package.mkdir(parents=True)
    (package / "of_package.py").write_text("def parse(text):\n    raise LookupError('a\\nb\\x1b[2J')\n")
    (tmp_path / "helper.py").write_text(
        "import of_package\ndef parse(text):\n    return int(text)\nof_package = of_package.parse\n"
    )
    (tmp_path / "rewards.py").write_text(SOURCE)
    for folder in (tmp_path, package):
        monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("rewards_of_a_test", tmp_path / "rewards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name in ("helper", "of_package"):  # other tests have modules of these names
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec.loader.exec_module(module)
    for name in ("helper", "of_package"):
        del sys.modules[name]
    return module


def failure_of(call: Callable[[str], Any]) -> RewardFailure:
    try:
        call("no")
    except Exception as error:
        return describe_error("f", call, error)
    raise AssertionError("it did not raise")


@pytest.mark.parametrize(
    ("name", "place", "error"),
    [
        ("plain", "rewards.py:6", "JSONDecodeError"),  # raised in the standard library
        ("helped", "helper.py:3", "ValueError"),
        ("library", "rewards.py:12", "LookupError"),
        ("decorated", "rewards.py:6", "JSONDecodeError"),
        ("grader", "rewards.py:24", "JSONDecodeError"),
    ],
)
def test_the_line_is_the_innermost_of_the_users_code(
    module: Any, tmp_path: Path, name: str, place: str, error: str
) -> None:
    failure = failure_of(getattr(module, name))
    assert (failure.place, failure.error) == (f"{tmp_path}/{place}", error)


def test_texts_are_one_printable_line(module: Any) -> None:
    assert failure_of(module.library).text == "LookupError: a b\\x1b[2J"
    assert one_line("x" * 3000) == "x" * 497 + "..."
    assert find_place(functools.partial(module.plain, ""), []).endswith("rewards.py:4")
    assert find_place(json.loads, [("/elsewhere.py", 3)]).endswith(
        f"{json.__file__}:{json.loads.__code__.co_firstlineno}"
    )
    assert find_place(len, [("/elsewhere.py", 3)]) == "/elsewhere.py:3"
    assert find_place(len, []) == ""


@pytest.mark.parametrize("values", [None, [], "text", {}, {"function": "f"}, vars(KEY_ERROR) | {"text": 1}])
def test_what_is_no_failure_is_refused(values: Any) -> None:
    assert read_failure(values) is None
    assert read_failure(vars(KEY_ERROR)) == KEY_ERROR
