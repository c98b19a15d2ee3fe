"""scripts/dequantize.py: checkpoints in each format, against values computed here."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[2] / "scripts/dequantize.py"
RANDOM = torch.Generator().manual_seed(0)
LINEAR = "model.layers.0.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def run(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["dequantize.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def write(directory: Path, quantization: dict | None, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir()
    config = {"model_type": "llama", "dtype": "bfloat16", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (directory / "tokenizer.json").write_text("{}")
    kept = {"model.norm.weight": torch.ones(3, dtype=torch.bfloat16), "model.embed_tokens.weight": torch.ones(2, 2)}
    save_file(tensors | kept, directory / "model.safetensors")
    save_file({"output.weight": eighths(2, 2)}, directory / "consolidated.safetensors")  # another copy of the weights
    return directory


def eighths(*shape: int) -> torch.Tensor:
    """Values that float8 represents."""
    return torch.randint(-8, 9, shape, generator=RANDOM).float() / 8


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=RANDOM) + 0.5


def fp8(scale: torch.Tensor, spread: np.ndarray, name: str, **settings):
    values = eighths(200, 150)
    tensors = {f"{LINEAR}.weight": values.to(torch.float8_e4m3fn), f"{LINEAR}.{name}": scale}
    tensors[f"{LINEAR}.input_scale"] = torch.ones(1)
    return settings, tensors, f"{LINEAR}.weight", values.numpy() * spread


def fp8_in_blocks():
    """The last blocks have 72 rows and 22 columns."""
    scale = scales(2, 2)
    spread = scale.numpy()[np.arange(200)[:, None] // 128, np.arange(150)[None] // 128]
    return fp8(scale, spread, "weight_scale_inv", quant_method="fp8", weight_block_size=[128, 128])


def fp8_with_exponents():
    spread = np.exp2(np.array([[2.0, -3.0], [0.0, 1.0]]))[np.arange(200)[:, None] // 128, np.arange(150)[None] // 128]
    exponents = torch.tensor([[129, 124], [127, 128]], dtype=torch.uint8)
    return fp8(exponents, spread, "weight_scale_inv", quant_method="fp8", weight_block_size=[128, 128])


def fp8_of_whole_weights():
    return fp8(torch.tensor(0.25), np.full((1, 1), 0.25), "weight_scale", quant_method="fp8")


def fp8_of_rows():
    scale = scales(200, 1)
    groups = {"group_0": {"targets": ["Linear"], "weights": FP8 | {"strategy": "channel"}}}
    return fp8(scale, scale.numpy(), "weight_scale", quant_method="compressed-tensors", config_groups=groups)


def int4_in_groups():
    """Eight values in 32 bits, the first in the lowest, with 8 added."""
    values, scale = torch.randint(-8, 8, (64, 96), generator=RANDOM), scales(64, 3)
    packed = sum((values[:, i::8] + 8) << (4 * i) for i in range(8))
    tensors = {
        f"{LINEAR}.weight_packed": torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32),
        f"{LINEAR}.weight_scale": scale,
        f"{LINEAR}.weight_shape": torch.tensor([64, 96]),
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": INT4}}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return settings, tensors, f"{LINEAR}.weight", values.numpy() * scale.numpy().repeat(32, 1)


def mxfp4_of_experts():
    """Two values of E2M1 in a byte, the first in the lower half; blocks of 32 with a power of two."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes, exponents = torch.randint(0, 16, (2, 5, 3, 32), generator=RANDOM), torch.tensor([124, 127, 129])
    tensors = {
        "experts.down_proj_blocks": (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8),
        "experts.down_proj_scales": exponents.expand(2, 5, 3).to(torch.uint8).contiguous(),
    }
    values = table[codes.numpy()] * np.exp2(exponents.numpy() - 127.0)[:, None]
    return {"quant_method": "mxfp4"}, tensors, "experts.down_proj", values.reshape(2, 5, 96).transpose(0, 2, 1)


FORMATS = [
    fp8_in_blocks, fp8_with_exponents, fp8_of_whole_weights, fp8_of_rows, int4_in_groups, mxfp4_of_experts,
]  # fmt: skip


@pytest.mark.parametrize("make", FORMATS)
def test_weights_are_the_products_in_bfloat16(make, tmp_path, monkeypatch):
    settings, tensors, name, wanted = make()
    run(monkeypatch, write(tmp_path / "quantized", settings, tensors), tmp_path / "new")
    weights = load_file(tmp_path / "new/model.safetensors")
    assert sorted(weights) == sorted([name, "model.embed_tokens.weight", "model.norm.weight"])
    assert weights[name].dtype == torch.bfloat16
    np.testing.assert_array_equal(weights[name].float().numpy(), torch.tensor(wanted).bfloat16().float().numpy())
    assert weights["model.embed_tokens.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "new/config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    assert (tmp_path / "new/tokenizer.json").exists() and not (tmp_path / "new/consolidated.safetensors").exists()


def eight_bits(*shape: int) -> torch.Tensor:
    return eighths(*shape).to(torch.float8_e4m3fn)


EIGHT_BITS = {f"{LINEAR}.weight": eight_bits(4, 4)}


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        (None, {}, "is not quantized; train it as it is"),
        ({"quant_method": "gptq"}, {}, "has the format gptq, which cannot be read; use the original"),
        ({"quant_method": "fp8"}, EIGHT_BITS, "cannot be dequantized: ValueError: .*weight has the type .* no scales"),
        (
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            EIGHT_BITS | {f"{LINEAR}.weight_scale_inv": torch.ones(2, 1)},
            r"has scales of shape \[2, 1\], and \[2, 2\] blocks",
        ),
        (
            {"quant_method": "fp8"},
            EIGHT_BITS | {f"{LINEAR}.weight_scale": torch.ones(3)},
            r"has scales of shape \[3\], and rows of shape \[4\]",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            EIGHT_BITS | {f"{LINEAR}.weight_zero_point": torch.ones(4)},
            "its weights have zero points",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            EIGHT_BITS | {f"{LINEAR}.weight_scale": torch.ones(4, 1), "other.weight_packed": torch.ones(4)},
            "packed weights beside quantized ones",
        ),
        *(
            (
                {"quant_method": "fp8"},
                {"a.weight": eight_bits(*shape), "a.weight_scale": torch.ones(*scales)},
                "rows of",
            )
            for shape, scales in (((4, 4), (1, 4)), ((4, 4, 8), (4,)), ((4, 4, 8), (4, 1, 1)))
        ),
    ],
)
def test_what_cannot_be_read_is_refused_and_leaves_nothing(
    quantization, tensors, message, tmp_path, monkeypatch, capsys
):
    source = write(tmp_path / "model", quantization, tensors)
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, source, tmp_path / "new")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert exit_code.value.code == 2 and len(lines) == 1
    assert re.search(message, lines[0]), lines
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("problem", ["inside", "truncated"])
def test_wrong_places_and_files_are_one_line(problem, tmp_path, monkeypatch, capsys):
    settings, tensors, *_ = fp8_in_blocks()
    source = write(tmp_path / "model", settings, tensors)
    if problem == "truncated":
        (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:2000])
        (tmp_path / "new").mkdir()
    target = source / "new" if problem == "inside" else tmp_path / "new"
    with pytest.raises(SystemExit) as exit_code:
        run(monkeypatch, source, target)
    assert exit_code.value.code == 2 and target.exists() == (problem == "truncated")
    assert not [*tmp_path.glob("new/*")]
    assert "Traceback" not in capsys.readouterr().err
