"""`inference`: start the inference server."""

from prime_rl.core.entry_point import command
from prime_rl.core.import_utils import require_packages
from prime_rl.liveness.parent_process import die_with_parent, is_supervised


@command
def main() -> None:
    """Parse the configuration and serve until stopped."""
    if is_supervised():
        die_with_parent()
    from prime_rl.configs.inference import InferenceConfig

    config = InferenceConfig.load()
    require_packages("torch", "vllm")
    from prime_rl.storage.model_files import check_on_hub

    check_on_hub(config.model.name, config.model.revision)
    from prime_rl.core.logs import set_up_logging
    from prime_rl.inference.vllm.libnuma import provide_libnuma

    provide_libnuma()
    from prime_rl.inference.server import run, server_name

    has_directory = config.log.file and "output_dir" in config.model_fields_set
    log_file = config.run_paths.log(server_name(config)) if has_directory else None
    set_up_logging(config.log.level, config.log.utc, log_file)
    run(config)


if __name__ == "__main__":
    main()
