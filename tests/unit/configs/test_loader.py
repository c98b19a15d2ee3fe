"""Sources and their precedence, forms of flags, shared values of `rl`, help, and errors in one line."""

import os
import re
import shlex
import signal
from operator import attrgetter
from pathlib import Path

import pytest

from prime_rl.configs.environment import EnvConfig, EvalEnvConfig
from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.heartbeat import HeartbeatConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.loading.base_config import to_toml
from prime_rl.configs.loading.schema import _OUR_NAMES, find, hint, walk
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError
from prime_rl.entrypoints import rl
from tests.unit.configs.conftest import REPOSITORY

OPENENV = ("--orchestrator.env.type", "openenv", "--orchestrator.env.url", "http://a:1")
ROOTS = (InferenceConfig, OrchestratorConfig, RLConfig, SFTConfig, TrainerConfig)


@pytest.fixture(autouse=True)
def _in_workdir(workdir):
    """Every test runs in an empty folder."""


def write(name, text):
    with open(name, "w") as file:
        file.write(text)
    return name


def message(root, *argv):
    with pytest.raises(ConfigError) as caught:
        root.load(list(argv))
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- precedence -------------------------------------------------------------------------------------------------


def test_precedence_of_the_documented_example(monkeypatch):
    write("qwen8b.toml", '[model]\nname = "Qwen/Qwen3-8B"\n')
    write("qwen14b.toml", '[model]\nname = "Qwen/Qwen-14B"\n')
    files = ["@", "qwen8b.toml", "@", "qwen14b.toml"]
    assert InferenceConfig.load([]).model.name == "Qwen/Qwen3-0.6B"
    write(".env", "PRIME_MODEL__NAME=Qwen/Qwen3-1.7B\n")
    assert InferenceConfig.load([]).model.name == "Qwen/Qwen3-1.7B"
    monkeypatch.setenv("PRIME_MODEL__NAME", "Qwen/Qwen3-4B")
    assert InferenceConfig.load([]).model.name == "Qwen/Qwen3-4B"
    assert InferenceConfig.load(files[:2]).model.name == "Qwen/Qwen3-8B"
    assert InferenceConfig.load(files).model.name == "Qwen/Qwen-14B"
    assert InferenceConfig.load(files[2:] + files[:2]).model.name == "Qwen/Qwen3-8B"
    assert InferenceConfig.load([*files, "--model.name", "Qwen/Qwen3-32B"]).model.name == "Qwen/Qwen3-32B"


def test_environment_reaches_every_kind_of_key(monkeypatch):
    for name, value in {
        "PRIME_TRAINER__OPTIM__LR": "1e-3",
        "PRIME_TRAINER__DATA__FAKE": "{'batch_size': 4}",
        "PRIME_ORCHESTRATOR__ENV__ID": "other",
        "PRIME_ORCHESTRATOR__EVAL__ENV": '[{id = "a", args = {n = 1}}]',
        "PRIME_INFERENCE__VLLM__MAX_NUM_SEQS": "4",
        "PRIME_INFERENCE_GPU_IDS": "0",
        "PRIME_WANDB__OFFLINE": "true",
    }.items():
        monkeypatch.setenv(name, value)
    config = RLConfig.load([])
    assert config.trainer.optim.lr == 1e-3
    assert config.trainer.data.fake.batch_size == 4
    assert config.orchestrator.env[0].id == "other"
    assert config.orchestrator.eval.env[0].args == {"n": 1}
    assert config.inference.vllm == {"max_num_seqs": 4}
    assert config.wandb.offline is config.trainer.wandb.offline is True


def test_variables_of_other_programs_are_never_configuration(monkeypatch):
    for name in ("PRIME_INTELLECT_MODEL", "PRIME_API_KEY", "PRIME_RL_SUPERVISED", "PRIME_TEAM_ID"):
        monkeypatch.setenv(name, "secret")
    assert RLConfig.load([]) == RLConfig()


# --- flags ------------------------------------------------------------------------------------------------------


