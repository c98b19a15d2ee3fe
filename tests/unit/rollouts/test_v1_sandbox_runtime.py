"""v1 agents in the sandbox: the tools of the shell harness, the runtime under them, and what hostile commands see."""

import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError

from prime_rl.configs.environment import EnvConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.agent_box import AgentBox, shared_sandbox
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.group_attempts import EnvironmentFailed
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate.agent_runtime import SandboxRuntime, SandboxRuntimeConfig, add_sandbox
from prime_rl.rollouts.separate.v1_harnesses import ShellHarness, ShellHarnessConfig
from prime_rl.rollouts.separate.values import Refused
from prime_rl.rollouts.workers import worker_main
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl_sandbox.execution import SandboxLimits, SandboxSettings, current_settings, use_settings
from tests.support.fake_engine import fake_engine
from tests.support.isolation import hide_bubblewrap, needs_isolation
from tests.support.tiny_model import make_tokenizer
from tests.unit.rollouts.conftest import ending_server

pytestmark = needs_isolation
PACKAGES = Path(__file__).parents[2] / "support/packages"
TOKENIZER = make_tokenizer()
SHELL = {"env": {"agent": {"harness": {"id": "bash"}}}}
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def small_sandbox():
    add_sandbox(AgentBox)
    before = current_settings()
    use_settings(SandboxSettings(limits=SandboxLimits(disk_bytes=2**22), num_jails=1))
    yield
    use_settings(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    runtime = runtimes.make_runtime(SandboxRuntimeConfig())
    await runtime.start()
    yield runtime
    await runtime.stop()
    await shared_sandbox.close()


@pytest.fixture(scope="module")
def harness():
    return ShellHarness(ShellHarnessConfig(id="prime_rl_shell"))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))


def calls(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*replies):
    """Reply i to the prompt with i tool results."""

    def reply(body):
        count = TOKENIZER.decode(body["token_ids"]).count("<tool_response>")
        text = replies[min(count, len(replies) - 1)]
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id], "stop"

    return reply


@asynccontextmanager
async def agent(*replies, **keys):
    config = EnvConfig(**{"id": "coding_taskset", "args": SHELL, **keys})
    environment = worker_main.load(config, Renderer(TOKENIZER), "train")
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = script(*replies)
        try:
            async with ending_server(environment):
                yield environment, engine
        finally:
            await shared_sandbox.close()


@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_agent_works_on_files_that_task_and_reward_share(installed, interpreter):
    commands = [calls("bash", command="paste -sd+ src/numbers.txt | tee sum.txt"), ""]
    commands[1] = calls("edit", path="sum.txt", old_str="19+23", new_str="42")
    keys = {} if interpreter is None else {"id": str(PACKAGES / "coding_taskset.py"), "interpreter": interpreter}
    async with agent(*commands, "done", **keys) as (environment, engine):
        (rollout,) = await environment.run_group(0, 1, engine, {"max_tokens": 300}, 4096)
    tools = [text for role, text in rollout.text if role == "tool"]
    assert [tool.strip() for tool in tools] == ["19+23", "Edited sum.txt"]
    assert rollout.reward == 1.0


