function element(name, text, kind) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function compare(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [left, right] = [Number(a), Number(b)];
  return Number.isNaN(left) || Number.isNaN(right) ? a.localeCompare(b) : left - right;
}

function sortBy(header) {
  const table = header.closest("table");
  const column = [...header.parentNode.children].indexOf(header);
  const rising = header.getAttribute("aria-sort") === "descending" || !header.hasAttribute("aria-sort");
  for (const sibling of header.parentNode.children) sibling.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const key = (row) => row.children[column].dataset.order || row.children[column].textContent;
  const missing = (row) => ["", "\u2013"].includes(key(row));
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b); // they stay at the end
    return rising ? compare(key(a), key(b)) : compare(key(b), key(a));
  });
  table.tBodies[0].append(...rows);
}

for (const header of document.querySelectorAll(".points th")) {
  header.querySelector("button").addEventListener("click", () => sortBy(header));
}
for (const box of document.querySelectorAll("[data-filter]")) { // rows with all of its words
  box.parentNode.hidden = false;
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of document.getElementById(box.dataset.filter).querySelectorAll("tbody tr")) {
      row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    }
  });
}
for (const box of document.querySelectorAll(".scroll")) { // a table that is cut says so, and what is out of sight
  const hint = element("p", "", "note cut");
  const update = () => {
    hint.hidden = box.scrollWidth <= box.clientWidth;
    const end = box.getBoundingClientRect().right;
    const hidden = [...box.querySelectorAll("thead th")].filter((title) => title.getBoundingClientRect().right > end + 4);
    const titles = hidden.slice(0, 4).map((title) => title.textContent.trim()).join(", ");
    hint.textContent = hidden.length ? `\u2192 scroll sideways for ${titles}${hidden.length > 4 ? ` and ${hidden.length - 4} more` : ""}` : "";
  };
  box.before(hint);
  box.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(box);
}
