"""Tasks of a folder, solved by a program in the sandbox, and graded in another one."""

import asyncio
import importlib
import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.core.errors import ConfigError
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from prime_rl_sandbox.execution import SandboxSettings, current_settings, use_settings
from prime_rl_sandbox.shared_sandbox import close_shared_sandboxes
from tests.support.fake_engine import fake_engine
from tests.support.isolation import needs_isolation
from tests.support.tiny_model import make_tokenizer
from tests.unit.rollouts.conftest import ending_server

pytestmark = needs_isolation
TOKENIZER = make_tokenizer()
AGENT = ["python3", "-c", (Path(__file__).parents[2] / "support/command_agent.py").read_text(), "{prompt}"]
TESTS = """
cd /app
if [ "$(python3 add.py 2 3)" = 5 ] && [ -z "$(ls /tmp)" ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
exit 3
"""
CONNECT = 'python3 -c \'import socket as s; a = s.create_server(("", 9099)); s.create_connection(("localhost", 9099))\''
WRONG = "import sys\nprint(int(sys.argv[1]) - int(sys.argv[2]))\n"


@pytest.fixture(autouse=True)
def one_jail():
    before = current_settings()
    use_settings(SandboxSettings(num_jails=1))
    yield
    use_settings(before)


@pytest.fixture
def tasks(tmp_path):
    """A folder with the tasks `add` and `group/other`."""
    for name in ("add", "group/other"):
        task = tmp_path / "tasks" / name
        for folder in ("environment", "tests"):
            (task / folder).mkdir(parents=True)
        (task / "task.toml").write_text('version = "1.0"\n[verifier]\ntimeout_sec = 20.0\nenv = { LEVEL = 3 }\n')
        (task / "instruction.md").write_text("Repair add.py, which adds two numbers.\n")
        (task / "environment" / "add.py").write_text(WRONG)
        (task / "tests" / "test.sh").write_text(TESTS)
    return tmp_path / "tasks"


def load(path, **args):
    config = EnvConfig(id="task_folder", args={"path": str(path), **args}, command=AGENT, num_retries=0)
    return worker_main.load(config, Renderer(TOKENIZER), "train")


@asynccontextmanager
async def engine_of(*commands):
    def reply(body):
        number = TOKENIZER.decode(body["token_ids"]).count("<tool_response>")
        call = json.dumps({"name": "bash", "arguments": {"command": commands[min(number, len(commands) - 1)]}})
        text = f"<tool_call>{call}</tool_call>" if number < len(commands) else "done"
        return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id], "stop"

    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        fake.reply = reply
        yield engine


def run(environment, *commands):
    async def one():
        async with engine_of(*commands) as engine, ending_server(environment):
            try:
                (rollout,) = await environment.run_group(0, 1, engine, {"max_tokens": 600}, 8192)
            finally:
                await close_shared_sandboxes()
        return rollout

    return asyncio.run(one())


def test_the_tests_grade_the_files_that_the_agent_leaves(tasks):
    environment = load(tasks)
    assert len(environment) == 2
    repair = "sed -i s/-/+/ add.py; mkdir -m 0 closed; touch $HOME/x /tests/y; ls /tests"
    rollout = run(environment, "pwd; cat add.py", repair)
    assert rollout.reward == rollout.metrics["tests"] == 1.0
    assert (rollout.metrics["tests_exit_code"], rollout.metrics["no_reward_file"]) == (3.0, 0.0)
    assert rollout.metrics["files_incomplete"] == 1.0, "a folder cannot be read"
    seen = [text.strip() for role, text in rollout.text if role == "tool"]
    assert seen == [f"/app\n{WRONG}".strip(), "y"]


def test_an_agent_that_forges_tests_and_rewards_gets_what_the_real_tests_say(tasks):
    forge = (
        "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json;"
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ln -s /tests/test.sh /app/x;"
        "(while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &"
    )
    rollout = run(load(tasks), forge)
    assert rollout.reward == 0.0
    assert rollout.metrics["tests_exit_code"] == 3.0


@pytest.mark.extended(after=2)
@pytest.mark.parametrize(
    ("tests", "reward", "metrics"),
    [
        ('echo "{\\"reward\\": 0.25, \\"level\\": $LEVEL}" > /logs/verifier/reward.json', 0.25, {"level": 3.0}),
        ("echo NaN > /logs/verifier/reward.txt", 0.0, {"no_reward_file": 1.0}),
        ("echo 0.5 > /logs/verifier/reward.json", 0.5, {"no_reward_file": 0.0}),
        ("echo many > /logs/verifier/reward.txt", 0.0, {"no_reward_file": 1.0}),
        ("echo true > /logs/verifier/reward.json; echo .5 > /logs/verifier/reward.txt", 0.5, {"no_reward_file": 0.0}),
        ('echo \'{"reward": 1, "x": NaN, "y": 1e999}\' > /logs/verifier/reward.json', 1.0, {"no_reward_file": 0.0}),
        (CONNECT + " && echo 1 > /logs/verifier/reward.txt", 1.0, {"files_incomplete": 0.0}),
        ("while :; do :; done", 0.0, {"no_reward_file": 1.0, "tests_exit_code": 124.0}),
        ("test -e /app/big || echo 1 > /logs/verifier/reward.txt", 0.0, {"files_too_large": 1.0}),
    ],
)
def test_rewards_that_tests_write(tasks, tests, reward, metrics):
    (tasks / "add/tests/test.sh").write_text(tests)
    (tasks / "add/task.toml").write_text("[verifier]\ntimeout_sec = 2.0\nenv = { LEVEL = 3 }\n")
    large = "head -c 200000000 /dev/zero > big" if "big" in tests else "true"
    rollout = run(load(tasks, tasks=["add"]), large)
    assert rollout.reward == reward
    assert metrics.items() <= rollout.metrics.items()


