"""The profile attributes sampled stacks to parts of the work by the innermost listed frame."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
ROOT_FRAMES = "run (uvloop/__init__.py:92);Runner.run (asyncio/runners.py:118)"
WORKER_FRAMES = f"{ROOT_FRAMES};_RecordedTask.send (prime_rl/rollouts/workers/crash_attribution.py:75)"
ROLLOUT_FRAMES = f"{WORKER_FRAMES};MultiTurnEnv.rollout (verifiers/legacy/envs/multiturn_env.py:176)"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        spec = importlib.util.spec_from_file_location("main_job_profile", BENCHMARKS / "main_job_profile.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "main_job_profile", module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        (ROOT_FRAMES, "event loop"),
        (WORKER_FRAMES, "IPC"),
        (ROLLOUT_FRAMES, "environment"),
        (f"{ROLLOUT_FRAMES};deepcopy (copy.py:128)", "environment"),
        (f"{ROLLOUT_FRAMES};Recorder.ask (prime_rl/rollouts/recorder.py:90);full (numpy/numeric.py:1)", "recording"),
        (f"{ROLLOUT_FRAMES};ClientSession._request (aiohttp/client.py:700)", "HTTP client"),
        (f"{WORKER_FRAMES};RewardCall.begin (prime_rl/rollouts/verifiers/rubrics.py:140)", "rubric"),
        (f"{WORKER_FRAMES};score (reverse_text/scores.py:6)", "rubric"),
        (
            f"{ROOT_FRAMES};RequestResponseCycle.run_asgi (uvicorn/protocols/http/httptools_impl.py:4)",
            "request parsing",
        ),
        (f"{ROOT_FRAMES};Router.app (starlette/routing.py:7)", "routing"),
        (f"{ROOT_FRAMES};AsyncLLM.generate (vllm/v1/engine/async_llm.py:5)", "engine client"),
        (f"{ROOT_FRAMES};process_outputs (vllm/v1/engine/output_processor.py:5)", "output handling"),
        (f"{ROOT_FRAMES};MsgpackDecoder.decode (vllm/v1/serial_utils.py:5)", "IPC"),
        (
            "run_busy_loop (vllm/v1/engine/core.py:9);Scheduler.schedule (vllm/v1/core/sched/scheduler.py:3)",
            "engine loop",
        ),
        ("main (prime_rl/trainer/rl/train.py:9);linear (torch/nn/functional.py:3)", "model"),
        (f"{ROOT_FRAMES};OrchestratorLoop.run (prime_rl/orchestrator/orchestrator.py:9)", "orchestration"),
        ("main (somewhere.py:1);encode (json/encoder.py:2)", "other"),
        ("_bootstrap (threading.py:1);_worker (concurrent/futures/thread.py:81)", None),
        (f"{WORKER_FRAMES};wait (threading.py:3)", None),
    ],
)
def test_stack_belongs_to_the_part_of_its_innermost_listed_frame(benchmark, stack, part):
    assert benchmark.part_of(stack) == part


def test_all_parts_of_the_report_are_declared(benchmark):
    parts = {part for part, _ in benchmark.PARTS}
    assert parts >= {
        "request parsing", "routing", "engine client", "output handling", "HTTP client", "environment", "rubric",
        "recording", "IPC",
    }  # fmt: skip


def test_no_prefix_is_hidden_by_an_earlier_one(benchmark):
    """A later prefix that an earlier one contains would never match."""
    prefixes = [prefix for _, group in benchmark.PARTS for prefix in group]
    hidden = [
        (earlier, later)
        for index, later in enumerate(prefixes)
        for earlier in prefixes[:index]
        if later.startswith(earlier)
    ]
    assert hidden == []


def test_shares_leave_out_threads_that_wait(benchmark):
    lines = [
        f"{WORKER_FRAMES};RewardCall.begin (prime_rl/rollouts/verifiers/rubrics.py:140) 3",
        f"{ROLLOUT_FRAMES} 1",
        "_worker (concurrent/futures/thread.py:81) 96",
    ]
    assert benchmark.shares(lines) == {"rubric": 0.75, "environment": 0.25}
