"use strict";
const sweeps = JSON.parse(document.getElementById("sweeps").textContent);
const byName = new Map(sweeps.sweeps.map((sweep) => [sweep.name, sweep]));
const entries = [...document.querySelectorAll(".entry")];
const words = document.getElementById("words"), state = document.getElementById("state"), order = document.getElementById("order");
const picks = [...document.querySelectorAll(".pick input")];
const panel = document.getElementById("beside"), told = document.getElementById("told"), title = document.getElementById("compared");
const chosen = [];
const hashes = ["data", "weights", "code"]; // of a setting: they say whether something differs, not how

document.querySelector(".tools").hidden = false;
document.getElementById("howto").hidden = picks.length < 2;
for (const pick of picks) pick.closest(".pick").hidden = false;

function filter() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const entry of entries) {
    const text = entry.dataset.words.toLowerCase();
    entry.hidden = !(wanted.every((word) => text.includes(word)) && (!state.value || entry.dataset.state === state.value));
    shown += !entry.hidden;
  }
  for (const kind of document.querySelectorAll(".kind")) {
    const here = [...kind.querySelectorAll(".entry")].filter((entry) => !entry.hidden).length;
    kind.hidden = !here;
    kind.querySelector("h2 span").textContent = here;
  }
  document.getElementById("shown").textContent = shown === entries.length ? "" : `${shown} of ${entries.length} shown`;
}

function sort() {
  const by = {
    date: (a, b) => (a.dataset.date < b.dataset.date) - (a.dataset.date > b.dataset.date),
    name: (a, b) => a.dataset.name.localeCompare(b.dataset.name, undefined, { numeric: true }),
    size: (a, b) => b.dataset.size - a.dataset.size,
  }[order.value];
  for (const list of document.querySelectorAll(".entries")) list.append(...[...list.children].sort(by));
}

words.addEventListener("input", filter);
state.addEventListener("change", filter);
order.addEventListener("change", sort);
document.querySelector(".tools").addEventListener("submit", (event) => event.preventDefault());
filter();
if (order.value !== "date") sort(); // a browser that goes back keeps the choice

for (const pick of picks) pick.addEventListener("change", () => choose(pick));
document.getElementById("close").addEventListener("click", close);
panel.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
for (const pick of picks) pick.checked = false;

function choose(pick) {
  if (pick.checked) chosen.push(pick); else chosen.splice(chosen.indexOf(pick), 1);
  while (chosen.length > 2) chosen.shift().checked = false;
  panel.hidden = chosen.length < 2;
  const how = document.getElementById("howto");
  how.textContent = chosen.length === 1 ? `“${chosen[0].value}” is A; tick another sweep to see both side by side.` : "Tick two sweeps to see them side by side.";
  if (chosen.length === 2) {
    compare(...chosen.map((one) => byName.get(one.value)));
    title.focus();
    panel.scrollIntoView({ block: "start" });
  }
}

function close() {
  const last = chosen.at(-1);
  for (const pick of chosen.splice(0)) pick.checked = false;
  panel.hidden = true;
  document.getElementById("howto").textContent = "Tick two sweeps to see them side by side.";
  if (last) last.focus();
}

