"""Have one conversation of a config with its tools or its environment, and show what the model reads and gets.

    python tools/try_environment.py --config configs/tiny_calculator.yaml
    python tools/try_environment.py --config configs/tiny_calculator.yaml --keyboard --row 3 environment.max_turns=2

The model of the config writes the turns, or you do at the keyboard. Everything else is as in a run: the conversation
server, the processes of the user's code, the limits and the reward functions. It needs neither torchrun nor vLLM.
The model samples with rollout.temperature and the seed of the row, but its tokens differ from those of an engine, which
draws other random numbers.

At the keyboard, an empty line ends a turn, and Ctrl-D ends the conversation. You may type special tokens, such as
<tool_call>. environment.max_seconds does not apply to people.

Exit status: 0 after a conversation with a score or after Ctrl-D, 1 if the environment or a reward function failed, 2 if
something is wrong with the settings.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.text import count_of
from rl.config.load import load_config
from rl.config.schema import Config, ConfigError, resolve_path
from rl.data.prompts import Prompt, Tokenizer
from rl.data.sources import check_files, make_conversation, read_data
from rl.environments.interface import Message
from rl.environments.protocol import Ask, Ended
from rl.model.hub import download, find_commit, find_in_cache
from rl.model.load import stop_token_ids
from rl.model.shape import check_folder, check_model, check_weights
from rl.model.tokenizer import load_tokenizer
from rl.rewards.failure import one_line
from rl.rewards.trial import TrialRow, score_responses, show_score
from rl.rollout.engine import Completion, Request
from rl.run.environment import LocalConversation, describe_conversations
from rl.run.find_data import choose_commits, download_datasets
from rl.watch.reports import ServiceUnavailable

FAILED, WRONG, INTERRUPTED = 1, 2, 130  # exit status
DAY_S = 86400.0
MAX_RESULT = 2000  # characters of an answer that are shown in one line; the model's own view has all


class Left(Exception):
    """The person has left the conversation."""


class Speaker(Protocol):
    """Whoever writes the turns of the model."""

    def speak(self, request: Request) -> Completion: ...


class Keyboard:
    """A person writes the turns."""

    def __init__(self, tokenizer: Tokenizer, stop: int):
        self._tokenizer, self._stop = tokenizer, stop
        if sys.stdin.isatty():
            import readline  # noqa: F401 (input() then can edit lines)

    def speak(self, request: Request) -> Completion:
        while True:
            text = self._read()
            try:
                tokens = [*self._tokenizer.encode(text, add_special_tokens=False), self._stop]
                break
            except Exception as error:  # the tokenizers package raises nothing narrower
                say(f"the tokenizer does not know this text ({error}); type the turn again")
        is_cut = len(tokens) > request.max_tokens
        tokens = tokens[: request.max_tokens]
        return Completion(request.id, tokens, [0.0] * len(tokens), is_cut)

    def _read(self) -> str:
        lines: list[str] = []
        while True:
            try:
                line = input("> ")
            except EOFError:
                print()
                if not lines:
                    raise Left from None
                line = ""
            if not line:
                return "\n".join(lines)
            lines.append(line)


class LocalModel:
    """The model of the config writes the turns, on a GPU if there is one."""

    def __init__(self, config: Config, folder: Path, stops: list[int]):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        check_weights(folder)
        disable_progress_bar()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = getattr(torch, config.model.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(self._device).eval()
        self._model.generation_config = (
            GenerationConfig()
        )  # that of the folder may have penalties, which no engine uses
        self._stops = stops

    def speak(self, request: Request) -> Completion:
        import torch

        sampling, prompt = request.sampling, torch.tensor([request.tokens], device=self._device)
        torch.manual_seed(request.seed or 0)
        ids = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=request.max_tokens,
            eos_token_id=self._stops,
            pad_token_id=self._stops[0],
        )
        tokens = ids[0, prompt.shape[1] :].tolist()
        return Completion(request.id, tokens, [0.0] * len(tokens), is_cut=tokens[-1] not in self._stops)


class TriedConversation:
    """One conversation, which is printed as it goes on."""

    def __init__(self, config: Config, prompt: Prompt, tokenizer: Tokenizer, local: LocalConversation):
        self._config, self._prompt, self._tokenizer, self._local = config, prompt, tokenizer, local
        self._group = local.begin(prompt)
        self._num_shown = len(make_conversation(prompt.row, config.data)) if config.data.chat_template else 0

    def run(self, speaker: Speaker) -> bool:
        """Have the conversation, and print its reward. Return False if the environment or a reward function failed."""
        turns, requests = self._local.turns, self._local.requests
        while isinstance(event := self._local.receive(), Ask):
            self._show_new(event.messages, event.failures)
            turns.ask(self._group, event)
            if requests:  # else the conversation has reached a limit
                request = requests.pop()
                self._show_prompt(event)
                say(f"turn {event.turn + 1}, of up to {count_of(request.max_tokens, 'token')}")
                completion = speaker.speak(request)
                cut = ", cut at its limit" if completion.is_cut else ""
                say(f"written: {count_of(len(completion.tokens), 'token')}{cut}")
                self._show_tokens(completion.tokens)
                turns.take(self._group, 0, completion)
        self._show_new(event.messages[self._num_shown :], event.failures)
        return self._finish(event)

    def _show_prompt(self, ask: Ask) -> None:
        """Print what the model reads: at first the whole prompt, then what was added to it."""
        turns = self._group.conversations[0].turns
        last = turns[ask.turn - 1] if ask.turn else None
        before = [] if last is None else [*last.prompt, *last.response.tokens]
        goes_on = bool(before) and ask.prompt[: len(before)] == before
        added = ask.prompt[len(before) :] if goes_on else ask.prompt
        if goes_on:
            say(f"the model reads on: {count_of(len(added), 'token')}, {len(ask.prompt)} in all")
        else:
            again = ", because the chat template changed earlier turns: a new stretch" if before else ""
            say(f"the model reads: {count_of(len(added), 'token')}{again}")
        self._show_tokens(added)

    def _show_tokens(self, tokens: list[int]) -> None:
        print(indent(self._tokenizer.decode(tokens, skip_special_tokens=False)), flush=True)

    def _show_new(self, messages: list[Message], failures: list[str]) -> None:
        self._num_shown += len(messages)
        for message in messages:
            for call in message.get("tool_calls", ()):
                given = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                say(f"call: {one_line(call['function']['name'])} {one_line(given, MAX_RESULT)}")
            if message["role"] == "tool":
                say(f"result of {one_line(message['name']) or 'no tool'}: {one_line(message['content'], MAX_RESULT)}")
            elif message["role"] != "assistant":
                say(f"{one_line(message['role'])}: {one_line(str(message['content']), MAX_RESULT)}")
        for failure in failures:
            say(f"failed: {failure}")

    def _finish(self, ended: Ended) -> bool:
        counts = ", ".join(f"{name} {count}" for name, count in ended.counts.items())
        say(f"end: {ended.ending} ({counts})")
        if ended.problem:
            say(f"no reward, because the environment failed: {ended.problem}. A run counts it as 0")
            return False
        prompt, tokens = self._prompt, self._group.conversations[0].last_tokens
        values = prompt.row | {"answer": prompt.answer, "messages": ended.messages, "environment_reward": ended.reward}
        row, text = (
            TrialRow(prompt.place, prompt.text, values),
            self._tokenizer.decode(tokens, skip_special_tokens=True),
        )
        result = score_responses(self._config.reward, row, {"response": text})["response"]
        if result["failure"] is not None:
            say(f"no reward, because {result['failure']}. A run counts it as 0")
            return False
        say(f"reward: it {show_score(result)}")
        return True


def say(text: str) -> None:
    print(f"-- {text}", flush=True)


def indent(text: str) -> str:
    """Return a text in indented lines. Control characters would change the terminal, so they are shown as escapes."""
    lines = ("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line) for line in text.split("\n"))
    return "\n".join(f"    {line}" for line in lines)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    head, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=details, formatter_class=raw)
    parser.add_argument("--config", metavar="F", help="YAML file; default: configs/default.yaml")
    parser.add_argument("--row", type=int, default=1, metavar="N", help="prompt of data.train, from 1; default: 1")
    speakers = parser.add_mutually_exclusive_group()
    what = "the model writes its turns; default, unless the input is a terminal"
    speakers.add_argument("--model", action="store_true", help=what)
    speakers.add_argument("--keyboard", action="store_true", help="you write the model's turns; default on a terminal")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the config file")
    return parser.parse_intermixed_args(arguments)


def find_model(config: Config) -> Path:
    """Return the model's folder. A model on the hub is downloaded, as in a run."""
    setting, path = "model.path", config.model.path
    folder = resolve_path(path)
    if not folder.exists():
        folder = find_in_cache(setting, path) or download(setting, path, find_commit(setting, path))
    check_folder(setting, folder)
    check_model(config, folder)
    return folder


