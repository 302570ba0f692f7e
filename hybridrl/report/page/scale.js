"use strict";
// Axes: round numbers for ticks, and what a value is in pixels.
(function () {
  const { s, number } = Report;

  function ticks(low, high, most) {
    const rough = (high - low) / Math.max(1, most);
    if (!(rough > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) {
      found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
    }
    return found;
  }

  function linear(low, high, from, to) {
    const span = high - low || 1;
    const scale = (value) => from + ((value - low) / span) * (to - from);
    scale.invert = (pixel) => low + ((pixel - from) / (to - from)) * span;
    return scale;
  }

  // Lowest and highest with some air; a constant gets room on both sides.
  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return null;
    if (low === high && low === 0) return [0, 1];
    if (low === high) {
      const air = Math.abs(low) * 0.1 || 1;
      return [low - air, high + air];
    }
    const air = (high - low) * 0.06;
    return [low >= 0 && low - air < 0 ? 0 : low - air, high + air];
  }

  // Horizontal lines with their numbers, and numbers of steps below.
  function axes(x, y, [low, high], [first, last], box) {
    const shown = ticks(low, high, 4), labels = distinct(shown, high - low);
    const lines = shown.map((value, place) => [
      s("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }),
      s("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" }, labels[place]),
    ]);
    const whole = ticks(first, last, Math.max(2, (box.right - box.left) / 70))
      .filter((value) => Number.isInteger(value));
    const steps = whole.map((value) =>
      s("text", { x: x(value), y: box.bottom + 15, "text-anchor": "middle" }, String(value)));
    return [lines, steps];
  }

  // As many digits as tell neighbouring ticks apart.
  function distinct(values, span) {
    let labels = [];
    for (let digits = 0; digits <= 4; digits++) {
      labels = values.map((value) => label(value, span, digits));
      if (new Set(labels).size === labels.length) break;
    }
    return labels;
  }

  function label(value, span, digits) {
    if (value === 0) return "0";
    if (Math.abs(value) >= 1e5 || span < 1e-4) {
      return value.toExponential(digits).replace("e+", "e");
    }
    if (Math.abs(value) >= 1000) return number(value);
    return value.toFixed(Math.max(0, Math.min(4, Math.ceil(1 - Math.log10(span)))));
  }

  Object.assign(Report, { ticks, linear, extent, axes });
})();
