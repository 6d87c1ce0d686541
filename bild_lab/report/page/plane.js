function startPlane(box, plane) {
  const find = (selector) => box.querySelector(selector);
  const policies = Object.fromEntries(plane.policies.map((policy) => [policy.name, policy]));
  const greatestLoss = Math.max(0, ...plane.points.map((point) => -point.quality_difference));
  const chosen = { point: plane.points[0], axes: [0, 1] };
  const policy = () => policies[chosen.point.policy];
  const moving = () => policy().knobs.map((knob, index) => ({ ...knob, index })).filter((knob) => knob.values.length > 1);
  const own = () => plane.points.filter((point) => point.policy === chosen.point.policy);
  const signed = (value) => `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(2)}`;
  const bounds = (low, high) => `[${signed(low)}, ${signed(high)}]`;
  const label = (point) => policies[point.policy].knobs.filter((knob) => knob.values.length > 1)
    .map((knob) => `${knob.name} ${knob.values[point.at[policies[point.policy].knobs.indexOf(knob)]]}`).join(", ");

  function nearest(knob, value) { // the point with this value whose other knobs moved least
    const distance = (point) => point.at.reduce((sum, at, index) => sum + (index === knob ? 0 : Math.abs(at - chosen.point.at[index])), 0);
    return own().filter((point) => point.at[knob] === value).sort((one, other) => distance(one) - distance(other))[0];
  }

  function within(loss) { // the fastest point that loses at most so much
    const allowed = plane.points.filter((point) => point.quality_difference >= -loss - 1e-9);
    return allowed.sort((one, other) => other.predicted_speedup - one.predicted_speedup)[0];
  }

  function sliders() {
    const made = moving().map((knob) => {
      const holder = element("label", knob.name);
      const value = element("output", knob.values[chosen.point.at[knob.index]]);
      const input = Object.assign(element("input"), { type: "range", min: 0, max: knob.values.length - 1, step: 1 });
      input.value = chosen.point.at[knob.index];
      input.setAttribute("aria-valuetext", value.textContent);
      input.dataset.knob = knob.index;
      input.addEventListener("input", () => {
        const found = nearest(knob.index, Number(input.value));
        if (found) choose(found);
      });
      holder.append(value, input);
      return holder;
    });
    find(".knobs").replaceChildren(...made);
  }

  function moveSliders() {
    for (const input of find(".knobs").querySelectorAll("input")) {
      const knob = policy().knobs[input.dataset.knob];
      input.value = chosen.point.at[input.dataset.knob];
      input.previousElementSibling.textContent = knob.values[input.value];
      input.setAttribute("aria-valuetext", knob.values[input.value]);
    }
  }

  function numbers() {
    const point = chosen.point;
    const percent = (value) => value === null ? "\u2013" : `${(100 * value).toFixed(0)} %`;
    const rows = [
      [plane.metric, `${point.quality.toFixed(2)} [${point.quality_low.toFixed(2)}, ${point.quality_high.toFixed(2)}]`],
      ["difference", `${signed(point.quality_difference)} ${bounds(point.quality_difference_low, point.quality_difference_high)}`],
      ["predicted speedup", `${point.predicted_speedup.toFixed(2)}\u00d7`],
      ["tokens a target call", point.tokens_per_target_call.toFixed(2)],
      ["calls of target, drafter", `${point.target_calls}, ${point.draft_calls}`],
      ["accepted", percent(point.acceptance_rate)],
      ["fallbacks, rollbacks", `${point.fallbacks}, ${point.rollbacks}`],
      ["measured", point.live === null ? "not confirmed"
        : `${point.live.speedup[0].toFixed(2)}\u00d7 [${point.live.speedup[1].toFixed(2)}, ${point.live.speedup[2].toFixed(2)}]`
          + ` at ${signed(point.live.difference[0])} ${bounds(point.live.difference[1], point.live.difference[2])}`
          + ` on ${point.live.examples} examples (${point.live.split})`],
    ].map(([title, text]) => {
      const row = element("tr");
      row.append(element("th", title), element("td", text));
      return row;
    });
    find(".numbers tbody").replaceChildren(...rows);
    find(".said").textContent = `${point.policy}, ${label(point)}: ${signed(point.quality_difference)} ${plane.metric}, `
      + `${point.predicted_speedup.toFixed(2)}\u00d7 predicted`;
  }

  function text() {
    const example = Number(find("[data-choose=example]").value);
    const holder = find(".text");
    find(".source").textContent = plane.sources[example] ?? "";
    if (chosen.point.texts === null || !plane.texts.length) {
      holder.replaceChildren("No sample text of this point was kept.");
      return;
    }
    const one = plane.texts[example][chosen.point.texts[example]];
    holder.replaceChildren(...one.token_ids.map((token, index) => (
      element("span", plane.pieces[token], one.target[index] ? "target" : "drafted"))));
  }

  function curve() {
    const ink = getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
    const at = (points, more) => ({ type: "scatter", mode: "markers", x: points.map((point) => 1 / point.predicted_speedup),
      y: points.map((point) => point.quality_difference), customdata: points.map((point) => plane.points.indexOf(point)),
      text: points.map((point) => `${point.policy}, ${label(point)}<br>${signed(point.quality_difference)}, `
        + `${point.predicted_speedup.toFixed(2)}\u00d7 predicted`), hovertemplate: "%{text}<extra></extra>", ...more });
    const front = plane.points.filter((point) => point.front).sort((one, other) => other.predicted_speedup - one.predicted_speedup);
    const data = [at(plane.points, { name: "screened", marker: { color: "#8a8a8a", size: 5 } }),
      at(front, { name: "front", mode: "lines+markers", line: { color: "#8a8a8a", width: 1.5, shape: "hv" },
        marker: { size: 8, color: front.map((point) => policies[point.policy].colour) } })];
    for (const { name, colour } of plane.policies) {
      const live = plane.points.filter((point) => point.policy === name && point.live);
      if (!live.length) continue;
      const error = (values) => ({ type: "data", symmetric: false, thickness: 1, width: 3, color: colour,
        array: values.map(([value, , high]) => high - value), arrayminus: values.map(([value, low]) => value - low) });
      const latency = live.map(({ live: { speedup: [value, low, high] } }) => [1 / value, 1 / high, 1 / low]);
      data.push(at(live, { name: `${name}, measured`, x: latency.map(([value]) => value), y: live.map((point) => point.live.difference[0]),
        error_x: error(latency), error_y: error(live.map((point) => point.live.difference)),
        marker: { symbol: "diamond", size: 11, color: colour } }));
    }
    data.push(at([chosen.point], { name: "chosen", marker: { symbol: "circle-open", size: 18, color: ink, line: { width: 2.5 } } }));
    return { data, layout: { height: 430, margin: { l: 64, r: 24, t: 16, b: 84 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0.01, x: 0 },
      xaxis: { title: { text: "Latency relative to vanilla (further left is faster)" }, zeroline: false },
      yaxis: { title: { text: `${plane.metric}, difference` }, zeroline: true, zerolinecolor: "#8a8a8a" } } };
  }

  function map(key, title, colour) {
    const [first, second] = chosen.axes.map((axis) => moving()[axis]);
    const others = moving().filter((knob) => knob.index !== first.index && knob.index !== second.index);
    const shown = own().filter((point) => others.every((knob) => point.at[knob.index] === chosen.point.at[knob.index]));
    const cells = second.values.map(() => first.values.map(() => null));
    for (const point of shown) {
      cells[point.at[second.index]][point.at[first.index]] = { value: point[key], chosen: point === chosen.point, pick: () => choose(point) };
    }
    return heatTable({ title, colour, across: first, up: second, cells });
  }

  function drawn(selector, figure) {
    const holder = find(selector);
    const { data, layout } = fitted(holder, figure);
    Plotly.react(holder, data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
    if (holder.dataset.listens) return;
    holder.dataset.listens = "yes";
    holder.on("plotly_click", (event) => {
      const index = event.points.map((each) => each.customdata).find((each) => Number.isInteger(each));
      if (index !== undefined) choose(plane.points[index]);
    });
  }

  function figuresOf() {
    drawn(".cloud", curve());
    const several = moving().length > 1;
    find(".maps").hidden = !several;
    find(".axes").hidden = moving().length < 3;
    if (!several) return;
    const maps = [[".quality-map", "quality_difference", `${plane.metric}, difference`, "around"],
      [".speed-map", "predicted_speedup", "Predicted speedup", "rising"]];
    for (const [selector, key, title, colour] of maps) {
      const focused = find(selector).contains(document.activeElement);
      find(selector).replaceChildren(map(key, title, colour));
      if (focused) find(`${selector} [aria-current]`)?.focus();
    }
  }

  function axesChoices() {
    const names = moving().map((knob) => knob.name);
    for (const [place, select] of [...box.querySelectorAll(".axes select")].entries()) {
      select.replaceChildren(...names.map((name, index) => Object.assign(element("option", name), { value: index })));
      select.value = chosen.axes[place];
    }
  }

  function choose(point) {
    const same = point.policy === chosen.point.policy && find(".knobs").children.length;
    chosen.point = point;
    if (!same) {
      chosen.axes = [0, 1];
      find("[data-choose=policy]").value = point.policy;
      sliders();
      axesChoices();
    }
    moveSliders();
    numbers();
    text();
    figuresOf();
  }

  function options(select, values) {
    select.replaceChildren(...values.map(([value, shown]) => Object.assign(element("option", shown), { value })));
  }

  options(find("[data-choose=policy]"), plane.policies.map(({ name }) => [name, name]));
  options(find("[data-choose=example]"), plane.sources.map((_, index) => [index, index + 1]));
  find("[data-choose=policy]").addEventListener("change", (event) => {
    const points = plane.points.filter((point) => point.policy === event.target.value);
    choose(points.find((point) => point.front) ?? points[0]);
  });
  find("[data-choose=example]").addEventListener("change", text);
  for (const [place, select] of [...box.querySelectorAll(".axes select")].entries()) {
    select.addEventListener("change", () => {
      const wanted = Number(select.value);
      if (chosen.axes[1 - place] === wanted) chosen.axes[1 - place] = chosen.axes[place];
      chosen.axes[place] = wanted;
      axesChoices();
      figuresOf();
    });
  }
  const budget = find(".budget input");
  budget.max = Math.ceil(10 * Math.min(greatestLoss, 10)) / 10;
  const spend = () => {
    const loss = Number(budget.value);
    const found = within(loss);
    const shown = `at most ${loss.toFixed(1)} ${plane.metric} lost`;
    budget.setAttribute("aria-valuetext", shown);
    find(".budget output").textContent = found ? shown : `${shown}: no point`;
    if (found) choose(found);
  };
  budget.addEventListener("input", spend);
  for (const media of [dark, narrow]) media.addEventListener("change", figuresOf);
  choose(within(0) ?? plane.points[0]);
  spend();
}

for (const box of document.querySelectorAll(".plane")) startPlane(box, planes[Number(box.dataset.plane)]);
