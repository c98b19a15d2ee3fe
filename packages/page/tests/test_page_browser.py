"""The page in a real browser: drawn while the run grows, rollouts by URL, token colours, hostile text."""

import json
import random
import re
import signal
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from tests.support.browser import CHROMIUM, WatchedTab, address_of, chart_steps, colours_of, wait_for_chart, wait_until
from tests.support.command import PROGRESS_TIMEOUT_SECONDS, until
from tests.support.synthetic_run import synthetic_run, write_run

from prime_rl.evaluation.eval_results import ExampleRow, ResultFile, RolloutRow
from prime_rl.liveness.heartbeat_writer import HeartbeatWriter
from prime_rl.storage.paths import RunPaths
from prime_rl_page.loss_surface import LossSurface, write_loss_surface
from prime_rl_page.page_report import make_report
from prime_rl_page.run_data.run_view import RunView

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install --no-install-recommends chromium"),
]
HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "\x1b[31mred\x1b[0m \u202eright to left\u2066 "
    "</div></main><a href='javascript:window.hacked = 3'>link</a> "
)


@pytest.fixture
def paths(tmp_path):
    return write_run(tmp_path / "run", steps=40)


@pytest.fixture
def served(paths, page_process):
    """The address of a page process for the run."""
    with page_process(paths.root) as (process, address):
        yield address
    assert process.returncode in (0, -signal.SIGTERM)


def add_step(paths, step):
    orchestrator, trainer = synthetic_run.metric_rows(step, 0.9, random.Random(step))
    for process, row in (("orchestrator", orchestrator), ("trainer", trainer)):
        with paths.metrics(process).open("a") as file:
            file.write(json.dumps(row) + "\n")


def add_failure(paths, detail):
    event = {"time": synthetic_run.START + 999, "event": "failed", "name": "rl", "role": "rl", "detail": detail}
    with paths.events.open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_overview_is_drawn_and_new_steps_appear_without_reload(paths, served, tab):
    page = tab.page
    page.goto(served)
    page.get_by_text("Gradient norm", exact=True).wait_for()
    assert wait_for_chart(page, "Reward") == list(range(40))
    ticks = page.evaluate(
        "(plot => { plot.setScale('x', { min: 0, max: 14 }); return new Promise(done => requestAnimationFrame(() =>"
        " done(plot.axes[0]._splits))); })(document.querySelector('.chart .plot').chart.plot)"
    )
    assert len(ticks) >= 3 and all(tick == int(tick) for tick in ticks), "a step is a whole number"
    page.evaluate("window.marked = true")
    page.evaluate("document.querySelector('nav a').focus()")
    add_step(paths, 40)
    with paths.metrics("trainer").open("a") as file:
        file.write('{"step": 41, "lo')  # half a line
    wait_until(page, "() => document.querySelector('#figures .value').textContent.startsWith('41')")
    wait_until(page, "() => document.querySelector('.chart .plot').chart.plot.data[0].at(-1) === 40")
    assert page.evaluate("window.marked") is True
    assert page.evaluate("document.activeElement === document.querySelector('nav a')"), "the keyboard stays there"


def test_tick_labels_of_an_axis_differ(paths, served, tab):
    rows = [{"step": n, "mismatch_kl": 1e-13 * (1 + n % 5 / 10), "time/step": 7e4 + n % 3} for n in range(40)]
    paths.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tab.page.goto(served)
    for title in ("Mismatch KL", "Step time"):
        wait_for_chart(tab.page, title)
        labels = tab.page.evaluate(
            'title => document.querySelector(`[aria-label="chart of ${title}"]`).chart.plot.axes[1]._values', title
        )
        assert len(set(labels)) == len(labels) >= 3, labels


def test_step_with_the_start_up_is_out_of_the_scale_of_times(paths, served, tab):
    rows = [{"step": n, "time/step": 5 + n % 3 if n else 80} for n in range(40)]
    paths.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for smooth in ("", "#smooth=0.9"):
        tab.page.goto(served + smooth)
        wait_for_chart(tab.page, "Step time")
        tab.page.get_by_text("step 0 with the start-up (80 s) is above the scale").wait_for()
        plot = "document.querySelector('[aria-label=\"chart of Step time\"]').chart.plot"
        assert 7 <= tab.page.evaluate(f"{plot}.scales.y.max") < 8
        assert max(tab.page.evaluate(f"{plot}.data[1].slice(1)")) <= 7


