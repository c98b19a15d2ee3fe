"""Keys of `rl --slurm`."""

from typing import Self

from pydantic import Field, model_validator

from prime_rl.configs.shared.blocks import StrList
from prime_rl.loading.base_config import BaseConfig


class SlurmConfig(BaseConfig):
    """Writes a batch script for this run to output_dir/slurm, and submits it instead of starting the run here."""

    nodes: int = Field(1, ge=1)
    """Nodes of the job. On one node the job starts `rl`; on several, the first ones have a server each and the others
    train together. GPU ids then count within a node."""

    inference_nodes: int = Field(1, ge=1)
    """Nodes with a server, if there are several nodes."""

    gpus_per_node: int | None = Field(None, ge=0)
    """GPUs that the job requests on each node; None is the number that inference and trainer use, 0 requests none."""

    partition: str | None = None
    """Partition of the job."""

    account: str | None = None
    """Account of the job."""

    time: str | None = None
    """Time limit of the job, such as 1-00:00:00. The run stops in order two minutes before."""

    options: StrList = Field([])
    """Further options of sbatch without their dashes, such as qos=high,constraint=h100."""

    submit: bool = True
    """Submit the script; false only writes it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if 1 < self.nodes <= self.inference_nodes:
            raise ValueError(
                f"inference_nodes = {self.inference_nodes} leaves none of nodes = {self.nodes} for the trainer"
            )
        return self
