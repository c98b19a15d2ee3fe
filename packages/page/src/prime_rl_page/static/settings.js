// The resolved configuration of the run, as text without secrets.
import { element, replaceChildren, visibleText } from "./dom.js";
import { getJson } from "./source.js";

export class SettingsView {
  constructor(run) {
    this.path = `runs/${encodeURIComponent(run)}/settings`;
    this.node = element("div", { class: "card" });
  }

  async render() {
    const { text } = await getJson(this.path);
    replaceChildren(this.node, element("h2", {}, "Resolved configuration"),
      text ? element("pre", { class: "diff" }, visibleText(text)) : element("p", { class: "empty" }, "This run has written no configuration (yet)."));
  }

  destroy() {}
}
