// State of the processes: what `doctor` reports.
import { element, formatBytes, formatClock, formatSeconds, replaceChildren, visibleString } from "./dom.js";
import { getJson, isReport } from "./source.js";

const INTERVAL_MS = 5000;

export class HealthView {
  constructor(run) {
    this.run = run;
    this.node = element("div", {}, element("p", { class: "empty" }, "Observing the heartbeats …"));
    this.timer = null;
  }

  async render() {
    clearTimeout(this.timer);
    try {
      const health = await getJson(`runs/${encodeURIComponent(this.run)}/health`);
      if (this.isDestroyed) return;
      replaceChildren(this.node, healthCards(health));
    } catch (error) {
      replaceChildren(this.node, element("p", { class: "empty" }, `Health is not available: ${error.message}`));
    }
    if (!isReport() && !this.isDestroyed) this.timer = setTimeout(() => this.render(), INTERVAL_MS);
  }

  destroy() {
    this.isDestroyed = true;
    clearTimeout(this.timer);
  }
}

function healthCards(health) {
  const problems = health.problems.map((problem) => element("div", { class: "message", style: { borderColor: "var(--bad)" } },
    element("div", { class: "bad" }, visibleString(problem.text)),
    problem.hint ? element("div", { class: "muted" }, visibleString(problem.hint)) : null));
  const verdict = element("div", { class: "card" },
    element("h2", {}, "State: ", element("span", { class: health.healthy ? "good" : "bad" }, health.state)),
    problems.length ? problems : element("div", { class: "muted" }, "No process has failed or stalled."),
    (health.notes ?? []).map((note) => element("div", { class: "message muted" }, visibleString(note))),
    health.chain?.length ? element("div", { class: "muted" }, `Waiting: ${health.chain.map(visibleString).join(" ← ")}`) : null);
  return [verdict, runCard(health), processCard(health), element("div", { class: "columns" }, versionCard(health), diskCard(health), eventCard(health))];
}

// Of a trainer of several runs.
function runCard(health) {
  if (!health.runs?.length) return null;
  const rows = health.runs.map((run) => element("tr", {}, element("td", {}, visibleString(run.name)),
    element("td", { class: run.healthy ? "good" : "bad" }, visibleString(run.summary)),
    element("td", { class: "number" }, `${run.steps.trained}${run.steps.max_steps ? ` / ${run.steps.max_steps}` : ""}`)));
  return element("div", { class: "card", style: { marginTop: "12px" } }, element("h2", {}, "Runs"),
    element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "run"), element("th", {}, "state"), element("th", { class: "number" }, "trained"))), element("tbody", {}, rows)));
}

function processCard(health) {
  if (!health.processes?.length) return null;
  const states = { alive: "good", ended: "", silent: "warn", unreachable: "warn" };
  const rows = health.processes.map((process) => element("tr", {},
    element("td", {}, process.name), element("td", { class: "number" }, process.pid), element("td", {}, visibleString(process.host)),
    element("td", {}, element("span", { class: `tag ${states[process.state] ?? "bad"}`, title: process.why }, process.state)),
    element("td", {}, visibleString(process.phase)),
    element("td", { class: "number" }, process.state === "ended" ? "" : formatSeconds(process.phase_s)),
    element("td", {}, process.waiting_for ?? "")));
  return element("div", { class: "card", style: { marginTop: "12px" } }, element("h2", {}, "Processes"),
    element("table", {}, element("thead", {}, element("tr", {},
      ["process", "pid", "node", "state", "phase", "for", "waiting for"].map((name) =>
        element("th", { class: name === "pid" || name === "for" ? "number" : null }, name)))),
      element("tbody", {}, rows)));
}

function versionCard(health) {
  const steps = health.steps ?? {};
  const fact = (name, value) => (value === null || value === undefined ? null : element("tr", {}, element("td", { class: "muted name" }, name), element("td", {}, String(value))));
  const bound = steps.async_level === null || steps.async_level === undefined ? "" : ` (limit ${steps.async_level})`;
  return element("div", { class: "card" }, element("h2", {}, "Versions"), element("table", {}, element("tbody", {},
    fact("trained steps", steps.trained), fact("shipped batches", steps.shipped), fact("newest published version", steps.published),
    (health.servers ?? []).map((server) => fact(server.name, `version ${server.version}${server.since ? ` since ${formatClock(server.since)}` : ""}`)),
    fact("staleness", steps.staleness === null || steps.staleness === undefined ? null : `${steps.staleness}${bound}`),
    fact("checkpoints", health.checkpoints?.complete?.length ? health.checkpoints.complete.slice(-8).join(", ") : "none"),
    Object.entries(health.checkpoints?.broken ?? {}).map(([name, why]) => fact(name, why)))));
}

function diskCard(health) {
  if (!health.disk) return null;
  const used = Object.entries(health.disk.used).slice(0, 8);
  const most = Math.max(1, ...used.map(([, bytes]) => bytes));
  return element("div", { class: "card" }, element("h2", {}, "Disk"),
    element("div", { class: "muted" }, `${formatBytes(health.disk.free)} free`),
    used.map(([name, bytes]) => element("div", { style: { marginTop: "8px" } },
      element("div", { style: { display: "flex", justifyContent: "space-between" } }, element("span", {}, name), element("span", { class: "muted" }, formatBytes(bytes))),
      element("div", { class: "bar" }, element("div", { style: { width: `${(100 * bytes) / most}%` } })))));
}

function eventCard(health) {
  if (!health.events?.length) return null;
  const bad = new Set(["failed", "silent", "stuck", "stopped", "killed"]);
  return element("div", { class: "card" }, element("h2", {}, "Latest events"), element("table", {}, element("tbody", {},
    [...health.events].reverse().map((event) => element("tr", {},
      element("td", { class: "muted" }, formatClock(event.time)),
      element("td", {}, visibleString(event.name ?? "")),
      element("td", { class: bad.has(event.event) || event.code ? "bad" : null }, visibleString(event.event ?? "")),
      element("td", { class: "muted anywhere" }, visibleString(event.detail ?? "")))))));
}
