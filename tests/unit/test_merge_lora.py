"""Merge checkpoints with adapters (LoRA): with their base model, or exported by themselves for PEFT and vLLM."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import yaml
from safetensors import safe_open

from rl.config.schema import ROOT, LoraConfig
from rl.export import write
from rl.export.convert import convert
from rl.export.upload import is_model_weights
from rl.model.adapter_names import is_adapter, plain_name
from rl.model.base_digest import BaseDigests, FrozenTensor, digest_tensors
from tests.checkpoint_files import Array, Made, read_model, write_checkpoint
from tests.merging import failure, files_of, merge, result
from tests.unit.test_merge_interrupted import KILLED
from tools.merge_checkpoint import main

RANDOM = np.random.default_rng(0)
RANK, ALPHA = 4, 8
LORA = LoraConfig(rank=RANK, alpha=ALPHA, targets=["q_proj", "down_proj"])
SHAPES = {"model.layers.0.self_attn.q_proj": (10, 6), "model.layers.0.mlp.down_proj": (3, 7)}


def fine(*shape: int) -> Array:
    """Multiples of 1/1024, which bfloat16 and float16 do not hold exactly, but float32 does, and its sums."""
    return (RANDOM.integers(-4096, 4096, shape) / 1024).astype(np.float32)


def coarse(*shape: int) -> Array:
    """Multiples of 1/8, whose products are exact in float32 in any order of the sums."""
    return (RANDOM.integers(-16, 16, shape) / 8).astype(np.float32)


BASE: dict[str, Array] = {
    "model.embed_tokens.weight": fine(11, 6),
    **{f"{module}.weight": fine(*shape) for module, shape in SHAPES.items()},
    "model.layers.0.mlp.gate.bias": fine(3),  # a buffer, which a bfloat16 run has in float32
    "model.norm.weight": fine(6),
    "count": np.arange(3),
}
BUFFERS = ("model.layers.0.mlp.gate.bias", "count")
ADAPTERS: dict[str, Array] = {}
for module, (num_rows, num_columns) in SHAPES.items():
    ADAPTERS[f"{module}.lora_A.weight"] = coarse(RANK, num_columns)
    ADAPTERS[f"{module}.lora_B.weight"] = coarse(num_rows, RANK)
HF_FILES = {"config.json": b'{"model_type": "llama", "dtype": "float32"}', "generation_config.json": b"{}"}
HF_FILES |= {"tokenizer.json": b"{}"}
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def rounded(array: Array, dtype: str) -> Array:
    """A float32 array in another dtype; bfloat16 as its bits."""
    numpy = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    return convert(array.reshape(-1).view(np.uint8), "F32", SAFETENSORS[dtype]).view(numpy).reshape(array.shape)


def widened(array: Array, dtype: str) -> Array:
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array.astype(np.float32)


def write_base(folder: Path, dtype: str = "float32", num_files: int = 1) -> Path:
    """The base model's folder. Its files may have the names of the checkpoint's shards."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(HF_FILES["config.json"])
    files: dict[str, str] = {}
    for index, name in enumerate(BASE):
        single = f"model-{index % num_files:05d}-of-{num_files:05d}.safetensors"
        files[name] = single if num_files > 1 else "model.safetensors"
    for file in set(files.values()):
        header: dict[str, Any] = {}
        data = b""
        for name in (name for name in files if files[name] == file):
            is_float = BASE[name].dtype == np.float32
            part = (rounded(BASE[name], dtype) if is_float else BASE[name]).tobytes()
            kind = SAFETENSORS[dtype] if is_float else "I64"
            offsets = [len(data), len(data) + len(part)]
            header[name] = {"dtype": kind, "shape": BASE[name].shape, "data_offsets": offsets}
            data += part
        text = json.dumps(header).encode()
        (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    if num_files > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def bases_of(folder: Path, dtype: str, names: Mapping[str, object] = BASE) -> dict[str, Any]:
    """What a run with this base model writes into its manifests."""
    frozen = {
        name: FrozenTensor("int64" if name == "count" else "float32" if name in BUFFERS else dtype, digest)
        for name, digest in digest_tensors(folder, names).items()
    }
    return {"model": asdict(BaseDigests(str(folder), {name: frozen[name] for name in names}))}


def write_step(
    folder: Path, base: Path, dtype: str = "float32", num_shards: int = 3, adapters: Mapping[str, Array] = ADAPTERS
) -> Made:
    config = {"model": {"path": str(base), "dtype": dtype, "lora": asdict(LORA)}}
    bases = bases_of(base, dtype)
    return write_checkpoint([folder], adapters, num_shards, config=config, hf_files=HF_FILES, bases=bases)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def made(tmp_path: Path, base: Path) -> Made:
    return write_step(tmp_path / "x", base)


def expected(stored: str, trained: str, merged: str) -> dict[str, Array]:
    """The base model as the run held it, plus the adapters, rounded once."""
    values: dict[str, Array] = {}
    for name, array in BASE.items():
        if name == "count":
            values[name] = array
            continue
        held = trained if name not in BUFFERS else "float32"
        value = widened(rounded(widened(rounded(array, stored), stored), held), held)
        module = name.removesuffix(".weight")
        if module in SHAPES:
            b, a = ADAPTERS[f"{module}.lora_B.weight"], ADAPTERS[f"{module}.lora_A.weight"]
            value = (value + ALPHA / RANK * (b.astype(np.float64) @ a.astype(np.float64))).astype(np.float32)
        values[name] = rounded(value, merged or held)
    return values


@pytest.mark.parametrize("chunk_bytes", [8, 60, 4 << 20])
@pytest.mark.parametrize(
    ("stored", "trained", "merged"),
    [
        ("float32", "float32", ""),
        ("float32", "bfloat16", ""),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", ""),
        ("bfloat16", "float32", ""),
        ("bfloat16", "bfloat16", "float16"),
        ("float16", "bfloat16", "float32"),
    ],
)
def test_adapters_are_added_to_what_the_run_held(
    stored: str, trained: str, merged: str, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model's files may have another dtype than the run, which rounded them. Values are exact sums, so all
    bits are known."""
    monkeypatch.setattr(write, "CHUNK_BYTES", chunk_bytes)
    base = write_base(tmp_path / "base", stored, num_files=1 if chunk_bytes == 60 else 3)
    made = write_step(tmp_path / "x", base, trained)
    merge(made.folders[0], *(["--dtype", merged] if merged else []))
    values = read_model(result(made))
    wanted = expected(stored, trained, merged)
    assert values.keys() == wanted.keys()
    for name, array in wanted.items():
        assert values[name].dtype == array.dtype and values[name].tobytes() == array.tobytes(), name
    for module in SHAPES:
        base_only = rounded(widened(rounded(BASE[f"{module}.weight"], stored), stored), merged or trained)
        assert values[f"{module}.weight"].tobytes() != base_only.tobytes()
    config = json.loads((result(made) / "config.json").read_bytes())
    assert config["dtype"] == (merged or "float32"), "the file of the run, unless --dtype changes it"


def test_a_merge_needs_neither_torch_nor_peft(made: Made) -> None:
    script = "import sys\nfrom tools.merge_checkpoint import main\nmain(sys.argv[1:])\n"
    script += "assert not {'torch', 'transformers', 'huggingface_hub', 'peft'} & set(sys.modules)"
    for arguments in ([], ["--adapter"]):
        command = [sys.executable, "-c", script, str(made.folders[0]), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    assert {path.name for path in (made.folders[0] / "merged").iterdir()} == {"step_40", "step_40-adapter"}


def test_the_base_model_may_have_moved(made: Made, base: Path, tmp_path: Path) -> None:
    base.rename(tmp_path / "moved")
    text = failure(made.folders[0])
    assert f"{base} is neither a folder here nor in the hub's cache" in text and "--base FOLDER" in text
    assert f"{tmp_path / 'nowhere'} is no folder" in failure(made.folders[0], "--base", tmp_path / "nowhere")
    merge(made.folders[0], "--base", tmp_path / "moved")
    values = read_model(result(made))
    assert {name: array.tobytes() for name, array in expected("float32", "float32", "").items()} == {
        name: array.tobytes() for name, array in values.items()
    }
    shutil.rmtree(tmp_path / "moved")
    merge(made.folders[0])  # a finished result needs no base model


def change_bit(path: Path, name: str) -> None:
    data = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    data[end + json.loads(data[8:end])[name]["data_offsets"][1] - 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", [(), ("--no-verify",)])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_another_base_model_is_refused(name: str, verify: tuple[str, ...], made: Made, base: Path) -> None:
    """By the name of the tensor that differs, whether it has adapters or not, and even if digests are not checked."""
    change_bit(base / "model.safetensors", name)
    text = failure(made.folders[0], *verify)
    assert f"{base} is not the base model of step 40: its {name} differs" in text and "--base FOLDER" in text
    assert "corrupt" not in text and not result(made).exists()


def test_a_base_model_of_another_architecture_is_refused(made: Made, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = {name: array for name, array in BASE.items() if name != "model.norm.weight"}
    safetensors.numpy.save_file(tensors, other / "model.safetensors")
    text = failure(made.folders[0], "--base", other)
    assert f"{other} is not the base model of step 40: {other} has no model.norm.weight" in text
    tensors = BASE | {"model.layers.0.mlp.down_proj.weight": np.zeros((7, 3), np.float32)}
    safetensors.numpy.save_file(tensors, other / "model.safetensors")
    text = failure(made.folders[0], "--base", other)
    assert "its model.layers.0.mlp.down_proj.weight has the shape [7, 3], which its adapters do not fit" in text
    safetensors.numpy.save_file(BASE | {"model.norm.weight": np.zeros(6, np.int64)}, other / "model.safetensors")
    assert "has the dtype I64, but the run had it as F32" in failure(made.folders[0], "--base", other)
    (other / "model.safetensors").write_bytes(b"\0" * 50)
    assert f"{other} is not the base model of step 40: the weights in" in failure(made.folders[0], "--base", other)
    assert not result(made).parent.exists()


def test_a_corrupt_shard_of_adapters_is_read_from_the_other_copy(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model": {"path": str(base), "dtype": "float32", "lora": asdict(LORA)}}
    folders = [tmp_path / "a/x", tmp_path / "b/x"]
    bases = bases_of(base, "float32")
    made = write_checkpoint(folders, ADAPTERS, 2, copies=2, config=config, hf_files=HF_FILES, bases=bases)
    path = made.step_folder(0) / made.shard(0).name
    change_bit(path, "model.layers.0.self_attn.q_proj.lora_B.weight")
    assert "is corrupt: the bytes of model.layers.0.self_attn.q_proj.lora_B.weight differ" in failure(folders[0])
    merge(folders[0], "--nodes", folders[1])
    assert "is corrupt" in capsys.readouterr().err
    wanted = expected("float32", "float32", "")
    assert all(wanted[name].tobytes() == array.tobytes() for name, array in read_model(result(made)).items())


@pytest.mark.timeout(200)
def test_a_killed_merge_continues(made: Made) -> None:
    command = [sys.executable, "-c", KILLED]
    arguments = [str(made.folders[0]), "--max-shard-size", "200"]
    merge(*arguments, "--output", made.folders[0].with_name("whole"))
    kept = 0
    for count in (8, 20, 1000):
        finished = set(result(made).parent.glob("*/model/*.safetensors"))
        times = {path.name: path.stat().st_mtime_ns for path in finished}
        done = subprocess.run([*command, str(count), *arguments], cwd=ROOT, timeout=120, check=False)
        assert done.returncode == (0 if count == 1000 else -signal.SIGKILL)
        place = result(made) if count == 1000 else next(result(made).parent.glob("*/model"))
        assert all((place / name).stat().st_mtime_ns == time_ns for name, time_ns in times.items()), (
            "finished files stay"
        )
        kept += len(times)
    assert kept > 0
    assert files_of(result(made)) == files_of(made.folders[0].with_name("whole"))
    assert os.listdir(result(made).parent) == ["step_40"]


def test_exported_adapters(made: Made, base: Path) -> None:
    shutil.rmtree(base)
    merge(made.folders[0], "--adapter")
    folder = made.folders[0] / "merged/step_40-adapter"
    names = {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md", "merge.json"}
    assert {path.name for path in folder.iterdir()} == names
    stored = read_model(folder)
    assert stored.keys() == {f"base_model.model.{name}" for name in ADAPTERS}
    assert all(stored[f"base_model.model.{name}"].tobytes() == array.tobytes() for name, array in ADAPTERS.items())
    config = json.loads((folder / "adapter_config.json").read_bytes())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, ["down_proj", "q_proj"])
    assert config["base_model_name_or_path"] == "base", "a path of this machine is not published"
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    assert "Adapters (LoRA) of `base`, trained with" in card and str(base) not in card
    assert "| adapters | rank 4, alpha 8, of q_proj, down_proj |" in card
    assert "was made with dtype=as saved" in failure(made.folders[0], "--adapter", "--dtype", "bfloat16")
    merge(made.folders[0], "--adapter", "--dtype", "bfloat16", "--output", made.folders[0] / "narrow")
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    narrow = read_model(made.folders[0] / "narrow")[f"base_model.model.{name}"]
    assert narrow.tobytes() == rounded(ADAPTERS[name], "bfloat16").tobytes()


def test_the_base_on_the_hub_is_named(tmp_path: Path, base: Path) -> None:
    bases = bases_of(base, "float32")
    bases["model"]["path"] = "org/name"
    config = {"model": {"path": "org/name", "dtype": "float32", "lora": asdict(LORA)}}
    write_checkpoint([tmp_path / "x"], ADAPTERS, 2, config=config, hf_files=HF_FILES, bases=bases)
    merge(tmp_path / "x", "--adapter")
    folder = tmp_path / "x/merged/step_40-adapter"
    assert json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"] == "org/name"
    assert yaml.safe_load((folder / "README.md").read_text().split("---")[1])["base_model"] == "org/name"


def test_the_base_on_the_hub_has_the_commit_of_the_run(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache also has a newer commit, which is another model."""
    bases = bases_of(base, "float32")
    bases["model"]["path"] = "org/name"
    config = {"model": {"path": "org/name", "dtype": "float32", "lora": asdict(LORA)}}
    write_checkpoint([tmp_path / "x"], ADAPTERS, 2, config=config, hf_files=HF_FILES, bases=bases)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repo, old, new = tmp_path / "cache/models--org--name", "0" * 40, "1" * 40
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(new)
    for commit in (old, new):
        shutil.copytree(base, repo / "snapshots" / commit)
    change_bit(repo / "snapshots" / new / "model.safetensors", "model.norm.weight")
    assert "its model.norm.weight differs" in failure(tmp_path / "x")
    (tmp_path / "x/hub_commits.json").write_text(json.dumps({"org/name": old}))
    merge(tmp_path / "x")
    assert read_model(tmp_path / "x/merged/step_40").keys() == BASE.keys()
    (tmp_path / "x/hub_commits.json").write_text(json.dumps({"org/name": "2" * 40}))
    text = failure(tmp_path / "x", "--output", tmp_path / "other")
    assert f"org/name at commit {'2' * 40} is neither a folder here nor in the hub's cache" in text


def test_verified_adapters_without_a_base_model_fail_before_they_are_exported(made: Made, base: Path) -> None:
    base.rename(base.parent / "moved")
    text = failure(made.folders[0], "--adapter", "--verify-logits")
    assert "--base FOLDER. Without --verify-logits, adapters are exported without that model" in text
    assert not (made.folders[0] / "merged").exists()


def test_a_merged_model_and_adapters_are_not_taken_for_each_other(made: Made) -> None:
    merge(made.folders[0], "--output", made.folders[0] / "one")
    text = failure(made.folders[0], "--adapter", "--output", made.folders[0] / "one")
    assert "one exists already and was made with result=merged model" in text
    assert is_model_weights("adapter_config.json") and is_model_weights("adapter_model.safetensors"), (
        "an upload of a merged model deletes the adapters that the repository held"
    )
    assert not is_model_weights("mine/adapter_config.json")


def test_options_for_adapters_are_refused_without_adapters(
    tmp_path: Path, base: Path, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plain"
    write_checkpoint([folder], {"w": np.zeros((2, 2), np.float32)}, 1)
    assert "has no adapters, since the run trained all weights; leave out --adapter" in failure(folder, "--adapter")
    assert "leave out --base" in failure(folder, "--base", base)
    with pytest.raises(SystemExit):
        main([str(made.folders[0]), "--adapter", "--base", str(base)])
    assert "leave out --base, or add --verify-logits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.0.mlp.down_proj.lora_B.weight": None}, "is not one of a pair of adapters of rank 4"),
        ({"model.layers.0.mlp.down_proj.lora_A.weight": np.zeros((5, 7), np.float32)}, "[5, 7], which is not one of"),
        ({"model.norm.weight": np.zeros(6, np.float32)}, "holds model.norm.weight [6], which is not one of a pair"),
        (
            {f"model.layers.9.up.lora_{of}.weight": np.zeros((4, 4), np.float32) for of in "AB"},
            "holds model.layers.9.up.lora_A.weight, but its base model has no weight for it",
        ),
    ],
)
def test_a_damaged_set_of_adapters_is_refused(
    change: Mapping[str, Array | None], said: str, tmp_path: Path, base: Path
) -> None:
    changed = {name: array for name, array in {**ADAPTERS, **change}.items() if array is not None}
    made = write_step(tmp_path / "x", base, adapters=changed)
    assert said in failure(made.folders[0])


