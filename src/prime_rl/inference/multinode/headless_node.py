"""A node without an HTTP server: its copies of the model run exactly as long as the head."""

import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any

from loguru import logger

from prime_rl.configs.inference import InferenceConfig
from prime_rl.core.errors import RunError
from prime_rl.core.ports import join_host_port
from prime_rl.inference.model_path import find_base_model
from prime_rl.inference.multinode.node_connection import NodeConnection
from prime_rl.inference.multinode.node_registry import NodeInfo, follow_head, join_head
from prime_rl.inference.policy.delta_cache import cache_root
from prime_rl.inference.policy.weight_checks import ServedModel
from prime_rl.inference.vllm import engine_arguments

_BEAT_S = 1.0


def run_headless(config: InferenceConfig) -> None:
    """Run this node's copies until the head ends.

    Raises:
        ConfigError: the model or an argument is invalid, or the head serves another model or with other settings.
        RunError: the head is lost or has failed, or an engine of this node died.
    """
    started = time.monotonic()
    base = find_base_model(config.model.name, config.vllm.get("revision"))
    on_cpu = engine_arguments.prepare_vllm(config, base.policy.path)  # takes seconds; not while the head waits
    signal.signal(signal.SIGTERM, exit_by_signal)
    parallel, silence_s = config.parallel, config.heartbeat.dead_after_seconds
    address = (str(parallel.address), parallel.rpc_port)
    logger.info("joining the head at {}", join_host_port(*address))
    head = join_head(node_info(config, base), address, parallel.wait_timeout_seconds, silence_s)
    with closing(head), ExitStack() as at_end, _report_failure(head):
        engines = _start_engines(config, base, on_cpu, head.address)
        at_end.callback(shutil.rmtree, cache_root(config.weights_cache, config.server.port), ignore_errors=True)
        at_end.callback(engines.shutdown, timeout=0)  # without the head they would wait indefinitely
        names = ", ".join(process.name for process in engines.processes)
        logger.info("started {} after {:.1f} s", names, time.monotonic() - started)
        while True:
            ready = wait([head.fileno(), *engines.sentinels()], timeout=_BEAT_S)
            if not follow_head(head, head.fileno() in ready, silence_s):
                logger.info("the head has ended; this node ends too")
                return
            if dead := [process for process in engines.processes if process.exitcode is not None]:
                raise RunError(f"{dead[0].name} (pid {dead[0].pid}) died; see its log above")


def node_info(config: InferenceConfig, base: ServedModel) -> NodeInfo:
    """Return the part of this node in a server over several nodes, and the settings that must be equal on all nodes."""
    parallel, model = config.parallel, config.model
    settings = {
        "parallel.dp": parallel.dp,
        "parallel.tp": parallel.tp,
        "model.name": model.name,
        "the directory of the model": str(base.policy.path.resolve()),
        "the hash of the model's weights": base.policy.hash,
        "model.dtype": model.dtype,
        "model.max_model_len": model.max_model_len,
        "enable_lora, max_loras, max_lora_rank": [config.enable_lora, config.max_loras, config.max_lora_rank],
        "vllm": config.vllm,
        "the version of vLLM": engine_arguments.vllm_version(),
    }
    return NodeInfo(socket.gethostname(), parallel.start_rank or 0, parallel.copies_here, settings)


def _start_engines(config: InferenceConfig, base: ServedModel, on_cpu: bool, address: str) -> Any:
    """Start the engines as `vllm serve --headless` does; they connect to the head."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    args = engine_arguments.make_arguments(config, base.policy.path, on_cpu, address)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=True)
    return CoreEngineProcManager(
        local_engine_count=config.parallel.copies_here,
        start_index=config.parallel.start_rank or 0,
        local_start_index=0,
        vllm_config=vllm_config,
        local_client=False,
        handshake_address=get_tcp_uri(address, config.parallel.rpc_port),
        executor_class=Executor.get_class(vllm_config),
        log_stats=not engine_args.disable_log_stats,
    )


@contextmanager
def _report_failure(head: NodeConnection) -> Iterator[None]:
    """Report an error of this node to the head before the engines are ended, which takes seconds."""
    try:
        yield
    except BaseException as error:
        by_signal = isinstance(error, (SystemExit, KeyboardInterrupt))
        reason = "stopped by a signal" if by_signal else str(error) or type(error).__name__
        with suppress(RunError):
            head.send_message("failed", reason=reason)
        raise


def exit_by_signal(signum: int, frame: object) -> None:
    """Unwind, so that the engines are ended, also starting ones, and the head is notified."""
    sys.exit(128 + signum)
