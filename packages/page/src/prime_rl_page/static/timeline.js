// A lane per process: what it did when, and whom it waited for.
import { prepareCanvas } from "./canvas.js";
import { announce, colour, element, formatClock, formatPercent, formatSeconds, hideTip, replaceChildren, showTip, visibleString } from "./dom.js";
import { getJson, isReport } from "./source.js";
import { readState, setState } from "./state.js";

const PHASE_COLOURS = ["c0", "c1", "c2", "c3", "c5", "c6", "c4", "c8", "c9", "c7"];
const BAD_EVENTS = new Set(["failed", "silent", "stuck", "stopped", "killed", "restarted"]);
const LANE_HEIGHT = 28;
const SUPERVISOR = "rl";

export class TimelineView {
  constructor(run) {
    this.run = run;
    this.node = element("div", {}, element("p", { class: "empty" }, "Reading the timeline …"));
    this.colours = new Map();
    this.onResize = () => this.draw();
    addEventListener("resize", this.onResize);
  }

  async render() {
    const state = readState();
    this.begin = state.from ? Number(state.from) : null;
    this.end = state.to ? Number(state.to) : null;
    const parameters = { begin: this.begin, end: this.end, pixels: Math.max(400, this.node.clientWidth - 240) };
    const data = await getJson(`runs/${encodeURIComponent(this.run)}/timeline`, parameters);
    if (this.isDestroyed) return;
    this.data = isReport() ? clipWindow(data, this.begin, this.end) : data;
    this.build();
  }

  onCounts(counts) {
    const key = `${counts.phases} ${counts.events}`;
    if (this.seen !== undefined && this.seen !== key && this.end === null && !this.drag) this.render();
    this.seen = key;
  }

  // The steps of the bottleneck have changed.
  onHeadline({ bottleneck }) {
    if (this.bottleneck !== bottleneck && this.begin === null && this.end === null && !this.drag) this.render();
    this.bottleneck = bottleneck;
  }

  build() {
    const { data } = this;
    if (data.begin === null) {
      replaceChildren(this.node, element("p", { class: "empty" }, "This run has neither timeline/ nor events yet."), this.currentCard());
      return;
    }
    const lanes = new Map(data.lanes.map((lane) => [lane.name, lane]));
    this.laneNames = [...lanes.keys()];
    for (const event of data.events) {
      const name = this.laneOf(event);
      if (name && !lanes.has(name) && !name.includes("/")) lanes.set(name, { name, spans: [], waits: {} });
    }
    this.lanes = [...lanes.values()];
    const focused = document.activeElement?.dataset.lane;
    this.axis = element("canvas");
    const rows = this.lanes.map((lane) => {
      const canvas = element("canvas", { "aria-label": `phases of ${lane.name}`, role: "img", tabindex: 0, "data-lane": lane.name,
        "aria-description": "Arrow keys read the phases, with Shift they move the window; plus and minus zoom, Escape shows the whole run.",
        onkeydown: (event) => this.onKey(event, lane), onblur: hideTip });
      this.listen(canvas, lane);
      lane.canvas = canvas;
      const idle = lane.idle_share === null || lane.idle_share === undefined ? (lane.spans.length ? "" : "no phases") : `idle ${formatPercent(lane.idle_share)}`;
      return element("div", { class: "lane" }, element("div", { class: "who", title: lane.name }, visibleString(lane.name), element("small", {}, idle)), canvas);
    });
    this.brush = element("div", { class: "brush", hidden: true });
    const lanesNode = element("div", { class: "lanes" }, element("div", { class: "lane axis" }, element("div"), this.axis), rows, this.brush);
    this.lanesNode = lanesNode;
    const note = data.has_phases ? null : element("p", { class: "muted" },
      "This run has no phases in timeline/: its version did not write them. Events and the present phases are shown.");
    replaceChildren(this.node, this.toolbar(), element("div", { class: "card" }, note, lanesNode, this.legend()),
      element("div", { class: "columns" }, this.waitCard(), this.currentCard(), this.eventCard()));
    this.draw();
    this.lanes.find((lane) => lane.name === focused)?.canvas.focus();
  }

