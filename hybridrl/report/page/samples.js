"use strict";
// The samples browser: a list to search and sort, one sample in full, and its group beside it.
(function () {
  const { h, replace, known, number } = Report;

  const PAGE = 150;
  const ORDERS = {
    sampled: ["as sampled", null],
    best: ["reward, best first", (a, b) => order(b.reward, a.reward)],
    worst: ["reward, worst first", (a, b) => order(a.reward, b.reward)],
    longest: ["length, longest first", (a, b) => order(b.length, a.length)],
    shortest: ["length, shortest first", (a, b) => order(a.length, b.length)],
    newest: ["step, newest first", (a, b) => b.step - a.step],
    advantage: ["advantage, largest first",
      (a, b) => order(Math.abs(b.advantage ?? NaN), Math.abs(a.advantage ?? NaN))],
  };
  let all = [], sources = [], found = [], shown = PAGE, chosen = null, colourBy = null, parts = null;

  // What has no number comes last, whichever way the others are sorted.
  function order(a, b) {
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0;
    return a - b;
  }

  const mark = (sample) => `${sources[sample.source].label}/${sample.number}`;

  function select() {
    const words = parts.search.value.toLowerCase();
    const source = parts.source.value, [, compare] = ORDERS[parts.order.value];
    found = all.filter((one) => (source === "" || sources[one.source].label === source)
      && (!words || [one.prompt, one.response, one.answer].some((text) =>
        text && text.toLowerCase().includes(words))));
    if (compare) found = [...found].sort(compare);
    shown = PAGE;
  }

  function drawList() {
    parts.count.textContent = `${number(found.length)} of ${number(all.length)}`;
    const rows = found.slice(0, shown).map((one, index) => h("div", { class: "row", role: "option",
      id: `sample-${index}`, "aria-selected": one === chosen ? "true" : "false",
      onclick: () => choose(index) },
    h("span", { class: "n" }, known(one.reward) ? one.reward.toFixed(2) : "–"),
    h("span", { class: "n" }, number(one.length)),
    h("span", {}, one.response || "(empty)"),
    h("span", { class: "where" }, `${sources[one.source].label} · ${one.prompt || ""}`)));
    const more = found.length > shown
      ? h("div", { class: "row", role: "presentation" }, h("button", { type: "button", onclick: () => {
        shown += PAGE;
        drawList();
      } }, "more")) : null;
    replace(parts.list, h("div", { class: "row head", role: "presentation" },
      h("span", { class: "n" }, "reward"), h("span", { class: "n" }, "tokens"), h("span", {}, "response")),
    rows, more, found.length ? null : h("div", { class: "row" }, "Nothing matches."));
  }

  function choose(index, scroll = true) {
    chosen = found[index] || null;
    if (index >= shown) { shown = index + PAGE; drawList(); }
    for (const row of parts.list.querySelectorAll("[aria-selected='true']")) {
      row.setAttribute("aria-selected", "false");
    }
    const row = parts.list.querySelector(`#sample-${index}`);
    if (row) {
      row.setAttribute("aria-selected", "true");
      parts.list.setAttribute("aria-activedescendant", row.id);
      if (scroll) {
        parts.list.scrollTop = Math.max(Math.min(parts.list.scrollTop, row.offsetTop - 40),
          row.offsetTop + row.offsetHeight - parts.list.clientHeight);
      }
    }
    drawDetail();
  }

  function keys(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    const at = found.indexOf(chosen);
    if (by) choose(Math.max(0, Math.min(found.length - 1, at + by)));
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(found.length - 1);
    else return;
    event.preventDefault();
  }

  function facts(sample) {
    const parted = Object.entries(sample.parts || {});
    const rows = [["reward", number(sample.reward)],
      ...(parted.length > 1 ? parted.map(([name, value]) => [name, number(value)]) : []),
      ["cost", known(sample.cost) ? number(sample.cost) : null],
      ["advantage, mean", known(sample.advantage) ? number(sample.advantage) : null],
      ["tokens", number(sample.length)], ["turns", sample.turns],
      ["ended by", sample.finish_reason], ["extracted", sample.extracted],
      ["policy version", sample.version], ["from", sources[sample.source].label]];
    return h("dl", { class: "facts" }, rows
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  }

  function response(sample) {
    if (!sample.tokens) return h("div", { class: "text" }, sample.response || "(empty)");
    const choices = Report.tokenChoices(sample.tokens);
    const name = choices.some(([one]) => one === colourBy) ? colourBy : choices[0] && choices[0][0];
    const select = h("select", { onchange: () => {
      colourBy = select.value;
      drawDetail();
      parts.detail.querySelector("select").focus();
    } }, choices.map(([one, words]) => h("option", { value: one, selected: one === name }, words)));
    return [h("div", { class: "bar", style: { marginBottom: "6px" } },
      h("label", {}, "colour", select),
      h("span", { class: "scale" }, Report.tokenScale(sample.tokens, name))),
    Report.colouredTokens(sample, name)];
  }

  function group(sample) {
    const same = all.filter((one) => one.source === sample.source && one.group === sample.group);
    if (same.length < 2) return null;
    return [h("h3", {}, `The ${same.length} samples of this prompt`),
      h("div", { class: "group" }, same.map((one) => h("button", { type: "button",
        "aria-current": one === sample ? "true" : "false", onclick: () => {
          let at = found.indexOf(one);
          if (at < 0) { parts.search.value = ""; select(); drawList(); at = found.indexOf(one); }
          choose(at);
        } },
      h("div", { class: "legend" }, h("span", {}, "reward ", h("b", {}, number(one.reward))),
        known(one.advantage) ? h("span", {}, "advantage ", h("b", {}, number(one.advantage))) : null),
      h("div", { class: "text" }, (one.response || "(empty)").slice(0, 400)))))];
  }

  function drawDetail() {
    const old = parts.detail.querySelector(".group");
    const across = old ? old.scrollLeft : 0;
    if (!chosen) {
      replace(parts.detail, h("p", { class: "soft" }, "Choose a sample."));
      return;
    }
    replace(parts.detail, facts(chosen),
      h("h3", {}, "Prompt"), h("div", { class: "text", tabindex: "0" }, chosen.prompt || "(empty)"),
      chosen.answer ? [h("h3", {}, "Known answer"), h("div", { class: "text" }, chosen.answer)] : null,
      h("h3", {}, "Response"), response(chosen), group(chosen));
    const now = parts.detail.querySelector(".group");
    if (now) now.scrollLeft = across;
  }

  function build(root) {
    const refresh = () => { select(); drawList(); choose(0, false); };
    parts = { count: h("span", { class: "soft" }), note: h("p", { class: "note" }),
      search: h("input", { type: "search", placeholder: "Search prompts and responses",
        "aria-label": "Search prompts and responses", oninput: refresh }),
      source: h("select", { onchange: refresh }),
      order: h("select", { onchange: refresh },
        Object.entries(ORDERS).map(([name, [words]]) => h("option", { value: name }, words))),
      list: h("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": "Samples",
        onkeydown: keys }),
      detail: h("div", { class: "detail" }) };
    replace(root, h("div", { class: "bar" }, parts.search, h("label", {}, "from", parts.source),
      h("label", {}, "order", parts.order), parts.count),
    h("div", { class: "browser" }, parts.list, parts.detail), parts.note);
  }

  Report.sections.samples = {
    title: "Samples",
    needs: ["samples"],
    render(root, { samples }) {
      const before = chosen && mark(chosen);
      sources = samples.sources;
      const numbers = sources.map(() => 0);
      all = samples.samples.map((one) => ({ ...one, step: sources[one.source].step,
        number: numbers[one.source]++ }));
      if (!all.length) {
        parts = null;
        replace(root, h("p", { class: "soft" }, samples.unread.join(" ")
          || "No samples have been kept yet: observe.samples_every says how often they are."));
        return;
      }
      if (!parts) build(root);
      const source = parts.source.value;
      replace(parts.source, h("option", { value: "" }, "everywhere"),
        sources.map((one) => h("option", { value: one.label, selected: one.label === source },
          one.label)));
      parts.note.textContent = [samples.note, ...samples.unread].filter(Boolean).join(" ");
      select();
      const at = found.findIndex((one) => mark(one) === before);
      chosen = found[Math.max(0, at)];
      drawList();
      if (at < 0 || !parts.detail.hasChildNodes()) choose(Math.max(0, at), false);
    },
  };
})();
