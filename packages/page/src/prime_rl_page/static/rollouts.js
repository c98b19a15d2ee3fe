// Finds rollouts by filters, and shows one with its group, conversation and tokens.
import { element, formatNumber, formatPercent, replaceChildren, visibleString, visibleText } from "./dom.js";
import { getJson, isReport, postJson } from "./source.js";
import { readState, setState, stateUrl } from "./state.js";
import { tokenSection } from "./tokens.js";

const FILTERS = ["evaluation", "step_from", "step_to", "env", "reward_from", "reward_to", "staleness_from", "truncated", "group", "example", "noted", "text", "order", "ascending"];
const COLUMNS = [["step", "Step"], [null, "Env"], [null, "Group"], ["reward", "Reward"], ["advantage", "Advantage"], ["staleness", "Stale"], [null, "Cut"], [null, "Last message"]];
const PAGE_SIZE = 60;

export class RolloutView {
  constructor(run) {
    this.run = run;
    this.rows = [];
    this.envs = [];
    this.listNode = element("div", { class: "card" });
    this.detailNode = element("div");
    this.node = element("div", { class: "browser" }, this.listNode, this.detailNode);
  }

  path(rest) {
    return `runs/${encodeURIComponent(this.run)}/rollouts${rest}`;
  }

  async render() {
    const state = readState();
    const key = JSON.stringify(FILTERS.map((name) => state[name]));
    if (key !== this.filterKey) {
      this.filterKey = key;
      await Promise.all([this.search(true), this.showDetail()]);
    } else {
      this.showList();
      await this.showDetail();
    }
  }

  onCounts(counts) {
    if (this.newest !== undefined && this.newest !== counts.newest_samples && (this.listTable?.scrollTop ?? 0) === 0) {
      if (this.rows.length <= PAGE_SIZE) this.search(true);
    }
    this.newest = counts.newest_samples;
  }

  async search(fromStart) {
    const state = readState();
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const parameters = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
    if (fromStart) [this.rows, this.next] = [[], 0];
    let found = [];
    let answer;
    do {
      answer = await getJson(this.path(""), { ...parameters, position: this.next, count: PAGE_SIZE });
      if (turn !== this.turn) return;
      found = found.concat(answer.rows);
      this.next = answer.next_position;
      this.answer = answer;
      [this.envs, this.evaluations] = [answer.envs, answer.evaluations ?? []];
      // A text search reads a part of the files per request; an index that grows moves the positions.
      if (answer.num_indexed < answer.num_files && fromStart && !state.text) {
        this.rows = found;
        this.showList();
        [found, this.next] = [[], 0];
      }
    } while ((this.next !== null && found.length < 1 && answer.num_files) || (answer.num_indexed < answer.num_files && found.length < PAGE_SIZE));
    this.rows = this.rows.length && fromStart ? found : this.rows.concat(found);
    this.showList();
  }

