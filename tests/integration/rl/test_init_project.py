"""What `rl init` writes runs on a CPU with the printed command, and the reward of the user's own data rises."""

from pathlib import Path

import numpy as np
import pytest

from prime_rl.entrypoints.init.project import main
from tests.support.command import Command, metrics_of
from tests.support.server import free_port

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

PORT = "--inference.server.port"


@pytest.mark.parametrize(
    "template, steps, rise", [("dataset", 20, 0.05), ("environment", 2, None), ("agent", 2, None), ("sft", 4, None)]
)
def test_project_of_each_template_runs(
    template: str, steps: int, rise: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cities = ("Vienna", "Brussels", "Ottawa", "Santiago", "Beijing", "Havana", "Cairo", "Helsinki")
    lines = [f'{number};"Which city is number ""{number}""?";{city}' for number, city in enumerate(cities)]
    Path("my.csv").write_text("\n".join(["id;Question;Answer", *lines]), encoding="utf-8-sig")
    main(["mine", "--data", "my.csv", "--template", template])
    name, port = ("sft", []) if template == "sft" else ("rl", [PORT, str(free_port())])
    run = Command(name, ["@", "mine.toml", "--max-steps", str(steps), *port], folder / "outputs")
    try:
        assert run.end() == 0, run.story()
    finally:
        run.clean_up()
    assert len(metrics_of(run.paths, "trainer")) >= steps
    if rise is not None:
        rewards = [line["metrics/my_reward"] for line in metrics_of(run.paths, "orchestrator")]
        assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + rise, rewards
