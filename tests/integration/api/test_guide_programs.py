"""The programs of the guides that use our names, as written except for model, data and sizes.

`verifiers.hub` and `prime_sandboxes` do not exist: `prime_rl` loads environments, and those with code have their own
sandbox.
"""

from pathlib import Path

import pytest

from tests.support.tiny_model import publish_weights

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]
MODEL = Path(__file__).parents[3] / "configs/reverse_text/model"

LOAD_MODEL = """
def load_model(name):
    return "configs/reverse_text/model"
"""

END_TO_END = """
from prime_rl import FSDP2Trainer, vLLMInference, Orchestrator
from prime_rl import load_environment

# 1. Setup infrastructure
trainer = FSDP2Trainer(
    model=load_model("intellect-3"),
    optimizer="adamw",
    num_gpus=1
)

inference = vLLMInference(
    model_weights=trainer.get_weights(),
    num_nodes=1
)

# 2. Load environments from Hub
environments = [
    load_environment("primeintellect/reverse-text", words=500),
    load_environment("primeintellect/reverse-text", words=500, min_letters=5),
]

# 3. Launch orchestrator
orchestrator = Orchestrator(
    trainer=trainer,
    inference=inference,
    environments=environments,
    batch_size=64,
    async_mode=True
)

# 4. Start training
orchestrator.train(
    total_steps=3,
    checkpoint_every=2,
    log_every=1
)
"""

SIMPLE = """
from prime_rl import SimpleSFTTrainer  # Simpler API for getting started
from prime_rl import load_environment

# Load environment
math_env = load_environment("primeintellect/reverse-text", words=500)

# Setup trainer (single GPU for quick start)
trainer = SimpleSFTTrainer(
    model="configs/reverse_text/model",
    environment=math_env,
    num_gpus=1
)

# Train
trainer.train(steps=3)
"""

ADAPTER = """
from prime_rl import PrimeIntellectRLAdapter
from prime_rl import load_policy

# Load your trained model
model, tokenizer = load_policy("trained")

# Create adapter
adapter = PrimeIntellectRLAdapter(
    model=model,
    tokenizer=tokenizer,
    env_id="harleycooper/nanochatAquaRat",
    env_args={
        "num_train_examples": 20,
        "num_eval_examples": 10,
        "data_dir": "aqua",
    }
)

# Load environment
env = adapter.load_environment()

# Generate responses
messages = [{"role": "user", "content": "What is 2+2?"}]
responses = adapter.generate_response(messages, num_samples=4)
print(len(env.get_dataset()), len(responses))
"""


def test_end_to_end_example(start):
    program = start(LOAD_MODEL + END_TO_END)
    assert [line.split(":")[0] for line in program.wait().splitlines()[-3:]] == ["step 0", "step 1", "step 2"]
    checkpoints = program.folder / "outputs/checkpoints"
    assert (checkpoints / "step_2/COMMITTED").exists() and (checkpoints / "step_3/COMMITTED").exists()
    program.assert_nothing_left()


def test_quick_start_example(start):
    program = start(SIMPLE)
    program.wait()
    assert (program.folder / "outputs/weights/step_3/model.safetensors").exists()


def test_adapter_example(start, tmp_path):
    publish_weights(tmp_path / "trained", MODEL, 1)
    (tmp_path / "aqua").mkdir()
    row = '{"question": "What is 2+2?", "options": ["A)3", "B)4"], "rationale": "4", "correct": "B"}\n'
    for split in ("train", "validation", "dev", "test"):
        (tmp_path / f"aqua/{split}.jsonl").write_text(row * 30)
    assert start(ADAPTER).wait().splitlines()[-1] == "20 4"
