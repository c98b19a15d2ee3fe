"""Every field of the SDK's requests is honoured, or refused unless it has its default: docs/reference/tinker.md."""

import importlib.util
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError
from tinker import types

from prime_rl_tinker import requests

ROOT = Path(__file__).parents[3]
specification = importlib.util.spec_from_file_location("reference_tinker", ROOT / "scripts/reference_tinker.py")
reference = importlib.util.module_from_spec(specification)
specification.loader.exec_module(reference)
REFUSED = {
    requests.SampleBody: {
        "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n",
        "base_model", "model_path",
    },
    requests.LoadBody: {"weights_access_token"},
}  # fmt: skip


def test_page_is_up_to_date():
    assert (ROOT / "docs/reference/tinker.md").read_text() == reference.page()


def test_every_request_of_the_sdk_is_listed():
    found = {name for name in dir(types) if name.endswith("Request")}
    assert found - {sdk.__name__ for sdk in reference.BODIES} == set(reference.WHOLE)
    annotations = [field.annotation for sdk in reference.BODIES for field in sdk.model_fields.values()]
    parts = {part for one in annotations for part in (one, *typing.get_args(one))}
    nested = {part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)}
    others = {one.__name__ for one in nested - set(reference.BODIES)}
    assert others <= {"OptimizerConfigBase", "OptimParamsBase", "TensorData", "_TensorDataModel"}


@pytest.mark.parametrize(("rows", "name"), [("json_rows", "top_k"), ("protobuf_rows", "sparse_csr")])
def test_field_that_no_code_reads_is_an_error(monkeypatch, rows, name):
    read = reference.attributes_read()
    monkeypatch.setattr(reference, "attributes_read", lambda: read - {name})
    with pytest.raises(ValueError, match=rf"\.{name} is accepted, but no code reads it"):
        list(getattr(reference, rows)())


def test_refused_fields_of_the_page_are_those_that_are_tested():
    listed = {field for sdk, field, server in reference.json_rows() if server.startswith("refused, unless")}
    assert listed == {name for names in REFUSED.values() for name in names} | {"type"}


@pytest.mark.parametrize(("body", "name"), [(body, name) for body, names in REFUSED.items() for name in sorted(names)])
def test_refused_fields_take_only_their_default(body, name):
    field = body.model_fields[name]
    with pytest.raises(ValidationError, match=name):
        body.__pydantic_validator__.validate_assignment(body.model_construct(), name, 5)
    body.__pydantic_validator__.validate_assignment(body.model_construct(), name, field.default)
