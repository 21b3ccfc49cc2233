"""SharedWeights: what a searcher in another process reads is what the trainer published, whole or not at all."""

import gc
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from runtime.weights import DIRTY, LATEST, Overtaken, SharedWeights

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 120  # seconds that a process may take to answer; only a failing test waits that long
needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks into /proc (Linux)")


ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu, id="cuda-ipc")


@pytest.fixture(params=[pytest.param("cpu", id="shared-memory"), ON_GPU])
def make(request):
    """make(named_tensors): a SharedWeights for them, in each kind of memory."""
    return lambda named_tensors: SharedWeights.like(named_tensors, request.param)


def mixed(seed=0):
    """Tensors of many kinds: odd sizes, scalars, an empty one, one that isn't contiguous, special values."""
    g = torch.Generator().manual_seed(seed)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    return [
        ("embed", torch.randn(67, 33, generator=g)),
        ("half", torch.randn(7, 3, 5, generator=g).bfloat16()),
        ("scale", torch.randn((), generator=g)),
        ("half_scalar", torch.randn((), generator=g).bfloat16()),
        ("double", torch.randn(11, generator=g, dtype=torch.float64)),
        ("fp16", torch.randn(1, generator=g).half()),
        ("bytes", torch.randint(256, (13,), generator=g, dtype=torch.uint8)),
        ("mask", torch.rand(17, generator=g) < 0.5),
        ("count", torch.tensor(2**40 + seed)),
        ("none", torch.zeros(0, 4)),
        ("turned", torch.randn(5, 9, generator=g).T),
        ("special", special.roll(seed)),
        ("parameter", torch.nn.Parameter(torch.randn(3, 1, generator=g))),
    ]


