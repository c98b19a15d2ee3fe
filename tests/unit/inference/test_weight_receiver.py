"""Weight transfer between memories: both ends, with a double for the device (tests/support/cpu_transfer.py)."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from prime_rl.configs.training.broadcast import IPCBroadcastConfig, NCCLBroadcastConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.inference.worker.weight_receiver import WeightReceiver
from prime_rl.storage.artifact import ArtifactError
from prime_rl.storage.tensor_hashes import content_hash
from prime_rl.storage.wait_for import DeadlineError
from prime_rl.storage.weights.transfer_channel import ChannelError, TransferDescriptor, connect
from prime_rl.trainer.weight_sync import memory_sender as sender
from prime_rl.trainer.weight_sync.memory_sender import WeightSender
from prime_rl.trainer.weight_sync.transport import raw_tensors
from tests.support import cpu_transfer
from tests.support.cpu_transfer import Communicator
from tests.support.vllm_modules import needs_vllm
from tests.unit.inference.test_shadow_weights import _weights
from tests.unit.inference.test_worker_weight_update import _staging_threads, _until, make_gated, update

pytestmark = needs_vllm

CONFIGS = {"nccl": NCCLBroadcastConfig, "ipc": IPCBroadcastConfig}


def make_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(33, 7, generator=generator).to(torch.bfloat16),
        "block.weight": torch.randn(64, 48, generator=generator),
        "scale": torch.tensor(float(seed)),
        "ids": torch.arange(seed, seed + 12).reshape(3, 4),
    }


class Trainer:
    """The sending side, and the content of its manifests."""

    def __init__(self, kind, timeout, copies):
        self.sender = WeightSender(CONFIGS[kind](port=0, timeout_seconds=timeout), torch.device("cpu"))
        self.kind, self.timeout, self.copies = kind, timeout, copies

    def publish(self, seed):
        tensors = make_tensors(seed)
        raw = raw_tensors(tensors)
        hashes = {name: tensor.digest(name) for name, tensor in raw.items()}
        digest = content_hash(hashes)
        self.sender.evict_old_versions()
        self.sender.add_version(digest, f"0.{seed}", tensors)
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in raw.items()}
        offer = TransferDescriptor(self.kind, "localhost", self.sender.port, self.sender.session, self.timeout, shapes)
        return {**offer.fields(), "hash": digest, "copies": self.copies, "group": "g"}, hashes


@pytest.fixture
def start(monkeypatch, tmp_path):
    cpu_transfer.install(monkeypatch.setattr, tmp_path)
    monkeypatch.setattr(sender, "_BUFFER_BYTES", 8192)  # several buffers
    trainers = []

    def start(kind="nccl", timeout=120, copies=1):
        trainers.append(Trainer(kind, timeout, copies))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.sender.close()
    for thread in threading.enumerate():
        if thread.name == "transfer":  # in code of torch, where the end of the process would abort it
            thread.join(120)
            assert not thread.is_alive()


def worker(rank=0):
    """A receiver of a worker, in a server of several engines with one worker each."""
    parallel = SimpleNamespace(data_parallel_index=rank, data_parallel_size=1, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return WeightReceiver(SimpleNamespace(device=torch.device("cpu"), vllm_config=config))


def fetch(receiver, request, hashes, **options):
    return dict(receiver.receive(request, hashes, **options))


def assert_equal(received, seed):
    expected = make_tensors(seed)
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_receive_several_versions_uses_one_group(start, kind, monkeypatch):
    opened = []
    open_engine = sender.open_engine
    monkeypatch.setattr(sender, "open_engine", lambda *a: opened.append(1) or open_engine(*a))
    trainer, receiver = start(kind), worker()
    for seed in (1, 2, 3):
        assert_equal(fetch(receiver, *trainer.publish(seed)), seed)
    assert opened == [1]
    receiver.leave()


def is_closed(connection):
    """Whether the other side closes the connection; raises after 60 s."""
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_sender_hello_that_is_too_long_is_refused_before_it_is_read(start):
    trainer = start()
    with socket.create_connection(("localhost", trainer.sender.port)) as stranger:
        stranger.sendall((2**16 + 1).to_bytes(4, "big") + b"{")
        assert is_closed(stranger)
    assert_equal(fetch(worker(), *trainer.publish(1)), 1)


def test_workers_of_one_server_receive_concurrently(start):
    trainer = start(copies=3)
    receivers = [worker(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for seed in (1, 2):
            request = trainer.publish(seed)
            for received in pool.map(fetch, receivers, *zip(*[request] * 3, strict=True)):
                assert_equal(received, seed)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_changed_byte_raises_an_error_with_the_tensor(start, monkeypatch, kind):
    trainer = start(kind)
    request, hashes = trainer.publish(1)
    altered = {**hashes, "block.weight": "0" * 32}
    with pytest.raises(ArtifactError, match=r"tensor block.weight from the trainer at localhost:\d+ differs from its"):
        fetch(worker(), request, altered)

    def flip(data):
        data[-1] ^= 1

    if kind == "nccl":
        monkeypatch.setattr(Communicator, "corrupt", staticmethod(flip))
        with pytest.raises(ArtifactError, match=r"differs from its manifest: it has another hash"):
            fetch(worker(), {**request, "group": "again"}, hashes)
        monkeypatch.undo()


def test_error_of_one_worker_reaches_the_others_and_the_next_group_works(start):
    trainer = start(copies=2)
    request, hashes = trainer.publish(1)
    receivers = [worker(rank) for rank in range(2)]
    altered = [{**hashes, "ids": "0" * 32}, hashes]
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(fetch, receiver, request, known) for receiver, known in zip(receivers, altered, strict=True)
        ]
        with pytest.raises(ArtifactError, match="tensor ids"):
            answers[0].result()
        with pytest.raises(ChannelError, match=r"version 0.1 was not sent: worker 0 .*tensor ids .* another hash"):
            answers[1].result()
        again = {**request, "group": "again"}
        for received in pool.map(lambda receiver: fetch(receiver, again, hashes), receivers):
            assert_equal(received, 1)
    trainer.sender.check()


def test_death_of_a_worker_ends_the_transfer_of_the_others(start, monkeypatch):
    trainer = start(timeout=200, copies=2)
    request, hashes = trainer.publish(1)
    staying, dying = (worker(rank) for rank in range(2))

    over = threading.Event()

    def die(*_):
        dying._membership.channel.disconnect()
        over.wait()  # in the middle of a collective

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(fetch, staying, request, hashes)
        receiving = dying.receive(request, hashes)
        collector = dying._member(TransferDescriptor.parse(request), "g", 2)._collector
        monkeypatch.setattr(collector, "load_weights", die)
        dead = pool.submit(next, receiving)
        with pytest.raises(ChannelError, match=r"version 0.1 was not sent: worker 1 of inference .* disconnected"):
            answer.result(120)
        over.set()
        assert isinstance(dead.exception(), ChannelError)
    trainer.sender.check()
    request, hashes = trainer.publish(2)
    assert_equal(fetch(worker(), {**request, "copies": 1, "group": "new"}, hashes), 2)


def test_death_of_the_trainer_raises_at_once(start):
    trainer, receiver = start(timeout=200), worker()
    request, hashes = trainer.publish(1)
    with pytest.raises(ChannelError, match=r"the trainer at localhost:\d+ disconnected"):
        for _ in receiver.receive(request, hashes):
            for group in list(trainer.sender._groups.values()):
                for channel in group.channels:
                    channel.disconnect()
    trainer.sender.close()
    with pytest.raises(ChannelError, match=r"the trainer at localhost:\d+ cannot be reached at localhost:"):
        fetch(worker(), {**request, "group": "later"}, hashes)


def test_missing_worker_is_named_in_the_error(start):
    trainer = start(timeout=0.5, copies=2)
    request, hashes = trainer.publish(1)
    with pytest.raises((ChannelError, DeadlineError), match=r"waited 0 s for (workers \[1\] of 2|the trainer)"):
        fetch(worker(), request, hashes)


def test_transfer_that_cannot_be_aborted_raises_in_the_trainer(start, monkeypatch):
    """A worker dies while the NCCL group is formed; the trainer's call returns only when all members have joined."""
    never = threading.Event()
    monkeypatch.setattr(sender, "_ABORT_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint", lambda info: never.wait())
    trainer = start()
    request, _ = trainer.publish(1)
    dying = connect("localhost", trainer.sender.port, 60, "the trainer")
    dying.send({"session": request["session"], "group": "g", "rank": 0, "workers": 1, "name": "worker 0"})
    dying.send({"want": request["hash"]})
    assert dying.receive(60)["do"] == "init"
    dying.close()
    deadline = time.monotonic() + 120
    with pytest.raises(RunError, match=r"cannot send version 0.1, and cannot abort .*: worker 0 disconnected"):
        while time.monotonic() < deadline:
            trainer.sender.check()
    never.set()


