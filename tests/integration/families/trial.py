"""What works with a family of transformers, tried on a small random model; the table of docs/reference/models.md.

    python -m tests.integration.families.trial FAMILY...

tries the families with 50 switches each, about two minutes per family on two cores, and writes their rows.
"""

import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from prime_rl.configs.training.broadcast import DeltaConfig, FileBroadcastConfig
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, RunError
from prime_rl.storage.delta.chain import chain_of, rebuild
from prime_rl.trainer.fsdp import reshard_policy
from prime_rl.trainer.model.policy_model import PolicyModel
from prime_rl.trainer.weights.policy_loading import build_policy, load_policy
from tests.integration.inference.conftest import gap, logprobs_of
from tests.integration.inference.policy_publisher import PolicyPublisher, process_group
from tests.support.server import Server, inference_server
from tests.unit.trainer.test_hybrid_models import check_against_transformers
from tests.unit.trainer.test_parallel import run_layouts
from tests.unit.trainer.test_policy_model import pack
from tests.unit.trainer.world import run_world

ROOT = Path(__file__).parents[3]
ROWS = ROOT / "src/prime_rl/supervisor/planning/tried_families.json"
LAYOUTS = {"tp": {"tp": 2}, "cp": {"cp": {"degree": 2}}, "ep": {"ep": 2}}
PROMPTS = [[5 + (7 * i + i * j) % 250 for i in range(40 + 150 * j)] for j in range(3)]  # 40 to 340 tokens
LIMIT = 1e-4
"""Largest difference of a log-probability between trainer and server."""


def try_family(family: str, root: Path, switches: int) -> dict[str, str]:
    """Return the cells of a family: "yes", "-" (does not apply), or "no: " and the reason."""
    row = _try_family(family, root, switches)
    return {name: cell.replace(str(root / "base"), "the model") for name, cell in row.items()}


def _try_family(family: str, root: Path, switches: int) -> dict[str, str]:
    base = make_model(family, root / "base")
    row = {"trains": _cell(lambda: load_policy(TrainerModelConfig(name=str(base)), seed=0))}
    if row["trains"] != "yes":
        return row
    row["packed"] = _cell(lambda: try_packing(base))
    is_moe = load_policy(TrainerModelConfig(name=str(base)), seed=0).routing.is_moe
    row |= try_layouts(base, root, is_moe)
    replay = TrainerModelConfig(name=str(base), router_replay=True)
    row["router replay"] = _cell(lambda: build_policy(replay)) if is_moe else "-"
    return row | try_server(base, root, switches)


def make_model(family: str, path: Path) -> Path:
    """Write a small random model of the family with scripts/make_tiny_model.py."""
    script = runpy.run_path(str(ROOT / "scripts/make_tiny_model.py"))
    arguments = sys.argv
    sys.argv = ["make_tiny_model.py", family, str(path)]
    try:
        script["main"]()
    finally:
        sys.argv = arguments
    return path


def try_packing(base: Path) -> None:
    """Compare values and gradients of packed segments of 1 to 300 tokens with those of transformers alone."""
    policy = load_policy(TrainerModelConfig(name=str(base)), seed=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, attn_implementation="eager"
    )
    for module in reference.modules():
        if hasattr(module, "time_step_limit"):  # a limit of transformers alone, at initialisation elsewhere
            module.time_step_limit = (0.0, float("inf"))
    lengths = np.random.default_rng(0).permutation([300, 1, 7, 64, 65, 130, 2, 66]).tolist()
    check_against_transformers(policy, reference.eval(), lengths)


def try_layouts(base: Path, root: Path, is_moe: bool) -> dict[str, str]:
    """Compare loss and gradient norm on two ranks with those on one."""
    models = {"root": str(base.parent)}
    (alone,) = run_world(1, run_layouts, {**models, "layouts": {"alone": (base.name, {})}}, root)
    row = {}
    for name, keys in LAYOUTS.items():
        if name == "ep" and not is_moe:
            row[name] = "-"
            continue

        def compare(name: str = name, keys: dict[str, Any] = keys) -> None:
            found = run_world(2, run_layouts, {**models, "layouts": {name: (base.name, keys)}}, root)[0][name]
            for wanted, got in zip(alone["alone"][:-1], found[:-1], strict=True):
                for key in ("loss", "grad_norm"):
                    difference = abs(got[key] - wanted[key])
                    assert difference <= 1e-5 * max(1, abs(wanted[key])), f"{key} differs by {difference:.2g}"

        row[name] = _cell(compare)
    return row


