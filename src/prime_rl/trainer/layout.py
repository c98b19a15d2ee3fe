"""How the ranks divide the work: sizes that are checked, and the groups of ranks that follow from them."""

import warnings
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from prime_rl.configs.trainer import TrainerModelConfig
from prime_rl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks for what; the product of `replicate`, `shard`, `cp` and `tp` is the number of ranks.

    Attributes:
        replicate: copies of the sharded model.
        shard: ranks among which a copy is sharded, besides those of `cp`.
        cp: ranks that share each row.
        tp: ranks that share each matrix.
        ep: ranks, out of `shard` and `cp`, that share the experts.
    """

    replicate: int
    shard: int
    cp: int
    tp: int
    ep: int

    @classmethod
    def of(cls, config: TrainerModelConfig, size: int) -> "Layout":
        """Divide `size` ranks as `config` asks for.

        Raises:
            ConfigError: they cannot be divided so.
        """
        try:
            shard = config.sharding_ranks(size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return cls(config.dp_replicate, shard, config.cp.degree if config.cp else 1, config.tp, config.ep)

    @property
    def sharers(self) -> int:
        """Ranks that work on the same rows; they lie next to each other."""
        return self.cp * self.tp


class Mesh:
    """The groups of ranks, as submeshes of one mesh; those that exchange most lie next to each other.

    Dimensions, of which those of size 1 are left out: dp_replicate, dp_shard, dp_shard_ep (the part of the sharding
    ranks that share experts), cp, tp.

    Attributes:
        data: [shard] or [replicate, shard], over which parameters are sharded and gradients summed: all ranks that hold
            different rows or different parts of rows.
        beside_experts: the same for experts, which are shared already; None without expert parallelism.
        experts: the ranks that share experts; None without.
        cp: the ranks that share each row; None without.
        tp: the ranks that share each matrix; None without.
    """

    def __init__(self, layout: Layout, device_type: str, timeout_s: float) -> None:
        """Make the groups; all ranks call it together.

        Args:
            layout: of all ranks.
            device_type: where tensors are, "cpu" or "cuda".
            timeout_s: longest wait in any group.
        """
        inside = max(1, layout.ep // layout.cp)
        sizes = {
            "dp_replicate": layout.replicate,
            "dp_shard": layout.shard // inside,
            "dp_shard_ep": inside,
            "cp": layout.cp,
            "tp": layout.tp,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        self._timeout, self._names = timedelta(seconds=timeout_s), tuple(kept)
        self._all = self._limited(init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=self._names))
        self.data = self._with_copies(self._flat("dp_shard", "dp_shard_ep", "cp"))
        self.beside_experts = self._with_copies(self._all["dp_shard"]) if layout.ep > 1 else None
        self.experts = self._flat("dp_shard_ep", "cp") if layout.ep > 1 else None
        self.cp = self._all["cp"] if layout.cp > 1 else None
        self.tp = self._all["tp"] if layout.tp > 1 else None

    def _flat(self, *names: str) -> DeviceMesh:
        """Make one dimension of those of `names` that there are."""
        present = tuple(name for name in names if name in self._names)
        if len(present) == 1:
            return self._all[present[0]]
        return self._limited(self._all[present]._flatten("_".join(present)))

    def _with_copies(self, sharding: DeviceMesh) -> DeviceMesh:
        if "dp_replicate" not in self._names:
            return sharding
        assert sharding.mesh_dim_names is not None
        with warnings.catch_warnings():  # torch means to drop this use of flattened names and has no other yet
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            return self._all["dp_replicate", sharding.mesh_dim_names[0]]

    def _limited(self, mesh: DeviceMesh) -> DeviceMesh:
        """Set the time limit of the groups of `mesh`, which torch makes with its own, 10 or 30 minutes (I7)."""
        for group in mesh.get_all_groups():
            _set_pg_timeout(self._timeout, group)
        return mesh
