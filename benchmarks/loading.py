"""Memory and time of loading a rank's shard of a model.

    uv run python benchmarks/loading.py --ranks 2 --json FILE

Writes a random model (16 layers, an eighth of the parameters in the embedding), starts the ranks and loads the model
like the trainer; then once like `from_pretrained`, the whole model on each rank. No GPU.

shards        float32 master weights of a rank, MiB
peak          maximum growth of the process, MiB
over shards   peak - shards: the cost of loading, with mapped pages of the file
anonymous     the same without mapped pages, which the system can reclaim
"""

import argparse
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from typing import Any

MIB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="width; 1024 makes 0.25 B parameters")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), arguments.hidden, arguments.dtype)
        size = sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")) / MIB
        print(f"files {size:.0f} MiB in {arguments.dtype}, {arguments.ranks} ranks")
        rows = [measure(way, directory, arguments.ranks) for way in ("sharded", "whole")]
    if arguments.json:
        facts = {"date": datetime.now(UTC).isoformat(), "processors": os.cpu_count(), "files_mib": size}
        arguments.json.write_text(json.dumps({**facts, **vars(arguments), "json": None, "rows": rows}, indent=2))


def write_model(directory: Path, hidden: int, dtype: str) -> None:
    import torch
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=32 * hidden,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=16,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size="200MB")


def measure(way: str, directory: str, ranks: int) -> dict[str, Any]:
    context = get_context("spawn")
    results = context.Queue()
    port = 29000 + os.getpid() % 1000
    processes = [
        context.Process(target=run_rank, args=(way, directory, rank, ranks, port, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    worst: dict[str, Any] = {name: max(answer[name] for answer in answers) for name in answers[0]}
    worst["way"] = way
    print(
        f"{way:8s} shards {worst['shards']:6.0f}  peak {worst['peak']:6.0f}  over shards {worst['over_shards']:6.0f}  "
        f"anonymous over shards {worst['anonymous_over_shards']:6.0f}  {worst['seconds']:.1f} s"
    )
    return worst


def run_rank(way: str, directory: str, rank: int, ranks: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch
    import transformers

    from prime_rl.configs.training.model import TrainerModelConfig
    from prime_rl.trainer.parallel.process_group import join_world
    from prime_rl.trainer.weights.policy_loading import make_policy

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with join_world("cpu", 120) as world:
        before, anonymous_before = resident()
        with Peak() as peak:
            start = time.perf_counter()
            if way == "sharded":
                model = make_policy(TrainerModelConfig(name=directory), 0, world)
                own = sum(p.to_local().nbytes for p in model.parameters()) / MIB
            else:
                model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
                own = sum(p.nbytes for p in model.parameters()) / MIB
            seconds = time.perf_counter() - start
        grown, anonymous = peak.resident - before, peak.anonymous - anonymous_before
        results.put(
            {
                "shards": own,
                "peak": grown,
                "over_shards": grown - own,
                "anonymous_over_shards": anonymous - own,
                "seconds": seconds,
            }
        )


def resident() -> tuple[float, float]:
    """Return the resident and the anonymous memory of this process, MiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    every, anonymous = (int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon"))
    return every, anonymous


class Peak:
    """Samples the memory every millisecond in a thread."""

    def __enter__(self) -> "Peak":
        self.resident = self.anonymous = 0.0
        self._stop = Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            every, anonymous = resident()
            self.resident, self.anonymous = max(self.resident, every), max(self.anonymous, anonymous)


if __name__ == "__main__":
    main()