def try_server(base: Path, root: Path, switches: int) -> dict[str, str]:
    """Sample at equal weights, switch to published versions, and compare with the trainer after each."""
    row: dict[str, str] = {}
    arguments = ["--vllm.kv_cache_memory_bytes", "64M", "--model.max_model_len", "1024"]
    try:
        with inference_server(base, root / "server.log", arguments) as server, _trainer(base, root) as trainer:
            row["served"] = "yes"
            row["mismatch"] = _cell(lambda: _compare(trainer.policy, server))
            row["weight switch"] = _cell(lambda: _switch(trainer, server, switches))
            row["delta"] = _cell(lambda: _try_delta(trainer.weights, switches))
            outputs = [server.generate(prompt, max_tokens=32)["token_ids"] for prompt in PROMPTS]
            row["LoRA"] = _cell(lambda: _try_lora(base, root, server, switches + 1))
        full = _full(root / f"weights/step_{switches}", root / "full")
        with inference_server(full, root / "fresh.log", arguments) as server:
            fresh = [server.generate(prompt, max_tokens=32)["token_ids"] for prompt in PROMPTS]
        if row["weight switch"] == "yes" and fresh != outputs:
            row["weight switch"] = "no: greedy outputs differ from those of a fresh server"
    except AssertionError as error:  # the server did not start
        errors = re.findall(r"^error: .*|^\S*(?:Error|Exception): .*", str(error), re.MULTILINE)
        row.setdefault("served", f"no: {errors[-1][:200] if errors else str(error)[-200:]}")
    return row


def _switch(trainer: PolicyPublisher, server: Server, switches: int) -> None:
    for step in range(1, switches + 1):
        trainer.train(step)
        server.update(trainer.publish(step), step)
        _compare(trainer.policy, server, seed=step)


def _compare(policy: PolicyModel, server: Server, seed: int = 0) -> None:
    """Sample each prompt twice, the second time from the prefix cache."""
    for prompt in [*PROMPTS, *PROMPTS]:
        choice = server.generate(prompt, temperature=1.0, seed=seed, max_tokens=32)
        difference = gap(logprobs_of(choice), _score(policy, prompt, choice["token_ids"]))
        assert difference <= LIMIT, f"log-probabilities differ by {difference:.2g}"


@torch.no_grad()
def _score(policy: PolicyModel, prompt: list[int], completion: list[int]) -> list[float]:
    logprobs, _ = policy(pack([np.array([*prompt, *completion])]))
    reshard_policy(policy)
    return logprobs[len(prompt) :].tolist()


def _try_delta(weights: Path, switches: int) -> None:
    *deltas, _ = chain_of(weights / f"step_{switches}")
    assert deltas, "all versions are full"


def _full(weights: Path, target: Path) -> Path:
    *deltas, full = chain_of(weights)
    target.mkdir()
    rebuild(full, deltas[::-1], target)
    return target


def _try_lora(base: Path, root: Path, server: Server, step: int) -> None:
    """Publish a merged adapter."""
    server.reload()
    trainer = PolicyPublisher(base, root / "lora", FileBroadcastConfig(), lora={"publish": "merged"})
    with torch.no_grad():
        for name, parameter in trainer.policy.named_parameters():
            if parameter.requires_grad and "lora" in name.lower():
                parameter.to_local().normal_(std=0.05)
    server.update(trainer.publish(step), step)
    _compare(trainer.policy, server)


@contextmanager
def _trainer(base: Path, root: Path) -> Iterator[PolicyPublisher]:
    with process_group():
        yield PolicyPublisher(base, root / "weights", FileBroadcastConfig(delta=DeltaConfig(full_interval=9)))


def _cell(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except (ConfigError, RunError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = re.findall(r"prime_rl\.core\.errors\.\w+: ([^\n\\\"']*)", str(error)) or lines[:1]
        return f"no: {said[-1]}"
    return "yes"


def main() -> None:
    """Try the families of the command line and write their rows."""
    torch.set_num_threads(1)
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for family in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as scratch:
            rows[family] = try_family(family, Path(scratch), 50)
        print(family, json.dumps(rows[family], indent=1), flush=True)
        ROWS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