FILES = {
    "a.toml": "max_steps = 3\n[optim]\nlr = 1.0\nweight_decay = 0.5\n[ckpt]\ninterval = 7\n[model.ac]\nfreq = 2\n",
    "b.toml": "[optim]\nlr = 2.0\n",
    "none.toml": 'ckpt = "None"\n',
    "i.toml": "gpu_memory_utilization = 0.4\n",
}
ADAPTER = "--trainer.model.lora.publish adapter --trainer.model.lora.rank 24"
LOADED = [
    (TrainerConfig, "@ a.toml @ b.toml", {"max_steps": 3, "optim.lr": 2.0, "optim.weight_decay": 0.5}),
    (TrainerConfig, "--ckpt.resume-step 7", {"ckpt.resume_step": 7}),
    # switches and optional blocks
    (TrainerConfig, "--no-model.reshard-after-forward", {"model.reshard_after_forward": False}),
    (TrainerConfig, "--model.reshard-after-forward false", {"model.reshard_after_forward": False}),
    (TrainerConfig, "@ a.toml --ckpt", {"ckpt.interval": 7}),
    (TrainerConfig, "@ a.toml --no-ckpt", {"ckpt": None}),
    (TrainerConfig, "@ a.toml --no-ckpt --ckpt.interval 9", {"ckpt.interval": 9}),
    (TrainerConfig, "@ none.toml", {"ckpt": None}),
    (TrainerConfig, "@ a.toml --max-steps None", {"max_steps": None}),
    # dictionaries and lists
    (TrainerConfig, "--data.fake '{\"batch_size\": 128}'", {"data.fake.batch_size": 128}),
    (RLConfig, "--inference-gpu-ids 0 1", {"inference_gpu_ids": [0, 1]}),
    # values that the processes of `rl` share
    (RLConfig, "--inference --orchestrator.max-steps 3 --trainer.model.name m",
     {"max_steps": 3, "trainer.max_steps": 3, "model.name": "m", "orchestrator.model.name": "m",
      "inference.model.name": "m"}),
    (RLConfig, "--orchestrator.log.level debug", {"trainer.log.level": "info"}),
    (RLConfig, "--inference @ i.toml", {"inference.gpu_memory_utilization": 0.4}),
    (RLConfig, "--inference @ i.toml --gpu-memory-utilization None", {"inference.gpu_memory_utilization": 0.9}),
    (RLConfig, "--inference --max-model-len 99",
     {"inference.model.max_model_len": 99, "orchestrator.seq_len": 2048, "trainer.model.seq_len": 2048}),
    (RLConfig, "--inference --orchestrator.seq-len 99",
     {"inference.model.max_model_len": 99, "trainer.model.seq_len": 99}),
    (RLConfig, "--max-model-len 97", {"trainer.model.max_model_len": 97}),
    (RLConfig, "--inference-gpu-ids 0,1,2,3 --inference.parallel.tp 2", {"inference.parallel.dp": 2}),
    (RLConfig, "--inference.parallel.dp 3", {"inference_gpu_ids": [0, 1, 2], "trainer_gpu_ids": [3]}),
    (RLConfig, "--trainer-ranks 2", {"ranks": 2}),
    # the server gets the adapters that the trainer publishes; a larger rank is kept
    (RLConfig, f"--inference {ADAPTER}", {"inference.enable_lora": True, "inference.max_lora_rank": 24}),
    (RLConfig, f"--inference {ADAPTER} --inference.max-lora-rank 64",
     {"inference.enable_lora": True, "inference.max_lora_rank": 64}),
    (RLConfig, f"--inference {ADAPTER} --trainer.model.lora.publish merged",
     {"inference.enable_lora": False, "inference.max_lora_rank": 16}),
    (RLConfig, ADAPTER, {"inference": None}),
    (RLConfig, "--inference --trainer.model.router-replay", {"inference.enable_return_routed_experts": True}),
    # the run has its own slot
    (RLConfig, f"{ADAPTER} --output-dir 'runs/my run'", {"orchestrator.model.lora.name": "my_run"}),
    (RLConfig, f"{ADAPTER} --orchestrator.model.lora.name mine", {"orchestrator.model.lora.name": "mine"}),
    (RLConfig, "--trainer.model.lora.rank 8", {"orchestrator.model.lora.name": None}),
    # the orchestrator waits as long as at the start for its own server that `rl` restarts
    (RLConfig, "--inference --max-restarts 3", {"orchestrator.client.reconnect_seconds": 1800}),
    (RLConfig, "--inference --max-restarts 3 --orchestrator.wait-timeout-seconds 90",
     {"orchestrator.client.reconnect_seconds": 90}),
    (RLConfig, "--inference --max-restarts 3 --orchestrator.client.reconnect-seconds 7",
     {"orchestrator.client.reconnect_seconds": 7}),
    (RLConfig, "--inference", {"orchestrator.client.reconnect_seconds": 4}),
    (RLConfig, "--max-restarts 3", {"orchestrator.client.reconnect_seconds": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("root", "line", "values"), LOADED)
def test_command_line_sets_values(root, line, values):
    for name, text in FILES.items():
        write(name, text)
    config = root.load(shlex.split(line))
    assert {path: attrgetter(path)(config) for path in values} == values


def test_union_keeps_its_variant_and_drops_the_keys_of_another():
    assert TrainerConfig.load(["--optim.lr", "1"]).optim.type == "adamw"
    assert SFTConfig.load(["--optim.weight-decay", "0"]).optim.lr == SFTConfig().optim.lr != TrainerConfig().optim.lr
    file = write("t.toml", '[optim]\nbeta1 = 0.5\n[scheduler]\ntype = "cosine"\n')
    arguments = "--optim.momentum 0.3 --optim.type sgd --optim.lr 2 --scheduler.min-lr 1 --max-steps 9"
    config = TrainerConfig.load(["@", file, *arguments.split()])
    assert (config.optim.type, config.optim.momentum) == ("sgd", 0.3)
    assert (config.scheduler.type, config.scheduler.min_lr) == ("cosine", 1.0)
    chosen = OrchestratorConfig.load(["--buffer.type", "difficulty-pool", "--buffer.easy-border", "0.9"]).buffer
    assert (chosen.easy_threshold, chosen.hard_threshold) == (0.9, 0.2)


def test_environments_of_the_orchestrator_in_every_form():
    def ids(*argv):
        return [env.id for env in OrchestratorConfig.load(list(argv)).env]

    table = write("table.toml", '[env]\nid = "a"\n[env.args]\nn = 3\n')
    assert ids("@", table) == ["a"]
    assert ids("@", write("old.toml", '[environment]\nid = "a"\nargs = {n = 3}\n')) == ["a"]
    two = write("two.toml", '[[env]]\nid = "a"\n[[env]]\nid = "b"\n')
    assert ids("@", two) == ["a", "b"]
    assert ids("--env.id", "x") == ids("--env", "x") == ids("--environment.id", "x") == ["x"]
    assert ids("--env", "[{'id': 'x'}, {'id': 'y'}]") == ids("--env", "x,y") == ["x", "y"]
    assert ids("@", two, "--env.1.id", "c") == ["a", "c"]
    assert "env has 2 entries" in message(OrchestratorConfig, "@", two, "--env.id", "c")
    args = OrchestratorConfig.load(["@", table, "--env.args.min-words", "4", "--env.args.split", "test"]).env[0].args
    assert args == {"n": 3, "min_words": 4, "split": "test"}


def test_file_for_a_block_and_glued_file():
    write("o.toml", "batch_size = 8\n")
    write("p.toml", "rollouts_per_example = 4\n")
    config = RLConfig.load(["--orchestrator", "@", "o.toml", "@", "p.toml", "--max-steps", "3"])
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example, config.max_steps) == (8, 4, 3)
    write("s.toml", "temperature = 0.5\n")
    config = OrchestratorConfig.load(["@o.toml", "--sampling", "@", "s.toml"])
    assert (config.batch_size, config.sampling.temperature) == (8, 0.5)


# --- shared values of rl ------------------------------------------------------------------------------------------


def test_shared_values_reach_all_processes():
    config = RLConfig.load(
        ["--inference", "--model.name", "m", "--max-steps", "3", "--async-level", "1", "--seq-len", "64", "--seed", "5",
         "--output-dir", "o", "--exp-id", "e", "--wandb", "--log.level", "debug", "--inference.server.port", "8001"]
    )  # fmt: skip
    parts = (config.trainer, config.orchestrator, config.inference)
    assert {part.model.name for part in parts} == {"m"}
    assert {str(part.output_dir) for part in (config, *parts)} == {"o/e"}
    assert {part.log.level for part in parts} == {"debug"}
    for part in parts[:2]:
        assert (part.max_steps, part.async_level, part.seed) == (3, 1, 5)
    assert config.trainer.model.seq_len == config.orchestrator.seq_len == config.inference.model.max_model_len == 64
    assert config.orchestrator.client.port == 8001
    assert (config.trainer.wandb.name, config.orchestrator.wandb.name) == ("e-trainer", "e-orchestrator")


def test_shared_value_of_a_stronger_source_overrides_the_file_of_a_process(monkeypatch):
    file = write("t.toml", "max_steps = 30\n")
    assert RLConfig.load(["--trainer", "@", file, "--max-steps", "10"]).trainer.max_steps == 10
    assert RLConfig.load(["--trainer", "@", file, "--max-steps", "None"]).trainer.max_steps is None
    monkeypatch.setenv("PRIME_MAX_STEPS", "5")
    assert RLConfig.load(["--trainer", "@", file]).orchestrator.max_steps == 30
    assert RLConfig.load([]).trainer.max_steps == 5


def test_checkpoints_are_shared_and_wandb_is_not():
    config = RLConfig.load(["--trainer.ckpt.interval", "5", "--trainer.wandb"])
    assert config.orchestrator.ckpt.interval == config.ckpt.interval == 5
    assert config.orchestrator.wandb is config.wandb is None
    assert RLConfig.load(["--ckpt.resume-step", "4", "--ckpt.skip-scheduler"]).trainer.ckpt.skip_scheduler
    file = write("t.toml", "[trainer.wandb]\n[trainer.ckpt]\ninterval = 3\n")
    config = RLConfig.load(["@", file, "--no-wandb", "--no-ckpt"])
    assert config.trainer.wandb is config.trainer.ckpt is config.orchestrator.ckpt is None


def test_resolved_toml_loads_to_the_same_values():
    config = RLConfig.load(
        ["--inference", "--ckpt", "--wandb", "--exp-id", "e", "--trainer-gpus", "2", "--inference-gpus", "6",
         "--orchestrator.env", "[{'id': 'x', 'args': {'n': None}}, {'id': 'y'}]", "--inference.vllm.max-num-seqs", "4",
         "--trainer.optim.type", "muon", "--trainer.data.fake", "--max-model-len", "99"]
    )  # fmt: skip
    write("run.toml", to_toml(config))
    assert RLConfig.load(["@", "run.toml"]) == config


def test_variables_are_below_a_resolved_file_and_unread_by_processes_of_rl(monkeypatch):
    """A None of the file included; what is meant for `rl` may not even be a key of a process."""
    write("t.toml", to_toml(TrainerConfig()))
    monkeypatch.setenv("PRIME_MAX_STEPS", "5")
    monkeypatch.setenv("PRIME_CKPT__INTERVAL", "5")
    assert TrainerConfig.load(["@", "t.toml"]) == TrainerConfig()
    monkeypatch.setenv("PRIME_ORCHESTRATOR__WANDB__PROJECT", "p")
    assert "PRIME_ORCHESTRATOR__WANDB__PROJECT" in message(TrainerConfig)
    monkeypatch.setenv("PRIME_RL_SUPERVISED", "1")
    assert TrainerConfig.load([]) == TrainerConfig()


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "argv", "parts"),
    [
        (TrainerConfig, ["--optm.lr", "1"], ["--optm.lr", "did you mean --optim.lr?"]),
        (TrainerConfig, ["--no-such-thing"], ["--no-such-thing", "see `trainer --help`"]),
        (RLConfig, ["--dry-run=true"], ["--dry-run takes no value here"]),
        (RLConfig, ["--config", "a.yaml"], ["--config takes no value here; files are given as @ FILE.toml"]),
        (RLConfig, ["--trainer.optim.LR", "1"], ["did you mean --trainer.optim.lr?"]),
        (RLConfig, ["--max-steps", f"{2**63}"], ["max_steps = 9223372036854775808 (--max-steps) is too large"]),
        (RLConfig, ["--seed", "-1"], ["seed = '-1' (--seed)", "greater than or equal to 0"]),
        (RLConfig, ["--trainer-gpus", "0"], ["trainer_gpus = 0 (--trainer-gpus): ", "greater than or equal to 1"]),
        (RLConfig, ["--trainer-gpu-ids", "0,0"], ["trainer_gpu_ids names GPU 0 twice"]),
        (RLConfig, ["--orchestrator.env.name", "gsm8k"], ["name = 'gsm8k' is only a label; set env.id"]),
        (RLConfig, ["--orchestrator.env.id", ""], ["env.0", "id is empty; name an environment"]),
        (RLConfig, ["--orchestrator.env.url", "http://a:1"], ["env.0: url = 'http://a:1' needs type = \"openenv\""]),
        (RLConfig, ["--orchestrator.env.type", "openenv"], ["env.0: type = 'openenv' needs url", "not None"]),
        *(
            (RLConfig, [*OPENENV, "--orchestrator.env.url", url], ["needs url, such as http://localhost:8000, not"])
            for url in ("a:1", "http://a b", "http://")
        ),
        (RLConfig, [*OPENENV, "--orchestrator.env.package", ""], ["package"]),
        (RLConfig, [*OPENENV, "--orchestrator.env.id", "gsm8k"], ["id = 'gsm8k' and type = 'openenv' are two"]),
        (RLConfig, [*OPENENV, "--orchestrator.env.args", "{'base_url': 'http://b:1'}"], ["are two servers; set url"]),
        (RLConfig, ["--orchestrator.env.type", "gym"], ["env.0.type = 'gym' (--orchestrator.env.type)", "'openenv'"]),
        (RLConfig, ["--output-dir", "~no-such-user/x"], ["output_dir = ~no-such-user/x (--output-dir)"]),
        (RLConfig, ["--sampling.temperatur", "1"], ["did you mean --orchestrator.sampling.temperature?"]),
        (RLConfig, ["--vllm.max-num-seqs", "1"], ["did you mean --inference.vllm.max-num-seqs?"]),
        (RLConfig, ["--ckpt-interval", "1"], ["did you mean --ckpt.interval?"]),
        (RLConfig, ["--actor.rollout.n", "8"], ["did you mean --orchestrator.rollouts-per-example?"]),
        (RLConfig, ["--orchestrator.env.args", "words=9"], ["valid dictionary; set orchestrator.env.0.args.KEY"]),
        (TrainerConfig, ["--loss.type", "custom"], ["loss.import_path is not set: name your function"]),
        (TrainerConfig, ["--no-optim.lr"], ["--optim.lr", "neither a switch nor optional"]),
        (TrainerConfig, ["--optim.lr", "abc"], ["optim.lr = 'abc'", "--optim.lr", "number"]),
        *((TrainerConfig, ["--optim.lr", value], ["optim.lr"]) for value in ("inf", "-inf", "nan")),
        (TrainerConfig, ["--optim.lr"], ["--optim.lr needs a value"]),
        (RLConfig, ["--ckpt.resume-step", "4", "--ckpt.skip-dataloader"], ["ckpt.skip_dataloader is for sft"]),
        (RLConfig, ["--ckpt.resume-step", "latest"], ["ckpt.resume_step = 'latest'", "-1 is the latest complete one"]),
        (TrainerConfig, ["--max-steps", "0"], ["max_steps = '0'", "greater than or equal to 1"]),
        (TrainerConfig, ["--optim.type", "adam"], ["optim.type = 'adam'", "--optim.type", "adamw"]),
        (TrainerConfig, ["@", "nope.toml"], ["nope.toml does not exist"]),
        (TrainerConfig, ["@"], ["@ is not followed by"]),
        (TrainerConfig, ["@", "."], [". cannot be read"]),
        (TrainerConfig, ["nope"], ['unexpected argument "nope"']),
        (TrainerConfig, ["--ckpt", "5"], ["--ckpt is a block", '"5"']),
        (TrainerConfig, ["--max-steps", "@", "x.toml"], ["--max-steps is not a block"]),
        (TrainerConfig, ["--data.fake", "{'batch_sise': 3}"], ["data.fake.batch_sise", "data.fake.batch_size"]),
        (TrainerConfig, ["--weight-broadcast.type", "nccl", "--device", "cpu"], ["'nccl' needs a GPU", "filesystem"]),
        (
            TrainerConfig,
            ["--weight-broadcast.type", "ipc", "--model.lora.publish", "adapter"],
            ["'ipc' sends whole models", "'adapter'", "merged"],
        ),
        (
            RLConfig,
            ["--trainer.weight-broadcast.type", "nccl", "--inference", "--trainer-gpu-ids", "0"],
            ["'nccl' cannot join two processes on one GPU", "share [0]", "ipc"],
        ),
        (
            RLConfig,
            ["--trainer.weight-broadcast.type", "nccl", "--inference.parallel.tp", "2", "--inference-gpu-ids", "0,1",
             "--trainer-gpu-ids", "2"],
            ["'nccl' is not supported with inference.parallel.tp = 2", "/dev/shm"],
        ),
        (
            RLConfig,
            ["--trainer.weight-broadcast.type", "ipc", "--inference"],
            ["trainer_gpu_ids = [1], inference_gpu_ids = [0]", "nccl"],
        ),
        (
            RLConfig,
            ["--trainer.weight-broadcast.type=nccl", "--orchestrator.eval.benchmarks=gsm8k",
             "--orchestrator.eval.mode=pinned", "--orchestrator.eval.base-url=http://a:1"],
            ["orchestrator.eval.base_url", "'nccl' writes none but the last"],
        ),
        (OrchestratorConfig, ["--batch-size", "10", "--rollouts-per-example", "3"], ["10", "3", "multiple"]),
        (OrchestratorConfig, ["--env", "[]"], ["env", "at least 1"]),
        (
            OrchestratorConfig,
            ["--env.id", "x", "--env.max-rollouts-per-minute", "0.1"],
            ["env.max_rollouts_per_minute = 0.1", "wait_timeout_seconds = 1800"],
        ),
        (
            EvalConfig,
            ["--sampling.min-tokens", "6", "--sampling.max-tokens", "5"],
            ["min_tokens = 6 is above max_tokens = 5"],
        ),
        (OrchestratorConfig, ["--env.2.id", "x"], ["gap"]),
        (InferenceConfig, ["--vllm.api_key", "x"], ["vllm.api_key", "secret"]),
        (OrchestratorConfig, ["--env.args.judge_api_key", "x"], ["judge_api_key", "secret"]),
        (RLConfig, ["--trainer"], ["--trainer is a block", "@ file.toml"]),
        (RLConfig, ["--exp-id", "../x"], ["exp_id", "../x"]),
        (RLConfig, ["--trainer.model.seq-len", "100", "--orchestrator.seq-len", "200"], ["100", "200", "shorter"]),
        (RLConfig, ["--inference.server.port", "1", "--orchestrator.client.port", "2"], ["server.port", "client.port"]),
        (RLConfig, ["--inference.parallel.dp", "2", "--inference-gpus", "3"], ["3 GPUs", "dp"]),
        (RLConfig, ["--inference-gpus", "2", "--inference-gpu-ids", "0"], ["inference_gpus = 2", "differ"]),
        (RLConfig, ["--trainer.model.tp", "2"], ["trainer.model.tp 2 does not divide the 1 ranks", "trainer_gpu_ids"]),
        (RLConfig, ["--trainer.model.cp", "2", "--trainer-ranks", "3"], ["model.cp 2", "3 ranks", "(trainer_ranks"]),
        (RLConfig, ["--inference.model.max-model-len", "99", "--trainer.model.max-model-len", "98"], ["differ"]),
        (RLConfig, ["--inference", *ADAPTER.split(), "--no-inference.enable-lora"],
         ["lora.publish = 'adapter' needs inference.enable_lora = true"]),
        (RLConfig, ["--inference", *ADAPTER.split(), "--inference.max-lora-rank", "8"],
         ["lora.rank = 24 is more than inference.max_lora_rank = 8"]),
        (RLConfig, ["--inference", "--trainer.model.router-replay", "--no-inference.enable-return-routed-experts"],
         ["router_replay needs inference.enable_return_routed_experts = true"]),
        (RLConfig, ["--trainer.max-concurrent-runs", "4"], ["max_concurrent_runs = 4 needs --model.lora"]),
        (OrchestratorConfig, ["--length-aware-admission=many"], ["length_aware_admission"]),
        *((OrchestratorConfig, ["--client.base-url", url], ["client.base_url =", "is not a URL such as http://localhost"])
          for url in ("not a url", "localhost:8000/v1", "http://", "http://a:1/v1,b:2", "ftp://a/v1", "http://a:80000")),
        (EvalConfig, ["--env.id", "a", "--steps", "3"], ["steps selects versions of weights_dir; set --weights-dir"]),
        (OrchestratorConfig, ["--buffer.easy-threshold", "0.9"],
         ["buffer.easy_threshold = '0.9' (--buffer.easy-threshold): needs type = difficulty-pool"]),
        (OrchestratorConfig,
         ["--buffer.type", "difficulty-pool", "--buffer.easy-fraction", "0.9", "--buffer.hard-fraction", "0.2"],
         ["buffer: easy_fraction = 0.9 and hard_fraction = 0.2 add up to more than 1"]),
        (OrchestratorConfig, ["--env.name", ".."], ["env.0.name = .. (--env.name): it is part of file names"]),
        (EvalConfig, ["--num-examples", "0"],
         ["num_examples = 0 (--num-examples): a number of examples is at least 1, or -1 for all"]),
        (OrchestratorConfig, ["--env.name", "a\nb"], ["it is part of file names"]),
        (SFTConfig, ["--output-dir", ""], ["output_dir =  (--output-dir) is empty; set a directory"]),
        *((RLConfig, flag, ["is neither TOML, JSON nor Python; write it like"])
          for flag in (["--orchestrator.env", "{id=dataset}"], ["--orchestrator.env", '[{id="a.py"}, {id="b.py"'],
                       ["--orchestrator.env.args", "{ data_path = q.csv }"])),
        (OrchestratorConfig, ["--env.name", "a" * 201], ["at most 200 bytes"]),
    ],
)  # fmt: skip
def test_bad_input_raises_in_one_line(root, argv, parts):
    text = message(root, *argv)
    for part in parts:
        assert part in text