def bits(tensor):
    """What a tensor is, to the last bit: NaN and -0 included."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw


def snapshot(named_tensors):
    return [(name, bits(t)) for name, t in named_tensors]


# --- a second process -----------------------------------------------------------------------------------------------


def reader(pipe):
    """Body of a reading process: does what it is told through the pipe and answers."""
    while True:
        what, *args = pipe.recv()
        if what == "hold":
            (weights,) = args
            weights.device = weights.slots.device  # where a searcher would want its copies
        elif what == "read":
            version, tensors = weights.read(*args)
            pipe.send((version, snapshot(tensors)))
        elif what == "version":
            pipe.send(weights.version)
        elif what == "watch":
            pipe.send(watch(weights, *args))
        elif what == "read for ever":
            pipe.send(None)
            while True:
                weights.read()
        elif what == "names":
            pipe.send(names_of(weights))
        else:
            return


def watch(weights, snapshots):
    """Read that many snapshots, as fast as can be; their versions, and what was wrong with them."""
    versions, wrong = [], []
    while len(versions) < snapshots:
        version, tensors = weights.read(PATIENCE)
        versions.append(version)
        for name, t in tensors:
            if not torch.equal(t, torch.full_like(t, value_of(version, t.dtype))):
                wrong.append((version, name, t.unique().tolist()[:5]))
    return versions, wrong


def value_of(version, dtype):
    """What every element of a snapshot holds in the test of torn reads: exact in each dtype, another each time."""
    return version % 251 if dtype == torch.uint8 else version % (128 if dtype == torch.bfloat16 else 2**24)


def names_of(weights):
    """Files behind the shared memory of a SharedWeights, as the kernel tells them: `/dev/shm/... (deleted)`."""
    names = []
    for tensor in (weights.slots, weights.header):
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                names.append(" ".join(line.split()[5:]))
    return names


class Reader:
    """A reading process and the pipe to it."""

    def __init__(self):
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=reader, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *what):
        self.pipe.send(what)

    def answer(self):
        assert self.pipe.poll(PATIENCE), "the reading process said nothing"
        return self.pipe.recv()

    def ask(self, *what):
        self.tell(*what)
        return self.answer()

    def end(self):
        if self.process.is_alive():
            self.tell("end")
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None


@pytest.fixture(scope="module")
def other():
    """A reading process that lives through all tests: `other.tell("hold", weights)` gives it a handle."""
    one = Reader()
    yield one
    one.end()
    assert one.process.exitcode == 0


@pytest.fixture
def victims():
    """Two reading processes to be killed."""
    two = [Reader(), Reader()]
    yield two
    for one in two:
        one.process.kill()
        one.process.join()


def test_another_process_reads_what_was_published_to_the_last_bit(make, other):
    weights = make(mixed())
    weights.publish(mixed(0), 0)
    other.tell("hold", weights)
    assert other.ask("read") == (0, snapshot(mixed(0)))
    for version in (1, 2, 5):  # both slots, and versions left out
        weights.publish(mixed(version), version)
        assert other.ask("version") == version
        assert other.ask("read") == (version, snapshot(mixed(version)))
    assert other.ask("read") == (5, snapshot(mixed(5)))  # again


def test_the_snapshot_outlives_what_it_was_made_from(make, other):
    """The producer may free its tensors, and its handle too."""
    source = mixed(3)
    want = snapshot(source)
    weights = make(source)
    weights.publish(source, 7)
    other.tell("hold", weights)
    assert other.ask("version") == 7
    del source, weights
    gc.collect()
    litter = [torch.randn(67, 33) for _ in range(50)]  # whatever takes the freed memory
    assert other.ask("read") == (7, want)
    assert len(litter) == 50


@pytest.mark.parametrize("reads", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_reader_beside_a_writer_that_never_rests_sees_whole_snapshots_only(make, other, reads):
    """... in growing order of versions. Every element is looked at."""
    shapes = [("a", (300, 301), torch.float32), ("b", (511, 3), torch.bfloat16), ("c", (70_001,), torch.uint8)]
    tensors = [(name, torch.zeros(shape, dtype=dtype)) for name, shape, dtype in shapes]
    weights = make(tensors)
    weights.publish(tensors, 0)
    other.tell("hold", weights)
    assert other.ask("version") == 0
    other.tell("watch", reads)
    version, deadline = 0, time.monotonic() + PATIENCE
    while not other.pipe.poll() and time.monotonic() < deadline:
        version += 1
        for _, t in tensors:
            t.fill_(value_of(version, t.dtype))
        weights.publish(tensors, version)
    versions, wrong = other.answer()
    assert wrong == []
    assert versions == sorted(versions) and len(set(versions)) > reads / 50  # they did meet
    assert version > reads / 5


def test_a_killed_reader_harms_nobody(make, victims, other):
    """It holds no lock that would stay taken: the writer goes on, and so does the next reader."""
    weights = make(mixed())
    weights.publish(mixed(0), 0)
    for one in (*victims, other):
        one.tell("hold", weights)
    for one in victims:
        one.ask("read for ever")
    for version in range(1, 200):
        weights.publish(mixed(version % 5), version)
        if version in (70, 140):
            one = victims[version // 140].process
            one.kill()
            one.join(PATIENCE)
            assert one.exitcode == -9
    assert other.ask("read") == (199, snapshot(mixed(199 % 5)))


@needs_proc
def test_nothing_is_left_in_dev_shm(victims):
    """The memory has no name from the start, in either process, so no end of any process can leave one behind."""
    weights = SharedWeights.like(mixed())
    weights.publish(mixed(0), 0)
    killed, ended = victims
    for one in victims:
        one.tell("hold", weights)
    for names in (names_of(weights), killed.ask("names"), ended.ask("names")):
        assert len(names) == 2 and all(name.endswith("(deleted)") for name in names), names
    pids = [str(p) for p in (os.getpid(), killed.process.pid, ended.process.pid)]
    killed.ask("read for ever")
    killed.process.kill()
    killed.process.join(PATIENCE)
    ended.end()
    del weights
    gc.collect()
    # torch's names hold the process id; other programs' files come and go meanwhile
    left = [name for name in os.listdir("/dev/shm") if set(name.split("_")) & set(pids)]
    assert left == []


# --- one process ----------------------------------------------------------------------------------------------------


def test_what_was_read_is_private(make):
    weights = make(mixed())
    weights.publish(mixed(1), 1)
    _, tensors = weights.read()
    for version in (2, 3, 4):
        weights.publish(mixed(version), version)
    assert snapshot(tensors) == snapshot(mixed(1))
    for _, t in tensors:
        t.zero_()
    assert weights.read()[0] == 4 and snapshot(weights.read()[1]) == snapshot(mixed(4))


def test_a_snapshot_may_be_in_the_searchers_dtype(make):
    """... which rounds floating-point tensors and leaves the others."""
    source = mixed(4)
    weights = SharedWeights.like(source, make(source).slots.device, torch.bfloat16)
    weights.publish(source, 0)
    for (name, got), (_, t) in zip(weights.read()[1], source, strict=True):
        want = t.bfloat16() if t.dtype.is_floating_point else t
        assert bits(got) == bits(want), name
    assert weights.slots.nbytes < make(source).slots.nbytes
    with pytest.raises(ValueError, match="not the tensors"):
        weights.publish(renamed(source), 1)


def test_publishing_takes_a_copy(make):
    source = [("w", torch.ones(5))]
    weights = make(source)
    weights.publish(source, 0)
    source[0][1].zero_()
    assert weights.read()[1][0][1].tolist() == [1.0] * 5


def test_versions_grow(make):
    weights = make(mixed())
    assert weights.version == -1
    weights.publish(mixed(0), 3)
    for version in (3, 2, -1):
        with pytest.raises(ValueError, match=f"version {version} must be above the published 3"):
            weights.publish(mixed(1), version)
    assert weights.version == 3 and snapshot(weights.read()[1]) == snapshot(mixed(0))
    weights.publish(mixed(1), 4)
    assert weights.version == 4


def renamed(tensors):
    return [("other", tensors[0][1]), *tensors[1:]]


def reshaped(tensors):
    return [(tensors[0][0], tensors[0][1].T), *tensors[1:]]


def another_dtype(tensors):
    """A silent conversion would lose bits of every weight, for ever."""
    return [(tensors[0][0], tensors[0][1].bfloat16()), *tensors[1:]]


def swapped(tensors):
    return [tensors[1], tensors[0], *tensors[2:]]


@pytest.mark.parametrize("wrong", [renamed, reshaped, another_dtype, swapped, lambda t: t[:-1], lambda t: [*t, t[0]]])
def test_other_tensors_than_those_of_the_layout_are_refused(make, wrong):
    weights = make(mixed())
    weights.publish(mixed(0), 0)
    with pytest.raises(ValueError, match="not the tensors"):
        weights.publish(wrong(mixed(1)), 1)
    assert weights.read()[0] == 0 and snapshot(weights.read()[1]) == snapshot(mixed(0))


def test_a_publication_may_come_from_a_generator(make):
    weights = make(t for t in mixed())
    weights.publish((t for t in mixed(2)), 0)
    assert snapshot(weights.read()[1]) == snapshot(mixed(2))


def test_reading_before_the_first_publication_says_so(make):
    weights = make(mixed())
    with pytest.raises(Overtaken, match="nothing was published"):
        weights.read(timeout=0.01)


# --- overtaken ------------------------------------------------------------------------------------------------------

SIZE = 1000


def filled(value):
    return [("w", torch.full((SIZE,), float(value)))]


@pytest.fixture
def halfway(make, monkeypatch):
    """A writer, a reader on the same memory, and a list: what is called halfway through each copy that is read."""
    writer = make(filled(0))
    writer.publish(filled(0), 0)
    reader = SharedWeights(writer.layout, writer.slots, writer.header)
    slots = [reader.slots[i].data_ptr() for i in (0, 1)]
    meanwhile, whole_copy = [], torch.Tensor.copy_

    def copy_(target, source, *args, **kwargs):
        if source.data_ptr() not in slots:
            return whole_copy(target, source, *args, **kwargs)
        middle = len(source) // 2
        whole_copy(target[:middle], source[:middle])
        if meanwhile:
            meanwhile.pop(0)()
        whole_copy(target[middle:], source[middle:])
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return writer, reader, meanwhile


def publish_twice(writer):
    """The second overwrites the slot that was the newest before."""
    for _ in range(2):
        writer.publish(filled(writer.version + 1), writer.version + 1)


def test_a_copy_that_was_overtaken_is_made_again(halfway):
    writer, reader, meanwhile = halfway
    meanwhile += [lambda: publish_twice(writer)] * 3
    version, tensors = reader.read()
    assert version == 6 and meanwhile == []
    assert torch.equal(tensors[0][1], filled(6)[0][1])


def test_a_copy_that_the_writer_did_not_touch_stays_valid(halfway):
    """One publication goes into the other slot."""
    writer, reader, meanwhile = halfway
    meanwhile.append(lambda: writer.publish(filled(1), 1))
    version, tensors = reader.read()
    assert version == 0 and torch.equal(tensors[0][1], filled(0)[0][1])


def test_a_reader_that_is_always_overtaken_says_so(halfway):
    writer, reader, meanwhile = halfway
    meanwhile += [lambda: publish_twice(writer)] * 100_000
    with pytest.raises(Overtaken, match="overtook every copy"):
        reader.read(timeout=0.05)
    assert reader.version == writer.version > 2


def test_a_slot_that_is_being_written_is_never_taken(halfway):
    """The writer has begun to overwrite what is being read, and does not end (or was killed)."""
    writer, reader, meanwhile = halfway

    def publish_and_begin_another():
        writer.publish(filled(1), 1)
        writer.header[0 if writer.header[LATEST] else 1] = DIRTY
        writer.slots[0 if writer.header[LATEST] else 1][:] = 7

    meanwhile.append(publish_and_begin_another)
    for _ in range(3):
        version, tensors = reader.read()
        assert version == reader.version == 1 and torch.equal(tensors[0][1], filled(1)[0][1])
    writer.publish(filled(2), 2)  # a writer that lives goes on
    assert reader.read()[0] == 2 and torch.equal(reader.read()[1][0][1], filled(2)[0][1])


def test_the_writer_marks_a_slot_before_its_first_byte_and_stamps_it_after_the_last(make, monkeypatch):
    seen, whole_copy = [], torch._foreach_copy_
    two = [("v", torch.zeros(3)), ("w", torch.zeros(3))]
    weights = make(two)
    for version in (0, 1, 2):  # both slots hold one
        weights.publish(two, version)
    newest = int(weights.header[LATEST])

    def copy_(targets, sources, **_):
        for target, source in zip(targets, sources, strict=True):
            for _ in range(2):  # before and after
                seen.append((int(weights.header[1 - newest]), int(weights.header[newest]), weights.version))
                if len(seen) % 2:
                    whole_copy([target], [source])

    monkeypatch.setattr(torch, "_foreach_copy_", copy_)
    weights.publish(two, 3)
    assert seen == [(DIRTY, 2, 2)] * 4
    assert int(weights.header[1 - newest]) == 3 and weights.version == 3


# --- memory ---------------------------------------------------------------------------------------------------------


def memory():
    """Bytes of this process by kind, shared memory included, and its open files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kinds = {kind: int(status[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem")}
    kinds["gpu"] = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return kinds, len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


@needs_proc
def test_unread_publications_take_no_memory(make, other):
    """200 of 4 MB each, with a reader that never reads."""
    tensors = [("w", torch.zeros(1_000_000)), ("v", torch.zeros(10))]
    weights = make(tensors)
    weights.publish(tensors, 0)
    other.tell("hold", weights)
    assert other.ask("version") == 0
    for version in (1, 2):  # both slots are in memory now
        weights.publish(tensors, version)
    (before, files, maps), total = memory(), 4_000_000
    for version in range(3, 203):
        weights.publish(tensors, version)
    after, files_after, maps_after = memory()
    assert after["RssShmem"] - before["RssShmem"] < total and after["RssAnon"] - before["RssAnon"] < 5 * total
    assert after["gpu"] == before["gpu"]
    assert files_after <= files + 2 and maps_after <= maps + 20
    assert other.ask("version") == 202
