// Curves of one run.
import { LineChart } from "./chart.js";
import { announce, element, formatPercent, formatSeconds, replaceChildren, segments } from "./dom.js";
import { getJson } from "./source.js";
import { readState, setState } from "./state.js";

const MAX_OTHER_CHARTS = 300;
const PALETTE = ["c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"];

// "orchestrator:eval/math/pass@2" is math/pass@2; validation keeps its prefix.
function evaluated(name) {
  return name.replace(/^\w+:(eval\/)?/, "");
}

export function isDuration(name) {
  return name.includes(":time/");
}

// The last learning rate of a schedule is near 0, which hides how high it was.
function hasLargest(name) {
  return /^trainer:lr(\/|$)/.test(name);
}

// Charts at the top of the page; those without data are left out.
function mainCharts(names) {
  const of = (pattern) => [...names].filter((name) => pattern.test(name)).sort();
  const envs = of(/^orchestrator:reward\/(?!sampled\/)[^/]+\/mean$/);
  const evaluations = of(/^(orchestrator|eval):(eval|val)\/.+\/reward\/mean$/);
  const passes = of(/^(orchestrator|eval):(eval|val)\/.+\/pass@\d+$/).slice(0, 6);
  return [
    { title: "Runs", lines: [["trainer:runs/active", "active"], ["trainer:runs/waiting", "waiting"], ["trainer:runs/in_iteration", "in the iteration"]] },
    { title: "Reward", lines: [["orchestrator:reward/mean", "mean"], ...(envs.length > 1 ? envs.map((name) => [name, name.split("/").slice(1, -1).join("/")]) : [])] },
    { title: "Evaluation", unit: "mean reward", lines: evaluations.map((name) => [name, evaluated(name).replace("/reward/mean", "")]) },
    { title: "Evaluation pass@k", unit: "share of examples", format: formatPercent, lines: passes.map((name) => [name, evaluated(name)]) },
    { title: "pass@k in training", unit: "share of groups", format: formatPercent, lines: of(/^orchestrator:pass@\d+$/).slice(0, 6).map((name) => [name, name.split(":")[1]]) },
    { title: "Staleness", unit: "versions", bound: true, lines: [["orchestrator:staleness/max", "max", 4], ["orchestrator:staleness/mean", "mean"]] },
    { title: "Mismatch KL", unit: "nats", lines: [["trainer:mismatch_kl", "all tokens"], ["trainer:mismatch_kl/on_policy", "on-policy"]] },
    { title: "Entropy", unit: "nats", lines: [["trainer:entropy", ""]] },
    { title: "Gradient norm", lines: [["trainer:grad_norm", ""]] },
    { title: "Learning rate", lines: [["trainer:lr", ""]] },
    { title: "Loss", lines: [["trainer:loss", "train"], ["trainer:val/loss", "validation"]] },
    { title: "Tokens per second", lines: [["trainer:perf/tokens_per_second", "trained"], ["orchestrator:perf/tokens_per_second", "sampled"]] },
    { title: "Step time", unit: "seconds", format: formatSeconds, lines: [["trainer:time/step", "step"], ["trainer:time/train", "train"], ["trainer:time/wait_for_batch", "wait for batch"]] },
    { title: "Waiting", unit: "share of the step", format: formatPercent, share: true, lines: [["wait_share:trainer", "trainer"], ["wait_share:orchestrator", "inference"]] },
    { title: "Efficiency", unit: "1 − smaller wait share", format: formatPercent, share: true, lines: [["efficiency:run", ""]] },
    { title: "MFU", format: formatPercent, lines: [["trainer:perf/mfu", ""]] },
    { title: "Completion length", unit: "tokens", lines: [["orchestrator:completion_len/mean", "mean"]] },
    { title: "Truncated", unit: "share of rollouts", format: formatPercent, share: true, lines: [["orchestrator:is_truncated/mean", ""]] },
    { title: "Clipped and masked", unit: "share of tokens", format: formatPercent, lines: [["trainer:importance_ratio/clipped", "clipped"], ["trainer:importance_ratio/masked", "masked"]] },
    { title: "Groups without gradient", unit: "share", format: formatPercent, share: true, lines: [["orchestrator:batch/zero_advantage_groups", ""]] },
    { title: "Memory", unit: "GiB", lines: [["trainer:perf/peak_memory_gib", "peak"]] },
  ].map((chart) => ({ ...chart, lines: chart.lines.filter(([name]) => names.has(name)) })).filter((chart) => chart.lines.length);
}

