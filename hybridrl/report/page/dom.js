"use strict";
// Elements and numbers. Text from a run only ever becomes text nodes and attributes, never markup.
const Report = { sections: {} };

(function () {
  const SVG = "http://www.w3.org/2000/svg";

  // An element: attributes, `on<event>` listeners, `style` as an object; children may be strings,
  // elements, lists of them, or null for nothing.
  function h(tag, attributes, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }

  function s(tag, attributes, ...children) {
    return fill(document.createElementNS(SVG, tag), attributes, children);
  }

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(element.style, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined));
    return element;
  }

  function replace(element, ...children) {
    element.replaceChildren(
      ...children.flat(Infinity).filter((one) => one !== null && one !== undefined));
    return element;
  }

  function known(value) {
    return typeof value === "number" && Number.isFinite(value);
  }

  // Three significant digits of what is small, all of a whole number that is not huge.
  function number(value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e7) return value.toExponential(2);
    if (size >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return value.toPrecision(3);
  }

  // Three significant digits, without zeros behind them. Seconds and bytes are written as
  // system/formatting.py writes them.
  const short = (value) => String(Number(value.toPrecision(3)));

  function seconds(value) {
    if (!known(value)) return "–";
    if (value <= 0) return "0 s";
    if (value < 0.9995e-3) return `${short(value * 1e6)} µs`;
    if (value < 0.9995) return `${short(value * 1e3)} ms`;
    if (value < 59.95) return `${short(value)} s`;
    const whole = Math.round(value);
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  }

  function bytes(value) {
    if (!known(value)) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 999.5 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${value >= 99.5 ? Math.round(value) : short(value)} ${units[unit]}`;
  }

  // A moment, from what Date takes.
  function moment(value) {
    return new Date(value).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  }

  function share(value) {
    if (!known(value)) return "–";
    return value > 0 && value < 0.01 ? "<1%" : `${Math.round(100 * value)}%`;
  }

  // `columns`: [heading, isNumber]; a cell is a string, an element, or {code: string}.
  function table(columns, rows) {
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {},
        columns.map(([name, isNumber]) =>
          h("th", { class: isNumber ? "n" : null, scope: "col" }, name)))),
      h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, column) => {
        const isCode = cell !== null && typeof cell === "object" && "code" in cell;
        const kind = isCode ? "code" : columns[column][1] ? "n" : null;
        return h("td", { class: kind }, isCode ? cell.code : cell);
      }))))));
  }

  function key(colour, ...words) {
    return h("span", { class: "key" }, h("i", { style: { background: colour } }), words);
  }

  const COLOURS = ["#4c8ed9", "#e0653f", "#45ada0", "#c08a1e", "#9377d6", "#d1618f", "#7d8a2e"];
  const colour = (index) => COLOURS[index % COLOURS.length];

  const STATES = { finished: "good", running: "good", failed: "bad", killed: "bad",
    interrupted: "warn" };
  function state(name) {
    return h("span", { class: `state ${STATES[name] || "soft"}` }, name || "state unknown");
  }

  Object.assign(Report, { h, s, replace, known, number, seconds, bytes, moment, share, table, key, colour,
    state });
})();