  filters() {
    const state = readState();
    const set = (name) => ({ target }) => {
      target.defaultValue = target.value;  // entered
      setState({ [name]: target.value, step: state.step, group_id: state.group_id });
    };
    const number = (name, label, step = 1) => element("label", {}, label, element("input", { type: "number", step, value: state[name] ?? "", onchange: set(name), name }));
    const options = (name, label, values) => element("label", {}, label, element("select", { onchange: set(name), name },
      values.map(([value, text]) => element("option", { value, selected: (state[name] ?? "") === value }, visibleString(text)))));
    const active = FILTERS.some((name) => state[name] !== undefined);
    return element("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      this.evaluations?.length || state.evaluation ? element("label", {}, "Rollouts of", element("select", { name: "evaluation",
        onchange: (event) => setState({ ...Object.fromEntries(FILTERS.map((one) => [one, null])), evaluation: event.target.value, rollout: null }) },
      [["", "training"], ...this.evaluations.map((one) => [one, `evaluation ${one}`])].map(([value, text]) => element("option", { value, selected: (state.evaluation ?? "") === value }, visibleString(text))))) : null,
      element("label", {}, "Text", element("input", { type: "search", name: "text", value: state.text ?? "", placeholder: "in the conversation", onchange: set("text") })),
      number("step_from", "Step from"), number("step_to", "to"),
      this.envs.length > 1 || state.env ? options("env", "Environment", [["", "all"], ...this.envs.map((env) => [env, env])]) : null,
      number("reward_from", "Reward from", 0.05), number("reward_to", "to", 0.05), number("staleness_from", "Staleness from"),
      options("truncated", "Truncated", [["", "all"], ["true", "yes"], ["false", "no"]]),
      isReport() ? null : options("noted", "Notes", [["", "all"], ["true", "with a note"]]),
      state.group ? number("group", "Group") : null, state.example ? number("example", "Example") : null,
      this.worstLink(),
      isReport() ? null : element("a", { href: `/api/runs/${encodeURIComponent(this.run)}/notes.jsonl`, download: "notes.jsonl" }, "Notes as JSONL"),
      active ? element("button", { type: "button", onclick: () => setState(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "Clear") : null);
  }

  worstLink() {
    const newest = this.answer?.newest_step;
    if (newest === null || newest === undefined) return null;
    const { evaluation } = readState();
    const changes = { ...Object.fromEntries(FILTERS.map((name) => [name, null])), evaluation, step_from: newest, step_to: newest, order: "reward", ascending: "true" };
    return element("a", { href: stateUrl(changes), onclick: (event) => {
      event.preventDefault();
      setState(changes);
    } }, evaluation ? "Worst of the last version" : "Worst of the last step");
  }

  showList() {
    const { answer } = this;
    if (answer === undefined) return;
    const state = readState();
    const order = state.order ?? "step";
    const direction = state.ascending === "true" ? "ascending" : "descending";
    const head = COLUMNS.map(([key, text]) => element("th", { "aria-sort": key === order ? direction : null, class: ["reward", "advantage", "staleness"].includes(key) ? "number" : null },
      key === null ? text : element("button", { type: "button", onclick: () => setState({ order: key === "step" ? null : key,
        ascending: order === key && state.ascending !== "true" ? "true" : null }) }, text + (order === key ? (state.ascending === "true" ? " ↑" : " ↓") : ""))));
    const selected = state.rollout;
    const rows = this.rows.map((row, number) => {
      const id = rolloutId(row);
      return element("tr", { tabindex: 0, "data-rollout": id, "aria-selected": String(id === selected), onclick: () => setState({ rollout: id }),
        onkeydown: (event) => this.chooseByKey(event, number) },
      element("td", {}, row.step), element("td", {}, visibleString(row.env)), element("td", { class: "muted" }, `${row.group}·${row.rollout}`),
      element("td", { class: "number" }, formatNumber(row.reward)), element("td", { class: `number ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : ""}` }, signed(row.advantage)),
      element("td", { class: "number" }, row.staleness ?? "–"), element("td", {}, row.is_truncated ? element("span", { class: "tag warn" }, "cut") : ""),
      element("td", { class: "preview" }, row.is_noted ? element("span", { title: "has a note" }, "⚑ ") : null, visibleString(row.preview ?? "")));
    });
    const partial = answer.num_indexed < answer.num_files ? ` · ${formatPercent(answer.num_indexed / answer.num_files)} of the files read` : "";
    const total = `${formatNumber(answer.num_matching)} ${answer.num_matching === 1 ? "rollout" : "rollouts"}`;
    const searched = this.next === null ? "" : `the first ${formatNumber(this.next)} of `;  // "More" searches the next ones
    const count = state.text ? `${formatNumber(this.rows.length)} found in ${searched}${total}` : total;
    const damaged = answer.num_damaged ? ` · ${answer.num_damaged} damaged lines left out` : "";
    const scroll = this.listTable?.scrollTop ?? 0;
    const { name, dataset, value, defaultValue } = document.activeElement ?? {};
    const focused = this.chosenByKey ?? dataset?.rollout;
    this.chosenByKey = null;
    this.listTable = element("div", { class: "list" }, this.rows.length
      ? element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows))
      : element("p", { class: "empty" }, answer.num_files ? "No rollout matches the filters." : "This run has no samples/ (yet)."),
    this.next !== null && this.rows.length ? element("button", { type: "button", style: { margin: "10px 0" }, onclick: () => this.search(false) }, "More") : null);
    replaceChildren(this.listNode, this.filters(), element("div", { class: "muted", style: { marginBottom: "6px" } }, count + partial + damaged), this.listTable);
    this.listTable.scrollTop = scroll;
    const filter = name ? this.listNode.querySelector(`[name="${name}"]`) : null;
    filter?.focus();
    // Text that is not entered yet. The browser notices its entry only if it is set after the focus.
    if (filter && defaultValue !== undefined && value !== defaultValue) filter.value = value;
    if (!name && focused) this.listNode.querySelector(`[data-rollout="${focused}"]`)?.focus();
  }

  chooseByKey(event, number) {
    const row = this.rows[{ Enter: number, ArrowDown: number + 1, ArrowUp: number - 1 }[event.key]];
    if (row === undefined) return;
    event.preventDefault();
    this.chosenByKey = rolloutId(row);
    setState({ rollout: this.chosenByKey }, { replace: event.key !== "Enter" });
  }

  async showDetail() {
    const { rollout: id, evaluation } = readState();
    const key = `${evaluation ?? ""} ${id}`;
    if (!id) {
      replaceChildren(this.detailNode, element("div", { class: "card" }, element("p", { class: "empty" }, "Choose a rollout to read its conversation and tokens.")));
      return;
    }
    const [step, group, rollout] = id.split(".").map(Number);
    try {
      if (this.detail?.key !== key) this.detail = { key, isEvaluation: Boolean(evaluation), ...(await getJson(this.path(`/${step}/${group}/${rollout}`), { evaluation })) };
      if (readState().rollout !== id) return;
      replaceChildren(this.detailNode, detailCard(this.detail, isReport() ? null : this.noteForm(this.detail), isReport() ? null : this.historySection(this.detail)));
    } catch (error) {
      replaceChildren(this.detailNode, element("div", { class: "card" }, element("p", { class: "empty" }, `Rollout ${visibleString(id)} cannot be shown: ${error.message}`)));
    }
  }

  noteForm(detail) {
    const { note } = detail;
    const status = element("span", { class: "muted", role: "status" });
    const flag = element("input", { type: "checkbox", checked: note.is_flagged });
    const text = element("input", { type: "search", name: "note", maxlength: 4000, value: note.text, placeholder: "why is this rollout of interest?" });
    const save = async () => {
      detail.note = { is_flagged: flag.checked, text: text.value };
      const { evaluation } = readState();
      try {
        await postJson(`runs/${encodeURIComponent(this.run)}/notes`, { evaluation: evaluation ?? null, step: detail.step, group: detail.group, rollout: detail.rollout, ...detail.note });
        status.textContent = "saved in samples/notes.jsonl";
        this.search(true);
      } catch (error) {
        status.textContent = `not saved: ${error.message}`;
      }
    };
    for (const input of [flag, text]) input.addEventListener("change", save);
    return element("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
      element("label", {}, flag, "Flag"), element("label", { class: "space" }, "Note", text), status);
  }

  historySection(detail) {
    if (detail.example === null) return null;
    const body = element("div");
    const show = async () => {
      if (body.childElementCount || !section.open) return;
      body.append(element("p", { class: "muted" }, "Reading the rollouts of this prompt …"));
      try {
        const { evaluation } = readState();
        const { steps } = await getJson(this.path(`/${detail.step}/${detail.group}/${detail.rollout}/history`), { evaluation });
        replaceChildren(body, element("div", { class: "history", tabindex: 0, role: "group", "aria-label": "replies over the steps" }, steps.map((one) => historyColumn(one, detail))),
          element("a", { href: stateUrl({ example: detail.example, env: detail.env }), onclick: (event) => {
            event.preventDefault();
            setState({ example: detail.example, env: evaluation ? null : detail.env, step_from: null, step_to: null });
          } }, "All rollouts of this prompt"));
      } catch (error) {
        replaceChildren(body, element("p", { class: "muted" }, `The other steps cannot be shown: ${error.message}`));
      }
    };
    const section = element("details", { class: "over-steps", ontoggle: show }, element("summary", {}, "The same prompt over the steps"), body);
    return section;
  }

  destroy() {
    this.turn = -1;
  }
}