export class OverviewView {
  constructor(run, store, overview) {
    Object.assign(this, { run, store, overview });
    this.charts = [];
    this.node = element("div");
    this.onData = () => this.redraw();
    store.listeners.add(this.onData);
    this.visible = new IntersectionObserver((entries) => entries.forEach((entry) => {
      if (entry.isIntersecting) entry.target.draw?.();
    }), { rootMargin: "200px" });
  }

  get names() {
    const names = new Set(this.overview.metrics.map((metric) => metric.name));
    if (names.has("trainer:time/wait_for_batch")) names.add("wait_share:trainer");
    if (names.has("orchestrator:time/wait_for_policy")) names.add("wait_share:orchestrator");
    if (names.has("wait_share:trainer") && names.has("wait_share:orchestrator")) names.add("efficiency:run");
    return names;
  }

  async render() {
    this.clear();
    const state = readState();
    this.drawnNames = this.overview.metrics.length;
    if (this.overview.metrics.length === 0) {
      replaceChildren(this.node, element("p", { class: "empty" }, [null, undefined, "running"].includes(this.overview.headline.state)
        ? "No metrics yet. The first line appears after the first step." : "This run has no metrics: it ended before its first step."));
      return;
    }
    const main = mainCharts(this.names);
    await this.store.load(main.flatMap((chart) => chart.lines.map(([name]) => name)));
    this.start = this.startTime();
    this.options = { x: state.x === "time" && this.overview.has_time ? "time" : "step", smooth: state.smooth ?? 0, start: this.start };
    const grid = element("div", { class: "charts" });
    const others = element("section");
    replaceChildren(this.node, this.toolbar(state, () => this.fillMetrics(grid, others)), grid, others);
    for (const chart of main) this.add(grid, this.makeMain(chart));
    this.fillMetrics(grid, others);
    this.drawIdle();
  }

  // Draws the charts that are not in sight yet, for print and pictures of the whole page.
  drawIdle() {
    const next = this.charts.find((chart) => chart.plot === null && !chart.isOther);
    if (!next) return;
    (globalThis.requestIdleCallback ?? setTimeout)(() => {  // Safari has none
      if (next.plot === null && next.node.isConnected) next.draw();
      if (next.plot !== null) this.drawIdle();
    });
  }

  onHeadline(headline) {
    const hasChanged = headline.state !== this.overview.headline.state;
    this.overview.headline = headline;
    if (hasChanged && this.overview.metrics.length === 0) this.render();
  }

  startTime() {
    const times = [...this.store.series.values()].map((series) => series.time.find((time) => time !== null)).filter((time) => time !== undefined);
    return times.length ? Math.min(...times) : 0;
  }

  makeMain(chart) {
    const lines = chart.lines.map(([name, label, width], number) => ({ label, width, colour: PALETTE[number % PALETTE.length], data: () => this.store.get(name) }));
    const bound = this.overview.headline.staleness_bound;
    if (chart.bound && bound !== null) {
      const any = chart.lines[0][0];
      lines.push({ label: "bound", colour: "c4", dash: [5, 4], width: 1.2, data: () => {
        const { step, time } = this.store.get(any);
        return { step, time, value: step.map(() => bound) };
      } });
    }
    const range = chart.share ? (_, low, high) => [0, Math.max(0.1, (high ?? 1) * 1.05)] : null;
    const meaning = chart.lines.map(([name]) => this.meaning(name)).filter(Boolean).join("\n");
    const hasStartup = chart.lines.every(([name]) => isDuration(name));
    return new LineChart({ title: chart.title, unit: chart.unit, meaning, lines, options: this.options, format: chart.format, range, hasStartup, hasLargest: hasLargest(chart.lines[0][0]) });
  }

  meaning(name) {
    const metric = this.overview.metrics.find((one) => one.name === name);
    return metric?.meaning ? `${name.replace(/^\w+:/, "")}: ${metric.meaning}` : "";
  }

  add(grid, chart) {
    chart.node.draw = () => chart.draw();
    this.charts.push(chart);
    grid.append(chart.node);
    this.visible.observe(chart.node);
  }

