"use strict";
// Settings, memory, evaluations, and what went wrong, as tables.
(function () {
  const { h, replace, known, number, bytes, moment, share, table, seconds } = Report;

  function settingsTable({ rows }, runs, withDefaults) {
    const columns = [["setting"], ...(withDefaults ? [["default"]] : []),
      ...(withDefaults ? [["here"]] : runs.map((name) => [name]))];
    return table(columns, rows.map((row) => [{ code: row.name },
      ...(withDefaults ? [{ code: row.default }] : []),
      ...(withDefaults ? row.values.slice(0, 1) : row.values).map((value) => ({ code: value }))]));
  }

  Report.sections.settings = {
    title: "Settings",
    needs: ["settings"],
    render(root, { settings }) {
      const { against, defaults, runs, text } = settings;
      replace(root,
        against ? [h("h3", {}, "What differs between the runs"), against.rows.length
          ? settingsTable(against, runs, false)
          : h("p", { class: "soft" }, "Nothing: their settings are the same.")] : null,
        against ? h("h3", {}, "What differs from the defaults") : null,
        !text ? h("p", { class: "soft" }, "The run has no config.yaml.")
          : defaults.rows.length ? settingsTable(defaults, runs, true)
            : h("p", { class: "soft" }, "Nothing: all settings are the defaults."),
        text ? h("details", {}, h("summary", {}, "All settings, config.yaml"),
          h("pre", { tabindex: "0" }, text)) : null);
    },
  };

  function memory({ rows, device, note }) {
    const most = Math.max(device || 0, ...rows.map((one) => Math.max(one.seen, one.planned || 0)));
    const meter = (one) => h("span", { class: "meter", role: "img",
      "aria-label": `${share(one.seen / most)} of the device` },
      h("i", { style: { width: `${100 * one.seen / most}%` } }));
    return [
      h("h3", {}, "Memory at the fullest moment of any rank"),
      table([["role"], ["phase"], ["seen", true], ["planned", true], ["seen / planned", true],
        [device ? `of ${number(device)} GiB` : ""]],
      rows.map((one) => [one.role, one.phase, `${number(one.seen)} GiB`,
        known(one.planned) ? `${number(one.planned)} GiB` : "–",
        known(one.planned) && one.planned > 0 ? (one.seen / one.planned).toFixed(2) : "–",
        meter(one)])),
      note ? h("p", { class: "note" }, note) : null,
    ];
  }

  function evaluations(sets) {
    const rows = Object.entries(sets).flatMap(([name, set]) =>
      Object.entries(set.metrics || {}).map(([metric, one], index) => {
        const d = one.difference;
        const isSure = d && known(d.p) && d.p < 0.05;
        return [index ? "" : name, metric, index ? "" : String(set.step), number(one.prompts),
          number(one.value), known(one.low) ? `${number(one.low)} to ${number(one.high)}` : "–",
          d ? number(d.baseline) : "",
          d ? h("span", { class: isSure ? "" : "soft" },
            `${d.value > 0 ? "+" : ""}${number(d.value)}`) : "",
          d && known(d.p) ? (d.p < 0.001 ? "<0.001" : d.p.toFixed(3)) : ""];
      }));
    return [
      h("h3", {}, "Newest evaluation of each set"),
      table([["set"], ["metric"], ["step", true], ["prompts", true], ["value", true],
        ["95%", true], ["compared with", true], ["difference", true], ["p", true]], rows),
    ];
  }

  function troubles(
    { recoveries, failed_episodes: failed, warnings, bad_steps: bad, troubles: counts }, status) {
    const rows = [];
    const steps = (count) => `in ${count} ${count === 1 ? "step" : "steps"}`;
    if (status.why) rows.push(["state", `${status.state}: ${status.why}`]);
    for (const one of recoveries) {
      const lost = known(one.seconds_lost) ? `, ${seconds(one.seconds_lost)} lost` : "";
      rows.push(["recovery", `${one.what || one.lost || "Workers were lost."}${lost}`]);
    }
    for (const { files, line, times } of failed) {
      const more = times > files.length ? " ..." : "";
      rows.push(["failed episodes", `${line}  (${times} kept: ${files.join(", ")}${more})`]);
    }
    for (const one of bad) {
      rows.push(["bad step", `Step ${one.step}: ${one.where || one.first || "a number was not finite"}`]);
    }
    for (const one of counts) {
      rows.push(["figures", `${number(one.total)} ${one.what}, ${steps(one.steps)} (${one.name})`]);
    }
    return [
      h("h3", {}, "Recoveries and warnings"),
      rows.length ? table([["from"], ["what"]], rows)
        : h("p", { class: "soft" }, "None: no workers were lost, no bad step."),
      warnings.length ? h("details", {}, // most are of libraries, and of no consequence
        h("summary", {}, `Warnings in the logs of ranks (${warnings.length})`),
        table([["from"], ["what"]], warnings.map(({ files, line, times }) =>
          [files.length > 2 ? `${files.length} logs` : files.join(" "),
            { code: times > 1 ? `${line}  (${times} times)` : line }]))) : null,
    ];
  }

  function checkpoints(found, folder) {
    return [
      h("h3", {}, "Checkpoints"),
      folder ? h("p", { class: "soft" },
        `In ${folder}; hybridrl checkpoint list RUN says more.`) : null,
      found.length ? table([["step", true], ["size", true], ["written"], ["figures"]], found.map((one) => [
        String(one.step), one.damaged ? "–" : bytes(one.bytes),
        one.damaged ? "its list is damaged" : moment(one.time * 1000),
        [one.best ? h("b", {}, "best ") : "",
          Object.entries(one.figures || {}).slice(0, 4)
            .map(([name, value]) => `${name} ${number(value)}`).join(", ")]])) : null,
    ];
  }

  Report.sections.state = {
    title: "State",
    needs: ["state", "head"],
    render(root, { state, head }) {
      replace(root,
        Object.keys(state.evaluations).length ? evaluations(state.evaluations) : null,
        state.memory.rows.length ? memory(state.memory) : null,
        troubles(state, head.status),
        state.checkpoints.length || state.checkpoints_at
          ? checkpoints(state.checkpoints, state.checkpoints_at) : null);
    },
  };
})();
