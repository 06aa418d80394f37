"""Who computes old and reference logprobs: this learner's own model, or the inference ranks.

A forward of a sharded model is a collective, so the ranks of a mesh run equally many. Actors agree on a count among
themselves; for inference ranks the first of them cuts arriving work into even parts and says how many forwards each
runs.

    actor --score--> first inference rank --forward--> every inference rank --scores--> actor
"""

from collections.abc import Mapping, Sequence

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.data.batch import Batch
from rl.data.micro_batches import cut, cut_together, over_micro_batches
from rl.data.packing import costs_of, count_micro_batches, split_evenly
from rl.learner.offload import Offload
from rl.model.logprobs import certainty_of_responses, hidden_size_of, score_responses
from rl.model.shards import TensorInfo, local_slices, reshard
from rl.sync.landing import Landing, Landings, Region
from rl.sync.probe import learner_logprobs
from rl.world.mail import Mail, Message
from rl.world.service import Service


@torch.no_grad()
def score_fields(
    models: Mapping[str, nn.Module],
    fields: Sequence[str],
    batch: Batch,
    micro_batches: list[list[int]],
    temperature: float,
    device: torch.device,
) -> dict[str, Tensor]:
    """[T] of each field: logprobs by the model of that name, and the policy's self-certainty by the way."""
    scores: dict[str, Tensor] = {}
    for name, model in models.items():
        if name not in fields:
            continue
        with_certainty = name == "old_logprobs" and "certainty" in fields

        def compute(
            micro_batch: Batch, model: nn.Module = model, with_certainty: bool = with_certainty
        ) -> list[Tensor]:
            if with_certainty:
                return list(certainty_of_responses(model, micro_batch, temperature, device))
            return [score_responses(model, micro_batch, temperature, device).logprobs]

        names = [name, "certainty"] if with_certainty else [name]
        scores |= zip(names, over_micro_batches(batch, micro_batches, compute, name), strict=True)
    return scores


class Scorer:
    def score(self, batch: Batch, version: int) -> Batch:
        """The batch with old_logprobs, where they need a pass of their own, and a reference's, if there is one."""
        raise NotImplementedError

    def release_device(self) -> None:
        """For an engine of this rank."""

    def take_device(self) -> None:
        """The engine sleeps."""


