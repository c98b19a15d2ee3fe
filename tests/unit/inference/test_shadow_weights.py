"""Shadow weights: a loader writes into the mirror and not into the model, or the model is unsupported."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.vllm_modules import LazyModule, needs_vllm

pytestmark = needs_vllm

shadow = LazyModule("prime_rl.inference.worker.shadow_weights")


class Layer(nn.Module):
    """A linear layer with its loader as a method, like vLLM's layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size), requires_grad=False)
        self.weight.weight_loader = self.load
        self.size = size

    def load(self, parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded * self.size)


class Model(nn.Module):
    """Two layers that share a weight, a third layer, and a parameter that no checkpoint contains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tied = Layer(2), Layer(3), Layer(2)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("statistics", torch.zeros(2))
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.elsewhere: list[Any] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        loaded = set()
        for name, tensor in weights:
            target: Any = named[name]
            getattr(target, "weight_loader", lambda parameter, value: parameter.data.copy_(value))(target, tensor)
            loaded.add(name)
        return loaded


class Astray(Model):
    """Its loader reaches a layer without the mirror."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if name == "second.weight":
                self.elsewhere[0].weight.data.copy_(tensor * 3)
                loaded.add(name)
            else:
                loaded |= super().load_weights([(name, tensor)])
        return loaded


class Halfway(Model):
    """Its loader writes a part of a weight."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name != "first.weight":
                continue
            self.first.weight.data[0].copy_(tensor[0])
        return {"first.weight"}


def _weights(value: float) -> dict[str, Tensor]:
    return {
        "first.weight": torch.full((2, 2), value),
        "second.weight": torch.full((3, 3), value),
        "statistics": torch.full((2,), value),
    }


def _make(kind: type[Model] = Model) -> Model:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = kind()
    record_metadata_for_reloading(model)
    model.elsewhere.append(model.second)
    model.load_weights(_weights(1.0).items())
    return model


def _shadow(model: Model) -> Any:
    return shadow.ShadowWeights(model, torch.float32)


def test_load_changes_the_model_only_after_load_into_model():
    model = _make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = _shadow(model).check_loading(_weights(1.0).items())
    assert kept == {"scale"}
    one = _shadow(model)
    one.load(_weights(5.0).items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    one.load_into_model(kept)
    one.free_replaced()
    assert torch.equal(model.first.weight, torch.full((2, 2), 10.0)), "by the layer's own loader"
    assert torch.equal(model.second.weight, torch.full((3, 3), 15.0))
    assert torch.equal(model.statistics, torch.full((2,), 5.0))
    assert torch.equal(model.scale, torch.ones(1)), "no checkpoint has it"
    assert parameters == dict(model.named_parameters(remove_duplicate=False)), "graphs may hold the parameters"
    assert model.tied.weight is model.first.weight
    assert one.bytes == 4 * (4 + 9 + 1)


def test_load_into_model_updates_a_view_of_a_parameter():
    """Layers of Mamba-2 compute with a view of the weight of their convolution."""
    model = _make()
    model.register_buffer("view", model.second.weight.data.flatten(), persistent=False)
    version = _shadow(model)
    version.load(_weights(2.0).items())
    version.load_into_model(frozenset({"scale"}))
    assert (model.second.weight == 6).all()
    assert (model.view == 6).all()


@pytest.mark.parametrize("kind", [Astray, Halfway])
def test_a_write_that_goes_astray_is_found_out_and_changes_nothing(kind):
    model = _make(Astray)
    model.__class__ = kind
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        shadow.UnsupportedModel, match=r"(second|first)\.weight is not loaded through the module that holds"
    ):
        _shadow(model).check_loading(_weights(1.0).items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_check_loading_rejects_integer_parameters():
    model = _make()
    model.packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    with pytest.raises(shadow.UnsupportedModel, match=r"parameters of torch\.int32"):
        _shadow(model).check_loading(_weights(1.0).items())