def test_tasks_that_cannot_be_run_are_refused_by_name(tasks):
    def refused(message, **args):
        with pytest.raises(ConfigError, match=message):
            load(tasks, **args)

    refused("there is no task 'none'", tasks=["add", "none"])
    with pytest.raises(ConfigError, match=r"there is no task\.toml in this folder"):
        load(tasks / "add/tests")
    with pytest.raises(ConfigError, match=r"args\.path is missing"):
        load("")
    (tasks / "add/environment/inner").mkdir()
    (tasks / "add/environment/inner/task.toml").write_text("of the agent's own files")
    assert len(load(tasks)) == 2
    (tasks / "add/tests/test.sh").write_bytes(b"exit 1\r\n")
    refused("tasks/add: its tests/test.sh has line ends of Windows")
    (tasks / "add/tests/test.sh").write_text(TESTS)
    (tasks / "add/instruction.md").write_text("x" * 140_000)
    refused("task 0 of 'task_folder' cannot use `command`: its prompt has 140,000 bytes, but an argument")
    (tasks / "add/instruction.md").write_text("Repair it.")
    (tasks / "add/environment/Dockerfile").write_text("FROM ubuntu\n")
    refused(r"tasks/add: its Dockerfile is not built; set docker_image .* args\.ignore_dockerfile")
    assert len(load(tasks, ignore_dockerfile=True)) == 2
    (tasks / "add/task.toml").write_text('[environment]\ndocker_image = "ubuntu:24.04"\n')
    refused("needs the container image 'ubuntu:24.04', and the sandbox is none")
    for text, message in (
        ("[verifier]\ntimeout_sec = 'long'\n", "could not convert"),
        ("[", "tasks/add: "),
        ("[verifier]\nenv = { KEY = '${SECRET}' }\n", "takes a value of this machine"),
        ("steps = [1]\n", "several steps"),
    ):
        (tasks / "add/task.toml").write_text(text)
        refused(message, ignore_dockerfile=True)
    (tasks / "add/task.toml").write_text("")
    (tasks / "add/tests/test.sh").unlink()
    refused(r"tasks/add: it has no tests/test\.sh", ignore_dockerfile=True)
    (tasks / "add/tests/test.sh").write_text("")
    (tasks / "add/instruction.md").unlink()
    refused(r"tasks/add: .*instruction\.md", ignore_dockerfile=True)


def test_changed_files_of_a_task_change_its_hash(tasks):
    before = load(tasks).content_hash()
    assert load(tasks).content_hash() == before
    (tasks / "group/other/tests/test.sh").write_text("exit 1")
    assert load(tasks).content_hash() != before


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[3] / "configs/agents").glob("*.toml")), ids=lambda f: f.stem
)
def test_programs_of_the_given_agents_are_shell_scripts_with_the_prompt_as_an_argument(file):
    (env,) = RLConfig.load(["@", str(file)]).orchestrator.env
    assert env.harness == (None if file.stem == "cpu" else file.stem)
    shell, option, script, prompt = env.program
    assert (env.id, shell, option, prompt) == ("task_folder", "sh", "-c", "{prompt}")
    assert "{prompt}" not in script and '"$0"' in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_repair_task_rewards_the_right_operator_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "scripts")
    make_agents_model = importlib.import_module("make_agents_model")
    make_agents_model.write_tasks(tmp_path)
    folders = sorted(tmp_path.iterdir())
    assert len(load(tmp_path)) == len(folders) == make_agents_model.NUM_TASKS
    for folder in folders[:3]:
        expression = (folder / "environment/f.py").read_text().splitlines()[0].removeprefix("# ")
        test = (folder / "tests/test.sh").read_text().replace("/logs/verifier", str(folder))
        for repair, reward in ((None, "0"), (expression, "1"), (expression[0], "0")):
            if repair is not None:
                subprocess.run(["sed", "-i", f"s/rn .*/rn {repair}/", "f.py"], cwd=folder / "environment", check=True)
            subprocess.run(["sh", "-c", test], cwd=folder / "environment", check=True, stderr=subprocess.DEVNULL)
            assert (folder / "reward.txt").read_text().strip() == reward
