"""Samples groups on one engine: pulls tasks, steps the engine, has each response scored as it ends, sends whole groups
to their owners.

All ranks of a tensor-parallel engine must make the same calls in the same order. The lead decides, and mirrors each
call to its followers by message just before it makes it; followers obey. So no rank waits for work inside a
collective.
"""

import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rl.data.batch import Batch
from rl.data.prompts import Tokenizer, sample_seed
from rl.rollout.dispatch import Task
from rl.rollout.engine import Completion, Engine, Request
from rl.watch.heart import HEART, size_class
from rl.world.mail import Message
from rl.world.service import Service, serve
from rl.world.world import World

AGREE_S = 10.0  # for the ranks of an engine to say that they failed too
MIN_SEQUENCES, MIN_PROMPT_TOKENS = 8, 256  # smaller steps of an engine count as one shape


class Rewards(Protocol):
    def submit(self, key: tuple[int, ...], prompt: str, response: str, row: dict[str, Any], answer_of: str) -> None:
        """The result comes as a message of the kind `scored`."""


@dataclass
class _Group:
    task: Task
    ended: dict[int, Completion] = field(default_factory=dict)  # by sample
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)  # results of the reward functions, by sample
    attempt: int = 0  # counts engines that failed under it; what was sampled on those is worth nothing

    @property
    def is_sampled(self) -> bool:
        return len(self.ended) == self.task.sampling.num_samples

    @property
    def is_scored(self) -> bool:
        return len(self.scores) == self.task.sampling.num_samples


