"""A rebuilt engine gets its version from another engine, chunk by chunk, and samples only when it is proven."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.config.schema import SyncConfig
from rl.data.prompts import Prompt
from rl.model.shards import TensorInfo
from rl.placement.roles import plan
from rl.rollout.dispatch import NewTasks, Sampling, Task
from rl.rollout.engine import Completion
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.followers import RebuildEngine, StepEngine
from rl.rollout.recovery import EngineHost
from rl.rollout.service import RolloutService
from rl.sync.digest import TensorPart
from rl.sync.donation import AskChunk, ChunkedMemory, DonationError, WeightChunk, WeightDonation
from rl.sync.layout import Destination, MemoryLayout, OpaqueLoader, Region
from rl.sync.plan import Plan
from rl.sync.probe import make_probe
from rl.sync.weights import SyncSettings, WeightSync
from rl.world.messages import Letter, Message
from rl.world.orders import Order
from rl.world.world import World
from tests.mails import Mark, connected_worlds, take
from tests.unit.test_reward_service import NUM_SAMPLES, STOP, Rewards, Tokenizer

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
VERSION = 6
MAX_BYTES = 256
QUIET_S = 0.3  # after this time without a message, none is on its way
TENSORS = (
    TensorInfo("embedding", (24, 8), "float32", sharded=True),  # 384 bytes per rank: rows of two chunks
    TensorInfo("o_proj", (6, 16), "bfloat16", sharded=True),  # cut by columns
    TensorInfo("norm", (200,), "float32", sharded=True),  # whole on each rank: one row in four chunks
    TensorInfo("scale", (), "float32", sharded=False),
)


def regions(tp_rank: int, tp_size: int) -> list[Region]:
    rows, columns = 24 // tp_size, 16 // tp_size
    embedding = Region(tp_rank * rows * 8, rows, 8, 8)
    return [embedding, Region(tp_rank * columns, 6, columns, 16), Region(0, 1, 200, 0), Region(0, 1, 1, 0)]


class TensorEngine(FakeEngine):
    """Holds weights as a tensor-parallel engine does: parts of tensors, inside larger parameters, with padding."""

    def __init__(self, tp_rank: int, tp_size: int):
        super().__init__(8, STOP)
        self._regions = regions(tp_rank, tp_size)
        self.views: list[Tensor] = []
        self.padding = torch.full((3,), 9.0)
        self.opaque_reason = ""

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> Any:
        if self.opaque_reason:
            return OpaqueLoader(lambda stream: None, self.opaque_reason)
        for info, region in zip(tensors, self._regions, strict=True):
            parameter = torch.full((region.num_rows + 2, region.num_columns + 3), -1.0, dtype=info.torch_dtype)
            view = parameter[1:-1, 1:-2]
            self.views.append(view if region.num_rows > 1 else view.as_strided(view.shape, (0, 1)))
        destinations = [Destination(i, r, view) for i, (r, view) in enumerate(zip(self._regions, self.views))]
        return MemoryLayout(tensors, destinations, zeros=[self.padding])

    def fill(self) -> None:
        """Hold the version: each element is a hash of its place in the whole tensor."""
        for index, (region, view) in enumerate(zip(self._regions, self.views, strict=True)):
            places = torch.arange(region.num_rows).unsqueeze(1) * region.row_stride + torch.arange(region.num_columns)
            view.copy_(torch.sin((places + region.start + 1000 * index).double()))
        self.padding.zero_()
        self.confirm(VERSION)


class BrokenTensorEngine(TensorEngine):
    def step(self) -> list[Completion]:
        raise ZeroDivisionError("planted")


@dataclass
class Rank:
    world: World
    host: EngineHost
    donation: WeightDonation
    service: RolloutService
    rewards: Rewards

    @property
    def engine(self) -> Any:
        return self.host.engine

    def take(self, kind: type[Message]) -> None:
        self.service.handle(take(self.world.mail, kind))

    def handle(self) -> bool:
        """Handle one message, as the serve loop does. Return whether there was one."""
        by_kind: dict[Any, Any] = {kind: service for service in (self.donation, self.service) for kind in service.kinds}
        letter = self.world.mail.receive_within(0.02, *by_kind)
        if letter is not None:
            by_kind[type(letter.message)].handle(letter)
        return letter is not None


class Engines:
    """Several engines, and a leader as the last rank. Everything runs in this thread."""

    def __init__(self, worlds: list[World], num_engines: int, tp: int):
        self.leader, self.tp = worlds[-1].mail, tp
        spec = {"rollout": f"0-{num_engines * tp - 1}", "actor": str(self.leader.rank)}
        self.placement = plan(spec, 1, len(worlds), tp)
        # More elements than a bucket holds, so no transfer is possible here; the plan is used for its size alone.
        sync_plan = Plan(TENSORS, (self.leader.rank,), tuple(self.placement.receivers), MAX_BYTES)
        settings = SyncSettings(self.placement, sync_plan, [None], SyncConfig(), CPU, make_probe(32, 16, 1e-3))
        places = [(rank, place) for ranks in self.placement.engines for place, rank in enumerate(ranks)]
        engines = [TensorEngine(place, tp) for _, place in places]
        with ThreadPoolExecutor(len(worlds)) as pool:  # all ranks compare their plans
            receivers: list[Any] = [[engine] for engine in engines] + [[]]
            built = [
                pool.submit(WeightSync, world.mail, settings, None, each, VERSION)
                for world, each in zip(worlds, receivers, strict=True)
            ]
            syncs = [future.result(20) for future in built]
        self.ranks = []
        for (rank, place), engine, sync in zip(places, engines, syncs):
            ranks = next(each for each in self.placement.engines if rank in each)
            host = EngineHost(worlds[rank], ranks, engine, lambda failed, place=place: TensorEngine(place, tp))
            host.sync = sync
            host.donation = WeightDonation(worlds[rank].mail, settings, sync, lambda host=host: host.engine)
            tokenizer: Any = Tokenizer()
            rewards: Any = Rewards(worlds[rank].mail)
            service = RolloutService(worlds[rank], host, rewards, tokenizer, 4, 8, self.leader.rank)
            self.ranks.append(Rank(worlds[rank], host, host.donation, service, rewards))
            engine.fill()

    def start(self, lead: int, *positions: int) -> None:
        tasks = [
            Task(
                2, position, self.leader.rank, Prompt(position, 0, "", "", [11]), Sampling(NUM_SAMPLES, 1.0, 9), VERSION
            )
            for position in positions
        ]
        self.ranks[lead].service.handle(Letter(self.leader.rank, NewTasks(tasks)))
        if self.tp > 1:
            self.pump()  # followers take the requests

    def fail(self, lead: int) -> None:
        """Let the engine fail in its next step, on all of its ranks."""
        for rank in next(ranks for ranks in self.placement.engines if lead in ranks):
            self.ranks[rank].engine.__class__ = BrokenTensorEngine
        followers = [self.ranks[rank] for rank in self.ranks[lead].host.followers]
        with ThreadPoolExecutor(4) as pool:  # the lead waits until they report the failure
            steps = [pool.submit(lambda each=each: each.take(StepEngine)) for each in followers]
            self.ranks[lead].service.work()
        for step in steps:
            step.result()

    def pump(self) -> None:
        """Let all ranks handle messages until there are none."""
        quiet_at = time.monotonic()
        while time.monotonic() < quiet_at + QUIET_S:
            if sum(rank.handle() for rank in self.ranks):
                quiet_at = time.monotonic()

    def sample(self, lead: int) -> None:
        while self.ranks[lead].service.busy:
            self.ranks[lead].service.work()
        self.pump()

    def assert_filled(self, *ranks: int) -> None:
        for rank in ranks:
            engine = self.ranks[rank].engine
            wanted = TensorEngine(rank % self.tp, self.tp)
            wanted.memory_layout(TENSORS)
            wanted.fill()
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(engine.views, wanted.views, strict=True))
            assert engine.padding.tolist() == [0.0] * 3
            assert engine.version == VERSION


Make = Callable[..., Engines]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Make:
    def build(num_engines: int, tp: int = 1) -> Engines:
        worlds = connected_worlds(num_engines * tp + 1)
        request.addfinalizer(lambda: worlds.__exit__(None, None, None))
        return Engines(worlds.__enter__(), num_engines, tp)

    return build


def samples(engines: Engines, lead: int) -> list[tuple[Any, ...]]:
    """Return what was sampled, without the number of the attempt."""
    return sorted((*key[:3], response) for key, _, response, _ in engines.ranks[lead].rewards.calls)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_gets_its_version_from_another_one_and_samples_the_same(
    tp: int, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    engines, whole = make(2, tp), make(2, tp)
    lead = tp
    for each in (engines, whole):
        each.start(lead, 0, 1)
    engines.fail(lead)
    rebuilt = engines.ranks[lead]
    assert rebuilt.engine.version == 0 and not rebuilt.service.busy
    assert rebuilt.donation.awaited == "weights from rank 0"
    engines.start(lead, 2)  # in the middle: it waits with the rest
    engines.pump()
    engines.assert_filled(*range(lead, lead + tp))
    assert rebuilt.donation.awaited == ""
    whole.start(lead, 2)
    for each in (engines, whole):
        each.sample(lead)
    assert samples(engines, lead) == samples(whole, lead)
    assert len(samples(engines, lead)) == 3 * NUM_SAMPLES
    rebuilt.world.mail.send(engines.leader.rank, Mark())
    assert isinstance(take(engines.leader, Order, Mark).message, Mark), "nothing is published again"
    text = f"oneworld: the rebuilt engine of rank {lead} (engine 1) got version 6 of the weights from rank 0 (engine 0)"
    assert capsys.readouterr().out.count(text) == 1


def test_a_donor_gives_one_chunk_per_message_and_none_exceeds_the_limit(make: Make) -> None:
    """Between two chunks it makes an engine step, if it has work."""
    engines = make(2)
    donor, receiver = engines.ranks
    engines.start(0, 0)
    engines.start(1, 1)
    engines.fail(1)
    num_chunks = 0
    while not receiver.engine.version:
        assert donor.service.busy
        donor.donation.handle(take(donor.world.mail, AskChunk))
        letter = take(receiver.world.mail, WeightChunk)
        assert 0 < len(letter.payload) <= MAX_BYTES
        assert donor.world.mail.receive_within(0.02, AskChunk) is None, "the next chunk is asked for afterwards"
        receiver.donation.handle(letter)
        num_chunks += 1
    num_bytes = sum(view.numel() * view.dtype.itemsize for view in donor.engine.views)
    assert num_chunks >= num_bytes / MAX_BYTES > 4


def test_the_lead_samples_when_all_of_its_ranks_hold_the_version(make: Make) -> None:
    engines = make(2, tp=2)
    lead, follower = engines.ranks[2:]
    engines.start(2, 0)
    engines.fail(2)
    follower.take(RebuildEngine)
    while lead.donation.awaited == "weights from rank 0":
        engines.ranks[0].handle()  # and not rank 1, which gives the follower its weights
        lead.handle()
    assert lead.donation.awaited == "weights on the other ranks of its engine"
    assert not lead.service.busy and lead.engine.version == 0
    engines.pump()
    engines.assert_filled(2, 3)
    assert lead.service.busy


def test_donors_are_asked_in_order_and_one_that_lost_the_version_is_left_out(make: Make) -> None:
    """Engine 0 fails in the middle of its donation, and engine 2 gives everything to both."""
    engines = make(3)
    for rank in range(3):
        engines.start(rank, rank)
    engines.fail(1)
    engines.ranks[0].donation.handle(take(engines.ranks[0].world.mail, AskChunk))
    engines.ranks[1].donation.handle(take(engines.ranks[1].world.mail, WeightChunk))
    engines.fail(0)
    assert engines.ranks[0].donation.awaited == "weights from rank 1"
    assert engines.ranks[1].donation.awaited == "weights from rank 0"
    engines.pump()
    engines.assert_filled(0, 1, 2)
    for rank in range(3):
        engines.sample(rank)
        assert len(samples(engines, rank)) == NUM_SAMPLES


def test_without_a_donor_that_holds_the_version_the_rank_ends(make: Make) -> None:
    engines = make(2)
    for rank in range(2):
        engines.start(rank, rank)
    for rank in range(2):
        engines.fail(rank)
    with pytest.raises(DonationError) as raised:
        engines.pump()
    text = str(raised.value)
    assert text.startswith("the engine of rank ") and "must get version 6 of the weights from another engine" in text
    assert "holds no version, because it was rebuilt too. The actors already train the next version" in text
    assert "The run resumes from the last checkpoint. To keep the world alive after such an error, use more" in text


@pytest.mark.parametrize("is_opaque", [False, True])
def test_an_engine_that_cannot_get_its_version_is_not_rebuilt(is_opaque: bool, make: Make) -> None:
    engines = make(2 if is_opaque else 1)
    rank = engines.ranks[0]
    if is_opaque:
        rank.host.sync.remove_receiver(rank.engine)
        rank.host.sync._has_opaque, rank.engine.opaque_reason = True, "it packs its layers"
        rank.host.sync.add_receiver(rank.engine)
    engines.start(0, 0)
    failed = rank.engine
    with pytest.raises(DonationError, match=r"^the engine of rank 0 failed \(ZeroDivisionError: planted\)") as raised:
        engines.fail(0)
    reason = "cannot be copied from another engine: it packs its layers" if is_opaque else "it is the only engine"
    assert reason in str(raised.value) and "resumes from the last checkpoint" in str(raised.value)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert rank.engine is failed


@pytest.mark.parametrize("chunk", [0, -1])
def test_what_arrived_in_another_way_is_named_and_not_sampled_from(
    chunk: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = make(2)
    engines.start(1, 0)
    write = ChunkedMemory.write

    def write_wrong(memory: ChunkedMemory, index: int, payload: bytearray) -> None:
        if index == range(memory.num_chunks)[chunk]:
            payload[-1] ^= 1
        write(memory, index, payload)

    monkeypatch.setattr(ChunkedMemory, "write", write_wrong)
    engines.fail(1)
    wrong = "embedding" if chunk == 0 else "scale"
    text = rf"rank 1 \(engine 1\) holds other values than rank 0 \(engine 0\) sent of {wrong};"
    with pytest.raises(DonationError, match=text):
        engines.pump()
    assert engines.ranks[1].engine.version == 0


def test_memory_that_is_overwritten_after_its_chunk_was_written_is_found(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests are taken of what the engine holds at the end, not of what arrived."""
    engines = make(2)
    engines.start(1, 0)
    write = ChunkedMemory.write

    def write_more(memory: ChunkedMemory, index: int, payload: bytearray) -> None:
        write(memory, index, payload)
        if index == memory.num_chunks - 1:
            engines.ranks[1].engine.views[1][0, 0] += 1

    monkeypatch.setattr(ChunkedMemory, "write", write_more)
    engines.fail(1)
    with pytest.raises(DonationError, match="sent of o_proj;"):
        engines.pump()


