"""All benchmark scripts can be imported; small runs write their figures; what the published claims rest on is right."""

import importlib.util
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from prime_rl.configs.command_bases import check_memory
from prime_rl.configs.training.model import TrainerModelConfig
from prime_rl.configs.training.optim import AdamWConfig
from prime_rl.orchestrator.packing import best_fit_decreasing

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a script; the scripts import each other by file name."""

    def loaded(script):
        path = BENCHMARKS / script
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.syspath_prepend(str(path.parent))
        name = "benchmark_" + path.stem
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    before = set(sys.modules)
    yield loaded
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]  # two folders have files of the same name


@pytest.mark.extended
def test_every_script_can_be_imported(load):
    scripts = {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py")}
    for script in sorted(scripts - {"peers/trl_trainer.py"}):  # TRL is not installed here
        load(script)
    assert len(scripts) > 40


RUNS = [
    ("weights.py", "--small --no-reverse-text", {"pause_over_copy", "stall_fraction", "delta"}),
    ("scale.py", "--tiny", {"in_flight", "cpu_ms_main_100", "cpu_ms_10000", "loop_lag_p99_ms", "restart_seconds"}),
    ("rollouts_in_flight.py", "--steps 5 --seconds 1", {"lag", "throughput"}),
    ("http_clients.py", "--rounds 1 --seconds 1", {"aiohttp_16_cpu_ms", "httpx_1024_cpu_ms", "ratio_16", "ratio_1024"}),
    ("orchestrator_overhead.py", "--shape tiny", {"tiny_cpu_ms_main", "tiny_cpu_ms_total", "tiny_loop_lag_p99_ms"}),
    ("pipeline.py", "--quick", {"policy", "k", "efficiency", "simulated", "staleness_max", "tokens_wasted"}),
    ("trainer.py", "--sequences 6 --repeats 1 --lengths LENGTHS", {"fraction_of_roof_bf16", "speedup_vs_padded"}),
    (
        "lm_head.py",
        "--tokens 2048 --vocabulary 40000 --hidden 16 --chunk 64 --dtypes float32",
        {"ours_float32", "naive_float32"},
    ),
    ("gpu/lm_head.py", "--device cpu --tokens 70 --vocabulary 300 --hidden 32 --repeats 1", {"heads"}),
]

# Start processes of a run.
SERVERS = {"scale.py", "rollouts_in_flight.py", "orchestrator_overhead.py", "pipeline.py", "http_clients.py"}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "options", "names"),
    [pytest.param(*run, id=run[0], marks=pytest.mark.release if run[0] in SERVERS else ()) for run in RUNS],
)
def test_small_run_writes_its_figures(tmp_path, script, options, names):
    file = tmp_path / "new" / "figures.json"
    file.parent.mkdir()
    (lengths := tmp_path / "lengths.txt").write_text("10 20 60")
    arguments = options.replace("LENGTHS", str(lengths)).split()
    subprocess.run([sys.executable, BENCHMARKS / script, *arguments, "--json", file], check=True, timeout=800)
    figures = json.loads(file.read_text())
    rows = figures if isinstance(figures, list) else [figures]
    assert all(names <= set(row) for row in rows)
    assert all(value >= 0 for row in rows for value in row.values() if isinstance(value, (int, float)))
    if script == "pipeline.py":
        policies = [("deadline", 1), ("deadline_length_aware", 2), ("discard_stale", 2)]
        assert [(row["policy"], row["k"]) for row in rows] == policies
        assert all(row["staleness_max"] <= row["k"] for row in rows)
        assert all(row["tokens_wasted"] == 0 and row["length_ratio"] == pytest.approx(1) for row in rows[:2])
    if script == "weights.py":
        assert all(one["exact"] and one["over_entropy"] < 1.3 for one in figures["delta"].values())
    if script == "lm_head.py":
        assert figures["ours_float32"]["memory_gib"] < figures["naive_float32"]["memory_gib"] / 4
        assert figures["ours_float32"]["logprob_error"] < 1e-3


def test_gpu_scenarios_are_valid_trainer_options(load):
    scenarios = load("gpu/scenarios.py")
    for scenario in scenarios.SCENARIOS.values():
        for way in scenario.ways:
            check_memory(TrainerModelConfig(seq_len=scenario.row, **way), AdamWConfig())
        for sized in (scenario, scenarios.tiny(scenario)):
            assert sized.row % sized.sequence == 0


@pytest.mark.extended
def test_gpu_scenario_that_is_tiny_is_recorded(load, monkeypatch, tmp_path, capsys):
    step = load("gpu/trainer_step.py")
    # main() sets it unless it is set: monkeypatch removes it after the test.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for options in (
        "--scenario rl-16k-low-memory --tiny --device cpu --no-compile --steps 1 --warmup 1",
        "--table",
    ):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["trainer_step.py", *options.split(), "--json", str(tmp_path / "step.json")])
        step.main()
    header, _, line = capsys.readouterr().out.strip().split("\n")
    assert "rl-16k-low-memory" in line and "optim_cpu_offload" in line and header.count("|") == line.count("|")


def test_readme_table_is_made_from_the_results(load):
    figures = load("readme_figures.py")
    page, rows = figures.README.read_text(), json.loads(figures.SIMULATION.read_text())
    assert figures.insert_table(page, figures.make_table(rows)) == page, "run benchmarks/readme_figures.py"
    for row in rows:
        row["efficiency"] = 0.5
    assert figures.insert_table(page, figures.make_table(rows)) != page
    with pytest.raises(ValueError, match="no markers"):
        figures.insert_table("# title", "| a |")


@pytest.mark.extended
def test_readme_pictures_are_the_same_each_time(load, tmp_path):
    figures = load("readme_figures.py")
    for name in ("a", "b"):
        figures.draw_reward(json.loads(figures.REVERSE_TEXT.read_text()), tmp_path / f"{name}.svg")
        figures.draw_architecture(tmp_path / f"{name}-architecture.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a-architecture.svg").read_bytes() == (tmp_path / "b-architecture.svg").read_bytes()


def test_entropy_of_changes_equals_the_formula(load):
    benchmark = load("delta.py")

    def count(base, new):
        return benchmark.count({"w": benchmark.raw(base)}, {"w": benchmark.raw(new)})

    base = np.full(16, 0x3F80, np.uint16)
    new = base.copy()
    new[:4] += np.array([1, 1, -1, 2], np.int16).view(np.uint16)
    counted, which = count(base, new), 16 * (0.25 * 2 + 0.75 * np.log2(4 / 3))
    assert counted["entropy_bytes"] == pytest.approx((which + 4 * 1.5) / 8)
    assert (counted["changed"], counted["one_unit"]) == (0.25, 0.75)
    assert counted["given_exponent"] == pytest.approx(1)  # all have the same one
    base = np.array([0x3F80, 0x3E80] * 8, np.uint16)
    counted = count(base, base + (base == 0x3E80).astype(np.uint16))
    assert counted["entropy_bytes"] == pytest.approx(2)
    assert counted["given_exponent"] == pytest.approx(0), "the exponent determines the change"


def test_values_are_ordered_and_rounded_as_bfloat16(load):
    benchmark = load("delta.py")
    words = np.array([0xFF80, 0xBF80, 0x8001, 0x8000, 0x0000, 0x0001, 0x3F80, 0x7F80], np.uint16)
    (found,) = benchmark.numbers(benchmark.raw(words))
    assert (np.diff(found) > 0).all() and np.diff(found)[2:5].tolist() == [1, 1, 1]
    values = np.array([1.0, 1.00390625, 1.01171875, -1.004, 3.0e38], np.float32)  # two ties, to even
    assert [hex(word) for word in benchmark.bfloat16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x7f62"]


@pytest.mark.extended
def test_delta_size_stays_within_the_limits_and_a_wrong_result_is_not_exact(load, monkeypatch):
    """Within 1.3 of the entropy and 1.8 times smaller than XOR + zstd, on simulated steps of Adam and drawn changes."""
    benchmark = load("delta.py")
    monkeypatch.setattr(benchmark, "LAYER", {"proj": (1024, 1024), "norm": (512,)})
    measured = benchmark.measure(layers=1)
    assert list(measured) == ["0.01", "0.02", "0.06"]
    for share in (0.01, 0.02, 0.06):
        pair = benchmark.drawn_pair(share, 1, 0)
        for figures in (measured[str(share)], benchmark.compare(*pair)):
            assert figures["changed"] == pytest.approx(share, rel=0.05)
            assert figures["one_unit"] > 0.8 and 1 <= figures["over_entropy"] < 1.3
            assert figures["xor_over_delta"] > 1.8 and figures["exact"] is True
    monkeypatch.setattr(benchmark, "patch_tensors", lambda *_: None)
    assert benchmark.compare(*pair)["exact"] is False


USUAL_SWITCH = {
    "stall_s": 1.0, "step_s": 1.0, "step_alone_s": 1.0, "load_s": 1.0, "stage_s": 1.0, "checks_s": 1.0,
    "file_bytes": 1.0, "staged_bytes": 1.0, "sampling_kept": 1.0, "canary_difference": 0.0, "pause_s": 0.5,
    "publish_to_switch_s": 6.2, "memcpy_s": 0.1, "disk_s": 2.0, "copy_s": 0.2, "process_s": 0.8, "writing_s": 4.0,
}  # fmt: skip


def test_switch_figures_are_medians_without_the_first_switch(load):
    benchmark = load("weights.py")
    served = [{"pause_s": 50.0, "stall_s": 9.0}, {"stall_s": 0.1}, {"stall_s": 0.3, "pause_s": 1.5}, {"stall_s": 0.2}]
    others = [USUAL_SWITCH | {"stall_s": 0.4}], [USUAL_SWITCH | {"stall_s": 0.04}]
    figures = benchmark.summary(2, *others, [USUAL_SWITCH | one for one in served])
    assert figures["pause_over_copy"] == pytest.approx(0.5) and figures["stall_fraction"] == pytest.approx(0.05)
    assert [figures["stall"][name] for name in ("alone", "alone_no_canary")] == pytest.approx([0.1, 0.01])
    assert figures["latency"]["over_limit"] == pytest.approx(2) and figures["pause"]["longest_s"] == 50
    delta = {share: {"over_entropy": size, "xor_over_delta": 1.9} for share, size in (("0.01", 1.2), ("0.02", 1.4))}
    reached = benchmark.reached({"pause_over_copy": 1.5, "stall_fraction": 0.06, "delta": delta})
    assert [name for name, holds in reached.items() if holds] == ["pause_over_copy", "xor_over_delta"]


def test_fewest_rows_is_a_lower_bound_tighter_than_the_sum(load):
    benchmark = load("packing.py")
    for lengths in itertools.combinations_with_replacement((7, 10, 11, 16, 30), 4):
        fewest = min(
            len(set(rows))
            for rows in itertools.product(range(4), repeat=4)
            if all(sum(n for n, r in zip(lengths, rows, strict=True) if r == row) <= 30 for row in set(rows))
        )
        assert benchmark.fewest_rows(lengths, 30) <= fewest <= len(best_fit_decreasing(lengths, 30))
    for lengths, bound in (([16] * 4, 4), ([10] * 6, 2), ([11] * 5, 3), ([30, 1], 2), ([5, 5], 1)):
        assert benchmark.fewest_rows(lengths, 30) == bound
    assert benchmark.balance([4.0, 3.0, 2.0, 1.0], [[0, 3], [1, 2]]) == (1.0, (4 + 2) / 5)
    assert benchmark.balance([4.0, 3.0], [[0], [-1]]) == (8 / 4, 8 / 4)


LEAKS = [
    ({"memory": lambda step: 500 + 40 * (step % 2), "files": lambda step: 20 + step % 7}, []),
    ({"memory": lambda step: 100 + 10 * min(step, 50), "files": lambda step: min(step, 50)}, []),  # the warm-up
    ({"memory": lambda step: 500 + 0.25 * step}, ["orchestrator (pid 2): 514 -> 549 MB (+6.9%), 20 -> 20 files"]),
    ({"files": lambda step: 20 + step // 30}, ["orchestrator (pid 2): 500 -> 500 MB (+0.0%), 21 -> 26 files"]),
    ({"until": 150}, ["orchestrator (pid 2) did not live to the end"]),
    ({"each": 2}, ["only 100 of 200 steps were seen"]),
]


@pytest.mark.parametrize(("run", "missed"), LEAKS)
def test_leaks_are_separated_from_fluctuation(load, run, missed):
    benchmark, looks = load("leaks.py"), []
    for step in range(1, 201, run.get("each", 1)):
        memory, files = run.get("memory", lambda _: 500.0)(step), run.get("files", lambda _: 20)(step)
        processes = {1: benchmark.Sample(900.0, 800.0, 10, 4), 2: benchmark.Sample(memory, memory - 100, files, 4)}
        looks.append(benchmark.Look(step, processes if step <= run.get("until", 200) else {1: processes[1]}))
    names = {1: "inference", 2: "orchestrator"}
    rows = benchmark.summarise(looks, names, 50)
    assert benchmark.missed_limits(rows, looks, names, 50, 200) == missed


@pytest.mark.parametrize(
    ("rewards", "staleness", "seconds", "ends", "missed"),
    [
        ([0.3, 0.4, 0.5, 0.6, 0.95, 0.96, 0.97, 0.98, 0.99], 2, 100.0, (0.4, 0.97), []),
        ([0.7] * 9, 3, 300.0, (0.7, 0.7), ["first 3 steps 0.700", "last 5 steps 0.700", "staleness 3", "300 seconds"]),
    ],
)
def test_reverse_text_ends_are_the_first_three_and_the_last_five_steps(load, rewards, staleness, seconds, ends, missed):
    benchmark = load("reverse_text_seeds.py")
    names = ("reward/mean", "metrics/exact_match", "metrics/letter_overlap", "metrics/length_match")
    steps = [{"step": i, "staleness/max": 0} | dict.fromkeys(names, reward) for i, reward in enumerate(rewards)]
    steps[1]["staleness/max"] = staleness
    run = {"async_level": 2, "seed": 0, "seconds": seconds, "greedy": {"lcs_ratio": 0.9, "exact_match": 0.75}}
    result = run | benchmark.summarise(steps)
    assert (result["reward"]["first"], result["reward"]["last"]) == pytest.approx(ends)
    assert (result["staleness_max"], result["steps"]) == (staleness, 9)
    assert benchmark.missed_limits(result) == missed


def test_trl_gets_the_values_of_the_recipes_and_its_curve_is_read(load):
    trl = load("peers/trl.py")
    for name in ("short", "long"):
        recipe = tomllib.loads(trl.RECIPES[name].read_text())
        arguments = trl.peer_arguments(name, trl.RECIPES[name], Path("out"))
        values = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert int(values["--batches"]) == recipe["max_steps"]
        assert int(values["--batch-size"]) == recipe["orchestrator"]["batch_size"]
        assert int(values["--max-tokens"]) == recipe["orchestrator"]["sampling"]["max_tokens"]
    assert trl.seconds_to([(1.0, 0.5), (2.0, 0.91), (3.0, 0.89), (4.0, 0.95)], 0.9) == 2.0
    assert trl.seconds_to([(1.0, 0.5)], 0.9) is None


LOOP = "run (uvloop/__init__.py:92);Runner.run (asyncio/runners.py:118)"
WORKER = f"{LOOP};_RecordedTask.send (prime_rl/rollouts/workers/crash_attribution.py:75)"
ROLLOUT = f"{WORKER};MultiTurnEnv.rollout (verifiers/legacy/envs/multiturn_env.py:176)"


@pytest.mark.parametrize(
    ("stack", "part"),
    [
        (LOOP, "event loop"),
        (WORKER, "IPC"),
        (f"{ROLLOUT};deepcopy (copy.py:128)", "environment"),
        (f"{ROLLOUT};ClientSession._request (aiohttp/client.py:700)", "HTTP client"),
        ("main (somewhere.py:1);encode (json/encoder.py:2)", "other"),
        (f"{WORKER};wait (threading.py:3)", None),
    ],
)
def test_stack_belongs_to_the_part_of_its_innermost_listed_frame(load, stack, part):
    benchmark = load("main_job_profile.py")
    assert benchmark.part_of(stack) == part
    prefixes = [prefix for _, group in benchmark.PARTS for prefix in group]
    assert not [later for i, later in enumerate(prefixes) if later.startswith(tuple(prefixes[:i]))], "never matches"
    waits = "_worker (concurrent/futures/thread.py:8) 96"
    lines = [f"{WORKER};score (reverse_text/scores.py:6) 3", f"{ROLLOUT} 1", waits]
    assert benchmark.shares(lines) == {"rubric": 0.75, "environment": 0.25}
