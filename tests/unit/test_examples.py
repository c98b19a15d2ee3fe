"""The examples run, and each extension is loaded through the keys that its head names."""

import importlib.util
import shlex
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from prime_rl.configs.advantage import CustomAdvantageConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.training.loss import CustomLossConfig
from prime_rl.orchestrator.algorithms.advantages import Scores, advantage_function
from prime_rl.rollouts.clients.inference_client import InferenceClient
from prime_rl.rollouts.rendering.renderer import Renderer
from prime_rl.rollouts.workers import worker_main
from prime_rl.trainer.losses.loss_functions import build_loss
from prime_rl.trainer.losses.loss_inputs import LossInputs
from tests.support.fake_engine import fake_engine
from tests.support.tiny_model import make_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def typed_command(path: Path) -> list[str]:
    """The arguments of `rl` in the head of an example."""
    head = path.read_text().split('"""')[1].replace("\\\n", " ")
    command = next(line for line in head.splitlines() if "uv run" in line)
    return shlex.split(command.split(" rl ", 1)[1])


@pytest.mark.slow
def test_minimal_loop_at_async_level_1_trains_on_the_sampler_before(monkeypatch):
    loop = load(EXAMPLES / "minimal_rl_loop.py", monkeypatch)
    monkeypatch.chdir(ROOT)
    settings = loop.Settings(steps=3, async_level=1, groups=4, rollouts=4, minibatches=1, lr=1e-3, seed=0)
    steps = list(loop.train(settings))
    assert [step for step, *_ in steps] == [0, 1, 2]
    assert [staleness for _, _, staleness, _ in steps] == [0, 1, 1]
    assert all(0 <= reward <= 1 and result.skipped == 0 for _, reward, _, result in steps)
    # Sampler and trainer compute the same log-probabilities as long as they have the same weights (I6).
    assert steps[0][3].means["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[2][3].means["mismatch_kl"] > 1e-6


@pytest.mark.parametrize("example", ["loss", "advantage", "curriculum"])
def test_command_of_an_example_resolves(example, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = RLConfig.load(typed_command(EXAMPLES / f"extend/{example}.py"))
    orchestrator = config.orchestrator
    blocks = {"loss": config.trainer.loss, "advantage": orchestrator.advantage, "curriculum": orchestrator.buffer}
    chosen = blocks[example]
    assert chosen.type == ("curriculum" if example == "curriculum" else "custom")
    assert chosen.import_path.startswith(f"examples.extend.{example}:")


def test_custom_loss_and_advantage_of_the_examples_are_bounded_masked_and_ranks(monkeypatch):
    monkeypatch.chdir(ROOT)
    loss = build_loss(CustomLossConfig(import_path="examples.extend.loss:bounded_reinforce", kwargs={"bound": 2.0}))
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -9.0, -1.0 + np.log(1.5), float("nan")])
    mask = torch.tensor([True, True, True, False])
    inputs = LossInputs(logprobs, sampler, torch.ones(4), mask, torch.zeros(4, dtype=torch.int64))
    loss(inputs).loss.sum().backward()
    np.testing.assert_allclose(logprobs.grad.numpy(), [-1.0, -2.0, -1 / 1.5, 0.0], rtol=1e-6)
    advantage = advantage_function(CustomAdvantageConfig(import_path="examples.extend.advantage:centred_ranks"))
    (ranks,) = advantage([Scores(np.array([0.0, 100.0, 1.0, 1.0]), np.ones(4, np.int64))])
    np.testing.assert_allclose(ranks, [-1.0, 1.0, 0.0, 0.0])


async def test_environment_of_the_example_rewards_and_measures(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(ROOT)
    tokenizer = make_tokenizer()
    config = RLConfig.load(typed_command(EXAMPLES / "extend/count_letters.py")[2:]).orchestrator.env[0]
    environment = worker_main.load(config, Renderer(tokenizer), "train")
    async with fake_engine() as fake, InferenceClient(fake.url, "m", "") as engine:
        replies = iter(["0", "10", "no idea"])
        fake.reply = lambda body: (
            [*tokenizer(next(replies), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
            "stop",
        )
        rollouts = await environment.run_group(0, 3, engine, {"temperature": 1.0}, 512)
    question = next(content for role, content in rollouts[0].text if role == "user")
    answer = question.split(" occur in ")[1].split("?")[0].count("a")
    by_reply = {rollout.text[-1][1].strip(): rollout for rollout in rollouts}
    assert by_reply["0"].reward == pytest.approx(1 / (1 + answer))
    assert by_reply["10"].reward == pytest.approx(1 / (1 + 10 - answer))
    assert by_reply["no idea"].reward == 0.0
    assert [by_reply[reply].metrics["is_number"] for reply in ("0", "10", "no idea")] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(("pattern", "most"), [("extend/*.py", 60), ("minimal_rl_loop.py", 250)])
def test_examples_are_short(pattern, most):
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob(pattern)) <= most
