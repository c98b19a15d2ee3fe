"""Publishing versions of the policy while training goes on (docs/publication.md)."""

from prime_rl.trainer.publication.canary import plain_twin
from prime_rl.trainer.publication.publisher import Publisher
from prime_rl.trainer.publication.transfer import choose_way

__all__ = ["Publisher", "choose_way", "plain_twin"]
