"""`python train.py --plan`: check a run without torchrun, GPU and network, and print what it would do.

The checks are those that a run makes at its start. The cheap ones come first, and torch is imported only after them,
so a mistake in the settings is reported in about a second.
"""

import argparse
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from rl.common.text import count_of, format_bytes
from rl.config.load import add_arguments
from rl.config.modes import load_settings, read_phase
from rl.config.schema import ConfigError, resolve_path
from rl.config.values import read_value, with_values
from rl.data.sources import Data, check_files, make_conversation, read_data
from rl.data.trajectory_files import list_files, run_folder, trajectory_folder
from rl.environments.find import read_environment
from rl.model.hub import HUB_COMMITS, find_in_cache, read_commits, warn_of_typo
from rl.model.memory import estimate, estimate_adapters
from rl.model.shape import check_folder, check_model, check_weights, measure_size
from rl.model.tokenizer import load_tokenizer
from rl.placement.nodes import Nodes
from rl.placement.roles import Placement, plan
from rl.report.printing import print_or_exit
from rl.report.sizes import describe_data_parallelism
from rl.report.writers import check_writers
from rl.rewards.find import check_rewards
from rl.rewards.trial import TrialRow, score_one_row
from rl.rollout.schedule import describe_lag, plan_schedule
from rl.run.checks import check_lora, check_settings
from rl.run.derive import Derived, derive, nominal_bytes, open_settings, read_models
from rl.run.find_data import choose_commits, download_datasets
from rl.watch.reports import ServiceUnavailable
from rl.world.bootstrap import exit_before_join, is_first_on_node

LINE_LENGTH = 120
DEFAULT_GPU_GB = 80.0
MAX_SAMPLE = 1000  # number of prompts from which the mean length is computed


class ArgumentParser(argparse.ArgumentParser):
    """Print help and mistakes on the first rank of a node only."""

    def error(self, message: str) -> NoReturn:
        exit_before_join(2, f"{self.format_usage()}oneworld: {self.prog}: error: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        exit_before_join(status, message or "")

    def print_help(self, file: Any = None) -> None:
        if is_first_on_node():
            super().print_help(file)


def parse_or_plan(description: str | None) -> argparse.Namespace:
    """Return the arguments of train.py. With --plan, print the plan and exit. One rank per node prints."""
    parser = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--plan", action="store_true", help="check the run, print what it would do, and exit")
    what = "with --plan: number of nodes; default: placement.num_nodes, or 1"
    parser.add_argument("--nnodes", type=int, metavar="N", help=what)
    what = "with --plan: ranks per node, or one number per node such as 8,4; default: placement.num_gpus_per_node, or 2"
    parser.add_argument("--nproc-per-node", type=_parse_list, metavar="M", help=what)
    what = "with --plan: memory of a GPU, as on its data sheet; default: this machine's GPU, or 80"
    parser.add_argument("--gpu-memory-gb", type=float, metavar="G", help=what)
    args = parser.parse_intermixed_args()
    sizes = [*([] if args.nnodes is None else [args.nnodes]), *(args.nproc_per_node or [])]
    if sizes and not args.plan:
        parser.error("--nnodes and --nproc-per-node after train.py need --plan; without it, write them before train.py")
    if sizes and min(sizes) < 1:
        parser.error(f"--nnodes and --nproc-per-node: got {min(sizes)}; they must be at least 1")
    if args.gpu_memory_gb is not None and not args.plan:
        parser.error("--gpu-memory-gb needs --plan; a run uses the memory of its own GPUs")
    if args.gpu_memory_gb is not None and not 1 <= args.gpu_memory_gb < 10_000:
        parser.error(f"--gpu-memory-gb: got {args.gpu_memory_gb:g}; it must be at least 1 and less than 10000")
    if args.nnodes and len(args.nproc_per_node or []) not in (0, 1, args.nnodes):
        got = f"--nproc-per-node has {len(args.nproc_per_node)} numbers, and --nnodes is {args.nnodes}"
        parser.error(f"{got}; give one number for all nodes, or one for each")
    if args.plan:
        print_plan(args)
    return args


def _parse_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; give a number such as 8, or one per node such as 8,4"
        ) from None


