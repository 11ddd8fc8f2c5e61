"use strict";
// Draws the charts of a report, and has them follow colours, legend, keys and, on a live page, the run.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const legend = document.getElementById("legend");
  const live = document.getElementById("live");
  const hidden = new Set();  // runs, and "average", that the legend has switched off
  const COLOURS = 8;
  const DASHES = ["solid", "dash", "dashdot", "longdash"];
  let charts = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const inkOf = (run) => `series-${run % COLOURS}`;

  function themed(chart, plot) {
    const [text, soft, grid, card] = ["text", "soft", "grid", "card"].map(colour);
    const axis = { gridcolor: grid, linecolor: grid, zeroline: false, color: soft, automargin: true };
    const narrow = plot.clientWidth < 420;
    const { xaxis, yaxis, ...layout } = chart.figure.layout;
    const data = chart.figure.data.map((trace) => {
      const ink = colour(inkOf(trace.meta.run));
      const shown = !hidden.has(trace.meta.run) && !(trace.meta.average && hidden.has("average"));
      const dash = trace.meta.average ? "dot" : DASHES[Math.floor(trace.meta.run / COLOURS) % DASHES.length];
      return {
        ...trace, visible: shown, marker: { ...trace.marker, color: ink },
        ...(trace.line && { line: { ...trace.line, dash, color: ink } }),
        ...(trace.error_x && { error_x: { ...trace.error_x, color: ink, thickness: 2, width: 5 } }),
      };
    });
    return [data, {
      ...layout, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: soft, size: 12, family: "inherit" },
      hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: text, size: 12 } },
      margin: { l: narrow ? 44 : 56, r: 12, t: 14, b: 44 }, dragmode: narrow ? false : "zoom",
    }];
  }

  const SETTINGS = {
    responsive: true, displaylogo: false, displayModeBar: "hover",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "pan2d", "zoom2d"],
  };

  function plotOf(chart) {
    const known = document.getElementById(`chart-${chart.id}`);
    if (known) return known;
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const note = document.createElement("small");
    const plot = document.createElement("div");
    caption.textContent = chart.title;
    note.textContent = chart.note;
    caption.append(note);
    plot.id = `chart-${chart.id}`;
    plot.className = "plot";
    plot.tabIndex = 0;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${chart.title}. ${chart.note} The numbers are in the tables.`);
    plot.addEventListener("keydown", (event) => step(event, plot));
    figure.append(caption, plot);
    document.querySelector(`#${chart.section} .charts`).append(figure);
    return plot;
  }

  function draw() {
    const plots = charts.map(plotOf);  // all of them before the first is drawn: they share the width
    for (const [place, chart] of charts.entries()) {
      const plot = plots[place];
      if (chart.figure.layout.yaxis.type === "category") {
        plot.classList.add("rows");
        plot.style.setProperty("--rows", new Set(chart.figure.data.map((trace) => trace.meta.run)).size);
      }
      Plotly.react(plot, ...themed(chart, plot), SETTINGS);
    }
  }

  // Arrow keys walk through the points of a chart, as the mouse does.
  function step(event, plot) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") Plotly.Fx.unhover(plot);
    if (!way) return;
    event.preventDefault();
    const points = [];
    plot.data.forEach((trace, curveNumber) => {
      if (trace.visible) trace.x.forEach((x, pointNumber) => points.push({ x, curveNumber, pointNumber }));
    });
    points.sort((a, b) => a.x - b.x || a.curveNumber - b.curveNumber);
    const stops = plot.layout.hovermode === "closest" ? points : points.filter((p, i) => !i || p.x !== points[i - 1].x);
    if (!stops.length) return;
    const at = Number(plot.dataset.at ?? (way > 0 ? -1 : 0));
    const next = (at + way + stops.length) % stops.length;
    plot.dataset.at = next;
    const same = plot.layout.hovermode === "closest" ? [stops[next]] : points.filter((p) => p.x === stops[next].x);
    Plotly.Fx.hover(plot, same.map(({ curveNumber, pointNumber }) => ({ curveNumber, pointNumber })));
  }

  function chip(key, name, ink) {
    const button = document.createElement("button");
    const swatch = document.createElement("i");
    button.type = "button";
    button.append(swatch, name);
    button.setAttribute("aria-pressed", String(!hidden.has(key)));
    if (ink) swatch.style.setProperty("--ink", `var(--${ink})`);
    else button.classList.add("dotted");
    button.addEventListener("click", () => {
      if (!hidden.delete(key)) hidden.add(key);
      button.setAttribute("aria-pressed", String(!hidden.has(key)));
      draw();
    });
    return button;
  }

  function show(news) {
    charts = news.charts;
    const averages = charts.some((chart) => chart.figure.data.some((trace) => trace.meta.average));
    const names = news.runs.map((name, run) => [run, name, inkOf(run)]);
    if (averages) names.push(["average", "average of the clients' models"]);
    if (legend.childElementCount !== (names.length > 1 ? names.length : 0)) {
      legend.replaceChildren(...(names.length > 1 ? names.map((chipped) => chip(...chipped)) : []));
    }
    draw();
  }

  // The server has escaped what it sends; sections that did not change are left alone.
  function renew(parts) {
    for (const [name, html] of Object.entries(parts)) {
      const section = document.getElementById(name);
      const part = section.querySelector(".part");
      if (part.dataset.html !== html) {
        const open = new Set([...part.querySelectorAll("details[open]")].map((item) => item.dataset.key));
        part.innerHTML = html;
        part.dataset.html = html;
        for (const item of part.querySelectorAll("details")) item.open = open.has(item.dataset.key);
      }
      section.hidden = !html && !charts.some((chart) => chart.section === name);
      document.querySelector(`nav a[href="#${name}"]`).hidden = section.hidden;
    }
  }

  function follow(address) {
    const source = new EventSource(address);
    const say = (text, on) => { live.textContent = text; live.classList.toggle("on", on); };
    say("live", true);
    source.addEventListener("news", (event) => {
      const news = JSON.parse(event.data);
      for (const chart of news.charts) document.getElementById(chart.section).hidden = false;
      document.querySelector("h1").textContent = news.title;
      document.getElementById("about").textContent = news.about;
      show(news);
      renew(news.parts);
      say("live", true);
    });
    source.addEventListener("end", (event) => { source.close(); say(JSON.parse(event.data), false); });
    source.addEventListener("error", () => say("connection lost", false));
  }

  show(report);
  if (report.events) follow(report.events);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => {
    for (const item of document.querySelectorAll("details")) item.open = true;
    draw();
  });
  addEventListener("afterprint", draw);
  document.documentElement.dataset.ready = "yes";
})();
