// A grid of values as a surface: quadrilaterals from back to front, in parallel projection. Needs no WebGL.
import { drawColourBar, extent, prepareCanvas, viridis } from "./canvas.js";
import { colour, formatNumber } from "./dom.js";
import { FIGURE_HEIGHT, axisTitle, gridOf } from "./figure_plane.js";

const MAX_CELLS = 64;
const VALUE_HEIGHT = 0.62;

// `turn` and `tilt` in degrees.
export function drawSurface(canvas, figure, turn, tilt) {
  const { context, width } = prepareCanvas(canvas, FIGURE_HEIGHT);
  const grid = gridOf(figure);
  const [low, high] = extent(grid.z);
  const [columns, rows] = [thin(grid.x.length), thin(grid.y.length)];
  const [cos, sin] = [Math.cos((turn * Math.PI) / 180), Math.sin((turn * Math.PI) / 180)];
  const [up, flat] = [Math.cos((tilt * Math.PI) / 180), Math.sin((tilt * Math.PI) / 180)];
  const size = Math.min((width - 100) / 1.42, FIGURE_HEIGHT / 1.5);
  const project = (x, y, z) => {
    const [across, depth] = [x * cos - y * sin, x * sin + y * cos];
    return [(width - 62) / 2 + across * size, FIGURE_HEIGHT * 0.64 - (z * up * VALUE_HEIGHT + depth * flat) * size, depth];
  };
  const share = (value) => (value - low) / (high - low || 1);
  const at = (i, j) => {
    const [x, y] = [i / Math.max(1, columns.length - 1) - 0.5, j / Math.max(1, rows.length - 1) - 0.5];
    const value = grid.z[rows[j]][columns[i]];
    return value === null ? null : { point: project(x, y, share(value)), share: share(value) };
  };
  drawFloor(context, project, figure, grid);
  const faces = [];
  for (let i = 0; i + 1 < columns.length; i += 1) for (let j = 0; j + 1 < rows.length; j += 1) {
    const corners = [at(i, j), at(i + 1, j), at(i + 1, j + 1), at(i, j + 1)];
    if (corners.some((corner) => corner === null)) continue;
    const mean = (pick) => corners.reduce((sum, corner) => sum + pick(corner), 0) / 4;
    faces.push({ corners, depth: mean((corner) => corner.point[2]), share: mean((corner) => corner.share) });
  }
  faces.sort((a, b) => b.depth - a.depth);
  for (const face of faces) {
    context.fillStyle = context.strokeStyle = `rgb(${viridis(face.share)})`;
    tracePath(context, face.corners.map((corner) => corner.point));
    context.fill();
    context.lineWidth = 0.7;
    context.strokeStyle = faces.length < 1200 ? "rgba(0, 0, 0, 0.22)" : context.strokeStyle;
    context.stroke();
  }
  context.lineWidth = 1;
  drawColourBar(context, width - 54, 14, FIGURE_HEIGHT - 50, low, high, grid.colorbar?.title?.text ?? "");
}

function thin(size) {
  const count = Math.min(size, MAX_CELLS);
  return Array.from({ length: count }, (_, i) => Math.round((i * (size - 1)) / Math.max(1, count - 1)));
}

function drawFloor(context, project, figure, grid) {
  const corners = [[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]].map(([x, y]) => project(x, y, 0));
  context.strokeStyle = colour("line");
  tracePath(context, corners);
  context.stroke();
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  context.textBaseline = "middle";
  const write = (text, x, y) => context.fillText(text, ...project(x, y, 0).slice(0, 2));
  const title = (name) => figure.layout.scene?.[name]?.title?.text ?? axisTitle(figure, name);
  write(title("xaxis"), 0, -0.62);
  write(title("yaxis"), -0.64, 0);
  for (const [place, x] of [[-0.47, grid.x[0]], [0.47, grid.x.at(-1)]]) write(formatNumber(x), place, -0.58);
  for (const [place, y] of [[-0.44, grid.y[0]], [0.47, grid.y.at(-1)]]) write(formatNumber(y), -0.57, place);
}

function tracePath(context, points) {
  context.beginPath();
  points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
}