async def test_sandbox_that_breaks_fails_the_rollout_of_its_own_interpreter(installed, monkeypatch):
    async def broken(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(AgentBox, "write", broken)
    keys = {"id": str(PACKAGES / "coding_taskset.py"), "interpreter": sys.executable, "num_retries": 0}
    async with agent("done", **keys) as (environment, engine):
        with pytest.raises(EnvironmentFailed, match="no room"):
            await environment.run_group(0, 1, engine, {"max_tokens": 300}, 4096)


@pytest.mark.extended
async def test_agent_in_a_worker_sees_neither_users_nor_keys_of_the_host(installed, tokenizer_dir, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    monkeypatch.setenv("SOME_API_KEY", "key-secret")
    look = "cat /etc/passwd; env; id -u; ls /root /home /work; cat /proc/*/environ; ps aux | wc -l"
    async with fake_engine() as fake, WorkerLauncher() as host:
        fake.reply = script(calls("bash", command=look), "done")
        pool = EnvironmentPool(EnvConfig(id="coding_taskset", args=SHELL), host, ModelAccess("m", str(tokenizer_dir)))
        async with pool:
            (rollout,) = await pool.run_group(0, 1, fake.url, {"max_tokens": 600}, 16384)
    (seen,) = [text for role, text in rollout.text if role == "tool"]
    assert "/etc/passwd: No such file" in seen and "HOME=/tmp" in seen
    for secret in ("secret", "root:", "TOKEN", "API_KEY", "PYTHONPATH", str(Path.home())):
        assert secret not in seen.replace("cannot access '/root'", "")


@pytest.mark.extended
@in_one_loop
@pytest.mark.parametrize(
    ("command", "seconds", "exit_code", "output"),
    [
        ("echo a; echo b >&2; exit 3", None, 3, "ab"),
        ("echo before; while :; do :; done", 3, 124, "beforethe command took longer than 3 s"),
        ("kill -9 $$", None, 137, ""),
        ("printf 'a\\377'", None, 0, "a?"),
        ("kill -9 1; kill -9 -1; echo alive", None, None, None),
        ("head -c 3000000 /dev/zero | tr '\\0' x", None, 0, "x" * 2**19),
        ("(sleep 1000 &); echo started", None, 0, "started"),
        ("cat /proc/1/environ /proc/1/mem; echo 1 > /proc/1/fd/4", None, None, None),
        ("touch /usr/x || touch /etc/x || echo refused", None, 0, None),
        ("cat < /dev/tcp/127.0.0.1/22", None, 1, None),
    ],
)
async def test_runtime_commands(box, command, seconds, exit_code, output):
    result = await box.run(["bash", "-c", command], {}, seconds)
    if exit_code is not None:
        assert result.exit_code == exit_code
    if output is not None:
        assert (result.stdout + result.stderr).replace("\n", "") == output
    assert (await box.run(["echo", "next"], {})).stdout == "next\n"


@in_one_loop
async def test_runtime_processes_that_programs_leave_are_waited_for(box):
    leave = "for i in $(seq 100); do sh -c 'true & exit 0' || exit 1; done; echo done"
    assert (await box.run(["bash", "-c", leave], {}, 60)).stdout == "done\n"


@in_one_loop
async def test_runtime_programs_cannot_write_to_the_session(box):
    result = await box.run(["bash", "-c", "echo x > /proc/1/fd/4; echo x > /proc/1/fd/1; ls /proc/1/fd"], {})
    assert result.stderr.count("Permission denied") == 3


@in_one_loop
async def test_runtime_environment_is_the_tasks_alone(box):
    view = box.with_env({"TASK": "1"})
    names = {line.partition("=")[0] for line in (await view.run(["env"], {"MINE": "2"})).stdout.splitlines()}
    one_thread = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}  # set for every program
    assert names - {"LC_CTYPE"} - one_thread == {"HOME", "TMPDIR", "PATH", "LANG", "TASK", "MINE", "PWD"} - (
        {"PWD"} - names
    )


@in_one_loop
@pytest.mark.parametrize("data", [b"", b"a\0\xff", bytes(3 * 2**20)])
async def test_runtime_files_are_read_as_written(box, data):
    await box.write("folder/file", data)
    assert await box.read("folder/file") == data
    assert await box.read("/tmp/folder/file") == data
    await box.run(["rm", "-r", "folder"], {})


@in_one_loop
async def test_runtime_files_that_do_not_fit_or_exist_are_os_errors(box):
    with pytest.raises(FileNotFoundError, match="missing"):
        await box.read("missing")
    with pytest.raises(OSError, match="/usr/x"):
        await box.write("/usr/x", b"")
    with pytest.raises(OSError, match=r"No space|too large"):
        await box.write("large", bytes(2**23))
    await box.run(["rm", "-f", "large"], {})
    assert await box.alive()


@in_one_loop
@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("bash", "{", "error: invalid JSON"),
        ("bash", "[1]", "error: the arguments of bash"),
        ("bash", '{"command": 1}', "error: the arguments of bash"),
        ("bash", '{"command": "a\\u0000b"}', "null character"),
        ("bash", '{"command": "echo \\ud83d"}', ""),
        ("edit", '{"path": "/etc/passwd", "old_str": "a", "new_str": "b"}', "No such file"),
        ("edit", '{"path": ".", "old_str": "a", "new_str": "b"}', "Is a directory"),
        ("edit", '{"path": "", "old_str": "a", "new_str": "b"}', "must not be empty"),
        ("edit", '{"path": "f", "old_str": "a", "new_str": "b"}', "exactly once in f (found 2)"),
    ],
)
async def test_shell_tools_answer_hostile_calls(box, harness, name, arguments, result):
    await box.write("f", b"aa")
    assert result in await harness.call_local(name, arguments, box)