def test_legend_of_the_learning_rate_names_the_step_and_the_largest(paths, served, tab):
    rows = [{"step": n, "lr": 0.02 * (1 - n / 39), "mismatch_kl": 0.1} for n in range(40)]
    rows[0]["mismatch_kl/on_policy"] = 0.0
    paths.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tab.page.goto(served)
    wait_for_chart(tab.page, "Learning rate")
    for title, text in (
        ("Learning rate", "step 390 · largest 0.02"), ("Mismatch KL", "step 39all tokens 0.1on-policy 0 (step 0)"),
    ):  # fmt: skip
        chart = tab.page.locator(".chart", has=tab.page.get_by_text(title, exact=True))
        assert chart.locator(".legend").text_content() == text


def test_every_view_has_findings_and_the_bottleneck(paths, served, tab):
    rows = [{"step": n, "time": 4e9 + 5 * n, "time/step": 5, "time/wait_for_batch": 4, "time/wait_for_policy": 0,
             "reward/mean": 0.1 * n, "metrics/correct <b>": 1 - 0.1 * n} for n in range(10)]  # fmt: skip
    for role in ("orchestrator", "trainer"):
        paths.metrics(role).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for view in ("overview", "timeline", "rollouts", "plots", "health"):
        tab.page.goto(f"{served}#view={view}")
        text = (
            "the reward rose from 0.1 to 0.8 while metrics/correct <b> fell from 0.9 to 0.2: read the rollouts with "
            "the highest reward in samples/step_9.jsonl; the reward may be hacked if a lower metrics/correct <b> is "
            "worse"
        )
        tab.page.locator("#findings").get_by_text(text).wait_for()
        tab.page.locator("#findings").get_by_text("inference is the bottleneck: the trainer waited 80%").wait_for()
    assert tab.page.locator("#findings > .finding").count() == 2
    tab.page.locator("#findings").get_by_role("link", name="samples/step_9.jsonl").click()
    assert address_of(tab.page).endswith("step_from=9&step_to=9&order=reward")
    for row in rows:
        row["time/wait_for_batch"] = 0.6
    paths.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tab.page.goto(served)
    last = tab.page.locator("#findings > div").last
    last.get_by_text("no large bottleneck (inference): the trainer waited 12%").wait_for()
    assert last.get_attribute("class") == "muted"


def test_samples_that_a_finding_names_are_one_click_away(paths, served, tab):
    rows = [{"step": n, "batch/zero_advantage_groups": 1.0, "reward/mean": 0.0, "reward/std": 0.0} for n in range(40)]
    paths.metrics("orchestrator").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tab.page
    page.goto(served)
    page.locator("#findings").get_by_role("link", name="samples/step_39.jsonl").click()
    page.locator("tbody tr").first.wait_for()
    wait_until(
        page,
        "() => [...document.querySelectorAll('.list tbody tr')].every(row => row.children[0].textContent === '39')",
    )
    assert "step_from=39&step_to=39" in address_of(page)


def test_damaged_lines_are_stated_also_those_that_are_written_later(paths, served, tab):
    page = tab.page
    with paths.metrics("trainer").open("a") as file:
        file.write("damaged\n")
    page.goto(served)
    page.locator(".state").wait_for()  # the event stream is open
    page.get_by_text("1 damaged line of the metric files is left out.").wait_for()
    with paths.metrics("orchestrator").open("a") as file:
        file.write('{"step": 40, "rew\n{"step": 41, "reward/mean": 1.0')
    page.get_by_text("2 damaged lines of the metric files are left out.").wait_for()


def test_overview_metric_search_is_in_the_url(served, tab):
    page = tab.page
    page.goto(f"{served}/#q=quality_3")
    page.get_by_text("metrics/quality_3", exact=True).wait_for()
    page.get_by_label("search metrics").fill("learning rate")
    page.get_by_text("lr", exact=True).wait_for()
    assert "q=learning+rate" in address_of(page)
    assert page.locator(".chart .title:visible").all_text_contents() == ["lr"]
    assert page.locator(".chart mark").all_text_contents() == ["learning rate"], "why it was found"
    page.get_by_label("search metrics").fill("lr")
    wait_until(page, "() => !document.querySelector('.chart mark')")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_label("search metrics").fill("")
    page.locator(".chart .title:visible", has_text="importance_ratio/clipped").wait_for()
    assert "all=1" in address_of(page)


