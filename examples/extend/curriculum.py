"""A custom curriculum: examples whose rollouts succeed sometimes, but not always, come most often.

    uv run --extra cpu rl @ configs/reverse_text/cpu.toml --orchestrator.buffer.type curriculum \
        --orchestrator.buffer.import-path examples.extend.curriculum:uncertain_first

A curriculum gets the results of an environment's N examples and returns their weights [N], at least 0. It is called
after each batch, and must return equal weights for equal results: a resumed run then draws the same examples.
"""

import numpy as np
from numpy.typing import NDArray

from prime_rl.orchestrator.curriculum import ExampleResults


def uncertain_first(results: ExampleResults, floor: float = 0.05) -> NDArray[np.float64]:
    """Weight p (1 - p) + floor by the mean reward p of the latest group; examples without a result count as p = 0.5."""
    reward = np.clip(np.nan_to_num(results.last, nan=0.5), 0, 1)
    return reward * (1 - reward) + floor