function rolloutId(row) {
  return `${row.step}.${row.group}.${row.rollout}`;
}

function signed(value) {
  return value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${formatNumber(value)}`;
}

function historyColumn(one, detail) {
  const tags = { added: "ins", removed: "del" };
  return element("div", {}, element("h3", {}, `${detail.isEvaluation ? "Version" : "Step"} ${one.step}${rolloutId(one) === rolloutId(detail) ? " (shown above)" : ""}`),
    element("div", { class: "facts" }, `reward ${formatNumber(one.reward)} · mean of ${one.num_rollouts} ${formatNumber(one.mean_reward)}`),
    element("div", { class: "text" }, one.changes.map(([kind, text]) => (tags[kind] ? element(tags[kind], {}, visibleText(text)) : visibleText(text)))));
}

// What the reward consists of: the value of each reward function times its weight.
function rewardTable({ metrics, weights }) {
  const names = Object.keys(weights).filter((name) => typeof metrics[name] === "number").slice(0, 40);
  if (names.length === 0) return null;
  const cell = (value) => element("td", { class: "number" }, formatNumber(value));
  return element("table", { class: "rewards" }, element("thead", {}, element("tr", {}, element("th", {}, "reward function"), ["value", "weight", "product"].map((name) => element("th", { class: "number" }, name)))),
    element("tbody", {}, names.map((name) => element("tr", {}, element("td", {}, visibleString(name)), cell(metrics[name]), cell(weights[name]), cell(metrics[name] * weights[name])))));
}

function detailCard(detail, noteForm, history) {
  const id = rolloutId(detail);
  const group = detail.all_rollouts.map((one) => element("a", { href: stateUrl({ rollout: rolloutId(one) }), "aria-current": String(rolloutId(one) === id),
    onclick: (event) => {
      event.preventDefault();
      setState({ rollout: rolloutId(one) });
    } }, formatNumber(one.reward), element("small", { class: one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : "muted" }, signed(one.advantage))));
  const fact = (name, value) => (value === null || value === undefined ? null : element("span", {}, `${name} `, element("b", {}, value)));
  const versions = detail.min_version === null ? null : detail.min_version === detail.max_version ? detail.min_version : `${detail.min_version}–${detail.max_version}`;
  const metrics = Object.entries(detail.metrics).filter(([name]) => !(name in detail.weights)).slice(0, 24).map(([name, value]) => fact(visibleString(name), typeof value === "number" ? formatNumber(value) : visibleString(String(value))));
  return element("div", { class: "card" },
    element("h2", {}, detail.isEvaluation ? `Rollout ${detail.rollout} of example ${detail.group}, version ${detail.step}`
      : `Rollout ${detail.rollout} of group ${detail.group}, batch ${detail.step}`),
    element("div", { class: "facts" }, fact("environment", visibleString(detail.env)), detail.isEvaluation ? null : fact("example", detail.example), fact("reward", formatNumber(detail.reward)), fact("advantage", signed(detail.advantage)),
      fact("versions", versions), fact("staleness", detail.staleness), detail.is_truncated ? element("span", { class: "tag warn" }, "truncated") : null),
    metrics.length ? element("div", { class: "facts", style: { marginTop: "4px", fontSize: "12px" } }, metrics) : null,
    rewardTable(detail), noteForm,
    element("div", { class: "group", role: "group", "aria-label": "rollouts of the group" }, group),
    element("h2", {}, "Conversation"), detail.messages.map(messageNode),
    detail.answer === null || detail.answer === undefined ? null : [element("h2", {}, "Reference answer"), element("div", { class: "text answer" }, visibleText(detail.answer))],
    history,
    tokenSection(detail));
}

function messageNode(message) {
  const known = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "";
  return element("div", { class: `message ${known}` }, element("div", { class: "role" }, visibleString(message.role)),
    message.reasoning ? element("details", {}, element("summary", { class: "muted" }, "Reasoning"), element("div", { class: "text muted" }, visibleText(message.reasoning))) : null,
    splitCalls(message.content).map((part) => (part.call === undefined ? (part.text ? element("div", { class: "text" }, visibleText(part.text)) : null) : callNode("tool call", part.call))),
    message.tool_calls.map((call) => callNode(call.name, call.arguments)),
    message.num_omitted ? element("div", { class: "muted" }, `${formatNumber(message.num_omitted)} further characters are left out.`) : null);
}

function callNode(name, body) {
  return element("div", { class: "call text" }, element("b", {}, visibleString(name)), "\n", visibleText(body));
}

// Tool calls in the model's own notation (Hermes): <tool_call>{…}</tool_call>
function splitCalls(content) {
  const parts = [];
  let rest = content;
  for (let at = rest.indexOf("<tool_call>"); at >= 0 && parts.length < 200; at = rest.indexOf("<tool_call>")) {
    const end = rest.indexOf("</tool_call>", at);
    if (end < 0) break;
    parts.push({ text: rest.slice(0, at) }, { call: rest.slice(at + "<tool_call>".length, end).trim() });
    rest = rest.slice(end + "</tool_call>".length);
  }
  return [...parts, { text: rest }];
}