def test_copies_of_a_shared_value_are_one_problem():
    assert message(RLConfig, "--max-steps", "x").endswith("; max_steps: Steps of the run; None is unlimited")
    text = message(RLConfig, "--max-steps", "x", "--trainer.optim.lr", "y")
    assert text.endswith("is unlimited (also wrong: trainer.optim.lr)")


@pytest.mark.extended
def test_hint_of_names_of_other_programs_leads_to_a_key():
    for name, end in _OUR_NAMES.items():
        roots = [root for root in (RLConfig, SFTConfig) if f"{end}?" in hint(root, name.split("."))]
        assert roots or find(RLConfig, name.split(".")), f"{name}: no key ends with {end}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[trainer.optim]\nlrr = 1\n", "unknown key trainer.optim.lrr (a.toml); did you mean trainer.optim.lr?"),
        ("[optim\nlr = 1\n", "a.toml is not TOML"),
        ("max_steps = " + "[" * 5000, "a.toml is not TOML: maximum recursion depth exceeded"),
        ('output_dir = "a\\u0000b"', "output_dir (a.toml) has a null character"),
        ('"trainer.optim.lr" = 1', "unknown key trainer.optim.lr (a.toml); remove the quotes around keys with dots"),
        ('trainer.optim.lr = "fast"', "trainer.optim.lr = 'fast' (a.toml)"),
        ("trainer.optim = 3", "trainer.optim = 3 (a.toml) is a block"),
        # pydantic would convert a bool to 1 or 0
        ("ckpt.resume_step = true", "ckpt.resume_step = true (a.toml): input should be a number; "),
        (
            "orchestrator.env = [{id = 'x', weight = true}]",
            "orchestrator.env.0.weight = true (a.toml): input should be a",
        ),
        ("trainer_gpu_ids = [0, true]", "trainer_gpu_ids.1 = true (a.toml): input should be a number; "),
    ],
)
def test_bad_file_is_named(text, shown):
    assert shown in message(RLConfig, "@", write("a.toml", text))