  toolbar(state, fill) {
    const axis = segments([["step", "Step"], ["time", "Time", this.overview.has_time ? "" : "The metrics of this run have no time."]],
      this.options.x, (x) => setState({ x: x === "step" ? null : x }), "horizontal axis");
    const smooth = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: this.options.smooth, "aria-label": "smoothing",
      onchange: (event) => setState({ smooth: Number(event.target.value) || null }) });
    this.searchInput = element("input", { type: "search", placeholder: `${this.overview.metrics.length} names`, value: state.q ?? "",
      oninput: (event) => {
        setState({ q: event.target.value }, { replace: true });
        fill();
      } });
    return element("div", { class: "toolbar" }, axis, element("label", {}, "Smoothing", smooth), element("label", {}, "Search metrics", this.searchInput),
      element("button", { type: "button", onclick: () => setState({ all: state.all === "1" ? null : "1" }) }, state.all === "1" ? "Show the main charts" : "Show all metrics"),
      element("span", { class: "space" }),
      element("span", {}, "Drag in a chart to zoom, double-click to reset."));
  }

  // Draws the metrics that are searched, or all of them, in place of the main charts.
  fillMetrics(grid, box) {
    this.dropCharts((chart) => chart.isOther);
    box.replaceChildren();
    const wanted = this.searchInput.value.trim().toLowerCase();
    grid.hidden = Boolean(wanted) || readState().all === "1";
    if (!grid.hidden) return;
    const found = this.overview.metrics.filter((metric) => !wanted || `${metric.name} ${metric.meaning}`.toLowerCase().includes(wanted));
    const shown = found.slice(0, MAX_OTHER_CHARTS);
    const count = found.length === 0 ? "No metric has this name or meaning." : `${found.length} of ${this.overview.metrics.length} metrics`;
    box.append(element("p", { class: "muted" }, count, shown.length < found.length ? `; the first ${shown.length} are shown` : ""));
    if (wanted) announce(count);
    const areas = new Map();
    for (const metric of shown) {
      const area = metric.name.split("/")[0].replace(":", " · ");
      areas.set(area, [...(areas.get(area) ?? []), metric]);
    }
    for (const [area, metrics] of [...areas].sort(([a], [b]) => a.localeCompare(b))) {
      const grid = element("div", { class: "charts" });
      box.append(element("div", { class: "group-title" }, area), grid);
      for (const metric of metrics) {
        const chart = new LineChart({ title: metric.name.replace(/^\w+:/, ""), unit: metric.unit, meaning: metric.meaning,
          lines: [{ label: "", colour: "c0", data: () => this.store.get(metric.name) }], options: this.options, hasStartup: isDuration(metric.name), hasLargest: hasLargest(metric.name) });
        chart.isOther = true;
        if (!metric.name.toLowerCase().includes(wanted)) chart.node.append(element("div", { class: "muted" }, markMatch(metric.meaning, wanted)));
        chart.node.draw = async () => {
          await this.store.load([metric.name]);
          if (chart.node.isConnected) chart.draw();
        };
        this.charts.push(chart);
        grid.append(chart.node);
        this.visible.observe(chart.node);
      }
    }
  }

  redraw() {
    const low = -200, high = innerHeight + 200;
    for (const chart of this.charts) {
      const box = chart.node.getBoundingClientRect();
      if (chart.plot !== null && box.bottom > low && box.top < high) chart.draw();
    }
  }

  // New metric names appear with the first evaluation, for example.
  async refreshNames() {
    this.overview = await getJson(`runs/${encodeURIComponent(this.run)}/overview`);
    if (this.overview.metrics.length !== this.drawnNames) await this.render();
  }

  onMetrics(rows) {
    const known = this.names;
    if (rows.some((row) => Object.keys(row.values).some((name) => !known.has(`${row.process}:${name}`)))) this.refreshNames();
  }

  dropCharts(test) {
    for (const chart of this.charts.filter(test)) {
      this.visible.unobserve(chart.node);
      chart.destroy();
    }
    this.charts = this.charts.filter((chart) => !test(chart));
  }

  clear() {
    this.dropCharts(() => true);
  }

  destroy() {
    this.clear();
    this.store.listeners.delete(this.onData);
  }
}

// The text with its first match of a search in lower case.
function markMatch(text, wanted) {
  const begin = text.toLowerCase().indexOf(wanted);
  const end = begin + wanted.length;
  return begin < 0 ? text : [text.slice(0, begin), element("mark", {}, text.slice(begin, end)), text.slice(end)];
}
