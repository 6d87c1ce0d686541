const dark = window.matchMedia("(prefers-color-scheme: dark)");

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
  return look;
}

function draw() {
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]; // the default ones offer an upload
  const options = { responsive: true, displaylogo: false, modeBarButtons: buttons };
  for (const [id, figure] of Object.entries(figures)) {
    Plotly.react(id, figure.data, inked(figure.layout), options);
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

for (const header of document.querySelectorAll(".points th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}
dark.addEventListener("change", draw);
draw();
