"""`sft`: supervised fine-tuning."""

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages


@command
def main() -> None:
    """Run supervised fine-tuning as a rank of torchrun, or without torchrun as the only rank."""
    from prime_rl.configs.sft import SFTConfig

    config = SFTConfig.load()
    from prime_rl.storage.model_files import check_model, check_on_hub
    from prime_rl.trainer.data.training_files import check_files

    require_packages("torch")
    check_model(config.model.name, not config.model.debug.random_init)
    check_on_hub(config.model.name, config.model.revision)
    if config.data.type == "sft":
        check_files(config.data)
    if config.show_sample:
        from prime_rl.trainer.data.sft_dataset import show_samples

        show_samples(config)
        return
    from prime_rl.trainer.rank_start import start_rank

    with start_rank(config.log, config.run_paths, "sft") as heartbeat:
        from prime_rl.trainer.sft.train import run

        run(config, heartbeat)


if __name__ == "__main__":
    main()
