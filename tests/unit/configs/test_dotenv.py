"""`.env` in the working directory: configuration, and variables of other programs, which are never written."""

import os
import re
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints import rl
from prime_rl.supervisor.launch_specs import make_process_specs
from tests.unit.configs.conftest import REPOSITORY

SECRET = "s3cr3t-of-a-test"
KEYS = ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "INFERENCE_SERVER_API_KEY", "PRIME_API_KEY")
NAMES = (*KEYS, "PRIME_RL_SUPERVISED", "OUTPUT_DIR")


@pytest.fixture(autouse=True)
def _clean(workdir, monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


def write(text):
    Path(".env").write_text(text)


def test_dotenv_sets_variables_of_other_programs_that_are_not_set(monkeypatch):
    text = f"WANDB_API_KEY={SECRET}\nPRIME_API_KEY=p\nexport OPENAI_API_KEY='o'\nHF_TOKEN=of-the-file\n"
    write(text + "OUTPUT_DIR=/shared/run\nPRIME_LOG__LEVEL=debug\nPRIME_RL_SUPERVISED=1\n")
    monkeypatch.setenv("HF_TOKEN", "of-the-shell")
    config = TrainerConfig.load([])
    assert (config.log.level, str(config.output_dir)) == ("debug", "/shared/run")
    assert (os.environ["WANDB_API_KEY"], os.environ["OPENAI_API_KEY"]) == (SECRET, "o")
    assert os.environ["HF_TOKEN"] == "of-the-shell"
    assert os.environ["PRIME_API_KEY"] == "p", "never configuration, so it is another program's"
    assert not {"PRIME_LOG__LEVEL", "PRIME_RL_SUPERVISED"} & os.environ.keys()


@pytest.mark.parametrize("text", [b"A=\xff\xfe\n", b"A=a\0b\n"])
def test_dotenv_unreadable_raises_in_one_line(text):
    Path(".env").write_bytes(text)
    with pytest.raises(ConfigError, match=r"cannot read .*\.env: it (is not UTF-8 text|contains a null character)$"):
        TrainerConfig.load([])


def test_dotenv_folder_such_as_a_virtual_environment_is_not_read():
    os.mkdir(".env")
    assert TrainerConfig.load([]) == TrainerConfig()


def test_dotenv_secret_is_in_no_file_or_output_of_a_run(tmp_path, monkeypatch, capfd):
    write("".join(f"{name}={SECRET}\n" for name in KEYS))
    config = RLConfig.load(["--inference", "--wandb", "--ckpt"])
    for role in make_process_specs(config, config.run_paths):
        assert role.env["WANDB_API_KEY"] == role.env["INFERENCE_SERVER_API_KEY"] == SECRET, f"{role.name} inherits it"
        assert SECRET not in " ".join(role.argv)
    for arguments in (["--dry-run"], ["--trainer.model.name", "./none"]):
        monkeypatch.setattr("sys.argv", ["rl", "--inference", "--log.level", "debug", *arguments])
        with pytest.raises(SystemExit):
            rl.main()
        assert SECRET not in "".join(capfd.readouterr())
    written = [file for file in (tmp_path / "outputs").rglob("*") if file.is_file()]
    assert len(written) >= 4
    assert not [file for file in written if SECRET.encode() in file.read_bytes()]


def test_template_of_dotenv_sets_nothing_and_names_what_is_read():
    text = (REPOSITORY / ".env.template").read_text()
    assert not [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {"WANDB_API_KEY", "HF_TOKEN", "INFERENCE_SERVER_API_KEY", "OUTPUT_DIR"} <= set(
        re.findall(r"[A-Z_]{5,}", text)
    )
