"""CUDA IPC as far as it can be seen without a GPU: whose index goes where, who falls back to what, who still reads."""

import logging
import multiprocessing
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from config import Config, ConfigError
from runtime import cuda_ipc
from runtime.weights import Publisher, SharedWeights, ask_for, choose, make_publisher

TRAINER, OTHER = "GPU-aaaa", "GPU-bbbb"
MEMORY = torch.zeros(2, 64, dtype=torch.uint8)  # what a handle opens


# --- the device's index ---------------------------------------------------------------------------------------------


def test_the_receivers_own_index_is_found_by_uuid():
    assert cuda_ipc.local_index(TRAINER, [TRAINER]) == 0
    assert cuda_ipc.local_index(TRAINER, [OTHER, TRAINER]) == 1
    for visible in ([OTHER], []):
        with pytest.raises(LookupError, match=f"{TRAINER} is not among the visible ones"):
            cuda_ipc.local_index(TRAINER, visible)


@pytest.fixture
def cuda(monkeypatch):
    """torch's reductions and the devices' UUIDs, faked: `cuda.visible` is what this process sees."""

    class Fake:
        visible = [TRAINER]
        sent: list = []  # arguments of rebuild_cuda_tensor that were handed out
        rebuilt: list = []
        exports = 0

        def reduce_tensor(self, tensor):
            self.exports += 1
            arguments = [f"argument {i}" for i in range(15)]
            arguments[6], arguments[7] = 0, f"handle {self.exports}"  # device: the sender's index
            return "rebuild_cuda_tensor", tuple(arguments)

        def rebuild_cuda_tensor(self, *arguments):
            self.rebuilt.append(arguments)
            return MEMORY

    fake = Fake()
    fake.sent, fake.rebuilt = [], []
    monkeypatch.setattr(cuda_ipc.reductions, "reduce_tensor", fake.reduce_tensor)
    monkeypatch.setattr(cuda_ipc.reductions, "rebuild_cuda_tensor", fake.rebuild_cuda_tensor)
    monkeypatch.setattr(cuda_ipc, "uuids", lambda: fake.visible)
    return fake


def test_a_handle_names_the_device_by_uuid_and_is_rebuilt_with_the_receivers_index(cuda):
    handle = cuda_ipc.export(torch.zeros(3))
    assert handle[0] == TRAINER
    cuda.visible = [OTHER, TRAINER]  # now the receiver
    assert cuda_ipc.rebuild(handle) is MEMORY
    (arguments,) = cuda.rebuilt
    assert arguments[6] == 1 and arguments[7] == "handle 1"
    assert [a for i, a in enumerate(arguments) if i not in (6, 7)] == [
        f"argument {i}" for i in range(15) if i not in (6, 7)
    ]
    cuda.visible = [OTHER]
    with pytest.raises(LookupError):
        cuda_ipc.rebuild(handle)


def test_torch_still_has_the_device_where_we_change_it():
    """DEVICE is the place of `storage_device` among rebuild_cuda_tensor's arguments."""
    import inspect

    names = list(inspect.signature(cuda_ipc.reductions.rebuild_cuda_tensor).parameters)
    assert names[cuda_ipc.DEVICE] == "storage_device"
    assert "storage_device" in inspect.getsource(cuda_ipc.reductions.rebuild_cuda_tensor)
    text = inspect.getsource(cuda_ipc.reductions.reduce_tensor)  # it can't be run without a GPU
    assert text.index("tensor.dtype,\n                device,") < text.index("handle,  # identifier")


class OnGpu(torch.Tensor):
    """Host memory that says it were a GPU's."""

    is_cuda = True


def test_each_pickling_makes_a_handle_of_its_own(cuda):
    """torch counts references in it: a receiver that has ended would take the next one's memory away."""
    weights = SharedWeights([("w", (4,), torch.uint8)], torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(3).long())
    weights.slots = weights.slots.as_subclass(OnGpu)
    handles = []
    for _ in range(3):
        open_, arguments = weights.__reduce__()
        handles.append(arguments[1][1][7])
        assert arguments[0] == weights.layout and arguments[2] is weights.header
    assert handles == ["handle 1", "handle 2", "handle 3"]
    cuda.visible = [OTHER, TRAINER]
    received = open_(*arguments)
    assert received.layout == weights.layout and received.slots is MEMORY
    assert cuda.rebuilt[0][6] == 1


