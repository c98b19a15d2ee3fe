"""Properties of each policy of the simulation, on a shorter trace."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import pipeline_model
        import policies
        import simulation

        yield SimpleNamespace(simulation=simulation, model=pipeline_model, policies=policies)


@pytest.fixture(scope="module")
def measure(bench):
    """Medians of a policy's columns over two short traces."""

    @cache
    def columns(name, k, bound=None, expectation=None, workload="four waves", **changes):
        policy = bench.simulation.Policy(name, k, bound, expectation)
        work = replace(bench.simulation.WORKLOADS[workload], steps=40, warmup_steps=8, **changes)
        runs = [bench.simulation.measure((work, policy, seed)) for seed in (0, 1)]
        merged = {column: median(run[column] for run in runs) for column in runs[0]}
        return SimpleNamespace(**merged | {"staleness_max": max(run["staleness_max"] for run in runs)})

    return columns


@pytest.mark.extended(after=1)
@pytest.mark.parametrize("workload", ["four waves", "one wave, brutal tail", "four waves, 30 % dropped"])
@pytest.mark.parametrize(("k", "bound"), [(2, 2), (1, 2)])
@pytest.mark.parametrize("expectation", ["history", None])
def test_deadlines_keep_the_bound_and_waste_nothing(measure, workload, k, bound, expectation):
    ours = measure("deadline", k, bound, expectation, workload)
    assert ours.staleness_max <= bound
    assert ours.tokens_wasted == 0
    assert ours.length_ratio == pytest.approx(1, abs=0.02)


@pytest.mark.extended
def test_efficiency_of_deadlines_and_of_length_aware_admission(measure):
    assert measure("synchronous", 0, 0).efficiency < 0.4
    in_order = {k: measure("deadline", k, k).efficiency for k in (1, 2, 4)}
    by_length = {k: measure("deadline", k, k, "history").efficiency for k in (1, 2, 4)}
    assert 0.58 < in_order[1] < in_order[2] < in_order[4]
    assert in_order[2] >= 0.86 and in_order[4] >= 0.97
    assert by_length[1] > in_order[1] + 0.05
    assert by_length[2] >= 0.95 and by_length[4] >= 0.97
    right, off, far_off = (measure("deadline", 2, 2, kind).efficiency for kind in ("exact", 0.5, 1.0))
    assert off > right - 0.02 and far_off > in_order[2] + 0.02, "with wrong expectations"


@pytest.mark.extended
def test_other_policies_exceed_the_bound_or_waste_tokens(bench, measure):
    """Other policies exceed the staleness bound, or discard tokens and prefer short rollouts."""
    gate = measure("admission_gate", 2)
    assert gate.staleness_max > 2 and gate.tokens_wasted == 0
    discard = measure("discard_stale", 1, 1)
    assert discard.staleness_max == 1 and discard.tokens_wasted > 0.2 and discard.length_ratio < 0.9
    fifo = measure("strict_fifo", 2, 2)
    assert fifo.staleness_max == 2
    assert fifo.efficiency == pytest.approx(measure("deadline", 2, 2).efficiency, abs=0.02)
    assert measure("one_step_off", 1, 1).staleness_max == 1
    for k, bound in ((1, 2), (2, 3), (4, 6)):
        assert bench.policies.WindowedFifo(32, k).bound == bound
        assert measure("windowed_fifo", k, bound, workload="one wave, brutal tail").staleness_max <= bound


@pytest.mark.extended
def test_oversampling_raises_efficiency_if_groups_are_dropped(bench):
    work = replace(bench.simulation.WORKLOADS["four waves, 30 % dropped"], steps=40, warmup_steps=8)
    plain, oversampled = (
        bench.simulation.measure((work, bench.simulation.Policy("deadline", 1, 2, oversampling=factor), 0))
        for factor in (1.0, 1.5)
    )
    assert oversampled["efficiency"] > plain["efficiency"]
    assert oversampled["staleness_max"] <= 2 and oversampled["tokens_wasted"] == 0


def test_trace_is_a_function_of_its_seed(bench):
    workload = bench.model.Workload(steps=4, examples=10)
    one, same, other = (bench.model.Trace(workload, seed) for seed in (3, 3, 4))
    draws = list(islice(one.draws(), 40))
    assert draws == list(islice(same.draws(), 40))
    backwards = [same.lengths(draw) for draw in reversed(draws)][::-1]
    assert np.array_equal([one.lengths(draw) for draw in draws], backwards), "not of the order of the questions"
    assert not np.array_equal(one.lengths(draws[0]), other.lengths(draws[0]))
    work = sum(one.seconds(draw).sum() for draw in islice(one.draws(), 4 * workload.batch_groups))
    assert work / workload.slots / 4 == pytest.approx(workload.t_infer), "a batch keeps all slots busy for t_infer"


@pytest.mark.extended
def test_program_writes_table_and_plot(tmp_path):
    files = tmp_path / "new" / "table.json", tmp_path / "new" / "plot.png"
    command = [sys.executable, BENCHMARKS / "simulation.py", "--seeds", "1", "--steps", "6", "--async-levels", "1"]
    done = subprocess.run(
        [*command, "--json", files[0], "--plot", files[1]], capture_output=True, text=True, check=True
    )
    table = json.loads(files[0].read_text())
    assert {"policy", "k", "efficiency", "staleness_max", "tokens_wasted", "length_ratio"} <= set(table[0])
    assert {"deadline", "deadline_length_aware", "synchronous"} <= {row["policy"] for row in table}
    assert done.stdout.count("\n| ") == len(table) + 3, "one line a row, and a header for each workload"
    assert files[1].read_bytes().startswith(b"\x89PNG")
