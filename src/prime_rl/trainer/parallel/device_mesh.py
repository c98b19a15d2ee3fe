"""The layout of the ranks over the kinds of parallelism, and the device meshes of their groups."""

import warnings
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.core.errors import ConfigError, translate_error


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the dimensions; the product of `replicate`, `shard`, `cp` and `tp` is the number of ranks."""

    replicate: int  # number of replicas of the sharded model
    shard: int  # number of ranks that shard a replica, without those of `cp`
    cp: int  # number of ranks that share each row
    tp: int  # number of ranks that share each matrix
    ep: int  # number of ranks, of those of `shard` and `cp`, that divide the experts

    @classmethod
    def of(cls, config: TrainerModelConfig, size: int) -> "Layout":
        """Divide `size` ranks as configured. Raises ConfigError if `size` is not divisible."""
        with translate_error(ValueError, lambda error: ConfigError(str(error))):
            shard = config.sharding_ranks(size)
        return cls(config.dp_replicate, shard, config.cp.degree if config.cp else 1, config.tp, config.ep)

    @property
    def ep_shard(self) -> int:
        """Ranks of `shard` that divide the experts."""
        return max(1, self.ep // self.cp)

    @property
    def expert_shard(self) -> int:
        """Ranks that shard the same experts."""
        return self.shard // self.ep_shard

    @property
    def model_parallel_size(self) -> int:
        """Number of consecutive ranks that work on the same rows."""
        return self.cp * self.tp


class Mesh:
    """The groups of ranks, as submeshes of one mesh; groups that communicate most consist of neighbouring ranks.

    Dimensions, without those of size 1: dp_replicate, dp_shard, dp_shard_ep (the sharding ranks that divide the
    experts), cp, tp.
    """

    def __init__(self, layout: Layout, device_type: str, timeout_s: float) -> None:
        """Create the groups, with the time limit `timeout_s` of collectives; a collective call."""
        sizes = {
            "dp_replicate": layout.replicate,
            "dp_shard": layout.expert_shard,
            "dp_shard_ep": layout.ep_shard,
            "cp": layout.cp,
            "tp": layout.tp,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        self._timeout, self._names = timedelta(seconds=timeout_s), tuple(kept)
        self._all = self._set_timeout(init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=self._names))
        # [shard] or [replicate, shard], all ranks with different rows or parts of rows: parameters are sharded and
        # gradients summed over it; experts over `expert_data`.
        self.data = self._with_replicas(self._flatten("dp_shard", "dp_shard_ep", "cp"))
        self.expert_data = self._with_replicas(self._all["dp_shard"]) if layout.ep > 1 else None
        self.ep = self._flatten("dp_shard_ep", "cp") if layout.ep > 1 else None  # the ranks that divide the experts
        self.cp = self._all["cp"] if layout.cp > 1 else None  # the ranks that share each row
        self.tp = self._all["tp"] if layout.tp > 1 else None  # the ranks that share each matrix

    def _flatten(self, *names: str) -> DeviceMesh:
        """Merge the existing dimensions among `names` into one."""
        present = tuple(name for name in names if name in self._names)
        if len(present) == 1:
            return self._all[present[0]]
        return self._set_timeout(self._all[present]._flatten("_".join(present)))

    def _with_replicas(self, sharding: DeviceMesh) -> DeviceMesh:
        if "dp_replicate" not in self._names:
            return sharding
        assert sharding.mesh_dim_names is not None
        with warnings.catch_warnings():  # torch 2.13 deprecates this use of flattened names without a replacement
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            return self._all["dp_replicate", sharding.mesh_dim_names[0]]

    def _set_timeout(self, mesh: DeviceMesh) -> DeviceMesh:
        for group in mesh.get_all_groups():  # torch creates them with its default of 10 or 30 minutes
            _set_pg_timeout(self._timeout, group)
        return mesh
