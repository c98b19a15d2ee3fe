// Series of one run that the page has loaded, kept current by the lines of the event stream.
import { getJson } from "./source.js";

const POINTS = 800;

export class SeriesStore {
  constructor(run) {
    this.run = run;
    this.series = new Map();
    this.pending = null;
    this.listeners = new Set();
  }

  // Load some metrics; one request for all calls of the same moment.
  load(names) {
    const missing = names.filter((name) => !this.series.has(name));
    if (missing.length === 0) return Promise.resolve();
    if (this.pending === null) {
      const batch = { names: new Set(), promise: null };
      batch.promise = Promise.resolve().then(async () => {
        this.pending = null;
        const answer = await getJson(`runs/${encodeURIComponent(this.run)}/series`, { metric: [...batch.names], points: POINTS });
        for (const name of batch.names) this.series.set(name, answer.series[name] ?? { step: [], time: [], value: [] });
      });
      this.pending = batch;
    }
    for (const name of missing) this.pending.names.add(name);
    return this.pending.promise;
  }

  get(name) {
    return this.series.get(name) ?? { step: [], time: [], value: [] };
  }

  async reload() {
    const names = [...this.series.keys()];
    this.series.clear();
    await this.load(names);
    this.tellListeners();
  }

  // Append lines of the metric files. Series that are computed by the server are loaded again.
  async append(rows) {
    const changed = new Set();
    let isTooLong = false;
    for (const row of rows) {
      for (const [name, value] of Object.entries(row.values)) {
        const series = this.series.get(`${row.process}:${name}`);
        if (series === undefined) continue;
        while (series.step.length && series.step.at(-1) >= row.step) for (const column of Object.values(series)) column.pop();
        series.step.push(row.step);
        series.time.push(row.time ?? null);
        series.value.push(value);
        series.mean?.push(value);
        isTooLong ||= series.step.length > 3 * POINTS;
        changed.add(`${row.process}:${name}`);
      }
    }
    const computed = [...this.series.keys()].filter((name) => /^(wait_share|efficiency):/.test(name));
    if (isTooLong) return this.reload();
    if (computed.length && changed.size) {
      for (const name of computed) this.series.delete(name);
      await this.load(computed);
    }
    if (changed.size) this.tellListeners();
  }

  tellListeners() {
    for (const listener of this.listeners) listener();
  }
}
