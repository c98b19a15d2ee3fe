// Figures over the whole run: distributions, gradient flow, pass@k and the loss surface, as heatmaps or surfaces.
import { announce, element, hideTip, replaceChildren, segments, showTip } from "./dom.js";
import { drawPlane, gridOf } from "./figure_plane.js";
import { drawSurface } from "./figure_surface.js";
import { getJson, isReport } from "./source.js";
import { readState, setState } from "./state.js";

const RELOAD_MILLISECONDS = 10_000;
const TURN = 35, TILT = 30;
const MEANINGS = {
  reward_landscape: "Share of the rollouts of a step with each reward, and their mean.",
  advantage_distribution: "Share of the rollouts of a step with each advantage, and their mean.",
  gradient_flow: "Gradient norm of each layer.",
  pass_at_k: "Unbiased pass@k of the groups of each third of the run, with the 5\u00a0% to 95\u00a0% bootstrap band.",
  loss_surface: "Loss of one batch in the plane of the versions' principal directions, and the path of the versions.",
};

export class PlotsView {
  constructor(run) {
    this.run = run;
    this.node = element("div", {}, element("p", { class: "empty" }, "Reading the rollouts …"));
    this.cards = [];
    this.onResize = () => this.draw();
    addEventListener("resize", this.onResize);
  }

  async render() {
    if (this.figures === undefined) await this.load();
    if (!this.isDestroyed) this.build();
  }

  async load() {
    this.loadedAt = performance.now();
    this.figures = (await getJson(`runs/${encodeURIComponent(this.run)}/figures`)).figures;
  }

  // Figures change slowly, so a run that grows is read again after a while only.
  onCounts() {
    if (this.timer !== undefined || this.loadedAt === undefined || isReport()) return;
    this.timer = setTimeout(async () => {
      this.timer = undefined;
      if (this.isDestroyed || this.drag) return;
      await this.load().catch(() => {});
      if (!this.isDestroyed) this.build();
    }, Math.max(0, this.loadedAt + RELOAD_MILLISECONDS - performance.now()));
  }

  build() {
    const focused = document.activeElement?.dataset.figure;
    const isSurface = readState().plots === "3d";
    const toolbar = element("div", { class: "toolbar" },
      segments([["2d", "Heatmaps"], ["3d", "Surfaces"]], isSurface ? "3d" : "2d", (kind) => setState({ plots: kind === "3d" ? "3d" : null }), "kind of plot"),
      isSurface ? element("span", {}, "Drag a surface to turn it.") : null);
    this.cards = Object.entries(this.figures).map(([name, figure]) => this.card(name, figure, isSurface && gridOf(figure) !== null));
    replaceChildren(this.node, toolbar,
      this.cards.length ? element("div", { class: "charts plots" }, this.cards.map((card) => card.node))
        : element("p", { class: "empty" }, "No figures yet. They need rollouts in samples/, or gradient norms of layers (trainer.grad_norm_interval)."),
      this.figures.loss_surface ? null : element("p", { class: "muted" }, "`uv run loss-surface DIRECTORY` adds the loss surface of a run with checkpoints and kept batches."));
    this.draw();
    if (focused) this.node.querySelector(`[data-figure="${focused}"]`)?.focus();
  }

  card(name, figure, isSurface) {
    const title = figure.layout.title.text;
    const canvas = element("canvas", { "aria-label": title, "data-figure": name, role: "img", tabindex: 0 });
    const card = { figure, canvas, isSurface, describe: () => null };
    if (isSurface) this.listenForTurns(canvas);
    else {
      canvas.addEventListener("pointermove", (event) => {
        const box = canvas.getBoundingClientRect();
        const text = card.describe(event.clientX - box.left, event.clientY - box.top);
        if (text) showTip(text, event.clientX, event.clientY);
        else hideTip();
      });
      canvas.addEventListener("pointerleave", hideTip);
      canvas.setAttribute("aria-description", "Arrow keys read the values.");
      canvas.addEventListener("blur", hideTip);
      canvas.addEventListener("keydown", (event) => this.moveByKey(card, event));
    }
    card.node = element("div", { class: "card chart" },
      element("div", { class: "head" }, element("span", { class: "title" }, title), element("span", { class: "unit" }, MEANINGS[name] ?? "")), canvas);
    return card;
  }

  moveByKey(card, event) {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const { columns, rows, place } = card.describe;
    if (!move || !place) return;
    event.preventDefault();
    const inside = (value, count) => Math.min(count - 1, Math.max(0, value));
    card.at = card.at ? [inside(card.at[0] + move[0], columns), inside(card.at[1] + move[1], rows)] : [columns - 1, rows - 1];
    const [[x, y], box] = [place(...card.at), card.canvas.getBoundingClientRect()];
    const text = card.describe(x, y) ?? "no value";
    showTip(text, box.left + x, box.top + y);
    announce(text);
  }

  listenForTurns(canvas) {
    canvas.setAttribute("aria-description", "Arrow keys turn the surface.");
    canvas.addEventListener("keydown", (event) => {
      const change = { ArrowLeft: [-5, 0], ArrowRight: [5, 0], ArrowUp: [0, 5], ArrowDown: [0, -5] }[event.key];
      if (!change) return;
      event.preventDefault();
      const { turn, tilt } = this.view();
      setState({ turn: turn + change[0], tilt: Math.min(85, Math.max(5, tilt + change[1])) }, { replace: true });
    });
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.clientX, y: event.clientY, ...this.view() };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.drag) return;
      const tilt = Math.min(85, Math.max(5, this.drag.tilt + (event.clientY - this.drag.y) / 3));
      this.turned = { turn: Math.round(this.drag.turn + (event.clientX - this.drag.x) / 2), tilt: Math.round(tilt) };
      this.draw();
    });
    canvas.addEventListener("pointerup", () => {
      const { turned } = this;
      [this.drag, this.turned] = [null, null];
      if (turned) setState(turned, { replace: true });
    });
  }

  view() {
    const { turn, tilt } = readState();
    return this.turned ?? { turn: Number(turn ?? TURN), tilt: Number(tilt ?? TILT) };
  }

  draw() {
    const { turn, tilt } = this.view();
    for (const card of this.cards) {
      if (!card.canvas.isConnected) continue;
      if (card.isSurface) drawSurface(card.canvas, card.figure, turn, tilt);
      else card.describe = drawPlane(card.canvas, card.figure);
    }
  }

  destroy() {
    this.isDestroyed = true;
    clearTimeout(this.timer);
    hideTip();
    removeEventListener("resize", this.onResize);
  }
}
