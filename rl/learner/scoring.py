"""Compute the old and reference logprobs of a batch, with the actors' own models or on the inference ranks.

A forward pass of a sharded model is a collective, so all ranks of a mesh must run the same number of them. Actors agree
on the number among themselves. The first inference rank splits each batch evenly, and tells every inference rank how
many forward passes to run.

    actor --ScoreBatch--> first inference rank --ScorePart--> every inference rank --PartScores--> actor
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.config.schema import AlgoConfig
from rl.data.batch import Batch
from rl.data.packing import (
    MAX_IMBALANCE,
    count_micro_batches,
    cut,
    cut_together,
    over_micro_batches,
    split_evenly,
    units_of,
)
from rl.learner.offload import Offloader
from rl.model.logprobs import certainty_of_responses, hidden_size_of, score_responses
from rl.model.shards import TensorInfo, local_slices, reshard
from rl.sync.layout import Destination, MemoryLayout, Region
from rl.sync.probe import learner_logprobs
from rl.watch.ledger import Awaited
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


def local_models(algo: AlgoConfig, policy: nn.Module, load_reference: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """Return the models with which actors fill each batch field. The reference model is loaded only for a KL."""
    models = {"old_logprobs": policy} if algo.has_old_pass else {}
    return models | ({"ref_logprobs": load_reference()} if algo.kl_coef else {})


@dataclass(frozen=True)
class ScoringModels:
    by_field: Mapping[str, nn.Module]  # the model that fills each batch field
    max_tokens: Mapping[str, int]  # maximum of one forward pass of each model
    temperature: float
    device: torch.device

    @property
    def hidden_size(self) -> int:
        return hidden_size_of(next(iter(self.by_field.values())))

    def count(self, batch: Batch, name: str) -> int:
        """Return how many micro-batches a pass needs."""
        limit = self.max_tokens[name]
        return count_micro_batches(units_of(batch, limit, self.hidden_size), limit)

    def cut(self, batch: Batch, name: str, count: int) -> list[list[int]]:
        limit = self.max_tokens[name]
        return cut(units_of(batch, limit, self.hidden_size), limit, count)

    def split(self, batch: Batch, num_parts: int) -> list[list[int]]:
        """Split a batch into parts such that the most expensive one is as cheap as possible. Samples of a prompt stay
        together if that leaves no part with less work than others."""
        limit, best = max(self.max_tokens.values()), math.inf
        parts: list[list[int]] = []
        for number in range(limit.bit_length()):
            units = units_of(batch, limit / 2**number, self.hidden_size)
            shares = split_evenly([unit.cost for unit in units], num_parts)
            costs = [sum(units[index].cost for index in share) for share in shares]
            if max(costs) < best:
                best = max(costs)
                parts = [sorted(s for index in share for s in units[index].sequences) for share in shares]
            if max(costs) * num_parts <= MAX_IMBALANCE * sum(costs):
                break
        return parts

    def passes(self, fields: Sequence[str]) -> list[str]:
        """Return the fields for which a model runs. Self-certainty comes from the pass for old_logprobs."""
        return [name for name in self.by_field if name in fields]

    @torch.no_grad()
    def score(self, fields: Sequence[str], batch: Batch, cuts: Mapping[str, list[list[int]]]) -> dict[str, Tensor]:
        """Return [T] scores for each field. `cuts` are the micro-batches of each pass."""
        scores: dict[str, Tensor] = {}
        for name in self.passes(fields):
            names = [name, "certainty"] if name == "old_logprobs" and "certainty" in fields else [name]
            compute = partial(self._forward, self.by_field[name], len(names) == 2)
            scores |= zip(names, over_micro_batches(batch, cuts[name], compute, name), strict=True)
        return scores

    def _forward(self, model: nn.Module, with_certainty: bool, micro_batch: Batch) -> Sequence[Tensor]:
        if with_certainty:
            return certainty_of_responses(model, micro_batch, self.temperature, self.device)
        return [score_responses(model, micro_batch, self.temperature, self.device).logprobs]


@dataclass(frozen=True)
class ScoreBatch(Message):
    """Asks the first inference rank to score the batch in the payload."""

    request: int  # number of the actor's request
    version: int
    fields: list[str]


@dataclass(frozen=True)
class ScorePart(Message):
    """Asks an inference rank to score the part of an actor's batch in the payload."""

    actor: int
    request: int
    version: int
    fields: list[str]
    sequences: list[int]  # indices into the actor's batch
    num_micro_batches: dict[str, int]  # by field


