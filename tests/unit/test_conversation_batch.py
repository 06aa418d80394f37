"""Conversations in a batch and in files: which sequences belong together, and what was said in which turn."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from rl.config.load import load_config
from rl.config.schema import ConfigError
from rl.data.batch import Batch, empty_batch
from rl.data.conversations import Turn, count_observed, read_conversations
from rl.data.group_file import FORMAT, StoredGroup, groups_from_bytes, groups_to_bytes
from rl.data.prompts import Prompt
from rl.data.trajectories import Trajectory, compare_provenance, read_trajectory, write_trajectory
from rl.data.trajectory_files import GroupKey
from rl.rollout.held import HeldGroups
from rl.run.find_groups import _check_prompt, _settings
from tests.conversations import Said, Sample, batch_of_conversations

# The second sample of the first group has two sequences: the template rewrote its first turn, 6 6, to 6.
ONE = Sample(1.0, [[[1, 2], Said(0, [5, 5]), [9], Said(1, [7])]])
SPLIT = Sample(0.5, [[[1, 2], Said(0, [6, 6])], [[1, 2, 6, 8, 8], Said(1, [7, 7, 7]), [9, 9], Said(2, [4])]], True)
SILENT = Sample(0.0, [[[3]]])  # it ended before the model could answer
GROUPS = [[ONE, SPLIT], [SILENT, ONE]]
OK = {"parts": {"rule": 1.0}, "status": "ok", "answer": None}


def test_sequences_of_a_conversation_belong_together() -> None:
    batch = batch_of_conversations(GROUPS)
    assert batch.num_sequences == 5 and batch.num_conversations == 4
    assert batch.starts_conversation.tolist() == [True, True, False, True, True]
    assert batch.conversation_ids.tolist() == [0, 1, 1, 2, 3]
    assert batch.response_lengths.tolist() == [3, 2, 4, 0, 3]
    assert batch.conversation_lengths.tolist() == [3, 6, 0, 3]
    assert batch.response_conversation_ids.tolist() == [0] * 3 + [1] * 6 + [3] * 3
    assert batch.response_segment_ids.tolist() == [0] * 3 + [1] * 2 + [2] * 4 + [4] * 3


def test_without_samples_every_sequence_is_a_conversation() -> None:
    batch = batch_of_conversations(GROUPS).without(["turns", "samples"])
    assert batch.conversation_ids.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(batch.conversation_lengths, batch.response_lengths)
    assert torch.equal(batch.response_conversation_ids, batch.response_segment_ids)
    assert empty_batch().num_conversations == 0 and empty_batch().conversation_lengths.tolist() == []


def test_equal_samples_of_neighbouring_groups_are_different_conversations() -> None:
    assert batch_of_conversations([[ONE], [ONE], [ONE]]).conversation_ids.tolist() == [0, 1, 2]


def test_scattered_sequences_are_an_error() -> None:
    """Advantages of tokens would be wrong, silently."""
    with pytest.raises(AssertionError, match="must follow each other"):
        _ = batch_of_conversations(GROUPS).select([1, 0, 2]).conversation_ids


def test_a_rank_without_groups_does_not_take_the_fields_of_the_others() -> None:
    """The empty share of a rank has no optional fields."""
    batch = batch_of_conversations(GROUPS)
    for parts in ([empty_batch(), batch], [batch, empty_batch()]):
        together = Batch.concat(parts)
        assert torch.equal(together.turns, batch.turns) and torch.equal(together.samples, batch.samples)
    assert Batch.concat([empty_batch(), empty_batch()]).num_sequences == 0


def test_turns_are_read_in_order() -> None:
    one, split, silent, _ = read_conversations(batch_of_conversations(GROUPS))
    assert (one.prompt, one.reward, one.is_truncated) == ([1, 2], 1.0, False)
    assert one.turns == [Turn("model", [5, 5]), Turn("environment", [9]), Turn("model", [7])]
    assert (one.last_response, one.num_model_turns, one.num_model_tokens) == ([7], 2, 3)
    # What is new in the prompt of the second sequence comes after 1 2 6.
    assert split.turns == [
        Turn("model", [6, 6]),
        Turn("environment", [8, 8]),
        Turn("model", [7, 7, 7]),
        Turn("environment", [9, 9]),
        Turn("model", [4]),
    ]
    assert (split.prompt, split.is_truncated, split.num_model_turns, split.num_model_tokens) == ([1, 2], True, 3, 6)
    assert (silent.prompt, silent.turns, silent.last_response) == ([3], [], [])


def test_turns_without_an_observation_in_between() -> None:
    """A rollout function may go on at once."""
    (read,) = read_conversations(batch_of_conversations([[Sample(0.0, [[[1], Said(0, [5]), Said(1, [6])]])]]))
    assert read.turns == [Turn("model", [5]), Turn("model", [6])]


def test_a_later_sequence_that_shares_nothing_or_everything() -> None:
    unrelated = Sample(0.0, [[[1], Said(0, [5])], [[2, 3], Said(1, [6])]])
    again = Sample(0.0, [[[1, 2], Said(0, [5])], [[1, 2], Said(1, [5])]])  # the same answer to the same prompt
    batch = batch_of_conversations([[unrelated, again]])
    assert [[turn.tokens for turn in each.turns] for each in read_conversations(batch)] == [
        [[5], [2, 3], [6]],
        [[5], [5]],
    ]
    assert count_observed(batch).tolist() == [2, 0]


def test_observed_tokens_are_neither_prompt_nor_sampled_nor_repeated() -> None:
    assert count_observed(batch_of_conversations(GROUPS)).tolist() == [1, 4, 0, 1]


def split_file(**changes: torch.Tensor) -> bytes:
    """Return a file of one group: ONE, then SPLIT with its two sequences."""
    data = groups_to_bytes([StoredGroup(4, batch_of_conversations([GROUPS[0]]), [OK, OK])])
    line = '{"group": 4, "num_sequences": 3, "state": "trained", "results": [null, null]}'
    return save(load(data) | changes, {"format": FORMAT, "groups": line, "step": "{}"})


def test_files_have_results_by_sample() -> None:
    batches = [batch_of_conversations([group]) for group in GROUPS]
    stored = [StoredGroup(number, batch, [OK, None]) for number, batch in enumerate(batches)]
    got = groups_from_bytes(groups_to_bytes(stored))
    for mine, other in zip(got, stored, strict=True):
        assert mine.results == other.results
        for name, tensor in other.batch.tensors().items():
            found = getattr(mine.batch, name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    assert len(groups_from_bytes(split_file())) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": torch.tensor([0, 1, 2])}, "an entry for each of the 3 samples"),
        ({"samples": torch.tensor([1, 2, 2])}, "samples must count the samples of a group from 0"),
        ({"samples": torch.tensor([0, 1, 0])}, "samples must count the samples of a group from 0"),
        ({"rewards": torch.tensor([1.0, 0.5, 0.0])}, "rewards must have one value for all sequences of a sample"),
        ({"truncated": torch.tensor([False, True, False])}, "truncated must have one value"),
        ({"group_ids": torch.tensor([0, 0, 1])}, "group_ids must have one value"),
        (
            {"samples": torch.tensor([0.0, 1.0, 1.0])},
            "samples has the dtype torch.float32, but it must have torch.int64",
        ),
        ({"turns": torch.zeros(21, dtype=torch.int32)}, "turns must be at least 0 where loss_mask is true"),
        (
            {"ended": torch.tensor([True, True, False]), "noise": torch.zeros(3, 0, dtype=torch.uint8)},
            "ended must have one value",
        ),
    ],
)
def test_damaged_conversations_are_named(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        groups_from_bytes(split_file(**changes))


def test_a_file_has_turns_and_samples_or_neither() -> None:
    tensors = load(split_file())
    del tensors["turns"]
    line = '{"group": 4, "num_sequences": 3, "state": "trained", "results": []}'
    with pytest.raises(ValueError, match="missing or unknown: only one of turns and samples"):
        groups_from_bytes(save(tensors, {"format": FORMAT, "groups": line, "step": "{}"}))


def unfinished() -> Batch:
    """Return ONE and SPLIT, of which the second is carried into the next round."""
    batch = batch_of_conversations([GROUPS[0]])
    ended, noise = torch.tensor([True, False, False]), torch.zeros(3, 4, dtype=torch.uint8)
    return batch.replace(ended=ended, noise=noise)


def test_a_checkpoint_keeps_results_by_sample() -> None:
    held = HeldGroups({0: 0}, {0: unfinished()}, {0: [OK, None]})
    loaded = HeldGroups.from_files({0: 0}, [held.to_bytes()], 1)
    assert loaded.results == {0: [OK, None]}
    assert torch.equal(loaded.groups[0].samples, unfinished().samples)
    without = HeldGroups.from_files({0: 0}, [groups_to_bytes([StoredGroup(0, unfinished())])], 1)
    assert without.results == {0: [None, None]}


def test_a_carried_conversation_that_is_too_long_for_new_settings_is_refused() -> None:
    """It has 6 tokens of the policy, in two sequences."""
    held = HeldGroups({0: 0}, {0: unfinished()}, {0: [OK, None]})
    held.check_lengths(max_new_tokens=7)
    with pytest.raises(ConfigError, match=r"got 6, .* has 6 tokens already"):
        held.check_lengths(max_new_tokens=6)


class Stream:
    def at(self, number: int) -> Prompt:
        return Prompt(number, 0, "text", "", [40, 41])


def test_files_between_phases_hold_conversations(tmp_path: Path) -> None:
    """Their prompts may differ from the row's: an environment adds to it, and the template lists the tools."""
    done = OK | {"ending": "done", "counts": {"turns": 2}}
    goes_on = {"parts": {}, "status": "open", "answer": None, "record": {"messages": [[], []], "counts": {}}}
    key, group = GroupKey(1, 4), Trajectory(unfinished(), [done, goes_on], "fake", 2, 3)
    write_trajectory(tmp_path, key, group, 5, {"run.seed": 1})
    read = read_trajectory(key, (tmp_path / key.file).read_bytes())
    assert (read.scores, read.engine, read.has_score) == ([done, goes_on], "fake", True)
    assert dataclasses.replace(group, scores=[None, goes_on]).has_score, "nothing has failed"
    assert not dataclasses.replace(group, scores=[OK | {"status": "error"}, goes_on]).has_score
    write_trajectory(tmp_path, key, dataclasses.replace(group, scores=[OK | {"colour": 1}, None]), 5, {})
    with pytest.raises(ValueError, match="must have answer, parts, status, and perhaps counts, ending, record"):
        read_trajectory(key, (tmp_path / key.file).read_bytes())
    assert torch.equal(read.batch.turns, group.batch.turns)
    _check_prompt(read, Stream(), 4, num_samples=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has 2 samples, but a group has 3"):
        _check_prompt(read, Stream(), 4, num_samples=3)  # type: ignore[arg-type]


def test_groups_of_another_environment_are_refused() -> None:
    """Runs without environments have the provenance that they always had, so their files stay usable."""

    def settings(name: str) -> dict[str, Any]:
        return _settings(load_config(None, [f"environment.class=my/game.py:{name}", "data.chat_template=true"]))

    plain, game, other = _settings(load_config(None, [])), settings("Guess"), settings("Other")
    assert not [name for name in plain if name.startswith("environment.")]
    assert compare_provenance(game, other) == ["environment.class is my/game.py:Guess there and my/game.py:Other here"]
    assert any("environment.max_turns" in each for each in compare_provenance(plain, game))
