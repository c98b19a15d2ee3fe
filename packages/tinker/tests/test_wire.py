"""Requests of forward_backward: what is parsed, and what is refused with the field's name."""

import itertools

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from prime_rl_tinker.messages import Answer
from prime_rl_tinker.wire import RequestError, ScoringRequest


def tensor(values, dtype=None):
    array = np.asarray(values)
    array = array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32)
    kind = pb.DTYPE_INT64 if array.dtype == np.int64 else pb.DTYPE_FLOAT32
    return pb.Tensor(dense=array.tobytes(), dtype=kind if dtype is None else dtype, shape=array.shape)


def sparse(rows, columns, values, shape):
    array = np.asarray(values)
    is_integer = np.issubdtype(array.dtype, np.integer)
    csr = pb.SparseCsr(
        values=array.astype(np.int64 if is_integer else np.float32).tobytes(),
        crow_indices=np.asarray(rows, np.int64).tobytes(),
        col_indices=np.asarray(columns, np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_INT64 if is_integer else pb.DTYPE_FLOAT32, shape=shape)


def body(*data, loss="cross_entropy", config=None, tokens=(1, 2, 3)):
    request = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=4, loss_fn=loss)
    for inputs in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, value in inputs.items():
            datum.loss_fn_inputs[name].CopyFrom(value)
    for name, value in (config or {}).items():
        kind = "number" if isinstance(value, float) else "text"
        setattr(request.loss_fn_config_v2[name], kind, value)
    return request.SerializeToString()


def parse(*data, **options):
    return ScoringRequest(body(*data, **options), vocabulary=10, max_tokens=8)


def numbers(data, dtype=np.int64):
    return np.frombuffer(data, dtype).tolist()


def answer_of(request, logprobs):
    parts = [np.asarray(one, np.float32).tobytes() for one in logprobs]
    output = pb.ForwardBackwardOutput()
    output.ParseFromString(request.answer(Answer(logprobs=parts, metrics={"loss:sum": 2.5})))
    field = output.loss_fn_outputs[0].fields["logprobs"]
    offsets = numbers(field.offsets)
    values = [numbers(field.data[a:b], np.float32) for a, b in itertools.pairwise(offsets)]
    return output, list(field.trailing_shape), values


def test_samples_are_flattened_and_answers_have_their_lengths():
    request = parse(
        {"target_tokens": tensor([4, 5, 6])}, {"target_tokens": tensor([7, 8, 9]), "weights": tensor([0.0, -1.5, 2.0])}
    )
    first, second = request.operation.samples
    assert (request.seq_id, request.operation.model_id, request.operation.forward_only) == (4, "s:train:0", False)
    assert numbers(first.tokens) == [1, 2, 3]
    assert numbers(first.positions) == [0, 1, 2]
    assert numbers(first.targets) == [4, 5, 6]
    assert numbers(first.arrays["weights"], np.float32) == [1, 1, 1]
    assert numbers(second.arrays["weights"], np.float32) == [0, -1.5, 2]
    output, shape, values = answer_of(request, [[-1, -2, -3], [-4, -5, -6]])
    assert (shape, values) == ([], [[-1, -2, -3], [-4, -5, -6]])
    assert output.loss_fn_outputs[0].num_datums == 2
    assert dict(output.metrics) == {"loss:sum": 2.5}


def test_several_targets_per_position():
    request = parse(
        {"target_tokens": tensor([[1, 2], [3, 4], [5, 6]]), "weights": tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]])}
    )
    (sample,) = request.operation.samples
    assert numbers(sample.positions) == [0, 0, 1, 1, 2, 2]
    assert numbers(sample.targets) == [1, 2, 3, 4, 5, 6]
    assert answer_of(request, [[-1, -2, -3, -4, -5, -6]])[1:] == ([2], [[-1, -2, -3, -4, -5, -6]])


def test_sparse_inputs_score_only_listed_cells():
    targets = sparse([0, 1, 1, 3], [1, 0, 2], [4, 5, 6], (3, 3))
    weights = sparse([0, 1, 1, 3], [1, 0, 2], [0.25, 0.5, 2.0], (3, 3))
    request = parse({"target_tokens": targets, "weights": weights})
    (sample,) = request.operation.samples
    assert numbers(sample.positions) == [0, 2, 2]
    assert numbers(sample.targets) == [4, 5, 6]
    assert numbers(sample.arrays["weights"], np.float32) == [0.25, 0.5, 2]
    _, shape, ((*values,),) = answer_of(request, [[-1, -2, -3]])
    assert shape == [3]
    np.testing.assert_array_equal(values, [np.nan, -1, np.nan, np.nan, np.nan, np.nan, -2, np.nan, -3])


