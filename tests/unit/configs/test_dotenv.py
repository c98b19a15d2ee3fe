"""`.env` in the working directory: configuration, and variables of other programs, which are never written."""

import os
import re
import subprocess
import sys

import pytest

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.supervisor.launch_specs import make_process_specs
from tests.unit.configs.conftest import REPOSITORY

SECRET = "s3cr3t-of-a-test"
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "INFERENCE_SERVER_API_KEY", "PRIME_API_KEY")
NAMES = (*KEYS, "PRIME_RL_SUPERVISED")


@pytest.fixture(autouse=True)
def _clean(workdir, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


def write(text):
    with open(".env", "w") as file:
        file.write(text)


def test_dotenv_sets_variables_of_other_programs():
    text = f"WANDB_API_KEY={SECRET}\nPRIME_API_KEY=p\nexport OPENAI_API_KEY='o'\n"
    write(text + "PRIME_LOG__LEVEL=debug\nPRIME_RL_SUPERVISED=1\n")
    config = TrainerConfig.load([])
    assert config.log.level == "debug"
    assert (os.environ["WANDB_API_KEY"], os.environ["OPENAI_API_KEY"]) == (SECRET, "o")
    assert os.environ["PRIME_API_KEY"] == "p", "never configuration, so it is another program's"
    assert "PRIME_LOG__LEVEL" not in os.environ
    assert "PRIME_RL_SUPERVISED" not in os.environ


def test_dotenv_variable_that_is_set_keeps_its_value(monkeypatch):
    write("HF_TOKEN=of-the-file\n")
    monkeypatch.setenv("HF_TOKEN", "of-the-shell")
    EvalConfig.load(["--env.id", "a"])
    assert os.environ["HF_TOKEN"] == "of-the-shell"


def test_dotenv_gives_the_variables_without_prefix(monkeypatch):
    monkeypatch.setenv("OUTPUT_DIR", "")
    monkeypatch.delenv("OUTPUT_DIR")
    write("OUTPUT_DIR=/shared/run\n")
    assert str(TrainerConfig.load([]).output_dir) == "/shared/run"


@pytest.mark.parametrize("text", [b"A=\xff\xfe\n", b"A=a\0b\n", None])
def test_dotenv_unreadable_raises_in_one_line(text):
    if text is None:
        os.mkdir(".env")
        TrainerConfig.load([])  # a folder of that name, such as a virtual environment, is none of ours
        return
    with open(".env", "wb") as file:
        file.write(text)
    with pytest.raises(ConfigError, match=r"cannot read .*\.env: it (is not UTF-8 text|contains a null character)$"):
        TrainerConfig.load([])


def test_dotenv_secret_is_in_no_file_or_output_of_a_run(tmp_path):
    write("".join(f"{name}={SECRET}\n" for name in KEYS))
    config = RLConfig.load(["--inference", "--wandb", "--ckpt"])
    for role in make_process_specs(config, config.run_paths):
        assert role.env["WANDB_API_KEY"] == SECRET, f"{role.name} inherits it"
        assert SECRET not in " ".join(role.argv)
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    for arguments in (["--dry-run"], ["--trainer.model.name", "./none"]):
        done = subprocess.run(
            [sys.executable, "-m", "prime_rl.entrypoints.rl", "--inference", "--log.level", "debug", *arguments],
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
        assert SECRET not in done.stdout + done.stderr
    written = [file for file in (tmp_path / "outputs").rglob("*") if file.is_file()]
    assert written
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


def test_template_of_dotenv_sets_nothing_and_names_what_is_read():
    text = (REPOSITORY / ".env.template").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {"WANDB_API_KEY", "HF_TOKEN", "INFERENCE_SERVER_API_KEY", "OUTPUT_DIR"} <= set(
        re.findall(r"[A-Z_]{5,}", text)
    )