class RolloutService(Service):
    """On every rank of an engine; `ranks` are the engine's, the lead first."""

    name = "rollout"
    kinds = ("work", "drained", "mirror", "scored")

    def __init__(
        self,
        world: World,
        engine: Engine,
        ranks: tuple[int, ...],
        leader: int,
        max_num_groups: int,
        run_seed: int | None,
        rewards: Rewards | None,
        tokenizer: Tokenizer,
        rebuild: Callable[[Engine], Engine],
    ):
        """`rewards` is the lead's; `rebuild` makes another engine in the place of one that failed."""
        self.engine = engine
        self.on_failed: Callable[[Engine], None] = lambda engine: None  # nobody may hold it any more
        self.on_rebuilt: Callable[[Engine], None] = lambda engine: None
        self._rebuild = rebuild
        self._failure: Exception | None = None  # on a follower: of its last step
        self._give_up_timer: threading.Timer | None = None
        self._world, self._mail, self._leader = world, world.mail, leader
        self._lead = ranks[0]
        self.followers = ranks[1:] if self.is_lead else ()
        self._max_num_groups, self._run_seed, self._tokenizer = max_num_groups, run_seed, tokenizer
        self._rewards = rewards
        self._groups: dict[tuple[int, int], _Group] = {}  # by batch and position
        self._to_begin_again: set[tuple[int, int]] = set()  # those of an engine that failed
        self._batch: int | None = None  # the batch that this rank's own loop waits for; None on ranks that only serve
        self._drained = 0
        self._num_prompt_tokens = 0  # that the engine was given since its last step

    @property
    def is_lead(self) -> bool:
        return self._mail.rank == self._lead

    @property
    def busy(self) -> bool:
        return self.is_lead and (self.engine.num_unfinished > 0 or self._is_to_begin_again)

    @property
    def _is_to_begin_again(self) -> bool:
        """A new engine has got its weights."""
        return bool(self._to_begin_again) and self.engine.version > 0

    def begin(self) -> None:
        """Asks for the first work; from then on every finished group asks for more."""
        self._pull()

    def serve_batch(self, batch: int, orders: Service) -> None:
        """On ranks that also drive the loop: samples until nothing of this batch is left to hand out or to finish
        here, or an order ends it."""
        self._batch = batch
        self._pull()
        serve(self._world, [self, orders], until=lambda: self._drained >= batch and not self._groups)
        if self.is_lead:
            self._mirror("drained", batch=batch)

    def handle(self, message: Message) -> None:
        if message.kind == "work":
            self._start([Task.from_dict(task) for task in message.meta["tasks"]])
        elif message.kind == "drained":
            self._drained = message.meta["batch"]
        elif message.kind == "scored":
            self._score(message.meta["key"], message.meta["result"])
        else:
            self._obey(message.meta)

    def work(self) -> None:
        if self._is_to_begin_again:
            self._begin_again()
            return
        self._mirror("step")
        try:
            ended = self._step()
        except Exception as error:
            self._survive(error)
            return
        HEART.beat(f"{self.engine.num_unfinished} responses", sum(len(done.tokens) for done in ended))
        sampled = [self._finish(done) for done in ended]
        if any(sampled):
            self._pull()

    def _survive(self, error: Exception) -> None:
        """Another engine in its place. It asks for the weights, and when they are proven its prompts begin anew.

        But each group only once, whatever ended in between: one that fails every engine would have them built for ever.
        """
        lost = {place for place, group in self._groups.items() if not group.is_sampled}
        is_again = any(self._groups[place].attempt > 0 for place in lost)
        if is_again or breaks_rank(error) or not self._have_all_failed():
            raise error
        clear_frames(error)  # which hold the engine's memory
        print(
            f"oneworld: the engine of rank {self._mail.rank} failed with {len(lost)} groups of step "
            f"{self._world.step}: {type(error).__name__}: {error}; it is built anew, and they are sampled again",
            file=sys.stderr,
            flush=True,
        )
        for place in lost:
            group = self._groups[place]
            self._groups[place] = _Group(group.task, attempt=group.attempt + 1)
        self._to_begin_again |= lost
        self._mirror("rebuild")
        self._replace_engine()
        self._mail.send(self._leader, "order", {"order": "publish again"})

    def _have_all_failed(self) -> bool:
        """Whether the other ranks of the engine say the same; else they are inside a step that cannot end."""
        deadline = time.monotonic() + AGREE_S
        for _ in self.followers:
            if self._mail.receive("engine failed", timeout_s=max(0.0, deadline - time.monotonic())) is None:
                return False
        return True

    def _replace_engine(self) -> None:
        self.on_failed(self.engine)
        self.engine = self._rebuild(self.engine)
        self._num_prompt_tokens = 0
        HEART.forget_shapes()  # all are new to this one
        self.on_rebuilt(self.engine)

    def _begin_again(self) -> None:
        tasks = [group.task for place, group in self._groups.items() if place in self._to_begin_again]
        self._to_begin_again.clear()
        assert {task.version for task in tasks} == {self.engine.version}, (tasks, self.engine.version)
        self._mirror("add", tasks=[asdict(task) for task in tasks])
        self._add(tasks)

    def _obey(self, order: dict) -> None:
        if order["call"] == "add":
            self._add([Task.from_dict(task) for task in order["tasks"]])
        elif order["call"] == "step":
            self._follow_step()
        elif order["call"] == "rebuild":
            assert self._give_up_timer is not None
            self._give_up_timer.cancel()
            self._failure = None
            self._replace_engine()
        else:
            self._drained = order["batch"]

    def _follow_step(self) -> None:
        if self._failure is not None:  # the lead goes on: it did not fail
            raise self._failure
        try:
            self._step()
        except Exception as error:
            if breaks_rank(error):
                raise
            clear_frames(error)
            self._failure = error
            self._mail.send(self._lead, "engine failed", {})
            self._give_up_timer = threading.Timer(AGREE_S, self._give_up, [self._world.step])
            self._give_up_timer.daemon = True
            self._give_up_timer.start()

    def _give_up(self, step: int) -> None:
        """The lead did not fail: it is inside a step that cannot end without this rank."""
        if self._failure is not None:
            self._world.fail_in_background(self._failure, self.name, step)

    def _mirror(self, call: str, **meta: object) -> None:
        for rank in self.followers:
            self._mail.send(rank, "mirror", {"call": call, **meta})

    def _pull(self) -> None:
        if not self.is_lead:
            return
        held = sum(not group.is_sampled for group in self._groups.values())
        room = max(self._max_num_groups - held, 0)
        self._mail.send(self._leader, "pull", {"room": room, "held": held, "batch": self._batch})

    def _start(self, tasks: list[Task]) -> None:
        new = {(task.batch, task.position): _Group(task) for task in tasks}
        if self._to_begin_again and not self.engine.version:  # asked for before it failed: begun with the others
            self._groups |= new
            self._to_begin_again |= new.keys()
            return
        for task in tasks:
            if task.version != self.engine.version:
                raise RuntimeError(
                    f"asked for a rollout of version {task.version}, but this engine has "
                    f"{f'confirmed version {self.engine.version}' if self.engine.version else 'confirmed none'}"
                )
        self._mirror("add", tasks=[asdict(task) for task in tasks])
        self._groups |= new
        self._add(tasks)
        self._pull()

    def _add(self, tasks: list[Task]) -> None:
        requests = self._requests(tasks)
        self._num_prompt_tokens += sum(len(request.tokens) for request in requests)
        self.engine.add(requests)

    def _step(self) -> list[Completion]:
        num_responses, num_prompt_tokens = self.engine.num_unfinished, self._num_prompt_tokens
        shape = f"decodes up to {size_class(num_responses, MIN_SEQUENCES)} responses"
        if num_prompt_tokens:
            shape = f"reads up to {size_class(num_prompt_tokens, MIN_PROMPT_TOKENS)} tokens of prompts"
        HEART.beat(f"{num_responses} responses", shape=shape)
        self._num_prompt_tokens = 0
        return self.engine.step()

    def _requests(self, tasks: list[Task]) -> list[Request]:
        return [
            Request(
                id=f"{task.batch}/{task.position}/{sample}",
                tokens=task.prompt.tokens,
                temperature=task.sampling.temperature,
                max_new_tokens=task.sampling.max_new_tokens,
                seed=self._seed(task, sample),
                top_p=task.sampling.top_p,
                top_k=task.sampling.top_k,
            )
            for task in tasks
            for sample in range(task.sampling.num_samples)
        ]

    def _seed(self, task: Task, sample: int) -> int | None:
        if self._run_seed is None:
            return None
        return sample_seed(self._run_seed, task.prompt.epoch, task.prompt.id, sample)

    def _finish(self, completion: Completion) -> bool:
        """Has it scored, while others are still sampled; returns whether it was the last of its group."""
        assert self._rewards is not None
        batch, position, sample = map(int, completion.id.split("/"))
        group = self._groups[batch, position]
        group.ended[sample] = completion
        prompt = group.task.prompt
        response = self._tokenizer.decode(completion.tokens, skip_special_tokens=True)
        key = (batch, position, sample, group.attempt)
        row = prompt.row | {"answer": prompt.answer}
        self._rewards.submit(key, prompt.text, response, row, group.task.sampling.answer_of)
        return group.is_sampled

    def _score(self, key: Sequence[int], result: dict[str, Any]) -> None:
        batch, position, sample, attempt = key
        group = self._groups.get((batch, position))
        if group is None or attempt != group.attempt:  # of an engine that failed
            return
        group.scores[sample] = result
        if group.is_scored:
            self._deliver(self._groups.pop((batch, position)))

    def _deliver(self, group: _Group) -> None:
        task = group.task
        samples = range(task.sampling.num_samples)
        scores = [group.scores[sample] for sample in samples]
        completions = [group.ended[sample] for sample in samples]
        rollouts = pack_group(task, completions, [score["score"] for score in scores])
        meta = {
            "batch": task.batch,
            "position": task.position,
            "version": task.version,
            "engine": self.engine.name,
            "scores": [{name: score[name] for name in ("parts", "status", "answer")} for score in scores],
            "num_preemptions": sum(completion.num_preemptions for completion in completions),
        }
        self._mail.send(task.owner, "group", meta, rollouts.to_bytes())


