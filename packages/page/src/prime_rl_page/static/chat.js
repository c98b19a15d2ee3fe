// A chat with the policy that the run's server samples from, while it runs. Replies are shown as text only.
import { element, replaceChildren, visibleText } from "./dom.js";
import { getJson } from "./source.js";

const INTERVAL_MS = 5000;

export class ChatView {
  constructor(run) {
    this.path = `runs/${encodeURIComponent(run)}/chat`;
    this.messages = [];
    this.log = element("div", { role: "log", "aria-label": "conversation" });
    this.state = element("p", { class: "muted", role: "status" }, "Looking for the server of the run …");
    this.input = element("input", { "aria-label": "message", autocomplete: "off", placeholder: "Message", style: { width: "100%" } });
    this.button = element("button", { disabled: true }, "Send");
    const form = element("form", { onsubmit: (event) => this.send(event) }, this.input, this.button,
      element("button", { type: "button", onclick: () => this.reset() }, "New conversation"));
    this.node = element("div", { class: "card" }, this.state, this.log, form);
  }

  async render() {
    clearTimeout(this.timer);
    const { step } = await getJson(this.path).catch(() => ({ step: null }));
    if (this.isDestroyed) return;
    const isServed = step !== null;
    const text = isServed ? `The server samples from step ${step}.`
      : "The server of the run does not run. On a terminal, uv run chat starts one and compares with the base model.";
    if (this.state.textContent !== text) this.state.textContent = text;  // a screen reader reads each change
    this.isServed = isServed;
    this.button.disabled = !isServed || this.isBusy;
    this.timer = setTimeout(() => this.render(), INTERVAL_MS);
  }

  async send(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    if (!text || this.isBusy || !this.isServed) return;
    this.isBusy = this.button.disabled = true;
    this.input.value = "";
    const messages = [...this.messages, { role: "user", content: text }];
    this.show("user", text);
    const node = this.show("assistant", "…");
    try {
      const response = await fetch(`/api/${this.path}`, {
        method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(messages),
      });
      if (!response.ok) throw new Error((await response.json().catch(() => ({}))).detail ?? `the server answered ${response.status}`);
      let reply = "";
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        reply += part.value;
        replaceChildren(node, element("b", {}, `step ${response.headers.get("x-policy-step")}: `), visibleText(reply));
      }
      if (!reply) replaceChildren(node, element("b", {}, `step ${response.headers.get("x-policy-step")}: `), element("i", {}, "an empty reply"));
      this.messages = [...messages, { role: "assistant", content: reply }];
    } catch (error) {
      replaceChildren(node, element("span", { class: "bad" }, visibleText(`No reply: ${error.message}`)));
    }
    this.isBusy = false;
    this.button.disabled = !this.isServed;
  }

  show(role, text) {
    const node = element("div", { class: "message" }, element("b", {}, `${role}: `), visibleText(text));
    this.log.append(node);
    return node;
  }

  reset() {
    this.messages = [];
    replaceChildren(this.log);
  }

  destroy() {
    this.isDestroyed = true;
    clearTimeout(this.timer);
  }
}
