"""v1 agents in the sandbox: programs, the tools of the shell harness, the runtime under them, what hostile ones see."""

import json
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.known_harnesses import KNOWN_HARNESSES, KnownHarness
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts import agent_box
from prime_rl.rollouts.agent_box import AgentBox, box_sandbox
from prime_rl.rollouts.group_attempts import EnvironmentFailed, UnsupportedEnvironment
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.separate.agent_runtime import SandboxRuntimeConfig, add_sandbox
from prime_rl.rollouts.separate.v1_harnesses import ShellHarness, ShellHarnessConfig
from prime_rl.rollouts.separate.values import Refused
from prime_rl.rollouts.workers import worker_main
from prime_rl.rollouts.workers.environment_pool import EnvironmentPool
from prime_rl.rollouts.workers.protocol import ModelAccess
from prime_rl.rollouts.workers.worker_launcher import WorkerLauncher
from prime_rl_sandbox import execution
from prime_rl_sandbox.execution import SandboxLimits, SandboxSettings, current_settings, use_settings
from prime_rl_sandbox.shared_sandbox import close_shared_sandboxes
from tests.support.fake_engine import fake_engine
from tests.support.isolation import hide_bubblewrap, needs_isolation
from tests.unit.rollouts.conftest import PACKAGES, TOKENIZER, encode, served

