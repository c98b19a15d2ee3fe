// Starts the page: reads the state of the URL, shows one view, follows the event stream.
import { CompareView } from "./compare.js";
import { element, formatNumber, formatPercent, formatSeconds, replaceChildren, visibleString } from "./dom.js";
import { HealthView } from "./health.js";
import { OverviewView } from "./overview.js";
import { PlotsView } from "./plots.js";
import { RolloutView } from "./rollouts.js";
import { SeriesStore } from "./series_store.js";
import { getJson, isReport, openSource, openStream } from "./source.js";
import { onState, readState, setState, stateUrl } from "./state.js";
import { TimelineView } from "./timeline.js";

const VIEWS = [["overview", "Overview"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["plots", "Plots"], ["health", "Health"]];

class Page {
  constructor(runs) {
    this.runs = runs;
    this.run = null;
    this.view = null;
    this.viewKey = null;
    this.headline = {};
    this.notices = new Map();
    this.closeStream = () => {};
  }

  async update() {
    const state = readState();
    const names = this.runs.map((run) => run.name);
    const run = names.includes(state.run) ? state.run : names[0];
    if (run !== this.run) await this.openRun(run);
    await this.show(state);
    this.showTop(state);
  }

  async openRun(run) {
    this.closeStream();
    this.run = run;
    this.viewKey = null;
    this.store = new SeriesStore(run);
    this.overview = await getJson(`runs/${encodeURIComponent(run)}/overview`);
    this.showFigures(this.overview.headline);
    this.closeStream = openStream(run, this.overview.cursor, {
      metrics: (rows) => {
        this.store.append(rows);
        this.view?.onMetrics?.(rows);
      },
      reload: () => this.store.reload(),
      headline: (headline) => {
        this.showFigures(headline);
        this.showTop(readState());
      },
      counts: (counts) => this.view?.onCounts?.(counts),
    }, (isOpen) => this.showNotice("connection", isOpen ? "" : "The connection to the page's process is lost; the figures are not current. Trying again …"));
  }

  async show(state) {
    const name = state.view === "compare" || VIEWS.some(([key]) => key === state.view) ? state.view : "overview";
    const key = `${name} ${this.run}`;
    const node = document.getElementById("view");
    if (key !== this.viewKey) {
      this.view?.destroy();
      this.viewKey = key;
      this.view = this.makeView(name);
      replaceChildren(node, this.view.node);
      document.getElementById("figures").hidden = name === "compare";
      scrollTo(0, 0);
    } else if (name === "overview" && document.activeElement === this.view.searchInput) {
      return;
    }
    await this.view.render();
  }

  makeView(name) {
    if (name === "timeline") return new TimelineView(this.run);
    if (name === "rollouts") return new RolloutView(this.run);
    if (name === "plots") return new PlotsView(this.run);
    if (name === "health") return new HealthView(this.run);
    if (name === "compare") return new CompareView(this.runs);
    return new OverviewView(this.run, this.store, this.overview);
  }

  showTop(state) {
    const current = this.viewKey?.split(" ")[0];
    const root = this.runs.find((run) => run.name === this.run)?.root ?? "";
    const picker = current === "compare" ? element("span", {}, `${this.runs.length} runs`) : this.runs.length > 1
      ? element("select", { "aria-label": "run", onchange: (event) => setState({ run: event.target.value, view: state.view }, { keep: false }) },
        this.runs.map((run) => element("option", { value: run.name, selected: run.name === this.run }, visibleString(run.name))))
      : element("span", {}, visibleString(this.run));
    const views = this.runs.length > 1 ? [...VIEWS, ["compare", "Compare"]] : VIEWS;
    const { state: condition, healthy } = this.headline;
    const links = views.map(([key, text]) => element("a", {
      href: stateUrl({ view: key === "overview" ? null : key, run: this.runs.length > 1 ? this.run : null }, false),
      "aria-current": key === current ? "page" : null,
      onclick: (event) => follow(event),
    }, text, key === "health" && healthy === false ? element("span", { class: "dot", title: "doctor finds a problem" }) : null));
    const kind = healthy === false ? "bad" : condition === "running" || condition === "finished" ? "good" : "";
    const label = isReport() ? `report${condition ? `, ${condition}` : ""}` : condition ?? "";
    replaceChildren(document.getElementById("top"),
      element("div", { class: "brand" }, picker, current === "compare" ? null : element("span", { class: "path", title: root }, visibleString(root))),
      current === "compare" || !label ? null : element("span", { class: `state ${kind}` }, label),
      element("nav", { "aria-label": "views" }, links));
    document.title = `${current === "compare" ? "Comparison" : visibleString(this.run)} · prime-rl`;
  }

  showFigures(headline) {
    this.headline = headline;
    const damaged = headline.num_damaged;
    this.showNotice("damage", damaged ? `${damaged} damaged ${damaged === 1 ? "line" : "lines"} of the metric files ${damaged === 1 ? "is" : "are"} left out.` : "");
    const { state: condition, steps, max_steps: most, staleness_bound: bound, staleness_max: stalest, trainer_wait_share: wait } = headline;
    const hasEnded = condition !== null && condition !== undefined && condition !== "running";
    const done = most ? Math.min(1, steps / most) : null;
    const wide = stalest !== null && stalest !== undefined && bound !== null ? stalest / Math.max(1, bound) : null;
    replaceChildren(document.getElementById("figures"),
      figure("Step", [formatNumber(steps), most ? element("small", {}, ` / ${formatNumber(most)}`) : null], done === null ? "" : null, done === null ? null : [done, ""]),
      headline.reward !== undefined && headline.reward !== null
        ? figure("Reward", [formatNumber(headline.reward)], "mean of the latest batch")
        : figure("Loss", [formatNumber(headline.loss)], "latest step"),
      stalest === null || stalest === undefined ? null : figure("Staleness", [formatNumber(headline.staleness_mean), element("small", {}, " mean")],
        `max ${formatNumber(stalest)}${bound === null ? "" : ` of ${bound} allowed`}`, wide === null ? null : [Math.min(1, wide), wide > 1 ? "bad" : ""]),
      figure("Tokens/s", [formatNumber(headline.tokens_per_second ?? headline.trained_tokens_per_second)],
        headline.tokens_per_second === null ? "trained" : `sampled · ${formatNumber(headline.trained_tokens_per_second)} trained`),
      figure("Step time", [formatSeconds(headline.step_seconds)], wait === null ? "" : `trainer waits ${formatPercent(wait)}`),
      figure("Time left", [done === 1 ? "done" : hasEnded ? "–" : formatSeconds(headline.eta_seconds)],
        done === 1 ? "" : hasEnded ? `the run is ${condition}` : done === null ? "no max_steps" : "at the pace of 10 steps"));
  }

  // A notice per subject: the end of one problem leaves the others on the page.
  showNotice(subject, text) {
    this.notices.set(subject, text);
    const texts = [...this.notices.values()].filter(Boolean);
    const notice = document.getElementById("notice");
    notice.textContent = texts.join(" ");
    notice.hidden = texts.length === 0;
  }
}

function figure(label, value, note, bar = null) {
  return element("div", { class: "figure" }, element("div", { class: "label" }, label), element("div", { class: "value" }, value),
    note ? element("div", { class: "note" }, note) : null,
    bar ? element("div", { class: `bar ${bar[1]}` }, element("div", { style: { width: `${100 * bar[0]}%` } })) : null);
}

function follow(event) {
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
  event.preventDefault();
  setState(Object.fromEntries(new URLSearchParams(event.currentTarget.getAttribute("href").slice(1))), { keep: false });
}

async function startPage() {
  await openSource();
  const { runs } = await getJson("runs");
  const page = new Page(runs);
  let running = Promise.resolve();
  const update = () => {
    running = running.then(() => page.update()).then(() => page.showNotice("view", ""))
      .catch((error) => page.showNotice("view", `This view cannot be shown: ${error.message}`));
  };
  onState(update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    page.viewKey = null;
    update();
  });
  update();
}

startPage().catch((error) => {
  const notice = document.getElementById("notice");
  notice.textContent = `The page cannot be shown: ${error.message}`;
  notice.hidden = false;
});
