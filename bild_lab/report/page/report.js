// everything about a point, from its row of the table
const dialog = document.getElementById("point");

function openPoint(name) {
  const row = document.querySelector(`tr[data-point="${CSS.escape(name)}"]`);
  if (!row) return;
  dialog.querySelector("h2").textContent = row.dataset.label;
  dialog.querySelector(".composition").textContent = row.dataset.composition;
  const headers = row.closest("table").tHead.rows[0].children;
  const facts = [...row.children].slice(1).flatMap((cell, index) => {
    const { title, textContent } = headers[index + 1];
    const [text, detail] = [cell.firstChild?.textContent.trim(), cell.querySelector("small")?.textContent];
    if (!text || text === "\u2013") return [];
    const shown = detail ? `${text}${detail.startsWith("[") ? " " : ", "}${detail}` : text;
    return [Object.assign(element("dt", textContent.trim()), { title }), element("dd", shown)];
  });
  dialog.querySelector("dl").replaceChildren(...facts);
  const folder = row.querySelector("td:last-child a").getAttribute("href");
  const links = ["config.yaml", "result.json", "examples.jsonl"].map((file) => Object.assign(element("a", file), { href: folder + file }));
  for (const option of document.querySelectorAll(`option[value="${CSS.escape(name)}"]`)) { // its texts, its rounds
    const box = option.closest("section").querySelector("h2");
    const link = Object.assign(element("a", box.firstChild.textContent.trim()), { href: `#${box.id}` });
    link.addEventListener("click", () => {
      dialog.close();
      option.parentNode.value = name;
      option.parentNode.dispatchEvent(new Event("change"));
    });
    links.unshift(link);
  }
  dialog.querySelector(".places").replaceChildren(...links.flatMap((link) => [link, " "]));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  history.replaceState(null, "", `#point-${encodeURIComponent(name)}`);
}

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
if (document.body.classList.contains("live")) { // a page that was touched is being read
  const timer = setTimeout(() => location.reload(), 20000);
  for (const kind of ["pointerdown", "keydown"]) addEventListener(kind, () => clearTimeout(timer), { once: true });
}
if (!window.matchMedia("(min-width: 1180px)").matches) document.querySelector("nav details").open = false;
addEventListener("load", () => {
  if (location.hash.startsWith("#point-")) openPoint(decodeURIComponent(location.hash.slice(7)));
});
