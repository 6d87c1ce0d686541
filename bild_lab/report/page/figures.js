// text and grid take their colours from report.css; each figure is in the script before its place
function labelsInside({ yaxis, ...layout }) { // each above its row
  const look = { xref: "paper", x: 0, xanchor: "left", yanchor: "bottom", yshift: 5, showarrow: false, font: { size: 10.5 } };
  layout.annotations.push(...yaxis.tickvals.map((y, row) => ({ ...look, y, text: yaxis.ticktext[row].replaceAll("<br>", " ") })));
  Object.assign(yaxis, { showticklabels: false, range: [yaxis.range[0], -0.9] });
}

const narrow = window.matchMedia("(max-width: 640px)").matches;
for (const holder of document.querySelectorAll(".figure")) {
  const { data, layout } = JSON.parse(holder.previousElementSibling.textContent);
  const entries = data.filter(({ name, showlegend }) => name && showlegend !== false).length;
  if (narrow) layout.height += 20 * Math.max(0, entries - 5); // the legend has an entry a row
  if (narrow && layout.meta === "rows") labelsInside(layout); // beside the marks they leave these no room
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]; // the default ones offer an upload
  Plotly.newPlot(holder, data, layout, { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: narrow ? false : "hover" });
  holder.on("plotly_click", (event) => {
    const name = event.points.map((mark) => mark.customdata).find((name) => name);
    if (name) document.querySelector(`[data-open="${CSS.escape(name)}"]`)?.click();
  });
}
