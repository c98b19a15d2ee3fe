"""Mean and largest value over the ranks of what each rank measures."""

from collections.abc import Mapping

import torch

from prime_rl.trainer.parallel.process_group import World


def rank_statistics(values: Mapping[str, float], world: World) -> dict[str, float]:
    """Return `<name>/rank_mean` and `<name>/rank_max`. All ranks call it together, with the same names in order."""
    table = torch.zeros(world.size, len(values), dtype=torch.float64, device=world.device)
    table[world.rank] = torch.tensor(list(values.values()), dtype=torch.float64)
    means, largest = (world.sum(table).mean(0).tolist(), table.amax(0).tolist())
    return {f"{name}/rank_mean": mean for name, mean in zip(values, means, strict=True)} | {
        f"{name}/rank_max": most for name, most in zip(values, largest, strict=True)
    }
