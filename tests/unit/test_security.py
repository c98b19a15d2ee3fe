"""Keys are in no file, foreign code does not run, and the text of rollouts is displayed without effect."""

import io
import json
import sys

import pytest
from loguru import logger
from rich.console import Console

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.environment import EnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.loading.schema import walk
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core import entry_point, logs
from prime_rl.core.api_key import read_api_key
from prime_rl.core.entry_point import run_main
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.core.terminal_escape import escape_control_chars
from prime_rl.evaluation.eval_report import print_table
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers.protocol import LoadEnvironment, ModelAccess
from prime_rl.supervisor import launch, preflight
from prime_rl.supervisor.child_processes import ProcessSpec
from prime_rl.supervisor.supervisor import Outcome
from prime_rl.trainer.model import policy_model
from tests.support.tiny_model import make_tiny_model

KEY = "k-9d1f27c4e6"
ROOTS = (RLConfig, TrainerConfig, OrchestratorConfig, InferenceConfig, SFTConfig, EvalConfig, SynthesizeConfig)


def defaults_of(*names):
    """The defaults of all configuration keys with these names, by class and key."""
    models = {model for root in ROOTS for _, node in walk((root,)) for model in (root, *node.variants)}
    return {
        f"{model.__name__}.{name}": model.model_fields[name].default
        for model in models
        for name in names
        if name in model.model_fields
    }


# Keys


def test_key_is_not_in_representations_or_logs(monkeypatch, capsys):
    monkeypatch.setenv("SOME_KEY", KEY)
    access = ModelAccess("m", "t", api_key=read_api_key("SOME_KEY"))
    assert access.api_key == KEY and KEY not in repr(access)
    assert KEY not in repr(LoadEnvironment(EnvConfig(id="e"), "train", access))
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.set_up_logging("info", utc=False)
    try:
        held = {"api_key": KEY}
        assert held["none"]
    except KeyError:
        logger.exception("failed")
    assert "failed" in stream.getvalue() and "KeyError" in stream.getvalue()
    assert KEY not in stream.getvalue(), "a traceback shows the values of variables"


def test_read_api_key_with_invalid_character_raises_without_the_key(monkeypatch):
    for text, expected in (("", None), (" \n", None), (f"{KEY}\n", KEY)):
        monkeypatch.setenv("SOME_KEY", text)
        assert read_api_key("SOME_KEY") == expected
    monkeypatch.delenv("SOME_KEY")
    assert read_api_key("SOME_KEY") is None
    for text in (f"{KEY}\r\nX-Admin: 1", f"{KEY}é"):
        monkeypatch.setenv("SOME_KEY", text)
        with pytest.raises(ConfigError, match="SOME_KEY contains a character") as refused:
            read_api_key("SOME_KEY")
        assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--orchestrator.client.base-url", f"http://user:{KEY}@node1:8000/v1"],
        ["--orchestrator.env.0.args.url", f"https://{KEY}@judge"],
        ["--orchestrator.env.0.args", json.dumps({"judges": [{"name": "a", "api_key": KEY}]})],
        ["--inference.vllm.hf-token", KEY],
        ["--inference.vllm.api-key", KEY],
    ],
)
def test_secret_in_configuration_is_rejected_before_any_write(argv, tmp_path):
    with pytest.raises(ConfigError) as refused:
        RLConfig.load(["--inference", "--output-dir", str(tmp_path), "--dry-run", *argv])
    assert KEY not in str(refused.value) and "environment" in str(refused.value)
    assert not list(tmp_path.rglob("*.toml"))


# Who is let in: tests/unit/inference/test_request_layer.py


def test_servers_listen_on_localhost_and_remote_code_is_off_by_default():
    addresses, remote_code = defaults_of("host", "address"), defaults_of("trust_remote_code")
    assert {"ServerConfig.host", "ClientConfig.host", "NCCLBroadcastConfig.host"} <= addresses.keys()
    assert set(addresses.values()) <= {"127.0.0.1", None}
    assert {name.split(".")[0] for name in remote_code} >= {
        "InferenceModelConfig",
        "TokenizerConfig",
        "TrainerModelConfig",
    }
    assert set(remote_code.values()) == {False}


