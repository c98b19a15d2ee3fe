"""The patched names exist in vLLM; each patch names the test of its effect."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl.core.errors import ConfigError
from prime_rl.inference.vllm import patches
from tests.support.vllm_modules import needs_vllm

pytestmark = needs_vllm


def test_check_hooks_accepts_the_installed_vllm():
    patches.check_hooks()


def test_check_hooks_names_a_missing_hook(monkeypatch):
    """An override that vLLM no longer calls would leave KV of old weights in the prefix cache."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "_get_local_prefix_cache_hit")
    with pytest.raises(
        ConfigError, match=r"has no vllm\.v1\.core\.sched\.scheduler\.Scheduler\._get_local_prefix"
    ) as message:
        patches.check_hooks()
    assert "\n" not in str(message.value)


def test_hooks_contain_every_override_of_the_scheduler():
    from vllm.v1.core.sched.scheduler import Scheduler

    from prime_rl.inference.vllm.salted_scheduler import SyncPolicyScheduler

    checked = patches._HOOKS["vllm.v1.core.sched.scheduler:Scheduler"].split()
    overridden = {name for name in vars(SyncPolicyScheduler) if callable(getattr(Scheduler, name, None))}
    assert overridden - {"__doc__"} <= set(checked)


def test_vllm_adds_all_requests_by_the_call_that_salts_them():
    """`prepare_requests` replaces it on vLLM's client."""
    import inspect
    import re

    from vllm.v1.engine.async_llm import AsyncLLM

    assert set(re.findall(r"engine_core\.(add_\w*request\w*)\(", inspect.getsource(AsyncLLM))) == {"add_request_async"}


def test_coordinator_that_does_not_start_raises_after_our_timeout(monkeypatch):
    from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc

    monkeypatch.setattr(DPCoordinator, "_wait_for_zmq_addrs", DPCoordinator._wait_for_zmq_addrs)
    monkeypatch.setattr(DPCoordinatorProc, "run_coordinator", DPCoordinatorProc.run_coordinator)
    patches.end_coordinator_with_server(forked=False, timeout_seconds=0.01)
    never, other_end = multiprocessing.Pipe()
    reader, writer = multiprocessing.Pipe(duplex=False)
    coordinator: Any = SimpleNamespace(proc=SimpleNamespace(name="VLLM_DP_Coordinator", sentinel=never.fileno()))
    with pytest.raises(RuntimeError, match=r"VLLM_DP_Coordinator did not start within 0 s \(parallel.wait_timeout_sec"):
        DPCoordinator._wait_for_zmq_addrs(coordinator, reader)
    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.send(("a", "b", "c"))
    assert DPCoordinator._wait_for_zmq_addrs(coordinator, reader) == ("a", "b", "c")
    other_end.close()


def test_tag_of_a_step_has_the_versions_of_the_slots_in_use():
    from vllm.v1.engine.core import EngineCore

    patches.add_switch_utility()
    tags: list[str] = []
    scheduler: Any = SimpleNamespace(versions={}, switch_policy=lambda *_: None, hash_of=lambda number: f"h{number}")
    scheduler.forget_adapter = scheduler.versions.pop
    core: Any = SimpleNamespace(
        scheduler=scheduler, set_weight_version=tags.append, get_weight_version=lambda: tags[-1]
    )
    for number, version in ((1, "0.3"), (5, "1.2"), (12, "0.0"), (5, "1.3")):
        assert EngineCore.switch_policy(core, version, "", False, number) == [version, f"h{number}"]
    EngineCore.forget_adapter(core, 5)
    assert tags == ["0.3", "0.3 5=1.2", "0.3 5=1.2 12=0.0", "0.3 5=1.3 12=0.0", "0.3 12=0.0"]
    assert [patches.version_in(tags[-2], number) for number in (0, 1, 5, 12)] == ["0.3", "0.3", "1.3", "0.0"]
