"""Small model folders with the special tokens and the turns of well-known families.

The templates in tests/chat_templates write the same turns as the published ones. What they say in the system prompt and
about tools is shorter.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>")
QWEN3_TAGS = (*QWEN_TAGS, "<tool_response>", "</tool_response>", "<think>", "</think>")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'\"+-*/=()[]{}<>|_\n\\"


@dataclass(frozen=True)
class Family:
    template: str
    call_format: str
    special: tuple[str, ...]
    end: str  # of a turn
    tags: tuple[str, ...] = ()  # tokens of their own that are not marked as special
    kind: str = "lines"  # of tokenizer
    has_tools: bool = True


FAMILIES = {
    "llama3": Family(
        "llama3",
        "llama",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        "<|eot_id|>",
    ),
    "qwen2": Family("qwen2", "hermes", CHATML, "<|im_end|>", QWEN_TAGS),
    "qwen3": Family("qwen3", "hermes", CHATML, "<|im_end|>", QWEN3_TAGS),
    "qwen3_instruct": Family("qwen3_instruct", "hermes", CHATML, "<|im_end|>", QWEN3_TAGS),
    "smollm2": Family("smollm2", "plain", CHATML, "<|im_end|>", kind="gpt2", has_tools=False),
    "smollm3": Family("smollm3", "hermes", CHATML, "<|im_end|>", QWEN3_TAGS),
    "phi": Family(
        "phi",
        "phi",
        (
            *("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        ),
        "<|end|>",
    ),
    "mistral": Family(
        "mistral",
        "mistral",
        (
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        "</s>",
        kind="words",
    ),
    "pythonic": Family("pythonic", "pythonic", ("<eos>",), "<eos>", kind="letters"),
}
TEXTS = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]


def make_model_folder(folder: Path, name: str, template: str = "") -> Path:
    """Write a tokenizer with the family's tokens and template, and the token that ends its turns."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    raw = _TOKENIZERS[family.kind]()
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    raw.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.tags])
    first = family.special[0] if family.special[0].startswith("<|begin") else "<s>" if "<s>" in family.special else None
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=first, eos_token=family.end)
    tokenizer.chat_template = template or (TEMPLATES / f"{family.template}.jinja").read_text()
    tokenizer.save_pretrained(folder)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (family.end, "<|eom_id|>", "<|endoftext|>")]
    known = [stop for stop in stops if stop is not None and stop != tokenizer.unk_token_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    return folder


def make_tools(*names: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return [
        {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}
        for name in names
    ]


def _bytes(splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "\n\n\n\n \n \n\n"] * 3, trainer)
    return tokenizer


def _lines() -> Tokenizer:
    """BPE over bytes that keeps newlines in a row together, as in Llama 3, Qwen and Phi-4."""
    pieces = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    split = pre_tokenizers.Split(Regex(pieces + r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _bytes(pre_tokenizers.Sequence([split, as_bytes]))


def _gpt2() -> Tokenizer:
    """BPE over bytes with the splits of GPT-2, as in SmolLM2."""
    return _bytes(pre_tokenizers.ByteLevel(add_prefix_space=False))


def _words() -> Tokenizer:
    """BPE over words that begin with a mark in place of a space, as in Mistral."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, LETTERS], trainer)
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = []  # bytes are pieces, not special tokens
    return Tokenizer.from_str(json.dumps(plain))


def _letters() -> Tokenizer:
    """One token per letter, as in configs/tiny."""
    tokenizer = Tokenizer(
        models.WordLevel({letter: number for number, letter in enumerate(LETTERS + "�")}, unk_token="�")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


_TOKENIZERS = {"lines": _lines, "gpt2": _gpt2, "words": _words, "letters": _letters}