def test_sparse_weights_of_token_zero_are_kept():
    """A sparse matrix of tokens leaves out token 0; its weight says that it is a target."""
    request = parse(
        {
            "target_tokens": sparse([0, 1, 1, 1], [0], [4], (3, 2)),
            "weights": sparse([0, 2, 2, 2], [0, 1], [1.0, 2.0], (3, 2)),
        }
    )
    (sample,) = request.operation.samples
    assert numbers(sample.targets) == [4, 0]
    assert numbers(sample.arrays["weights"], np.float32) == [1, 2]


TARGETS, ZEROS = {"target_tokens": tensor([1, 2, 3])}, tensor([0.0] * 3)
PPO = {**TARGETS, "logprobs": ZEROS, "advantages": ZEROS}
REFUSED = [  # inputs of each datum, other options of the request, what is said
    ([TARGETS], {"loss": "gspo"}, "loss_fn: 'gspo' is not supported"),
    ([TARGETS], {"config": {"beta": 1.0}}, "loss_fn_config: 'beta' is not an option of cross_entropy"),
    ([PPO], {"loss": "ppo", "config": {"clip_low_threshold": "x"}}, "clip_low_threshold = 'x' is not a finite number"),
    ([], {}, "data: there is no datum"),
    ([{}], {}, r"data\[0\]: loss_fn_inputs: 'target_tokens' is missing"),
    ([{**TARGETS, "logprobs": ZEROS}], {"loss": "ppo"}, "'advantages' is missing"),
    ([{**TARGETS, "clip_low_threshold": ZEROS}], {}, "'clip_low_threshold' is not an input"),
    ([{"target_tokens": tensor([1, 2])}], {}, "model_input has 3 tokens"),
    ([TARGETS], {"tokens": [1] * 9}, "model_input has 9 tokens; the model takes 1 to 8"),
    ([TARGETS], {"tokens": []}, "model_input has 0 tokens"),
    ([{"target_tokens": tensor([1, 2, 10])}], {}, "target_tokens contains a token outside the vocabulary"),
    ([TARGETS], {"tokens": [1, -2, 3]}, "model_input contains a token outside the vocabulary"),
    ([{**TARGETS, "weights": tensor([1.0, 1.0])}], {}, r"weights has shape \(2,\), target_tokens \(3,\)"),
    ([{**TARGETS, "weights": tensor([1.0, np.nan, 1.0])}], {}, "weights contains a value that is not finite"),
    ([{"target_tokens": tensor([1.0, 2.0, 3.0])}], {}, "target_tokens: the dtype must be an integer"),
    ([{**TARGETS, "weights": tensor([1.0], pb.DTYPE_BFLOAT16)}], {}, "the dtype DTYPE_BFLOAT16 is not supported"),
    ([{"target_tokens": sparse([0, 2, 1, 3], [0, 1, 2], [1, 2, 3], (3, 3))}], {}, "not a valid sparse matrix"),
    ([{"target_tokens": tensor([[1], [2], [3]])}, TARGETS], {}, r"data\[1\]: target_tokens has shape \(3,\)"),
]


@pytest.mark.parametrize(("data", "options", "message"), REFUSED)
def test_request_that_is_not_supported_is_refused_by_the_name_of_its_field(data, options, message):
    with pytest.raises(RequestError, match=message):
        parse(*data, **options)


def test_images_and_broken_bodies_are_refused():
    request = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    request.data.add().model_input.add().image.data = b"png"
    with pytest.raises(RequestError, match="a chunk of type image is not supported"):
        ScoringRequest(request.SerializeToString(), 10, 8)
    with pytest.raises(RequestError, match="not a ForwardBackwardRequest"):
        ScoringRequest(b"\xff\xff", 10, 8)


def test_options_of_a_loss_are_completed_by_its_defaults():
    assert parse(PPO, loss="ppo").operation.options == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    given = parse(PPO, loss="ppo", config={"clip_low_threshold": 0.5}).operation.options
    assert given == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}