def find_prompt(config: Config, tokenizer: Tokenizer, number: int) -> Prompt:
    datasets = download_datasets(config, choose_commits(config, {}))
    check_files(config, datasets)
    prompts = read_data(config, tokenizer, lambda text: None, datasets).stream.prompts
    if not 1 <= number <= len(prompts):
        raise ConfigError(
            f"--row: got {number}, but data.train has {count_of(len(prompts), 'prompt')}; give a number from 1 to "
            f"{len(prompts)}"
        )
    return prompts[number - 1]


def end_of_turn(tokenizer: Any, stops: list[int]) -> int:
    """Return the stop token that the chat template writes after a turn of the model."""
    if tokenizer.chat_template is None:
        return stops[0]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Probe7x"}]
    after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Probe7x")[2]
    places = {stop: after.find(tokenizer.decode([stop])) for stop in stops}
    return min((stop for stop in stops if places[stop] >= 0), key=places.__getitem__, default=stops[0])


def load_for_trial(args: argparse.Namespace) -> Config:
    config = load_config(args.config, args.overrides)
    if not config.environment.is_set:
        raise ConfigError(
            "the config has no environment, so there is no conversation to try; set environment.tools, "
            "environment.class or environment.rollout (docs/environments.md)"
        )
    config = replace(config, eval=replace(config.eval, interval=0))  # held-out prompts are not read
    if args.keyboard:
        config = replace(config, environment=replace(config.environment, max_seconds=DAY_S))
    return config