def test_missing_file_suggests_the_closest_name():
    write("cpu.toml", "")
    assert message(RLConfig, "@", "cpus.toml") == "configuration file cpus.toml does not exist; did you mean cpu.toml?"
    assert message(RLConfig, "@cpus.toml") == message(RLConfig, "@", "cpus.toml")
    assert "(looked in " in message(RLConfig, "@", "quite_different")
    os.symlink("nowhere", "a_link.toml")
    assert "a_link.toml?" not in message(RLConfig, "@", "a_link.toml")


def test_actions_may_have_underscores(capsys):
    assert help_text(RLConfig, "--help_all", capsys) == help_text(RLConfig, "--help-all", capsys)


def test_output_dir_below_a_file_is_refused_before_anything_is_written():
    write("file", "")
    os.symlink("nowhere", "link")
    assert "file/run cannot be written: file is a file; set" in message(RLConfig, "--output-dir", "file/run")
    assert "link is a symbolic link to nothing" in message(SFTConfig, "--output-dir", "link")


def test_file_with_a_byte_order_mark_and_a_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    write("a.toml", '\ufeffoutput_dir = "~/runs"\n')
    assert RLConfig.load(["@", "a.toml"]).trainer.output_dir == Path("/home/user/runs")


@pytest.mark.parametrize("name", ["PRIME_TRAINER_OPTIM_LR", "PRIME_TRAINERS__OPTIM__LR", "PRIME_TEAM_ID"])
def test_variable_that_is_almost_a_key_logs_a_warning(monkeypatch, capsys, name):
    monkeypatch.setenv(name, "1")
    RLConfig.load([])
    warning = f"warning: {name} is no key and is ignored; did you mean PRIME_TRAINER__OPTIM__LR?\n"
    assert capsys.readouterr().err == ("" if name == "PRIME_TEAM_ID" else warning)


