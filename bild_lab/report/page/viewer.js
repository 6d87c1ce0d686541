function startViewer(box) {
  const find = (selector) => box.querySelector(selector);
  const points = traces.flatMap((setting) => setting.points.map((point) => (
    { ...point, label: traces.length > 1 ? `${point.label}: ${setting.title}` : point.label })));
  const chosen = { point: 0, example: 0, round: 0 };
  const point = () => points[chosen.point];
  const example = () => point().examples[chosen.example];

  const pieceOf = (token) => example().pieces[token];
  const visible = (token) => pieceOf(token).replaceAll("\n", "\u21b5\n");

  function ownKind(round) {
    if (round.dropped.length || round.tree.length > round.kept.length) return "replacement";
    return round.fallback ? "fallback" : "own";
  }

  function showText() {
    const spans = [];
    example().rounds.slice(0, chosen.round + 1).forEach((round, index) => {
      const add = (token, kind) => spans.push(element("span", visible(token), index === chosen.round ? `${kind} now` : kind));
      round.kept.forEach((token) => add(token, "accepted"));
      if (index === chosen.round) round.dropped.forEach((token) => add(token, "dropped"));
      if (round.own !== null) add(round.own, ownKind(round));
    });
    find(".tokens").replaceChildren(...spans);
  }

  function rowOf(title, values) {
    const row = element("tr");
    row.append(element("th", title), ...values.map((value) => element("td", value)));
    return row;
  }

  function summary(round) {
    const drafted = round.tree.length || round.kept.length + round.dropped.length;
    if (!drafted) return "Nothing was drafted; the target wrote the token.";
    const asked = round.fallback ? " The drafter handed over, as it was not confident enough." : "";
    const checked = round.own === null && round.kept.length === drafted ? "the text ends there"
      : `${round.kept.length} of ${drafted} drafted tokens were accepted`;
    return `${checked[0].toUpperCase()}${checked.slice(1)}.${asked}`;
  }

  function showRound() {
    const round = example().rounds[chosen.round];
    const parts = [element("p", summary(round))];
    const drafted = [...round.kept, ...round.dropped];
    const limits = point().thresholds;
    const digits = (value) => Number(value).toPrecision(3);
    if (round.tree.length) {
      parts.push(element("p", `The tree of drafts: ${round.tree.map((token) => pieceOf(token).trim() || "\u2423").join(" \u00b7 ")}`, "muted"));
    } else if (drafted.length) {
      const table = element("table");
      table.append(rowOf("drafted", drafted.map((token) => pieceOf(token).trim() || "\u2423")));
      if (round.confidence.length) {
        const limit = limits.fallback === undefined ? "" : ` (fallback below ${limits.fallback})`;
        table.append(rowOf(`confidence${limit}`, round.confidence.map(digits)));
      }
      if (round.distance.length) {
        const limit = limits.rollback === undefined ? "" : ` (rollback above ${limits.rollback})`;
        table.append(rowOf(`distance, nats${limit}`, round.distance.map(digits)));
      }
      parts.push(table);
    } else if (round.confidence.length) {
      parts.push(element("p", `Confidence ${round.confidence.map(digits).join(", ")}`, "muted"));
    }
    find(".round").replaceChildren(...parts);
  }

  function showTimeline() {
    const { spans } = example();
    const holder = find(".timeline");
    holder.replaceChildren();
    if (!spans.length) return;
    const make = (name, values) => {
      const node = document.createElementNS("http://www.w3.org/2000/svg", name);
      Object.entries(values).forEach(([key, value]) => node.setAttribute(key, value));
      return node;
    };
    const [left, width, lanes] = [58, 940, { draft: 6, verify: 32, prefill: 32 }];
    const colours = { prefill: "#8a8a8a", draft: "#2E93CC", verify: "#0072B2" };
    const end = Math.max(...spans.map((span) => span[2]));
    const svg = make("svg", { viewBox: `0 0 ${left + width + 2} 74`, preserveAspectRatio: "none" });
    const label = (text, x, y, anchor) => {
      const node = make("text", { x, y, "text-anchor": anchor });
      node.textContent = text;
      svg.append(node);
    };
    label("drafter", 0, 20, "start");
    label("target", 0, 46, "start");
    label("0 ms", left, 70, "start");
    label(`${end.toFixed(1)} ms`, left + width, 70, "end");
    const seen = { prefill: 0, draft: 0, verify: 0 };
    for (const [stage, start, stop] of spans.filter((span) => span[0] in lanes)) {
      const number = seen[stage]++;
      const bar = make("rect", { x: left + (width * start) / end, y: lanes[stage], height: 20,
        width: Math.max((width * (stop - start)) / end, 0.6), fill: colours[stage] });
      if (stage !== "prefill" && number === chosen.round) bar.setAttribute("class", "current");
      else if (number > chosen.round) bar.setAttribute("opacity", 0.3);
      svg.append(bar);
    }
    holder.append(svg);
  }

  function show() {
    const count = example().rounds.length;
    chosen.round = Math.min(Math.max(chosen.round, 0), count - 1);
    find("output").textContent = `round ${chosen.round + 1} of ${count}`;
    showText();
    showRound();
    showTimeline();
  }

  function open(change) {
    Object.assign(chosen, change);
    chosen.example = Math.min(Math.max(chosen.example, 0), point().examples.length - 1);
    chosen.round = change.round ?? 0;
    choices(find("[data-choose=example]"), point().examples.map((each) => each.id), chosen.example);
    find(".prompt").textContent = example().prompt;
    show();
  }

  function step(by) {
    chosen.round += by;
    show();
  }

  choices(find("[data-choose=point]"), points.map((each) => each.label), 0);
  find("[data-choose=point]").addEventListener("change", (event) => open({ point: Number(event.target.value) }));
  find("[data-choose=example]").addEventListener("change", (event) => open({ example: Number(event.target.value) }));
  for (const button of box.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => step(Number(button.dataset.step)));
  }
  box.addEventListener("keydown", (event) => {
    if (event.target.tagName === "SELECT") return;
    const moves = {
      ArrowRight: () => step(1),
      ArrowLeft: () => step(-1),
      ArrowDown: () => open({ example: chosen.example + 1 }),
      ArrowUp: () => open({ example: chosen.example - 1 }),
      Home: () => step(-chosen.round),
      End: () => step(example().rounds.length),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });
  const place = (name) => points.findIndex((each) => each.point === name);
  showsOf.push({
    title: "round by round",
    id: "viewer",
    has: (name) => place(name) >= 0,
    show: (name) => {
      find("[data-choose=point]").value = place(name);
      open({ point: place(name) });
    },
  });
  open({ point: 0, example: 0, round: Infinity });
}

for (const box of document.querySelectorAll(".viewer")) startViewer(box);
