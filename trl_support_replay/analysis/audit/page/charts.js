"use strict";
// Facts, table and charts. All figures come from the report that the page carries.
const report = JSON.parse(document.getElementById("report").textContent);
const PARTS = ["truncation", "routes", "staleness", "numerics"];
const has = { total: true, truncation: true, routes: report.routes, staleness: report.has_sampler, numerics: true };
const shown = ["total", ...PARTS].filter((name) => has[name]);
const MEANING = {
  total: "vocabulary score − recorded", truncation: "mass outside the supports", routes: "other experts than the engine's",
  staleness: "other weights than the sampler's", numerics: "what is left",
};
const byId = (id) => document.getElementById(id);

function make(space, name, attributes = {}, ...children) {
  const node = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const el = (name, attributes, ...children) => make("", name, attributes, ...children);
const svg = (name, attributes, ...children) => make("http://www.w3.org/2000/svg", name, attributes, ...children);
const count = (n) => n.toLocaleString("en");
const nats = (x) => (x === null ? "" : x === 0 ? "0" : Math.abs(x) >= 0.01 ? x.toPrecision(3) : x.toExponential(1));
// A number that is shown rounded, and carried whole.
const figure = (x, format = nats) => (x === null ? el("td") : el("td", { "data-value": x }, format(x)));

byId("verdict").textContent = report.verdict;
if (report.findings.some((f) => f.fault)) byId("verdict").className = "fault";
const chosen = report.num_traces < report.num_saved ? ` of ${count(report.num_saved)}` : "";
const facts = [
  `${count(report.num_traces)}${chosen} traces`, `${count(report.num_tokens)} recorded tokens`,
  `${count(report.num_singletons)} alone in their support`, `temperature ${report.temperature}`,
  report.model && `model ${report.model}`, report.sampler && `sampler ${report.sampler}`,
  report.route_agreement !== null && `live routers agree with ${(100 * report.route_agreement).toFixed(1)} % of the recorded experts`,
  ...Object.entries(report.origins).map(([name, values]) => `recorded ${name.replace("_", " ")}: ${values.join("; ")}`),
];
byId("facts").textContent = facts.filter(Boolean).join(" · ");
byId("footer").textContent = `trl-support-replay ${report.version}; rounding: up to ${report.tolerance} nats.`;

function key(name) { return el("span", { class: "key", style: `background:var(--${name})` }); }
{
  const columns = [["mean_abs", "mean", ""], ["median", "median", "wide"], ["p90", "90 %", "wide"], ["p99", "99 %", ""], ["max_abs", "largest", ""], ["mean", "signed mean", "wide"]];
  const head = el("tr", {}, el("th", {}, "part"), el("th", { class: "wide", style: "text-align:left" }, "comes from"));
  for (const [, label, cls] of columns) head.append(el("th", { class: cls }, label));
  byId("parts").append(el("thead", {}, head));
  const body = el("tbody");
  for (const name of shown) {
    const row = el("tr", { class: name, "data-part": name }, el("td", {}, key(name), name), el("td", { class: "wide", style: "text-align:left" }, MEANING[name]));
    for (const [field, , cls] of columns) {
      const cell = figure(report.parts[name][field]);
      cell.className = cls;
      cell.dataset.field = field;
      row.append(cell);
    }
    body.append(row);
  }
  byId("parts").append(body);
  for (const f of report.findings) {
    byId("findings").append(el("li", {}, el("span", { class: f.fault ? "tag fault" : "tag" }, f.fault ? "fault" : "replayed"), f.sentence));
  }
}

// A plot: width, height and margins in its own units, scales from data to them, axes with labels.
function plot({ x, y, xTicks, yTicks, xFormat = String, yFormat = String, height = 170, width = 400, xLabel = "", label = "" }) {
  const box = { left: 44, right: 14, top: 8, bottom: xLabel ? 34 : 20 };
  const span = ([a, b]) => b - a || 1;
  const sx = (v) => box.left + ((v - x[0]) / span(x)) * (width - box.left - box.right);
  const sy = (v) => height - box.bottom - ((v - y[0]) / span(y)) * (height - box.top - box.bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const v of yTicks) {
    root.append(svg("line", { class: "axis", x1: box.left, x2: width - box.right, y1: sy(v), y2: sy(v) }));
    root.append(svg("text", { x: box.left - 5, y: sy(v) + 4, "text-anchor": "end" }, yFormat(v)));
  }
  for (const v of xTicks) root.append(svg("text", { x: sx(v), y: height - box.bottom + 14, "text-anchor": "middle" }, xFormat(v)));
  if (xLabel) root.append(svg("text", { x: (box.left + width - box.right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel));
  return { root, sx, sy };
}
function ticks([low, high], most = 4, whole = false) {
  const rough = (high - low) / most || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= rough);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(Math.round(v / step) * step);
  return found.map((v) => Number(v.toPrecision(10)));
}
const superscript = (n) => String(n).replace(/[-0-9]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
const power = (v) => (v === 0 ? "1" : `10${superscript(v)}`);

for (const name of shown) {
  const edges = report.histogram.edges.map(Math.log10);
  const counts = report.histogram.counts[name];
  const most = Math.max(...counts, 1);
  const { root, sx, sy } = plot({
    x: [edges[0], edges.at(-1)], y: [0, most], xTicks: [-8, -6, -4, -2, 0, 2], yTicks: [0, most], xFormat: power, yFormat: count,
    label: `histogram of ${name}`,
  });
  counts.forEach((n, i) => {
    if (!n) return;
    const left = sx(edges[i]), right = sx(edges[i + 1]);
    const title = svg("title", {}, `${count(n)} tokens from ${nats(report.histogram.edges[i])} to ${nats(report.histogram.edges[i + 1])} nats`);
    root.append(svg("rect", { x: left + 0.5, width: right - left - 1, y: sy(n), height: sy(0) - sy(n), fill: `var(--${name})`, "data-part": name, "data-count": n }, title));
  });
  byId("histograms").append(el("figure", {}, el("figcaption", {}, key(name), name), root));
}

{
  const rows = report.sequences;
  const LN10 = Math.log(10);
  const series = [["stock", "without replay", "--truncation"], ["mass", "product of masses", "--muted"], ["replayed", "replayed", "--numerics"]];
  const logs = rows.flatMap((r) => series.map(([name]) => r[name] / LN10));
  const y = [Math.floor(Math.min(0, ...logs)), Math.ceil(Math.max(0, ...logs))];
  if (y[0] === y[1]) { y[0] -= 1; y[1] += 1; }
  const x = [0, 1.03 * Math.max(1, ...rows.map((r) => r.tokens))];
  const { root, sx, sy } = plot({
    x, y, xTicks: ticks(x, 6, true), yTicks: ticks(y, 5, true), yFormat: power, width: Math.min(900, Math.max(340, innerWidth - 90)), height: 250,
    xLabel: "sampled tokens", label: "importance ratio against length",
  });
  root.append(svg("line", { class: "rule", x1: sx(x[0]), x2: sx(x[1]), y1: sy(0), y2: sy(0) }));
  for (const [name, label, colour] of series) {
    for (const r of rows) {
      const ring = name === "mass";
      const mark = svg("circle", {
        cx: sx(r.tokens), cy: sy(r[name] / LN10), r: ring ? 6 : 3.2, fill: ring ? "none" : `var(${colour})`, "fill-opacity": 0.75,
        stroke: ring ? `var(${colour})` : "none", "data-series": name, "data-value": r[name],
      }, svg("title", {}, `trace ${r.trace}, step ${r.step}, ${r.tokens} tokens, ${label}: ${Math.exp(r[name]).toPrecision(3)}`));
      root.append(mark);
    }
  }
  const legend = el("p", { class: "muted" });
  for (const [name, label, colour] of series) {
    const look = name === "mass" ? `border:2px solid var(${colour});border-radius:50%` : `background:var(${colour});border-radius:50%`;
    legend.append(el("span", { class: "swatch" }, el("span", { class: "key", style: look }), label));
  }
  byId("ratios").append(legend, root);
}

{
  const rows = report.steps;
  const draw = (caption, field, format, low) => {
    const values = rows.map((r) => r[field]);
    const y = [low ?? Math.min(...values), Math.max(...values)];
    const pad = (y[1] - y[0]) * 0.08 || Math.abs(y[1]) * 0.1 || 1;
    const range = [low ?? y[0] - pad, y[1] + pad];
    const x = [rows[0].step, rows.at(-1).step];
    if (x[0] === x[1]) { x[0] -= 1; x[1] += 1; }
    const { root, sx, sy } = plot({ x, y: range, xTicks: ticks(x, 5, true).filter((v) => rows.length > 1 || v === rows[0].step), yTicks: ticks(range, 3), yFormat: format, xLabel: report.step_name, label: caption });
    root.append(svg("polyline", { points: rows.map((r) => `${sx(r.step)},${sy(r[field])}`).join(" "), fill: "none", stroke: "var(--numerics)", "stroke-width": 1.6 }));
    for (const r of rows) root.append(svg("circle", { cx: sx(r.step), cy: sy(r[field]), r: rows.length > 60 ? 1.5 : 3, fill: "var(--numerics)", "data-field": field, "data-value": r[field] }, svg("title", {}, `${report.step_name} ${r.step}: ${r[field]}`)));
    byId("steps").append(el("figure", {}, el("figcaption", {}, caption), root));
  };
  if (rows.length) {
    draw("mean size of a support", "size_mean", String, 0);
    draw("mean mass that a support holds", "mass_mean", (v) => `${Number((100 * v).toPrecision(4))} %`);
    draw("share of supports with one token", "singletons", (v) => `${(100 * v).toFixed(0)} %`, 0);
    draw("mean gap left after replay (nats)", "left_mean", String, 0);
  }
}