def test_bad_variable_is_named(monkeypatch):
    monkeypatch.setenv("PRIME_OUTPUT_DIR", "")
    assert "PRIME_OUTPUT_DIR) is empty" in message(RLConfig)
    monkeypatch.setenv("PRIME_OPTIM__LRR", "1")
    assert "PRIME_OPTIM__LRR" in message(TrainerConfig)


def test_conflict_names_both_places():
    write("t.toml", "async_level = 1\n")
    assert message(RLConfig, "--trainer", "@", "t.toml", "--orchestrator.async-level", "2") == (
        "trainer.async_level = 1 (t.toml) and orchestrator.async_level = 2 (--orchestrator.async-level) differ; "
        "set it once, with --async-level"
    )


# --- help, dry run, warnings ------------------------------------------------------------------------------------


def help_text(root, option, capsys):
    with pytest.raises(SystemExit) as exit_info:
        root.load([option])
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("root", ROOTS)
def test_help_lists_the_common_keys_or_every_key_with_doc_and_default(root, capsys):
    text = help_text(root, "--help-all", capsys)
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN, "a lost connection would end the process"
    for path, node in walk((root,)):
        assert node.field.description, path
        dotted = ".".join(str(part) for part in path)
        shown = f"[{dotted}]" if node.variants else "--" + dotted.replace("_", "-") + " "
        assert shown in text or path[-1] == "type", path
    assert max(len(line) for line in text.splitlines()) <= 120

    text = help_text(root, "--help", capsys)
    last = f"These are the common keys. `uv run {root.command_name} --help-all` shows all keys."
    assert text.splitlines()[-1] == last
    keys = re.findall(r"^  --([\w.-]+)", text, re.M)
    assert len(set(keys)) == len(keys) <= 49
    assert {"output-dir", "log.level"} <= set(keys)
    if root is RLConfig:
        common = {"model.name", "max-steps", "trainer.optim.lr", "orchestrator.batch-size", "ckpt.interval"}
        assert common <= set(keys) and not {"trainer.max-steps", "trainer.model.name"} & set(keys)


