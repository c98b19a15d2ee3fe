"""The model card has the figures of the run's files, no others, and no text in it is markup."""

import json
import re
from pathlib import Path

import pytest

from prime_rl.configs.loading.base_config import write_config
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.entrypoints.delivery.policy_export import export_policy
from tests.support.tiny_model import publish_weights

MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"
HOSTILE = "x`|<script>alert(1)</script>\n# [a](http://b) \x1b[31m"


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    publish_weights(root, MODEL, 3, overrides={"packages": {"torch": "2.13.0"}})
    rows = [
        {"step": step, "reward/mean": reward, "staleness/max": None}
        for step, reward in enumerate([0.25, 0.125, 0.5, 0.75])
    ]
    rows.append({"step": 1, "reward/mean": 0.375})  # a branch after a rollback did the step again
    of_env = {"examples": 8, "reward/mean": 0.5, "reward/ci95_low": 0.25, "reward/ci95_high": 0.75}
    rows += [{"step": step, **{f"eval/words/{k}": v for k, v in of_env.items()}} for step in (0, 2, 3)]
    write(root / "metrics/orchestrator.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return root


def configure(run, **settings):
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    write(run / "configs/orchestrator.toml", "".join(lines))
    write(run / "configs/trainer.toml", f"[model]\nname = {json.dumps(settings.get('name', str(MODEL)))}\n")


def card(run, tmp_path):
    export_policy(run, tmp_path / "out")
    return (tmp_path / "out/README.md").read_text()


def test_card_has_the_figures_of_the_run_and_no_others(run, tmp_path):
    configure(run, batch_size=64, max_epochs="None", output_dir="/home/alice")
    text = card(run, tmp_path)
    manifest = json.loads((run / "weights/step_3/manifest.json").read_text())
    assert text.count(manifest["hash"]) == 2 and "| `torch of the trainer` | `2.13.0` |" in text
    assert "| `reward/mean` | `0.25` | `0.25` | `0.5` | `0.5` | `▁▄█` |" in text, "of steps 0 to 2, each once"
    assert "| `words` | `3` | `8` | `0.5` | `0.25 to 0.75` |" in text and "| `words` | `2` |" not in text
    assert "| `batch_size` | `64` |" in text and "max_epochs" not in text and "staleness" not in text
    assert "license" not in text.split("---")[1] and "alice" not in text and str(MODEL.parent) not in text
    assert "base_model:" not in text, "a local directory is no model of the hub"


def test_card_of_a_run_without_files_has_no_empty_section(tmp_path):
    directory = publish_weights(tmp_path / "run", MODEL, 3)
    export_policy(directory, tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["Origin", "Licence"]
    assert "Policy after 3 steps of training" in text


def test_card_makes_names_inert(run, tmp_path):
    configure(run, name=HOSTILE)
    file = run / "configs/orchestrator.toml"
    file.write_text(f"[[env]]\nid = {json.dumps(HOSTILE)}\nidentity = {json.dumps(HOSTILE)}\n")
    text = card(run, tmp_path)
    assert "\x1b" not in text and "\n# [a]" not in text
    row = next(line for line in text.splitlines() if line.startswith("| `environment x"))
    assert row.count("|") == 3 and row.count("`") == 4, "markup is between the two backticks of a cell"


@pytest.mark.parametrize("is_of_several", [False, True])
def test_card_has_the_settings_of_the_trainer_and_what_the_run_changes(run, tmp_path, is_of_several):
    model = {"name": str(MODEL), "lora": {"rank": 16, "alpha": 32}}
    values = {"output_dir": str(run), "seed": 1, "num_minibatches": 2, "model": model}
    values |= {"optim": {"type": "adamw", "lr": 0.125}}
    write_config(TrainerConfig.model_validate(values), (run.parent if is_of_several else run) / "configs/trainer.toml")
    changes, expected = {"seed": 1}, {"seed": 1, "model.lora.rank": 16}
    if is_of_several:
        changes = {"seed": 5, "model": {"name": str(MODEL), "lora": {"name": "x", "rank": 4}}, "loss": {"eps": 0.5}}
        changes |= {"optim": {"weight_decay": 0.25}}
        expected = {"seed": 5, "model.lora.rank": 4, "optim.weight_decay": 0.25}
    values = {"output_dir": str(run), "env": [{"id": "reverse_text"}], **changes}
    write_config(OrchestratorConfig.model_validate(values), run / "configs/orchestrator.toml")
    text = card(run, tmp_path)
    for key, value in (expected | {"optim.lr": 0.125, "num_minibatches": 2, "model.lora.alpha": 32.0}).items():
        assert f"| `{key}` | `{value}` |" in text
    assert "| `optim.type` |" in text and "| `scheduler.type` |" in text and "model.lora.name" not in text


def test_card_has_the_validation_of_the_version_itself(run, tmp_path):
    rows = [{"step": step, "val/loss": loss} for step, loss in ((0, 2.0), (3, 0.5), (6, 8.0))]
    write(run / "metrics/trainer.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert "| `val/loss` | `2` | `0.5` | `2` | `0.5` |" in card(run, tmp_path)
