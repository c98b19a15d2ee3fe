// A card with a line chart: uPlot with our colours, and a legend that shows the values at the cursor.
import { colour, distinctLabels, element, formatNumber, formatPercent, replaceChildren, visibleString } from "./dom.js";

// Steps are whole numbers: 1, 2, 5, 10, ...
const STEP_INCREMENTS = Array.from({ length: 36 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

const observer = new ResizeObserver((entries) => {
  for (const entry of entries) entry.target.chart?.resize();
});

export class LineChart {
  // lines: [{ label, colour, width, dash, data: () => ({ step, time, value, mean }) }]; mean if points were left out
  // hasStartup: step 0 contains the start-up, so the scale is that of the others; hasLargest: of one line, in the legend
  constructor({ title, unit = "", meaning = "", lines, options, format = formatNumber, range = null, hasStartup = false, hasLargest = false }) {
    Object.assign(this, { title, lines, options, format, range, hasStartup, hasLargest });
    this.beyond = element("span");
    this.legend = element("div", { class: "legend" });
    this.plotNode = element("div", { class: "plot", tabindex: 0, role: "group", "aria-label": `chart of ${visibleString(title)}`,
      "aria-description": "Arrow keys move the cursor, plus and minus zoom, Escape shows all.", onkeydown: (event) => this.onKey(event),
      onfocus: () => this.legend.setAttribute("aria-live", "polite"), onblur: () => this.legend.removeAttribute("aria-live") });
    this.node = element("div", { class: "card chart" },
      element("div", { class: "head" },
        element("span", { class: "title", title: meaning || null }, visibleString(title)),
        element("span", { class: "unit" }, unit, this.beyond), this.legend),
      this.plotNode);
    this.plotNode.chart = this;
    this.plot = null;
    observer.observe(this.plotNode);
  }

  get isEmpty() {
    return this.lines.every((line) => line.data().step.length === 0);
  }

  table(column = "value") {
    const byTime = this.options.x === "time";
    const start = this.options.start ?? 0;
    const tables = this.lines.map((line) => {
      const { step, time, ...columns } = line.data();
      const value = columns[column] ?? columns.value;
      if (!byTime) return [step, value];
      const known = [...time.keys()].filter((i) => time[i] !== null);
      return [known.map((i) => (time[i] - (line.start ?? start)) / 60), known.map((i) => value[i])];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  data() {
    const [x, ...raw] = this.table();
    const weight = Number(this.options.smooth || 0);
    if (!weight) return [x, ...raw];
    const means = this.table("mean").slice(1).map((values, number) => {
      const omitted = this.startup(number, values);
      return smoothed(values.map((value, i) => (i === omitted ? null : value)), weight);
    });
    return [x, ...means, ...raw];
  }

  // Where a column of a line has step 0 that is left out of the scale; -1 if nowhere.
  startup(number, column) {
    const { step } = this.lines[number].data();
    return this.hasStartup && step[0] === 0 && step.length > 1 ? column.findIndex((value) => value !== null && value !== undefined) : -1;
  }

  rangeAfterStartup(plot, low, high) {
    const [first, last] = plot.series[0].idxs;
    const values = plot.data.slice(1).flatMap((column, number) => {
      const omitted = this.startup(number % this.lines.length, column);
      return column.filter((value, i) => i >= first && i <= last && i !== omitted && value !== null && value !== undefined);
    });
    return values.length ? paddedRange(plot, Math.min(...values), Math.max(...values)) : paddedRange(plot, low, high);
  }

  showBeyond(plot) {
    const columns = plot.data.slice(-this.lines.length);
    const largest = Math.max(...columns.map((column, number) => column[this.startup(number, column)] ?? -Infinity));
    this.beyond.textContent = largest > plot.scales.y.max ? ` · step 0 with the start-up (${this.format(largest)}) is above the scale` : "";
  }

  draw() {
    const data = this.data();
    const weight = Number(this.options.smooth || 0);
    if (this.plot !== null && this.drawnWith === `${weight} ${this.options.x}`) {
      this.plot.setData(data);
    } else {
      this.plot?.destroy();
      this.plotNode.replaceChildren();
      const size = { width: Math.max(120, this.plotNode.clientWidth || 400), height: 190 };
      this.plot = new uPlot({ ...size, ...this.settings(weight) }, data, this.plotNode);
      this.drawnWith = `${weight} ${this.options.x}`;
    }
    this.showValues(null);
  }

  settings(weight) {
    const muted = colour("muted");
    const axis = { stroke: muted, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const lines = this.lines.map((line) => ({
      label: line.label, stroke: colour(line.colour), width: line.width ?? 1.7, dash: line.dash,
      spanGaps: true, points: { show: this.data()[0].length < 2, size: 5 },
    }));
    const faint = weight ? this.lines.map((line) => ({
      label: `${line.label} raw`, stroke: `${colour(line.colour)}47`, width: 1, spanGaps: true, points: { show: false },
    })) : [];
    const minutes = this.options.x === "time";
    return {
      series: [{}, ...lines, ...faint],
      scales: { x: { time: false }, y: { range: this.range ?? (this.hasStartup ? (...values) => this.rangeAfterStartup(...values) : paddedRange) } },
      axes: [
        { ...axis, size: 22, gap: 2, space: 60, incrs: minutes ? undefined : STEP_INCREMENTS, values: (_, ticks) => distinctLabels(ticks, minutes ? formatMinutes : formatTick) },
        { ...axis, size: (_, labels) => Math.max(42, 10 + 6 * Math.max(...(labels ?? [""]).map((label) => label.length))), gap: 4, space: 32,
          values: (_, ticks) => distinctLabels(ticks, this.format === formatPercent ? formatPercentTick : formatTick) },
      ],
      cursor: { sync: { key: this.options.syncKey ?? "page" }, points: { size: 6 }, drag: { x: true, y: false }, y: false },
      hooks: { setCursor: [(plot) => this.showValues(plot.cursor.idx)], setScale: [(plot, name) => name === "y" && this.showBeyond(plot)] },
      legend: { show: false },
      padding: [8, 14, 0, 0],
    };
  }

  showValues(index) {
    if (this.plot === null) return;
    const [x] = this.plot.data;
    const chosen = index ?? x.length - 1;
    const place = (at) => (x.length === 0 ? "" : this.options.x === "time" ? formatMinutes(x[at]) : `step ${x[at]}`);
    const parts = this.lines.map((line, number) => {
      const column = this.plot.data[number + 1] ?? [];
      let at = chosen;
      while (at > 0 && (column[at] === null || column[at] === undefined)) at -= 1;
      const key = element("span", { class: "key", style: { background: colour(line.colour) } });
      return element("span", {}, key, line.label ? `${visibleString(line.label)} ` : "", element("b", {}, this.format(column[at])), at === chosen || (column[at] ?? null) === null ? "" : ` (${place(at)})`);
    });
    const largest = this.hasLargest && x.length ? ` · largest ${this.format(Math.max(...this.plot.data.at(-1)))}` : "";
    replaceChildren(this.legend, element("span", {}, place(chosen)), parts, largest);
  }

  onKey(event) {
    const x = this.plot?.data[0] ?? [];
    if (!x.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.plot.cursor.idx ?? x.length - 1;
    const { min, max } = this.plot.scales.x;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const half = { "+": (max - min) / 4, "=": (max - min) / 4, "-": max - min }[event.key];
    if (move) {
      const next = x[Math.min(x.length - 1, Math.max(0, at + move))];
      if (next < min || next > max) this.plot.setScale("x", { min: min + next - x[at], max: max + next - x[at] });
      this.plot.setCursor({ left: this.plot.valToPos(next, "x"), top: 0 });
    } else if (half) {
      const centre = Math.min(max, Math.max(min, x[at]));
      this.plot.setScale("x", { min: Math.max(x[0], centre - half), max: Math.min(x.at(-1), centre + half) });
    } else if (event.key === "Escape") this.plot.setScale("x", { min: x[0], max: x.at(-1) });
    else return;
    event.preventDefault();
  }

  resize() {
    const width = this.plotNode.clientWidth;
    if (this.plot !== null && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: 190 });
  }

  destroy() {
    observer.unobserve(this.plotNode);
    this.plot?.destroy();
    this.plot = null;
  }
}

function paddedRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [-0.1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const padding = (high - low) * 0.08;
  return [low >= 0 && low < (high - low) * 0.4 ? Math.min(0, low) : low - padding, high + padding];
}

function formatTick(value, further = 0) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const scaled = (unit) => Number((value / unit).toPrecision(3 + further));
  if (size >= 1e9) return `${scaled(1e9)}G`;
  if (size >= 1e6) return `${scaled(1e6)}M`;
  if (size >= 1e4) return `${scaled(1e3)}k`;
  return size < 1e-3 ? value.toExponential(further) : String(Number(value.toPrecision(4 + further)));
}

function formatPercentTick(value, further) {
  return `${Number((100 * value).toPrecision(4 + further))} %`;
}

function formatMinutes(minutes, further = 0) {
  if (Math.abs(minutes) < 2) return `${Number((minutes * 60).toFixed(further))} s`;
  return minutes < 120 ? `${Number(minutes.toPrecision(3 + further))} min` : `${Number((minutes / 60).toPrecision(3 + further))} h`;
}

// Exponential moving average, with the correction of its beginning (as Adam's).
export function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