def test_a_manifest_that_names_no_base_is_refused(made: Made) -> None:
    path = made.step_folder() / "manifest.json"
    state = {name: value for name, value in made.manifest.state.items() if name != "bases"}
    path.write_bytes(replace(made.manifest, state=state).to_json())
    assert "does not name the base model of its adapters, so it is damaged" in failure(made.folders[0])


def test_a_dry_run_says_what_is_merged_with_what(made: Made, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merge(made.folders[0], "--dry-run")
    printed = capsys.readouterr().out
    assert "3 shards of adapters" in printed
    assert f"would add the adapters to the model in {base}" in printed
    assert not result(made).parent.exists()


class Policy(NamedTuple):
    """A trained policy: its base model, its adapters, and its logits in float32 and in bfloat16."""

    base: Path
    adapters: dict[str, Array]
    tokens: Any
    logits: dict[str, Any]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """As peft computes it: adapters beside the layers. They are large, so that the base model alone is far off."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=37,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokens = torch.arange(1, 20)
    adapters: dict[str, Array] = {}
    logits = {}
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LORA.targets, init_lora_weights=False)
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        peft.inject_adapter_in_model(settings, model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    if dtype == "float32":
                        adapters[plain_name(name)] = parameter.uniform_(-0.6, 0.6).numpy()
                    parameter.copy_(torch.from_numpy(adapters[plain_name(name)]))
            logits[dtype] = model(tokens[None]).logits[0].float()
    return Policy(folder, adapters, tokens, logits)


def save_policy(policy: Policy, folder: Path, dtype: str) -> Made:
    """Save a step as a run does, with the probe for --verify-logits."""
    import safetensors.torch

    from rl.checkpoint.write import read_hf_files

    with safe_open(policy.base / "model.safetensors", "numpy") as file:
        names = list(file.keys())
    frozen = {name: FrozenTensor(dtype, digest) for name, digest in digest_tensors(policy.base, names).items()}
    bases = {"model": asdict(BaseDigests(str(policy.base), frozen))}
    config = {"model": {"path": str(policy.base), "dtype": dtype, "lora": asdict(LORA)}}
    hf_files = read_hf_files(policy.base, dtype)
    made = write_checkpoint([folder], policy.adapters, 3, config=config, hf_files=hf_files, bases=bases)
    probe = {"tokens": policy.tokens, "logits": policy.logits[dtype]}
    safetensors.torch.save_file(probe, made.step_folder() / "probe.safetensors")
    return made


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_both_results_give_the_logits_of_the_policy(
    dtype: str, limit: float, policy: Policy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged folder in transformers, and the adapters in peft on the base model."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    made = save_policy(policy, tmp_path / "x", dtype)
    merge(made.folders[0], "--verify-logits")
    merge(made.folders[0], "--adapter", "--verify-logits")
    told = [float(part.split()[0]) for part in capsys.readouterr().out.split("relative difference ")[1:]]
    assert len(told) == 2 and max(told) < limit

    def difference(model: Any) -> float:
        with torch.no_grad():
            logits = model(policy.tokens[None]).logits[0].float()
        return ((logits - policy.logits[dtype]).norm() / policy.logits[dtype].norm()).item()

    def load(folder: Path, **options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, **options)

    adapted = result(made).with_name("step_40-adapter")
    merged, base = load(result(made)), load(policy.base, dtype=getattr(torch, dtype))
    assert merged.dtype == getattr(torch, dtype)
    assert difference(merged) < limit
    assert difference(base) > 0.3, "without adapters, the logits would be equal as well"
    assert difference(peft.PeftModel.from_pretrained(base, adapted)) < limit


def test_verified_adapters_need_the_same_base_model(policy: Policy, tmp_path: Path) -> None:
    made = save_policy(policy, tmp_path / "x", "float32")
    other = shutil.copytree(policy.base, tmp_path / "other")
    change_bit(other / "model.safetensors", "model.norm.weight")
    text = failure(made.folders[0], "--adapter", "--verify-logits", "--base", other)
    assert f"{other} is not the base model of step 40: its model.norm.weight differs" in text


VLLM = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from rl.rollout.vllm.build import turn_off_packing
model, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
turn_off_packing()
options = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
options |= {"enforce_eager": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}
llm = LLM(model, dtype="float32", skip_tokenizer_init=True, **options)
wanted = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
request = LoRARequest("adapter", 1, adapter) if adapter else None
(done,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], wanted, lora_request=request)
logprobs = [entry[token].logprob for entry, token in zip(done.prompt_logprobs[1:], tokens[1:])]
print("logprobs", json.dumps(logprobs), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_serves_both_results(policy: Policy, tmp_path: Path) -> None:
    """The merged folder, and the base model with enable_lora and the exported adapters."""
    import torch

    made = save_policy(policy, tmp_path / "x", "float32")
    merge(made.folders[0])
    merge(made.folders[0], "--adapter")
    adapted = str(result(made).with_name("step_40-adapter"))
    tokens = policy.tokens.tolist()
    logprobs = torch.log_softmax(policy.logits["float32"], -1)[:-1].gather(1, policy.tokens[1:, None])[:, 0]
    differences = {}
    for model, adapter in ((result(made), ""), (policy.base, adapted), (policy.base, "")):
        command = [sys.executable, "-c", VLLM, str(model), adapter, json.dumps(tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
        line = next((line for line in done.stdout.splitlines() if line.startswith("logprobs ")), "")
        assert line, done.stdout[-2000:] + done.stderr[-4000:]
        found = torch.tensor(json.loads(line.removeprefix("logprobs ")))
        differences[model, adapter] = (found - logprobs).abs().max().item()
    merged, with_adapters, without = differences.values()
    assert merged < 1e-4 and with_adapters < 1e-4
    assert without > 0.1
