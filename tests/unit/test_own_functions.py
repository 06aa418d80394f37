"""A loss and an advantage in a file of the user: what they get, what they may return, and every mistake."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.algo.choose import LOSS_INPUTS, Loss, OwnAdvantage, check_functions
from rl.algo.losses import LOSSES, PolicyLoss
from rl.config import schema
from rl.config.load import load_config
from rl.config.schema import AlgoConfig, ConfigError
from tests.doc_commands import tutorial
from tests.own_functions import write_functions
from tests.unit.ragged import close, ragged

FILE = """
IMPORTS = []
IMPORTS.append(1)

def half(new_logprobs, advantages, scale=0.5):
    return -scale * new_logprobs * advantages

def needy(new_logprobs, delta):
    return new_logprobs * delta

def without_policy(advantages):
    return advantages

def of_one(logprobs, advantages):
    return logprobs * advantages

def first(new_logprobs, /, advantages):
    return new_logprobs

def mean(new_logprobs):
    return new_logprobs.mean()

def detached(new_logprobs):
    return new_logprobs.detach()

def number(new_logprobs):
    return 1.0

def any_options(new_logprobs, **options):
    return new_logprobs * options["delta"]

def centred(rewards, group_ids, scale=1.0):
    return (rewards - rewards.mean()) * scale

def both(rewards, token_rewards):
    return rewards

def neither(group_ids):
    return group_ids

def critic(token_rewards, values):
    return token_rewards - values

def of_groups(rewards, group_ids):
    return rewards.unique()

def divides(rewards):
    return rewards / 0

def stumbles(new_logprobs):
    return new_logprobs.reshape(7, 11)

def to_go(token_rewards, segment_ids, gamma, lengths):
    return token_rewards * gamma + lengths[segment_ids]

to_go.standardize = True
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_functions(tmp_path_factory.mktemp("own") / "own.py", FILE)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    data = ragged(seed)
    new, old = data.tokens(1, 0.3).requires_grad_(), data.tokens(2, 0.3)
    found = {"new_logprobs": new, "old_logprobs": old, "rollout_logprobs": old - 0.01}
    return found | {"advantages": data.tokens(3), "segment_ids": data.segment_ids, "lengths": data.lengths}


def test_the_names_of_the_schema_are_those_of_the_functions() -> None:
    assert tuple(LOSSES) == schema.LOSS_NAMES


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_a_copy_of_a_built_in_loss_gives_the_same_bits(name: str, file: Path) -> None:
    settings = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 2.0 if name == "clip" else 0.0}
    results = []
    for spec in (name, f"{file}:{LOSSES[name].__name__}"):
        data = tensors()
        loss = Loss(AlgoConfig(loss=spec, **settings))
        got = loss(**data)
        got.loss.sum().backward()
        results.append((got.loss, got.clipped, data["new_logprobs"].grad))
        assert loss.is_own == (spec != name)
    assert all(ours.equal(theirs) for ours, theirs in zip(*results, strict=True))
    assert results[0][1].any() and not results[0][1].all()


def test_a_loss_gets_what_it_names_and_its_options(file: Path) -> None:
    data = tensors()
    algo = AlgoConfig(loss=f"{file}:half", options={"half": {"scale": 3.0}})
    got = Loss(algo)(**data)
    close(got.loss, -3 * data["new_logprobs"] * data["advantages"])
    assert not got.clipped.any()
    close(Loss(AlgoConfig(loss=f"{file}:half"))(**data).loss, -0.5 * data["new_logprobs"] * data["advantages"])
    options = {"any_options": {"delta": 2.0}}
    close(Loss(AlgoConfig(loss=f"{file}:any_options", options=options))(**data).loss, 2 * data["new_logprobs"])


def test_a_file_is_imported_once(file: Path) -> None:
    call = Loss(AlgoConfig(loss=f"{file}:half"))._function.call
    OwnAdvantage(AlgoConfig(advantage=f"{file}:centred"))
    assert call.__globals__["IMPORTS"] == [1]
    assert Loss(AlgoConfig(loss=f"{file}:half"))._function.call is call


