// Drawing on a canvas: its size in device pixels, axes, ticks and the colour scale of figures.
import { colour, formatNumber } from "./dom.js";

// Viridis, at nine equal distances.
const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]];
const FONT = "11px system-ui, sans-serif";

export function prepareCanvas(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth || 600;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

export function viridis(share) {
  const place = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return VIRIDIS[low].map((value, i) => Math.round(value + (place - low) * (VIRIDIS[low + 1][i] - value)));
}

export function niceTicks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-6; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

// The rectangle of a plot in a canvas. `xTicks` and `yTicks` are pairs of a share of the rectangle and a text.
export function drawAxes(context, box, { xTicks, yTicks, xLabel, yLabel }) {
  context.font = FONT;
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("line");
  context.strokeRect(box.left - 0.5, box.top - 0.5, box.width + 1, box.height + 1);
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const [share, text] of xTicks) context.fillText(text, box.left + share * box.width, box.top + box.height + 5);
  context.fillText(xLabel, box.left + box.width / 2, box.top + box.height + 20);
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const [share, text] of yTicks) context.fillText(text, box.left - 6, box.top + (1 - share) * box.height);
  context.save();
  context.translate(9, box.top + box.height / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(yLabel, 0, 0);
  context.restore();
}

export function drawColourBar(context, x, top, height, low, high, label) {
  for (let i = 0; i < height; i += 1) {
    context.fillStyle = `rgb(${viridis(1 - i / height)})`;
    context.fillRect(x, top + i, 9, 1.5);
  }
  context.font = FONT;
  context.fillStyle = colour("muted");
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(formatNumber(high), x + 13, top + 4);
  context.fillText(formatNumber(low), x + 13, top + height - 4);
  context.save();
  context.translate(x + 20, top + height / 2);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(label, 0, 0);
  context.restore();
}

export function extent(rows) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of rows) for (const value of row) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : [0, 1];
}
