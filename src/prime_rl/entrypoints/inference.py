"""`uv run inference`: start the inference server."""

import gc
import importlib.util
import os

from prime_rl.configs.inference import InferenceConfig
from prime_rl.errors import ConfigError, run_main


def main() -> None:
    """Parse the configuration and serve until told to stop."""
    run_main(_serve)


def _serve() -> None:
    if os.environ.get("PRIME_RL_SUPERVISED") == "1":
        from prime_rl.supervisor.process import follow_parent

        follow_parent()
    config = InferenceConfig.load()
    for package in ("torch", "vllm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed; run `uv sync --extra cpu` (or `--extra gpu`)")
    from prime_rl.inference.server import run
    from prime_rl.logs import set_up_logging

    set_up_logging(config.log)
    try:
        run(config)
    finally:
        gc.freeze()  # otherwise Python walks over all that vLLM has imported before it ends: seconds


if __name__ == "__main__":
    main()
