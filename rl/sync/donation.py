"""Give a rebuilt engine the weights of another engine, the donor, and verify them.

With rollout.ahead=1, the actors already train the next version while engines sample. If an engine fails then, they
cannot publish its version again. But every other engine still holds it.

    rank of the rebuilt engine --AskChunk-->     rank with the same place in the donor
                               <--WeightChunk--  one chunk per message, between two steps of the donor
    follower                   --PartFilled-->   lead, which samples again when all ranks hold the version

Engines have equal sizes, so ranks with the same place hold the same regions of each tensor. Each rank sends and
receives in its main thread: large messages between two I/O threads could block each other.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.sync.digest import NUM_SUMS, Digests, TensorPart
from rl.sync.layout import Destination, MemoryLayout, OpaqueLoader
from rl.sync.plan import aligned
from rl.sync.verification import Verifier, differing, digest_rows
from rl.sync.weights import Receiver, SyncSettings, WeightSync
from rl.watch.heart import HEART
from rl.watch.ledger import Awaited
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


class DonationError(RuntimeError):
    """A rebuilt engine cannot get its version. torchrun restarts the world from the last checkpoint."""


@dataclass(frozen=True)
class AskChunk(Message):
    """Ask a rank of another engine for a part of its weights."""

    version: int
    chunk: int
    layout: str  # `ChunkedMemory.fingerprint` of the receiver


@dataclass(frozen=True)
class WeightChunk(Message):
    """Answer AskChunk. The payload is the chunk, unless the donor refuses."""

    chunk: int
    digests: bytes = b""  # of what the donor holds, by tensor
    refusal: str = ""  # why the donor cannot give its weights, as the end of a sentence about it; empty: it can


@dataclass(frozen=True)
class PartFilled(Message):
    """Tell the lead that a follower holds the verified weights."""

    version: int


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and its place in a chunk."""

    part: TensorPart  # its values are a view of the engine's memory
    bytes: slice  # in the chunk


class ChunkedMemory:
    """The weights in the memory of one engine rank, cut into chunks of at most `max_bytes`."""

    def __init__(self, layout: MemoryLayout, max_bytes: int, device: torch.device):
        self._num_tensors, self._device = len(layout.regions), device
        parts = [part for destination in layout.destinations for part in _cut(destination, max_bytes)]
        self._chunks = list(_pack(parts, max_bytes))
        places = [(p.tensor, p.start, p.row_stride, tuple(p.values.shape), str(p.dtype)) for p in parts]
        # Two ranks with equal fingerprints have the same chunks.
        self.fingerprint = hashlib.sha256(repr((places, max_bytes)).encode()).hexdigest()

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    @torch.no_grad()
    def read(self, chunk: int) -> tuple[memoryview, bytes]:
        """Return the bytes of a chunk, and the digests of the memory that they were read from."""
        buffer = torch.empty(self._chunks[chunk][-1].bytes.stop, dtype=torch.uint8, device=self._device)
        self._copy(chunk, buffer, is_read=True)
        return buffer.cpu().numpy().data, self._digest(chunk).to_bytes()

    @torch.no_grad()
    def write(self, chunk: int, payload: bytes | bytearray) -> None:
        self._copy(chunk, torch.frombuffer(payload, dtype=torch.uint8).to(self._device), is_read=False)

    @torch.no_grad()
    def digests(self) -> Tensor:
        """Return the digests of everything that the memory holds now, by tensor."""
        return self._digest(*range(self.num_chunks)).result()

    def _copy(self, chunk: int, buffer: Tensor, is_read: bool) -> None:
        memory = [piece.part.values for piece in self._chunks[chunk]]
        packed = [
            buffer[piece.bytes].view(values.dtype).view(values.shape)
            for piece, values in zip(self._chunks[chunk], memory, strict=True)
        ]
        torch._foreach_copy_(packed if is_read else memory, memory if is_read else packed)

    def _digest(self, *chunks: int) -> Digests:
        digests = Digests(self._num_tensors, self._device)
        for chunk in chunks:
            digests.add([piece.part for piece in self._chunks[chunk]])
        return digests


