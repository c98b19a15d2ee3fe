"""I3: the endless stream of examples, a function of (seed, position)."""

import numpy as np


class ExampleStream:
    """Position -> example, in an order that is shuffled anew each epoch."""

    def __init__(self, examples: int, seed: int) -> None:
        """Stream over `examples` examples."""
        self._examples = examples
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def example(self, position: int) -> int:
        """Return the index of the example at `position` (group_id) of the stream."""
        epoch, offset = divmod(position, self._examples)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._examples)
            self._epoch = epoch
        return int(self._order[offset])
