"""`trainer`: train on the orchestrator's batches and publish policy versions."""

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages


@command
def main() -> None:
    """Run the trainer as a rank of torchrun, or without torchrun as the only rank."""
    from prime_rl.configs.trainer import TrainerConfig

    config = TrainerConfig.load()
    from prime_rl.storage.model_files import check_model, check_on_hub

    require_packages("torch")
    check_model(config.model.name, not config.model.debug.random_init)
    check_on_hub(config.model.name, config.model.revision)
    from prime_rl.trainer.rank_start import start_rank

    transport = config.weight_broadcast.type
    with start_rank(config.log, config.run_paths, settings=config.run_settings, transport=transport) as heartbeat:
        from prime_rl.trainer.rl.train import run

        run(config, heartbeat)


if __name__ == "__main__":
    main()
