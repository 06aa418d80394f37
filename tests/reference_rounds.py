"""A plain single-process reference of rounds: it samples, cuts, queues and trains as docs/rounds.md defines it.

It shares no code with the schedule, the sampler, the rollout service or the learner. What it takes from the program is
the data: the prompt stream, the seeds of samples, and the noise of the fake engine, which depends on the seed and the
position of a token alone. Versions are counted as in a run: version 1 is the model that the run starts from.
"""

import math
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.data.prompts import Prompt, PromptStream, sample_seed
from rl.data.sources import read_data

TINY = ROOT / "configs/tiny"
STOP = 0  # its stop token

# The model of a version, the setting, and a response so far in; its next token and the logprob out.
Engine = Callable[[torch.nn.Module, "Setting", "Response"], tuple[int, float]]
Reward = Callable[[str, str, dict[str, str]], float]


def make_model(folder: Path) -> Path:
    """Write an untrained model with the shape and the tokenizer of configs/tiny.

    Its logprobs are moderate, so that the ratios to the fake engine's logprobs are not all clipped.
    """
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY), dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


@dataclass(frozen=True)
class Setting:
    """The settings of a run that decide its data and its losses."""

    num_steps: int
    num_prompts: int  # groups per update
    num_samples: int  # responses per group
    max_new_tokens: int
    max_tokens_per_round: int = 0  # 0: no limit
    ahead: int = 0  # rounds that are sampled before the updates of a round are made
    model: Path = TINY
    data: Path = TINY / "train.jsonl"
    lr: float = 2e-3
    clip_low: float = 0.99
    clip_high: float = 0.2
    temperature: float = 1.0
    num_groups: int | None = None  # of the whole run; None: no limit
    is_dynamic: bool = False  # only groups with different rewards are trained on
    # The recorded ones; those of the learner before the step; or the same with importance weights (decoupled PPO).
    old_logprobs: Literal["rollout", "auto", "always"] = "rollout"

    @property
    def is_stale(self) -> bool:
        """Whether some tokens may have a lag above 0."""
        return bool(self.max_tokens_per_round or self.ahead)

    @property
    def overrides(self) -> list[str]:
        """Return the arguments of train.py for this setting."""
        named = {
            "train.num_steps": self.num_steps,
            "train.num_prompts_per_step": self.num_prompts,
            "rollout.num_samples_per_prompt": self.num_samples,
            "rollout.max_new_tokens": self.max_new_tokens,
            "rollout.max_tokens_per_round": self.max_tokens_per_round,
            "rollout.ahead": self.ahead,
            "model.path": self.model,
            "data.train": self.data,
            "actor.lr": self.lr,
            "algo.clip_low": self.clip_low,
            "algo.clip_high": self.clip_high,
            "rollout.temperature": self.temperature,
            "algo.old_logprobs": self.old_logprobs,
            "algo.correction": "token" if self.old_logprobs == "always" else "none",
            "algo.dynamic_sampling": str(self.is_dynamic).lower(),
        }
        return [f"{name}={value}" for name, value in named.items()]


@dataclass
class Response:
    prompt: Prompt
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    has_ended: bool = False

    def is_truncated(self, setting: Setting) -> bool:
        return len(self.tokens) == setting.max_new_tokens and self.tokens[-1] != STOP


@dataclass
class Group:
    number: int  # place in the prompt stream
    responses: list[Response]
    rewards: list[float] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return all(response.has_ended for response in self.responses)


@dataclass(frozen=True)
class Step:
    """What one update has trained on."""

    groups: list[Group]
    version: int  # before the update
    loss: float
    grad_norm: float
    num_carried: int  # groups with an unfinished response, when the update begins
    num_queued: int  # finished groups that wait for a later update, when the update begins

    @property
    def responses(self) -> list[Response]:
        return [response for group in self.groups for response in group.responses]

    @property
    def sequences(self) -> list[list[int]]:
        """Return prompt and response of each sample."""
        return [response.prompt.tokens + response.tokens for response in self.responses]

    @property
    def lags(self) -> list[int]:
        """Return the lag of each response token."""
        return [self.version - version for response in self.responses for version in response.versions]

    @property
    def rewards(self) -> list[float]:
        return [reward for group in self.groups for reward in group.rewards]