def test_run_with_public_server_requires_a_key(monkeypatch):
    monkeypatch.delenv("INFERENCE_SERVER_API_KEY", raising=False)
    config = RLConfig.load(["--inference.server.host", "0.0.0.0"])
    with pytest.raises(ConfigError, match=r"inference.server.host = 0.0.0.0 .* INFERENCE_SERVER_API_KEY"):
        preflight.check_key(config.inference.server)
    monkeypatch.setenv("INFERENCE_SERVER_API_KEY", KEY)
    preflight.check_key(config.inference.server)
    monkeypatch.delenv("INFERENCE_SERVER_API_KEY")
    for host in ("127.0.0.1", "127.0.0.2", "::1"):
        preflight.check_key(RLConfig.load(["--inference.server.host", host]).inference.server)


# Code of others


def test_model_with_code_does_not_execute_it(tmp_path):
    path = make_tiny_model(tmp_path / "model")
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass A: pass\n")
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        written = json.loads((path / name).read_text())
        own = "own.A" if entry == "AutoConfig" else ["own.A", None]
        written |= {"auto_map": {entry: own}, "model_type": "own", "tokenizer_class": "A"}
        (path / name).write_text(json.dumps(written))
    with pytest.raises(ConfigError):
        policy_model._hf_config(TrainerModelConfig(name=str(path)), path)
    with pytest.raises(ConfigError):
        policy_model.load_tokenizer(TokenizerConfig(), TrainerModelConfig(name=str(path)))
    Renderer.load(str(path))
    assert not (tmp_path / "ran").exists()


# Text of others

NASTY = "\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202eabc[bold]x[/bold]<red>y</red>{0}\ttab\nline"
SHOWN = "\\x1b[2J\\x1b]0;title\\x07\\x9b31m\\x7f\\u202eabc[bold]x[/bold]<red>y</red>{0}\ttab\nline"


def test_escape_control_chars_replaces_terminal_controls():
    assert escape_control_chars(NASTY) == SHOWN
    assert escape_control_chars("naïve 世界 👩‍🔬") == "naïve 世界 👩‍🔬"


def test_log_error_and_table_escape_the_text_of_a_rollout(monkeypatch, capsys):
    monkeypatch.delenv(entry_point.ERROR_FILE, raising=False)
    print_table([
        dict.fromkeys(("examples", "rollouts", "errors"), 1)
        | {"env": "[red]env[/nothing]", "reward/mean": 1.0, "reward/stderr": None, "completion_len/mean": 1.0}
    ])  # fmt: skip
    assert "[red]env[/nothing]" in capsys.readouterr().out

    def fail():
        raise RunError(f"cannot parse {NASTY}")

    with pytest.raises(SystemExit):
        run_main(fail)
    assert SHOWN in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    logs.set_up_logging("info", utc=False)
    logger.warning("group {} is played again: {}", 1, NASTY)
    assert f"group 1 is played again: {SHOWN}" in stream.getvalue()


def test_rl_escapes_control_chars_of_a_process_log(tmp_path):
    log = tmp_path / "[out]" / "trainer.log"
    log.parent.mkdir()
    log.write_text(f"{NASTY}\n[/nothing]\n")
    role = ProcessSpec("trainer", [], {}, log, tmp_path / "none.json")
    console = Console(file=io.StringIO(), force_terminal=True, width=200, highlight=False, markup=False)
    launch.explain(Outcome(role, 1), console)
    shown = console.file.getvalue()
    assert "[/nothing]" in shown and "[out]" in shown
    assert all(line in shown for line in SHOWN.replace("\t", " ").splitlines()[1:])
    assert "\x1b[2J" not in shown and "\x1b]0" not in shown
