"""Make the tiny language models in configs/, with their tokenizers and tasks.

    python tools/make_tiny_model.py --task sums --output configs/tiny --seed 0
    python tools/make_tiny_model.py --task tools --output configs/tiny_tools --seed 0

With these models you can run every part of the trainer and see it learn, without a download or a GPU. The output is a
Hugging Face folder. Each character is one token; <eos> has id 0 and is also the pad token.

`sums` makes the default model. The rows of train.jsonl and eval.jsonl look like {"prompt": "37+45=", "answer": "82"}.
`tools` makes a model that calls tools. It has a chat template and two tasks: calculator.jsonl has sums of three
numbers, for a calculator that adds two; guess.jsonl has the secrets of a guessing game.

The warm start teaches good and bad ways to answer, and reinforcement learning must find the best one. The warm start is
supervised, in two phases: first on good answers, then on a mixture in which most are wrong. Without the first phase,
the model learns the good answers badly. Samples at temperature 1 are right about a third of the time. A policy that
always answers in the good way scores near 1. Greedy decoding of the first model is right only for sums below 100, 40%
of the pairs.

The shape is chosen for test coverage: tied embeddings (one parameter with two names), 2 key/value heads (grouped-query
attention that tensor parallelism can split in 2), head_dim 32 (the smallest that vLLM's CPU attention supports), and 96
tokens (a multiple of 32; the tokenizer can decode every id).
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.report.printing import print_and_go_on

Pair = tuple[int, int]
Message = dict[str, Any]
IdsAndLabels = tuple[torch.Tensor, torch.Tensor]

LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 50
IGNORED = -100  # label that cross_entropy skips

# Sums
NUM_EVAL = 200
MAX_LENGTH = 128
PROMPT_LENGTH = 6  # "37+45="
RESPONSE_LENGTH = 4  # three digits and <eos>
NUM_SUM_STEPS = 450
NUM_MIXTURE_STEPS = 750
BATCH_SIZE = 128
# Rates of three ways to answer: the right sum; the right sum if it is below 100, otherwise GUESS; always GUESS.
# A sample is right with probability 0.14 + 0.43 * P(a + b < 100) = 0.31. One test trains on answers that are shuffled
# between prompts, and checks that accuracy does not rise. GUESS is the most frequent sum, so there it gets the highest
# reward. If GUESS were never a sum, right sums would get more reward than GUESS, and accuracy would rise.
SKILLS = (0.14, 0.43, 0.43)
GUESS = "109"

# Tools
MAX_TOOLS_LENGTH = 256
NUM_CALCULATOR_ROWS = 2000
NUM_GOOD_STEPS = 800
NUM_MIXED_STEPS = 700
NUM_CALCULATIONS, NUM_GAMES = 32, 16  # in a batch, which has one of the two
GOOD_CALCULATOR_TURNS = 0.75  # rate of good turns in the mixture; a solved conversation has three
GOOD_GUESSES = 0.75  # a game needs up to five
HIGHEST = 31
MAX_GUESSES = 5
# A turn is a mark for its role, the text, and <eos>. It is short, because each character is a token. Tools are listed
# as name(parameters), and calls look like [add(a=12, b=34)].
CHAT_TEMPLATE = """\
{%- set marks = {'system': '#', 'user': '?', 'assistant': '>', 'tool': '='} -%}
{%- for tool in tools or [] -%}
{{- '#' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' + eos_token -}}
{%- endfor -%}
{%- for message in messages -%}
{{- marks[message.role] + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- ('[' if loop.first else ', ') + call.function.name + '(' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- ('' if loop.first else ', ') + name + '=' + (value | tojson) -}}
{%- endfor -%}
{{- ')' + (']' if loop.last else '') -}}
{%- endfor -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- marks.assistant -}}{%- endif -%}
"""


def make_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    vocab = {"<eos>": 0} | {chr(code): code - 31 for code in range(32, 127)}
    # There is no unknown token, so a character outside the vocabulary raises an error instead of being lost.
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decode puts a space between characters
    tokens = {"eos_token": "<eos>", "pad_token": "<eos>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **tokens)


def make_tools_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(MAX_TOOLS_LENGTH)
    # A tool may return any character.
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[^ -~]"), " ")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None}
    tokens |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    limits = {"max_position_embeddings": tokenizer.model_max_length, "initializer_range": 0.05, "dtype": "float32"}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **tokens, **limits))


def warm_start(
    model: LlamaForCausalLM, draw: Callable[[bool], IdsAndLabels], num_good_steps: int, num_mixture_steps: int
) -> None:
    """Train on batches of token ids and labels. `draw(is_good)` returns one, with good answers only or the mixture."""
    num_steps = num_good_steps + num_mixture_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    # The learning rate falls to zero in the second phase, so that the model learns the rates exactly.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP_STEPS, (num_steps - step) / num_mixture_steps)
    )
    for step in range(num_steps):
        ids, labels = draw(step < num_good_steps)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T-1, V]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print_and_go_on(f"step {step + 1}/{num_steps} loss {loss.item():.4f}")


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


# Sums


def answers(a: int, b: int) -> tuple[str, str, str]:
    right = str(a + b)
    return right, right if a + b < 100 else GUESS, GUESS


def split_pairs(rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Return train and eval pairs of two-digit numbers. Neither order of an eval pair is in train."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    eval_pairs: list[Pair] = []
    held_out: set[Pair] = set()
    for a, b in pairs:
        if len(eval_pairs) < NUM_EVAL and (a, b) not in held_out:
            eval_pairs.append((a, b))
            held_out |= {(a, b), (b, a)}
    return [pair for pair in pairs if pair not in held_out], eval_pairs


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> IdsAndLabels:
    """Return token ids and labels [skill, pair, token]. Only the response and its <eos> have labels."""
    shape = (len(SKILLS), len(pairs), PROMPT_LENGTH + RESPONSE_LENGTH)
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, IGNORED)
    for row, (a, b) in enumerate(pairs):
        for skill, answer in enumerate(answers(a, b)):
            tokens = torch.tensor([*tokenizer.encode(f"{a}+{b}={answer}"), tokenizer.eos_token_id])
            ids[skill, row, : len(tokens)] = tokens
            labels[skill, row, PROMPT_LENGTH : len(tokens)] = tokens[PROMPT_LENGTH:]
    return ids, labels


@torch.no_grad()
def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], greedy: bool) -> float:
    prompts = tokenizer([f"{a}+{b}=" for a, b in pairs], return_tensors="pt")
    # Without top_k=0, generate() samples only from the 50 most likely tokens. The trainer samples from all tokens.
    choice = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    tokens = model.generate(**prompts, max_new_tokens=6, **choice)[:, PROMPT_LENGTH:]
    responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(text.strip() == str(sum(pair)) for text, pair in zip(responses, pairs, strict=True)) / len(pairs)


def make_sums(output: Path, seed: int) -> None:
    train_pairs, eval_pairs = split_pairs(random.Random(seed))
    tokenizer = make_tokenizer(MAX_LENGTH)
    model = make_model(tokenizer)
    ids, labels = encode(tokenizer, train_pairs)
    mixture, only_sums = torch.tensor(SKILLS), torch.tensor([1.0, 0.0, 0.0])

    def draw(is_good: bool) -> IdsAndLabels:
        skill = torch.multinomial(only_sums if is_good else mixture, BATCH_SIZE, replacement=True)
        pair = torch.randint(len(train_pairs), (BATCH_SIZE,))
        return ids[skill, pair], labels[skill, pair]

    warm_start(model, draw, NUM_SUM_STEPS, NUM_MIXTURE_STEPS)
    model.eval()
    save(model, tokenizer, output)
    for name, pairs in (("train", train_pairs), ("eval", eval_pairs)):
        write_rows(output / f"{name}.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs])
        pairs = pairs[:1000]
        sampled = measure(model, tokenizer, pairs * (4000 // len(pairs)), greedy=False)
        greedy = measure(model, tokenizer, pairs, greedy=True)
        print_and_go_on(f"{name}: accuracy {sampled:.3f} sampled, {greedy:.3f} greedy")


# Tools


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


ADD, ASK = tool("add", "a", "b"), tool("guess", "n")


def turn(text: str = "", call: str = "", **arguments: int) -> Message:
    calls = [{"type": "function", "function": {"name": call, "arguments": arguments}}] if call else []
    return {"role": "assistant", "content": text, "tool_calls": calls}


def observation(text: str) -> Message:
    return {"role": "tool", "content": text}


def calculator_row(rng: random.Random) -> dict[str, str]:
    numbers = [rng.randint(100, 999) for _ in range(3)]
    return {"prompt": "+".join(map(str, numbers)), "answer": str(sum(numbers))}


def calculate(rng: random.Random, rate: float) -> list[Message]:
    """Return a conversation with the calculator. Each turn is good at this rate. After a bad one, the end is wrong."""
    row = calculator_row(rng)
    a, b, c = map(int, row["prompt"].split("+"))
    invented = turn(str(rng.randint(300, 2997)))
    messages = [{"role": "user", "content": row["prompt"]}]
    if rng.random() >= rate:
        return [*messages, invented]
    messages += [turn(call="add", a=a, b=b), observation(str(a + b))]
    if rng.random() >= rate:
        if rng.random() < 0.5:
            return [*messages, turn(str(a + b))]
        return [*messages, turn(call="add", a=a, b=c), observation(str(a + c)), turn(str(a + c))]
    messages += [turn(call="add", a=a + b, b=c), observation(row["answer"])]
    return [*messages, turn(row["answer"]) if rng.random() < rate else invented]


def guess(rng: random.Random, rate: float) -> list[Message]:
    """Return a game. Each guess halves the interval at this rate. After one that does not, all guesses are random."""
    secret, low, high, is_good = rng.randint(1, HIGHEST), 1, HIGHEST, True
    messages = [{"role": "user", "content": f"guess 1 to {HIGHEST}"}]
    for _ in range(MAX_GUESSES):
        is_good = is_good and rng.random() < rate
        number = (low + high) // 2 if is_good else rng.randint(1, HIGHEST)
        messages.append(turn(call="guess", n=number))
        if number == secret:
            return messages  # the game is over
        if number < secret:
            low = max(low, number + 1)
        else:
            high = min(high, number - 1)
        messages.append(observation("higher" if number < secret else "lower"))
    return messages


def label_turns(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[str]) -> IdsAndLabels:
    """Return token ids and labels [conversation, token]. Only the model's turns and their <eos> have labels."""
    rows = [tokenizer.encode(text) for text in conversations]
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (text, tokens) in enumerate(zip(conversations, rows, strict=True)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        start = 0
        for part in text.split(tokenizer.eos_token)[:-1]:
            end = start + len(part) + 1
            if part.startswith(">"):
                labels[row, start + 1 : end] = ids[row, start + 1 : end]
            start = end
    return ids, labels


def make_tools(output: Path, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = make_tools_tokenizer()
    model = make_model(tokenizer)

    calculations, games = (
        (calculate, ADD, GOOD_CALCULATOR_TURNS, NUM_CALCULATIONS),
        (guess, ASK, GOOD_GUESSES, NUM_GAMES),
    )
    tasks = cycle((calculations, calculations, games))  # copying numbers is harder to learn than the few games

    def draw(is_good: bool) -> IdsAndLabels:
        play, schema, rate, count = next(tasks)
        conversations = [play(rng, 1.0 if is_good else rate) for _ in range(count)]
        return label_turns(tokenizer, tokenizer.apply_chat_template(conversations, tools=[schema], tokenize=False))

    warm_start(model, draw, NUM_GOOD_STEPS, NUM_MIXED_STEPS)
    save(model.eval(), tokenizer, output)
    rows = [calculator_row(rng) for _ in range(NUM_CALCULATOR_ROWS + NUM_EVAL)]
    write_rows(output / "calculator.jsonl", rows[NUM_EVAL:])
    write_rows(output / "calculator_eval.jsonl", rows[:NUM_EVAL])
    secrets = range(1, HIGHEST + 1)
    write_rows(output / "guess.jsonl", [{"prompt": f"guess 1 to {HIGHEST}", "secret": secret} for secret in secrets])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("sums", "tools"), default="sums", help="what the model learns")
    parser.add_argument("--output", type=Path, help="folder to write; configs/tiny or configs/tiny_tools by default")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data, the initial weights and the warm start")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads add in another order, which changes the weights
    torch.manual_seed(args.seed)
    if args.task == "sums":
        make_sums(args.output or Path("configs/tiny"), args.seed)
    else:
        make_tools(args.output or Path("configs/tiny_tools"), args.seed)


if __name__ == "__main__":
    main()
