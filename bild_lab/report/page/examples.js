function choices(select, entries) { // entries: value and text of each
  select.replaceChildren(...entries.map(([value, text]) => Object.assign(element("option", text), { value })));
}

const contentOf = (box) => JSON.parse(box.querySelector("script").textContent);

// the words of a text that are of both, or of this side alone, which are in a mark
function marked(words, side, mark) {
  const line = element("dd");
  for (const [whose, text] of words.filter(([whose]) => whose === 0 || whose === side)) {
    line.append(whose === 0 ? text : element(mark, text), " ");
  }
  return line;
}

function startTexts(box) {
  const browser = contentOf(box);
  const find = (name) => box.querySelector(`[data-choose=${name}]`);
  const orders = {
    change: (a, b) => b.change - a.change,
    slow: (a, b) => (a.speedup ?? Infinity) - (b.speedup ?? Infinity),
    fast: (a, b) => (b.speedup ?? -Infinity) - (a.speedup ?? -Infinity),
    place: (a, b) => a.example.place - b.example.place,
  };

  function card({ example, words, change, speedup }) {
    const facts = [change ? `${(100 * change).toFixed(0)} % of the words differ` : "the same words",
      ...(speedup ? [`${speedup.toFixed(2)}\u00d7`] : [])];
    const [article, title, list] = [element("article"), element("h4", example.id), element("dl")];
    title.append(element("small", facts.join(" \u00b7 ")));
    if (example.source) list.append(element("dt", "source"), element("dd", example.source));
    for (const reference of example.references) list.append(element("dt", "reference"), element("dd", reference));
    list.append(element("dt", browser.baseline), marked(words, 1, "del"), element("dt", "this point"), marked(words, 2, "ins"));
    article.append(title, list);
    return article;
  }

  function show() {
    const point = find("point").selectedIndex;
    const rows = browser.examples.filter(({ of }) => of[point] !== null).map((example) => ({
      example, words: example.texts[example.of[point]], change: example.changes[example.of[point]], speedup: example.speedups[point],
    })).filter(({ change }) => change > 0 || !find("changed").checked).sort(orders[find("order").value]);
    box.querySelector(".list").replaceChildren(...(rows.length ? rows.map(card) : [element("p", "No text of this point differs.")]));
  }

  choices(find("point"), browser.points.map(({ point, label }) => [point, label]));
  for (const name of ["point", "order", "changed"]) find(name).addEventListener("change", show);
  show();
}

function startViewer(box) {
  const points = contentOf(box);
  const find = (selector) => box.querySelector(selector);
  const [point, example] = [find("[data-choose=point]"), find("[data-choose=example]")];
  let round = 0;

  function show(number) {
    const { rounds, spans, prompt } = points[point.selectedIndex].examples[example.selectedIndex];
    round = Math.min(Math.max(number, 0), rounds.length - 1);
    find("output").textContent = `round ${round + 1} of ${rounds.length}`;
    find(".prompt").textContent = prompt;
    find(".tokens").replaceChildren(...rounds.slice(0, round + 1).flatMap(({ tokens }, index) => tokens
      .filter(([, kind]) => index === round || kind !== "dropped")
      .map(([text, kind]) => element("span", text, index === round ? `${kind} now` : kind))));
    const table = element("table");
    for (const [title, cells] of rounds[round].rows) {
      const row = table.insertRow();
      row.append(element("th", title), ...cells.map((text) => element("td", text)));
    }
    find(".round").replaceChildren(element("p", rounds[round].said), table);
    timeline(spans);
  }

  function timeline(spans) { // a lane for the drafter above one for the target
    const end = Math.max(...spans.map(([, , stop]) => stop));
    const seen = { prefill: -1, draft: -1, verify: -1 };
    find(".timeline").replaceChildren(...spans.filter(([stage]) => stage in seen).map(([stage, start, stop]) => {
      const number = stage === "prefill" ? -1 : seen[stage] += 1;
      const bar = element("i", undefined, number > round ? `${stage} later` : number === round ? `${stage} now` : stage);
      Object.assign(bar.style, { left: `${(100 * start) / end}%`, width: `${(100 * (stop - start)) / end}%` });
      return bar;
    }), element("span", `${spans.length ? end.toFixed(1) : 0} ms`));
  }

  function open(place) { // an example of the chosen point
    const { examples } = points[point.selectedIndex];
    choices(example, examples.map(({ id }, index) => [index, id]));
    example.selectedIndex = Math.min(Math.max(place, 0), examples.length - 1);
    show(0);
  }

  choices(point, points.map(({ point: name, label }) => [name, label]));
  point.addEventListener("change", () => open(0));
  example.addEventListener("change", () => show(0));
  for (const button of box.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => show(round + Number(button.dataset.step)));
  }
  box.addEventListener("keydown", (event) => {
    const moves = {
      ArrowRight: () => show(round + 1),
      ArrowLeft: () => show(round - 1),
      ArrowDown: () => open(example.selectedIndex + 1),
      ArrowUp: () => open(example.selectedIndex - 1),
      Home: () => show(0),
      End: () => show(Infinity),
    };
    if (event.target.tagName === "SELECT" || !(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });
  open(0);
  show(Infinity);
}

for (const box of document.querySelectorAll(".texts")) startTexts(box);
for (const box of document.querySelectorAll(".viewer")) startViewer(box);
