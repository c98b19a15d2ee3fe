"""Agents of the public registries, an engine that answers them from a script, and what a run trains on."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from prime_rl.storage.batch import Batch, read_batch
from prime_rl.storage.paths import RunPaths
from prime_rl_sandbox.jail.bubblewrap import find_bubblewrap
from tests.support.chat_templates import SHAPES, make_merging_tokenizer
from tests.support.command import clean_environment, executable
from tests.support.fake_engine import FakeEngine

TOKENIZER = make_merging_tokenizer(SHAPES["tools"])
"""Many texts have several tokenizations; the template leaves earlier reasoning out."""
INSTALL_SECONDS, RUN_SECONDS = 900, 600
REPLIES: tuple[tuple[str, ...], ...] = (
    ("ls -la",),
    ("cat add.py", "python3 add.py 2 3 || true"),
    ("sed -i 's/-/+/' add.py # caf\u00e9 \U0001f600",),
    ("python3 add.py 2 3 | tee result.txt",),
    (),
)
"""The commands that each reply of the policy calls; the last one ends the conversation."""
_SHELLS = ("Bash", "bash", "exec_command", "shell_command", "shell", "run_shell_command")
_ADD = "import sys\nprint(int(sys.argv[1]) - int(sys.argv[2]))\n"
_TESTS = (
    'cd /app && [ "$(cat result.txt)" = 5 ] && [ "$(python3 add.py 4 5)" = 9 ] && echo 1 > /logs/verifier/reward.txt\n'
)


def with_agents(folder: Path) -> list[str]:
    """Return the start of a command for which `folder` is /opt/agents. This machine's /opt does not change."""
    folders = {path: path for path in Path("/opt").iterdir()} | {Path("/opt/agents"): folder}
    mounts = [part for target, source in folders.items() for part in ("--bind", str(source), str(target))]
    return [find_bubblewrap(), "--die-with-parent", "--dev-bind", "/", "/", "--tmpfs", "/opt", *mounts]


def install(folder: Path, command: str) -> None:
    """Run a command that installs an agent below /opt/agents, which is `folder`. AssertionError if it fails."""
    done = subprocess.run(
        [*with_agents(folder), "sh", "-c", command],
        capture_output=True, text=True, timeout=INSTALL_SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\nfailed: {done.stdout[-2000:]}{done.stderr[-2000:]}"


class ScriptedEngine(FakeEngine):
    """Samples `REPLIES`, a token for each byte, so never as the tokenizer would encode them.

    Attributes:
        sampled: the prompts and the replies.
        ending: command by which the agent ends the conversation.
    """

    def __init__(self, ending: str | None = None) -> None:
        super().__init__()
        self.sampled = list[tuple[list[int], list[int]]]()
        self.ending, self.reply = ending, self.answer

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        """Return the token ids of a reply."""
        text = f"<think>\nrequest {len(self.sampled)}\n</think>\n\n{self._said(TOKENIZER.decode(body['token_ids']))}"
        ids = [token for character in text for token in TOKENIZER.encode(character, add_special_tokens=False)]
        self.sampled.append((body["token_ids"], [*ids, TOKENIZER.eos_token_id]))
        return self.sampled[-1][1], "stop"

    def _said(self, prompt: str) -> str:
        step = 1 + max(map(int, re.findall(r"Step (\d+):", prompt)), default=-1)
        asked = prompt.rpartition("<|im_start|>user\n")[2]
        if step and "COMPACTION" in asked:
            return f"<summary>\nStep {step - 1}: done.\n</summary>"
        commands = REPLIES[min(step, len(REPLIES) - 1)] or ((self.ending,) if self.ending else ())
        calls = [f"<tool_call>\n{_call(prompt, command)}\n</tool_call>" for command in commands]
        return "\n".join([f"Step {step}: na\u00efve \u2013 fine.", *calls])


def _call(prompt: str, command: str) -> str:
    """Return a call of the agent's shell, in JSON with unusual spaces and escapes."""
    starts = ((name, prompt.find(f'{{"name": "{name}", "description": ')) for name in _SHELLS)
    name, start = next((name, start) for name, start in starts if start >= 0)
    schema = json.JSONDecoder().raw_decode(prompt, start)[0]["parameters"]
    arguments: dict[str, Any] = {}
    for key in schema.get("required", ()) or schema["properties"]:
        kind = schema["properties"][key]
        if key in ("command", "cmd"):
            arguments[key] = ["bash", "-lc", command] if kind.get("type") == "array" else command
        elif key in schema.get("required", ()):
            arguments[key] = {"string": "a step", "boolean": False, "number": 60_000, "integer": 60_000}[kind["type"]]
    text = json.dumps(arguments, separators=(" ,", " :  "))
    return f'{{"arguments":{text},  "name": "{name}"}}'


def write_task(folder: Path) -> None:
    """Write the task: repair a program, and run it."""
    files = {
        "task.toml": "", "instruction.md": "Repair add.py, which adds two numbers, and write 2 + 3 to result.txt.",
        "environment/add.py": _ADD, "tests/test.sh": _TESTS,
    }  # fmt: skip
    for name, text in files.items():
        (folder / "add" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "add" / name).write_text(text)


def run_agent(agents: Path, folder: Path, engine: FakeEngine, **env: Any) -> RunPaths:
    """Run the orchestrator for a batch of two rollouts of the agent; return the run's paths."""
    write_task(folder / "tasks")
    (folder / "model").mkdir()
    TOKENIZER.save_pretrained(folder / "model")
    (folder / "model/config.json").write_text(json.dumps({"model_type": "qwen3"}))
    values = {
        "output_dir": str(folder / "run"),
        "max_steps": 1,
        "batch_size": 2,
        "rollouts_per_example": 2,
        "seq_len": 200_000,
        "failing_at_start_seconds": 5,
        "wait_for_final_version": False,
        "model": {"name": str(folder / "model")},
        "client": {"base_url": [engine.url]},
        "sampling": {"max_tokens": 2000},
        "sandbox": {"paths": ["/opt/agents"]},
        "env": [{"id": "task_folder", "args": {"path": str(folder / "tasks")}, "num_retries": 0, **env}],
    }
    (folder / "run.toml").write_text(tomli_w.dumps(values))
    done = subprocess.run(
        [*with_agents(agents), executable("orchestrator"), "@", str(folder / "run.toml")],
        capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL, env=clean_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return RunPaths(folder / "run")


def read_samples(paths: RunPaths) -> tuple[Batch, dict[int, list[tuple[list[int], list[int]]]]]:
    """Return the batch, and the samples of each rollout: their tokens and loss masks."""
    batch, _ = read_batch(paths.rollouts(0), 0)
    found: dict[int, list[tuple[list[int], list[int]]]] = {}
    for rollout, length, end in zip(batch.sample_rollout, batch.seq_lens, np.cumsum(batch.seq_lens), strict=True):
        part = slice(end - length, end)
        found.setdefault(int(rollout), []).append((batch.tokens[part].tolist(), batch.loss_mask[part].tolist()))
    return batch, found