def clear_frames(error: BaseException | None) -> None:
    """Also of what it came from."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def breaks_rank(error: Exception) -> bool:
    """After which nothing on the device, or no process group, can be trusted."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("cuda", "cudnn", "cublas", "triton error", "nccl", "gloo", "connection closed by peer")
    is_device = isinstance(error, torch.AcceleratorError | dist.DistError)
    is_told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    cause = error.__cause__
    return is_device or is_told or (isinstance(cause, Exception) and breaks_rank(cause))


def pack_group(task: Task, completions: list[Completion], rewards: list[float]) -> Batch:
    """The ragged batch of one group, in the order of its samples."""
    prompt = task.prompt.tokens
    tokens, logprobs, versions = array("q"), array("f"), array("i")  # four times as fast as lists
    for completion in completions:
        tokens.fromlist([*prompt, *completion.tokens])
        logprobs.fromlist([0.0] * len(prompt) + completion.logprobs)
        versions.fromlist([-1] * len(prompt) + [task.version] * len(completion.tokens))
    return Batch(
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        lengths=torch.tensor([len(prompt) + len(c.tokens) for c in completions], dtype=torch.int64),
        prompt_lengths=torch.full((len(completions),), len(prompt), dtype=torch.int64),
        versions=torch.frombuffer(versions, dtype=torch.int32),
        rollout_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.full((len(completions),), task.position, dtype=torch.int64),
        truncated=torch.tensor([c.truncated for c in completions], dtype=torch.bool),
    )
