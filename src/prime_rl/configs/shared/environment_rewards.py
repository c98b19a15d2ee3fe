"""The block `rewards` of an environment."""

from typing import ClassVar

from pydantic import Field

from prime_rl.loading.base_config import BaseConfig, ImportPath


class RewardConfig(BaseConfig):
    """A reward function to add to an environment."""

    shorthand: ClassVar[str | None] = "import_path"

    import_path: ImportPath
    """Your function, from an installed package or the working directory."""

    weight: float = 1.0
    """Factor of its value in the reward; with 0 it is only a metric."""

    name: str | None = Field(None, min_length=1)
    """Name of its metric; None uses the name of the function."""

    kwargs: dict[str, object] = Field({})
    """Keyword arguments of the function."""

    @property
    def label(self) -> str:
        """Name of its metric."""
        return self.name or self.import_path.replace(":", ".").rpartition(".")[2]