def test_rollout_is_found_by_filter_and_opened_by_url(served, tab, browser):
    page = tab.page
    page.goto(f"{served}/#view=rollouts")
    page.locator("tbody tr").first.wait_for()
    page.locator("select[name=env]").select_option("code")
    page.locator("input[name=reward_from]").fill("1")
    page.locator("input[name=reward_from]").press("Enter")
    wait_until(
        page,
        "() => (rows => rows.length > 0 && rows.every(row => row.children[1].textContent === 'code' &&"
        " row.children[3].textContent === '1'))([...document.querySelectorAll('tbody tr')])",
    )
    page.locator("tbody tr").first.click()
    page.get_by_text("Conversation", exact=True).wait_for()
    title = page.locator("h2").first.text_content()
    address = address_of(page)
    assert "env=code" in address and "reward_from=1" in address and "rollout=39." in address
    other = WatchedTab(browser)
    other.page.goto(address)
    other.page.get_by_text(title, exact=True).wait_for()
    other.check(("http", urlsplit(served).netloc))
    page.goto(f"{served}/#view=rollouts&text=what")
    page.get_by_text("60 found in the first 60 of 640 rollouts", exact=True).wait_for()
    page.get_by_role("button", name="More").click()
    page.get_by_text("120 found in the first 120 of 640 rollouts", exact=True).wait_for()
    page.goto(f"{served}/#view=rollouts&text=what&step_from=39")
    page.get_by_text("16 found in 16 rollouts", exact=True).wait_for()


def test_filter_that_is_typed_while_rollouts_arrive_is_kept(served, tab):
    page, held = tab.page, []
    page.goto(f"{served}/#view=rollouts")
    page.get_by_text("640 rollouts", exact=True).wait_for()  # the first search is over
    page.route("**/rollouts?*", lambda route: route.continue_() if held else held.append(route))
    page.locator("select[name=env]").select_option("code")
    until(lambda: held or page.wait_for_timeout(20), "the search for an environment")
    page.locator("input[name=reward_from]").fill("1")
    held[0].continue_()
    wait_until(
        page,
        "() => (rows => rows.length > 0 && rows.every(row => row.children[1].textContent === 'code'))"
        "([...document.querySelectorAll('tbody tr')])",
    )
    assert page.locator("input[name=reward_from]").input_value() == "1"
    page.keyboard.press("Enter")
    wait_until(page, "() => location.hash.includes('reward_from=1')")
    page.go_back()
    wait_until(page, "() => !location.hash.includes('reward_from')")
    wait_until(page, "() => document.querySelector('input[name=reward_from]').value === ''")


def test_rollout_of_an_evaluation_is_chosen_by_its_folder(paths, served, tab):
    messages = [{"role": "assistant", "content": "evaluated"}]
    with ResultFile(paths.evals_dir / "math/step_5.jsonl") as results:
        results.add(ExampleRow(7, [RolloutRow(1.0, {}, False, 3, messages)]))
    page = tab.page
    page.goto(f"{served}/#view=rollouts&rollout=39.78.0")
    page.locator("select[name=evaluation]").select_option("math")
    page.get_by_text("1 rollout", exact=True).wait_for()
    page.locator("tbody tr").first.click()
    page.get_by_text("Rollout 0 of example 7, version 5").wait_for()
    assert (
        "evaluation=math" in address_of(page) and page.locator(".message.assistant .text").text_content() == "evaluated"
    )


def test_token_colours_follow_the_values_of_the_mode(paths, served, tab):
    detail = RunView("run", paths.root).rollout(39, 78, 0)
    [sample] = detail["samples"]
    page = tab.page
    for mode, title, value in (
        ("difference", "Logprob difference", lambda i: sample["trainer_logprob"][i] - sample["sampler_logprob"][i]),
        ("entropy", "Entropy", lambda i: sample["entropy"][i]),
        ("version", "Staleness", lambda i: 39 - sample["version"][i]),
        ("advantage", "Advantage", lambda i: sample["advantage"][i] * sample["mask"][i]),
    ):
        page.goto(f"{served}/#view=rollouts&rollout=39.78.0&colour={mode}")
        page.locator(".segments button[aria-pressed=true]", has_text=title).wait_for()  # drawn with the tokens
        shown = page.evaluate(
            "[...document.querySelectorAll('.tokens span')]"
            ".map(span => [span.dataset.value ?? null, span.style.backgroundColor])"
        )
        assert len(shown) == len(sample["token"])
        for i, (text, colour) in enumerate(shown):
            if not sample["mask"][i]:
                assert text is None and colour == "", "the prompt has no colour"
                continue
            assert float(text) == pytest.approx(value(i), abs=2e-4)
            if mode == "difference" and abs(value(i)) > 0.05:
                assert colour.startswith("rgba(47, 133, 222" if value(i) > 0 else "rgba(214, 69, 65")


