"""Publishing versions of the policy while training goes on (docs/publication.md)."""

from prime_rl.trainer.publication.canary import plain_twin
from prime_rl.trainer.publication.publisher import Publisher

__all__ = ["Publisher", "plain_twin"]
