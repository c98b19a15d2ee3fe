"""Requests of `forward_backward` in protobuf, checked and flattened; answers in protobuf."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from prime_rl_tinker.losses import LOSSES
from prime_rl_tinker.messages import Answer, ForwardBackward, Sample

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
_TARGETS = "target_tokens"
_ABSENT = np.float32(np.nan)
"""Log-probability of a cell that a sparse request does not list."""


STABLE = "stable_reinforce"
"""The cookbook's default loss."""
NO_FORMULA = (
    "its formula is not public; use importance_sampling, or start the server with an alias: "
    f'{STABLE} = "importance_sampling" in [aliases_of_losses]'
)


class RequestError(ValueError):
    """The request is invalid or not supported; the message names the field."""


class ScoringRequest:
    """A parsed `forward_backward`: the operation, and the shapes of its answer."""

    def __init__(
        self, body: bytes, vocabulary: int, max_tokens: int, aliases: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Parse and check; raises RequestError. A sample may have `max_tokens` tokens. `aliases` are of losses."""
        message = pb.ForwardBackwardRequest()
        try:
            message.ParseFromString(body)
        except DecodeError as error:
            raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from None
        loss_fn = message.loss_fn if message.loss_fn in LOSSES else aliases.get(message.loss_fn, message.loss_fn)
        if (loss := LOSSES.get(loss_fn)) is None:
            advice = NO_FORMULA if loss_fn == STABLE else f"use one of {', '.join(LOSSES)}"
            raise RequestError(f"loss_fn: {loss_fn!r} is not supported; {advice}")
        if not message.data:
            raise RequestError("data: there is no datum")
        self.seq_id = message.seq_id
        self._shapes: list[tuple[tuple[int, ...], NDArray[np.int64] | None]] = []
        samples = []
        for index, datum in enumerate(message.data):
            try:
                samples.append(
                    self._sample(datum, (*loss.inputs, *loss.optional), loss.optional, vocabulary, max_tokens)
                )
            except RequestError as error:
                raise RequestError(f"data[{index}]: {error}") from None
        options = _options(message, loss.options)
        self.operation = ForwardBackward(message.model_id, samples, loss_fn, options, message.forward_only)

    def answer(self, answer: Answer) -> bytes:
        """Return the result as a `ForwardBackwardOutput`."""
        output = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn", metrics=answer.metrics)
        record = output.loss_fn_outputs.add(num_datums=len(self._shapes))
        arrays = []
        for (shape, cells), values in zip(self._shapes, answer.logprobs, strict=True):
            logprobs = np.frombuffer(values, np.float32)
            if cells is not None:
                logprobs = np.full(int(np.prod(shape)), _ABSENT)
                logprobs[cells] = np.frombuffer(values, np.float32)
            arrays.append(logprobs)
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(self._shapes[0][0][1:])
        return bytes(output.SerializeToString())

    def _sample(
        self, datum: Any, names: Sequence[str], optional: Sequence[str], vocabulary: int, max_tokens: int
    ) -> Sample:
        tokens = tokens_of(datum.model_input)
        if not 1 <= len(tokens) <= max_tokens:
            raise RequestError(f"model_input has {len(tokens)} tokens; the model takes 1 to {max_tokens}")
        inputs = datum.loss_fn_inputs
        if unknown := sorted(set(inputs) - {_TARGETS, *names}):
            raise RequestError(f"loss_fn_inputs: {unknown[0]!r} is not an input of this loss")
        if missing := sorted({_TARGETS, *names} - set(optional) - set(inputs)):
            raise RequestError(f"loss_fn_inputs: {missing[0]!r} is missing")
        targets, listed = _dense(_TARGETS, inputs[_TARGETS])
        if not np.issubdtype(targets.dtype, np.integer):
            raise RequestError("target_tokens: the dtype must be an integer")
        if targets.ndim not in (1, 2) or len(targets) != len(tokens):
            raise RequestError(f"target_tokens has shape {targets.shape}; model_input has {len(tokens)} tokens")
        for field, ids in (("model_input", tokens), (_TARGETS, targets)):
            if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
                raise RequestError(f"{field} contains a token outside the vocabulary of {vocabulary}")
        arrays = dict[str, NDArray[np.float32]]()
        for name in names:
            if name not in inputs:
                arrays[name] = np.ones(targets.shape, np.float32)
                continue
            values, cells = _dense(name, inputs[name])
            if values.shape != targets.shape:
                raise RequestError(f"{name} has shape {values.shape}, target_tokens {targets.shape}")
            if not np.isfinite(values).all():
                raise RequestError(f"{name} contains a value that is not finite")
            arrays[name], listed = values.astype(np.float32), _union(listed, cells)
        positions = np.repeat(np.arange(len(tokens)), targets[0].size) if len(targets) else tokens[:0]
        columns: dict[str, NDArray[Any]] = {name: array.ravel() for name, array in arrays.items()}
        columns[_TARGETS] = targets.ravel().astype(np.int64)
        if listed is not None:
            positions, columns = positions[listed], {name: column[listed] for name, column in columns.items()}
        if self._shapes and self._shapes[0][0][1:] != targets.shape[1:]:
            raise RequestError(f"target_tokens has shape {targets.shape}, data[0] {self._shapes[0][0]}")
        self._shapes.append((targets.shape, listed))
        flat = {name: column.tobytes() for name, column in columns.items()}
        return Sample(tokens.tobytes(), positions.astype(np.int64).tobytes(), flat.pop(_TARGETS), flat)


def tokens_of(chunks: Sequence[Any]) -> NDArray[np.int64]:
    """Return the tokens of a protobuf `model_input`; raises RequestError for images and sound."""
    parts = [np.zeros(0, np.int32)]
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise RequestError(f"model_input: a chunk of type {kind} is not supported, only encoded_text")
        parts.append(_array("model_input", chunk.encoded_text.tokens, np.int32))
    return np.concatenate(parts).astype(np.int64)


def _dense(name: str, tensor: Any) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Return a tensor with zeros for absent cells, and the indices of those that a sparse one lists."""
    if tensor.dtype not in _DTYPES:
        raise RequestError(f"{name}: the dtype {pb.DType.Name(tensor.dtype)} is not supported")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "dense":
        values = _array(name, tensor.dense, dtype)
        shape = shape or values.shape
        if int(np.prod(shape)) != values.size:
            raise RequestError(f"{name} has {values.size} values and shape {shape}")
        return values.reshape(shape), None
    sparse = tensor.sparse_csr
    values = _array(name, sparse.values, dtype)
    rows, columns = (_array(name, part, np.int64) for part in (sparse.crow_indices, sparse.col_indices))
    valid = len(shape) == 2 and len(rows) == shape[0] + 1 and len(columns) == len(values)
    valid = valid and rows[0] == 0 and rows[-1] == len(values) and (np.diff(rows) >= 0).all()
    if not valid or (len(columns) and not (columns.min() >= 0 and columns.max() < shape[1])):
        raise RequestError(f"{name} is not a valid sparse matrix in CSR format")
    cells = np.repeat(np.arange(shape[0]), np.diff(rows)) * shape[1] + columns
    dense = np.zeros(shape[0] * shape[1], dtype)
    dense[cells] = values
    return dense.reshape(shape), np.sort(cells)


def _union(one: NDArray[np.int64] | None, other: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    return None if one is None or other is None else np.union1d(one, other)


def _array(name: str, data: bytes, dtype: Any) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise RequestError(f"{name}: {len(data)} bytes are not a whole number of values")
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)


def _options(message: Any, defaults: Mapping[str, float]) -> dict[str, float]:
    """Merge `loss_fn_config_v2`, or its older mirror, with the defaults."""
    given: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        given[name] = value.number if value.WhichOneof("value") == "number" else value.text
    for name, value in given.items():
        if name not in defaults:
            known = ", ".join(defaults) or "none"
            raise RequestError(f"loss_fn_config: {name!r} is not an option of {message.loss_fn} (known: {known})")
        if not isinstance(value, float) or not np.isfinite(value):
            raise RequestError(f"loss_fn_config: {name} = {value!r} is not a finite number")
    return {**defaults, **given}