def test_hostile_text_is_inert_and_visible(paths, served, tab):
    rows = [json.loads(line) for line in paths.samples(39).read_text().splitlines()]
    rows[0]["messages"][1]["content"] = HOSTILE + "x" * 1_000_000
    rows[0]["answer"], rows[0]["example"] = HOSTILE, 12
    rows[0]["metrics"] = {HOSTILE: 1.0, "<b>": 2.0}
    rows[0]["weights"] = {HOSTILE: 0.5}
    rows[0]["env"] = "<img src=x onerror='window.hacked = 4'>"
    paths.samples(39).write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tab.page
    page.goto(f"{served}/#view=rollouts&rollout={39}.{rows[0]['group_id']}.0")
    text = page.locator(".message.assistant .text")
    text.wait_for()
    shown = text.text_content()
    assert shown.startswith("<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>␛[31mred")
    assert "[U+202E]right to left[U+2066]" in shown and "\u202e" not in shown
    assert page.get_by_text("further characters are left out").is_visible()
    assert page.locator(".answer").text_content().startswith("<script>window.hacked = 1</script><img")
    assert page.get_by_text("example 12", exact=True).is_visible()
    note = page.locator("input[name=note]")
    note.fill(HOSTILE)
    note.press("Enter")
    page.get_by_text("saved in samples/notes.jsonl").wait_for()
    page.get_by_text("The same prompt over the steps").click()
    page.locator(".history .text").first.wait_for()
    hostile = ":is(.message, .answer, .rewards, .facts, .history, form.toolbar) :is(a, b img, img, script)"
    assert page.locator(hostile).count() == 0
    page.locator(".group a").nth(1).click()
    page.get_by_text("Rollout 1 of group", exact=False).wait_for()
    assert page.locator(".answer").count() == 0, "the row has no answer"
    paths.run_toml.write_text(f"max_steps = 7\ntext = {json.dumps(HOSTILE)}\n")
    page.get_by_role("navigation").get_by_role("link", name="Settings").click()
    page.locator("pre", has_text="max_steps = 7").wait_for()
    shown = page.locator("pre").text_content()
    assert "<script>window.hacked = 1</script>" in shown and "[U+202E]right to left" in shown
    assert page.locator("main :is(a, img, script)").count() == 0


def test_reward_parts_note_and_other_steps_of_a_rollout_are_shown(paths, served, tab):
    page = tab.page
    page.goto(f"{served}/#view=rollouts&rollout=39.78.1")
    cells = page.locator("table.rewards tbody td")
    cells.first.wait_for()
    assert cells.all_text_contents()[0::2] == ["exact_match", "1"]
    page.get_by_text("The same prompt over the steps").click()
    page.get_by_text("Step 39 (shown above)").wait_for()
    assert page.locator(".history > div").count() >= 4 and page.locator(".history ins").count() > 0
    page.get_by_label("Flag").check()
    page.get_by_text("saved in samples/notes.jsonl").wait_for()
    page.locator("select[name=noted]").select_option("true")
    page.get_by_text("1 rollout", exact=True).wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name="Notes as JSONL").click()
    row = json.loads(download.value.path().read_bytes())
    assert (row["step"], row["group"], row["rollout"], row["is_flagged"]) == (39, 78, 1, True)
    assert row["sample"]["messages"] == json.loads(paths.samples(39).read_text().splitlines()[1])["messages"]
    page.get_by_role("link", name="All rollouts of this prompt").or_(page.get_by_text("The same prompt")).first.click()
    page.reload()
    page.get_by_label("Flag").wait_for()
    assert page.get_by_label("Flag").is_checked()


def test_timeline_zoom_is_in_the_url_and_shows_who_waited(served, tab):
    page = tab.page
    page.goto(f"{served}/#view=timeline")
    lane = page.get_by_label("phases of trainer_0")
    page.get_by_text("the steps of the bottleneck above").wait_for()
    box = lane.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 10)
    page.mouse.up()
    wait_until(page, "() => location.hash.includes('from=')")
    wait_until(page, "() => !document.body.textContent.includes('the steps of the bottleneck above')")
    page.get_by_text("Who waited for whom").wait_for()
    assert page.get_by_text("for orchestrator").first.is_visible()