def read_stream(setting: Setting) -> PromptStream:
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    return read_data(load_config(None, [f"data.train={setting.data}"]), tokenizer).stream


def prompts_of(setting: Setting, count: int) -> list[Prompt]:
    """Return the first prompts of the stream."""
    stream = read_stream(setting)
    return [stream.at(number) for number in range(count)]


class Reference:
    """Walk through the rounds of a run, one response after the other."""

    def __init__(self, setting: Setting, engine: Engine, reward: Reward):
        self._setting, self._engine, self._reward = setting, engine, reward
        self._tokenizer = AutoTokenizer.from_pretrained(setting.model)
        self._stream = read_stream(setting)
        self.model = AutoModelForCausalLM.from_pretrained(setting.model, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.lr, weight_decay=0.0)
        assert setting.is_stale or not setting.is_dynamic, "a run would drop the surplus, and this class does not"
        self._num_started = 0
        self._carried: list[Group] = []
        self._queue: list[Group] = []  # of all rounds that have ended
        self._num_queued = [0]  # groups that have entered the queue by each round: C(r)
        self._num_finished = [0]  # groups that have finished by each round; more than C(r) only if dynamic
        self._num_carried = [0]  # groups that each round has left unfinished
        self.steps: list[Step] = []

    def run(self) -> list[Step]:
        """Return all updates. When round r has ended, the model makes its first U(r - K) updates. So it is the version
        from which round r + 1 must sample."""
        setting = self._setting
        while len(self.steps) < setting.num_steps:
            self._sample_round()
            while len(self.steps) < min(self._num_possible(self._num_rounds - setting.ahead), setting.num_steps):
                self._train()
        return self.steps

    @property
    def _num_rounds(self) -> int:
        """Return the number of rounds that have been sampled."""
        return len(self._num_queued) - 1

    def _num_possible(self, number: int) -> int:
        """Return U(r) = floor(C(r) / N), the number of updates that are possible after round r."""
        return self._num_queued[max(0, number)] // self._setting.num_prompts

    def _sample_round(self) -> None:
        """Round r samples from version U(r - 1 - K). The first version is 1 here, and 0 in the definition."""
        setting = self._setting
        version = 1 + self._num_possible(self._num_rounds - setting.ahead)
        assert version == 1 + len(self.steps)  # so the reference's only model is that of the version
        started = [self._start_group() for _ in range(self._num_to_start())]
        sampled = sorted(self._carried + started, key=lambda group: group.number)
        for group in sampled:
            for response in group.responses:
                self._continue(response, version)
        finished = [group for group in sampled if group.has_ended]
        for group in finished:
            group.rewards = [self._score(response) for response in group.responses]
        queued = [group for group in finished if not setting.is_dynamic or len(set(group.rewards)) > 1]
        self._carried = [group for group in sampled if not group.has_ended]
        self._queue += queued
        self._num_queued.append(self._num_queued[-1] + len(queued))
        self._num_finished.append(self._num_finished[-1] + len(finished))
        self._num_carried.append(len(self._carried))

    def _num_to_start(self) -> int:
        """Return N, or what is left of the run. Dynamic sampling starts as many as should fill the batch, if a round
        since the last one that allowed an update has finished groups, and if their share of groups with different
        rewards stays the same.
        """
        setting = self._setting
        count, total = setting.num_prompts, self._num_queued[-1]
        last = self._first_round_with(self._num_possible(self._num_rounds))
        queued, finished = total - self._num_queued[last], self._num_finished[-1] - self._num_finished[last]
        if setting.is_dynamic and finished:
            count = min(count, math.ceil((count - total % count) * finished / max(queued, 1)))
        return count if setting.num_groups is None else min(count, setting.num_groups - self._num_started)

    def _first_round_with(self, num_updates: int) -> int:
        """Return the first round after which so many updates are possible."""
        return next(number for number in range(self._num_rounds + 1) if self._num_possible(number) >= num_updates)

    def _num_ended(self, update: int) -> int:
        """Return the number of rounds that have ended when an update begins. If it is the first one that a round
        allows, no further round has ended. The others wait for the K rounds that begin before the first one."""
        number = self._first_round_with(update)
        return number if self._num_possible(number - 1) == update - 1 else number + self._setting.ahead

    def _start_group(self) -> Group:
        prompt = self._stream.at(self._num_started)
        seeds = [sample_seed(0, prompt.epoch, prompt.id, sample) for sample in range(self._setting.num_samples)]
        self._num_started += 1
        return Group(self._num_started - 1, [Response(prompt, seed) for seed in seeds])

    def _continue(self, response: Response, version: int) -> None:
        """Sample at most Q tokens, until the response ends."""
        for _ in range(self._setting.max_tokens_per_round or self._setting.max_new_tokens):
            if response.has_ended:
                return
            with torch.no_grad():
                token, logprob = self._engine(self.model, self._setting, response)
            response.tokens.append(token)
            response.logprobs.append(logprob)
            response.versions.append(version)
            response.has_ended = token == STOP or len(response.tokens) == self._setting.max_new_tokens

    def _score(self, response: Response) -> float:
        text = self._tokenizer.decode(response.tokens, skip_special_tokens=True)
        return self._reward(response.prompt.text, text, {"answer": response.prompt.answer})

    def _train(self) -> None:
        """Make one step of GRPO."""
        count, lowest, highest = self._setting.num_prompts, 1 - self._setting.clip_low, 1 + self._setting.clip_high
        groups, self._queue = self._queue[:count], self._queue[count:]
        terms: list[Tensor] = []
        for group in groups:
            rewards = torch.tensor(group.rewards, dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for response, advantage in zip(group.responses, advantages.tolist(), strict=True):
                new = self._logprobs(response)
                recorded, before = torch.tensor(response.logprobs), new.detach()
                ratio = torch.exp(new - (recorded if self._setting.old_logprobs == "rollout" else before))
                term = -torch.minimum(ratio * advantage, ratio.clamp(lowest, highest) * advantage)
                if self._setting.old_logprobs == "always":
                    term = term * torch.exp(before - recorded).clamp(max=2.0)
                terms.append(term)
        loss = torch.cat(terms).mean()
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        ended = self._num_ended(len(self.steps) + 1)
        num_queued = self._num_queued[ended] - (len(self.steps) + 1) * count
        step = Step(groups, 1 + len(self.steps), loss.item(), norm.item(), self._num_carried[ended], num_queued)
        self._optimizer.step()
        self.steps.append(step)

    def _logprobs(self, response: Response) -> Tensor:
        prompt = response.prompt.tokens
        whole = torch.tensor(prompt + response.tokens)
        logits = self.model(whole.unsqueeze(0)).logits[0, len(prompt) - 1 : -1] / self._setting.temperature
        return torch.log_softmax(logits, -1).gather(1, whole[len(prompt) :, None]).squeeze(1)


def fake_engine(model: torch.nn.Module, setting: Setting, response: Response) -> tuple[int, float]:
    """Draw from ten tokens. The noise depends on the sample's seed and on the position in the sequence."""
    source = random.Random(f"{response.seed}/{len(response.prompt.tokens) + len(response.tokens)}")
    return source.choice([*range(1, 10), STOP]), -source.random()


def vllm_engine(model: torch.nn.Module, setting: Setting, response: Response) -> tuple[int, float]:
    """Draw from the model's own distribution, with the noise of vLLM's sampler on a CPU.

    Each request has a generator, and each of its tokens takes one number from it, which seeds the noise of the token.
    """
    tokens = torch.tensor([response.prompt.tokens + response.tokens])
    logits = model(tokens).logits[0, -1] / setting.temperature
    generator = torch.Generator().manual_seed(response.seed)
    for _ in range(len(response.tokens) + 1):
        seed = torch.randint(0, 2**31, (1,), generator=generator)
    token = int(torch.ops._C.fused_gumbel_argmax(logits.unsqueeze(0), seed))
    return token, float(torch.log_softmax(logits, -1)[token])


def flat(lists: Iterable[list[int]]) -> list[int]:
    return [item for each in lists for item in each]
