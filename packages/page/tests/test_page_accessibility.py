"""The page for everybody: axe-core's rules in both colour schemes, keyboard, narrow windows."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from tests.support.browser import CHROMIUM, wait_for_chart, wait_until
from tests.support.synthetic_run import write_run

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; apt-get install --no-install-recommends chromium"),
]
VIEWS = {
    "overview": ".chart canvas", "overview&all=1&q=time": "main section canvas",
    "timeline": ".lane canvas[tabindex]", "rollouts": "tbody tr",
    "rollouts&rollout=39.78.0": ".tokens span", "plots": ".plots canvas", "health": "main h2",
    "settings": "main pre", "compare": ".chart canvas",
}  # fmt: skip
CUT = """() => [...document.querySelectorAll('main :is(td, th, button, input, select), #top :is(a, select)')]
  .filter(node => node.checkVisibility() && !node.closest('thead, .history'))
  .map(node => [node, node.getBoundingClientRect()])
  .filter(([, box]) => box.width > 1 && (box.right > innerWidth + 1 || box.left < -1))
  .map(([node]) => node.textContent || node.name)"""


@pytest.fixture(scope="module")
def served(tmp_path_factory, page_process):
    """The address of a page process for two runs."""
    folder = tmp_path_factory.mktemp("runs")
    roots = [write_run(folder / name / "run", steps=40, seed=seed).root for seed, name in enumerate("ab")]
    (roots[1] / "run.toml").write_text((roots[1] / "run.toml").read_text().replace("1e-5", "3e-5"))
    with page_process(*roots) as (_, address):
        yield address


def open_view(page, served, view):
    page.goto(f"{served}/#view={view}")
    page.locator(VIEWS[view]).first.wait_for()
    if view.startswith("rollouts&"):
        page.get_by_text("The same prompt over the steps").click()
        page.locator(".history .text").first.wait_for()


@pytest.mark.parametrize("view", VIEWS)
def test_view_is_accessible(served, tab, view):
    page = tab.page
    open_view(page, served, view)
    assert page.locator("h1").count() == 1 and page.locator("h1").text_content().strip()
    assert "" not in [text.strip() for text in page.locator("th").all_text_contents()], "columns have names"
    if view not in ("health", "settings"):
        assert page.locator("main [tabindex='0']").count() >= 1, "the keyboard stops in it"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = [
            (rule["id"], rule["impact"], [node["html"][:200] for node in rule["nodes"]])
            for rule in Axe().run(page).response["violations"]
            if rule["impact"] in ("serious", "critical")
        ]
        assert not found, scheme


@pytest.mark.parametrize("view", VIEWS)
def test_phone_shows_every_column(served, tab, view):
    tab.page.set_viewport_size({"width": 360, "height": 740})
    open_view(tab.page, served, view)
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.page.evaluate(CUT) == []


def test_chart_is_read_and_zoomed_by_keyboard(served, tab):
    page = tab.page
    page.goto(served)
    wait_for_chart(page, "Reward")
    scale = "(() => { const { min, max } = document.activeElement.chart.plot.scales.x; return max - min; })()"
    page.get_by_label("chart of Reward", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    legend = page.locator(".legend[aria-live=polite]")
    legend.get_by_text("step 38").wait_for()
    assert page.evaluate(scale) == 39
    page.keyboard.press("+")
    assert page.evaluate(scale) < 20
    page.keyboard.press("Escape")
    assert page.evaluate(scale) == 39


def test_timeline_is_read_and_zoomed_by_keyboard(served, tab):
    page = tab.page
    page.goto(f"{served}/#view=timeline")
    page.get_by_label("phases of trainer_0").focus()
    spoken = page.locator("body > [role=status].unseen")
    page.keyboard.press("ArrowRight")
    first = spoken.text_content()
    page.keyboard.press("ArrowRight")
    second = spoken.text_content()
    assert first.startswith("wait for batch 0\n") and second != first
    page.keyboard.press("ArrowLeft")
    assert spoken.text_content() == first
    page.keyboard.press("+")
    wait_until(page, "() => location.hash.includes('from=')")
    wait_until(page, "() => document.activeElement.dataset.lane === 'trainer_0'")
    before = page.evaluate("location.hash")
    page.keyboard.press("Shift+ArrowRight")
    wait_until(page, "before => location.hash !== before", before)
    wait_until(page, "() => document.activeElement.dataset.lane === 'trainer_0'")
    page.keyboard.press("Escape")
    wait_until(page, "() => !location.hash.includes('from=')")


@pytest.mark.parametrize(("figure", "words"), [("reward_landscape", "step 39"), ("pass_at_k", "k ")])
def test_plot_is_read_by_keyboard(served, tab, figure, words):
    page = tab.page
    page.goto(f"{served}/#view=plots")
    page.locator(f"canvas[data-figure={figure}]").focus()
    spoken = page.locator("body > [role=status].unseen")
    page.keyboard.press("ArrowLeft")
    first = spoken.text_content()
    page.keyboard.press("ArrowLeft")
    assert words in first and spoken.text_content() != first