@dataclass(frozen=True)
class PartScores(Message):
    """Returns the scores of some sequences of an actor's batch. The scores are in the payload."""

    request: int
    sequences: list[int]
    awaited = Awaited("logprobs from the inference ranks", "inference")


@dataclass(frozen=True)
class PendingScores:
    """A batch whose scores are not known yet."""

    batch: Batch
    request: int = 0  # 0: nobody was asked to score it


class Scorer:
    """Base class of the scorers that an actor can use. Between `offload` and `reload`, an engine uses the device."""

    def score(self, batch: Batch, version: int) -> Batch:
        """Return the batch with the fields of AlgoConfig.fields_to_score."""
        raise NotImplementedError

    def start(self, batch: Batch, version: int) -> PendingScores:
        """Ask the inference ranks to score a batch, and do not wait. Without such ranks, this does nothing."""
        return PendingScores(batch)

    def take(self, pending: PendingScores) -> Batch:
        """Wait for the scores that `start` has asked for, and return the batch with them."""
        return pending.batch

    def finish(self, batch: Batch, version: int) -> Batch:
        """Return a batch that `take` has returned, or several of them as one, with all scores. Without inference ranks,
        this is a collective of the actors."""
        return self.score(batch, version)

    def wait(self) -> None:
        """Wait until the inference ranks have answered all requests of this actor."""

    def offload(self) -> None:
        pass

    def reload(self) -> None:
        pass


class LocalScorer(Scorer):
    """Scores with the actors' own models. With `offloads_reference`, the weights of the reference model are in host
    memory between `offload` and `reload`."""

    def __init__(
        self, models: ScoringModels, fields: Sequence[str], pg: dist.ProcessGroup, offloads_reference: bool = False
    ):
        self._models, self._fields, self._pg = models, fields, pg
        self._reference = models.by_field.get("ref_logprobs")
        parts = local_slices(self._reference) if self._reference is not None and offloads_reference else ()
        self._offloader = Offloader(part.data for part in parts)

    def offload(self) -> None:
        self._offloader.offload()

    def reload(self) -> None:
        self._offloader.start_reload()
        self._offloader.wait()

    def score(self, batch: Batch, version: int) -> Batch:
        if not self._fields:
            return batch
        models, cuts = self._models, dict[int, list[list[int]]]()
        limits = {name: models.max_tokens[name] for name in models.passes(self._fields)}
        for limit in dict.fromkeys(limits.values()):
            cuts[limit] = cut_together(batch, limit, models.hidden_size, self._pg)
        scores = models.score(self._fields, batch, {name: cuts[limit] for name, limit in limits.items()})
        if self._reference is not None:  # the parameters of the policy stay for the update that follows
            reshard(self._reference)
        return batch.replace(**scores)