def try_environment(args: argparse.Namespace) -> bool:
    config = load_for_trial(args)
    folder = find_model(config)
    tokenizer: Any = load_tokenizer(folder)
    prompt = find_prompt(config, tokenizer, args.row)
    score_responses(config.reward, TrialRow(prompt.place, prompt.text, prompt.row), {})  # imports the functions
    stops = stop_token_ids(folder)
    with LocalConversation(config, folder) as local:
        say(f"row {args.row}: {prompt.place}" + (prompt.answer and f"; answer: {one_line(prompt.answer)}"))
        for line in describe_conversations(config, local.pool.loaded):
            say(line)
        if args.keyboard:
            say("write the model's turns: an empty line ends a turn, Ctrl-D ends the conversation")
        stop = end_of_turn(tokenizer, stops)
        speaker = Keyboard(tokenizer, stop) if args.keyboard else LocalModel(config, folder, stops)
        return TriedConversation(config, prompt, tokenizer, local).run(speaker)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    args.keyboard = args.keyboard or (sys.stdin.isatty() and not args.model)
    try:
        return 0 if try_environment(args) else FAILED
    except Left:
        say("you have left the conversation, so it has no reward")
        return 0
    except (ConfigError, ServiceUnavailable) as error:
        print(f"try_environment: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
