"""The mirror of a model: what a loader writes arrives there and nowhere else, or the model does not suit."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

standby = pytest.importorskip("prime_rl.inference.standby")


class Layer(nn.Module):
    """A linear layer whose loader is a method of it, as vLLM's are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, size), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]
        self.size = size

    def load(self, parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded * self.size)


class Model(nn.Module):
    """Two layers that share a weight, one of its own, and a parameter that no checkpoint has."""

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
    """Its loader finds a layer by a way that a mirror does not see."""

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
    """Fills a weight in part."""

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


def _standby(model: Model) -> Any:
    return standby.Standby(model, torch.float32)


def test_the_model_changes_only_when_the_weights_are_put_in_place() -> None:
    model = _make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = _standby(model).prove(_weights(1.0).items())
    assert kept == {"scale"}
    one = _standby(model)
    one.load(_weights(5.0).items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    one.put_in_place(kept)
    one.retire()
    assert torch.equal(model.first.weight, torch.full((2, 2), 10.0)), "by the layer's own loader"
    assert torch.equal(model.second.weight, torch.full((3, 3), 15.0))
    assert torch.equal(model.statistics, torch.full((2,), 5.0))
    assert torch.equal(model.scale, torch.ones(1)), "no checkpoint has it"
    assert parameters == dict(model.named_parameters(remove_duplicate=False)), "graphs may hold the parameters"
    assert model.tied.weight is model.first.weight
    assert one.bytes == 4 * (4 + 9 + 1)


@pytest.mark.parametrize("kind", [Astray, Halfway])
def test_a_write_that_goes_astray_is_found_out_and_changes_nothing(kind: type[Model]) -> None:
    model = _make(Astray)
    model.__class__ = kind
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(standby.Unsuitable, match=r"(second|first)\.weight is not loaded through the module that holds"):
        _standby(model).prove(_weights(1.0).items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_integers_are_left_to_vllm() -> None:
    model = _make()
    model.packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    with pytest.raises(standby.Unsuitable, match=r"parameters of torch\.int32"):
        _standby(model).prove(_weights(1.0).items())