  // The phase that begins next to the last one that was read.
  readPhase(lane, direction) {
    const { begin, end } = this.data;
    const spans = lane.spans.filter((span) => span.end >= begin && span.start <= end);
    const last = this.read?.lane === lane.name ? this.read.start : direction > 0 ? -Infinity : Infinity;
    const span = direction > 0 ? spans.find((one) => one.start > last) : spans.findLast((one) => one.start < last);
    if (!span) return announce("no further phase in this window");
    this.read = { lane: lane.name, start: span.start };
    const text = this.describeSpan(span);
    const box = lane.canvas.getBoundingClientRect();
    showTip(text, box.left + this.x(Math.max(span.start, begin), box.width), box.top);
    announce(text);
  }

  onKey(event, lane) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (direction && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.readPhase(lane, direction);
      return;
    }
    const { begin, end, first, last } = this.data;
    const length = end - begin, middle = (begin + end) / 2;
    const window = { "+": [middle - length / 4, middle + length / 4], "=": [middle - length / 4, middle + length / 4], "-": [middle - length, middle + length],
      ArrowLeft: [begin - length / 4, end - length / 4], ArrowRight: [begin + length / 4, end + length / 4], Escape: [first, last] }[event.key];
    if (!window || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const [from, to] = [Math.max(first, window[0]), Math.min(last, window[1])];
    if (from <= first && to >= last) setState({ from: null, to: null });
    else if (to - from > 1e-3) setState({ from: from.toFixed(3), to: to.toFixed(3) });
  }

  // The process with the name of an event, else the first of its role: a role without a number has no lane.
  laneOf({ name }) {
    return this.laneNames.includes(name) ? name : this.laneNames.find((one) => one.startsWith(`${name}_`)) ?? name;
  }

  toolbar() {
    const { first, last } = this.data;
    const jump = (seconds, text) => element("button", { type: "button", onclick: () => setState({ from: Math.max(first, last - seconds), to: null }) }, text);
    const length = last - first;
    return element("div", { class: "toolbar" },
      element("button", { type: "button", onclick: () => setState({ from: null, to: null }) }, "Whole run"),
      length > 60 ? jump(60, "Last minute") : null, length > 600 ? jump(600, "Last 10 minutes") : null, length > 7200 ? jump(3600, "Last hour") : null,
      element("span", {}, `${formatClock(this.data.begin)} – ${formatClock(this.data.end)} (${formatSeconds(this.data.end - this.data.begin)})`),
      element("span", { class: "space" }), element("span", {}, "Drag, or press + and −, to zoom. Arrow keys read the phases."),
      isReport() ? null : element("a", { href: `/api/runs/${encodeURIComponent(this.run)}/trace.json`, download: "trace.json" }, "Chrome trace"));
  }

