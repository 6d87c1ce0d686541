const COLOURS = { // from the lowest value to the highest; "around" has its middle at 0
  rising: ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"],
  around: ["#b34e00", "#e39a63", "#f2f2f2", "#6aa6cf", "#00538a"],
};

function colourAt(scale, share) {
  const place = Math.min(Math.max(share, 0), 1) * (scale.length - 1);
  const [low, part] = [Math.floor(place), place % 1];
  const channels = (hex) => [1, 3, 5].map((start) => Number.parseInt(hex.slice(start, start + 2), 16));
  const [from, to] = [channels(scale[low]), channels(scale[Math.min(low + 1, scale.length - 1)])];
  return from.map((value, index) => Math.round(value + part * (to[index] - value)));
}

function onColour([red, green, blue]) { // black or white, whichever stands out more
  const linear = [red, green, blue].map((value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000" : "#fff";
}

// across, up: {name, values}; cells: [place up][place across] is null or {value, chosen, pick}
function heatTable({ title, colour, across, up, cells }) {
  const known = cells.flat().filter((cell) => cell && cell.value !== null).map((cell) => cell.value);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const reach = Math.max(Math.abs(least), Math.abs(most), 1e-9);
  const share = (value) => (colour === "around" ? (value + reach) / (2 * reach) : most > least ? (value - least) / (most - least) : 0.5);
  const written = (value) => `${colour === "around" && value > 0 ? "+" : ""}${value.toFixed(2)}`.replace("-", "\u2212");
  const table = element("table", undefined, "cells");
  table.append(element("caption", title));
  const body = element("tbody");
  for (let row = up.values.length - 1; row >= 0; row -= 1) {
    const line = element("tr");
    line.append(Object.assign(element("th", up.values[row]), { scope: "row" }));
    for (const [column, cell] of cells[row].entries()) {
      const holder = element("td");
      if (cell && cell.value !== null) {
        const made = element("button", written(cell.value));
        made.type = "button";
        const ground = colourAt(COLOURS[colour], share(cell.value));
        made.style.background = `rgb(${ground.join(",")})`;
        made.style.color = onColour(ground);
        made.setAttribute("aria-label", `${across.name} ${across.values[column]}, ${up.name} ${up.values[row]}: ${written(cell.value)}`);
        if (cell.chosen) made.setAttribute("aria-current", "true");
        made.addEventListener("click", cell.pick);
        holder.append(made);
      }
      line.append(holder);
    }
    body.append(line);
  }
  const foot = element("tr");
  foot.append(element("th", `${up.name}\u00a0\u2191 ${across.name}\u00a0\u2192`, "corner"), ...across.values.map((value) => Object.assign(element("th", value), { scope: "col" })));
  body.append(foot);
  table.append(body);
  const scroll = element("div", undefined, "scroll");
  Object.assign(scroll, { tabIndex: 0, role: "region", ariaLabel: title });
  scroll.append(table);
  return scroll;
}

function startHeat(box, maps) {
  for (const map of maps) {
    const chosen = { axes: [0, 1], at: map.points[0].at };
    const controls = element("div", undefined, "controls");
    const tables = element("div", undefined, "maps");
    const select = (label, labels, value, change) => {
      const [holder, list] = [element("label", `${label} `), element("select")];
      choices(list, labels, value);
      list.addEventListener("change", () => { change(Number(list.value)); show(); });
      holder.append(list);
      return holder;
    };
    const show = () => {
      const [first, second] = chosen.axes;
      const names = map.knobs.map((knob) => knob.name);
      const axis = (place) => (wanted) => {
        if (chosen.axes[1 - place] === wanted) chosen.axes[1 - place] = chosen.axes[place];
        chosen.axes[place] = wanted;
      };
      const others = map.knobs.map((_, index) => index).filter((index) => !chosen.axes.includes(index));
      controls.replaceChildren(...(others.length ? [
        select("Across", names, first, axis(0)),
        select("Up", names, second, axis(1)),
        ...others.map((index) => select(names[index], map.knobs[index].values, chosen.at[index], (value) => {
          chosen.at = chosen.at.map((at, knob) => (knob === index ? value : at));
        })),
      ] : []));
      const shown = map.points.filter((point) => others.every((index) => point.at[index] === chosen.at[index]));
      tables.replaceChildren(...map.shown.map(({ title, colour }, number) => {
        const cells = map.knobs[second].values.map(() => map.knobs[first].values.map(() => null));
        for (const point of shown) {
          cells[point.at[second]][point.at[first]] = { value: point.values[number], pick: () => openPoint(point.point) };
        }
        return heatTable({ title: `${map.policy}: ${title}`, colour, across: map.knobs[first], up: map.knobs[second], cells });
      }));
    };
    show();
    box.append(controls, tables);
  }
}

for (const box of document.querySelectorAll(".heat")) startHeat(box, heat[Number(box.dataset.heat)]);
