"""MLflow: scalars of every step, tables of samples as JSON lines, and the configuration."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from loguru import logger
from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from prime_rl.configs.loading.root_config import RootConfig
from prime_rl.configs.monitoring import MLflowConfig
from prime_rl.core.errors import ConfigError, summarize_exception
from prime_rl.monitors.loggers.logger_base import LoggerUnreachable, MetricLogger, continues_earlier_run
from prime_rl.storage.file_locks import acquire_lock
from prime_rl.storage.wait_for import DeadlineError

_REFUSALS = {
    "INVALID_PARAMETER_VALUE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "BAD_REQUEST",
    "RESOURCE_DOES_NOT_EXIST",
}
"""Errors of a wrong configuration; others are those of a service that is down."""
_MAX_BATCH = 1000
_MAX_PARAMS = 100
_MAX_VALUE = 500


class MLflowLogger(MetricLogger):
    """One MLflow run. A resumed process continues its own run.

    MLflow has no histograms, and permits no `@` and `^` in names: pass@1 is pass_at_1, pass^1 is pass_all_1.

    Args:
        role: role of the process, the default name of the run.
        directory: the run directory, with the default database.
        whole: configuration of the process, shown as parameters.

    Raises:
        ConfigError: MLflow rejects the settings.
        LoggerUnreachable: the server or the database does not answer, or its directory cannot be written.
    """

    name = "MLflow"

    def __init__(self, config: MLflowConfig, role: str, directory: Path, whole: RootConfig | None) -> None:
        # MLflow's own defaults report usage to its makers, and repeat a request for minutes.
        seconds = max(1, round(config.timeout_seconds / 4))
        limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds)}
        for variable, value in {"MLFLOW_DISABLE_TELEMETRY": "true", **limits}.items():
            os.environ.setdefault(variable, value)
        given = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        folder = directory / "mlflow"
        uri = given or f"sqlite:///{folder.resolve()}/mlflow.db?timeout=60"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("a+") as lock:  # trainer and orchestrator would both create the tables
                acquire_lock(lock, config.timeout_seconds, "creates the experiment of MLflow")
                self._client = MlflowClient(tracking_uri=uri)
                found = self._client.get_experiment_by_name(config.experiment)
                artifacts = None if given else (folder.resolve() / "artifacts").as_uri()
                experiment = (
                    found.experiment_id if found else self._client.create_experiment(config.experiment, artifacts)
                )
            self._start(config, role, folder / f"{role}.id", experiment, whole)
        except MlflowException as error:
            if error.error_code in _REFUSALS:
                advice = "set mlflow.tracking_uri or MLFLOW_TRACKING_URI, and its MLFLOW_TRACKING_TOKEN"
                raise ConfigError(f"mlflow: {summarize_exception(error)}; {advice}") from None
            raise LoggerUnreachable(f"MLflow cannot be reached: {summarize_exception(error)}") from None
        except ImportError as error:
            raise ConfigError(
                f"mlflow: a package for its tracking URI is missing ({summarize_exception(error)}); install it"
            ) from None
        except (DeadlineError, OSError) as error:
            raise LoggerUnreachable(f"MLflow cannot be started: {summarize_exception(error)}") from None

    def _start(self, config: MLflowConfig, role: str, known: Path, experiment: str, whole: RootConfig | None) -> None:
        """Continue the earlier run of this process, or create one with its configuration."""
        self._stores_artifacts = True
        if continues_earlier_run(whole) and known.exists() and self._continue(known.read_text()):
            return
        tags = {"group": config.group, "role": role}
        run = self._client.create_run(
            experiment, run_name=config.name or role, tags={key: value for key, value in tags.items() if value}
        )
        self._id = run.info.run_id
        known.write_text(self._id)
        if whole is not None:
            values = whole.model_dump(mode="json")
            params = [Param(_allowed(key), str(value)[:_MAX_VALUE]) for key, value in _flat(values).items()]
            for first in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + _MAX_PARAMS])
            self._store(lambda: self._client.log_dict(self._id, values, "config.json"))

    def _continue(self, run: str) -> bool:
        """Continue a run; False if it is not in this store, which may be another one than before, or was deleted."""
        try:
            exists = self._client.get_run(run).info.lifecycle_stage == LifecycleStage.ACTIVE
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            exists = False
        if not exists:
            logger.warning("MLflow has no run {}, which this process would continue; it starts a new one", run)
            return False
        self._id = run
        self._client.update_run(run, status="RUNNING")
        return True

    def _store(self, log: Callable[[], None]) -> None:
        """Log an artifact. Its store is often another machine's: without it, MLflow still gets the values."""
        if not self._stores_artifacts:
            return
        try:
            log()
        except Exception as error:  # noqa: BLE001  each kind of store has its own errors
            self._stores_artifacts = False
            summary = summarize_exception(error)
            logger.warning("MLflow cannot store files: {}; it gets values, but no samples or configuration", summary)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log scalars."""
        now = time.time_ns() // 1_000_000
        values = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        for first in range(0, len(values), _MAX_BATCH):
            self._client.log_batch(self._id, metrics=values[first : first + _MAX_BATCH])

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the rollouts as an artifact, one JSON object per line."""
        text = b"".join(msgspec.json.encode(row) + b"\n" for row in rows).decode()
        self._store(lambda: self._client.log_text(self._id, text, f"samples/step_{step}.jsonl"))

    def summarize(self, values: Mapping[str, float]) -> None:
        """Log the values as tags: MLflow has no summary."""
        self._client.log_batch(self._id, tags=[RunTag(_allowed(name), f"{value:g}") for name, value in values.items()])

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """Replace the characters that MLflow does not permit in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_").replace("^", "_all_"))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