def test_a_loss_is_not_called_without_tokens(file: Path) -> None:
    """A rank may have fewer micro-batches than the others. `mean` would return NaN."""
    empty = {name: torch.zeros(0) for name in LOSS_INPUTS}
    empty["new_logprobs"].requires_grad_()
    got = Loss(AlgoConfig(loss=f"{file}:mean"))(**empty)
    assert got.loss.shape == got.clipped.shape == (0,) and got.loss.requires_grad


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mean",
            "returned a tensor of shape []; it must return one loss per token, [99], or a PolicyLoss of two such "
            "tensors. Do not take the mean or the sum",
        ),
        ("number", "returned a float; it must return one loss per token, [99]"),
        ("stumbles", "failed: RuntimeError: shape '[7, 11]' is invalid for input of size 99 (line "),
        ("detached", "returned a loss without a gradient; it must depend on new_logprobs, not detached"),
    ],
)
def test_a_wrong_result_of_a_loss(name: str, message: str, file: Path) -> None:
    data = tensors()
    assert len(data["new_logprobs"]) == 99
    with pytest.raises(ConfigError) as caught:
        Loss(AlgoConfig(loss=f"{file}:{name}"))(**data)
    assert str(caught.value).startswith(f"algo.loss: {file}:{name} {message}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "nowhere.py:x"}, "algo.loss: got 'nowhere.py:x', but no file at nowhere.py; give the path of a file"),
        ({"loss": "{file}:absent"}, "has no function 'absent'; it has clipped_ratio, _pessimistic, sequence_ratio"),
        ({"loss": "{file}:IMPORTS"}, "has no function 'IMPORTS'"),
        (
            {"loss": "{broken}:x"},
            "broken.py cannot be imported: ModuleNotFoundError: No module named 'nowhere' (line 1)",
        ),
        ({"loss": "{text}:x"}, "text.txt:x'; the file's name must end in .py"),
        (
            {"loss": "{file}:of_one"},
            "algo.loss: of_one takes (logprobs, advantages), but missing a required argument: 'logprobs'; its "
            "parameters must be among new_logprobs, old_logprobs, rollout_logprobs, advantages, segment_ids, lengths, "
            "clip_low, clip_high, dual_clip, or have a default, or be set in algo.options.of_one",
        ),
        ({"loss": "{file}:first"}, "'new_logprobs' parameter is positional only"),
        ({"loss": "{file}:needy"}, "needy takes (new_logprobs, delta), but missing a required argument: 'delta'"),
        (
            {"loss": "{file}:half", "options": {"half": {"size": 1}}},
            "half takes (new_logprobs, advantages, scale=0.5), but got an unexpected keyword argument 'size'",
        ),
        (
            {"loss": "{file}:clipped_ratio", "options": {"clipped_ratio": {"clip_low": 1}}},
            "algo.options.clipped_ratio: got clip_low, which the learner passes itself; set algo.clip_low",
        ),
        (
            {"loss": "{file}:half", "options": {"half": {"advantages": 1}}},
            "algo.options.half: got advantages, which the learner passes itself; remove it",
        ),
        ({"loss": "{file}:half", "options": {"half": 1}}, "algo.options.half: got 1; it must be a mapping"),
        (
            {"options": {"clip": {}}},
            "got options of 'clip'; only functions of your own in algo.loss and algo.advantage have options, and there "
            "are none",
        ),
        (
            {"loss": "{file}:half", "options": {"other": {}}},
            "got options of 'other'; only functions of your own in algo.loss and algo.advantage have options, and the "
            "functions of your own are half",
        ),
        (
            {"loss": "{file}:half", "advantage": "{file}:half", "options": {"half": {}}},
            "algo.loss and algo.advantage are both named 'half', so their options cannot be told apart; rename one",
        ),
        ({"loss": "{file}:without_policy"}, "takes no new_logprobs, so its loss would have no gradient"),
        ({"loss": "{file}:half", "dual_clip": 3.0}, "takes no dual_clip; set it to 0, or add the parameter"),
        ({"advantage": "{file}:both"}, "takes both of rewards and token_rewards; take rewards [S] to return one"),
        ({"advantage": "{file}:neither"}, "takes neither of rewards and token_rewards; take rewards [S] to return"),
        ({"advantage": "{file}:critic"}, "takes values, but only algo.advantage=gae trains a critic"),
    ],
    ids=str,
)
def test_mistakes_that_need_no_batch(settings: dict[str, Any], message: str, file: Path) -> None:
    paths = {"file": file, "broken": file.with_name("broken.py"), "text": file.with_name("text.txt")}
    paths["broken"].write_text("import nowhere\n")
    paths["text"].write_text("")
    filled = {name: value.format(**paths) if isinstance(value, str) else value for name, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        check_functions(AlgoConfig(**filled))
    assert message in str(caught.value)


def advantage(spec: str, **settings: Any) -> tuple[OwnAdvantage, dict[str, Tensor]]:
    data = ragged()
    found = {"rewards": data.rewards, "token_rewards": data.tokens(4), "group_ids": data.group_ids}
    found |= {"segment_ids": data.segment_ids, "lengths": data.lengths}
    return OwnAdvantage(AlgoConfig(advantage=spec, **settings)), found


def test_an_advantage_per_response_or_per_token(file: Path) -> None:
    of_responses, data = advantage(f"{file}:centred", options={"centred": {"scale": 2.0}})
    close(of_responses(**data), (2 * (data["rewards"] - data["rewards"].mean()))[data["segment_ids"]])
    assert not (of_responses.is_per_token or of_responses.is_standardized)
    of_tokens, data = advantage(f"{file}:to_go", gamma=0.5)
    close(of_tokens(**data), data["token_rewards"] / 2 + data["lengths"][data["segment_ids"]])
    assert of_tokens.is_per_token and of_tokens.is_standardized
    none = {name: tensor[:0] for name, tensor in data.items()}
    assert of_responses(**none).shape == (0,)


def test_wrong_results_of_an_advantage(file: Path) -> None:
    wrong, data = advantage(f"{file}:of_groups")
    data["rewards"] = torch.ones(len(data["rewards"]))
    with pytest.raises(ConfigError, match=r"returned a tensor of shape \[1\]; it must return one advantage per respon"):
        wrong(**data)
    infinite, data = advantage(f"{file}:divides")
    with pytest.raises(FloatingPointError, match="returned 20 of 20 advantages that are NaN or infinite; every adv"):
        infinite(**data)


def test_rules_of_built_in_names_do_not_hold_for_own_functions(file: Path) -> None:
    """One rollout per prompt is allowed, because only the function knows whether it compares rollouts."""
    config = load_config(None, [f"algo.advantage={file}:centred", "rollout.num_samples_per_prompt=1"])
    assert not (config.algo.compares_rollouts or config.algo.has_critic)
    with pytest.raises(ConfigError, match=r"algo.loss: got 'clib'; it must be clip, gspo, cispo or file.py:function"):
        load_config(None, ["algo.loss=clib"])
    with pytest.raises(ConfigError, match=r"algo.advantage: got 'ppo'; it must be grpo, dr_grpo, rloo, reinforce_pp, "):
        load_config(None, ["algo.advantage=ppo"])


def test_the_example_of_the_docs(tmp_path: Path) -> None:
    file = tmp_path / "algo.py"
    file.write_text(tutorial()["my/algo.py"])
    algo = AlgoConfig(
        loss=f"{file}:proximal", advantage=f"{file}:above_median", options={"proximal": {"strength": 2.0}}
    )
    check_functions(algo)
    new = torch.tensor([-1.0, -3.0], requires_grad=True)
    inputs = {"new_logprobs": new, "old_logprobs": torch.tensor([-1.0, -2.0]), "advantages": torch.tensor([3.0, -1.0])}
    # 3 x 1 + 0, and 1 x -3 + 2 x 1
    close(Loss(algo)(**inputs | {"rollout_logprobs": new, "segment_ids": new, "lengths": new}).loss, [3.0, -1.0])
    rewards, groups = torch.tensor([1.0, 5.0, 2.0, 7.0]), torch.tensor([0, 0, 0, 1])
    segments, lengths = torch.tensor([0, 0, 1, 3]), torch.tensor([2, 1, 0, 1])
    tokens = {"token_rewards": torch.zeros(4), "segment_ids": segments, "lengths": lengths}
    # The medians are 2 and 7.
    close(OwnAdvantage(algo)(rewards=rewards, group_ids=groups, **tokens), [-1.0, -1.0, 3.0, 0.0])


def test_own_policy_loss_with_a_mask(file: Path) -> None:
    """A PolicyLoss says which tokens were clipped, for policy/clip_fraction."""
    got = Loss(AlgoConfig(loss=f"{file}:clipped_ratio"))(**tensors())
    assert isinstance(got, PolicyLoss) and got.clipped.dtype == torch.bool