def print_plan(args: argparse.Namespace) -> NoReturn:
    """Print the plan, or the first mistake, and exit."""
    if is_first_on_node():
        try:
            text = RunPlan(args).text()
        except ConfigError as error:
            exit_before_join(2, f"oneworld: {error}")
        print_or_exit(text)
    exit_before_join(0)


class RunPlan:
    """The settings of a run, what was checked about them, and what could not be checked."""

    def __init__(self, args: argparse.Namespace):
        """Make all checks. Raise ConfigError for the first mistake."""
        self.checked, self.unchecked, self.notes = ["settings", "placement"], list[str](), list[str]()
        self.config, _, self.of_run = load_settings(args)
        self.phase, self.start_step = read_phase(args), 0
        self.trains = not args.eval_only and self.phase.split != "eval-only"
        self.placement = self._place(args)
        self.notes += check_settings(self.config, self.placement)
        check_lora(self.config.model.lora)
        check_rewards(self.config.reward)
        read_environment(self.config.environment)
        check_writers(self.config.metrics.writers)
        self._check_run_folder()
        self.models = {setting: self._find_model(setting, path) for setting, path in self.config.model_paths.items()}
        self.datasets = self._find_datasets()
        check_files(self.config, self.datasets)
        # What follows may import torch, which takes seconds.
        self.data = self._read_data()
        self.conversations = self._try_environment() if self.config.environment.is_set else []
        self.reward = self._try_rewards()
        self._check_functions()
        num_steps = self.config.train.count_steps(len(self.data.stream))
        self.config = replace(self.config, train=replace(self.config.train, num_steps=num_steps))
        self.gpu, self.derived = self._derive(args.gpu_memory_gb)
        self._check_resume()
        self.unchecked.append("GPUs, other nodes, the network (launch/preflight.py)")
        self.unchecked.append("whether learner and engine support the model (--dry-run)")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model is here. Otherwise neither tokens nor prompts that are too long are known."""
        return self.models["model.path"] is not None

    def _place(self, args: argparse.Namespace) -> Placement:
        config = self.config
        stated = config.placement.get("num_gpus_per_node") or 2
        sizes = args.nproc_per_node or (stated if isinstance(stated, list) else [stated])
        num_nodes = args.nnodes or (len(sizes) if len(sizes) > 1 else config.placement.get("num_nodes") or 1)
        if len(sizes) not in (1, num_nodes):
            got = f"placement.num_gpus_per_node has {len(sizes)} numbers, and --nnodes is {num_nodes}"
            raise ConfigError(f"{got}; give one number for all nodes, or one for each")
        nodes = Nodes.of(num_nodes, sizes[0] if len(sizes) == 1 else sizes)
        tp, num_replicas = config.rollout.tensor_parallel_size, config.actor.num_replicas
        return plan(config.placement, nodes.num_nodes, nodes.sizes, tp, num_replicas, self.phase.name)

    def _check_run_folder(self) -> None:
        """Check that run.dir, and what exists of the run's own folder, can be written."""
        root, name = Path(self.config.run.dir), self.config.run.name
        folders = {root: "run.dir"}
        if name:
            folders |= {root / name: "run.name", root / name / "checkpoints": "run.name"}
        for folder, setting in folders.items():
            existing = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                problem = "cannot be written to" if existing.is_dir() else "is not a directory"
                remedy = "give a folder that can be written" if setting == "run.dir" else "give another name"
                raise ConfigError(f"{setting}: cannot make {folder}: {existing} {problem}; {remedy}")
        self.checked.append(f"run.dir={root} can be written")

    def _find_model(self, setting: str, path: str) -> Path | None:
        """Return a model's folder, after a check of its files, or None if a run would ask the hub for it."""
        folder = resolve_path(path)
        found = folder if folder.exists() else find_in_cache(setting, path)
        if found is None:
            why = "no folder here, and not in the hub's cache: a run would ask the hub"
            self.unchecked.append(f"{setting}={path} ({why})")
            self.notes += filter(None, [warn_of_typo(setting, path)])
            return None
        check_folder(setting, found)
        if setting == "model.path":
            check_model(self.config, found)
        if not self.config.debug.dry_run:
            check_weights(found)
        self.checked.append(f"{setting}={path}")
        return found

    def _find_datasets(self) -> dict[str, Path]:
        """Return the folders of datasets on the hub. Unlike a model, a dataset is downloaded for the plan."""
        run = Path(self.config.run.dir) / self.config.run.name
        try:
            return download_datasets(self.config, choose_commits(self.config, read_commits(run / HUB_COMMITS)))
        except ServiceUnavailable as error:
            raise ConfigError(str(error)) from None

    def _read_data(self) -> Data:
        folder = self.models["model.path"]
        if folder is None:
            self.unchecked.append("length of prompts, chat template (they need the tokenizer)")
        tokenizer = None if folder is None else load_tokenizer(folder)
        data = read_data(self.config, tokenizer, self.notes.append, self.datasets)
        self.checked.append("every row of data.train" + (" and data.eval" if data.eval_sets else ""))
        if self.config.data.eval and not data.eval_sets:
            self.unchecked.append("data.eval (not read, because eval.interval=0)")
        return data

    def _try_environment(self) -> list[str]:
        """Import the user's code, and begin a conversation. Return what the conversations are."""
        from rl.environments.protocol import Ask
        from rl.run.environment import LocalConversation, describe_conversations  # imports torch

        folder, prompt = self.models["model.path"], self.data.stream.prompts[0]
        with LocalConversation(self.config, folder) as local:
            lines = describe_conversations(self.config, local.pool.loaded)
            self.checked.append("import of the environment")
            self.unchecked.append("whole conversations (tools/try_environment.py)")
            if folder is None:
                self.unchecked.append("the chat template of conversations (it needs the tokenizer)")
                return lines
            if local.pool.loaded.call_format:
                self.checked.append("the chat template of conversations")
            if self.config.environment.rollout:
                return [*lines, "the rollout function was not called"]
            local.begin(prompt)
            event = local.receive()
        if isinstance(event, Ask):
            return [
                *lines,
                f"{prompt.place}: the prompt has {len(event.prompt)} tokens, with all that the model is told",
            ]
        return [*lines, f"{prompt.place}: this conversation could not begin: {event.problem or event.ending}"]

    def _try_rewards(self) -> str:
        """Return what the reward functions give for a row of the data."""
        prompt = self.data.stream.prompts[0]
        values = prompt.row | {"answer": prompt.answer}
        if self.config.environment.is_set:
            data = self.config.data
            values["messages"] = make_conversation(prompt.row, data) if data.chat_template else []
        trial = score_one_row(self.config.reward, TrialRow(prompt.place, prompt.text, values))
        self.checked.append("reward functions" if trial.has_score else "import of the reward functions")
        if not trial.has_score:
            self.unchecked.append("scores of the reward functions (see reward)")
        return trial.text

    def _check_functions(self) -> None:
        from rl.algo.choose import check_functions, own_advantage  # imports torch
        from rl.learner.optimizers import check_optimizer

        check_functions(self.config.algo)
        check_optimizer(self.config.actor.optimizer)
        if self.trains and self.config.actor.overlap:
            from rl.learner.overlap import why_overlap_waits

            self.notes += filter(None, [why_overlap_waits(self.config.algo, own_advantage(self.config.algo))])
        self.checked.append("loss and advantage")

    def _derive(self, given_gb: float | None) -> tuple[str, Derived | None]:
        """Fill in the settings that a run would derive, and name the GPU. Without the model, nothing can be derived."""
        from rl.run.agree import device_bytes  # imports torch

        self.left_open = open_settings(self.config)
        folders = {setting: folder for setting, folder in self.models.items() if folder is not None}
        gpu_gb, num_bytes = given_gb or DEFAULT_GPU_GB, 0 if given_gb else device_bytes()
        gpu = f"GPUs of {format_bytes(num_bytes)}, as here" if num_bytes else f"GPUs of {gpu_gb:g} GB (--gpu-memory-gb)"
        if len(folders) < len(self.models):
            return gpu, None
        models = read_models(self.config, folders)
        found = derive(self.of_run, self.placement, models, num_bytes or nominal_bytes(gpu_gb), self.trains)
        self.config = with_values(self.config, {name: read_value(found.config, name) for name in self.left_open})
        return gpu, found

    def _settings(self) -> list[str]:
        """Return the derived settings, the reason for each, and whether the run fits."""
        if self.derived is None:
            names = open_settings(self.config)
            return [f"{', '.join(names)}: a run derives them from the model, which is not here"] if names else []
        values = self.derived.values
        lines = [f"for {self.gpu}; on a CPU they are fixed"] if values else [f"for {self.gpu}"]
        lines += [f"{name}={values[name]}: {reason}" for name, reason in self.derived.reasons.items()]
        if self.derived.problem:
            return [*lines, f"estimated not to fit: {self.derived.problem}"]
        return [*lines, f"estimated to fit: {self.derived.use}"] if self.derived.use else lines

    def _check_resume(self) -> None:
        """Find the checkpoint that the run would resume from, and compare its prompts with the data."""
        config = self.config
        root, resume = Path(config.run.dir) / config.run.name / "checkpoints", config.checkpoint.resume
        if resume in ("auto", "never") and not (config.run.name and root.is_dir()):
            return
        from rl.checkpoint.resume import announcement, check_prompts, preview_resume

        try:
            found = preview_resume(root, config)
        except ConfigError as error:
            if self.placement.num_nodes == 1:
                raise
            self.unchecked.append(f"the checkpoint to resume from (other nodes may have it; here: {error})")
            return
        if found is None:
            return
        self.start_step = found.manifest.step
        self.notes.append(announcement(found, root, config, self.left_open))
        if self.trains and self.has_tokenizer and (warning := check_prompts(found, self.data.stream)):
            self.notes.append(warning)
        self.checked.append(f"the checkpoint of step {found.manifest.step}")

    def text(self) -> str:
        """Return the table of ranks, then numbers and what was checked, in lines that fit a wide terminal."""
        sections = {
            "phase": self._phase(),
            "shares": self._shares(),
            "settings": self._settings(),
            "memory": self._memory(),
            "steps": self._steps() if self.trains else [],
            "tokens": self._tokens() if self.trains else [],
            "evaluation": self._evaluation(),
            "environment": self.conversations,
            "reward": [self.reward],
            "note": self.notes,
            "checked": ["; ".join(self.checked)],
            "not checked": ["; ".join(self.unchecked)],
        }
        width = max(map(len, sections)) + 2
        wrapper = textwrap.TextWrapper(LINE_LENGTH - width, break_long_words=False, break_on_hyphens=False)
        lines = []
        for name, entries in sections.items():
            wrapped = [line for entry in entries for line in wrapper.wrap(entry)]
            lines += [f"{'' if index else name:<{width}}{line}" for index, line in enumerate(wrapped)]
        return "\n".join([self.placement.table(), "", *lines])

    def _shares(self) -> list[str]:
        """Return the stated share of each node in the rollout work, if placement.rank_weights states them."""
        shares = self.placement.engine_shares
        if not shares:
            return []
        lines = []
        for node in range(self.placement.num_nodes):
            own = [share for lead, share in shares.items() if self.placement.nodes.node_of(lead) == node]
            each = f", {100 * own[0]:.1f}% each" if len(own) > 1 else ""
            lines.append(f"node {node}: {100 * sum(own):.1f}% of the groups ({count_of(len(own), 'engine')}{each})")
        return lines

    def _phase(self) -> list[str]:
        """Return what a command with --rl-phase does."""
        phase, config, step = self.phase, self.config, self.start_step + 1
        if phase.name == "both":
            return []
        run = Path(config.run.dir) / config.run.name
        source = f"the checkpoint of step {self.start_step}" if self.start_step else "model.path"
        lead = f"rollout: rank {self.placement.leader} loads {source} into its host memory, and sends it to all engines"
        if phase.split == "eval-only":
            return [f"{lead}, which evaluate it. Nothing else is sampled"]
        if step > config.train.num_steps:
            return ["all steps are done, so nothing is sampled or trained on"]
        folders = [trajectory_folder(run_folder(each), step) for each in phase.folders or [str(run)]]
        found = len({key for folder in folders for key in list_files(folder)})
        there = f"{count_of(found, 'group')} of step {step} {'is' if found == 1 else 'are'} there now"
        if phase.name == "update":
            listed = ", ".join(map(str, folders))
            partial = ". A partial batch is accepted" if phase.takes_partial else ""
            return [f"update: the actors train step {step} on the groups in {listed}, and save it. {there}{partial}"]
        part = f"part {phase.part[0]} of {phase.part[1]} of " if phase.samples_part else ""
        return [f"{lead}. They sample what is missing of {part}step {step} into {folders[0]}. {there}"]

    def _memory(self) -> list[str]:
        """Return a line for each set of roles, or why there is no estimate."""
        lora = self.config.model.lora
        sizes = {
            setting: measure_size(folder, lora.targets) if folder else None for setting, folder in self.models.items()
        }
        if missing := [setting for setting, size in sizes.items() if size is None]:
            return [f"not estimated, because the weights of {missing[0]} are not here"]
        policy = sizes["model.path"]
        assert policy is not None
        critic = (sizes.get("critic.path") or policy) if self.config.algo.has_critic else None
        lines = []
        for role in estimate(self.config, self.placement, policy, critic, self.trains):
            offloaded = f" ({format_bytes(role.offloaded)} offloaded during rollouts)" if role.offloaded else ""
            host = f"{format_bytes(role.host)} of host memory ({format_bytes(role.host_on_cpu)} without a GPU)"
            lines.append(f"{role.who}: each {role.parts}{offloaded}, {host}")
        if lora.is_set and self.trains:
            lines.append(estimate_adapters(lora, policy))
        return [
            *lines,
            f"estimated from {policy.num_parameters / 1e6:.2f} M parameters, without activations and KV cache",
        ]

    def _steps(self) -> list[str]:
        config, num_prompts = self.config, len(self.data.stream)
        per_step, samples = config.train.num_prompts_per_step, config.rollout.num_samples_per_prompt
        num_steps, limit = config.train.num_steps, "" if self.has_tokenizer else "at most "
        step = f"{count_of(per_step, 'prompt')} x {count_of(samples, 'sample')} = {per_step * samples:,} rollouts"
        of_epochs = limit if config.train.num_epochs else ""
        epochs = f"{num_steps * per_step / num_prompts:.2f} epochs of {limit}{count_of(num_prompts, 'prompt')}"
        if config.algo.dynamic_sampling:
            step += f", in at most {count_of(config.algo.max_sampling_rounds, 'round')} of this size"
            epochs = f"at least {epochs}"
        return [f"{of_epochs}{count_of(num_steps, 'step')} of {step}; {epochs}"]

    def _tokens(self) -> list[str]:
        """Return the upper bound of the tokens of a step and, if there is a tokenizer, what to expect."""
        config, stream = self.config, self.data.stream
        num_rollouts = config.train.num_prompts_per_step * config.rollout.num_samples_per_prompt
        prompt, response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
        after, most = config.max_training_tokens, config.max_step_tokens
        lines = [f"a step has at most {num_rollouts:,} x ({prompt} + {after}) = {most:,} tokens"]
        lines.append(describe_data_parallelism(config, self.placement))
        if self.has_tokenizer:
            mean = fmean(len(each.tokens) for each in map(stream.at, range(min(len(stream), MAX_SAMPLE))))
            alone = " without tools and observations" if config.environment.is_set else ""
            expected = f"{num_rollouts:,} x {mean:.1f} = {num_rollouts * mean:,.0f} of prompts{alone}"
            lines.append(f"expected: {expected}, and up to {num_rollouts * response:,} of responses")
        schedule = plan_schedule(config)
        if schedule.max_lag:
            lines.append(describe_lag(schedule, schedule.max_lag))
        return lines

    def _evaluation(self) -> list[str]:
        config = self.config.eval
        if not config.interval or self.phase.name == "update" or self.phase.split == "train-only":
            return []
        sizes = {name: len(prompts[: config.num_prompts or None]) for name, prompts in self.data.eval_sets.items()}
        sets = ", ".join(f"{name} {count_of(size, 'prompt')}" for name, size in sizes.items())
        when = f"every {count_of(config.interval, 'step')}" if self.trains else "once"
        when += "" if config.before_training or not self.trains else ", not before training"
        return [f"{when}: {sets} x {count_of(config.num_samples, 'sample')}"]