pytestmark = needs_isolation
PROGRAM = (PACKAGES.parent / "command_agent.py").read_text()
AGENT = ["python3", "-c", PROGRAM, "{prompt}"]
SHELL = {"env": {"agent": {"harness": {"id": "bash"}}}}
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def small_sandbox():
    before = current_settings()
    use_settings(SandboxSettings(limits=SandboxLimits(disk_bytes=2**22), num_jails=1))
    yield
    use_settings(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def closed_sandboxes(small_sandbox):
    yield
    await close_shared_sandboxes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    add_sandbox(AgentBox)  # environments with a command have added larger ones
    runtime = runtimes.make_runtime(SandboxRuntimeConfig())
    await runtime.start()
    yield runtime
    await runtime.stop()


@pytest.fixture(scope="module")
def harness():
    return ShellHarness(ShellHarnessConfig(id="prime_rl_shell"))


def calls(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(*replies, sampled=None):
    """Reply i to the prompt with i tool results; add each prompt and reply to `sampled`."""
    sampled = [] if sampled is None else sampled

    def reply(body):
        count = TOKENIZER.decode(body["token_ids"]).count("<tool_response>")
        sampled.append((body["token_ids"], encode(replies[min(count, len(replies) - 1)])))
        return sampled[-1][1], "stop"

    return reply


async def play(*replies, count=1, **keys):
    """Return the rollouts of a group, and the prompt and the reply of each request that the engine got."""
    config = EnvConfig(**{"id": "coding_taskset", "num_retries": 0, **keys})
    environment, sampled = worker_main.load(config, Renderer(TOKENIZER), "train"), []
    async with served(environment, script(*replies, sampled=sampled)) as (_, engine):
        return await environment.run_group(0, count, engine, {"max_tokens": 300}, 8192), sampled


@in_one_loop
@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_agent_works_on_files_that_task_and_reward_share(installed, interpreter):
    commands = [calls("bash", command="paste -sd+ src/numbers.txt | tee sum.txt"), ""]
    commands[1] = calls("edit", path="sum.txt", old_str="19+23", new_str="42")
    keys = {} if interpreter is None else {"id": str(PACKAGES / "coding_taskset.py"), "interpreter": interpreter}
    (rollout,), _ = await play(*commands, "done", args=SHELL, **keys)
    tools = [text for role, text in rollout.text if role == "tool"]
    assert [tool.strip() for tool in tools] == ["19+23", "Edited sum.txt"]
    assert rollout.reward == 1.0


@in_one_loop
@pytest.mark.extended
async def test_sandbox_that_breaks_fails_the_rollout_of_its_own_interpreter(installed, monkeypatch):
    async def broken(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(AgentBox, "write", broken)
    with pytest.raises(EnvironmentFailed, match="no room"):
        await play("done", args=SHELL, id=str(PACKAGES / "coding_taskset.py"), interpreter=sys.executable)


@in_one_loop
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


@in_one_loop
@pytest.mark.extended(after=1)
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_tokens_that_a_program_sampled_are_trained_once_in_one_sample(installed, interpreter):
    keys = {} if interpreter is None else {"id": str(PACKAGES / "coding_taskset.py"), "interpreter": interpreter}
    commands = ("cat src/numbers.txt", "echo $((19 + 23)) > sum.txt; cat sum.txt")
    replies = (*(calls("bash", command=command) for command in commands), "The sum is 42.")
    rollouts, sampled = await play(*replies, count=2, command=AGENT, **keys)
    assert len(sampled) == 6
    for rollout in rollouts:
        assert rollout.reward == 1.0
        assert rollout.metrics["agent_exit_code"] == 0.0
        (sample,) = rollout.samples
        assert sample.tokens[sample.loss_mask].tolist() == [token for reply in replies for token in encode(reply)]
        assert sample.tokens.tolist() in [prompt + ids for prompt, ids in sampled], "as the engine saw them"


@in_one_loop
async def test_a_program_reaches_the_model_and_nothing_else_of_the_host(installed):
    look = "ls /root /home; curl -s http://127.0.0.1:22; cat < /dev/tcp/127.0.0.1/22; env"
    (rollout,), _ = await play(calls("bash", command=look), "done", command=AGENT)
    (seen,) = [text for role, text in rollout.text if role == "tool"]
    assert "onnection refused" in seen and "SSH" not in seen
    names = {line.partition("=")[0] for line in seen.splitlines() if "=" in line}
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"} <= names
    assert not names & {"PYTHONPATH", "HF_TOKEN", "VIRTUAL_ENV"}


@in_one_loop
async def test_a_program_that_fails_after_a_reply_is_scored_and_one_without_replies_fails(installed):
    (rollout,), _ = await play("done", command=[*AGENT, "--exit", "3"])
    assert rollout.metrics["agent_exit_code"] == 3.0
    for command, message in (
        ([*AGENT, "--silent"], "it called no model; it printed: nothing to do"),
        (["sh", "-c", "echo broken >&2; exit 5"], "exited 5: broken"),
        # What may be there for another task does not end the run, nor does a code that a program returns.
        (["sh", "-c", "/app/run.sh"], "exited 127: .*/app/run.sh: not found"),
        (["sh", "-c", "cd /app; ./run.sh"], "exited 127: .*run.sh: not found"),
        (["bash", "-c", 'env true "$(head -c 200000 /dev/zero | tr "\\0" x)"'], "exited 126: .*list too long"),
        (["sh", "-c", "echo no key >&2; exit 127"], "exited 127: no key"),
    ):
        with pytest.raises(EnvironmentFailed, match=message):
            await play("done", command=command)


@in_one_loop
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/usr/bin/no-such-agent"], "no-such-agent: .*No such file"),
        (["sh", "-c", "exec /opt/agents/x"], "exec: /opt/agents/x: not found"),
        (["bash", "-c", "no-agent {prompt}"], "no-agent: command not found"),
        (["env", "X=1", "no-agent"], "no-agent.*: No such file"),
        (["/tmp"], "/tmp: .*Permission denied"),
    ],
)
async def test_a_program_that_is_not_there_is_refused_in_the_first_group(installed, command, message):
    with pytest.raises(UnsupportedEnvironment, match=f"program cannot be started; install it below /usr .*{message}"):
        await play("done", command=command)


@in_one_loop
@pytest.mark.parametrize("interpreter", [None, sys.executable])
async def test_a_harness_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    installed, interpreter, monkeypatch
):
    monkeypatch.setitem(KNOWN_HARNESSES, "codex", KnownHarness("npm install codex", "exec /opt/agents/no-such"))
    keys = {} if interpreter is None else {"id": str(PACKAGES / "coding_taskset.py"), "interpreter": interpreter}
    with pytest.raises(UnsupportedEnvironment, match=r"install it by `npm install codex` .*no-such: not found"):
        await play("done", harness="codex", **keys)


