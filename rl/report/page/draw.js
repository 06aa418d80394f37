// Draw the charts of a report. Each is a Vega-Lite specification in a script element of type application/json.
"use strict";
const views = {}; // by the id of the chart; a test reads their data
window.reportViews = views;
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function theme(width) {
  const text = dark.matches ? "#c9cfd6" : "#3c434c", line = dark.matches ? "#3a414b" : "#dde1e6";
  const words = { labelColor: text, titleColor: text, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
  const axis = { ...words, gridColor: line, domainColor: line, tickColor: line };
  const legend = { ...words, columns: Math.max(1, Math.floor(width / 110)) };
  return { background: "transparent", axis, legend, view: { stroke: null }, font: "system-ui, sans-serif" };
}

// The data of most charts are columns, which take less space: html.py has packed them.
function unpack(rows) {
  if (Array.isArray(rows)) return rows;
  const row = (place) => Object.fromEntries(Object.entries(rows.lists).map(([key, values]) => [key, values[place]]));
  return Array.from({ length: rows.length }, (_, place) => ({ ...rows.same, ...row(place) }));
}

async function draw(element) {
  const id = element.id;
  const spec = JSON.parse(document.getElementById("spec-" + id).textContent);
  for (const name of Object.keys(spec.datasets)) spec.datasets[name] = unpack(spec.datasets[name]);
  const options = { actions: false, renderer: "svg", config: theme(element.clientWidth), tooltip: { theme: dark.matches ? "dark" : "light" } };
  try {
    if (views[id]) views[id].finalize();
    views[id] = (await vegaEmbed(element, spec, options)).view;
    element.dataset.state = "drawn";
  } catch (error) {
    element.textContent = "This chart cannot be drawn: " + error.message;
    element.dataset.state = "failed";
    console.error(error);
  }
}

// A chart is drawn when it comes near the screen. Charts in closed <details> have no size and are drawn when it opens.
const near = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !entry.target.dataset.state) {
      entry.target.dataset.state = "drawing";
      draw(entry.target);
    }
  }
}, { rootMargin: "400px" });
const charts = document.querySelectorAll(".chart");
charts.forEach((element) => near.observe(element));
dark.addEventListener("change", () => charts.forEach((element) => { if (element.dataset.state === "drawn") draw(element); }));
window.addEventListener("beforeprint", () => charts.forEach((element) => { if (!element.dataset.state) draw(element); }));
