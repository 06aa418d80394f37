"""What a run, `--plan` and tools/try_environment.py check and say about the environment of the conversations."""

import queue
from pathlib import Path
from typing import Self

from rl.common.text import count_of
from rl.config.schema import Config, ConfigError
from rl.data.prompts import Prompt
from rl.environments.pool import ConversationPool
from rl.environments.protocol import Ask, Ended, Ready
from rl.rewards.find import read_rules
from rl.rewards.launch import launch
from rl.rollout.dispatch import Sampling, Task
from rl.rollout.engine import Request
from rl.rollout.group import Group
from rl.rollout.turns import Conversations


def uses_own_reward(config: Config) -> bool:
    """Return whether reward.function counts the reward that the environment gives."""
    return any(rule.spec == "environment" for rule in read_rules(config.reward))


def check_reward_use(config: Config, has_reward: bool) -> None:
    """Raise ConfigError if the environment gives a reward that is not used, or if it should give one and does not."""
    is_used = uses_own_reward(config)
    if has_reward and not is_used:
        raise ConfigError(
            f"reward.function: got {config.reward.function!r}, but the environment has a reward of its own, which it "
            "ignores; set reward.function=environment, or a mapping such as {environment: 1, format: 0.1}"
        )
    if is_used and not has_reward:
        raise ConfigError(
            f"reward.function: got environment, but {config.environment.class_} has no method `reward`; write one, or "
            "choose another function"
        )


def describe_conversations(config: Config, loaded: Ready) -> list[str]:
    """Return who answers the model, and the limits of a conversation."""
    environment, rollout = config.environment, config.rollout
    tools = ", ".join(loaded.tools)
    if environment.rollout:
        who = f"the rollout function {environment.rollout}"
    elif environment.class_:
        who = f"the class {environment.class_}" + (tools and f", with the tools {tools}")
        who += ", and `step` for messages without calls" if tools and loaded.has_step else ""
    else:
        who = f"the tools {tools}"
    who += f"; calls in the format {loaded.call_format}" if tools and loaded.call_format else ""
    per_turn = f" ({environment.max_tokens_per_turn} per turn)" if environment.max_tokens_per_turn else ""
    limits = (
        f"at most {count_of(environment.max_turns, 'turn')}, {rollout.max_new_tokens} tokens of the model{per_turn}"
    )
    limits += f", {environment.max_observation_tokens} tokens per observation, {environment.timeout_s:g} s per call"
    limits += f" and {environment.max_seconds:g} s in all"
    prompt, after = config.data.max_prompt_tokens, config.max_tokens_after_prompt
    longest = f"the longest sequence has {prompt} + {after} = {config.max_sequence_tokens} tokens"
    return [who, f"{limits}; {longest}"]


class LocalConversation:
    """One conversation of a command that has no ranks and no engine. Use it in a `with` statement."""

    def __init__(self, config: Config, model_folder: Path | None):
        """Load the user's code and the model's tokenizer. Raise ConfigError if something is wrong with them."""
        self._config = config
        self._events: queue.Queue[Ask | Ended | BaseException] = queue.Queue()
        add = self._events.put
        self.pool = ConversationPool(launch("rl.environments.server"), config, model_folder, add, add)
        self.requests: list[Request] = []  # that `turns` has added
        self.turns = Conversations(self.pool.send, self.requests.extend, config, config.run.seed)
        try:
            check_reward_use(config, self.pool.wait_ready())
        except BaseException:
            self.pool.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def begin(self, prompt: Prompt) -> Group:
        """Begin a conversation, without rounds. Return its group of one sample."""
        rollout = self._config.rollout
        sampling = Sampling(1, rollout.temperature, rollout.max_new_tokens, rollout.top_p, rollout.top_k)
        group = Group(Task(0, 0, 0, prompt, sampling, version=1))
        group.begin(are_conversations=True)
        self.turns.begin([group])
        return group

    def receive(self) -> Ask | Ended:
        """Wait for what a conversation asks, or for its end. Raise RuntimeError if the server has ended."""
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event
