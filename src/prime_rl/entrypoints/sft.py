"""`sft`: supervised fine-tuning."""

from typing import TYPE_CHECKING

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages

if TYPE_CHECKING:
    from prime_rl.configs.sft import SFTConfig


@command
def main() -> None:
    """Run supervised fine-tuning as a rank of torchrun, or without torchrun as the only rank."""
    from prime_rl.configs.sft import SFTConfig

    config = SFTConfig.load(check=_check_data)
    from prime_rl.storage.model_files import check_model, check_on_hub

    require_packages("torch")
    check_model(config.model.name, not config.model.debug.random_init)
    check_on_hub(config.model.name, config.model.revision)
    _check_data(config)
    if config.show_sample:
        from prime_rl.trainer.data.sft_dataset import show_samples

        show_samples(config)
        return
    from prime_rl.trainer.rank_start import start_rank

    with start_rank(config.log, config.run_paths, "sft") as heartbeat:
        from prime_rl.trainer.sft.train import run

        run(config, heartbeat)


def _check_data(config: "SFTConfig") -> None:
    """Raise ConfigError for local data that training would refuse."""
    from prime_rl.trainer.data.training_files import check_files

    if config.data.type == "sft":
        check_files(config.data)


if __name__ == "__main__":
    main()