def _cut(destination: Destination, max_bytes: int) -> Iterator[TensorPart]:
    """Cut a region into parts of at most `max_bytes`: whole rows, or columns of a row that is longer. Values keep the
    engine's own dtype."""
    tensor, region, target = destination.tensor, destination.region, destination.target
    num_columns = min(region.num_columns, max_bytes // target.dtype.itemsize)
    num_rows = max_bytes // (num_columns * target.dtype.itemsize)
    for row in range(0, region.num_rows, num_rows):
        for column in range(0, region.num_columns, num_columns):
            values = target[row : row + num_rows, column : column + num_columns]
            start = region.start + row * region.row_stride + column
            yield TensorPart(tensor, values, start, region.row_stride, target.dtype)


def _pack(parts: Iterable[TensorPart], max_bytes: int) -> Iterator[list[Piece]]:
    """Put consecutive parts together into chunks. Each part starts at an aligned byte."""
    chunk: list[Piece] = []
    for part in parts:
        size, start = part.values.numel() * part.dtype.itemsize, aligned(chunk[-1].bytes.stop) if chunk else 0
        if start + size > max_bytes:
            yield chunk
            chunk, start = [], 0
        chunk.append(Piece(part, slice(start, start + size)))
    if chunk:
        yield chunk


@dataclass
class _Intake:
    """The state of a rebuilt rank that takes weights."""

    version: int
    donors: list[int]  # ranks to ask; the first one is giving its weights
    sent: Tensor  # digests of what it has sent, by tensor
    chunk: int = 0  # the next one
    refusals: list[str] = field(default_factory=list)


class WeightDonation(Service):
    """One engine rank's part in donations, as a donor and as a receiver."""

    name = "sync"
    kinds = (AskChunk, WeightChunk, PartFilled)

    def __init__(self, mail: Mailbox, settings: SyncSettings, sync: WeightSync, engine: Callable[[], Receiver]):
        placement, plan = settings.placement, settings.plan
        index = placement.engine_of(mail.rank)
        assert index is not None
        self._mail, self._sync, self._engine, self._tensors = mail, sync, engine, plan.tensors
        self._max_bytes, self._device = plan.bucket_bytes, settings.device
        self._ranks = placement.engines[index]
        place = self._ranks.index(mail.rank)
        self._donors = [ranks[place] for other, ranks in enumerate(placement.engines) if other != index]
        self._describe = Verifier(self._tensors, placement).describe
        self._memory: ChunkedMemory | None = None  # of the current engine, once it was needed
        self._intake: _Intake | None = None
        self._unfilled: set[int] = set()  # ranks of this engine that do not hold the version yet; only on the lead

    @property
    def awaited(self) -> str:
        if self._intake is not None:
            return Awaited(f"weights from rank {self._intake.donors[0]}", "rollout")
        return Awaited("weights on the other ranks of its engine", "rollout") if self._unfilled else ""

    def require_possible(self, error: Exception) -> None:
        """Raise DonationError if a rebuilt engine could get its version from no other engine. `error` is why it must
        be rebuilt."""
        layout = self._sync.layout_of(self._engine())
        if not self._donors:
            reason = "it is the only engine, so no other one holds its version"
        elif isinstance(layout, OpaqueLoader):
            reason = f"its weights cannot be copied from another engine: {layout.reason}"
        else:
            return
        text = f"the engine of rank {self._mail.rank} failed ({type(error).__name__}: {error}), and {reason}"
        raise DonationError(_with_remedy(text)) from error

    def release(self) -> None:
        """Drop all views of the engine's memory, before the engine is rebuilt."""
        self._memory = None

    @torch.no_grad()
    def begin(self, version: int) -> None:
        """Ask for the weights of the version that the engine held before it was rebuilt. All of its ranks call this."""
        engine, memory = self._engine(), self._get_memory()
        layout = self._sync.layout_of(engine)
        assert isinstance(memory, ChunkedMemory) and isinstance(layout, MemoryLayout), layout
        engine.begin_version()
        layout.fill_zeros()
        self._intake = _Intake(version, [*self._donors], self._no_digests())
        self._unfilled = set(self._ranks) if self._mail.rank == self._ranks[0] else set()
        self._ask(self._intake, memory)

    def handle(self, letter: Letter) -> None:
        match letter.message:
            case AskChunk():
                self._answer(letter.source, letter.message)
            case WeightChunk():
                self._take(letter)
            case PartFilled(version):
                self._mark_filled(letter.source, version)

    def _answer(self, rank: int, ask: AskChunk) -> None:
        self._require_version(ask.version)
        held, memory = self._engine().version, self._get_memory()
        if held != ask.version:
            refusal = f"holds version {held}" if held else "holds no version, because it was rebuilt too"
        elif isinstance(memory, OpaqueLoader):
            refusal = f"cannot be read ({memory.reason})"
        elif memory.fingerprint != ask.layout:
            refusal = "has placed its weights in another way"
        else:
            HEART.beat(f"chunk {ask.chunk + 1} of {memory.num_chunks} for rank {rank}")
            payload, digests = memory.read(ask.chunk)
            return self._mail.send(rank, WeightChunk(ask.chunk, digests), payload=payload)
        self._mail.send(rank, WeightChunk(ask.chunk, refusal=refusal))

    def _ask(self, intake: _Intake, memory: ChunkedMemory) -> None:
        self._mail.send(intake.donors[0], AskChunk(intake.version, intake.chunk, memory.fingerprint))

    def _take(self, letter: Letter[WeightChunk]) -> None:
        intake, memory, answer = self._intake, self._get_memory(), letter.message
        assert intake is not None and isinstance(memory, ChunkedMemory)
        assert (letter.source, answer.chunk) == (intake.donors[0], intake.chunk), f"chunk {answer.chunk} was not asked"
        self._require_version(intake.version)
        if answer.refusal:
            return self._ask_next_donor(intake, memory, answer.refusal)
        HEART.beat(f"chunk {intake.chunk + 1} of {memory.num_chunks} from rank {letter.source}")
        memory.write(answer.chunk, letter.payload)
        intake.sent += digest_rows(answer.digests)
        intake.chunk += 1
        if intake.chunk < memory.num_chunks:
            return self._ask(intake, memory)
        self._intake = None
        if names := differing(memory.digests(), intake.sent, self._tensors):
            raise DonationError(
                f"the rebuilt engine of {self._describe(self._mail.rank)} holds other values than "
                f"{self._describe(letter.source)} sent of {names}; both must be equal before it samples. The run "
                "resumes from the last checkpoint"
            )
        if self._mail.rank == self._ranks[0]:
            print(
                f"oneworld: the rebuilt engine of {self._describe(self._mail.rank)} got version {intake.version} of "
                f"the weights from {self._describe(letter.source)}",
                flush=True,
            )
            self._mark_filled(self._mail.rank, intake.version)
        else:
            self._engine().confirm(intake.version)
            self._mail.send(self._ranks[0], PartFilled(intake.version))

    def _ask_next_donor(self, intake: _Intake, memory: ChunkedMemory, refusal: str) -> None:
        """Ask the next donor for all chunks, because this one refused. It may have failed after it had sent some."""
        intake.refusals.append(f"{self._describe(intake.donors.pop(0))} {refusal}")
        if not intake.donors:
            self._intake = None
            text = f"the engine of {self._describe(self._mail.rank)} failed and was rebuilt, and it must get version "
            text += f"{intake.version} of the weights from another engine, but none can give it: "
            raise DonationError(_with_remedy(text + "; ".join(intake.refusals)))
        intake.chunk, intake.sent = 0, self._no_digests()
        self._ask(intake, memory)

    def _mark_filled(self, rank: int, version: int) -> None:
        """Confirm the version on the lead when all ranks of the engine hold it. The lead then starts to sample."""
        self._require_version(version)
        self._unfilled.remove(rank)
        if not self._unfilled:
            self._engine().confirm(version)

    def _require_version(self, version: int) -> None:
        """Check that no sync ran meanwhile. None can: it waits for the end of the round, which needs this engine."""
        published = self._sync.version
        assert published == version, f"version {published} was published while an engine takes version {version}"

    def _get_memory(self) -> ChunkedMemory | OpaqueLoader:
        if self._memory is None:
            layout = self._sync.layout_of(self._engine())
            if isinstance(layout, OpaqueLoader):
                return layout
            self._memory = ChunkedMemory(layout, self._max_bytes, self._device)
        return self._memory

    def _no_digests(self) -> Tensor:
        return torch.zeros(len(self._tensors), NUM_SUMS, dtype=torch.int32)


def _with_remedy(text: str) -> str:
    return (
        f"{text}. The actors already train the next version, so they cannot publish this one again. The run resumes "
        "from the last checkpoint. To keep the world alive after such an error, use more engines, or rollout.ahead=0"
    )
