"""The RL trainer: train v_n on batch n and publish v_{n+1}, for n = 0, 1, 2, ...

    rollouts/step_n --> BatchSource.read --> split_batch --> References.score --> TrainStep.step
          ^                   (1)                                                  (2)    |
          |                                                                               v
    orchestrator <-- inference <-- weights/step_{n+1} <-- writer thread <-- Publisher.start   Checkpointer.step_done
                                                                               (3)                  (4)

Back-pressure:

1. `read` waits for the orchestrator, which ships batch n only when each of its tokens is from v_{n-k} or later (I1).
2. The update waits until the writer thread has copied the weights of v_n to host memory.
3. `start` waits until v_n is written; v_{n+1} is then written while the next step runs.
4. A checkpoint waits until the previous one is written.

Started by `trainer`, or on several ranks by `torchrun --nproc-per-node N -m prime_rl.trainer.rl.train @ config.toml`.
"""

import sys
from functools import partial
from itertools import count

from prime_rl.configs.trainer import TrainerConfig
from prime_rl.core.entry_point import run_main
from prime_rl.trainer.rank_start import start_rank

if __name__ == "__main__":  # before the imports of torch

    def main() -> None:
        """Train as a rank, whose heartbeat shows that it imports torch."""
        config = TrainerConfig.load()
        transport = config.weight_broadcast.type
        with start_rank(config.log, config.run_paths, settings=config.run_settings, transport=transport) as heartbeat:
            from prime_rl.trainer.rl.train import run

            run(config, heartbeat)

    run_main(main)
    sys.exit()

from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.monitors.bench_report import report_benchmark
from prime_rl.storage.artifact import remove_artifact
from prime_rl.trainer.model.policy_model import load_tokenizer
from prime_rl.trainer.packing_check import check_packing
from prime_rl.trainer.parallel.process_group import NodeRanks, join_world
from prime_rl.trainer.process_setup import (
    GarbageCollection,
    check_rank_settings,
    exit_if_stopped,
    limit_process,
)
from prime_rl.trainer.rl.batch_source import BatchSource, compare_with_orchestrator, split_batch
from prime_rl.trainer.rl.multi_run import train_runs
from prime_rl.trainer.rl.rl_objective import References
from prime_rl.trainer.rl.trained_run import (
    PolicyOfRuns,
    TrainedRun,
    check_version_0,
    complete_settings,
    make_checkpoints,
)
from prime_rl.trainer.trainer_metrics import StepTimer
from prime_rl.trainer.trainer_nodes import join_nodes
from prime_rl.trainer.weights.policy_loading import make_policy


def run(config: TrainerConfig, heartbeat: HeartbeatWriter) -> None:
    """Prepare this process, train, and report the benchmark with `--bench`. Raises what `train` raises."""
    limit_process(config.deterministic)
    heartbeat.add_settings(complete_settings(config))
    heartbeat.enter("wait for all ranks", config.dist_timeout_seconds)
    with report_benchmark(config.bench, config.run_paths, "trainer"):
        stopped = (train if config.max_concurrent_runs == 1 else train_runs)(config, heartbeat)
    exit_if_stopped(stopped)


def train(config: TrainerConfig, heartbeat: HeartbeatWriter) -> bool:
    """Train until `config.max_steps`, or until the trainer is stopped; return whether it was stopped.

    Raises ConfigError for invalid input, and RunError if the run cannot continue.
    """
    paths, timeout_seconds = config.run_paths, config.dist_timeout_seconds
    with (
        join_world(config.device, timeout_seconds, config.model) as world,
        join_nodes(paths, world, heartbeat, config.heartbeat.limits, config.nodes_share_directory) as directory,
    ):
        check_rank_settings(config, world)
        node = NodeRanks(world)
        compare_with_orchestrator(config)
        heartbeat.enter("load the model")
        exporter, checkpoints = make_checkpoints(config, world)
        policy = make_policy(config.model, config.seed, world)
        policy.entropy_gradient = config.loss.entropy_coef > 0
        tokenizer = load_tokenizer(config.tokenizer, config.model)
        references = References(config, policy, world)
        shared = PolicyOfRuns(policy, tokenizer, world, directory)
        run = TrainedRun(config, shared, heartbeat, exporter, checkpoints)
        batches = BatchSource(
            config, paths, policy.vocabulary, run.publisher.check, heartbeat, checkpoints.required_branch,
            partial(check_version_0, config, policy, world), checkpoints.stop_request, world, node,
            policy.replay,
        )  # fmt: skip

        heartbeat.enter("restore")
        progress = run.restore()
        heartbeat.enter("check the model", timeout_seconds if world.size > 1 else None)
        check_packing(policy, config.model, world, config.model.seq_len)
        run.publish_restored()
        with checkpoints.stop_request as stop:
            garbage = GarbageCollection(config.gc_interval)
            for step in range(progress.step, config.max_steps) if config.max_steps else count(progress.step):
                timer = StepTimer()
                if (batch := batches.read(step)) is None:
                    break
                timer.lap("wait_for_batch")
                heartbeat.enter(f"step {step}", timeout_seconds if world.size > 1 else None, step=step)
                minibatches = split_batch(batch, step, config.num_minibatches, world, max_tokens=config.model.seq_len)
                options = run.begin_step(batch, sum(len(minibatch.rows) for minibatch in minibatches))
                result = run.train_step.step(references.score(minibatches), *options)
                timer.lap("train")
                run.end_step(batch, result, timer)
                garbage.step_done(step)
            garbage.close()
            run.close()
            if world.is_main and config.data.fake is not None:
                remove_artifact(paths.weights(progress.step))
        return stop.is_agreed