  // "train step 12" and "train step 13" are one kind of phase.
  kind(name) {
    return name.replace(/\d+/g, "#").replace(/\s*#$/, "").trim();
  }

  colourOf(span, lane) {
    if (span.waiting_for) return colour("wait");
    if (lane.name === SUPERVISOR) return colour("faint");
    const kind = this.kind(span.name);
    this.addColour(kind);
    return colour(this.colours.get(kind));
  }

  // A kind of phase has the same colour in every run, unless another one has it already.
  addColour(kind) {
    if (this.colours.has(kind)) return;
    const used = new Set(this.colours.values());
    const place = [...kind].reduce((sum, character) => (31 * sum + character.codePointAt(0)) % 9973, 0);
    const palette = PHASE_COLOURS.map((_, i) => PHASE_COLOURS[(place + i) % PHASE_COLOURS.length]);
    this.colours.set(kind, palette.find((one) => !used.has(one)) ?? palette[0]);
  }

  legend() {
    const seconds = new Map();
    for (const lane of this.lanes) for (const span of lane.spans) {
      if (span.waiting_for || span.merged || lane.name === SUPERVISOR) continue;
      const kind = this.kind(span.name);
      seconds.set(kind, (seconds.get(kind) ?? 0) + span.end - span.start);
    }
    // The longest phases get colours first, because there are more kinds of phases than colours.
    const top = [...seconds].sort((a, b) => b[1] - a[1]).slice(0, PHASE_COLOURS.length);
    for (const [kind] of top.toSorted()) this.addColour(kind);
    if (top.length === 0) return null;
    const key = (background, text) => element("span", {}, element("span", { class: "key", style: { background } }), text);
    return element("div", { class: "phases" }, top.map(([kind]) => key(colour(this.colours.get(kind)), visibleString(kind))), key(colour("wait"), "waiting"));
  }

  x(time, width) {
    return ((time - this.data.begin) / Math.max(1e-6, this.data.end - this.data.begin)) * width;
  }

  draw() {
    if (!this.data || this.data.begin === null || !this.axis?.isConnected) return;
    this.drawAxis();
    for (const lane of this.lanes) {
      const { context, width } = prepareCanvas(lane.canvas, LANE_HEIGHT);
      for (const span of lane.spans) {
        const left = this.x(Math.max(span.start, this.data.begin), width);
        const right = this.x(Math.min(span.end, this.data.end), width);
        const size = Math.max(0.6, right - left);
        if (span.merged || (span.busy !== undefined && !span.waiting_for)) {
          context.fillStyle = colour("wait");
          context.fillRect(left, 4, size, 20);
          context.fillStyle = span.merged ? colour("c0") : this.colourOf(span, lane);
          context.fillRect(left, 4 + 20 * (1 - span.busy), size, 20 * span.busy);
        } else {
          context.fillStyle = this.colourOf(span, lane);
          context.fillRect(left, span.waiting_for ? 10 : 4, Math.max(0.6, size - (size > 4 ? 1 : 0)), span.waiting_for ? 8 : 20);
        }
      }
      for (const event of this.eventsOf(lane)) {
        const at = this.x(event.time, width);
        context.fillStyle = colour(BAD_EVENTS.has(event.event) || event.code ? "bad" : "muted");
        context.fillRect(at - 0.75, 0, 1.5, LANE_HEIGHT);
        context.beginPath();
        context.moveTo(at - 4, 0);
        context.lineTo(at + 4, 0);
        context.lineTo(at, 5);
        context.fill();
      }
    }
  }

  eventsOf(lane) {
    return this.data.events.filter((event) => this.laneOf(event) === lane.name);
  }

  drawAxis() {
    const { context, width } = prepareCanvas(this.axis, 24);
    const length = this.data.end - this.data.begin;
    const step = niceStep(length / Math.max(2, Math.floor(width / 110)));
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("muted");
    context.strokeStyle = colour("line");
    const origin = this.data.first;
    for (let tick = Math.ceil((this.data.begin - origin) / step) * step; tick <= this.data.end - origin; tick += step) {
      const at = this.x(origin + tick, width);
      context.beginPath();
      context.moveTo(at, 18);
      context.lineTo(at, 24);
      context.stroke();
      const text = formatOffset(tick, step);
      if (at + 3 + context.measureText(text).width <= width) context.fillText(text, at + 3, 14);
    }
  }

  listen(canvas, lane) {
    const time = (event) => {
      const box = canvas.getBoundingClientRect();
      return this.data.begin + ((event.clientX - box.left) / box.width) * (this.data.end - this.data.begin);
    };
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { from: time(event), x: event.clientX };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) {
        const host = this.lanesNode.getBoundingClientRect();
        this.brush.hidden = false;
        this.brush.style.left = `${Math.min(event.clientX, this.drag.x) - host.left}px`;
        this.brush.style.width = `${Math.abs(event.clientX - this.drag.x)}px`;
        return;
      }
      const box = canvas.getBoundingClientRect();
      const text = this.describe(lane, time(event), (4 / box.width) * (this.data.end - this.data.begin));
      if (text) showTip(text, event.clientX, event.clientY);
      else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("pointerup", (event) => {
      const { drag } = this;
      this.drag = null;
      this.brush.hidden = true;
      if (drag && Math.abs(event.clientX - drag.x) > 5) {
        const [from, to] = [drag.from, time(event)].sort((a, b) => a - b);
        setState({ from: from.toFixed(3), to: to.toFixed(3) });
      }
    });
    canvas.addEventListener("dblclick", () => setState({ from: null, to: null }));
  }

