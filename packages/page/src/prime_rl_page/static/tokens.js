// The tokens of a rollout, coloured by one of their values.
import { element, formatNumber, hideTip, segments, showTip, visibleString } from "./dom.js";
import { readState, setState } from "./state.js";

// Each mode maps a token to a number between -1 and 1 (null: no colour); `needs` names the columns.
const MODES = {
  difference: { text: "Logprob difference", needs: ["trainer_logprob", "sampler_logprob"],
    value: (sample, i) => sample.trainer_logprob[i] - sample.sampler_logprob[i], limit: () => 1,
    ends: ["trainer less likely", "more likely"], isSigned: true },
  logprob: { text: "Logprob", needs: ["sampler_logprob"], value: (sample, i) => sample.sampler_logprob[i],
    limit: (values) => Math.max(0.1, ...values.map(Math.abs)), ends: ["certain", "unlikely"] },
  version: { text: "Staleness", needs: ["version"], value: (sample, i, step) => (sample.version[i] < 0 ? null : step - sample.version[i]),
    limit: (values) => Math.max(1, ...values), ends: ["on-policy", "oldest"] },
  advantage: { text: "Advantage × mask", needs: ["advantage", "mask"],
    value: (sample, i) => sample.advantage[i] * sample.mask[i] * (sample.masked?.[i] ? 0 : 1),
    limit: (values) => Math.max(1e-6, ...values.map(Math.abs)), ends: ["discouraged", "encouraged"], isSigned: true },
  entropy: { text: "Entropy", needs: ["entropy"], value: (sample, i) => sample.entropy[i], limit: (values) => Math.max(0.1, ...values), ends: ["certain", "uncertain"] },
};
const NEGATIVE = [214, 69, 65], POSITIVE = [47, 133, 222], AMOUNT = [222, 135, 40];

export function tokenSection(rollout) {
  const samples = rollout.samples;
  const wanted = readState().colour;
  const missing = (mode) => MODES[mode].needs.filter((column) => !samples.length || samples[0][column] === undefined);
  const available = Object.keys(MODES).filter((mode) => missing(mode).length === 0);
  const mode = available.includes(wanted) ? wanted : available[0] ?? null;
  const options = Object.entries(MODES).map(([key, { text }]) => [key, text, missing(key).length ? "The run did not write the values of this mode for this step." : ""]);
  const chooser = segments(options, mode, (key) => setState({ colour: key }), "colour of tokens");
  const note = rollout.token_note ? element("p", { class: "muted" }, rollout.token_note) : null;
  if (samples.length === 0) return element("section", {}, element("h2", {}, "Tokens"), note);
  const bodies = samples.map((sample, number) => [samples.length > 1 ? element("div", { class: "group-title" }, `Sample ${number + 1}`) : null,
    tokenText(sample, mode, rollout.step)]);
  return element("section", {}, element("h2", {}, "Tokens"), element("div", { class: "toolbar" }, chooser, mode ? scaleNode(mode) : null), note, bodies);
}

function tokenText(sample, mode, step) {
  const count = sample.token.length;
  const setting = mode === null ? null : MODES[mode];
  const values = [...Array(count).keys()].map((i) => (sample.mask?.[i] && setting ? setting.value(sample, i, step) : null));
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  const limit = setting && known.length ? setting.limit(known) : 1;
  const node = element("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens" });
  for (let i = 0; i < count; i += 1) {
    const text = sample.text ? visibleString(sample.text[i]).replaceAll("␊", "↵\n") : `${sample.token[i]} `;
    const span = element("span", { "data-index": i, class: sample.mask?.[i] ? null : "context" }, text);
    if (values[i] !== null && Number.isFinite(values[i])) {
      span.dataset.value = String(Number(values[i].toPrecision(5)));
      span.style.backgroundColor = tokenColour(values[i] / limit, setting.isSigned);
    }
    node.append(span);
  }
  node.addEventListener("pointermove", (event) => {
    const index = event.target.dataset?.index;
    if (index === undefined) hideTip();
    else showTip(describeToken(sample, Number(index), step), event.clientX, event.clientY);
  });
  node.addEventListener("pointerleave", hideTip);
  if (sample.num_omitted) node.append(element("p", { class: "muted" }, `${sample.num_omitted} further tokens are left out.`));
  return node;
}

export function tokenColour(share, isSigned) {
  const [red, green, blue] = !isSigned ? AMOUNT : share < 0 ? NEGATIVE : POSITIVE;
  return `rgba(${red}, ${green}, ${blue}, ${(0.75 * Math.min(1, Math.abs(share))).toFixed(3)})`;
}

function scaleNode(mode) {
  const { ends, isSigned } = MODES[mode];
  const low = isSigned ? tokenColour(-1, true) : tokenColour(0, false);
  const middle = isSigned ? "transparent, " : "";
  return element("span", { class: "scale" }, ends[0],
    element("i", { style: { background: `linear-gradient(90deg, ${low}, ${middle}${tokenColour(1, isSigned)})` } }), ends[1]);
}

function describeToken(sample, i, step) {
  const lines = [`token ${sample.token[i]}`];
  if (!sample.mask?.[i]) lines.push("not sampled: prompt or tool output");
  const add = (name, value) => value !== undefined && value !== null && lines.push(`${name} ${formatNumber(value, 4)}`);
  if (sample.mask?.[i]) {
    add("sampler logprob", sample.sampler_logprob?.[i]);
    add("trainer logprob", sample.trainer_logprob?.[i]);
    add("ratio", sample.ratio?.[i]);
    add("advantage", sample.advantage?.[i]);
    add("entropy", sample.entropy?.[i]);
    if (sample.version?.[i] >= 0) lines.push(`version ${sample.version[i]} (staleness ${step - sample.version[i]})`);
    if (sample.clipped?.[i]) lines.push("clipped");
    if (sample.masked?.[i]) lines.push("masked by the loss");
  }
  return lines.join("\n");
}