@pytest.mark.parametrize(
    ("root", "arguments"),
    [*((root, []) for root in ROOTS), (RLConfig, ["@", str(REPOSITORY / "configs/reverse_text/cpu.toml")])],
)
def test_dry_run_prints_a_file_that_loads_to_the_same_values_and_writes_nothing(root, arguments, capsys, tmp_path):
    arguments = [*arguments, "--output-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as exit_info:
        root.load([*arguments, "--dry-run"])
    assert exit_info.value.code == 0
    assert not (tmp_path / "run").exists()
    write("my.toml", capsys.readouterr().out)
    assert root.load(["@", "my.toml"]) == root.load(arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--trainer.optm.lr", "1"], "error: unknown key --trainer.optm.lr; did you mean --trainer.optim.lr?\n"),
        ([], "error: nothing to run; usage: uv run rl @ FILE.toml"),
    ],
)
def test_entry_points_report_one_line_and_exit_2(arguments, error, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rl", *arguments])
    with pytest.raises(SystemExit, match="2"):
        rl.main()
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(error) and err.count("\n") == 1


def test_heartbeat_limits_reach_all_processes_and_warn_before_dead():
    keys = ["--heartbeat.warn-after-seconds", "3", "--heartbeat.dead-after-seconds", "20", "--inference"]
    config = RLConfig.load(keys)
    for part in (config, config.trainer, config.orchestrator, config.inference):
        assert (part.heartbeat.limits.warn_after_seconds, part.heartbeat.limits.dead_after_seconds) == (3, 20)
    assert TrainerConfig.load(["--heartbeat.dead-after-seconds", "2"]).heartbeat.limits.warn_after_seconds == 2


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_trainer_ipc_with_expandable_segments_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(ConfigError, match=f"'ipc'.*{name}=.*remove expandable_segments"):
        TrainerConfig.load(["--weight-broadcast.type", "ipc"])
    assert TrainerConfig.load(["--weight-broadcast.type", "nccl"]).weight_broadcast.type == "nccl"
    monkeypatch.setenv(name, "expandable_segments:False")
    assert TrainerConfig.load(["--weight-broadcast.type", "ipc"]).weight_broadcast.type == "ipc"


# --- deprecated names -------------------------------------------------------------------------------------------


def test_deprecated_key_sets_the_new_one_and_logs_one_warning(capsys, monkeypatch):
    assert TrainerConfig.load(["--minibatches", "3"]).num_minibatches == 3
    warning = "warning: minibatches (--minibatches) is deprecated; use num_minibatches\n"
    assert capsys.readouterr().err == warning
    file = write("t.toml", '[trainer.optim]\nbetas1 = 0.5\n[orchestrator]\non_refused_weights = "keep"\n')
    config = RLConfig.load(["@", file])
    assert (config.trainer.optim.beta1, config.orchestrator.on_invalid_weights) == (0.5, "keep_previous")
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "warning: orchestrator.on_refused_weights (t.toml) is deprecated; use on_invalid_weights = keep_previous",
        "warning: trainer.optim.betas1 (t.toml) is deprecated; use beta1",
    ]
    monkeypatch.setenv("PRIME_GRACE_SECONDS", "9")
    assert RLConfig.load([]).grace_timeout_seconds == 9