# --- which kind of memory -------------------------------------------------------------------------------------------

NO, GO = "shared-memory", "cuda-ipc"


@pytest.mark.parametrize(
    "wanted, on_gpu, problem, want",
    [
        ("auto", True, None, GO),
        ("auto", True, "no", NO),
        ("auto", False, None, NO),
        ("auto", False, "no", NO),
        ("shared-memory", True, None, NO),
        ("shared-memory", True, "no", NO),
        ("shared-memory", False, None, NO),
        ("shared-memory", False, "no", NO),
        ("cuda-ipc", True, None, GO),
        ("cuda-ipc", True, "the driver says no", "the driver says no"),
        ("cuda-ipc", False, None, "there is no GPU"),
        ("cuda-ipc", False, "the driver says no", "the driver says no"),
    ],
)
def test_the_choice(wanted, on_gpu, problem, want):
    if want in (NO, GO):
        assert choose(wanted, on_gpu, problem) == want
    else:
        with pytest.raises(ConfigError, match=f"^--weights cuda-ipc: {want}; use --weights shared-memory$"):
            choose(wanted, on_gpu, problem)


def test_an_owner_that_can_not_share_says_why(monkeypatch):
    def reduce_tensor(_):
        raise RuntimeError("CUDA error: operation not supported\nmany more lines")

    monkeypatch.setattr(cuda_ipc.reductions, "reduce_tensor", reduce_tensor)
    problem = cuda_ipc.problem(torch.device("cpu"))
    assert problem == "CUDA can't share memory here (CUDA error: operation not supported)"


def test_routes_in_words(monkeypatch):
    def device(i):
        return torch.device("cuda", i)

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    assert cuda_ipc.route(torch.device("cpu"), device(0)) == "from shared host memory"
    assert cuda_ipc.route(device(0), torch.device("cuda")) == "by CUDA IPC within one GPU"
    assert cuda_ipc.route(device(1), torch.device("cuda")) == "by CUDA IPC from GPU to GPU"
    assert cuda_ipc.route(device(2), torch.device("cuda")).endswith("through the host: they can't reach each other")


def test_the_measured_bandwidth_is_told():
    weights = SharedWeights.like([("w", torch.zeros(2**18))])
    weights.publish([("w", torch.ones(2**18))], 1)
    text = cuda_ipc.measured(weights)
    assert text.startswith("from shared host memory, 1.0 MiB at ") and text.endswith(" GB/s")
    assert float(text.split()[-2]) > 0


@pytest.mark.parametrize("engine, dtype", [("vllm", torch.bfloat16), ("hf", torch.float32)])
def test_the_trainer_publishes_in_the_searchers_dtype_wherever_it_can(monkeypatch, caplog, engine, dtype):
    """A trainer that is told it is on a GPU."""
    device = types.SimpleNamespace(type="cuda")
    named = [("w", torch.nn.Parameter(torch.arange(3.0)))]
    model = types.SimpleNamespace(device=device, named_parameters=lambda: named)
    for problem, kind in ((None, "cuda-ipc"), ("no CUDA IPC here", "shared-memory")):
        monkeypatch.setattr(cuda_ipc, "problem", lambda _, problem=problem: problem)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            publisher = make_publisher(Config(engine=engine), model, 5)
        assert [r.getMessage() for r in caplog.records] == [f"weights go through shared memory: {problem}"][
            : bool(problem)
        ]
        assert list(publisher._snapshots) == [kind]
        version, ((_, w),) = publisher.offer(None).read()
        assert version == 5 and w.dtype == dtype and w.tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="^--weights cuda-ipc: no CUDA IPC here; use --weights shared-memory$"):
        make_publisher(Config(engine=engine, weights="cuda-ipc"), model, 5)
    asked = Config(engine=engine, weights="shared-memory")
    assert list(make_publisher(asked, model, 5)._snapshots) == ["shared-memory"]


# --- handing out ----------------------------------------------------------------------------------------------------


class Unopenable(SharedWeights):
    """A snapshot whose handle does not open at the receiver, as CUDA's may not."""

    def __reduce__(self):
        return _cuda_says_no, ()


def _cuda_says_no():
    raise RuntimeError("CUDA error: invalid resource handle\nmore of that")