def test_a_donor_with_other_places_refuses(make: Make) -> None:
    engines = make(2)
    engines.start(1, 0)
    sync: Any = engines.ranks[0].host.sync
    layout = sync.layout_of(engines.ranks[0].engine)
    sync._receivers = [(engines.ranks[0].engine, MemoryLayout(TENSORS, layout.destinations[1:]))]
    engines.fail(1)
    with pytest.raises(DonationError, match=r"rank 0 \(engine 0\) has placed its weights in another way"):
        engines.pump()


@pytest.mark.parametrize("rank", [0, 1])
def test_no_version_may_be_published_meanwhile(rank: int, make: Make) -> None:
    engines = make(2)
    engines.start(1, 0)
    engines.fail(1)
    sync: Any = engines.ranks[rank].host.sync
    sync.version = VERSION + 1
    with pytest.raises(AssertionError, match="version 7 was published while an engine takes version 6"):
        engines.pump()


@pytest.mark.parametrize("max_bytes", [16, 32, 48, 80, 256, 1 << 20])
def test_chunks_cover_everything_once(max_bytes: int) -> None:
    engine = TensorEngine(1, 2)
    memory = ChunkedMemory(engine.memory_layout(TENSORS), max_bytes, CPU)
    engine.fill()
    other = TensorEngine(1, 2)
    copy = ChunkedMemory(other.memory_layout(TENSORS), max_bytes, CPU)
    assert copy.fingerprint == memory.fingerprint
    total = torch.zeros(len(TENSORS), 2, dtype=torch.int32)
    for chunk in range(memory.num_chunks):
        payload, digests = memory.read(chunk)
        assert len(payload) <= max_bytes
        total += torch.frombuffer(bytearray(digests), dtype=torch.int32).view(-1, 2)
        copy.write(chunk, bytearray(payload))
    assert all(torch.equal(*views) for views in zip(engine.views, other.views, strict=True))
    assert torch.equal(copy.digests(), total) and torch.equal(memory.digests(), total)
    parts: list[TensorPart] = [piece.part for chunk in memory._chunks for piece in chunk]
    sizes = [sum(part.values.numel() for part in parts if part.tensor == index) for index in range(len(TENSORS))]
    assert sizes == [region.num_elements for region in regions(1, 2)]