@in_one_loop
async def test_runtime_whose_session_has_ended_is_a_sandbox_error(box):
    other = runtimes.make_runtime(SandboxRuntimeConfig())
    await other.run(["true"], {})
    await other._box["box"]._session.run("import os; os._exit(0)")
    with pytest.raises(SandboxError):
        await other.run(["true"], {})
    assert not await other.alive()
    await other.stop()
    with pytest.raises(SandboxError, match="no network"):
        await box.prepare_uv_script("print(1)")


def test_install_on_another_verifiers_is_an_error(monkeypatch):
    monkeypatch.delattr(runtimes, "_runtime_cls")
    monkeypatch.setattr(
        runtimes, "make_runtime", lambda config: runtimes.SubprocessRuntime(runtimes.SubprocessConfig())
    )
    with pytest.raises(Refused, match="selects runtimes in another way"):
        add_sandbox(AgentBox)


def test_agents_without_isolation_are_refused_at_the_start(installed, monkeypatch):
    hide_bubblewrap(monkeypatch)
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        worker_main.load(EnvConfig(id="coding_taskset", args=SHELL), Renderer(TOKENIZER), "train")


def test_harness_that_needs_a_container_is_refused(installed):
    args = {"env": {"agent": {"harness": {"id": "codex"}}}}
    with pytest.raises(ConfigError, match=r"needs a container.*docker"):
        worker_main.load(EnvConfig(id="coding_taskset", args=args), Renderer(TOKENIZER), "train")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"task": {"image": "python:3"}}, "needs the container image 'python:3'"),
        ({"task": {"tools": {"colocated": True}}}, "tool server CalculatorTools .* runs in the agent's container"),
    ],
)
def test_tasks_that_need_a_container_are_refused_at_the_start(installed, args, message):
    with pytest.raises(ConfigError, match=f"{message}.*docker") as caught:
        worker_main.load(EnvConfig(id="coding_taskset", args=args), Renderer(TOKENIZER), "train")
    assert "\n" not in str(caught.value)
    container = {**args, "env": {"agent": {"runtime": {"type": "docker"}}}}
    worker_main.load(EnvConfig(id="coding_taskset", args=container), Renderer(TOKENIZER), "train")


async def test_task_with_an_image_is_refused():
    with pytest.raises(SandboxError, match="image"):
        SandboxRuntime(SandboxRuntimeConfig().model_copy(update={"image": "python:3"}))
    assert runtimes.runtime_is_local(SandboxRuntimeConfig())


def test_harness_of_a_taskset_runs_in_the_sandbox(installed):
    environment = worker_main.load(EnvConfig(id="shell_taskset"), Renderer(TOKENIZER), "train")
    assert environment._adapter.env.config.agent.runtime.type == "sandbox"