def test_receive_of_an_older_version_raises(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    for seed in (2, 3):
        trainer.publish(seed)
    with pytest.raises(ChannelError, match=r"no longer has the version in memory; its newest version is 0.3"):
        fetch(worker(), request, hashes)


def test_third_version_waits_until_the_first_is_sent(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    receiving = worker().receive(request, hashes)
    next(receiving)
    trainer.publish(2)
    third = threading.Thread(target=trainer.publish, args=(3,), daemon=True)
    third.start()
    third.join(0.1)
    assert third.is_alive()
    assert len(list(receiving)) == len(hashes) - 1
    third.join(120)
    assert not third.is_alive()


def test_cancelled_receive_discards_the_rest_and_leaves_the_group(start, tmp_path):
    trainer, receiver = start(), worker()
    request, hashes = trainer.publish(1)
    fetch(receiver, request, hashes)
    version = update.StagedVersion("v2", tmp_path, {})
    request, hashes = trainer.publish(2)
    with pytest.raises(update.Cancelled):
        for _ in receiver.receive(request, hashes, version.check):
            version.cancelled.set()
    request, hashes = trainer.publish(3)
    assert_equal(fetch(receiver, {**request, "group": "next"}, hashes), 3)


def test_overtaken_version_does_not_leave_the_group_of_the_next(start, tmp_path, monkeypatch):
    """Both use one `WeightReceiver`, one after the other."""
    one, model, root = make_gated(tmp_path)
    monkeypatch.setitem(globals(), "make_tensors", lambda seed: _weights(float(seed)))
    vars(one._worker.vllm_config)["parallel_config"] = worker()._worker.vllm_config.parallel_config
    trainer = start()
    request, hashes = trainer.publish(5)
    one.stage("v5", str(root), hashes, request)
    assert model.entered.wait(120)
    one.drop("v5")
    request, hashes = trainer.publish(6)
    one.stage("v6", str(root), hashes, {**request, "group": "next"})
    _until(lambda: one.state("v6")["state"] == "staged", seconds=0.2)  # times out unless version 6 fails to wait
    model.gate.set()
    assert _until(lambda: one.state("v6")["state"] != "staging" and not _staging_threads())
    assert one.state("v6") == {**one.state("v6"), "state": "staged", "error": ""}
    assert one._receiver._membership.name[1] == "next", "it stays a member for the next version"
    one.load("v6")
    assert torch.equal(model.second.weight, torch.full((3, 3), 18.0))
    trainer.sender.check()


def test_sender_serves_its_session_on_a_port_of_its_own(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    with pytest.raises(ChannelError, match="this is not the trainer that published the version"):
        fetch(worker(), {**request, "session": "guessed"}, hashes)
    with pytest.raises(ConfigError, match=r"weight_broadcast.port: cannot listen on 127.0.0.1:\d+ \(Address already"):
        WeightSender(NCCLBroadcastConfig(port=trainer.sender.port), torch.device("cpu"))
