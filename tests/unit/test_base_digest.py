"""Digests of a base model's tensors: what they depend on, and what is found with them."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash

from rl.config.schema import ConfigError
from rl.model import base_digest
from rl.model.base_digest import BaseDigests, FrozenTensor, digest_tensors, find_tensors

RANDOM = np.random.default_rng(0)
TENSORS = {
    "embed.weight": RANDOM.standard_normal((37, 6)).astype(np.float32),
    "layers.0.up.weight": RANDOM.standard_normal((9, 6)).astype(np.float16),
    "layers.0.norm.weight": RANDOM.standard_normal(6).astype(np.float32),
    "count": np.array(5, np.int64),
    "lm_head.weight": RANDOM.standard_normal((37, 6)).astype(np.float32),  # in the file, but tied in the model
}
NAMES = [name for name in TENSORS if name != "lm_head.weight"]
EXPECTED = {name: xxhash.xxh3_64_hexdigest(TENSORS[name].tobytes()) for name in NAMES}


def write_single(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(TENSORS, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(TENSORS)}
    for file in set(files.values()):
        safetensors.numpy.save_file({name: TENSORS[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def digests() -> BaseDigests:
    return BaseDigests("base", {name: FrozenTensor("float32", digest) for name, digest in EXPECTED.items()})


@pytest.mark.parametrize("write", [write_single, write_sharded])
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 24])
def test_a_digest_is_of_the_bytes_in_the_file(
    write: object, chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file or several, and chunks of any size, give the same digests. Other tensors of the files do not count."""
    monkeypatch.setattr(base_digest, "CHUNK_BYTES", chunk_bytes)
    assert digest_tensors(write(tmp_path), NAMES) == EXPECTED


@pytest.mark.parametrize("num_parts", [1, 3, 9])
def test_shares_are_disjoint_and_complete(num_parts: int, tmp_path: Path) -> None:
    folder = write_sharded(tmp_path)
    shares = [digest_tensors(folder, NAMES, part, num_parts) for part in range(num_parts)]
    assert sum(map(len, shares)) == len(NAMES)
    assert {name: digest for share in shares for name, digest in share.items()} == EXPECTED
    if num_parts > 1:
        assert next(iter(shares[0])) == "embed.weight" and "embed.weight" not in shares[1], "the largest are spread"


def test_places_of_tensors(tmp_path: Path) -> None:
    folder = write_single(tmp_path)
    stored = find_tensors(folder, NAMES)
    data = (folder / "model.safetensors").read_bytes()
    for name, tensor in stored.items():
        assert data[tensor.begin : tensor.begin + tensor.num_bytes] == TENSORS[name].tobytes()
        assert tensor.shape == TENSORS[name].shape
    assert {name: tensor.dtype for name, tensor in stored.items()} == dict(zip(NAMES, ["F32", "F16", "F32", "I64"]))


def test_one_flipped_bit_names_its_tensor(tmp_path: Path) -> None:
    folder = write_single(tmp_path)
    before = digests()
    assert before.find_difference(digest_tensors(folder, NAMES)) == ""
    place = find_tensors(folder, NAMES)["layers.0.up.weight"]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[place.begin + place.num_bytes - 1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert before.find_difference(digest_tensors(folder, NAMES)) == "its layers.0.up.weight differs"
    after = BaseDigests("", {name: FrozenTensor("", text) for name, text in digest_tensors(folder, NAMES).items()})
    assert after.digest != before.digest


def test_other_tensors_are_a_difference() -> None:
    assert digests().find_difference({**EXPECTED, "layers.1.up.weight": "0"}) == "it also has layers.1.up.weight"
    fewer = {name: digest for name, digest in EXPECTED.items() if name != "count"}
    assert digests().find_difference(fewer) == "it has no count"


def test_the_digest_of_a_model_does_not_depend_on_path_dtype_or_order() -> None:
    turned = dict(reversed(EXPECTED.items()))
    other = BaseDigests("elsewhere", {name: FrozenTensor("bfloat16", digest) for name, digest in turned.items()})
    assert other.digest == digests().digest


def damage(folder: Path, how: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    if how == "cut":
        path.write_bytes(data[:-10])
    elif how == "no header":
        path.write_bytes(data[:5])
    elif how == "long header":
        path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    elif how == "not JSON":
        path.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    elif how == "negative":
        header = json.loads(data[8 : 8 + length])
        header["count"]["data_offsets"][0] -= 1 << 40
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    elif how == "gone":
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "no header", "long header", "not JSON", "negative", "gone"])
def test_a_damaged_folder_is_refused(how: str, tmp_path: Path) -> None:
    damage(write_single(tmp_path), how)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        digest_tensors(tmp_path, NAMES)


@pytest.mark.parametrize("how", ["cut", "no header", "long header", "not JSON", "negative", "gone"])
def test_a_damaged_file_of_several_is_refused(how: str, tmp_path: Path) -> None:
    """Here no other reader looks at the header first."""
    damage(write_single(tmp_path), how)
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be read.*copy the folder again"):
        digest_tensors(tmp_path, NAMES)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path} has no layers.7.up.weight; give the folder of the whole model"):
        digest_tensors(write_single(tmp_path), ["count", "layers.7.up.weight"])
