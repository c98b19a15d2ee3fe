"""`sft`: supervised fine-tuning."""

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages
from prime_rl.loading.saved_help import print_saved_help


@command
def main() -> None:
    """Run supervised fine-tuning as a rank of torchrun, or without torchrun as the only rank."""
    print_saved_help("sft")
    from prime_rl.configs.sft import SFTConfig

    config = SFTConfig.load()
    require_packages("torch")
    from prime_rl.trainer.sft.train import run

    run(config)


if __name__ == "__main__":
    main()
