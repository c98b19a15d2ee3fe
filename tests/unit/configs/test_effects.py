"""Keys without effect in a command or combination: a warning with the reason, or an error in one line."""

import re

import pytest

from prime_rl.configs.environment import EvalEnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _in_workdir(workdir):
    """Every test runs in an empty folder, without the variables."""


@pytest.mark.parametrize(
    ("root", "argv", "warning"),
    [
        (TrainerConfig, "--wandb --no-wandb.log-extras.samples", "wandb.log_extras.samples has no effect: only"),
        (EvalConfig, "--env.id a --wandb.log-extras.interval 5", "wandb.log_extras.interval has no effect: each"),
        (EvalConfig, "--env.id a --client.reconnect-seconds 9", "client.reconnect_seconds has no effect here"),
        (OrchestratorConfig, "--oversampling-factor 2", "oversampling_factor has no effect unless max_off_policy"),
        (OrchestratorConfig, "--ckpt.save-async", "ckpt.save_async has no effect on the orchestrator"),
        (OrchestratorConfig, "--ckpt.resume-step 1 --ckpt.skip-optimizer", "ckpt.skip_optimizer has no effect on the"),
        (TrainerConfig, "--ckpt.skip-optimizer", "ckpt.skip_optimizer has no effect without ckpt.resume_step"),
        (OrchestratorConfig, "--client.base-url http://a/v1 --client.port 9",
         "client.port has no effect if client.base_url"),
        (OrchestratorConfig, "--max-concurrent 9 --concurrency.max 9", "concurrency.max has no effect if max_con"),
        (OrchestratorConfig, "--no-concurrency.adaptive --concurrency.min 9", "concurrency.min has no effect without"),
        (TrainerConfig, "--ckpt.keep-interval 3", "ckpt.keep_interval has no effect without ckpt.keep_last"),
        (TrainerConfig, "--bench-steps 3", "bench_steps has no effect without --bench"),
        (RLConfig, "--orchestrator.oversampling-factor 2", "orchestrator.oversampling_factor has no effect unless"),
        (RLConfig, "--inference-gpu-ids 3", "inference_gpu_ids starts no server without an .inference. block"),
        (TrainerConfig, "--orchestrator.wandb.id x", "orchestrator has no effect on the trainer; give it to the"),
        (RLConfig, "--seq-len 512 --orchestrator.sampling.max-tokens 5000", r".*max_tokens = 5000.*seq_len = 512"),
        (OrchestratorConfig, "--seq-len 512 --env {'id':'a','sampling':{'max_tokens':5000}}",
         r"env\.sampling\.max_tokens = 5000"),
        (RLConfig, "--seq-len 512 --orchestrator.eval.env.id a --orchestrator.eval.sampling.max-tokens 5000",
         r"orchestrator\.eval\.sampling\.max_tokens = 5000"),
        (RLConfig, "--max-steps 60 --trainer.scheduler.warmup-steps 500", ".*warmup_steps = 500.*max_steps = 60"),
        (RLConfig, "--orchestrator.batch-size 8 --trainer.num-minibatches 3", ".*minibatches = 3.*batch_size = 8|.*"
         "batch_size = 8.*minibatches = 3"),
    ],
)  # fmt: skip
def test_key_without_effect_is_one_warning(root, argv, warning, capsys):
    root.load(argv.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"warning: {warning}", line), line


@pytest.mark.parametrize(
    ("root", "argv"),
    [
        (OrchestratorConfig, "--oversampling-factor 2 --max-off-policy-steps 4"),
        (OrchestratorConfig, "--max-concurrent 9 --concurrency.initial 9"),
        (TrainerConfig, "--ckpt.keep-interval 3 --ckpt.keep-last 1"),
        (RLConfig, "--ckpt.keep-last 3 --ckpt.save-async --wandb.log-extras.interval 3"),
        (TrainerConfig, "--wandb.log-extras.interval 3"),
        (RLConfig, "--inference --inference-gpu-ids 3"),
        (OrchestratorConfig, "--rollouts-per-example 1 --bench"),
        (OrchestratorConfig, "--rollouts-per-example 1 --advantage.type none"),
        (RLConfig, "--orchestrator.rollouts-per-example 1 --algorithm reinforce++"),
    ],
)
def test_key_with_an_effect_gives_no_warning(root, argv, capsys):
    root.load(argv.split())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", ["PRIME_RL_SUPERVISED", "RANK"])
