// Where the data of the page comes from: the server, or the data inside a report.

let reportData = null;

export async function openSource() {
  const node = document.getElementById("report-data");
  if (node === null) return;
  const bytes = Uint8Array.from(atob(node.textContent.trim()), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  reportData = JSON.parse(await new Response(stream).text());
}

export function isReport() {
  return reportData !== null;
}

export async function getJson(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  if (reportData !== null) return reportAnswer(path, query);
  return (await request(`/api/${path}${query.size ? `?${query}` : ""}`)).json();
}

export function postJson(path, body) {
  return request(`/api/${path}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

async function request(url, options = {}) {
  const response = await fetch(url, options);
  if (!response.ok) {
    const detail = await response.json().catch(() => ({}));
    throw new Error(typeof detail.detail === "string" ? detail.detail : `the server answered ${response.status}`);
  }
  return response;
}

function reportAnswer(path, query) {
  const answers = reportData.answers;
  if (path.endsWith("/series")) {
    const all = answers[path].series;
    return { series: Object.fromEntries(query.getAll("metric").filter((name) => name in all).map((name) => [name, all[name]])) };
  }
  if (path.endsWith("/rollouts")) return filterRollouts(answers[path], query);
  if (!(path in answers)) throw new Error("the report does not contain this; it has a sample of the rollouts");
  return answers[path];
}

function filterRollouts(all, query) {
  const get = (name) => (query.has(name) ? query.get(name) : null);
  const text = get("text")?.toLowerCase();
  const matching = all.rows.filter((row) =>
    (get("step_from") === null || row.step >= Number(get("step_from"))) &&
    (get("step_to") === null || row.step <= Number(get("step_to"))) &&
    (get("env") === null || row.env === get("env")) &&
    ["group", "example"].every((name) => get(name) === null || row[name] === Number(get(name))) &&
    (get("reward_from") === null || row.reward >= Number(get("reward_from"))) &&
    (get("reward_to") === null || row.reward <= Number(get("reward_to"))) &&
    (get("staleness_from") === null || row.staleness >= Number(get("staleness_from"))) &&
    (get("truncated") === null || String(row.is_truncated) === get("truncated")));
  const rows = matching.filter((row) => !text || row.search.includes(text));
  const key = get("order") ?? "step";
  const sign = get("ascending") === "true" ? 1 : -1;
  rows.sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)) || b.step - a.step);
  return { ...all, rows, num_matching: matching.length, next_position: null };
}

// One stream of events per tab; `handlers` has a function per event. Returns a function that ends the stream.
export function openStream(run, cursor, handlers, onStatus) {
  if (reportData !== null) return () => {};
  const source = new EventSource(`/api/runs/${encodeURIComponent(run)}/stream?cursor=${encodeURIComponent(cursor)}`);
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.addEventListener("open", () => onStatus(true));
  source.addEventListener("error", () => onStatus(false));
  return () => source.close();
}
