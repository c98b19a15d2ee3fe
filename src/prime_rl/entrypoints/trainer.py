"""`trainer`: train on the orchestrator's batches and publish policy versions."""

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages
from prime_rl.loading.saved_help import print_saved_help


@command
def main() -> None:
    """Run the trainer as a rank of torchrun, or without torchrun as the only rank."""
    print_saved_help("trainer")
    from prime_rl.configs.trainer import TrainerConfig

    config = TrainerConfig.load()
    require_packages("torch")
    from prime_rl.trainer.rl.train import run

    run(config)


if __name__ == "__main__":
    main()