function element(name, attributes = {}, ...inside) {
  const svg = ["svg", "circle", "line", "text", "path", "g"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  if (svg && inside.some((one) => one instanceof Title)) inside = inside.map((one) => one instanceof Title ? one.made() : one);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

class Title {
  constructor(text) { this.text = text; }
  made() {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "title");
    made.textContent = this.text;
    return made;
  }
}

function compare(a, b) {
  title.replaceChildren(side("A", a.name), " and ", side("B", b.name));
  const differing = keys(a, b).filter((key) => values(a, key) !== values(b, key));
  const varying = keys(a, b).filter((key) => !hashes.includes(key) && key !== "hardware" && (several(a, key) || several(b, key)));
  const find = new Map(b.points.map((point) => [identity(b, point, varying), point]));
  const pairs = a.points.map((point) => [point, find.get(identity(a, point, varying))]).filter((pair) => pair[1]);
  const parts = [];
  const constant = differing.filter((key) => !varying.includes(key));
  if (constant.length) {
    const words = constant.map((key) => hashes.includes(key) ? key : `${key} (A ${values(a, key)}, B ${values(b, key)})`);
    parts.push(element("p", { class: "note" }, `They differ in ${words.join("; ")}.`));
  }
  const same = ["dataset", "split", "metric", "n_examples", "data"].every((key) => values(a, key) === values(b, key));
  if (same) parts.push(...plane(a, b, pairs));
  else parts.push(element("p", {}, "Their data or metrics differ, so their points do not share one plane; the command below compares the examples that both have, where there are any."));
  if (pairs.length) parts.push(table(pairs));
  else parts.push(element("p", {}, "No point has the same policy and knobs in both, so there is nothing to pair."));
  const left = [a, b].filter((one) => one.points_left_out).map((one) => `${one.points_left_out} more of ${one.name}`);
  if (left.length) parts.push(element("p", { class: "note" }, `Not shown here: ${left.join(", ")}; the command compares all of them.`));
  parts.push(command(a, b));
  told.replaceChildren(...parts);
}

function side(letter, name) { return element("span", { class: `key-${letter.toLowerCase()}` }, `${letter}: ${name}`); }

function keys(a, b) { return [...new Set([...a.settings, ...b.settings].flatMap((one) => Object.keys(one)))]; }

function values(sweep, key) { return [...new Set(sweep.settings.map((one) => one[key] ?? "–"))].sort().join(", "); }

function several(sweep, key) { return new Set(sweep.settings.map((one) => one[key])).size > 1; }

function identity(sweep, point, varying) {
  const setting = sweep.settings[point.setting];
  return JSON.stringify([point.policy, Object.entries(point.knobs).sort(), varying.map((key) => setting[key] ?? null)]);
}

function label(point, peers) {
  const own = peers.filter((one) => one.policy === point.policy);
  const shown = Object.entries(point.knobs).filter(([knob]) => own.length < 2 || new Set(own.map((one) => one.knobs[knob])).size > 1);
  const knobs = shown.map(([knob, value]) => `${knob} ${value}`).join(", ");
  return knobs ? `${point.policy} (${knobs})` : point.policy;
}

function number(value, digits = 2) { return value == null ? "–" : value.toFixed(digits).replace("-", "−"); }

function signed(value) { return (value > 0 ? "+" : "") + number(value); }

function bounds(low, high, written) { return low == null || high == null ? "" : `[${written(low)}, ${written(high)}]`; }

function cell(main, detail) { return element("td", {}, main, ...(detail ? [element("small", {}, detail)] : [])); }

function table(pairs) {
  const head = element("tr");
  for (const text of ["point", "speedup A", "speedup B", "quality A", "quality B"]) head.append(element("th", { scope: "col" }, text));
  const body = element("tbody");
  for (const pair of pairs) {
    const row = element("tr", {}, element("td", {}, label(pair[0], pairs.map((one) => one[0]))));
    for (const one of pair) row.append(cell(one.speedup == null ? "–" : `${number(one.speedup)}×`, bounds(one.speedup_low, one.speedup_high, number)));
    for (const one of pair) {
      row.append(cell(number(one.quality), one.difference == null ? "" : `${signed(one.difference)} ${bounds(one.difference_low, one.difference_high, signed)}`));
    }
    body.append(row);
  }
  const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "points of both sweeps" });
  scroll.append(element("table", {}, element("thead", {}, head), body));
  return scroll;
}

