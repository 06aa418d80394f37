"""Names of a model's tensors with LoRA adapters. The weights keep their Hugging Face names, and adapters have PEFT's.

in the module                                 everywhere else
...q_proj.base_layer.weight                   ...q_proj.weight            [out, in], frozen
...q_proj.lora_A.default.weight               ...q_proj.lora_A.weight     [rank, in]
...q_proj.lora_B.default.weight               ...q_proj.lora_B.weight     [out, rank]
"""

ADAPTER = "default"  # peft's name of the only adapter
KINDS = ("lora_A", "lora_B")


def plain_name(name: str) -> str:
    """Return the name of a tensor in files, from its name in a module with adapters."""
    for kind in KINDS:
        name = name.replace(f".{kind}.{ADAPTER}.", f".{kind}.")
    return name.replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return any(f".{kind}." in name for kind in KINDS)


def adapters_of(name: str) -> tuple[str, str]:
    """Return the names of the adapters A and B that a weight would have."""
    module, _, leaf = name.rpartition(".")
    return f"{module}.lora_A.{leaf}", f"{module}.lora_B.{leaf}"
