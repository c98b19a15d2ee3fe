"""Weights that go from memory to memory: both ends, over a double for the device (tests/support/cpu_transfer.py)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from prime_rl.configs.broadcast import IPCBroadcastConfig, NCCLBroadcastConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.inference.reading import Cancelled
from prime_rl.inference.transfer import Receiver
from prime_rl.run.artifact import ArtifactError
from prime_rl.run.channel import ChannelError, connect
from prime_rl.run.offer import Offer
from prime_rl.run.tensors import content_hash
from prime_rl.run.wait import DeadlineError
from prime_rl.trainer.publication import sending
from prime_rl.trainer.publication.files import raw_tensors
from prime_rl.trainer.publication.sending import Sender
from tests.support import cpu_transfer
from tests.support.cpu_transfer import Communicator

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
    """The sending side, and what its manifests say."""

    def __init__(self, kind, timeout, copies):
        self.sender = Sender(CONFIGS[kind](port=0, timeout=timeout), torch.device("cpu"))
        self.kind, self.timeout, self.copies = kind, timeout, copies

    def publish(self, seed):
        tensors = make_tensors(seed)
        raw = raw_tensors(tensors)
        hashes = {name: tensor.digest(name) for name, tensor in raw.items()}
        digest = content_hash(hashes)
        self.sender.make_room()
        self.sender.hold(digest, f"0.{seed}", tensors)
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in raw.items()}
        offer = Offer(self.kind, "localhost", self.sender.port, self.sender.session, self.timeout, shapes)
        return {**offer.fields(), "hash": digest, "copies": self.copies, "group": "g"}, hashes


@pytest.fixture
def start(monkeypatch, tmp_path):
    cpu_transfer.install(monkeypatch.setattr, tmp_path)
    monkeypatch.setattr(sending, "_BUFFER_BYTES", 8192)  # several buffers
    trainers = []

    def start(kind="nccl", timeout=20, copies=1):
        trainers.append(Trainer(kind, timeout, copies))
        return trainers[-1]

    yield start
    for trainer in trainers:
        trainer.sender.close()
    for thread in threading.enumerate():
        if thread.name == "transfer":  # in code of torch, where the end of the process would abort it
            thread.join(20)
            assert not thread.is_alive()


def worker(rank=0):
    """A place in a server of several engines with one worker each."""
    parallel = SimpleNamespace(data_parallel_index=rank, data_parallel_size=1, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return Receiver(SimpleNamespace(device=torch.device("cpu"), vllm_config=config))


def fetch(receiver, request, hashes, **options):
    return dict(receiver.receive(request, hashes, **options))


def assert_equal(received, seed):
    expected = make_tensors(seed)
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_versions_arrive_one_after_the_other_in_one_group(start, kind, monkeypatch):
    opened = []
    open_engine = sending.open_engine
    monkeypatch.setattr(sending, "open_engine", lambda *a: opened.append(1) or open_engine(*a))
    trainer, receiver = start(kind), worker()
    for seed in (1, 2, 3):
        assert_equal(fetch(receiver, *trainer.publish(seed)), seed)
    assert opened == [1]
    receiver.leave()


def test_all_workers_of_a_server_receive_at_once(start):
    trainer = start(copies=3)
    receivers = [worker(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for seed in (1, 2):
            request = trainer.publish(seed)
            for received in pool.map(fetch, receivers, *zip(*[request] * 3, strict=True)):
                assert_equal(received, seed)


def test_two_servers_are_served_one_after_the_other(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    with ThreadPoolExecutor(2) as pool:
        for received in pool.map(lambda name: fetch(worker(), {**request, "group": name}, hashes), "ab"):
            assert_equal(received, 1)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_a_byte_that_changes_on_the_way_is_found_and_named(start, monkeypatch, kind):
    trainer = start(kind)
    request, hashes = trainer.publish(1)
    altered = {**hashes, "block.weight": "0" * 32}
    with pytest.raises(ArtifactError, match=r"tensor block.weight from the trainer at localhost:\d+ is not what was"):
        fetch(worker(), request, altered)

    def flip(data):
        data[-1] ^= 1

    if kind == "nccl":
        monkeypatch.setattr(Communicator, "garble", staticmethod(flip))
        with pytest.raises(ArtifactError, match=r"is not what was published: it has another hash"):
            fetch(worker(), {**request, "group": "again"}, hashes)
        monkeypatch.undo()


def test_what_goes_wrong_at_one_worker_is_told_to_the_others_and_the_next_group_works(start):
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


def test_a_worker_that_dies_in_the_middle_frees_the_others_at_once(start, monkeypatch):
    trainer = start(timeout=60, copies=2)
    request, hashes = trainer.publish(1)
    staying, dying = (worker(rank) for rank in range(2))

    over = threading.Event()

    def die(*_):
        dying._joined.channel.hang_up()
        over.wait()  # in the middle of a collective

    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(fetch, staying, request, hashes)
        receiving = dying.receive(request, hashes)
        collector = dying._member(Offer.parse(request), "g", 2)._collector
        monkeypatch.setattr(collector, "load_weights", die)
        dead = pool.submit(next, receiving)
        begun = time.monotonic()
        with pytest.raises(ChannelError, match=r"version 0.1 was not sent: worker 1 of inference .* has gone"):
            answer.result(20)
        assert time.monotonic() - begun < 10
        over.set()
        assert isinstance(dead.exception(), ChannelError)
    trainer.sender.check()
    request, hashes = trainer.publish(2)
    assert_equal(fetch(worker(), {**request, "copies": 1, "group": "new"}, hashes), 2)


def test_a_trainer_that_dies_is_noticed_at_once(start):
    trainer, receiver = start(timeout=60), worker()
    request, hashes = trainer.publish(1)
    begun = time.monotonic()
    with pytest.raises(ChannelError, match=r"the trainer at localhost:\d+ has gone"):
        for _ in receiver.receive(request, hashes):
            for group in list(trainer.sender._groups.values()):
                for channel in group.channels:
                    channel.hang_up()
    trainer.sender.close()
    with pytest.raises(ChannelError, match=r"the trainer at localhost:\d+ cannot be reached at localhost:"):
        fetch(worker(), {**request, "group": "later"}, hashes)
    assert time.monotonic() - begun < 15


def test_a_worker_that_never_comes_is_named(start):
    trainer = start(timeout=0.5, copies=2)
    request, hashes = trainer.publish(1)
    with pytest.raises((ChannelError, DeadlineError), match=r"waited 0 s for (workers \[1\] of 2|the trainer)"):
        fetch(worker(), request, hashes)


def test_a_worker_that_does_not_answer_is_named(start):
    trainer = start(timeout=1, copies=2)
    request, hashes = trainer.publish(1)
    silent = connect("localhost", trainer.sender.port, 5, "the trainer")
    silent.send({"session": request["session"], "group": "g", "rank": 1, "workers": 2, "name": "the silent one"})
    silent.send({"want": request["hash"]})
    with pytest.raises((ChannelError, DeadlineError)):
        fetch(worker(), request, hashes)
    silent.close()


def test_what_cannot_be_aborted_ends_the_run(start, monkeypatch):
    """A worker dies while the NCCL group is formed: its trainer is inside one call that only the last member ends."""
    never = threading.Event()
    monkeypatch.setattr(sending, "_ABORT_S", 0.2)
    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint", lambda info: never.wait())
    trainer = start(timeout=5)
    request, _ = trainer.publish(1)
    dying = connect("localhost", trainer.sender.port, 5, "the trainer")
    dying.send({"session": request["session"], "group": "g", "rank": 0, "workers": 1, "name": "worker 0"})
    dying.send({"want": request["hash"]})
    assert dying.receive(5)["do"] == "init"
    dying.close()
    deadline = time.monotonic() + 20
    with pytest.raises(RunError, match=r"cannot send version 0.1, and cannot leave the transfer: worker 0 has gone"):
        while time.monotonic() < deadline:
            trainer.sender.check()
    never.set()


def test_a_version_that_is_no_longer_held_is_refused(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    for seed in (2, 3):
        trainer.publish(seed)
    with pytest.raises(ChannelError, match=r"no longer in the trainer's memory; the newest there is 0.3"):
        fetch(worker(), request, hashes)


def test_a_third_version_waits_until_the_first_is_sent(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    receiving = worker().receive(request, hashes)
    next(receiving)
    trainer.publish(2)
    third = threading.Thread(target=trainer.publish, args=(3,), daemon=True)
    third.start()
    third.join(0.3)
    assert third.is_alive()
    assert len(list(receiving)) == len(hashes) - 1
    third.join(20)
    assert not third.is_alive()


def test_an_overtaken_worker_receives_to_the_end_and_leaves(start):
    trainer, receiver = start(), worker()
    request, hashes = trainer.publish(1)
    fetch(receiver, request, hashes)
    cancelled = threading.Event()
    request, hashes = trainer.publish(2)
    with pytest.raises(Cancelled):
        for _ in receiver.receive(request, hashes, cancelled.is_set):
            cancelled.set()
    request, hashes = trainer.publish(3)
    assert_equal(fetch(receiver, {**request, "group": "next"}, hashes), 3)


def test_only_who_has_read_the_manifest_is_served(start):
    trainer = start()
    request, hashes = trainer.publish(1)
    with pytest.raises(ChannelError, match="this is not the trainer that published the version"):
        fetch(worker(), {**request, "session": "guessed"}, hashes)


def test_a_port_in_use_is_a_clear_error(start):
    trainer = start()
    with pytest.raises(ConfigError, match=r"weight_broadcast.port: cannot listen on localhost:\d+ \(Address already"):
        Sender(NCCLBroadcastConfig(port=trainer.sender.port), torch.device("cpu"))