class LocalScorer(Scorer):
    """The actors' own models, by the name of the batch field that each fills, of which `fields` are wanted. With
    `reference_rests` the reference's weights lie in host memory between `release_device` and `take_device`."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        fields: Sequence[str],
        pg: dist.ProcessGroup,
        max_tokens: int,
        temperature: float,
        device: torch.device,
        reference_rests: bool = False,
    ):
        self._models, self._fields, self._pg, self._max_tokens = models, fields, pg, max_tokens
        self._temperature, self._device = temperature, device
        self._reference = models.get("ref_logprobs")
        self._rest = None
        if self._reference is not None and reference_rests:
            self._rest = Offload(part.data for part in local_slices(self._reference))

    def release_device(self) -> None:
        self._reshard_reference()  # which a loss with the full KL has used too
        if self._rest is not None:
            self._rest.leave()

    def take_device(self) -> None:
        if self._rest is not None:
            self._rest.come_back()
            self._rest.wait()

    def _reshard_reference(self) -> None:
        """Nothing but the next batch needs its root again; that of the policy is what the update begins with."""
        if self._reference is not None:
            reshard(self._reference)

    def score(self, batch: Batch, version: int) -> Batch:
        if not self._fields:
            return batch
        hidden_size = hidden_size_of(next(iter(self._models.values())))
        micro_batches = cut_together(batch, self._max_tokens, hidden_size, self._pg)
        scores = score_fields(self._models, self._fields, batch, micro_batches, self._temperature, self._device)
        self._reshard_reference()
        return batch.replace(**scores)


class RemoteScorer(Scorer):
    """Asks the inference ranks."""

    def __init__(self, mail: Mail, scorers: list[int], fields: list[str]):
        self._mail, self._scorers, self._fields = mail, scorers, fields

    def score(self, batch: Batch, version: int) -> Batch:
        merged = {name: torch.zeros(batch.num_tokens) for name in self._fields}
        if batch.num_sequences == 0 or not merged:
            return batch.replace(**merged)
        self._mail.send(self._scorers[0], "score", {"version": version, "fields": self._fields}, batch.to_bytes())
        starts = batch.cu_lengths.tolist()
        for _ in self._scorers:
            message = self._mail.receive("scores")
            assert message is not None
            for name, scores in safetensors.torch.load(bytes(message.payload)).items():
                sequences = message.meta["sequences"]
                pieces = scores.split([starts[s + 1] - starts[s] for s in sequences])
                for sequence, piece in zip(sequences, pieces, strict=True):
                    merged[name][starts[sequence] : starts[sequence + 1]] = piece
        return batch.replace(**merged)


class LogprobService(Service):
    """On every inference rank: `models` are its sharded copies, by the name of the batch field that each fills. The one
    for old_logprobs follows the policy, so the service takes weights as engines do."""

    name = "logprobs"
    kinds = ("score", "forward")

    def __init__(
        self,
        mail: Mail,
        scorers: list[int],
        models: Mapping[str, nn.Module],
        max_tokens: int,
        temperature: float,
        device: torch.device,
    ):
        self.version = 0
        self.models = models
        self._mail, self._scorers, self._max_tokens = mail, scorers, max_tokens
        self._temperature, self._device = temperature, device

    def landings(self, tensors: Sequence[TensorInfo]) -> Landings:
        """Of the copy that follows the policy: this rank's rows of each tensor."""
        index = self._scorers.index(self._mail.rank)
        parts = {part.info.name: part for part in local_slices(self.models["old_logprobs"])}
        ours = {name: part.info.shape for name, part in parts.items()}
        theirs = {info.name: info.shape for info in tensors}
        assert ours == theirs, f"this rank's copy is of another model: {set(ours.items()) ^ set(theirs.items())}"
        landed = []
        for number, info in enumerate(tensors):
            first, _ = info.rows(index, len(self._scorers)) if info.sharded else (0, 0)
            data = parts[info.name].data.view(1, -1)
            landed.append(Landing(number, Region(first * info.row_elements, 1, data.numel(), 0), data))
        return Landings(tensors, [landing for landing in landed if landing.region.num_elements])

    def begin_version(self) -> None:
        self.version = 0
        reshard(self.models["old_logprobs"])

    def confirm(self, version: int) -> None:
        self.version = version

    def probe(self, tokens: list[int]) -> list[float]:
        """On every inference rank, since a forward of the sharded copy is a collective."""
        return learner_logprobs(self.models["old_logprobs"], tokens, self._device)

    def handle(self, message: Message) -> None:
        if message.kind == "score":
            self._cut(message)
        else:
            self._forward(message)

    def _cut(self, message: Message) -> None:
        batch = Batch.from_bytes(message.payload)
        lengths = batch.lengths.tolist()
        parts = split_evenly(costs_of(lengths, hidden_size_of(self.models["old_logprobs"])), len(self._scorers))
        count = max(count_micro_batches([lengths[s] for s in part], self._max_tokens) for part in parts)
        for rank, part in zip(self._scorers, parts, strict=True):
            meta = {
                "actor": message.source,
                "version": message.meta["version"],
                "fields": message.meta["fields"],
                "sequences": part,
                "num_micro_batches": count,
            }
            self._mail.send(rank, "forward", meta, batch.select(part).to_bytes())

    def _forward(self, message: Message) -> None:
        meta = message.meta
        assert meta["version"] == self.version, (
            f"asked for logprobs of version {meta['version']}, this rank holds {self.version}"
        )
        batch = Batch.from_bytes(message.payload)
        hidden_size = hidden_size_of(self.models["old_logprobs"])
        micro_batches = cut(batch, self._max_tokens, hidden_size, meta["num_micro_batches"])
        scores = score_fields(self.models, meta["fields"], batch, micro_batches, self._temperature, self._device)
        self._mail.send(meta["actor"], "scores", {"sequences": meta["sequences"]}, safetensors.torch.save(scores))
