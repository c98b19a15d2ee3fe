"""`sft`: supervised fine-tuning."""

from prime_rl.configs.sft import SFTConfig
from prime_rl.entrypoints.needs import need_torch
from prime_rl.errors import run_main


def main() -> None:
    """Run supervised fine-tuning as a rank of torchrun, or as a world of one without it."""
    run_main(_main)


def _main() -> None:
    config = SFTConfig.load()
    need_torch()
    from prime_rl.monitor.bench import benchmark
    from prime_rl.trainer.sft.train import train
    from prime_rl.trainer.start import start_process

    start_process(config.log)
    with benchmark(config.bench, config.run_paths, "trainer"):
        train(config)
