// Several runs side by side.
import { LineChart } from "./chart.js";
import { element, formatNumber, formatPercent, formatSeconds, replaceChildren, segments, visibleString } from "./dom.js";
import { isDuration } from "./overview.js";
import { SeriesStore } from "./series_store.js";
import { getJson, isReport } from "./source.js";
import { readState, setState, stateUrl } from "./state.js";

const COMPARISON_MILLISECONDS = 10_000;
const RUN_COLOURS = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];
const COMPARED = [
  ["orchestrator:reward/mean", "Reward"], ["trainer:mismatch_kl", "Mismatch KL", "nats"], ["trainer:entropy", "Entropy", "nats"], ["trainer:grad_norm", "Gradient norm"],
  ["orchestrator:staleness/mean", "Mean staleness", "versions"], ["trainer:perf/tokens_per_second", "Trained tokens per second"], ["efficiency:run", "Efficiency", "1 − smaller wait share", formatPercent],
  ["orchestrator:completion_len/mean", "Completion length", "tokens"], ["trainer:time/step", "Step time", "seconds"], ["trainer:loss", "Loss"],
];

export class CompareView {
  constructor(runs) {
    this.runs = runs;
    this.charts = [];
    this.node = element("div", {}, element("p", { class: "empty" }, "Reading the runs …"));
    // The runs grow. A control that is in use stays.
    this.timer = setInterval(() => isReport() || this.node.contains(document.activeElement) || this.onRuns(this.runs), COMPARISON_MILLISECONDS);
  }

  async onRuns(runs) {
    this.runs = runs;
    await this.render(null).catch(() => {});  // the next call may find the server again
  }

