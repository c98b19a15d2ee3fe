"""Every command line and TOML block of the user's documents, verbatim, and what it must mean."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from scripts.prime_rl_train import leave_torchrun

from prime_rl.configs.eval import EvalConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.synthesize import SynthesizeConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.errors import ConfigError

ROOT = Path(__file__).parents[3]

COMMANDS = {
    config.command_name: config
    for config in (
        EvalConfig,
        InferenceConfig,
        OrchestratorConfig,
        RLConfig,
        SFTConfig,
        SynthesizeConfig,
        TrainerConfig,
    )
}

SINGLE_GPU = """
inference_gpu_ids = [0]
trainer_gpu_ids = [0]

[inference]
gpu_memory_utilization = 0.50  # Leave room for trainer!

[trainer.model.ac]
freq = 1  # Activation checkpointing

[orchestrator]
batch_size = 8
rollouts_per_example = 2

[orchestrator.sampling]
max_tokens = 2000  # Must fit within max_model_len - input_tokens
"""

FILES = {
    "config.toml": SINGLE_GPU, "eval_config.toml": '[[env]]\nid = "reverse_text"\n',
    "path/to/train.toml": "max_steps = 40\n", "path/to/orch.toml": "max_steps = 40\n", "path/to/infer.toml": "",
    "path/to/config.toml": '[model]\nname = "Qwen/Qwen3-8B"\n', "qwen8b.toml": '[model]\nname = "Qwen/Qwen3-8B"\n',
    "qwen14b.toml": '[model]\nname = "Qwen/Qwen-14B"\n',
}  # fmt: skip

# `...` stands for further arguments in the documents and is left out; so are `VAR=value` and `export`, which the
# precedence tests set. A dict of dotted keys says what the line must have set.
LINES = [
    # The scraped documentation.
    ("uv run rl --trainer @ path/to/train.toml --orchestrator @ path/to/orch.toml --inference @ path/to/infer.toml",
     {"trainer.max_steps": 40, "max_steps": 40}),
    ("uv run sft ...", {"data.type": "sft"}),
    ("uv run eval @ configs/debug/eval/single_env.toml", {"env.0.id": "reverse_text"}),
    ("uv run eval @ configs/debug/eval/multi_env.toml", {"env.1.name": "reverse_text_b"}),
    ("uv run eval @ configs/debug/eval/local_model.toml --client.base-url http://localhost:8000/v1",
     {"client.base_url": ["http://localhost:8000/v1"], "client.urls": ["http://localhost:8000"]}),
    ("uv run synthesize", {"env.0.id": "reverse_text", "split": "train"}),
    ("uv run inference @ path/to/config.toml", {"model.name": "Qwen/Qwen3-8B"}),
    ("uv run inference @ qwen8b.toml @ qwen14b.toml --model.name Qwen/Qwen3-32B", {"model.name": "Qwen/Qwen3-32B"}),
    ("uv run sft ... --max-steps 20 --ckpt", {"max_steps": 20, "ckpt.interval": 50}),
    ("uv run sft ... --max-steps 40 --ckpt.resume-step 20", {"max_steps": 40, "ckpt.resume_step": 20}),
    ("uv run inference ...", {"server.port": 8000}),
    ("uv run rl --trainer @ path/to/train.toml --orchestrator @ path/to/orch.toml --max-steps 10 --ckpt",
     {"trainer.max_steps": 10, "orchestrator.max_steps": 10, "trainer.ckpt.interval": 50, "inference": None}),
    ("uv run rl --trainer @ path/to/train.toml --orchestrator @ path/to/orch.toml --max-steps 20 "
     "--ckpt.resume-step 10",
     {"orchestrator.ckpt.resume_step": 10, "trainer.ckpt.resume_step": 10, "trainer.max_steps": 20}),
    ("uv run sft ... --wandb", {"wandb.project": "prime-rl"}),
    ("uv run sft ... --wandb.project my-project --wandb.name my-run",
     {"wandb.project": "my-project", "wandb.name": "my-run"}),
    ("uv run rl ... --wandb", {"trainer.wandb.project": "prime-rl", "orchestrator.wandb.project": "prime-rl"}),
    ("uv run rl ... --wandb --no-trainer.wandb.log-extras.distributions --orchestrator.wandb.log-extras.interval 50",
     {"trainer.wandb.log_extras.distributions": False, "orchestrator.wandb.log_extras.interval": 50}),
    ("uv run rl ... --wandb", {"trainer.wandb.log_extras.samples": True, "trainer.wandb.log_extras.figures": False}),
    ("uv run sft ... --data.type fake --bench", {"data.type": "fake", "bench": True}),
    ("uv run sft ... --data.seq-len 4096 --data.batch-size 64 --data.micro-batch-size 2 --bench",
     {"data.seq_len": 4096, "data.batch_size": 64, "data.micro_batch_size": 2, "data.type": "sft"}),
    ("uv run rl --trainer @ path/to/train.toml --orchestrator @ path/to/orch.toml --inference @ path/to/infer.toml "
     "--bench", {"trainer.bench": True, "orchestrator.bench": True}),
    ("uv run rl ... --inference --gpu-memory-utilization 0.5", {"inference.gpu_memory_utilization": 0.5}),
    ("uv run rl ... --inference --trainer-gpu-ids 0", {"inference.gpu_memory_utilization": 0.5}),
    ("uv run rl ... --inference --trainer-gpu-ids 0 --gpu-memory-utilization 0.7",
     {"inference.gpu_memory_utilization": 0.7}),
    ("uv run rl ... --inference --trainer-gpu-ids 1", {"inference.gpu_memory_utilization": 0.9}),
    ("uv run inference ... --gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
    ("uv run rl ... --inference-gpu-ids 0,1,2,3,4,5 --trainer-gpu-ids 6,7",
     {"inference_gpu_ids": [0, 1, 2, 3, 4, 5], "trainer_gpu_ids": [6, 7], "ranks": 2}),
    ("uv run inference ... --data-parallel-start-rank 2 --headless --parallel.dp 4 --parallel.dp-local 2 "
     "--parallel.address 10.0.0.1", {"parallel.start_rank": 2}),
    ("uv run inference --parallel.tp 4 --parallel.dp 4 --data-parallel-size-local 2 "
     "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345",
     {"parallel.tp": 4, "parallel.copies_here": 2, "parallel.headless": False, "parallel.spans_nodes": True}),
    ("uv run inference --tensor-parallel-size 4 --data-parallel-size 4 --data-parallel-size-local 2 "
     "--data-parallel-address 10.0.0.1 --data-parallel-rpc-port 13345 --data-parallel-start-rank 2 --headless",
     {"parallel.start_rank": 2, "parallel.rpc_port": 13345, "parallel.headless": True, "parallel.tp": 4}),
    ("uv run trainer ... --model.ac", {"model.ac.freq": 1}),
    ("uv run sft ... --data.micro-batch-size 1", {"data.micro_batch_size": 1}),
    ("uv run sft ... --data.seq-len 64", {"data.seq_len": 64}),
    ("uv run trainer ... --model.cp", {"model.cp.degree": 2}),
    ("uv run rl @ config.toml --wandb", {"wandb.project": "prime-rl"}),
    ("uv run rl @ config.toml --ckpt --ckpt.interval 10 --ckpt.keep-last 3",
     {"ckpt.interval": 10, "trainer.ckpt.keep_last": 3, "orchestrator.ckpt.keep_last": 3}),
    ("uv run rl @ config.toml --ckpt.resume-step 50 --max-steps 100", {"ckpt.resume_step": 50, "max_steps": 100}),
    ("uv run sft ... --ckpt.save-async", {"ckpt.save_async": True}),
    ("uv run sft ... --ckpt.keep-interval 5", {"ckpt.keep_interval": 5}),
    ("uv run eval @ eval_config.toml", {"env.0.id": "reverse_text"}),
    ("uv run rl @ config.toml --ckpt --ckpt.interval 5 --ckpt.keep-last 3", {"ckpt.interval": 5}),
    # The saved repository page.
    ("uv run trainer @ configs/trainer/debug.toml", {"data.fake.batch_size": 8, "model.debug.random_init": True}),
    ("uv run inference @ configs/inference/debug.toml", {"model.name": "configs/reverse_text/model"}),
    ("uv run orchestrator @ configs/orchestrator/debug.toml", {"model.name": "configs/reverse_text/model"}),
    ("uv run rl --trainer @ configs/trainer/reverse_text.toml "
     "--orchestrator @ configs/orchestrator/reverse_text.toml "
     "--inference @ configs/inference/reverse_text.toml",
     {"model.name": "willcb/Qwen2.5-0.5B-Reverse-SFT", "max_steps": 30, "trainer.optim.lr": 3e-6,
      "orchestrator.batch_size": 128, "orchestrator.rollouts_per_example": 16, "trainer.model.seq_len": 128}),
    ("uv run rl --trainer @ configs/trainer/hendrycks_math/1b.toml "
     "--orchestrator @ configs/orchestrator/hendrycks_math/1b.toml "
     "--inference @ configs/inference/hendrycks_math/1b.toml --trainer-gpus 2 --inference-gpus 6",
     {"inference_gpu_ids": [0, 1, 2, 3, 4, 5], "trainer_gpu_ids": [6, 7], "inference.parallel.dp": 6, "ranks": 2}),
    ("uv run rl --trainer @ configs/trainer/intellect_math/1b.toml "
     "--orchestrator @ configs/orchestrator/intellect_math/1b.toml "
     "--inference @ configs/inference/intellect_math/1b.toml --trainer-gpus 2 --inference-gpus 6",
     {"orchestrator.batch_size": 2048, "orchestrator.seq_len": 8192, "max_steps": 1000}),
    ("uv run rl --trainer @ configs/trainer/reverse_text.toml "
     "--orchestrator @ configs/orchestrator/reverse_text.toml "
     "--inference @ configs/inference/reverse_text.toml --exp-id exp-1",
     {"output_dir": "outputs/exp-1", "trainer.output_dir": "outputs/exp-1",
      "orchestrator.output_dir": "outputs/exp-1"}),
    ("uv run rl --trainer @ configs/trainer/reverse_text.toml "
     "--orchestrator @ configs/orchestrator/reverse_text.toml "
     "--inference @ configs/inference/reverse_text.toml --inference.server.port 8001 "
     "--orchestrator.client.port 8001 --exp-id exp-2",
     {"inference.server.port": 8001, "orchestrator.client.urls": ["http://127.0.0.1:8001"]}),
    ("uv run inference --model.name Qwen/Qwen3-0.6B --max-model-len 2048",
     {"model.max_model_len": 2048, "max_model_len": 2048}),
    ("uv run eval --model.name Qwen/Qwen3-0.6B --benchmarks math500,aime24,aime25",
     {"benchmarks": ["math500", "aime24", "aime25"]}),
    ("uv run inference @qwen8b.toml @qwen14b.toml --model.name Qwen/Qwen3-32B", {"model.name": "Qwen/Qwen3-32B"}),
    ("uv run inference @ configs/inference/reverse_text.toml", {"model.name": "willcb/Qwen2.5-0.5B-Reverse-SFT"}),
    ("uv run rl --trainer @ configs/trainer/reverse_text.toml "
     "--orchestrator @ configs/orchestrator/reverse_text.toml", {"inference": None, "orchestrator.client.port": 8000}),
    ("uv run trainer @ configs/trainer/reverse_text.toml --ckpt.interval 10", {"ckpt.interval": 10}),
    ("uv run trainer @ configs/trainer/reverse_text.toml --ckpt.resume_step 10", {"ckpt.resume_step": 10}),
    ("uv run trainer @ configs/trainer/reverse_text.toml --monitor.wandb.project '<project>' --ckpt.resume-step 10 "
     "--monitor.wandb.id '<trainer-run-id>' --orchestrator.monitor.wandb.id '<orchestrator-run-id>'",
     {"wandb.project": "<project>", "wandb.id": "<trainer-run-id>", "orchestrator.wandb.id": "<orchestrator-run-id>"}),
    ("uv run rl --monitor.wandb.id t --orchestrator.monitor.wandb.id o",
     {"trainer.wandb.id": "t", "orchestrator.wandb.id": "o"}),
    ("uv run orchestrator @ configs/orchestrator/reverse_text.toml --bench", {"bench": True}),
    ("uv run trainer @ configs/trainer/reverse_text.toml --bench "
     "--data.fake \"{'micro_batch_size': 8, 'batch_size': 128, 'seq_len': 128}\"",
     {"data.fake.micro_batch_size": 8, "data.fake.batch_size": 128, "data.fake.seq_len": 128}),
    ("uv run rl --trainer.optim.lr 1e-5 --ckpt.path elsewhere", {"trainer.optim.lr": 1e-5}),
]  # fmt: skip


def look_up(config, key):
    for part in key.split("."):
        config = (
            config[int(part)] if part.isdigit() else config[part] if isinstance(config, dict) else getattr(config, part)
        )
    return config


def load(line):
    words = [word for word in shlex.split(line) if word != "..."]
    assert words[:2] == ["uv", "run"]
    return COMMANDS[words[2]].load(words[3:])


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_command_line_means_what_the_documents_say(workdir, line, expected):
    for name, text in FILES.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(text)
    config = load(line)
    for key, value in expected.items():
        found = look_up(config, key)
        assert (found if isinstance(found, (list, bool, int, float, type(None))) else str(found)) == value, key


def test_single_gpu_block_is_complete_as_it_stands(workdir):
    (workdir / "config.toml").write_text(SINGLE_GPU)
    config = RLConfig.load(["@", "config.toml", "--ckpt", "--ckpt.interval", "5", "--ckpt.keep-last", "3"])
    assert config.model.name == config.trainer.model.name == config.inference.model.name == "Qwen/Qwen3-0.6B"
    assert config.inference.gpu_memory_utilization == 0.5
    assert config.inference_gpu_ids == config.trainer_gpu_ids == [0]
    assert config.inference.parallel.dp == config.ranks == 1
    assert config.trainer.model.ac.freq == 1
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (8, 2)
    assert config.orchestrator.sampling.max_tokens == 2000
    assert [env.id for env in config.orchestrator.env] == ["reverse_text"]
    assert config.inference.model.max_model_len is None


def test_documented_defaults(workdir):
    config = RLConfig.load(["--inference"])
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert str(config.output_dir) == "outputs"
    assert config.inference.server.port == config.orchestrator.client.port == 8000
    assert config.async_level == config.trainer.async_level == config.orchestrator.async_level == 2
    assert config.ckpt is config.trainer.ckpt is config.orchestrator.ckpt is config.wandb is None
    assert config.trainer.optim.type == "adamw"
    assert config.trainer.optim.lr == 1e-6
    assert config.orchestrator.batch_size == 128
    assert RLConfig.load(["--ckpt"]).orchestrator.ckpt.interval == 50


DOCUMENTED_PATHS = [
    *(f"configs/{role}/{name}.toml" for role in ("trainer", "orchestrator", "inference")
      for name in ("debug", "reverse_text", "hendrycks_math/1b", "intellect_math/1b")),
    *(f"configs/debug/eval/{name}.toml" for name in ("single_env", "multi_env", "local_model")),
    "configs/reverse_text/cpu.toml",
    "configs/reverse_text/gpu.toml",
    "configs/reverse_text/sft_cpu.toml",
    "configs/sft/gsm8k.toml",
    "configs/debug/synthesize.toml",
    "configs/debug/synthesize_multi_turn.toml",
    *(f"configs/{folder}/{name}.toml" for folder in ("aqua_rat", "prime_rl")
      for name in ("default", "small_scale", "distributed", "full_dataset")),
    "configs/aqua_rat/cpu.toml",
    "configs/aqua_rat/sft_cpu.toml",
    *(f"configs/presets/{name}.toml" for name in ("cpu", "1x24gb", "1x80gb", "2x80gb", "8x80gb", "2x8x80gb")),
]  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTED_PATHS)
def test_documented_config_passes_dry_run_without_a_warning(workdir, path, capsys):
    kind = path.split("/")[1]
    debug = "synthesize" if "synthesize" in path else "eval"
    command = {"debug": debug, "reverse_text": "sft" if "sft" in path else "rl", "presets": "rl"}.get(kind, kind)
    if kind in ("aqua_rat", "prime_rl"):
        command = "sft" if "sft" in path else "rl"
    with pytest.raises(SystemExit) as exit_info:
        COMMANDS[command].load(["@", path, "--dry-run", "--output-dir", str(workdir / "out")])
    assert exit_info.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert not (workdir / "out").exists(), "nothing is written"
    assert tomllib.loads(out)["output_dir"] == str(workdir / "out")


def test_gpu_recipe_is_the_documented_one(workdir):
    config = RLConfig.load(["@", "configs/reverse_text/gpu.toml"])
    assert config.model.name == "willcb/Qwen2.5-0.5B-Reverse-SFT"
    assert (config.max_steps, config.trainer.optim.lr) == (30, 3e-6)
    assert (config.orchestrator.batch_size, config.orchestrator.rollouts_per_example) == (128, 16)
    assert (config.orchestrator.seq_len, config.trainer.model.seq_len) == (128, 1024)


@pytest.mark.parametrize(
    ("name", "examples", "steps", "gpus"),
    [
        ("default", 2000, 400, ([0], [0])),
        ("small_scale", 500, 100, ([0], [0])),
        ("distributed", 10_000, 1000, ([0, 1, 2, 3, 4, 5], [6, 7])),
        ("full_dataset", -1, 2000, ([0], [0])),
    ],
)
def test_aqua_recipes_have_the_numbers_of_the_guide(workdir, name, examples, steps, gpus):
    config = RLConfig.load(["@", f"configs/prime_rl/{name}.toml"])
    assert (config.max_steps, config.inference_gpu_ids, config.trainer_gpu_ids) == (steps, *gpus)
    orchestrator, trainer = config.orchestrator, config.trainer
    (env,) = orchestrator.env
    assert env.args == {"num_train_examples": examples, "num_eval_examples": 254}
    assert (orchestrator.batch_size, orchestrator.rollouts_per_example) == (16 * 16, 16)
    sampling = orchestrator.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (256, 1.0, 50)
    optim = trainer.optim
    assert (optim.matrix_lr, optim.embedding_lr, optim.unembedding_lr, optim.weight_decay) == (0.02, 0.2, 0.004, 0)
    assert (config.ckpt.interval, orchestrator.val.interval, orchestrator.val.num_examples) == (60, 60, 254)


COMMAND = re.compile(r"^uv run rl @ my\.toml .*?(?<!\\)$", re.MULTILINE | re.DOTALL)
READMES = [page for page in sorted((ROOT / "environments").glob("*/README.md")) if COMMAND.search(page.read_text())]


@pytest.mark.parametrize("page", READMES, ids=[page.parent.name for page in READMES])
def test_commands_of_an_environments_readme_name_it(workdir, page):
    (workdir / "my.toml").write_text('[orchestrator.env]\nid = "other"\n')
    for line in COMMAND.findall(page.read_text()):
        _, _, _, *argv = shlex.split(line.replace("\\\n", " "), comments=True)
        assert [env.id for env in RLConfig.load(argv).orchestrator.env] == [page.parent.name], line


@pytest.mark.parametrize("name", ["default", "small_scale", "distributed", "full_dataset"])
@pytest.mark.parametrize(
    ("flags", "inference", "trainer"),
    [
        ("--inference-gpus 6 --trainer-gpus 2", range(6), range(6, 8)),
        ("--inference-gpu-ids None --inference-gpus 8 --trainer-gpus 4", range(8), range(8, 12)),
        ("--inference-gpu-ids 2,3 --trainer-gpu-ids 0,1", range(2, 4), range(2)),
        ("--inference-gpus 6 --inference.parallel.tp 3 --trainer-gpu-ids 6,7", range(6), range(6, 8)),
        ("--inference.parallel.dp 2 --trainer-gpu-ids 6,7", range(2), range(6, 8)),
        ("--inference.parallel.dp 2 --inference.parallel.tp 2 --trainer-gpu-ids 6", range(4), range(6, 7)),
    ],
)
def test_counts_and_ids_of_the_command_line_replace_those_of_a_file(name, flags, inference, trainer):
    config = RLConfig.load(["@", str(ROOT / f"configs/prime_rl/{name}.toml"), *flags.split()])
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (list(inference), list(trainer))


@pytest.mark.parametrize("name", ["default", "distributed"])
def test_torchrun_over_nodes_is_documented_with_all_gpus_of_each_node(workdir, name):
    page = (ROOT / "configs/aqua_rat/README.md").read_text()
    (line,) = re.findall(r"\| `torchrun --nnodes.*`uv run rl @ FILE (.*?)`", page)
    config = RLConfig.load(["@", f"configs/aqua_rat/{name}.toml", *shlex.split(line)])
    assert (len(config.nodes), config.inference_nodes) == (4, 3)
    assert (len(config.inference_gpu_ids), len(config.trainer_gpu_ids)) == (8, 8)
    with pytest.raises(ConfigError) as refused:
        leave_torchrun({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32", "RANK": "0"})
    assert f"uv run rl @ FILE {line} " in str(refused.value)


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_a_file_with_ids_overrides_a_count_of_the_environment(workdir, monkeypatch, role):
    monkeypatch.setenv(f"PRIME_{role.upper()}_GPUS", "3")
    (workdir / "t.toml").write_text(f"{role}_gpu_ids = [4, 5]\n[inference]\n")
    assert getattr(RLConfig.load(["@", "t.toml"]), f"{role}_gpu_ids") == [4, 5]


def test_copies_of_the_command_line_replace_a_count_of_a_file_and_contradict_one_beside_them(workdir):
    (workdir / "t.toml").write_text("inference_gpus = 3\ntrainer_gpus = 1\n[inference]\n")
    config = RLConfig.load(["@", "t.toml", "--inference.parallel.dp", "2"])
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ([0, 1], [2])
    for flags in ("--inference-gpus 3", "--inference-gpu-ids 0,1,2"):
        with pytest.raises(ConfigError, match=r"inference has 3 GPUs .* but inference\.parallel\.tp \* dp = 1 \* 2"):
            RLConfig.load(["@", "t.toml", "--inference.parallel.dp", "2", *flags.split()])


@pytest.mark.parametrize("role", ["inference", "trainer"])
def test_counts_and_ids_of_one_source_that_differ_are_refused(workdir, role):
    (workdir / "t.toml").write_text(f"{role}_gpus = 3\n{role}_gpu_ids = [4, 5]\n[inference]\n")
    with pytest.raises(ConfigError, match=f"{role}_gpus = 3 .* and {role}_gpu_ids = .* differ; give only one of them"):
        RLConfig.load(["@", "t.toml"])