def test_run_that_an_earlier_release_wrote_still_loads():
    old = to_toml(RLConfig.load(["--inference", "--ckpt"]))
    old = old.replace("grace_timeout_seconds", "grace_seconds").replace("num_minibatches = 1", "minibatches = 1")
    old = old.replace("warn_after_seconds", "silence").replace("dead_after_seconds", "timeout")
    old = old.replace('on_invalid_weights = "fail"', 'on_refused_weights = "end"').replace("beta1", "betas1")
    assert RLConfig.load(["@", write("run.toml", old)]) == RLConfig.load(["--inference", "--ckpt"])
    assert HeartbeatConfig.model_validate({"silence": 5, "timeout": 60}) == HeartbeatConfig(), "doctor reads run.toml"


def test_every_deprecated_name_is_an_alias_of_an_existing_key():
    def models(of):
        return {of, *(model for _, node in walk((of,)) for model in node.variants)}

    for model in set().union(*(models(root) for root in ROOTS)):
        assert {key.partition(".")[0] for key in model.deprecated.values()} <= set(model.model_fields), model
        assert not set(model.deprecated) & set(model.model_fields), model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{ id = "dataset", args = { grader = "number" } }', [["dataset", {"grader": "number"}]]),
        ('{"id": "dataset", "args": {"grader": "number"}}', [["dataset", {"grader": "number"}]]),
        ("{'id': 'dataset', 'args': {'grader': 'number'}}", [["dataset", {"grader": "number"}]]),
        ('[{id="a"}, {id="b", args={deep=[true, {x=1.5}]}}]', [["a", {}], ["b", {"deep": [True, {"x": 1.5}]}]]),
        ('[{"id": "a"}, {"id": "b"}]', [["a", {}], ["b", {}]]),
        ('["a", "b"]', [["a", {}], ["b", {}]]),
        ('{ type = "openenv", url = "http://a:1" }', [["openenv", {"base_url": "http://a:1"}]]),
        ("{timeout_seconds = 7}", [["other", {"words": 1}]]),  # without an id it changes the only entry
    ],
)
def test_list_of_blocks_is_read_as_toml_json_or_python(text, expected):
    file = write("t.toml", '[[orchestrator.env]]\nid = "other"\nargs = { words = 1 }\n')
    for arguments in (["--orchestrator.env", text], [f"--orchestrator.env={text}"]):
        config = RLConfig.load(["@", file, *arguments])
        assert [[env.id, env.args] for env in config.orchestrator.env] == expected


