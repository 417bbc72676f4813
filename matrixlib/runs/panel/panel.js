// Curves of a training, drawn by uPlot (which stands before this in the module). `view` and `progress` come from the
// kernel; zoom, the choice of curves and the x axis belong to whoever looks.

const HEIGHT = 165; // pixels of a chart without its legend
const NEAR = 6; // pixels from a mark within which its text is shown
const RED = "#d93a2f";

function element(parent, tag, properties = {}) {
  const one = Object.assign(document.createElement(tag), properties);
  parent.append(one);
  return one;
}

function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(1);
  return value.toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });
}

const floats = (view, Type) => new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

function columns(chart) {
  const steps = floats(chart.steps, Float64Array);
  const values = Array.from(floats(chart.values, Float32Array), (value) => (Number.isNaN(value) ? null : value));
  return [steps, ...chart.curves.map((_, i) => values.slice(i * steps.length, (i + 1) * steps.length))];
}

function yRange(chart, low, high) {
  const values = [low, high, ...chart.levels.map(([, value]) => value)].filter((value) => value != null);
  if (!values.length) return chart.log ? [0.1, 1] : [0, 1];
  [low, high] = [Math.min(...values), Math.max(...values)];
  if (chart.log && low > 0) return [low * 0.9, high * 1.1];
  const margin = 0.05 * (high - low || Math.abs(high) || 1);
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

// uPlot labels whole decades alone, of which there is often none.
function logTicks(low, high) {
  const ratio = high / low;
  const factors = ratio > 300 ? [1] : ratio > 30 ? [1, 3] : ratio > 4 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];
  const powers = Array.from({ length: Math.ceil(Math.log10(ratio)) + 2 }, (_, i) => 10 ** (Math.floor(Math.log10(low)) + i));
  return powers.flatMap((power) => factors.map((factor) => factor * power)).filter((tick) => low <= tick && tick <= high);
}

// Of a curve its smooth line alone stands in the legend, with the latest held-out value before the cursor behind it.
function legendValue(chart, curve) {
  const other = chart.curves.findIndex((one) => one.name === curve.name && one.kind === "held-out") + 1;
  return (u, value, _, index) => {
    const points = other && index != null ? u.data[other].slice(0, index + 1).filter((one) => one != null) : [];
    return number(value) + (points.length ? ` (${number(points.at(-1))})` : "");
  };
}

function series(chart, curve) {
  const points = { size: 6, fill: curve.colour, show: curve.kind === "held-out" || ((u) => u.data[0].length < 4) };
  const shared = { label: curve.name, stroke: curve.colour, spanGaps: true, points, value: legendValue(chart, curve) };
  if (curve.kind === "raw") return { ...shared, class: "aside", alpha: 0.3, width: 1 };
  if (curve.kind === "held-out") return { ...shared, class: "aside", dash: [4, 4], width: 1 };
  return { ...shared, width: 2 };
}

