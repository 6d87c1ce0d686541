const PER_PAGE = 8;

// the words of both texts in order: [word, "same" | "before" | "after"]
function wordsOf(before, after) {
  const [a, b] = [before.split(/\s+/).filter(Boolean), after.split(/\s+/).filter(Boolean)];
  const longest = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i][j] = a[i] === b[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const words = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { words.push([a[i], "same"]); i += 1; j += 1; }
    else if (j < b.length && (i === a.length || longest[i][j + 1] >= longest[i + 1][j])) { words.push([b[j], "after"]); j += 1; }
    else { words.push([a[i], "before"]); i += 1; }
  }
  return words;
}

function startTexts(box, browser) {
  const find = (name) => box.querySelector(`[data-choose=${name}]`);
  let start = 0;

  const orders = {
    change: (one, other) => other.change - one.change,
    slow: (one, other) => (one.speedup ?? Infinity) - (other.speedup ?? Infinity),
    fast: (one, other) => (other.speedup ?? -Infinity) - (one.speedup ?? -Infinity),
    place: (one, other) => one.example.place - other.example.place,
  };

  function rows() {
    const point = Number(find("point").value);
    return browser.examples.filter((example) => example.of[point] !== null).map((example) => ({
      example, text: example.texts[example.of[point]], change: example.changes[example.of[point]], speedup: example.speedups[point],
    })).filter((row) => row.change > 0 || !find("changed").checked).sort(orders[find("order").value]);
  }

  function marked(words, mark, kind) { // the words of one side, each run of differing ones in a mark
    const line = element("dd");
    let run = null;
    for (const [word, where] of words.filter(([, where]) => where === "same" || where === kind)) {
      if (where !== kind) run = null;
      else if (run === null) line.append(run = element(mark));
      if (run === null) line.append(`${word} `);
      else { run.append(run.textContent ? ` ${word}` : word); if (run.nextSibling === null) line.append(" "); }
    }
    return line;
  }

  function card({ example, text, change, speedup }) {
    const made = element("article");
    const facts = [change ? `${(100 * change).toFixed(0)} % of the words differ` : "the same words",
      ...(speedup ? [`${speedup.toFixed(2)}\u00d7`] : [])];
    const title = element("h4", example.id);
    title.append(element("small", facts.join(" \u00b7 ")));
    const list = element("dl");
    const plain = (name, value) => list.append(element("dt", name), element("dd", value));
    if (example.source) plain("source", example.source);
    example.references.forEach((reference, index) => plain(index ? `reference ${index + 1}` : "reference", reference));
    const words = wordsOf(example.target, text);
    list.append(element("dt", browser.baseline), marked(words, "del", "before"));
    list.append(element("dt", "this point"), marked(words, "ins", "after"));
    made.append(title, list);
    return made;
  }

  function show() {
    const found = rows();
    start = Math.min(Math.max(start, 0), Math.max(0, PER_PAGE * Math.floor((found.length - 1) / PER_PAGE)));
    const shown = found.slice(start, start + PER_PAGE);
    box.querySelector(".list").replaceChildren(...(shown.length ? shown.map(card) : [element("p", "No text of this point differs.")]));
    box.querySelector("output").textContent = shown.length ? `${start + 1} to ${start + shown.length} of ${found.length}` : "";
    for (const button of box.querySelectorAll("[data-turn]")) {
      button.disabled = button.dataset.turn < 0 ? start === 0 : start + PER_PAGE >= found.length;
    }
  }

  choices(find("point"), browser.points.map(({ label }) => label), 0);
  for (const name of ["point", "order", "changed"]) find(name).addEventListener("change", () => { start = 0; show(); });
  for (const button of box.querySelectorAll("[data-turn]")) {
    button.addEventListener("click", () => { start += PER_PAGE * Number(button.dataset.turn); show(); });
  }
  const place = (name) => browser.points.findIndex(({ point }) => point === name);
  showsOf.push({
    title: "its texts",
    id: "texts",
    has: (name) => place(name) >= 0,
    show: (name) => { find("point").value = place(name); start = 0; show(); },
  });
  show();
}

for (const box of document.querySelectorAll(".texts")) startTexts(box, texts[Number(box.dataset.texts)]);
