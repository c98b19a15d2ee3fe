"""Publishing during training: a version is complete or absent, and none is skipped (I4)."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import log_softmax

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.broadcast import FileBroadcastConfig, IPCBroadcastConfig, NCCLBroadcastConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.types import PolicyVersion
from prime_rl.storage.artifact import WEIGHTS_FORMAT, read_manifest, remove_artifact
from prime_rl.storage.paths import steps_in
from prime_rl.storage.tensor_hashes import content_hash, hash_tensors
from prime_rl.storage.wait_for import DeadlineError, wait_for
from prime_rl.storage.weights.transfer_channel import TransferDescriptor
from prime_rl.trainer.fsdp import shard_policy
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import join_world
from prime_rl.trainer.weight_sync import gather_plan, publisher, transport
from prime_rl.trainer.weight_sync.publisher import Publisher, canary_row, measure_canary, unsharded_copy
from prime_rl.trainer.weights.policy_loading import load_policy, make_policy
from tests.support.tiny_model import make_tiny_model
from tests.unit.trainer.world import _context, run_world

pytestmark = pytest.mark.extended

PATIENCE_SECONDS = 60


class Training:
    """A policy whose steps set every weight to a number, and the publisher of its versions."""

    def __init__(self, path, world, broadcast=FileBroadcastConfig(), *, dtype=torch.float32, **options):  # noqa: B008
        config = TrainerModelConfig(name=str(path))
        self.policy = shard_policy(load_policy(config, seed=0), config, world)
        tokenizer = load_tokenizer(TokenizerConfig(), config)
        self.publisher = Publisher(self.policy, tokenizer, dtype, world, broadcast, **options)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=1.0)
        self.publisher.guard(self.optimizer)

    def update(self, value=1.0):
        for parameter in self.policy.parameters():
            parameter.grad = parameter.detach() - value
        self.optimizer.step()


@pytest.fixture
def slow_disk(monkeypatch):
    """Writing waits at each file until `written` is released; `started` counts the files that wait or are written."""

    class Disk:
        started, written = threading.Semaphore(0), threading.Semaphore(0)

    write = transport.write_safetensors

    def slowly(path, tensors):
        Disk.started.release()
        assert Disk.written.acquire(timeout=PATIENCE_SECONDS)
        return write(path, tensors)

    monkeypatch.setattr(transport, "write_safetensors", slowly)
    return Disk


def test_start_with_slow_disk_returns_and_publishes_weights_of_its_step(tiny, world, weights, slow_disk):
    training = Training(tiny, world)
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    assert slow_disk.started.acquire(timeout=PATIENCE_SECONDS)
    for value in (1.0, 2.0, 3.0):
        training.update(value)
    assert training.publisher.metrics()["weight_sync/seconds"] is None
    assert steps_in(weights) == []
    slow_disk.written.release()
    training.publisher.close()
    assert hash_tensors(weights / "step_1") == hash_tensors(tiny)
    assert all((parameter.to_local() == 3.0).all() for parameter in training.policy.parameters())
    metrics = training.publisher.metrics()
    assert metrics["weight_sync/seconds"] > 0
    assert metrics["weight_sync/bytes"] >= (weights / "step_1/model.safetensors").stat().st_size


@pytest.mark.parametrize("late", ["copy", "canary"])
def test_update_waits_until_weights_are_copied_and_scored(tiny, world, weights, monkeypatch, late):
    config, may_go_on, updated = TrainerModelConfig(name=str(tiny)), threading.Event(), threading.Event()
    owner, name = (Publisher, "_run") if late == "copy" else (publisher, "measure_canary")
    original = getattr(owner, name)

    def wait_first(*arguments):
        assert may_go_on.wait(PATIENCE_SECONDS)
        return original(*arguments)

    canary_model = lambda: unsharded_copy(training.policy, config, world, torch.float32)  # noqa: E731
    training = Training(tiny, world, canary=torch.float32, canary_model=canary_model)
    expected = measure_canary(training.policy, canary_row(training.policy.vocabulary))()
    monkeypatch.setattr(owner, name, wait_first)
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    updating = threading.Thread(target=lambda: (training.update(), updated.set()), daemon=True)
    updating.start()
    assert not updated.wait(0.3)
    may_go_on.set()
    assert updated.wait(PATIENCE_SECONDS)
    training.publisher.close()
    assert hash_tensors(weights / "step_1") == hash_tensors(tiny)
    manifest = read_manifest(weights / "step_1", WEIGHTS_FORMAT)
    assert manifest["canary"]["logprobs"] == pytest.approx(expected, abs=1e-6)


def test_start_waits_for_previous_version_and_skips_none(tiny, world, weights, slow_disk, monkeypatch):
    training, seen = Training(tiny, world), []
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    slow_disk.started.acquire(timeout=PATIENCE_SECONDS)

    def release():
        seen.append(steps_in(weights))
        slow_disk.written.release()

    wait = training.publisher.wait
    training.update()
    with monkeypatch.context() as patch:
        patch.setattr(training.publisher, "wait", lambda: (threading.Timer(0.3, release).start(), wait()))
        training.publisher.start(weights / "step_2", PolicyVersion(0, 2))
    assert seen == [[]] and steps_in(weights) == [1]
    assert training.publisher.metrics()["time/publish_wait"] > 0.2
    slow_disk.written.release()
    training.publisher.close()
    assert steps_in(weights) == [1, 2]
    hashes = [read_manifest(weights / f"step_{step}", WEIGHTS_FORMAT)["hash"] for step in (1, 2)]
    assert hashes[0] != hashes[1]


def test_batch_wait_raises_publication_error(tiny, world, weights):
    training = Training(tiny, world)
    (weights / "step_1").mkdir(parents=True)
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    with pytest.raises(RunError, match="exists already"):
        wait_for(weights.parent / "rollouts" / "step_1", PATIENCE_SECONDS, "nobody", training.publisher.check)


def die_while_writing(path, weights):
    """Runs in a process of its own, which is killed when the second of three files is half written."""

    def stop(path, tensors):
        if "00001" in path.name:
            return write(path, tensors)
        path.write_bytes(b"half")
        (weights.parent / "now").touch()
        return threading.Event().wait()

    write, transport.write_safetensors = transport.write_safetensors, stop
    with join_world("cpu", 60) as world:
        training = Training(path, world, shard_bytes=60_000)
        training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
        training.publisher.close()


def test_kill_while_writing_leaves_no_version_and_next_run_cleans_up(tiny, world, weights):
    """I4."""
    process = _context.Process(target=die_while_writing, args=(tiny, weights))
    process.start()
    wait_for(weights.parent / "now", PATIENCE_SECONDS, "the test")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (left,) = weights.iterdir()
    assert left.name.startswith(".tmp-") and steps_in(weights) == []
    Training(tiny, world).publisher.publish(weights / "step_1", PolicyVersion(1, 1))
    assert [entry.name for entry in weights.iterdir()] == ["step_1"]
    assert read_manifest(weights / "step_1", WEIGHTS_FORMAT)["branch"] == 1


def publish_on_ranks(world, argument):
    """Runs on every rank: small files, so that all ranks write."""
    gather_plan._LEAST_FILE_BYTES = 1
    root = Path(argument)
    training = Training(root / "tiny", world, shard_bytes=30_000, canary=torch.float32)
    training.publisher.start(root / f"out{world.size}" / "step_1", PolicyVersion(0, 1))
    training.update()
    training.publisher.close()
    return [file.owner for file in training.publisher._plan.files]


def publish_from_one_rank(world, argument):
    """Runs on every rank: IPC is refused; the first one writes two versions, in full and as a delta."""
    gather_plan._LEAST_FILE_BYTES = 1
    root = Path(argument)
    with pytest.raises(ConfigError, match=r"'ipc' is for one trainer rank .* there are 2; use 'nccl' or"):
        Training(root / "tiny", world, IPCBroadcastConfig(port=0))
    options = FileBroadcastConfig(delta={})
    training = Training(root / "tiny", world, options, shard_bytes=30_000, num_writers=1)
    written, write = [], transport.fsync
    transport.fsync = lambda path: (written.append(path.name), write(path))
    for step in (1, 2):
        training.publisher.publish(root / "one" / f"step_{step}", PolicyVersion(0, step))
        training.update()
    training.publisher.close()
    return [len(written), [file.owner for file in training.publisher._plan.files]]


def test_publish_by_the_first_rank_alone_writes_all_files_there(tmp_path):
    """The other ranks may be on nodes that do not share its directory."""
    make_tiny_model(tmp_path / "tiny")
    (first, owners), (second, _) = run_world(2, publish_from_one_rank, str(tmp_path), tmp_path)
    assert len(owners) > 1 and set(owners) == {0}
    assert (first, second) == (2 * len(owners), 0)
    assert hash_tensors(tmp_path / "one/step_1") == hash_tensors(tmp_path / "tiny")
    assert read_manifest(tmp_path / "one/step_2", WEIGHTS_FORMAT)["delta"]["base"] == "step_1"


def test_publish_on_several_ranks_writes_the_bytes_of_one(tmp_path):
    """I9."""
    make_tiny_model(tmp_path / "tiny")
    manifests = []
    for size in (1, 4):
        (owners, *_) = run_world(size, publish_on_ranks, str(tmp_path), tmp_path)
        assert set(owners) == set(range(size))
        target = tmp_path / f"out{size}" / "step_1"
        manifests.append(read_manifest(target, WEIGHTS_FORMAT))
        assert manifests[-1]["tensors"] == hash_tensors(target) == hash_tensors(tmp_path / "tiny")
        assert manifests[-1]["hash"] == content_hash(manifests[-1]["tensors"])
        _, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
    for manifest in manifests[1:]:
        assert manifest["canary"]["token_ids"] == manifests[0]["canary"]["token_ids"]
        assert manifest["canary"]["logprobs"] == pytest.approx(manifests[0]["canary"]["logprobs"], abs=1e-5)


def test_canary_equals_published_model(tiny, world, weights):
    training = Training(tiny, world, canary=torch.float32)
    training.publisher.publish(weights / "step_1", PolicyVersion(0, 1))
    canary = read_manifest(weights / "step_1", WEIGHTS_FORMAT)["canary"]
    model = transformers.AutoModelForCausalLM.from_pretrained(weights / "step_1")
    tokens = torch.tensor(canary["token_ids"])
    with torch.no_grad():
        expected = log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
    assert len(tokens) == 64 and canary["dtype"] == "float32"
    assert canary["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("tied", "options"), [(True, {}), (False, {"ac": {}}), (True, {"lora": {"rank": 4}})])
def test_unsharded_copy_equals_policy_after_every_update(tmp_path, world, tied, options):
    config = TrainerModelConfig(name=str(make_tiny_model(tmp_path, tied)), **options)
    policy = make_policy(config, 0, world)
    canary_model = unsharded_copy(policy, config, world, torch.float32)
    row, before = canary_row(policy.vocabulary), None
    for scale in (0.9, 0.8):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(scale).add_(0.01)
        mine, its = measure_canary(policy, row)(), measure_canary(canary_model, row)()
        assert its == pytest.approx(mine, abs=1e-6) and its != before
        before = its
    assert unsharded_copy(policy, config, world, torch.bfloat16) is None  # another precision than that of the weights


def test_failing_canary_fails_the_publication_but_not_the_update(tiny, world, weights, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(publisher, "measure_canary", fail)
    training = Training(tiny, world, canary=torch.float32, canary_model=lambda: training.policy)
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    training.update()
    with pytest.raises(RuntimeError, match="out of memory"):
        training.publisher.close()
    assert steps_in(weights) == []


def test_directory_versions_are_linked_and_last_is_at_its_target(tiny, world, weights, tmp_path):
    memory = tmp_path / "memory"
    training = Training(tiny, world, FileBroadcastConfig(directory=memory))
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    training.publisher.start(weights / "step_2", PolicyVersion(0, 2), last=True)
    training.publisher.close()
    assert (weights / "step_1").is_symlink() and not (weights / "step_2").is_symlink()
    assert (weights / "step_1").resolve().is_relative_to(memory)
    assert steps_in(weights) == [1, 2]
    assert [read_manifest(weights / f"step_{n}", WEIGHTS_FORMAT)["step"] for n in (1, 2)] == [1, 2]
    remove_artifact(weights / "step_1")
    remove_artifact(weights / "step_1")
    assert steps_in(weights) == [2] and list(memory.glob("*/*")) == []


def test_directory_without_free_space_raises(tiny, world, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=r"t\.directory: .* has 0\.0 GiB free, but 3 versions need"):
        Training(tiny, world, FileBroadcastConfig(directory=tmp_path / "memory", delta={"full_interval": 10}))


def _hold_in_memory(world, argument):
    tiny, weights = map(Path, argument)
    training = Training(tiny, world, NCCLBroadcastConfig(port=0), shard_bytes=100_000)
    training.publisher.publish(weights / "step_1", PolicyVersion(0, 1))
    training.update()
    training.publisher.start(weights / "step_2", PolicyVersion(0, 2), last=True)
    training.publisher.wait()
    held = {}
    if world.is_main:
        sender = training.publisher._transport._sender
        versions = sender._versions.items()
        held = {digest: {n: t.tolist() for n, t in tensors.items()} for digest, (_, tensors) in versions}
    training.publisher.close()
    return held


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_transport_version_equals_files_and_last_is_in_files(tiny, tmp_path, weights, ranks):
    [held, *_] = run_world(ranks, _hold_in_memory, [str(tiny), str(weights)], tmp_path)
    manifest = read_manifest(weights / "step_1", WEIGHTS_FORMAT)
    assert not list((weights / "step_1").glob("*.safetensors"))
    assert manifest["tensors"] == hash_tensors(tiny)
    assert manifest["hash"] == content_hash(manifest["tensors"])
    assert held == {manifest["hash"]: {name: t.tolist() for name, t in load_file(tiny / "model.safetensors").items()}}
    offer = TransferDescriptor.parse(manifest["transfer"])
    assert offer.type == "nccl" and offer.tensors.keys() == manifest["tensors"].keys()
    last = read_manifest(weights / "step_2", WEIGHTS_FORMAT)
    assert "transfer" not in last and last["tensors"] == hash_tensors(weights / "step_2")


def test_hanging_disk_raises_at_the_deadline(tiny, world, weights, slow_disk):
    training = Training(tiny, world, FileBroadcastConfig(timeout_seconds=0.3))
    training.publisher.start(weights / "step_1", PolicyVersion(0, 1))
    assert slow_disk.started.acquire(timeout=PATIENCE_SECONDS)
    message = r"step_1 to be written \(weight_broadcast\.timeout_seconds\): .*disk of .*weights"
    with pytest.raises(DeadlineError, match=message):
        training.publisher.start(weights / "step_2", PolicyVersion(0, 2))
    assert steps_in(weights) == []
    holding = [thread for thread in threading.enumerate() if thread.name == "publication-end"]
    for thread in holding:  # these alone would keep the process from its end
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    slow_disk.written.release()
    wait_for(weights / "step_1", PATIENCE_SECONDS, "the disk")


def test_full_file_system_leaves_nothing_and_names_file_and_free_space(tiny, world, weights):
    training = Training(tiny, world)
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, earlier[1]))
    try:
        message = r"cannot publish .*step_1: File too large: .*model\.safetensors \(.* MiB free"
        with pytest.raises(RunError, match=message):
            training.publisher.publish(weights / "step_1", PolicyVersion(0, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert list(weights.iterdir()) == []
    training.publisher.publish(weights / "step_1", PolicyVersion(0, 1))
    assert steps_in(weights) == [1]
