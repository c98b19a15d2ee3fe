// Starts the page: reads the state of the URL, shows one view, follows the event stream.
import { ChatView } from "./chat.js";
import { CompareView } from "./compare.js";
import { element, formatNumber, formatPercent, formatSeconds, replaceChildren, visibleString, visibleText } from "./dom.js";
import { HealthView } from "./health.js";
import { OverviewView } from "./overview.js";
import { PlotsView } from "./plots.js";
import { RolloutView } from "./rollouts.js";
import { SeriesStore } from "./series_store.js";
import { SettingsView } from "./settings.js";
import { getJson, isReport, openSource, openStream } from "./source.js";
import { onState, readState, setState, stateUrl } from "./state.js";
import { TimelineView } from "./timeline.js";

const VIEWS = [["overview", "Overview"], ["timeline", "Timeline"], ["rollouts", "Rollouts"], ["plots", "Plots"], ["health", "Health"], ["settings", "Settings"], ["chat", "Chat"]];

class Page {
  constructor(runs) {
    this.runs = runs;
    this.run = null;
    this.view = null;
    this.viewKey = null;
    this.headline = {};
    this.notices = new Map();
    this.closeStream = () => {};
    this.refresh = () => {};
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
        const { state, healthy } = this.headline;
        this.showFigures(headline);
        // Only for a change: an open list of runs closes when it is drawn again.
        if (state !== headline.state || healthy !== headline.healthy) this.showTop(readState());
        this.view?.onHeadline?.(headline);
      },
      counts: (counts) => this.view?.onCounts?.(counts),
      runs: (runs) => this.onRuns(runs),
    }, (isOpen) => this.showNotice("connection", isOpen ? "" : "The connection to the page's process is lost; the figures are not current. Trying again …"));
  }

  // A run has joined a trainer, or its directory was removed.
  onRuns(runs) {
    if (JSON.stringify(runs) === JSON.stringify(this.runs)) return;
    this.runs = runs;
    this.view?.onRuns?.(runs);
    if (runs.some((run) => run.name === this.run)) this.showTop(readState());
    else this.refresh();
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
    if (name === "settings") return new SettingsView(this.run);
    if (name === "chat") return new ChatView(this.run);
    if (name === "compare") return new CompareView(this.runs);
    return new OverviewView(this.run, this.store, this.overview);
  }

  showTop(state) {
    const current = this.viewKey?.split(" ")[0];
    const { root = "", label: runLabel = this.run } = this.runs.find((run) => run.name === this.run) ?? {};
    const picker = current === "compare" ? element("span", {}, `${this.runs.length} runs`) : this.runs.length > 1
      ? element("select", { "aria-label": "run", onchange: (event) => setState({ run: event.target.value, view: state.view }, { keep: false }) },
        this.runs.map((run) => element("option", { value: run.name, selected: run.name === this.run }, visibleString(run.label))))
      : element("span", {}, visibleString(runLabel));
    const shown = VIEWS.filter(([key]) => key !== "chat" || !isReport());
    const views = this.runs.length > 1 ? [...shown, ["compare", "Compare"]] : shown;
    const { state: condition, healthy } = this.headline;
    const links = views.map(([key, text]) => element("a", {
      href: stateUrl({ view: key === "overview" ? null : key, run: this.runs.length > 1 ? this.run : null }, false),
      "aria-current": key === current ? "page" : null,
      onclick: (event) => follow(event),
    }, text, key === "health" && healthy === false ? element("span", { class: "dot", title: "doctor finds a problem" }) : null));
    const kind = healthy === false ? "bad" : condition === "running" || condition === "finished" ? "good" : "";
    const label = isReport() ? `report${condition ? `, ${condition}` : ""}` : condition ?? "";
    const title = views.find(([key]) => key === current)?.[1] ?? "";
    const top = document.getElementById("top");
    const focusable = () => [...top.querySelectorAll("a, select")];
    const focused = focusable().indexOf(document.activeElement);
    replaceChildren(top,
      element("h1", { class: "unseen" }, current === "compare" ? "Comparison of runs" : `${title} of the run ${visibleString(runLabel)}`),
      element("div", { class: "brand" }, picker, current === "compare" || root === this.run ? null : element("span", { class: "path", title: root }, visibleString(root))),
      current === "compare" || !label ? null : element("span", { class: `state ${kind}` }, label),
      element("nav", { "aria-label": "views" }, links));
    focusable()[focused]?.focus();  // new elements: the keyboard's focus was lost with the old ones
    document.title = `${current === "compare" ? "Comparison" : visibleString(runLabel)} · prime-rl`;
  }

  showFigures(headline) {
    this.headline = headline;
    this.showProblem(headline.problem);
    this.showFindings(headline);
    const damaged = headline.num_damaged;
    this.showNotice("damage", damaged ? `${damaged} damaged ${damaged === 1 ? "line" : "lines"} of the metric files ${damaged === 1 ? "is" : "are"} left out.` : "");
    const { state: condition, steps, max_steps: most, staleness_bound: bound, staleness_max: stalest, trainer_wait_share: wait } = headline;
    const hasEnded = condition !== null && condition !== undefined && condition !== "running";
    const done = most ? Math.min(1, steps / most) : null;
    const wide = stalest !== null && stalest !== undefined && bound !== null ? stalest / Math.max(1, bound) : null;
    replaceChildren(document.getElementById("figures"),
      figure("Step", [formatNumber(steps), most ? element("small", {}, ` / ${formatNumber(most)}`) : null], done === null ? "" : null, done === null ? null : [done, ""]),
      headline.runs_active !== null
        ? figure("Runs", [formatNumber(headline.runs_active)], `${formatNumber(headline.runs_waiting)} waiting`)
        : headline.reward !== undefined && headline.reward !== null
        ? figure("Reward", [formatNumber(headline.reward)], "mean of the latest batch")
        : figure("Loss", [formatNumber(headline.loss)], "latest step"),
      stalest === null || stalest === undefined ? null : figure("Staleness", [formatNumber(headline.staleness_mean), element("small", {}, " mean")],
        `max ${formatNumber(stalest)}${bound === null ? "" : ` of ${bound} allowed`}`, wide === null ? null : [Math.min(1, wide), wide > 1 ? "bad" : ""]),
      figure("Tokens/s", [formatNumber(headline.tokens_per_second ?? headline.trained_tokens_per_second)],
        headline.tokens_per_second === null ? "trained, prompts included" : `completions · training ${formatNumber(headline.trained_tokens_per_second)}`, null,
        "Tokens of finished completions per second of the step. While it trains, the trainer processes its tokens, prompts included, at the second rate."),
      figure("Step time", [formatSeconds(headline.step_seconds)], wait === null ? "" : `trainer waits ${formatPercent(wait)}`),
      figure("Time left", [done === 1 ? "done" : hasEnded ? "–" : formatSeconds(headline.eta_seconds)],
        done === 1 ? "" : hasEnded ? `the run is ${condition}` : done === null ? "no max_steps" : headline.eta_seconds === null ? "" : "at the pace of 10 steps"));
  }

  // The banner of every view: the first problem that doctor finds.
  showProblem(problem) {
    const node = document.getElementById("problem");
    const key = JSON.stringify(problem ?? null);
    if (key === node.dataset.shown) return;  // a screen reader reads each change
    node.dataset.shown = key;
    node.hidden = !problem;
    if (!problem) return;
    const others = problem.num_others ? ` and ${problem.num_others} more` : "";
    replaceChildren(node, element("b", {}, visibleText(problem.text)), problem.hint ? element("div", {}, visibleText(problem.hint)) : null,
      element("a", { href: stateUrl({ view: "health", run: this.runs.length > 1 ? this.run : null }, false), onclick: follow }, `Health${others}`));
  }

  // On every view: what is probably wrong with the learning, what limits the speed, and before the first step what each process does.
  showFindings({ findings = [], bottleneck, bottleneck_is_large: isLarge, activities = [] }) {
    const node = document.getElementById("findings");
    const shown = JSON.stringify([findings, bottleneck, activities]);
    if (shown === node.dataset.shown) return;
    node.dataset.shown = shown;
    node.hidden = !findings.length && !bottleneck && !activities.length;
    const rows = activities.map((one) => element("tr", {}, element("td", { class: "name" }, visibleString(one.who)),
      element("td", {}, visibleString(one.phase), one.waiting_for ? element("span", { class: "muted" }, `, waits for ${visibleString(one.waiting_for)}`) : null),
      element("td", { class: "number" }, formatSeconds(one.seconds))));
    replaceChildren(node, findings.map((finding) => element("div", { class: "finding" }, this.linkSamples(finding))),
      bottleneck ? element("div", { class: isLarge ? "finding" : "muted" }, visibleText(bottleneck)) : null,
      rows.length ? element("table", { "aria-label": "start of the processes" }, element("tbody", {}, rows)) : null);
  }

  // The text of a finding, in which a file of samples is a link to its rollouts, of which it may mean the best ones.
  linkSamples(text) {
    const parts = text.split(/(samples\/step_\d+\.jsonl)/);
    return parts.map((part, number) => {
      if (number % 2 === 0) return visibleText(part);
      const step = part.match(/\d+/)[0];
      const order = parts[number - 1].endsWith("with the highest reward in ") ? "reward" : null;
      const state = { view: "rollouts", run: this.runs.length > 1 ? this.run : null, step_from: step, step_to: step, order };
      return element("a", { href: stateUrl(state, false), onclick: follow }, part);
    });
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

function figure(label, value, note, bar = null, meaning = null) {
  return element("div", { class: "figure", title: meaning }, element("div", { class: "label" }, label), element("div", { class: "value" }, value),
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
  page.refresh = update;
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