@pytest.fixture
def publisher(tmp_path):
    """A Publisher whose first snapshot nobody can open."""
    one = Publisher([("w", torch.arange(5.0))], 3, "cuda-ipc")  # of host memory, in truth
    one._snapshots["cuda-ipc"].__class__ = Unopenable
    one.address = str(tmp_path / "weights")
    one.hand_out(one.address)
    return one


def test_a_searcher_that_can_not_open_the_handle_gets_shared_memory_with_one_line(publisher, caplog):
    with caplog.at_level(logging.WARNING):
        weights = ask_for(publisher.address, lambda: True)
    (record,) = caplog.records
    assert record.getMessage() == "weights go through shared memory: CUDA error: invalid resource handle"
    assert type(weights) is SharedWeights and weights.read()[0] == 3
    assert weights.read()[1][0][1].tolist() == [0, 1, 2, 3, 4]
    publisher.publish([("w", torch.ones(5))], 4)  # both kinds
    assert weights.read()[0] == 4 and weights.read()[1][0][1].tolist() == [1] * 5
    assert publisher.offer("cuda-ipc").version == 4
    again = ask_for(publisher.address, lambda: True)  # a second searcher: no third snapshot
    assert again.read()[0] == 4 and set(publisher._snapshots) == {"cuda-ipc", "shared-memory"}


def test_a_searcher_that_must_not_fall_back_says_what_to_do(publisher):
    with pytest.raises(ConfigError, match="^--weights cuda-ipc: .* can't be opened: CUDA error.*use --weights shared"):
        ask_for(publisher.address, lambda: True, "cuda-ipc")


def test_the_second_kind_keeps_the_searchers_dtype():
    publisher = Publisher([("w", torch.tensor([1.001, 2.0])), ("n", torch.tensor([7]))], 0, "cuda-ipc", torch.bfloat16)
    other = publisher.offer("shared-memory")
    tensors = dict(other.read()[1])
    assert tensors["w"].dtype == torch.bfloat16 and tensors["w"].tolist() == [1.0, 2.0] and tensors["n"].item() == 7
    publisher.publish([("w", torch.tensor([3.001, 4.0])), ("n", torch.tensor([8]))], 1)
    assert dict(other.read()[1])["w"].tolist() == [3.0, 4.0]


def test_publishing_while_a_second_kind_is_made(tmp_path):
    """The thread that hands out and the training loop share the snapshots."""
    publisher = Publisher([("w", torch.zeros(200_000))], 0, "cuda-ipc")
    stop = threading.Event()

    def train():
        version = 0
        while not stop.is_set():
            version += 1
            publisher.publish([("w", torch.full((200_000,), float(version)))], version)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        other = publisher.offer("shared-memory")
        for _ in range(20):
            version, ((_, w),) = other.read()
            assert w.unique().tolist() == [version]
    finally:
        stop.set()
        thread.join()
    assert other.version == publisher.offer(None).version > 0


def read_and_wait(address, authkey, pipe):
    multiprocessing.current_process().authkey = authkey
    weights = ask_for(address, lambda: True)
    pipe.send(weights.read()[0])
    pipe.recv()


def test_the_trainer_knows_when_its_last_reader_has_gone(tmp_path):
    """Also one that was killed."""
    publisher = Publisher([("w", torch.zeros(3))], 0, "shared-memory")
    address = str(tmp_path / "weights")
    publisher.hand_out(address)
    assert publisher.wait_for_readers(5.0) == 0  # there was none
    ctx, readers = multiprocessing.get_context("spawn"), []
    for _ in range(2):
        pipe, theirs = ctx.Pipe()
        key = bytes(multiprocessing.current_process().authkey)
        process = ctx.Process(target=read_and_wait, args=(address, key, theirs), daemon=True)
        process.start()
        readers.append((process, pipe))
    for _, pipe in readers:
        assert pipe.poll(120) and pipe.recv() == 0
    assert publisher.wait_for_readers(0.1) == 2
    readers[0][0].kill()
    deadline = time.monotonic() + 60
    while publisher.wait_for_readers(0.1) == 2 and time.monotonic() < deadline:
        pass
    assert publisher.wait_for_readers(0.1) == 1
    readers[1][1].send("end")
    assert publisher.wait_for_readers(60.0) == 0
    assert Path(address).exists()  # it still serves
    for process, _ in readers:
        process.join()
