"""Runs of train.py with the conversations of tests/e2e/environment_functions.py, and what came of each conversation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl.data.batch import Batch
from rl.data.group_file import StoredGroup, groups_from_bytes
from tests.launcher import Result, command_of, members
from tests.reference_rounds import make_model

FUNCTIONS = "tests/e2e/environment_functions.py"
TEMPLATE = (
    "{% if tools %}{s{% for tool in tools %} {{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '{' + message.role[0] + ' ' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>'
    "{% endfor %}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{a ' }}{% endif %}"
)
# What the tokens 1 to 9 say, of which the fake engine's responses consist: calls, and words.
SPOKEN = (
    *(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        for name, arguments in (
            ("add", '{"n": 1}'),
            ("add", '{"n": 2}'),
            ("add", '{"n": "x"}'),
            ("look", "{}"),
            ("nothing", "{}"),
        )
    ),
    *("yes ", "no ", "one ", "two "),
)
UNUSED = "`~^|\\@$;&"  # characters that make room for them
DOORS: Mapping[str, list[str]] = {
    "class": [
        *(f"environment.class={FUNCTIONS}:Account", f"environment.tools=[{FUNCTIONS}:look]"),
        "reward.function=environment",
    ],
    "tools": [
        f"environment.tools=[{FUNCTIONS}:add,{FUNCTIONS}:look]",
        "reward.function=tests/e2e/reward_functions.py:varied",
    ],
    "rollout": [f"environment.rollout={FUNCTIONS}:play", "reward.function=environment"],
}


def make_chat_model(folder: Path) -> Path:
    """Write an untrained model with a chat template, in which single tokens are whole calls."""
    make_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    moved = [character for character, number in ids.items() if 1 <= number <= 9]
    for character, unused in zip(moved, UNUSED, strict=True):
        ids[character] = ids.pop(unused)
    ids |= {text: number for number, text in enumerate(SPOKEN, start=1)}
    tokenizer["pre_tokenizer"]["pattern"]["Regex"] = r"[\s\S]"
    tokenizer["model"] |= {"vocab": ids, "unk_token": "#"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def overrides_of(model: Path, door: str = "class", num_steps: int = 3) -> list[str]:
    """Return the arguments of train.py for small conversations."""
    return [
        *(f"model.path={model}", "data.chat_template=true", "data.max_prompt_tokens=60"),
        *(f"train.num_steps={num_steps}", "train.num_prompts_per_step=4", "rollout.num_samples_per_prompt=3"),
        *("rollout.max_new_tokens=24", "environment.max_tokens_per_turn=7", "environment.max_turns=6"),
        *("environment.max_conversation_tokens=700", "environment.max_observation_tokens=50", "actor.lr=1e-3"),
        *DOORS[door],
    ]


def find_server(launcher: int) -> int | None:
    """Return the process id of a conversation server of a run."""
    servers = [
        each.pid for each in members(launcher) if any("rl.environments.server" in one for one in command_of(each))
    ]
    return servers[0] if servers else None


class Conversation(NamedTuple):
    """What came of a sample. Each tuple has an entry per sequence of the conversation."""

    tokens: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[bool, ...], ...]
    turns: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]  # of the engine
    reward: float
    is_truncated: bool


Key = tuple[int, int]  # place of the prompt in the stream, and number of the sample


def groups_of(result: Result, steps: Sequence[int] = ()) -> dict[int, StoredGroup]:
    """Return the groups that a run has trained on, or that some of its steps have, by their place in the stream."""
    found: dict[int, StoredGroup] = {}
    for step in steps or [int(row["step"]) for row in result.metrics]:
        for file in sorted((result.folder / "rollouts").glob(f"step_{step}.rank_*.safetensors")):
            groups = groups_from_bytes(file.read_bytes())
            assert not found.keys() & {group.number for group in groups}
            found |= {group.number: group for group in groups}
    return found


def conversations_of(result: Result, steps: Sequence[int] = ()) -> dict[Key, Conversation]:
    groups = groups_of(result, steps)
    return {
        (number, sample): _read(group.batch, sample)
        for number, group in groups.items()
        for sample in sorted(set(_samples(group.batch)))
    }


def versions_of(result: Result) -> list[dict[int, list[int]]]:
    """Return the versions that have sampled each turn of each conversation."""
    found = []
    for group in groups_of(result).values():
        assert group.batch.turns is not None
        numbers, versions = group.batch.turns.tolist(), group.batch.versions.tolist()
        starts = group.batch.cu_lengths.tolist()
        turns: dict[int, dict[int, list[int]]] = {}
        for sample, begin, end in zip(_samples(group.batch), starts, starts[1:], strict=False):
            for number, version in zip(numbers[begin:end], versions[begin:end], strict=True):
                if number >= 0:
                    turns.setdefault(sample, {}).setdefault(number, []).append(version)
        found += turns.values()
    return found


def _samples(batch: Batch) -> list[int]:
    assert batch.samples is not None
    return batch.samples.tolist()


def _read(batch: Batch, sample: int) -> Conversation:
    assert batch.turns is not None
    chosen = batch.select([index for index, owner in enumerate(_samples(batch)) if owner == sample])
    lengths = chosen.lengths.tolist()
    fields = (chosen.tokens, chosen.loss_mask, chosen.turns, chosen.rollout_logprobs)
    parts: list[Any] = [tuple(tuple(part.tolist()) for part in field.split(lengths)) for field in fields]  # type: ignore
    (reward,), (is_truncated,) = set(chosen.rewards.tolist()), set(chosen.truncated.tolist())
    return Conversation(*parts, reward, is_truncated)