function render({ model, el }) {
  el.classList.add("matrixlib-panel");
  const colour = (name, other) => getComputedStyle(el).getPropertyValue(name) || other;
  const ink = () => colour("--jp-ui-font-color1", "#222");
  const faint = () => colour("--jp-border-color2", "#8884");
  const head = element(el, "div", { className: "head" });
  const bar = element(head, "progress");
  const pace = element(head, "span", { className: "pace" });
  const box = element(element(head, "label", { title: "the x axis up to the last update of the plan" }), "input", { type: "checkbox" });
  box.after(" whole plan");
  const back = element(head, "button", { textContent: "reset zoom", hidden: true });
  const line = element(el, "div", { className: "numbers" });
  const alarm = element(el, "div", { className: "bad" });
  const grid = element(el, "div", { className: "charts" });
  const drawn = new Map(); // by label
  const hidden = new Set(); // names of curves
  let zoom = null;

  function xRange() {
    const { charts } = model.get("view");
    const last = Math.max(1, ...charts.map((chart) => floats(chart.steps, Float64Array).at(-1) ?? 1));
    return zoom ?? [0, box.checked ? Math.max(last, model.get("progress").total) : last];
  }

  function scale() {
    const [min, max] = xRange();
    back.hidden = !zoom;
    for (const { plot } of drawn.values()) plot.setScale("x", { min, max });
  }

  function drawOver(u, chart) {
    const { ctx } = u;
    const { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    const stroke = (style, dash, ...points) => {
      ctx.strokeStyle = style;
      ctx.setLineDash(dash);
      ctx.beginPath();
      points.forEach(([x, y]) => ctx.lineTo(x, y));
      ctx.stroke();
    };
    for (const [step, , bad] of model.get("view").marks) {
      const x = u.valToPos(step, "x", true);
      stroke(bad ? RED : ink(), bad ? [] : [2, 4], [x, top], [x, top + height]);
    }
    ctx.fillStyle = ink();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    const heights = chart.levels.map(([, value]) => u.valToPos(value, "y", true));
    chart.levels.forEach(([name], i) => {
      const y = heights[i];
      stroke(ink(), [3, 5], [left, y], [left + width, y]);
      const below = y - top < 16 * devicePixelRatio;
      const near = heights.slice(0, i).some((other) => Math.abs(other - y) < 16 * devicePixelRatio);
      ctx.fillText(name, left + (near ? width / 2 : width - 4), y + (below ? 13 : -4) * devicePixelRatio);
    });
    ctx.restore();
  }

  function showMark(u, note) {
    const near = model.get("view").marks.filter(([step]) => Math.abs(u.valToPos(step, "x") - u.cursor.left) < NEAR);
    note.hidden = !near.length || !u.root.matches(":hover"); // the cursor is shown in all charts
    note.textContent = near.slice(0, 3).map(([step, text]) => `${step.toLocaleString("en")}: ${text}`).join("\n");
    note.style.left = `${Math.max(0, Math.min(u.cursor.left, u.width - 260))}px`;
    note.style.top = `${HEIGHT}px`;
  }

  function make(chart) {
    const place = element(grid, "div", { className: "chart" });
    element(place, "div", { className: "title", textContent: chart.label + (chart.held_out ? ", points: held-out" : "") });
    const note = element(place, "div", { className: "note", hidden: true });
    const state = { chart };
    const axis = { stroke: ink, font: "11px system-ui, sans-serif", grid: { stroke: faint, width: 1 }, ticks: { stroke: faint, width: 1 } };
    const toggle = (u, index, { show }) => {
      const curve = chart.curves[index - 1];
      if (show == null || curve?.kind !== "line") return;
      hidden[show ? "delete" : "add"](curve.name);
      chart.curves.forEach((other, i) => other.kind !== "line" && other.name === curve.name && u.setSeries(i + 1, { show }));
    };
    const select = (u) => {
      if (u.select.width < 4) return;
      zoom = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
      u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      scale();
    };
    const options = {
      width: place.clientWidth || 300,
      height: HEIGHT,
      cursor: {
        y: false, // it would look like a level
        drag: { x: true, y: false, setScale: false },
        sync: { key: model },
        bind: { dblclick: () => () => ((zoom = null), scale()) },
      },
      scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1, range: (u, low, high) => yRange(state.chart, low, high) } },
      axes: [
        { ...axis, size: 28, values: (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
        { ...axis, ...(chart.log && { splits: (u, axis, low, high) => logTicks(low, high), filter: (u, ticks) => ticks }), size: 66, values: (u, ticks) => ticks.map((tick) => (tick == null ? "" : number(tick))) },
      ],
      series: [{ label: "update", value: (u, value) => (value == null ? "–" : Math.round(value).toLocaleString("en")) }, ...chart.curves.map((curve) => series(chart, curve))],
      hooks: {
        draw: [(u) => drawOver(u, state.chart)],
        setCursor: [(u) => showMark(u, note)],
        setSelect: [select],
        setSeries: [toggle],
      },
    };
    chart.curves.forEach((curve, i) => (options.series[i + 1].show = !hidden.has(curve.name)));
    state.plot = new uPlot(options, columns(chart), place);
    state.place = place;
    return state;
  }

  const kind = (chart) => JSON.stringify([chart.log, chart.curves]);

  function refresh() {
    const { charts = [], marks = [] } = model.get("view");
    for (const [label, state] of drawn) {
      const chart = charts.find((one) => one.label === label);
      if (chart && kind(chart) === kind(state.chart)) continue;
      state.plot.destroy();
      state.place.remove();
      drawn.delete(label);
    }
    const first = !drawn.size && charts.length;
    for (const chart of charts) {
      const state = drawn.get(chart.label) ?? make(chart);
      drawn.set(chart.label, state);
      grid.append(state.place); // in the order of the charts
      state.chart = chart;
      state.plot.setData(columns(chart), false);
    }
    const bad = marks.filter(([, , grave]) => grave);
    alarm.textContent = bad.slice(-2).map(([step, text]) => `update ${step.toLocaleString("en")}: ${text}`).join("; ");
    if (charts.length) scale();
    if (first) el.scrollIntoView({ block: "start" }); // "Run All Cells" leaves the last cell in sight
  }

  function showProgress() {
    const { step, total, text, line: numbers } = model.get("progress");
    Object.assign(bar, { max: Math.max(1, total), value: step });
    pace.textContent = text;
    line.textContent = numbers;
  }

  const redraw = () => drawn.forEach(({ plot }) => plot.redraw(false, true));
  const fit = () => drawn.forEach(({ plot, place }) => plot.setSize({ width: place.clientWidth, height: HEIGHT }));
  const theme = new MutationObserver(redraw);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class"] });
  const size = new ResizeObserver(fit);
  size.observe(grid);
  box.addEventListener("change", scale);
  back.addEventListener("click", () => ((zoom = null), scale()));
  model.on("change:view", refresh);
  model.on("change:progress", showProgress);
  showProgress();
  refresh();
  return () => {
    theme.disconnect();
    size.disconnect();
    drawn.forEach(({ plot }) => plot.destroy());
  };
}

export default { render };