  describe(lane, time, tolerance) {
    const event = this.eventsOf(lane).find((one) => Math.abs(one.time - time) < tolerance);
    if (event) return visibleString(`${event.event} at ${formatClock(event.time)}${event.detail ? `\n${event.detail}` : ""}${event.code ? `\nexit code ${event.code}` : ""}`);
    const span = lane.spans.find((one) => one.start - tolerance / 4 <= time && time <= one.end + tolerance / 4);
    return span ? this.describeSpan(span) : null;
  }

  describeSpan(span) {
    const lines = [visibleString(span.name || "phase"), `${formatSeconds(span.end - span.start)} from ${formatClock(span.start)}${span.unfinished ? ", not finished" : ""}`];
    if (span.waiting_for) lines.push(`waits for ${visibleString(span.waiting_for)}`);
    if (span.step !== undefined) lines.push(`step ${span.step}`);
    if (span.version !== undefined) lines.push(`version ${span.version}`);
    if (span.busy !== undefined) lines.push(`busy ${formatPercent(span.busy)}`);
    return lines.join("\n");
  }

  waitCard() {
    const rows = this.data.lanes.flatMap((lane) => Object.entries(lane.waits).map(([role, seconds]) => [lane, role, seconds])).sort((a, b) => b[2] - a[2]);
    if (rows.length === 0) return null;
    return element("div", { class: "card" }, element("h2", {}, "Who waited for whom"), element("p", {}, this.countedTime()), element("table", {}, element("tbody", {},
      rows.slice(0, 12).map(([lane, role, seconds]) => element("tr", {}, element("td", {}, visibleString(lane.name)), element("td", { class: "muted" }, `for ${visibleString(role)}`),
        element("td", { class: "number" }, formatSeconds(seconds)), element("td", { class: "number muted" }, formatPercent(seconds / lane.covered_seconds)))))));
  }

  countedTime() {
    const { counted: [from, to], begin, end, first, last } = this.data;
    const steps = (from === begin && to === end) || (from === first && to === last) ? "" : ", the steps of the bottleneck above";
    return `From ${formatClock(from)} to ${formatClock(to)}${steps}.`;
  }

  currentCard() {
    const entries = Object.entries(this.data.current ?? {});
    if (entries.length === 0) return null;
    return element("div", { class: "card" }, element("h2", {}, "Last known phases"), element("table", {}, element("tbody", {},
      entries.map(([name, beat]) => element("tr", {}, element("td", {}, visibleString(name)), element("td", {}, visibleString(beat.phase)),
        element("td", { class: "muted" }, beat.waiting_for ? `waits for ${visibleString(beat.waiting_for)}` : ""),
        element("td", { class: "number muted" }, `since ${formatClock(beat.since)}`))))));
  }

  eventCard() {
    const events = this.data.events.slice(-40).reverse();
    if (events.length === 0) return null;
    return element("div", { class: "card" }, element("h2", {}, "Events"), element("div", { class: "list", style: { maxHeight: "320px" } }, element("table", {}, element("tbody", {},
      events.map((event) => element("tr", {}, element("td", { class: "muted" }, formatClock(event.time)), element("td", {}, visibleString(event.name ?? "")),
        element("td", { class: BAD_EVENTS.has(event.event) || event.code ? "bad" : null }, visibleString(event.event ?? ""))))))));
  }

  destroy() {
    this.isDestroyed = true;
    hideTip();
    removeEventListener("resize", this.onResize);
  }
}

function clipWindow(data, begin, end) {
  if (data.begin === null) return data;
  return { ...data, begin: begin ?? data.begin, end: end ?? data.end };
}

function niceStep(seconds) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  return steps.find((step) => step >= seconds) ?? 86400 * Math.ceil(seconds / 86400);
}

function formatOffset(seconds, step) {
  if (step < 1) return `${seconds.toFixed(step < 0.01 ? 3 : 2)} s`;
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const pad = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${pad(minutes)}:${pad(rest)}` : `${minutes}:${pad(rest)}`;
}
