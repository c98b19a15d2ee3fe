"""I7 on a node without an HTTP server: its copies of the model live exactly as long as the head that they serve."""

import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from loguru import logger

from prime_rl.errors import RunError
from prime_rl.inference import arguments
from prime_rl.inference.link import Link, LinkLost
from prime_rl.inference.model import BaseModel, find_base_model
from prime_rl.inference.nodes import Member, join_head, listen_to
from prime_rl.inference.replica import replica_root

if TYPE_CHECKING:
    from prime_rl.configs.inference import InferenceConfig

_BEAT_S = 1.0


def run_headless(config: "InferenceConfig") -> None:
    """Run this node's copies until the head ends.

    Raises:
        ConfigError: the model or an argument is wrong, or the head serves something else.
        RunError: the head is gone or has failed, or an engine of this node died.
    """
    started = time.monotonic()
    base = find_base_model(config.model.name, config.vllm.get("revision"))
    on_cpu = arguments.runs_on_cpu()
    arguments.check_copies(config, base.policy.path, on_cpu)
    arguments.prepare_environment(config, on_cpu)
    import vllm.v1.engine.utils  # noqa: F401  before the head waits for this node: it takes seconds

    if arguments.forks_engines(config, on_cpu):
        from prime_rl.inference import patches

        patches.start_fast_on_cpu()
    signal.signal(signal.SIGTERM, _end)
    parallel, silence_s = config.parallel, config.heartbeat.timeout
    address = (str(parallel.address), parallel.rpc_port)
    logger.info("joining the head at {}:{}", *address)
    link = join_head(member_of(config, base), address, parallel.wait_timeout_seconds, silence_s)
    with closing(link), _telling(link):
        engines = _start_engines(config, base, on_cpu, link.peer)
        logger.info("runs {} after {:.1f} s", ", ".join(p.name for p in engines.processes), time.monotonic() - started)
        try:
            with _telling(link):
                _serve(link, engines, silence_s)
        finally:
            engines.shutdown(timeout=0)  # without the head they have nobody to answer, and would wait for it
            shutil.rmtree(replica_root(config.weights_cache, config.server.port), ignore_errors=True)


def member_of(config: "InferenceConfig", base: BaseModel) -> Member:
    """What this node brings to a server over several nodes, and what must be the same on all of them."""
    parallel, model = config.parallel, config.model
    facts = {
        "parallel.dp": parallel.dp,
        "parallel.tp": parallel.tp,
        "model.name": model.name,
        "the directory of the model": str(base.policy.path.resolve()),
        "the hash of the model's weights": base.policy.hash,
        "model.dtype": model.dtype,
        "model.max_model_len": model.max_model_len,
        "enable_lora, max_loras, max_lora_rank": [config.enable_lora, config.max_loras, config.max_lora_rank],
        "vllm": config.vllm,
        "the version of vLLM": arguments.vllm_version(),
    }
    return Member(socket.gethostname(), parallel.start_rank or 0, parallel.copies_here, facts)


def _start_engines(config: "InferenceConfig", base: BaseModel, on_cpu: bool, head: str) -> Any:
    """What `vllm serve --headless` does: the engines connect to the head by themselves."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    args = arguments.make_arguments(config, base.policy.path, on_cpu, head)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    vllm_config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=True)
    return CoreEngineProcManager(
        local_engine_count=config.parallel.copies_here,
        start_index=config.parallel.start_rank or 0,
        local_start_index=0,
        vllm_config=vllm_config,
        local_client=False,
        handshake_address=get_tcp_uri(head, config.parallel.rpc_port),
        executor_class=Executor.get_class(vllm_config),
        log_stats=not engine_args.disable_log_stats,
    )


def _serve(link: Link, engines: Any, silence_s: float) -> None:
    """Wait for the end of the head, or of an engine."""
    while True:
        ready = wait([link.fileno(), *engines.sentinels()], timeout=_BEAT_S)
        if not listen_to(link, link.fileno() in ready, silence_s):
            logger.info("the head has ended, and so does this node")
            return
        if dead := [process for process in engines.processes if process.exitcode is not None]:
            raise RunError(f"{dead[0].name} (pid {dead[0].pid}) died; see its last words above")


@contextmanager
def _telling(link: Link) -> Iterator[None]:
    """Let the head know why this node ends, before its engines are ended, which takes seconds."""
    try:
        yield
    except BaseException as error:
        told = isinstance(error, (SystemExit, KeyboardInterrupt))
        with suppress(LinkLost):
            link.send("gone", reason="was told to end" if told else str(error) or type(error).__name__)
        raise


def _end(signum: int, frame: object) -> None:
    """Unwind, so that the engines are ended and the head hears of it."""
    sys.exit(128 + signum)
