"""Keys of `rl --slurm`."""

from typing import Self

from pydantic import Field, model_validator

from prime_rl.configs.lists import StrList
from prime_rl.configs.loading.base_config import BaseConfig


class SlurmConfig(BaseConfig):
    """Writes a batch script for this run to output_dir/slurm, and submits it instead of starting the run here."""

    nodes: int = Field(1, ge=1)
    """Nodes of the job. On one node the job starts `rl`; on several, the first ones have a server each and the others
    train together. GPU ids then count within a node."""

    inference_nodes: int = Field(1, ge=1)
    """Nodes with a server, if there are several nodes."""

    trainer_nodes: int | None = Field(None, ge=1)
    """Nodes of the trainer, if there are several nodes; see `trainer_nodes` of `rl`."""

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
        if self.nodes > 1:
            count_trainer_nodes(self.nodes, self.inference_nodes, self.trainer_nodes)
        return self


def count_trainer_nodes(nodes: int, inference_nodes: int, trainer_nodes: int | None) -> int:
    """Return how many of the nodes, the last ones, train; with the inference nodes they may be more than `nodes`.

    Raises:
        ValueError: a node has no role, or a role has no node.
    """
    if trainer_nodes is None:
        trainer_nodes = nodes - inference_nodes
        if trainer_nodes < 1:
            raise ValueError(
                f"inference_nodes = {inference_nodes} leaves none of the {nodes} nodes for the trainer; with "
                "trainer_nodes, nodes have both roles"
            )
    for key, count in (("inference_nodes", inference_nodes), ("trainer_nodes", trainer_nodes)):
        if count > nodes:
            raise ValueError(f"{key} = {count}, but there are {nodes} nodes")
    if inference_nodes + trainer_nodes < nodes:
        raise ValueError(
            f"inference_nodes = {inference_nodes} and trainer_nodes = {trainer_nodes} are fewer than {nodes} nodes; "
            "remove trainer_nodes or some nodes"
        )
    return trainer_nodes
