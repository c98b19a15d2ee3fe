"""Keys of `uv run sft`."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from prime_rl.configs.command_bases import TrainingConfig
from prime_rl.configs.loading.base_config import common
from prime_rl.configs.rendering import TemplateConfig
from prime_rl.configs.training.broadcast import Precision
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig, OptimConfig
from prime_rl.configs.training.sft_data import SFTDataConfig, SFTFakeDataConfig, SFTValConfig


class SFTConfig(TrainingConfig):
    """Supervised fine-tuning. The result is the latest weights/step_N of output_dir."""

    command_name: ClassVar[str] = "sft"

    data: Annotated[SFTDataConfig | SFTFakeDataConfig, Field(discriminator="type")] = Field(
        default_factory=SFTDataConfig, json_schema_extra=common("Data")
    )
    """The training data."""

    val: SFTValConfig | None = Field(None, json_schema_extra=common("Data"))
    """Validation loss; None computes none."""

    rendering: TemplateConfig = Field(default_factory=TemplateConfig)
    """The chat template."""

    show_sample: bool = Field(False, json_schema_extra=common("Data"))
    """Print the first five examples as they are rendered, with the trained text between « and », and exit."""

    optim: OptimConfig = Field(default_factory=lambda: AdamWConfig(lr=1e-5), json_schema_extra=common("Training"))

    max_steps: int | None = Field(None, ge=1, json_schema_extra=common("Run"))
    """Steps to train; None is one pass over the data."""

    weights_interval: int | None = Field(None, ge=1)
    """Steps between two published versions of the weights; None publishes only the last."""

    weights_dtype: Precision = "auto"
    """Precision of the published weights; auto is bfloat16 on CUDA and float32 on CPU."""

    @model_validator(mode="after")
    def _check(self) -> "SFTConfig":
        if self.model.seq_len != TrainerModelConfig.model_fields["seq_len"].default:
            raise ValueError(
                f"model.seq_len = {self.model.seq_len} is for the RL trainer; the length of a row is data.seq_len here"
            )
        if self.model.router_replay:
            raise ValueError("model.router_replay is for the RL trainer: examples have no sampler; set it to false")
        data, val = self.data, self.val
        if data.type == "fake":
            if self.max_steps is None:
                raise ValueError("max_steps: fake data are unlimited; set max_steps")
            if val is not None and not self.bench:
                raise ValueError("val: data.type is fake, so there is nothing to validate on; remove val")
            return self
        if data.streaming and self.max_steps is None:
            raise ValueError("max_steps: the number of steps of a streaming dataset is unknown; set max_steps")
        if val is not None and not (val.name or val.split) and data.streaming:
            raise ValueError("val.fraction: cannot hold out part of a streaming dataset; set val.name or val.split")
        if val is not None and val.name == data.name and (val.split or "train") == data.split:
            raise ValueError("val.name: this is the training data; remove it to hold out a part of the training data")
        files = [name for name in data.name if Path(name).expanduser().is_file()]
        if val is not None and val.split and not val.name and files:
            raise ValueError(f"val.split: {files[0]} is a file without splits; set val.name")
        return self
