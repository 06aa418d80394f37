"""Names of tensors with adapters: those of the model's files, and PEFT's."""

from rl.model.adapter_names import adapters_of, is_adapter, plain_name

LAYER = "model.layers.3.self_attn.q_proj"


def test_names_in_files() -> None:
    assert plain_name(f"{LAYER}.base_layer.weight") == f"{LAYER}.weight"
    assert plain_name(f"{LAYER}.base_layer.bias") == f"{LAYER}.bias"
    assert plain_name(f"{LAYER}.lora_A.default.weight") == f"{LAYER}.lora_A.weight"
    assert plain_name(f"{LAYER}.lora_B.default.weight") == f"{LAYER}.lora_B.weight"
    assert plain_name("model.norm.weight") == "model.norm.weight"


def test_which_names_are_adapters() -> None:
    first, second = adapters_of(f"{LAYER}.weight")
    assert (first, second) == (f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight")
    assert is_adapter(first) and is_adapter(second) and not is_adapter(f"{LAYER}.weight")