def test_plots_are_heatmaps_or_surfaces_that_turn(paths, served, tab):
    write_loss_surface(paths, LossSurface([0, 1, 2], [0, 1], [[1, 2, 5], [3, 4, 6]], [(1, 0, 0), (2, 1, 1)]))
    page = tab.page
    page.goto(f"{served}/#view=plots")
    canvas = page.locator("canvas[data-figure=reward_landscape]")
    canvas.wait_for()
    for name in ("reward_landscape", "advantage_distribution", "pass_at_k", "loss_surface"):
        assert colours_of(page, name) > 20, name
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 59, box["y"] + 15)
    tip = page.get_by_role("tooltip")
    assert tip.text_content().startswith("step 0\nreward 0.98")
    page.get_by_role("button", name="Surfaces").click()
    assert "plots=3d" in address_of(page)
    before = canvas.screenshot()
    page.mouse.move(box["x"] + 200, box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 150)
    page.mouse.up()
    wait_until(page, "() => location.hash.includes('turn=85')")
    assert canvas.screenshot() != before and colours_of(page, "reward_landscape") > 20


def test_arrow_keys_choose_the_next_rollout(served, tab):
    page = tab.page
    page.goto(f"{served}/#view=rollouts")
    rows = page.locator("tbody tr")
    rows.nth(2).click()
    for key, number in (("ArrowDown", 3), ("ArrowDown", 4), ("ArrowUp", 3)):
        page.keyboard.press(key)
        chosen = rows.nth(number).get_attribute("data-rollout")
        wait_until(page, "id => document.activeElement.dataset.rollout === id", chosen)
        assert f"rollout={chosen}" in address_of(page) and rows.nth(number).get_attribute("aria-selected") == "true"


def test_comparison_of_two_runs_shows_both_and_their_settings(paths, browser, page_process):
    other = write_run(paths.root.parent / "other" / paths.root.name, steps=20, seed=1)
    other.run_toml.write_text(other.run_toml.read_text().replace("1e-5", "3e-5"))
    for run, steps in ((paths, 50), (other, 25)):
        with run.run_toml.open("a") as file:
            file.write(f"max_steps = {steps}\n[orchestrator]\nmax_steps = {steps}\n")  # trainer.optim.max_steps
            file.write(f'[trainer.loss]\ntype = "{"token" if paths is run else "sequence"}"\n')
    with page_process(paths.root, other.root) as (_, address):
        watched = WatchedTab(browser)
        watched.page.goto(f"{address}/#view=compare")
        watched.page.get_by_text("Different settings").wait_for()
        assert watched.page.get_by_text("trainer.optim.lr").is_visible()
        assert watched.page.get_by_role("link", name=f"other/{paths.root.name}", exact=True).is_visible()
        assert watched.page.get_by_text(str(other.root), exact=True).is_visible()
        keys = watched.page.locator("table").last.locator("tbody tr td:first-child").all_text_contents()
        assert len([key for key in keys if "max_steps" in key]) == 1, keys
        assert wait_for_chart(watched.page, "Reward")[-1] == 39
        wait_for_chart(watched.page, "Loss (of different types)")
        for run in (paths, other):
            label = "/".join(run.root.parts[-2:])
            watched.page.get_by_role("link", name=label, exact=True).click()
            wait_until(watched.page, f"() => document.title === {json.dumps(f'{label} · prime-rl')}")
            watched.page.get_by_role("link", name="Compare").click()
        watched.check(("http", urlsplit(address).netloc))


def test_runs_of_a_shared_trainer_appear_when_they_join(tmp_path, browser, page_process):
    root = RunPaths(tmp_path / "shared")
    options = {"settings": {"max_concurrent_runs": 2}}
    with HeartbeatWriter(root, "trainer_0", "trainer", **options), ExitStack() as stack:

        def start(name):
            paths = write_run(root.root / name, steps=4)
            paths.events.unlink()  # it has no `rl`
            heart = stack.enter_context(HeartbeatWriter(paths, "trainer_0", "trainer"))
            heart.enter("step 4")

        start("run_alpha")
        with page_process(root.root) as (_, address):
            watched = WatchedTab(browser)
            page = watched.page
            page.goto(f"{address}/#view=compare")
            page.get_by_role("link", name="shared (trainer)", exact=True).wait_for()
            page.get_by_text("2 runs", exact=True).wait_for()
            start("run_beta")
            page.get_by_role("link", name="run_beta", exact=True).wait_for()
            page.get_by_text("3 runs", exact=True).wait_for()
            add_step(RunPaths(root.root / "run_beta"), 4)
            until(lambda: chart_steps(page, "Reward")[-1:] == [4] or page.wait_for_timeout(100), "its next step")
            assert page.get_by_text("Different settings").count() == 0, "the trainer's settings are not compared"
            page.goto(f"{address}/#view=health&run=shared")
            page.get_by_text("training: step 4").nth(1).wait_for()
            watched.check(("http", urlsplit(address).netloc))