def test_openenv_is_another_spelling_of_id_package_and_arguments():
    spelling = {"type": "openenv", "url": "http://a:1", "name": "game", "args": {"resets": [{}]}}
    args = {"resets": [{}], "base_url": "http://a:1"}
    same = {"id": "openenv", "package": "verifiers[openenv]>=0.4", "name": "game", "args": args}
    assert EnvConfig(**spelling) == EnvConfig(**same)
    assert EvalEnvConfig(**spelling, package="./verifiers[openenv]").package == "./verifiers[openenv]"
    config = OrchestratorConfig.load(["--env", str([spelling])])
    assert OrchestratorConfig.load(["@", write("saved.toml", to_toml(config))]) == config


@pytest.mark.parametrize(
    ("argv", "batches"),
    [
        ("", 1), ("--length-aware-admission", 1), ("--no-length-aware-admission", 0), ("@ true.toml", 1),
        ("@ false.toml", 0), ("--length-aware-admission false", 0), ("--length-aware-admission=8", 8),
        ("--length-aware-admission --seed 3", 1),
    ],
)  # fmt: skip
def test_switch_that_is_also_a_number_becomes_a_number(argv, batches):
    for value in ("true", "false"):
        write(f"{value}.toml", f"length_aware_admission = {value}\n")
    config = OrchestratorConfig.load(argv.split())
    assert config.length_aware_admission == batches and not isinstance(config.length_aware_admission, bool)
    reloaded = OrchestratorConfig.load(["@", write("saved.toml", to_toml(config))])
    assert reloaded.length_aware_admission == batches


def test_environments_with_equal_names_are_refused(tmp_path):
    environments = f'[{{id="{tmp_path}/a/mine.py"}}, {{id="{tmp_path}/b/mine.py"%s}}]'
    with pytest.raises(ConfigError, match=r"two environments are called 'mine'; give each a different env\.name"):
        OrchestratorConfig.load(["--env", environments % ""])
    config = OrchestratorConfig.load(["--env", environments % ', name="other"'])
    assert [env.label for env in config.env] == ["mine", "other"]


@pytest.mark.parametrize("key", ["--model.revision", "--trainer.model.revision", "--inference.vllm.revision"])
def test_revision_of_the_model_reaches_all_processes(key):
    config = RLConfig.load(["--inference", key, "v1.2"])
    models = [config.trainer.model, config.orchestrator.model, config.inference.model]
    assert [model.revision for model in models] == ["v1.2"] * 3