class RemoteScorer(Scorer):
    """Scores on the inference ranks. Several requests may be under way at the same time."""

    def __init__(self, mail: Mailbox, scorers: list[int], fields: list[str]):
        self._mail, self._scorers, self._fields = mail, scorers, fields
        self._num_requests = 0
        self._num_missing: dict[int, int] = {}  # answers that are still to come, by request
        self._answers: dict[int, list[Letter[PartScores]]] = {}  # by request, until `finish` takes them

    def score(self, batch: Batch, version: int) -> Batch:
        return self.take(self.start(batch, version))

    def start(self, batch: Batch, version: int) -> PendingScores:
        if batch.num_sequences == 0 or not self._fields:
            return PendingScores(batch)
        self._num_requests += 1
        request = self._num_requests
        self._num_missing[request], self._answers[request] = len(self._scorers), []
        self._mail.send(self._scorers[0], ScoreBatch(request, version, self._fields), payload=batch.to_bytes())
        return PendingScores(batch, request)

    def take(self, pending: PendingScores) -> Batch:
        batch, merged = pending.batch, {name: torch.zeros(pending.batch.num_tokens) for name in self._fields}
        while pending.request in self._num_missing:
            self._receive()
        for letter in self._answers.pop(pending.request, ()):
            for name, scores in safetensors.torch.load(bytes(letter.payload)).items():
                merged[name] += batch.at_sequences(letter.message.sequences, scores)
        return batch.replace(**merged)

    def finish(self, batch: Batch, version: int) -> Batch:
        return batch if batch.num_sequences else self.score(batch, version)

    def wait(self) -> None:
        while self._num_missing:
            self._receive()

    def _receive(self) -> None:
        letter = self._mail.receive(PartScores)
        request = letter.message.request
        self._answers[request].append(letter)
        self._num_missing[request] -= 1
        if not self._num_missing[request]:
            del self._num_missing[request]


class LogprobService(Service):
    """Scores batches on an inference rank, with sharded copies of the models. The copy for old_logprobs follows the
    policy, so the service receives weights as an engine does."""

    name = "logprobs"
    kinds = (ScoreBatch, ScorePart)

    def __init__(self, mail: Mailbox, scorers: list[int], models: ScoringModels):
        self.version = 0
        self._mail, self._scorers, self._models = mail, scorers, models
        self._policy = models.by_field["old_logprobs"]

    @property
    def awaited(self) -> str:
        return Awaited("work from the actors", "actor")

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout:
        index = self._scorers.index(self._mail.rank)
        parts = {(part.info.name, part.info.shape): part.data.view(1, -1) for part in local_slices(self._policy)}
        theirs = {(info.name, info.shape) for info in tensors}
        assert parts.keys() == theirs, f"this rank's copy is of another model: {parts.keys() ^ theirs}"
        destinations = []
        for number, info in enumerate(tensors):
            start, _ = info.span(index, len(self._scorers)) if info.sharded else (0, 0)
            data = parts[info.name, info.shape]
            if data.numel():
                destinations.append(Destination(number, Region(start, 1, data.numel(), 0), data))
        return MemoryLayout(tensors, destinations)

    def begin_version(self) -> None:
        self.version = 0
        reshard(self._policy)

    def confirm(self, version: int) -> None:
        self.version = version

    def probe(self, tokens: list[int]) -> list[float]:
        """Return the copy's logprobs of these tokens. This is a collective of the inference ranks."""
        return learner_logprobs(self._policy, tokens, self._models.device)

    def handle(self, letter: Letter[Any]) -> None:
        if isinstance(letter.message, ScoreBatch):
            self._cut(letter)
        else:
            self._score_part(letter)

    def _cut(self, letter: Letter[ScoreBatch]) -> None:
        asked, models, batch = letter.message, self._models, Batch.from_bytes(letter.payload)
        parts = models.split(batch, len(self._scorers))
        batches = [batch.select(part) for part in parts]
        counts = {name: max(models.count(each, name) for each in batches) for name in models.passes(asked.fields)}
        for rank, part, each in zip(self._scorers, parts, batches, strict=True):
            message = ScorePart(letter.source, asked.request, asked.version, asked.fields, part, counts)
            self._mail.send(rank, message, payload=each.to_bytes())

    def _score_part(self, letter: Letter[ScorePart]) -> None:
        asked, models, batch = letter.message, self._models, Batch.from_bytes(letter.payload)
        assert asked.version == self.version, f"asked to score version {asked.version}, this rank holds {self.version}"
        cuts = {name: models.cut(batch, name, count) for name, count in asked.num_micro_batches.items()}
        scores = models.score(asked.fields, batch, cuts)
        answer = PartScores(asked.request, asked.sequences)
        self._mail.send(asked.actor, answer, payload=safetensors.torch.save(scores))
