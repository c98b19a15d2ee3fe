"""Correctness and cost of versions from a trainer's GPU to a server by files, NCCL and CUDA IPC.

    uv run --extra gpu python benchmarks/gpu/transfer.py --json transfer.json          # one GPU: filesystem, ipc
    uv run --extra gpu python benchmarks/gpu/transfer.py --types nccl --server-gpus 1,2 --tp 2
    uv run --extra cpu python benchmarks/gpu/transfer.py --double                      # no GPU: a simulated device

A policy with random weights of the model's shapes (Qwen3-0.6B's, or a tiny one with --double) is changed and published
`--versions` times by each type, and a real server switches to each version. Checks: the server's content hash equals
the manifest's, the canary agrees, and at the end greedy completions equal those after a switch to the same weights by
files. The exit code is 1 if a check fails. Seconds are medians; `arrive` is from the start of the publication to the
server's response, `stage` and `pause` are the server's, `copy` is the wait of the trainer's next update.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.server import Server, inference_server
from tests.support.tiny_model import make_tiny_model, make_tokenizer

from prime_rl.configs.base_model import TokenizerConfig
from prime_rl.configs.training.broadcast import FileBroadcastConfig, IPCBroadcastConfig, NCCLBroadcastConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.types import PolicyVersion
from prime_rl.trainer.fsdp import compute_dtype, shard_policy
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.parallel.process_group import World
from prime_rl.trainer.weight_sync.publisher import Publisher
from prime_rl.trainer.weights.policy_loading import load_policy

PROMPTS = [[6 + (7 * i + j) % 90 for j in range(5 + 9 * i)] for i in range(8)]
CONFIGS = {"nccl": NCCLBroadcastConfig, "ipc": IPCBroadcastConfig}


def main() -> int:
    """Measure and print; return 1 if a check fails."""
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = make_tiny_model(root / "model") if options.double else make_model(root / "model")
        if options.double:
            from tests.support import cpu_transfer

            cpu_transfer.install(setattr, root)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        module = "tests.support.cpu_transfer" if options.double else "prime_rl.entrypoints.inference"
        environment = {} if options.double else {"CUDA_VISIBLE_DEVICES": options.server_gpus}
        arguments = ["--gpu_memory_utilization", str(options.memory), "--parallel.tp", str(options.tp)]
        with inference_server(model, root / "server.log", arguments, environment, module=module) as server:
            results = {kind: measure(kind, model, root / kind, server, options) for kind in options.types}
        dist.destroy_process_group()
    table(results)
    if options.json:
        device = "double" if options.double else torch.cuda.get_device_name(0)
        record = {"device": device, "torch": torch.__version__, "command": sys.argv, "results": results}
        options.json.write_text(json.dumps(record, indent=1))
    return 0 if all(result["right"] for result in results.values()) else 1


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=None, help="comma-separated: filesystem, nccl, ipc")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--server-gpus", default="0", help="the trainer is on GPU 0; nccl needs others")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.5, help="memory fraction of the server's GPUs")
    parser.add_argument("--double", action="store_true", help="no GPU: a simulated device and a tiny model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.double and not torch.cuda.is_available():
        parser.error("there is no GPU; --double tries the script without one")
    shared = "0" in options.server_gpus.split(",")
    default = "filesystem,nccl,ipc" if options.double else "filesystem,ipc" if shared else "filesystem,nccl"
    options.types = (options.types or default).split(",")
    return options


def make_model(path: Path) -> Path:
    """Write random weights of Qwen3-0.6B's shapes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def measure(kind: str, model: Path, directory: Path, server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Publish and switch `--versions` times by one type, then once by files."""
    device = torch.device("cpu") if options.double else torch.device("cuda", 0)
    world = World(rank=0, size=1, device=device)
    config = TrainerModelConfig(name=str(model))
    policy = shard_policy(load_policy(config, seed=0), config, world)
    publisher = Publisher(
        policy,
        load_tokenizer(TokenizerConfig(), config),
        compute_dtype("auto", device),
        world,
        FileBroadcastConfig() if kind == "filesystem" else CONFIGS[kind](port=0, timeout_seconds=120),
        canary=compute_dtype("auto", device),
    )
    seconds: dict[str, list[float]] = {"arrive": [], "stage": [], "pause": [], "copy": []}
    canary, right = 0.0, True
    server.reload()
    for step in range(1, options.versions + 2):
        by_files = step > options.versions  # the weights of the previous version
        if not by_files:
            change(policy, step)
        start = time.perf_counter()
        publisher.start(directory / f"step_{step}", PolicyVersion(0, step), last=by_files)
        copied = time.perf_counter()
        publisher.wait()
        answer = server.update(directory / f"step_{step}", step)
        manifest = json.loads((directory / f"step_{step}/manifest.json").read_text())
        right &= answer["hash"] == manifest["hash"] and ("transfer" in manifest) == (
            kind != "filesystem" and not by_files
        )
        canary = max(canary, answer["canary_difference"] or 0.0)
        if by_files:
            break
        seconds["arrive"].append(time.perf_counter() - start)
        seconds["copy"].append(copied - start)
        seconds["stage"].append(answer["stage_s"])
        seconds["pause"].append(answer["pause_s"])
        size = answer["bytes"]
        sampled = [server.generate(prompt, max_tokens=32)["token_ids"] for prompt in PROMPTS]
    publisher.close()
    server.reload()
    server.update(directory / f"step_{options.versions + 1}", options.versions + 1)
    right &= sampled == [server.generate(prompt, max_tokens=32)["token_ids"] for prompt in PROMPTS]
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {**medians, "bytes": size, "canary_difference": canary, "right": bool(right)}


@torch.no_grad()
def change(policy: torch.nn.Module, step: int) -> None:
    """Change the weights to another version."""
    generator = torch.Generator(device="cpu").manual_seed(step)
    for parameter in policy.parameters():
        local: torch.Tensor = parameter.to_local()
        local.mul_(1 + 0.02 * float(torch.randn((), generator=generator)))


def table(results: dict[str, dict[str, Any]]) -> None:
    """Print one line per type."""
    names = ("arrive", "stage", "pause", "copy", "canary_difference", "right")
    print(f"{'type':12}" + "".join(f"{name:>20}" for name in names))
    for kind, result in results.items():
        cells = [f"{result[name]:20.4g}" if name != "right" else f"{result[name]!s:>20}" for name in names]
        print(f"{kind:12}" + "".join(cells))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
