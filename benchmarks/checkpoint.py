"""A save beside torch's dcp.async_save of the same state, in one run: what training waits for. Prints one JSON line.

    python benchmarks/checkpoint.py [--ranks 1] [--megabytes 200 | --model 1.7b] [--rollout-seconds 2] [--folder PATH]

It starts its own torchrun. The learner, its moments after one optimizer step, and what saves them are train.py's; there
are no engines. Rounds are interleaved on one disk, which is synced between them; figures are medians of five after one
round that warms up, each the slowest rank's:
    blocked_s                   in end_step and in wait_copied, were the next update to come at once
    blocked_in_loop_s           the same when it comes after the next rollouts
    commit_s                    from end_step until committed; also how long a synchronous save would block
    dcp_async_blocked_s         in async_save and until its copy is taken, by the fastest of the settings in `dcp`; the
                                state dict is made before (dcp_state_dict_s)
    blocked_ratio_to_dcp_async  blocked_s / dcp_async_blocked_s
    end_step_s, wait_copied_s   the parts of blocked_s; probe_s is the forward in end_step, timed by itself
    first_blocked_s             in the round that warms up: pages are faulted in, and pinned for a GPU
    write_gbps                  file_gb over the time from copied to committed
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from transformers import AutoModelForCausalLM, LlamaConfig

from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.save import Record, Saver
from rl.checkpoint.shelf import Shelf
from rl.config import Config, load_config
from rl.data.batch import Batch
from rl.learner import Learner
from rl.metrics import Measures
from rl.model.load import load_model
from rl.placement import make_groups, plan
from rl.sync.probe import LIMITS, learner_logits, make_probe
from rl.sync.weights import share_tensors
from rl.world import World, join

ROUNDS = 5
MODELS = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "any size": (1024, 2816, 0, 16, 8, 16384),  # as many layers as the size asks for
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1.7b": (2048, 8192, 24, 32, 32, 49152),
}


class Bench:
    """One rank of the benchmark."""

    def __init__(self, world: World, args: argparse.Namespace):
        self.world, self.args = world, args
        self.placement = plan({"actor,rollout": "all"}, 1, world.size)
        self.is_leader = world.rank == self.placement.leader
        self.on_gpu = torch.cuda.is_available()
        world.connect(share_gpu=self.on_gpu and world.size > torch.cuda.device_count(), timeout_s=300)
        self.groups = make_groups(self.placement, world.rank, world.device.type, timeout_s=300)
        self.world_pg, self.dcp_pg = (dist.new_group(list(range(world.size)), backend="gloo") for _ in range(2))
        self.folder = Path(args.folder)
        dtype = "bfloat16" if self.on_gpu else "float32"
        self._make_model(dtype)
        overrides = [f"model.path={self.folder / 'model'}", f"model.dtype={dtype}", "train.num_steps=1000000"]
        self.config: Config = load_config(None, [*overrides, "checkpoint.save_interval=1"])
        self.learner = self._build_learner()
        self.saver = self._build_saver()
        self.probe_tokens = make_probe(MODELS[args.model][-1], 64, LIMITS[dtype]).tokens
        config, steps = self.config.checkpoint, self.config.train.num_steps
        self.checkpoints = Checkpoints(
            world, self.placement, self.saver, self.learner, config, steps, self.probe_tokens, resume=None
        )
        self.stagers = _stagers(self.on_gpu)
        self.step = 0
        self.num_bytes: dict[str, int] = {}  # of the files of each kind of round

    def _make_model(self, dtype: str) -> None:
        hidden, intermediate, layers, heads, kv_heads, vocab = MODELS[self.args.model]
        if not layers:
            size = self.args.megabytes * 1e6 / torch.float32.itemsize
            in_layer = (2 * hidden + 2 * hidden * kv_heads // heads + 3 * intermediate) * hidden
            layers = max(1, round((size - vocab * hidden) / in_layer))
        if self.world.rank == 0:
            config = LlamaConfig(
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
                vocab_size=vocab,
                tie_word_embeddings=True,
            )
            with torch.device(self.world.device):
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
                model.save_pretrained(self.folder / "model")
        self.wait()

    def _build_learner(self) -> Learner:
        config, mesh = self.config, self.groups.actor_mesh
        assert mesh is not None
        model = load_model(self.folder / "model", mesh, self.world.device, config.model.dtype, trainable=True)
        learner = Learner(model, self.groups.actor_pg, self.world.device, config.actor, config.algo, 1.0, 1)
        learner.update(_batch(), 1, Measures())
        return learner

    def _build_saver(self) -> Saver:
        tensors = share_tensors(self.world.mail, self.placement, self.learner.model, self.config.model.dtype)
        self.shelf = Shelf(self.world.mail, self.folder / "checkpoints", None, self.placement.keepers)
        hosts: tuple[str, ...] = ()
        if self.is_leader:
            hosts = tuple(answer.meta["host"] for answer in self.shelf.ask_all("make"))
        self.wait()
        settings, model_folder = asdict(self.config), self.folder / "model"
        record = Record(self.world.id, "benchmark", settings, hosts, model_folder, tuple(tensors))
        return Saver(self.world, self.placement, self.shelf, record, copies=1)

    def ours(self, pause_s: float) -> dict[str, float]:
        """One save, with the next update after the pause."""
        self.step += 1
        self.checkpoints.end_update(self.step, self.step, stream=None)
        started = self.clean_start()
        self.checkpoints.end_step(self.step, {})
        ended = time.perf_counter()
        time.sleep(pause_s)
        needed = time.perf_counter()
        self.checkpoints.wait_copied()
        copied = time.perf_counter()
        self.saver.wait_committed()
        committed = time.perf_counter()
        self.remove("ours", self.shelf.root / f"step_{self.step}")
        end_step_s, wait_copied_s = ended - started, copied - needed
        return {
            "blocked_s": end_step_s + wait_copied_s,
            "end_step_s": end_step_s,
            "wait_copied_s": wait_copied_s,
            "commit_s": committed - started,
        }

    def dcp(self, setting: str) -> dict[str, float]:
        self.step += 1
        folder = self.folder / f"dcp_{self.step}"
        before = self.clean_start()
        state = self.state_dict()
        started = self.clean_start(state_is_new=True)
        made = time.perf_counter()
        response = dcp.async_save(
            state, checkpoint_id=folder, process_group=self.dcp_pg, async_stager=self.stagers[setting]
        )
        called = time.perf_counter()
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            upload = response.upload_completion
        else:
            upload = response
        copied = time.perf_counter()
        upload.result()
        committed = time.perf_counter()
        self.remove("dcp", folder)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What dcp saves. A tied parameter comes once, as in ours."""
        model, optimizer = get_state_dict(self.learner.model, self.learner._optimizer)
        names = {name for name, _ in self.learner.model.named_parameters()}
        names |= {name for name, _ in self.learner.model.named_buffers()}
        return {"model": {name: value for name, value in model.items() if name in names}, "optimizer": optimizer}
