"use strict";
// The token view: one sample, coloured by a part of the gap; hover, tap or arrow keys show a token's support.
const state = { sample: 0, token: null, colour: "total" };
const textOf = (id) => report.texts[id] ?? `#${id}`;
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·") || "∅";
const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 && p < 100 ? ">99.9 %" : p >= 10 ? `${p.toFixed(1)} %` : `${p.toPrecision(2)} %`;
};
// From 1e-4 nats (no colour) to 1 nat and more (full colour).
const strength = (gap) => Math.min(1, Math.max(0, (Math.log10(Math.abs(gap) || 1e-9) + 4) / 4));
const tint = (gap) => `rgba(var(${gap < 0 ? "--under" : "--over"}), ${(0.65 * strength(gap)).toFixed(3)})`;

function drawTokens() {
  const sample = report.samples[state.sample];
  const box = byId("tokens");
  box.replaceChildren(el("span", { class: "prompt" }, sample.prompt.map(textOf).join("")));
  const ends = new Set(report.eos_token_ids);
  sample.ids.forEach((id, t) => {
    const gap = sample[state.colour][t];
    const classes = ["t", sample.kind[t]];
    if (sample.kind[t] === "sampled" && sample.size[t] === 1) classes.push("single");
    if (t === sample.ids.length - 1 && ends.has(id)) classes.push("eos");
    const token = el("span", { class: classes.join(" "), tabindex: t === 0 ? 0 : -1, "data-t": t }, textOf(id).replace(/\n/g, "⏎\n"));
    if (gap !== null) {
      token.style.backgroundColor = tint(gap);
      token.dataset.gap = gap;
    }
    box.append(token);
  });
}

function drawDetail() {
  const sample = report.samples[state.sample], t = state.token, box = byId("detail");
  for (const on of document.querySelectorAll(".t.on")) on.classList.remove("on");
  if (t === null) {
    box.replaceChildren(el("span", { class: "muted" }, "Hover, tap, or use the arrow keys on a token to see its support."));
    return;
  }
  document.querySelector(`.t[data-t="${t}"]`).classList.add("on");
  const rows = [el("h3", {}, visible(textOf(sample.ids[t]))), el("div", { class: "muted" }, `token ${t} of ${sample.ids.length}, id ${sample.ids[t]}`)];
  if (sample.kind[t] === "observation") rows.push(el("p", {}, "An observation: nobody sampled it, and it is not in the loss."));
  if (sample.kind[t] === "unsupported") rows.push(el("p", {}, "No recorded support: an end of sequence that was not sampled."));
  if (sample.kind[t] === "sampled") {
    const figures = el("dl");
    const add = (name, value, ...marks) => figures.append(el("div", { "data-figure": name, "data-value": value }, el("dt", {}, ...marks, name), el("dd", {}, nats(value))));
    add("recorded", sample.recorded[t]);
    add("replayed", sample.policy[t]);
    for (const part of shown) add(part === "total" ? "gap" : part, sample[part][t], key(part));
    rows.push(figures);
    const known = sample.rollout[t].length > 0;
    const table = el("table", {}, el("tr", {}, el("th", {}, "support"), el("th", {}, "rollout"), el("th", {}, "policy")));
    sample.candidates[t].forEach((id, i) => {
      const sampled = id === sample.ids[t];
      const rollout = sampled ? sample.recorded[t] : known ? sample.rollout[t][i] : null;
      const mark = sampled ? { class: "sampled" } : {};
      table.append(el("tr", mark, el("td", { title: `id ${id}` }, visible(textOf(id))), rollout === null ? el("td", {}, "–") : figure(rollout, percent), figure(sample.probs[t][i], percent)));
    });
    rows.push(table);
    const more = sample.size[t] - sample.candidates[t].length;
    if (more > 0) rows.push(el("div", { class: "muted" }, `and ${more} more candidates`));
    if (sample.size[t] === 1) rows.push(el("div", { class: "muted" }, "The only candidate: its log-prob is 0 whatever the model."));
    else if (!known) rows.push(el("div", { class: "muted" }, "Rollout probabilities of the others need the weights that sampled (--sampler)."));
  }
  box.replaceChildren(...rows);
}

function select(sample, token) {
  state.sample = (sample + report.samples.length) % report.samples.length;
  state.token = token;
  byId("sample").value = state.sample;
  drawTokens();
  drawDetail();
}
function show(t) {
  state.token = t;
  drawDetail();
  // On a narrow screen the panel lies over the page's lower part.
  if (matchMedia("(max-width: 760px)").matches) document.querySelector(".t.on").scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#s${state.sample}t${t}`);
}

function startView() {
  const left = report.samples_left_out;
  byId("left-out").textContent = `${count(report.samples.length)} samples, largest mean gap first${left ? `; ${count(left)} more are not shown` : ""}.`;
  if (!report.samples.length) return;
  report.samples.forEach((s, i) => byId("sample").append(el("option", { value: i }, `trace ${s.trace}, ${report.step_name} ${s.step}, ${s.ids.length} tokens`)));
  for (const name of shown) byId("colour").append(el("option", { value: name }, name === "total" ? "the whole gap" : name));
  const swatch = (gap, label) => el("span", { class: "swatch", style: `background:${tint(gap)}` }, label);
  byId("legend").append("policy below rollout ", swatch(-1, "1"), swatch(-0.1, "0.1"), swatch(-0.01, "0.01"), " nats, above ", swatch(0.01, "0.01"), swatch(0.1, "0.1"), swatch(1, "1"),
    " · ", el("span", { class: "t single" }, "alone in its support"), " · ", el("span", { class: "t observation" }, "observation"), " · ", el("span", { class: "t unsupported" }, "no support"));
  byId("sample").addEventListener("change", (e) => select(Number(e.target.value), null));
  byId("colour").addEventListener("change", (e) => { state.colour = e.target.value; drawTokens(); drawDetail(); });
  byId("previous").addEventListener("click", () => select(state.sample - 1, null));
  byId("next").addEventListener("click", () => select(state.sample + 1, null));
  const box = byId("tokens");
  for (const event of ["pointerover", "click", "focusin"]) {
    box.addEventListener(event, (e) => {
      const token = e.target.closest(".t");
      if (token && (event !== "pointerover" || e.pointerType === "mouse")) show(Number(token.dataset.t));
    });
  }
  box.addEventListener("keydown", (e) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
    const next = step && box.querySelector(`.t[data-t="${(state.token ?? -1) + step}"]`);
    if (next) { e.preventDefault(); next.focus(); }
  });
  // A link can point at a token.
  const [, sample, token] = location.hash.match(/^#s(\d+)t(\d+)$/) ?? [];
  const known = report.samples[sample]?.ids.length > token;
  select(known ? Number(sample) : 0, known ? Number(token) : null);
}
startView();
