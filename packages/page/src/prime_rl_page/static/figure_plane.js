// Figures in two dimensions, from plotly's JSON: a heatmap or contour with lines over it, or curves with bands.
import { drawAxes, drawColourBar, extent, niceTicks, prepareCanvas, viridis } from "./canvas.js";
import { colour, distinctLabels, formatNumber } from "./dom.js";

export const FIGURE_HEIGHT = 270;

export function gridOf(figure) {
  return figure.data.find((trace) => Array.isArray(trace.z)) ?? null;
}

export function axisTitle(figure, name) {
  return figure.layout?.[name]?.title?.text ?? "";
}

// Where a value lies among ascending ones, as a fraction of an index.
function indexOf(values, value) {
  if (values.length < 2) return 0;
  let i = values.findIndex((one) => one >= value);
  if (i < 0) i = values.length - 1;
  i = Math.max(1, i);
  return i - 1 + (value - values[i - 1]) / (values[i] - values[i - 1]);
}

// The ticks of an axis whose cells have equal widths.
function cellTicks(values, count) {
  const size = values.length;
  const inside = size > 1 && values.every((value, i) => i === 0 || Math.abs(value - values[i - 1] - (values[1] - values[0])) < 1e-6 * Math.abs(values[1] - values[0]));
  const chosen = inside && size > count
    ? niceTicks(values[0], values[size - 1], count)
    : [...values.keys()].filter((i) => i % Math.ceil(size / count) === 0).map((i) => values[i]);
  return labelled(chosen, (value) => (indexOf(values, value) + 0.5) / size);
}

function labelled(values, shareOf) {
  const labels = distinctLabels(values, (value, further) => formatNumber(value, 3 + further));
  return values.map((value, i) => [shareOf(value), labels[i]]);
}

export function drawPlane(canvas, figure) {
  const grid = gridOf(figure);
  return grid === null ? drawCurves(canvas, figure) : drawGrid(canvas, figure, grid);
}

function drawGrid(canvas, figure, grid) {
  const { context, width } = prepareCanvas(canvas, FIGURE_HEIGHT);
  const box = { left: 56, top: 10, width: width - 56 - 64, height: FIGURE_HEIGHT - 10 - 40 };
  const [columns, rows] = [grid.x.length, grid.y.length];
  const [low, high] = extent(grid.z);
  const cells = new OffscreenCanvas(columns, rows);
  const pixels = cells.getContext("2d");
  const image = pixels.createImageData(columns, rows);
  grid.z.forEach((row, y) => row.forEach((value, x) => {
    if (value !== null) image.data.set([...viridis((value - low) / (high - low || 1)), 255], 4 * ((rows - 1 - y) * columns + x));
  }));
  pixels.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = grid.type === "contour";
  context.drawImage(cells, box.left, box.top, box.width, box.height);
  const place = (x, y) => [box.left + ((indexOf(grid.x, x) + 0.5) / columns) * box.width, box.top + (1 - (indexOf(grid.y, y) + 0.5) / rows) * box.height];
  drawAxes(context, box, { xTicks: cellTicks(grid.x, box.width / 70), yTicks: cellTicks(grid.y, 7), xLabel: axisTitle(figure, "xaxis"), yLabel: axisTitle(figure, "yaxis") });
  drawColourBar(context, box.left + box.width + 10, box.top, box.height, low, high, grid.colorbar?.title?.text ?? "");
  for (const line of figure.data.filter((trace) => trace.type === "scatter")) {
    const points = line.x.map((x, i) => place(x, line.y[i]));
    drawLine(context, points, "white", line.mode.includes("markers"));
    context.fillStyle = "white";
    context.textAlign = "center";
    if (line.text) points.forEach(([x, y], i) => context.fillText(line.text[i], x, y - 9));
  }
  const describe = (x, y) => {
    const [column, row] = [Math.floor(((x - box.left) / box.width) * columns), Math.floor((1 - (y - box.top) / box.height) * rows)];
    const value = grid.z[row]?.[column];
    if (value === undefined || value === null) return null;
    const name = (axis, one) => `${axisTitle(figure, axis)} ${formatNumber(one, 4)}`;
    return `${name("xaxis", grid.x[column])}\n${name("yaxis", grid.y[row])}\n${grid.colorbar?.title?.text ?? "value"} ${formatNumber(value, 4)}`;
  };
  return Object.assign(describe, { columns, rows, place: (column, row) => [box.left + ((column + 0.5) / columns) * box.width, box.top + (1 - (row + 0.5) / rows) * box.height] });
}

function drawCurves(canvas, figure) {
  const { context, width } = prepareCanvas(canvas, FIGURE_HEIGHT);
  const box = { left: 56, top: 26, width: width - 56 - 14, height: FIGURE_HEIGHT - 26 - 40 };
  const isLog = figure.layout.xaxis?.type === "log";
  const scale = (x) => (isLog ? Math.log2(x) : x);
  const all = [...new Set(figure.data.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const [first, last] = [scale(all[0]), scale(all.at(-1))];
  const shareX = (x) => (last > first ? (scale(x) - first) / (last - first) : 0.5);
  const [low, high] = figure.layout.yaxis?.range ?? extent(figure.data.map((trace) => trace.y));
  const shareY = (y) => (y - low) / (high - low || 1);
  const place = (x, y) => [box.left + shareX(x) * box.width, box.top + (1 - shareY(y)) * box.height];
  drawAxes(context, box, {
    xTicks: labelled(all, shareX), yTicks: labelled(niceTicks(low, high, 5), shareY),
    xLabel: axisTitle(figure, "xaxis"), yLabel: axisTitle(figure, "yaxis"),
  });
  let left = box.left;
  figure.data.forEach((trace, number) => {
    const points = trace.x.map((x, i) => place(x, trace.y[i]));
    if (trace.fill === "tonexty") fillBetween(context, points, figure.data[number - 1].x.map((x, i) => place(x, figure.data[number - 1].y[i])), trace.fillcolor);
    if (!trace.name) return;
    drawLine(context, points, trace.line.color, true);
    context.textAlign = "left";
    context.fillStyle = trace.line.color;
    context.fillRect(left, 8, 9, 9);
    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    context.fillText(trace.name, left + 14, 13);
    left += 30 + context.measureText(trace.name).width;
  });
  const describe = (x) => {
    const nearest = all.toSorted((a, b) => Math.abs(place(a, low)[0] - x) - Math.abs(place(b, low)[0] - x))[0];
    const values = figure.data.filter((trace) => trace.name && trace.x.includes(nearest)).map((trace) => `${trace.name} ${formatNumber(trace.y[trace.x.indexOf(nearest)], 4)}`);
    return [`${axisTitle(figure, "xaxis")} ${formatNumber(nearest)}`, ...values].join("\n");
  };
  return Object.assign(describe, { columns: all.length, rows: 1, place: (column) => place(all[column], (low + high) / 2) });
}

function drawLine(context, points, style, hasMarkers) {
  context.strokeStyle = context.fillStyle = style;
  context.lineWidth = 1.7;
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
  context.lineWidth = 1;
  if (hasMarkers) for (const [x, y] of points) {
    context.beginPath();
    context.arc(x, y, 3, 0, 2 * Math.PI);
    context.fill();
  }
}

function fillBetween(context, upper, lower, style) {
  context.fillStyle = style;
  context.beginPath();
  [...upper, ...lower.toReversed()].forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.fill();
}