def test_failed_run_shows_its_first_problem_on_every_view(paths, served, tab, browser, tmp_path):
    add_failure(paths, f"no memory {HOSTILE}")
    report = tmp_path / "report.html"
    report.write_text(make_report(RunView("run", paths.root)))
    offline = WatchedTab(browser)
    for watched, address in ((tab, served), (offline, report.as_uri())):
        page = watched.page
        page.goto(address)
        for view in ("Overview", "Timeline", "Rollouts", "Plots", "Health", "Settings"):
            page.get_by_role("navigation").get_by_role("link", name=view).click()
            banner = page.get_by_role("alert")
            banner.get_by_text("no memory <script>").wait_for()
            assert banner.locator("script, img").count() == 0
        page.get_by_role("navigation").get_by_role("link", name="Plots").click()
        banner.get_by_role("link", name="Health").click()
        page.get_by_text("State:").wait_for()
        assert "view=health" in address_of(page)
    offline.check(("file", ""))


@pytest.fixture
def failed_early(paths):
    for process in ("trainer", "orchestrator"):
        paths.metrics(process).unlink()
    add_failure(paths, "no memory")


@pytest.mark.usefixtures("failed_early")  # before the page is served
def test_run_that_failed_before_its_first_step_says_so(served, tab):
    tab.page.goto(served)
    tab.page.get_by_text("it ended before its first step").wait_for()
    assert "at the pace" not in tab.page.locator("#figures").text_content()


def test_sorted_column_is_announced_and_the_worst_of_the_last_step_is_one_click_away(served, tab):
    page = tab.page
    page.goto(f"{served}/#view=rollouts")
    page.locator("th[aria-sort=descending]", has_text="Step").wait_for()
    page.get_by_role("link", name="Worst of the last step").click()
    page.locator("th[aria-sort=ascending]", has_text="Reward").wait_for()
    wait_until(page, "() => [...document.querySelectorAll('tbody tr')].length === 16")
    rows = page.locator("tbody tr")
    assert {rows.nth(i).locator("td").first.text_content() for i in range(16)} == {"39"}
    assert rows.first.locator("td").nth(3).text_content() == "0"


def test_report_opens_from_disk(paths, browser, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(make_report(RunView("run", paths.root)))
    assert file.stat().st_size < 5_000_000
    watched = WatchedTab(browser)
    watched.page.goto(file.as_uri())
    watched.page.get_by_text("Gradient norm", exact=True).wait_for()
    assert wait_for_chart(watched.page, "Reward") == list(range(40))
    watched.page.get_by_role("link", name="Rollouts").click()
    watched.page.locator("tbody tr").first.click()
    watched.page.get_by_text("Conversation", exact=True).wait_for()
    assert watched.page.locator(".tokens span").count() > 0
    total = watched.page.get_by_text(re.compile(r"^\d+ rollouts$")).text_content()
    watched.page.locator("input[name=text]").fill("no such text")
    watched.page.locator("input[name=text]").press("Enter")
    watched.page.get_by_text(f"0 found in {total}", exact=True).wait_for()
    watched.page.get_by_role("link", name="Timeline").click()
    watched.page.get_by_label("phases of trainer_0").wait_for()
    watched.page.get_by_role("link", name="Plots").click()
    watched.page.locator("canvas[data-figure=pass_at_k]").wait_for()
    assert colours_of(watched.page, "reward_landscape") > 20
    watched.check(("file", ""))


def test_interrupt_ends_the_page_while_a_tab_is_open_and_the_tab_says_so(paths, browser, page_process):
    with page_process(paths.root) as (process, address):
        watched = WatchedTab(browser)
        watched.page.goto(address)
        watched.page.locator(".state").wait_for()  # the event stream is open
        process.send_signal(signal.SIGINT)
        assert process.wait(PROGRESS_TIMEOUT_SECONDS) == 130
        assert process.stdout.read() == "", "no traceback"
    watched.page.get_by_text("The connection to the page's process is lost").wait_for()