def test_warnings_are_printed_once_per_run(variable, capsys, monkeypatch):
    monkeypatch.setenv(variable, "1")
    TrainerConfig.load(["--ckpt.keep-interval", "3"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("root", "argv", "parts"),
    [
        (SFTConfig, ["--model.seq-len", "4096"], ["model.seq_len = 4096", "data.seq_len"]),
        (EvalConfig, ["--env.id", "a", "--env.weight", "2"], ["env.0.weight = 2", "env.num_examples"]),
        (OrchestratorConfig, ["--eval.env.id", "a", "--eval.env.weight", "2"], ["eval.env.0.weight = 2"]),
        (TrainerConfig, ["--no-nodes-share-directory", "--ckpt"], ["ckpt", "nodes_share_directory = false"]),
        (RLConfig, ["--gpu-memory-utilization", "0.5"], ["gpu_memory_utilization", "no [inference] block"]),
        (OrchestratorConfig, ["--rollouts-per-example", "1"], ["rollouts_per_example = 1", "'grpo'", "= 8"]),
        (RLConfig, ["--algorithm=rloo", "--orchestrator.rollouts-per-example=1"], ["every advantage", "'rloo'"]),
        (InferenceConfig, ["--parallel.start-rank", "2", "--parallel.dp", "4"], ["start_rank = 2", "--headless"]),
        (OrchestratorConfig, ["--sampling.repetition-penalty", "1.2"], ["repetition_penalty is not supported"]),
        (OrchestratorConfig, ["--env.sampling", "{'repetition_penalty': 1.2}"],
         ["env.sampling of environment 'reverse_text'", "repetition_penalty is not supported"]),
        (SynthesizeConfig, ["--env.sampling", "{'temprature': 1}"], ["env.sampling", "temprature"]),
    ],
)  # fmt: skip
def test_misleading_key_raises_in_one_line(root, argv, parts):
    with pytest.raises(ConfigError) as caught:
        root.load(argv)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_weight_of_a_training_environment_does_not_stop_validation():
    config = OrchestratorConfig.load(["--env.weight", "3", "--val.num-examples", "2"])
    assert EvalEnvConfig.from_training(config.env[0]).weight == 1.0


@pytest.mark.parametrize("flag", ["--no-trainer.wandb.log-extras.distributions", "--no-orchestrator.wandb.offline"])
def test_negated_flag_switches_no_block_on(flag, capsys):
    config = RLConfig.load([flag])
    assert (config.wandb, config.trainer.wandb, config.orchestrator.wandb) == (None, None, None)
    assert capsys.readouterr().err == f"warning: {flag} has no effect: its block is off\n"


def test_negated_flag_changes_a_block_that_a_shared_value_switches_on(capsys):
    config = RLConfig.load(["--wandb", "--wandb.log-extras", "--no-orchestrator.wandb.log-extras.samples"])
    assert config.orchestrator.wandb.log_extras.samples is False
    assert config.wandb.log_extras.samples is True
    assert capsys.readouterr().err == ""
    assert TrainerConfig.load(["--no-ckpt.save-async", "--ckpt.save-async"]).ckpt.save_async is True


def test_wandb_variables_count_where_the_configuration_is_silent(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "p")
    monkeypatch.setenv("WANDB_ENTITY", "e")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert SFTConfig.load([]).wandb is None
    wandb = SFTConfig.load(["--wandb"]).wandb
    assert (wandb.project, wandb.entity, wandb.offline) == ("p", "e", True)
    config = RLConfig.load(["--wandb", "--wandb.project", "q", "--no-wandb.offline"])
    values = {(part.project, part.entity, part.offline) for part in (config.trainer.wandb, config.orchestrator.wandb)}
    assert values == {("q", "e", False)}
    assert RLConfig.load(["--trainer.wandb.entity", "x", "--wandb"]).trainer.wandb.entity == "x"
    wandb = RLConfig.load(["--orchestrator.wandb", "--no-orchestrator.wandb.offline"]).orchestrator.wandb
    assert (wandb.name, wandb.group, wandb.offline) == ("Qwen3-0.6B-orchestrator", "Qwen3-0.6B", False)
    monkeypatch.setenv("WANDB_MODE", "dryrun")  # W&B's older name for it; such a run must not be uploaded
    assert SFTConfig.load(["--wandb"]).wandb.offline is True
