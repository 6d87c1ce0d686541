const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 640px)");

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function choices(select, labels, value) {
  select.replaceChildren(...labels.map((label, index) => Object.assign(element("option", label), { value: index })));
  select.value = value;
}

function inked(layout) {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const look = structuredClone(layout);
  look.font = { ...look.font, color: value("--ink"), family: getComputedStyle(document.body).fontFamily, size: 13 };
  look.hoverlabel = { ...look.hoverlabel, bgcolor: value("--page"), bordercolor: value("--muted"),
    font: { color: value("--ink"), size: 12.5 } };
  for (const axis of Object.keys(look).filter((key) => /^[xy]axis/.test(key))) {
    look[axis] = { gridcolor: value("--grid"), linecolor: value("--line"), ...look[axis] };
  }
  for (const note of (look.annotations ?? []).filter(({ name }) => name === "front")) note.bgcolor = value("--page");
  return look;
}

// room for the legend's rows, and on a small screen less of it for margins and long names
function fitted(holder, figure) {
  const layout = inked(figure.layout);
  const names = figure.data.filter((trace) => trace.showlegend !== false && trace.visible !== false).map((trace) => trace.name ?? "");
  const entry = 48 + 7.5 * Math.max(0, ...names.map((name) => name.length));
  const rows = Math.ceil(names.length / Math.max(1, Math.floor((holder.clientWidth - 60) / entry)));
  const more = 20 * Math.max(0, rows - 1);
  layout.margin = { ...layout.margin, b: layout.margin.b + more };
  layout.height += more;
  if (!narrow.matches) return { data: figure.data, layout };
  layout.margin = { ...layout.margin, l: 46, r: 14 };
  layout.font.size = 11;
  for (const note of (layout.annotations ?? []).filter(({ xref }) => xref === "paper")) {
    Object.assign(note, { xanchor: "right", xshift: 0, yanchor: "bottom" });
  }
  for (const key of ["xaxis", "yaxis"]) layout[key] = { ...layout[key], nticks: 6 };
  if (layout.xaxis.title) layout.xaxis.title.text = layout.xaxis.title.text.replace(/ \(.*\)$/, "");
  const bars = figure.data.some((trace) => trace.type === "bar");
  if (!bars) return { data: figure.data, layout };
  const wrapped = figure.data[0].y.map((label) => label.replace(/(.{12,}?) /g, "$1<br>"));
  const lines = Math.max(...wrapped.map((label) => label.split("<br>").length));
  layout.yaxis = { ...layout.yaxis, tickfont: { size: 10 } };
  layout.height = 200 + wrapped.length * Math.max(30, 14 * lines + 8);
  return { data: figure.data.map((trace) => ({ ...trace, y: wrapped })), layout };
}

function draw() {
  for (const [id, figure] of Object.entries(figures)) {
    const holder = document.getElementById(id);
    const { data, layout } = fitted(holder, figure);
    const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]; // the default ones offer an upload
    const options = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: narrow.matches ? false : "hover" };
    Plotly.react(holder, data, layout, options);
    if (holder.dataset.listens) continue;
    holder.dataset.listens = "yes";
    holder.on("plotly_click", (event) => {
      const name = event.points.map((each) => each.customdata).find((each) => rowOf(each));
      if (name) openPoint(name);
    });
  }
}

function compare(one, other) {
  if (one === "" || other === "") return (one === "") - (other === "");
  const [left, right] = [Number(one), Number(other)];
  return Number.isNaN(left) || Number.isNaN(right) ? one.localeCompare(other) : left - right;
}

function sortBy(header) {
  const table = header.closest("table");
  const column = [...header.parentNode.children].indexOf(header);
  const rising = header.getAttribute("aria-sort") === "descending" || !header.hasAttribute("aria-sort");
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const key = (row) => row.children[column].dataset.order;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    if (key(a) === "" || key(b) === "") return compare(key(a), key(b)); // missing values stay at the end
    return rising ? compare(key(a), key(b)) : compare(key(b), key(a));
  });
  table.tBodies[0].append(...rows);
}

// everything about a point, from its row of the table

const rowOf = (name) => name && document.querySelector(`tr[data-point="${CSS.escape(name)}"]`);

function openPoint(name) {
  const row = rowOf(name);
  const dialog = document.getElementById("point");
  if (!row) return;
  dialog.querySelector("h2").textContent = row.dataset.label;
  dialog.querySelector(".composition").textContent = row.dataset.composition;
  const headers = row.closest("table").tHead.rows[0].children;
  const facts = [...row.children].flatMap((cell, index) => {
    const [title, meaning] = [headers[index].textContent.trim(), headers[index].title];
    if (index === 0 || cell.textContent.trim() === "\u2013" || !cell.textContent.trim()) return [];
    const detail = cell.querySelector("small")?.textContent ?? "";
    const shown = element("dd", detail ? `${cell.firstChild.textContent}${detail.startsWith("[") ? " " : ", "}${detail}` : cell.textContent.trim());
    return [Object.assign(element("dt", title), { title: meaning }), shown];
  });
  dialog.querySelector("dl").replaceChildren(...facts);
  const link = (text, target) => Object.assign(element("a", text), { href: target });
  const folder = row.querySelector("a").getAttribute("href");
  const goes = showsOf.filter(({ has }) => has(name)).map(({ title, id, show }) => {
    const made = link(title, `#${id}`);
    made.addEventListener("click", () => { dialog.close(); show(name); });
    return made;
  });
  const files = ["config.yaml", "result.json", "examples.jsonl"].map((file) => link(file, `${folder}${file}`));
  dialog.querySelector(".places").replaceChildren(...[...goes, ...files].flatMap((each) => [each, " "]));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#point-${encodeURIComponent(name)}`);
}

const showsOf = []; // the parts of the page that can show a point: {title, id, has, show}
const dialog = document.getElementById("point");
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#point-")) history.replaceState(null, "", location.pathname);
});
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-open]");
  if (!opener) return;
  event.preventDefault();
  openPoint(opener.dataset.open);
});

for (const header of document.querySelectorAll(".points th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}
for (const box of document.querySelectorAll("[data-bars]")) {
  box.addEventListener("change", () => {
    for (const trace of figures[box.dataset.bars].data) if (trace.meta === "others") trace.visible = box.checked;
    draw();
  });
}
if (document.body.classList.contains("live")) { // a page that was touched is being read
  const timer = setTimeout(() => location.reload(), 20000);
  for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => clearTimeout(timer), { once: true });
}
if (!window.matchMedia("(min-width: 1180px)").matches) document.querySelector("nav details").open = false;
for (const media of [dark, narrow]) media.addEventListener("change", draw);
draw();
addEventListener("load", () => {
  if (location.hash.startsWith("#point-")) openPoint(decodeURIComponent(location.hash.slice(7)));
});