def test_the_box_of_a_harness_sees_its_folder_and_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "_current", SandboxSettings(paths=(Path("/opt/a"),)))
    for folder, paths in ((tmp_path, (Path("/opt/a"), tmp_path)), (tmp_path / "missing", (Path("/opt/a"),))):
        monkeypatch.setattr(agent_box, "HARNESS_FOLDER", folder)
        assert box_sandbox(EnvConfig(harness="codex"))._options["paths"] == paths


@in_one_loop
async def test_only_known_names_in_braces_are_replaced(installed):
    command = ["python3", "-c", PROGRAM, 'say {"a": {prompt}} {model} {other} {} {base_url} {api_key}']
    (rollout,), _ = await play("done", command=command)
    text = rollout.text[0][1]
    assert text.startswith(
        'say {"a": Write the sum of src/numbers.txt to sum.txt.} policy {other} {} http://127.0.0.1:'
    )
    assert text.endswith("/v1 " + text.rpartition(" ")[2]) and "{" not in text.rpartition(" ")[2]


def test_a_classic_environment_refuses_a_command(installed):
    with pytest.raises(ConfigError, match="need a v1 taskset"):
        worker_main.load(EnvConfig(id="reverse_text", command=AGENT), Renderer(TOKENIZER), "train")


@in_one_loop
@pytest.mark.parametrize(
    ("command", "seconds", "exit_code", "output"),
    [
        ("echo a; echo b >&2; exit 3", None, 3, "ab"),
        ("echo before; while :; do :; done", 0.5, 124, "beforethe command took longer than 0.5 s"),
        ("kill -9 $$", None, 137, ""),
        ("printf 'a\\377'", None, 0, "a?"),
        ("head -c 3000000 /dev/zero | tr '\\0' x", None, 0, "x" * 2**19),
        ("(sleep 1000 &); echo started", None, 0, "started"),
        pytest.param(  # they are waited for; a busy machine may be late, and bash says that it tries again
            "for i in $(seq 100); do sh -c 'true & exit 0' || exit 1; done", None, 0, "", marks=pytest.mark.extended
        ),
        ("echo x 2> /dev/null > /proc/1/fd/4 || echo refused", None, 0, "refused"),
        ("cat 2> /dev/null < /dev/tcp/127.0.0.1/22", None, 1, ""),
    ],
)
async def test_runtime_commands(box, command, seconds, exit_code, output):
    result = await box.run(["bash", "-c", command], {}, seconds)
    assert (result.exit_code, (result.stdout + result.stderr).replace("\n", "")) == (exit_code, output)
    assert (await box.run(["echo", "next"], {})).stdout == "next\n"


@in_one_loop
async def test_runtime_environment_is_the_tasks_alone(box):
    view = box.with_env({"TASK": "1"})
    names = {line.partition("=")[0] for line in (await view.run(["env"], {"MINE": "2"})).stdout.splitlines()}
    one_thread = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}  # set for every program
    assert names - {"LC_CTYPE"} - one_thread == {"HOME", "TMPDIR", "PATH", "LANG", "TASK", "MINE", "PWD"} - (
        {"PWD"} - names
    )


@in_one_loop
async def test_runtime_files_are_read_as_written(box):
    for data in (b"", b"a\0\xff", bytes(3 * 2**20)):
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


def test_harness_of_a_taskset_runs_in_the_sandbox(installed):
    environment = worker_main.load(EnvConfig(id="shell_taskset"), Renderer(TOKENIZER), "train")
    assert environment._adapter.env.config.agent.runtime.type == "sandbox"