  async render(loaded = this.loaded ?? null) {
    const state = readState();
    const hidden = new Set((state.without ?? "").split(",").filter(Boolean));
    if (loaded === null) {
      loaded = await Promise.all(this.runs.slice(0, 24).map(async (run) => {
        const path = `runs/${encodeURIComponent(run.name)}`;
        const [overview, config] = await Promise.all([getJson(`${path}/overview`), getJson(`${path}/config`)]);
        return { ...run, overview, config, store: new SeriesStore(run.name) };
      }));
    }
    const evaluations = [...new Set(loaded.flatMap((run) => run.overview.metrics.map((metric) => metric.name).filter((name) => /:(eval|val)\/.+\/reward\/mean$/.test(name))))];
    const charts = [COMPARED[0], ...evaluations.slice(0, 4).map((name) => [name, name.replace(/^\w+:/, "")]), ...COMPARED.slice(1)];
    await Promise.all(loaded.map((run) => run.store.load(charts.map(([name]) => name))));
    if (this.isDestroyed) return;
    this.loaded = loaded;
    this.clear();
    const hasTime = this.loaded.every((run) => run.overview.has_time || run.overview.metrics.length === 0);
    const options = { x: state.x === "time" && hasTime ? "time" : "step", smooth: state.smooth ?? 0, syncKey: "compare" };
    const shown = this.loaded.map((run, number) => ({ ...run, colour: RUN_COLOURS[number % RUN_COLOURS.length] })).filter((run) => !hidden.has(run.name));
    const grid = element("div", { class: "charts" });
    const toolbar = element("div", { class: "toolbar" },
      segments([["step", "Step"], ["time", "Time since start", hasTime ? "" : "The metrics of some runs have no time."]], options.x, (x) => setState({ x: x === "step" ? null : x }), "horizontal axis"),
      element("label", {}, "Smoothing", element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: options.smooth, onchange: (event) => setState({ smooth: Number(event.target.value) || null }) })));
    replaceChildren(this.node, this.table(hidden), element("div", { style: { height: "14px" } }), toolbar, grid, this.differences(shown.filter((run) => !run.is_trainer)));
    const losses = new Set(shown.map((run) => JSON.stringify([...flatten(run.config)].filter(([key]) => /(^|\.)loss\.type$/.test(key)).map(([, value]) => value))));
    for (const [name, usual, unit, format] of charts) {
      const title = name === "trainer:loss" && losses.size > 1 ? "Loss (of different types)" : usual;
      const lines = shown.filter((run) => run.store.get(name).step.length).map((run) => ({ label: run.label, colour: run.colour, start: firstTime(run.store), data: () => run.store.get(name) }));
      if (lines.length === 0) continue;
      const chart = new LineChart({ title, unit, format, lines, options, hasStartup: isDuration(name) });
      this.charts.push(chart);
      grid.append(chart.node);
      chart.draw();
    }
  }

  table(hidden) {
    const toggle = (name) => {
      const next = new Set(hidden);
      if (!next.delete(name)) next.add(name);
      setState({ without: [...next].join(",") });
    };
    const rows = this.loaded.map((run, number) => {
      const { headline } = run.overview;
      return element("tr", {},
        element("td", {}, element("label", {}, element("input", { type: "checkbox", checked: !hidden.has(run.name), onchange: () => toggle(run.name), "aria-label": `show ${run.label}` }),
          element("span", { class: "key", style: { background: `var(--${RUN_COLOURS[number % RUN_COLOURS.length]})`, display: "inline-block", width: "10px", height: "10px", borderRadius: "3px", margin: "0 7px" } }))),
        element("td", {}, element("a", { href: stateUrl({ run: run.name }, false), onclick: (event) => {
          event.preventDefault();
          setState({ run: run.name }, { keep: false });
        } }, visibleString(run.label)), element("div", { class: "muted" }, visibleString(run.root))),
        element("td", {}, formatDate(firstTime(run.store))),
        element("td", { class: "number" }, `${headline.steps}${headline.max_steps ? ` / ${headline.max_steps}` : ""}`),
        element("td", { class: "number" }, formatNumber(headline.reward)), element("td", { class: "number" }, formatNumber(headline.loss)),
        element("td", { class: "number" }, headline.staleness_max === undefined || headline.staleness_max === null ? "–" : `${formatNumber(headline.staleness_mean)} / ${formatNumber(headline.staleness_max)}`),
        element("td", { class: "number" }, formatNumber(headline.trained_tokens_per_second)), element("td", { class: "number" }, formatSeconds(headline.step_seconds)),
        element("td", { class: "number" }, formatPercent(headline.trainer_wait_share)));
    });
    return element("div", { class: "card" }, element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "show"), element("th", {}, "run"), element("th", {}, "started"),
      ["step", "reward", "loss", "staleness mean / max", "trained tokens/s", "step time", "trainer waits"].map((name) => element("th", { class: "number" }, name)))), element("tbody", {}, rows)));
  }

  differences(runs) {
    const flat = runs.map((run) => flatten(run.config));
    const keys = [...new Set(flat.flatMap((config) => [...config.keys()]))].filter((key) => !/(^|\.)(output_dir|exp_id)$/.test(key));
    const different = uniteKeys(keys.filter((key) => new Set(flat.map((config) => config.get(key))).size > 1), flat);
    if (runs.length < 2 || different.length === 0) return null;
    return element("div", { class: "card", style: { marginTop: "12px", overflow: "auto" } }, element("h2", {}, "Different settings"),
      element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "key"), runs.map((run) => element("th", {}, visibleString(run.label))))),
        element("tbody", {}, different.slice(0, 80).map(([key, ...same]) => element("tr", {}, element("td", {}, visibleString(key),
          same.map((other) => element("div", { class: "muted" }, `= ${visibleString(other)}`))),
          flat.map((config) => element("td", {}, visibleString((config.get(key) ?? "–").slice(0, 120)))))))));
  }

  clear() {
    for (const chart of this.charts) chart.destroy();
    this.charts = [];
  }

  destroy() {
    this.isDestroyed = true;
    clearInterval(this.timer);
    this.clear();
  }
}

// Lists of keys that end in the same name and have the same values in all runs, each with the shortest key first.
function uniteKeys(keys, configs) {
  const groups = new Map();
  for (const key of keys.toSorted((a, b) => a.split(".").length - b.split(".").length)) {
    const group = JSON.stringify([key.split(".").at(-1), ...configs.map((config) => config.get(key) ?? null)]);
    groups.set(group, [...(groups.get(group) ?? []), key]);
  }
  return [...groups.values()];
}

function formatDate(time) {
  return time ? new Date(time * 1000).toLocaleString("en-GB") : "–";
}

function firstTime(store) {
  const times = [...store.series.values()].map((series) => series.time.find((time) => time !== null)).filter((time) => time !== undefined);
  return times.length ? Math.min(...times) : 0;
}

function flatten(value, prefix = "", found = new Map()) {
  for (const [key, inner] of Object.entries(value ?? {})) {
    const name = prefix ? `${prefix}.${key}` : key;
    if (inner !== null && typeof inner === "object") flatten(inner, name, found);
    else found.set(name, String(inner));
  }
  return found;
}
