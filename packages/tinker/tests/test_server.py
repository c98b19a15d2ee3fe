"""The unmodified SDK against a real server: three processes, on the CPU."""

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import tinker
from tests.support.command import clean_environment, until
from tests.support.server import free_port
from tests.support.tiny_model import make_tiny_model
from tinker import types

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
NAME = "Qwen/Qwen3-8B"
PROMPT = [5, 6, 7, 8]


class Server:
    """A running `tinker-server`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port, self.log = free_port(), folder / "log"
        options = {
            "--model.name": make_tiny_model(folder / "model") if not (folder / "model").exists() else folder / "model",
            "--model.seq-len": 64,
            "--aliases-of-model": f'{{"{NAME}" = "{folder / "model"}"}}',
            "--port": self.port,
            "--inference.server.port": free_port(),
            "--inference.max-loras": 3,
            "--output-dir": folder / "out",
        }
        given = [str(one) for pair in options.items() for one in pair]
        command = [sys.executable, "-m", "prime_rl_tinker.tinker_server", *given, *arguments]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=clean_environment())
        until(self.answers, "the server", 300)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/healthz", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def client(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=f"http://127.0.0.1:{self.port}", api_key="tml-test")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    one = Server(tmp_path_factory.mktemp("tinker"), "--ranks", "2")
    yield one
    assert one.stop() == 0, one.log.read_text()


def datum(tokens, **inputs):
    values = {name: list(value) for name, value in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=values)


def data(seed, count=3, length=6):
    random = np.random.default_rng(seed)
    return [
        datum(random.integers(0, 128, length).tolist(), target_tokens=random.integers(0, 128, length).tolist())
        for _ in range(count)
    ]


def train(client, steps, seed=0, rate=1e-2):
    """Take some steps; return the losses."""
    losses = []
    for _ in range(steps):
        scored = client.forward_backward(data(seed), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=rate)).result()
        losses.append(scored.result().metrics["loss:sum"])
    return losses


def scores(client, tokens):
    """Log-probabilities of tokens 1 ... by the trainer."""
    one = datum(tokens[:-1], target_tokens=tokens[1:])
    (output,) = client.forward([one], "cross_entropy").result().loss_fn_outputs
    return output["logprobs"].tolist()


def test_loss_falls_and_samples_have_the_trainers_logprobs(server):
    service = server.client()
    client = service.create_lora_training_client(NAME, rank=8, seed=1)
    losses = train(client, 6)
    assert losses[-1] < 0.7 * losses[0]
    sampler = client.save_weights_and_get_sampling_client()
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, types.SamplingParams(max_tokens=8, seed=3)).result()
    for sequence in answer.sequences:
        expected = scores(client, PROMPT + list(sequence.tokens))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-4)
    service.close("success").result()


def test_program_of_the_page_runs(server):
    page = (Path(__file__).parents[3] / "docs/tinker.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(block.replace("8600", str(server.port)), names)
    assert names["training"].get_info().model_data.model_name == NAME
    names["client"].close("success").result()


def test_snapshot_stays_the_same_while_training_goes_on(server):
    service = server.client()
    client = service.create_lora_training_client(NAME, rank=4, seed=2)
    base = service.create_sampling_client(base_model=NAME)
    first = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([*PROMPT, 9, 10])
    before = first.compute_logprobs(prompt).result()
    np.testing.assert_allclose(before[1:], base.compute_logprobs(prompt).result()[1:], atol=2e-4)  # B = 0
    train(client, 20)
    samplers = [client.save_weights_for_sampler(f"s{n}").result().path for n in range(3)]  # more than the slots
    others = [service.create_sampling_client(model_path=path) for path in samplers]
    after = [one.compute_logprobs(prompt).result() for one in others]
    assert after[0] == after[1] == after[2]
    assert np.abs(np.array(after[0][1:]) - before[1:]).max() > 0.05
    assert first.compute_logprobs(prompt).result() == before
    service.close("success").result()


def test_custom_loss_has_the_gradient_of_its_formula(server):
    """The loss is lp^2 / 2. The SDK sends weights -lp of cross_entropy, so the step equals one with these weights."""
    import torch

    def loss_of(samples, logprobs):
        return sum((one**2).sum() / 2 for one in logprobs), {}

    service, results = server.client(), []
    for custom in (True, False):
        client = service.create_lora_training_client(NAME, rank=4, seed=7)
        if custom:
            client.forward_backward_custom(data(1), loss_of).result()
        else:
            outputs = client.forward(data(1), "cross_entropy").result().loss_fn_outputs
            weighted = [
                datum(one.model_input.to_ints(), target_tokens=one.loss_fn_inputs["target_tokens"].tolist(),
                      weights=(-torch.tensor(output["logprobs"].tolist())).tolist())
                for one, output in zip(data(1), outputs, strict=True)
            ]  # fmt: skip
            client.forward_backward(weighted, "cross_entropy").result()
        step = client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        results.append([step.metrics["grad_norm"], *scores(client, PROMPT)])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def test_training_continues_after_the_server_was_killed(tmp_path):
    server = Server(tmp_path)
    client = server.client().create_lora_training_client(NAME, rank=4, seed=5)
    train(client, 2)
    path = client.save_state("a").result().path
    expected = train(client, 2)
    server.stop(signal.SIGKILL)
    until(lambda: not _serves(server.port), "the end of the server's processes", 60)
    again = Server(tmp_path)
    continued = again.client().create_training_client_from_state_with_optimizer(path)
    np.testing.assert_allclose(train(continued, 2), expected, rtol=1e-5)
    assert again.stop() == 0, again.log.read_text()


def _serves(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz", timeout=5).close()
    except OSError:
        return False
    return True


def process_of(server, module):
    """Return the process of `server` that runs a module."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [one for one in children if "-m" in one.cmdline() and module in one.cmdline()]
    return found


SILENT_CLIENT = """
import sys, time, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-test")
training = client.create_lora_training_client(sys.argv[2], rank=4)
sampler = training.save_weights_and_get_sampling_client()
futures = [sampler.sample(types.ModelInput.from_ints([5, 6]), 4, types.SamplingParams(max_tokens=60, stop=[]))
           for _ in range(100)]
print(training.model_id, flush=True)
time.sleep(600)
"""


def test_sessions_go_on_after_the_inference_server_and_a_client_were_killed(tmp_path):
    server = Server(tmp_path, "--server.session-timeout-seconds", "12")
    service = server.client()
    client = service.create_lora_training_client(NAME, rank=4, seed=5)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([*PROMPT, 9, 10])
    before = sampler.compute_logprobs(prompt).result()
    saved = client.save_state("a").result().path

    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-c", SILENT_CLIENT, url, NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as silent:
        model_id = silent.stdout.readline().strip()
        silent.kill()
    process_of(server, "prime_rl.entrypoints.inference").kill()

    again = sampler.compute_logprobs(prompt)  # waits for the restart, then loads the adapter again
    losses = train(client, 3)  # meanwhile
    assert losses[-1] < losses[0]
    assert again.result() == before
    after = client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    assert np.abs(np.array(after[1:]) - before[1:]).max() > 0.01
    others = service.create_rest_client()
    until(lambda: model_id.partition(":")[0] not in others.list_sessions().result().sessions, "the silent session", 30)
    assert others.list_sessions().result().sessions == [client.model_id.partition(":")[0]]
    (listed,) = others.list_checkpoints(client.model_id).result().checkpoints
    assert listed.tinker_path == saved
    service.close("success").result()
    assert server.stop() == 0, server.log.read_text()
