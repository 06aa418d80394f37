"""Make the default model: a tiny language model, its tokenizer and an arithmetic task.

    python tools/make_tiny_model.py --output configs/tiny --seed 0

With this model you can run every part of the trainer and see it learn, without a download or a GPU. The output is a
Hugging Face folder. Each character is one token; <eos> has id 0 and is also the pad token. The rows of train.jsonl and
eval.jsonl look like {"prompt": "37+45=", "answer": "82"}.

The warm start teaches three ways to answer, and reinforcement learning must find the best one. The warm start is
supervised, in two phases: first on right sums, then on the mixture `SKILLS`, in which most answers are wrong. Without
the first phase, the model learns sums badly. Samples at temperature 1 are right about a third of the time. Greedy
decoding is right only for sums below 100, 40% of the pairs. A policy that always gives the right sum scores near 1.

The shape is chosen for test coverage: tied embeddings (one parameter with two names), 2 key/value heads (grouped-query
attention that tensor parallelism can split in 2), head_dim 32 (the smallest that vLLM's CPU attention supports), and 96
tokens (a multiple of 32; the tokenizer can decode every id).
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.report.console import print_and_go_on

Pair = tuple[int, int]

NUM_EVAL = 200
MAX_LENGTH = 128
PROMPT_LENGTH = 6  # "37+45="
RESPONSE_LENGTH = 4  # three digits and <eos>
NUM_SUM_STEPS = 450
NUM_MIXTURE_STEPS = 750
BATCH_SIZE = 128
LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 50
IGNORED = -100  # label that cross_entropy skips
# Rates of three ways to answer: the right sum; the right sum if it is below 100, otherwise GUESS; always GUESS.
# A sample is right with probability 0.14 + 0.43 * P(a + b < 100) = 0.31. One test trains on answers that are shuffled
# between prompts, and checks that accuracy does not rise. GUESS is the most frequent sum, so there it gets the highest
# reward. If GUESS were never a sum, right sums would get more reward than GUESS, and accuracy would rise.
SKILLS = (0.14, 0.43, 0.43)
GUESS = "109"


def answers(a: int, b: int) -> tuple[str, str, str]:
    right = str(a + b)
    return right, right if a + b < 100 else GUESS, GUESS


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<eos>": 0} | {chr(code): code - 31 for code in range(32, 127)}
    # There is no unknown token, so a character outside the vocabulary raises an error instead of being lost.
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decode puts a space between characters
    tokens = {"eos_token": "<eos>", "pad_token": "<eos>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **tokens)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None}
    tokens |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    limits = {"max_position_embeddings": MAX_LENGTH, "initializer_range": 0.05, "dtype": "float32"}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **tokens, **limits))


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


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels [skill, pair, token]. Only the response and its <eos> have labels."""
    shape = (len(SKILLS), len(pairs), PROMPT_LENGTH + RESPONSE_LENGTH)
    ids, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, IGNORED)
    for row, (a, b) in enumerate(pairs):
        for skill, answer in enumerate(answers(a, b)):
            tokens = torch.tensor([*tokenizer.encode(f"{a}+{b}={answer}"), tokenizer.eos_token_id])
            ids[skill, row, : len(tokens)] = tokens
            labels[skill, row, PROMPT_LENGTH : len(tokens)] = tokens[PROMPT_LENGTH:]
    return ids, labels


def warm_start(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]) -> None:
    ids, labels = encode(tokenizer, pairs)
    mixture, only_sums = torch.tensor(SKILLS), torch.tensor([1.0, 0.0, 0.0])
    num_steps = NUM_SUM_STEPS + NUM_MIXTURE_STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    # The learning rate falls to zero in the second phase, so that the model learns the rates exactly.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / NUM_WARMUP_STEPS, (num_steps - step) / NUM_MIXTURE_STEPS)
    )
    for step in range(num_steps):
        rates = only_sums if step < NUM_SUM_STEPS else mixture
        skill = torch.multinomial(rates, BATCH_SIZE, replacement=True)
        pair = torch.randint(len(pairs), (BATCH_SIZE,))
        logits = model(input_ids=ids[skill, pair, :-1], use_cache=False).logits  # [B, T-1, V]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[skill, pair, 1:].flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0:
            print_and_go_on(f"step {step + 1}/{num_steps} loss {loss.item():.4f}")


@torch.no_grad()
def measure(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair], greedy: bool) -> float:
    prompts = tokenizer([f"{a}+{b}=" for a, b in pairs], return_tensors="pt")
    # Without top_k=0, generate() samples only from the 50 most likely tokens. The trainer samples from all tokens.
    choice = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    tokens = model.generate(**prompts, max_new_tokens=6, **choice)[:, PROMPT_LENGTH:]
    responses = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return sum(text.strip() == str(sum(pair)) for text, pair in zip(responses, pairs, strict=True)) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("configs/tiny"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the initial weights and the warm start")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads add in another order, which changes the weights
    torch.manual_seed(args.seed)
    train_pairs, eval_pairs = split_pairs(random.Random(args.seed))
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_start(model, tokenizer, train_pairs)
    model.eval()

    args.output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    for name, pairs in (("train", train_pairs), ("eval", eval_pairs)):
        rows = ({"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs)
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = pairs[:1000]
        sampled = measure(model, tokenizer, pairs * (4000 // len(pairs)), greedy=False)
        greedy = measure(model, tokenizer, pairs, greedy=True)
        print_and_go_on(f"{name}: accuracy {sampled:.3f} sampled, {greedy:.3f} greedy")


if __name__ == "__main__":
    main()
