"""Sample the turns of conversations, within their limits.

conversation server --Ask--> lead --Request--> engine --Completion--> lead --SampledTurn--> conversation server
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rl.config.schema import Config
from rl.data.prompts import sample_seed, turn_seed
from rl.data.sources import make_conversation
from rl.environments.protocol import Ask, Close, Finish, Key, Open, SampledTurn, ToServer
from rl.rollout.conversations import RecordedTurn
from rl.rollout.engine import Completion, Request
from rl.rollout.group import Group


class Conversations:
    """Sample what the conversations of an engine ask for. Runs on its lead."""

    def __init__(
        self,
        send: Callable[[Sequence[ToServer]], None],
        add: Callable[[list[Request]], None],
        config: Config,
        run_seed: int | None,  # None: turns differ between runs
    ):
        """`send` reaches the conversation server, and `add` gives requests to the engine."""
        self._deliver, self._add, self._config, self._run_seed = send, add, config, run_seed
        self._collected: list[ToServer] | None = None  # what is sent at the end of `together`

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all that is sent in here at once, at the end."""
        assert self._collected is None
        collected = self._collected = []
        try:
            yield
        finally:
            self._collected = None
            if collected:
                self._deliver(collected)

    def _send(self, message: ToServer) -> None:
        if self._collected is None:
            self._deliver([message])
        else:
            self._collected.append(message)

    def begin(self, groups: Iterable[Group]) -> None:
        """Begin the conversations of groups, or continue them."""
        data, opened = self._config.data, list[ToServer]()
        for group in groups:
            prompt = group.task.prompt
            messages = make_conversation(prompt.row, data) if data.chat_template else []
            row = prompt.row | {"answer": prompt.answer}
            for sample in sorted(group.running):
                conversation = group.conversations[sample]
                seed = sample_seed(self._config.run.seed, prompt.epoch, prompt.id, sample)
                history, counts = conversation.history(), conversation.counts
                opened.append(Open(_key(group, sample), row, messages, prompt.tokens, seed, history, counts))
        self._deliver(opened)

    def drop(self, groups: Iterable[Group]) -> None:
        """Forget the conversations of groups whose engine has failed."""
        for group in groups:
            for sample in sorted(group.running):
                self._send(Close(_key(group, sample)))

    def forget(self, key: Key) -> None:
        """Forget a conversation that has ended. The server may have got a turn of it that nobody waits for."""
        self._send(Close(key))

    def ask(self, group: Group, ask: Ask) -> bool:
        """Sample a turn. Return False if the conversation has no tokens left in this round, and goes on in the next."""
        sample, sampling = ask.key[2], group.task.sampling
        conversation = group.conversations[sample]
        conversation.counts = ask.counts
        group.waiting.discard(sample)
        if ask.turn == len(conversation.turns):
            conversation.turns.append(RecordedTurn(ask.prompt, messages=ask.messages))
        turn, most = conversation.turns[ask.turn], self._config.max_tokens_after_prompt
        begun = turn.response.tokens.tolist()
        num_left = sampling.max_new_tokens - conversation.num_tokens
        room = len(conversation.turns[0].prompt) + most - len(turn.prompt) - len(begun)
        if num_left <= 0 or room <= 0:
            self._send(SampledTurn(ask.key, ask.turn, [], "tokens" if num_left <= 0 else "context"))
            return True
        of_round = (sampling.max_tokens_per_round or math.inf) - conversation.num_new_tokens
        if of_round <= 0:
            self._send(Close(ask.key))
            return False
        of_turn = max(1, ask.max_tokens - len(begun)) if ask.max_tokens else math.inf
        prompt, seed = group.task.prompt, None
        if self._run_seed is not None:
            seed = turn_seed(sample_seed(self._run_seed, prompt.epoch, prompt.id, sample), ask.turn)
        request = Request(
            id="/".join(map(str, (*ask.key[:3], ask.turn, ask.max_tokens))),
            tokens=turn.prompt + begun,
            sampling=sampling,
            max_tokens=int(min(num_left, room, of_round, of_turn)),
            seed=seed,
            noise=turn.response.noise,
            cache_key=group.task.cache_key,
        )
        group.num_read_tokens += len(request.tokens)
        group.writing.add(sample)
        self._add([request])
        return True

    def take(self, group: Group, sample: int, completion: Completion) -> bool:
        """Take what the engine has sampled. Return False if the turn goes on in the next round."""
        number, max_tokens = map(int, completion.id.split("/")[3:])
        conversation, sampling = group.conversations[sample], group.task.sampling
        turn = conversation.turns[number]
        response, key = turn.response, _key(group, sample)
        group.writing.discard(sample)
        group.num_cached_tokens += completion.num_cached_tokens
        response.add(completion, group.task.version)
        conversation.num_new_tokens += len(completion.tokens)
        num_after_prompt = len(turn.prompt) + len(response.tokens) - len(conversation.turns[0].prompt)
        finish: Finish
        if not completion.is_cut:
            finish = "stop"
        elif conversation.num_tokens >= sampling.max_new_tokens:
            finish = "tokens"
        elif num_after_prompt >= self._config.max_tokens_after_prompt:
            finish = "context"
        elif max_tokens and len(response.tokens) >= max_tokens:
            finish = "length"
        else:
            self._send(Close(key))
            return False
        response.is_ended, response.noise, turn.is_cut = True, b"", finish == "length"
        group.waiting.add(sample)
        self._send(SampledTurn(key, number, response.tokens.tolist(), finish))
        return True


def _key(group: Group, sample: int) -> Key:
    return group.task.batch, group.task.position, sample, group.attempt