function plane(a, b, pairs) {
  const drawn = (sweep) => sweep.points.filter((point) => point.speedup > 0 && point.quality != null);
  const all = [...drawn(a), ...drawn(b)];
  if (!all.length) return [];
  const width = 760, height = 380, left = 56, bottom = 44, top = 14, right = 14;
  const xs = all.map((point) => 1 / point.speedup), ys = all.map((point) => point.quality);
  const wide = Math.max(...xs) / Math.min(...xs) > 8;
  const across = wide ? Math.log : (value) => value;
  const x = scale(Math.min(...xs.map(across)), Math.max(...xs.map(across)), left + 12, width - right - 12);
  const y = scale(Math.min(...ys), Math.max(...ys), height - bottom - 12, top + 12);
  const place = (point) => [x(across(1 / point.speedup)), y(point.quality)];
  const svg = element("svg", { id: "plane", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Quality against relative latency of ${a.name}, rings, and ${b.name}, dots; faster is left, better is up` });
  svg.append(element("path", { class: "axis", fill: "none", d: `M${left} ${top}V${height - bottom}H${width - right}` }));
  for (const value of ticks(Math.min(...xs), Math.max(...xs), wide)) {
    svg.append(element("text", { x: x(across(value)), y: height - bottom + 18, "text-anchor": "middle" }, String(value)));
  }
  for (const value of ticks(Math.min(...ys), Math.max(...ys), false)) {
    svg.append(element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  svg.append(element("text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, "relative latency (1 over the speedup); faster is left"));
  svg.append(element("text", { x: 14, y: height / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${height / 2})` }, all[0].metric));
  for (const [one, other] of pairs) {
    if (!(one.speedup > 0 && other.speedup > 0 && one.quality != null && other.quality != null)) continue;
    const [x1, y1] = place(one), [x2, y2] = place(other);
    svg.append(element("line", { class: "join", x1, y1, x2, y2 }));
  }
  for (const [sweep, kind] of [[a, "a"], [b, "b"]]) {
    for (const point of drawn(sweep)) {
      const [cx, cy] = place(point);
      svg.append(element("circle", { class: kind, cx, cy, r: kind === "a" ? 5 : 4 }, new Title(`${kind.toUpperCase()}: ${label(point, sweep.points)}: ${number(point.speedup)}×, ${point.metric} ${number(point.quality)}`)));
    }
  }
  const key = element("p", { class: "note" }, "Rings are ", side("A", a.name), ", dots are ", side("B", b.name), "; a line joins the same point of both.");
  return [svg, key];
}

function scale(low, high, start, end) {
  const width = high - low || 1;
  return (value) => high === low ? (start + end) / 2 : start + (value - low) / width * (end - start);
}

function ticks(low, high, wide) {
  if (wide) return [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].filter((value) => value >= low && value <= high);
  const step = [1, 2, 2.5, 5, 10].map((one) => one * 10 ** Math.floor(Math.log10((high - low) / 5 || 1))).find((one) => (high - low) / one <= 6) || 1;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(+value.toPrecision(6));
  return found.length ? found : [+low.toPrecision(4)];
}

function command(a, b) {
  const plain = /^[\w.-]+$/, folder = (name) => plain.test(name) ? `${sweeps.outputs}/${name}` : `'${`${sweeps.outputs}/${name}`.replaceAll("'", "'\\''")}'`;
  const name = [a, b].every((one) => plain.test(one.name)) ? ` name=${a.name}_vs_${b.name}`.slice(0, 180) : "";
  const line = `python scripts/compare.py ${folder(a.name)} ${folder(b.name)}${name}`;
  const made = sweeps.comparisons.find((one) => one.sides.length === 2 && one.sides[0] === a.name && one.sides[1] === b.name);
  const before = element("p", {}, "Each side’s intervals are against its own baseline. Paired intervals, with a verdict for every point:");
  const copy = element("button", { type: "button" }, "Copy");
  copy.addEventListener("click", () => navigator.clipboard?.writeText(line).then(() => { copy.textContent = "Copied"; }));
  const parts = [before, element("pre", {}, line), copy];
  if (made) parts.push(element("p", {}, "This was done before: ", element("a", { href: made.path }, made.name), "."));
  return element("div", {}, ...parts);
}
