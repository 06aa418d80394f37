"""Defaults, files, overrides, and the message of each mistake in them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.config.differences import flatten
from rl.config.load import load_config
from rl.config.schema import DEFAULT_CONFIG, ROOT, Config, ConfigError, DataConfig, keys_of
from rl.placement.roles import plan

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write


def typed(name: str, number: int) -> int | float:
    """Return the number in the type of the key: 0 or 0.0."""
    return dict(keys_of(Config))[name].type(number)


def failure(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def test_an_empty_file_gives_the_defaults(write: Write) -> None:
    config = load_config(write(""))
    assert config == Config()
    assert config.placement == {"actor,rollout": "all"}
    assert config.actor.lr == 1e-6
    assert config.actor.beta2 == 0.999
    assert config.rollout.num_samples_per_prompt == 8
    assert config.algo.clip_low == config.algo.clip_high == 0.2
    assert config.train.num_steps == 100


def test_without_a_path_the_embedded_default_is_read() -> None:
    assert load_config() == load_config(DEFAULT_CONFIG) == load_config("configs/default.yaml")
    assert load_config().eval.interval == 10
    assert load_config().model.path == "configs/tiny"


def test_override_beats_file_beats_default(write: Write) -> None:
    config = load_config(
        write("actor: {lr: 0.5, beta1: 0.8}\ntrain: {num_steps: 7}"), ["actor.lr=2.5e-1", "run.seed=3"]
    )
    assert (config.actor.lr, config.actor.beta1, config.actor.beta2) == (0.25, 0.8, 0.999)
    assert (config.train.num_steps, config.run.seed) == (7, 3)


def test_the_last_of_two_overrides_wins(write: Write) -> None:
    assert load_config(write(""), ["run.seed=3", "run.seed=4"]).run.seed == 4


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("actor.lr=1e-5", "actor", "lr", 1e-5),
        ("data.chat_template=true", "data", "chat_template", True),
        ("run.name=5", "run", "name", "5"),
        ("run.name=a=b", "run", "name", "a=b"),
        ("data.eval=''", "data", "eval", ""),
        ("rollout.max_new_tokens=32", "rollout", "max_new_tokens", 32),
    ],
)
def test_override_values_are_yaml(write: Write, override: str, section: str, name: str, value: object) -> None:
    got = getattr(getattr(load_config(write(""), [override]), section), name)
    assert got == value
    assert type(got) is type(value)


ROLES_AND_SIZE = "placement: {rollout: 0-19, actor: 20-31, num_nodes: 4}"


@pytest.mark.parametrize(
    ("overrides", "placement"),
    [
        ([], {"rollout": "0-19", "actor": "20-31", "num_nodes": 4}),
        (["placement.num_nodes=1"], {"rollout": "0-19", "actor": "20-31", "num_nodes": 1}),
        (["placement.actor,rollout=all"], {"actor,rollout": "all", "num_nodes": 4}),
        (
            ["placement.actor,rollout=0-3,8", "placement.num_nodes=2", "placement.inference=4 ranks"],
            {"actor,rollout": "0-3,8", "inference": "4 ranks", "num_nodes": 2},
        ),
        (["placement.rollout=75%", "placement.actor=[6, 7]"], {"rollout": "75%", "actor": [6, 7], "num_nodes": 4}),
        (["placement.actor=3"], {"actor": 3, "num_nodes": 4}),
        (
            ["placement.rank_weights=2,1,1,1", "placement.num_gpus_per_node=[4, 4, 4, 2]"],
            {
                "rollout": "0-19",
                "actor": "20-31",
                "num_nodes": 4,
                "rank_weights": "2,1,1,1",
                "num_gpus_per_node": [4, 4, 4, 2],
            },
        ),
    ],
)
def test_a_role_on_the_command_line_replaces_the_files_role_map(
    write: Write, overrides: list[str], placement: dict
) -> None:
    assert load_config(write(ROLES_AND_SIZE), overrides).placement == placement


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor.lr_shedule=linear", ["unknown config key actor.lr_shedule", "did you mean actor.lr_schedule?"]),
        ("aktor.lr=1", ["unknown config key aktor", "did you mean actor?"]),
        (
            "train.zzz=1",
            ["unknown config key train.zzz", "train.num_steps, train.num_epochs, train.num_prompts_per_step"],
        ),
        ("actor..lr=1", ["unknown config key actor.;", "known keys: actor.lr, "]),
        ("zzz=1", ["unknown config key zzz", "known keys: placement, run, model"]),
        ("actor.lr=fast", ["actor.lr: got 'fast'; it must be a number"]),
        ("train.num_steps=1.5", ["train.num_steps: got 1.5; it must be a whole number"]),
        ("data.chat_template=maybe", ["data.chat_template: got 'maybe'; it must be true or false"]),
        ("reward.options=3", ["reward.options: got 3; it must be a mapping"]),
        ("reward.credentials=x", ["reward.credentials: got 'x'; it must be a list"]),
        ("model.path=null", ["model.path: got ''; it must be a directory or a hub name"]),
        ("model.path=", ["model.path: got ''; it must be a directory or a hub name"]),
        ("data.prompt_key=''", ["data.prompt_key: got ''; it must be the name of a column"]),
        ("run.dir=", ["run.dir: got ''; it must be a path"]),
        ("actor.lr=", ["actor.lr: got no value; it must be a number: give one, or leave the key out"]),
        ("train.num_steps=", ["train.num_steps: got no value; it must be a whole number"]),
        ("data.chat_template=", ["data.chat_template: got no value; it must be true or false"]),
        ("model.dtype=", ["model.dtype: got no value; it must be one of float32, bfloat16"]),
        ("reward.options=", ["reward.options: got no value; it must be a mapping"]),
        ("run.name=${nowhere}", ["run.name", "'nowhere' not found"]),
        ("actor=5", ["actor: got 5", "section"]),
        ("actor.lr.peak=5", ["got 'actor.lr.peak=5'", "'lr' is a value, not a section"]),
        ("placement.num_gpus_per_node=8,0", ["num_gpus_per_node: got '8,0'", "whole number", "such as 8,4"]),
        ("placement.num_gpus_per_node=[8, 4.5]", ["num_gpus_per_node: got [8, 4.5]", "such as 8,4"]),
        ("placement.num_nodes=two", ["placement.num_nodes: got 'two'", "whole number"]),
        ("placement=all", ["placement: got 'all'", "{'actor,rollout': all}"]),
        ("actor.lr", ["got the argument 'actor.lr'", "key=value", "actor.lr=1e-5"]),
        ("=1", ["got the argument '=1'", "key=value"]),
        ("run.name={a", ["got 'run.name={a'", "not valid YAML", "quote it"]),
    ],
)
def test_bad_overrides(write: Write, override: str, parts: list[str]) -> None:
    message = failure(write("actor: {lr: 0.5}"), override)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("name", ["data.answer_key", "critic.path", "run.name", "checkpoint.best_metric", "data.eval"])
@pytest.mark.parametrize("value", ["", "''", '""', "null"])
def test_an_empty_value_of_a_text_key_is_the_empty_text(write: Write, name: str, value: str) -> None:
    """A shell turns key='' into key=, and YAML reads that as null."""
    section, _, leaf = name.partition(".")
    before = write(f"{section}: {{{leaf}: given}}")
    assert getattr(getattr(load_config(before), section), leaf) == "given"
    assert getattr(getattr(load_config(before, [f"{name}={value}"]), section), leaf) == ""
    assert getattr(getattr(load_config(write(f"{section}:\n  {leaf}: {value}")), section), leaf) == ""


def test_an_empty_value_of_a_role_is_no_rank(write: Write) -> None:
    config = load_config(write(""), ["placement.rollout=", "placement.actor=rest"])
    with pytest.raises(ConfigError, match=r"placement.rollout: got ''; write ranks as 0-3,8"):
        plan(config.placement, 1, 2)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("actor: {lr_shedule: linear}", ["unknown config key actor.lr_shedule", "actor.lr_schedule?"]),
        ("actor: {lr: fast}", ["actor.lr", "'fast'"]),
        ("actor: {lr: }", ["actor.lr: got no value; it must be a number"]),
        ("actor: [", ["config.yaml is not valid YAML"]),
        ("actor:\n\tlr: 1", ["config.yaml, line 2: got a tab; YAML requires spaces: replace the tab with spaces"]),
        ("actor:\n  # é\n  lr: 1\n  \teps: 1\n", ["config.yaml, line 4: got a tab"]),
        ("actor: {lr: 1}\nactor: {lr: 2}", ["config.yaml is not valid YAML", "duplicate"]),
        ("- actor", ["config.yaml holds a list", "mapping of sections"]),
        ("actor: 5", ["actor: got 5", "section"]),
        ("placement: 5", ["placement: got 5", "{'actor,rollout': all}"]),
    ],
)
def test_bad_files(write: Write, text: str, parts: list[str]) -> None:
    message = failure(write(text))
    assert [part for part in parts if part not in message] == [], message


def test_sizes_alone_leave_the_roles_as_they_are() -> None:
    placement = load_config(None, ["placement.num_gpus_per_node=1"]).placement
    assert placement == {"actor,rollout": "all", "num_gpus_per_node": 1}


def test_a_placement_that_is_not_a_mapping_is_an_error_even_with_an_override(write: Write) -> None:
    assert "placement" in failure(write("placement: all"), "placement.actor=0")


def test_missing_file(tmp_path: Path) -> None:
    message = failure(tmp_path / "nowhere.yaml")
    assert f"no config file at {tmp_path}/nowhere.yaml" in message
    assert "--config" in message
    assert "configs/default.yaml" in message


POSITIVE = [
    "train.num_steps",
    "train.num_prompts_per_step",
    "rollout.num_samples_per_prompt",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.tensor_parallel_size",
    "actor.max_grad_norm",
    "inference.max_tokens_per_micro_batch",
    "actor.num_replicas",
    "sync.join_timeout_s",
    "world.transfer_timeout_s",
    "algo.num_mini_batches",
    "algo.num_epochs",
    "data.max_prompt_tokens",
]
NOT_NEGATIVE = [
    "rollout.max_num_seqs",
    "actor.max_tokens_per_micro_batch",
    "train.num_epochs",
    "actor.lr",
    "actor.warmup_steps",
    "algo.kl_coef",
    "eval.interval",
    "eval.num_prompts",
    "rollout.max_mismatch_kl",
    "rollout.max_tokens_per_round",
    "debug.mean_response_tokens",
    "sync.bucket_mb",
    "sync.probe_interval",
    "sync.probe_limit",
]
CHOICES = {
    "model.dtype": ["float32", "bfloat16"],
    "rollout.engine": ["vllm", "fake"],
    "sync.verify": ["full", "transport", "off"],
    "algo.kl_estimator": ["k1", "k2", "k3", "full"],
    "algo.kl_place": ["loss", "reward"],
    "algo.loss_norm": ["token", "sequence", "constant"],
    "algo.correction": ["none", "token", "sequence", "token_mask", "sequence_mask", "sequence_mask_two_sided"],
    "algo.old_logprobs": ["auto", "always", "rollout"],
    "actor.lr_schedule": ["constant", "linear", "cosine"],
    "actor.offload": ["auto", "none", "rollout", "moments", "always"],
    "actor.recompute": ["auto", "none", "head", "selective", "full"],
    "data.long_rows": ["skip", "fatal"],
    "data.bad_rows": ["fatal", "skip"],
}
BAD_TRAIN = {"''": "''", "[]": "[]", "{}": "{}", "5": "5", "[a, 5]": "['a', 5]", "[a, a]": "['a', 'a']"}
TRAIN_RULE = "it must be a path, a list of different paths, or a mapping path -> weight"
WEIGHT_RULE = "a mixing weight must be greater than 0"
BAD_EVAL = {"5": "5", "[a, [b]]": "['a', ['b']]", "[a, a]": "['a', 'a']", "{a: 1}": "{'a': 1}"}
EVAL_RULE = "it must be a path, a list of different paths, or a mapping name -> path"
NAME_RULE = "a set's name has only letters, digits, '_', '-' and '.': give a mapping name -> path"
BETWEEN_0_AND_1 = "it must be greater than 0 and less than 1"
FROM_0_BELOW_1 = "it must be at least 0 and less than 1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(([f"{name}=0"], f"{name}: got {typed(name, 0)}; it must be greater than 0") for name in POSITIVE),
        *(([f"{name}=-1"], f"{name}: got {typed(name, -1)}; it must be at least 0") for name in NOT_NEGATIVE),
        *(
            ([f"{name}=x"], f"{name}: got 'x'; it must be one of {', '.join(choices)}")
            for name, choices in CHOICES.items()
        ),
        (["rollout.temperature=nan"], "rollout.temperature: got nan; it must be greater than 0"),
        (["algo.clip_low=0"], f"algo.clip_low: got 0.0; {BETWEEN_0_AND_1}"),
        (["algo.clip_low=1"], f"algo.clip_low: got 1.0; {BETWEEN_0_AND_1}"),
        (["algo.clip_high=0"], "algo.clip_high: got 0.0; it must be greater than 0"),
        (["rollout.gpu_memory_fraction=-0.1"], f"rollout.gpu_memory_fraction: got -0.1; {FROM_0_BELOW_1}"),
        (["rollout.gpu_memory_fraction=1"], f"rollout.gpu_memory_fraction: got 1.0; {FROM_0_BELOW_1}"),
        (
            ["algo.num_mini_batches=5", "train.num_prompts_per_step=4"],
            "algo.num_mini_batches: got 5; a mini-batch holds whole groups, so it must not exceed "
            "train.num_prompts_per_step = 4",
        ),
        (
            ["rollout.num_samples_per_prompt=1"],
            "rollout.num_samples_per_prompt: got 1; algo.advantage=grpo compares at least 2 rollouts of a prompt",
        ),
        *(
            (
                [setting, *others],
                f"rollout.top_p={top_p}, rollout.top_k={top_k}: engines would sample from a truncated and rescaled "
                "distribution, but the learner computes probabilities over the whole vocabulary, so their ratio would "
                "be wrong. Set algo.correction=token, which weights each token by that ratio, or top_p=1 "
                "top_k=0",
            )
            for setting, others, top_p, top_k in (
                ("rollout.top_p=0.9", [], "0.9", 0),
                ("rollout.top_k=20", ["algo.advantage=rloo"], "1", 20),
            )
        ),
        (["rollout.top_p=0"], "rollout.top_p: got 0.0; it must be greater than 0 and at most 1"),
        (["algo.gamma=1.1"], "algo.gamma: got 1.1; it must be greater than 0 and at most 1"),
        (["algo.lam=0"], "algo.lam: got 0.0; it must be greater than 0 and at most 1"),
        (["algo.dual_clip=1"], "algo.dual_clip: got 1.0; it must be 0 or greater than 1"),
        (
            ["algo.dual_clip=3", "algo.loss=gspo"],
            "algo.dual_clip: got 3.0, but algo.loss=gspo has no such bound; set it to 0",
        ),
        (["algo.correction_limit=1"], "algo.correction_limit: got 1.0; it must be greater than 1"),
        (["algo.correction_limit=.inf"], "algo.correction_limit: got inf; it must be greater than 1"),
        (["algo.certainty_coef=.nan"], "algo.certainty_coef: got nan; it must be a finite number"),
        (
            ["algo.kl_target=0.1"],
            "algo.kl_target is set, but algo.kl_coef=0 leaves nothing to adapt; give a coefficient to start with",
        ),
        (
            ["algo.kl_estimator=full", "algo.kl_coef=0.1", "algo.kl_place=reward"],
            "algo.kl_estimator=full needs the distributions of policy and reference at once, which only the update "
            "has; set algo.kl_place=loss, or choose k1, k2 or k3",
        ),
        (
            ["algo.overlong_tokens=65"],
            "algo.overlong_tokens: got 65; it must not exceed rollout.max_new_tokens = 64",
        ),
        (
            ["algo.dynamic_sampling=true", "algo.advantage=gae", "rollout.num_samples_per_prompt=1"],
            "rollout.num_samples_per_prompt: got 1; algo.dynamic_sampling keeps only groups with different rewards, so "
            "set it to 2 or more",
        ),
        (
            ["algo.dynamic_sampling=true", "train.num_epochs=2"],
            "train.num_epochs cannot be turned into steps with algo.dynamic_sampling, because the number of "
            "prompts per step is not known in advance; set train.num_steps",
        ),
        (
            ["algo.old_logprobs=rollout", "algo.correction=token"],
            "algo.correction: got token, but with algo.old_logprobs=rollout the ratio of the loss is already that of "
            "the policy to the engine; set algo.correction=none, or algo.old_logprobs=always",
        ),
        (
            ["algo.old_logprobs=always", "rollout.max_tokens_per_round=63"],
            "algo.old_logprobs: got always, but with rollout.max_tokens_per_round=63 older weights have sampled some "
            "of the tokens, which algo.correction=none does not correct; set algo.correction=token, or "
            "algo.old_logprobs=rollout",
        ),
        (
            ["actor.overlap=true", "rollout.max_tokens_per_round=63"],
            "actor.overlap: got true, but with rollout.max_tokens_per_round=63 an update trains on groups of several "
            "rounds; set rollout.max_tokens_per_round=0, or actor.overlap=false",
        ),
        (
            ["actor.overlap=true", "rollout.ahead=1"],
            "actor.overlap: got true, but with rollout.ahead=1 all groups of an update are there before it begins; set "
            "actor.overlap=false. rollout.ahead=0 with actor.overlap=true stays on-policy",
        ),
        (
            ["actor.overlap=true", "algo.dynamic_sampling=true"],
            "actor.overlap: got true, but with algo.dynamic_sampling=true it is not known which groups an update "
            "trains on before all of them are sampled; set algo.dynamic_sampling=false, or actor.overlap=false",
        ),
        *(
            (
                ["rollout.keep_kv=true", f"rollout.max_tokens_per_round={limit}"],
                f"rollout.keep_kv: got true, but with rollout.max_tokens_per_round={limit} no response continues in "
                "another round; set it above 0 and below rollout.max_new_tokens = 64, or rollout.keep_kv=false",
            )
            for limit in (0, 64)
        ),
        (
            ["eval.interval=5"],
            "eval.interval is set, but data.eval is empty: give held-out prompts or set eval.interval=0",
        ),
        *(([f"data.train={got}"], f"data.train: got {shown}; {TRAIN_RULE}") for got, shown in BAD_TRAIN.items()),
        *(
            ([f"data.train={{a.jsonl: {got}}}"], f"data.train: got {shown} for a.jsonl; {WEIGHT_RULE}")
            for got, shown in {"0": "0", "-1": "-1", "x": "'x'", "true": "True", ".inf": "inf"}.items()
        ),
        *(([f"data.eval={got}"], f"data.eval: got {shown}; {EVAL_RULE}") for got, shown in BAD_EVAL.items()),
        (["data.eval={a b: c.jsonl}"], f"data.eval: got the name 'a b'; {NAME_RULE}"),
        (["data.eval=held out.jsonl"], f"data.eval: got the name 'held out'; {NAME_RULE}"),
        (
            ["data.eval=[a/test.jsonl, b/test.jsonl]"],
            "data.eval: got ['a/test.jsonl', 'b/test.jsonl']; two of these have the same name, so give a mapping "
            "name -> path",
        ),
        (
            ["data.system_prompt=hello"],
            "data.system_prompt is set, but only a chat template uses it; set data.chat_template=true",
        ),
        (
            ["data.template='say {}'"],
            "data.template: got 'say {}', which has no {column}, so all prompts would be the same; add one, such as "
            "{prompt} for the column data.prompt_key",
        ),
        (
            [r"data.template='{prompt} \boxed{answer}'"],
            r"data.template: got '{prompt} \\boxed{answer}'; the placeholder {answer} would put the reference answer "
            "into the prompt. Remove it. If the braces are literal text, write another word in them",
        ),
        (
            ["data.template='{prompt} {a.b}'", "data.answer_key=a"],
            "data.template: got '{prompt} {a.b}'; the placeholder {a.b} would put the reference answer into the "
            "prompt. Remove it. If the braces are literal text, write another word in them",
        ),
        *(
            (
                [f"run.name={name}"],
                f"run.name: got '{name}'; it must be a printable directory name without '/', other than '.' and '..' "
                "(run.dir is the path)",
            )
            for name in ("a/b", "..")
        ),
    ],
)
def test_validation(write: Write, overrides: list[str], message: str) -> None:
    assert failure(write(""), *overrides) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.num_mini_batches=4", "train.num_prompts_per_step=4"],
        ["rollout.num_samples_per_prompt=2"],
        ["rollout.num_samples_per_prompt=1", "algo.advantage=gae"],
        ["rollout.num_samples_per_prompt=1", "algo.advantage=reinforce_pp"],
        ["rollout.top_p=0.9", "rollout.top_k=20", "algo.correction=sequence_mask"],
        ["eval.interval=5", "data.eval=held_out.jsonl"],
        ["data.eval=[a/test.jsonl, b/dev.jsonl]"],
        ["data.eval={math-500: a/test.jsonl, gsm8k_v1.0: b/test.jsonl}"],
        [r"data.template='{prompt} \boxed{}'", "data.chat_template=true", "data.system_prompt=x"],
        ["data.template='{answer}'", "data.answer_key=''"],
        ["data.template='{answers.first}'"],
        ["sync.bucket_mb=0", "sync.probe_interval=0", "sync.probe_limit=0"],
        ["actor.lr=0", "algo.kl_coef=0", "rollout.max_mismatch_kl=0"],
        ["algo.clip_low=0.99", "algo.clip_high=3", "rollout.gpu_memory_fraction=0.99"],
        ["rollout.max_tokens_per_round=63", "rollout.keep_kv=true"],
        ["rollout.max_tokens_per_round=64", "actor.overlap=true"],
        ["rollout.max_tokens_per_round=64", "algo.old_logprobs=always"],
        ["rollout.max_tokens_per_round=65", "algo.old_logprobs=always"],
    ],
)
def test_values_at_the_edge_are_accepted(write: Write, overrides: list[str]) -> None:
    load_config(write(""), overrides)


@pytest.mark.parametrize(
    ("overrides", "resolved"),
    [
        ([], "auto"),
        (["algo.correction=token"], "auto"),
        (["rollout.max_tokens_per_round=64"], "auto"),
        (["rollout.max_tokens_per_round=99", "algo.correction=token"], "auto"),
        (["rollout.max_tokens_per_round=63"], "rollout"),
        (["rollout.max_tokens_per_round=63", "algo.num_epochs=2"], "rollout"),
        (["rollout.max_tokens_per_round=63", "algo.correction=token"], "always"),
        (["rollout.max_tokens_per_round=63", "algo.correction=sequence_mask", "algo.old_logprobs=auto"], "always"),
        (["rollout.max_tokens_per_round=63", "algo.correction=token", "algo.old_logprobs=always"], "always"),
        (["algo.old_logprobs=rollout"], "rollout"),
        (["algo.old_logprobs=always"], "always"),
    ],
)
def test_old_logprobs_of_rounds_are_resolved(write: Write, overrides: list[str], resolved: str) -> None:
    """If responses may take several rounds, the ratio of the loss or importance weights correct for older weights."""
    config = load_config(write(""), overrides)
    assert config.algo.old_logprobs == resolved


@pytest.mark.parametrize("text", ["off", "'off'", "false"])
def test_off_needs_no_quotes_though_yaml_reads_it_as_false(write: Write, text: str) -> None:
    assert load_config(write(f"sync: {{verify: {text}}}")).sync.verify == "off"
    assert load_config(write("sync: {verify: full}"), [f"sync.verify={text}"]).sync.verify == "off"


def test_files_to_train_on_and_held_out_sets(write: Write) -> None:
    def data(text: str) -> DataConfig:
        return load_config(write(f"data: {{{text}}}")).data

    assert data("train: a/x.jsonl").train_weights == {"a/x.jsonl": None}
    assert data("train: [a/x.jsonl, b.csv]").train_weights == {"a/x.jsonl": None, "b.csv": None}
    assert data("train: {a/x.jsonl: 3, b.csv: 0.5}").train_weights == {"a/x.jsonl": 3, "b.csv": 0.5}
    assert data("eval: a/x.jsonl").eval_paths == {"x": "a/x.jsonl"}
    assert data("eval: [a/x.jsonl, y.z.csv]").eval_paths == {"x": "a/x.jsonl", "y.z": "y.z.csv"}
    assert data("eval: {500: a/x.jsonl, b: y.csv}").eval_paths == {"500": "a/x.jsonl", "b": "y.csv"}
    assert data("eval: ''").eval_paths == {}
    overridden = load_config(write("data: {train: {a.jsonl: 1, b.jsonl: 1}}"), ["data.train={c.jsonl: 2}"])
    assert overridden.data.train_weights == {"c.jsonl": 2}


def test_fewer_than_162_keys_each_with_a_line_of_documentation() -> None:
    fields = dict(keys_of(Config))
    assert {"placement", "actor.lr", "debug.share_gpu"} <= fields.keys()
    assert len(fields) < 162  # 11 of them are thresholds and actions of health rules
    assert [name for name, entry in fields.items() if not entry.metadata.get("doc", "").strip()] == []


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().actor.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)


def test_a_section_inside_a_section() -> None:
    lora = load_config(None, ["model.lora={rank: 8, targets: [q_proj, v_proj]}", "model.lora.alpha=16"]).model.lora
    assert (lora.rank, lora.alpha, lora.targets, lora.scale, lora.is_set) == (8, 16, ["q_proj", "v_proj"], 2.0, True)
    assert not load_config().model.lora.is_set
    assert flatten({"model": {"path": "x", "lora": {"rank": 8}}, "reward": {"options": {"a": 1}}}) == {
        "model.path": "x",
        "model.lora.rank": 8,
        "reward.options": {"a": 1},
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.lora.rang=8", "unknown config key model.lora.rang; did you mean model.lora.rank?"),
        ("model.lora=8", "model.lora: got 8; it must be a section with keys, or be left out"),
        ("model.lora.rank=many", "model.lora.rank: got 'many'; it must be a whole number"),
        ("model.lora.rank=", "model.lora.rank: got no value; it must be a whole number"),
        ("model.lora.dropout=0.1", "model.lora.dropout: got 0.1; it must be 0"),
        ("model.lora.targets=[]", r"model.lora.targets: got \[\]; it must be \[all-linear\], or a list"),
        ("model.lora.targets={q_proj: 1}", r"model.lora.targets: got {.*}; it must be \[all-linear\], or a list"),
        ("model.lora.targets=[[q_proj]]", r"model.lora.targets: got \[\['q_proj'\]\]; it must be \[all-linear\], or a"),
        ("model.lora.targets=[null]", r"model.lora.targets: got \[None\]; it must be \[all-linear\], or a list"),
        (
            "model.lora.targets=all-linear",
            r"model.lora.targets: got 'all-linear'; it must be \[all-linear\], or a",
        ),
        ("model.lora.targets=5", "model.lora.targets: got 5; it must be"),
        ("critic.lora=8", "critic.lora: got 8; it must be true or false"),
        ("model.lora.targets=[all-linear, q_proj]", "model.lora.targets: got .*; it must be"),
        ("model.lora.targets=[q_proj, q_proj]", "model.lora.targets: got .*; it must be"),
    ],
)
def test_mistakes_in_a_section_inside_a_section(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(None, [override])
